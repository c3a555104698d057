"""Page and pictures of `published_tables`: steps, agent cost, learning curves, papers beside."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from plot import Band, band_plot

Runs = list[dict[str, Any]]

# s per step, relative to the human expert there. None: out of memory.
PUBLISHED: dict[str, dict[str, dict[str, float | None]]] = {
    "HDP (Mirhoseini et al. 2018, table 1)": {
        "inception-v3": {"expert": 0.15, "scotch": 0.93, "mincut": 0.82, "hdp": 0.13},
        "resnet-152": {"expert": 1.18, "scotch": 6.27, "mincut": 2.92, "hdp": 1.18},
        "rnnlm": {"expert": 1.57, "scotch": 5.62, "mincut": 5.21, "hdp": 1.57},
        "nmt-2": {"expert": 2.13, "scotch": 3.21, "mincut": 5.34, "hdp": 0.84},
        "nmt-4": {"expert": 3.64, "scotch": 11.18, "mincut": 11.63, "hdp": 1.69},
        "nmt-8": {"expert": 3.88, "scotch": 17.85, "mincut": 19.01, "hdp": 4.07},
    },
    "Mars (Lan et al. 2021, as in its authors' slides)": {
        "inception-v3": {
            "gpu-only": 0.071,
            "grouper-placer": 0.067,
            "encoder-placer": 0.067,
            "mars": 0.067,
            "mars-no-pretraining": 0.067,
        },
        "gnmt-4": {
            "expert": 1.661,
            "gpu-only": None,
            "grouper-placer": 1.418,
            "encoder-placer": 1.437,
            "mars": 1.379,
            "mars-no-pretraining": 1.396,
        },
        "bert-large": {
            "expert": None,
            "gpu-only": None,
            "grouper-placer": 12.661,
            "encoder-placer": 11.737,
            "mars": 9.214,
            "mars-no-pretraining": 11.363,
        },
    },
}
# Picture -> placers whose curves it has.
PICTURES = {
    "systems": ("random", "colocrl", "hdp", "spotlight", "post", "mars", "search"),
    "post": ("random", "post", "post-ce", "post-ppo", "post-pg"),
    "mars": ("random", "mars", "mars-no-pretraining", "grouper-placer", "encoder-placer"),
    "hdp": ("random", "hdp", "hdp-no-grouping", "hdp-random-grouping", "placeto"),
}
ORDER = (
    *("cpu", "gpu-only", "expert", "scotch", "mincut", "heft", "random", "colocrl"),
    *("hdp", "hdp-no-grouping", "hdp-random-grouping", "spotlight", "placeto"),
    *("post", "post-ce", "post-ppo", "post-pg", "grouper-placer", "encoder-placer"),
    *("mars-no-pretraining", "mars", "search"),
)
"""Of the lines of a table; others come last."""
PICTURE_ROWS = ("nmt-4", "gnmt-4")
CLOSE = 1.05


def samples_to_reach(run: dict[str, Any]) -> int:
    """Evaluations after which the run's step stayed within 5 % of its best."""
    close = CLOSE * run["history"][-1][1]
    first = int(run["history"][-1][0])
    for count, step in reversed(run["history"]):
        if step > close:
            break
        first = int(count)
    return first


def best_after(run: dict[str, Any], counts: Sequence[int]) -> list[float | None]:
    """Best step so far after each number of evaluations; None before the first."""
    at = [count for count, _ in run["history"]]
    found = [bisect_right(at, count) for count in counts]
    return [run["history"][k - 1][1] if k else None for k in found]


def _median_of(runs: Runs) -> float:
    return float(median(run["step_ns"] for run in runs))


def _step_cell(runs: Runs) -> str:
    """Median of the seeds and spread, ms; OOM where most of them break a limit."""
    if not runs:
        return ""
    kept = [run for run in runs if run["feasible"]]
    if 2 * len(kept) <= len(runs):
        return "OOM"
    steps = sorted(run["step_ns"] / 1e6 for run in kept)
    text = f"{median(steps):.4g}"
    if len(runs) > 1:
        text += f" ({steps[0]:.4g} to {steps[-1]:.4g})"
    return text + (f", {len(runs) - len(kept)} OOM" if len(kept) < len(runs) else "")


def _cost_cell(runs: Runs) -> str:
    if not runs:
        return ""
    spent = median(run["cpu_s"] for run in runs)
    reached = [samples_to_reach(run) for run in runs if run["history"]]
    return f"{spent:.0f} s, {median(reached):.0f}" if reached else f"{spent:.0f} s, none fits"


def _table(head: str, columns: Iterable[str], lines: dict[str, list[str]]) -> list[str]:
    columns = list(columns)
    return [
        f"| {head} | " + " | ".join(columns) + " |",
        "|---" * (len(columns) + 1) + "|",
        *(f"| {name} | " + " | ".join(cells) + " |" for name, cells in lines.items()),
        "",
    ]


def _is_there(row: dict[str, Any], runs: dict[tuple[str, str], Runs]) -> bool:
    """Whether the placers without randomness, which come with the bound, were run."""
    return (f"{row['workload']}, {row['machine']}", "cpu") in runs


