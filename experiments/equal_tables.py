"""The page of equal budgets, and of SAGA's schedulers beside ours."""

from __future__ import annotations

from statistics import median
from typing import Any

LINKS = {
    "free": "Links where no transfer waits (SAGA's model)",
    "queued": "Links where transfers queue",
}


def equal_budget(data: dict[str, Any], made: list[str]) -> str:
    """One table per budget, then SAGA's part.

    Args:
        data: The result file.
        made: Where each of its runs was made, as sentences.
    """
    lines = ["# Equal budgets, and schedulers of others", ""]
    for budget in dict.fromkeys(row["budget"] for row in data["rows"]):
        rows = [row for row in data["rows"] if row["budget"] == budget]
        lines += _one_budget(rows, data["bounds"], budget)
        lines += [made[run] for run in sorted({row["run"] for row in rows})] + [""]
    if data["saga"]:
        lines += [*_saga(data["saga"]), made[data["saga"]["run"]], ""]
    return "\n".join(lines)


def _one_budget(rows: list[dict[str, Any]], bounds: list[dict[str, Any]], budget: str) -> list[str]:
    placers = list(dict.fromkeys(row["placer"] for row in rows))
    lines = [
        f"## {budget} for each",
        "",
        "Predicted ms per training step (SGD, full size, analytic costs): median over seeds, in "
        "brackets smallest and largest where they differ; the smallest in bold. *annealing* moves "
        "one colocation group at a time at a temperature that falls geometrically (from 0.1 % to "
        "0.0001 % of the step), from the best single device or from HEFT's placement, whose "
        "simulations are counted too; *heft* needs two. *over* marks plans that exceed a memory "
        "limit. The last columns are the lower bound, how far `search` is above it, and how much "
        "longer the best of the others is than `search`.",
        "",
        f"| workload | machine | {' | '.join(placers)} | bound | gap | others |",
        "|---" * (len(placers) + 5) + "|",
    ]
    bound_of = {(b["workload"], b["machine"]): b["lower_bound_ns"] for b in bounds}
    for key in dict.fromkeys((row["workload"], row["machine"]) for row in rows):
        found = {
            placer: [
                r for r in rows if (r["workload"], r["machine"], r["placer"]) == (*key, placer)
            ]
            for placer in placers
        }
        fitting = {
            placer: median(r["step_ns"] for r in runs)
            for placer, runs in found.items()
            if runs and all(r["feasible"] for r in runs)
        }
        cells = [_cell(runs, min(fitting.values(), default=0)) for runs in found.values()]
        lines.append("| " + " | ".join([*key, *cells, *_beside(fitting, bound_of.get(key))]) + " |")
    return [*lines, ""]


def _cell(runs: list[dict[str, Any]], best: float) -> str:
    if not runs:
        return "-"
    steps = [row["step_ns"] for row in runs]
    text = f"{median(steps) / 1e6:.4g}"
    fits = all(row["feasible"] for row in runs)
    if fits and median(steps) <= best:
        text = f"**{text}**"
    if max(steps) > min(steps):
        text += f" ({min(steps) / 1e6:.4g}-{max(steps) / 1e6:.4g})"
    return text + ("" if fits else " *over*")


def _beside(fitting: dict[str, float], bound: int | None) -> list[str]:
    """Bound, gap of the search to it, and the best other placer over the search."""
    search = fitting.get("search")
    others = [step for placer, step in fitting.items() if placer != "search"]
    return [
        f"{bound / 1e6:.4g}" if bound else "",
        f"{search / bound - 1:.0%}" if bound and search else "",
        f"{min(others) / search - 1:+.0%}" if others and search else "",
    ]


