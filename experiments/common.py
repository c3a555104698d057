"""What every experiment records: machine, versions, commit; and how a problem is made."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "docs" / "results"


def provenance() -> dict[str, Any]:
    """Where and with what a result was made."""
    import numpy
    import torch

    import devplace
    from devplace.simulator import native_module

    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "devplace": devplace.__version__,
        "commit": _git("rev-parse", "--short", "HEAD"),
        "clean": not _git("status", "--porcelain", "--", "src", "native", "experiments"),
        "simulator": "native" if native_module() is not None else "python",
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], capture_output=True, text=True, check=False, cwd=RESULTS.parent.parent
    )
    return done.stdout.strip()


def capture_workload(name: str, optimizer: str = "sgd", **options: Any) -> Any:
    """Full-size graph of a workload's training step, captured on the meta device."""
    import torch

    from devplace import workloads
    from devplace.step_capture import capture

    workload = workloads.build(name, size="full", device="meta")
    optimizers = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    update = optimizers[optimizer](workload.model.parameters(), lr=0.01)
    return capture(workload.model, workload.inputs, workload.loss_fn, update, name=name, **options)


def write(name: str, data: dict[str, Any]) -> None:
    """Write a result; a later run replaces it."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")


def named_placer(name: str) -> Any:
    """A placer to compare: `search` gives the shortest step that it finds, whatever it gains."""
    from devplace import placers

    return placers.Search(least_gain=0.0) if name == "search" else placers.by_name(name)
