"""One row of a table: measured in a child process with a time limit for each phase.

The child says which phase it is in (a small file beside its result), so that waiting for the GPUs
does not count as compiling, and a compiler that takes too long is ended, not waited for.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import importlib
import json
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments.gpu.timing import GpuLock
from experiments.gpu.training import FORMATS, OPTIMIZERS, Settings

LIMITS_S: Mapping[str, float] = {
    "start": 120.0,
    "compile": 300.0,
    "wait": 1800.0,
    "measure": 150.0,  # Inception-V3 compiled: a first step of more than 60 s
    "optimizer": 90.0,
    "session": 900.0,  # of a group of processes, which keeps the other limits itself
}
COMPILE_THREADS = 4
END_S = 20.0
ROOT = Path(__file__).parent.parent.parent


class Progress:
    """Where a row stands, told to the process that watches it."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._lock = GpuLock()

    def phase(self, name: str) -> None:
        """Begin a phase, one of LIMITS_S."""
        write_atomically(phase_file(self._out), f"{name} {time.time()}")

    def acquire(self) -> None:
        """Wait for the GPUs, then measure."""
        self.phase("wait")
        self._lock.acquire()
        self.phase("measure")

    def release(self) -> None:
        """Let others use the GPUs."""
        self._lock.release()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Use the GPUs alone, within whatever phase it is; nothing new where they are held."""
        if self._lock.is_held:
            yield
            return
        self._lock.acquire(is_ready=False)
        try:
            yield
        finally:
            self._lock.release()

    def write(self, data: Mapping[str, Any]) -> None:
        """Write the result; a later call replaces it."""
        write_atomically(self._out, json.dumps(data, indent=1) + "\n")


def phase_file(out: Path) -> Path:
    """The file with phase and time beside a result."""
    return out.with_name(out.name + ".phase")


def write_atomically(path: Path, text: str) -> None:
    """Write a file that a reader sees whole or not at all."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text)
    temporary.replace(path)


def first_line(error: BaseException) -> str:
    """Class and first line of an error."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


def provenance(device_type: str) -> dict[str, Any]:
    """Card, cores, versions and commit."""
    import torch

    is_cuda = device_type == "cuda"
    return {
        "card": torch.cuda.get_device_name(0) if is_cuda else "cpu",
        "cards": torch.cuda.device_count() if is_cuda else 0,
        "driver": _of_cards("driver_version") if is_cuda else None,
        "uuid": _of_cards("uuid") if is_cuda else None,
        "cores": len(os.sched_getaffinity(0)),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if is_cuda else None,
        "python": platform.python_version(),
        "commit": os.environ.get("COMMIT") or _commit(),
    }


def _of_cards(what: str) -> str | None:
    """What the driver's tool says of the first card, if it is there."""
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return next(iter(done.stdout.split()), None)


def _commit() -> str | None:
    """Commit of this checkout, if it is one."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def run_child(
    module: str,
    arguments: list[str],
    out: Path,
    limits_s: Mapping[str, float] = LIMITS_S,
    gpu: int | None = None,
) -> str | None:
    """Run `python -m module arguments --inside` to its end or to a limit.

    Returns:
        None if it ended well, otherwise what went wrong in one line; its output is beside `out`.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    for stale in (out, phase_file(out)):
        stale.unlink(missing_ok=True)
    Progress(out).phase("start")
    log = out.with_name(out.name + ".log")
    with cache_folder() as cache, log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments, "--out", str(out), "--inside"],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=ROOT,
            env=child_environment(cache, gpu, out.stem),
        )
        try:
            reason = _watch(process, phase_file(out), limits_s)
        finally:
            end(process)
            phase_file(out).unlink(missing_ok=True)
    if reason is None and process.returncode != 0:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        reason = f"ended with code {process.returncode}: {(lines or ['no output'])[-1][:300]}"
    if reason is None:
        log.unlink()
    return reason


@contextlib.contextmanager
def cache_folder() -> Iterator[str]:
    """Folder of the compiler's caches: empty, so that compile times are cold ones, and gone
    afterwards; or the one that COMPILE_CACHE names, which is kept."""
    kept = os.environ.get("COMPILE_CACHE")
    if kept:
        yield kept
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        yield cache


def child_environment(cache: str, gpu: int | None, name: str) -> dict[str, str]:
    """Few threads a process, the compiler's caches, and where turns are given, in the folder that
    GPU_TURNS names, this process's name there."""
    changes = {
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        ),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "4"),
        "TORCHINDUCTOR_COMPILE_THREADS": os.environ.get(
            "TORCHINDUCTOR_COMPILE_THREADS", str(COMPILE_THREADS)
        ),
        "TORCHINDUCTOR_CACHE_DIR": cache,
        "TRITON_CACHE_DIR": str(Path(cache) / "triton"),
    }
    if "GPU_TURNS" in os.environ:
        changes["GPU_TURN"] = str(Path(os.environ["GPU_TURNS"], name))
    if gpu is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        changes["CUDA_VISIBLE_DEVICES"] = visible.split(",")[gpu] if visible else str(gpu)
    return os.environ | changes


