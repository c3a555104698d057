"""Chrome traces."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.report.steps import OP_NS, chain_graph, machine, make_problem, placed
from tests.strategies import problems, random_placement

from devplace.errors import InputError
from devplace.problem import Problem
from devplace.report import chrome_trace, measured_summary, not_observed, save_chrome_trace
from devplace.run.measured_timeline import MeasuredTimeline
from devplace.schedule import PlannedTransfer
from devplace.simulator import Timeline, simulate


def rows_of(trace: dict[str, Any], process: str) -> dict[str, list[dict[str, Any]]]:
    """Slices per row name of one process."""
    names: dict[tuple[int, int], str] = {}
    pids = {}
    for event in trace["traceEvents"]:
        if event["name"] == "process_name":
            pids[event["args"]["name"]] = event["pid"]
        if event["name"] == "thread_name":
            names[event["pid"], event["tid"]] = event["args"]["name"]
    rows: dict[str, list[dict[str, Any]]] = {
        name: [] for (pid, _), name in names.items() if pid == pids[process]
    }
    for event in trace["traceEvents"]:
        if event["ph"] == "X" and event["pid"] == pids[process]:
            rows[names[event["pid"], event["tid"]]].append(event)
    return rows


def as_measured(timeline: Timeline, delay_ns: int = 0) -> MeasuredTimeline:
    """A measurement in which everything happens as planned, a little later."""
    runs = np.zeros(len(timeline.devices), bool)
    runs[[op for row in timeline.order for op in row]] = True
    arrivals = [(t.start_ns, t.arrival_ns) for t in timeline.transfers]
    times = np.array(arrivals, np.int64).reshape(-1, 2) + delay_ns
    return MeasuredTimeline(
        np.where(runs, timeline.start_ns + delay_ns, -1),
        np.where(runs, timeline.finish_ns + delay_ns, -1),
        times[:, 0],
        times[:, 1],
        timeline.makespan_ns + delay_ns,
    )


@given(problem=problems, seed=st.integers(0, 2**32 - 1))
@pytest.mark.slow
def test_s74_rows_do_not_overlap_and_sum_to_the_report(problem: Problem, seed: int) -> None:
    """On random problems slices of a row do not overlap, and busy sums per device are exact."""
    timeline = simulate(problem, random_placement(problem, np.random.default_rng(seed)))
    trace = chrome_trace(timeline, as_measured(timeline, 5))
    for process in ("planned", "measured"):
        busy: dict[str, int] = defaultdict(int)
        for name, slices in rows_of(trace, process).items():
            spans = [(round(e["ts"] * 1000), round(e["dur"] * 1000)) for e in slices]
            ends = [start + length for start, length in spans]
            assert all(end <= start for end, (start, _) in zip(ends, spans[1:], strict=False)), name
            busy[name.split(" ")[0]] += sum(length for _, length in spans)
        names = problem.machine.device_names
        assert [busy[name] for name in names] == timeline.busy_ns.tolist()


def test_s74_trace_has_a_row_per_device_and_link_and_memory_counters(tmp_path: Path) -> None:
    """The file is JSON with device rows, link rows, op args and one memory counter per device."""
    problem = make_problem(chain_graph(2), machine(2))
    timeline = placed(problem, {"layer0": "cuda:0"}, "cuda:1").timeline
    save_chrome_trace(tmp_path / "trace.json", timeline)
    trace = json.loads((tmp_path / "trace.json").read_text())
    rows = rows_of(trace, "planned")
    assert list(rows) == ["cuda:0", "cuda:1", "link cuda:0->cuda:1", "link cuda:1->cuda:0"]
    first = rows["cuda:0"][0]
    assert (first["name"], first["ts"], first["dur"]) == ("f0", 0.0, 1000.0)
    assert first["args"] == {
        "module": "layer0",
        "target": "aten.f.default",
        "source": "model.py:1",
        "stage": "forward",
        "bytes": 100,
        "flops": 0,
        "critical": True,
    }
    (sent,) = rows["link cuda:0->cuda:1"]
    assert (sent["name"], sent["ts"], sent["dur"]) == ("f0", 1000.0, 0.1)
    assert sent["args"]["arrives_us"] == 1001.1
    counters = {e["name"]: e["args"]["bytes"] for e in trace["traceEvents"] if e["ph"] == "C"}
    assert set(counters) == {"memory cuda:0", "memory cuda:1"}


def test_an_arrow_leads_from_maker_to_reader() -> None:
    """`f0` is sent once, from the end of its slice over the link to `f1`; what comes back is
    `d1`, for `g0`. Each point lies in a slice of its row."""
    problem = make_problem(chain_graph(2), machine(2))
    timeline = placed(problem, {"layer0": "cuda:0"}, "cuda:1").timeline
    transfers = [PlannedTransfer(t.tensor, t.src, t.dst, 100) for t in timeline.transfers]
    events = chrome_trace(timeline, as_measured(timeline, OP_NS), transfers)["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    for process in (1, 2):
        ways: dict[int, list[tuple[str, str]]] = defaultdict(list)
        for event in events:
            if event["pid"] == process and event["ph"] in "stf":
                (inside,) = [
                    one["name"]
                    for one in slices
                    if (one["pid"], one["tid"]) == (process, event["tid"])
                    and one["ts"] <= event["ts"] < one["ts"] + one["dur"]
                ]
                ways[event["id"]].append((event["ph"], inside))
        assert list(ways.values()) == [
            [("s", "f0"), ("t", "f0"), ("f", "f1")],
            [("s", "d1"), ("t", "d1"), ("f", "g0")],
        ]


def test_s71_planned_and_observed_stand_side_by_side() -> None:
    """Every op that ran is in a row of its device in both processes; the transfers are, too."""
    problem = make_problem(chain_graph(2), machine(2))
    timeline = placed(problem, {"layer0": "cuda:0"}, "cuda:1").timeline
    transfers = [PlannedTransfer(t.tensor, t.src, t.dst, 100) for t in timeline.transfers]
    trace = chrome_trace(timeline, as_measured(timeline, OP_NS), transfers)
    planned, seen = rows_of(trace, "planned"), rows_of(trace, "measured")
    assert list(planned) == list(seen)
    for name, slices in planned.items():
        assert [e["name"] for e in slices] == [e["name"] for e in seen[name]]
    assert seen["cuda:0"][0]["args"]["planned_us"] == 0.0
    assert not_observed(timeline, as_measured(timeline)) == []


def test_s71_an_op_that_was_not_observed_is_told() -> None:
    """An op without a measurement is named, and left out of the measured rows."""
    timeline = placed(make_problem(chain_graph(1), machine(1))).timeline
    measured = as_measured(timeline)
    measured.start_ns[timeline.problem.graph.op_index["g0"]] = -1
    assert not_observed(timeline, measured) == ["g0"]
    assert "1 ops were planned but not observed: g0" in measured_summary(timeline, measured)
    names = [e["name"] for e in rows_of(chrome_trace(timeline, measured), "measured")["cuda:0"]]
    assert names == ["f0", "loss", "u0"]


def test_measured_summary_puts_figures_side_by_side() -> None:
    """Step and busy time, predicted and measured, with the error of the prediction."""
    timeline = placed(make_problem(chain_graph(1), machine(1))).timeline
    first, second = measured_summary(timeline, as_measured(timeline, OP_NS)).splitlines()
    assert first.split() == ["step", "4", "ms", "predicted", "5", "ms", "measured", "-20%"]
    assert second.split() == [
        "cuda:0",
        "busy",
        "4",
        "ms",
        "predicted",
        "4",
        "ms",
        "measured",
        "+0%",
    ]


def test_measurements_of_another_plan_are_refused(tmp_path: Path) -> None:
    """Wrong numbers of ops or transfers, and a path that cannot be written, are user errors."""
    timeline = placed(make_problem(chain_graph(1), machine(1))).timeline
    other = placed(make_problem(chain_graph(2), machine(1))).timeline
    with pytest.raises(InputError, match="must be of the planned graph"):
        chrome_trace(timeline, as_measured(other))
    with pytest.raises(InputError, match="must be those of the schedule"):
        chrome_trace(timeline, as_measured(timeline), [PlannedTransfer(0, 0, 0, 1)])
    with pytest.raises(InputError, match="Cannot write trace"):
        save_chrome_trace(tmp_path / "no" / "trace.json", timeline)
