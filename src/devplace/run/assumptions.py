"""Assumptions of a captured step about the model, checked before each step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from operator import attrgetter, is_not
from typing import Any, ClassVar
from weakref import WeakSet

import torch

from devplace.errors import PlanMismatchError
from devplace.graph.program import Binding, Program
from devplace.step_capture.guards.rechecked import own_names
from devplace.step_capture.guards.values import (
    NOTHING,
    difference,
    differs,
    is_computed_with,
    shown,
)
from devplace.step_capture.sources import memory

Get = Callable[[int], Any]
_LISTS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)


class CapturedFacts:
    """Flags, attributes and variables that a step has read; it computes what they said at capture.

    Args:
        program: Of the captured step.
        model: The user's model; names that it lacks are not checked.
        autocast: Low-precision dtype of the captured forward pass, such as `bfloat16`.
    """

    def __init__(self, program: Program, model: Any, autocast: str | None = None) -> None:
        self._model = model
        self._device, self._autocast = program.device, autocast
        self._training = program.training
        modules = dict(model.named_modules())
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self._modes = _Flags("training", modules, program.modes)
        self._trainable = _Flags("requires_grad", parameters, program.trainable)
        self._attributes = [
            (modules[name], own_names(modules[name]), key, value, name)
            for name, values in program.attributes.items()
            if name in modules
            for key, value in values.items()
        ]
        self._variables = program.variables
        self._parts = [
            (name, module._modules, dict(module._modules), isinstance(module, _LISTS))
            for name, module in modules.items()
            if module._modules or isinstance(module, _LISTS)
        ]

    def check(self) -> None:
        """See that all is as at capture. About 50 ns per module, parameter and attribute read.

        Raises:
            PlanMismatchError: Names what is not.
        """
        if self._model.training != self._training:
            raise _wrong_mode("it", "model", self._training)
        for name, is_training in self._modes.changed():
            raise _wrong_mode(f"module {name!r}", f"model.get_submodule({name!r})", is_training)
        for name, is_trained in self._trainable.changed():
            now, then = ("frozen", "trained") if is_trained else ("to be trained", "frozen")
            raise PlanMismatchError(
                f"What is trained is fixed at capture: parameter {name!r} is {now}, the step "
                f"was captured with it {then}. Set its requires_grad to {is_trained}, or "
                f"sync and capture again."
            )
        self.check_parts()
        self._check_values()
        if torch.is_autocast_enabled(self._device):
            self._check_autocast()

    def _check_autocast(self) -> None:
        """A surrounding autocast block does nothing to a step: it must be the captured one."""
        now = str(torch.get_autocast_dtype(self._device)).removeprefix("torch.")
        if now != self._autocast:
            raise PlanMismatchError(
                f"Autocast is fixed at capture: the step is called under autocast in {now}, and "
                f"was captured {f'in {self._autocast}' if self._autocast else 'without'}. Call it "
                f"outside of the block, or capture again with autocast=torch.{now}."
            )

    def check_parts(self) -> None:
        """See that the model is made of the modules it was made of.

        Raises:
            PlanMismatchError: Names one that was replaced or removed, or added to a list.
        """
        for path, parts, known, is_list in self._parts:
            if parts == known:
                continue
            for key in {**known, **parts} if is_list else known:
                if parts.get(key) is not known.get(key):
                    name = f"{path}.{key}" if path else key
                    does, way = ("replaced or removed", "Put it back")
                    if key not in known:
                        does, way = "added", "Remove it"
                    raise PlanMismatchError(
                        f"The parts of a model are fixed at capture: module {name!r} was {does}. "
                        f"{way}, or capture again."
                    )

    def _check_values(self) -> None:
        for module, own, key, value, name in self._attributes:
            now = own[0].get(key, NOTHING)
            if now is NOTHING:
                now = _further(module, own, key, value)
            if now is not value and differs(now, value):
                where = f"module {name!r}" if name else "the model"
                path, now, value = difference(now, value)
                raise _other_value(f"attribute {key + path!r} of {where}", now, value)
        for variable in self._variables:
            now = variable.present()
            if now is not variable.value and differs(now, variable.value):
                path, now, value = difference(now, variable.value)
                raise _other_value(f"{variable.name + path!r}", now, value)


def _further(module: Any, own: tuple[dict[str, Any], ...], key: str, value: Any) -> Any:
    """An attribute that is not in a module's first dict: of its class, a buffer, or missing."""
    if value is NOTHING:  # looking it up would raise
        return next((names[key] for names in own if key in names), NOTHING)
    return getattr(module, key, NOTHING)


