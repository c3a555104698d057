"""Table of how the learned placer does on families that it has not seen."""

from __future__ import annotations

from statistics import geometric_mean, median
from typing import Any


def generalisation(data: dict[str, Any], made: str) -> str:
    """Median step of each method and budget; last column relative to the best single device."""
    problems = list(dict.fromkeys((row["workload"], row["machine"]) for row in data["rows"]))
    methods = list(dict.fromkeys((row["method"], row["budget"]) for row in data["rows"]))
    found: dict[tuple[str, int, str, str], list[dict[str, Any]]] = {}
    for row in data["rows"]:
        key = row["method"], row["budget"], row["workload"], row["machine"]
        found.setdefault(key, []).append(row)
    weights = data["weights"]
    lines = [
        "# The learned placer on families that it has not seen",
        "",
        f"Predicted ms per training step (SGD, full size, analytic costs), median over "
        f"{data['seeds']} seed(s). Trained on small graphs of {', '.join(weights['train'])}, "
        f"chosen by {', '.join(weights['validation'])}; the families here are in neither. "
        "*untrained* is the same network with first weights: a rule of less queueing and less "
        "traffic. The last column is the geometric mean of step / best single device; *over* marks "
        "plans that exceed a memory limit.",
        "",
        f"Weights: commit {weights['provenance']['commit']}, seed {weights['seed']}, "
        f"{weights['updates']} updates, {weights['problems']} problems, {weights['seconds']} s of "
        f"evolution on one core shared with others.{_validation(weights['validation_score'])}",
        "",
        " ".join([made, data.get("note", "")]).strip(),
        "",
        "| method | evaluations | "
        + " | ".join(f"{w}, {m}" for w, m in problems)
        + " | of single |",
        "|---" * (len(problems) + 3) + "|",
    ]
    single = {p: median(r["step_ns"] for r in found[("single", 100, *p)]) for p in problems}
    for method, budget in methods:
        rows = [found[(method, budget, *problem)] for problem in problems]
        steps = [median(row["step_ns"] for row in of) for of in rows]
        over = ["" if all(r["feasible"] for r in of) else " *over*" for of in rows]
        part = geometric_mean([step / single[p] for step, p in zip(steps, problems, strict=True)])
        cells = [f"{step / 1e6:.4g}{note}" for step, note in zip(steps, over, strict=True)]
        spent = max(r["evaluations"] for of in rows for r in of)
        lines.append(f"| {method} | {spent} | " + " | ".join(cells) + f" | {part:.3f} |")
    bounds = [found[("single", 100, *p)][0]["lower_bound_ns"] / 1e6 for p in problems]
    lines.append("| lower bound | | " + " | ".join(f"{b:.4g}" for b in bounds) + " | |")
    return "\n".join([*lines, ""])


def _validation(scores: Any) -> str:
    """What each stage of training brought on the problems of the validation."""
    if not isinstance(scores, dict):
        return ""
    parts = ", ".join(f"{name} {value:.3f}" for name, value in scores.items())
    return (
        f" Zero-shot on the validation problems, mean of log(step / best single device): {parts}."
    )
