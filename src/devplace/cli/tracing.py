"""`devplace trace`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec

from devplace.cli.measured_file import load_measured, measured_path
from devplace.cli.session import Given, check_output, refuse_overwriting, reopen, working
from devplace.errors import InputError, WriteError
from devplace.files import write_whole
from devplace.graph import Captured
from devplace.plan import load_plan


@dataclass(frozen=True)
class TraceOutcome:
    """Where a trace was written."""

    output: Path
    num_events: int
    has_measured: bool
    deviations: Any = None
    exit_code: int = 0
    complaint: str = ""

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        return {
            "trace": str(self.output),
            "events": self.num_events,
            "measured": self.has_measured,
            **({"deviations": self.deviations.as_json()} if self.deviations else {}),
        }

    def print(self) -> None:
        """For people."""
        what = "planned and measured" if self.has_measured else "planned"
        click.echo(
            f"{self.output}: {self.num_events} events, {what}. Open it in chrome://tracing or "
            f"ui.perfetto.dev."
        )
        if self.deviations is not None:
            print_deviations(self.deviations)


def print_deviations(found: Any) -> None:
    """Tables of the largest deviations, and what is only planned or only measured."""
    from devplace.cli.console import console

    for table in found.tables():
        console().print(table)
    if found.missing:
        names = ", ".join(found.missing[:5])
        click.echo(f"note: {len(found.missing)} are only planned or only measured: {names}")


def trace(path: Path, output: Path, given: Given, with_deviations: bool) -> TraceOutcome:
    """Write the Chrome trace of a plan."""
    plan = load_plan(path)
    measured = load_measured(path, plan)
    if with_deviations and measured is None:
        raise InputError(
            f"Deviations need a measured timeline of this plan. First: devplace run {path}"
        )
    check_output("a trace", output, (path, measured_path(path)))
    session = reopen(plan, path, given)
    refuse_overwriting(output, session.request.files())
    from devplace import report
    from devplace.schedule import make_schedule

    graph = session.problem.graph
    transfers: Sequence[Any] = ()  # those of a graph that can be run
    with working("writing the trace"):
        if isinstance(graph, Captured):
            schedule = make_schedule(graph, plan.placement, plan.order, plan.device_names)
            transfers = schedule.transfers
        timeline = plan.timeline(session.problem)
        data = report.chrome_trace(timeline, measured, transfers)
        try:
            write_whole(output, msgspec.json.encode(data))
        except OSError as error:
            raise WriteError(
                f"Cannot write {output}: {error.strerror}. Check the folder."
            ) from error
    found = report.deviations(timeline, measured, transfers) if with_deviations else None
    return TraceOutcome(output, len(data["traceEvents"]), measured is not None, found)
