"""From a model to the fastest measured step in one call."""

from __future__ import annotations

import contextlib
import gc
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree

from devplace.auto.budget_clock import BudgetClock
from devplace.auto.compiled import compiled_step_ns
from devplace.auto.further_shapes import FurtherShapes, stated
from devplace.auto.local_devices import MachineLike, find_machine
from devplace.auto.parallel_step import ParallelStep
from devplace.auto.planning import Target, Tell, find_target
from devplace.auto.shared_choice import (
    share_candidate,
    share_fusing,
    share_machine,
    why_unmeasured,
)
from devplace.auto.step_notes import step_notes
from devplace.cost.measuring_worker import is_out_of_memory
from devplace.cost.worker_process import WorkerProcess
from devplace.device_kinds import is_host
from devplace.errors import (
    CaptureError,
    ExecutionError,
    InfeasibleError,
    InputError,
    RankError,
    did_you_mean,
)
from devplace.graph import Captured, as_captured
from devplace.kernels.compilers import Compilers
from devplace.kernels.prepare import any_compiled, prepare
from devplace.placers import Placer, Result, Search, Single, place
from devplace.run.compile import Step
from devplace.run.cpu import RETRY
from devplace.run.planned import check, check_batch_kind, compile
from devplace.run.ranks.group import Group, several_processes
from devplace.step_capture import capture
from devplace.step_capture.batch import as_call, open_dataclasses
from devplace.step_capture.micro_batches.chunks import Known
from devplace.step_capture.refuse import unwrap
from devplace.tune.calibration_store import learn_from
from devplace.tune.candidates import Candidate
from devplace.tune.confirm import Confirmation
from devplace.tune.confirm import confirm as confirm_plans
from devplace.tune.measure import Measurer
from devplace.tune.step_timing import WARM_UP_S, median_ns, time_steps
from devplace.units import format_time

_TOO_SLOW = (
    "No plan was measured within {:.3g} s, so the best predicted one is used unmeasured: the "
    "computer is busy, or steps take long. Give a larger budget, as budget='5min'."
)
MICRO_BATCHES = (1, 2, 4, 8)
CAPTURE_SHARE = 0.35
"""Part of the budget after which no further number of micro-batches is captured."""
SETTLE_SECONDS = 0.5


