"""Runs the command line in a folder of its own, with a model file and a plan."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MLP = """
import os
import torch

def build():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    inputs = (torch.randn(6, 8), torch.randint(0, 4, (6,)))
    return model, inputs, lambda m, x, y: torch.nn.functional.cross_entropy(m(x), y)

def branch():
    class Branch(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = torch.nn.Linear(8, 8)
        def forward(self, x):
            if x.sum() > 0:
                return self.fc(x)
            return -self.fc(x)
    return Branch(), (torch.randn(6, 8),), lambda m, x: m(x).sum()

def empty():
    return torch.nn.Identity(), (torch.randn(2, 2),), lambda m, x: m(x).sum()

def zero():
    model = torch.nn.Linear(4, 4)
    inputs = (torch.randn(3, 4), torch.randn(0, 4))
    return model, inputs, lambda m, x, none: m(x).sum() + m(none).sum()

def crash():
    raise RuntimeError("no data today")

def wrong():
    return 3

def chatty():
    print("building")
    os.write(1, b"as C does\\n")
    model = torch.nn.Linear(4, 4)
    model.register_forward_hook(lambda *_: print("forward"))
    return model, (torch.randn(3, 4),), lambda m, x: m(x).sum() * float("nan")
"""


PLAIN = "from devplace.cli import main; main()"
PATIENT = """
from functools import partial
from devplace.cli import main, planning
from devplace.tune import confirm
planning.CONFIRM_SECONDS = 3000.0
confirm.Measurer = partial(confirm.Measurer, time_limit_s=600.0)
main()
"""


def devplace(
    *arguments: str, cwd: Path, script: str = PLAIN, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the command line as a user does; with `PATIENT` a slow computer has time to measure."""
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=cwd,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model file and a plan of it for two CPU devices."""
    path = tmp_path_factory.mktemp("cli")
    (path / "mlp.py").write_text(MLP)
    done = devplace(
        *("plan", "mlp.py:build", "--machine", "cpux2", "--budget", "40ev", "-o", "plan.json"),
        cwd=path,
    )
    assert done.returncode == 0, done.stderr
    return path


def refused(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """One line on stderr with these words, nothing like a traceback, and the exit code."""
    assert done.returncode == code, (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr + done.stdout
    lines = [line for line in done.stderr.splitlines() if line]
    assert lines
    for word in words:
        assert word in lines[-1], lines[-1]
