"""Graphs from files on the command line."""

import json

import pytest
import torch
from click.testing import CliRunner

from devplace.cli.commands import devplace
from devplace.cli.imported import fused_import
from devplace.errors import InputError
from devplace.testing import hand_graph

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A small export."""
    layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    path = tmp_path_factory.mktemp("imported") / "net.pt2"
    torch.export.save(torch.export.export(layers, (torch.zeros(2, 8),)), str(path))
    return path


def call(*arguments):
    """Output of a command; its error is raised."""
    result = CliRunner().invoke(devplace, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_plan_explain_and_trace(path, tmp_path):
    """An imported graph is planned with analytic costs, explained and traced."""
    plan = tmp_path / "plan.json"
    common = ("--machine", "k40x2", "--budget", "20ev", "--json")
    found = json.loads(call("plan", path, *common, "-o", plan))
    assert found["feasible"]
    assert json.loads(plan.read_text())["request"]["model"] == str(path)
    assert "layers" in call("explain", plan) or "0" in call("explain", plan)
    call("trace", plan, "-o", tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = json.loads(call("compare", path, *common, "--placers", "single,heft"))["rows"]
    assert [row["placer"] for row in rows] == ["single", "heft"]


def test_it_can_be_planned_fused(path, tmp_path):
    """Ops of an export are known to be fusible or not; the plan says that it is fused."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.LayerNorm(8))
    saved, plan = tmp_path / "norm.pt2", tmp_path / "plan.json"
    torch.export.save(torch.export.export(module.eval(), (torch.zeros(2, 4),)), str(saved))
    call("plan", saved, "--fuse", "--machine", "k40x2", "--budget", "20ev", "-o", plan)
    data = json.loads(plan.read_text())
    assert data["request"]["fuse"]
    assert any(name.startswith("fused_") for name in data["ops"])
    assert "1" in call("explain", plan)


def test_a_file_that_does_not_tell_what_is_fusible_is_refused():
    """As of ONNX files; the message says what to do."""
    with pytest.raises(InputError, match="Leave --fuse out"):
        fused_import("net.onnx", hand_graph("x = input\na = Relu(x) result=output"), {})


def test_it_cannot_be_run(path, tmp_path):
    """Neither `run` nor `--confirm`: it has no values."""
    plan = tmp_path / "plan.json"
    call("plan", path, "--machine", "k40x2", "--budget", "20ev", "-o", plan)
    with pytest.raises(InputError, match="but not run"):
        call("run", plan)
    with pytest.raises(InputError, match="but not run"):
        call("plan", path, "--machine", "cpux2", "--confirm")


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--batch", "4"], "Leave --batch out"),
        (["--micro-batches", "2"], "--micro-batches"),
        (["--size", "small"], "--size"),
    ],
)
def test_options_without_meaning_are_refused(path, options, what):
    """The file is planned as it is."""
    with pytest.raises(InputError, match=what):
        call("plan", path, "--machine", "k40x2", *options)


def test_the_file_is_not_overwritten(path):
    """An output must not replace what is read."""
    with pytest.raises(InputError, match="overwrite"):
        call("plan", path, "--machine", "k40x2", "-o", path)
