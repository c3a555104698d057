"""`devplace bench` as a user meets it."""

import json

import pytest
from click.testing import CliRunner
from tests.instances import files

from devplace.cli.commands import devplace
from devplace.errors import InputError


def bench(*arguments):
    """What it prints; its error is raised as the command line would catch it."""
    result = CliRunner().invoke(devplace, ["bench", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def rows(*arguments):
    """Rows of --json."""
    result = bench(*arguments, "--json")
    assert result.exit_code == 0
    return json.loads(result.stdout)["rows"]


@pytest.fixture
def path(tmp_path):
    """A small Tarnawski file."""
    return files.write(tmp_path, "net.json", files.tarnawski())


def test_json_has_the_promised_keys(path):
    """Suite and rows, values in the instance's unit, and nothing else on stdout."""
    result = bench(path, "--budget", "20s", "--json")
    data = json.loads(result.stdout)
    assert set(data) == {"suite", "rows"}
    assert data["suite"] == str(path)
    (row,) = data["rows"]
    keys = {"instance", "objective", "value", "best_known", "bound", "status", "seconds"}
    assert keys <= set(row)
    assert (row["instance"], row["objective"], row["value"]) == ("net", "throughput", 3.25)
    assert (row["unit"], row["best_known"], row["seed"]) == ("ms", None, 0)


def test_table_names_everything(path):
    """Value, bound, gap and status stand in one line per instance."""
    out = bench(path, "--budget", "20s").stdout
    head, line = out.splitlines()[:2]
    for column in ("instance", "value", "best known", "bound", "gap", "status", "seconds"):
        assert column in head
    assert line.split()[:4] == ["net", "throughput", "3.25", "ms"]


def test_infeasible_is_no_error(path):
    """Status and reason, value null, exit code 0."""
    (row,) = rows(path, "--cpus", "0", "--budget", "20s")
    assert (row["status"], row["value"], row["gap"]) == ("infeasible", None, None)
    out = bench(path, "--cpus", "0", "--budget", "20s").stdout
    assert "net: infeasible: " in out


def test_changes_are_applied(path):
    """Devices, memory and edge costs of the command line are those that are solved."""
    (row,) = rows(path, "--devices", "1", "--budget", "20s")
    assert row["value"] == 4.5  # both on the one accelerator, and out
    (row,) = rows(path, "--edge-cost-scale", "0", "--budget", "20s")
    assert row["value"] == 2.5
    (row,) = rows(path, "--memory", "50B", "--devices", "1", "--budget", "20s")
    assert row["value"] == 10.5 + 0.0
    assert row["changed"] == "--devices 1 --memory 50"


def test_solutions_are_written(path, tmp_path):
    """With the device of every node, so that others can check them."""
    output = tmp_path / "out.json"
    bench(path, "--budget", "20s", "-o", output)
    (row,) = json.loads(output.read_text())["rows"]
    assert len(row["solution"]["device"]) == 3
    assert row["file"] == str(path)
    with pytest.raises(InputError, match="would overwrite"):
        bench(path, "-o", path)
    with pytest.raises(InputError, match="no such folder"):
        bench(path, "-o", tmp_path / "no" / "x.json")


def test_records_are_kept_only_if_asked_for(path, tmp_path, monkeypatch):
    """--record writes the verified value; a second run has nothing to add."""
    from devplace.bench import best_known

    target = tmp_path / "best.json"
    target.write_text("[]")
    monkeypatch.setattr(best_known, "FILE", target)
    bench(path, "--budget", "20s")
    assert json.loads(target.read_text()) == []
    out = bench(path, "--budget", "20s", "--seed", "4", "--record").stdout
    assert "Best known values recorded: 1" in out
    (entry,) = json.loads(target.read_text())
    assert (entry["value"], entry["seed"], entry["instance"]) == (3.25, 4, "net")
    (row,) = rows(path, "--budget", "20s")
    assert row["best_known"] == 3.25


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["nothing"], "no file, folder or suite"),
        (["--placer", "foo"], "Known for it: search"),
        (["--budget", "soon"], "budget"),
        (["--memory", "much"], "--memory"),
        (["--objective", "cost"], "Unknown objective"),
        (["--bandwidth", "5"], "--bandwidth changes nothing"),
    ],
)
def test_mistakes_are_one_line(path, arguments, what):
    """Each is an input error that names the option."""
    given = arguments if arguments == ["nothing"] else [path, *arguments]
    with pytest.raises(InputError, match=what):
        bench(*given)


def test_a_file_of_pipeline_stages(tmp_path):
    """PipeDream and Piper files are solved by their own programmes."""
    profile = files.write(tmp_path, "p.txt", files.PIPEDREAM)
    (row,) = rows(profile, "--devices", "1")
    assert (row["value"], row["unit"], row["status"]) == (0.004, "s", "optimal")
    layers = files.write(tmp_path, "v.json", files.piper())
    (row,) = rows(layers)
    assert row["value"] <= 0.875 + 0.15
    (row,) = rows(layers, "--memory", "1B")
    assert (row["status"], row["value"]) == ("infeasible", None)
