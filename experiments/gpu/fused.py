"""Fused steps beside torch.compile, and on two GPUs beside DDP, FSDP2 and pipelines of compiled
parts: each row by each peer in a process of its own, which has the GPUs alone when it is timed.

Every result is one line of JSON in FOLDER/fused.jsonl, written when it is there. A process that
takes too long is killed and costs only its own row. Those of one process are started at once, get
ready side by side, and are timed in turn; then come groups of processes, one after another, as all
do with --one-by-one. With --warm
nothing is timed: several processes at a time fill the compiler's caches (--cache), which a later
call finds.

Run: `python -m experiments.gpu.fused --out FOLDER [--rows bert-large-32,gpt-2-32,...]
[--peers fused,compile,autotune,ddp,fsdp,pipeline] [--gpus 1,2] [--limit 240] [--deadline 570]
[--budget 20s] [--variants 1] [--plain] [--warm] [--one-by-one] [--commit ID]`, then
`python experiments/fused_tables.py FOLDER`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from experiments.gpu.fused_rows import ROWS, TRIED, Row
from experiments.gpu.turns import Turns

from experiments.gpu import rows

MODES = {"compile": "reduce-overhead", "autotune": "max-autotune"}
PEERS = ("fused", "compile", "ddp", "fsdp", "pipeline", "autotune")  # in this order
MIN_S = 20.0
"""A row is not begun with less time than that."""
LOG_LINES = 12
TAKEN = (
    *("mode", "update", "updates_ms", "compile_s", "update_compile_s", "graphs", "graph_breaks"),
    *("cudagraph_skips", "peak_bytes", "reserved_bytes", "first_loss", "last_loss", "reason"),
    *("unfinished", "status", "us_by_kind", "kernels"),
)
"""What is kept of the rows of other experiments."""


@dataclass(frozen=True)
class Job:
    """One row by one peer: one process, or one group of them.

    Attributes:
        name: Of the row.
        peer: One of PEERS.
        gpus: GPUs it uses; ours on several also measures one.
    """

    name: str
    peer: str
    gpus: int

    @property
    def row(self) -> Row:
        """What is trained."""
        return ROWS[self.name]

    @property
    def tag(self) -> str:
        """Its name among files."""
        return f"{self.name}-{self.peer}"


def make_jobs(names: list[str], peers: list[str], counts: list[int]) -> list[Job]:
    """The jobs in their order: row by row, then those whose compiler tries much, then groups of
    processes."""
    jobs = []
    for name in names:
        several = max(counts)
        for peer in (peer for peer in PEERS if peer in peers):
            if peer == "fused":
                jobs.append(Job(name, peer, several))
            elif peer in MODES and 1 in counts:
                jobs.append(Job(name, peer, 1))
            elif peer in ROWS[name].peers and several > 1:
                jobs.append(Job(name, peer, several))
    return sorted(jobs, key=lambda job: (job.peer in TRIED, job.peer == "autotune"))


def figures(rounds_ms: list[float]) -> dict[str, Any]:
    """Milliseconds per step: median, least and most over rounds, and the range of the median."""
    middle = median(rounds_ms)
    return {
        "ms": round(middle, 4),
        "min_ms": round(min(rounds_ms), 4),
        "max_ms": round(max(rounds_ms), 4),
        "spread": round((max(rounds_ms) - min(rounds_ms)) / middle, 4),
        "rounds_ms": [round(each, 4) for each in rounds_ms],
    }


def run_compiled(job: Job, options: Any, folder: Path, limit_s: float) -> Iterator[dict[str, Any]]:
    """torch.compile on one GPU."""
    mode = ["--mode", MODES[job.peer], "--compile-limit", str(options.compile_limit)]
    mode += ["--kernels"] if options.kernels else []
    yield kept(job.peer, _measured("compiled", job, options, folder, mode, limit_s))


def run_group(job: Job, options: Any, folder: Path, limit_s: float) -> Iterator[dict[str, Any]]:
    """Several GPUs, a process for each: one result for every way tried."""
    names = ["--rows", ",".join(TRIED[job.peer][: options.variants])]
    names += ["--compile-limit", str(options.compile_limit)]
    found = _measured("group", job, options, folder, names, limit_s)
    for row in found.get("rows", [found]):
        yield kept(row["row"], row)


def _measured(
    module: str, job: Job, options: Any, folder: Path, extra: list[str], limit_s: float
) -> dict[str, Any]:
    limits_s = {**rows.LIMITS_S, "compile": options.compile_limit, "all": limit_s}
    settings = job.row.settings(options, job.gpus)
    out = folder / f"{job.tag}.json"
    row = rows.run_row(f"experiments.gpu.{module}", settings, out, extra, limits_s)
    log = out.with_name(out.name + ".log")
    return row | ({"log": tail(log)} if log.exists() else {})


def kept(peer: str, row: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a row of another experiment."""
    found = {key: row[key] for key in (*TAKEN, "log") if row.get(key) is not None}
    return {"peer": peer, **found, **(figures(row["rounds_ms"]) if "rounds_ms" in row else {})}


