"""What a captured step takes for granted about the model, checked before each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from devplace.errors import PlanMismatchError
from devplace.graph.program import Program

_GONE = object()
Get = Callable[[int], Any]


class CapturedFacts:
    """Flags, attributes and variables that a step has read; it computes what they said at capture.

    Args:
        program: Of the captured step.
        model: The user's model; names that it lacks are not checked.
    """

    def __init__(self, program: Program, model: Any) -> None:
        self._model = model
        self._training = program.training
        modules = dict(model.named_modules())
        self._modes = [
            (modules[name], is_training, name)
            for name, is_training in program.modes.items()
            if name in modules
        ]
        self._attributes = [
            (modules[name], vars(modules[name]), key, value, name)
            for name, values in program.attributes.items()
            if name in modules
            for key, value in values.items()
        ]
        self._variables = program.variables
        self._parts = [
            (module._modules, key, part, f"{name}.{key}" if name else key)
            for name, module in modules.items()
            for key, part in module._modules.items()
        ]
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self._trainable = [
            (parameters[name], is_trained, name)
            for name, is_trained in program.trainable.items()
            if name in parameters
        ]

    def check(self) -> None:
        """See that all is as at capture. About 50 ns per module, parameter and attribute read.

        Raises:
            PlanMismatchError: Names what is not.
        """
        if self._model.training != self._training:
            raise _wrong_mode("it", "model", self._training)
        for module, is_training, name in self._modes:
            if module.training != is_training:
                where = f"model.get_submodule({name!r})"
                raise _wrong_mode(f"module {name!r}", where, is_training)
        for parameter, is_trained, name in self._trainable:
            if parameter.requires_grad != is_trained:
                now, then = ("frozen", "trained") if is_trained else ("to be trained", "frozen")
                raise PlanMismatchError(
                    f"What is trained is fixed at capture: parameter {name!r} is {now}, the step "
                    f"was captured with it {then}. Set its requires_grad to {is_trained}, or "
                    f"sync and capture again."
                )
        self.check_parts()
        self._check_values()

    def check_parts(self) -> None:
        """See that the model is made of the modules it was made of.

        Raises:
            PlanMismatchError: Names one that was replaced or removed.
        """
        for parts, key, part, name in self._parts:
            if parts.get(key) is not part:
                raise PlanMismatchError(
                    f"The parts of a model are fixed at capture: module {name!r} was replaced or "
                    f"removed. Put it back, or capture again."
                )

    def _check_values(self) -> None:
        for module, own, key, value, name in self._attributes:
            now = own.get(key, _GONE)
            if now is _GONE:
                now = getattr(module, key, _GONE)  # of its class
            if now is not value and now != value:
                where = f"module {name!r}" if name else "the model"
                raise _other_value(f"attribute {key!r} of {where}", now, value)
        for variable in self._variables:
            now = variable.present()
            if now is not variable.value and now != variable.value:
                raise _other_value(f"{variable.name!r}", now, variable.value)


class SharedValues:
    """Tensors of the user's that a step has copies of; sees when the user changes one.

    What is written through `.data` is not seen.

    Args:
        program: Of the captured step.
        tensors: Name -> parameter or buffer of the model.
    """

    def __init__(self, program: Program, tensors: dict[str, Any]) -> None:
        self._held = [
            (b.op, b.kind, b.key, tensors[b.key] if b.kind != "constant" else b.value)
            for b in program.bindings
            if b.kind in ("parameter", "buffer", "constant")
        ]
        self._held = [
            held
            for held in self._held
            if isinstance(held[3], torch.Tensor) and not held[3].is_inference()
        ]
        self.note()

    def note(self) -> None:
        """They are now as the step has them."""
        self._versions = [held[3]._version for held in self._held]

    def check(self, get: Get, is_synced: bool) -> None:
        """See that nobody wrote to them since. About 30 ns each.

        Args:
            get: Source op -> the step's value.
            is_synced: Whether the user's values were the step's, so that a tensor which was written
                to and put back does no harm.

        Raises:
            PlanMismatchError: Names one.
        """
        if [held[3]._version for held in self._held] == self._versions:
            return
        for (op, kind, key, tensor), version in zip(self._held, self._versions, strict=True):
            if tensor._version == version:
                continue
            if (is_synced or kind == "constant") and _is_equal(tensor, get(op)):
                continue
            raise _written(kind, key, tensor)
        self.note()


def _is_equal(one: Any, other: Any) -> bool:
    if one.is_meta or one.shape != other.shape:
        return False
    return bool(torch.equal(one.detach().cpu(), other.detach().cpu()))


def _written(kind: str, key: str, tensor: Any) -> PlanMismatchError:
    if kind == "constant":
        return PlanMismatchError(
            f"A step has its own copies of tensors outside the model: one of shape "
            f"{list(tensor.shape)} was written to since. Call step.sync(), then step.load() to "
            f"take its values."
        )
    return PlanMismatchError(
        f"A step has its own copies of parameters and buffers: {kind} {key!r} of the model was "
        f"written to since. Call step.load() to take the model's values, or step.sync() to "
        f"overwrite them with the step's."
    )


def _other_value(what: str, now: Any, captured: Any) -> PlanMismatchError:
    found = "gone" if now is _GONE else repr(now)
    return PlanMismatchError(
        f"Plain values that a step reads are fixed at capture: {what} is {found}, the step was "
        f"captured with {captured!r}. Set it back, or sync and capture again."
    )


def _wrong_mode(part: str, call: str, captured: bool) -> PlanMismatchError:
    now, then = ("eval", "train") if captured else ("train", "eval")
    return PlanMismatchError(
        f"The model must be in the mode it was captured in: {part} is in {now} mode, "
        f"the step was captured in {then} mode. Call {call}.{then}(), or capture again in {now} "
        f"mode."
    )
