"""Reports of fused steps speak of modules as before."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from tests.fused_steps import FUSIBLE, LAYERS, TRAINING, fusible
from tests.report.test_deviations import as_planned

from devplace import workloads
from devplace.cost import CostTable
from devplace.cost.analytic import Analytic
from devplace.graph import OpGraph
from devplace.graph.fusion import fuse
from devplace.machine import Machine, load_machine
from devplace.placers import Even, Single, place
from devplace.problem import Problem
from devplace.report import (
    chrome_trace,
    deviations,
    device_map,
    explain,
    html_report,
    memory_rows,
)
from devplace.report.fallback import fallbacks
from devplace.report.what_if import changes
from devplace.simulator import Timeline, simulate
from devplace.step_capture import capture
from devplace.testing import hand_machine, hand_placement


def priced(graph: OpGraph, machine: Machine, ns: dict[str, int], **demands: Any) -> Problem:
    """A problem in which named ops take so long, on a CPU ten times that."""
    slow = [10 if device.kind == "cpu" else 1 for device in machine.devices]
    rows = [[ns.get(op.name, 0) * factor for factor in slow] for op in graph.ops]
    return Problem(graph, machine, CostTable(np.array(rows, np.int64), "hand"), **demands)


def layers(devices: dict[str, str], **demands: Any) -> Timeline:
    """The fused steps of LAYERS: products of 10 ns, the group of 6."""
    machine = demands.pop("machine", None) or hand_machine({"gpu:0": 10**6, "gpu:1": 10**6})
    problem = priced(fuse(fusible(LAYERS)), machine, {"h": 10, "fused_r": 6, "y": 10}, **demands)
    return simulate(problem, hand_placement(problem, devices))


def test_half_the_work_of_a_module_is_half_of_its_share_of_a_group() -> None:
    """Of 60 ns 40 are the second layer's and 20 the third's: half of these are saved."""
    machine = hand_machine({"gpu:0": 10**6})
    problem = priced(fuse(fusible(LAYERS)), machine, {"h": 1, "fused_r": 60, "y": 1})
    found = {change.what: change.step_ns for change in changes(place(problem, Single(), "1ev"))}
    assert found == {
        "gpu:0 twice as fast": 30,
        "half the work in two": 42,
        "half the work in three": 52,
    }


def test_explain_shares_the_time_of_a_group() -> None:
    """6 ns: 4 for the member that moves 200 bytes, 2 for the one that moves 100, none for views."""
    timeline = layers({})
    rows = {row.module: row for row in explain(timeline).modules}
    assert {name: row.time_ns for name, row in rows.items()} == {
        "one": 10, "two": 4, "flat": 0, "three": 2, "four": 10
    }  # fmt: skip
    assert {name: row.ops for name, row in rows.items()} == {
        "one": 1, "two": 1, "flat": 0, "three": 1, "four": 1
    }  # fmt: skip
    assert sum(row.critical_ns for row in rows.values()) == timeline.makespan_ns == 26
    assert explain(timeline).limits.path_modules["three"] == 2


def test_received_bytes_count_for_the_member_that_reads() -> None:
    """The product crosses to the group's device for the first member that reads it."""
    found = explain(layers({"fused_r": "gpu:1", "y": "gpu:1"}))
    received = {row.module: row.received_bytes for row in found.modules}
    assert received == {"one": 0, "two": 100, "flat": 0, "three": 0, "four": 0}


def test_a_pin_of_one_member_s_module_explains_all_of_them() -> None:
    """Modules of a pinned group are where they are because of the pin."""
    timeline = layers({"fused_r": "gpu:1"}, pins={"t*": "gpu:1"})
    why = {row.module: row.why for row in explain(timeline).modules}
    assert (why["two"], why["three"]) == ("pinned", "pinned")
    assert why["one"] != "pinned"


@pytest.mark.parametrize("name", ["resnet-50", "gpt-2", "nmt-2", "bert-base"])
@pytest.mark.slow
def test_explain_lists_the_modules_of_the_plain_step(name: str) -> None:
    """No module vanishes, though many have no op that stands for a group; times add up."""
    workload = workloads.build(name, size="small", device="meta")
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=0.1)
    graph = capture(workload.model, workload.inputs, workload.loss_fn, optimizer, fuse=True)
    machine = load_machine("k40x2")
    assert graph.plain is not None
    modules, maps = [], []
    for one in (graph, graph.plain):
        problem = Problem(one, machine, Analytic()(one, machine))
        result = place(problem, Even(), "1ev", allow_infeasible=True)
        found = explain(result.timeline)
        modules.append({row.module for row in found.modules})
        spent = result.timeline.finish_ns - result.timeline.start_ns
        works = [k for k, op in enumerate(one.ops) if not op.is_source]
        assert sum(row.time_ns for row in found.modules) == spent[works].sum()
        maps.append(device_map(place(problem, Single(), allow_infeasible=True).timeline))
    standing = {op.module for op in graph.ops if not op.is_source}
    assert modules[0] == modules[1]
    assert standing <= modules[0]
    assert maps[0] == maps[1]


