"""`--fuse` from planning to tracing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.runner import devplace, folder

__all__ = ["folder"]

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.act = nn.GELU()
        self.norm = nn.LayerNorm(32)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(32, 4)

    def forward(self, x):
        return self.last(self.drop(self.norm(self.act(self.first(x)))))

def build():
    torch.manual_seed(0)
    return Net(), (torch.randn(8, 16), torch.randint(0, 4, (8,))), nn.CrossEntropyLoss()
"""
GIVEN = ("net.py:build", "--machine", "cpux2", "--budget", "60ev", "--placer", "even")
ONE_BY_ONE = {"DEVPLACE_COMPILE": "0"}
"""The compiler takes seconds; what it makes is tested elsewhere."""


@pytest.fixture(scope="module")
def planned(folder: Path) -> Path:
    """A folder with plans of a small net, plain and fused."""
    (folder / "net.py").write_text(NET)
    for name, flags in (("plain.json", ()), ("fused.json", ("--fuse",))):
        done = devplace("plan", *GIVEN, *flags, "-o", name, cwd=folder)
        assert done.returncode == 0, done.stderr
    return folder


def read(path: Path) -> dict:
    """A plan file."""
    return json.loads(path.read_text())


@pytest.mark.slow
def test_a_plan_says_whether_it_is_fused(planned: Path) -> None:
    """Without GPUs a step is plain unless --fuse is given; stacked gradients follow."""
    plain, fused = read(planned / "plain.json"), read(planned / "fused.json")
    kept = [{k: p["request"][k] for k in ("fuse", "stack_gradients")} for p in (plain, fused)]
    assert kept == [
        {"fuse": False, "stack_gradients": False},
        {"fuse": True, "stack_gradients": True},
    ]
    assert any(name.startswith("fused_") for name in fused["ops"])
    assert not any(name.startswith("fused_") for name in plain["ops"])


@pytest.mark.slow
def test_each_option_can_be_given_alone(planned: Path) -> None:
    """--no-stack-gradients with --fuse."""
    done = devplace(
        "plan", *GIVEN, "--fuse", "--no-stack-gradients", "-o", "mixed.json", cwd=planned
    )
    assert done.returncode == 0, done.stderr
    request = read(planned / "mixed.json")["request"]
    assert (request["fuse"], request["stack_gradients"]) == (True, False)


@pytest.mark.slow
def test_explain_needs_no_flag_and_lists_the_same_modules(planned: Path) -> None:
    """The plan says how it was made; modules and device map are those of the plain plan's model."""
    found = []
    for name in ("plain.json", "fused.json"):
        done = devplace("explain", name, "--json", cwd=planned)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    modules = [{row["module"] for row in data["modules"]} for data in found]
    assert modules[0] == modules[1] >= {"first", "act", "norm", "drop", "last"}


@pytest.mark.slow
def test_a_fused_plan_runs_and_is_traced(planned: Path) -> None:
    """run equals the unplaced fused step bit for bit; trace and deviations have the groups."""
    done = devplace(
        *("run", "fused.json", "--steps", "2", "--deviations", "--json"), cwd=planned, **ONE_BY_ONE
    )
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["bit_equal"]
    assert any("modules" in row for row in data["deviations"]["ops"])
    done = devplace("trace", "fused.json", "-o", "trace.json", cwd=planned)
    assert done.returncode == 0, done.stderr
    assert "planned and measured" in done.stdout
    events = json.loads((planned / "trace.json").read_text())["traceEvents"]
    assert any("act" in e.get("args", {}).get("modules", ()) for e in events)


@pytest.mark.slow
def test_compare_says_how_many_ops_became_how_many(planned: Path) -> None:
    """The first line has the ops of the fused step, and of the plain one."""
    done = devplace(
        *("compare", *GIVEN[:5], "--fuse", "--placers", "single,even"), cwd=planned, **ONE_BY_ONE
    )
    assert done.returncode == 0, done.stderr
    assert " (fused of " in done.stdout


@pytest.mark.slow
def test_pins_part_groups(planned: Path) -> None:
    """A pin of one module of a group is no error; the plan can be explained and run."""
    done = devplace(
        *("plan", *GIVEN, "--fuse", "--pin", "act=cpu:1", "--pin", "norm=cpu:0"),
        *("-o", "pinned.json"),
        cwd=planned,
    )
    assert done.returncode == 0, done.stderr
    assert len(read(planned / "pinned.json")["ops"]) > len(read(planned / "fused.json")["ops"])
    done = devplace("explain", "pinned.json", "--json", cwd=planned)
    assert done.returncode == 0, done.stderr
    rows = {row["module"]: row for row in json.loads(done.stdout)["modules"]}
    assert (list(rows["act"]["devices"]), rows["act"]["why"]) == (["cpu:1"], "pinned")
    assert list(rows["norm"]["devices"]) == ["cpu:0"]
    done = devplace("run", "pinned.json", "--steps", "1", cwd=planned, **ONE_BY_ONE)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_plan_file_without_the_word_is_plain(planned: Path) -> None:
    """Plans of versions that did not fuse are found again."""
    data = read(planned / "plain.json")
    del data["request"]["fuse"]
    (planned / "old.json").write_text(json.dumps(data))
    done = devplace("explain", "old.json", cwd=planned)
    assert done.returncode == 0, done.stderr
