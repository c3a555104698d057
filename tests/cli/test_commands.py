"""The commands a user types: what they print, and their exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from tests.cli.runner import MLP, devplace, folder, refused

from devplace.cli import commands, main
from devplace.machine import load_machine

__all__ = ["folder"]

LIBRARY_OF = {
    "m-sct": "highspy",
    "scotch": "scotchpy",
    "scotch-repaired": "scotchpy",
    "mincut": "pymetis",
    "mincut-repaired": "pymetis",
}


@pytest.mark.slow
def test_compare_json_has_the_fixed_form(folder: Path) -> None:
    """stdout is one JSON value with the documented fields, integers for time and size."""
    done = devplace(
        *("compare", "mlp.py:build", "--machine", "k40x2", "--budget", "60ev", "--json"), cwd=folder
    )
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert set(data) == {"model", "machine", "lower_bound_ns", "rows", "notes"}
    names = [row["placer"] for row in data["rows"]]
    assert names == [
        "single",
        "cpu",
        "even",
        "layers",
        "expert",
        "data-parallel",
        "greedy",
        "topo",
        "heft",
        "etf",
        "m-topo",
        "m-etf",
        "m-sct",
        "mayer",
        "pipedream",
        "scotch",
        "scotch-repaired",
        "mincut",
        "mincut-repaired",
        "random",
        "climb",
        "search",
        "exact",
    ]
    skipped = [row["placer"] for row in data["rows"] if row["step_ns"] is None]
    without_library = {name for name, module in LIBRARY_OF.items() if find_spec(module) is None}
    assert set(skipped) <= {"cpu", "layers", "expert", "data-parallel"} | without_library
    for row in data["rows"]:
        if row["placer"] in skipped:
            assert row["feasible"] is False
            continue
        assert row["feasible"] is True
        assert isinstance(row["step_ns"], int)
        assert row["step_ns"] >= data["lower_bound_ns"]
        assert row["status"] in ("optimal", "feasible")
        assert row["gap"] == row["step_ns"] / row["lower_bound_ns"] - 1
        assert set(row["peak_bytes"]) <= {"cpu:0", "cuda:0", "cuda:1"}
        assert all(isinstance(n, int) for n in row["peak_bytes"].values())
        assert isinstance(row["transfer_bytes"], int)
        assert row["evaluations"] <= 60
    step = {row["placer"]: row["step_ns"] for row in data["rows"] if row["step_ns"] is not None}
    assert step["search"] == min(ns for placer, ns in step.items() if placer != "exact")


UNROLLED = """
import torch
from torch import nn
from torch.nn import functional as F

def run(model, x):
    h = x.new_zeros(2, 16)
    for step in x.unbind(1):
        h = model(step, h)
    return h.square().mean()

def build():
    return nn.GRUCell(16, 16), (torch.randn(2, 12, 16),), run