def test_a_trace_has_a_group_as_one_slice_with_its_modules() -> None:
    """Args name the modules and the first members; plain ops have no such args."""
    events = {e["name"]: e for e in chrome_trace(layers({}))["traceEvents"] if e["ph"] == "X"}
    args = events["fused_r"]["args"]
    assert args["modules"] == ["two", "flat", "three"]
    assert args["members"] == ["r", "v", "m"]
    assert args["num_members"] == 3
    assert "members" not in events["h"]["args"]


def test_a_long_group_names_its_first_members() -> None:
    """Eight members are named, and all are counted, in traces and on the page."""
    body = "\n".join(f"m{k} = relu(m{k - 1}) bytes=4 module=deep.{k}" for k in range(1, 12))
    text = f"x = input bytes=4\nm0 = mm(x) bytes=4\n{body}\ny = mm(m11) bytes=4 result=output"
    problem = priced(fuse(fusible(text)), hand_machine({"gpu:0": 99}), {"fused_m1": 5})
    result = place(problem, Single(), "1ev")
    events = chrome_trace(result.timeline)["traceEvents"]
    (args,) = [e["args"] for e in events if e["name"] == "fused_m1" and e["ph"] == "X"]
    assert (len(args["members"]), args["num_members"], len(args["modules"])) == (8, 11, 11)
    page = html_report(result)
    assert "m8 and 3 more, of deep.1, deep.2, deep.3, deep.4 and 7 more" in page
    assert all(f"deep.{k}" in page for k in range(1, 12))


def test_deviations_name_the_modules_of_a_group() -> None:
    """Rows of groups have modules, kinds what the members call; both are in the JSON form."""
    timeline = layers({})
    measured, sent = as_planned(timeline, fused_r=5)
    found = deviations(timeline, measured, sent)
    (row,) = [row for row in found.ops if row.name == "fused_r"]
    assert (row.modules, row.about) == (("two", "flat", "three"), "two, flat and 1 more")
    (kind,) = [row for row in found.kinds if row.name.startswith("fused.")]
    assert kind.about == "relu, mul"
    data = json.loads(json.dumps(found.as_json()))
    assert data["ops"][0]["modules"] == ["two", "flat", "three"]
    assert all("modules" not in row for row in data["ops"][1:])
    assert "about" not in data["step"]


def test_a_group_falls_back_for_one_member_without_a_kernel() -> None:
    """The reason is the missing kernel, and the text names calls and modules of the group."""
    machine = hand_machine({"gpu:0": 10**6, "cpu:0": 10**6}, unsupported={"gpu:0": ("mul",)})
    timeline = layers({"fused_r": "cpu:0"}, machine=machine)
    (found,) = fallbacks(timeline, timeline.makespan_ns)
    assert found.reason == "no kernel"
    assert "fused_r (relu, mul in two, flat and 1 more) runs on cpu:0" in found.text
    assert "gpu:0 has no kernel for it; costs" in found.text


def test_terms_of_a_gradient_are_gradients_also_where_a_group_updates() -> None:
    """Sum and update are one op; what it reads are the gradient's terms, as on the plain graph."""
    plain = fusible(TRAINING)
    fused = fuse(plain)
    (group,) = [op for op in fused.ops if op.members]
    assert [m.name for m in group.members] == ["g", "u"]
    machine = hand_machine({"cpu:0": 10**6})
    parts = []
    for graph in (plain, fused):
        work = {op.name: 5 for op in graph.ops if not op.is_source}
        problem = priced(graph, machine, work)
        (row,) = memory_rows(simulate(problem, hand_placement(problem, {})))
        parts.append(row.parts)
    assert parts[0]["gradients"] >= parts[1]["gradients"] == 16
    assert parts[1]["activations"] == 8  # the loss


def test_a_page_of_a_fused_step_has_all_modules() -> None:
    """The table of modules has those that only groups of others hold."""
    problem = layers({}).problem
    page = html_report(place(problem, Single(), "1ev"))
    assert all(f">{name}<" in page for name in ("one", "two", "flat", "three", "four"))


def test_the_helper_s_targets_are_fused() -> None:
    """Both made-up names and ATen's are marked."""
    assert {op.target for op in fusible(LAYERS).ops if op.is_fusible} <= set(FUSIBLE)
