"""Signature of a compiled kernel: input layouts and overwritten inputs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from devplace.device_kinds import kind_of
from devplace.graph.fusion.call import FusedCall, Pairs

ALIGNMENT = 16
"""Bytes; a kernel may load as much at once where an input begins at a multiple."""

OPTIONS = {
    # Many kernels are compiled at once, by processes of our own.
    "compile_threads": 1,
    # What it would keep are whole graphs under keys that take longer to find than to make.
    "fx_graph_cache": False,
    # Kernels that add up are chosen by rules, not by times, which differ from card to card and from
    # run to run, and their numbers with them. (On an H200 steps of GPT-2 were as fast either way.)
    "deterministic": True,
    # Layouts of outputs are those that the step was planned with.
    "keep_output_stride": True,
}
"""Of the compiler."""


class Layout(NamedTuple):
    """How an input lies in memory.

    Attributes:
        shape: Sizes.
        strides: Elements.
        dtype: torch name without prefix.
        is_aligned: Whether it begins at a multiple of `ALIGNMENT`. Never for one element, of which
            no more can be loaded at once: so keys of random numbers need one kernel wherever they
            lie.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    is_aligned: bool


class Signature(NamedTuple):
    """All that a compiled kernel depends on beside what it computes.

    Attributes:
        call: Name of the group's `FusedCall`.
        device: Name of the torch device.
        layouts: Of the inputs.
        writes: (output, input) pairs: the output is written into the memory of the input.
    """

    call: str
    device: str
    layouts: tuple[Layout, ...]
    writes: Pairs = ()

    @property
    def key(self) -> str:
        """Name of the kernel among those of one place."""
        return hashlib.sha256(repr(tuple(self)).encode()).hexdigest()[:32]


def layout_of(tensor: Any) -> Layout:
    """The layout of a tensor, fake ones included; these count as aligned by their offset."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Layout(tuple(tensor.shape), tuple(tensor.stride()), dtype, _is_aligned(tensor))


def _is_aligned(tensor: Any) -> bool:
    if tensor.numel() == 1:
        return False
    if type(tensor) is torch.Tensor and not tensor.is_meta:
        return bool(tensor.data_ptr() % ALIGNMENT == 0)
    return bool(tensor.storage_offset() * tensor.element_size() % ALIGNMENT == 0)


def signature_of(call: FusedCall, device: Any, tensors: Sequence[Any]) -> Signature:
    """The signature of a call with these tensors.

    Only where values keep their addresses do kernels write over old ones, and there all do,
    wherever they are called: another kernel could round otherwise.
    """
    writes = call.over if kind_of(str(device)).fixed_addresses else ()
    return Signature(call.name, str(device), tuple(map(layout_of, tensors)), writes)


@cache
def place_of(device: str) -> str:
    """All that compiled kernels of a device depend on, as text: versions and the card."""
    versions = f"torch {torch.__version__}|{OPTIONS}"
    if kind_of(device).compiler != "triton":
        from devplace.machine.detect import cpu_model

        return f"{versions}|{cpu_model()}"
    from torch.utils._triton import has_triton

    card = torch.cuda.get_device_properties(torch.device(device))
    triton = __import__("triton").__version__ if has_triton() else "no triton"
    return f"{versions}|{triton}|{card.name}|{card.major}.{card.minor}|cuda {torch.version.cuda}"
