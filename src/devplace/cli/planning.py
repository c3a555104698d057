"""`devplace plan` and `devplace compare`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from devplace import placers
from devplace.cli.plan_files import with_folder
from devplace.cli.session import (
    PlanRequest,
    Session,
    check_output,
    open_session,
    prints_on_stderr,
    refuse_overwriting,
    working,
)
from devplace.cli.trust import remember
from devplace.errors import InputError, WriteError
from devplace.placers import Budget, Evaluator, Placer, Result
from devplace.placers.infeasible import infeasible
from devplace.placers.ray_workers import RayWorkers
from devplace.problem import Placement, Problem
from devplace.report import Skipped
from devplace.simulator.bounds import LowerBound, lower_bound

if TYPE_CHECKING:
    import numpy as np

    from devplace.tune.confirm import Confirmation

CONFIRM_SECONDS = 60.0
"""Time after which `--confirm` tries no more plans."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


@dataclass(frozen=True)
class Outputs:
    """Files to write: the plan as JSON, a page with the timeline, a folder for curves and
    checkpoints of placers that learn; with `resume` they go on from there. `failures` are why some
    could not be written."""

    plan: Path | None = None
    html: Path | None = None
    log_dir: Path | None = None
    resume: bool = False
    failures: tuple[str, ...] = ()

    def check(self, request: PlanRequest) -> None:
        """A path that cannot or must not be written is told before the search, not after."""
        for what, path in (("a plan", self.plan), ("a page", self.html)):
            if path is not None:
                check_output(what, path, request.files())
        if self.plan is not None and self.html is not None:
            refuse_overwriting(self.html, [self.plan])

    def require_learning(self, names: Sequence[str]) -> None:
        """A folder for curves is refused where none of these placers learns."""
        if (self.log_dir is None and not self.resume) or any(n in placers.LEARNING for n in names):
            return
        one = f"Placer {names[0]} does not learn and has" if len(names) == 1 else ""
        raise InputError(
            f"{one or 'None of these placers learns, so there are'} no curves: leave out --log-dir "
            f"and --resume, or use one that learns: {', '.join(placers.LEARNING)}."
        )

    def logged(self, placer: Placer) -> Placer:
        """The placer, with the folder if it learns."""
        if placer.name not in placers.LEARNING or (self.log_dir is None and not self.resume):
            return placer
        training = placers.TrainingOptions(log_dir=self.log_dir, resume=self.resume)
        changed: Placer = replace(placer, training=training)  # type: ignore[type-var]
        return changed

    def write(self, result: Result, rows: Sequence[Result | Skipped] = ()) -> Outputs:
        """Write what was asked for; a plan only if it fits.

        Returns:
            These, without what could not be written; `failures` tell why.
        """
        written, failures = self, []
        if self.plan is not None and result.is_feasible:
            try:
                with_folder(result.plan, self.plan).save(self.plan)
            except InputError as error:
                written, failures = replace(written, plan=None), [str(error)]
        if self.html is not None:
            from devplace.report import save_html_report

            try:
                save_html_report(self.html, result, rows)
            except InputError as error:
                written, failures = replace(written, html=None), [*failures, str(error)]
        return replace(written, failures=tuple(failures))

    def lines(self, result: Result) -> list[str]:
        """What was written, in words."""
        lines = []
        if self.plan is not None and result.is_feasible:
            lines.append(f"Plan of {result.placer} written to {self.plan}")
        if self.html is not None:
            lines.append(f"Page written to {self.html}")
        if self.log_dir is not None:
            lines.append(f"Curves and checkpoints written to {self.log_dir}")
        return lines


@dataclass(frozen=True)
class PlanOutcome:
    """One plan."""

    session: Session
    result: Result
    outputs: Outputs
    confirmation: Confirmation | None = None

    @property
    def exit_code(self) -> int:
        """0 if it fits, else 3; 1 if it cannot be written, 130 after Ctrl-C."""
        if self.result.is_interrupted:
            return INTERRUPTED
        if self.outputs.failures:
            return WriteError.exit_code
        return 0 if self.result.is_feasible else 3

    @property
    def complaint(self) -> str:
        """Why it does not fit, or that it was interrupted."""
        if self.result.is_interrupted:
            text = "interrupted: this is the best plan found until then."
            return " ".join([text, *self.outputs.failures])
        if self.outputs.failures:
            return " ".join(self.outputs.failures)
        if self.result.is_feasible:
            return ""
        return str(infeasible(self.result.timeline, self.result.placer, self.result.bound))

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        from devplace.report import best_single, comparison_json, memory_json

        row = comparison_json([self.result])
        return {
            **{key: row[key] for key in ("model", "machine")},
            **row["rows"][0],
            "seed": self.result.seed,
            "single_ns": best_single(self.session.problem, [self.result.timeline]).makespan_ns,
            "memory": memory_json(self.result.timeline),
            "notes": [*self.session.problem.notes, *self.result.notes],
            "plan": str(self.outputs.plan)
            if self.outputs.plan and self.result.is_feasible
            else None,
            **self._confirmed_json(),
        }

    def _confirmed_json(self) -> dict[str, Any]:
        if self.confirmation is None:
            return {}
        return {
            "measured_ns": next((row.measured_ns for row in self.confirmation.ranked), None),
            "confirmation": [row.as_json() for row in self.confirmation.rows],
        }

    def print(self) -> None:
        """For people."""
        from devplace.cli.console import console
        from devplace.report import memory_table, plan_summary

        click.echo(plan_summary(self.result))
        console().print(memory_table(self.result.timeline))
        for note in (*self.session.problem.notes, *self.result.notes):
            click.echo(f"note: {note}")
        if self.confirmation is not None:
            for line in (self.confirmation.verdict(), *self.confirmation.lines()):
                click.echo(line)
        for line in self.outputs.lines(self.result):
            click.echo(line)


