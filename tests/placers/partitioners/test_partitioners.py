"""Scotch and min-cut, memory-blind and repaired."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.placers.helpers import placed
from tests.strategies import random_problem

from devplace.errors import InputError
from devplace.placers import (
    Budget,
    MinCut,
    MinCutRepaired,
    Placer,
    Scotch,
    ScotchRepaired,
    by_name,
    place,
)
from devplace.placers.partitioners.group_graph import device_weights, group_graph, scaled
from devplace.problem import Problem
from devplace.testing import check_placer, hand_machine, hand_problem

BLIND: list[Placer] = [Scotch(), Scotch(quality=True), MinCut()]
PLACERS: list[Placer] = [*BLIND, ScotchRepaired(), MinCutRepaired()]


def name_of(placer: Any) -> str:
    return f"{placer.name}{'-quality' if getattr(placer, 'quality', False) else ''}"


def available(placer: Placer) -> None:
    problem = hand_problem("a = f ns=1", hand_machine({"gpu:0": 9}))
    if reason := placer.supports(problem):
        pytest.skip(reason)


def clusters(machine: Any, ns: str = "10", count: int = 2, **demands: Any) -> Problem:
    """Groups of 20 ops each: a chain with dear tensors; one cheap tensor between two groups."""
    lines = []
    for c in range(count):
        for k in range(20):
            reads = [f"c{c}_{k - 1}"] if k else []
            if k == 10 and c:
                reads.append(f"e{c - 1}")
            lines.append(f"c{c}_{k} = f({', '.join(reads)}) bytes=1000 ns={ns}")
        lines.append(f"e{c} = f(c{c}_5) bytes=1 ns={ns}")
    return hand_problem("\n".join(lines), machine, **demands)


ROOMY = {"gpu:0": 10**6, "gpu:1": 10**6}


@pytest.mark.parametrize("placer", BLIND, ids=name_of)
def test_the_cut_runs_between_clusters(placer: Placer) -> None:
    """Two chains with dear tensors are halves that only 1 byte connects: each is on one device."""
    available(placer)
    result = place(clusters(hand_machine(ROOMY)), placer, Budget(evaluations=1))
    found = placed(result)
    for c in range(2):
        assert len({found[f"c{c}_{k}"] for k in range(20)}) == 1
    assert found["c0_0"] != found["c1_0"]
    assert result.timeline.transfer_bytes == 1


@pytest.mark.parametrize("placer", BLIND, ids=name_of)
def test_a_faster_device_gets_more_work(placer: Placer) -> None:
    """Of 60 ops the device that runs each in a third of the time gets about three quarters."""
    available(placer)
    lines = [f"a{k} = f ns=30,10" for k in range(60)]
    problem = hand_problem("\n".join(lines), hand_machine(ROOMY))
    found = list(placed(place(problem, placer, Budget(evaluations=1))).values())
    assert 42 <= found.count("gpu:1") <= 48


@pytest.mark.parametrize("placer", [Scotch(), MinCut()], ids=name_of)
def test_who_may_use_the_cpu(placer: Placer) -> None:
    """Scotch maps onto the CPU too; min-cut leaves it out."""
    available(placer)
    lines = [f"a{k} = f ns=10,10,10" for k in range(60)]
    machine = hand_machine({"gpu:0": 10**6, "gpu:1": 10**6, "cpu:0": 10**6})
    problem = hand_problem("\n".join(lines), machine)
    found = set(placed(place(problem, placer, Budget(evaluations=1))).values())
    assert ("cpu:0" in found) == (placer.name == "scotch")


@pytest.mark.parametrize("placer", PLACERS, ids=name_of)
def test_pins_and_excluded_devices_hold(placer: Placer) -> None:
    """What is pinned is where it should be, and an excluded device has nothing."""
    available(placer)
    machine = hand_machine({f"gpu:{d}": 10**6 for d in range(3)})
    problem = clusters(machine, pins={"c0_3": "gpu:2"}, exclude=["gpu:0"])
    found = placed(place(problem, placer, Budget(evaluations=20)))
    assert found["c0_3"] == "gpu:2"
    assert set(found.values()) == {"gpu:1", "gpu:2"}


@pytest.mark.parametrize("placer", PLACERS, ids=name_of)
@pytest.mark.slow
def test_every_seed_and_process_gives_the_same_plan(placer: Placer) -> None:
    """Large enough for several threads; also in a fresh process, whose library starts anew."""
    available(placer)
    problem = random_problem(3, 1500, 3)
    first, second = (
        place(problem, placer, Budget(evaluations=9), seed, allow_infeasible=True).placement
        for seed in (0, 1)
    )
    assert np.array_equal(first.devices, second.devices)
    code = (
        "import sys; sys.path.insert(0, '.')\n"
        "from tests.strategies import random_problem\n"
        "from devplace.placers import *\n"
        f"result = place(random_problem(3, 1500, 3), {placer!r}, Budget(evaluations=9), "
        "allow_infeasible=True)\n"
        "print(*result.placement.devices)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [int(d) for d in done.stdout.split()] == first.devices.tolist()


def test_scotch_leaves_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of threads that it asks for lasts only as long as the call."""
    available(Scotch())
    problem = clusters(hand_machine(ROOMY))
    monkeypatch.delenv("SCOTCH_PTHREAD_NUMBER", raising=False)
    place(problem, Scotch(), Budget(evaluations=1))
    assert "SCOTCH_PTHREAD_NUMBER" not in os.environ
    monkeypatch.setenv("SCOTCH_PTHREAD_NUMBER", "3")
    place(problem, Scotch(), Budget(evaluations=1))
    assert os.environ["SCOTCH_PTHREAD_NUMBER"] == "3"