class _Flags:
    """A flag of some named objects, and what it was."""

    def __init__(self, flag: str, objects: Mapping[str, Any], values: Mapping[str, bool]) -> None:
        self._get = attrgetter(flag)
        self._names = [name for name in values if name in objects]
        self._objects = [objects[name] for name in self._names]
        self._values = [values[name] for name in self._names]

    def changed(self) -> list[tuple[str, bool]]:
        """Names of those that differ, with what the flag was."""
        now = list(map(self._get, self._objects))
        if now == self._values:
            return []
        rows = zip(self._names, self._values, now, strict=True)
        return [(name, was) for name, was, is_now in rows if was != is_now]


class SharedValues:
    """Tensors of the user's that a step has copies of; sees when the user changes one.

    What is written in place through `.data` is not seen.

    Args:
        program: Of the captured step.
        model: The user's model.
        optimizer: The user's, if there is one.
        replaced: Source ops whose values the step replaces.
        owner: What several of these belong to that do not take turns; by default it is alone.
    """

    _ahead: ClassVar[WeakSet[SharedValues]] = WeakSet()
    """Those whose step has trained its own copies since it was synced or loaded."""

    def __init__(
        self,
        program: Program,
        model: Any,
        optimizer: Any = None,
        replaced: Collection[int] = frozenset(),
        owner: object = None,
    ) -> None:
        self._owner = self if owner is None else owner
        self._bindings: list[Binding] = []
        self._places: list[tuple[Any, str]] = []
        for binding in program.bindings:
            place, key = _place(binding, model, optimizer)
            tensor = place.get(key)
            is_new = tensor is None and binding.kind == "state"
            if is_new or (tensor is not None and not tensor.is_inference()):  # without versions
                self._bindings.append(binding)
                self._places.append((place, key))
        self.note()
        rows = zip(self._bindings, self._tensors, strict=True)
        mine = [(b.key, t) for b, t in rows if b.op in replaced and b.kind != "state"]
        self._trained = {memory(tensor): key for key, tensor in mine}

    def go_ahead(self) -> None:
        """The step has made new values of those that it replaces."""
        if self._trained:
            self._ahead.add(self)

    def let_go(self) -> None:
        """The step is over: what it has made since its last sync is nobody's."""
        self._ahead.discard(self)

    def note(self) -> None:
        """They are now as the step has them."""
        self.let_go()
        self._tensors = self._present()
        self._versions = list(map(_version, self._tensors))

    def are_written(self) -> bool:
        """Whether the user has written to one of them, or put another in its place."""
        is_other = any(map(is_not, self._present(), self._tensors))
        return is_other or list(map(_version, self._tensors)) != self._versions

    def _present(self) -> list[Any]:
        return [place.get(key) for place, key in self._places]

    def check(self, get: Get, is_synced: bool) -> None:
        """See that nobody wrote to them, or put others in their place. About 100 ns each.

        Args:
            get: Source op -> the step's value.
            is_synced: Whether the user's values were the step's, so that a tensor which was written
                to and put back does no harm.

        Raises:
            PlanMismatchError: Names one, also if another step has newer values of it.
        """
        for other in tuple(self._ahead):
            if other._owner is not self._owner:
                self._check_other(other)
        if not self.are_written():
            return
        rows = zip(self._bindings, self._tensors, self._present(), self._versions, strict=True)
        for binding, tensor, now, version in rows:
            if now is tensor and _version(tensor) == version:
                continue
            may_be_equal = now is tensor and (is_synced or binding.kind == "constant")
            if not (may_be_equal and _is_equal(tensor, get(binding.op))):
                raise _written(binding.kind, binding.key, tensor)
        self.note()

    def _check_other(self, other: SharedValues) -> None:
        mine = (memory(tensor) for tensor in self._tensors if tensor is not None)
        newer = next((m for m in mine if m in other._trained), None)
        if newer is not None:
            raise PlanMismatchError(
                f"Steps over one model take turns: another step has trained "
                f"{other._trained[newer]!r} since it was synced, and this one has older values of "
                f"it. Call sync() of the other step, then load() of this one, or close the other."
            )


