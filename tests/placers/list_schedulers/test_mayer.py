"""The critical-path family by hand-worked examples."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.placers.helpers import placed
from tests.strategies import random_problem

from devplace.errors import InputError
from devplace.placers import Budget, Mayer, place
from devplace.placers.list_schedulers.mayer import VARIANTS, Variant
from devplace.testing import check_placer, hand_machine, hand_problem

TWO = {"gpu:0": 1000, "gpu:1": 1000}


def test_the_whole_longest_path_goes_to_the_fastest_device() -> None:
    """p-q-r is the longest path; gpu:1 runs the step faster, so all three are there."""
    problem = hand_problem(
        """
        p = f bytes=1 ns=20,10
        x = f bytes=1 ns=4,2
        q = f(p) bytes=1 ns=20,10
        y = f(x) bytes=1 ns=4,2
        r = f(q, y) bytes=1 ns=20,10
        """,
        hand_machine(TWO),
    )
    found = placed(place(problem, Mayer(variant="critical-path"), Budget(evaluations=1)))
    assert found["p"] == found["q"] == found["r"] == "gpu:1"


def test_the_rest_goes_where_there_is_no_work_yet() -> None:
    """Beside the path on gpu:0, independent ops go to the idle device: nothing has to be fetched
    and the execution time there is smaller."""
    problem = hand_problem(
        """
        p = f bytes=1 ns=20
        q = f(p) bytes=1 ns=20
        x = f bytes=1 ns=4
        y = f(x) bytes=1 ns=4
        """,
        hand_machine(TWO),
    )
    found = placed(place(problem, Mayer(variant="critical-path"), Budget(evaluations=1)))
    assert found == {"p": "gpu:0", "q": "gpu:0", "x": "gpu:1", "y": "gpu:1"}


def test_dear_traffic_keeps_ops_together() -> None:
    """y reads 500 bytes of x: the factor for traffic outweighs that x's device has more work."""
    text = """
    x = f bytes={} ns=10
    y = f(x) bytes=1 ns=10
    """
    for variant in ("mite", "dfs"):
        for size, together in ((500, True), (1, False)):
            problem = hand_problem(text.format(size), hand_machine(TWO))
            found = placed(place(problem, Mayer(variant=variant), Budget(evaluations=1)))
            assert (found["x"] == found["y"]) is together


def test_mite_looks_at_memory() -> None:
    """gpu:0 is a bit faster, but the op would fill it: `dfs` takes it, `mite` the larger one."""
    problem = hand_problem(
        "a = f bytes=90 ns=10,11 result=output",
        hand_machine({"gpu:0": 100, "gpu:1": 10000}),
    )
    for variant, device in (("dfs", "gpu:0"), ("mite", "gpu:1")):
        found = placed(place(problem, Mayer(variant=variant), Budget(evaluations=1)))
        assert found["a"] == device


def test_mite_keeps_important_ops_off_slow_devices() -> None:
    """gpu:0 has work of 15 and would end a at 25, the slower gpu:1 at 16: a goes there, but not
    when it heads the longest path (25 / 20.5 < 1.6 * 16 / 20.5)."""
    text = """
    load = f bytes=0 ns=15
    a = f bytes=1 ns=10,16
    z = f{} bytes=1 ns=1000
    """
    for reads, device in (("", "gpu:1"), ("(a)", "gpu:0")):
        problem = hand_problem(text.format(reads), hand_machine(TWO), pins={"load": "gpu:0"})
        found = placed(place(problem, Mayer(variant="mite"), Budget(evaluations=1)))
        assert found["a"] == device


def test_hashing_follows_speeds() -> None:
    """Of 400 ops a device three times as fast gets about three quarters, by name alone."""
    lines = [f"a{k} = f ns=30,10" for k in range(400)]
    problem = hand_problem("\n".join(lines), hand_machine({"gpu:0": 10**6, "gpu:1": 10**6}))
    found = placed(place(problem, Mayer(variant="hash"), Budget(evaluations=1)))
    assert 270 <= list(found.values()).count("gpu:1") <= 330


def test_a_full_device_is_passed_over() -> None:
    """The path of 120 bytes does not fit the fastest device of 100: its last op goes elsewhere."""
    problem = hand_problem(
        """
        a = f bytes=60 ns=5,9 result=output
        b = f(a) bytes=60 ns=5,9 result=output
        """,
        hand_machine({"gpu:0": 100, "gpu:1": 1000}),
    )
    result = place(problem, Mayer(), Budget(evaluations=1))
    assert result.is_feasible
    assert placed(result) == {"a": "gpu:0", "b": "gpu:1"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_keeps_what_placers_promise(variant: Variant) -> None:
    """On the hand-solved problems."""
    check_placer(Mayer(variant=variant))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), variant=st.sampled_from(VARIANTS))
def test_random_problems_are_placed_by_every_variant(seed: int, variant: Variant) -> None:
    """On random ones too."""
    check_placer(Mayer(variant=variant), [random_problem(seed)])


def test_an_unknown_variant_is_refused() -> None:
    """The error lists those there are."""
    with pytest.raises(InputError, match="critical-path, mite, dfs, hash"):
        Mayer(variant="batch-split")  # type: ignore[arg-type]