def run_ours(job: Job, options: Any, folder: Path, limit_s: float) -> Iterator[dict[str, Any]]:
    """Our step on one GPU and, where asked for, the fastest plan on several."""
    settings, tag = job.row.settings(options), job.tag
    asked = options.micro_batches or ",".join(map(str, job.row.micro_batches))
    counts = sorted({1, *map(int, asked.split(","))} if job.gpus > 1 else {1})
    command = [sys.executable, "-m", "experiments.gpu.plans", settings.workload, "--tag", tag]
    command += ["--micro-batches", ",".join(map(str, counts)), "--gpus", str(job.gpus)]
    for name in ("number_format", "size", "device", "batch", "layers", "optimizer"):
        value = getattr(settings, name)
        if value is not None:
            command += [f"--{name.replace('_', '-')}", str(value)]
    command += ["--budget", options.budget, "--seconds", str(options.seconds / 2)]
    command += ["--out", str(folder)] + ([] if options.plain else ["--fuse"])
    command += ["--no-expert"] + (["--warm"] if options.warm else [])
    command += ["--kernels"] if options.kernels else []
    reason = run_within(command, folder / f"{tag}.log", limit_s)
    written = folder / f"{tag}.json"
    found = json.loads(written.read_text()) if written.exists() else {"rows": [], "captures": []}
    yield from ours(found, "plain" if options.plain else "fused", job.gpus, reason, options.warm)
    if reason is not None:
        print("\n".join(tail(folder / f"{tag}.log")), flush=True)


def ours(
    found: dict[str, Any], peer: str, gpus: int, reason: str | None, warm: bool = False
) -> Iterator[dict[str, Any]]:
    """Results of a file of `experiments.gpu.plans`: on one GPU, and the best on several."""
    seconds = {str(c["micro_batches"]): c["seconds"] for c in found["captures"]}
    why = {} if reason is None else {"reason": reason}
    errors = [row["error"] for row in found["rows"] if "error" in row]
    why |= {"errors": errors} if errors else {}
    ran = [row for row in found["rows"] if "measured_ns" in row]
    alone = [r for r in ran if r["gpus"] == 1 and r["micro_batches"] == 1]
    several = best_of(r for r in ran if r["gpus"] > 1 and r["name"] != "layers")
    for name, count, chosen in (
        (peer, 1, alone[0] if alone else None),
        (f"{peer}-{gpus}", gpus, several),
    ):
        if name != peer and gpus == 1:
            return
        head = {"peer": name, "gpus": count, "seconds": seconds, **why}
        if chosen is None:
            yield head | {"status": "ok" if warm and reason is None else "failed"}
            continue
        yield head | of_plan(chosen) | {"plans": [plan_line(r) for r in ran if r["gpus"] == count]}


