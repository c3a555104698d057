"""Predicted training steps of the cards in `presets/cards.csv` beside published ones.

Published: throughput of one card, as Lambda measured it with NVIDIA's DeepLearningExamples in their
PyTorch 22.10 container. Predicted: the sum of the analytic costs of all ops of the same step, fused
(`devplace.fuse`) and op by op. Writes docs/results/card_benchmarks.json and the page beside it.
Run: `python experiments/card_benchmarks.py [--page]` (--page: the page alone, from the JSON).
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import msgspec
import torch
from common import RESULTS, provenance, write

from devplace import workloads
from devplace.cost.analytic import Analytic
from devplace.graph import OpGraph
from devplace.graph.fusion import fuse
from devplace.machine import Machine, load_machine
from devplace.step_capture import capture

NAME = "card_benchmarks"
LIMIT = 1.5
SOURCE = (
    "Lambda, GPU benchmarks: github.com/lambdal/deeplearning-benchmark, "
    "pytorch/pytorch-train-throughput-fp32.csv and -fp16.csv (commit 0551cb7), batch sizes from "
    "pytorch/pytorch-train-bs-fp32.csv and -fp16.csv (commit 08d77c4)"
)
# Card -> GB by which Lambda chose batch sizes, and samples/s: ResNet-50 and BERT-large fine-tuned
# on SQuAD (384 tokens), each in float32 (tf32 where the card has it) and in mixed float16.
PUBLISHED = {
    "v100": (16, 369, 833, 12, 57),
    "rtx8000": (48, 274, 651, 12, 50),
    "rtx3090": (24, 513, 905, 24, 52),
    "a6000": (48, 514, 916, 33, 68),
    "a10": (24, 349, 638, 19, 42),
    "a100-pcie-40gb": (40, 882, 1396, 53, 117),
    "a100-pcie": (80, 1014, 1527, 70, 140),
    "a100": (80, 1066, 1582, 75, 152),
    "rtx4090": (24, 721, 1301, 44, 93),
    "rtx6000-ada": (48, 647, 1146, 44, 79),
    "h100-pcie": (80, 1197, 1866, 97, 203),
    "h100": (80, 1753, 2616, 141, 301),
}
BATCHES = {  # GB -> batch of each column
    16: (128, 256, 8, 16),
    24: (224, 448, 16, 28),
    40: (360, 720, 28, 48),
    48: (496, 928, 32, 64),
    80: (640, 1280, 64, 112),
}
STEPS = (
    ("resnet-50", "float32"),
    ("resnet-50", "float16"),
    ("bert-large", "float32"),
    ("bert-large", "float16"),
)


def step(name: str, batch: int, precision: str) -> OpGraph:
    """The step as NVIDIA's examples have it. BERT's head gives a token a few numbers, no words."""
    bert = {"seq": 384, "vocabulary": 8} if name == "bert-large" else {}
    workload = workloads.build(name, device="meta", batch=batch, **bert)
    parameters = workload.model.parameters()
    update: Any = torch.optim.Adam(parameters) if bert else torch.optim.SGD(parameters, 0.1, 0.9)
    half = torch.bfloat16 if precision == "float16" else None
    inputs, loss_fn = workload.inputs, workload.loss_fn
    return capture(workload.model, inputs, loss_fn, update, name=name, autocast=half)


def in_float16(machine: Machine) -> Machine:
    """The machine at float16's rate for bfloat16: float16 is not captured, but is as wide."""
    devices = tuple(
        msgspec.structs.replace(
            device, flops_per_s=device.flops_per_s | {"bfloat16": device.flops_per_s["float16"]}
        )
        for device in machine.devices
    )
    return replace(machine, devices=devices)


def predicted_ns(graph: OpGraph, card: str) -> int:
    """Sum of the costs on the card."""
    machine = in_float16(load_machine(card))
    costs = Analytic()(graph, machine)
    return int(costs.compute_ns[:, machine.device_index["cuda:0"]].sum())


