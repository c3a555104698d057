"""What a process holds of a training run, as `torch.distributed.checkpoint` saves and loads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from devplace.errors import InputError
from devplace.graph import Captured
from devplace.run.state import ModelState

STEPS = "steps"
"""Key of the number of steps, where the optimizer does not count them."""


class HeldState:
    """Parameters, buffers and optimizer state by the names that plain PyTorch gives them.

    `{"model": {name: tensor}, "optimizer": {"state": {name: {slot: tensor}}, "param_groups":
    [...]}}`, as `torch.distributed.checkpoint.state_dict.get_state_dict` has it, but of every
    process with those tensors alone that it holds.

    Args:
        graph: The captured step.
        state: The user's model and optimizer.
        holds: Whether this process holds a source op.
        is_first: Whether it also answers for what the step does not use.
    """

    def __init__(
        self, graph: Captured, state: ModelState, holds: Callable[[int], bool], is_first: bool
    ) -> None:
        self._graph = graph
        self._state = state
        self._holds = holds
        self._is_first = is_first

    def collect(self, get: Callable[[int], Any], steps: int) -> dict[str, Any]:
        """The state dict; tensors are those the step goes on with, not copies.

        Args:
            get: Source op -> its present value.
            steps: Made since capture.
        """
        ops = dict(self._model_ops())
        found: dict[str, Any] = {"model": {}}
        for name, tensor in self._state.persistent().items():
            op = ops.get(id(tensor))
            if op is None and self._is_first:
                found["model"][name] = tensor.detach()
            elif op is not None and self._holds(op):
                found["model"][name] = get(op).detach()
        if self._state.has_optimizer:
            slots: dict[str, Any] = {}
            for name, slot, op in self._slots():
                slots.setdefault(name, {})[slot] = get(op).detach()
            counters = self._state.step_counters(steps)
            for name, op in self._updated():
                if name in counters and self._holds(op):
                    slots.setdefault(name, {})["step"] = counters[name]
            found["optimizer"] = {"state": slots, "param_groups": self._state.named_groups()}
            if not counters:
                found[STEPS] = torch.tensor(steps + self._state.steps_before_capture, device="cpu")
        return found

    def spread(self, state: Mapping[str, Any], put: Callable[[int, Any], None]) -> int:
        """Take over a state dict; gives the steps made, -1 if it does not tell.

        Args:
            state: Of `collect`, with other values.
            put: Gives a source op its value.

        Raises:
            InputError: Something that this process holds is missing.
        """
        ops, steps = dict(self._model_ops()), {int(state.get(STEPS, -1))}
        for name, tensor in self._state.persistent().items():
            op = ops.get(id(tensor))
            if op is None and self._is_first:
                with torch.no_grad():
                    tensor.copy_(_entry(state, "model", name))
            elif op is not None and self._holds(op):
                put(op, _entry(state, "model", name))
        if self._state.has_optimizer:
            for name, slot, op in self._slots():
                put(op, _entry(state, "optimizer", "state", name, slot))
            entries = state["optimizer"]["state"].values()
            steps |= {int(entry["step"]) for entry in entries if "step" in entry}
            self._state.take_groups(_entry(state, "optimizer", "param_groups"))
        return max(steps)

    def _model_ops(self) -> Iterator[tuple[int, int]]:
        """The user's tensors, by identity, and the ops that are their values."""
        named = self._state.named_tensors()
        for binding in self._graph.program.bindings:
            if binding.kind in ("parameter", "buffer"):
                yield id(named[binding.key]), binding.op

    def _slots(self) -> Iterator[tuple[str, str, int]]:
        """(name of a parameter, of its state, source op) of what is held."""
        for binding in self._graph.program.bindings:
            if binding.kind == "state" and self._holds(binding.op):
                yield binding.key, str(binding.slot), binding.op

    def _updated(self) -> Iterator[tuple[str, int]]:
        for binding in self._graph.program.bindings:
            if binding.kind == "parameter" and binding.op in self._graph.replaced:
                yield binding.key, binding.op


def _entry(state: Mapping[str, Any], *path: str) -> Any:
    found: Any = state
    for key in path:
        if not isinstance(found, Mapping) or key not in found:
            raise InputError(
                f"A state dict must have all that this process holds: {'.'.join(path)!r} is "
                f"missing. Load into what step.state_dict() gives."
            )
        found = found[key]
    return found
