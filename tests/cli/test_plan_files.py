"""Plans name model and machine files that are found from any folder."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import msgspec
import pytest
from tests.cli.runner import MLP, devplace, refused

from devplace.cli.plan_files import PlanFiles, model_file, with_folder
from devplace.errors import PlanError
from devplace.machine import load_machine, toml
from devplace.placers import Single, place
from devplace.plan import Plan
from devplace.testing import hand_machine, hand_problem

PLAN_OPTIONS = ("--machine", "mine.toml", "--budget", "20ev")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model and a machine file, another folder beside it; one works in `other`."""
    for name in ("project", "plans", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "project" / "mlp.py").write_text(MLP)
    (tmp_path / "project" / "mine.toml").write_text(toml.dumps(load_machine("cpux2")))
    monkeypatch.chdir(tmp_path / "other")
    return tmp_path


def plan_of(model: str, machine: str) -> Plan:
    problem = hand_problem("a = f ns=5", hand_machine({"gpu:0": 99}))
    request = {"model": model, "machine": machine}
    return place(problem, Single(), "1ev", request=request).plan


@pytest.mark.parametrize(
    ("model", "file"),
    [
        ("rnnlm", ""),
        ("mlp.py:build", "mlp.py"),
        ("a/b:c.py:build", "a/b:c.py"),
        ("net.onnx", "net.onnx"),
        ("net.PT2", "net.PT2"),
    ],
)
def test_the_file_of_a_model(model: str, file: str) -> None:
    """Built-in models have none."""
    assert model_file(model) == file


