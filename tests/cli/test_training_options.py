"""Options of the training step, and `python -m devplace`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner
from tests.cli.runner import MLP

from devplace.cli.commands import devplace

COMMON = ("--machine", "cpux2", "--budget", "5ev", "--placer", "random")


def test_autocast_clipping_and_micro_batches_are_kept_in_the_plan(tmp_path: Path) -> None:
    """A plan made with them is found again by `explain`, which captures the step anew."""
    (tmp_path / "mlp.py").write_text(MLP)
    plan = tmp_path / "plan.json"
    options = ("--autocast", "bfloat16", "--clip-grad-norm", "0.5", "--micro-batches", "2")
    options += ("--batch-dim", "1=0", "--no-compare-batches")
    model = f"{tmp_path / 'mlp.py'}:build"
    result = CliRunner().invoke(devplace, ["plan", model, *COMMON, *options, "-o", str(plan)])
    assert result.exit_code == 0, result.output
    request = json.loads(plan.read_text())["request"]
    assert request["autocast"] == "bfloat16"
    assert request["clip_grad_norm"] == 0.5
    assert request["batch_dims"] == {"1": 0}
    assert request["compare_batches"] is False
    names = json.loads(plan.read_text())["ops"]
    assert any(name.startswith("linalg_vector_norm") for name in names)
    assert any(name.startswith("_to_copy") for name in names)
    result = CliRunner().invoke(devplace, ["explain", str(plan)])
    assert result.exit_code == 0, result.output


def test_python_dash_m_is_the_command_line() -> None:
    """For environments whose scripts are not on the path."""
    done = subprocess.run(
        [sys.executable, "-m", "devplace", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("devplace")
