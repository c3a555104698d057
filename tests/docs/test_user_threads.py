"""The table of users' threads tells the truth."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "user-threads.md").read_text(encoding="utf-8")


def test_every_test_named_there_exists() -> None:
    """Each test in the table is one of ours, in the row of its own thread."""
    have = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        have |= set(re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE))
    rows = re.findall(r"^\| S(\d\d) \|(.*)$", PAGE, re.MULTILINE)
    named = [(number, name) for number, row in rows for name in re.findall(r"`(test_\w+)`", row)]
    assert named
    assert [name for _, name in named if name not in have] == []
    assert [name for number, name in named if not name.startswith(f"test_s{number}_")] == []


def test_every_thread_has_an_answer() -> None:
    """Each row has a link, an answer, and a test or the reason why there is none."""
    rows = re.findall(r"^\| (S\d\d) \|(.*)\|$", PAGE, re.MULTILINE)
    assert len(rows) == len({key for key, _ in rows}) == 67
    for key, row in rows:
        thread, answer, test = (cell.strip() for cell in row.split(" | "))
        assert re.fullmatch(r"\[.+\]\(https://.+\)", thread), key
        assert len(answer) > 10, key
        assert test, key