@dataclass(frozen=True)
class CompareOutcome:
    """Several placers on one problem."""

    session: Session
    rows: list[Result | Skipped]
    bound: LowerBound
    outputs: Outputs

    @property
    def results(self) -> list[Result]:
        """Rows of placers that support the problem."""
        return [row for row in self.rows if isinstance(row, Result)]

    @property
    def notes(self) -> list[str]:
        """What the user should know of the problem, and of each placer's result."""
        found = [f"{each.placer}: {note}" for each in self.results for note in each.notes]
        return [*self.session.problem.notes, *found]

    @property
    def best(self) -> Result | None:
        """The fastest plan that fits, by the objective."""
        fitting = [result for result in self.results if result.is_feasible]
        return min(fitting, key=lambda result: (result.value_ns, result.step_ns), default=None)

    @property
    def exit_code(self) -> int:
        """0 if some plan fits, 3 if none does, 2 if no placer supports it; 1 if the plan cannot be
        written, 130 after Ctrl-C."""
        if any(result.is_interrupted for result in self.results):
            return INTERRUPTED
        if self.outputs.failures:
            return WriteError.exit_code
        if self.best is not None:
            return 0
        return 3 if self.results else InputError.exit_code

    @property
    def complaint(self) -> str:
        """Why nothing fits, or that it was interrupted."""
        if self.exit_code == INTERRUPTED:
            text = "interrupted: these are the placers that had a plan until then."
            return " ".join([text, *self.outputs.failures])
        if self.outputs.failures:
            return " ".join(self.outputs.failures)
        if self.best is not None:
            return ""
        if not self.results:
            reasons = (
                f"{row.placer}: {row.reason}" for row in self.rows if isinstance(row, Skipped)
            )
            return f"No placer can place this: {'; '.join(reasons)}. Name another one in --placers."
        closest = min(
            self.results,  # a proof comes first
            key=lambda r: (not r.bound.is_infeasible, sum(r.timeline.missing_bytes.values())),
        )
        return str(infeasible(closest.timeline, closest.placer, closest.bound))

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        from devplace.report import comparison_json

        found = comparison_json(self.rows, problem=self.session.problem, bound=self.bound)
        return {**found, "notes": self.notes}

    def print(self) -> None:
        """For people."""
        from devplace.cli.console import console
        from devplace.report import comparison_table

        graph = self.session.problem.graph
        fused = f" (fused of {len(graph.plain.ops)})" if graph.plain is not None else ""
        click.echo(
            f"{self.session.request.model} on {self.session.problem.machine.name}: "
            f"{len(graph.ops)} ops{fused}, {graph.num_edges} edges, captured for "
            f"{graph.meta.get('device', 'cpu')}; {self.session.problem.costs.origin} costs"
        )
        console().print(comparison_table(self.rows, problem=self.session.problem, bound=self.bound))
        for note in self.notes:
            click.echo(f"note: {note}")
        if self.best is not None:
            for line in self.outputs.lines(self.best):
                click.echo(line)


def plan(
    request: PlanRequest,
    placer_name: str,
    budget: str,
    seed: int,
    outputs: Outputs,
    confirms: bool = False,
    workers: RayWorkers | None = None,
) -> PlanOutcome:
    """Plan with one placer; with `confirms`, run the best few plans and take the fastest."""
    placer, limits = outputs.logged(_placer(placer_name)), Budget.parse(budget)
    outputs.require_learning([placer.name])
    outputs.check(request)
    if confirms and request.objective != "latency":
        raise InputError(
            "--confirm measures one step at a time and cannot confirm a plan for a full pipeline. "
            "Leave it out, or plan with --objective latency."
        )
    session = open_session(request, confirms=confirms)
    remember(request.model)
    with working("computing the lower bound"):
        bound = lower_bound(session.problem)
    with _progress([placer.name]) as begin:
        result = _place(session, placer, limits, seed, bound, begin(placer.name), workers)
    confirmation = None
    if confirms and result.is_feasible and not result.is_interrupted:
        confirmation, result = _confirmed(session, result)
    return PlanOutcome(session, result, outputs.write(result), confirmation)


