"""Start several processes of a program of `programs.py`, as torchrun would, and collect what they
say."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[3]
LIMIT_S = 900.0


@dataclass
class Ended:
    """A process that has ended.

    Attributes:
        code: Exit status; negative for a signal; None if it had to be killed.
        error: Type and message of what it raised.
        value: What the program gave.
        ended: When it left a value or an error, s since the epoch; 0 if it did not.
        output: What it printed.
        port: Of the store of all.
    """

    code: int | None
    error: str
    value: Any
    ended: float
    output: str
    port: int


def free_port() -> int:
    """A port of this computer that nobody listens on, and that no outgoing connection is given
    before it is used: those get higher ones."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 1000):
        with socket.socket() as found, suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port
    raise OSError("1000 ports are taken")


def launch(
    folder: Path,
    size: int,
    program: str,
    *,
    limit_s: float = LIMIT_S,
    mark: str = "",
    left: int = -1,
    **arguments: Any,
) -> list[Ended]:
    """Run a program in `size` processes; what is left after `limit_s` is killed, process `left` as
    soon as all others have ended. With `mark`, the time counts once each has left a file of that
    suffix."""
    port = free_port()
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.run.ranks.programs", program, json.dumps(arguments)],
            cwd=ROOT,
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TORCHELASTIC_RUN_ID": "test",
                "OMP_NUM_THREADS": "1",
                "OUT": str(folder / f"rank{rank}"),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    until = time.monotonic() + LIMIT_S
    outs = [folder / f"rank{rank}" for rank in range(size)]
    try:
        while mark and not all(out.with_suffix(mark).exists() for out in outs):
            if time.monotonic() > until or any(each.poll() is not None for each in running):
                break
            time.sleep(0.05)
        until = time.monotonic() + limit_s
        found = {
            rank: _collect(running[rank], outs[rank], 0.0 if rank == left else until, port)
            for rank in sorted(range(size), key=lambda rank: (rank == left, rank))
        }
        return [found[rank] for rank in range(size)]
    finally:
        for process in running:
            process.kill()
            process.wait()


def _collect(process: Any, out: Path, until: float, port: int) -> Ended:
    code: int | None
    try:
        output, _ = process.communicate(timeout=max(0.1, until - time.monotonic()))
        code = process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        code = None
    error, value = out.with_suffix(".error"), out.with_suffix(".pt")
    left = [path for path in (error, value) if path.exists()]
    return Ended(
        code,
        error.read_text() if error.exists() else "",
        torch.load(value) if value.exists() else None,
        max((path.stat().st_mtime for path in left), default=0.0),
        output,
        port,
    )