def _beside(table: str, runs: dict[tuple[str, str], Runs], of: dict[str, str]) -> list[str]:
    """Published ratios to the human expert (or to one GPU) with ours beside."""
    lines: dict[str, list[str]] = {}
    published_rows = {name: row for name, row in PUBLISHED[table].items() if name in of}
    names = list(dict.fromkeys(n for row in published_rows.values() for n in row))
    for name in names:
        cells = []
        for workload, there in published_rows.items():
            base = next(b for b in ("expert", "gpu-only", "grouper-placer") if there.get(b))
            ours, ground = runs.get((of[workload], name)), runs.get((of[workload], base))
            if name not in there or not ours or not ground:
                cells.append("")
                continue
            time = there[name]
            told = "OOM" if time is None else f"{time / float(there[base] or 1):.2f}"
            fits = [run for run in ours if run["feasible"]]
            here = f"{_median_of(fits) / _median_of(ground):.2f}" if fits else "OOM"
            cells.append(f"{told} / {here}")
        lines[name] = cells
    return _table("published / here", published_rows, lines)


def page(data: dict[str, Any], made: str) -> str:
    """All tables, with links to the pictures."""
    rows = data["problems"]
    runs: dict[tuple[str, str], Runs] = {}
    for run in data["rows"]:
        runs.setdefault((f"{run['workload']}, {run['machine']}", run["placer"]), []).append(run)
    lines = [
        "# The published tables, rebuilt",
        "",
        f"Predicted ms per training step (SGD, full size, analytic costs), {data['budget']} "
        "evaluations for every placer that learns or draws; median over 5 seeds, least and most in "
        "brackets. *OOM*: a memory limit is broken. Where a limit is given, it is that of each "
        "GPU, chosen so that one GPU runs out as in the paper; *gpu-only* is the whole step on "
        "one GPU.",
        "",
        made,
        "",
        data.get("findings", ""),
        "",
    ]
    for table, published in (("hdp", 0), ("mars", 1)):
        own = [row for row in rows if row["table"] == table and _is_there(row, runs)]
        if not own:
            continue
        keys = {row["workload"]: f"{row['workload']}, {row['machine']}" for row in own}
        heads = [
            keys[row["workload"]] + (f", {row['limit']}" if row["limit"] else "") for row in own
        ]
        title = list(PUBLISHED)[published]
        found = {name for key, name in runs if key in keys.values()}
        names = [*(name for name in ORDER if name in found), *sorted(found.difference(ORDER))]
        steps = {
            name: [_step_cell(runs.get((keys[row["workload"]], name), [])) for row in own]
            for name in names
        }
        bounds = [
            f"{runs[keys[row['workload']], 'cpu'][0]['lower_bound_ns'] / 1e6:.4g}" for row in own
        ]
        learning = [n for n in names if any(len(runs.get((k, n), [])) > 1 for k in keys.values())]
        costs = {
            name: [_cost_cell(runs.get((keys[row["workload"]], name), [])) for row in own]
            for name in learning
        }
        lines += [f"## {title}", "", *_table("placer", heads, steps | {"lower bound": bounds})]
        lines += [
            "CPU seconds of the whole run, and evaluations until within 5 % of its own best:",
            "",
            *_table("placer", heads, costs),
            "Step relative to the human expert (to one GPU or the grouper-placer where the paper "
            "has none), as published and here:",
            "",
            *_beside(title, runs, keys),
        ]
    lines += ["## Learning curves", ""]
    lines += [
        "Best step so far; lines are medians, bands least to most of 5 seeds. A line begins when "
        "all seeds have a plan that fits; a placer without a line never got there.",
        "",
    ]
    for workload in PICTURE_ROWS:
        for name in PICTURES:
            lines += [
                f"![{workload}, {name}](published_{name}_{workload}.svg)",
                "",
            ]
    return "\n".join(lines)


def pictures(data: dict[str, Any]) -> dict[str, str]:
    """File name -> SVG of learning curves."""
    made = {}
    most = int(data["budget"])
    counts = [most * k // 48 for k in range(1, 49)]
    for workload in PICTURE_ROWS:
        for title, names in PICTURES.items():
            bands = []
            for name in names:
                runs = [
                    run
                    for run in data["rows"]
                    if run["workload"] == workload and run["placer"] == name
                ]
                if runs:
                    bands.append(_band(name, runs, counts))
            bands = [band for band in bands if band.x]  # in some runs nothing ever fitted
            if bands:
                made[f"published_{title}_{workload}.svg"] = band_plot(
                    bands, "evaluations", f"best step so far, ms ({workload})"
                )
    return made


def _band(name: str, runs: Runs, counts: Sequence[int]) -> Band:
    columns = zip(counts, *(best_after(run, counts) for run in runs), strict=True)
    kept = [(c, [v / 1e6 for v in values if v]) for c, *values in columns]
    kept = [(c, values) for c, values in kept if len(values) == len(runs)]
    return Band(
        name,
        [c for c, _ in kept],
        [median(values) for _, values in kept],
        [min(values) for _, values in kept],
        [max(values) for _, values in kept],
    )
