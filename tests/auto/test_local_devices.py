"""Which machine is meant, and whether it is this one."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from devplace.auto.local_devices import (
    capture_device,
    excluded,
    find_machine,
    fuses,
    missing_here,
    require_here,
)
from devplace.errors import InputError
from devplace.machine import Machine, load_machine


def with_gpus(monkeypatch: pytest.MonkeyPatch, count: int, name: str) -> None:
    """Let torch report GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    properties = SimpleNamespace(name=name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)


def test_a_number_means_logical_cpu_devices() -> None:
    """Names, machines and numbers all give a machine."""
    assert find_machine(3).device_names == ("cpu:0", "cpu:1", "cpu:2")
    assert find_machine("cpux2").device_names == ("cpu:0", "cpu:1")
    machine = load_machine("cpux2")
    assert find_machine(machine) is machine


def test_cpus_beside_gpus_are_left_out_unless_wanted() -> None:
    """On a machine with GPUs the CPU is used only if asked for; on CPUs alone it always is."""
    gpus, cpus = load_machine("h100x2"), load_machine("cpux2")
    assert excluded(gpus, (), False) == ("cpu:0",)
    assert excluded(gpus, ("cuda:1",), False) == ("cuda:1", "cpu:0")
    assert excluded(gpus, (), True) == ()
    assert excluded(cpus, (), False) == ()
    assert excluded(gpus, ("cuda:0", "cuda:1"), False) == ("cuda:0", "cuda:1")


@pytest.mark.parametrize(
    ("count", "name", "words"),
    [
        (0, "", "has cuda:0 .*this computer has 0 CUDA devices"),
        (1, "NVIDIA H100 80GB HBM3", "has cuda:1 .*this computer has 1 CUDA device$"),
        (2, "NVIDIA A100-SXM4-80GB", "here it is a NVIDIA A100"),
        (2, "NVIDIA H100 80GB HBM3", "^$"),
    ],
)
def test_devices_must_be_those_of_this_computer(
    count: int, name: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too few GPUs and other cards are told; the same cards count as these."""
    with_gpus(monkeypatch, count, name)
    machine: Machine = load_machine("h100x2")
    reason = missing_here(machine)
    assert re.search(words, reason)
    assert capture_device(machine) == ("cpu" if reason else "cuda")
    if reason:
        with pytest.raises(InputError, match="Only devices of this computer"):
            require_here(machine)


def test_without_its_gpus_a_machine_is_logical_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """When all GPUs are excluded, the step is captured for the CPU and can run anywhere."""
    with_gpus(monkeypatch, 0, "")
    machine = load_machine("h100x1")
    assert missing_here(machine, ("cuda:0",)) == ""
    assert capture_device(machine, ("cuda:0",)) == "cpu"


@pytest.mark.parametrize(
    ("device", "reason", "expected"),
    [("cuda", "", True), ("cuda", "triton is not installed", False), ("cpu", "", False)],
)
def test_steps_for_gpus_are_fused_where_a_compiler_is(
    device: str, reason: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain without a compiler, and on CPUs whatever is there."""
    monkeypatch.setattr("devplace.kernels.fused.why_not_compiled", lambda name: reason)
    assert fuses(device) is expected
