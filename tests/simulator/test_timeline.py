"""Hand-worked timelines."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies import problems, random_placement

from devplace.cost import CostTable
from devplace.errors import ProblemError
from devplace.placers import Budget
from devplace.placers.counted_simulator import Evaluator
from devplace.problem import Placement, Problem
from devplace.simulator import Timeline, simulate
from devplace.simulator.kernel import ReferenceKernel
from devplace.testing import hand_machine, hand_placement, hand_problem, show

TWO = {"gpu:0": 100, "gpu:1": 100}


def run(
    text: str, machine: object, devices: dict[str, str], first: tuple[str, ...] = ()
) -> Timeline:
    """Simulate a graph's text on a machine."""
    problem = hand_problem(text, machine)  # type: ignore[arg-type]
    return simulate(problem, hand_placement(problem, devices, first))


def lines(text: str) -> str:
    """The text without indentation."""
    return "\n".join(line.strip() for line in text.strip().splitlines())


def test_a_tensor_crosses_once_per_consumer_device() -> None:
    """Two readers on one device share a transfer; another device gets its own."""
    timeline = run(
        """
        a = f bytes=4 ns=5
        b = g(a) ns=3
        c = g(a) ns=3
        d = g(a) ns=3
        """,
        hand_machine({**TWO, "gpu:2": 100}, latency_ns=1),
        {"b": "gpu:1", "c": "gpu:1", "d": "gpu:2"},
    )
    assert show(timeline) == lines(
        """
        gpu:0: a@0-5
        gpu:1: b@10-13 c@13-16
        gpu:2: d@10-13
        gpu:0->gpu:1: a@5-10
        gpu:0->gpu:2: a@5-10
        """
    )
    assert timeline.transfer_bytes == 8


def test_transfers_of_one_link_queue_in_the_order_of_requests() -> None:
    """A link serves one transfer after the other, whichever is needed first."""
    timeline = run(
        """
        a = f bytes=20 ns=5
        b = f bytes=2 ns=5
        urgent = g(b) ns=90
        idle = g(a) ns=1
        """,
        hand_machine(TWO),
        {"urgent": "gpu:1", "idle": "gpu:1"},
        ("a", "b"),
    )
    assert show(timeline) == lines(
        """
        gpu:0: a@0-5 b@5-10
        gpu:1: idle@25-26 urgent@27-117
        gpu:0->gpu:1: a@5-25
        gpu:0->gpu:1: b@25-27
        """
    )


@pytest.mark.parametrize(("channel", "second"), [("", "6@5-11"), ("bus", "6@11-17")])
def test_links_on_one_channel_wait_for_each_other(channel: str, second: str) -> None:
    """Two pairs of devices overlap, unless they share a channel."""
    timeline = run(
        """
        a = f bytes=6 ns=5
        b = f bytes=6 ns=5
        c = g(a) ns=1
        d = g(b) ns=1
        """,
        hand_machine({f"gpu:{k}": 100 for k in range(4)}, channel=channel),
        {"b": "gpu:1", "c": "gpu:2", "d": "gpu:3"},
    )
    move = timeline.transfers[1]
    assert f"6@{move.start_ns}-{move.arrival_ns}" == second
    assert timeline.transfers[1].request_ns == 5


def test_latency_does_not_occupy_the_link() -> None:
    """The next transfer starts when the last byte has left, not when it has arrived."""
    timeline = run(
        """
        a = f bytes=3,3 ns=2
        b = g(a:0, a:1) ns=1
        """,
        hand_machine(TWO, latency_ns=50),
        {"b": "gpu:1"},
    )
    assert [(t.start_ns, t.arrival_ns) for t in timeline.transfers] == [(2, 55), (5, 58)]


def test_the_next_op_pays_for_a_transfer() -> None:
    """Overheads lengthen the next op of the sender and of the receiver, once."""
    timeline = run(
        """
        a = f bytes=4 ns=5
        b = f ns=10
        c = g(a) ns=3
        d = g(c) ns=3
        """,
        hand_machine(TWO, overhead_ns=(2, 7)),
        {"c": "gpu:1", "d": "gpu:1"},
        ("a", "b", "c"),
    )
    assert show(timeline) == lines(
        """
        gpu:0: a@0-5 b@5-17
        gpu:1: c@9-19 d@19-22
        gpu:0->gpu:1: a@5-9
        """
    )
    assert timeline.busy_ns.tolist() == [17, 13]


def test_streams_run_ops_side_by_side() -> None:
    """Two streams run two ready ops at once, the third when one ends."""
    timeline = run("a = f ns=5\nb = f ns=9\nc = f ns=4", hand_machine({"gpu:0": 9}, streams=2), {})
    assert show(timeline) == "gpu:0: b@0-9 a@0-5 c@5-9"


