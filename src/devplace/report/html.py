"""The full report as one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import msgspec
from markupsafe import Markup

from devplace.errors import InputError
from devplace.files import write_whole
from devplace.graph.members import some_text
from devplace.placers import Result
from devplace.report.blocks import folded
from devplace.report.chrome_trace import Span, lanes, planned_rows
from devplace.report.explain import explain
from devplace.report.measured import measured_summary
from devplace.report.memory import CATEGORIES, memory_by_module, memory_rows
from devplace.report.summary import best_single, devices_in_use, missing_text, plan_summary
from devplace.report.text_tables import Skipped, gap_text
from devplace.report.what_if import changes
from devplace.simulator import Timeline
from devplace.units import format_bytes, format_time

if TYPE_CHECKING:
    from devplace.run.measured_timeline import MeasuredTimeline

_STAGES = {"forward": 0, "backward": 1, "update": 2, "transfer": 3}
_NAMED = 4  # modules of a fused group that are named


def html_report(
    result: Result,
    results: Sequence[Result | Skipped] = (),
    measured: MeasuredTimeline | None = None,
) -> str:
    """Summary, explanation, timeline, comparison, memory and modules of a plan.

    Args:
        result: The plan that is shown.
        results: Rows of the comparison; left out when empty.
        measured: A run of the plan, to stand beside what was planned.

    Returns:
        HTML text, about 60 bytes per op.
    """
    timeline = result.timeline
    found = [row.timeline for row in (result, *results) if isinstance(row, Result)]
    single = best_single(timeline.problem, found)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("devplace.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    environment.filters["size"] = format_bytes
    environment.filters["time"] = format_time
    used = set(devices_in_use(timeline))
    memory = [row for d, row in enumerate(memory_rows(timeline)) if d in used]
    explanation = explain(timeline, result.bound)
    return environment.get_template("report.html.j2").render(
        title=f"{timeline.problem.graph.name} on {timeline.problem.machine.name}",
        summary=plan_summary(result, single),
        explanation=explanation,
        changes=changes(result),
        step_ns=max(1, timeline.makespan_ns),
        measured=measured_summary(timeline, measured) if measured is not None else "",
        modules=folded(explanation.modules, memory_by_module(timeline)),
        rows=_comparison_rows(results, single),
        categories=[name for name in CATEGORIES if any(row.parts[name] for row in memory)],
        memory=memory,
        data=_embedded(_chart(timeline)),
    )


def save_html_report(
    path: str | Path,
    result: Result,
    results: Sequence[Result | Skipped] = (),
    measured: MeasuredTimeline | None = None,
) -> None:
    """Write `html_report` as a file.

    Raises:
        InputError: The file cannot be written.
    """
    text = html_report(result, results, measured)
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise InputError(
            f"Cannot write report {path}: {error.strerror}. Check the path."
        ) from error


def _embedded(data: dict[str, Any]) -> Markup:
    """JSON that cannot end the script element it stands in."""
    return Markup(msgspec.json.encode(data).decode().replace("<", "\\u003c"))


def _comparison_rows(results: Sequence[Result | Skipped], single: Timeline) -> list[dict[str, Any]]:
    steps = [r.step_ns for r in results if isinstance(r, Result) and r.is_feasible]
    rows: list[dict[str, Any]] = []
    for row in results:
        if isinstance(row, Skipped):
            blank = dict.fromkeys(
                ("step", "speed_up", "gap", "moved", "evaluations", "seconds"), "-"
            )
            reason = row.reason or missing_text(row.missing_bytes)
            rows.append(
                {**blank, "placer": row.placer, "best": False, "peaks": "", "reason": reason}
            )
            continue
        timeline = row.timeline
        names = timeline.problem.machine.device_names
        peaks = (
            f"{names[d]} {format_bytes(int(timeline.peak_bytes[d]))}"
            for d in devices_in_use(timeline)
        )
        missing = missing_text(timeline.missing_bytes)
        rows.append(
            {
                "placer": row.placer,
                "best": row.is_feasible and row.step_ns == min(steps),
                "step": format_time(row.step_ns),
                "speed_up": f"{single.makespan_ns / max(1, row.step_ns):.2f}x",
                "gap": gap_text(row),
                "peaks": ", ".join(peaks),
                "moved": format_bytes(timeline.transfer_bytes),
                "evaluations": f"{row.evaluations:,}",
                "seconds": f"{row.seconds:.1f}",
                "reason": f"does not fit: {missing}" if missing else "",
            }
        )
    return rows


def _chart(timeline: Timeline) -> dict[str, Any]:
    """Tracks of the chart, top to bottom; texts that repeat are stored once in `infos`."""
    problem = timeline.problem
    infos: dict[str, int] = {}
    tracks: list[dict[str, Any]] = []
    names = problem.machine.device_names
    used = {names[d]: d for d in devices_in_use(timeline)}
    for label, spans in planned_rows(timeline).items():
        if label in names and label not in used:
            continue
        kind = "device" if label in used else "link"
        label = label.removeprefix("link ")
        for number, row in enumerate(lanes(spans) or [[]]):
            title = label if not number else f"{label} ({number + 1})"
            runs_own = label in used and not problem.machine.devices[used[label]].traits.is_host
            tracks.append(_track(title, kind, row, infos, runs_own))
        if kind == "device":
            tracks.append(_memory_track(timeline, used[label]))
    return {"makespan_ns": timeline.makespan_ns, "tracks": tracks, "infos": list(infos)}


def _track(
    label: str, kind: str, row: Sequence[Span], infos: dict[str, int], runs_own: bool
) -> dict[str, Any]:
    details = [infos.setdefault(_info(args, runs_own), len(infos)) for *_, args in row]
    return {
        "label": label,
        "kind": kind,
        "start": [span[0] for span in row],
        "finish": [span[1] for span in row],
        "name": [span[2] for span in row],
        "info": details,
        "stage": [_STAGES.get(args.get("stage", "transfer"), 0) for *_, args in row],
        "critical": [int(args.get("critical", False)) for *_, args in row],
    }


def _info(args: dict[str, Any], runs_own: bool) -> str:
    if "from" in args:
        return f"{args['from']} to {args['to']}, {format_bytes(args['bytes'])}"
    place = " ".join(part for part in (args["module"], args["source"]) if part)
    # A step captured on a CPU has its kernel of attention; accelerators run their own.
    target = args["target"].replace("_for_cpu", "") if runs_own else args["target"]
    text = f"{place}\n{target}, {args['stage']}, makes {format_bytes(args['bytes'])}"
    if "members" in args:
        modules = [module for module in args["modules"] if module]
        what = some_text(args["members"], len(args["members"]))
        hidden = args["num_members"] - len(args["members"])
        what += f" and {hidden} more" if hidden else ""
        text += f"\nfused: {what}" + (f", of {some_text(modules, _NAMED)}" if modules else "")
    return text.strip()


def _memory_track(timeline: Timeline, device: int) -> dict[str, Any]:
    rows = timeline.memory[timeline.memory[:, 1] == device]
    return {
        "label": "memory",
        "kind": "memory",
        "start": rows[:, 0].tolist(),
        "bytes": rows[:, 2].tolist(),
        "peak": int(timeline.peak_bytes[device]),
        "limit": timeline.problem.limit_bytes[device],
    }
