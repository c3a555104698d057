"""Tables of what was measured on GPUs."""

from __future__ import annotations

import json
from statistics import correlation, median
from typing import Any

from common import RESULTS

SHORT_NS = 1_200_000
SEND_NS, RECEIVE_NS = 1_300, 1_200  # of src/devplace/tune/measured_costs.py


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
        "in critical-path order; *search* the searched plan; *confirmed* the fastest measured of "
        "it, the even split and runners-up, measured again. Predicted: measured costs, probed "
        "links, the package's constants.",
        "",
        f"{made['constants']} "
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
        step = _step(row)
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
    return "\n".join(lines + _baseline_lines(data["rows"], data.get("baselines", [])))


def gpu_one(data: dict[str, Any]) -> str:
    """What the order of ops and stacked gradients do on one GPU."""
    made = data["provenance"]
    lines = [
        "# Orders of a step on one GPU, and stacked gradients",
        "",
        f"Milliseconds per training step, or per part of one, each as one CUDA graph. "
        f"{made['card']}, {made['cpu_cores']} cores, driver {made['driver']}, torch "
        f"{made['torch']}, SGD, fp32 with TF32 products or bf16 autocast, seed {made['seed']}. "
        f"Written by `{made['command']}`; orders and parts at commits "
        f"{_commits(data['orders'])}, stacked gradients at {_commits(data['stacked'])}, "
        f"torch.compile at {_commits(data['compiled'])}.",
        "",
        *(f"- {note}" for note in made["notes"]),
        "",
        "## The same ops in several orders",
        "",
        "*priced*: the sum of the ops' measured times in the order of critical paths on one GPU; "
        "*in order*: with what the cache holds in the order that was run.",
        "",
        *_order_lines([row for row in data["orders"] if not _is_part(row)]),
        "",
        "## Each GPU's part of a plan for four, alone on one",
        "",
        "Tensors of other GPUs are there at once, pushes go into memory of the same GPU. Sums of "
        "prices hold the constants for sending and receiving.",
        "",
        *_order_lines([row for row in data["orders"] if _is_part(row)]),
        "",
        "## Gradients of weights that are used many times, by one product",
        "",
        "*plain*, of [](gpu_plans.md): the same step without `stack_gradients`, one graph on one "
        "GPU of another such machine, not the same run. *torch.compile* of this page or that one.",
        "",
        "| step | plain | torch.compile | stacked, predicted | stacked | error | of plain |",
        "|---|---|---|---|---|---|---|",
    ]
    plans = json.loads((RESULTS / "gpu_plans.json").read_text())
    for row in data["stacked"]:
        name = row["workload"].removesuffix(" stacked")
        plain = next(
            r["measured_ns"] / 1e6
            for r in plans["rows"]
            if (r["workload"], r["name"], r["number_format"]) == (name, "one graph", "tf32")
        )
        known = [r for r in (*data["compiled"], *plans["baselines"]) if r["workload"] == name]
        compiled = next(
            (r["step_ms"] for r in known if r.get("row", "compiled") == "compiled"), None
        )
        predicted, measured = row["predicted_ns"] / 1e6, row["measured_ns"] / 1e6
        lines.append(
            f"| {name} | {plain:.1f} | {'-' if compiled is None else f'{compiled:.1f}'} | "
            f"{predicted:.1f} | {measured:.1f} | {predicted / measured - 1:+.1%} | "
            f"{measured / plain:.2f} |"
        )
    return "\n".join([*lines, ""])


def _commits(rows: list[dict[str, Any]]) -> str:
    """Commits of rows, in their order."""
    return ", ".join(dict.fromkeys(row["commit"] for row in rows if "commit" in row))


def _is_part(row: dict[str, Any]) -> bool:
    return bool(row["name"][-1].isdigit())


