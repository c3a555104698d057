"""`devplace run` and `devplace trace`."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec

from devplace.cli.session import Session, refuse_overwriting, reopen, working
from devplace.errors import InputError
from devplace.plan import Plan, load_plan
from devplace.units import format_bytes, format_time


@dataclass(frozen=True)
class RunOutcome:
    """What a checked run gave."""

    data: dict[str, Any]
    exit_code: int = 0
    complaint: str = ""

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        return self.data

    def print(self) -> None:
        """For people."""
        d = self.data
        equal = (
            "bit for bit equal"
            if d["bit_equal"]
            else (f"equal within {d['largest_error']:.1e} of each tensor's largest value")
        )
        click.echo(
            f"{d['results']} results (loss, parameters, buffers, optimizer state) of "
            f"{d['steps']} steps: {equal} to the unplaced step."
        )
        count = len(d["devices"])
        click.echo(
            f"{count} logical CPU device{'s' if count > 1 else ''} stood in for "
            f"{', '.join(d['devices'])}; {d['transfers']} transfers per step, "
            f"{format_bytes(d['transfer_bytes'])}."
        )
        click.echo(
            f"Measured here, where logical devices share the cores and Python, "
            f"{format_time(d['measured_step_ns'])} per step; predicted for {d['machine']} "
            f"{format_time(d['predicted_step_ns'])}."
        )
        if not all(math.isfinite(loss) for loss in d["losses"]):
            click.echo("note: losses are not finite; equal steps can still be of no use.")
        click.echo(f"Losses: {', '.join(f'{loss:.6g}' for loss in d['losses'])}")


def run(path: Path, steps: int, seed: int, machine: str | None) -> RunOutcome:
    """Execute a plan on logical CPU devices and compare it with the unplaced step."""
    plan = load_plan(path)
    session = reopen(plan, machine, with_values=True)
    from devplace.run import check_plan

    problem = session.problem
    timeline = plan.timeline(problem)
    with working("checking against the unplaced step"):
        report = check_plan(
            plan,
            problem.graph,
            session.workload.model,
            session.optimizer,
            session.workload.inputs,
            steps=steps,
            seed=seed,
        )
    with working("measuring"):
        losses, measured, step_ns = _measure(plan, session, steps, seed)
    _keep_measured(path, plan, measured)
    used = sorted({plan.device_names[d] for d in plan.placement})
    return RunOutcome(
        {
            "model": session.request.model,
            "machine": problem.machine.name,
            "devices": used,
            "steps": report.steps,
            "results": len(report.tensors),
            "bit_equal": report.is_bit_equal,
            "largest_error": report.worst.error,
            "worst_result": report.worst.name,
            "transfers": report.num_transfers,
            "transfer_bytes": timeline.transfer_bytes,
            "predicted_step_ns": timeline.makespan_ns,
            "measured_step_ns": step_ns,
            "losses": losses,
        }
    )


def _measure(plan: Plan, session: Session, steps: int, seed: int) -> tuple[list[float], Any, int]:
    """Losses, the timeline of the last step, and the median step time."""
    from devplace.run import compile

    step = compile(
        session.workload.model,
        plan,
        optimizer=session.optimizer,
        graph=session.problem.graph,
        seed=seed,
    )
    losses, times, inputs = [], [], session.workload.inputs
    try:
        for number in range(steps):
            step.is_timed = number == steps - 1
            begin = time.perf_counter_ns()
            loss = step(**inputs) if isinstance(inputs, dict) else step(*inputs)
            losses.append(float(loss))
            times.append(time.perf_counter_ns() - begin)
        return losses, step.timeline, sorted(times)[len(times) // 2]
    finally:
        step.close()


class _Measured(msgspec.Struct):
    """The file beside a plan; see `MeasuredTimeline`."""

    graph: str
    placement: tuple[int, ...]
    order: tuple[tuple[int, ...], ...]
    start_ns: list[int]
    finish_ns: list[int]
    transfer_start_ns: list[int]
    transfer_finish_ns: list[int]
    makespan_ns: int


def measured_path(plan_path: Path) -> Path:
    """Where the measured timeline of a plan is kept."""
    return plan_path.with_name(plan_path.name + ".measured.json")


def _keep_measured(path: Path, plan: Plan, measured: Any) -> None:
    data = {
        "graph": plan.fingerprints.graph,
        "placement": plan.placement,
        "order": plan.order,
        "start_ns": measured.start_ns.tolist(),
        "finish_ns": measured.finish_ns.tolist(),
        "transfer_start_ns": measured.transfer_start_ns.tolist(),
        "transfer_finish_ns": measured.transfer_finish_ns.tolist(),
        "makespan_ns": measured.makespan_ns,
    }
    target = measured_path(path)
    try:
        target.write_bytes(msgspec.json.encode(data))
    except OSError as error:
        raise InputError(f"Cannot write {target}: {error.strerror}. Check the folder.") from error


def _load_measured(path: Path, plan: Plan) -> Any:
    """The measured timeline, if there is one and it is of this plan."""
    import numpy as np

    target = measured_path(path)
    if not target.exists():
        return None
    try:
        data = msgspec.json.decode(target.read_bytes(), type=_Measured)
        of_plan = (plan.fingerprints.graph, plan.placement, plan.order)
        if (data.graph, data.placement, data.order) != of_plan:
            return None
        from devplace.run.timeline import MeasuredTimeline

        rows = (data.start_ns, data.finish_ns, data.transfer_start_ns, data.transfer_finish_ns)
        if [len(row) for row in rows] != [len(plan.ops)] * 2 + [len(data.transfer_start_ns)] * 2:
            raise ValueError("rows of unequal length")
        start, finish, sent, arrived = (np.array(row, np.int64) for row in rows)
        return MeasuredTimeline(start, finish, sent, arrived, data.makespan_ns)
    except (OSError, msgspec.MsgspecError, ValueError, OverflowError) as error:
        raise InputError(
            f"{target} is damaged ({type(error).__name__}). Remove it, or run the plan again."
        ) from error


@dataclass(frozen=True)
class ExplainOutcome:
    """Where a plan puts things and why."""

    explanation: Any
    device_map: dict[str, str]
    exit_code: int = 0
    complaint: str = ""

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        found: dict[str, Any] = self.explanation.to_dict()
        return {**found, "device_map": self.device_map}

    def print(self) -> None:
        """For people."""
        from rich.console import Console

        Console().print(self.explanation.table())
        for line in self.explanation.lines():
            click.echo(line)


def explain(path: Path, machine: str | None) -> ExplainOutcome:
    """Explain a plan."""
    from devplace import report

    plan = load_plan(path)
    timeline = plan.timeline(reopen(plan, machine).problem)
    return ExplainOutcome(report.explain(timeline), report.device_map(timeline))


@dataclass(frozen=True)
class TraceOutcome:
    """Where a trace was written."""

    output: Path
    num_events: int
    has_measured: bool
    exit_code: int = 0
    complaint: str = ""

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        return {
            "trace": str(self.output),
            "events": self.num_events,
            "measured": self.has_measured,
        }

    def print(self) -> None:
        """For people."""
        what = "planned and measured" if self.has_measured else "planned"
        click.echo(
            f"{self.output}: {self.num_events} events, {what}. Open it in chrome://tracing or "
            f"ui.perfetto.dev."
        )


def trace(path: Path, output: Path, machine: str | None) -> TraceOutcome:
    """Write the Chrome trace of a plan."""
    plan = load_plan(path)
    measured = _load_measured(path, plan)
    refuse_overwriting(output, (path, measured_path(path)))
    session = reopen(plan, machine)
    refuse_overwriting(output, session.request.files())
    from devplace.report import chrome_trace
    from devplace.run.schedule import make_schedule

    graph = session.problem.graph
    transfers = make_schedule(graph, plan.placement, plan.order, plan.device_names).transfers
    data = chrome_trace(plan.timeline(session.problem), measured, transfers)
    try:
        output.write_bytes(msgspec.json.encode(data))
    except OSError as error:
        raise InputError(f"Cannot write {output}: {error.strerror}. Check the folder.") from error
    return TraceOutcome(output, len(data["traceEvents"]), measured is not None)
