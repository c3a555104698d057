"""Prices of the machine a step is planned for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from devplace import workloads
from devplace.cost.op_signature import op_calls
from devplace.cost.op_timing import Timing
from devplace.cost.profiled import KERNEL_GAP_NS, Profiled
from devplace.graph import OpGraph
from devplace.machine import Machine, presets
from devplace.run.probe import probe_key
from devplace.run.probe.kept_probe import keep_text
from devplace.step_capture import capture
from devplace.tune.kept_calibration import KIND
from devplace.tune.measured_costs import HOPPER, measured_machine, price, probed_machine
from tests.cost.timers import fake_times

OP_NS = 1_000


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    """A step as if captured for GPUs."""
    workload = workloads.build("rnnlm", size="small", device="meta")
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=0.01)
    found = capture(workload.model, workload.inputs, workload.loss_fn, optimizer)
    return replace(found, program=replace(found.program, device="cuda"))


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """One GPU beside a CPU, whose every op takes OP_NS in a chain; an empty cache."""

    fake_times(monkeypatch, lambda call: Timing(OP_NS), "a card")
    monkeypatch.setattr("devplace.run.cuda.device_memory.held_bytes", lambda device: 0)
    monkeypatch.setattr("devplace.run.probe.driver_version", lambda: "1.0")
    monkeypatch.setenv("DEVPLACE_CACHE", str(tmp_path))
    return presets.get("h200x1")


def test_the_gap_is_a_setting_of_the_profile(graph: OpGraph, card: Machine) -> None:
    """Ops that work cost a chain's time and the gap on the GPU, and are marked there; nothing else
    is, neither views and sources nor what a CPU runs."""
    works = sorted(op_calls(graph))
    free = sorted(set(range(len(graph.ops))) - set(works))
    gpu, cpu = card.device_names.index("cuda:0"), card.device_names.index("cpu:0")
    for settings, gap_ns in ({}, KERNEL_GAP_NS), ({"kernel_gap_ns": 333}, 333):
        table = Profiled(cache=None, **settings)(graph, card)
        assert (table.compute_ns[works, gpu] == OP_NS + gap_ns).all()
        assert (table.compute_ns[free, gpu] == 0).all()
        assert table.kernel_gap_ns == gap_ns
        assert table.kernels is not None
        assert table.kernels[works, gpu].all()
        assert not table.kernels[free].any()
        assert not table.kernels[:, cpu].any()
    assert Profiled(cache=None, skip=("cuda:0",))(graph, card).kernels is None


def test_prices_hold_the_gap_kept_for_the_machine(graph: OpGraph, card: Machine) -> None:
    """Until one is kept that of Hopper serves; a given one comes first."""
    works, gpu = sorted(op_calls(graph)), card.device_names.index("cuda:0")
    first = price(graph, card, ("cpu:0",))
    assert (first.compute_ns[works, gpu] == OP_NS + HOPPER.kernel_gap_ns).all()
    kept = msgspec.structs.replace(HOPPER, kernel_gap_ns=1_234, num_gap_steps=4)
    assert keep_text(KIND, probe_key(card), msgspec.json.encode(kept).decode())
    assert (price(graph, card, ("cpu:0",)).compute_ns[works, gpu] == OP_NS + 1_234).all()
    given = price(graph, card, ("cpu:0",), 5)
    assert (given.compute_ns[works, gpu] == OP_NS + 5).all()
    assert np.array_equal(given.with_kernel_gap(850).compute_ns, first.compute_ns)


def test_a_machine_with_one_gpu_is_not_probed(card: Machine) -> None:
    """It has no links between GPUs: as detected, so its fingerprint is that of before."""
    assert measured_machine(card) is card
    assert probed_machine(card) is card