def measure() -> dict[str, Any]:
    """Every row, each batch captured once."""
    made, rows = provenance(), []
    for column, (name, precision) in enumerate(STEPS):
        for size, batches in BATCHES.items():
            cards = [card for card, row in PUBLISHED.items() if row[0] == size]
            if not cards:
                continue
            batch = batches[column]
            graph = step(name, batch, precision)
            fused = fuse(graph)
            for card in cards:
                published_ns = round(batch / PUBLISHED[card][column + 1] * 1e9)
                row = {
                    "card": card,
                    "workload": name,
                    "precision": precision,
                    "batch": batch,
                    "samples_per_s": PUBLISHED[card][column + 1],
                    "published_ns": published_ns,
                    "predicted_ns": predicted_ns(fused, card),
                    "op_by_op_ns": predicted_ns(graph, card),
                }
                rows.append(row)
                print(row, flush=True)
    return {"provenance": made, "source": SOURCE, "rows": rows}


def ratio(row: dict[str, Any]) -> float:
    """Predicted over published step time."""
    return float(row["predicted_ns"] / row["published_ns"])


def page(data: dict[str, Any]) -> str:
    """The page of a result."""
    rows, made = data["rows"], data["provenance"]
    near = sum(1 / LIMIT <= ratio(row) <= LIMIT for row in rows)
    cards = list(dict.fromkeys(row["card"] for row in rows))
    lines = [
        "# Cards beside published benchmarks",
        "",
        "<!-- made by experiments/card_benchmarks.py -->",
        "",
        f"Predicted training steps of {len(cards)} cards, from their data sheets alone, beside"
        " steps that others measured on them. Published are samples per second of one card:",
        f"{data['source']}. Predicted is the sum of the analytic costs of all ops of a fused step"
        " of the same model, batch and precision; in brackets that op by op. NVIDIA's BERT has"
        " kernels fused by hand, its ResNet-50 hardly any, so that step should lie between"
        " the two. float32 is tf32 where a card has it, as in NVIDIA's containers; mixed"
        " precision was captured in bfloat16 and priced at the rates of float16.",
        "",
        f"{near} of {len(rows)} are within a factor of {LIMIT}. A ratio below 1 is a step predicted"
        " too short.",
        "",
        "| card | step | batch | published | predicted (op by op) | predicted / published |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for card in cards:
        for row in (row for row in rows if row["card"] == card):
            own = [row[key] / 1e6 for key in ("published_ns", "predicted_ns", "op_by_op_ns")]
            mark = "" if 1 / LIMIT <= ratio(row) <= LIMIT else " (1)"
            lines.append(
                f"| `{card}` | {row['workload']}, {row['precision']} | {row['batch']} "
                f"| {own[0]:.0f} ms | {own[1]:.0f} ms ({own[2]:.0f} ms) | {ratio(row):.2f}{mark} |"
            )
    far = [row for row in rows if not 1 / LIMIT <= ratio(row) <= LIMIT]
    between = [row for row in far if row["predicted_ns"] < row["published_ns"] < row["op_by_op_ns"]]
    if far:
        names = ", ".join(sorted({row["workload"] for row in far}))
        lines += [
            "",
            f"(1) {len(far)} steps, of {names}; {len(between)} of them took longer than the fused"
            " step and less than the sum of its ops. What is predicted too short there is what the"
            " benchmark does not fuse: batch norm, activation and addition after a convolution.",
        ]
    lines += [
        "",
        f"devplace {made['devplace']}, commit {made['commit']}, torch {made['torch']}. No seed: the"
        " costs have no randomness.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Price every step, write result and page."""
    if "--page" not in sys.argv[1:]:
        write(NAME, measure())
    data = json.loads((RESULTS / f"{NAME}.json").read_text())
    (RESULTS / f"{NAME}.md").write_text(page(data))


if __name__ == "__main__":
    main()