"""


@pytest.mark.slow
def test_a_plan_with_stacked_gradients_is_found_again(folder: Path) -> None:
    """The step has fewer ops, and the plan file says how to capture it for `run`."""
    (folder / "unrolled.py").write_text(UNROLLED)
    given = ("plan", "unrolled.py:build", "--machine", "cpux2", "--budget", "30ev", "-o")
    counts = []
    for name, flags in (("plain.json", ()), ("stacked.json", ("--stack-gradients",))):
        done = devplace(*given, name, *flags, cwd=folder)
        assert done.returncode == 0, done.stderr
        counts.append(len(json.loads((folder / name).read_text())["ops"]))
        done = devplace("run", name, cwd=folder)
        assert done.returncode == 0, done.stderr
    assert counts[1] < counts[0]


@pytest.mark.slow
def test_the_same_seed_and_evaluations_give_the_same_plan(folder: Path) -> None:
    """Two runs write the same file but for nothing."""
    for name in ("a.json", "b.json"):
        devplace(
            *("plan", "mlp.py:build", "--machine", "k40x4", "--budget", "80ev", "--seed", "3"),
            *("-o", name),
            cwd=folder,
        )
    assert (folder / "a.json").read_text() == (folder / "b.json").read_text()


@pytest.mark.slow
def test_a_plan_runs_and_is_checked(folder: Path) -> None:
    """run reports equality, losses and times; trace then has planned and measured processes."""
    done = devplace("run", "plan.json", "--steps", "2", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["bit_equal"] is True
    assert len(data["losses"]) == 2
    assert data["losses"][1] < data["losses"][0]
    assert "of an eager step" in data["eager"]
    assert data["ordinary_step_ns"] > 0
    assert "the ordinary step takes" in data["ordinary"]
    done = devplace("trace", "plan.json", "-o", "trace.json", cwd=folder)
    assert done.returncode == 0, done.stderr
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} >= {1, 2}


@pytest.mark.slow
def test_a_plan_that_stands_where_nothing_can_be_written_is_run(folder: Path) -> None:
    """What was checked and measured is told; a note says that the timeline is not kept."""
    (folder / "shared.json").write_bytes((folder / "plan.json").read_bytes())
    (folder / "shared.json.measured.json").mkdir()  # stands in for a folder without permission
    done = devplace("run", "shared.json", "--steps", "1", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "bit for bit equal" in done.stdout
    assert "note: the measured timeline is not kept" in done.stdout
    done = devplace("run", "shared.json", "--steps", "1", "--json", cwd=folder)
    assert "shared.json.measured.json" in json.loads(done.stdout)["notes"][0]


@pytest.mark.slow
def test_a_plan_is_explained(folder: Path) -> None:
    """explain has a row per module and a map that covers every parameter; --html is one page."""
    done = devplace("explain", "plan.json", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "no plan can be below" in " ".join(done.stdout.split())
    data = json.loads(devplace("explain", "plan.json", "--json", cwd=folder).stdout)
    assert {"0", "2"} <= {row["module"] for row in data["modules"]}
    placed = json.loads(devplace("explain", "plan.json", "--device-map", cwd=folder).stdout)
    assert placed == data["device_map"]
    assert set(placed.values()) <= {"cpu:0", "cpu:1"}
    assert set(data["run_elsewhere"]) <= {row["module"] for row in data["modules"]}
    done = devplace("explain", "plan.json", "--html", "one.html", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "<canvas" in (folder / "one.html").read_text()
    (folder / "map.json").write_text('{"0": "cpu:1", "2": "cpu:0"}')
    options = (
        "--machine",
        "cpux2",
        "--budget",
        "20ev",
        "--pins-from",
        "map.json",
        "-o",
        "again.json",
    )
    done = devplace("plan", "mlp.py:build", *options, cwd=folder)
    assert done.returncode == 0, done.stderr
    again = json.loads(devplace("explain", "again.json", "--device-map", cwd=folder).stdout)
    assert again == {"0": "cpu:1", "2": "cpu:0"}
    cut = json.loads(devplace("explain", "again.json", "--split-points", cwd=folder).stdout)
    assert cut == {"2": "cpu:0"}
    options = ("--machine", "cpux2", "--budget", "20ev", "--html", "page.html")
    done = devplace("compare", "mlp.py:build", *options, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "<canvas" in (folder / "page.html").read_text()


@pytest.mark.slow
def test_placers_that_learn_write_curves_and_resume(folder: Path) -> None:
    """--log-dir has curves and a checkpoint; --resume goes on; others refuse the folder."""
    options = ("plan", "mlp.py:build", "--machine", "cpux2", "--json")
    learning = (*options, "--placer", "post", "--log-dir", "runs")
    first = devplace(*learning, "--budget", "40ev", cwd=folder)
    assert first.returncode == 0, first.stderr
    (curves,) = (folder / "runs").glob("post-*/curves.csv")
    assert len(curves.read_text().splitlines()) == 3
    again = devplace(*learning, "--budget", "80ev", "--resume", cwd=folder)
    assert json.loads(again.stdout)["evaluations"] == 80
    assert len(curves.read_text().splitlines()) == 5
    done = devplace(*options, "--placer", "single", "--log-dir", "runs", cwd=folder)
    refused(done, 2, "single does not learn", "post-ce")
    refused(devplace(*options, "--placer", "post", "--resume", cwd=folder), 2, "--log-dir")
    checkpoint = curves.with_name("checkpoint.pt")
    assert f"went on from evaluation 40 of {checkpoint.parent.relative_to(folder)}" in again.stdout
    other = devplace(*learning, "--budget", "40ev", "--seed", "1", "--resume", cwd=folder)
    assert "started anew, as runs has no checkpoint of this run" in other.stdout
    checkpoint.write_bytes(b"no checkpoint")
    broken = devplace(*learning, "--budget", "80ev", "--resume", cwd=folder)
    refused(broken, 2, "Cannot resume from", "checkpoint.pt", "delete the file")


@pytest.mark.slow
def test_compare_refuses_curves_of_placers_that_have_none(folder: Path) -> None:
    """--log-dir and --resume need one placer that learns; its notes are told beside its name."""
    options = ("compare", "mlp.py:build", "--machine", "cpux2", "--budget", "20ev")
    for names in ("plain", "single,even"):
        done = devplace(*options, "--placers", names, "--log-dir", "none", cwd=folder)
        refused(done, 2, "None of these placers learns", "leave out --log-dir", "post-ce")
    assert not (folder / "none").exists()
    learning = ("--placers", "single,post", "--log-dir", "some", "--resume")
    done = devplace(*options, *learning, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "note: post: started anew, as some has no checkpoint" in done.stdout
    assert len(list((folder / "some").iterdir())) == 1


@pytest.mark.slow
def test_infeasible_rows_keep_their_figures(folder: Path) -> None:
    """With one device too small, its row says what lacks; nothing fitting anywhere is exit 3."""
    options = ("compare", "mlp.py:build", "--machine", "k40x2", "--placers", "single,even")
    done = devplace(
        *options,
        *("--budget", "20ev", "--limit", "cuda:0=1KB", "--exclude", "cpu:0", "--json"),
        cwd=folder,
    )
    rows = {row["placer"]: row for row in json.loads(done.stdout)["rows"]}
    assert rows["single"]["feasible"] is True
    assert rows["even"]["feasible"] is False
    assert rows["even"]["missing_bytes"]["cuda:0"] > 0
    assert rows["even"]["step_ns"] > 0
    tight = [f"--limit=cuda:{k}=1KB" for k in range(2)]
    done = devplace(*options, "--budget", "20ev", *tight, "--exclude", "cpu:0", cwd=folder)
    refused(done, 3, "cuda", "1000 B", "proved")


@pytest.mark.slow
def test_what_the_users_code_prints_is_not_in_the_json(folder: Path) -> None:
    """With --json, stdout is strict JSON: prints go to stderr, and NaN becomes null."""
    options = ("--machine", "cpux2", "--budget", "10ev", "-o", "chatty.json")
    done = devplace("plan", "mlp.py:chatty", *options, "--json", cwd=folder)
    assert json.loads(done.stdout)["feasible"] is True
    assert "building" in done.stderr
    assert "as C does" in done.stderr
    assert "forward" in done.stderr
    done = devplace("run", "chatty.json", "--steps", "1", "--json", cwd=folder)
    assert json.loads(done.stdout, parse_constant=pytest.fail)["losses"] == [None]


def test_a_closed_pipe_is_no_error(folder: Path) -> None:
    """`devplace workloads | head -1` ends well."""
    script = (
        "import os, sys; read, write = os.pipe(); os.close(read); os.dup2(write, 1)\n"
        "sys.argv = ['devplace', 'workloads']\n"
        "from devplace.cli import main; main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("command", [["machines", "k40x4"], ["explain", "plan.json"]])
@pytest.mark.slow
def test_a_closed_pipe_is_no_error_for_tables(folder: Path, command: list[str]) -> None:
    """Nor while a table is printed."""
    script = (
        "import os, sys; read, write = os.pipe(); os.close(read); os.dup2(write, 1)\n"
        f"sys.argv = ['devplace', *{command}]\n"
        "from devplace.cli import main; main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.slow
def test_names_are_shown_as_they_are(folder: Path) -> None:
    """Brackets are no markup, columns stay on narrow screens, and a letter that the terminal
    lacks is escaped."""
    (folder / "names.py").write_text(
        MLP + "\ndef odd():\n    model = torch.nn.Module()\n"
        "    model.add_module('[/b]größe', torch.nn.Linear(8, 4))\n"
        "    inputs = (torch.randn(6, 8), torch.randint(4, (6,)))\n"
        "    return model, inputs, lambda m, x, y: torch.nn.functional.cross_entropy("
        "dict(m.named_children())['[/b]größe'](x), y)\n"
    )
    (folder / "names.toml").write_text(
        '[[devices]]\nname = "[/red]"\nkind = "cpu"\nmemory = "1 GB"\n'
        'flops = "1 TFLOP/s"\nbandwidth = "9 GB/s"\n'
    )
    assert "[/red]" in devplace("machines", "names.toml", cwd=folder).stdout
    options = ("--machine", "names.toml", "--budget", "9ev", "-o", "names.json")
    assert devplace("plan", "names.py:odd", *options, cwd=folder).returncode == 0
    done = devplace("explain", "names.json", cwd=folder, COLUMNS="0", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "[/b]gr\\xf6\\xdfe" in done.stdout
    assert "[/red]" in done.stdout


@pytest.mark.slow
def test_ctrl_c_is_exit_code_130(folder: Path) -> None:
    """An interrupted command ends without a traceback."""
    code = "\ndef interrupt():\n    raise KeyboardInterrupt\n"
    (folder / "stop.py").write_text(MLP + code)
    done = devplace("plan", "stop.py:interrupt", "--machine", "cpux2", cwd=folder)
    refused(done, 130, "Aborted")


@pytest.mark.slow
def test_zero_size_tensors_are_planned_and_run(folder: Path) -> None:
    """A batch with an empty tensor is legal."""
    options = ("--machine", "cpux2", "--budget", "30ev", "-o", "zero.json")
    done = devplace("plan", "mlp.py:zero", *options, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert devplace("run", "zero.json", cwd=folder).returncode == 0


@pytest.mark.slow
def test_a_wrong_copy_is_exit_code_4(folder: Path) -> None:
    """When a transfer returns wrong data, the check ends the run with code 4."""
    script = (
        "import functools, sys\n"
        "import devplace.run.planned as planned\n"
        "wrong = lambda x, *rest: x.clone() + 1 if x.is_floating_point() else x.clone()\n"
        "planned.check_step = functools.partial(planned.check_step, copy=wrong)\n"
        "from devplace.cli import main\n"
        "sys.argv = ['devplace', 'run', 'pinned.json']\n"
        "main()\n"
    )
    options = ("--machine", "cpux2", "--budget", "30ev", "-o", "pinned.json")
    pins = ("--pin", "0=cpu:0", "--pin", "2=cpu:1")
    done = devplace("plan", "mlp.py:build", *options, *pins, cwd=folder)
    assert done.returncode == 0, done.stderr
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=False
    )
    refused(done, 4, "off by")


def test_lists_are_there_for_people_and_programs(folder: Path) -> None:
    """workloads and machines print names; --json is JSON."""
    done = devplace("workloads", cwd=folder)
    assert "gnmt-4" in done.stdout
    assert len(json.loads(devplace("workloads", "--json", cwd=folder).stdout)) == 14
    listing = json.loads(devplace("machines", "--json", cwd=folder).stdout)
    assert listing["simulator"] in ("native", "python")
    assert "k40x4" in [machine["name"] for machine in listing["machines"]]
    shown = devplace("machines", "k40x4", cwd=folder)
    assert "cuda:3" in shown.stdout
    assert json.loads(devplace("machines", "k40x4", "--json", cwd=folder).stdout)["sources"]
    cards = devplace("machines", cwd=folder).stdout.splitlines()
    assert any(row.split()[0] == "rtx4090" and " 24 GB " in row for row in cards if row)


def test_a_known_machine_is_written_to_be_edited(folder: Path) -> None:
    """The file is the machine; one that is there is not overwritten."""
    done = devplace("machines", "rtx4090+rtx3090x2", "-o", "mixed.toml", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert load_machine(folder / "mixed.toml") == load_machine("rtx4090+rtx3090x2")
    refused(devplace("machines", "h100", "-o", "mixed.toml", cwd=folder), 2, "is there already")
    refused(devplace("machines", "h100", "-o", "h100.json", cwd=folder), 2, "end in .toml")
    refused(devplace("machines", "-o", "all.toml", cwd=folder), 2, "Name one")


@pytest.mark.slow
def test_a_dict_batch_is_keyword_inputs(folder: Path) -> None:
    """A model file may return a dict of inputs; plan and run take it."""
    (folder / "named.py").write_text(
        MLP.replace(
            "return model, inputs, lambda m, x, y:", "return model, batch, lambda m, x, y:"
        ).replace(
            "    return model, batch",
            "    batch = dict(x=inputs[0], y=inputs[1])\n    return model, batch",
        )
    )
    options = ("--machine", "cpux2", "--budget", "20ev", "-o", "named.json")
    done = devplace("plan", "named.py:build", *options, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert devplace("run", "named.json", cwd=folder).returncode == 0


@pytest.mark.slow
def test_ctrl_c_keeps_the_best_plan_so_far(folder: Path) -> None:
    """An interrupted search writes what it has and exits with 130."""
    script = (
        "import os, signal, sys, threading\n"
        "from devplace.placers import counted_simulator\n"
        "remember = counted_simulator.Evaluator._remember\n"
        "def interrupt(self, *rest):\n"
        "    remember(self, *rest)\n"
        "    if self.meter.num_evaluations > 100:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "counted_simulator.Evaluator._remember = interrupt\n"
        "from devplace.cli import main\n"
        "line = 'devplace plan mlp.py:build --machine k40x4 --budget 600s -o cut.json'\n"
        "sys.argv = line.split()\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=False
    )
    refused(done, 130, "interrupted")
    assert json.loads((folder / "cut.json").read_text())["format"] == "devplace plan"


@pytest.mark.parametrize(
    ("value", "shows"), [("", False), ("0", False), ("off", False), ("False", False), ("1", True)]
)
def test_debugging_is_off_where_its_variable_says_so(
    value: str, shows: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """DEVPLACE_DEBUG set to 0, off or false is as if it were not set: a line, no traceback."""

    def broken(**options: object) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr("devplace.cli.commands.devplace", broken)
    monkeypatch.setenv("DEVPLACE_DEBUG", value)
    with pytest.raises(RuntimeError if shows else SystemExit):
        main()
    assert ("internal error: RuntimeError: a fault" in capsys.readouterr().err) != shows


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["plan", "x", "--bugdet", "9ev"], "No such option '--bugdet'. Did you mean '--budget'?"),
        (["plan", "x", "--evaluations", "9"], "No such option '--evaluations'."),
        (["run", "x", "--confirm"], "No such option '--confirm'. `devplace plan` has it."),
        (
            ["trace", "x", "--budget", "9ev"],
            "No such option '--budget'. `devplace plan`, `devplace compare`, `devplace bench` have "
            "it.",
        ),
    ],
)
def test_an_unknown_option_names_one_like_it_or_the_commands_that_have_it(
    words: list[str], told: str
) -> None:
    """Only options spelt much alike are suggested, however alike their dashes are."""
    found = CliRunner().invoke(commands.devplace, words)
    assert found.exit_code == 2
    assert found.output.splitlines()[-1] == f"Error: {told}"


def test_every_option_says_what_it_is() -> None:
    """Each has a help text, and each command a line that the overview shows whole."""
    for name, command in commands.devplace.commands.items():
        assert not command.get_short_help_str(limit=60).endswith("..."), name
        for option in command.params:
            if isinstance(option, click.Option):
                assert option.help, (name, option.name)
