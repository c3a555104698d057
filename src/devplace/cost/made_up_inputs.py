"""Made-up arguments for timing an op: right shapes and layouts, valid integers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from devplace.cost.op_signature import DEVICE, INTEGERS, OpCall, TensorSpec
from devplace.kernels import kernel_of

MAX_COPIES = 256


def num_bytes(spec: TensorSpec) -> int:
    """Bytes of storage a tensor argument spans."""
    if 0 in spec.shape:
        return 0
    pairs = zip(spec.shape, spec.stride, strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in pairs)
    return span * int(getattr(torch, spec.dtype).itemsize)


def make_tensor(spec: TensorSpec, device: Any, generator: Any) -> Any:
    """A tensor laid out like `spec`: normal floats, integers in its range, random bools."""
    dtype = getattr(torch, spec.dtype)
    span = max(1, num_bytes(spec) // dtype.itemsize)
    if spec.dtype in INTEGERS:
        flat = torch.randint(0, max(1, spec.bound), (span,), device=device, generator=generator)
    elif spec.dtype == "bool":
        flat = torch.randint(0, 2, (span,), device=device, generator=generator)
    else:
        plain = torch.float64 if spec.dtype in ("float64", "complex128") else torch.float32
        flat = torch.empty(span, dtype=plain, device=device).normal_(0.0, 0.3, generator=generator)
        flat = flat.abs_() if 0 in spec.stride or len(spec.shape) < 2 else flat
    return flat.to(dtype).as_strided(spec.shape, spec.stride)


def lay_out(value: Any, spec: TensorSpec, device: Any) -> Any:
    """A value laid out like `spec`, in memory of its own; None if it is of another form."""
    dtype = getattr(torch, spec.dtype)
    if tuple(value.shape) != spec.shape or value.dtype != dtype:
        return None
    flat = torch.zeros(max(1, num_bytes(spec) // dtype.itemsize), dtype=dtype, device=device)
    laid = flat.as_strided(spec.shape, spec.stride)
    firsts = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in spec.stride)
    try:
        laid[firsts].copy_(value[firsts])  # dimensions that are expanded hold one value
    except RuntimeError:  # overlapping otherwise
        return None
    return laid


class Arguments:
    """Arguments of one call, in as many copies as keep the cold ones out of the cache.

    Args:
        call: The call.
        device: Where they lie.
        cold_bytes: Bytes that must be touched before a copy is read again.
        most_bytes: Bytes all copies may take.
        seed: Of their values.
        real: Place among the call's tensors -> value it gets; the others are made up.
    """

    def __init__(
        self,
        call: OpCall,
        device: Any,
        cold_bytes: int,
        most_bytes: int,
        seed: int = 0,
        real: Mapping[int, Any] | None = None,
    ) -> None:
        self._real = real or {}
        self._call = call
        self._device = torch.device(device)
        self._generator = torch.Generator(self._device).manual_seed(seed)
        specs = list(_specs((call.args, call.kwargs)))
        self.input_bytes = sum(map(num_bytes, specs))
        cold = sum(num_bytes(spec) for spec in specs if spec.is_cold)
        copies = 1 if cold == 0 else min(MAX_COPIES, 1 + cold_bytes // cold)
        spare = max(0, most_bytes - self.input_bytes) // max(1, cold)
        self.copies = max(1, min(copies, 1 + spare))
        shared: dict[int, Any] = {}
        self._sets = [self._fill(shared) for _ in range(self.copies)]
        self._seeds = host_seeds(call)

    def run(self, number: int) -> Any:
        """Call the op with one of the copies."""
        args, kwargs = self.arguments(number)
        if self._seeds and not torch.cuda.is_current_stream_capturing():
            args = tuple(self._seeds.get(place, arg) for place, arg in enumerate(args))
        return kernel_of(self._call.target, self._device.type, in_place=True)(*args, **kwargs)

    def arguments(self, number: int) -> tuple[Any, Any]:
        """Those of one call: positional and named."""
        chosen: tuple[Any, Any] = self._sets[number % self.copies]
        return chosen

    def _make(self, place: int, spec: TensorSpec) -> Any:
        real = self._real.get(place)
        laid = None if real is None else lay_out(real, spec, self._device)
        return make_tensor(spec, self._device, self._generator) if laid is None else laid

    def _fill(self, shared: dict[int, Any]) -> tuple[Any, Any]:
        count = iter(range(1_000_000))

        def make(spec: TensorSpec) -> Any:
            place = next(count)
            if place not in shared:
                shared[place] = self._make(place, spec)
            elif spec.is_cold:
                return _copy(shared[place])
            return shared[place]

        return _map(self._call.args, make, self._device), _map(
            self._call.kwargs, make, self._device
        )


def _copy(tensor: Any) -> Any:
    """The same values in memory of their own, laid out alike."""
    flat = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
    return flat.clone().as_strided(tensor.shape, tensor.stride())


def host_seeds(call: OpCall) -> dict[int, Any]:
    """Seed and offset of attention's backward by place among the arguments, in host memory.

    Outside of a capture these ops follow the addresses on the host, in a capture on the device;
    the wrong one crashes the process. Seeds of other types are always on the device.
    """
    if not any(name in str(call.target) for name in ("efficient_attention", "flash_attention")):
        return {}
    names = [argument.name for argument in call.target._schema.arguments]
    return {
        place: torch.zeros(arg.shape, dtype=torch.int64, device="cpu")
        for place, (name, arg) in enumerate(zip(names, call.args, strict=False))
        if name in ("philox_seed", "philox_offset") and arg.dtype == "int64"
    }


def _specs(arg: Any) -> Any:
    if isinstance(arg, TensorSpec):
        yield arg
    elif isinstance(arg, (list, tuple)):
        for item in arg:
            yield from _specs(item)
    elif isinstance(arg, dict):
        yield from _specs(list(arg.values()))


def _map(arg: Any, make: Callable[[TensorSpec], Any], device: Any) -> Any:
    if isinstance(arg, TensorSpec):
        return make(arg)
    if arg is DEVICE:
        return device
    if isinstance(arg, list):
        return [_map(item, make, device) for item in arg]
    if isinstance(arg, tuple):
        return tuple(_map(item, make, device) for item in arg)
    if isinstance(arg, dict):
        return {key: _map(value, make, device) for key, value in arg.items()}
    return arg
