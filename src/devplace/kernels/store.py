"""Compiled kernels on disk: generated source, or the reason for a failure."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

from devplace.files import cache_folder, write_whole

VERSION = 1


class KernelStore:
    """The kernels of one place, a file each.

    A file begins with a seal over the rest, so one that is damaged or cut counts as not there.

    Args:
        place: All that kernels depend on beside their signature.
    """

    def __init__(self, place: str) -> None:
        digest = hashlib.sha256(f"{VERSION}|{place}".encode()).hexdigest()[:16]
        self.folder = cache_folder() / "kernels" / digest

    def read(self, key: str) -> str | None:
        """Source of a kernel, None if it was not compiled here."""
        return self._read(f"{key}.py")

    def read_failure(self, key: str) -> str | None:
        """Why a kernel could not be compiled, None if that was not tried or it could."""
        return self._read(f"{key}.failure")

    def write(self, key: str, source: str) -> None:
        """Keep the source of a kernel; what cannot be written is compiled again next time."""
        self._write(f"{key}.py", source)

    def write_failure(self, key: str, reason: str) -> None:
        """Note that a kernel cannot be compiled."""
        self._write(f"{key}.failure", reason)

    def _read(self, name: str) -> str | None:
        path = self.folder / name
        try:
            if not path.is_file():  # opening a pipe would wait for the other end
                return None
            text = path.read_text()
        except (OSError, UnicodeDecodeError):
            return None
        seal, _, rest = text.partition("\n")
        return rest if seal == _seal(rest) else None

    def _write(self, name: str, text: str) -> None:
        path = self.folder / name
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            if path.is_file() or not path.exists():
                write_whole(path, f"{_seal(text)}\n{text}".encode())

    def path(self, key: str) -> Path:
        """Where the source of a kernel is kept."""
        return self.folder / f"{key}.py"


def _seal(text: str) -> str:
    return f"# {hashlib.sha256(text.encode()).hexdigest()}"
