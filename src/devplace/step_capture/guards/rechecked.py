"""Values a step reads beside its tensors, rechecked at each call."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from devplace.step_capture.guards.values import NOTHING, is_array, kept


@dataclass(frozen=True, eq=False)
class Place:
    """Where a function reads a value: a global, free variable, attribute or item.

    Attributes:
        name: As the user wrote it, such as `args.beta`.
        holder: The cell, mapping or object that holds it; the value itself for an argument.
        key: Its key in the mapping, or name in the object.
        value: Its value before the step.
        kind: `variable` of a cell, `item`, `attribute`, `argument` or `context` (variable).
        above: Where the holder was found; if another object is there now, that one holds it.
        module: Name of the model's module that holds it, None if none does.
        outlives: Whether the holder is known to be there after the step.
        names: The dict of the holder in which an attribute is, if it is in one.
    """

    name: str
    holder: Any
    key: Any
    value: Any
    kind: str = "item"
    above: Place | None = None
    module: str | None = None
    outlives: bool = True
    names: Mapping[str, Any] | None = None

    def item(self, key: Any, value: Any) -> Place:
        """An item of what is here."""
        name = f"{self.name}[{key!r}]"
        return Place(name, self.value, key, value, "item", self, outlives=self.outlives)

    def attribute(
        self, key: str, value: Any, names: Any = None, module: str | None = None
    ) -> Place:
        """An attribute of what is here."""
        name = f"{self.name if module is None else module}.{key}".removeprefix(".")
        at = Place(name, self.value, key, value, "attribute", self, module, self.outlives)
        return replace(at, names=names)

    @property
    def described(self) -> str:
        """Its name in a message."""
        if self.module is None:
            return self.name
        return f"{self.key!r} of {f'module {self.module!r}' if self.module else 'the model'}"

    def with_copy(self) -> Place:
        """The same place, with a copy of what can be written to."""
        return replace(self, value=kept(self.value))

    def present(self) -> Any:
        """Its value now; `NOTHING` if it is gone."""
        holder, above, names = self.holder, self.above, self.names
        if above is not None and above.holder is not None and above.kind != "argument":
            now = above.present()
            if now is not above.value:
                holder, names = now, None
        if names is not None:
            return names.get(self.key, NOTHING)
        if self.kind == "variable":
            return enclosed(holder)
        if self.kind == "argument":
            return holder
        if self.kind == "context":
            return holder.get(NOTHING)
        if isinstance(holder, torch.nn.Module):
            return attribute(holder, self.key)
        if self.kind == "item":
            return tried(lambda *args: holder.get(*args), self.key)
        return tried(getattr, holder, self.key)

    def put_back(self) -> None:
        """Give it its old value, once what containers held is there again."""
        now, value, holder = self.present(), self.value, self.holder
        if is_array(now) and is_array(value) and now.shape == value.shape != ():
            now[...] = value
        elif self.kind == "variable":
            holder.cell_contents = value
        elif self.kind == "context":
            if value is not NOTHING:
                holder.set(value)
        elif self.kind == "attribute" and self.names is None:
            if value is not NOTHING:
                setattr(holder, self.key, value)
        elif self.kind != "argument":
            names: Any = holder if self.names is None else self.names
            if value is NOTHING:
                names.pop(self.key, None)
            else:
                names[self.key] = value


@dataclass(frozen=True, eq=False)
class Setting:
    """A setting of torch that every step depends on.

    Attributes:
        name: How the user reads it.
        present: Reads it.
        value: At capture.
    """

    name: str
    present: Callable[[], Any]
    value: Any


def settings() -> list[Setting]:
    """Settings as they are now."""
    dtype = torch.get_default_dtype
    return [Setting("torch.get_default_dtype()", dtype, dtype())]


def own_names(module: torch.nn.Module) -> tuple[dict[str, Any], ...]:
    """The dicts that hold what a module itself has."""
    return vars(module), module._parameters, module._buffers, module._modules


def attribute(module: torch.nn.Module, name: str) -> Any:
    """Attribute of a module itself or a value of its class; nothing is computed."""
    for names in own_names(module):
        if name in names:
            return names[name]
    return next((vars(k)[name] for k in type(module).__mro__ if name in vars(k)), NOTHING)


def enclosed(cell: types.CellType) -> Any:
    """What a closure's cell holds; `NOTHING` if that is not assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return NOTHING


def tried(get: Callable[..., Any], *args: Any) -> Any:
    """What a function of the user's objects gives, with a default; `NOTHING` if it raises."""
    try:
        return get(*args, NOTHING)
    except Exception:  # whatever their rules like
        return NOTHING
