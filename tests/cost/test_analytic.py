"""Roofline costs: hand-computed times, dtypes, fallbacks, order of devices."""

import dataclasses

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from devplace.cost import Analytic
from devplace.cost.analytic import GPU_SHARES, rate_of
from devplace.graph import Op, OpGraph, Tensor
from devplace.machine import Device, Link, Machine, presets


def one_op(**fields):
    """A graph with one op that makes one tensor."""
    dtype = fields.pop("dtype", "float32")
    base = {"name": "op", "target": "aten.mm.default", "outputs": (0,)}
    return OpGraph("one", (Op(**(base | fields)),), (Tensor("t", (1,), dtype, 4),))


def one_device(kind="gpu", **rates):
    """A machine with one device: 1 TFLOP/s, 100 GB/s, 1000 ns per op."""
    device = Device(
        name="d",
        kind=kind,
        memory_bytes=1,
        flops_per_s={"float32": 10**12, **rates},
        bytes_per_s=10**11,
        launch_gap_ns=1000,
    )
    return Machine("one", (device,))


def cost(graph, machine, **fields):
    return int(Analytic(**fields)(graph, machine).compute_ns[0, 0])


def test_compute_bound():
    """5 MFLOP at 1 TFLOP/s take 5 us, above 2 us of memory time; the gap comes on top."""
    graph = one_op(flops=5_000_000, bytes_read=150_000, bytes_written=50_000)
    assert cost(graph, one_device()) == 5_000 + 1_000


def test_memory_bound():
    """400 KB at 100 GB/s take 4 us, above 1 us of compute."""
    graph = one_op(flops=1_000_000, bytes_read=300_000, bytes_written=100_000)
    assert cost(graph, one_device()) == 4_000 + 1_000


def test_rounded_once():
    """Half a nanosecond more or less is rounded to whole nanoseconds."""
    assert cost(one_op(flops=1_400), one_device()) == 1_001
    assert cost(one_op(flops=1_600), one_device()) == 1_002


def test_empty_op_costs_the_gap():
    """An op that moves nothing still has to be launched."""
    assert cost(one_op(), one_device()) == 1_000


def test_sources_and_views_are_free():
    """What is there before the step, and views, cost nothing."""
    ops = (
        Op(name="x", target="source", outputs=(0,), stage="source", role="input"),
        Op(name="v", target="aten.view.default", inputs=(0,), outputs=(1,), alias_of=0),
        Op(name="y", target="aten.relu.default", inputs=(1,), outputs=(2,)),
    )
    tensors = tuple(Tensor(name, (1,), "float32", 4) for name in "xvy")
    table = Analytic()(OpGraph("g", ops, tensors), one_device())
    assert table.compute_ns.tolist() == [[0], [0], [1000]]
    assert (table.compute_ns.dtype, table.origin) == (np.int64, "analytic")


@pytest.mark.parametrize(
    ("dtype", "ns"), [("float32", 9000), ("bfloat16", 2000), ("float64", 17000)]
)
def test_rate_of_the_output_dtype(dtype, ns):
    """A product whose output is bfloat16 runs at the bfloat16 rate."""
    machine = one_device(bfloat16=8 * 10**12)
    assert cost(one_op(flops=8_000_000, dtype=dtype), machine) == ns


def test_first_floating_output_counts():
    """Integer outputs, such as indices, say nothing about the rate."""
    op = Op(name="op", target="aten.max.dim", outputs=(0, 1), flops=8_000_000)
    tensors = (Tensor("i", (1,), "int64", 8), Tensor("v", (1,), "float16", 2))
    assert cost(OpGraph("g", (op,), tensors), one_device(float16=8 * 10**12)) == 2_000


def test_tf32_can_be_switched_off():
    """float32 products use the tf32 rate unless told not to."""
    graph, machine = one_op(flops=8_000_000), one_device(tf32=8 * 10**12)
    assert cost(graph, machine) == 2_000
    assert cost(graph, machine, tf32=False) == 9_000


