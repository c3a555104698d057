"""`parallelize` with fused steps, and beside torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import devplace as dp
from devplace.auto import compiled
from devplace.auto.compiled import compiled_step_ns
from devplace.auto.local_devices import fuses
from devplace.kernels import fused

pytestmark = pytest.mark.usefixtures("patient")
QUICK: dict[str, Any] = {"machine": "cpux2", "budget": "30ev,1200s"}


def job() -> tuple[nn.Module, Any, Any, Any]:
    """Model, batch, loss and optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3))
    batch = (torch.randn(8, 6), torch.randint(3, (8,)))
    return model, batch, nn.functional.cross_entropy, torch.optim.AdamW(model.parameters())


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.slow
def test_a_fused_step_trains_as_the_plain_one() -> None:
    """Members run one by one here, so losses are equal; pins part groups."""
    found = []
    for fuse in (False, True):
        pins = {"1": "cpu:0", "2": "cpu:1"}
        with dp.parallelize(*job(), fuse=fuse, pins=pins, verify=True, **QUICK) as step:
            assert step.graph.is_fused is fuse
            found.append([float(step(*job()[1])) for _ in range(3)])
    assert found[0] == pytest.approx(found[1], rel=1e-6)


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.slow
def test_the_report_tells_what_torch_compile_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time, or why there is none; model and optimizer stay as they were."""
    monkeypatch.setattr(compiled.torch, "compile", lambda call, mode: call)
    model, batch, loss, optimizer = job()
    before = [p.detach().clone() for p in model.parameters()]
    options = {"compare_compile": True, "confirm": False, **QUICK}
    with dp.parallelize(model, batch, loss, optimizer, **options) as step:
        assert "the ordinary step under torch.compile takes " in str(step)
    assert all(map(torch.equal, before, model.parameters()))
    assert not optimizer.state

    def refuse(call: Any, mode: str) -> Any:
        raise RuntimeError("no compiler\nhere")

    monkeypatch.setattr(compiled.torch, "compile", refuse)
    with dp.parallelize(model, batch, loss, optimizer, **options) as step:
        assert "torch.compile did not compile the ordinary step: no compiler" in str(step)


def test_an_inference_is_timed_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled call is that of the model."""
    modes = []

    def compile_(call: Any, mode: str) -> Any:
        return lambda *args: modes.append(torch.is_grad_enabled()) or call(*args)

    monkeypatch.setattr(compiled.torch, "compile", compile_)
    assert compiled_step_ns(dp.capture(nn.Linear(2, 2), torch.randn(3, 2)), torch.randn(3, 2)) > 0
    assert set(modes) == {False}


def test_steps_for_cpus_are_not_fused_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those for GPUs are, where a compiler is there."""
    assert not fuses("cpu")
    for reason, expected in (("", True), ("no triton", False)):
        monkeypatch.setattr(fused, "why_not_compiled", lambda device, why=reason: why)
        assert fuses("cuda") is expected