def _watch(process: Any, phases: Path, limits_s: Mapping[str, float]) -> str | None:
    """Wait for the end of a process or of a phase's time; what went wrong, if anything."""
    begin = time.monotonic()
    while process.poll() is None:
        time.sleep(0.1)
        if time.monotonic() - begin > limits_s.get("all", math.inf):
            return f"killed after {limits_s['all']:.0f} s"
        reason = overdue(phases, limits_s)
        if reason is not None:
            return reason
    return None


def overdue(phases: Path, limits_s: Mapping[str, float]) -> str | None:
    """What took too long, if the present phase has lasted longer than its limit."""
    name, _, since = phases.read_text().partition(" ")
    if time.time() - float(since) <= limits_s[name]:
        return None
    if name == "compile":
        return f"did not compile within {limits_s[name]:.0f} s"
    return f"phase {name!r} took more than {limits_s[name]:.0f} s"


def end(process: Any) -> None:
    """End a process and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # one that the system cannot end
        process.wait(END_S)


def free_memory(device_type: str) -> None:
    """Give the memory of what is no longer used back to the GPUs."""
    import torch

    gc.collect()
    if device_type == "cuda":
        torch.cuda.empty_cache()


def end_with_parent() -> None:
    """End this process when the one that watches it is gone."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def add_settings(parser: argparse.ArgumentParser) -> None:
    """The options that all rows share."""
    parser.add_argument("workload")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--number-format", choices=FORMATS, default="tf32")
    parser.add_argument("--size", choices=("full", "small"), default="full")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--dropout", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=Settings("").seconds)
    parser.add_argument("--steps", type=int, default=Settings("").steps)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    parser.add_argument("--compile-limit", type=float, default=LIMITS_S["compile"])
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)


def settings_of(options: argparse.Namespace) -> Settings:
    """The settings among parsed options."""
    names = [field.name for field in dataclasses.fields(Settings)]
    return Settings(**{name: getattr(options, name) for name in names})


def arguments_of(settings: Settings) -> list[str]:
    """The settings as command-line arguments, without those that are None."""
    arguments = [settings.workload]
    for field in dataclasses.fields(Settings):
        value = getattr(settings, field.name)
        if field.name != "workload" and value is not None:
            arguments += [f"--{field.name.replace('_', '-')}", str(value)]
    return arguments


def run_row(
    module: str,
    settings: Settings,
    out: Path,
    extra: list[str] | None = None,
    limits_s: Mapping[str, float] = LIMITS_S,
    gpu: int | None = None,
) -> dict[str, Any]:
    """Measure one row in a child process and write it, whatever happens to the child.

    Args:
        module: One of this package that has a `main`.
        settings: What is trained.
        out: Where the row goes.
        extra: Further arguments of the module.
        limits_s: Seconds for each phase, and `all` for everything.
        gpu: The only GPU that the child sees.

    Returns:
        The row: `row`, the settings, and either the figures with status `ok` or a `reason`.
    """
    name = module.rpartition(".")[2]
    head = {"row": name, **dataclasses.asdict(settings), "options": extra or []}
    begin = time.perf_counter()
    reason = run_child(module, [*arguments_of(settings), *(extra or [])], out, limits_s, gpu)
    row: dict[str, Any] = {"status": "failed"}
    if out.exists():
        row = json.loads(out.read_text())
    if reason is not None and "rows" in row:
        row["rows"].append({"row": "rest", "status": "failed", "reason": reason})
    elif reason is not None:
        # A row that is complete but for an extra keeps its figures.
        row |= {"unfinished": reason} if row["status"] == "ok" else {"reason": reason}
    row = head | row | {"seconds_in_all": round(time.perf_counter() - begin, 1)}
    Progress(out).write(row)
    return row


def main(
    module: str,
    measure: Callable[[Settings, Progress, argparse.Namespace], dict[str, Any]],
    add_options: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> None:
    """Command line of one row: watch a child, or be it."""
    parser = argparse.ArgumentParser(description=importlib.import_module(module).__doc__)
    add_settings(parser)
    add_options(parser)
    options = parser.parse_args()
    settings = settings_of(options)
    if options.inside:
        _measure_inside(measure, settings, options)
        return
    extra = extra_arguments(parser, options)
    limits_s = {**LIMITS_S, "compile": options.compile_limit}
    row = run_row(module, settings, options.out, extra, limits_s)
    print(json.dumps(row))


def extra_arguments(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[str]:
    """The options that a module has beside the shared ones, as given."""
    shared = {field.name for field in dataclasses.fields(Settings)}
    shared |= {"out", "inside", "compile_limit", "help"}
    extra: list[str] = []
    for action in parser._actions:
        value = getattr(options, action.dest, None)
        if action.dest in shared or value is None or value == action.default:
            continue
        extra += [action.option_strings[0]]
        extra += [] if value is True else [str(value)]
    return extra


def _measure_inside(
    measure: Callable[[Settings, Progress, argparse.Namespace], dict[str, Any]],
    settings: Settings,
    options: argparse.Namespace,
) -> None:
    """Be the child: measure and write; an error is a row too."""
    end_with_parent()
    progress = Progress(options.out)
    try:
        row = {"status": "ok", **measure(settings, progress, options)}
    except Exception as error:
        import traceback

        traceback.print_exc()
        row = {"status": "failed", "reason": first_line(error)}
    progress.write(row | provenance(settings.device_type))
    free_memory(settings.device_type)
    progress.release()
