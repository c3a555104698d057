"""The verifier of steps against the simulator."""

import dataclasses

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from devplace.placers import Heft, place
from devplace.plan import make_plan
from devplace.problem import Placement, Problem
from devplace.simulator import simulate
from devplace.simulator.in_order import simulate_in_order
from devplace.testing import hand_machine, hand_placement, hand_problem, tiny_problems
from devplace.verify import verify_placement, verify_plan, verify_step
from devplace.verify.device_demands import broken_demands
from tests.strategies import problems, random_placement


@settings(max_examples=300, deadline=None)
@given(problem=problems, seed=st.integers(0, 2**32 - 1))
def test_verifier_equals_simulator(problem, seed):
    """Times, transfers and peaks are those of the simulator, to the nanosecond and byte."""
    placement = random_placement(problem, np.random.default_rng(seed))
    timeline = simulate(problem, placement)
    verdict = verify_placement(problem, placement)
    assert verdict.step_ns == timeline.makespan_ns
    for op in verdict.seen.sequence:
        assert verdict.seen.start_ns[op] == timeline.start_ns[op]
        assert verdict.seen.finish_ns[op] == timeline.finish_ns[op]
    sent = [(s.tensor, s.src, s.dst, s.request_ns, s.arrival_ns) for s in verdict.seen.sent]
    told = [(t.tensor, t.src, t.dst, t.request_ns, t.arrival_ns) for t in timeline.transfers]
    assert sent == told
    assert verdict.peak_bytes == tuple(timeline.peak_bytes.tolist())
    assert verdict.pool_peak_bytes == tuple(timeline.pool_peak_bytes.tolist())
    assert (not verdict.broken) == timeline.is_feasible


@settings(max_examples=100, deadline=None)
@given(problem=problems, seed=st.integers(0, 2**32 - 1))
def test_verifier_equals_simulator_in_order(problem, seed):
    """Where each op waits for its turn, too."""
    rng = np.random.default_rng(seed)
    placement = random_placement(problem, rng)
    tasks = problem.core.tasks
    device = problem.task_devices(placement)
    order = [[] for _ in problem.machine.devices]
    for task, op in enumerate(tasks.task_op.tolist()):
        if not tasks.is_source[task]:
            order[device[task]].append(op)
    timeline = simulate_in_order(problem, placement, order)
    priority = None if placement.priority is None else placement.priority.tolist()
    verdict = verify_step(problem, placement.devices.tolist(), priority, order)
    assert verdict.step_ns == timeline.makespan_ns
    assert verdict.peak_bytes == tuple(timeline.peak_bytes.tolist())


@pytest.mark.parametrize("tiny", tiny_problems(), ids=lambda tiny: tiny.name)
def test_plans_are_valid(tiny):
    """A placer's plan breaks no rule, and what it predicts is what comes out."""
    result = place(tiny.problem, Heft(), "10ev", allow_infeasible=True)
    verdict = verify_plan(tiny.problem, result.plan)
    assert verdict.step_ns == result.step_ns
    assert (not verdict.broken) == result.is_feasible, verdict.broken


def test_broken_rules_are_named():
    """Parted groups, unknown devices, lies about the step and circles of waiting are told."""
    tiny = next(tiny for tiny in tiny_problems() if tiny.name == "update stays home")
    problem = tiny.problem
    result = place(problem, Heft(), "10ev")
    index = problem.graph.op_index
    parted = np.array(result.plan.placement, np.int32)
    parted[index["w"]] = 1 - parted[index["w"]]
    assert "share a device" in verify_placement(problem, Placement(parted)).broken[0]
    assert "on device 7" in verify_placement(problem, Placement(parted * 0 + 7)).broken[0]
    predicted = dataclasses.replace(
        result.plan, predicted=type(result.plan.predicted)(1, {"gpu:0": 1}, 0, 0)
    )
    broken = verify_plan(problem, predicted).broken
    assert any("predicts 1 ns" in text for text in broken)
    order = [list(reversed(row)) for row in result.plan.order]
    verdict = verify_step(problem, result.plan.placement, result.plan.priority, order)
    assert "wait for each other" in verdict.broken[0]


PINNED = """
x = input bytes=10
w = parameter bytes=20 module=enc
a = f(x, w) bytes=60 ns=10 module=enc
b = f(a) bytes=10 ns=10 module=dec.last result=output
w2 = u(w, b) bytes=20 ns=1 module=enc replaces=w
"""


