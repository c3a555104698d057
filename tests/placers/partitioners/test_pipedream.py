"""PipeDream's contiguous split."""

from __future__ import annotations

from itertools import combinations_with_replacement

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.placers.helpers import placed

from devplace.placers import Budget, PipeDream, place
from devplace.placers.partitioners.pipedream import cut_ns, split
from devplace.testing import hand_machine, hand_problem

TWO = {"gpu:0": 1000, "gpu:1": 1000}
NO_CUTS, ROOM = np.zeros(4), np.full(2, 1e9)


def equal(times: list[float], devices: int = 2) -> np.ndarray:
    return np.tile(np.array(times, float), (devices, 1))


def test_the_slowest_stage_is_as_fast_as_can_be() -> None:
    """4, 3 | 2, 5 has a slowest stage of 7; any other cut has 9 or more."""
    assert split(equal([4, 3, 2, 5]), NO_CUTS, np.zeros(4), ROOM).tolist() == [0, 0, 1, 1]  # type: ignore[union-attr]


def test_a_dear_cut_is_avoided() -> None:
    """The cut in the middle takes 12: the next best, 4, 3, 2 | 5, has a slowest stage of 9."""
    cuts = np.array([0, 0, 12, 3.0])
    found = split(equal([4, 3, 2, 5]), cuts, np.zeros(4), ROOM)
    assert found is not None
    assert found.tolist() == [0, 0, 0, 1]


def test_one_stage_if_every_cut_is_dearer_than_the_whole() -> None:
    """All cuts take 20, all work 14: one device."""
    found = split(equal([4, 3, 2, 5]), np.array([0, 20, 20, 20.0]), np.zeros(4), ROOM)
    assert found is not None
    assert len(set(found.tolist())) == 1


def test_a_slower_device_gets_less() -> None:
    """The second device takes three times as long: three links there would take 9, one takes 3."""
    load = np.array([[1, 1, 1, 1.0], [3, 3, 3, 3.0]])
    found = split(load, NO_CUTS, np.zeros(4), ROOM)
    assert found is not None
    assert found.tolist() == [0, 0, 0, 1]


def test_stages_fit_their_devices() -> None:
    """10 bytes a link and room for one on the first device; with room for none at all: no split."""
    found = split(equal([1, 1, 1, 1]), NO_CUTS, np.full(4, 10.0), np.array([15.0, 40.0]))
    assert found is not None
    assert found.tolist() == [0, 1, 1, 1]
    assert split(equal([1, 1, 1, 1]), NO_CUTS, np.full(4, 10.0), np.array([5.0, 35.0])) is None


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), links=st.integers(1, 7), devices=st.integers(1, 4))
def test_it_is_as_good_as_all_splits(seed: int, links: int, devices: int) -> None:
    """The largest load or cut equals that of the best of all contiguous splits that fit."""
    rng = np.random.default_rng(seed)
    load = rng.integers(0, 20, (devices, links)).astype(float)
    cuts = np.concatenate([[0.0], rng.integers(0, 25, links - 1).astype(float)])
    sizes = rng.integers(0, 10, links).astype(float)
    room = rng.integers(5, 40, devices).astype(float)

    def value(stage: tuple[int, ...] | list[int]) -> float:
        at = np.array(stage)
        if (np.bincount(at, sizes, devices) > room).any():
            return np.inf
        worst = max(float(load[d][at == d].sum()) for d in range(devices))
        moved = [cuts[k] for k in range(1, links) if at[k] != at[k - 1]]
        return max([worst, *moved])

    best = min(value(stage) for stage in combinations_with_replacement(range(devices), links))
    found = split(load, cuts, sizes, room)
    assert (found is None) == (best == np.inf)
    if found is not None:
        assert value(found.tolist()) == best


def test_what_crosses_a_cut_counts_once_and_both_ways() -> None:
    """Links 0, 1, 2: a (8 bytes) is read in 1 and 2, b (3 bytes) in 2, and g (2 bytes) of link 2
    goes back to 0."""
    problem = hand_problem(
        """
        a = f bytes=8 ns=1
        b = f(a) bytes=3 ns=1
        c = f(a, b) bytes=1 ns=1
        g = f(c) bytes=2 ns=1
        h = f(g) bytes=1 ns=1
        """,
        hand_machine(TWO),
    )
    assert cut_ns(problem, np.array([0, 1, 2, 2, 0], np.int32), 3, [0, 1]).tolist() == [0, 10, 13]


def test_modules_are_the_chain_and_backward_goes_along() -> None:
    """Work of 4, 3, 2, 5 per module, half of it in the backward pass: as above."""
    lines = ["x = input bytes=1"]
    before = "x"
    for k, ns in enumerate((4, 3, 2, 5)):
        lines.append(f"y{k} = f({before}) bytes=1 ns={50 * ns} module=l{k}")
        before = f"y{k}"
    for k, ns in reversed(list(enumerate((4, 3, 2, 5)))):
        lines.append(f"g{k} = f({before}) bytes=1 ns={50 * ns} module=l{k} stage=backward")
        before = f"g{k}"
    problem = hand_problem("\n".join(lines), hand_machine(TWO))
    found = placed(place(problem, PipeDream(), Budget(evaluations=1)))
    assert [found[f"y{k}"] for k in range(4)] == ["gpu:0", "gpu:0", "gpu:1", "gpu:1"]
    assert all(found[f"y{k}"] == found[f"g{k}"] for k in range(4))


def test_a_graph_without_modules_is_cut_along_its_order() -> None:
    """Ten equal ops in a row: five and five."""
    lines = ["a0 = f bytes=1 ns=9"] + [f"a{k} = f(a{k - 1}) bytes=1 ns=9" for k in range(1, 10)]
    problem = hand_problem("\n".join(lines), hand_machine(TWO))
    found = placed(place(problem, PipeDream(), Budget(evaluations=1)))
    assert [found[f"a{k}"] for k in range(10)] == ["gpu:0"] * 5 + ["gpu:1"] * 5
