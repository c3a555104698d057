"""Where caches are kept; writing files so that what was there gives way only to a whole one."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """`$DEVPLACE_CACHE`, else `devplace` in the user's cache folder; without a home, in the folder
    for temporary files."""
    named = os.environ.get("DEVPLACE_CACHE")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "devplace"
    try:
        return Path.home() / ".cache" / "devplace"
    except RuntimeError:  # a user without an entry, as in some containers
        return Path(tempfile.gettempdir()) / f"devplace-{os.getuid()}"


def write_whole(path: str | Path, data: bytes) -> None:
    """Write a file, or leave what was there.

    A symbolic link stays one, and a file keeps its permissions; a pipe or device is written to.

    Raises:
        OSError: It cannot be written; one that is write-protected is not replaced.
    """
    target = Path(os.path.realpath(path))
    exists = target.exists()
    if exists and not target.is_file():
        target.write_bytes(data)
        return
    if exists and not os.access(target, os.W_OK):  # renaming would not ask
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(target))
    part = target.with_name(f".devplace-{os.getpid()}.part")
    try:
        part.write_bytes(data)
        if exists:
            shutil.copymode(target, part)
        part.replace(target)
    except BaseException:  # Ctrl-C, too, leaves no half file
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def why_unwritable(path: str | Path) -> str:
    """Why no file can be written there, as far as can be told before; empty if one can."""
    target = Path(os.path.realpath(path))
    try:
        os.stat(target)
    except (FileNotFoundError, NotADirectoryError):
        if not target.parent.is_dir():
            return "there is no such folder"
        allowed = os.access(target.parent, os.W_OK | os.X_OK)
        return "" if allowed else "there is no permission to write in that folder"
    except OSError as error:
        return error.strerror or type(error).__name__
    if target.is_dir():
        return "it is a folder"
    allowed = os.access(target, os.W_OK)
    if target.is_file():  # it gives way to a new one beside it
        allowed = allowed and os.access(target.parent, os.W_OK | os.X_OK)
    return "" if allowed else "there is no permission to write it"