@pytest.mark.parametrize(
    ("demand", "broken"),
    [
        ({"limits": {"0": 50}}, "more than its limit of 50"),
        ({"limits": {"cpu": 50}}, "more than its limit of 50"),
        ({"exclude": ["cpu"]}, "on cpu:0, which is excluded"),
        ({"exclude": ["0"]}, "on cuda:0, which is excluded"),
        ({"pins": {"dec": "1"}}, "'b' is not on cuda:1, where pin 'dec' wants it"),
        ({"pins": {"w2": "cuda:1"}}, "'w2' is not on cuda:1, where pin 'w2' wants it"),
    ],
)
def test_demands_hold_under_any_name_of_a_device(demand, broken):
    """Limits, excluded devices and pins count for the device that a short name means."""
    machine = hand_machine({"cuda:0": 200, "cuda:1": 200, "cpu:0": 200})
    problem = hand_problem(PINNED, machine, **demand)
    told = [verify_step(problem, [d] * 5).broken for d in range(3)]
    kept = [
        not problem.violations(Placement(np.full(5, d, np.int32)))
        and simulate(problem, Placement(np.full(5, d, np.int32))).is_feasible
        for d in range(3)
    ]
    assert kept == [not found for found in told]
    assert any(broken in text for found in told for text in found)


@settings(max_examples=100, deadline=None)
@given(problem=problems, seed=st.integers(0, 2**32 - 1))
def test_verifier_names_demands_that_the_problem_names(problem, seed):
    """A placement of any tasks anywhere breaks a demand for both or for none of them."""
    rng = np.random.default_rng(seed)
    count = len(problem.machine.devices)
    device = rng.integers(0, count, problem.core.tasks.num_tasks).astype(np.int32)
    devices = problem.spaces.op_devices(device)
    said = broken_demands(problem, devices.tolist())
    assert bool(said) == bool(problem.violations(Placement(devices)))


TIED = """
    x = input bytes=4
    table = parameter bytes=30 module=emb
    bias = parameter bytes=3 module=head
    e = f(x, table) bytes=8 ns=5 module=emb
    low = f(table) bytes=15 ns=1 module=
    turned = view(low) bytes=15 module=head
    y = f(e, turned, bias) bytes=8 ns=5 module=head
    z = f(y, low) bytes=8 ns=5 module=
    g = f(z, e) bytes=30 ns=5 stage=backward module=
    u = f(table, g) bytes=30 ns=1 stage=update replaces=table
"""


@pytest.mark.parametrize("tied", [{}, {"head.weight": "table"}])
@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize(
    "pins",
    [
        {"emb": "cuda:1"},
        {"head": "cuda:1"},
        {"emb": "cuda:1", "": "cuda:0"},
        {"emb": "cuda:1", "head": "cuda:0"},
        {"head*": "cuda:1", "z": "cuda:0"},
        {"table": "cuda:1", "g": "cuda:1"},
        {"head": "cuda:1", "emb": "cuda:1"},
    ],
)
def test_pins_hold_for_what_reads_the_weights(pins, soft, tied):
    """The verifier's own reading of the rule refuses the placements that the problem refuses: all
    of the ops on two devices."""
    machine = hand_machine({"cuda:0": 200, "cuda:1": 200})
    plain = hand_problem(TIED, machine)
    graph = dataclasses.replace(plain.graph, meta={**plain.graph.meta, "tied": tied})
    problem = Problem(graph, machine, plain.costs, pins=pins, soft_pins=soft)
    refused = 0
    for number in range(2**problem.core.tasks.num_tasks):
        tasks = np.array([number >> k & 1 for k in range(problem.core.tasks.num_tasks)], np.int32)
        devices = problem.spaces.op_devices(tasks)
        told = bool(broken_demands(problem, devices.tolist()))
        assert told == bool(problem.violations(Placement(devices)))
        refused += told
    assert refused


def test_soft_pins_hold_where_they_can():
    """A soft pin is broken only where all that must share a device could go there."""
    machine = hand_machine({"gpu:0": 200, "gpu:1": 200}, unsupported={"gpu:1": ("u",)})
    pins = {"enc": "gpu:1", "dec": "gpu:1"}
    problem = hand_problem(PINNED, machine, pins=pins, soft_pins=True)
    assert len(problem.notes) == 2  # for w and w2, which cannot run there
    assert not verify_step(problem, [0, 0, 1, 1, 0]).broken
    assert "'a' is not on gpu:1" in verify_step(problem, [0, 0, 0, 1, 0]).broken[0]


