"""Rows end in a result or a reason, within their limits."""

from __future__ import annotations

import json
import os
import textwrap
import time
from pathlib import Path

import pytest
from experiments.gpu.timing import GpuLock
from experiments.gpu.training import Settings

from experiments.gpu import rows

SMALL = Settings("rnnlm", size="small", device="cpu", seconds=0.2, steps=3)


@pytest.mark.slow
def test_a_row_has_its_settings_and_figures(tmp_path: Path) -> None:
    """An eager row of a small model is measured in a child and written as JSON."""
    out = tmp_path / "row.json"
    row = rows.run_row("experiments.gpu.eager", SMALL, out)
    assert row["status"] == "ok", row
    assert row["step_ms"] > 0
    assert (row["row"], row["workload"], row["torch"] != "") == ("eager", "rnnlm", True)
    assert json.loads(out.read_text()) == row
    assert [file.name for file in tmp_path.iterdir()] == ["row.json"]


@pytest.mark.slow
def test_an_unknown_workload_is_a_reason_not_a_crash(tmp_path: Path) -> None:
    """A child that raises gives a failed row with the error's first line."""
    settings = Settings("rnnml", device="cpu")
    row = rows.run_row("experiments.gpu.eager", settings, tmp_path / "row.json")
    assert row["status"] == "failed"
    assert "Unknown workload 'rnnml'" in row["reason"]


@pytest.fixture
def slow_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A row module that reports one result, starts a child of its own, and compiles for ever."""
    code = """
        import subprocess, sys, time
        from pathlib import Path
        from experiments.gpu import rows

        def measure(settings, progress, options):
            sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(6000)"])
            Path(options.out).with_name("pid").write_text(str(sleeper.pid))
            if settings.layers == 1:
                progress.write({"status": "ok", "step_ms": 1.0})
            if settings.layers == 2:
                progress.write({"status": "ok", "rows": [{"row": "ddp", "status": "ok"}]})
            progress.phase("compile")
            time.sleep(6000)

        if __name__ == "__main__":
            rows.main("slow_row", measure)
    """
    (tmp_path / "slow_row.py").write_text(textwrap.dedent(code))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "slow_row"


def is_alive(pid: int) -> bool:
    """Whether a process runs; a dead one that nobody has waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize("layers", [None, 1])
@pytest.mark.slow
def test_a_compiler_that_takes_too_long_is_ended(
    tmp_path: Path, slow_module: str, layers: int | None
) -> None:
    """Its row says so, keeps what was measured before, and no process is left."""
    out = tmp_path / "row.json"
    settings = Settings("rnnlm", device="cpu", layers=layers)
    begin = time.monotonic()
    row = rows.run_row(slow_module, settings, out, limits_s={**rows.LIMITS_S, "compile": 0.5})
    assert time.monotonic() - begin < 3000
    key = "unfinished" if layers else "reason"
    assert row[key] == "did not compile within 0 s"
    assert row["status"] == ("ok" if layers else "failed")
    deadline = time.monotonic() + 60
    pid = int((tmp_path / "pid").read_text())
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(pid)


@pytest.mark.slow
def test_a_group_that_is_ended_keeps_its_finished_rows(tmp_path: Path, slow_module: str) -> None:
    """The rows measured so far stay, and one more says why the rest is missing."""
    settings = Settings("rnnlm", device="cpu", layers=2)
    limits_s = {**rows.LIMITS_S, "compile": 0.5}
    group = rows.run_row(slow_module, settings, tmp_path / "row.json", limits_s=limits_s)
    assert [row["row"] for row in group["rows"]] == ["ddp", "rest"]
    assert group["rows"][1]["reason"] == "did not compile within 0 s"


@pytest.mark.slow
def test_the_lock_lets_one_process_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the lock is held a row waits for it, and that is not counted as measuring."""
    monkeypatch.setenv("GPU_LOCK", str(tmp_path / "lock"))
    lock = GpuLock()
    lock.acquire()
    out, limits_s = tmp_path / "row.json", {**rows.LIMITS_S, "wait": 0.5}
    row = rows.run_row("experiments.gpu.eager", SMALL, out, limits_s=limits_s)
    assert row["reason"].startswith("phase 'wait'")
    lock.release()
    row = rows.run_row("experiments.gpu.eager", SMALL, out)
    assert row["status"] == "ok"
    assert os.environ["GPU_LOCK"]


def test_who_holds_the_lock_has_the_cores_meant_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """While it is held, and no longer."""
    own = os.sched_getaffinity(0)
    first = min(own)
    monkeypatch.setenv("GPU_LOCK", str(tmp_path / "lock"))
    monkeypatch.setenv("GPU_CORES", str(first))
    lock = GpuLock()
    lock.acquire()
    lock.acquire()
    assert os.sched_getaffinity(0) == {first}
    lock.release()
    assert os.sched_getaffinity(0) == own
