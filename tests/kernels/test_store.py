"""Kernels on disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from devplace.kernels.store import KernelStore

KEY, SOURCE = "k" * 32, "def call(args):\n    return args\n# grüße\n"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> KernelStore:
    """An empty one."""
    monkeypatch.setenv("DEVPLACE_CACHE", str(tmp_path))
    return KernelStore("here")


def test_what_was_written_is_read(store: KernelStore) -> None:
    """Sources and reasons, each under its key; a second write replaces the first."""
    assert store.read(KEY) is None
    assert store.read_failure(KEY) is None
    store.write(KEY, SOURCE)
    assert store.read(KEY) == SOURCE
    assert store.read_failure(KEY) is None
    assert store.read("other") is None
    store.write(KEY, "pass")
    store.write_failure("other", "too hard")
    assert (store.read(KEY), store.read_failure("other")) == ("pass", "too hard")
    assert store.read("other") is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: data.replace(b"return args", b"return None"),
        lambda data: data.partition(b"\n")[2],
        lambda data: data + b"\n",
        lambda data: data[:70] + b"\xff" + data[70:],
        lambda data: b"# " + b"0" * 64 + b"\nimport os\n",
    ],
)
def test_a_damaged_file_is_not_there(store: KernelStore, damage: object) -> None:
    """Cut, changed, without its seal, no text, of someone else; it can be written again."""
    store.write(KEY, SOURCE)
    path = store.path(KEY)
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    assert store.read(KEY) is None
    store.write(KEY, SOURCE)
    assert store.read(KEY) == SOURCE


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no such pipes")
def test_a_pipe_in_place_of_a_file_is_not_waited_for(store: KernelStore) -> None:
    """It is no kernel, and stays."""
    store.folder.mkdir(parents=True)
    os.mkfifo(store.path(KEY))
    store.write(KEY, SOURCE)
    assert store.read(KEY) is None


def test_places_have_kernels_of_their_own(store: KernelStore) -> None:
    """Another card or version finds none."""
    store.write(KEY, SOURCE)
    assert KernelStore("elsewhere").read(KEY) is None
    assert KernelStore("here").read(KEY) == SOURCE


def test_a_folder_that_cannot_be_written_is_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing is kept then: a file lies where the folder should."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DEVPLACE_CACHE", str(tmp_path / "file" / "below"))
    store = KernelStore("here")
    store.write(KEY, SOURCE)
    store.write_failure(KEY, "reason")
    assert (store.read(KEY), store.read_failure(KEY)) == (None, None)


def test_a_folder_in_place_of_a_file_is_not_there(store: KernelStore) -> None:
    """Neither read nor written, and no error."""
    store.path(KEY).mkdir(parents=True)
    store.write(KEY, SOURCE)
    assert store.read(KEY) is None
