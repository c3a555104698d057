"""Rows measured by several processes, one per GPU, of one host.

One start of the processes measures many rows, one after another. If a row fails or hangs, its
processes are ended, the row is written down as failed, and the rest goes on in new ones.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from experiments.gpu.timing import peaks, reset_peaks, time_steps
from experiments.gpu.training import Settings, build, prepare_torch
from torch import Tensor

from devplace.workloads import Workload
from experiments.gpu import rows

# Row -> (module, keyword arguments of its `prepare`).
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp", {}),
    "ddp-compiled": ("ddp", {"compiled": True}),
    "ddp-graphs": ("ddp", {"compiled": True, "mode": "reduce-overhead"}),
    "fsdp": ("fsdp", {}),
    "fsdp-mixed": ("fsdp", {"mixed": True}),
    "fsdp-compiled": ("fsdp", {"compiled": True}),
    "fsdp-mixed-compiled": ("fsdp", {"mixed": True, "compiled": True}),
    "1f1b-4": ("pipelining", {"schedule": "1f1b", "micro_batches": 4}),
    "1f1b-8": ("pipelining", {"schedule": "1f1b", "micro_batches": 8}),
    "1f1b-2-compiled": ("pipelining", {"schedule": "1f1b", "micro_batches": 2, "compiled": True}),
    "1f1b-4-compiled": ("pipelining", {"schedule": "1f1b", "micro_batches": 4, "compiled": True}),
    "1f1b-8-compiled": ("pipelining", {"schedule": "1f1b", "micro_batches": 8, "compiled": True}),
    "zero-bubble-4": ("pipelining", {"schedule": "zero-bubble", "micro_batches": 4}),
    "zero-bubble-8": ("pipelining", {"schedule": "zero-bubble", "micro_batches": 8}),
    "zbv-4": ("pipelining", {"schedule": "zbv", "micro_batches": 4}),
    "zbv-8": ("pipelining", {"schedule": "zbv", "micro_batches": 8}),
}
TIMEOUT_S = 600
"""Of a collective: a process may have to wait while another compiles."""


class Group:
    """One process's view of the group.

    Attributes:
        settings: What is trained.
        rank: This process, `0 .. world-1`.
        world: Processes.
        device: This process's device.
    """

    def __init__(self, settings: Settings, rank: int, world: int, out: Path) -> None:
        self.settings = settings
        self.rank = rank
        self.world = world
        self.device = torch.device("cpu")
        if settings.device_type == "cuda":
            self.device = torch.device("cuda", rank)
        self._progress = rows.Progress(out)
        self._workload = build(settings, "cpu")
        self._hosts = dist.new_group(backend="gloo")

    def workload(self) -> Workload:
        """A fresh copy of the workload, on the CPU; the same in every process."""
        fresh = copy.deepcopy(self._workload.model)
        return Workload(self._workload.name, fresh, self._workload.inputs, self._workload.loss_fn)

    def phase(self, name: str) -> None:
        """Begin a phase in all processes."""
        dist.barrier(group=self._hosts)
        if self.rank == 0:
            self._progress.phase(name)

    def acquire(self) -> None:
        """Wait until all processes are here and the GPUs are free for measuring."""
        dist.barrier(group=self._hosts)
        if self.rank == 0:
            self._progress.acquire()
        dist.barrier(group=self._hosts)

    def release(self) -> None:
        """Let others measure once all processes have finished."""
        dist.barrier(group=self._hosts)
        if self.rank == 0:
            self._progress.release()

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, by rank."""
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self._hosts)
        return values


def measure_row(group: Group, name: str) -> dict[str, Any]:
    """Prepare and time one row; the same result in all processes."""
    module, arguments = ROWS[name]
    prepare: Callable[..., Callable[[], Tensor]] = importlib.import_module(
        f"experiments.gpu.{module}"
    ).prepare
    settings = group.settings
    compile_s: list[float] = []
    begin = time.perf_counter()

    def ready() -> None:
        compile_s.append(round(time.perf_counter() - begin, 1))
        group.acquire()

    if arguments.get("compiled"):
        group.phase("compile")
        if module == "ddp":
            step = prepare(group, before_run=ready, **arguments)
        else:  # processes wait for each other between compiling parts
            step = prepare(group, **arguments)
            step()
            ready()
    else:
        group.acquire()
        step = prepare(group, **arguments)
    reset_peaks([group.device])
    times = time_steps(step, [group.device], settings.seconds, settings.steps, fixed=True)
    mine = times | peaks([group.device])
    group.release()
    return combined(group.gather(mine)) | ({"compile_s": compile_s[0]} if compile_s else {})


