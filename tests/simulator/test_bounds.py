"""Lower bounds against brute force."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies import problems, random_placement, tiny_case

from devplace.problem import Problem
from devplace.simulator import make_kernel, simulate
from devplace.simulator.bounds import lower_bound
from devplace.simulator.memory_bounds import least_needs
from devplace.testing import hand_machine, hand_placement, hand_problem


def best_by_brute_force(problem: Problem, seed: int) -> int | None:
    """Shortest step over all group placements that fit, with critical-path and random orders."""
    tasks, wires, kernel = problem.core.tasks, problem.core.wires, make_kernel(problem.core)
    rng = np.random.default_rng(seed)
    choices = [np.flatnonzero(row).tolist() for row in problem.allowed]
    rows = [np.array(choice, np.int32)[tasks.group] for choice in itertools.product(*choices)]
    devices = np.stack(rows)
    orders = [None, *(rng.permutation(tasks.num_tasks).astype(np.int64) for _ in range(60))]
    best: int | None = None
    for order in orders:
        scores = kernel.evaluate(devices, order)
        fits = (scores.peak_bytes <= wires.limit_bytes).all(axis=1)
        fits &= (scores.pool_peak_bytes <= wires.pool_limit_bytes).all(axis=1)
        if fits.any():
            fastest = int(scores.makespan_ns[fits].min())
            best = fastest if best is None else min(best, fastest)
    return best


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
@pytest.mark.slow
def test_nothing_that_fits_beats_the_bound(seed: int) -> None:
    """On tiny problems with memory limits, pins and unequal devices every placement that fits
    takes at least the bound, in any order; where one fits, none is proved not to."""
    problem = tiny_case(seed, 6)
    if problem.core.tasks.num_groups > 6:
        return
    best, bound = best_by_brute_force(problem, seed), lower_bound(problem)
    if best is not None:
        assert not bound.is_infeasible, bound.lack
        assert bound.step_ns <= best


@settings(max_examples=100, deadline=None)
@given(problem=problems, seed=st.integers(0, 2**32 - 1))
def test_random_placements_respect_the_bound(problem: Problem, seed: int) -> None:
    """Larger problems too; and a bound that says infeasible has no feasible placement beside it."""
    rng = np.random.default_rng(seed)
    kernel, bound = make_kernel(problem.core), lower_bound(problem)
    rows = np.stack([problem.task_devices(random_placement(problem, rng)) for _ in range(8)])
    scores = kernel.evaluate(rows, None)
    wires = problem.core.wires
    fits = (scores.peak_bytes <= wires.limit_bytes).all(axis=1)
    fits &= (scores.pool_peak_bytes <= wires.pool_limit_bytes).all(axis=1)
    assert bound.step_ns <= int(scores.makespan_ns[fits].min(initial=2**62))
    if bound.is_infeasible:
        assert not fits.any()


def test_the_bound_is_reached_where_it_should_be() -> None:
    """Four equal independent ops on two equal devices: load bound = two ops."""
    from devplace.cost import CostTable
    from devplace.graph import Op, OpGraph, Tensor
    from devplace.machine import Device, Link, Machine

    graph = OpGraph(
        "four",
        tuple(Op(f"o{k}", "t", outputs=(k,)) for k in range(4)),
        tuple(Tensor(f"o{k}", (1,), "float32", 4) for k in range(4)),
    )
    devices = tuple(
        Device(name=n, kind="gpu", memory_bytes=100, flops_per_s={"float32": 1}, bytes_per_s=1)
        for n in ("a", "b")
    )
    links = tuple(Link(src=s, dst=d, bytes_per_s=1) for s, d in (("a", "b"), ("b", "a")))
    problem = Problem(
        graph, Machine("two", devices, links), CostTable(np.full((4, 2), 100, np.int64), "hand")
    )
    bound = lower_bound(problem)
    assert (bound.critical_path_ns, bound.load_ns, bound.step_ns) == (100, 200, 200)


def test_an_old_value_nobody_reads_needs_no_room() -> None:
    """A buffer that is only overwritten is no proof that nothing fits; one that is read is."""
    machine = hand_machine({"gpu:0": 100})
    overwritten = hand_problem("b = buffer bytes=300\na = f bytes=9 ns=1 replaces=b", machine)
    assert simulate(overwritten, hand_placement(overwritten, {})).is_feasible
    assert not lower_bound(overwritten).is_infeasible
    read = hand_problem("b = buffer bytes=300\na = f(b) bytes=9 ns=1 replaces=b", machine)
    assert lower_bound(read).is_infeasible
    assert lower_bound(read).static_bytes == 300


def test_streams_and_pins_are_in_the_bound() -> None:
    """Two streams halve the load bound; a pin to a slow device lengthens the path."""
    text = "\n".join(f"o{k} = f ns=10,30" for k in range(4))
    machine = hand_machine({"gpu:0": 99, "gpu:1": 99}, streams=2)
    assert lower_bound(hand_problem(text, machine)).load_ns == 15
    pinned = hand_problem(text, machine, pins={"o0": "gpu:1"})
    assert lower_bound(pinned).critical_path_ns == 30


def test_excluded_devices_do_not_weaken_the_bound() -> None:
    """With one device left the load bound is all its work, however many are excluded."""
    text = "\n".join(f"o{k} = f ns=1000000" for k in range(4))
    machine = hand_machine({f"gpu:{k}": 99 for k in range(4)})
    alone = hand_problem(text, machine, exclude=["gpu:1", "gpu:2", "gpu:3"])
    assert lower_bound(alone).load_ns == 4_000_000


def test_what_must_cross_a_link_is_in_the_path() -> None:
    """Pinned apart, two ops are joined by a transfer: 5 + 10 bytes + 2 latency + 7."""
    text = "a = f bytes=10 ns=5\nb = g(a) ns=7"
    machine = hand_machine({"gpu:0": 99, "gpu:1": 99}, latency_ns=2)
    apart = hand_problem(text, machine, pins={"a": "gpu:0", "b": "gpu:1"})
    assert lower_bound(apart).critical_path_ns == 24


def test_two_makers_wait_for_each_other_or_for_a_link() -> None:
    """A join of two branches of 20: both on one device take 40, apart 20 and the dearer way."""
    text = "a = f bytes={0} ns=20\nb = f bytes={0} ns=20\nc = join(a, b) ns=5"
    machine = hand_machine({"gpu:0": 999, "gpu:1": 999})
    assert lower_bound(hand_problem(text.format(7), machine)).critical_path_ns == 32
    assert lower_bound(hand_problem(text.format(90), machine)).critical_path_ns == 45


def test_two_readers_wait_for_each_other_or_for_a_link() -> None:
    """The same seen from the end: one of two readers follows the other, or comes over a link."""
    text = "a = f bytes=7 ns=5\nb = f(a) ns=20\nc = g(a) ns=20"
    machine = hand_machine({"gpu:0": 99, "gpu:1": 99})
    assert lower_bound(hand_problem(text, machine)).critical_path_ns == 32


def test_streams_begin_and_end_with_different_ops() -> None:
    """Two devices: heads of 10 and 20 and the load between them, not twice the smaller head."""
    lines = ["a = f ns=10 bytes=0", "b = f ns=20 bytes=0"]
    lines += [f"c{k} = g(a) ns=30 bytes=0" for k in range(2)]
    lines += [f"d{k} = g(b) ns=30 bytes=0" for k in range(2)]
    problem = hand_problem("\n".join(lines), hand_machine({"gpu:0": 99, "gpu:1": 99}))
    assert lower_bound(problem).step_ns == 75


def test_memory_forces_work_onto_slow_devices() -> None:
    """Half of the parameters do not fit the fast device, so half of the work is slow: 4 x 10."""
    lines = [f"w{k} = parameter bytes=10" for k in range(8)]
    lines += [f"y{k} = sgd(w{k}) bytes=0 ns=1,10 replaces=w{k}" for k in range(8)]
    problem = hand_problem("\n".join(lines), hand_machine({"gpu:0": 40, "cpu:0": 100}))
    assert lower_bound(problem).step_ns == 40


def test_an_op_that_fits_nowhere_and_crowded_pins_are_proofs() -> None:
    """An op that needs more than its device, and pins that need more than theirs."""
    machine = hand_machine({"gpu:0": 50, "gpu:1": 100})
    large = "a = f bytes=80 ns=1"
    assert lower_bound(hand_problem(large, machine)).lack == ""
    assert lower_bound(hand_problem(large, machine, pins={"a": "gpu:0"})).lack == "op"
    text = "v = parameter bytes=30\nw = parameter bytes=30\na = f(v) bytes=0 replaces=v\n"
    text += "b = f(w) bytes=0 replaces=w"
    assert lower_bound(hand_problem(text, machine)).lack == ""
    pins = {"v": "gpu:0", "w": "gpu:0"}
    assert lower_bound(hand_problem(text, machine, pins=pins)).lack == "bound groups"


def test_status_says_what_is_proved() -> None:
    """A step that meets the bound is optimal, one above it feasible, one that does not fit
    infeasible only where that is proved."""
    text = "a = f bytes=8 ns=5"
    bound = lower_bound(hand_problem(text, hand_machine({"gpu:0": 99})))
    assert [bound.status(step, True) for step in (5, 6)] == ["optimal", "feasible"]
    assert bound.status(5, False) == "unknown"
    assert (bound.gap(5), bound.gap(6)) == (0.0, pytest.approx(0.2))
    full = lower_bound(hand_problem(text, hand_machine({"gpu:0": 7})))
    assert full.status(5, False) == "infeasible"


@pytest.mark.parametrize(
    ("size", "pool", "fits"), [(60, 90, True), (61, 90, False), (60, 89, False)]
)
def test_what_is_held_leaves_less_room(size: int, pool: int, fits: bool) -> None:
    """Of a device of 100 bytes in a pool of 90, whose libraries hold 30, an op can have 60; that
    is also the most that any placement gives it."""
    machine = hand_machine({"gpu:0": 100, "gpu:1": 40}, pools={"ram": (pool, ("gpu:0",))})
    free = hand_problem(f"a = f bytes={size} ns=1", machine)
    held = np.array([30, 0], np.int64)
    problem = dataclasses.replace(free, costs=dataclasses.replace(free.costs, held_bytes=held))
    assert least_needs(problem).room_bytes.tolist() == [pool - 30, 40]
    assert lower_bound(problem).lack == ("" if fits else "op")
    timeline = simulate(problem, hand_placement(problem, {"a": "gpu:0"}))
    assert timeline.is_feasible is fits
