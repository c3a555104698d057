"""The fused LSTM models compute what the unrolled workloads compute."""

from __future__ import annotations

import copy

import pytest
import torch
from experiments.gpu.lstm_models import from_unrolled
from torch import nn

from devplace import workloads

NAMES = ("rnnlm", "nmt-2", "nmt-4", "gnmt-4")


def gradients(model: nn.Module) -> dict[int, list[torch.Tensor]]:
    """Gradients by number of elements, each sorted."""
    by_size: dict[int, list[torch.Tensor]] = {}
    for parameter in model.parameters():
        assert parameter.grad is not None
        by_size.setdefault(parameter.numel(), []).append(parameter.grad.flatten().sort().values)
    return by_size


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_are_those_of_the_unrolled_model(name: str) -> None:
    """With the same weights, loss and every gradient agree to rounding in float64."""
    workload = workloads.build(name, size="small", device="cpu")
    unrolled = workload.model.double()
    fused, _ = from_unrolled(copy.deepcopy(unrolled))
    losses = []
    for model in (unrolled, fused):
        loss = workload.loss_fn(model, *workload.inputs)
        loss.backward()
        losses.append(loss.detach())
    torch.testing.assert_close(losses[0], losses[1])
    expected, found = gradients(unrolled), gradients(fused)
    assert {size: len(many) for size, many in found.items()} == {
        size: len(many) for size, many in expected.items()
    }
    for size, many in expected.items():
        for one in many:
            assert any(torch.allclose(one, other, rtol=1e-9, atol=1e-12) for other in found[size])


@pytest.mark.parametrize("name", ["rnnlm", "nmt-2", "nmt-4", "nmt-8", "gnmt-4"])
def test_parameters_are_as_many_at_full_size(name: str) -> None:
    """At full size the fused model has the unrolled one's number of parameters."""
    model = workloads.build(name, size="full", device="meta").model
    counts = [sum(p.numel() for p in one.parameters()) for one in (model, from_unrolled(model)[0])]
    assert counts[0] == counts[1]


def test_dropout_is_refused() -> None:
    """A model with dropout has no fused twin that draws the same masks."""
    workload = workloads.build("rnnlm", size="small", device="cpu", dropout=0.5)
    with pytest.raises(ValueError, match="dropout"):
        from_unrolled(workload.model)
