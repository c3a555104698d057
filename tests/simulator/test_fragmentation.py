"""What a step reserves beyond what is in use at its peak."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import problems, random_placement

from devplace.cost.analytic import Analytic
from devplace.graph import OpGraph
from devplace.graph.serialize import from_json
from devplace.machine import presets
from devplace.problem import Placement, Problem
from devplace.simulator import Timeline, simulate
from devplace.simulator.critical import device_orders
from devplace.simulator.fragmentation import StepHeaps
from devplace.simulator.in_order import simulate_in_order
from devplace.testing import hand_machine, hand_placement, hand_problem

MIB = 2**20
ROOM = {"gpu:0": 1000 * MIB, "gpu:1": 1000 * MIB}


def sized(text: str, memory: dict[str, int] = ROOM) -> Problem:
    """A problem with sizes such as `20M`, on a machine that torch runs on."""
    text = re.sub(r"(\d+)M\b", lambda size: str(int(size[1]) * MIB), text)
    problem = hand_problem(text, hand_machine(memory))
    return replace(problem, costs=replace(problem.costs, has_gaps=True))


def heaps(timeline: Timeline) -> list[int]:
    """What each device's heap reserves, MiB."""
    problem, device, run = timeline.problem, timeline.task_devices, timeline.run
    orders = device_orders(problem.core, device, run)
    steps = StepHeaps(problem, device, orders)
    return [steps.heap_bytes(d) // MIB for d in range(len(orders))]


def on_one(text: str) -> Timeline:
    """The step on the first device."""
    problem = sized(text)
    return simulate(problem, hand_placement(problem, {}))


def test_a_chain_of_whole_pages_has_no_gaps() -> None:
    """Each tensor takes the place of the last but one: what is reserved is what is in use."""
    timeline = on_one(
        """
        x = input bytes=512
        a = f(x) bytes=20M ns=1
        b = f(a) bytes=20M ns=1
        c = f(b) bytes=20M ns=1
        d = f(c) bytes=20M ns=1
        """
    )
    assert timeline.gap_bytes.tolist() == [0, 0]
    assert timeline.peak_bytes.tolist() == [40 * MIB + 512, 0]


def test_a_hole_that_is_too_small_is_a_gap() -> None:
    """40 MiB do not fit where 30 were: 100 are reserved for the 60 in use, and 2 for the loss."""
    timeline = on_one(
        """
        x = input bytes=512
        a = f(x) bytes=30M ns=1
        b = f(a) bytes=20M ns=1
        c = f(b) bytes=40M ns=1
        loss = f(b, c) bytes=512 ns=1
        """
    )
    assert timeline.run.peak_bytes[0] == 60 * MIB + 1024
    assert timeline.peak_bytes[0] == 102 * MIB + 512
    assert timeline.gap_bytes.tolist() == [42 * MIB - 512, 0]


def test_new_values_over_old_ones_take_nothing_of_the_heap() -> None:
    """Only the gradient does: the parameter is computed over the old one, and so is the product
    that state goes through."""
    text = """
        x = input bytes=512
        w = parameter bytes=20M
        m = state bytes=20M
        g = f(x, w) bytes=20M ns=1
        s = aten.mul.Tensor(m) bytes=20M ns=1
        n = {}(s, g) bytes=20M ns=1 replaces=m
        u = {}(w, g) bytes=20M ns=1 replaces=w
        """
    assert heaps(on_one(text.replace("{}", "aten.add.Tensor"))) == [20, 0]
    assert heaps(on_one(text.replace("{}", "sgd"))) == [40, 0]


def test_a_new_value_that_was_copied_back_gives_its_memory_free() -> None:
    """It is read where the old one was, so what comes next takes its place."""
    timeline = on_one(
        """
        w = parameter bytes=20M
        u = sgd(w) bytes=20M ns=1 replaces=w
        z = f(u) bytes=20M ns=1
        """
    )
    assert heaps(timeline) == [20, 0]


def test_workspace_is_taken_beside_outputs() -> None:
    """20 MiB of output and 20 of workspace make 40, which the next op has for itself."""
    timeline = on_one(
        """
        x = input bytes=512
        a = f(x) bytes=20M workspace_bytes=20M ns=1
        b = f(a) bytes=20M ns=1
        """
    )
    assert heaps(timeline) == [40, 0]


@pytest.mark.parametrize(("flops", "heap"), [(0, 42), (10**12, 22)])
def test_a_pushed_tensor_keeps_its_memory_until_it_is_joined(flops: int, heap: int) -> None:
    """After a long op the push of `a` should be over, and `b` lies where `a` did."""
    problem = sized(
        f"""
        x = input bytes=512
        a = f(x) bytes=20M ns=1
        r = f(a) bytes=512 ns=1
        c = f(x) bytes=512 flops={flops} ns=2
        b = f(c) bytes=20M ns=1
        """
    )
    placement = hand_placement(problem, {"r": "gpu:1"}, first=("a", "c", "b", "r"))
    assert heaps(simulate(problem, placement))[0] == heap


def test_without_torch_there_are_no_gaps() -> None:
    """Peaks of described machines are what is in use."""
    problem = sized("a = f bytes=30M ns=1")
    plain = replace(problem, costs=replace(problem.costs, has_gaps=False))
    found = [simulate(p, hand_placement(p, {})) for p in (problem, plain)]
    assert [timeline.peak_bytes[0] // MIB for timeline in found] == [40, 30]
    assert found[1].gap_bytes.tolist() == [0, 0]


def test_pools_shared_by_devices_include_the_gaps() -> None:
    """What a device reserves counts in its memory pool of the machine."""
    machine = hand_machine(ROOM, pools={"ram": (35 * MIB, ("gpu:0", "gpu:1"))})
    problem = hand_problem(f"a = f bytes={30 * MIB} ns=1", machine)
    problem = replace(problem, costs=replace(problem.costs, has_gaps=True))
    timeline = simulate(problem, hand_placement(problem, {}))
    assert timeline.pool_peak_bytes.tolist() == [40 * MIB]
    assert timeline.missing_bytes == {"ram": 5 * MIB}


@given(problem=problems, seed=st.integers(0, 2**32 - 1))
def test_gaps_are_never_negative(problem: Problem, seed: int) -> None:
    """On random problems gaps only add, only where a GPU runs something."""
    problem = replace(problem, costs=replace(problem.costs, has_gaps=True))
    timeline = simulate(problem, random_placement(problem, np.random.default_rng(seed)))
    assert (timeline.gap_bytes >= 0).all()
    assert (timeline.peak_bytes == timeline.run.peak_bytes + timeline.gap_bytes).all()
    for d, order in enumerate(timeline.order):
        if not order or problem.machine.devices[d].kind == "cpu":
            assert timeline.gap_bytes[d] == 0


def test_heaps_of_a_recorded_step_are_predicted_from_its_plan() -> None:
    """RNNLM on two H200: graph, placement and order alone give the heaps that torch had."""
    path = Path(__file__).parent / "data/rnnlm_2.json.gz"
    record = json.loads(gzip.decompress(path.read_bytes()))
    graph = from_json(json.dumps(record["graph"]))
    machine = presets.get("h200x2")  # its first device is the CPU
    problem = Problem(graph, machine, replace(Analytic()(graph, machine), has_gaps=True))
    placement = Placement(np.array(record["placement"], np.int32) + 1)
    timeline = simulate_in_order(problem, placement, [[], *record["order"]])
    expected = [sum(record["heap_bytes"][d].values()) // MIB for d in ("0", "1")]
    assert heaps(timeline)[1:] == expected


@pytest.mark.parametrize(("workspace", "spare"), [("18M", 0), ("20M", 40)])
def test_large_workspaces_may_lie_in_several_pieces(workspace: str, spare: int) -> None:
    """40 MiB more are reserved where an op takes 20 MiB or more beside its outputs, not below."""
    timeline = on_one(
        f"""
        x = input bytes=512
        a = f(x) bytes=20M workspace_bytes={workspace} ns=1
        b = f(a) bytes=20M ns=1
        """
    )
    held = 512
    reserved = int(timeline.run.peak_bytes[0]) + int(timeline.gap_bytes[0])
    assert reserved == held + (heaps(timeline)[0] + spare) * MIB


def test_an_op_without_outputs_lies_nowhere() -> None:
    """An elementwise op that makes nothing has no output that could lie in a source."""
    problem = sized(
        """
        w = parameter bytes=4M
        a = f(w) bytes=4M ns=1
        n = aten.add.Tensor(w, a) bytes=1 ns=1
        b = f(a) bytes=4M ns=1 replaces=w
        """
    )
    graph = problem.graph
    ops = [msgspec.structs.replace(op, outputs=()) if op.name == "n" else op for op in graph.ops]
    made = [graph.tensors[t] for op in ops for t in op.outputs]
    at = {tensor.name: index for index, tensor in enumerate(made)}

    def renumbered(ids: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(at[graph.tensors[t].name] for t in ids)

    ops = [
        msgspec.structs.replace(op, inputs=renumbered(op.inputs), outputs=renumbered(op.outputs))
        for op in ops
    ]
    results = tuple(
        msgspec.structs.replace(r, tensor=renumbered((r.tensor,))[0]) for r in graph.results
    )
    silent = replace(problem, graph=OpGraph("silent", tuple(ops), tuple(made), results))
    timeline = simulate(silent, hand_placement(silent, {}))
    assert (timeline.gap_bytes >= 0).all()
