"""What was found is told where it cannot be written, and kept where it was interrupted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.fuzz.test_fuzz_graphs import onnx_model
from tests.instances import files as instance_files

PLAN = ("net.onnx", "--machine", "cpux2", "--budget", "20ev")


def on_a_full_disk(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the command line where no file can have more than 100 bytes."""
    limit = "import resource as r; r.setrlimit(r.RLIMIT_FSIZE, (100, r.RLIM_INFINITY))"
    code = f"{limit}; from devplace.cli import main; main()"
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model and three instances."""
    (tmp_path / "net.onnx").write_bytes(onnx_model())
    for name in ("a.json", "b.json", "c.json"):
        (tmp_path / name).write_text(instance_files.tarnawski())
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (("plan", *PLAN, "-o", "p.json"), "lower bound"),
        (("plan", *PLAN, "--html", "p.html"), "lower bound"),
        (("compare", *PLAN, "--placers", "single,heft", "-o", "p.json"), "heft"),
        (("bench", "a.json", "--budget", "9s", "-o", "p.json"), "3.25"),
    ],
    ids=["plan", "html", "compare", "bench"],
)
def test_a_full_disk_costs_the_file_not_what_was_found(
    folder: Path, arguments: tuple[str, ...], found: str
) -> None:
    """It is printed; the last line names the file; the exit code is 1, and the old file stays."""
    output = folder / arguments[-1]
    output.write_text("old")
    done = on_a_full_disk(*arguments, cwd=folder)
    assert done.returncode == 1, done.stderr
    assert found in done.stdout
    assert "written to" not in done.stdout
    assert output.name in done.stderr.splitlines()[-1]
    assert "too large" in done.stderr.splitlines()[-1]
    assert output.read_text() == "old"


INTERRUPTED = """
import sys
from devplace.bench import run
solve, done = run.solve, []
def once(*arguments):
    if len(done) == 2:
        raise ERROR
    done.append(1)
    return solve(*arguments)
run.solve = once
from devplace.cli import main
main()
"""


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        ("KeyboardInterrupt", 130, "interrupted"),
        ("run.VerificationError('a rule is broken')", 4, "a rule is broken"),
    ],
)
def test_a_suite_that_ends_early_keeps_its_finished_rows(
    folder: Path, error: str, code: int, words: str
) -> None:
    """Ctrl-C and a fault cost the instance they come in."""
    command = [sys.executable, "-c", INTERRUPTED.replace("ERROR", error), "bench"]
    options = ["a.json", "b.json", "c.json", "--budget", "9s", "-o", "rows.json"]
    done = subprocess.run(
        [*command, *options], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert words in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    rows = json.loads((folder / "rows.json").read_text())["rows"]
    assert [row["instance"] for row in rows] == ["a", "b"]
    assert done.stdout.count("optimal") == 2