def test_priority_decides_among_ready_ops_only() -> None:
    """A more important op does not make a device wait for it."""
    timeline = run(
        """
        a = f bytes=1 ns=5
        late = g(a) ns=3
        x = f ns=4
        y = f ns=4
        """,
        hand_machine(TWO),
        {"late": "gpu:1", "x": "gpu:1", "y": "gpu:1"},
        ("late", "y", "x"),
    )
    assert show(timeline).splitlines()[1] == "gpu:1: y@0-4 x@4-8 late@8-11"


def test_ties_go_to_the_earlier_op() -> None:
    """Equal priorities are settled by the order of the graph."""
    timeline = run("a = f ns=1\nb = f ns=1\nc = f ns=1", hand_machine({"gpu:0": 9}), {})
    assert show(timeline) == "gpu:0: a@0-1 b@1-2 c@2-3"


def test_memory_follows_tensors_from_birth_to_last_use() -> None:
    """Outputs and workspace count while an op runs, inputs until their last reader has ended."""
    timeline = run(
        """
        x = input bytes=10
        a = f(x) bytes=20 ns=5 workspace_bytes=7
        b = f(a) bytes=30 ns=5
        c = f(b) bytes=1 ns=5 result=output
        """,
        hand_machine({"gpu:0": 100}),
        {},
    )
    # x stays (an input is ours for the whole step); 10+20+7, 10+20+30, 10+30+1, 10+1
    assert timeline.memory.tolist() == [[0, 0, 37], [5, 0, 60], [10, 0, 41], [15, 0, 11]]
    assert timeline.peak_bytes.tolist() == [60]


def sent_once(names: tuple[str, str]) -> list[list[list[int]]]:
    """Memory over time, per device, of one tensor made on the first and read on the second."""
    timeline = run(
        """
        a = f bytes=8 ns=2
        b = g(a) bytes=1 ns=2
        """,
        hand_machine(dict.fromkeys(names, 100)),
        {"a": names[0], "b": names[1]},
        ("a", "b"),
    )
    return [[row for row in timeline.memory.tolist() if row[1] == d] for d in (0, 1)]


def test_both_ends_hold_a_tensor_on_its_way() -> None:
    """The receive buffer is taken on request; the sender keeps its copy until arrival."""
    first, second = sent_once(("cpu:0", "cpu:1"))
    assert first == [[0, 0, 8], [10, 0, 0]]
    assert second == [[0, 1, 0], [2, 1, 8], [10, 1, 9], [12, 1, 0]]


def test_a_gpu_holds_its_receive_buffers_for_the_whole_step() -> None:
    """A receive buffer of a GPU is there from the first instant to the last."""
    first, second = sent_once(("gpu:0", "gpu:1"))
    assert first == [[0, 0, 8], [10, 0, 0]]
    assert second == [[0, 1, 8], [10, 1, 9], [12, 1, 8]]


def test_what_libraries_hold_counts_where_something_runs() -> None:
    """Work buffers raise the peak of devices with ops, measured workspaces replace the graph's."""
    problem = hand_problem("a = f bytes=8 ns=2 workspace_bytes=5", hand_machine(TWO))
    costs = replace(
        problem.costs,
        held_bytes=np.array([7, 3], np.int64),
        workspace_bytes=np.array([2], np.int64),
    )
    problem = replace(problem, costs=costs)
    placement = hand_placement(problem, {})
    for kernel in (None, ReferenceKernel(problem.core)):
        assert simulate(problem, placement, kernel).peak_bytes.tolist() == [8 + 2 + 7, 0]


def test_results_are_held_to_the_end() -> None:
    """A result keeps its memory after its last reader."""
    timeline = run(
        "a = f bytes=8 ns=2 result=output\nb = g(a) bytes=1 ns=2\nc = f bytes=4 ns=9",
        hand_machine({"gpu:0": 100}),
        {},
        ("a", "b", "c"),
    )
    assert timeline.memory.tolist()[-1] == [13, 0, 8]
    assert timeline.peak_bytes.tolist() == [12]


def test_a_pool_counts_its_devices_together() -> None:
    """The peak of a pool is that of the sum, not the sum of the peaks."""
    machine = hand_machine(TWO, pools={"ram": (150, ("gpu:0", "gpu:1"))})
    timeline = run(
        """
        a = f bytes=60 ns=5
        b = g(a) bytes=1 ns=5
        c = f(b) bytes=70 ns=5
        """,
        machine,
        {"b": "gpu:0", "c": "gpu:1"},
    )
    assert timeline.peak_bytes.tolist() == [61, 71]
    assert timeline.pool_peak_bytes.tolist() == [71]  # b has left gpu:0 when c starts


