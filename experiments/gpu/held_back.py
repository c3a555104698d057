"""What holds searched plans back from an even share of one graph's time, from measured traces.

The step of a plan on D GPUs is split into four parts, which add up to it: an even share of the
undivided step on one GPU; what dividing the batch into micro-batches adds to such a share (smaller
kernels, more of them); what ops take longer in the plan than on one GPU (transfers delay them, and
use the same memory); and what a GPU waits, on average. The last two come from a step whose ops were
timed (`experiments.gpu.plans --trace`), scaled to the step time without timing.

Run: `python -m experiments.gpu.held_back FOLDER --out FILE --cards TEXT --commit ID [--note TEXT]`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

TRACE = ".trace.start"


def split(data: Mapping[str, Any], arrays: Mapping[str, Any], key: str) -> dict[str, Any] | None:
    """One traced plan; None if it has one GPU, or the step on one GPU was not measured."""
    count, gpus, name = key.split(".", 2)
    rows = {(r["micro_batches"], r["gpus"], r["name"]): r.get("measured_ns") for r in data["rows"]}
    measured = rows[int(count), int(gpus), name]
    whole, divided = (rows.get((k, 1, "one graph")) for k in (1, int(count)))
    if int(gpus) == 1 or whole is None or divided is None or measured is None:
        return None
    start, finish = arrays[f"{key}.trace.start"], arrays[f"{key}.trace.finish"]
    length, busy = int(finish.max() - start.min()), []
    orders = sorted(k for k in arrays if k.startswith(f"{key}.order"))
    for ops in (arrays[k] for k in orders if len(arrays[k])):
        busy.append(int((finish[ops] - start[ops]).sum()))
    scale = measured / length
    working = scale * sum(busy) / int(gpus)
    return {
        "workload": data["workload"],
        "number_format": data["number_format"],
        "layers": data["layers"],
        "batch": data["batch"],
        "micro_batches": int(count),
        "gpus": int(gpus),
        "name": name,
        "measured_ns": measured,
        "traced_ns": length,
        "share_ns": round(whole / int(gpus)),
        "divided_ns": round((divided - whole) / int(gpus)),
        "slower_ns": round(working - divided / int(gpus)),
        "waiting_ns": round(measured - working),
    }


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cards", required=True)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--torch", default="2.11.0+cu130")
    parser.add_argument("--note", action="append", default=[])
    options = parser.parse_args()
    rows = []
    for path in sorted(options.folder.glob("*.json")):
        data, arrays = json.loads(path.read_text()), np.load(path.with_suffix(".npz"))
        keys = [k.removesuffix(TRACE) for k in arrays if k.endswith(TRACE)]
        rows += [row for key in sorted(keys) if (row := split(data, arrays, key)) is not None]
    made = {"cards": options.cards, "commit": options.commit, "torch": options.torch, "seed": 0}
    made |= {"command": "python -m experiments.gpu.held_back", "notes": options.note}
    options.out.write_text(json.dumps({"provenance": made, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
