"""A measuring process that does, plan after plan, what a file says: `hostile.py FILE`."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from devplace.tune import plan_worker

ACTIONS = Path(sys.argv[1])
honest = plan_worker.measure


def measure(*request: Any) -> Any:
    """Take the first action off the file, do it, and go on if it lets us."""
    action, *rest = ACTIONS.read_text().split()
    ACTIONS.write_text(" ".join(rest))
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "hang":
        time.sleep(1000)
    elif action == "exit":
        print("last words", file=sys.stderr)
        os._exit(7)
    elif action == "memory":
        torch.empty(2**60, dtype=torch.uint8, device="cuda" if torch.cuda.is_available() else "cpu")
    elif action == "illegal":
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    elif action == "assert":  # poisons the CUDA context for good
        torch.zeros(4, device="cuda")[torch.tensor([99], device="cuda")].sum().item()
    elif action == "noise":
        print("something on stdout" * 1000, flush=True)
    return honest(*request)


if __name__ == "__main__":
    plan_worker.measure = measure
    plan_worker.main()