def test_missing_bytes_name_devices_and_pools() -> None:
    """What is over a limit is told in bytes, per device and per pool, and nothing is raised."""
    machine = hand_machine({"gpu:0": 50, "gpu:1": 200}, pools={"ram": (55, ("gpu:0", "gpu:1"))})
    timeline = run("a = f bytes=60 ns=5", machine, {})
    assert timeline.missing_bytes == {"gpu:0": 10, "ram": 5}
    assert not timeline.is_feasible


def test_the_critical_path_explains_the_step() -> None:
    """The ops that decide the length, through a transfer and a wait for the device."""
    problem = hand_problem(
        """
        a = f bytes=4 ns=5
        b = f ns=9
        c = g(a) ns=3
        d = join(b, c) ns=3
        """,
        hand_machine(TWO),
    )
    timeline = simulate(problem, hand_placement(problem, {"b": "gpu:1"}, ("a", "b", "c", "d")))
    names = [problem.graph.ops[op].name for op in timeline.critical_path()]
    assert names == ["b", "d"]
    slow_a = replace(
        problem, costs=CostTable(np.array([[50] * 2, [9] * 2, [3] * 2, [3] * 2]), "hand")
    )
    timeline = simulate(slow_a, hand_placement(slow_a, {"b": "gpu:1"}))
    names = [problem.graph.ops[op].name for op in timeline.critical_path()]
    assert names == ["a", "c", "d"]


@settings(max_examples=150, deadline=None)
@given(problem=problems, seed=st.integers(0, 2**32 - 1))
def test_every_step_of_the_critical_path_waits_for_the_one_before(
    problem: Problem, seed: int
) -> None:
    """On the path each op starts the moment its predecessor ends or its tensor arrives; the last
    ends with the step."""
    timeline = simulate(problem, random_placement(problem, np.random.default_rng(seed)))
    path = timeline.critical_path()
    if not path:
        assert timeline.makespan_ns == 0
        return
    producer = problem.graph.producer
    tasks = problem.core.tasks
    assert timeline.finish_ns[path[-1]] == timeline.makespan_ns
    for before, op in itertools.pairwise(path):
        arrivals = {
            t.arrival_ns
            for t in timeline.transfers
            if tasks.task_op[tasks.op_task[producer[t.tensor]]] == before
            and t.dst == timeline.devices[op]
        }
        assert timeline.start_ns[op] in arrivals | {timeline.finish_ns[before]}


@settings(max_examples=100, deadline=None)
@given(problem=problems, seed=st.integers(0, 2**32 - 1))
def test_s31_the_order_of_devices_does_not_matter(problem: Problem, seed: int) -> None:
    """With devices listed in another order the same placement takes the same time and memory."""
    rng = np.random.default_rng(seed)
    placement = random_placement(problem, rng)
    count = len(problem.machine.devices)
    new_of_old = rng.permutation(count)
    old_of_new = np.argsort(new_of_old)
    turned = Problem(
        problem.graph,
        replace(problem.machine, devices=tuple(problem.machine.devices[d] for d in old_of_new)),
        replace(
            problem.costs,
            compute_ns=np.ascontiguousarray(problem.costs.compute_ns[:, old_of_new]),
            held_bytes=None
            if problem.costs.held_bytes is None
            else problem.costs.held_bytes[old_of_new],
        ),
    )
    moved = Placement(new_of_old[placement.devices].astype(np.int32), placement.priority)
    before, after = simulate(problem, placement), simulate(turned, moved)
    assert before.makespan_ns == after.makespan_ns
    assert before.peak_bytes.tolist() == after.peak_bytes[new_of_old].tolist()
    np.testing.assert_array_equal(before.start_ns, after.start_ns)


def test_both_simulators_tell_the_hand_worked_story() -> None:
    """The plain and the native simulator print the same text."""
    problem = hand_problem(
        "a = f bytes=4 ns=5\nb = g(a) ns=3\nc = g(a) ns=2", hand_machine(TWO, latency_ns=1)
    )
    placement = hand_placement(problem, {"b": "gpu:1"})
    slow = simulate(problem, placement, ReferenceKernel(problem.core))
    assert show(slow) == show(simulate(problem, placement))
    assert show(slow) == "gpu:0: a@0-5 c@5-7\ngpu:1: b@10-13\ngpu:0->gpu:1: a@5-10"