@pytest.mark.parametrize(
    ("dtype", "rates", "rate"),
    [
        ("bfloat16", {"float16": 7}, 7),
        ("float16", {"bfloat16": 6}, 6),
        ("float16", {"bfloat16": 6, "float16": 7}, 7),
        ("bfloat16", {}, 4),
        ("float8_e4m3fn", {"bfloat16": 6}, 6),
        ("float64", {}, 2),
        ("complex128", {"float64": 1}, 1),
        ("complex64", {}, 4),
        ("int64", {"tf32": 9}, 4),
    ],
)
def test_missing_rates_fall_back(dtype, rates, rate):
    """A dtype without a rate uses the documented next one."""
    machine = one_device(**rates)
    device = msgspec.structs.replace(machine.devices[0], flops_per_s={"float32": 4, **rates})
    assert rate_of(device, dtype) == rate


def test_convolutions_and_norms_reach_less_on_gpus():
    """The measured shares apply on GPUs, not on CPUs."""
    conv = one_op(target="aten.convolution.default", flops=3_000_000)
    fast = one_device(tf32=10 * 10**12)
    assert cost(conv, fast) == round(300 / GPU_SHARES["convolution"][0]) + 1000
    norm = one_op(target="aten.native_batch_norm_backward.default", bytes_read=100_000)
    assert cost(norm, one_device()) == 4_000 + 1_000
    assert cost(norm, one_device("cpu")) == 1_000 + 1_000


def test_convolution_is_never_slower_than_plain_float32():
    """Without tensor cores the share does not apply: those losses are theirs."""
    conv = one_op(target="aten.convolution.default", flops=3_000_000)
    assert cost(conv, one_device()) == 3_000 + 1_000


@given(st.permutations(range(5)))
def test_columns_do_not_depend_on_device_order(order):
    """Listing the devices differently only permutes the columns."""
    machine = presets.get("k40x4")
    ops = tuple(
        Op(name=f"o{i}", target="aten.mm.default", outputs=(i,), flops=i * 10**9, bytes_read=i)
        for i in range(4)
    )
    graph = OpGraph("g", ops, tuple(Tensor(f"o{i}", (1,), "float32", 4) for i in range(4)))
    shuffled = dataclasses.replace(machine, devices=tuple(machine.devices[i] for i in order))
    expected = Analytic()(graph, machine).compute_ns[:, list(order)]
    assert np.array_equal(Analytic()(graph, shuffled).compute_ns, expected)


@given(st.integers(0, 10**15), st.integers(0, 10**12), st.integers(1, 3))
def test_cost_grows_with_work_and_falls_with_speed(flops, num_bytes, factor):
    """More work never costs less; a faster device never costs more."""
    slow = one_device()
    device = slow.devices[0]
    fast = Machine("f", (msgspec.structs.replace(device, bytes_per_s=factor * 10**11),))
    small = cost(one_op(flops=flops, bytes_read=num_bytes), slow)
    assert cost(one_op(flops=flops * factor, bytes_read=num_bytes * factor), slow) >= small
    assert cost(one_op(flops=flops, bytes_read=num_bytes), fast) <= small


def test_endless_work_is_long_not_negative():
    """Work that would take longer than 64 bits of ns hold is the longest time, not an overflow."""
    slow = Device(
        name="cpu:0", kind="cpu", memory_bytes=1, flops_per_s={"float32": 1}, bytes_per_s=1
    )
    op = Op(name="mm", target="aten.mm.default", outputs=(0,), flops=10**16)
    graph = OpGraph("long", (op,), (Tensor("mm", (1,), "float32", 4),))
    assert Analytic()(graph, Machine("slow", (slow,))).compute_ns[0, 0] == 2**62


def test_two_devices_two_columns():
    """Shape is ops by devices, in the machine's order."""
    device = one_device().devices[0]
    other = msgspec.structs.replace(device, name="e", launch_gap_ns=1)
    links = (Link(src="d", dst="e", bytes_per_s=1), Link(src="e", dst="d", bytes_per_s=1))
    table = Analytic()(one_op(), Machine("m", (device, other), links))
    assert table.compute_ns.tolist() == [[1000, 1]]
