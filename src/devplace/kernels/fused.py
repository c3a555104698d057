"""Compiled kernels of a group, one for each input layout."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Sequence
from typing import Any

import torch

from devplace.errors import ExecutionError
from devplace.graph.fusion.call import FusedCall, one_or_all
from devplace.kernels.compiler import Function, compile_source, load, why_no_compiler
from devplace.kernels.kernel_signature import Signature, place_of, signature_of
from devplace.kernels.store import KernelStore

_lock = threading.RLock()  # the compiler is not safe in several threads
_kernels: dict[str, FusedKernel] = {}
_failures: dict[str, str] = {}


def kernel_of_call(call: FusedCall) -> FusedKernel:
    """The kernel of a group; groups that compute the same share one."""
    return _kernels.setdefault(call.name, FusedKernel(call))


def failures() -> dict[str, str]:
    """Groups of this process whose ops run one by one -> why."""
    return dict(_failures)


class FusedKernel:
    """A group as a function of its inputs, compiled when it meets a new layout of them.

    Kernels are taken from disk if they were compiled before. Where that fails, or no compiler is
    there, its ops run one by one.

    Args:
        call: The group.
    """

    def __init__(self, call: FusedCall) -> None:
        self.call = call
        self._functions: dict[Any, Function | None] = {}

    def __call__(self, *tensors: Any) -> Any:
        """The outputs: the tensor, or a tuple of several."""
        return one_or_all(self.run(tensors))

    def in_place(self, *tensors: Any) -> Any:
        """As a call, but every output that replaces an input is written over it."""
        return one_or_all(self.run(tensors, [output for output, _ in self.call.over]))

    def run(self, tensors: Sequence[Any], over: Collection[int] = ()) -> tuple[Any, ...]:
        """All outputs.

        Args:
            tensors: The inputs.
            over: Those outputs that are to be written over the inputs they replace; all other
                inputs keep their values.
        """
        signature = signature_of(self.call, tensors[0].device, tensors)
        function = self.function(signature)
        if function is None:
            made = self.call(*tensors)
            outputs = [made] if self.call.num_outputs == 1 else list(made)
        else:
            given = list(tensors)
            for output, place in signature.writes:
                if output not in over:
                    given[place] = _copy(given[place])
            places = dict(signature.writes)
            rest = iter(function(list(given)))
            count = self.call.num_outputs
            outputs = [given[places[k]] if k in places else next(rest) for k in range(count)]
        for output, place in self.call.over:
            if output in over and outputs[output] is not tensors[place]:
                outputs[output] = tensors[place].copy_(outputs[output])
        return tuple(outputs)

    def function(self, signature: Signature) -> Function | None:
        """The compiled function, None if there is none; compiles it if need be."""
        try:
            return self._functions[signature]
        except KeyError:
            pass
        with _lock:
            if signature not in self._functions:
                self._functions[signature] = self._made(signature)
            return self._functions[signature]

    def _made(self, signature: Signature) -> Function | None:
        reason = why_not_compiled(signature.device)
        if not reason:
            try:
                return load(source_of(self.call, signature))
            except ExecutionError as error:
                reason = str(error)
        _failures[self.call.name] = reason
        return None


def _copy(tensor: Any) -> Any:
    """The same values laid out alike; `clone` lays some tensors out anew."""
    made = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return made.copy_(tensor)


def why_not_compiled(device: str) -> str:
    """Why groups run their ops one by one on a device; empty if they are compiled."""
    if os.environ.get("DEVPLACE_COMPILE") == "0":
        return "compiling is switched off (DEVPLACE_COMPILE=0)"
    return why_no_compiler(device.partition(":")[0])


def source_of(call: FusedCall, signature: Signature) -> str:
    """Source of a compiled group: from disk, else compiled and kept.

    Raises:
        ExecutionError: The compiler refuses it, now or when it was tried before.
    """
    store = KernelStore(place_of(signature.device))
    failure = store.read_failure(signature.key)
    if failure is not None:  # also of one that compiles, but crashed when it was tried
        raise ExecutionError(failure)
    source = store.read(signature.key)
    if source is not None:
        return source
    try:
        source = compile_source(call, signature)
    except ExecutionError as error:
        store.write_failure(signature.key, str(error))
        raise
    store.write(signature.key, source)
    return source
