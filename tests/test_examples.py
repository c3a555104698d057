"""Every example runs and prints what lies beside it."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


def missing(script: Path) -> list[str]:
    """Modules that an example imports and that are not installed."""
    nodes = list(ast.walk(ast.parse(script.read_text())))
    names = [one.name for node in nodes if isinstance(node, ast.Import) for one in node.names]
    names += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    roots = {name.partition(".")[0] for name in names}
    return sorted(root for root in roots if find_spec(root) is None)


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.slow
def test_example_prints_its_expected_output(script: Path, tmp_path: Path) -> None:
    """What an example prints is what its .out file says; it is skipped without its libraries."""
    if missing(script):
        pytest.skip(f"needs {', '.join(missing(script))}")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == script.with_suffix(".out").read_text()
