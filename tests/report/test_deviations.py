"""Planned beside measured times."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.report.steps import OP_NS, chain_graph, machine, make_problem, placed, rendered

from devplace.errors import InputError
from devplace.report import Deviation, deviations
from devplace.run.measured_timeline import MeasuredTimeline
from devplace.schedule import PlannedTransfer
from devplace.simulator import Timeline


def split_chain() -> Timeline:
    """Two layers on two devices: `f0` feeds `f1`, `d1` feeds `g0`."""
    problem = make_problem(chain_graph(2), machine())
    return placed(problem, {"layer1": "cuda:1", "loss": "cuda:1"}, "cuda:0").timeline


def as_planned(
    timeline: Timeline, **changes: Any
) -> tuple[MeasuredTimeline, list[PlannedTransfer]]:
    """A measured timeline equal to the plan, but for given changes (op name -> ns longer)."""
    graph = timeline.problem.graph
    start, finish = timeline.start_ns.copy(), timeline.finish_ns.copy()
    ran = {op for row in timeline.order for op in row}
    for index, op in enumerate(graph.ops):
        if index not in ran:
            start[index] = finish[index] = -1
        finish[index] += changes.get(op.name, 0)
    moved = timeline.transfers
    measured = MeasuredTimeline(
        start,
        finish,
        np.array([t.request_ns for t in moved], np.int64),
        np.array([t.arrival_ns + changes.get("transfer", 0) for t in moved], np.int64),
        timeline.makespan_ns + changes.get("step", 0),
    )
    sizes = graph.tensors
    return measured, [
        PlannedTransfer(t.tensor, t.src, t.dst, sizes[t.tensor].num_bytes) for t in moved
    ]


def test_a_step_as_planned_deviates_nowhere() -> None:
    """Every difference is zero, and nothing is missing."""
    timeline = split_chain()
    measured, sent = as_planned(timeline)
    found = deviations(timeline, measured, sent)
    rows = [found.step, *found.devices, *found.kinds, *found.ops, *found.transfers, *found.links]
    assert len(found.transfers) == 2
    assert {row.difference_ns for row in rows} == {0}
    assert found.missing == ()


def test_the_largest_deviation_comes_first_and_adds_up() -> None:
    """A slower op shows as itself, in its kind and in the work of its device; others wait less."""
    timeline = split_chain()
    measured, sent = as_planned(timeline, f1=3 * OP_NS, f0=-OP_NS // 2, step=2 * OP_NS)
    found = deviations(timeline, measured, sent)
    assert found.ops[0] == Deviation("f1", "cuda:1", 1, OP_NS, 4 * OP_NS)
    assert found.kinds[0] == Deviation("aten.f.default", "cuda:1", 1, OP_NS, 4 * OP_NS)
    assert found.ops[1].difference_ns == -OP_NS // 2
    by_device = {(row.name, row.where): row.difference_ns for row in found.devices}
    assert by_device == {
        ("work", "cuda:0"): -OP_NS // 2,
        ("wait", "cuda:0"): 5 * OP_NS // 2,
        ("work", "cuda:1"): 3 * OP_NS,
        ("wait", "cuda:1"): -OP_NS,
    }


def test_transfers_are_compared_per_tensor_and_per_link() -> None:
    """Time is from when a tensor is ready to when it has arrived; sizes are beside it."""
    timeline = split_chain()
    measured, sent = as_planned(timeline, transfer=500)
    found = deviations(timeline, measured, sent)
    assert {row.name for row in found.transfers} == {"f0", "d1"}
    assert {row.difference_ns for row in found.transfers} == {500}
    assert {row.where for row in found.links} == {"cuda:0->cuda:1", "cuda:1->cuda:0"}
    assert all(row.num_bytes == 100 for row in found.transfers)


def test_what_is_on_one_side_only_is_named() -> None:
    """An op that did not run and a transfer nobody planned are listed, not compared."""
    timeline = split_chain()
    measured, sent = as_planned(timeline)
    start = measured.start_ns.copy()
    op = timeline.problem.graph.op_index["f1"]
    start[op] = -1
    other = timeline.problem.graph.ops[op].outputs[0]
    sent[0] = sent[0]._replace(tensor=other)
    changed = MeasuredTimeline(
        start,
        measured.finish_ns,
        measured.transfer_start_ns,
        measured.transfer_finish_ns,
        measured.makespan_ns,
    )
    found = deviations(timeline, changed, sent)
    assert len(found.transfers) == 1
    assert "f1" in found.missing
    assert any(name.startswith("f1 cuda") for name in found.missing)
    assert any(name.startswith("f0 cuda") for name in found.missing)


def test_tables_and_json_hold_the_same_rows() -> None:
    """Shares are of the measured step, and long lists are cut."""
    timeline = split_chain()
    measured, sent = as_planned(timeline, f1=OP_NS, step=OP_NS)
    found = deviations(timeline, measured, sent)
    data = found.as_json(most=2)
    assert len(data["ops"]) == 2
    assert data["ops"][0]["share"] == OP_NS / measured.makespan_ns
    text = "\n".join(rendered(table, 100) for table in found.tables(2))
    assert "Ops, 2 largest of" in text
    assert "+1 ms" in text
    assert "aten.f.default" in text


def test_a_timeline_of_another_step_is_refused() -> None:
    """Ops and transfers must be those of the plan."""
    timeline = split_chain()
    measured, sent = as_planned(timeline)
    with pytest.raises(InputError, match="Pass `Schedule"):
        deviations(timeline, measured, sent[:1])
    other = make_problem(chain_graph(3), machine())
    with pytest.raises(InputError, match="must be of the planned graph"):
        deviations(placed(other).timeline, measured)