def test_plans_that_cannot_be_replayed_are_told():
    """Parted groups, too few devices or priorities, and orders that lack an op or have one twice or
    elsewhere are named, not raised."""
    tiny = next(tiny for tiny in tiny_problems() if tiny.name == "update stays home")
    plan = place(tiny.problem, Heft(), "10ev").plan
    order = [list(row) for row in plan.order]
    full = max(range(len(order)), key=lambda d: len(order[d]))
    for change, text in [
        ({"placement": (1 - plan.placement[0], *plan.placement[1:])}, "must share a device"),
        ({"placement": plan.placement[:-1]}, "devices are given for"),
        ({"priority": plan.priority[:-1]}, "priorities are given for"),
        ({"order": plan.order[:1]}, "orders are given for 2 devices"),
        ({"order": [row[1:] if d == full else row for d, row in enumerate(order)]}, "is 0 times"),
        ({"order": [row * 2 if d == full else row for d, row in enumerate(order)]}, "is 2 times"),
        ({"order": order[::-1]}, "does not run there"),
        ({"order": [[*row, 99] for row in order]}, "op 99 is in the order of"),
    ]:
        verdict = verify_plan(tiny.problem, dataclasses.replace(plan, **change))
        assert any(text in said for said in verdict.broken), (change, verdict.broken)


def test_reserved_memory_may_be_predicted():
    """With costs that have gaps, a peak predicted above what is in use is no lie; one below is."""
    machine = hand_machine({"gpu:0": 10**9, "cpu:0": 10**9})
    problem = hand_problem("x = input bytes=99\na = f(x) bytes=999 ns=5", machine)
    problem = dataclasses.replace(problem, costs=dataclasses.replace(problem.costs, has_gaps=True))
    plan = place(problem, Heft(), "10ev").plan
    verdict = verify_plan(problem, plan)
    assert not verdict.broken
    assert plan.predicted.peak_bytes["gpu:0"] > verdict.peak_bytes[0]
    less = msgspec.structs.replace(plan.predicted, peak_bytes={"gpu:0": 1, "cpu:0": 0})
    assert (
        "a peak of 1 bytes"
        in verify_plan(problem, dataclasses.replace(plan, predicted=less)).broken[0]
    )


def test_plans_for_several_streams_are_valid():
    """Two ops that end at once send by priority, though the other one had begun before."""
    text = """
    a = f bytes=10 ns=10
    c = f bytes=1 ns=5
    b = f(c) bytes=10 ns=5
    ra = f(a) bytes=1 ns=1
    rb = f(b) bytes=1 ns=50
    """
    problem = hand_problem(text, hand_machine({"gpu:0": 99, "gpu:1": 99}, streams=2))
    at = {"ra": "gpu:1", "rb": "gpu:1"}
    timeline = simulate(problem, hand_placement(problem, at, first=("c", "b", "a", "rb", "ra")))
    plan = make_plan(timeline, [3, 5, 4, 1, 2], {})
    assert plan.order[0] == (1, 0, 2)
    assert timeline.makespan_ns == plan.timeline().makespan_ns == 70
    assert not verify_plan(problem, plan).broken


def test_parts_of_very_long_transfers_are_whole():
    """A share of a transfer of 100 days, and an overhead of one, add up to the nanosecond."""
    machine = hand_machine({"gpu:0": 10**18, "gpu:1": 10**18}, overhead_ns=(1, 1))
    links = tuple(
        msgspec.structs.replace(link, send_share=1.0, receive_share=1.0) for link in machine.links
    )
    size = 2**53 + 2
    problem = hand_problem(
        f"a = f bytes={size} ns=1\nb = f(a) bytes=1 ns=1\nc = g(a) bytes=1 ns=1",
        dataclasses.replace(machine, links=links),
    )
    assert problem.core.wires.transfers.send_ns[0, 0] == size + 1
    placement = Placement(np.array([0, 1, 0], np.int32))
    verdict = verify_placement(problem, placement)
    assert verdict.step_ns == simulate(problem, placement).makespan_ns
