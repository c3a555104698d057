"""Further shapes of batches for a step that was planned for one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.utils._pytree as pytree

from devplace.auto.budget_clock import BudgetClock
from devplace.auto.planning import Target, Tell
from devplace.device_kinds import kind_of
from devplace.errors import CaptureError, InfeasibleError, InputError, ShapeError
from devplace.graph import Captured
from devplace.placers import Budget, Placer, Search, Single, place
from devplace.plan import Plan
from devplace.problem import Problem
from devplace.run.batch_inputs import as_captured_call
from devplace.run.captured_shape import input_sizes, shown_sizes
from devplace.run.compile import Step
from devplace.run.planned import add_shape
from devplace.schedule import source_bytes, stored_sources
from devplace.step_capture.batch import as_call, num_rows, open_dataclasses
from devplace.step_capture.micro_batches.chunks import Known
from devplace.units import format_time


@dataclass(frozen=True)
class ShapePlan:
    """A further shape.

    Attributes:
        graph: The step captured with it.
        plan: Its plan, with weights where the first plan has them.
    """

    graph: Captured
    plan: Plan

    @property
    def inputs(self) -> dict[str, tuple[int, ...]]:
        """Sizes of the batch's tensors, by name."""
        return input_sizes(self.graph)

    def __str__(self) -> str:
        rows = zip(self.plan.device_names, self.plan.order, strict=True)
        devices = ", ".join(name for name, row in rows if row)
        took = format_time(self.plan.predicted.step_ns)
        return f"{shown_sizes(self.inputs)}: predicted {took} on {devices}"