def combined(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Rank 0's times, the mean loss of the ranks that have one, and every rank's peaks."""
    row = dict(results[0])
    for name in ("first_loss", "last_loss"):
        losses = [result[name] for result in results if not math.isnan(result[name])]
        row[name] = sum(losses) / len(losses)
    for name in ("peak_bytes", "reserved_bytes"):
        row[name] = [value for result in results for value in result[name]]
    return row


def work(rank: int, settings: Settings, names: list[str], meeting: str, out: Path) -> None:
    """One process: measure the rows in order; rank 0 adds each to a file of JSON lines."""
    prepare_torch(settings, rank)
    is_cuda = settings.device_type == "cuda"
    if is_cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=settings.gpus,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    if is_cuda:
        dist.all_reduce(torch.zeros(1, device="cuda"))  # all meet before the first pair does
    group = Group(settings, rank, settings.gpus, out)
    for name in names:
        group.phase("start")
        row = measure_row(group, name)
        if rank == 0:
            text = lines_file(out).read_text() + json.dumps({"row": name, "status": "ok", **row})
            rows.write_atomically(lines_file(out), text + "\n")
        torch._dynamo.reset()
        gc.collect()
        if is_cuda:
            torch.cuda.empty_cache()
    group.phase("start")
    dist.destroy_process_group()


def lines_file(out: Path) -> Path:
    """The file of finished rows beside a result."""
    return out.with_name(out.name + ".lines")


def measure_rows(
    settings: Settings, progress: rows.Progress, names: list[str], out: Path, compile_limit: float
) -> list[dict[str, Any]]:
    """Measure rows in groups of processes until each has a result or a reason why not."""
    inner = out.with_name(out.name + ".group")
    limits_s = {**rows.LIMITS_S, "compile": compile_limit}
    done: list[dict[str, Any]] = []
    head = rows.provenance(settings.device_type)
    while len(done) < len(names):
        lines_file(inner).write_text("")
        before = done

        def save(before: list[dict[str, Any]] = before) -> list[dict[str, Any]]:
            lines = lines_file(inner).read_text().splitlines()
            now = before + [json.loads(line) for line in lines]
            progress.write({"status": "ok", "rows": now} | head)
            return now

        reason = _run_group(settings, names[len(done) :], inner, limits_s, save)
        done = save()
        if len(done) < len(names):
            why = reason or "ended without a result"
            done.append({"row": names[len(done)], "status": "failed", "reason": why})
    for file in (lines_file(inner), rows.phase_file(inner)):
        file.unlink(missing_ok=True)
    return done


def _run_group(
    settings: Settings,
    names: list[str],
    inner: Path,
    limits_s: dict[str, float],
    save: Callable[[], Any],
) -> str | None:
    """Run one group of processes, saving as it goes; what ended it before its time, if anything."""
    rows.Progress(inner).phase("start")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (settings, names, str(Path(folder) / "meeting"), inner)
        context = mp.spawn(work, arguments, nprocs=settings.gpus, join=False)
        try:
            while not context.join(timeout=0.2):
                save()
                reason = rows.overdue(rows.phase_file(inner), limits_s)
                if reason is not None:
                    return reason
        except mp.ProcessRaisedException as error:
            print(error, flush=True)
            return str(error).strip().splitlines()[-1][:300]
        except mp.ProcessExitedException as error:
            return rows.first_line(error)
        finally:
            for process in context.processes:
                process.kill()
                process.join()
    return None


def add_options(parser: argparse.ArgumentParser) -> None:
    """The rows to measure."""
    parser.add_argument("--rows", default=",".join(ROWS), help="comma-separated names")


def measure(
    settings: Settings, progress: rows.Progress, options: argparse.Namespace
) -> dict[str, Any]:
    """All rows asked for, as a list under `rows`."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    progress.phase("session")
    names = options.rows.split(",")
    done = measure_rows(settings, progress, names, options.out, options.compile_limit)
    return {"rows": done}


def main_of(module: str, choices: list[str]) -> None:
    """Command line of a module that has some of the rows."""

    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--rows", default=",".join(choices), help="comma-separated names")

    rows.main(module, measure, add)


if __name__ == "__main__":
    rows.main("experiments.gpu.group", measure, add_options)
