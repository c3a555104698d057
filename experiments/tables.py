"""Make docs/results/*.md from docs/results/*.json. Run: `python experiments/tables.py`."""

from __future__ import annotations

import json
from collections import defaultdict
from statistics import median
from typing import Any

import equal_tables
import learned_tables
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


def gpu_first(data: dict[str, Any]) -> str:
    """Measured steps on GPUs beside the predicted ones; further runs are in `gpu_first_*.json`."""
    lines = ["# First steps on GPUs", ""]
    lines += [
        "Milliseconds per training step, host not waiting, beside the prediction by analytic costs "
        "(uncalibrated): everything on one GPU as one CUDA graph, and the search's plan on two.",
        "",
    ]
    others = sorted(RESULTS.glob("gpu_first_*.json"))
    for run in (data, *(json.loads(path.read_text()) for path in others)):
        lines += _gpu_run(run)
    return "\n".join(lines)


def _gpu_run(data: dict[str, Any]) -> list[str]:
    made = data["provenance"]
    lines = [
        f"{made['card']}, {made['host']}, torch {made['torch']}, {made['precision']}, "
        f"{made['optimizer']}, seed {made['seed']}, commit {made['commit']}:",
        "",
        "| workload | GPUs | measured | predicted | transfers | moved, GB |",
        "|---|---|---|---|---|---|",
    ]
    for workload in data["workloads"]:
        for row in workload["rows"]:
            lines.append(
                f"| {workload['workload']} | {row['devices']} | {row['step_ms']:.1f} | "
                f"{row['predicted_ms']:.1f} | {row['transfers']} | "
                f"{row['transfer_bytes'] / 1e9:.2f} |"
            )
    return [*lines, ""]


def gpu_plans(data: dict[str, Any]) -> str:
    """Plans on GPUs, predicted beside measured."""
    made, errors = data["provenance"], data["errors_package"]
    lines = [
        f"# {data.get('title', 'Plans on GPUs, predicted and measured')}",
        "",
        f"Milliseconds per training step, steps not waited for one by one. {made['cards']}, "
        f"{made['cpu_cores']} cores, driver {made['driver']}, torch {made['torch']}, SGD, fp32 "
        f"with TF32 products or bf16 autocast, seed {made['seed']}, commit {made['commit']}. "
        "*one graph* is the whole step in one CUDA graph on one GPU; *layers* the expert's split "
        "in critical-path order; *search* the searched plan. Predicted: measured costs, probed "
        "links, the package's constants.",
        "",
        "The constants were fitted to an earlier run, with an earlier executor, of RNNLM, NMT-4, "
        "GNMT-4, ResNet-50 and BERT-large with 12 layers. "
        + "; ".join(_errors_of(data["rows"], is_fitted) for is_fitted in (True, False))
        + ".",
        "",
        f"Median error {errors['median_error']:.1%} over {errors['rows']} rows, worst "
        f"{errors['worst_error']:.1%} ({errors['worst_row']}).",
        "",
        *(f"- {note}" for note in made["notes"]),
        "",
        "| step | micro-batches | GPUs | plan | predicted | measured | error | of one graph |",
        "|---|---|---|---|---|---|---|---|",
    ]
    alone: dict[str, int] = {}
    for row in data["rows"]:
        step = row["workload"] + (f", {row['layers']} layers" if row["layers"] else "")
        step += f", batch {row['batch']}" if row["batch"] else ""
        step += f", {row['number_format']}"
        alone.setdefault(step, row["measured_ns"])
        if row["name"].startswith("random"):
            continue
        predicted, measured = row["predicted_package_ns"], row["measured_ns"]
        lines.append(
            f"| {step} | {row['micro_batches']} | {row['gpus']} | {row['name']} | "
            f"{predicted / 1e6:.2f} | {measured / 1e6:.2f} | {predicted / measured - 1:+.1%} | "
            f"{measured / alone[step]:.2f} |"
        )
    lines += ["", *(f"- {k}: {v}" for k, v in errors.items() if "," in k), ""]
    return "\n".join(lines + _baseline_lines(data.get("baselines", [])))


