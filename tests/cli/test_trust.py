"""A plan from somebody else runs no code of theirs without being told to."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.cli.runner import MLP, devplace, folder, refused

__all__ = ["folder"]

COMMANDS = (("explain",), ("trace", "-o", "t.json"), ("run", "--steps", "1"))


@pytest.fixture
def foreign(folder: Path, tmp_path: Path) -> Path:
    """A plan with the file it names, neither of which was seen here before."""
    shutil.copy(folder / "plan.json", tmp_path)
    (tmp_path / "mlp.py").write_text("open('RAN', 'w').close()\n" + MLP)
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.slow
def test_a_plan_that_names_a_python_file_is_asked_about(
    foreign: Path, command: tuple[str, ...]
) -> None:
    """The message names plan and file and says how to go on; nothing is run."""
    done = devplace(command[0], "plan.json", *command[1:], cwd=foreign)
    refused(done, 2, "plan.json", str(foreign / "mlp.py"), "--trust", "--model mlp.py:build")
    assert not (foreign / "RAN").exists()


@pytest.mark.parametrize("agreed", [("--trust",), ("--model", "mlp.py:build")])
@pytest.mark.slow
def test_it_is_run_when_the_user_says_so(foreign: Path, agreed: tuple[str, ...]) -> None:
    """By an option, or by naming the model."""
    done = devplace("explain", "plan.json", *agreed, cwd=foreign)
    assert done.returncode == 0, done.stderr
    assert (foreign / "RAN").exists()


@pytest.mark.slow
def test_what_the_user_planned_is_known_until_it_changes(foreign: Path) -> None:
    """Planning a file names it; other content, or a copy elsewhere, is asked about."""
    options = ("--machine", "cpux2", "--budget", "20ev", "-o", "plan.json")
    assert devplace("plan", "mlp.py:build", *options, cwd=foreign).returncode == 0
    assert devplace("explain", "plan.json", cwd=foreign).returncode == 0
    (foreign / "sub").mkdir()
    for name in ("plan.json", "mlp.py"):
        shutil.copy(foreign / name, foreign / "sub")
    refused(devplace("explain", "plan.json", cwd=foreign / "sub"), 2, "--trust")
    with (foreign / "mlp.py").open("a") as file:
        file.write("\nopen('CHANGED', 'w').close()\n")
    refused(devplace("explain", "plan.json", cwd=foreign), 2, "--trust")
    assert not (foreign / "CHANGED").exists()


@pytest.mark.parametrize("model", ["os:getcwd", "pkg/m.py:x", "m.py", ":x", "m.py:x:y"])
def test_every_form_of_a_python_file_is_asked_about(foreign: Path, model: str) -> None:
    """Also modules, packages and odd names."""
    (foreign / "pkg").mkdir()
    for name in ("os.py", "m.py", "pkg/m.py", "m.py:x", "os"):
        (foreign / name).write_text("open('RAN', 'w').close()\n")
    plan = json.loads((foreign / "plan.json").read_text())
    plan["request"]["model"] = model
    (foreign / "odd.json").write_text(json.dumps(plan))
    done = devplace("explain", "odd.json", cwd=foreign)
    assert done.returncode in (2, 5), done.stderr
    assert "Traceback" not in done.stderr
    assert not (foreign / "RAN").exists()


@pytest.mark.slow
def test_built_in_models_are_not_asked_about(tmp_path: Path) -> None:
    """They come with devplace."""
    options = ("--size", "small", "--machine", "k40x2", "--budget", "5ev", "-o", "plan.json")
    assert devplace("plan", "rnnlm", *options, cwd=tmp_path).returncode == 0
    assert devplace("explain", "plan.json", cwd=tmp_path).returncode == 0
