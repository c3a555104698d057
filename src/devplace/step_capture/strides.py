"""How kernels lay out what they make: learned from the kernels themselves.

PyTorch's fake kernels do not always lie as the real ones do (batch norm of a transposed input, roll
of an image with channels last). A trace that believes them records views that do not fit, and reads
other elements by `as_strided`.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch

from devplace.device_kinds import find_kind
from devplace.graph.program import Layouts, layouts_of
from devplace.step_capture.analysis import shares_memory, tensors_in

Node: TypeAlias = torch.fx.Node

MAX_BYTES = 2**20
"""Inputs and outputs of a kernel that is run to learn; one run takes some microseconds to some
milliseconds (one x86 core)."""


class KernelStrides:
    """How the kernels of a device lay out what they make.

    Each kernel of ATen is run once for every layout, dtype and plain argument it is met with, on
    made-up values: floats are 1, integers and masks 0, which is an index in every table. Kernels
    whose tensors are together larger than `MAX_BYTES` are not run, nor are those of other
    libraries, which may do more than compute; what their fake kernels say is then kept by the
    executors (`unsure`). CUDA kernels are run only where the process uses CUDA already, and only
    where a tensor is not contiguous.

    Args:
        mode: Of the fake tensors.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        # A trace is made without these, a step runs with them.
        self._libraries = torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()
        self._known: dict[Any, Layouts | None] = {}

    def laid_out(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any) -> Any:
        """What the fake kernel of a call gives, lying as the real one's."""
        layouts = self.learned(func, args, kwargs, made)
        if layouts is None:
            return made
        leaves, spec = pytree.tree_flatten(made)
        if all(map(_lies_so, leaves, layouts)):
            return made
        return pytree.tree_unflatten(map(self._laid, leaves, layouts), spec)

    def _laid(self, value: Any, strides: tuple[int, ...] | None) -> Any:
        if _lies_so(value, strides):
            return value
        with no_dispatch():
            bare = torch.empty_strided(value.shape, strides, dtype=value.dtype, device="meta")
        return FakeTensor(self._mode, bare, value.device)

    def learned(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any
    ) -> Layouts | None:
        """How the kernel of a call lays out what it makes; None if that is not known.

        Args:
            func: The op.
            args, kwargs: With fake tensors.
            made: What the fake kernel gives.
        """
        if not isinstance(func, torch._ops.OpOverload) or func.namespace not in ("aten", "prims"):
            return None
        if shares_memory(func) or func._schema.is_mutable:
            return None
        try:
            key = func, _key(args), _key(kwargs)
            if key not in self._known:
                self._known[key] = self._learn(func, args, kwargs, made)
            return self._known[key]
        except TypeError:  # something that is not hashable
            return None

    def _learn(self, func: Any, args: Any, kwargs: Any, made: Any) -> Layouts | None:
        read, written = tensors_in((args, kwargs)), tensors_in(made)
        both = [*read, *written]
        if not written or any(t.layout is not torch.strided or t.is_quantized for t in both):
            return None
        devices = {t.device for t in written}
        if len(devices) > 1 or sum(map(_span_bytes, both)) > MAX_BYTES:
            return None
        (device,) = devices
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        kind = find_kind(device.type)
        if kind is None:
            return None
        if not kind.is_host:
            is_plain = all(t.is_contiguous() for t in both)
            if is_random or is_plain or not torch.cuda.is_initialized():
                return None
        real = self._run(func, args, kwargs, is_random)
        leaves, fakes = pytree.tree_leaves(real), pytree.tree_leaves(made)
        if [getattr(t, "shape", None) for t in leaves] != [
            getattr(t, "shape", None) for t in fakes
        ]:
            return None
        return tuple(
            tuple(leaf.stride()) if isinstance(leaf, torch.Tensor) else None for leaf in leaves
        )

    def _run(self, func: Any, args: Any, kwargs: Any, is_random: bool) -> Any:
        """What a kernel gives for made-up values; nothing if it does not take them."""
        with no_dispatch(), _as_in_a_step(self._libraries):
            state = torch.get_rng_state() if is_random else None
            given = pytree.tree_map_only(torch.Tensor, _made_up, (list(args), dict(kwargs)))
            try:
                return func(*given[0], **given[1])
            except Exception:  # a kernel may want other values
                return None
            finally:
                if state is not None:
                    torch.set_rng_state(state)


@contextlib.contextmanager
def _as_in_a_step(libraries: tuple[bool, bool]) -> Iterator[None]:
    was = torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()
    torch._C._set_mkldnn_enabled(libraries[0])
    torch._C._set_cudnn_enabled(libraries[1])
    try:
        with torch.no_grad(), torch._C._DisableAutocast(), torch._C._DisableFuncTorch():
            yield
    finally:
        torch._C._set_mkldnn_enabled(was[0])
        torch._C._set_cudnn_enabled(was[1])


def _made_up(like: torch.Tensor) -> torch.Tensor:
    """A tensor that lies like another."""
    is_number = like.is_floating_point() or like.is_complex()
    whole = torch.full((_span(like),), int(is_number), dtype=like.dtype, device=like.device)
    return whole.as_strided(like.shape, like.stride())


def _span(tensor: torch.Tensor) -> int:
    """Elements from the first to the last."""
    if tensor.numel() == 0:
        return 0
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    last: int = sum((size - 1) * stride for size, stride in sides)
    return 1 + last


def _span_bytes(tensor: torch.Tensor) -> int:
    return int(_span(tensor) * tensor.element_size())


def _key(value: Any) -> Any:
    """What decides a layout of an argument, hashable."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), tuple(value.stride()), value.dtype, value.device
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    if isinstance(value, Mapping):
        return tuple((name, _key(part)) for name, part in value.items())
    return type(value), value


def _lies_so(value: Any, strides: tuple[int, ...] | None) -> bool:
    """Whether a tensor lies so; the stride of a dimension of size 1 says nothing."""
    if strides is None or not isinstance(value, torch.Tensor) or value.stride() == strides:
        return True
    sides = zip(value.shape, value.stride(), strides, strict=True)
    return value.numel() == 0 or all(size == 1 or one == other for size, one, other in sides)


def unsure(graph: torch.fx.Graph, strides: KernelStrides) -> dict[str, Layouts]:
    """Layouts of the calls of a clean graph that a kernel may not keep: name -> as traced.

    Sure is what the kernel was seen to make of the same inputs. Tensors with gaps come to other
    devices with smaller ones, so what is made of such is not, but for pointwise ops, which look at
    the order of strides only.
    """
    found: dict[str, Layouts] = {}
    for node in graph.nodes:
        is_call = node.op == "call_function" and node.target is not operator.getitem
        if not is_call or shares_memory(node.target):
            continue
        made = node.meta["val"]
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        leaves = pytree.tree_leaves(made)
        known = None
        is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
        is_same = is_pointwise or all(map(is_dense, tensors_in((args, kwargs))))
        if is_same:
            known = strides.learned(node.target, args, kwargs, made)
        if known is None or not all(map(_lies_so, leaves, known)):
            found[node.name] = layouts_of(made)
    return found


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no gaps and repeats nothing."""
    return bool(tensor.numel() == _span(tensor))
