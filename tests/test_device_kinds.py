"""A new kind of device is one record, and the file of its executor."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from devplace import device_kinds
from devplace.auto.local_devices import capture_device, fuses, missing_here
from devplace.auto.planning import find_target
from devplace.cost import Analytic
from devplace.device_kinds import CPU, GPU, DeviceKind, is_accelerator, is_host, kind_of
from devplace.errors import CaptureError, MachineError
from devplace.machine import Device, Link, Machine, toml
from devplace.placers import Budget, Cpu, Even, Search, place
from devplace.problem import Problem
from devplace.run.cpu import CpuExecutor
from devplace.run.executors import accelerators_used, make_executor, used_devices
from devplace.schedule import Schedule, make_schedule
from devplace.step_capture import capture
from devplace.verify import verify_plan

NPU = DeviceKind(
    name="npu", torch_type="npu", label="NPU", executor="tests.test_device_kinds:NpuExecutor"
)

FILE = """
name = "two-npus"

[[devices]]
name = "cpu:0"
memory = "1 GB"
flops = { float32 = "0.001 TFLOP/s" }
bandwidth = "1 GB/s"
host = "left"

[[devices]]
name = "npu:0"
memory = "1 GB"
flops = { float32 = "1 TFLOP/s" }
bandwidth = "100 GB/s"
host = "left"

[[devices]]
name = "second"
kind = "npu"
memory = "1 GB"
flops = { float32 = "1 TFLOP/s" }
bandwidth = "100 GB/s"
host = "right"

[[links]]
src = "cpu:0"
dst = "npu:0"
both = true
bandwidth = "10 GB/s"

[[links]]
src = "npu:0"
dst = "second"
both = true
bandwidth = "1 GB/s"
"""


class NpuExecutor(CpuExecutor):
    """Stands in for an accelerator's: runs each device of the schedule on a host thread."""

    def __init__(
        self,
        schedule: Schedule,
        seed: int,
        *,
        waits: bool,
        predicted_bytes: Mapping[str, int] | None,
        staged_pairs: frozenset[tuple[str, str]],
        processes: None,
    ) -> None:
        super().__init__(schedule, seed)


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kind is known."""
    monkeypatch.setattr(device_kinds, "KINDS", (CPU, GPU, NPU))


@pytest.fixture
def npus_here(npu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch finds two such devices."""
    found = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 2,
        get_device_properties=lambda index: SimpleNamespace(name=f"chip {index}"),
    )
    usual = torch.get_device_module
    monkeypatch.setattr(
        torch, "get_device_module", lambda kind: found if kind == "npu" else usual(kind)
    )


def model() -> torch.nn.Module:
    layers = [torch.nn.Linear(32, 32) for _ in range(4)]
    return torch.nn.Sequential(*layers)


def step() -> Any:
    torch.manual_seed(0)
    network, batch = model(), (torch.randn(8, 32), torch.randn(8, 32))
    return capture(network, batch, lambda run, x, y: ((run(x) - y) ** 2).mean())


def test_every_kind_is_found_by_its_names() -> None:
    """A kind's name, its torch type and names of its devices mean it; other words mean none."""
    for kind in device_kinds.KINDS:
        for text in (kind.name, kind.torch_type, f"{kind.torch_type}:3"):
            assert kind_of(text) is kind
            assert is_host(text) is kind.is_host is not is_accelerator(text)
    assert not is_host("meta")
    assert not is_accelerator("meta")
    assert not is_accelerator("cudas:0")
    assert kind_of("meta") == DeviceKind(name="meta", torch_type="meta", label="meta")


def test_a_new_kind_is_planned_for(npu: None) -> None:
    """Machine files take its name, placers use it as an accelerator, and the verifier agrees with
    times and memory of the plan. What is received is freed after its last reader, as nothing says
    that its addresses are fixed."""
    machine = toml.loads(FILE)
    assert [device.kind for device in machine.devices] == ["cpu", "npu", "npu"]
    problem = Problem(step(), machine, Analytic()(step(), machine))
    assert problem.core.wires.fixed_buffers.tolist() == [0, 0, 0]
    spread = place(problem, Even(), Budget(evaluations=1))
    assert {machine.device_names[d] for d in spread.placement.devices} == {"npu:0", "second"}
    for objective in ("latency", "throughput"):
        for placer in (Even(), Search(), Cpu()):
            found = place(problem, placer, Budget(evaluations=50), objective=objective)
            assert not verify_plan(problem, found.plan).broken
    assert set(place(problem, Cpu(), Budget(evaluations=9)).placement.devices.tolist()) == {0}


