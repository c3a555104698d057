"""Commands that are killed while they write leave the old file or the new one, and go on from it
the next time. `DEVPLACE_KILLS=200`, or `make fuzz`, kills more often than here."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from devplace.cost.price_cache import TimingCache
from devplace.plan import load_plan
from tests.fuzz.test_fuzz_graphs import onnx_model
from tests.instances import files as instance_files

KILLS = int(os.environ.get("DEVPLACE_KILLS", "10"))
# Calls of the system, within writing a file, before which the process is killed.
SCRIPT = """
import os, signal, sys
left = [int(sys.argv.pop(1))]
def watched(call):
    def either(*arguments, **options):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **options)
    return either
for name in ("fsync", "replace"):
    setattr(os, name, watched(getattr(os, name)))
"""
CLI = SCRIPT + "from devplace.cli import main; main()"
CACHES = (
    SCRIPT
    + """
from pathlib import Path
from devplace.cost.price_cache import TimingCache
from devplace.kernels.store import KernelStore
from devplace.run.probe.kept_probe import keep_text
new, store = int(sys.argv[1]), KernelStore("here")
for number in range(20):
    TimingCache(Path("times.sqlite")).write("here", {"call": (new, new)})
    store.write("key", f"# {new}")
    keep_text("probe", {"a": "b"}, str(new))
"""
)
PLAN = ("net.onnx", "--machine", "cpux2", "--budget", "20ev")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and an instance."""
    path = tmp_path_factory.mktemp("kills")
    (path / "net.onnx").write_bytes(onnx_model())
    (path / "i.json").write_text(instance_files.tarnawski())
    return path


def started(folder: Path, script: str, point: int, *arguments: str) -> Any:
    """A process that is killed at its `point`-th call of interest; 0: never."""
    command = [sys.executable, "-c", script, str(point), *arguments]
    environment = {**os.environ, "DEVPLACE_CACHE": str(folder / "cache")}
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=folder, env=environment, text=True, **silent)


def check_plan(path: Path) -> None:
    """A whole plan."""
    assert load_plan(path).ops


def check_rows(path: Path) -> None:
    """All rows."""
    assert [row["status"] for row in json.loads(path.read_text())["rows"]] == ["optimal"]


def check_caches(path: Path) -> None:
    """A time that one of the processes wrote, with its seal."""
    cache = TimingCache(path)
    ((ns, workspace),) = cache.read("here", ["call"]).values()
    assert ns == workspace > 0
    assert cache.dropped == 0


CASES: dict[str, tuple[str, tuple[str, ...], str, Callable[[Path], None]]] = {
    "plan": (CLI, ("plan", *PLAN, "-o", "a.json"), "a.json", check_plan),
    "compare": (
        *(CLI, ("compare", *PLAN, "--placers", "single,heft", "-o", "b.json")),
        *("b.json", check_plan),
    ),
    "bench": (CLI, ("bench", "i.json", "--budget", "20s", "-o", "c.json"), "c.json", check_rows),
    "caches": (CACHES, (), "times.sqlite", check_caches),
    "checkpoint": (
        *(CLI, ("plan", *PLAN, "--placer", "post", "--log-dir", "runs", "--resume")),
        *("runs", lambda path: None),  # the next run takes it
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_a_kill_leaves_the_old_file_or_the_new_one(name: str, folder: Path) -> None:
    """Whenever it comes; nothing else is left after the next write."""
    script, arguments, output, check = CASES[name]
    seeds = ("--seed",) if name != "caches" else ()
    rng = random.Random(name)

    def run(point: int, seed: int) -> Any:
        return started(folder, script, point, *arguments, *seeds, str(seed))

    def finish(seed: int = 1) -> float:
        began = time.monotonic()
        whole = run(0, seed)
        said = whole.communicate()[1]
        assert whole.returncode == 0, said
        check(folder / output)
        return time.monotonic() - began

    seconds = finish()
    for kill in range(max(2, KILLS // len(CASES))):
        if kill % 2:
            killed = run(0, 2 + kill)
            time.sleep(rng.uniform(0, seconds))
            killed.send_signal(signal.SIGKILL)
        else:
            killed = run(1 + kill // 2 % 6, 2 + kill)
        killed.communicate()
        check(folder / output)
        if name == "checkpoint":
            finish(2 + kill)
    finish()
    left = [path.name for path in folder.rglob(".devplace-part-*")]
    assert left == []
