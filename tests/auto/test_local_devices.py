"""Which machine is meant, and whether it is this one."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from devplace.auto.local_devices import (
    capture_device,
    find_machine,
    fuses,
    missing_here,
    require_here,
)
from devplace.auto.planning import find_target
from devplace.errors import InputError, PlanMismatchError, ProblemError
from devplace.machine import Machine, load_machine
from tests.tune.steps import captured


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


def test_cpus_beside_gpus_are_left_out_unless_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside GPUs, here or elsewhere, the CPU is used if asked for or where a pin names it, on CPUs
    alone always."""
    with_gpus(monkeypatch, 2, "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr("devplace.kernels.fused.why_not_compiled", lambda name: "none here")

    def left(*demands: Any, **options: Any) -> tuple[str, ...]:
        found = find_target("h100x2", *demands, **options)
        assert set(found.left_out) <= set(found.exclude) <= set(found.unused)
        return found.left_out

    assert left() == left(runs=True) == ("cpu:0",)
    assert left({}, {}, ["cuda:1"]) == ("cpu:0",)
    assert left(uses_cpu=True) == ()
    assert left({}, {"embed": "cpu"}) == ()
    assert left({}, {}, ["cpu"]) == ()
    assert left({}, {}, ["cuda:0", 1]) == ()
    assert left({"cuda:0": 0, "cuda:1": 0}) == ()
    assert find_target("cpux2").left_out == ()
    target = find_target("h100x2", {"cuda:1": "0"}, device="cuda")
    assert (target.exclude, target.unused) == (("cpu:0",), ("cpu:0", "cuda:1"))
    with_gpus(monkeypatch, 0, "")
    assert left() == ("cpu:0",)
    assert left(uses_cpu=True) == left({}, {}, ["cuda:0", 1]) == ()


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        ("h100x2", True),
        ("v100", True),
        ("rtx3060", True),
        ("mi300x", True),
        ("k40x4", False),
        ("p100", False),
        ("m2", False),
        ("h100+k40", False),
        ("cpux2", False),
    ],
)
def test_a_step_for_gpus_elsewhere_is_fused_as_they_would(
    monkeypatch: pytest.MonkeyPatch, machine: str, expected: bool
) -> None:
    """Where PyTorch's compiler makes kernels for all of them, unless told otherwise."""
    with_gpus(monkeypatch, 0, "")
    assert find_target(machine).fuse is expected
    assert find_target(machine, fuse=not expected).fuse is not expected


def test_a_problem_says_which_cpus_are_left_out() -> None:
    """By a note, with both ways to have them."""
    problem = find_target("h100x2", device="cpu").problem(captured()[0])
    note = "left out beside GPUs: cpu:0; uses_cpu=True (--cpu) lets ops go there"
    assert note in problem.notes
    assert not find_target("cpux2").problem(captured()[0]).notes


def test_a_step_captured_for_cuda_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a plan that was made elsewhere."""
    with_gpus(monkeypatch, 0, "")
    with pytest.raises(PlanMismatchError, match="this computer has none"):
        find_target("h100x2", device="cuda")


@pytest.mark.parametrize(
    ("demands", "words"),
    [
        (({"gpu": "1GiB"},), "'gpu' in limits"),
        (({}, {"embed": "cuda:7"}), "'cuda:7' in pin 'embed'"),
        (({}, {}, ["cuda:7"]), "'cuda:7' in exclude"),
    ],
)
def test_devices_that_are_not_there_are_named(demands: Any, words: str) -> None:
    """Before anything is captured."""
    with pytest.raises(ProblemError, match=words):
        find_target("h100x2", *demands)


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
