"""Device maps split the parameters evenly and keep what must stay whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from experiments.gpu.device_map import WHOLE, balanced_map
from experiments.gpu.training import Settings

from devplace import workloads
from experiments.gpu import rows

pytest.importorskip("accelerate")


@pytest.mark.parametrize("num_devices", [2, 4])
def test_a_balanced_map_uses_all_devices(num_devices: int) -> None:
    """BERT-large is cut between blocks, each device holding a fair share of the parameters."""
    model = workloads.build("bert-large", size="full", device="meta").model
    device_map = balanced_map(model, num_devices, WHOLE)
    held = [0] * num_devices
    for name, device in device_map.items():
        held[device] += sum(p.numel() for p in model.get_submodule(name).parameters())
    assert min(held) > 0.5 * sum(held) / num_devices
    assert device_map["projection"] == device_map["word_embedding"]


def test_hooks_train_the_model(tmp_path: Path) -> None:
    """The row's losses are those of the eager row; on the CPU all devices are one."""
    settings = Settings("nmt-2", size="small", device="cpu", seconds=30.0, steps=3, gpus=2)
    mapped = rows.run_row("experiments.gpu.device_map", settings, tmp_path / "map.json")
    eager = rows.run_row("experiments.gpu.eager", settings, tmp_path / "eager.json")
    assert mapped["status"] == "ok", mapped
    for name in ("first_loss", "last_loss"):
        assert mapped[name] == pytest.approx(eager[name], rel=1e-5)
