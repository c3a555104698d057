"""The example under torchrun itself."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tests.run.ranks.launch import ROOT

EXAMPLE = ROOT / "examples" / "several_processes.py"


@pytest.mark.slow
def test_the_example_prints_the_same_under_torchrun(tmp_path: Any) -> None:
    """Two processes print what one does, and leave a checkpoint with a file of each."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(EXAMPLE)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == EXAMPLE.with_suffix(".out").read_text()
    saved = sorted(path.name for path in (tmp_path / "checkpoint").glob("*.distcp"))
    assert [name.split("_")[2] for name in saved] == ["0", "1"]
