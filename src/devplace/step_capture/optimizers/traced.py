"""Updates of torch.optim traced from torch's own single-tensor code.

The code is asked for the form that a compiler or a CUDA graph takes (`capturable`), in which the
step number is a tensor; the learning rate is one, too. Both are 0-dim float64 inputs of the step.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from devplace.step_capture.optimizers.wide import LOW_PRECISION, Exact

KINDS = {
    name.lower(): getattr(torch.optim, name)
    for name in (
        *("Adadelta", "Adafactor", "Adagrad", "Adamax", "ASGD", "Muon", "NAdam", "RAdam"),
        *("RMSprop", "Rprop"),
    )
    if hasattr(torch.optim, name)
}
"""Classes whose own step is traced, by the name of their rule."""

FORMS = ("foreach", "fused", "capturable", "differentiable")  # of the code, not of what it computes
Tensors = Mapping[str, torch.Tensor]


class Fresh(NamedTuple):
    """Optimizer state of a parameter before its first step: alike everywhere."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    value: float


def fresh_state(kind: str, options: Mapping[str, Any], param: torch.Tensor) -> dict[str, Fresh]:
    """State that the first step of an optimizer begins with, by name; its `step` among it."""
    shapes = _begun(kind, options, torch.empty_like(param, device="meta"))
    small = torch.zeros([1] * param.ndim, dtype=param.dtype, device="cpu")
    values = _begun(kind, options, small)
    return {
        name: Fresh(tuple(shapes[name].shape), value.dtype, float(value.reshape(-1)[0]))
        for name, value in values.items()
        if isinstance(value, torch.Tensor)
    }


def _begun(kind: str, options: Mapping[str, Any], param: torch.Tensor) -> Mapping[str, Any]:
    """What the state of a parameter is when its first update begins."""
    twin = _twin(kind, options, param)
    with _replaced(_names(kind), kind, lambda *args, **kwargs: None):
        _step(twin, param, torch.zeros_like(param))
    state: Mapping[str, Any] = twin.state[param]
    return state


