"""`devplace run` and `devplace explain`."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from devplace.cli.measured_file import keep_measured, load_measured, measured_path
from devplace.cli.session import (
    Given,
    Session,
    check_output,
    prints_on_stderr,
    refuse_overwriting,
    reopen,
    working,
)
from devplace.cli.tracing import print_deviations
from devplace.errors import WriteError
from devplace.graph.members import some_text
from devplace.plan import Plan, load_plan
from devplace.units import format_bytes, format_time

TIMING_SECONDS = 0.5
QUICK_NS = 200_000_000
"""Quicker steps are run more often for their time: the first ones are slower."""


@dataclass(frozen=True)
class RunOutcome:
    """What a checked run gave."""

    data: dict[str, Any]
    deviations: Any = None
    exit_code: int = 0
    complaint: str = ""

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        extra = {"deviations": self.deviations.as_json()} if self.deviations is not None else {}
        return {**self.data, **extra}

    def print(self) -> None:
        """For people."""
        d = self.data
        equal = (
            "bit for bit equal"
            if d["bit_equal"]
            else (f"equal within {d['largest_error']:.1e} of each tensor's largest value")
        )
        click.echo(f"{d['eager'][:1].upper()}{d['eager'][1:]}.")
        kinds = "loss, parameters, buffers, optimizer state" if d["losses"] else "outputs, buffers"
        click.echo(
            f"{d['results']} results ({kinds}) of "
            f"{d['steps']} steps: {equal} to the {d['compared_with']}."
        )
        moved = f"{d['transfers']} transfers per step, {format_bytes(d['transfer_bytes'])}."
        took, planned = format_time(d["measured_step_ns"]), format_time(d["predicted_step_ns"])
        names = ", ".join(d["devices"])
        if d["mode"] == "threads":
            count = len(d["devices"])
            who = f"{count} logical CPU device{'s' if count > 1 else ''}"
            click.echo(f"{who} stood in for {names}; {moved}")
            click.echo(
                f"Measured here, where logical devices share the cores and Python, {took} per "
                f"step; predicted for {d['machine']} {planned}."
            )
        else:
            how = "CUDA graphs" if d["mode"] == "graph" else f"no CUDA graphs: {d['reason']}"
            click.echo(f"Ran on {names} of this computer ({how}); {moved}")
            click.echo(f"Measured {took} per step; predicted {planned}.")
        click.echo(f"{d['ordinary'][:1].upper()}{d['ordinary'][1:]}.")
        if not all(math.isfinite(loss) for loss in d["losses"]):
            click.echo("note: losses are not finite; equal steps can still be of no use.")
        for note in d["notes"]:
            click.echo(f"note: {note}")
        if d["losses"]:
            click.echo(f"Losses: {', '.join(f'{loss:.6g}' for loss in d['losses'])}")
        if self.deviations is not None:
            print_deviations(self.deviations)


def run(
    path: Path, steps: int, seed: int, given: Given, with_deviations: bool = False
) -> RunOutcome:
    """Execute a plan and compare it with the ordinary step, run eagerly, and the unplaced one."""
    plan = load_plan(path)
    session = reopen(plan, path, given, with_values=True)
    from devplace.graph import as_captured
    from devplace.run import check
    from devplace.tune.ordinary import time_ordinary

    problem = session.problem
    timeline = plan.timeline(problem)
    _compile_kernels(plan, session)
    graph = as_captured(problem.graph, "To run it")
    with working("checking against the unplaced step"), prints_on_stderr():
        report = check(graph, plan, session.workload.inputs, steps=steps, seed=seed)
    with working("timing the ordinary step"), prints_on_stderr():
        workload = session.workload
        own = time_ordinary(graph, workload.model, session.optimizer, workload.inputs)
    with working("measuring"):
        ran = _measure(plan, session, steps, seed)
    notes = _keep(path, plan, ran.timeline)
    found = None
    if with_deviations:
        from devplace.report import deviations

        found = deviations(timeline, ran.timeline, ran.transfers)
    used = sorted({plan.device_names[d] for d in plan.placement})
    return RunOutcome(
        {
            "model": session.request.model,
            "machine": problem.machine.name,
            "devices": used,
            "steps": report.steps,
            "results": len(report.tensors),
            "compared_with": f"unplaced {'fused ' if problem.graph.is_fused else ''}step",
            "eager": report.beside_own,
            "bit_equal": report.is_bit_equal,
            "largest_error": report.worst.error,
            "worst_result": report.worst.name,
            "transfers": report.num_transfers,
            "transfer_bytes": timeline.transfer_bytes,
            "predicted_step_ns": timeline.makespan_ns,
            "measured_step_ns": ran.step_ns,
            "ordinary_step_ns": own.timing.step_ns if own.timing else None,
            "ordinary": str(own),
            "losses": ran.losses,
            "mode": ran.mode,
            "reason": ran.reason,
            "notes": notes,
        },
        found,
    )


def _compile_kernels(plan: Plan, session: Session) -> None:
    """Compile what a fused step needs, telling how far that is; the runs find it on disk."""
    graph = session.problem.graph
    if not graph.is_fused:
        return
    from devplace.kernels.prepare import prepare
    from devplace.run.executors import used_devices
    from devplace.schedule import make_schedule

    schedule = make_schedule(graph, plan.placement, plan.order, plan.device_names)
    with working("compiling kernels") as note:
        prepare(graph, used_devices(schedule), note)


def _keep(path: Path, plan: Plan, measured: Any) -> list[str]:
    """Keep the measured timeline; what was checked and measured is told also where it cannot be."""
    try:
        keep_measured(path, plan, measured)
    except WriteError as error:
        return [f"the measured timeline is not kept. {error}"]
    return []


@dataclass(frozen=True)
class _Ran:
    """Losses, median step time, the timeline of one step, and how they ran."""

    losses: list[float]
    step_ns: int
    timeline: Any
    transfers: Any
    mode: str
    reason: str


def _measure(plan: Plan, session: Session, steps: int, seed: int) -> _Ran:
    """Steps one by one for their losses; quick ones more often, for their time."""
    from devplace.graph import as_captured
    from devplace.run import compile
    from devplace.step_capture.loss import read_loss
    from devplace.tune.step_timing import median_ns, time_steps

    workload = session.workload
    captured = as_captured(session.problem.graph, "To run it")
    step = compile(captured, plan, seed=seed, waits=False)
    executor: Any = step.executor

    def once() -> Any:
        inputs = workload.inputs
        return step(**inputs) if isinstance(inputs, dict) else step(*inputs)

    losses: list[float] = []
    times: list[int] = []
    try:
        for number in range(steps):
            mode = getattr(executor, "mode", "threads")
            step.is_timed = number == steps - 1 and mode == "threads"
            begin = time.perf_counter_ns()
            returned = once()
            if workload.loss_fn is not None:
                losses.append(float(read_loss(returned).loss))
            times.append(time.perf_counter_ns() - begin)
        step.is_timed = False
        if min(times) < QUICK_NS:
            wait = getattr(executor, "synchronize", lambda: None)
            times = list(time_steps(once, wait, TIMING_SECONDS))
        if step.timeline is None:
            step.is_timed = True
            once()
        mode = getattr(executor, "mode", "threads")
        reason = getattr(executor, "reason", "")
        transfers = executor.schedule.transfers
        return _Ran(losses, median_ns(times), step.timeline, transfers, mode, reason)
    finally:
        step.close()


@dataclass(frozen=True)
class ExplainOutcome:
    """Where a plan puts things and why."""

    explanation: Any
    device_map: dict[str, str]
    run_elsewhere: tuple[str, ...]
    loads: tuple[str, ...] = ()
    exit_code: int = 0
    complaint: str = ""

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        found: dict[str, Any] = self.explanation.to_dict()
        return {
            **found,
            "device_map": self.device_map,
            "run_elsewhere": list(self.run_elsewhere),
        }

    def print_map(self) -> None:
        """The device map on stdout; beside it, where the plan is finer."""
        click.echo(json.dumps(self.device_map))
        if self.run_elsewhere:
            parts = some_text(list(self.run_elsewhere), 4)
            click.echo(
                f"devplace: note: a map has one device for each block and each tied weight; of "
                f"{parts} the plan runs ops on another one.",
                err=True,
            )

    def print(self) -> None:
        """For people."""
        from devplace.cli.console import console

        console().print(self.explanation.table())
        for line in (*self.loads, *self.explanation.lines()):
            click.echo(line)


def explain(path: Path, given: Given, html: Path | None = None) -> ExplainOutcome:
    """Explain a plan; write it as a page besides."""
    from devplace import report

    plan = load_plan(path)
    if html is not None:
        check_output("a page", html, (path, measured_path(path)))
    session = reopen(plan, path, given)
    if html is not None:
        refuse_overwriting(html, session.request.files())
        _write_page(html, path, plan, session)
    with working("explaining"):
        timeline = plan.timeline(session.problem)
        loads = report.plan_load_lines(plan, timeline.problem)
        model = getattr(session.workload, "model", None)
        names = model.state_dict() if model is not None else ()
        found = report.device_map(timeline, names=names)
        elsewhere = report.run_elsewhere(timeline, found)
        return ExplainOutcome(report.explain(timeline), found, elsewhere, tuple(loads))


def _write_page(html: Path, path: Path, plan: Plan, session: Session) -> None:
    from devplace import report
    from devplace.placers import Result
    from devplace.simulator.bounds import lower_bound

    timeline = plan.timeline(session.problem)
    result = Result(
        placement=plan.as_placement(),
        timeline=timeline,
        plan=plan,
        placer=str(plan.request.get("placer", "")),
        seed=int(plan.request.get("seed", 0)),
        evaluations=0,
        seconds=0.0,
        history=(),
        bound=lower_bound(session.problem),
    )
    report.save_html_report(html, result, measured=load_measured(path, plan))
    click.echo(f"Page written to {html}", err=True)


def split_points(path: Path, given: Given) -> dict[str, str]:
    """Where a pipeline's stages begin."""
    from devplace import report

    plan = load_plan(path)
    return report.split_points(plan.timeline(reopen(plan, path, given).problem))
