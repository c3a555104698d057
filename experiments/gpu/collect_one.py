"""Put what `parts`, `plans --stack-gradients` and `compiled` wrote on one GPU into a result file.

Run: `python -m experiments.gpu.collect_one FOLDER=COMMIT ... --compiled FILE ... --out FILE
--driver TEXT [--note TEXT ...]`. A folder may hold files of both kinds.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

ABOUT = ("workload", "number_format", "layers", "batch")
ORDERS = ("name", "ops", "sent", "received", "priced_ns", "priced_in_order_ns", "measured_ns")
STACKED = ("predicted_ns", "measured_ns", "predicted_peak", "peak")
COMPILED = ("workload", "number_format", "batch", "step_ms", "compile_s", "reason", "commit")


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+")
    parser.add_argument("--compiled", type=Path, nargs="*", default=[])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cores", type=int, default=16)
    parser.add_argument("--driver", default="580.159.04")
    parser.add_argument("--note", action="append", default=[])
    options = parser.parse_args()
    orders: list[dict[str, Any]] = []
    stacked: list[dict[str, Any]] = []
    card = torch = ""
    for folder, _, commit in (text.partition("=") for text in options.folders):
        for path in sorted(Path(folder).glob("*.json")):
            data = json.loads(path.read_text())
            card, torch = data["card"], data["torch"]
            about = {key: data.get(key) for key in ABOUT} | {"commit": commit}
            for row in data["rows"]:
                if "priced_ns" in row:
                    kept = {key: row[key] for key in ORDERS}
                    orders.append(about | {"micro_batches": data["micro_batches"]} | kept)
                elif row["name"] == "one graph":
                    stacked.append(about | {key: row[key] for key in STACKED})
    compiled = [row for path in options.compiled for row in _rows(path)]
    made = {
        "card": card,
        "cpu_cores": options.cores,
        "driver": options.driver,
        "torch": torch,
        "seed": 0,
        "command": "python -m experiments.gpu.parts, plans, compiled",
        "notes": options.note,
    }
    result = {"provenance": made, "orders": orders, "stacked": stacked, "compiled": compiled}
    options.out.write_text(json.dumps(result, indent=1) + "\n")


def _rows(path: Path) -> list[dict[str, Any]]:
    data = json.loads(path.read_text())
    return [
        {key: row[key] for key in COMPILED if row.get(key) is not None}
        for row in data.get("rows", [data])
    ]


if __name__ == "__main__":
    main()
