"""A batch is copied to the devices that read it before a step begins."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies import random_placement, random_problem

from devplace.graph.graph import BATCH_ON
from devplace.machine import presets
from devplace.placers import Search, Single, place
from devplace.problem import Problem
from devplace.problem.transfers import copy_times
from devplace.simulator import simulate
from devplace.simulator.bounds import lower_bound
from devplace.testing import hand_machine, hand_placement, hand_problem, show
from devplace.verify.replay import replay

GPUS = {"cuda:0": 10**6, "cuda:1": 10**6}
TWO = """
    x = input bytes=100
    mask = input bytes=20
    w = constant bytes=1000
    half = view(x) bytes=50
    a = f(half, w) bytes=10 ns=7
    b = f(x, mask) bytes=10 ns=9
    c = g(a, b) bytes=1 ns=2 result=loss
"""


def problem(text: str = TWO, **machine: float) -> Problem:
    named = {"bytes_per_ns": 10, "latency_ns": 3, **machine}
    return hand_problem(text, hand_machine({**GPUS, "cpu:0": 10**6}, **named))  # type: ignore[arg-type]


def test_copies_are_made_one_after_the_other_before_anything_begins() -> None:
    """By hand: x (10 + 3 ns) goes whole to both devices that read it or a part, mask (2 + 3) to
    one; the constant lies there already. Then a and b run at once, and b crosses in 1 + 3."""
    found = problem()
    timeline = simulate(found, hand_placement(found, {"b": "cuda:1"}))
    assert timeline.batch_ns == 13 + 13 + 5
    assert show(timeline).splitlines() == [
        "cuda:0: a@31-38 c@44-46",
        "cuda:1: b@31-40",
        "cpu:0:",
        "cuda:1->cuda:0: b@40-44",
    ]
    assert timeline.makespan_ns == 46
    assert timeline.memory[:, 0].min() == 31
    one = simulate(found, hand_placement(found, {}))
    assert (one.batch_ns, one.makespan_ns) == (13 + 5, 18 + 7 + 9 + 2)


def test_on_the_host_a_batch_is_there() -> None:
    """The only CPU device reads it where it lies; without one nobody knows where it comes from."""
    found = problem()
    there = dict.fromkeys("abc", "cpu:0")
    assert simulate(found, hand_placement(found, there)).batch_ns == 0
    alone = hand_problem(TWO, hand_machine(GPUS))
    assert not alone.core.wires.transfers.copy_ns.any()


def test_logical_cpu_devices_get_a_copy_each() -> None:
    """It takes what a transfer between two of them takes, but for its latency."""
    cpus = {"cpu:0": 10**6, "cpu:1": 10**6}
    found = hand_problem(TWO, hand_machine(cpus, bytes_per_ns=10, latency_ns=99))
    assert simulate(found, hand_placement(found, {})).batch_ns == 10 + 2
    assert simulate(found, hand_placement(found, {"b": "cpu:1"})).batch_ns == 10 + 10 + 2


def test_a_batch_on_a_gpu_comes_from_there() -> None:
    """There it is free, the other one gets it over the link between them."""
    found = problem()
    there = replace(found, graph=replace(found.graph, meta={BATCH_ON: "cuda:1"}))
    assert simulate(there, hand_placement(there, dict.fromkeys("abc", "cuda:1"))).batch_ns == 0
    assert simulate(there, hand_placement(there, {"b": "cuda:1"})).batch_ns == 13


def test_64_mib_take_over_a_millisecond_to_an_h200() -> None:
    """Over the link from the host to a card; that of a CPU machine is not touched."""
    machine = presets.get("h200x1")
    (row,) = copy_times(np.array([64 * 2**20]), machine).tolist()
    times = dict(zip(machine.device_names, row, strict=True))
    assert 1_100_000 < times["cuda:0"] < 1_400_000
    assert times["cpu:0"] == 0


def test_a_large_batch_is_reduced_where_it_lies() -> None:
    """As if an op of the CPU had made it, an op that makes little of it stays there, though a GPU
    is five times as fast."""
    text = """
        x = input bytes=1000000
        a = reduce(x) bytes=10 ns=2000,10000
        b = mm(a) bytes=10 ns=1000,20000
        c = loss(b) bytes=4 ns=10,100 result=loss
    """
    machine = hand_machine({"cuda:0": 10**8, "cpu:0": 10**8}, bytes_per_ns=10, latency_ns=100)
    found = hand_problem(text, machine)
    result = place(found, Search(), "200ev")
    names = machine.device_names
    placed = dict(zip("xabc", (names[d] for d in result.placement.devices), strict=True))
    assert placed == {"x": "cpu:0", "a": "cpu:0", "b": "cuda:0", "c": "cuda:0"}
    assert result.step_ns == 10_000 + 1 + 100 + 1_000 + 10
    assert result.step_ns == verified_ns(found, result.placement.devices.tolist())


def verified_ns(found: Problem, devices: list[int]) -> int:
    return replay(found, devices).step_ns


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_verifier_and_the_bound_agree(seed: int) -> None:
    """On random problems whose CPU devices hold the batch: the replay gives the same step, and the
    bound, which counts the least copies of placements that fit, stays below it."""
    found = random_problem(seed)
    placement = random_placement(found, np.random.default_rng(seed))
    timeline = simulate(found, replace(placement, priority=None, order=None))
    assert replay(found, timeline.devices.tolist()).step_ns == timeline.makespan_ns
    assert not timeline.is_feasible or lower_bound(found).batch_ns <= timeline.batch_ns


def test_a_single_device_that_must_get_the_batch_meets_the_bound() -> None:
    """Pinned to a card, a chain and the copy before it are the bound."""
    found = replace(problem(), pins={"*": "cuda:0"})
    result = place(found, Single(), "5ev")
    assert result.step_ns == lower_bound(found).step_ns == 36


def test_times_of_copies_that_overflow_are_refused() -> None:
    """Sizes and bandwidths that no 64 bits hold are named."""
    from devplace.errors import ProblemError

    with pytest.raises(ProblemError, match="64 bits"):
        problem(f"x = input bytes={2**61}\na = f(x) bytes=1 ns=1 result=output", bytes_per_ns=1e-9)