def best_of(found: Any) -> dict[str, Any] | None:
    """The fastest plan over numbers of micro-batches: of each the one that was measured again,
    if there is one, for the least of several times is too small."""
    by_count: dict[int, list[dict[str, Any]]] = {}
    for row in found:
        by_count.setdefault(row["micro_batches"], []).append(row)
    tops = []
    for group in by_count.values():
        again = [row for row in group if row["name"] == "confirmed"]
        tops.append(min(again or group, key=lambda row: row["measured_ns"]))
    return min(tops, key=lambda row: row["measured_ns"]) if tops else None


def of_plan(row: dict[str, Any]) -> dict[str, Any]:
    """The figures of a plan that ran."""
    return {
        "status": "ok",
        **figures([each / 1e6 for each in row["round_ns"]]),
        "predicted_ms": round(row["predicted_ns"] / 1e6, 4),
        "plan": row["name"],
        "micro_batches": row["micro_batches"],
        "mode": row["mode"],
        "reserved_bytes": list(row["peak"].values()),
        "predicted_peak_bytes": row["predicted_peak"],
        "compile_s": round(row.get("seconds", 0.0), 1),
        **{key: row[key] for key in ("us_by_kind", "kernels") if key in row},
    }


def plan_line(row: dict[str, Any]) -> dict[str, Any]:
    """A plan that was tried."""
    return {
        "plan": row["name"],
        "micro_batches": row["micro_batches"],
        "predicted_ms": round(row["predicted_ns"] / 1e6, 3),
        "ms": round(row["measured_ns"] / 1e6, 3),
    }


def run_within(command: list[str], log: Path, limit_s: float) -> str | None:
    """Run a command, and kill it and all that it started when time is up; what went wrong."""
    with rows.cache_folder() as cache, log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=rows.ROOT,
            env=rows.child_environment(cache, None, log.stem),
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"killed after {limit_s:.0f} s"
        finally:
            rows.end(process)
    return None if code == 0 else f"ended with code {code}: {''.join(tail(log)[-1:])}"