def test_the_folder_is_written_where_a_relative_file_is_named(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the way from the plan's folder; other plans are as they were."""
    monkeypatch.chdir(project / "project")
    whole = str(project / "project" / "mlp.py")
    named = plan_of("mlp.py:build", "cpux2")
    assert with_folder(named, Path("p.json")).request["folder"] == "."
    assert with_folder(named, Path("sub/p.json")).request["folder"] == ".."
    elsewhere = with_folder(named, project / "plans" / "p.json")
    assert elsewhere.request == {**named.request, "folder": "../project"}
    assert with_folder(plan_of("rnnlm", "mine.toml"), Path("p.json")).request["folder"] == "."
    for plan in (plan_of("rnnlm", "cpux2"), plan_of(f"{whole}:build", "detect")):
        assert with_folder(plan, Path("p.json")) is plan


def test_files_are_found_from_the_folder_the_plan_was_made_in(project: Path) -> None:
    """Wherever the plan lies and whatever folder is the present one."""
    there = project / "project"
    for path, folder in ((there / "p.json", "."), (project / "plans" / "p.json", "../project")):
        files = PlanFiles(path, folder)
        assert files.model("mlp.py:build") == f"{there}/mlp.py:build"
        assert files.machine("mine.toml") == f"{there}/mine.toml"
    assert files.model("rnnlm") == "rnnlm"
    assert [files.machine(name) for name in ("detect", "cpux2")] == ["detect", "cpux2"]


def test_a_path_through_a_link_leads_to_the_same_files(project: Path) -> None:
    """The way is that between the real folders."""
    (project / "deep" / "er").mkdir(parents=True)
    (project / "link").symlink_to(project / "deep" / "er")
    (project / "deep" / "mlp.py").write_text(MLP)
    found = PlanFiles(project / "link" / "p.json", "..").model("mlp.py:build")
    assert Path(found.removesuffix(":build")).samefile(project / "deep" / "mlp.py")


def test_the_plans_own_file_comes_before_one_of_the_same_name_here(project: Path) -> None:
    """Of plans that do not say where they were made, the present folder comes first, as it was the
    only one once."""
    Path("mlp.py").write_text("")
    path = project / "project" / "p.json"
    assert PlanFiles(path, ".").model("mlp.py:build") == f"{project}/project/mlp.py:build"
    assert PlanFiles(path, None).model("mlp.py:build") == "mlp.py:build"
    Path("mlp.py").unlink()
    assert PlanFiles(path, None).model("mlp.py:build") == f"{project}/project/mlp.py:build"


def test_a_file_of_the_present_folder_keeps_its_short_name(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is printed where the plan was made is as it was."""
    monkeypatch.chdir(project / "project")
    assert PlanFiles(Path("p.json"), ".").model("./mlp.py:build") == "./mlp.py:build"
    moved = PlanFiles(project / "plans" / "p.json", "../gone")  # the plan alone was moved
    assert moved.model("mlp.py:build") == "mlp.py:build"


@pytest.mark.parametrize("folder", ["../gone", None])
def test_a_file_that_is_gone_is_told_with_all_places(project: Path, folder: str | None) -> None:
    """And what to do next."""
    files = PlanFiles(project / "plans" / "p.json", folder)
    beside = project / ("gone" if folder else "plans")
    with pytest.raises(PlanError) as error:
        files.model("mlp.py:build")
    places = [f"{beside}/mlp.py", f"{project}/other/mlp.py"]
    first, second = places if folder else places[::-1]
    assert str(error.value) == (
        f"The plan was made with the model file 'mlp.py', which is not found: there is no {first} "
        f"and no {second}. Put it there, or plan again where it is now."
    )
    with pytest.raises(PlanError, match=r"mine\.toml.*give one with --machine"):
        files.machine("mine.toml")
    with pytest.raises(PlanError, match=r"there is no /no/such/net\.onnx\. Put it there"):
        files.model("/no/such/net.onnx")


@pytest.mark.slow
def test_a_plan_is_used_from_another_folder(project: Path) -> None:
    """explain, trace and run find model and machine from a plan that was made elsewhere, also after
    the whole project was moved; then the model's file is another one, and they ask."""
    made = devplace(
        *("plan", "mlp.py:build", *PLAN_OPTIONS, "-o", "../plans/plan.json"),
        cwd=project / "project",
    )
    assert made.returncode == 0, made.stderr
    other, plan = project / "other", project / "plans" / "plan.json"
    assert json.loads(plan.read_text())["request"]["model"] == "mlp.py:build"
    told = devplace("explain", "../plans/plan.json", cwd=other)
    assert told.returncode == 0, told.stderr
    ran = devplace("run", str(plan), "--steps", "1", "--json", cwd=other)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["model"] == f"{project}/project/mlp.py:build"
    overwriting = devplace("trace", str(plan), "-o", "../project/mlp.py", cwd=other)
    refused(overwriting, 2, "would overwrite")
    (project / "new").mkdir()
    for name in ("project", "plans"):
        shutil.move(project / name, project / "new" / name)
    trace = ("trace", "../new/plans/plan.json", "-o", "t.json")
    refused(devplace(*trace, cwd=other), 2, "new/project/mlp.py", "--trust")
    traced = devplace(*trace, "--trust", cwd=other)
    assert traced.returncode == 0, traced.stderr
    shutil.rmtree(project / "new" / "project")
    refused(devplace("run", "../new/plans/plan.json", cwd=other), 2, "new/project/mine.toml")
    gone = devplace("run", "../new/plans/plan.json", "--machine", "cpux2", cwd=other)
    refused(gone, 2, "new/project/mlp.py", "plan again")


@pytest.mark.slow
def test_a_plan_is_refused_where_less_memory_is_free(project: Path) -> None:
    """Opened when others hold a device's memory: every command that opens the plan names the
    device, what it must hold and what it has, and ends with exit code 5."""
    folder = project / "project"
    made = devplace("plan", "mlp.py:build", *PLAN_OPTIONS, "-o", "plan.json", cwd=folder)
    assert made.returncode == 0, made.stderr
    peaks = json.loads((folder / "plan.json").read_text())["predicted"]["peak_bytes"]
    name, peak = max(peaks.items(), key=lambda pair: pair[1])
    machine = load_machine(str(folder / "mine.toml"))
    devices = tuple(
        msgspec.structs.replace(d, reserve_bytes=d.memory_bytes - peak + 1) if d.name == name else d
        for d in machine.devices
    )
    (folder / "mine.toml").write_text(toml.dumps(dataclasses.replace(machine, devices=devices)))
    for command in (("explain",), ("run",), ("trace", "-o", "trace.json")):
        done = devplace(command[0], "plan.json", *command[1:], cwd=folder)
        assert done.returncode == 5, done.stderr
        assert f"{name} must hold" in done.stderr
        assert f"({peak} bytes) and has" in done.stderr
        assert f"({peak - 1} bytes)" in done.stderr
        assert "Traceback" not in done.stderr
