"""Page and pictures of `published_tables`: steps, agent cost, learning curves, papers beside."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from math import inf
from statistics import median
from typing import Any

import published_systems as systems
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
    "systems": ("random-64", "climb-64", "colocrl", "hdp", "spotlight", "post", "mars", "search"),
    "post": ("random-64", "climb-64", "post", "post-ce", "post-ppo", "post-pg"),
    "mars": (
        *("random-64", "climb-64", "mars", "mars-no-pretraining"),
        *("grouper-placer", "encoder-placer"),
    ),
    "hdp": (
        *("random-all", "climb-all", "hdp", "hdp-strict"),
        *("hdp-no-grouping", "hdp-random-grouping"),
    ),
    "placeto": ("random-64", "climb-64", "placeto", "placeto-per-step", "placeto-strict"),
}
ORDER = (
    *("cpu", "gpu-only", "expert", "scotch", "mincut", "heft"),
    *("random-all", "random-64", "climb-all", "climb-all-constant"),
    *("climb-64", "climb-64-constant", "climb-64-per-gb", "colocrl"),
    *("hdp", "hdp-strict", "hdp-no-grouping", "hdp-random-grouping", "spotlight"),
    *("placeto", "placeto-per-step", "placeto-strict"),
    *("post", "post-ce", "post-ppo", "post-pg", "grouper-placer", "encoder-placer"),
    *("mars-no-pretraining", "mars", "mars-every-op", "search"),
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


def _steps(runs: Runs) -> list[float]:
    """Step times in order, ms; one that breaks a limit is longer than all."""
    return sorted(run["step_ns"] / 1e6 if run["feasible"] else inf for run in runs)


def _step_cell(runs: Runs) -> str:
    """Median of the seeds and spread, ms; OOM where the median breaks a limit."""
    if not runs:
        return ""
    steps = _steps(runs)
    kept = [step for step in steps if step < inf]
    lost = f"{len(steps) - len(kept)} of {len(steps)} OOM"
    mark = " †" if runs[0]["workload"] in systems.tuned_on(runs[0]["placer"]) else ""
    if median(steps) == inf:
        return lost if kept else "OOM"
    text = f"{median(steps):.4g}{mark}"
    if len(runs) > 1:
        text += f" ({kept[0]:.4g} to {kept[-1]:.4g})"
    return text + (f", {lost}" if len(kept) < len(steps) else "")


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
            here = _ratio(ours, ground) or "OOM"
            cells.append(f"{told} / {here}")
        lines[name] = cells
    return _table("published / here", published_rows, lines)


def _ratio(ours: Runs, others: Runs) -> str:
    """Median step of some runs over that of others; empty if either breaks a limit."""
    one, other = median(_steps(ours)), median(_steps(others))
    return f"{one / other:.2f}" if max(one, other) < inf else ""


def _by_problem(data: dict[str, Any]) -> dict[tuple[str, str], Runs]:
    """Runs by problem and placer."""
    runs: dict[tuple[str, str], Runs] = {}
    for run in data["rows"]:
        runs.setdefault((f"{run['workload']}, {run['machine']}", run["placer"]), []).append(run)
    return runs


def _climbing(data: dict[str, Any], runs: dict[tuple[str, str], Runs]) -> list[str]:
    """Each system's step over that of the climber and of random sampling on its own ground."""
    problems = [row for row in data["problems"] if _is_there(row, runs)]
    heads = [f"{row['workload']}, {row['machine']}" for row in problems]
    lines = [
        "## What a plain climber does",
        "",
        data.get("climber", ""),
        "",
        "Median step of a system over that of the climber, then over that of random sampling, each "
        "with the system's own groups, devices, memory rule and number of evaluations. Below 1 the "
        "system is faster; **bold** where every seed of it is faster than every seed of the "
        "climber, *italic* where every one is slower. *OOM*: no median that fits, of the system "
        "(*OOM / fits*) or of the climber (*fits / OOM*).",
        "",
    ]
    table: dict[str, list[str]] = {}
    for system in systems.SYSTEMS:
        table[system] = [
            _against(system, bool(row["limit"]), head, runs)
            for row, head in zip(problems, heads, strict=True)
        ]
    return [*lines, *_table("system / climber, system / random", heads, table)]


def _against(system: str, is_limited: bool, problem: str, runs: dict[tuple[str, str], Runs]) -> str:
    """A cell: a system beside the climber and random sampling of its ground."""
    random, climber = systems.ground(system, is_limited)
    own, climbed = runs.get((problem, system)), runs.get((problem, climber))
    if not own or not climbed:
        return ""
    steps, others = _steps(own), _steps(climbed)
    ratio = _ratio(own, climbed)
    if not ratio:
        ratio = " / ".join("fits" if median(each) < inf else "OOM" for each in (steps, others))
    elif steps[-1] < others[0]:
        ratio = f"**{ratio}**"
    elif steps[0] > others[-1]:
        ratio = f"*{ratio}*"
    drawn = runs.get((problem, random))
    return f"{ratio}, {(drawn and _ratio(own, drawn)) or '-'}"


def _spaces(data: dict[str, Any]) -> list[str]:
    """What there is to decide on each problem."""
    return _table(
        "problem",
        ["ops", "colocation groups", "groups of most systems", "devices (CPU included)"],
        {
            f"{row['workload']}, {row['machine']}": [
                str(row.get(name, "")) for name in ("ops", "colocation_groups", "groups", "devices")
            ]
            for row in data["problems"]
        },
    )


