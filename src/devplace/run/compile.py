"""Make a placed step callable in a training loop."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree

from devplace.errors import ExecutionError, InputError, ShapeError
from devplace.graph import Captured
from devplace.graph.program import Constant
from devplace.kernels.prepare import prepare
from devplace.run.batch_inputs import WAYS_OUT, bind_inputs, bind_scalars, require_values
from devplace.run.captured_shape import CapturedShape, input_sizes, shown_sizes
from devplace.run.copies import clone_tensor
from devplace.run.cpu import StepOutcome
from devplace.run.executors import Executor, make_executor, used_devices
from devplace.run.mailbox import CopyFunction
from devplace.run.measured_timeline import MeasuredTimeline
from devplace.run.stale import StaleGuard
from devplace.run.state_dict import HeldState
from devplace.schedule import Schedule, make_schedule
from devplace.step_capture.optimizers.several import as_one, each_of

if TYPE_CHECKING:
    from devplace.run.ranks.processes import Processes


Join = Callable[[Schedule], "Processes | None"]


def alone(_: Schedule) -> None:
    """This process runs the whole of a schedule."""


def compile_step(
    model: Any,
    optimizer: Any,
    graph: Captured,
    device_of_op: Sequence[int],
    order: Sequence[Sequence[int]],
    device_names: Sequence[str],
    seed: int = 0,
    *,
    copy: CopyFunction = clone_tensor,
    keeps_old_state: bool = True,
    invent_seed: int | None = None,
    waits: bool = True,
    predicted_bytes: Mapping[str, int] | None = None,
    staged_pairs: frozenset[tuple[str, str]] = frozenset(),
    join: Join = alone,
) -> Step:
    """Make a placed step callable on logical CPU devices, or on CUDA devices if these are named.

    A step captured for CUDA may use both: ops on CPU devices run beside those on GPUs.

    Parameters, buffers and optimizer state are copied to their devices once; the model is not
    touched until `Step.sync`.

    Args:
        model: The model the graph was captured from (or one just like it).
        optimizer: Its optimizer, or None for inference.
        graph: The captured step.
        device_of_op: Device index per op; views sit with their base. Shape `[V]`.
        order: Per device the indices of its ops (no sources, no views) in execution order.
        device_names: Names of the devices, shape `[D]`.
        seed: Fixes all random numbers, whatever the placement.
        copy: Makes the copy of a transferred tensor.
        keeps_old_state: Keep the state before a step until it has succeeded; if not, less memory
            is used, but after an error the state must be loaded again.
        invent_seed: Seed of made-up values for a model on the meta device, to measure without
            weights; None refuses such a model.
        waits: Whether each step on GPUs is waited for; if not, a failure shows in a later call.
        predicted_bytes: Device name -> peak that the plan predicted, for messages.
        staged_pairs: (sender, receiver) names of GPUs whose direct link is not to be used.
        join: Gives the processes that run a schedule together; None if this one does so alone.

    Raises:
        PlanError: The order is incomplete or can never finish, or an op on a CPU device beside
            GPUs cannot run there.
        PlanMismatchError: The model differs from the captured one.
        InputError: The model has no values, or the graph no program.
    """
    schedule = make_schedule(graph, device_of_op, order, device_names)
    processes = join(schedule)
    if processes is not None:
        schedule = processes.part
    prepare(graph, used_devices(schedule))
    executor = make_executor(
        schedule, seed, copy, keeps_old_state, waits, predicted_bytes, staged_pairs, processes
    )
    return Step(model, optimizer, graph, executor, invent_seed, processes)


class Step:
    """A placed training step (or inference) of a model; call it with a batch.

    It knows the shapes that were captured: one, and those of `add`.

    Attributes:
        timeline: Measured timeline of the last step that was called with `is_timed` set.
        is_timed: Whether the next steps measure their timeline.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        graph: Captured,
        executor: Executor,
        invent_seed: int | None = None,
        processes: Processes | None = None,
    ) -> None:
        self.is_timed = False
        self.timeline: MeasuredTimeline | None = None
        self._lost_by = ""
        self._processes = processes
        self._optimizer = as_one(optimizer)
        self._changes_state = bool(graph.replaced)
        self._owner = object()  # not the step itself, which is to end when it is dropped
        given = model, optimizer, self._owner, invent_seed
        self._at = CapturedShape(graph, lambda: executor, *given)
        self._shapes = [self._at]
        self._steps_done = self._at.state.steps_before_capture
        own = [] if self._optimizer is None else each_of(self._optimizer)
        is_other = processes is not None and not processes.is_first
        sync = "step.sync(everywhere=True) in all processes" if is_other else "step.sync()"
        self._guard = StaleGuard(self, self._at.state.model, own, sync)
        self._lock = threading.RLock()
        self._process = os.getpid()
        self.load()

    def __reduce__(self) -> Any:
        """Steps are not copied or pickled.

        Raises:
            InputError: Always; says what to save instead.
        """
        raise InputError(
            "A step cannot be copied or pickled: it has threads and memory on devices. Call "
            "sync(), and copy or save model.state_dict() and optimizer.state_dict()."
        )

    @property
    def executor(self) -> Executor:
        """What runs the last shape met."""
        return self._at.executor

    @property
    def shapes(self) -> tuple[Mapping[str, tuple[int, ...]], ...]:
        """Of every shape that is known the sizes of the batch's tensors, by name."""
        return tuple(input_sizes(shape.graph) for shape in self._shapes)

    @property
    def first(self) -> CapturedShape:
        """The shape that the step was made for."""
        return self._shapes[0]

    @contextlib.contextmanager
    def unguarded(self) -> Iterator[None]:
        """Let the model be captured again, though it may have values of before."""
        with self._lock:
            self._at.facts.check()
            self._guard.end()
            try:
                yield
            finally:
                if not self._is_synced:
                    self._guard.resume()

    def add(self, graph: Captured, make_executor: Callable[[], Executor]) -> None:
        """Know another shape of the step, with the same parameters, buffers and optimizer state.

        Args:
            graph: The step captured with a batch of that shape; of the same model and optimizer.
            make_executor: Makes what runs it, when it is first met.

        Raises:
            InputError: Several processes run the step.
            PlanMismatchError: It reads or trains other tensors, or what the step takes for granted
                has changed.
        """
        self._check_process()
        if self._processes is not None:
            raise InputError(
                "Several processes run a step of one shape. Pad the batch, or use one process."
            )
        with self._lock, torch.inference_mode(False):
            self._check_state()
            self._at.facts.check()
            self._at.shared.check(self._held, self._is_synced)
            model = self._at.state.model
            shape = CapturedShape(graph, make_executor, model, self._optimizer, self._owner)
            shape.check_alike(self._at)
            shape.renew()
            self._shapes.append(shape)

    @property
    def steps_done(self) -> int:
        """Steps the optimizer has made, those before capture included where it counts them."""
        return self._steps_done

    @property
    def _steps_since_capture(self) -> int:
        """Of the shape that ran last."""
        return self._steps_done - self._at.state.steps_before_capture

    @property
    def is_ahead(self) -> bool:
        """Whether the step has newer values than the model, which nobody has written to since."""
        has_values = not (self._is_synced or self._lost_by or self.executor.has_lost_state)
        return has_values and not self._at.shared.are_written()

    def load(self) -> None:
        """Read parameters, buffers and optimizer state from the model and optimizer again.

        Random numbers go on: they are those of the number of steps made, which comes from the
        optimizer, or where that does not count (SGD, no optimizer) from the steps of this object.

        Raises:
            PlanMismatchError: They differ in name, shape or dtype from the captured ones.
            InputError: The model has no values.
        """
        self._check_process()
        with self._lock, torch.inference_mode(False):
            values = self._read()
            self._at = self._shapes[0]  # another one may have had no room
            for shape in self._shapes:
                shape.renew()
            number = self._at.state.steps_since_capture(self._steps_since_capture)
            if self._processes is not None:
                number = self._processes.number(number)
            self._steps_done = self._at.state.steps_before_capture + number
            self._at.put(values)
            self._guard.end()
            self._is_synced = True
            self._lost_by = ""

    def _read(self) -> dict[int, Any]:
        """Values of the user's model, of several processes that of the first."""
        if self._processes is None or self._processes.is_first:
            values = self._at.state.read()
        else:
            values = self._at.state.present()
        return values if self._processes is None else self._processes.spread_weights(values)

    def restart(self) -> None:
        """As `load`, and as if no step had been made: random numbers begin anew, too."""
        self._steps_done = self._at.state.steps_before_capture
        self.load()

    def sync(self, everywhere: bool = False) -> None:
        """Write parameters, buffers and optimizer state into the model and optimizer, in place.

        Afterwards `state_dict()`, checkpoints and evaluation see the trained values; without it
        they are refused. Of several processes all call it, and the first one's model is written.

        Args:
            everywhere: Whether the models of the other processes are written, too.

        Raises:
            InputError: The model is on the meta device and cannot hold values.
            ExecutionError: A step failed and took the state with it; nothing is written.
        """
        self._check_process()
        with self._lock, torch.inference_mode(False):
            self._check_state()
            self._at.facts.check_parts()
            get: Callable[[int], Any] = self.executor.get
            if self._processes is not None:
                ops = self._at.graph.replaced
                get = self._processes.gather_weights(get, ops, everywhere).__getitem__
                if not (everywhere or self._processes.is_first):
                    return
            self._at.state.write(get, self._steps_since_capture)
            for shape in self._shapes:
                shape.shared.note()
            self._guard.end()
            self._is_synced = True

    def state_dict(self) -> dict[str, Any]:
        """What this process holds of model and optimizer, for `torch.distributed.checkpoint.save`.

        Names and structure are those of `torch.distributed.checkpoint.state_dict.get_state_dict`,
        so that a checkpoint can be loaded into another plan, another number of processes, and
        plain PyTorch. Tensors are the step's own and change with the next step.

        Raises:
            ExecutionError: A step failed and took the state with it.
        """
        self._check_process()
        with self._lock, torch.inference_mode(False):
            self._check_state()
            return self._held_state().collect(self.executor.get, self._steps_since_capture)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; of several processes all call it.

        Args:
            state: What `state_dict` gave, after `torch.distributed.checkpoint.load` has put values
                in.

        Raises:
            InputError: Something that this process holds is missing.
        """
        self._check_process()
        with self._lock, torch.inference_mode(False):
            made = self._held_state().spread(state, self.executor.put)
            if self._processes is not None:
                made = self._processes.largest(made)
            if made >= 0:
                self._steps_done = made
            for shape in self._shapes:
                shape.forget()
            self._lost_by = ""
            if self._is_synced and self._changes_state:
                self._guard.begin(self.steps_done)
                self._is_synced = False
                self._at.shared.go_ahead()

    def _held_state(self) -> HeldState:
        is_first = self._processes is None or self._processes.is_first
        holders = self.executor.schedule.holders
        return HeldState(self._at.graph, self._at.state, holders.__contains__, is_first)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step.

        Args:
            args: Batch, as passed to capture.
            kwargs: Named part of the batch.

        Returns:
            The loss (0-dimensional tensor) of a training step; with further outputs what the loss
            function returns. Without a loss the model's output.

        Raises:
            InputError: A tensor of the batch has another shape or dtype than captured.
            PlanMismatchError: The model, or a part of it, is in another mode (train or eval) than
                captured, or other parameters require gradients.
            ExecutionError: An op failed. On CPU devices the state is as before the step; on GPUs
                it is lost, and nothing but `load` is possible.
        """
        return _rebuild_output(*self._graph_and_outcome(args, kwargs))

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> StepOutcome:
        """Run one step and return everything it gave, with the timeline if `is_timed`.

        Calls from several threads are done one after another.
        """
        return self._graph_and_outcome(args, kwargs)[1]

    def _graph_and_outcome(
        self, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Captured, StepOutcome]:
        self._check_process()
        with self._lock, torch.inference_mode(False):
            if self._processes is None:
                outcome = self._run(args, kwargs)
            else:
                with self._processes.group.failing_together():
                    outcome = self._run(args, kwargs)
            return self._at.graph, outcome

    def _run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> StepOutcome:
        self._check_state()
        values = self._meet(args, kwargs) if len(self._shapes) > 1 else None
        at = self._at
        at.facts.check()
        if self._processes is None or self._processes.is_first:
            at.shared.check(self._held, self._is_synced)
        if values is None:
            whole = None if self._processes is None else self._processes.whole
            values = bind_inputs(at.graph, args, kwargs, whole)
        require_values(at.graph, values)
        groups = None if self._optimizer is None else self._optimizer.param_groups
        scalars = bind_scalars(at.graph, self._steps_since_capture + 1, groups)
        try:
            for op, value in scalars.items():
                self.executor.put(op, value)
            begin = time.perf_counter_ns()
            for op, value in values.items():
                self.executor.put(op, value)
            batch_ns = time.perf_counter_ns() - begin
            outcome = self.executor.step(self.steps_done + 1, self.is_timed)
        except ExecutionError as error:
            if self.executor.has_lost_state:
                self._lost_by = str(error)
            raise
        if self._is_synced and self._changes_state:
            self._guard.begin(self.steps_done)
            self._is_synced = False
        self._steps_done += 1
        at.shared.go_ahead()
        if self._optimizer is not None:
            for one in each_of(self._optimizer):
                one._opt_called = True  # or torch's schedulers warn that no step was made
        if outcome.timeline is not None:
            self.timeline = outcome.timeline.after(batch_ns)
        return outcome

    def _meet(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[int, Any]:
        """Go to the shape that a batch has; gives its tensors as `bind_inputs` does.

        Raises:
            ShapeError: None has it.
        """
        failures: list[InputError] = []
        for shape in (self._at, *(each for each in self._shapes if each is not self._at)):
            try:
                values = bind_inputs(shape.graph, args, kwargs)
            except InputError as error:
                failures.append(error)
                continue
            if shape is not self._at:
                shape.take(self._at)
                self._at = shape
            return values
        first = next((one for one in failures if not isinstance(one, ShapeError)), failures[0])
        if not isinstance(first, ShapeError):
            raise first
        known = "; ".join(map(shown_sizes, self.shapes))
        raise ShapeError(f"{first.culprit}, the step knows {known}. {WAYS_OUT}") from None

    def close(self) -> None:
        """End the device threads. The step cannot be called any more, and what was not synced is
        lost."""
        if not self._is_synced:
            self._guard.lose(self.steps_done)
        for shape in self._shapes:
            shape.shared.let_go()
            shape.close()
        if self._processes is not None:
            self._processes.group.close()

    def __enter__(self) -> Step:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _held(self, op: int) -> Any:
        """Value of a source; None if it is held in other processes alone."""
        return self.executor.get(op) if op in self.executor.schedule.holders else None

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise ExecutionError(
                "A step cannot be used in a forked process: its threads are those of the process "
                "that made it. Make a step there, or call it in the process it was made in."
            )

    def _check_state(self) -> None:
        if self._lost_by or self.executor.has_lost_state:
            first = self._lost_by.split(". ")[0].rstrip(".") or "see the error before"
            raise ExecutionError(
                "Parameters and state were lost with a step that failed, so nothing can be run or "
                f"synced: {first}. Call step.load() to start again from the model's values."
            )


def _rebuild_output(graph: Captured, outcome: StepOutcome) -> Any:
    program = graph.program
    outputs = [k for k, result in enumerate(graph.results) if result.role in ("loss", "output")]
    if program.output_spec is None:
        values = [outcome.results[k] for k in outputs]
        return values[0] if len(values) == 1 else values
    leaves = [
        leaf.value if isinstance(leaf, Constant) else outcome.results[leaf]
        for leaf in program.output_leaves
    ]
    return pytree.tree_unflatten(leaves, program.output_spec)
