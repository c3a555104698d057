"""Bad input is one line that names the culprit, and the right exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli.runner import MLP, devplace, folder, refused

__all__ = ["folder"]

BAD: list[tuple[list[str], int, list[str]]] = [
    (["plan", "nmt-5"], 2, ["nmt-4"]),
    (["plan", "mlp.py:biuld"], 2, ["build"]),
    (["plan", "nowhere.py:build"], 2, ["nowhere.py"]),
    (["plan", "mlp.py:crash"], 2, ["no data today"]),
    (["plan", "mlp.py:wrong"], 2, ["(model, inputs, loss_fn)"]),
    (["plan", "mlp.py:empty"], 2, ["trainable parameters"]),
    (["plan", "mlp.py:branch"], 2, ["mlp.py:17"]),
    (["plan", "mlp.py:build", "--machine", "k41x4"], 2, ["k40x4"]),
    (["plan", "mlp.py:build", "--machine", "bad.toml"], 2, ["bad.toml:6", "bandwidth"]),
    (["plan", "mlp.py:build", "--budget", "0"], 2, ["30s"]),
    (["plan", "mlp.py:build", "--budget", "0s"], 2, ["positive"]),
    (["plan", "mlp.py:build", "--budget", "0ev"], 2, ["positive"]),
    (["plan", "mlp.py:build", "--budget", "soon"], 2, ["30s"]),
    (["plan", "mlp.py:build", "--placer", "serach"], 2, ["search"]),
    (["plan", "mlp.py:build", "--optimizer", "lion"], 2, ["sgd"]),
    (["plan", "mlp.py:build", "--batch", "4"], 2, ["batch"]),
    (["plan", "mlp.py:build", "--micro-batches", "0"], 2, ["micro-batches"]),
    (["plan", "mlp.py:build", "--micro-batches", "7"], 2, ["7"]),
    (["plan", "mlp.py:build", "--limit", "cuda:0"], 2, ["cuda:0=20GiB"]),
    (["plan", "mlp.py:build", "--machine", "k40x2", "--limit", "cuda:9=1GB"], 2, ["cuda:1"]),
    (["plan", "mlp.py:build", "--machine", "k40x2", "--limit", "cuda:0=ten"], 2, ["ten"]),
    (["plan", "mlp.py:build", "--machine", "k40x2", "--pin", "7=cuda:1"], 2, ["7"]),
    (["plan", "mlp.py:build", "--machine", "k40x2", "--pin", "0=tpu:0"], 2, ["tpu:0"]),
    (["plan", "mlp.py:build", "-o", "no/such/folder/plan.json"], 2, ["no/such/folder"]),
    (["plan", "mlp.py:build", "--budget", "9ev", "--size", "huge"], 2, ["huge"]),
    (["compare", "mlp.py:build", "--placers", "heft,hefft"], 2, ["heft"]),
    (["plan", "mlp.py:build", "--ray", "local"], 2, ["--ray and --workers go together"]),
    (["compare", "mlp.py:build", "--workers", "2"], 2, ["--ray and --workers go together"]),
    (["run", "nothing.json"], 2, ["nothing.json"]),
    (["run", "odd-limits.json"], 2, ["limits"]),
    (["run", "odd-model.json"], 2, ["model"]),
    (["trace", "plan.json", "-o", "plan.json"], 2, ["overwrite plan.json"]),
    (["trace", "plan.json", "-o", "./mlp.py"], 2, ["overwrite mlp.py"]),
    (["plan", "mlp.py:build", "-o", "mlp.py"], 2, ["overwrite mlp.py"]),
    (["plan", "mlp.py:build", "-o", "x.json", "--html", "x.json"], 2, ["overwrite x.json"]),
    (["run", "truncated.json"], 2, ["truncated.json"]),
    (["run", "edited.json"], 2, ["device"]),
    (["run", "other-model.json"], 2, ["other.py", "--trust"]),
    (["run", "other-model.json", "--trust"], 5, ["another"]),
    (["run", "plan.json", "--model", "other.py:build"], 5, ["another"]),
    (["run", "plan.json", "--seed", "9" * 20], 2, ["--seed"]),
    (["explain", "not-utf8.json"], 2, ["not-utf8.json", "UTF-8"]),
    (["explain", "deep.json"], 2, ["deep.json", "too deeply"]),
    (["explain", "/dev/null"], 2, ["/dev/null"]),
    (["machines", "deep.toml"], 2, ["deep.toml", "too deeply"]),
    (["machines", "digits.toml"], 2, ["digits.toml", "digits"]),
    (["machines", "not-utf8.toml"], 2, ["not-utf8.toml", "UTF-8"]),
    (["machines", "streams.toml"], 2, ["streams", "1025", "2000000000"]),
    (["plan", "mlp.py:build", "--seed", "-1"], 2, ["--seed"]),
    (["plan", "mlp.py:build", "--budget", "1e300s"], 2, ["1e300s"]),
    (["plan", "mlp.py:build", "--budget", "9" * 30 + "ev"], 2, ["9,007,199,254,740,992"]),
    (["plan", "mlp.py:build", "--limit", "cpu:0=1e999GB"], 2, ["cpu:0"]),
    (["bench", "mlp.py", "--threads", "100000"], 2, ["1024", "100000"]),
    (["run", "plan.json", "--machine", "cpux3"], 5, ["cpu:2"]),
    (["explain", "bound.json", "--machine", "k40x2"], 5, ["another machine", "cuda:1"]),
    (["compare", "mlp.py:build", "--placers", "data-parallel"], 2, ["micro_batches=2"]),
    (["plan", "mlp.py:build", "--autocast", "float16"], 2, ["bfloat16", "loss scaling"]),
    (["plan", "mlp.py:build", "--clip-grad-norm", "0"], 2, ["positive"]),
    (["plan", "mlp.py:build", "--batch-dim", "0=x"], 2, ["'whole'"]),
    (["plan", "mlp.py:build", "--machine", "k40x2", "--budget", "1ev,2ev"], 2, ["twice"]),
    (["trace", "plan.json", "-o", "no/such/folder/t.json"], 2, ["no/such/folder"]),
    (["machines", "k40x99"], 2, ["k40"]),
    (["plan", "mlp.py:build", "--pins-from", "no.json"], 2, ["device map no.json", "No such file"]),
    (["plan", "mlp.py:build", "--pins-from", "mlp.py"], 2, ["mlp.py holds no device map"]),
    (["plan", "mlp.py:build", "--pins-from", "twice.json"], 2, ["twice.json names '0' twice"]),
    (["plan", "mlp.py:build", "--recompute"], 2, ["repeats nothing. Leave --recompute out"]),
    (["plan", "mlp.py:build", "--optimizer", "adam:amsgrad='yes'"], 2, ["True or False"]),
    (["plan", "mlp.py:build", "--optimizer", "adam:lrr=1"], 2, ["'lrr'", "mean 'lr'", "betas"]),
    (["plan", "mlp.py:build", "--machine", "no.toml"], 2, ["no.toml", "Check the path", "-o FILE"]),
    (["machines", "bad.toml"], 2, ["bad.toml:6"]),
    (
        ["plan", "mlp.py:build", "--limit", "cpu:0=4GB,cpu:1=4GB"],
        2,
        ["cuda:0=20GiB at a time", "--limit cpu:0=4GB --limit"],
    ),
    (["plan", "mlp.py:build", "--exclude", "cpu:0,cpu:1"], 2, ["one device at a time"]),
    (["plan", "plan.json"], 2, ["explain, run and trace"]),
    (["explain", "mlp.py:build"], 2, ["`devplace plan MODEL -o FILE` writes plans"]),
    (["machines", "cyclic.toml"], 2, ["cyclic.toml"]),
]


@pytest.fixture(scope="module")
def bad_files(folder: Path) -> Path:
    """Damaged files beside the good ones."""
    text = (folder / "plan.json").read_text()
    data: dict[str, Any] = json.loads(text)
    data["request"]["limits"] = {"cpu:1": "1GB"}
    (folder / "bound.json").write_text(json.dumps(data))
    (folder / "truncated.json").write_text(text[: len(text) // 2])
    data = json.loads(text)
    data["placement"][0] = 7
    (folder / "edited.json").write_text(json.dumps(data))
    (folder / "other.py").write_text(
        MLP.replace("Linear(8, 16)", "Linear(8, 32)").replace("Linear(16, 4)", "Linear(32, 4)")
    )
    for key in ("limits", "model"):
        data = json.loads(text)
        data["request"][key] = 5
        (folder / f"odd-{key}.json").write_text(json.dumps(data))
    data = json.loads(text)
    data["request"]["model"] = "other.py:build"
    (folder / "other-model.json").write_text(json.dumps(data))
    (folder / "not-utf8.json").write_bytes(text.encode().replace(b"mlp.py", b"ml\xff.py"))
    (folder / "deep.json").write_text('{"request": {"x": ' + "[" * 100_000)
    (folder / "deep.toml").write_text("x = " + "[" * 4000)
    (folder / "digits.toml").write_text("x = " + "9" * 5000)
    (folder / "twice.json").write_text('{"0": "cpu:0", "2": "cpu:1", "0": "cpu:1"}')
    (folder / "not-utf8.toml").write_bytes(b'name = "\xff"')
    (folder / "streams.toml").write_text(
        '[[devices]]\nname = "cpu:0"\nmemory = "1GB"\nbandwidth = "1 GB/s"\n'
        'flops = "1 TFLOP/s"\nstreams = 2000000000\n'
    )
    device = '[[devices]]\nname = "{}"\nkind = "cpu"\nmemory = "1GB"\n'
    (folder / "bad.toml").write_text(
        'name = "bad"\n\n[[devices]]\nname = "cpu:0"\nkind = "cpu"\nbandwidth = "-3 GB/s"\n'
        'memory = "1GB"\nflops = "1 TFLOP/s"\n'
    )
    (folder / "cyclic.toml").write_text('name = "x"\n' + device.format("a") + "links = [[[\n")
    return folder


@pytest.mark.parametrize(("arguments", "code", "words"), BAD, ids=lambda v: str(v)[:60])
@pytest.mark.slow
def test_bad_input_is_one_line_and_the_right_exit_code(
    bad_files: Path, arguments: list[str], code: int, words: list[str]
) -> None:
    """Never a traceback; the message names the culprit and what to do."""
    refused(devplace(*arguments, cwd=bad_files), code, *words)


@pytest.mark.parametrize(
    ("field", "value"),
    [("start_ns", True), ("finish_ns", []), ("transfer_finish_ns", [10**30]), ("graph", None)],
)
@pytest.mark.slow
def test_a_damaged_measured_file_is_named(folder: Path, field: str, value: Any) -> None:
    """Wrong types, lengths and numbers in it are one line that says what to do."""
    (folder / "kept.json").write_bytes((folder / "plan.json").read_bytes())
    assert devplace("run", "kept.json", "--steps", "1", cwd=folder).returncode == 0
    path = folder / "kept.json.measured.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    done = devplace("trace", "kept.json", "-o", "kept-trace.json", cwd=folder)
    refused(done, 2, "kept.json.measured.json is damaged", "run the plan again")
