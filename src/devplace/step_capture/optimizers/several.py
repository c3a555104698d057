"""Present several optimizers over one model as one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class Optimizers:
    """Some optimizers; each trains parameters of its own.

    Args:
        optimizers: Of torch.optim, in the order in which their groups are counted.
    """

    def __init__(self, optimizers: Any) -> None:
        self.optimizers = tuple(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups of all, one optimizer after another."""
        return [group for each in self.optimizers for group in each.param_groups]

    @property
    def state(self) -> _States:
        """State of every parameter, in the optimizer that trains it."""
        return _States(self.optimizers)

    def step(self) -> None:
        """A step of each."""
        for each in self.optimizers:
            each.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients of all."""
        for each in self.optimizers:
            each.zero_grad(set_to_none=set_to_none)


class _States:
    def __init__(self, optimizers: tuple[Any, ...]) -> None:
        self._optimizers = optimizers
        self._of = {
            id(param): each.state
            for each in optimizers
            for group in each.param_groups
            for param in group["params"]
        }

    def __getitem__(self, param: Any) -> Any:
        return self._of[id(param)][param]

    def get(self, param: Any, default: Any = None) -> Any:
        return self._of.get(id(param), {}).get(param, default)

    def values(self) -> Iterator[Any]:
        for each in self._optimizers:
            yield from each.state.values()


def as_one(optimizer: Any) -> Any:
    """A list or tuple of optimizers as one; anything else as it is."""
    return Optimizers(optimizer) if isinstance(optimizer, (list, tuple)) else optimizer


def each_of(optimizer: Any) -> tuple[Any, ...]:
    """The optimizers that one stands for."""
    return optimizer.optimizers if isinstance(optimizer, Optimizers) else (optimizer,)


def kind_of(optimizer: Any) -> str:
    """Name of the class; of several optimizers all, such as `Muon+AdamW`."""
    return "+".join(type(each).__name__ for each in each_of(optimizer))


def owner_of(optimizer: Any, group: Any) -> Any:
    """The optimizer that has a parameter group."""
    return next(o for o in each_of(optimizer) if any(group is each for each in o.param_groups))
