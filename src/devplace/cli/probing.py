"""`devplace probe`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from devplace.cli.session import check_output, working
from devplace.errors import InputError, MachineError, VerificationError, WriteError
from devplace.files import write_whole
from devplace.machine import Machine, detect, toml
from devplace.units import format_bandwidth, format_bytes, format_time, three_digits

if TYPE_CHECKING:
    from rich.table import Table

    from devplace.run.probe import PairReport, ProbeReport


@dataclass(frozen=True)
class ProbeOutcome:
    """What a probe found, and the machine made from it."""

    report: ProbeReport
    machine: Machine | None
    refusal: str
    output: Path | None
    failure: str = ""

    @property
    def exit_code(self) -> int:
        """0; that of a failed verification if a pair must not be used; 1 if the machine could not
        be written."""
        if self.report.faulty:
            return VerificationError.exit_code
        return WriteError.exit_code if self.failure else 0

    @property
    def complaint(self) -> str:
        """The pairs that must not be used."""
        faults = [f"{p.src} -> {p.dst} {p.faults[0]}" for p in self.report.faulty]
        if not faults:
            return self.failure
        ending = self.refusal or "Plans for the measured machine do not use them."
        count = f"{len(faults)} of {len(self.report.pairs)} links are faulty"
        return f"{count}: {'; '.join(faults)}. {ending} {self.failure}".rstrip()

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        from devplace.run.probe import link_fit
        from devplace.run.probe.fit import crossover_bytes

        data: dict[str, Any] = msgspec.to_builtins(self.report)
        for row, pair in zip(data["pairs"], self.report.pairs, strict=True):
            fit = link_fit(self.report, pair) if not pair.faults else None
            row["fit"] = msgspec.to_builtins(fit)
            row["crossover_bytes"] = crossover_bytes(pair)
        data["machine_file"] = str(self.output) if self._is_written else None
        return data

    @property
    def _is_written(self) -> bool:
        return self.output is not None and self.machine is not None

    def print(self) -> None:
        """For people."""
        from devplace.cli.console import console

        out = console(least=100)
        out.print(links_table(self.report))
        for way in _ways(self.report.pairs):
            out.print(hops_table(self.report.pairs, way))
        out.print(devices_table(self.report))
        for line in notes(self.report):
            out.print(line)
        if self._is_written:
            out.print(f"Machine written to {self.output}")


def probe(output: Path | None) -> ProbeOutcome:
    """Probe the machine this process runs on; keep the result for later plans."""
    if output is not None:
        _check_output(output)
    with working("loading torch"):
        from devplace.run import probe as room

        machine = detect()
    with working("probing links"):
        report = room.probe(machine)
    room.keep_report(report)
    measured, refusal = None, ""
    try:
        measured = room.machine_from_probe(machine, report)
    except MachineError as error:
        refusal = f"No machine can be described: {error}"
    if output is not None and measured is not None:
        try:
            write_whole(output, toml.dumps(measured).encode())
        except OSError as error:
            failure = f"Cannot write {output}: {error.strerror}. Check the path."
            return ProbeOutcome(report, measured, refusal, None, failure)
    return ProbeOutcome(report, measured, refusal, output)


def _check_output(output: Path) -> None:
    """A path that cannot or must not be written is told before the probe, not after."""
    check_output("a machine", output)
    if output.suffix != ".toml":
        raise InputError(f"A machine file must end in .toml, got {output}. Give another output.")
    if output.exists() and not _is_probed(output):
        raise InputError(
            f"Writing to {output} would overwrite a file that `devplace probe` did not write. "
            "Give another output, or remove it first."
        )


def _is_probed(path: Path) -> bool:
    from devplace.run.probe.probed_machine import MEASURED

    try:
        return any(MEASURED in text for text in toml.load(path).sources.values())
    except MachineError:
        return False


def _ways(pairs: Sequence[PairReport]) -> list[str]:
    return list(dict.fromkeys(way for pair in pairs for way in pair.hop_ns))


def links_table(report: ProbeReport) -> Table:
    """Latency and bandwidth per ordered pair, as the executor carries tensors."""
    from rich.table import Table

    from devplace.run.probe import link_fit
    from devplace.run.probe.channels import channels
    from devplace.run.probe.fit import crossover_bytes

    table = Table(
        "from", "to", "latency", "bandwidth", "fit within", "engine from", "shares", "data"
    )
    names = channels(report)
    for pair in report.pairs:
        if pair.faults:
            table.add_row(pair.src, pair.dst, "-", "-", "-", "-", "-", "; ".join(pair.faults))
            continue
        fit = link_fit(report, pair)
        crossover = crossover_bytes(pair)
        table.add_row(
            pair.src,
            pair.dst,
            format_time(fit.latency_ns) if fit else "-",
            format_bandwidth(fit.bytes_per_s) if fit else "-",
            f"{fit.worst:.0%}" if fit else "-",
            format_bytes(crossover) if crossover else "-",
            ", ".join(names[pair.src, pair.dst]) or "-",
            "right",
        )
    return table


def hops_table(pairs: Sequence[PairReport], way: str) -> Table:
    """Time of a hop per size, and the bandwidth of the largest, for one way to carry."""
    from rich.table import Table

    rows = [pair for pair in pairs if way in pair.hop_ns]
    sizes = sorted({size for pair in rows for size in pair.sizes})
    table = Table("from", "to", *map(format_bytes, sizes), "largest", title=f"Hop by {way}, us")
    for pair in rows:
        times = dict(zip(pair.sizes, pair.hop_ns[way], strict=True))
        texts = [three_digits(times[size] / 1e3) if size in times else "-" for size in sizes]
        largest = pair.sizes[-1]
        rate = largest * 10**9 // times[largest]
        table.add_row(pair.src, pair.dst, *texts, format_bandwidth(rate))
    return table


def devices_table(report: ProbeReport) -> Table:
    """What transfers cost each device."""
    from rich.table import Table

    table = Table("device", "per send", "per receive", "send starts later by", "smallest op", "gap")
    for d in report.devices:
        op = (format_time(d.op_ns), format_time(d.launch_gap_ns)) if d.op_ns else ("-", "-")
        costs = (d.send_overhead_ns, d.receive_overhead_ns, d.fork_ns)
        table.add_row(d.name, *map(format_time, costs), *op)
    return table


def notes(report: ProbeReport) -> list[str]:
    """Steps, sharing and time spent, in words."""
    lines = []
    if report.step is not None:
        lines.append(
            f"Between steps {format_time(report.step.step_gap_ns)}; the shortest step takes "
            f"{format_time(report.step.least_step_ns)}."
        )
    for row in report.sharing:
        pairs = " with ".join(f"{src} -> {dst}" for src, dst in row.transfers)
        lines.append(f"At once: {pairs}: {row.slowdown:.2f} times as long.")
    parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in report.seconds.items())
    lines.append(f"Took {parts}.")
    return lines
