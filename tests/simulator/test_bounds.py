"""Lower bounds against brute force."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies import problems, random_placement, random_problem

from devplace.problem import Problem
from devplace.simulator import make_kernel, simulate
from devplace.simulator.bounds import lower_bound
from devplace.testing import hand_machine, hand_placement, hand_problem


def best_by_brute_force(problem: Problem, seed: int) -> int:
    """Shortest step over all group placements, with critical-path and a few random orders."""
    tasks, kernel = problem.core.tasks, make_kernel(problem.core)
    rng = np.random.default_rng(seed)
    rows = [
        np.array(choice, np.int32)[tasks.group]
        for choice in itertools.product(
            range(len(problem.machine.devices)), repeat=tasks.num_groups
        )
    ]
    devices = np.stack(rows)
    best = int(kernel.evaluate(devices, None).makespan_ns.min())
    for _ in range(3):
        order = rng.integers(0, 100, tasks.num_tasks).astype(np.int64)
        best = min(best, int(kernel.evaluate(devices, order).makespan_ns.min()))
    return best


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num_ops=st.integers(1, 5), num_devices=st.integers(1, 3))
def test_no_placement_and_order_beats_the_bound(seed: int, num_ops: int, num_devices: int) -> None:
    """On tiny problems every placement and order takes at least the bound."""
    problem = random_problem(seed, num_ops, num_devices)
    assert lower_bound(problem).step_ns <= best_by_brute_force(problem, seed)


@settings(max_examples=100, deadline=None)
@given(problem=problems, seed=st.integers(0, 2**32 - 1))
def test_random_placements_respect_the_bound(problem: Problem, seed: int) -> None:
    """Larger problems too; and a bound that says infeasible has no feasible placement beside it."""
    rng = np.random.default_rng(seed)
    kernel, bound = make_kernel(problem.core), lower_bound(problem)
    rows = np.stack([problem.task_devices(random_placement(problem, rng)) for _ in range(8)])
    scores = kernel.evaluate(rows, None)
    assert bound.step_ns <= int(scores.makespan_ns.min())
    if bound.is_infeasible:
        wires = problem.core.wires
        fits = (scores.peak_bytes <= wires.limit_bytes).all(axis=1)
        fits &= (scores.pool_peak_bytes <= wires.pool_limit_bytes).all(axis=1)
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
