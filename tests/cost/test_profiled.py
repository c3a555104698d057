"""Costs measured on this computer's own CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.cost.timers import fake_times

from devplace import workloads
from devplace.cost.analytic import Analytic
from devplace.cost.made_up_inputs import Arguments, host_seeds, make_tensor
from devplace.cost.op_signature import OpCall, TensorSpec, op_calls
from devplace.cost.op_timing import Timing, free_bytes
from devplace.cost.profiled import Profiled
from devplace.graph import OpGraph
from devplace.kernels.prepare import Prepared
from devplace.machine import Machine, detect, presets
from devplace.step_capture import capture

NAMES = ["rnnlm", "nmt-2", "gnmt-4", "bert-base", "gpt-2", "llama", "vit-b-16", "moe", "resnet-50"]
NAMES += ["inception-v3"]


def captured(name: str = "rnnlm") -> OpGraph:
    workload = workloads.build(name, size="small", device="meta")
    optimizer = torch.optim.Adam(workload.model.parameters(), lr=0.01)
    return capture(workload.model, workload.inputs, workload.loss_fn, optimizer)


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    return captured()


@pytest.fixture(scope="module")
def machine() -> Machine:
    return detect(cpu_devices=2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_every_op_of_every_workload_can_be_timed(name: str) -> None:
    """Made-up inputs are valid: no op of the built-in workloads fails, indices included."""
    step = captured(name)
    table = Profiled(seconds=900, cache=None)(step, detect(cpu_devices=2))
    assert table.origin == "profiled"
    assert table.notes == ()
    works = [i for i, op in enumerate(step.ops) if not op.is_source and not op.is_view]
    assert (table.compute_ns[works] > 0).all()
    free = sorted(set(range(len(step.ops))) - set(works))
    assert (table.compute_ns[free] == 0).all()


@pytest.mark.slow
def test_equal_calls_cost_the_same(graph: OpGraph, machine: Machine) -> None:
    """Ops of one signature have one time, on every device of the same model."""
    calls = op_calls(graph)
    table = Profiled(seconds=900, cache=None)(graph, machine)
    assert len({call.key for call in calls.values()}) < len(calls) / 2
    first: dict[str, int] = {}
    for index, call in calls.items():
        assert table.compute_ns[index, 0] == first.setdefault(call.key, table.compute_ns[index, 0])
    assert (table.compute_ns[:, 0] == table.compute_ns[:, 1]).all()


@pytest.mark.slow
def test_a_second_time_comes_from_the_cache(
    graph: OpGraph, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is measured again, and the numbers are equal."""
    profiled = Profiled(seconds=900, cache=tmp_path / "t.sqlite")
    first = profiled(graph, machine)

    timer = fake_times(monkeypatch, lambda call: Timing(1))
    assert np.array_equal(profiled(graph, machine).compute_ns, first.compute_ns)
    assert timer.calls == []


@pytest.mark.slow
def test_a_damaged_cache_is_said_and_not_used(
    graph: OpGraph, machine: Machine, tmp_path: Path
) -> None:
    """The step is measured all the same, with a note."""
    path = tmp_path / "t.sqlite"
    path.write_text("no database at all, whatever its name says")
    table = Profiled(seconds=900, cache=path)(graph, machine)
    assert table.origin == "profiled"
    assert any("cannot be used" in note for note in table.notes)


def test_without_time_everything_is_estimated(graph: OpGraph, machine: Machine) -> None:
    """No second to measure: base costs and a note that says so."""
    table = Profiled(seconds=0, cache=None)(graph, machine)
    assert np.array_equal(table.compute_ns, Analytic()(graph, machine).compute_ns)
    assert "not measured within 0 s" in table.notes[0]


