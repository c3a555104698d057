"""Roofline costs: every op priced from its flops and bytes, without running anything."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from devplace.cost.table import CostTable
from devplace.graph import Op, OpGraph, require_graph
from devplace.machine import Device, Machine, require_machine
from devplace.units import NS_PER_S

FloatArray = NDArray[np.float64]

# Kind of op -> (share of the compute rate, share of the bandwidth) it reaches on a GPU, relative
# to the device's useful rates. Measured on an H200 (torch 2.11, float32 with tf32, NCHW), ops of a
# ResNet-50 and an Inception-V3 training step, batch 32: convolutions 0.20-0.41 forward and
# backward; batch norm 0.13-0.24 of the bandwidth; pooling 0.10-0.45.
GPU_SHARES = {
    "convolution": (0.3, 1.0),
    "batch_norm": (1.0, 0.25),
    "pool": (1.0, 0.25),
    "other": (1.0, 1.0),
}
_KINDS = tuple(GPU_SHARES)
_DTYPES = (
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e5m2",
)
_CODE = {dtype: code for code, dtype in enumerate(_DTYPES)}


@dataclass(frozen=True)
class Analytic:
    """Price ops by the roofline model.

    `time = max(flops / rate(dtype), (bytes_read + bytes_written) / bandwidth) + launch gap`,
    rounded once to whole nanoseconds; 0 for sources and views. `rate` and `bandwidth` are the
    device's useful ones, times `GPU_SHARES` for the kinds of ops that fall short of them on GPUs.
    The dtype of an op is that of its first floating-point output, so a product under autocast to
    bfloat16 runs at the bfloat16 rate.

    Attributes:
        tf32: Whether float32 work may run at a device's `tf32` rate, as after
            `torch.set_float32_matmul_precision("high")`.

    Source: Williams, Waterman, Patterson (2009), Roofline, doi:10.1145/1498765.1498785; differs
    from it in: a fixed gap per op, shares per kind of op.

    Example:
        >>> from devplace.graph import Op, OpGraph, Tensor
        >>> from devplace.machine import presets
        >>> ops = (Op(name="add", target="aten.add.Tensor", outputs=(0,), bytes_read=3_840_000),)
        >>> graph = OpGraph("tiny", ops, (Tensor("add", (480_000,), "float32", 1_920_000),))
        >>> Analytic()(graph, presets.get("h200x1")).compute_ns[0, 1]  # 1 us of memory + 2.3 us
        np.int64(3300)
    """

    tf32: bool = True

    def __call__(self, graph: OpGraph, machine: Machine) -> CostTable:
        """Price every op of `graph` on every device of `machine`.

        Returns:
            int64 nanoseconds, shape `[V, D]`; a device's column does not depend on the others.

        Raises:
            GraphError, MachineError: One of the two is something else.

        Complexity: O(V D) in numpy, after one pass over the ops in Python.
        """
        require_graph(graph)
        require_machine(machine)
        flops, moved, dtype, kind, is_free = _columns(graph)
        compute_ns = np.empty((len(graph.ops), len(machine.devices)), dtype=np.int64)
        for column, device in enumerate(machine.devices):
            rates, bandwidths = self._tables(device)
            work = np.maximum(flops / rates[dtype, kind], moved / bandwidths[kind])
            work_ns = np.minimum(np.rint(work * NS_PER_S), 2.0**62)  # `Problem` refuses such times
            compute_ns[:, column] = work_ns + device.launch_gap_ns
        compute_ns[is_free] = 0
        return CostTable(compute_ns=compute_ns, origin="analytic")

    def _tables(self, device: Device) -> tuple[FloatArray, FloatArray]:
        """Rate per dtype and kind, FLOP/s, shape `[T, K]`; bandwidth per kind, shape `[K]`."""
        shares = np.ones((len(_KINDS), 2))
        if device.traits.has_gpu_shares:
            shares = np.array([GPU_SHARES[kind] for kind in _KINDS])
        plain = np.array([rate_of(device, dtype, tf32=self.tf32) for dtype in _DTYPES])
        # A tensor core slowed by its data layout is left for the CUDA cores where those are faster.
        floor = np.minimum(plain, device.flops_per_s["float32"])[:, None]
        return (
            np.maximum(plain[:, None] * shares[:, 0], floor),
            device.bytes_per_s * shares[:, 1],
        )


def rate_of(device: Device, dtype: str, *, tf32: bool = True) -> float:
    """Useful compute rate of `device` for `dtype`, FLOP/s.

    A dtype the device has no rate for falls back: bfloat16 and float16 to each other, then to
    float32; float8 to bfloat16's rule; float64 to half of float32; complex64 to float32 and
    complex128 to float64; anything else to float32.
    """
    rates = device.flops_per_s
    if dtype == "float32" and tf32:
        return float(rates.get("tf32", rates["float32"]))
    if dtype in rates:
        return float(rates[dtype])
    if dtype in ("float64", "complex128"):
        return rates.get("float64", rates["float32"] / 2)
    if dtype in ("float16", "bfloat16") or dtype.startswith("float8"):
        order = ("float16", "bfloat16") if dtype == "float16" else ("bfloat16", "float16")
        return float(next((rates[d] for d in order if d in rates), rates["float32"]))
    return float(rates["float32"])


@lru_cache(maxsize=4096)
def _kind_of(target: str) -> int:
    return next((k for k, kind in enumerate(_KINDS) if kind in target), len(_KINDS) - 1)


def _dtype_of(graph: OpGraph, op: Op) -> int:
    for tensor in op.outputs:
        code = _CODE.get(graph.tensors[tensor].dtype)
        if code is not None:
            return code
    return 0


def _columns(
    graph: OpGraph,
) -> tuple[FloatArray, FloatArray, NDArray[np.intp], NDArray[np.intp], NDArray[np.bool_]]:
    """Flops, bytes moved, dtype code, kind code and "costs nothing" of each op, shape `[V]`."""
    rows = [
        (op.flops, op.bytes_read + op.bytes_written, _dtype_of(graph, op), _kind_of(op.target),
         op.is_source or op.is_view)
        for op in graph.ops
    ]  # fmt: skip
    flops, moved, dtype, kind, is_free = zip(*rows, strict=True)
    return (
        np.array(flops, dtype=np.float64),
        np.array(moved, dtype=np.float64),
        np.array(dtype, dtype=np.intp),
        np.array(kind, dtype=np.intp),
        np.array(is_free, dtype=np.bool_),
    )