def _origins(data: dict[str, Any], made: Sequence[str]) -> list[str]:
    """Where runs were made, and what runs repeated elsewhere gave."""
    lines = []
    for number, sentence in enumerate(made):
        own = [row for row in data["rows"] if row.get("run") == number]
        where: dict[str, dict[str, None]] = {}
        for row in own:
            where.setdefault(row["workload"], {})[row["placer"]] = None
        alike: dict[str, list[str]] = {}
        for workload, names in where.items():
            alike.setdefault(", ".join(n for n in ORDER if n in names), []).append(workload)
        told = "; ".join(f"{', '.join(them)}: {names}" for names, them in alike.items())
        lines.append(f"- {len(own)} runs. {sentence} {told}.")
    first = {_key(row): row["step_ns"] for row in data["rows"]}
    repeated: dict[str, list[float]] = {}
    for row in data.get("repeated", []):
        if _key(row) in first:
            off = abs(row["step_ns"] / first[_key(row)] - 1)
            repeated.setdefault(row["placer"], []).append(off)
    if repeated:
        lines += [
            "",
            "Runs that an older commit had made and the last one above made again: "
            + "; ".join(
                f"{name}, {sum(not off for off in them)} of {len(them)} the same to the "
                f"nanosecond, the others {max(them):.1%} off at most"
                for name, them in repeated.items()
            )
            + ".",
        ]
    return [*lines, ""]


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in ("workload", "machine", "placer", "seed", "budget"))


def page(
    data: dict[str, Any],
    made: Sequence[str],
    variants: dict[str, Any] | None = None,
) -> str:
    """All tables, with links to the pictures.

    Args:
        data: The result file.
        made: Where each of its runs was made, as sentences.
        variants: Systems with published settings, by name.
    """
    rows = data["problems"]
    runs = _by_problem(data)
    lines = [
        "# The published tables, rebuilt",
        "",
        f"Predicted ms per training step (SGD, full size, analytic costs), {data['budget']} "
        "evaluations for every placer that learns, climbs or draws; median over 5 seeds, least and "
        "most in brackets. A seed whose plan breaks a memory limit (*OOM*) counts as slower than "
        "all. Where a limit is given, it is that of each GPU, chosen so that one GPU runs out as "
        "in the paper; *gpu-only* is the whole step on one GPU. †: a model that settings of this "
        "system were tuned on; for it all others are held out.",
        "",
        data.get("findings", ""),
        "",
        *_climbing(data, runs),
        "## What each system decides",
        "",
        "| system | places | a placement that fails counts as | tuned on |",
        "|---|---|---|---|",
        *systems.table(),
        "",
        "`random-64`, `climb-64`: random sampling and the climber over the at most 64 groups; "
        "`random-all`, `climb-all`: over every colocation group by itself, which is what HDP and "
        "its ablations place. `climb-...-constant` and `-per-gb`: the climber with the rules of "
        "ColocRL and HDP and of Placeto where a limit binds. Nothing of them was tuned.",
        "",
        *_spaces(data),
    ]
    for table, published in (("hdp", 0), ("mars", 1)):
        own = [row for row in rows if row["table"] == table and _is_there(row, runs)]
        if own:
            lines += _results(own, runs, list(PUBLISHED)[published])
    lines += ["## Learning curves", ""]
    lines += [
        "Best step so far; lines are medians, bands least to most of 5 seeds. A line begins when "
        "all seeds have a plan that fits; a placer without a line never got there.",
        "",
    ]
    drawn = pictures(data)
    for workload in PICTURE_ROWS:
        for name in PICTURES:
            file = f"published_{name}_{workload}.svg"
            if file in drawn:
                lines += [f"![{workload}, {name}]({file})", ""]
    lines += ["## Where each system differs from its paper", ""]
    if variants:
        lines += [
            "Runs with the settings that were published (in brackets what the system has here):",
            "",
            "| row | settings | run on |",
            "|---|---|---|",
            *systems.setting_rows(variants, data["rows"]),
            "",
            data.get("not_run", ""),
            "",
        ]
    lines += ["| system | differs in |", "|---|---|", *systems.difference_rows(), ""]
    lines += ["## Where the numbers were made", "", *_origins(data, made)]
    return "\n".join(lines)


def _results(own: Runs, runs: dict[tuple[str, str], Runs], title: str) -> list[str]:
    """Steps, costs and the published ratios of one table."""
    keys = {row["workload"]: f"{row['workload']}, {row['machine']}" for row in own}
    heads = [keys[row["workload"]] + (f", {row['limit']}" if row["limit"] else "") for row in own]
    found = {name for key, name in runs if key in keys.values()}
    names = [*(name for name in ORDER if name in found), *sorted(found.difference(ORDER))]
    steps = {
        name: [_step_cell(runs.get((keys[row["workload"]], name), [])) for row in own]
        for name in names
    }
    bounds = [f"{runs[keys[row['workload']], 'cpu'][0]['lower_bound_ns'] / 1e6:.4g}" for row in own]
    learning = [n for n in names if any(len(runs.get((k, n), [])) > 1 for k in keys.values())]
    costs = {
        name: [_cost_cell(runs.get((keys[row["workload"]], name), [])) for row in own]
        for name in learning
    }
    return [
        *(f"## {title}", "", *_table("placer", heads, steps | {"lower bound": bounds})),
        "CPU seconds of the whole run, and evaluations until within 5 % of its own best:",
        "",
        *_table("placer", heads, costs),
        "Step relative to the human expert (to one GPU or the grouper-placer where the paper "
        "has none), as published and here:",
        "",
        *_beside(title, runs, keys),
    ]


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
