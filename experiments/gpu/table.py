"""Both tables on this machine in one run: our plans, then what others do.

All processes plan at once, each on cores of its own; then one after another measures, with cores
that nothing else uses and no search beside it (GPU_LOCK, GPU_CORES). Groups of processes (DDP,
FSDP2, pipelines) and the rows of one GPU follow. What is measured is written at once.

Run: `python -m experiments.gpu.table --out FOLDER [--gpus 2,4] [--parts plans,groups,others]
[--deadline 3600]`, then `experiments.gpu.predict` and `experiments.gpu.collect`.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from experiments.gpu.baselines import BF16_WORKLOADS, GLOBAL_BATCH, WORKLOADS

MICRO_BATCHES = (1, 4, 8)
CORES_PER_GPU = 2  # of the process that measures: a thread feeds each GPU
# Steps of many ops get twice the cores: with two cores and as many processes beside it, a search
# on GNMT-4 tried 39,000 placements in 30 s, with four and one process beside it 299,000.
LARGE = ("nmt-4", "nmt-8", "gnmt-4", "bert12-4", "table2-bert-large-4", "table2-bert-large-8")
PARTS = {
    "groups": ("--tables", "2", "--kinds", "group", "--workers", "1"),
    "others": ("--kinds", "compiled,eager,lstm,device_map"),
}


def steps(counts: Sequence[int]) -> dict[str, list[str]]:
    """Name of a process -> arguments of `experiments.gpu.plans`. A step's undivided batch comes
    first by name: it is what the others are compared with."""
    all_counts, most = ",".join(map(str, counts)), str(max(counts))
    found = {}
    for name in WORKLOADS:
        best = "5" if name == "nmt-4" else "1"
        found[name] = [name, "--gpus", all_counts, "--best", best]
    for name in ("rnnlm", "nmt-4", "gnmt-4"):
        found[f"{name}-stacked"] = [*found[name][:-1], "1", "--stack-gradients"]
    for name in BF16_WORKLOADS:
        bf16 = [name, "--number-format", "bf16", "--best", "1"]
        found[f"{name}-bf16"] = [*bf16, "--gpus", all_counts]
        for count in MICRO_BATCHES:
            batch = ["--batch", str(GLOBAL_BATCH), "--micro-batches", str(count)]
            found[f"table2-{name}-{count}"] = [*bf16, *batch, "--gpus", most]
    for count in (1, 4):
        batch = ["--layers", "12", "--batch", "32", "--micro-batches", str(count)]
        found[f"bert12-{count}"] = ["bert-large", *batch, "--gpus", all_counts, "--best", "1"]
    return found


def core_sets(cores: Sequence[int], num_gpus: int, shares: Sequence[int]) -> Iterator[list[int]]:
    """Cores for measuring, then those of each process by its share; where there are too few for
    that, processes have some in common."""
    kept = min(CORES_PER_GPU * num_gpus, max(1, len(cores) // 2))
    yield list(cores[:kept])
    rest = cores[kept:] or cores
    unit, at = max(1, len(rest) // sum(shares)), 0
    for share in shares:
        yield sorted({rest[(at + k) % len(rest)] for k in range(unit * share)})
        at += unit * share


def run_plans(out: Path, counts: Sequence[int], budget: str, seconds: float, end: float) -> None:
    """Start all processes and wait for them, or end them when time is up."""
    todo = steps(counts)
    cores = sorted(os.sched_getaffinity(0))
    shares = [2 if name in LARGE else 1 for name in todo]
    measuring, *own = core_sets(cores, max(counts), shares)
    environment = {
        **os.environ,
        "GPU_LOCK": str(out / "gpu.lock"),
        "GPU_CORES": ",".join(map(str, measuring)),
        "OMP_NUM_THREADS": "2",
    }
    common = ["--budget", budget, "--seconds", str(seconds), "--together", str(len(todo))]
    for stale in out.glob("*.planned"):
        stale.unlink()
    processes = []
    for (tag, arguments), mine in zip(todo.items(), own, strict=True):
        command = [sys.executable, "-m", "experiments.gpu.plans", *arguments, *common]
        with (out / f"{tag}.log").open("w") as log:
            process = subprocess.Popen(
                [*command, "--tag", tag, "--out", str(out)],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        with suppress(ProcessLookupError):
            os.sched_setaffinity(process.pid, mine)
        processes.append(process)
    for process in processes:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run_others(part: str, out: Path, counts: Sequence[int], seconds: float, end: float) -> None:
    """Rows of `experiments.gpu.baselines`, which keeps to the time itself."""
    left = end - time.monotonic()
    if left <= 0:
        print(f"{part}: no time left", flush=True)
        return
    gpus = ",".join(map(str, counts))
    arguments = [*PARTS[part], "--gpus", gpus, "--seconds", str(seconds), "--deadline", str(left)]
    command = [sys.executable, "-m", "experiments.gpu.baselines", *arguments]
    subprocess.run([*command, "--out", str(out / f"{part}.baselines")], check=False)


def main() -> None:
    """Run the parts asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", default="2,4")
    parser.add_argument("--parts", default="plans,groups,others")
    parser.add_argument("--budget", default="60s", help="of each search, as of parallelize")
    parser.add_argument("--seconds", type=float, default=0.6, help="of each measurement of a plan")
    parser.add_argument("--deadline", type=float, default=3600.0, help="of everything, s")
    options = parser.parse_args()
    end = time.monotonic() + options.deadline
    counts = [int(count) for count in options.gpus.split(",")]
    options.out.mkdir(parents=True, exist_ok=True)
    for part in options.parts.split(","):
        if part == "plans":
            run_plans(options.out, counts, options.budget, options.seconds, end)
        else:
            run_others(part, options.out, counts, max(1.5, options.seconds), end)
        left = end - time.monotonic()
        print(f"{part}: through, {left:.0f} s left", flush=True)


if __name__ == "__main__":
    main()
