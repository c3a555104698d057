"""Measured times on disk, so that the next plan on the same hardware need not measure again."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from devplace.errors import CacheError

if TYPE_CHECKING:
    import sqlite3

VERSION = 1
_TABLE = """CREATE TABLE IF NOT EXISTS timings (
    place TEXT NOT NULL, call TEXT NOT NULL, ns INTEGER NOT NULL, workspace INTEGER NOT NULL,
    seal TEXT NOT NULL, PRIMARY KEY (place, call)) WITHOUT ROWID"""


class TimingCache:
    """Times and workspaces of ops, by place and call, in an SQLite file.

    Every row carries a seal over its content; a row that does not match it (half-written, edited)
    is dropped and measured again. A file that is no cache of this version is refused by `read` and
    `write`, never overwritten.

    Args:
        path: The file; None keeps nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.dropped = 0

    def read(self, place: str, calls: list[str]) -> dict[str, tuple[int, int]]:
        """(ns, workspace bytes) of the calls known at this place.

        Args:
            place: Device model, driver, versions and flags: all that times depend on.
            calls: Keys of calls.

        Raises:
            CacheError: The file is no cache of this version.
        """
        if self.path is None or not os.path.exists(self.path):
            return {}
        found: dict[str, tuple[int, int]] = {}
        names = {_digest(call): call for call in calls}
        with self._open() as connection:
            rows = connection.execute(
                "SELECT call, ns, workspace, seal FROM timings WHERE place = ?", (place,)
            ).fetchall()
        for call, ns, workspace, seal in rows:
            if call not in names:
                continue
            if _is_sound(place, call, ns, workspace, seal):
                found[names[call]] = (ns, workspace)
            else:
                self.dropped += 1
        return found

    def write(self, place: str, timings: Mapping[str, tuple[int, int]]) -> None:
        """Keep timings; all of them or none.

        Raises:
            CacheError: The file is no cache of this version, or cannot be written.
        """
        if self.path is None or not timings:
            return
        rows = []
        for name, (ns, workspace) in timings.items():
            call = _digest(name)
            rows.append((place, call, ns, workspace, _seal(place, call, ns, workspace)))
        with self._open() as connection:
            connection.executemany("INSERT OR REPLACE INTO timings VALUES (?, ?, ?, ?, ?)", rows)
            connection.commit()

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        assert self.path is not None
        try:
            import sqlite3  # some builds of Python have none, and not every plan needs it
        except ImportError as error:
            raise CacheError(
                _complaint(self.path, f"this Python has no sqlite3 ({error})")
            ) from None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(self.path, timeout=5.0)
        except (OSError, sqlite3.Error) as error:
            raise CacheError(_complaint(self.path, str(error))) from error
        try:
            self._check_version(connection)
            yield connection
        except (sqlite3.Error, UnicodeError) as error:
            raise CacheError(_complaint(self.path, str(error))) from error
        finally:
            connection.close()

    def _check_version(self, connection: sqlite3.Connection) -> None:
        from sqlite3 import DatabaseError

        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if version == 0 and tables == 0:
            connection.execute(_TABLE)
            connection.execute(f"PRAGMA user_version = {VERSION}")
            connection.commit()
        elif version != VERSION:
            raise DatabaseError(f"it has version {version}, this is {VERSION}")


def _is_sound(place: str, call: str, ns: object, workspace: object, seal: object) -> bool:
    if type(ns) is not int or type(workspace) is not int or ns < 1 or workspace < 0:
        return False
    return seal == _seal(place, call, ns, workspace)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _seal(place: str, call: str, ns: int, workspace: int) -> str:
    return _digest(f"{place}|{call}|{ns}|{workspace}")


def _complaint(path: Path, reason: str) -> str:
    reason = " ".join(reason.split())  # SQLite's may have several lines
    return (
        f"The cache of measured times {path} cannot be used: {reason}. Times are measured again "
        "and not kept. Delete the file, or name another folder in DEVPLACE_CACHE."
    )
