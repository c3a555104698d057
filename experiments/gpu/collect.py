"""Put what `predict` and `baselines` wrote into one result file, with what is to be known of it.

Run: `python -m experiments.gpu.collect PREDICTED --out FILE --cards TEXT --commit ID
--constants TEXT [--baselines FILE ...] [--note TEXT ...]`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

KEPT = ("table", "row", "workload", "number_format", "batch", "gpus", "step_ms", "reason")


def baseline_rows(paths: list[Path]) -> list[dict[str, Any]]:
    """Rows of baselines that were measured, or that say why not."""
    found = [row for path in paths for row in json.loads(path.read_text())["rows"]]
    return [{key: row[key] for key in KEPT if row.get(key) is not None} for row in found]


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("predicted", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--baselines", type=Path, nargs="*", default=[])
    parser.add_argument("--title", default="Plans on GPUs, predicted and measured")
    parser.add_argument("--cards", required=True)
    parser.add_argument("--cores", type=int, default=64)
    parser.add_argument("--driver", default="580.159.04")
    parser.add_argument("--torch", default="2.11.0+cu130")
    parser.add_argument("--commit", required=True)
    parser.add_argument("--constants", required=True, help="where the constants come from")
    parser.add_argument("--note", action="append", default=[])
    options = parser.parse_args()
    data = json.loads(options.predicted.read_text())
    made = {
        "cards": options.cards,
        "cpu_cores": options.cores,
        "driver": options.driver,
        "torch": options.torch,
        "commit": options.commit,
        "seed": 0,
        "command": "python -m experiments.gpu.plans WORKLOAD, then experiments.gpu.predict",
        "constants": options.constants,
        "notes": options.note,
    }
    kept = {key: data[key] for key in ("package", "errors_package")}
    rows = []
    for row in data["rows"]:
        row.pop("predicted_fitted_ns", None)
        rows.append(row)
    result = {"title": options.title, "provenance": made, **kept, "rows": rows}
    if options.baselines:
        result["baselines"] = baseline_rows(options.baselines)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
