"""Fake tensors of a trace: kernels no stricter than the real ones, and values known without any."""

from __future__ import annotations

import contextlib
import operator
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import get_proxy_slot
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from devplace.errors import CaptureError
from devplace.step_capture.ctc import FAKES
from devplace.step_capture.sources import memory
from devplace.step_capture.strides import KernelStrides

aten = torch.ops.aten
Call = tuple[Any, Sequence[Any], Mapping[str, Any], int | None]
"""An op, its arguments, and which of its outputs a tensor is, if it has several."""
_NO_CALL: Call = None, (), {}, None
CallOf = Callable[[torch.Tensor], Call | None]
_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_DISTRIBUTIONS = os.path.join(_TORCH, "distributions") + os.sep
# Where these read a truth value, they only check arguments: an error in eager mode, else nothing.
_ANSWERS = {
    (os.path.join(_TORCH, "__init__.py"), "_check_tensor_all_with"): True,
    (os.path.join(_TORCH, "nn", "functional.py"), "gaussian_nll_loss"): False,
    # A hint which kernel to take; without it the mask that is given is applied.
    (os.path.join(_TORCH, "nn", "modules", "transformer.py"), "_detect_is_causal_mask"): False,
}
_CHECKS = ("distribution.py", "constraints.py", "continuous_bernoulli.py", "geometric.py")
_MAX_CALLS, _MAX_NUMBERS = 20, 10_000  # of a value that is computed from numbers alone
_MAX_BYTES = 1 << 30  # of the inputs of a real kernel that is tried
_UNIFORM = (aten.rand.default, aten.rand_like.default)  # at least 0, below 1
_PASSED_ON = (
    *(aten.detach.default, aten.view.default, aten._unsafe_view.default, aten.squeeze.default),
    *(aten.alias.default, aten.reshape.default, aten.select.int, aten.unsqueeze.default),
)
# A number in [0, 1) against a limit: the limits up to which, or from which on, it is decided.
_DECIDED: dict[Any, Any] = {
    aten.lt.Scalar: lambda c: False if c <= 0 else (True if c >= 1 else None),
    aten.le.Scalar: lambda c: False if c < 0 else (True if c >= 1 else None),
    aten.gt.Scalar: lambda c: True if c < 0 else (False if c >= 1 else None),
    aten.ge.Scalar: lambda c: True if c <= 0 else (False if c >= 1 else None),
}


