"""Measured times on disk: found again, and never trusted when damaged."""

from __future__ import annotations

import os
import sqlite3
import sys
import tempfile
from pathlib import Path

import pytest

from devplace.cost.price_cache import TimingCache
from devplace.errors import CacheError
from devplace.files import cache_folder

TIMINGS = {"mm": (1200, 0), "add": (3, 64)}


def kept(folder: Path) -> TimingCache:
    cache = TimingCache(folder / "sub" / "timings.sqlite")
    cache.write("card", TIMINGS)
    return cache


def test_times_are_found_again_at_the_same_place_only(tmp_path: Path) -> None:
    """What was written is read back for that device and those versions, not for others."""
    cache = kept(tmp_path)
    assert cache.read("card", ["mm", "add", "other"]) == TIMINGS
    assert cache.read("another card", ["mm"]) == {}


def test_newer_times_replace_older_ones(tmp_path: Path) -> None:
    """A second measurement counts."""
    cache = kept(tmp_path)
    cache.write("card", {"mm": (900, 1)})
    assert cache.read("card", ["mm", "add"]) == {"mm": (900, 1), "add": (3, 64)}


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE timings SET ns = 1",
        "UPDATE timings SET ns = 0",
        "UPDATE timings SET ns = 'fast'",
        "UPDATE timings SET workspace = -5",
        "UPDATE timings SET seal = ''",
        "UPDATE timings SET place = 'another card'",
    ],
)
def test_edited_rows_are_dropped(tmp_path: Path, change: str) -> None:
    """A row whose content does not match its seal is not used."""
    cache = kept(tmp_path)
    assert cache.path is not None
    with sqlite3.connect(cache.path) as connection:
        connection.execute(change)
    connection.close()
    place = "another card" if "place" in change else "card"
    assert cache.read(place, ["mm", "add"]) == {}
    assert cache.dropped == 2


@pytest.mark.parametrize("content", [b"", b"no database", b"SQLite format 3\0" + b"x" * 200])
def test_a_damaged_file_is_told_apart(tmp_path: Path, content: bytes) -> None:
    """An empty file becomes a cache; anything else that is none is refused and left alone."""
    path = tmp_path / "timings.sqlite"
    path.write_bytes(content)
    cache = TimingCache(path)
    if not content:
        cache.write("card", TIMINGS)
        assert cache.read("card", ["mm"]) == {"mm": (1200, 0)}
        return
    with pytest.raises(CacheError, match="cannot be used"):
        cache.read("card", ["mm"])
    with pytest.raises(CacheError, match="DEVPLACE_CACHE"):
        cache.write("card", TIMINGS)
    assert path.read_bytes() == content


def test_a_half_written_file_is_refused(tmp_path: Path) -> None:
    """A cache cut in the middle is not read."""
    cache = TimingCache(tmp_path / "timings.sqlite")
    cache.write("card", {f"op{k}": (k + 1, 0) for k in range(2000)})
    assert cache.path is not None
    data = cache.path.read_bytes()
    cache.path.write_bytes(data[: len(data) // 2])
    with pytest.raises(CacheError):
        cache.read("card", ["op7"])


def test_another_version_is_refused(tmp_path: Path) -> None:
    """A file of another version of devplace is neither read nor written."""
    cache = kept(tmp_path)
    assert cache.path is not None
    with sqlite3.connect(cache.path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(CacheError, match="version 99"):
        cache.read("card", ["mm"])


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """A path through a file is an error with the path in it."""
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="file"):
        TimingCache(tmp_path / "file" / "timings.sqlite").write("card", TIMINGS)


def test_without_a_path_nothing_is_kept() -> None:
    """No path, no cache, no error."""
    cache = TimingCache(None)
    cache.write("card", TIMINGS)
    assert cache.read("card", ["mm"]) == {}


def test_the_folder_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DEVPLACE_CACHE comes first, then the user's cache folder."""
    monkeypatch.setenv("DEVPLACE_CACHE", str(tmp_path / "here"))
    assert cache_folder() == tmp_path / "here"
    monkeypatch.delenv("DEVPLACE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "devplace"


def test_a_python_without_sqlite_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is told when times are to be kept; nothing else needs it."""
    monkeypatch.setitem(sys.modules, "sqlite3", None)
    with pytest.raises(CacheError, match=r"no sqlite3.*measured again"):
        kept(tmp_path)


def test_a_user_without_a_home_has_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in containers that run under any number."""
    for name in ("DEVPLACE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", fail)
    assert cache_folder() == Path(tempfile.gettempdir()) / f"devplace-{os.getuid()}"
