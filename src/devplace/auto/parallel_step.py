"""The result of `parallelize`: a callable step with a report of how it was chosen."""

from __future__ import annotations

from typing import Any

from devplace.auto.further_shapes import FurtherShapes, ShapePlan
from devplace.errors import ShapeError
from devplace.graph import Captured
from devplace.plan import Plan
from devplace.run.compile import Step
from devplace.run.measured_timeline import MeasuredTimeline
from devplace.tune.confirm import Confirmation
from devplace.units import format_time


class ParallelStep:
    """A placed training step (or inference); call it with a batch.

    The model and optimizer given are not touched until `sync`.

    Attributes:
        plan: What it runs.
        graph: The captured step.
        confirmation: All plans that were measured; None if none was.
        micro_batches: Chunks the batch is cut into.
        measured_ns: Step time in this process, batches fed to it, ns; None if not measured.
        notes: What else is worth knowing.
        further: Plans of further shapes.
    """

    def __init__(
        self,
        step: Step,
        plan: Plan,
        graph: Captured,
        confirmation: Confirmation | None,
        measured_ns: int | None,
        notes: tuple[str, ...],
    ) -> None:
        self.plan = plan
        self.graph = graph
        self.confirmation = confirmation
        self.micro_batches = int(graph.meta.get("micro_batches", 1))
        self.measured_ns = measured_ns
        self.notes = notes
        self.further: list[ShapePlan] = []
        self._step = step
        self._shapes: FurtherShapes | None = None

    def join(self, shapes: FurtherShapes) -> None:
        """Let the step know further shapes: those that were stated, and those that it meets."""
        self.further += shapes.join(self._step, self.graph, self.plan)
        self._shapes = shapes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step on a batch of the example's shapes, or of others that it knows; see `Step`.

        One that it does not know is captured and planned first, if `max_shapes` allows it.

        Returns:
            The loss of a training step (on the device that made it; on GPUs it is not waited for),
            or the model's output.

        Raises:
            InputError: A tensor of the batch has another shape or dtype than captured (a shape:
                `ShapeError`).
            PlanMismatchError: The model is in another mode (train or eval) than captured.
            ExecutionError: This step failed, or on GPUs one before it.
        """
        try:
            return self._step(*args, **kwargs)
        except ShapeError:
            if self._shapes is None or self._shapes.most == 1:
                raise
        self.further.append(self._shapes.meet(self._step, self.graph, args, kwargs))
        return self._step(*args, **kwargs)

    def sync(self, everywhere: bool = False) -> None:
        """Write parameters, buffers and optimizer state into the model and optimizer, in place.

        Afterwards `state_dict()`, checkpoints and evaluation see the trained values. Of several
        processes all call it, and the first one's model is written, or with `everywhere` all are.
        """
        self._step.sync(everywhere)

    def state_dict(self) -> dict[str, Any]:
        """What this process holds, for `torch.distributed.checkpoint.save`; see `Step`."""
        return self._step.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `torch.distributed.checkpoint.load` has put into a `state_dict()`."""
        self._step.load_state_dict(state)

    def load(self) -> None:
        """Read them from the model and optimizer again, after loading a checkpoint into these."""
        self._step.load()

    def close(self) -> None:
        """End threads and free what is held on devices. The step cannot be called any more."""
        self._step.close()

    def __enter__(self) -> ParallelStep:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the devices that run ops."""
        pairs = zip(self.plan.device_names, self.plan.order, strict=True)
        return tuple(name for name, row in pairs if row)

    @property
    def mode(self) -> str:
        """`graph` or `eager` on GPUs (empty before the first step), `threads` on logical CPUs."""
        return str(getattr(self._step.executor, "mode", "threads"))

    @property
    def steps_done(self) -> int:
        """Steps the optimizer has made, those before capture included where it counts them."""
        return self._step.steps_done

    @property
    def is_timed(self) -> bool:
        """Whether the next steps measure their `timeline`."""
        return self._step.is_timed

    @is_timed.setter
    def is_timed(self, value: bool) -> None:
        self._step.is_timed = value

    @property
    def timeline(self) -> MeasuredTimeline | None:
        """Measured timeline of the last step that was called with `is_timed` set."""
        return self._step.timeline

    @property
    def transfers(self) -> Any:
        """What the timeline's transfers are, in their order."""
        return self._step.executor.schedule.transfers

    def report(self) -> str:
        """What was chosen and why, predicted beside measured."""
        chunks = f", {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        lines = [f"{self.graph.name} on {', '.join(self.devices)}{chunks}"]
        if self.confirmation is None:
            predicted = format_time(self.plan.predicted.step_ns)
            lines.append(
                f"Predicted {predicted} per step; not compared with other plans by running."
            )
        else:
            lines += [self.confirmation.verdict(), *self.confirmation.lines()]
        if self.measured_ns is not None:
            mode = {"graph": "CUDA graphs", "eager": "no CUDA graphs", "threads": "threads"}
            lines.append(
                f"In this process, batches fed: {format_time(self.measured_ns)} per step "
                f"({mode.get(self.mode, self.mode)})."
            )
        lines += [f"Also {shape}" for shape in self.further]
        reason = getattr(self._step.executor, "reason", "")
        if reason:
            lines.append(f"note: no CUDA graphs: {reason}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def __str__(self) -> str:
        return self.report()

    def __repr__(self) -> str:
        return f"ParallelStep({self.graph.name!r} on {', '.join(self.devices)})"