def _confirmed(session: Session, result: Result) -> tuple[Confirmation, Result]:
    """What was measured, and the result whose plan is the fastest measured."""
    from devplace.tune.confirm import confirm

    with working("running the best plans") as note:
        found = confirm(
            result,
            session.workload.inputs,
            seconds=CONFIRM_SECONDS,
            progress=lambda name: note(f"measuring {name}"),
        )
    if not found.ranked and found.untimed:
        return found, result
    best = found.best
    plan = best.plan
    timeline = plan.timeline(session.problem)
    chosen = replace(
        result, placement=plan.as_placement(), timeline=timeline, plan=plan, placer=best.name
    )
    return found, chosen


def compare(
    request: PlanRequest,
    names: str,
    budget: str,
    seed: int,
    outputs: Outputs,
    workers: RayWorkers | None = None,
) -> CompareOutcome:
    """Plan with several placers, each on the whole budget."""
    chosen = [outputs.logged(placer) for placer in _choose(names, request.objective)]
    outputs.require_learning([placer.name for placer in chosen])
    limits = Budget.parse(budget)
    outputs.check(request)
    session = open_session(request)
    remember(request.model)
    with working("computing the lower bound"):
        bound = lower_bound(session.problem)
    rows: list[Result | Skipped] = []
    with _progress([placer.name for placer in chosen]) as begin:
        for placer in chosen:
            spent = begin(placer.name)
            reason = placer.supports(session.problem)
            if reason:
                rows.append(Skipped(placer.name, reason))
            else:
                result = _place(session, placer, limits, seed, bound, spent, workers)
                rows.append(result)
                if result.is_interrupted:
                    break
    outcome = CompareOutcome(session, rows, bound, outputs)
    if outcome.best is not None:
        return replace(outcome, outputs=outputs.write(outcome.best, rows))
    return outcome


def _place(
    session: Session,
    placer: Placer,
    budget: Budget,
    seed: int,
    bound: LowerBound,
    spent: Callable[[float], None] | None,
    workers: RayWorkers | None,
) -> Result:
    return placers.place(
        session.problem,
        placer,
        budget,
        seed,
        objective=session.request.objective,
        request=asdict(session.request),
        allow_infeasible=True,
        bound=bound,
        progress=spent,
        workers=workers,
    )


def _choose(names: str, objective: str) -> list[Placer]:
    more = placers.ONLY_THROUGHPUT if objective == "throughput" else ()
    if names.strip() == "plain":
        return [placer() for placer in (*placers.PLAIN, *more)]
    if names.strip() == "all":
        return [placer() for placer in (*placers.ALL, *more)]
    wanted = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    if not wanted:
        raise InputError("--placers must name at least one placer, or be 'plain' or 'all'.")
    return [_placer(name) for name in wanted]


def _placer(name: str) -> Placer:
    """A placer by its name, or what `file.py:function` (or class) gives."""
    if ":" not in name and not name.endswith(".py"):
        return placers.by_name(name)
    from devplace.workloads.user import made_by

    with prints_on_stderr():
        made = made_by(name)
    has_name = isinstance(getattr(made, "name", None), str) and not isinstance(made, type)
    if not (has_name and callable(made) and callable(getattr(made, "supports", None))):
        raise InputError(
            f"{name} gave {made!r}, which is no placer: one has a text `name`, `supports(problem)` "
            f"and `__call__(problem, evaluate, rng)`. docs/guides/add-a-placer.md shows one."
        )
    own: Placer = made
    return own if type(own).__module__.startswith("devplace.") else _OwnPlacer(own, name)


@dataclass(frozen=True)
class _OwnPlacer:
    """A placer of the user's: what it prints goes to stderr, its errors are bad input."""

    placer: Placer
    spec: str

    @property
    def name(self) -> str:
        return self.placer.name

    @property
    def start(self) -> Placement | None:
        return getattr(self.placer, "start", None)

    def supports(self, problem: Problem) -> str:
        with self._watched("asking whether it supports the problem"):
            return self.placer.supports(problem)

    def __call__(
        self, problem: Problem, evaluate: Evaluator, rng: np.random.Generator
    ) -> Placement:
        with self._watched("placing"):
            found = self.placer(problem, evaluate, rng)
        if not isinstance(found, Placement):
            raise InputError(
                f"{self.spec}: a placer must give a devplace.Placement, got {repr(found)[:60]}."
            )
        return found

    @contextmanager
    def _watched(self, doing: str) -> Iterator[None]:
        from devplace.workloads.user import own_errors

        with prints_on_stderr(), own_errors(self.spec, doing):
            yield


@contextmanager
def _progress(names: list[str]) -> Iterator[Callable[[str], Callable[[float], None] | None]]:
    """Which placer is at work and how much of its budget is spent, on stderr; silent when that is
    no terminal. Gives a function from the next placer's name to its progress callback."""
    if not sys.stderr.isatty():
        yield lambda name: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from devplace.cli.console import console

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console(on_stderr=True), transient=True) as progress:
        bar = progress.add_task("planning", total=float(len(names)))

        def begin(name: str) -> Callable[[float], None]:
            done = names.index(name)
            progress.update(bar, completed=done, description=f"{name} ({done + 1}/{len(names)})")
            return lambda part: progress.update(bar, completed=done + part)

        yield begin
