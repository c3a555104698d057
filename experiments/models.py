"""Which models can be captured: small ones of many kinds, trained placed and eagerly in float64.

Each model of `zoo` is captured with AdamW, placed at random on two CPU devices of unequal speed,
run for three steps and compared with eager: losses, parameters, buffers. A model that draws random
numbers is compared with the unplaced step instead. Every model has a child process of its own with
a time limit. Writes docs/results/models.json and .md.

Run: `python experiments/models.py [--only hand/,checkpointed/] [--jobs 2] [--seconds 120] [--note
TEXT]`;
transformers, torchvision and timm are used where they are installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import multiprocessing
import statistics
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from common import RESULTS, provenance, write

SEED = 0
STEPS = 3
SLOWER = 3
"""How many times slower the second device is."""
TOLERANCE = {"torch.float64": 1e-9, "torch.float32": 1e-4}
"""Largest error of a loss, parameter or buffer, relative to the largest value of its tensor."""
RIGHT = {
    "hand/boolean_index": "Right: how many rows are trained depends on labels.",
    "hand/early_exit": "Right: a norm decides which layers run.",
    "hand/averaged_model": "Right: a count in a buffer decides whether the average begins or goes "
    "on; an average by `lerp_` runs (hand/unet_averaged), or is updated after the step.",
    "hand/adaptive_softmax": "Right: each cluster computes as many rows as have a word of it.",
    "transformers/NystromformerForMaskedLM": "Right: Transformers drops a mask of ones by its "
    "values; a mask with zeros fails in eager mode, too. As many landmarks as tokens run.",
    "transformers/DebertaForSequenceClassification": "Right: rows that have a label are picked by "
    'its value; with `problem_type="single_label_classification"` none are.',
    "transformers/ProphetNetForConditionalGeneration": "Right: an assertion on values of labels "
    "decides whether the step goes on; labels shifted outside the model need none.",
    "transformers/SwitchTransformersForConditionalGeneration": "Right: each expert computes as "
    "many rows as are routed to it.",
    "transformers/LEDForConditionalGeneration": "Right: values of the mask decide whether there is "
    "global attention.",
    "transformers/DetrForObjectDetection": "Right: whether all values are finite decides, in "
    "training, whether they are clamped.",
    "transformers/ViltForImagesAndTextClassification": "Right: the mask of pixels decides the size "
    "to which positions are resized.",
    "transformers/VideoMAEForPreTraining": "Right: the mask decides how many patches are encoded.",
}
"""Each refusal of a model that is right: values decide, or kernels of other libraries."""
RAN = ("bit-equal", "equal", "equal to unplaced")


def unequal() -> Any:
    """Two CPU devices, the second slower."""
    import msgspec

    from devplace.machine import load_machine

    machine = load_machine("cpux2")
    first, second = machine.devices
    slow = msgspec.structs.replace(
        second,
        flops_per_s={kind: rate // SLOWER for kind, rate in second.flops_per_s.items()},
        bytes_per_s=second.bytes_per_s // SLOWER,
    )
    return dataclasses.replace(machine, name="unequal", devices=(first, slow))


def run_one(name: str) -> dict[str, Any]:
    """Capture, plan, run and compare one model."""
    import torch
    from zoo import cases

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    make = cases()[name]
    torch.manual_seed(SEED)
    case = make()
    torch.manual_seed(SEED)
    eager = make().model  # made again, because not every model can be copied
    losses = []
    try:
        optimizer = _adamw(eager)
        for _ in range(STEPS):
            loss = _loss(case, eager)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
    except Exception as error:  # not a model of ours: say so
        return {"status": "no eager run", "why": f"{type(error).__name__}: {error}"[:300]}
    if not all(map(math.isfinite, losses)):
        return {"status": "no eager run", "why": f"losses {losses}"}
    return _placed(case, eager, losses)


def _adamw(model: Any) -> Any:
    import torch

    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)


def _loss(case: Any, model: Any) -> Any:
    is_named = isinstance(case.inputs, dict)
    args, kwargs = ((), case.inputs) if is_named else (case.inputs, {})
    return case.loss_fn(model, *args, **kwargs) if case.loss_fn else model(*args, **kwargs).loss


def _placed(case: Any, eager: Any, losses: list[float]) -> dict[str, Any]:
    import devplace as dp
    from devplace.errors import CaptureError
    from devplace.run.planned import check

    optimizer = _adamw(case.model)
    begin = time.process_time()
    try:
        graph = dp.capture(case.model, case.inputs, case.loss_fn, optimizer)
    except CaptureError as error:
        return {"status": "refused", "why": str(error)}
    found = {"ops": len(graph.ops), "capture_cpu_s": round(time.process_time() - begin, 3)}
    machine = unequal()
    problem = dp.Problem(graph, machine, dp.Analytic()(graph, machine))
    plan = dp.place(problem, dp.placers.Random(), "5ev", seed=SEED).plan
    if case.draws or graph.program.random_ops:
        check(graph, plan, case.inputs)
        return found | {"status": "equal to unplaced"}
    is_named = isinstance(case.inputs, dict)
    args, kwargs = ((), case.inputs) if is_named else (case.inputs, {})
    with dp.compile(graph, plan) as step:
        placed = [float(step(*args, **kwargs)) for _ in range(STEPS)]
        step.sync()
    error = max(
        [abs(a - b) / max(abs(b), 1e-12) for a, b in zip(placed, losses, strict=True)]
        + _errors(case.model, eager)
    )
    status = "bit-equal" if error == 0 else "equal"
    return found | {
        "status": status if error <= TOLERANCE[str(case.dtype)] else "other",
        "error": error,
    }


def _errors(model: Any, eager: Any) -> list[float]:
    """Of each parameter and buffer, relative to its largest value."""
    mine, theirs = model.state_dict(), eager.state_dict()
    pairs = [(mine[name].double(), theirs[name].double()) for name in theirs]
    return [
        float((a - b).abs().max() / b.abs().max().clamp(min=1e-12)) for a, b in pairs if b.numel()
    ]


def child(name: str, seconds: float) -> dict[str, Any]:
    """One model in a process of its own, forked from one that has imported the libraries."""
    begin = time.perf_counter()
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(there, name))
    process.start()
    there.close()
    found: dict[str, Any] = {"status": "no answer", "why": f"after {seconds:g} s"}
    if here.poll(seconds):
        try:
            found = here.recv()
        except EOFError:
            found = {"status": "failed", "why": "the process ended"}
    process.kill()
    process.join()
    return {"name": name, **found, "seconds": round(time.perf_counter() - begin, 1)}


def _send(there: Any, name: str) -> None:
    try:
        found = run_one(name)
    except Exception as error:
        found = {"status": "failed", "why": f"{type(error).__name__}: {error}"[:300]}
    there.send(found)


def table(data: dict[str, Any]) -> str:
    """The result as Markdown."""
    rows = [row for row in data["rows"] if row["status"] != "no eager run"]
    runs = [r for r in rows if r["status"] in RAN]
    right = [r for r in rows if _judged(r).startswith("Right")]
    rest = len(rows) - len(right)
    count = {
        s: sum(r["status"] == s for r in rows) for s in dict.fromkeys(r["status"] for r in rows)
    }
    lines = [
        "# Models that can be captured",
        "",
        f"{len(rows)} small models, AdamW, float64, placed at random on two CPU devices of which "
        f"one is {SLOWER} times slower, {STEPS} steps beside eager "
        f"(`experiments/models.py`, seed {SEED}, commits {_commits(rows)}, torch "
        f"{data['provenance']['torch']}, {_libraries(data)}).",
        "",
        f"{len(runs)} run: {', '.join(f'{n} {s}' for s, n in count.items() if n)}. "
        f"{len(right)} are rightly refused; of the other {rest}, "
        f"{100 * len(runs) / max(1, rest):.1f} % run. A capture takes "
        f"{_median_ms_per_op(runs):.2f} ms of CPU per op, in the median over models.",
        "",
        *([data["note"], ""] if data["note"] else []),
        "| model | what | why | judged |",
        "|---|---|---|---|",
    ]
    for row in rows:
        if row not in runs:
            why = row.get("why") or f"error {row.get('error', 0):.1e}"
            lines.append(
                f"| {row['name']} | {row['status']} | {why.replace('|', '/')} | {_judged(row)} |"
            )
    lines += [
        "",
        "| model | ops | capture, s of CPU | result | largest relative error |",
        "|---|---|---|---|---|",
    ]
    for row in runs:
        error = f"{row['error']:.1e}" if row.get("error") else "0" if "error" in row else "-"
        lines.append(
            f"| {row['name']} | {row['ops']} | {row.get('capture_cpu_s', '-')} | {row['status']} "
            f"| {error} |"
        )
    return "\n".join(lines) + "\n"


def _median_ms_per_op(runs: list[dict[str, Any]]) -> float:
    timed = [row for row in runs if "capture_cpu_s" in row]
    return statistics.median(1e3 * row["capture_cpu_s"] / row["ops"] for row in timed)


def _judged(row: dict[str, Any]) -> str:
    """Whether a model is rightly refused, and why; else that it is to be done."""
    return RIGHT.get(row["name"], "To be done") if row["status"] == "refused" else "To be done"


def _commits(rows: list[dict[str, Any]]) -> str:
    """Each commit with its number of rows."""
    counts = Counter(row["commit"] for row in rows)
    return ", ".join(f"{commit} ({count} rows)" for commit, count in counts.items())


def _libraries(data: dict[str, Any]) -> str:
    return ", ".join(f"{name} {number}" for name, number in data["libraries"].items())


def main() -> None:
    """Run all models; results are written after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--again", action="store_true", help="keep rows that ran, run the others")
    parser.add_argument("--jobs", type=int, default=1, help="models at once")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--note", default="")
    options = parser.parse_args()
    multiprocessing.get_context("forkserver").set_forkserver_preload(["zoo.loaded"])
    from zoo import cases

    libraries = {}
    for library in ("transformers", "torchvision", "timm"):
        try:
            libraries[library] = version(library)
        except PackageNotFoundError:
            continue
    made, wanted = provenance(), tuple(options.only.split(","))
    rows = {}
    if options.again:
        kept = json.loads((RESULTS / "models.json").read_text())["rows"]
        rows = {row["name"]: row for row in kept}
    todo = [
        name
        for name in cases()
        if name.startswith(wanted) and rows.get(name, {}).get("status") not in RAN
    ]
    pool = ThreadPoolExecutor(options.jobs)
    running = {pool.submit(child, name, options.seconds): name for name in todo}
    for done in as_completed(running):
        name = running[done]
        rows[name] = done.result() | {"commit": made["commit"]}
        print(name, rows[name]["status"], rows[name].get("why", ""), flush=True)
        data = {
            "provenance": made,
            "libraries": libraries,
            "seed": SEED,
            "steps": STEPS,
            "note": options.note,
            "rows": [rows[name] for name in cases() if name in rows],
        }
        write("models", data)
        (RESULTS / "models.md").write_text(table(data))


if __name__ == "__main__":
    main()
