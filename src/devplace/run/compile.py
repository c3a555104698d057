"""Make a placed step callable in a training loop."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree

from devplace.errors import ExecutionError, InputError
from devplace.graph import Captured
from devplace.graph.program import Constant
from devplace.kernels.prepare import prepare
from devplace.run.assumptions import CapturedFacts, SharedValues
from devplace.run.batch_inputs import bind_inputs, bind_scalars, require_values
from devplace.run.copies import clone_tensor
from devplace.run.cpu import StepOutcome
from devplace.run.executors import Executor, make_executor, used_devices
from devplace.run.mailbox import CopyFunction
from devplace.run.measured_timeline import MeasuredTimeline
from devplace.run.schedule import Schedule, make_schedule
from devplace.run.stale import StaleGuard
from devplace.run.state import ModelState
from devplace.run.state_dict import HeldState
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

    Attributes:
        executor: What runs it.
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
        self.executor = executor
        self.is_timed = False
        self.timeline: MeasuredTimeline | None = None
        self._lost_by = ""
        self._processes = processes
        self._optimizer = as_one(optimizer)
        self._graph = graph
        self._changes_state = bool(graph.replaced)
        self._state = ModelState(graph, model, optimizer, invent_seed)
        own = [] if self._optimizer is None else each_of(self._optimizer)
        is_other = processes is not None and not processes.is_first
        sync = "step.sync(everywhere=True) in all processes" if is_other else "step.sync()"
        self._guard = StaleGuard(self, self._state.model, own, sync)
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._steps_since_capture = 0
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
    def steps_done(self) -> int:
        """Steps the optimizer has made, those before capture included where it counts them."""
        return self._state.steps_before_capture + self._steps_since_capture

    @property
    def is_ahead(self) -> bool:
        """Whether the step has newer values than the model, which nobody has written to since."""
        has_values = not (self._is_synced or self._lost_by or self.executor.has_lost_state)
        return has_values and not self._shared.are_written()

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
            self._facts = CapturedFacts(
                self._graph.program, self._state.model, self._graph.meta.get("autocast")
            )
            number = self._state.steps_since_capture(self._steps_since_capture)
            if self._processes is not None:
                number = self._processes.number(number)
            self._steps_since_capture = number
            for op, value in values.items():
                self.executor.put(op, value)
            self._shared = SharedValues(
                self._graph.program, self._state.model, self._graph.replaced
            )
            self._guard.end()
            self._is_synced = True
            self._lost_by = ""

    def _read(self) -> dict[int, Any]:
        """Values of the user's model, of several processes that of the first."""
        if self._processes is None or self._processes.is_first:
            values = self._state.read()
        else:
            values = self._state.present()
        return values if self._processes is None else self._processes.spread_weights(values)

    def restart(self) -> None:
        """As `load`, and as if no step had been made: random numbers begin anew, too."""
        self._steps_since_capture = 0
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
            self._facts.check_parts()
            get: Callable[[int], Any] = self.executor.get
            if self._processes is not None:
                ops = self._graph.replaced
                get = self._processes.gather_weights(get, ops, everywhere).__getitem__
                if not (everywhere or self._processes.is_first):
                    return
            self._state.write(get, self._steps_since_capture)
            self._shared.note()
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
                self._steps_since_capture = made - self._state.steps_before_capture
            self._lost_by = ""
            if self._is_synced and self._changes_state:
                self._guard.begin(self.steps_done)
                self._is_synced = False
                self._shared.go_ahead()

    def _held_state(self) -> HeldState:
        is_first = self._processes is None or self._processes.is_first
        holders = self.executor.schedule.holders
        return HeldState(self._graph, self._state, holders.__contains__, is_first)

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
        return _rebuild_output(self._graph, self.run(args, kwargs))

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> StepOutcome:
        """Run one step and return everything it gave, with the timeline if `is_timed`.

        Calls from several threads are done one after another.
        """
        self._check_process()
        with self._lock, torch.inference_mode(False):
            if self._processes is None:
                return self._run(args, kwargs)
            with self._processes.group.failing_together():
                return self._run(args, kwargs)

    def _run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> StepOutcome:
        self._check_state()
        self._facts.check()
        if self._processes is None or self._processes.is_first:
            self._shared.check(self._held, self._is_synced)
        number = self._steps_since_capture + 1
        groups = None if self._optimizer is None else self._optimizer.param_groups
        whole = None if self._processes is None else self._processes.whole
        values = bind_inputs(self._graph, args, kwargs, whole)
        require_values(self._graph, values)
        scalars = bind_scalars(self._graph, number, groups)
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
        self._steps_since_capture = number
        self._shared.go_ahead()
        if self._optimizer is not None:
            for one in each_of(self._optimizer):
                one._opt_called = True  # or torch's schedulers warn that no step was made
        if outcome.timeline is not None:
            self.timeline = outcome.timeline.after(batch_ns)
        return outcome

    def close(self) -> None:
        """End the device threads. The step cannot be called any more, and what was not synced is
        lost."""
        if not self._is_synced:
            self._guard.lose(self.steps_done)
        self._shared.let_go()
        self.executor.close()
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