@pytest.mark.slow
def test_nothing_is_printed() -> None:
    """METIS complains on standard output about parts that stay empty; nobody should read that, and
    what is printed before and after is there, in order."""
    available(MinCut())
    code = (
        "import sys; sys.path.insert(0, '.')\n"
        "from devplace.placers import *\n"
        "from devplace.testing import hand_machine, hand_problem\n"
        "print('before')\n"
        "machine = hand_machine({f'gpu:{d}': 10**6 for d in range(4)})\n"
        "lines = [f'a{k} = f ns=9000,9000,9000,100' for k in range(4)]\n"
        "problem = hand_problem('\\n'.join(lines), machine)\n"
        "place(problem, MinCut(), Budget(evaluations=1))\n"
        "print('after')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "before\nafter\n"
    assert done.stderr == ""


def test_mt_kahypar_cuts_between_clusters_too() -> None:
    """The optional library finds the same halves, and keeps what placers promise."""
    placer = MinCut(library="mt-kahypar")
    available(placer)
    assert (
        place(clusters(hand_machine(ROOMY)), placer, Budget(evaluations=1)).timeline.transfer_bytes
        == 1
    )
    check_placer(placer)
    check_placer(placer, [random_problem(seed, 25, 3) for seed in range(10)])


def test_hyper_parameters_are_checked() -> None:
    """An unknown library and an impossible imbalance are refused with what is allowed."""
    with pytest.raises(InputError, match="metis or mt-kahypar"):
        MinCut(library="zoltan")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="imbalance"):
        MinCut(imbalance=0)


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("scotch", "scotchpy64"),
        ("scotch-repaired", "scotchpy64"),
        ("mincut", "pymetis"),
        ("mincut-repaired", "pymetis"),
    ],
)
def test_a_missing_library_is_named(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason says which package is missing and which extra has it."""
    monkeypatch.setattr("devplace.placers.extras.find_spec", lambda name: None)
    reason = by_name(name).supports(clusters(hand_machine(ROOMY)))
    assert reason == f"needs {package}: pip install 'devplace[partition]'"


def test_edges_count_bytes_once_per_reading_group() -> None:
    """a's 7 bytes go to b and c, which read it twice in all; parameters make no edge."""
    problem = hand_problem(
        """
        w = parameter bytes=50
        a = f(w) bytes=7 ns=1
        b = f(a, w) bytes=3 ns=1
        c = f(a, b) bytes=1 ns=1
        """,
        hand_machine(ROOMY),
    )
    graph = group_graph(problem)
    pairs = {}
    for g in range(graph.num_groups):
        for k in range(graph.ptr[g], graph.ptr[g + 1]):
            pairs[g, int(graph.neighbour[k])] = int(graph.num_bytes[k])
    assert pairs == {(0, 1): 7, (1, 0): 7, (0, 2): 7, (2, 0): 7, (1, 2): 3, (2, 1): 3}


def test_weights_fit_32_bits() -> None:
    """Huge weights are scaled to a sum of at most 2^30 (and the smallest weight each)."""
    found = scaled(np.array([10**15, 10**12, 0]), 1)
    assert found.sum() <= 2**30 + 3
    assert found.min() == 1
    assert scaled(np.array([5, 7]), 1).tolist() == [5, 7]


def test_device_weights_are_speeds() -> None:
    """A device that needs twice the time for the step has half the weight."""
    problem = hand_problem("a = f ns=10,20\nb = f ns=10,20", hand_machine(ROOMY))
    assert device_weights(problem, [0, 1]).tolist() == [1000, 500]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_graph_is_symmetric_and_loses_no_byte(seed: int) -> None:
    """Each edge has its twin, and their bytes are those of carriers between different groups."""
    problem = random_problem(seed)
    graph, tasks = group_graph(problem), problem.core.tasks
    ends = np.repeat(np.arange(graph.num_groups), np.diff(graph.ptr))
    edges = dict(zip(zip(ends, graph.neighbour, strict=True), graph.num_bytes, strict=True))
    assert all(edges[b, a] == weight for (a, b), weight in edges.items())
    total = 0
    for carrier, maker in enumerate(tasks.carrier_maker):
        readers = tasks.cons[tasks.cons_ptr[carrier] : tasks.cons_ptr[carrier + 1]]
        others = set(tasks.group[readers].tolist()) - {int(tasks.group[maker])}
        total += len(others) * int(tasks.carrier_bytes[carrier])
    assert graph.num_bytes.sum() == 2 * total
