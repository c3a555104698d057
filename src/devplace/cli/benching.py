"""`devplace bench`: published instances solved, checked, and compared with the best known."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from devplace.bench import BenchRow, Effort, bench, save_best_known
from devplace.cli.session import check_output
from devplace.cli.terminal import shown
from devplace.errors import DevplaceError, WriteError
from devplace.files import write_whole
from devplace.instances import Changes, change_all, load_instance
from devplace.instances.suites import find
from devplace.placers import Budget
from devplace.units import parse_size

if TYPE_CHECKING:
    from devplace.instances import Instance


INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


@dataclass(frozen=True)
class BenchOutcome:
    """Rows of a suite."""

    suite: str
    rows: list[BenchRow]
    recorded: int
    output: Path | None
    exit_code: int = 0
    complaint: str = ""

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        return {"suite": self.suite, "rows": [row.as_json() for row in self.rows]}

    def print(self) -> None:
        """For people."""
        click.echo(table(self.rows))
        for row in self.rows:
            if row.value is None and row.why:
                click.echo(f"{row.instance.about.name}: {row.status}: {row.why}")
        if self.recorded:
            click.echo(f"Best known values recorded: {self.recorded}")
        if self.output is not None:
            click.echo(f"Solutions written to {self.output}")


def run(
    specs: Sequence[str],
    placer: str,
    budget: str,
    seed: int,
    threads: int,
    objective: str,
    changes: dict[str, Any],
    output: Path | None,
    records: bool,
) -> BenchOutcome:
    """Solve what the specs name; every row is checked by the verifier.

    Where it ends early, by Ctrl-C or an error, the rows until then are kept.

    Raises:
        InputError: A spec, file, option or budget that makes no sense.
        VerificationError: A solver and the verifier disagree.
    """
    effort = Effort(Budget.parse(budget), seed, threads)
    files = [file for spec in specs for file in find(spec)]
    if output is not None:
        check_output("solutions", output, files)
    given = [load_instance(file, objective) for file in files]
    instances = change_all(given, _changes(changes))
    rows: list[BenchRow] = []
    code, complaints = 0, []
    try:
        with _progress(len(instances)) as begin:
            for row in bench(instances, effort, placer, begin):
                rows.append(row)
    except (KeyboardInterrupt, DevplaceError) as error:
        if not rows:
            raise
        is_ours = isinstance(error, DevplaceError)
        code = error.exit_code if isinstance(error, DevplaceError) else INTERRUPTED
        complaints = [str(error) if is_ours else f"interrupted: these are the first {len(rows)}."]
    outcome = BenchOutcome(" ".join(specs), rows, 0, output)
    try:
        news = [row.record for row in rows if row.record is not None] if records else []
        if news:
            save_best_known(news)
            outcome = replace(outcome, recorded=len(news))
        if output is not None:
            _write(output, outcome)
    except WriteError as error:
        outcome = replace(outcome, output=None)
        code, complaints = code or error.exit_code, [*complaints, str(error)]
    return replace(outcome, exit_code=code, complaint=" ".join(complaints))


COLUMNS = (
    "instance",
    "objective",
    "value",
    "unit",
    "best known",
    "to it",
    "bound",
    "gap",
    "status",
)
_LEFT = ("instance", "objective", "unit", "status")


def table(rows: Sequence[BenchRow]) -> str:
    """Rows as aligned text."""
    columns = (*COLUMNS, "seconds")
    cells = [columns, *(_cells(row) for row in rows)]
    widths = [max(len(line[k]) for line in cells) for k in range(len(columns))]
    lines = []
    for line in cells:
        parts = [
            text.ljust(width) if name in _LEFT else text.rjust(width)
            for name, text, width in zip(columns, line, widths, strict=True)
        ]
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)


def _cells(row: BenchRow) -> tuple[str, ...]:
    to_best = None
    if row.value is not None and row.best_known:
        to_best = row.value / row.best_known - 1
    return (
        row.instance.about.name,
        row.instance.objective,
        _number(row.value),
        row.instance.unit,
        _number(row.best_known),
        _percent(to_best, signed=True),
        _number(row.bound),
        _percent(row.gap),
        row.status,
        f"{row.seconds:.1f}",
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.7g}"


def _percent(value: float | None, signed: bool = False) -> str:
    if value is None:
        return "-"
    return f"{100 * value:+.2f} %" if signed else f"{100 * value:.2f} %"


def _changes(options: dict[str, Any]) -> Changes:
    memory = options["memory"]
    return Changes(
        devices=options["devices"],
        cpus=options["cpus"],
        memory_bytes=None if memory is None else parse_size(_size(memory), "--memory"),
        edge_cost_scale=options["edge_cost_scale"],
        bandwidth=options["bandwidth"],
    )


def _size(text: str) -> int | str:
    return int(text) if text.isdecimal() and len(text) < 19 else text


def _write(output: Path, outcome: BenchOutcome) -> None:
    rows = []
    for row, data in zip(outcome.rows, outcome.as_json()["rows"], strict=True):
        solution = None if row.solution is None else asdict(row.solution)
        rows.append({**data, "file": row.instance.about.path, "solution": solution})
    text = json.dumps({"suite": outcome.suite, "rows": rows}, allow_nan=False) + "\n"
    try:
        write_whole(output, text.encode())
    except OSError as error:
        raise WriteError(f"Cannot write {output}: {error.strerror}. Check the path.") from error


@contextmanager
def _progress(count: int) -> Iterator[Any]:
    """Which instance is being solved, on stderr; silent when that is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.text import Text

    from devplace.cli.console import console

    done = 0
    with console(on_stderr=True).status("reading") as status:

        def begin(instance: Instance) -> None:
            nonlocal done
            done += 1
            status.update(Text(shown(f"{instance.about.name} ({done}/{count})")))

        yield begin
