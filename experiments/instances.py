"""Published instances, each solved with several seeds, against the best values known.

Writes docs/results/instances.json and .md; every value is computed by the verifier. Run:
`python experiments/instances.py [--budget 60s] [--seeds 3] [--threads 2] [--suites public]`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from common import RESULTS, provenance, write

from devplace.bench import BenchRow, Effort, bench, load_best_known, save_best_known
from devplace.instances import Changes, Instance, fingerprint, load_instance
from devplace.instances.suites import find
from devplace.placers import Budget

COLUMNS = (
    *("instance", "objective", "unit", "best", "worst"),
    *("best known", "to it", "bound", "gap", "status"),
)
MATCHES = 1e-3
"""A value within this part of the best known one counts as equal."""


def instances(suites: str) -> list[Instance]:
    """All files of the suites; for Piper the published setting beside the file's own."""
    found = []
    for path in [file for suite in suites.split(",") for file in find(suite)]:
        found.append(load_instance(path))
        if path.stem == "bert32a100":
            published = Changes(devices=512, memory_bytes=8 * 2**30, bandwidth=25 * 2**30)
            found.append(load_instance(path, changes=published))
    return found


def as_row(row: BenchRow) -> dict[str, Any]:
    """What is kept of a row."""
    kept = row.as_json()
    kept["file"] = Path(row.instance.about.path).name
    return kept


def table(data: dict[str, Any]) -> str:
    """One line per instance: best and worst value over seeds against what was known."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in data["rows"]:
        groups.setdefault((row["instance"], row["objective"], row["changed"]), []).append(row)
    lines = [
        "# Published instances",
        "",
        f"`devplace bench` with {data['budget']}, {data['threads']} threads per instance and "
        f"{data['seeds']} seed(s). Values are computed by the verifier, each in its instance's "
        "own unit; to it = best value / best known - 1. Best known are published "
        "or re-measured values of others; see [](../guides/bench.md) for formats and objectives.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---" * len(COLUMNS) + "|",
    ]
    better, equal, worse = [], 0, []
    for (name, objective, changed), rows in groups.items():
        values = [row["value"] for row in rows if row["value"] is not None]
        label = f"{name} ({changed})" if changed else name
        known = rows[0]["best_known"]
        best, worst = (min(values), max(values)) if values else (None, None)
        bounds = [row["bound"] for row in rows if row["bound"] is not None]
        bound = max(bounds, default=None)
        status = "optimal" if any(r["status"] == "optimal" for r in rows) else rows[0]["status"]
        to_it = best / known - 1 if best is not None and known else None
        if to_it is not None:
            if to_it < -rounding(data, rows[0]):
                better.append(label)
            elif to_it <= MATCHES:
                equal += 1
            else:
                worse.append(label)
        gap = best / bound - 1 if best is not None and bound else None
        cells = [label, objective, rows[0]["unit"], number(best), number(worst), number(known)]
        cells += [percent(to_it, True), number(bound), percent(gap), status]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", f"Better than known: {', '.join(better) or 'none'}."]
    lines.append(f"Equal (within {MATCHES:.1%}): {equal}. Worse: {', '.join(worse) or 'none'}.")
    made = data["provenance"]
    if note := data.get("note"):
        return "\n".join([*lines, "", note]) + "\n"
    lines += [
        "",
        f"Made on {made['cores']} cores of {made['cpu']}, Python {made['python']}, devplace "
        f"{made['devplace']} at commit {made['commit']}.",
    ]
    return "\n".join(lines) + "\n"


def rounding(data: dict[str, Any], row: dict[str, Any]) -> float:
    """Part of the best known value that its printed digits leave open."""
    return float(data["rounding"].get(f"{row['instance']} {row['objective']}", 0.0))


def number(value: float | None) -> str:
    """Seven digits."""
    return "" if value is None else f"{value:.7g}"


def percent(value: float | None, signed: bool = False) -> str:
    """Two decimals."""
    if value is None:
        return ""
    return f"{100 * value:+.2f} %" if signed else f"{100 * value:.2f} %"


def main() -> None:
    """Solve everything; the files are written anew after each seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="60s")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--suites", default="public")
    parser.add_argument("--record", action="store_true", help="keep better values as best known")
    options = parser.parse_args()
    known = load_best_known()
    found = instances(options.suites)
    best = {f"{i.about.name} {i.objective}": known.get(fingerprint(i)) for i in found}
    data: dict[str, Any] = {
        "provenance": provenance(),
        "budget": options.budget,
        "seeds": options.seeds,
        "threads": options.threads,
        "rounding": {key: row.rounding / row.value for key, row in best.items() if row},
        "rows": [],
    }
    for seed in range(options.seeds):
        effort = Effort(Budget.parse(options.budget), seed, options.threads)
        for row in bench(found, effort):
            if options.record and row.record is not None:
                save_best_known([row.record])
            data["rows"].append(as_row(row))
            print(row.instance.about.name, seed, row.value, row.best_known, row.status, flush=True)
        write("instances", data)
        (RESULTS / "instances.md").write_text(table(data))


if __name__ == "__main__":
    main()
