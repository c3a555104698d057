"""One shape of batches that a step knows: its graph, and what runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from devplace.errors import PlanMismatchError
from devplace.graph import Captured
from devplace.graph.program import Binding
from devplace.run.assumptions import CapturedFacts, SharedValues
from devplace.run.copies import laid_out
from devplace.run.executors import Executor
from devplace.run.state import STORED_KINDS, ModelState

Key = tuple[str, str, Any]


class CapturedShape:
    """A captured shape with its executor, which is made when the shape is first met.

    The shapes of a step share parameters, buffers and optimizer state: the one that runs has them,
    and `take` brings them to the next. Tensors outside the model are each shape's own. What is
    noted of the model is there after `renew`.

    Args:
        graph: The captured step.
        make_executor: Makes what runs it.
        model, optimizer: The user's.
        owner: Of all shapes of a step, which do not count as other steps over the model.
        invent_seed: As for `ModelState`.

    Attributes:
        graph: The captured step.
        state: The user's model and optimizer, as this graph binds them.
        facts: What the graph takes for granted.
        shared: Versions of the user's tensors.
        bindings: What is shared with other shapes.
    """

    def __init__(
        self,
        graph: Captured,
        make_executor: Callable[[], Executor],
        model: Any,
        optimizer: Any,
        owner: object,
        invent_seed: int | None = None,
    ) -> None:
        self.graph = graph
        self.state = ModelState(graph, model, optimizer, invent_seed)
        stored = [b for b in graph.program.bindings if b.kind in STORED_KINDS]
        self.bindings = {_key(b): b for b in stored if b.kind != "constant"}
        self._constants = [b for b in stored if b.kind == "constant"]
        self._make_executor = make_executor
        self._executor: Executor | None = None
        self._owner = owner
        self._has_fixed = False

    @property
    def executor(self) -> Executor:
        """What runs it; made now, if it was not yet."""
        if self._executor is None:
            self._executor = self._make_executor()
        return self._executor

    def renew(self) -> None:
        """The model is read again: note what it is like now."""
        program, model = self.graph.program, self.state.model
        self.facts = CapturedFacts(program, model, self.graph.meta.get("autocast"))
        optimizer = self.state.optimizer
        self.shared = SharedValues(program, model, optimizer, self.graph.replaced, self._owner)
        self.forget()

    def forget(self) -> None:
        """What steps do not change is to be taken again."""
        self._has_fixed = False

    def check_alike(self, other: CapturedShape) -> None:
        """See that another shape reads and trains the same tensors.

        Raises:
            PlanMismatchError: Names one of which that is not so.
        """
        for one, two in ((self, other), (other, self)):
            for key, binding in one.bindings.items():
                twin = two.bindings.get(key)
                does = "reads"
                if twin is not None:
                    if binding.op not in one.graph.replaced or twin.op in two.graph.replaced:
                        continue
                    does = "trains"
                with_it, without = (shown_sizes(input_sizes(each.graph)) for each in (one, two))
                raise PlanMismatchError(
                    f"All shapes of a step must read and train the same tensors: it {does} "
                    f"{binding.kind} {binding.key!r} with {with_it}, and not with {without}. Use a "
                    f"step for each, in turn: sync() of the one, then load() of the other."
                )

    def take(self, other: CapturedShape) -> None:
        """Go on with what another shape of the same step has; what steps do not change only once.

        Raises:
            ExecutionError: The other's last step failed, or there is no room.
        """
        moved, executor = {}, self.executor
        is_alike = type(executor) is type(other.executor)
        for key, mine in self.bindings.items():
            theirs = other.bindings[key]
            if self._has_fixed and mine.op not in self.graph.replaced:
                continue
            if is_alike and mine.strides == theirs.strides:
                moved[mine.op] = theirs.op
            else:
                executor.put(mine.op, laid_out(other.executor.get(theirs.op), mine.strides))
        if moved:
            executor.take(other.executor, moved)
        if not self._has_fixed:
            for binding in self._constants:
                executor.put(binding.op, laid_out(binding.value, binding.strides))
        self._has_fixed = True

    def put(self, values: Mapping[int, Any]) -> None:
        """Take the user's values, by source op, as `ModelState.read` gives them."""
        executor = self.executor
        for op, value in values.items():
            executor.put(op, value)
        self._has_fixed = True

    def close(self) -> None:
        """End what runs it."""
        if self._executor is not None:
            self._executor.close()


def input_sizes(graph: Captured) -> dict[str, tuple[int, ...]]:
    """Sizes of the batch's tensors that a captured step reads, by name."""
    bindings = [b for b in graph.program.bindings if b.kind == "input"]
    return {b.key: tuple(graph.tensors[graph.ops[b.op].outputs[0]].shape) for b in bindings}


def shown_sizes(inputs: Mapping[str, tuple[int, ...]]) -> str:
    """For messages: `x [32, 64], y [32]`."""
    return ", ".join(f"{name} {list(size)}" for name, size in inputs.items()) or "no tensors"


def _key(binding: Binding) -> Key:
    """What a source is, in whatever graph."""
    return binding.kind, binding.key, binding.slot
