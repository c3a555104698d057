"""Turns on the GPUs: processes get ready side by side, then each uses the GPUs alone.

One process gives the turns. A process asks for its turn with a file, `NAME.wanted`, waits for
`NAME.given`, and ends its turn by removing that file or by its own end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

POLL_S = 0.02


class Turn:
    """The side of a process that wants the GPUs.

    Args:
        path: Folder and name that its files begin with.
    """

    def __init__(self, path: str) -> None:
        self._wanted, self._given = Path(path + ".wanted"), Path(path + ".given")

    def take(self) -> None:
        """Wait for a turn."""
        part = self._wanted.with_suffix(".part")
        part.write_text(str(os.getpid()))
        part.replace(self._wanted)
        while not self._given.exists():
            time.sleep(POLL_S)

    def end(self) -> None:
        """Let others have theirs."""
        self._given.unlink(missing_ok=True)


def give(
    folder: Path,
    names: Sequence[str],
    has_ended: Callable[[str], bool],
    ready_s: float,
    turn_s: float,
) -> None:
    """Give turns until all have ended: the first only once every process wants one.

    Args:
        folder: Where the files are.
        names: Of the processes; the first that wants a turn gets the next one.
        has_ended: Whether a process is through.
        ready_s: After so many seconds those that are ready do not wait for the others.
        turn_s: A process whose turn lasts longer is killed, with its process group.
    """
    begin = time.monotonic()

    def wants(name: str) -> bool:
        return (folder / f"{name}.wanted").exists()

    while time.monotonic() - begin < ready_s:
        if all(wants(name) or has_ended(name) for name in names):
            break
        time.sleep(POLL_S)
    late = [name for name in names if not wants(name) and not has_ended(name)]
    spent = time.monotonic() - begin
    print(f"{spent:6.1f} s  turns begin; not ready: {', '.join(late) or 'none'}", flush=True)
    while not all(map(has_ended, names)):
        name = next((n for n in names if wants(n) and not has_ended(n)), None)
        if name is None:
            time.sleep(POLL_S)
            continue
        _one_turn(folder, name, has_ended, turn_s)


def _one_turn(folder: Path, name: str, has_ended: Callable[[str], bool], turn_s: float) -> None:
    wanted, given = folder / f"{name}.wanted", folder / f"{name}.given"
    process = int(wanted.read_text())
    wanted.unlink()
    given.touch()
    end = time.monotonic() + turn_s
    while given.exists() and not has_ended(name):
        if time.monotonic() > end:
            print(f"{name}: its turn took more than {turn_s:.0f} s", flush=True)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(os.getpgid(process), signal.SIGKILL)
            given.unlink(missing_ok=True)
        time.sleep(POLL_S)
