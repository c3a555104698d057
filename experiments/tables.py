"""Make docs/results/*.md from docs/results/*.json. Run: `python experiments/tables.py`."""

from __future__ import annotations

import json
from collections import defaultdict
from statistics import median
from typing import Any

import equal_tables
import fused_tables
import gpu_tables
import published_pages
import search_tables
from common import RESULTS

from devplace import placers


def compare_placers(data: dict[str, Any]) -> str:
    """One table per machine: median step (and spread) of each placer; best in bold."""
    known = {row["placer"] for row in data["rows"]}
    names = [kind().name for kind in placers.ALL if kind().name in known]
    lines = ["# Every placer on every workload", ""]
    lines += [
        f"Predicted ms per training step (SGD, full size), budget {data['budget']} per placer; "
        "median over seeds, in brackets smallest and largest where they differ. Analytic costs, "
        "graphs captured on a CPU. *over* marks plans that exceed a memory limit; the best that "
        "fits is in bold. The last rows are the lower bound, and how far the median of `search` "
        "is above it.",
        "",
        " ".join([provenance_line(data["provenance"]), data.get("note", "")]).rstrip(),
        "",
    ]
    cells: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in data["rows"]:
        cells[row["machine"], row["workload"], row["placer"]].append(row)
    workloads = list(dict.fromkeys(row["workload"] for row in data["rows"]))
    for machine in dict.fromkeys(row["machine"] for row in data["rows"]):
        columns = [_column(cells, machine, workload, names) for workload in workloads]
        lines += [f"## {machine}", "", "| placer | " + " | ".join(workloads) + " |"]
        lines.append("|---" * (len(workloads) + 1) + "|")
        for name, texts in zip(
            [*names, "lower bound", "gap of search"], zip(*columns, strict=True), strict=True
        ):
            lines.append(f"| {name} | {' | '.join(texts)} |")
        lines.append("")
    return "\n".join(lines)


def _column(cells: Any, machine: str, workload: str, names: list[str]) -> list[str]:
    """One workload on one machine: a text per placer, the bound and the gap of search to it."""
    found = [
        [row for row in cells[machine, workload, name] if row["step_ns"] is not None]
        for name in names
    ]
    fitting = [rows for rows in found if rows and all(r["feasible"] for r in rows)]
    best = min(median(r["step_ns"] for r in rows) for rows in fitting)
    bound = next(rows[0] for rows in found if rows)["lower_bound_ns"]
    search = median(r["step_ns"] for r in found[names.index("search")])
    texts = [_cell(rows, best) for rows in found]
    return [*texts, f"{bound / 1e6:.4g}", f"{search / bound - 1:.0%}"]


def plan_nmt8(data: dict[str, Any]) -> str:
    """One plan from the command line, in a few lines."""
    single, step, bound = (data[k] / 1e6 for k in ("single_ns", "step_ns", "lower_bound_ns"))
    return "\n".join(
        [
            "# Planning NMT-8 for eight devices",
            "",
            f"`{data['command']}`: {data['seconds']} s in all (start, capture, search, report), "
            f"{data['peak_rss_bytes'] / 1e9:.2f} GB of memory at most, {data['evaluations']} "
            f"evaluations. Predicted step {step:.4g} ms; best single device {single:.4g} ms, "
            f"lower bound {bound:.4g} ms.",
            "",
            provenance_line(data["provenance"]),
            "",
        ]
    )


def _cell(rows: list[dict[str, Any]], best: float) -> str:
    if not rows:
        return "-"
    steps = [row["step_ns"] / 1e6 for row in rows]
    text = f"{median(steps):.4g}"
    fits = all(row["feasible"] for row in rows)
    if fits and median(row["step_ns"] for row in rows) <= best:
        text = f"**{text}**"
    if max(steps) > min(steps):
        text += f" ({min(steps):.4g}-{max(steps):.4g})"
    return text + ("" if fits else " *over*")


def provenance_line(made: dict[str, Any]) -> str:
    """Where a result was made, as a sentence."""
    if "cpu" not in made:  # a run whose machine was not recorded in full
        return str(made["text"])
    return (
        f"Made on {made['cores']} cores of {made['cpu']}, Python {made['python']}, torch "
        f"{made['torch']}, devplace {made['devplace']} at commit {made['commit']}"
        + ("" if made["clean"] else " with uncommitted changes")
        + "."
    )


def ablation(data: dict[str, Any]) -> str:
    """See `search_tables`."""
    return search_tables.ablation(data, provenance_line(data["provenance"]))


def stacked(data: dict[str, Any]) -> str:
    """See `search_tables`."""
    return search_tables.stacked(data, provenance_line(data["provenance"]))


def more_devices(data: dict[str, Any]) -> str:
    """See `search_tables`."""
    return search_tables.more_devices(data, provenance_line(data["provenance"]))


def micro_batches(data: dict[str, Any]) -> str:
    """See `search_tables`."""
    return search_tables.micro_batches(data, provenance_line(data["provenance"]))


def cluster(data: dict[str, Any]) -> str:
    """See `search_tables`."""
    return search_tables.cluster(data, provenance_line(data["provenance"]))


def fused_planning(data: dict[str, Any]) -> str:
    """See `search_tables`."""
    return search_tables.fused_planning(data, provenance_line(data["provenance"]))


def scaling(data: dict[str, Any]) -> str:
    """See `search_tables`."""
    return search_tables.scaling(data, provenance_line(data["provenance"]))


def published_tables(data: dict[str, Any]) -> str:
    """See `published_pages`; writes the pictures too."""
    for name, picture in published_pages.pictures(data).items():
        (RESULTS / name).write_text(picture)
    from published_tables import STRICT

    made = [provenance_line(run) for run in data["runs"]]
    return published_pages.page(data, made, STRICT)


def equal_budget(data: dict[str, Any]) -> str:
    """See `equal_tables`."""
    return equal_tables.equal_budget(data, [provenance_line(made) for made in data["runs"]])


TABLES = {
    "published_tables": published_tables,
    "ablation": ablation,
    "equal_budget": equal_budget,
    "scaling": scaling,
    "stacked": stacked,
    "micro_batches": micro_batches,
    "more_devices": more_devices,
    "cluster": cluster,
    "fused_planning": fused_planning,
    "compare_placers": compare_placers,
    "compare_60s": compare_placers,
    "plan_nmt8": plan_nmt8,
    "gpu_first": gpu_tables.gpu_first,
    "gpu_plans": gpu_tables.gpu_plans,
    "gpu_plans_2": gpu_tables.gpu_plans,
    "gpu_prediction": gpu_tables.gpu_plans,
    "gpu_one": gpu_tables.gpu_one,
    "gpu_fused": fused_tables.gpu_fused,
    "gpu_held_back": gpu_tables.gpu_held_back,
    "gpu_memory": gpu_tables.gpu_memory,
    "gpu_processes": gpu_tables.gpu_processes,
    "gpu_rewards": gpu_tables.gpu_rewards,
}


def main() -> None:
    """Make every table whose result is there."""
    for name, make in TABLES.items():
        source = RESULTS / f"{name}.json"
        if source.exists():
            (RESULTS / f"{name}.md").write_text(make(json.loads(source.read_text())))
            print(f"docs/results/{name}.md")


if __name__ == "__main__":
    main()
