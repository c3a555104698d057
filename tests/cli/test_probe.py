"""`devplace probe` on a machine without GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from devplace.machine import load_machine


def probe(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does, with a cache of its own and no GPUs."""
    return subprocess.run(
        [sys.executable, "-c", "from devplace.cli import main; main()", "probe", *arguments],
        cwd=folder,
        env={**os.environ, "DEVPLACE_CACHE": str(folder / "cache"), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


@pytest.mark.slow
def test_probe_writes_a_machine_file_and_json(tmp_path: Path) -> None:
    """stdout is one JSON value, the file is a machine with the measured links, exit code 0."""
    done = probe(tmp_path, "-o", "here.toml", "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["machine_file"] == "here.toml"
    machine = load_machine(tmp_path / "here.toml")
    assert {(link.src, link.dst) for link in machine.links} == {
        (pair["src"], pair["dst"]) for pair in data["pairs"]
    }
    assert len(list((tmp_path / "cache").iterdir())) == 1
    again = probe(tmp_path, "-o", "here.toml")
    assert again.returncode == 0, again.stderr
    assert "Hop by copy, us" in again.stdout
    assert "Machine written to here.toml" in again.stdout


@pytest.mark.slow
def test_probe_overwrites_nothing_else(tmp_path: Path) -> None:
    """A file that the probe did not write stays, and one line says so."""
    (tmp_path / "mine.toml").write_text('name = "mine"\n')
    (tmp_path / "plan.json").write_text("{}")
    for name, word in (("mine.toml", "overwrite"), ("plan.json", ".toml"), ("no/x.toml", "folder")):
        done = probe(tmp_path, "-o", name)
        assert done.returncode == 2
        assert word in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert (tmp_path / "mine.toml").read_text() == 'name = "mine"\n'
