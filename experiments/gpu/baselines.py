"""All baseline rows of the two tables on this machine, in one go.

Rows run in child processes, several at a time, since compiling takes minutes; only one at a time
uses the GPUs (a lock). A row that fails or takes too long is written down with the reason. The
result file is rewritten after every row.

Run: `python -m experiments.gpu.baselines --out FILE [--tables 1,2] [--kinds eager,lstm]
[--workloads nmt-4,gpt-2] [--gpus 2,4] [--deadline 600]`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from experiments.gpu.training import Settings

from experiments.gpu import rows

LSTM_WORKLOADS = ("rnnlm", "nmt-2", "nmt-4", "nmt-8", "gnmt-4")
WORKLOADS = (*LSTM_WORKLOADS, "inception-v3", "resnet-50", "bert-large", "gpt-2")
BF16_WORKLOADS = ("bert-large", "gpt-2")
GLOBAL_BATCH = 32  # of the second table, samples per step over all GPUs
GROUP_ROWS = (
    "ddp,fsdp,fsdp-mixed,1f1b-4,1f1b-8,zero-bubble-4,zero-bubble-8,zbv-4,zbv-8"  # in this order
)
CORES_PER_ROW = 4
LOG_LINES = 25


@dataclasses.dataclass(frozen=True)
class Job:
    """One row, or one group of rows that share their processes.

    Attributes:
        table: 1 or 2.
        kind: Module of this package.
        settings: What is trained.
        extra: Further command-line arguments of the module.
    """

    table: int
    kind: str
    settings: Settings
    extra: tuple[str, ...] = ()

    @property
    def turn(self) -> int:
        """What compiles for minutes on the CPU starts first, what does so on all GPUs last."""
        return 0 if self.kind == "compiled" else 2 if "ddp-compiled" in self.extra else 1


def first_table(base: Settings, workloads: list[str], gpu_counts: list[int]) -> list[Job]:
    """Eager, compiled, fused LSTM and device map of every workload; the slowest first."""
    variants = [
        dataclasses.replace(base, workload=name, number_format=number_format)
        for name in workloads
        for number_format in ("tf32", "bf16")
        if number_format == "tf32" or name in BF16_WORKLOADS
    ]
    jobs = [Job(1, "compiled", settings) for settings in variants]
    jobs += [Job(1, "eager", settings) for settings in variants]
    jobs += [Job(1, "lstm", s) for s in variants if s.workload in LSTM_WORKLOADS]
    return jobs + [
        Job(1, "device_map", dataclasses.replace(settings, gpus=count))
        for settings in variants
        for count in gpu_counts
    ]


def second_table(base: Settings, workloads: list[str], num_gpus: int) -> list[Job]:
    """One GPU, data parallel and pipelines with the same global batch, in bf16."""
    jobs = []
    for name in (name for name in workloads if name in BF16_WORKLOADS):
        one = dataclasses.replace(
            base, workload=name, number_format="bf16", batch=base.batch or GLOBAL_BATCH
        )
        all_gpus = dataclasses.replace(one, gpus=num_gpus)
        jobs += [
            Job(2, "compiled", one),
            Job(2, "group", all_gpus, ("--rows", "ddp-compiled")),
            Job(2, "group", all_gpus, ("--rows", GROUP_ROWS)),
            Job(2, "eager", one),
        ]
    return jobs


class Results:
    """The rows so far, written after each."""

    def __init__(self, out: Path, head: dict[str, Any]) -> None:
        self._out = out
        self._head = head
        self._rows: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._begin = time.perf_counter()

    def add(self, job: Job, row: dict[str, Any], log: Path) -> None:
        """Add a job's rows, with the end of its output if it failed, and write all."""
        shared = {key: value for key, value in row.items() if key != "rows"}
        found = [shared | inner for inner in row["rows"]] if "rows" in row else [shared]
        if log.exists():
            lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
            found[-1] = found[-1] | {"log": lines}
        with self._lock:
            self._rows += [{"table": job.table, **one} for one in found]
            for one in found:
                print(self._line(one), flush=True)
            seconds = round(time.perf_counter() - self._begin, 1)
            self._out.parent.mkdir(parents=True, exist_ok=True)
            data = {**self._head, "seconds": seconds, "rows": self._rows}
            rows.write_atomically(self._out, json.dumps(data, indent=1) + "\n")

    def _line(self, row: dict[str, Any]) -> str:
        """A row in one line of text."""
        what = f"{row['step_ms']:.3f} ms" if "step_ms" in row else row.get("reason", "?")
        if "unfinished" in row:
            what += f" (then {row['unfinished']})"
        seconds = time.perf_counter() - self._begin
        return (
            f"{seconds:6.1f} s  {row['row']:14} {row['workload']:13} {row['number_format']} "
            f"x{row['gpus']}  {what}"
        )


