"""Every example runs and prints what lies beside it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.slow
def test_example_prints_its_expected_output(script: Path, tmp_path: Path) -> None:
    """What an example prints is what its .out file says."""
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == script.with_suffix(".out").read_text()
