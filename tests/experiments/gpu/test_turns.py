"""Processes get ready side by side and have turns alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from experiments.gpu.rows import ROOT
from experiments.gpu.timing import GpuLock
from experiments.gpu.turns import Turns

MEMBER = """
import sys, time
from pathlib import Path
from experiments.gpu.timing import GpuLock
from experiments.gpu.turns import Turns
name, ready_s, turns, turn_s = sys.argv[1], *map(float, sys.argv[2:5])
log, lock = Path("log"), GpuLock()
def note(what):
    with log.open("a") as file:
        file.write(f"{name} {what}\\n")
if ready_s < 0:
    lock.acquire(is_ready=False)
    note("tries")
    lock.release()
    ready_s = -ready_s
time.sleep(ready_s)
note("ready")
for _ in range(int(turns)):
    lock.acquire()
    note("begins")
    time.sleep(turn_s)
    note("ends")
    lock.release()
"""


def run(
    folder: Path, members: dict[str, tuple[float, int, float]], turn_s: float = 60.0
) -> list[str]:
    """Notes of members in the order they were made; name -> seconds to get ready (negative: after a
    short turn), turns, seconds of each."""
    running = {
        name: subprocess.Popen(
            [sys.executable, "-c", MEMBER, name, *map(str, about)],
            cwd=folder,
            env=os.environ | {"GPU_TURN": str(folder / name), "PYTHONPATH": str(ROOT)},
            start_new_session=True,
        )
        for name, about in members.items()
    }
    Turns(folder, [*members], lambda name: running[name].poll() is not None, turn_s).give(900.0)
    return (folder / "log").read_text().splitlines()


@pytest.mark.slow
def test_nobody_has_a_turn_before_all_are_ready_nor_beside_another(tmp_path: Path) -> None:
    """Two of a and one of b, however late the last one is ready."""
    notes = run(tmp_path, {"a": (0.0, 2, 0.1), "b": (0.5, 1, 0.1)})
    assert {notes[0], notes[1]} == {"a ready", "b ready"}
    begins, ends = notes[2::2], notes[3::2]
    assert [line.split()[1] for line in begins] == ["begins"] * 3
    assert [line.split()[0] for line in begins] == [line.split()[0] for line in ends]
    assert sorted(line.split()[0] for line in begins) == ["a", "a", "b"]


@pytest.mark.slow
def test_a_short_turn_is_given_while_others_get_ready(tmp_path: Path) -> None:
    """It does not mean that its process is ready."""
    notes = run(tmp_path, {"a": (0.0, 1, 0.0), "b": (-0.5, 1, 0.0)})
    assert notes.index("b tries") < notes.index("b ready") < notes.index("a begins")


@pytest.mark.slow
def test_a_turn_that_lasts_too_long_ends_with_its_process(tmp_path: Path) -> None:
    """The other one has its turn."""
    notes = run(tmp_path, {"a": (0.0, 1, 600.0), "b": (0.0, 1, 0.0)}, turn_s=10.0)
    assert "a begins" in notes
    assert "a ends" not in notes
    assert notes[-1] == "b ends"


def test_who_is_late_does_not_keep_the_others_waiting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Turns begin when the time is up, and it is said who was late."""
    late = subprocess.Popen(["sleep", "600"], start_new_session=True)
    (tmp_path / "a.wanted").write_text(f"{late.pid} ready")
    ended = {"b": False}

    def has_ended(name: str) -> bool:
        if name == "a" and (tmp_path / "a.given").exists():
            late.send_signal(signal.SIGKILL)
            late.wait()
            ended.update(a=True, b=True)
        return ended.get(name, False)

    Turns(tmp_path, ["a", "b"], has_ended, turn_s=60.0).give(ready_s=0.1)
    assert "not ready: b" in capsys.readouterr().out


def test_a_turn_counts_as_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has a turn asks for no second one."""
    monkeypatch.setenv("GPU_TURN", str(tmp_path / "a"))
    lock = GpuLock()
    (tmp_path / "a.given").touch()
    lock.acquire()
    assert lock.is_held
    (tmp_path / "a.wanted").unlink()
    lock.acquire()
    assert not (tmp_path / "a.wanted").exists()
    lock.release()
    assert not lock.is_held
    assert not (tmp_path / "a.given").exists()