class _StateOf:
    """State of a parameter in an optimizer, which may get another, as by `load_state_dict`."""

    def __init__(self, optimizer: Any, parameter: Any) -> None:
        self._optimizer, self._parameter = optimizer, parameter

    def get(self, slot: str) -> Any:
        """A tensor; None before there is one."""
        return self._optimizer.state.get(self._parameter, {}).get(slot)


def _version(tensor: Any) -> Any:
    """What changes when a tensor is written to, or given other memory."""
    return None if tensor is None else (tensor._version, tensor.data_ptr())


def _place(binding: Binding, model: Any, optimizer: Any) -> tuple[Any, str]:
    """Where the user's tensor of a binding is held; an empty dict if there is none."""
    if binding.kind == "constant":
        return {"": binding.value}, ""
    path, _, key = binding.key.rpartition(".")
    if binding.kind == "parameter":
        return model.get_submodule(path)._parameters, key
    if binding.kind == "state" and optimizer is not None:
        return _StateOf(optimizer, model.get_parameter(binding.key)), str(binding.slot)
    return (model.get_submodule(path)._buffers, key) if binding.kind == "buffer" else ({}, key)


def _is_equal(one: Any, other: Any) -> bool:
    if one is None or one.is_meta or other is None or one.shape != other.shape:
        return False
    is_same = one.dtype == other.dtype
    return is_same and bool(torch.equal(one.detach().cpu(), other.detach().cpu()))


def _written(kind: str, key: str, tensor: Any) -> PlanMismatchError:
    if kind == "constant":
        return PlanMismatchError(
            f"A step has its own copies of tensors outside the model: one of shape "
            f"{list(tensor.shape)} was written to since. Call step.sync(), then step.load() to "
            f"take its values."
        )
    what = (
        f"the optimizer's state of {key!r}" if kind == "state" else f"{kind} {key!r} of the model"
    )
    return PlanMismatchError(
        f"A step has its own copies of parameters, buffers and optimizer state: {what} was "
        f"written to or replaced since. Call step.load() to take the model's values, or "
        f"step.sync() to overwrite them with the step's."
    )


def _other_value(what: str, now: Any, captured: Any) -> PlanMismatchError:
    rule, found, way = "Plain values that a step reads are", shown(now), ""
    if is_computed_with(captured):
        rule = "What a step computes with is"
        found = "another one" if type(now) is type(captured) else found
    else:
        way = " What is only logged is logged outside: a step does not call loss_fn or forward."
    return PlanMismatchError(
        f"{rule} fixed at capture: {what} is {found}, the step was captured with "
        f"{shown(captured)}. Set it back, or sync and capture again.{way}"
    )


def _wrong_mode(part: str, call: str, captured: bool) -> PlanMismatchError:
    now, then = ("eval", "train") if captured else ("train", "eval")
    return PlanMismatchError(
        f"The model must be in the mode it was captured in: {part} is in {now} mode, "
        f"the step was captured in {then} mode. Call {call}.{then}(), or capture again in {now} "
        f"mode."
    )
