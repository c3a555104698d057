"""The way from a model to a step that runs: capture, search, measure, compile."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree

from devplace.auto.budget_clock import BudgetClock
from devplace.auto.compiled import compiled_step_ns
from devplace.auto.parallel_step import ParallelStep
from devplace.auto.planning import Target, Tell
from devplace.auto.step_notes import step_notes
from devplace.cost.measuring_worker import is_out_of_memory
from devplace.cost.worker_process import WorkerProcess
from devplace.device_kinds import is_host
from devplace.errors import (
    CaptureError,
    ExecutionError,
    InfeasibleError,
    RankError,
)
from devplace.graph import Captured, as_captured
from devplace.kernels.compilers import Compilers
from devplace.kernels.prepare import prepare
from devplace.placers import Placer, Result, Search, Single, place
from devplace.run.compile import Step
from devplace.run.cpu import RETRY
from devplace.run.planned import check, compile
from devplace.step_capture.batch import as_call, open_dataclasses
from devplace.tune.calibration_store import learn_from
from devplace.tune.candidates import Candidate
from devplace.tune.confirm import Confirmation
from devplace.tune.confirm import confirm as confirm_plans
from devplace.tune.measure import Measurer
from devplace.tune.step_timing import WARM_UP_S, median_ns, time_steps
from devplace.units import format_time

CAPTURE_SHARE = 0.35
"""Part of the budget after which no further number of micro-batches is captured."""
SETTLE_SECONDS = 0.5


@dataclass
class Job:
    """A model on its way to a step.

    Attributes:
        inputs, kwargs: The example batch.
        capture: Number of micro-batches, and further options -> captured step.
        target: Its devices.
        clock: What time is left.
        tell: Told what is being done.
        notes: For the report.
        together: Options of `compile` for several processes; empty for one.
    """

    inputs: Any
    kwargs: Mapping[str, Any] | None
    capture: Callable[..., Captured]
    target: Target
    clock: BudgetClock
    tell: Tell
    notes: list[str] = field(default_factory=list)
    together: dict[str, Any] = field(default_factory=dict)

    def capture_all(self, counts: Sequence[int]) -> list[Captured]:
        """The step with each number of micro-batches, as long as there is time."""
        graphs: list[Captured] = []
        for count in counts:
            if graphs and self.clock.spent > CAPTURE_SHARE:
                self.notes.append(f"{count} and more micro-batches not tried: no time to capture")
                break
            chunks = f" with {count} micro-batches" if count > 1 else ""
            self.tell(f"capturing the step{chunks}")
            try:
                graphs.append(self.capture(count))
            except CaptureError as error:
                if not graphs:
                    raise
                self.notes.append(f"{count} and more micro-batches not tried: {error}")
                break
        return graphs

    def capture_again(self, graph: Captured, error: InfeasibleError) -> list[Captured]:
        """The step with the most micro-batches, its repeated blocks computed again.

        Raises:
            InfeasibleError: The given one, if it has no backward pass or nothing is repeated.
        """
        if graph.meta["mode"] != "train":
            raise error
        self.tell("capturing the step with blocks computed again")
        try:
            found = self.capture(int(graph.meta["micro_batches"]), recompute=True)
        except CaptureError:
            raise error from None
        self.notes.append(
            "blocks are computed again in the backward pass (recompute=True): no placement that "
            "keeps all was found within the memory limits"
        )
        return [found]

    def compile_kernels(self, graphs: Sequence[Captured], compilers: Compilers | None) -> None:
        """Compile what is fused before ops are timed."""
        kind = self.target.device
        fast = [d.name for d in self.target.machine.devices if not d.traits.is_host]
        names = [name for name in fast if name in self.target.devices]
        for graph in graphs:
            done = prepare(graph, [kind] if is_host(kind) else names, self.tell, compilers)
            self.notes += done.notes

    def search(
        self,
        graphs: Sequence[Captured],
        placer: Placer | None,
        seed: int,
        child: WorkerProcess | None,
        confirms: bool,
    ) -> list[Result]:
        """Place every capture, its ops timed in `child`; those that do not fit are left out.

        Raises:
            InfeasibleError: None fits.
        """
        found: list[Result] = []
        failures: list[InfeasibleError] = []
        for number, graph in enumerate(graphs):
            self.tell("timing ops")
            problem = self.target.problem(graph, times_cpus=True, child=child)
            # where plans are measured, the faster prediction is worth a try
            usual = Search(least_gain=0.0) if confirms else Search()
            chosen = placer or (usual if len(problem.usable_devices) > 1 else Single())
            budget = self.clock.search_budget(len(graphs) - number, confirms)
            self.tell(f"searching ({number + 1} of {len(graphs)})")
            try:
                result = place(problem, chosen, budget, seed)
            except InfeasibleError as error:
                failures.append(error)
                continue
            if result.is_interrupted:
                raise KeyboardInterrupt
            found.append(result)
        if not found:
            raise failures[0]
        return found

    def choose(
        self, results: Sequence[Result], measurer: Measurer | None
    ) -> tuple[Confirmation | None, list[Candidate]]:
        """What was measured, and plans in the order in which they should be used: the fastest
        measured first, or where nothing was measured in time, or is to be, the best predicted.

        Raises:
            ExecutionError: None of them ran, for other reasons than time.
        """
        noted = [note for r in results for note in (*r.timeline.problem.notes, *r.notes)]
        self.notes[:0] = noted
        if measurer is None:
            best = sorted(results, key=lambda result: result.step_ns)
            return None, [Candidate(r.placer, r.plan, r.step_ns) for r in best]
        found = confirm_plans(
            results,
            self.inputs,
            self.kwargs,
            seconds=self.clock.confirm_seconds(),
            measurer=measurer,
            progress=lambda name: self.tell(f"measuring {name}"),
        )
        if found.ranked:
            learn_from(found.rows, self.clock.left_s, self.tell)
        rows = found.ranked or found.untimed or [found.best]  # which says why none ran
        return found, [row.candidate for row in rows]

    def compare(self, graph: Captured) -> None:
        """Note how fast torch.compile makes the user's own step."""
        device = self.target.device
        self.tell("compiling the ordinary step")
        try:
            took_ns = compiled_step_ns(graph, self.inputs, self.kwargs)
        except Exception as error:  # whatever a compiler raises
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self.notes.append(f"torch.compile did not compile the ordinary step: {reason}")
        else:
            took = format_time(took_ns)
            self.notes.append(f"the ordinary step under torch.compile takes {took} on one {device}")
        _free()

    def finish(
        self, found: Confirmation | None, ranked: Sequence[Candidate], seed: int, verify: bool
    ) -> ParallelStep:
        """The step of the first candidate that runs in this process."""
        failures = []
        settles = found is None or bool(found.ranked)
        for candidate in ranked:
            graph = as_captured(candidate.problem.graph, "To run it")
            if verify:
                self.tell("comparing with the unplaced step")
                self._verify(candidate, graph, seed)
            self.tell(f"compiling {candidate.name}")
            try:
                step, measured_ns = self._compiled(candidate, graph, seed, settles)
            except RankError:
                raise
            except (ExecutionError, RuntimeError, MemoryError) as error:
                if not isinstance(error, ExecutionError) and not is_out_of_memory(error):
                    raise
                why = str(error).removesuffix(RETRY).strip()
                failures.append(f"{candidate.name} did not run in this process: {why}")
                _free()
                continue
            notes = (*self.notes, *failures, *step_notes(graph, candidate.plan))
            told = tuple(dict.fromkeys(notes))
            return ParallelStep(step, candidate.plan, graph, found, measured_ns, told)
        raise ExecutionError("No plan could be run here. " + " ".join(failures))

    def _verify(self, candidate: Candidate, graph: Captured, seed: int) -> None:
        plan = candidate.plan
        report = check(graph, plan, self.inputs, kwargs=self.kwargs, steps=2, seed=seed)
        self.notes.append(report.beside_own)

    def _compiled(
        self, candidate: Candidate, graph: Captured, seed: int, settles: bool
    ) -> tuple[Step, int | None]:
        step = compile(graph, candidate.plan, seed=seed, waits=False, **self.together)
        try:
            return step, self._settle(step) if settles and not self.together else None
        except BaseException:
            with contextlib.suppress(RuntimeError, ExecutionError):
                step.close()
            raise

    def _settle(self, step: Step) -> int | None:
        """Run the step some times as it will be used, and undo what that changed in it.

        A step that cannot be repeated with one batch, as one that fills a cache, is run once.
        """
        args, kwargs = as_call(self.inputs, self.kwargs)
        if any(_is_meta(leaf) for leaf in (*args, *kwargs.values())):
            return None
        wait = getattr(step.executor, "synchronize", None)
        warm_up_s = WARM_UP_S if wait else 0.0
        begun = step.steps_done
        try:
            rounds = time_steps(
                lambda: step(*args, **kwargs), wait or (lambda: None), SETTLE_SECONDS, warm_up_s
            )
        except ExecutionError:
            if step.executor.has_lost_state or step.steps_done == begun:
                raise
            self.notes.append("not timed here: the step cannot be repeated with one batch")
            step.restart()
            return None
        step.restart()
        return median_ns(rounds)


def _is_meta(value: Any) -> bool:
    leaves = pytree.tree_leaves(open_dataclasses(value))
    return any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in leaves)


def _free() -> None:
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