def own_step(
    kind: str,
    options: Mapping[str, Any],
    param: torch.Tensor,
    grad: torch.Tensor,
    state: Tensors,
    scalars: Tensors,
    exact: Exact,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """New parameter and new state; what is given is written in place.

    Args:
        kind: Name of the rule.
        options: Hyper-parameters of the parameter's group.
        param, grad: The parameter, and its gradient.
        state: By name, without `step`.
        scalars: `lr`, and as `step` the number of steps made before this one.
        exact: How 16-bit tensors are computed with numbers.
    """
    twin = _twin(kind, options, param)
    group = twin.param_groups[0]
    group.update({"lr": scalars["lr"]} | ({"capturable": True} if "capturable" in group else {}))
    twin.state[param] = {**state, "step": scalars["step"].clone()}
    names = _names(kind)
    with (
        _replaced(vars(torch.compiler), "is_compiling", lambda: True),
        _replaced(names, "min", _least),
        _replaced(names, "max", _greatest),
        _Numbers([each for each in state.values() if each.ndim == 0], exact),
    ):
        _step(twin, param, grad)
    return param, dict(state)


def _twin(kind: str, options: Mapping[str, Any], param: torch.Tensor) -> Any:
    """An optimizer of the class over one parameter."""
    twin: Any = KINDS[kind]([param])
    group = twin.param_groups[0]
    group.update(options)
    group.update({form: False for form in FORMS if form in group})
    return twin


def _step(twin: Any, param: torch.Tensor, grad: torch.Tensor) -> None:
    """Its step, without what torch wraps around steps."""
    before, param.grad = param.grad, grad
    try:
        with torch.no_grad():
            inspect.unwrap(type(twin).step)(twin)
    finally:
        param.grad = before


def _names(kind: str) -> dict[str, Any]:
    """Global names of the module that has the code."""
    found: dict[str, Any] = inspect.unwrap(KINDS[kind].step).__globals__
    return found


@contextlib.contextmanager
def _replaced(names: dict[str, Any], name: str, value: Any) -> Iterator[None]:
    before = names.get(name, _replaced)
    names[name] = value
    try:
        yield
    finally:
        if before is _replaced:
            del names[name]
        else:
            names[name] = before


def _least(first: Any, second: Any) -> Any:
    return _chosen(torch.minimum, min, first, second)


def _greatest(first: Any, second: Any) -> Any:
    return _chosen(torch.maximum, max, first, second)


def _chosen(of_tensors: Any, of_numbers: Any, *both: Any) -> Any:
    """As Python's `min` or `max` of two numbers, of which some are tensors."""
    known = next((each for each in both if isinstance(each, torch.Tensor)), None)
    if known is None:
        return of_numbers(*both)
    return of_tensors(
        *(
            torch.as_tensor(each, dtype=known.dtype, device=known.device)
            if not isinstance(each, torch.Tensor)
            else each
            for each in both
        )
    )


class _Numbers(TorchFunctionMode):  # type: ignore[misc]
    """Takes 0-dim float64 tensors where torch's code has numbers, and as precisely.

    With tensors of 16 bits a kernel computes in 32 bits if it is given numbers, but would round
    0-dim tensors; so such ops compute in 32 bits here.

    Args:
        small: 0-dim tensors of the state, which the code reads as numbers.
        exact: How 16-bit tensors are computed with numbers.
    """

    def __init__(self, small: Sequence[torch.Tensor], exact: Exact) -> None:
        super().__init__()
        self._small, self._exact = small, exact

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.item:
            return args[0].double()
        writes = _writes(func)
        if writes and self._is_small(args[0]):
            rest = [a.to(args[0].dtype) if _is_number(a) else a for a in args[1:]]
            return func(args[0], *rest, **kwargs)
        args = tuple(a.double() if self._is_small(a) else a for a in args)
        if not any(map(_is_number, (*args, *kwargs.values()))):
            return func(*args, **kwargs)
        low = next((a.dtype for a in args if _is_low(a)), None)
        if low is None:
            return _with_numbers(func, args, kwargs)
        known = _as_exact(func, args, kwargs)
        if known is not None:
            made = self._exact(*known)
        else:
            made = _with_numbers(func, tuple(a.float() if _is_low(a) else a for a in args), kwargs)
        return args[0].copy_(made) if writes else made.to(low)

    def _is_small(self, value: Any) -> bool:
        return any(value is each for each in self._small)


def _with_numbers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of torch some of whose numbers are 0-dim tensors."""
    name = func.__name__
    if name == "add_" and _is_number(kwargs.get("alpha")):
        return args[0].addcmul_(args[1], kwargs["alpha"])
    if name in ("addcmul_", "addcdiv_") and _is_number(kwargs.get("value")):
        return func(args[0], args[1] * kwargs["value"], *args[2:])
    if name in ("lerp", "lerp_") and _is_number(args[2]):
        args = (*args[:2], args[2].to(args[0].dtype))
    return func(*args, **kwargs)


def _as_exact(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Name and tensors of a call of `_Numbers` as an op of `wide.FORMS`; None if it is none."""
    name = func.__name__.strip("_")
    name = name[1:] if name in ("imul", "itruediv") else name
    name = {"truediv": "div"}.get(name, name)
    if not all(_is_low(each) for each in args[:-1]) or len(args) < 2:
        return None
    if name in ("mul", "div") and len(args) == 2 and not kwargs and _is_number(args[1]):
        return (name, *args)
    number = kwargs.get("alpha" if name == "add" else "value")
    if set(kwargs) > {"alpha", "value"} or not (_is_low(args[-1]) and _is_number(number)):
        return None
    if (name, len(args)) == ("add", 2):
        return ("addcmul", *args, number)
    return ("addcdiv", *args, number) if (name, len(args)) == ("addcdiv", 3) else None


def _writes(func: Any) -> bool:
    """Whether a method writes into its tensor: `mul_`, or `*=`."""
    name = func.__name__
    is_method = name.endswith("_") and not name.startswith("_")
    return is_method or name in ("__iadd__", "__isub__", "__imul__", "__itruediv__")


def _is_number(value: Any) -> bool:
    is_tensor = isinstance(value, torch.Tensor)
    return is_tensor and value.ndim == 0 and value.dtype is torch.float64


def _is_low(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in LOW_PRECISION
