"""Tables of searches: their ingredients, larger problems, stacked gradients."""

from __future__ import annotations

import math
from statistics import median
from typing import Any

from scaling import time_to_reach


def ablation(data: dict[str, Any], made: str) -> str:
    """Step without an ingredient over the whole search's, geometric mean over seeds."""
    places = list(dict.fromkeys((row["workload"], row["machine"]) for row in data["rows"]))
    variants = list(dict.fromkeys(row["variant"] for row in data["rows"]))
    logs: dict[tuple[str, str, str], list[float]] = {}
    for row in data["rows"]:
        key = row["variant"], row["workload"], row["machine"]
        logs.setdefault(key, []).append(math.log(row["step_ns"]))
    mean = {key: sum(values) / len(values) for key, values in logs.items()}
    lines = [
        "# What each ingredient of the search gives",
        "",
        f"How much longer the step is when one ingredient is switched off (a field of `Search`), "
        f"budget {data['budget']} for each; geometric mean over seeds, last column over all. "
        "Differences below 1 % are within what seeds make. Analytic costs.",
        "",
        " ".join([made, data.get("note", "")]).strip(),
        "",
        "| variant | " + " | ".join(f"{w}, {m}" for w, m in places) + " | all |",
        "|---" * (len(places) + 2) + "|",
    ]
    for variant in variants:
        over = [mean[variant, w, m] - mean[variants[0], w, m] for w, m in places]
        cells = [f"{math.expm1(value):+.1%}" for value in (*over, sum(over) / len(over))]
        if variant == variants[0]:
            steps = [math.exp(mean[variant, w, m]) / 1e6 for w, m in places]
            cells = [*(f"{step:.4g} ms" for step in steps), ""]
        lines.append(f"| {variant} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def stacked(data: dict[str, Any], made: str) -> str:
    """Steps with and without stacked gradients, medians over seeds."""
    steps: dict[tuple[str, bool, int], list[int]] = {}
    peaks: dict[tuple[str, bool, int], list[int]] = {}
    ops: dict[tuple[str, bool], int] = {}
    for row in data["rows"]:
        key = row["workload"], row["stacked"], row["gpus"]
        steps.setdefault(key, []).append(row["step_ns"])
        peaks.setdefault(key, []).append(row["peak_bytes"])
        ops[key[:2]] = row["ops"]
    counts = sorted({key[2] for key in steps})
    lines = [
        "# What stacked gradients give on several GPUs",
        "",
        f"Predicted milliseconds per training step on {data['machine']} and its first GPUs, and "
        f"the largest peak in GB: medians over seeds of searches with {data['budget']} each; on "
        "one GPU everything is on it. Analytic costs of graphs captured without a GPU, which hold "
        "each LSTM cell as several ops, so steps are longer than measured ones "
        "([](gpu_one.md)).",
        "",
        made,
        "",
        "| step | gradients | ops | "
        + " | ".join(f"{c} GPU{'s' * (c > 1)}" for c in counts)
        + " |",
        "|---" * (len(counts) + 3) + "|",
    ]
    for name, is_stacked in ops:
        cells = []
        for count in counts:
            step = median(steps[name, is_stacked, count]) / 1e6
            peak = median(peaks[name, is_stacked, count]) / 1e9
            cells.append(f"{step:.1f} ({peak:.2f} GB)")
        kind = "stacked" if is_stacked else "plain"
        lines.append(f"| {name} | {kind} | {ops[name, is_stacked]} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def fused_planning(data: dict[str, Any], made: str) -> str:
    """Searches of equal seconds on plain and fused steps."""
    rows = {(r["machine"], r["workload"], r["fused"]): r for r in data["rows"]}
    pairs = [(rows[m, w, False], r) for (m, w, fused), r in rows.items() if fused]
    fewer = [plain["tasks"] / fused["tasks"] for plain, fused in pairs]
    nearer = sum(_gap(fused) <= _gap(plain) for plain, fused in pairs)
    lines = [
        "# Planning fused steps",
        "",
        f"The same search for {data['seconds']:g} s on the plain and on the fused step of every "
        "workload; both stack gradients. Analytic costs of graphs captured without a GPU, as "
        "predicted ms per step. *Gap* is that to the lower bound of the same graph; *ops* are "
        "those that are scheduled, without views and read-only sources. Fused steps are shorter as "
        "they move fewer bytes and have fewer gaps between kernels, so steps tell what fusing is "
        "predicted to give, gaps how well each was planned.",
        "",
        f"Fused steps have {min(fewer):.1f} to {max(fewer):.1f} times fewer such ops (median "
        f"{median(fewer):.1f}). The gap of the fused plan is at most that of the plain one in "
        f"{nearer} of {len(pairs)} rows, and its step is shorter in "
        f"{sum(fused['step_ns'] < plain['step_ns'] for plain, fused in pairs)}.",
        "",
        f"{made} {data['note']}".rstrip(),
        "",
    ]
    heads = ("step", "ops", "edges", "simulations/s", "one device", "plan", "gap")
    for machine in dict.fromkeys(row["machine"] for row in data["rows"]):
        lines += [f"## {machine}", "", "| " + " | ".join(f"{h}, plain / fused" if k else h
                  for k, h in enumerate(heads)) + " |", "|---" * len(heads) + "|"]  # fmt: skip
        for plain, fused in pairs:
            if fused["machine"] == machine:
                cells = zip(_planned(plain), _planned(fused), strict=True)
                texts = [" / ".join(cell) for cell in cells]
                lines.append(f"| {fused['workload']} | {' | '.join(texts)} |")
        lines.append("")
    return "\n".join(lines)


def _gap(row: dict[str, Any]) -> float:
    return float(row["step_ns"] / row["bound_ns"] - 1)


def _planned(row: dict[str, Any]) -> list[str]:
    """Cells of one search."""
    rate = row["evaluations"] / row["seconds"]
    single, step = (f"{row[key] / 1e6:.4g}" for key in ("single_ns", "step_ns"))
    over = "" if row["feasible"] else " *over*"
    sizes = [str(row["tasks"]), str(row["edges"]), f"{rate:,.0f}"]
    return [*sizes, single, step + over, f"{_gap(row):.0%}"]


def scaling(data: dict[str, Any], made: str) -> str:
    """Time and memory per size."""
    sizes = list(dict.fromkeys((row["ops"], row["devices"]) for row in data["rows"]))
    lines = [
        "# How the search grows with the problem",
        "",
        "Layered graphs (`devplace.testing.layered`), budgets of time that double; *to within 2 %* "
        "is the shortest budget whose plan is within 2 % of the best of all. Memory is what a "
        "chain on a thread of its own adds.",
        "",
        " ".join([made, data.get("note", "")]).strip(),
        "",
        "![](scaling.svg)",
        "",
        "| ops | devices | to within 2 %, s | per 1,000 ops, s | best step, ms | bound, ms | "
        "us per simulation | bytes per op and thread |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for ops, devices in sizes:
        rows = [row for row in data["rows"] if (row["ops"], row["devices"]) == (ops, devices)]
        last, reach = rows[-1], time_to_reach(rows)
        lines.append(
            f"| {ops:,} | {devices} | {reach:.3g} | {1000 * reach / ops:.3g} | "
            f"{min(row['step_ns'] for row in rows) / 1e6:.4g} | "
            f"{last['lower_bound_ns'] / 1e6:.4g} | "
            f"{1e6 * last['budget_s'] / last['evaluations']:.0f} | "
            f"{last['bytes_per_op_and_thread']:.0f} |"
        )
    return "\n".join([*lines, ""])


def micro_batches(data: dict[str, Any], made: str) -> str:
    """Steps of pipelines of micro-batches: the best starts, the search, the search before."""
    before = {_case(row): row for row in data.get("before", [])}
    both = [row for row in data["rows"] if _case(row) in before]
    gains = [1 - row["step_ns"] / before[_case(row)]["step_ns"] for row in both]
    lines = [
        "# Pipelines of micro-batches",
        "",
        f"Predicted milliseconds per training step on {data['machine']} (SGD, full size, analytic "
        f"costs, seed {data['seed']}): the best plans that the search begins with, what it ends "
        "with, and the lower bound. *Before* is the search without starts for pipelines, orders in "
        f"which devices wait, and moves of the order (commit {data.get('before_commit', '')}).",
        "",
        made,
        "",
    ]
    if gains:
        lines += [f"Median {median(gains):.1%} shorter than before, over {len(gains)} rows.", ""]
    lines += [
        "| step | micro-batches | simulations | best start | even | search | before | bound |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in data["rows"]:
        name, best = next(iter(row["starts"].items()))
        old = before.get(_case(row), {}).get("step_ns")
        times = [row["starts"]["even"], row["step_ns"], old, row["bound_ns"]]
        cells = [f"{ns / 1e6:.2f}" if ns else "" for ns in times]
        case = f"{row['workload']} | {row['parts']} | {row['evaluations']:,}"
        lines.append(f"| {case} | {best / 1e6:.2f} ({name}) | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def more_devices(data: dict[str, Any], made: str) -> str:
    """How often a further device made the plan slower."""
    worst = max((row["part"] for row in data["slower"]), default=0.0)
    least, above = data["ops"]
    lines = [
        "# Plans for one device more",
        "",
        f"{data['problems']:,} random steps of recurrent stacks ({least} to {above - 1} ops, two "
        f"to {data['devices'][1] - 1} devices of random speeds, dear and cheap transfers), each "
        f"searched on its first device, its first two and so on, with {data['budget']} each and "
        f"seed {data['seed']}. Of {data['pairs']:,} plans for one device more, "
        f"{len(data['slower'])} were slower than the plan before, by {worst:.1%} at most: plans "
        "for fewer devices are only starts, and a search of the same budget has more to try.",
        "",
        made,
    ]
    return "\n".join([*lines, ""])


def _case(row: dict[str, Any]) -> tuple[str, int, int]:
    return row["workload"], row["parts"], row["evaluations"]


def cluster(data: dict[str, Any], made: str) -> str:
    """What workers of a Ray cluster find side by side, medians over seeds."""
    found: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for row in data["rows"]:
        found.setdefault((row["workload"], row["placer"], row["workers"]), []).append(row)
    lines = [
        "# Searches on a Ray cluster",
        "",
        f"Every worker searches with {data['budget']} and a seed of its own, and the best is kept. "
        f"Predicted ms per training step on {data['machine']} (SGD, analytic costs): median over "
        "seeds, in brackets smallest and largest. Each search was done twice; *again*: how many "
        "gave the same plan in every op. Work is counted: all workers shared one computer.",
        "",
        made,
        "",
        "| workload | placer | workers | simulations | step | again |",
        "|---|---|---|---|---|---|",
    ]
    for (workload, placer, count), rows in found.items():
        steps = [row["step_ns"] / 1e6 for row in rows]
        spread = f"{median(steps):.2f} ({min(steps):.2f} to {max(steps):.2f})"
        simulations = median(row["evaluations"] for row in rows)
        same = sum(row["equal"] for row in rows)
        lines.append(
            f"| {workload} | {placer} | {count} | {simulations:.0f} | {spread} "
            f"| {same} of {len(rows)} |"
        )
    return "\n".join([*lines, ""])