def tail(log: Path) -> list[str]:
    """The last lines of a log."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return [line[:300] for line in lines[-LOG_LINES:]]


class Results:
    """Lines of JSON, each on the disk when it is added."""

    def __init__(self, out: Path, head: dict[str, Any]) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._path = out / "fused.jsonl"
        self._head = head
        self._lock = threading.Lock()
        self._begin = time.perf_counter()

    def add(self, job: Job, result: dict[str, Any]) -> None:
        """Write one result and say it in a line."""
        about = {"row": job.name, **asdict(job.row), "gpus": job.gpus}
        for unimportant in ("micro_batches", "peers"):
            del about[unimportant]
        line = json.dumps(about | result | self._head)
        with self._lock, self._path.open("a") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
        what = f"{result['ms']:8.3f} ms" if "ms" in result else result.get("reason", "no time")
        seconds = time.perf_counter() - self._begin
        print(f"{seconds:6.1f} s  {job.name:14} {result['peer']:20} {what}", flush=True)


def run_job(job: Job, results: Results, options: Any, folder: Path, end: float) -> None:
    """Run one job within what is left of the time; never raises for one that fails."""
    left = end - time.monotonic()
    if left < MIN_S:
        print(f"{job.name} {job.peer}: not begun, {left:.0f} s left", flush=True)
        return
    run = run_ours if job.peer == "fused" else run_compiled if job.peer in MODES else run_group
    begin = time.perf_counter()
    try:
        limit_s = min(left, options.limit) if options.warm or options.one_by_one else left
        for result in run(job, options, folder, limit_s):
            spent = round(time.perf_counter() - begin, 1)
            results.add(job, result | {"seconds_in_all": spent})
    except Exception as error:
        reason = rows.first_line(error)
        results.add(job, {"peer": job.peer, "status": "failed", "reason": reason})


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--gpus", default="1")
    parser.add_argument("--seconds", type=float, default=2.0, help="of the steps of a result")
    parser.add_argument("--steps", type=int, default=50, help="measured at most")
    parser.add_argument("--budget", default="20s", help="of each search of ours")
    parser.add_argument("--micro-batches", help="that ours tries on several GPUs; default: row's")
    parser.add_argument("--variants", type=int, help="of each peer on several GPUs; default: all")
    parser.add_argument("--plain", action="store_true", help="ours without fusing")
    parser.add_argument("--warm", action="store_true", help="fill the compiler's caches only")
    parser.add_argument("--workers", type=int, default=4, help="processes at a time, with --warm")
    parser.add_argument("--kernels", action="store_true", help="on one GPU time every kernel, too")
    parser.add_argument("--one-by-one", action="store_true", help="no job beside another's")
    parser.add_argument("--ready", type=float, default=240.0, help="turns begin at the latest, s")
    parser.add_argument("--turn", type=float, default=120.0, help="of the GPUs, at most, s")
    parser.add_argument("--cache", help="folder of the compiler's caches; default: empty ones")
    parser.add_argument("--limit", type=float, default=240.0, help="of one process, s")
    parser.add_argument("--compile-limit", type=float, default=200.0, help="s")
    parser.add_argument("--deadline", type=float, default=570.0, help="of everything, s")
    parser.add_argument("--commit", help="default: COMMIT of the environment, or git's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", choices=("full", "small"), default="full")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args()
    for given, known in ((options.rows, ROWS), (options.peers, PEERS)):
        if unknown := set(given.split(",")) - set(known):
            parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    if options.warm:
        options.seconds, options.steps = 0.01, 2
    return options


def set_environment(options: argparse.Namespace, folder: Path, at_once: int) -> None:
    """What the processes find in their environment."""
    threads = max(2, len(os.sched_getaffinity(0)) // at_once)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
    os.environ.setdefault("GPU_LOCK", str(folder / "gpu.lock"))
    if options.cache:
        os.environ["COMPILE_CACHE"] = options.cache
    if options.commit:
        os.environ["COMMIT"] = options.commit


def run_in_turn(
    jobs: list[Job],
    submit: Callable[[Job], Future[None]],
    options: argparse.Namespace,
    folder: Path,
) -> None:
    """All get ready side by side, and have the GPUs in turn."""
    os.environ["GPU_TURNS"] = str(folder)
    running = {job.tag: submit(job) for job in jobs}
    turns = Turns(folder, [*running], lambda tag: running[tag].done(), options.turn)
    turns.give(options.ready)
    del os.environ["GPU_TURNS"]


def main() -> None:
    """Run all jobs: at once and timed in turn, one after another, or several to warm up. Groups of
    processes always run one after another: getting ready they wait for each other on the GPUs."""
    options = parse()
    end = time.monotonic() + options.deadline
    counts = [int(count) for count in options.gpus.split(",")]
    jobs = make_jobs(options.rows.split(","), options.peers.split(","), counts)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        single = [job for job in jobs if job.peer not in TRIED]
        in_turn = not (options.warm or options.one_by_one or not single)
        at_once = options.workers if options.warm else len(single) if in_turn else 1
        set_environment(options, folder, at_once)
        head = rows.provenance(options.device.partition(":")[0])
        head |= {"seed": options.seed, "pass": "warm" if options.warm else "time"}
        head |= {"caches": "kept" if options.cache else "empty"}
        results = Results(options.out, head)

        def run(job: Job) -> None:
            run_job(job, results, options, folder, end)

        if in_turn:
            with ThreadPoolExecutor(at_once) as pool:
                run_in_turn(single, lambda job: pool.submit(run, job), options, folder)
            jobs = [job for job in jobs if job.peer in TRIED]
        with ThreadPoolExecutor(options.workers if options.warm else 1) as pool:
            list(pool.map(run, jobs))


if __name__ == "__main__":
    main()
