"""Results say where they are from."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "docs/results").glob("*.json"))


def commits(value: Any) -> Iterator[str]:
    """Every commit that is named anywhere in a result."""
    if isinstance(value, list):
        for each in value:
            yield from commits(each)
    elif isinstance(value, dict):
        for key, each in value.items():
            if key == "commit" and isinstance(each, str):
                yield each.split()[0]  # a note may follow
            yield from commits(each)


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_results_are_from_commits_that_there_are(file: Path) -> None:
    """Git knows every commit that a result names."""
    if not (ROOT / ".git").exists() or (ROOT / ".git/shallow").exists():
        pytest.skip("no history here")
    for commit in sorted(set(commits(json.loads(file.read_text())))):
        known = subprocess.run(["git", "cat-file", "-e", commit], cwd=ROOT, check=False)
        assert known.returncode == 0, commit