def parallelize(
    model: torch.nn.Module | Captured,
    example_inputs: Any = (),
    loss_fn: Callable[..., Any] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    machine: MachineLike = "detect",
    budget: str = "60s",
    limits: Mapping[str, int | str] | None = None,
    pins: Mapping[str, str] | None = None,
    exclude: Sequence[str] = (),
    uses_cpu: bool = False,
    micro_batches: int | str = 1,
    seed: int = 0,
    placer: Placer | None = None,
    confirm: bool = True,
    verify: bool = False,
    compare_compile: bool = False,
    progress: Callable[[str], None] | None = None,
    shapes: Sequence[Any] = (),
    max_shapes: int = 1,
    ranks: Mapping[str, int] | None = None,
    batch: str = "whole",
    timeout_s: float = 30.0,
    **of_capture: Any,
) -> ParallelStep:
    """Plan a step for the devices of this computer, confirm by running, and make it callable.

    The step is captured, priced and searched; the best few plans, the best single device and the
    even split are then run in a process of their own, and the fastest measured is taken. So the
    result is never slower than the best single device that fits, as measured. Your own step is
    timed, too, and the report says where it is faster. Where nothing can be measured in time, a
    warning says so and the best predicted plan is taken. Model and optimizer are not changed by
    this, and by training only with `sync`.

    Under `torchrun`, or in a process group of several processes, all of them call this; the first
    one plans for its `machine`, and all run its plan together, as `compile` has it. Plans are
    measured only where the first process has all devices in reach.

    Args:
        model: The model, on the CPU or a GPU, in the mode (train or eval) it shall run in; or a
            step of it, of `capture`, which has its own loss, optimizer and options.
        example_inputs: A tensor, a tuple of positional inputs, or a dict of keyword inputs. Shapes
            and dtypes are fixed; integers among them are used to measure.
        loss_fn: As for `capture`; None with an optimizer: the model returns the loss. None without
            one: inference, the step returns the model's output.
        optimizer: As for `capture`.
        machine: `detect`, a preset's name, a machine file, a machine, or a number of logical CPU
            devices; its devices must be those of this computer.
        budget: Time for everything, capture and confirmation included, as `60s` or `2min`. With a
            number of evaluations, as `500ev`, the search is reproducible; measuring takes its time
            (`500ev,60s` bounds both).
        limits: Device name -> most bytes a step may use there (integer or text such as `20GiB`);
            0: it is not used.
        pins: Pattern -> device name, see `Problem`.
        exclude: Names of devices that must not be used.
        uses_cpu: Whether ops may go to CPUs beside GPUs. Without GPUs, and where pins name them,
            CPUs are used anyway.
        micro_batches: Chunks of the batch; `auto` tries 1, 2, 4 and 8 on two or more devices.
        seed: Of the search and of all random ops.
        placer: Who searches; `placers.Search()` by default.
        confirm: Whether plans are measured; if not, the best predicted is taken.
        verify: Whether two steps are first compared with the unplaced ones, and the first of those
            with an eager step; the notes say what was compared.
        compare_compile: Whether the report tells how fast `torch.compile` makes the user's own
            step on one device; that may take minutes, which the budget does not count.
        progress: Called with what is being done.
        shapes: Further batches, each in a form that `example_inputs` may have: the step takes
            batches of their shapes, too. They are planned with the weights where the plan of the
            example has them, which all shapes share, and compiled when they are first met. Of
            the budget each gets half of what the example does.
        max_shapes: Shapes in all. A batch of another shape is captured and planned when it is met,
            while there are fewer, and refused then. 1: only those given.
        ranks, batch, timeout_s: Of several processes, as for `compile`.
        of_capture: All else that `capture` takes, such as `example_kwargs`, `batch_dims`,
            `clip_grad_norm`, `autocast`. `fuse` is on by default where GPUs have a compiler, and
            `recompute` where nothing fits without it.

    Returns:
        A step: `loss = step(*batch)`; `step.sync()` writes back; `print(step)` says why this plan.

    Raises:
        InputError: A bad argument, a model on the meta device, or devices that are not here.
        CaptureError: The step cannot be one graph; says where and what to do.
        InfeasibleError: Nothing within the memory limits was found.
        ExecutionError: No plan could be run, for other reasons than time; says what happened to
            each.
        VerificationError: With `verify`, the placed step gave other numbers.
    """
    whole = BudgetClock.parse(budget)
    clock = whole.shared_with(len(shapes) if isinstance(shapes, (tuple, list)) else 0)
    if progress is not None and not callable(progress):
        raise InputError(f"progress must be a function of a text, such as print, got {progress!r}.")
    tell = progress or (lambda text: None)
    if isinstance(model, Captured):
        given = {"loss_fn": loss_fn, "optimizer": optimizer, "micro_batches": micro_batches}
        _refuse_second(given | of_capture)
        fuse = bool(model.meta["fuse"])
    else:
        _check_options(of_capture)
        fuse = of_capture.pop("fuse", None)
        of_capture["known"] = Known()
    _check_model(model.model if isinstance(model, Captured) else model)
    check_batch_kind(batch)
    group = Group(timeout_s) if several_processes() else None
    if group is not None:
        machine = share_machine(group, find_machine(machine))
    target = find_target(
        *(machine, limits, pins, exclude),
        uses_cpu=uses_cpu,
        runs=True,
        in_part=group is not None,
        fuse=fuse,
        tell=tell,
    )
    own = model, example_inputs, loss_fn, optimizer
    further = None
    if _wants_shapes(shapes, max_shapes, model, group):
        further = FurtherShapes(
            target,
            (model, loss_fn, optimizer),
            of_capture,
            stated(shapes, example_inputs, of_capture.get("example_kwargs")),
            max_shapes,
            whole,
            placer,
            seed,
            tell,
        )
    job = _Job(
        example_inputs,
        of_capture.get("example_kwargs"),
        lambda count, **more: target.capture(*own, count, **{**of_capture, **more}),
        target,
        clock,
        tell,
    )

    def choose_alone() -> tuple[Confirmation | None, list[Candidate]]:
        counts = _counts(micro_batches, model, job)
        early = Compilers() if target.fuse and not any_compiled(target.device) else None
        with Measurer(seed=seed) as measurer, early or contextlib.nullcontext() as compilers:
            if confirm:
                measurer.start()
            graphs = job.capture_all(counts)
            if further is not None:
                further.capture_early(graphs[0])
            searched = placer, seed, measurer.child, confirm
            job.compile_kernels(graphs, compilers)
            try:
                results = job.search(graphs, *searched)
            except InfeasibleError as error:
                if "recompute" in of_capture or isinstance(model, Captured):
                    raise
                graphs = job.capture_again(graphs[-1], error)
                job.compile_kernels(graphs, compilers)
                results = job.search(graphs, *searched)
            found, ranked = job.choose(results, measurer if confirm else None)
        if found is not None and not found.ranked:
            warnings.warn(_TOO_SLOW.format(found.seconds), stacklevel=3)
        if compare_compile:
            job.compare(graphs[0])
        return found, ranked

    if group is None:
        step = job.finish(*choose_alone(), seed, verify)
        if further is not None:
            with contextlib.ExitStack() as undo:
                undo.callback(step.close)
                step.join(further)
                undo.pop_all()
        return step
    job.together = {"ranks": ranks, "batch": batch, "timeout_s": timeout_s}
    with group.failing_together():
        target = job.target = share_fusing(group, target)
        reason = why_unmeasured(group, target.machine, target.exclude)
        if confirm:
            job.notes.append(
                f"plans were not measured: {reason}"
                if reason
                else "plans were measured in one process; between several, tensors take longer"
            )
        confirm = confirm and not reason
        found, best = None, None
        if group.rank == 0:
            with group.keeping_alive():
                found, (best, *_) = choose_alone()
        best = share_candidate(group, best, target, job.capture)
        return job.finish(found, [best], seed, verify)


