"""Cache folder, whole-file reads, and atomic writes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TypeVar

import msgspec

from devplace.units import format_bytes

T = TypeVar("T")
MAX_BYTES = 10**9
"""Size of the largest file that is read; plans of 200,000 ops have 20 MB."""
_PART = ".devplace-part-"
_NO_LINK = os.O_NOFOLLOW | os.O_CLOEXEC


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
        return _own_temporary_folder()


@cache
def _own_temporary_folder() -> Path:
    """A folder that nobody else can put anything into: kernels in it are run."""
    folder = Path(tempfile.gettempdir()) / f"devplace-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(0o700)
    found = folder.lstat()
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if is_ours and not found.st_mode & 0o022:
        return folder
    return Path(tempfile.mkdtemp(prefix="devplace-"))


def write_whole(path: str | Path, data: bytes) -> None:
    """Write a file, or leave what was there.

    The bytes go to a new file beside it, are flushed to the disk, and take its name at once; so
    several writers at the same time each leave a whole file. A file keeps its permissions, and one
    that is a symbolic link stays one; a pipe or device is written to. What writers that were killed
    left in the folder is removed.

    Raises:
        OSError: It cannot be written; one that is write-protected is not replaced.
    """
    target = Path(os.path.realpath(path))
    exists = target.exists()
    if exists and not target.is_file():
        with open(target, "wb") as pipe:
            pipe.write(data)
        return
    if exists and not os.access(target, os.W_OK):  # renaming would not ask
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(target))
    try:
        _remove_left_over(target.parent)
        part, handle = _new_part(target.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                if exists:
                    shutil.copymode(target, part)
                file.flush()
                os.fsync(handle)
                os.replace(part, target)
        except BaseException:  # Ctrl-C, too, leaves no half file
            with contextlib.suppress(OSError):
                os.unlink(part)
            raise
        _sync_folder(target.parent)
    except OSError as error:
        error.filename, error.filename2 = str(path), None  # the user knows no other name
        raise


def _new_part(folder: Path) -> tuple[Path, int]:
    """A new, empty file that nobody else has, locked for as long as it is open."""
    while True:
        part = folder / f"{_PART}{secrets.token_hex(8)}"
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK, 0o666)
        with contextlib.suppress(OSError):  # some network disks have no locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return part, handle
        os.close(handle)  # it was taken for a left-over one before it was locked


def _remove_left_over(folder: Path) -> None:
    """Remove parts whose writers are gone: those that can be locked."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.path for entry in entries if entry.name.startswith(_PART)]
    except OSError:
        return
    for name in names:
        with contextlib.suppress(OSError):
            handle = os.open(name, os.O_WRONLY | os.O_NONBLOCK | _NO_LINK)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(name)
            finally:
                os.close(handle)


def _sync_folder(folder: Path) -> None:
    """Make the new name outlast a power cut, where the disk can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def alone(lock: str | Path | None) -> Iterator[None]:
    """Keep other processes with the same lock file, or folder, out; does nothing without one."""
    if lock is None:
        yield
        return
    flags = os.O_RDONLY if os.path.isdir(lock) else os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    handle = os.open(lock, flags | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)  # the system lets go of it if this process dies
        yield
    finally:
        os.close(handle)


def read_whole(path: str | Path, most: int = MAX_BYTES) -> bytes:
    """The bytes of a file.

    Raises:
        OSError: It cannot be read, or has more than `most` bytes.
    """
    with open(path, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {format_bytes(most)}", str(path))
    return data


def decode_json(data: bytes | str, kind: type[T]) -> T:
    """JSON as a record.

    Raises:
        ValueError: No JSON, or not of this kind; says what is wrong, in a line.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise ValueError(str(error)) from error


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
