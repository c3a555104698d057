"""Files are written whole or not at all, and what cannot be written is told before."""

import os
import stat
from pathlib import Path

import pytest

from devplace.files import why_unwritable, write_whole


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

    def fail(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[:1])
        raise error

    monkeypatch.setattr(Path, "write_bytes", fail)
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