def _baseline_lines(rows: list[dict[str, Any]]) -> list[str]:
    """What others do on the same machine, where it was measured."""
    if not rows:
        return []
    lines = [
        "## Others, on the same machine",
        "",
        "| step | GPUs | how | measured |",
        "|---|---|---|---|",
    ]
    for row in sorted(
        rows, key=lambda r: (r["table"], r["workload"], r["number_format"], r["gpus"])
    ):
        if "step_ms" in row:
            step = row["workload"] + (f", batch {row['batch']}" if "batch" in row else "")
            lines.append(
                f"| {step}, {row['number_format']} | {row['gpus']} | {row['row']} | "
                f"{row['step_ms']:.2f} |"
            )
    missing = sorted({f"{r['row']} of {r['workload']}" for r in rows if "step_ms" not in r})
    if missing:
        lines += ["", f"Not measured for lack of time: {', '.join(missing)}."]
    return [*lines, ""]


def gpu_memory(data: dict[str, Any]) -> str:
    """Predicted peaks beside what was reserved, and verdicts."""
    found = data["summary"]
    lines = [
        "# Predicted and measured memory",
        "",
        f"{data['provenance']}",
        "",
        f"Median error {found['median_error']:.1%}, worst {found['worst_error']:.1%}; verdicts "
        f"right in {found['right']} of {found['cases']} cases. MiB.",
        "",
        "| step | GPUs | device | predicted | reserved | error |",
        "|---|---|---|---|---|---|",
    ]
    verdicts = [
        "",
        "| step | GPUs | limit | predicted | should run | ran |",
        "|---|---|---|---|---|---|",
    ]
    for model in data["models"]:
        for peak in model["peaks"]:
            for row in peak.get("rows", []):
                predicted, reserved = row["predicted_bytes"], row["reserved_peak_bytes"]
                lines.append(
                    f"| {model['model']} | {peak['gpus']} | {row['device']} | "
                    f"{predicted / 2**20:.0f} | {reserved / 2**20:.0f} | "
                    f"{predicted / reserved - 1:+.1%} |"
                )
        verdicts += [
            f"| {model['model']} | {case['gpus']} | {case['limit_bytes'] / 2**20:.0f} | "
            f"{case['predicted_bytes'] / 2**20:.0f} | {'yes' if case['should_run'] else 'no'} | "
            f"{'yes' if case['ran'] else 'no'} |"
            for case in model["verdicts"]
        ]
    return "\n".join([*lines, *verdicts, ""])


FITTED = ("rnnlm", "nmt-4", "gnmt-4", "resnet-50")
"""Steps the package's constants were fitted to, beside BERT-large with 12 layers."""


def _errors_of(rows: list[dict[str, Any]], is_fitted: bool) -> str:
    """Errors over the steps the constants were fitted to, or over the others."""
    errors = [
        abs(row["predicted_package_ns"] / row["measured_ns"] - 1)
        for row in rows
        if not row["name"].startswith("random")
        and "," not in row["name"]
        and (row["workload"] in FITTED or row["layers"] == 12) == is_fitted
    ]
    which = "Over their rows" if is_fitted else "over the rows of other steps"
    return f"{which} ({len(errors)}): median {median(errors):.1%}, worst {max(errors):.1%}"


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
    return (
        f"Made on {made['cores']} cores of {made['cpu']}, Python {made['python']}, torch "
        f"{made['torch']}, devplace {made['devplace']} at commit {made['commit']}"
        + ("" if made["clean"] else " with uncommitted changes")
        + "."
    )


def ablation(data: dict[str, Any]) -> str:
    """See `search_tables`."""
    return search_tables.ablation(data, provenance_line(data["provenance"]))


def scaling(data: dict[str, Any]) -> str:
    """See `search_tables`."""
    return search_tables.scaling(data, provenance_line(data["provenance"]))


def generalisation(data: dict[str, Any]) -> str:
    """See `learned_tables`."""
    return learned_tables.generalisation(data, provenance_line(data["provenance"]))


def published_tables(data: dict[str, Any]) -> str:
    """See `published_pages`; writes the pictures too."""
    for name, picture in published_pages.pictures(data).items():
        (RESULTS / name).write_text(picture)
    return published_pages.page(data, provenance_line(data["provenance"]))


def equal_budget(data: dict[str, Any]) -> str:
    """See `equal_tables`."""
    return equal_tables.equal_budget(data, [provenance_line(made) for made in data["runs"]])


TABLES = {
    "published_tables": published_tables,
    "ablation": ablation,
    "equal_budget": equal_budget,
    "generalisation": generalisation,
    "scaling": scaling,
    "compare_placers": compare_placers,
    "compare_60s": compare_placers,
    "plan_nmt8": plan_nmt8,
    "gpu_first": gpu_first,
    "gpu_plans": gpu_plans,
    "gpu_prediction": gpu_plans,
    "gpu_prediction_2": gpu_plans,
    "gpu_memory": gpu_memory,
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
