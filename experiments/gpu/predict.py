"""Predict again every plan that `experiments/gpu/plans.py` measured, and fit the constants.

Prints predicted beside measured for every row, with the constants of the package and with those
fitted to the rows of some workloads; writes both to a file. Where a run did not keep which costs
hold the kernel gap, the gap stays as it was, and rows on one GPU are not fitted to.

Run: `python -m experiments.gpu.predict FOLDER [--fit rnnlm,nmt-4,bert-large] [--out FILE]`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from devplace.cost import Analytic, CostTable
from devplace.cost.likely_order import likely_order
from devplace.cost.reuse import CacheTimes, cold_inputs
from devplace.graph import OpGraph, serialize
from devplace.machine import load_machine, toml
from devplace.tune.calibration import Calibration, Observation, fit
from devplace.tune.measured_costs import HOPPER


def observations(path: Path) -> list[tuple[dict[str, Any], Observation]]:
    """Every measured row of one workload."""
    data, arrays = json.loads(path.read_text()), np.load(path.with_suffix(".npz"))
    machine = toml.loads(data["probed"])
    found, steps = [], {}
    for row in data["rows"]:
        if "measured_ns" not in row:
            continue
        count = row["micro_batches"]
        if count not in steps:
            graph = serialize.from_json(bytes(arrays[f"{count}.graph"]))
            steps[count] = graph, kept_costs(arrays, count, graph)
        graph, costs = steps[count]
        key = f"{count}.{row['gpus']}.{row['name']}"
        order = [arrays[f"{key}.order{d}"].tolist() for d in range(len(machine.devices))]
        one = Observation(
            graph,
            costs.in_order(graph, order),
            machine,
            tuple(arrays[f"{key}.placement"].tolist()),
            tuple(map(tuple, order)),
            row["measured_ns"],
        )
        about = {key: data[key] for key in ("workload", "number_format", "layers", "batch", "card")}
        found.append(({**about, **row}, one))
    return found


def kept_costs(arrays: Mapping[str, np.ndarray], count: int, graph: OpGraph) -> CostTable:
    """Costs of the step with this number of micro-batches."""
    times = arrays[f"{count}.costs"]
    if f"{count}.kernels" not in arrays:
        return CostTable(times, "profiled")
    gap = int(arrays[f"{count}.kernel_gap"])
    kernels = arrays[f"{count}.kernels"]
    table = CostTable(times, "profiled", kernel_gap_ns=gap, kernels=kernels)
    if f"{count}.usual" not in arrays:
        return replace(table, caching=seen_states(graph, table))
    usual: dict[int, set[int]] = {}
    for op, tensor in arrays[f"{count}.usual"].tolist():
        usual.setdefault(op, set()).add(tensor)
    cold = {op: frozenset(tensors) for op, tensors in usual.items()}
    caching = CacheTimes(cold, arrays[f"{count}.warm"], arrays[f"{count}.cold"])
    return replace(table, caching=caching)


def seen_states(graph: OpGraph, table: CostTable) -> CacheTimes:
    """What a run that kept no warm and cold times tells of them: of ops of one kind, the times of
    those with the fewest and with the most bytes from memory."""
    column = int(np.flatnonzero(table.kernels.any(0))[0]) if table.kernels is not None else 0
    base = Analytic()(graph, load_machine("h200x1")).compute_ns[:, 1].tolist()
    usual = cold_inputs(graph, likely_order(graph, base))
    states: dict[Any, dict[int, list[int]]] = {}
    for op, cold in usual.items():
        read = sum(graph.tensors[tensor].num_bytes for tensor in cold)
        kind = states.setdefault(_kind(graph, op), {})
        kind.setdefault(read, []).append(int(table.compute_ns[op, column]))
    warm, late = table.compute_ns.copy(), table.compute_ns.copy()
    for op in usual:
        seen = states[_kind(graph, op)]
        gpus = table.kernels[op] if table.kernels is not None else slice(None)
        warm[op, gpus] = round(np.median(seen[min(seen)]))
        late[op, gpus] = round(np.median(seen[max(seen)]))
    return CacheTimes(usual, warm, late)


def _kind(graph: OpGraph, index: int) -> Any:
    op, tensors = graph.ops[index], graph.tensors
    shapes = [(tensors[t].shape, tensors[t].dtype) for t in (*op.inputs, *op.outputs)]
    return op.target, tuple(shapes), op.flops, op.bytes_read, op.bytes_written


def ranks(values: list[float]) -> np.ndarray:
    """Ranks; ties do not occur among measured times."""
    return np.argsort(np.argsort(values))


def summary(rows: list[dict[str, Any]], key: str) -> dict[str, Any]:
    """Median and worst error over the rows that are not random placements; rank correlation over
    those that are, per workload."""
    plain = [r for r in rows if not r["name"].startswith("random") and "," not in r["name"]]
    errors = np.abs([r[key] / r["measured_ns"] - 1 for r in plain])
    found: dict[str, Any] = {
        "rows": len(plain),
        "median_error": round(float(np.median(errors)), 4),
        "worst_error": round(float(errors.max()), 4),
        "worst_row": "{workload} {number_format} {micro_batches} {gpus} {name}".format(
            **plain[int(errors.argmax())]
        ),
    }
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["name"].startswith("random"):
            where = f"{row['workload']} x{row['micro_batches']} on {row['gpus']}"
            groups.setdefault(where, []).append(row)
    for name, group in groups.items():
        pairs = ranks([r[key] for r in group]), ranks([r["measured_ns"] for r in group])
        found[f"rank correlation, {name}"] = round(float(np.corrcoef(*pairs)[0, 1]), 4)
        found[f"placements, {name}"] = len(group)
    return found


def main() -> None:
    """Predict, fit, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fit", default="rnnlm,nmt-4,bert-large")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    pairs = [p for path in sorted(options.folder.glob("*.json")) for p in observations(path)]
    chosen = options.fit.split(",")
    used = [one for row, one in pairs if row["workload"] in chosen]
    fitted: Calibration = fit(used, HOPPER, rounds=options.rounds) if options.rounds else HOPPER
    rows = []
    for row, one in pairs:
        row["predicted_package_ns"] = one.predicted_ns(HOPPER)
        row["predicted_fitted_ns"] = one.predicted_ns(fitted)
        rows.append(row)
        print(
            f"{row['workload']:13} {row['number_format']} x{row['micro_batches']} on {row['gpus']} "
            f"{row['name']:12} measured {row['measured_ns'] / 1e6:7.2f}  package "
            f"{row['predicted_package_ns'] / row['measured_ns'] - 1:+6.1%}  fitted "
            f"{row['predicted_fitted_ns'] / row['measured_ns'] - 1:+6.1%}"
        )
    data = {
        "package": msgspec.to_builtins(HOPPER),
        "fitted": msgspec.to_builtins(fitted),
        "fitted_to": chosen,
        "errors_package": summary(rows, "predicted_package_ns"),
        "errors_fitted": summary(rows, "predicted_fitted_ns"),
        "rows": rows,
    }
    print(json.dumps({key: value for key, value in data.items() if key != "rows"}, indent=1))
    if options.out:
        options.out.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