class Fakes:
    """The fake tensors of one trace.

    Attributes:
        mode: Their mode; torch's own class, for which operators with sub-graphs have rules.
        strides: How kernels lay out what they make.
        tracer: That of the trace, once it has begun.
        call_of: Tells the op that made a tensor, and its arguments, while the step is rehearsed.
        unknown: Where a value was first asked for that is not known.
        read_outside: Tensors from outside the step whose values were read.
    """

    def __init__(self, place: Callable[[], str] = lambda: "the step") -> None:
        self.unknown = ""
        self.read_outside: list[torch.Tensor] = []
        self._place = place
        self.mode: Any = FakeTensorMode(allow_non_fake_inputs=True)
        self.strides = KernelStrides(self.mode)
        self.tracer: Any = None
        self.call_of: CallOf | None = None
        self._dispatch = self.mode.dispatch
        self.mode.dispatch = self.dispatch

    def dispatch(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """As torch's, but for values that are known, and for kernels whose fake one refuses."""
        if func is aten._local_scalar_dense.default and not isinstance(args[0], FakeTensor):
            self.read_outside.append(args[0])
        elif func is aten._local_scalar_dense.default:
            known = self._known(args[0])
            if known is not None:
                return known
        elif func is aten.equal.default:
            given = self._computed(args, _MAX_CALLS)
            if given is not None:
                return torch.equal(*given)
        if func is aten._efficientzerotensor.default:  # rules of their own would take them to meta
            func = aten.zeros.default
        kwargs = kwargs or {}
        fake = FAKES.get(func)
        if fake is not None:
            with self.mode:
                return fake(*args, **kwargs)
        try:
            made = self._dispatch(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            self.is_unknown()
            raise
        except RuntimeError as error:
            if type(error) is not RuntimeError or func.namespace != "aten":
                raise
            made = self._by_real_kernel(func, args, kwargs)
            if made is None:
                raise
        return self.strides.laid_out(func, args, kwargs, made)

    def is_unknown(self) -> None:
        """A value is asked for that is not known; the error that follows may be caught."""
        self.unknown = self.unknown or self._place()

    def refuse_caught(self) -> None:
        """Refuse a step that went on without a value it asked for: eager mode has it."""
        if self.unknown:
            raise CaptureError(
                f"Control flow must not depend on tensor values: {self.unknown} reads a value, and "
                f"goes on without it, as the error that capture raises there is caught. Use "
                f"torch.where, or compute it outside the step."
            )

    @contextlib.contextmanager
    def memory_hidden(self) -> Iterator[None]:
        """Inside, memory of tensors without values is not read past the mode."""
        kind: Any = torch.Tensor

        def hidden(name: str) -> Callable[..., Any]:
            original = getattr(kind, name)

            def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                if not isinstance(tensor, FakeTensor):
                    self.read_outside.append(tensor)
                elif name != "tolist":  # which asks the mode for each value
                    self.is_unknown()
                    raise RuntimeError(f"data-dependent: .{name}()")
                return original(tensor, *args, **kwargs)

            return read

        with contextlib.ExitStack() as stack:
            for name in ("numpy", "__array__", "__dlpack__", "tolist"):
                stack.enter_context(mock.patch.object(kind, name, hidden(name)))
            stack.enter_context(mock.patch.object(kind, "data_ptr", address))
            yield

    def _known(self, tensor: Any) -> Any:
        """A value that does not depend on what the step is given."""
        if tensor.dtype is torch.bool:
            answer = _answer()
            known = self._comparison(tensor) if answer is None else answer
            if known is not None:
                return known
        made = self._computed(tensor, _MAX_CALLS)
        return made.item() if isinstance(made, torch.Tensor) else None

    def _computed(self, value: Any, calls_left: int) -> Any:
        """The real tensor of a fake one that is computed from numbers alone; None if it is not."""
        if isinstance(value, (list, tuple)):
            parts = [self._computed(part, calls_left) for part in value]
            is_whole = all(p is not None or v is None for p, v in zip(parts, value, strict=True))
            return parts if is_whole else None
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if not isinstance(value, (torch.Tensor, torch.fx.Node)):
            return value
        target, args, kwargs, place = self._call(value)
        if target in (aten.lift_fresh.default, aten.lift_fresh_copy.default):
            return self._lifted(args[0])
        if calls_left == 0 or getattr(target, "namespace", "") != "aten":
            return None
        if target._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
            return None
        given = self._computed([*args, *kwargs.values()], calls_left - 1)
        if given is None:
            return None
        named = dict(zip(kwargs, given[len(args) :], strict=True))
        with _disable_current_modes():
            made = target(*given[: len(args)], **named)
        made = made if place is None else made[place]
        is_small = isinstance(made, torch.Tensor) and made.numel() <= _MAX_NUMBERS
        return made if is_small else None

    def _lifted(self, value: Any) -> Any:
        """A tensor made of numbers in the step; None if it is large or stands for another."""
        if isinstance(value, torch.fx.Node):
            value = getattr(self.tracer.root, str(value.target), None)
        is_real = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
        return value if is_real and value.numel() <= _MAX_NUMBERS else None

    def _comparison(self, tensor: Any) -> bool | None:
        """That of a random number in [0, 1) with a limit outside: a layer dropped at rate 0."""
        target, args, *_ = self._origin(tensor)
        if target not in _DECIDED or not isinstance(args[1], (int, float)):
            return None
        is_uniform = self._origin(args[0])[0] in _UNIFORM
        return _DECIDED[target](args[1]) if is_uniform else None

    def _origin(self, value: Any) -> Call:
        """The op that made a value which views and copies pass on, and its arguments."""
        call = self._call(value)
        while call[0] in _PASSED_ON:
            call = self._call(call[1][0])
        return call

    def _call(self, value: Any) -> Call:
        """The op that made a tensor, or a node; None if that is not known."""
        if self.call_of is not None:
            return self.call_of(value) or _NO_CALL
        if isinstance(value, torch.Tensor):
            slot: Any = None if self.tracer is None else get_proxy_slot(value, self.tracer, None)
            value = None if slot is None else slot.proxy.node
        if not isinstance(value, torch.fx.Node):
            return _NO_CALL
        place = None
        if value.target is operator.getitem:
            value, place = value.args
        return value.target, value.args, value.kwargs, place

    def _by_real_kernel(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What the real kernel makes of zeros, on the CPU; None if it refuses them, too."""
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        size = sum(t.numel() * t.element_size() for t in tensors)
        if (
            func._schema.is_mutable
            or size > _MAX_BYTES
            or not all(map(self.mode.is_our_fake, tensors))
        ):
            return None
        device = tensors[0].device if tensors else torch.device("cpu")

        def real(leaf: Any) -> Any:
            if isinstance(leaf, torch.device):
                return torch.device("cpu")
            if not isinstance(leaf, FakeTensor):
                return leaf
            made = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="cpu")
            return made.zero_()

        with _disable_current_modes(), torch.random.fork_rng(devices=[]):
            given, named = pytree.tree_map(real, (tuple(args), dict(kwargs)))
            memories = {
                t.untyped_storage()._cdata
                for t in pytree.tree_leaves((given, named))
                if isinstance(t, torch.Tensor)
            }
            try:
                made = func(*given, **named)
            except Exception:
                return None
        found = [t for t in pytree.tree_leaves(made) if isinstance(t, torch.Tensor)]
        if any(t.untyped_storage()._cdata in memories for t in found):
            return None  # a view, which only a fake kernel can make of a fake tensor

        def fake(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            with self.mode:
                return torch.empty_strided(
                    leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device
                )

        return pytree.tree_map(fake, made)


def _answer() -> bool | None:
    """What torch's own code that reads a truth value goes on with; None if it may be either."""
    frame = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        answer = _ANSWERS.get((filename, frame.f_code.co_name))
        if answer is not None:
            return answer
        if filename.startswith(_DISTRIBUTIONS):
            return True if os.path.basename(filename) in _CHECKS else None
        if not filename.startswith((_TORCH, _PACKAGE, "<")):
            return None
        frame = frame.f_back  # type: ignore[assignment]
    return None


def address(tensor: torch.Tensor) -> int:
    """As `data_ptr`; of a tensor without values a number that those over its memory share."""
    if not isinstance(tensor, FakeTensor):
        return int(torch._C.TensorBase.data_ptr(tensor))
    return int(memory(tensor) + tensor.storage_offset() * tensor.element_size())


class _Unequal(TorchDispatchMode):  # type: ignore[misc]
    """Inside, no two tensors are equal."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return False if func is aten.equal.default else func(*args, **(kwargs or {}))


@contextlib.contextmanager
def windows_trusted() -> Iterator[None]:
    """Let `torch.istft` not look whether its windows leave a gap: an error, or nothing."""
    original = torch.istft

    def istft(*args: Any, **kwargs: Any) -> Any:
        with _Unequal():
            return original(*args, **kwargs)

    with mock.patch.object(torch, "istft", istft):
        yield