@dataclass
class FurtherShapes:
    """Captures further shapes, and plans them with the weights where the first plan has them.

    Attributes:
        target: The devices.
        own: Model, loss function and optimizer, as for `capture`.
        options: All else for `capture`.
        batches: Those that were stated.
        most: Shapes at most; what is met up to there is captured then.
        clock: What time is left for those that were stated.
        placer: Who searches; `Search` by default.
        seed: Of searches and random ops.
        tell: Told what is being done.
    """

    target: Target
    own: tuple[Any, Any, Any]
    options: dict[str, Any]
    batches: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]
    most: int
    clock: BudgetClock
    placer: Placer | None
    seed: int
    tell: Tell
    _early: dict[int, Captured] = field(default_factory=dict)
    _kept: dict[str, int] = field(default_factory=dict)

    def capture_early(self, like: Captured) -> None:
        """Capture what was stated, so that what cannot be captured is told before a long search."""
        for number, batch in enumerate(self.batches):
            self._early[number] = self._capture(*batch, like)

    def join(self, step: Step, graph: Captured, plan: Plan) -> list[ShapePlan]:
        """Let a step know the shapes that were stated.

        Args:
            step: Of the first shape.
            graph, plan: What it runs.

        Raises:
            CaptureError: One cannot be captured.
            InfeasibleError: One does not fit beside the weights.
        """
        found = []
        self._keep(step, plan)
        for number, batch in enumerate(self.batches):
            if input_sizes(self._early[number]) in step.shapes:
                continue  # stated twice, or that of the example
            again = self._early.pop(number)
            if _way(again) != self._way(*batch, graph):
                again = self._capture(*batch, graph)
            budget = self.clock.search_budget(len(self.batches) - number, confirms=False)
            found.append(self._add(step, graph, again, budget))
        return found

    def meet(
        self, step: Step, graph: Captured, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> ShapePlan:
        """Let a step know the shape of a batch that it was called with.

        Raises:
            ShapeError: It has as many as it may.
            CaptureError, InfeasibleError: As of `join`.
        """
        if len(step.shapes) >= self.most:
            raise ShapeError(
                f"A step has at most max_shapes={self.most} shapes, and these are known: "
                f"{'; '.join(map(shown_sizes, step.shapes))}. Pad the batch, drop it "
                f"(DataLoader(drop_last=True)), or raise max_shapes."
            )
        args, kwargs = as_captured_call(graph, args, kwargs)
        with step.unguarded():
            captured = self._capture(tuple(args), dict(kwargs), graph)
        return self._add(step, graph, captured, self.clock.late_budget())

    def _capture(self, args: tuple[Any, ...], kwargs: dict[str, Any], like: Captured) -> Captured:
        count, blocks = self._way(args, kwargs, like)
        model, loss_fn, optimizer = self.own
        more = {"recompute": blocks} if blocks else {}
        self.tell("capturing the step with another shape")
        return self.target.capture(
            *(model, args, loss_fn, optimizer, count),
            **{**self.options, "example_kwargs": kwargs, "known": Known(), **more},
        )

    def _way(self, args: Any, kwargs: Any, like: Captured) -> tuple[int, list[str]]:
        """Micro-batches, as many as of the other step if the rows allow it, and blocks that are
        computed again."""
        count, blocks = _way(like)
        if count > 1:
            try:
                rows = num_rows(args, kwargs, self.options.get("batch_dims"))
            except CaptureError:
                return count, blocks
            count = max(k for k in range(1, count + 1) if rows % k == 0)
        return count, blocks

    def _add(self, step: Step, first: Captured, graph: Captured, budget: Budget) -> ShapePlan:
        homes, used = _homes(step, first), _used(step)
        unused = [name for name in self.target.devices if name not in used]
        target = replace(
            self.target,
            exclude=(*self.target.exclude, *unused),
            unused=tuple(dict.fromkeys((*self.target.unused, *unused))),
        )
        problem = target.problem(graph, times_cpus=True)
        problem = replace(problem, homes=homes, limits=limits_beside(self._kept, problem))
        placer = self.placer or (Search() if len(problem.usable_devices) > 1 else Single())
        text = shown_sizes(input_sizes(graph))
        self.tell(f"placing the step for {text}")
        try:
            result = place(problem, placer, budget, self.seed)
        except InfeasibleError as error:
            raise InfeasibleError(
                f"All shapes of a step must fit beside the same weights: {text} does not. {error} "
                f"Give the largest batch as the example.",
                error.missing_bytes,
            ) from None
        if result.is_interrupted:
            raise KeyboardInterrupt
        add_shape(step, graph, result.plan, seed=self.seed, waits=False)
        self._keep(step, result.plan)
        return ShapePlan(graph, result.plan)

    def _keep(self, step: Step, plan: Plan) -> None:
        """Where steps are recorded, their memory stays theirs between steps: count it."""
        schedule = step.first.executor.schedule
        stored = stored_sources(schedule)
        for device, name in enumerate(schedule.device_names):
            if kind_of(name).has_graphs:
                sizes = source_bytes(schedule, device)
                shared = sum(size for op, size in sizes.items() if op in stored)
                own = max(0, plan.predicted.peak_bytes.get(name, 0) - shared)
                self._kept[name] = self._kept.get(name, 0) + own


def limits_beside(kept: Mapping[str, int], problem: Problem) -> dict[str, int | str]:
    """The limits of a problem, less what other shapes of the step keep of each device, bytes.

    At least 1: a limit of 0 would say that the device is not used.
    """
    limit = dict(zip(problem.machine.device_names, problem.limit_bytes, strict=True))
    return {**problem.limits, **{name: max(1, limit[name] - size) for name, size in kept.items()}}


def stated(shapes: Sequence[Any], example_inputs: Any, example_kwargs: Any) -> list[Any]:
    """The batches of an argument `shapes`, each as positional and keyword inputs.

    Raises:
        InputError: One is no batch like the example.
    """
    wanted = _tensors(*as_call(example_inputs, example_kwargs))
    found = [as_call(batch) for batch in shapes]
    for number, batch in enumerate(found):
        if _tensors(*batch) != wanted:
            raise InputError(
                f"Each of shapes must be a batch like the example, which has {wanted} tensors: "
                f"shapes[{number}] has {_tensors(*batch)}. Give shapes=[batch, ...]."
            )
    return found


def _tensors(args: Any, kwargs: Any) -> int:
    leaves = pytree.tree_leaves(open_dataclasses((tuple(args), dict(kwargs))))
    return sum(isinstance(leaf, torch.Tensor) for leaf in leaves)


def _way(graph: Captured) -> tuple[int, list[str]]:
    return int(graph.meta.get("micro_batches", 1)), list(graph.meta.get("recompute", ()))


def _homes(step: Step, graph: Captured) -> dict[str, str]:
    """Where a step has what is in one place: source op -> device name."""
    schedule, replaced = step.first.executor.schedule, graph.replaced
    names = schedule.device_names
    return {
        graph.ops[op].name: names[schedule.device_of_op[op]]
        for op, holders in schedule.holders.items()
        if op in replaced or (len(holders) == 1 and graph.ops[op].role in ("parameter", "buffer"))
    }


def _used(step: Step) -> list[str]:
    """Names of the devices that run ops of a step's first shape."""
    schedule = step.first.executor.schedule
    rows = zip(schedule.device_names, schedule.instructions, strict=True)
    return [name for name, some in rows if some]