def test_parallel_links_make_nothing_wait() -> None:
    """Three results cross one link at once, past its channel: all arrive 5 after they are made."""
    text = """
        x = input bytes=1
        a = f(x) bytes=5 ns=0
        b = f(x) bytes=5 ns=0
        c = f(x) bytes=5 ns=0
        d = join(a, b, c) bytes=1 ns=1 result=output
    """
    machine = hand_machine({"gpu:0": 100, "gpu:1": 100}, channel="bridge")
    steps = []
    for parallel in (False, True):
        links = tuple(msgspec.structs.replace(link, parallel=parallel) for link in machine.links)
        problem = hand_problem(text, replace(machine, links=links))
        devices = np.array([0, 0, 0, 0, 1], np.int32)
        steps.append(simulate(problem, Placement(devices)).makespan_ns)
    assert steps == [16, 6]


CHAIN = """
    w = parameter bytes=4
    a = f(w) bytes=4 ns=5
    v = view(a) bytes=4
    b = f(v) bytes=4 ns=5
    u = sgd(w, b) bytes=4 ns=1 replaces=w
"""


@pytest.mark.parametrize(
    ("order", "part"),
    [
        (((4, 3, 1), ()), "can never finish"),
        (((), (1, 3, 4)), "'a' is ordered on gpu:1 but placed on device 0"),
        (((1, 3), ()), "'u' is ordered 0 times"),
        (((1, 1, 3, 4), ()), "'a' is ordered 2 times"),
        (((0, 1, 3, 4), ()), "'w' is ordered 1 times"),
        (((1, 2, 3, 4), ()), "'v' is ordered 1 times"),
        (((1, 3, 4, -1), ()), "names op -1"),
        (((1, 3, 4, 5), ()), "names op 5"),
        (((1.0, 3, 4), ()), "names op 1.0"),
        (((1, 3, math.nan), ()), "names op nan"),
        (((1, 3, "u"), ()), "names op 'u'"),
        (((1, 3, True), ()), "names op True"),
        ((1, 3, 4), "one list of ops per device, got"),
        (7, "one list of ops per device, got"),
        (((1, 3, 4),), "1 lists, 2 devices"),
        (((1, 3, 4), (), ()), "3 lists, 2 devices"),
    ],
)
def test_an_order_that_devices_cannot_keep_is_refused(order: Any, part: str) -> None:
    """Whatever the order lacks or lists wrongly is named, instead of a step of 0 ns; placers'
    evaluations refuse it, too."""
    problem = hand_problem(CHAIN, hand_machine(TWO))
    placement = Placement(np.zeros(5, np.int32), None, order)
    with pytest.raises(ProblemError, match=part):
        simulate(problem, placement)
    with pytest.raises(ProblemError, match=part):
        Evaluator(problem, Budget(evaluations=5))(placement)
    right = simulate(problem, Placement(np.zeros(5, np.int32), None, ((1, 3, 4), ())))
    assert right.makespan_ns == 11


@pytest.mark.parametrize(
    ("devices", "priority", "part"),
    [
        ([0.0] * 5, None, "whole number per op"),
        ([0, 0, 0.5, 0, 0], None, "whole number per op"),
        ([math.nan] * 5, None, "whole number per op"),
        ([math.inf] * 5, None, "whole number per op"),
        ([False] * 5, None, "whole number per op"),
        ([0, 0, 0, 0, 2**32], None, "0 to 1, got 0 to 4294967296"),
        ([0, 0, 0, 0, -1], None, "0 to 1, got -1"),
        ([[0] * 5], None, "one per op"),
        ([0] * 5, [math.nan] * 5, "Priorities must be 5 integers"),
        ([0] * 5, [2**63] * 5, "Priorities must be 5 integers"),
        ([0, 0, 0, 0, 1], None, "'u' must sit with its colocation group"),
    ],
)
def test_a_placement_that_does_not_fit_the_problem_is_refused(
    devices: Any, priority: Any, part: str
) -> None:
    """Devices and priorities are whole numbers in range, and demands of the problem hold."""
    problem = hand_problem(CHAIN, hand_machine(TWO))
    given = None if priority is None else np.array(priority)
    with pytest.raises(ProblemError, match=part):
        simulate(problem, Placement(np.array(devices), given))


@pytest.mark.parametrize(
    "demands", [{"pins": {"b": "gpu:1"}}, {"exclude": ["gpu:0"]}, {"limits": {"gpu:0": 0}}]
)
def test_a_placement_against_a_demand_is_refused(demands: Any) -> None:
    """A pinned op elsewhere, or any op on a device that is not to be used."""
    problem = hand_problem(CHAIN, hand_machine(TWO), **demands)
    with pytest.raises(ProblemError, match="may not go to gpu:0"):
        simulate(problem, Placement(np.zeros(5, np.int32)))