def _saga(data: dict[str, Any]) -> list[str]:
    found = data["checks"]
    lines = [
        "## SAGA's schedulers",
        "",
        f"The list schedulers of SAGA (anrg-saga {data['saga']}, other people's code; "
        "`experiments/equal_budget.py --saga`) "
        "beside ours on graphs without colocation: layered graphs (`devplace.testing.layered`, "
        "parameters read only) on four devices with links of 150 GB/s, equal or (*unequal*) with "
        "speeds 1, 1, 1/2, 1/4, or equal with links of 12 GB/s (*slow links*), and the published "
        "DOPPLER graphs. In SAGA's model no transfer waits for another. Devices and "
        "order of its schedules are valued by our simulator, once with such links and once with "
        "links where transfers queue, which its schedulers do not know of and ours do. Schedulers "
        "of both sides run once, `search` has "
        f"{data['budget']} and the median of its seeds is shown; *search x16* has 16 times that.",
        "",
        "What agrees where the models are the same:",
        "",
        f"- Of {found['theirs_valued']} schedules of SAGA, our simulator gives SAGA's own makespan "
        f"for {found['theirs_equal']}, an earlier end for {found['theirs_earlier']} (they leave a "
        "device idle where the next op could begin; ours begins it), a later end for "
        f"{found['theirs_valued'] - found['theirs_equal'] - found['theirs_earlier']}. "
        f"{found['theirs_broken']} more break a rule of SAGA's own model and are left out.",
        f"- Of {found['ours_valued']} plans of ours, SAGA gives our makespan for "
        f"{found['ours_equal']}.",
        f"- On {found['tiny_valued']} random graphs of 5 ops and 2 devices, `search` (400ev) "
        f"equals SAGA's exhaustive search on {found['tiny_equal']} and is above it on "
        f"{found['tiny_worse']}; below on none.",
        "",
        *_failed(data["rows"]),
        "",
    ]
    for links, title in LINKS.items():
        lines += _schedulers(data["rows"], links, title)
    return lines


def _failed(rows: list[dict[str, Any]]) -> list[str]:
    """Why cells of the tables are empty."""
    why: dict[str, list[str]] = {}
    for row in rows:
        if "reason" in row:
            failed = f"{row['scheduler']}: {row['reason']}"
            why.setdefault(failed, []).append(f"{row['graph']}, {row['devices']}")
    return ["No value:", "", *(f"- {failed} ({'; '.join(on)})." for failed, on in why.items())]


def _schedulers(rows: list[dict[str, Any]], links: str, title: str) -> list[str]:
    rows = [row for row in rows if f"{links} bound" in row]
    graphs = list(dict.fromkeys((row["graph"], row["devices"]) for row in rows))
    kinds = list(dict.fromkeys((row["who"], row["scheduler"]) for row in rows))
    lines = [
        f"### {title}",
        "",
        "The first row is the step of our `search`, the others are how much longer theirs is.",
        "",
        "| | " + " | ".join(f"{graph}, {devices}" for graph, devices in graphs) + " |",
        "|---" * (len(graphs) + 1) + "|",
    ]
    steps = {
        (*graph, *kind): [
            row[links]
            for row in rows
            if (row["graph"], row["devices"], row["who"], row["scheduler"]) == (*graph, *kind)
            and links in row
        ]
        for graph in graphs
        for kind in kinds
    }
    first = ("devplace", "search")
    units = {(row["graph"], row["devices"]): row["unit"] for row in rows}
    bounds = {(row["graph"], row["devices"]): row[f"{links} bound"] for row in rows}
    cells = []
    for graph in graphs:
        scale, unit = units[graph]
        cells.append(f"{median(steps[*graph, *first]) / scale:.4g} {unit}")
    lines.append("| devplace search | " + " | ".join(cells) + " |")
    for kind in (kind for kind in kinds if kind != first):
        cells = [_longer(steps[*graph, *kind], steps[*graph, *first]) for graph in graphs]
        lines.append(f"| {' '.join(kind)} | " + " | ".join(cells) + " |")
    cells = [f"{bounds[graph] / median(steps[*graph, *first]) - 1:+.1%}" for graph in graphs]
    lines += ["| lower bound | " + " | ".join(cells) + " |", ""]
    below = [
        f"{kind[1]} on {graph[0]}, {graph[1]} ({_longer(steps[*graph, *kind], search)})"
        for graph in graphs
        for kind in kinds
        for search in [steps[*graph, *first]]
        if kind[0] == "saga" and steps[*graph, *kind]
        if median(steps[*graph, *kind]) < median(search)
    ]
    return [*lines, f"Shorter than our `search`: {'; '.join(below) or 'none'}.", ""]


def _longer(steps: list[int], search: list[int]) -> str:
    return f"{median(steps) / median(search) - 1:+.1%}" if steps else "-"
