"""Files are written whole or not at all, and what cannot be written is told before."""

import os
import resource
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from devplace.files import decode_json, read_whole, why_unwritable, write_whole


def test_a_file_is_replaced_and_keeps_its_permissions(tmp_path: Path) -> None:
    """The new content stands there with the old mode, and nothing else is left."""
    path = tmp_path / "a.json"
    write_whole(path, b"old")
    path.chmod(0o640)
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_half_a_file_is_never_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Neither a full disk nor Ctrl-C costs the file that was there."""
    path = tmp_path / "a.json"
    write_whole(path, b"old")

    def fail(handle: int) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(type(error)):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_write_protected_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Renaming over it would be allowed, but it was protected for a reason."""
    path = tmp_path / "a.json"
    write_whole(path, b"old")
    monkeypatch.setattr(os, "access", lambda name, mode: Path(name).name != "a.json")
    with pytest.raises(PermissionError):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert "no permission to write it" in why_unwritable(path)


def test_what_cannot_be_written_is_told_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders, missing folders, loops of links, names too long, folders without permission."""
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "new").symlink_to("later.json")
    assert why_unwritable(tmp_path / "a.json") == ""
    assert why_unwritable(tmp_path / "new") == ""
    assert why_unwritable("/dev/null") == ""
    assert "is a folder" in why_unwritable(tmp_path)
    assert "no such folder" in why_unwritable(tmp_path / "no" / "a.json")
    assert "links" in why_unwritable(tmp_path / "loop")
    assert "too long" in why_unwritable(tmp_path / ("a" * 300))
    monkeypatch.setattr(os, "access", lambda name, mode: False)
    assert "no permission to write in that folder" in why_unwritable(tmp_path / "a.json")


def write_often(folder: Path, count: int = 100) -> str:
    """Code of a process that writes two files again and again, each with its own content."""
    return (
        "import sys; from devplace.files import write_whole\n"
        f"for k in range({count}):\n"
        f"    write_whole({str(folder)!r} + f'/{{k % 2}}.json', bytes([48 + k % 2]) * 50_000)\n"
    )


def is_whole(path: Path) -> bool:
    """Whether a file of `write_often` is not there or has its own content, all of it."""
    return not path.exists() or path.read_bytes() == path.stem.encode() * 50_000


def test_two_threads_and_two_processes_write_whole_files(tmp_path: Path) -> None:
    """None takes the part of another, none loses its own."""
    code = write_often(tmp_path)
    others = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    threads = [threading.Thread(target=exec, args=(code, {})) for _ in range(2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert is_whole(tmp_path / "0.json")
        assert is_whole(tmp_path / "1.json")
    assert [other.wait() for other in others] == [0, 0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.json", "1.json"]
    assert is_whole(tmp_path / "0.json")
    assert is_whole(tmp_path / "1.json")


def test_links_that_lie_in_wait_are_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where somebody guessed the name of a part, another one is an error, not their file."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    monkeypatch.setattr("secrets.token_hex", lambda size: "guessed")
    (tmp_path / ".devplace-part-guessed").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_whole(tmp_path / "plan.json", b"new")
    assert victim.read_text() == "precious"


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    """A part goes with the next write, unless its writer is still at work."""
    code = (
        "import os, sys; import devplace.files as files\n"
        "part, handle = files._new_part(files.Path(sys.argv[1]))\n"
        "print(part, flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    part = Path(writer.stdout.readline().strip())
    write_whole(tmp_path / "a", b"new")
    assert part.exists()
    writer.kill()
    writer.communicate()
    write_whole(tmp_path / "a", b"newer")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_file_that_outgrows_its_limit_is_not_replaced(tmp_path: Path) -> None:
    """As on a full disk: the error names the file, and the old one stays."""
    path = tmp_path / "a.json"
    write_whole(path, b"old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="large") as caught:
            write_whole(path, b"x" * 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_files_without_end_are_not_read() -> None:
    """`/dev/zero` would fill the memory."""
    with pytest.raises(OSError, match="more than 2 KiB"):
        read_whole("/dev/zero", 2048)


@pytest.mark.parametrize("data", [b"[" * 100_000, b"\xff", b"{", b'"a"'])
def test_json_of_another_kind_is_a_value_error(data: bytes) -> None:
    """Deep, not UTF-8, cut, of another type."""
    with pytest.raises(ValueError, match=r"."):
        decode_json(data, int)