@dataclass
class _Job:
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


def _check_options(of_capture: Mapping[str, Any]) -> None:
    """Refuse what `capture` does not take, before any work, as Python would."""
    known = inspect.signature(capture).parameters
    for name in of_capture:
        if name not in known:
            hint = did_you_mean(name, [*known, *inspect.signature(parallelize).parameters])
            raise TypeError(f"parallelize() got an unexpected keyword argument {name!r}.{hint}")


def _refuse_second(given: Mapping[str, Any]) -> None:
    """Refuse what a captured step has already; only the batch is given beside it."""
    nothing = {"micro_batches": 1, "example_kwargs": given.get("example_kwargs")}
    second = [name for name, value in given.items() if value != nothing.get(name)]
    if second:
        raise InputError(
            f"A captured step has its own {', '.join(second)}. Give them to dp.capture, or give "
            f"parallelize the model in its place."
        )


def _wants_shapes(shapes: Any, max_shapes: Any, model: Any, group: Group | None) -> bool:
    """Whether a step is to have further shapes; refuses them where it can have only one."""
    if isinstance(max_shapes, bool) or not isinstance(max_shapes, int) or max_shapes < 1:
        raise InputError(f"max_shapes must be a positive number, got {max_shapes!r}.")
    if not isinstance(shapes, (tuple, list)):
        raise InputError(
            f"shapes must be a list of batches, got {type(shapes).__name__}. For one more shape "
            f"give shapes=[batch]."
        )
    if max_shapes == 1 and not shapes:
        return False
    if 1 < max_shapes <= len(shapes):
        raise InputError(
            f"max_shapes must leave room for the example and all of shapes, which are "
            f"{1 + len(shapes)}, got {max_shapes}. Raise it, or give fewer shapes."
        )
    if isinstance(model, Captured):
        raise InputError(
            "A captured step has one shape. Give parallelize the model in its place, to plan it "
            "for further shapes."
        )
    if group is not None:
        raise InputError(
            "Several processes run a step of one shape: shapes and max_shapes are for one process. "
            "Pad the batches, or start one process."
        )
    return True


def _check_model(model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        way = "To run a plan file, use dp.compile."
        if isinstance(model, torch.export.ExportedProgram):
            way = "Pass its module: exported.module()."
        raise InputError(f"parallelize needs a torch.nn.Module, got {type(model).__name__}. {way}")
    module = unwrap(model)
    tensors = [*module.named_parameters(), *module.named_buffers()]
    name = next((name for name, tensor in tensors if tensor.is_meta), None)
    if name is not None:
        raise InputError(
            f"To run, the model needs values: {name!r} is on the meta device. Load weights (for "
            "example model.to_empty(device='cpu') and load_state_dict) first, or only plan with "
            "dp.place."
        )


def _counts(wanted: int | str, model: Any, job: _Job) -> tuple[int, ...]:
    """Numbers of micro-batches to try."""
    if isinstance(wanted, int) and not isinstance(wanted, bool) and wanted >= 1:
        return (wanted,)
    if wanted != "auto":
        raise InputError(f"micro_batches must be a positive number or 'auto', got {wanted!r}.")
    if len(job.target.devices) < 2:
        return (1,)
    batch_norm = torch.nn.modules.batchnorm._BatchNorm
    if any(isinstance(part, batch_norm) and part.training for part in model.modules()):
        job.notes.append(
            "only one micro-batch tried: batch norm takes its statistics over a whole batch"
        )
        return (1,)
    return MICRO_BATCHES
