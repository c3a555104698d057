"""Explanations."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.report.steps import (
    ACTIVATION,
    OP_NS,
    WEIGHT,
    chain_graph,
    machine,
    make_problem,
    placed,
    rendered,
    wide_graph,
)
from tests.strategies import problems, random_placement

from devplace.graph import OpGraph
from devplace.placers import Search, Single, place
from devplace.problem import Problem
from devplace.report import Explanation, explain
from devplace.simulator import simulate
from devplace.testing import hand_machine, hand_problem


def forward_chain(num_layers: int) -> OpGraph:
    """The forward part of a chain, an inference."""
    graph = chain_graph(num_layers)
    end = graph.op_index["loss"] + 1
    return OpGraph("chain", graph.ops[:end], graph.tensors[:end], graph.results[:1])


def test_s21_pure_chain_has_no_gain() -> None:
    """A chain on two devices: no gain, and the critical path is named as the reason."""
    problem = make_problem(forward_chain(4), machine(2))
    result = place(problem, Single(), "2ev")
    found = explain(result.timeline)
    assert found.limits.limited_by == "chain"
    assert "No gain from 2 devices" in found.text
    assert "critical path" in found.text
    assert found.limits.chain_ns == result.step_ns == 5 * OP_NS


def test_s21_a_chain_spread_over_devices_is_told_to_be_slower() -> None:
    """A chain that was split all the same: the text compares it with one device."""
    problem = make_problem(forward_chain(4), machine(2))
    found = explain(placed(problem, {"layer1": "cuda:0", "layer3": "cuda:0"}, "cuda:1").timeline)
    assert "this plan takes" in found.text
    assert "one device takes 5 ms" in found.text


LAYERS = "x = input bytes=1\n" + "\n".join(
    f"w{k} = parameter bytes=100 module=l.{k}\n"
    f"y{k} = f(x, w{k}) bytes=1 ns=1000 module=l.{k}\n"
    f"u{k} = sgd_(w{k}, y{k}) bytes=0 ns=0 replaces=w{k} module=l.{k}"
    for k in range(4)
)
"""Four layers beside one another, each of 102 bytes."""


def idle_text_of(
    memory: dict[str, int], unsupported: Any = None, text: str = LAYERS, **demands: Any
) -> str:
    """Why devices are not used in what the search finds for independent layers."""
    where = hand_machine(memory, unsupported=unsupported)
    problem = hand_problem(text, where, **demands)
    text = explain(place(problem, Search(), "200ev").timeline).text
    return text.partition("Not used: ")[2].partition(". Status")[0]


def test_a_device_is_idle_for_the_reason_that_holds() -> None:
    """Too small by so many bytes, pinned away, no kernel, excluded, or a limit of 0: none of these
    is called too slow."""
    memory = {"cuda:0": 1000, "cuda:1": 1000}
    assert idle_text_of(memory) == ""
    small = idle_text_of({"cuda:0": 1000, "cuda:1": 101})
    assert small == "cuda:1 (too small by 1 B, even for the smallest part of the work)"
    limited = idle_text_of(memory, limits={"cuda:1": 90})
    assert limited.startswith("cuda:1 (too small by 12 B")
    pinned = idle_text_of(memory, pins={"l.*": "cuda:0"})
    assert pinned == "cuda:1 (pins keep all work elsewhere)"
    assert idle_text_of(memory, limits={"cuda:1": 0}) == "cuda:1 (limit of 0)"
    assert idle_text_of(memory, exclude=["cuda:1"]) == "cuda:1 (excluded)"
    stuck = idle_text_of(memory, unsupported={"cuda:1": ("f",)})
    assert stuck == "cuda:1 (no kernel for any op)"


def test_a_device_is_too_slow_to_help_only_where_it_is() -> None:
    """A hundred times slower: what it could take over is below what counts. Equal, but behind a
    link that takes longer than the work: not slow."""
    slow = LAYERS.replace("ns=1000", "ns=1000,200000")
    memory = {"cuda:0": 1000, "cpu:0": 1000}
    assert idle_text_of(memory, text=slow) == "cpu:0 (too slow to help)"
    far = hand_machine({"cuda:0": 1000, "cuda:1": 1000}, latency_ns=10**6)
    joined = LAYERS + "\nz = join(y0, y1, y2, y3) bytes=1 ns=1 result=loss"
    joined = joined.replace("f(x, w", "f(s, w").replace("\n", "\ns = f(x) bytes=1 ns=1\n", 1)
    found = explain(place(hand_problem(joined, far), Search(), "200ev").timeline)
    assert found.limits.single_ns == found.step_ns
    assert "too slow" not in found.text


def test_limits_tell_load_from_path_and_transfers() -> None:
    """Busy devices: load. Devices that wait for one another: path. Slow links: transfers."""
    wide = make_problem(wide_graph(8), machine(2))
    even = placed(wide, {f"b{k}": f"cuda:{k % 2}" for k in range(8)}).timeline
    assert explain(even).limits.limited_by == "load"
    chain = make_problem(chain_graph(3), machine(2))
    split = placed(chain, {"layer0": "cuda:0"}, "cuda:1").timeline
    assert explain(split).limits.limited_by == "critical path"
    slow = machine(2)
    links = tuple(msgspec.structs.replace(link, latency_ns=5 * OP_NS) for link in slow.links)
    far = make_problem(chain_graph(3), type(slow)("far", slow.devices, links))
    found = explain(placed(far, {"layer0": "cuda:0"}, "cuda:1").timeline)
    assert found.limits.limited_by == "transfers"
    assert found.limits.path_wait_ns >= 10 * OP_NS


def test_s26_parameter_bytes_that_cross_links_are_told() -> None:
    """Weights used where they rest: zero bytes cross. A forward op elsewhere: its weight does."""
    problem = make_problem(chain_graph(2), machine(2))
    at_rest = explain(placed(problem, {"layer0": "cuda:0"}, "cuda:1").timeline)
    assert at_rest.parameter_bytes == 0
    assert "parameters cross" not in at_rest.text
    dragged = explain(placed(problem, {"f0": "cuda:0"}, "cuda:1").timeline)
    assert dragged.parameter_bytes == WEIGHT
    assert "1000 B of parameters cross links every step" in dragged.text


def test_s72_one_line_per_module_and_json_that_validates() -> None:
    """One row per module in model order, and JSON that decodes strictly into the same value."""
    problem = make_problem(chain_graph(3), machine(2))
    found = explain(placed(problem, {"layer0": "cuda:0"}, "cuda:1").timeline)
    assert [row.module for row in found.modules] == ["layer0", "layer1", "layer2", ""]
    assert msgspec.json.decode(found.to_json(), type=Explanation) == found
    lines = rendered(found.table(), 100).splitlines()
    assert lines[0].split() == ["module", "device", "time", "critical", "received", "why"]
    assert lines[2].split()[:4] == ["layer0", "cuda:0", "3", "ms"]
    assert len([line for line in lines[2:] if line.strip()]) == 4
    assert set(found.to_dict()) == {
        "format", "version", "model", "machine", "step_ns", "lower_bound_ns", "limits", "text",
        "gap", "status",
        "parameter_bytes", "warnings", "modules",
    }  # fmt: skip
    assert found.to_dict()["modules"][0] == {
        "module": "layer0",
        "ops": 3,
        "devices": {"cuda:0": 3 * OP_NS},
        "time_ns": 3 * OP_NS,
        "critical_ns": OP_NS,
        "critical_share": OP_NS / found.step_ns,
        "received_bytes": ACTIVATION,
        "why": "with its parameter",
    }


@given(problem=problems, seed=st.integers(0, 2**32 - 1))
@pytest.mark.slow
def test_rows_account_for_all_time_and_bytes(problem: Problem, seed: int) -> None:
    """Times of the rows sum to the busy time, received bytes to the bytes moved."""
    timeline = simulate(problem, random_placement(problem, np.random.default_rng(seed)))
    found = explain(timeline)
    assert sum(row.time_ns for row in found.modules) == int(timeline.busy_ns.sum())
    assert sum(row.received_bytes for row in found.modules) == timeline.transfer_bytes
    assert sum(row.critical_ns for row in found.modules) == found.limits.path_compute_ns
    modules = {op.module for op in problem.graph.ops if not op.is_source}
    assert {row.module for row in found.modules} == modules


def test_reasons_of_modules() -> None:
    """Pinned, no kernel elsewhere, memory, and one device are told apart."""
    pinned = make_problem(chain_graph(2), machine(2), pins={"layer0": "cuda:0"})
    rows = explain(placed(pinned, {"layer0": "cuda:0"}, "cuda:1").timeline).modules
    assert rows[0].why == "pinned"
    stuck = make_problem(
        chain_graph(2), machine(1, with_cpu=True, unsupported=("aten.*",)), soft_pins=True
    )
    assert {r.why for r in explain(placed(stuck, default="cpu:0").timeline).modules} == {
        "no kernel elsewhere"
    }
    full = make_problem(chain_graph(2), machine(2, memory=3500))
    rows = explain(placed(full, {"layer0": "cuda:0"}, "cuda:1").timeline).modules
    assert [row.why for row in rows[:2]] == ["memory", "memory"]
    alone = make_problem(chain_graph(2), machine(2))
    assert {r.why for r in explain(placed(alone).timeline).modules} == {"one device"}


def test_s73_missing_kernel_is_a_warning_with_op_reason_and_cost() -> None:
    """An op without a kernel on the GPU: named, with its reason and what it costs in ms."""
    problem = make_problem(wide_graph(2), machine(1, with_cpu=True, unsupported=("aten.mm.*",)))
    (warning,) = explain(placed(problem, default="cpu:0").timeline).warnings
    assert (warning.reason, warning.ops, warning.cost_ns) == ("no kernel", ("b0", "b1"), 18 * OP_NS)
    assert "b0 (aten.mm.default in branch0)" in warning.text
    assert "run on cpu:0, not on cuda:0: cuda:0 has no kernel for them" in warning.text
    assert "costs 18 ms" in warning.text


def test_s73_memory_pins_and_choice_are_told_apart() -> None:
    """The same op on the CPU because the GPU is full, because of a pin, or as the placer likes."""
    on_cpu = {"b0": "cpu:0"}
    small = machine(1, memory=250, with_cpu=True)
    (full,) = explain(placed(make_problem(wide_graph(2), small), on_cpu).timeline).warnings
    assert (full.reason, full.cost_ns) == ("memory", 9 * OP_NS)
    assert "it does not fit on cuda:0" in full.text
    roomy = machine(1, with_cpu=True)
    pins = {"branch0": "cpu:0"}
    (pin,) = explain(
        placed(make_problem(wide_graph(2), roomy, pins=pins), on_cpu).timeline
    ).warnings
    assert pin.reason == "pinned"
    (choice,) = explain(placed(make_problem(wide_graph(2), roomy), on_cpu).timeline).warnings
    assert choice.reason == "placer"
    assert explain(placed(make_problem(wide_graph(2), roomy)).timeline).warnings == ()


def test_a_slow_device_that_shortens_the_step_says_so() -> None:
    """Work that a slow device takes off a busy fast one is told as such."""
    problem = make_problem(wide_graph(30), machine(1, with_cpu=True))
    (warning,) = explain(placed(problem, {"b29": "cpu:0"}).timeline).warnings
    assert warning.reason == "faster there"
    assert "to shorten the step, while cuda:0 is busy 100% of it" in warning.text
