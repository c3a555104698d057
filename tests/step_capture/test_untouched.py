"""Capture computes nothing and changes nothing, also when it fails."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from tests.step_capture.checks import batches, xent
from torch import nn

from devplace.errors import CaptureError
from devplace.step_capture import capture


class Messy(nn.Module):
    """Convolution, norm, dropout, and everything a forward pass may leave behind."""

    def __init__(self, fail: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.lstm = nn.LSTM(12, 8, batch_first=True)
        self.head = nn.Linear(8, 4)
        self.seen: list[torch.Tensor] = []
        self.last: torch.Tensor | None = None
        self.calls = 0
        self.fail = fail
        self.register_forward_hook(lambda m, i, o: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.drop(self.norm(self.conv(x.view(-1, 1, 4, 8)[:, :, :, :8])))
        h = self.head(self.lstm(h.flatten(2))[0][:, -1])
        self.calls += 1
        self.last = h
        self.seen.append(h)
        if self.fail:
            h = h * h.mean().item()
        return h


def snapshot(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything that must stay."""
    return {
        "state": copy.deepcopy(model.state_dict()),
        "objects": [id(t) for t in (*model.parameters(), *model.buffers())],
        "flat": [id(t) for t in model.lstm._flat_weights],
        "grads": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "modes": [m.training for m in model.modules()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        "attributes": [sorted(m.__dict__) for m in model.modules()],
        "own": (model.calls, model.last, list(model.seen)),
        "optimizer": copy.deepcopy(optimizer.state_dict()),
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
        "grad mode": torch.is_grad_enabled(),
        "backends": (torch.backends.cudnn.enabled, torch.backends.mkldnn.enabled),
    }


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Compare two snapshots."""
    for key, value in before.items():
        torch.testing.assert_close(after[key], value, rtol=0, atol=0, msg=key) if key in (
            "state",
            "torch",
        ) else _assert_plain(key, value, after[key])


def _assert_plain(key: str, before: Any, after: Any) -> None:
    if key == "grads":
        assert all((a is None) == (b is None) for a, b in zip(before, after, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True) if a is not None)
    elif key == "optimizer":
        assert str(before) == str(after)
    else:
        assert before == after, key


@pytest.mark.parametrize("fail", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("started", [False, True])
def test_s46_model_optimizer_and_generators_are_unchanged(
    fail: bool, training: bool, started: bool
) -> None:
    """State dict, objects, grads, flags, hooks, attributes and every generator are as before."""
    model = Messy(fail).train(training)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    x = torch.randn(6, 32)
    y = torch.zeros(6, dtype=torch.int64)
    if started:
        model.fail = False
        xent(model, x, y).backward()
        optimizer.step()
        model.fail, model.last, model.seen = fail, None, []
    before = snapshot(model, optimizer)
    if fail:
        with pytest.raises(CaptureError, match="reads a value"):
            capture(model, (x, y), xent, optimizer)
    else:
        capture(model, (x, y), xent, optimizer, clip_grad_norm=1.0)
        with torch.no_grad():
            capture(model, x)
    assert_same(before, snapshot(model, optimizer))


def test_capture_under_no_grad_still_differentiates() -> None:
    """A surrounding no_grad does not reach the training step."""
    model = nn.Linear(8, 4).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for surrounding in (torch.no_grad(), torch.inference_mode()):
        with surrounding:
            graph = capture(model, batches()[0], xent, optimizer)
        assert any(op.stage == "backward" for op in graph.ops)


def test_importing_the_graph_room_does_not_import_torch() -> None:
    """Saved graphs are planned without torch."""
    code = "import sys, devplace.graph; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_capture_allocates_no_weights() -> None:
    """A model of 400 GB on the meta device is captured."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(200_000, 250_000), nn.Linear(250_000, 200_000))
        x = torch.empty(4, 200_000)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    graph = capture(model, x, lambda m, x: m(x).square().mean(), optimizer)
    held = sum(graph.tensors[op.outputs[0]].num_bytes for op in graph.ops if op.role == "parameter")
    assert held > 400 * 10**9


def test_progress_is_reported() -> None:
    """Progress is called with a growing number of nodes."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(80)))
    seen: list[tuple[str, int]] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    capture(
        model,
        torch.randn(2, 4),
        lambda m, x: m(x).sum(),
        optimizer,
        progress=lambda stage, count: seen.append((stage, count)),
    )
    assert seen
    assert seen == sorted(seen)
