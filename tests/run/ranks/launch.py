"""Start several processes of a program of `programs.py`, as torchrun would, and collect what they
say."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[3]


@dataclass
class Ended:
    """A process that has ended.

    Attributes:
        code: Exit status; negative for a signal; None if it had to be killed.
        error: Type and message of what it raised.
        value: What the program gave.
        seconds: How long it ran.
        output: What it printed.
        port: Of the store of all.
    """

    code: int | None
    error: str
    value: Any
    seconds: float
    output: str
    port: int


def free_port() -> int:
    """A port of this computer that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def launch(
    folder: Path,
    size: int,
    program: str,
    *,
    limit_s: float = 400.0,
    left: int = -1,
    **arguments: Any,
) -> list[Ended]:
    """Run a program in `size` processes; what is left after `limit_s` is killed, process `left` as
    soon as all others have ended."""
    port = free_port()
    begin = time.monotonic()
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
    try:
        found = {
            rank: _collect(
                running[rank], folder / f"rank{rank}", begin, 0.0 if rank == left else limit_s, port
            )
            for rank in sorted(range(size), key=lambda rank: (rank == left, rank))
        }
        return [found[rank] for rank in range(size)]
    finally:
        for process in running:
            process.kill()
            process.wait()


def _collect(process: Any, out: Path, begin: float, limit_s: float, port: int) -> Ended:
    code: int | None
    try:
        output, _ = process.communicate(timeout=max(0.1, begin + limit_s - time.monotonic()))
        code = process.returncode
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        code = None
    error, value = out.with_suffix(".error"), out.with_suffix(".pt")
    ended = out.with_suffix(".end")
    return Ended(
        code,
        error.read_text() if error.exists() else "",
        torch.load(value) if value.exists() else None,
        float(ended.read_text()) if ended.exists() else time.monotonic() - begin,
        output,
        port,
    )