def test_an_op_that_fails_is_estimated_from_its_kin(
    graph: OpGraph, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time is the base one times the ratio found on other ops."""
    base = Analytic()(graph, machine).compute_ns[:, 0]
    keys = {call.key: int(base[index]) for index, call in op_calls(graph).items()}

    def twice(call: OpCall) -> Timing:
        if "tanh" in call.key:
            raise RuntimeError("no such kernel")
        return Timing(2 * keys[call.key])

    fake_times(monkeypatch, twice)
    table = Profiled(seconds=900, cache=None)(graph, machine)
    assert any("no such kernel" in note for note in table.notes)
    works = list(op_calls(graph))
    assert (table.compute_ns[works, 0] == 2 * base[works]).all()


def test_devices_of_another_machine_keep_their_base_costs(graph: OpGraph) -> None:
    """A described machine is priced by the roofline, whatever this computer is."""
    described = presets.get("h100x2")
    table = Profiled(cache=None)(graph, described)
    assert table.origin == "analytic"
    assert np.array_equal(table.compute_ns, Analytic()(graph, described).compute_ns)


def test_skipped_devices_are_not_measured(graph: OpGraph, machine: Machine) -> None:
    """A device that is left out costs no time and keeps its base costs."""
    table = Profiled(cache=None, skip=("cpu:0", "cpu:1"))(graph, machine)
    assert table.origin == "analytic"


def test_indices_are_valid_and_layouts_kept() -> None:
    """Integers stay below their bound; strides, also of expanded tensors, are as asked for."""
    generator = torch.Generator().manual_seed(0)
    indices = make_tensor(TensorSpec((50,), (1,), "int64", 3), "cpu", generator)
    assert set(indices.tolist()) == {0, 1, 2}
    expanded = make_tensor(TensorSpec((4, 5), (1, 0), "float32"), "cpu", generator)
    assert expanded.stride() == (1, 0)
    turned = make_tensor(TensorSpec((4, 5), (1, 4), "bfloat16"), "cpu", generator)
    assert turned.stride() == (1, 4)
    assert turned.dtype == torch.bfloat16


def test_cold_inputs_come_in_copies() -> None:
    """An input that is out of the cache in a step is read from several places in turn."""
    warm = TensorSpec((1024, 1024), (1024, 1), "float32")
    cold = warm._replace(is_cold=True)
    call = OpCall(torch.ops.aten.add.Tensor, (cold, warm), {}, "add")
    arguments = Arguments(call, "cpu", cold_bytes=3 * 4 * 2**20, most_bytes=2**30)
    assert arguments.copies == 4
    few = Arguments(call, "cpu", cold_bytes=3 * 4 * 2**20, most_bytes=12 * 2**20)
    assert few.copies == 2
    colds = [arguments.arguments(number)[0][0].data_ptr() for number in range(5)]
    warms = {arguments.arguments(number)[0][1].data_ptr() for number in range(5)}
    assert len(set(colds)) == 4
    assert colds[0] == colds[4]
    assert len(warms) == 1
    assert torch.equal(arguments.run(0), arguments.run(1))


def test_copies_are_laid_out_alike() -> None:
    """Strides of a cold input, zeros too, are kept in every copy."""
    spread = TensorSpec((3, 4), (0, 2), "float32", is_cold=True)
    call = OpCall(torch.ops.aten.neg.default, (spread,), {}, "neg")
    arguments = Arguments(call, "cpu", cold_bytes=10**3, most_bytes=2**20)
    assert arguments.copies > 1
    first, second = (arguments.arguments(number)[0][0] for number in range(2))
    assert first.stride() == second.stride() == (0, 2)
    assert torch.equal(first, second)


def test_a_machine_is_measured_only_where_its_processor_is(graph: OpGraph) -> None:
    """A CPU of another model is not this computer's."""
    here = detect(cpu_devices=2)
    devices = tuple(msgspec.structs.replace(d, model="Another CPU") for d in here.devices)
    other = Machine("other", devices, here.links, here.pools)
    assert Profiled(cache=None)(graph, other).origin == "analytic"


def attention_backward(kind: str, target: Any, dtype: str) -> OpCall:
    """A call with one spec for every tensor, the seeds' in `dtype`."""
    schema = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention_backward").default
    specs = []
    for argument in schema._schema.arguments:
        is_seed = argument.name.startswith("philox")
        specs.append(TensorSpec((), (), dtype) if is_seed else TensorSpec((2,), (1,), "float32"))
    return OpCall(target or schema, tuple(specs), {}, "key")


@pytest.mark.parametrize(
    ("kind", "dtype", "names"),
    [
        ("efficient", "int64", ["philox_seed", "philox_offset"]),
        ("flash", "int64", ["philox_seed", "philox_offset"]),
        ("flash", "uint64", []),
        ("cudnn", "int64", []),
    ],
)
def test_seeds_of_attention_lie_where_its_backward_reads_them(
    kind: str, dtype: str, names: list[str]
) -> None:
    """Those that are followed on the host outside a capture are made there."""
    call = attention_backward(kind, None, dtype)
    arguments = call.target._schema.arguments
    found = host_seeds(call)
    assert [arguments[place].name for place in found] == names
    assert all(seed.device.type == "cpu" and seed.shape == () for seed in found.values())


def test_seeds_in_host_memory_are_for_calls_outside_a_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A captured call gets the seeds that lie on the device."""

    class Recorder:
        _schema = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default._schema

        def __str__(self) -> str:
            return "efficient_attention"

        def __call__(self, *args: Any) -> Any:
            return args

    call = attention_backward("efficient", Recorder(), "int64")
    arguments = Arguments(call, "cpu", 0, 10**6)
    (place, *_) = host_seeds(call)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    outside = arguments.run(0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    inside = arguments.run(0)
    assert outside[place] is not inside[place]
    assert outside[0] is inside[0]


@pytest.mark.parametrize(("fraction", "expected"), [(1.0, 40 + 5), (0.3, 30 - 15), (0.1, 0)])
def test_free_memory_of_a_gpu_keeps_to_the_fraction(
    fraction: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 100 bytes 40 are free, 20 are torch's, 15 of them in use; the process may be limited."""
    values = {
        "mem_get_info": (40, 100),
        "memory_allocated": 15,
        "memory_reserved": 20,
        "get_per_process_memory_fraction": fraction,
    }
    for name, value in values.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert free_bytes("cuda:0") == expected


@pytest.mark.slow
def test_compiling_tells_how_far_it_is(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is told goes to the caller; plain steps tell nothing."""
    told: list[str] = []

    def prepare(graph: OpGraph, devices: Any, tell: Any) -> Prepared:
        tell(f"compiling kernels for {devices}")
        return Prepared(1, 1, 0, 2.0)

    monkeypatch.setattr("devplace.kernels.prepare.prepare", prepare)
    monkeypatch.setenv("DEVPLACE_COMPILE", "0")
    workload = workloads.build("rnnlm", size="small", device="meta")
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=0.01)
    step = capture(workload.model, workload.inputs, workload.loss_fn, optimizer, fuse=True)
    assert step.plain is not None
    model = Profiled(seconds=0.01, cache=None, tell=told.append)
    model(step.plain, machine)
    assert told == []
    assert "1 kernels were compiled in 2.0 s" in model(step, machine).notes
    assert told == ["compiling kernels for ['cpu']"]
