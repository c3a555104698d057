"""Turns on the GPUs: processes get ready side by side, then each uses the GPUs alone.

One process gives the turns. A process asks for its turn with a file, `NAME.wanted`, waits for
`NAME.given`, and ends its turn by removing that file or by its own end. Who is not ready yet may
ask for a short turn, to try kernels while it compiles.
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

    def take(self, is_ready: bool = True) -> None:
        """Wait for a turn: one to measure, or a short one while getting ready."""
        part = self._wanted.with_suffix(".part")
        part.write_text(f"{os.getpid()} {'ready' if is_ready else 'short'}")
        part.replace(self._wanted)
        while not self._given.exists():
            time.sleep(POLL_S)

    def end(self) -> None:
        """Let others have theirs."""
        self._given.unlink(missing_ok=True)


class Turns:
    """The side that gives them.

    Args:
        folder: Where the files are.
        names: Of the processes; the first that is ready gets the next turn, short ones go before.
        has_ended: Whether a process is through.
        turn_s: A process whose turn lasts longer is killed, with its process group.
    """

    def __init__(
        self, folder: Path, names: Sequence[str], has_ended: Callable[[str], bool], turn_s: float
    ) -> None:
        self._folder = folder
        self._names = names
        self._has_ended = has_ended
        self._turn_s = turn_s

    def give(self, ready_s: float) -> None:
        """Give turns until all have ended: the first only once every process is ready.

        Args:
            ready_s: After so many seconds those that are ready do not wait for the others.
        """
        begin = time.monotonic()
        while (late := self._late()) and time.monotonic() - begin < ready_s:
            self._next("short")
        spent = time.monotonic() - begin
        print(f"{spent:6.1f} s  turns begin; not ready: {', '.join(late) or 'none'}", flush=True)
        while not all(map(self._has_ended, self._names)):
            self._next("short", "ready")

    def _late(self) -> list[str]:
        return [
            name
            for name in self._names
            if not self._has_ended(name) and self._wish(name) != "ready"
        ]

    def _wish(self, name: str) -> str:
        wanted = self._folder / f"{name}.wanted"
        return wanted.read_text().split()[1] if wanted.exists() else ""

    def _next(self, *wishes: str) -> None:
        """One turn to the first process with the first of some wishes; without any a short wait."""
        for wish in wishes:
            for name in self._names:
                if self._wish(name) == wish and not self._has_ended(name):
                    self._one(name)
                    return
        time.sleep(POLL_S)

    def _one(self, name: str) -> None:
        wanted, given = self._folder / f"{name}.wanted", self._folder / f"{name}.given"
        process = int(wanted.read_text().split()[0])
        wanted.unlink()
        given.touch()
        end = time.monotonic() + self._turn_s
        while given.exists() and not self._has_ended(name):
            if time.monotonic() > end:
                print(f"{name}: its turn took more than {self._turn_s:.0f} s", flush=True)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(os.getpgid(process), signal.SIGKILL)
                given.unlink(missing_ok=True)
            time.sleep(POLL_S)