def test_a_machine_file_tells_kinds_and_hosts(npu: None) -> None:
    """A link knows from its ends' hosts whether it is a network's, also of a new kind; what is
    written reads back."""
    machine = toml.loads(FILE)
    crossing = {(a.src, a.dst) for a in machine.links if machine.crosses_hosts(a)}
    assert crossing == {("npu:0", "second"), ("second", "npu:0")}
    assert machine.hosts == ("left", "right")
    assert toml.loads(toml.dumps(machine)) == machine


def test_an_unknown_kind_is_refused_with_the_known_ones(npu: None) -> None:
    """Wherever a machine comes from."""
    with pytest.raises(MachineError, match="kind must be 'cpu' or 'gpu' or 'npu', got 'tpu'"):
        Machine(
            "one",
            (
                Device(
                    name="a",
                    kind="tpu",
                    memory_bytes=1,
                    flops_per_s={"float32": 1},
                    bytes_per_s=1,
                ),
            ),
        )
    with pytest.raises(MachineError, match="must be 'cpu' or 'gpu' or 'npu', got 'cuda'"):
        toml.loads(FILE.replace('"npu"', '"cuda"'))
    with pytest.raises(CaptureError, match="captured for 'cpu' or 'cuda' or 'npu', got"):
        capture(model(), (torch.ones(1, 32),), device="tpu")


def rates(kind: str) -> dict[str, Any]:
    return {"kind": kind, "memory_bytes": 1, "flops_per_s": {"float32": 10**9}, "bytes_per_s": 1}


def machine_of(*names: str) -> Machine:
    devices = tuple(Device(name=name, **rates(kind_of(name).name)) for name in names)
    links = tuple(Link(src=a, dst=b, bytes_per_s=10**9) for a in names for b in names if a != b)
    return Machine("hand", devices, links)


def test_only_where_torch_has_them_is_a_step_captured_for_them(npu: None) -> None:
    """Where they are missing, the step is captured for the CPU, and only planned."""
    machine = machine_of("cpu:0", "npu:0")
    assert "npu:0" in missing_here(machine)
    assert "0 NPU devices" in missing_here(machine)
    assert capture_device(machine) == "cpu"


def test_devices_that_are_here_are_used(npus_here: None) -> None:
    """A step is captured for their type, CPUs beside them are left out, and as no compiler is known
    for them nothing is fused."""
    target = find_target(machine_of("cpu:0", "npu:0", "npu:1"), runs=True)
    assert (target.device, target.left_out, target.fuse) == ("npu", ("cpu:0",), False)
    assert not fuses("npu")
    assert "npu:2" in missing_here(machine_of("npu:2"))


def test_a_step_runs_on_the_executor_that_the_record_names(npus_here: None) -> None:
    """Only where it was captured for them and some of them has ops."""
    graph = step()
    order = [
        [v for v, op in enumerate(graph.ops) if not (op.is_view or op.is_source)],
        [],
    ]
    here = [0] * len(graph.ops)
    names = ["npu:0", "cpu:0"]
    elsewhere = make_schedule(graph, here, order, names)
    assert not accelerators_used(elsewhere)
    there = replace(graph, program=replace(graph.program, device="npu"))
    schedule = make_schedule(there, here, order, names)
    assert used_devices(schedule) == accelerators_used(schedule) == ["npu:0"]
    executor = make_executor(schedule)
    try:
        assert type(executor) is NpuExecutor
    finally:
        executor.close()


def asks_by_name(path: Path) -> Iterator[int]:
    """Lines of a file that compare a text with the name of a kind, or look at how it begins."""
    words = {word for kind in (CPU, GPU) for word in (kind.name, kind.torch_type)}
    for node in ast.walk(ast.parse(path.read_text())):
        asked: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            asked = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".startswith"):
            asked = node.args
        parts = [part for each in asked for part in getattr(each, "elts", [each])]
        if any(isinstance(part, ast.Constant) and part.value in words for part in parts):
            yield node.lineno


def test_no_file_asks_for_a_kind_by_name() -> None:
    """All ask what it can do; but for the CUDA executor's own, and the words of presets."""
    src = Path(device_kinds.__file__).parent
    own = ("run/cuda/", "machine/presets/")
    rest = [
        p for p in sorted(src.rglob("*.py")) if not p.relative_to(src).as_posix().startswith(own)
    ]
    assert [f"{path.relative_to(src)}:{line}" for path in rest for line in asks_by_name(path)] == []
    found = [line for path in sorted((src / own[0]).rglob("*.py")) for line in asks_by_name(path)]
    assert found, "the search finds such lines where there are some"