def _order_lines(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| step | micro-batches | order | ops | priced | in order | measured | error, priced | "
        "error, in order |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    errors: list[tuple[float, float]] = []
    for row in rows:
        links = row["sent"] * SEND_NS + row["received"] * RECEIVE_NS
        priced, in_order = row["priced_ns"] + links, row["priced_in_order_ns"] + links
        measured = row["measured_ns"]
        both = priced / measured - 1, in_order / measured - 1
        if measured >= SHORT_NS:
            errors.append(both)
        lines.append(
            f"| {_step(row)} | {row['micro_batches']} | {row['name']} | {row['ops']} | "
            f"{priced / 1e6:.2f} | {in_order / 1e6:.2f} | {measured / 1e6:.2f} | "
            f"{both[0]:+.1%} | {both[1]:+.1%} |"
        )
    for k, name in enumerate(("priced", "in order")):
        sizes = [abs(pair[k]) for pair in errors]
        lines += [
            "",
            f"Error, {name}: median {median(sizes):.1%}, worst {max(sizes):.1%} over the rows of "
            "1.2 ms or more; what a launch takes shows in shorter ones.",
        ]
    return lines


def gpu_held_back(data: dict[str, Any]) -> str:
    """Where the time of plans on several GPUs goes."""
    made = data["provenance"]
    parts = ("measured_ns", "share_ns", "divided_ns", "slower_ns", "waiting_ns")
    lines = [
        "# What holds plans on several GPUs back",
        "",
        f"Milliseconds per training step, from measured traces. {made['cards']}, torch "
        f"{made['torch']}, seed {made['seed']}, commit {made['commit']}. A step's time is the sum "
        "of an even share of the undivided step on one GPU, what dividing the batch adds to that "
        "share, by how much ops are slower than on one GPU (transfers), and what a GPU waits on "
        "average.",
        "",
        *(f"- {note}" for note in made["notes"]),
        "",
        "| step | micro-batches | GPUs | plan | measured | even share | divided | slower ops | "
        "waiting |",
        "|---" * 9 + "|",
    ]
    for row in data["rows"]:
        times = " | ".join(f"{row[part] / 1e6:.2f}" for part in parts)
        lines.append(
            f"| {_step(row)} | {row['micro_batches']} | {row['gpus']} | {row['name']} | {times} |"
        )
    return "\n".join([*lines, ""])


def _step(row: dict[str, Any]) -> str:
    """What is trained, in words; the same for our rows and for those of others."""
    step = row["workload"] + (f", {row['layers']} layers" if row.get("layers") else "")
    step += f", batch {row['batch']}" if row.get("batch") else ""
    return f"{step}, {row['number_format']}"


def _grid(title: str, cells: dict[tuple[str, str], float]) -> list[str]:
    """Ways as rows, steps as columns; the fastest of a step in bold."""
    steps = list(dict.fromkeys(step for step, _ in cells))
    best = {step: min(ms for (of, _), ms in cells.items() if of == step) for step in steps}
    lines = [f"## {title}", "", f"| how | {' | '.join(steps)} |", "|---" * (len(steps) + 1) + "|"]
    for way in sorted(dict.fromkeys(way for _, way in cells), key=_place):
        texts = []
        for step in steps:
            ms = cells.get((step, way))
            text = "" if ms is None else f"{ms:.1f}"
            texts.append(f"**{text}**" if ms == best[step] else text)
        lines.append(f"| {way} | {' | '.join(texts)} |")
    return [*lines, ""]


WAYS = (
    *("eager", "compiled", "lstm", "device_map", "ddp", "fsdp", "fsdp-mixed", "1f1b"),
    *("zero-bubble", "zbv", "one graph", "layers", "search"),
    "confirmed",
)
NAMES = {
    "compiled": "torch.compile",
    "lstm": "nn.LSTM",
    "device_map": "device map",
    "ddp": "DDP",
    "fsdp": "FSDP2",
    "fsdp-mixed": "FSDP2, bf16 policy",
    "1f1b-4": "1F1B, 4 micro-batches",
    "1f1b-8": "1F1B, 8 micro-batches",
    "zero-bubble-4": "zero bubble, 4 micro-batches",
    "zero-bubble-8": "zero bubble, 8 micro-batches",
    "zbv-4": "ZBV, 4 micro-batches",
    "zbv-8": "ZBV, 8 micro-batches",
    "group": "DDP with torch.compile",  # what is left of a group's rows comes last
    "rest": "DDP with torch.compile",
    "ddp-compiled": "DDP with torch.compile",
}
SHOWN = {name: way for way, name in NAMES.items()}


def _way(name: str, gpus: int, micro_batches: int = 1) -> str:
    """How a step was run, in words."""
    way = NAMES.get(name, name) + (f", {micro_batches} micro-batches" if micro_batches > 1 else "")
    return f"{way}: {gpus} GPU{'s' if gpus > 1 else ''}"


def _place(way: str) -> tuple[int, str]:
    """Where a row stands."""
    name = way.partition(":")[0]
    known = SHOWN.get(name, name)
    return next(k for k, start in reversed([*enumerate(WAYS)]) if known.startswith(start)), way


def _baseline_lines(plans: list[dict[str, Any]], others: list[dict[str, Any]]) -> list[str]:
    """What others do on the same machine, where it was measured, beside our plans."""
    if not others:
        return []
    grids: dict[int, dict[tuple[str, str], float]] = {1: {}, 2: {}}
    for row in others:
        if "step_ms" in row:
            way = _way(row["row"], row["gpus"])
            grids[row["table"]][_step(row), way] = row["step_ms"]
    for row in plans:
        of = [table for table, cells in grids.items() if _step(row) in {s for s, _ in cells}]
        if row["name"] in WAYS:
            for table in of:
                way = _way(row["name"], row["gpus"], row["micro_batches"])
                grids[table][_step(row), way] = row["measured_ns"] / 1e6
    lines = _grid("Beside what others do", grids[1]) if grids[1] else []
    lines += _grid("The same batch over all GPUs", grids[2]) if grids[2] else []
    missing = sorted(
        {f"{_way(r['row'], r['gpus'])} of {_step(r)}" for r in others if "reason" in r}
    )
    return (
        [*lines, f"Not measured for lack of time: {'; '.join(missing)}.", ""] if missing else lines
    )


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


def gpu_rewards(data: dict[str, Any]) -> str:
    """Placers that learn from measured steps, beside the same with simulated ones."""
    made = data["provenance"]
    lines = [
        "# Learning from measured steps",
        "",
        f"NMT-4 on {made['cards']}, driver {made['driver']}, torch {made['torch']}, seed "
        f"{made['seed']}. Ms per training step.",
        "",
        *(f"- {note}" for note in made["notes"]),
        "",
        "| commit | placer | placements measured | seconds | best while learning | error of "
        "rewards, median | rank correlation with predictions |",
        "|---|---|---|---|---|---|---|",
    ]
    finals = ["| commit | placement of | predicted | measured alone |", "|---|---|---|---|"]
    for run in data["runs"]:
        for row in run["rows"]:
            pairs = zip(row["predicted_ns"], row["measured_ns"], strict=True)
            ran = [(predicted, measured) for predicted, measured in pairs if measured]
            errors = [abs(predicted / measured - 1) for predicted, measured in ran]
            lines.append(
                f"| {run['commit']} | {row['placer']} | {row['measured']} | {row['seconds']:.0f} | "
                f"{min(measured for _, measured in ran) / 1e6:.2f} | {median(errors):.0%} | "
                f"{_rank_correlation(ran):.2f} |"
            )
        finals += [
            f"| {run['commit']} | {row['name']} | {row['predicted_ns'] / 1e6:.2f} | "
            f"{row['measured_ns'] / 1e6:.2f} |"
            for row in run["best"]
        ]
    return "\n".join([*lines, "", *finals, ""])


def _rank_correlation(pairs: list[tuple[int, int]]) -> float:
    """Spearman's; equal values have one place."""
    ranks = []
    for values in zip(*pairs, strict=True):
        places = {value: place for place, value in enumerate(sorted(set(values)))}
        ranks.append([float(places[value]) for value in values])
    return correlation(*ranks)


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


def gpu_processes(data: dict[str, Any]) -> str:
    """Steps of one plan by several processes and by one; rows of `gpu/processes.py`."""
    lines = [
        "# Several processes on the GPUs of one host",
        "",
        "Milliseconds per training step of one plan: run by two processes with a GPU each, which "
        "see that the step before the last is over before they begin the next, and by one process "
        "with both GPUs. Plans by `search` with analytic costs; Adam, float32 without TF32. Losses "
        "are the same to the last digit.",
        "",
        "| step | transport | mixing in NCCL | transfers | two processes | one process | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for run in data["runs"]:
        for row in run["rows"]:
            together, alone = row["processes"]["step_ms"], row["one_process"]["step_ms"]
            is_nccl = row["transport"] == "nccl"
            is_mixed = run["nccl"].get("NCCL_GRAPH_MIXING_SUPPORT") == "1"
            mixing = ("on" if is_mixed else "off") if is_nccl else ""
            lines.append(
                f"| {row['workload']} | {row['transport']} | {mixing} | "
                f"{row['transfers']} | {together:.2f} | {alone:.2f} | {together / alone:.3f} |"
            )
    made = data["runs"][0]
    commits = ", ".join(dict.fromkeys(run["commit"] for run in data["runs"]))
    return "\n".join(
        [
            *lines,
            "",
            "NCCL had peer access switched off (NCCL_P2P_DISABLE=1), so it went through host "
            "memory; its two rows are of two plans. With peer access it was tried before dfb8a37 "
            "alone, with results broadcast beside the graph: the first step of NMT-4 never ended.",
            "",
            f"Made on 2 x {made['gpu']}, {made['cores']} cores, Python {made['python']}, torch "
            f"{made['torch']}, seed {made['seed']}, commits {commits}.",
            "",
        ]
    )