def run_job(
    job: Job, results: Results, folder: Path, number: int, options: Any, end: float
) -> None:
    """Run one job within what is left of the time; never raises for a failing row."""
    out = folder / f"{number:03}-{job.kind}-{job.settings.workload}.json"
    left = end - time.monotonic()
    head = {"row": job.kind, **dataclasses.asdict(job.settings), "options": list(job.extra)}
    if left <= 0:
        results.add(job, head | {"status": "failed", "reason": "not started: no time left"}, out)
        return
    limits_s = {**rows.LIMITS_S, "compile": options.compile_limit, "all": left}
    extra = [*job.extra, "--compile-limit", str(options.compile_limit)]
    gpu = number % options.num_gpus if job.settings.gpus == 1 and options.num_gpus else None
    try:
        row = rows.run_row(f"experiments.gpu.{job.kind}", job.settings, out, extra, limits_s, gpu)
    except Exception as error:
        row = head | {"status": "failed", "reason": rows.first_line(error)}
    results.add(job, row, out.with_name(out.name + ".log"))


def make_jobs(options: argparse.Namespace) -> list[Job]:
    """The jobs asked for, in their turns."""
    base = Settings(
        "",
        size=options.size,
        device=options.device,
        batch=options.batch,
        layers=options.layers,
        seed=options.seed,
        seconds=options.seconds,
        steps=options.steps,
    )
    workloads = options.workloads.split(",")
    counts = [int(count) for count in options.gpus.split(",")] if options.gpus else []
    jobs = []
    if "1" in options.tables:
        jobs += first_table(base, workloads, counts)
    if "2" in options.tables and counts:
        jobs += second_table(base, workloads, max(counts))
    if options.kinds:
        jobs = [job for job in jobs if job.kind in options.kinds.split(",")]
    return sorted(jobs, key=lambda job: job.turn)


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    folder = Path(os.environ.get("OUT", "."))
    parser.add_argument("--out", type=Path, default=folder / "baselines.json")
    parser.add_argument("--tables", default="1,2")
    parser.add_argument("--kinds", help="eager, compiled, lstm, device_map, group; default all")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--gpus", help="of device maps; the largest is the second table's")
    parser.add_argument("--size", choices=("full", "small"), default="full")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=3.0, help="of the steps of a row")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--compile-limit", type=float, default=rows.LIMITS_S["compile"])
    parser.add_argument("--deadline", type=float, default=1800.0, help="of everything, s")
    parser.add_argument("--workers", type=int, help="rows at a time")
    options = parser.parse_args()
    import torch

    options.num_gpus = torch.cuda.device_count() if options.device.startswith("cuda") else 0
    if options.gpus is None:
        options.gpus = ",".join(str(count) for count in (2, 4) if count <= options.num_gpus)
    if options.workers is None:
        options.workers = max(2, len(os.sched_getaffinity(0)) // CORES_PER_ROW)
    return options


def main() -> None:
    """Run all jobs, several at a time."""
    options = parse()
    end = time.monotonic() + options.deadline
    jobs = make_jobs(options)
    head = rows.provenance(options.device.partition(":")[0])
    head["options"] = {key: str(value) for key, value in vars(options).items()}
    results = Results(options.out, head)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("GPU_LOCK", str(Path(folder) / "gpu.lock"))
        with ThreadPoolExecutor(options.workers) as pool:
            for number, job in enumerate(jobs):
                pool.submit(run_job, job, results, Path(folder), number, options, end)


if __name__ == "__main__":
    main()
