"""Refuse to read a model while its compiled step holds newer values."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from devplace.errors import PlanMismatchError


class StaleGuard:
    """Hooks on a model and its optimizers that are there while a step has newer values of them.

    They meet `state_dict()`, calls of the model or a part of it, and copies. Nothing is left on the
    model of a step that is synced, and steps cost nothing more.

    Args:
        step: The step; once it is gone or closed, what it has not synced is lost, which reading
            then warns of, once.
        model: The user's model.
        optimizers: Its optimizers.
        sync: The call that brings the values into this model.
    """

    def __init__(
        self, step: Any, model: Any, optimizers: Iterable[Any], sync: str = "step.sync()"
    ) -> None:
        self._sync = sync
        self._step = weakref.ref(step)
        self._model = model
        self._optimizers = tuple(optimizers)
        self._handles: list[Any] = []
        self._steps_at_sync = 0
        self._lost = 0

    def begin(self, steps_done: int) -> None:
        """The step has made its first new values, after so many steps."""
        self._steps_at_sync = steps_done
        self._lost = 0
        self.resume()

    def resume(self) -> None:
        """Watch the model, from `begin` on or again after `end`."""
        for module in self._model.modules():
            self._handles.append(module.register_state_dict_pre_hook(self))
            self._handles.append(module.register_forward_pre_hook(self))
        for optimizer in self._optimizers:
            self._handles.append(optimizer.register_state_dict_pre_hook(self))

    def end(self) -> None:
        """The model has the step's values, or the step the model's."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def lose(self, steps_done: int) -> None:
        """The step is closed; what it has not synced is lost."""
        self._lost = steps_done - self._steps_at_sync

    def __call__(self, *_: Any) -> None:
        """Something is about to read the model or an optimizer.

        Raises:
            PlanMismatchError: Says how many steps it lacks.
        """
        step = self._step()
        is_traced = torch._C._len_torch_dispatch_stack() > 0  # reads no values
        if not self._handles or is_traced or (step is not None and not step.is_ahead):
            return
        if step is None or self._lost:
            self.end()
            warnings.warn(
                f"{type(self._model).__name__} has its values of before the steps of a step that "
                f"was closed or dropped without sync(): what these trained is lost. Call "
                f"{self._sync} before step.close().",
                stacklevel=_level_outside(),
            )
            return
        made = step.steps_done - self._steps_at_sync
        raise PlanMismatchError(
            f"{type(self._model).__name__} and its optimizer are {made} step{'s' * (made != 1)} "
            f"behind: only the step has the trained values. Call {self._sync} before state_dict(), "
            f"evaluation or a copy; to give these values up, call step.load()."
        )

    def __reduce__(self) -> Any:
        """A copy of a model is a reading of it; the copy has no step."""
        self()
        return _nothing, ()


class _Nothing:
    """What stands on a copied model for a guard."""

    def __call__(self, *_: Any) -> None:
        """Nothing is stale."""


def _nothing() -> _Nothing:
    return _Nothing()


def _level_outside() -> int:
    """For a warning: how many frames the user's code is above, those of torch left out."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    return level


def _is_ours(module: str) -> bool:
    parts = module.split(".")
    return parts[0] in ("torch", "copy") or parts[:2] == ["devplace", "run"]
