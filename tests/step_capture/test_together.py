"""Parts of capture that meet in one step: each keeps what it says of itself beside the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.run.placed import NAMES
from tests.run.tracing import random_placement
from tests.step_capture.placed_steps import assert_as_eager, planned
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import devplace as dp
from devplace.errors import CaptureError
from devplace.run.check import check_step

FLOAT = torch.float64


class Net(nn.Module):
    """Two layers, and between them what a test does there."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 6), nn.Linear(6, 3)
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.change(self.first(x)))


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Labels are padded unevenly."""
    torch.manual_seed(1)
    labels = torch.randint(0, 3, (6,))
    labels[:2] = -100
    return torch.randn(6, 8, dtype=FLOAT), labels


def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def dropped(h: torch.Tensor) -> torch.Tensor:
    """A layer that is dropped at rate 0."""
    return h if torch.rand([]) < 0.0 else h.tanh()


def checkpointed(h: torch.Tensor) -> torch.Tensor:
    return checkpoint(torch.tanh, h, use_reentrant=False)


def counted(h: torch.Tensor) -> torch.Tensor:
    """Elements that are counted in memory, of what lies transposed."""
    made = F.instance_norm(h.t().unsqueeze(0)).squeeze(0).t()
    return h + torch.as_strided(h.t(), h.shape, h.stride()) + 0 * made


def masked(h: torch.Tensor) -> torch.Tensor:
    h = h.clone()
    h[h[:, 0] > 0] = h.new_zeros(6)
    return h


@pytest.mark.parametrize("change", [dropped, checkpointed, counted, masked])
def test_micro_batches_of_padded_labels_are_the_whole_batch(change: Any) -> None:
    """Whatever the rehearsal, the fake tensors or the replays of checkpoints do in between."""
    twin, model = Net(change).double(), Net(change).double()
    batch = rows()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = dp.capture(model, batch, loss_fn, sgd, 3)
    assert "unchecked" not in graph.meta
    with dp.compile(graph, planned(graph)) as step:
        found = [float(step(*batch)) for _ in range(2)]
    theirs = torch.optim.SGD(twin.parameters(), lr=0.1)
    expected = []
    for _ in range(2):
        theirs.zero_grad()
        loss = loss_fn(twin, *batch)
        loss.backward()
        theirs.step()
        expected.append(float(loss.detach()))
    assert found == pytest.approx(expected, rel=1e-12)


def test_a_counter_is_refused_in_micro_batches() -> None:
    """A step that is cut is rehearsed, too."""
    calls: list[int] = []

    def change(h: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return h * len(calls)

    model = Net(change).double()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for micro_batches in (1, 2):
        with pytest.raises(CaptureError, match="must not depend on values that it changes"):
            dp.capture(model, rows(), loss_fn, sgd, micro_batches)
    assert calls == []


def test_several_optimizers_are_compared_with_an_eager_step() -> None:
    """Each steps on copies; what they hold is compared by parameter."""
    model, batch = Net(torch.tanh).double(), rows()
    both = [
        torch.optim.AdamW(model.first.parameters(), lr=0.01),
        torch.optim.RMSprop(model.second.parameters(), lr=0.01, momentum=0.9),
    ]
    graph = dp.capture(model, batch, loss_fn, both)
    report = check_step(graph, model, both, batch, *random_placement(graph, 3, 0), NAMES, steps=2)
    assert report.not_compared == ""
    assert {"loss", "parameter", "state"} <= {each.role for each in report.own}
    assert max(each.error for each in report.own) < 1e-9


def test_derivatives_at_inference_are_compared_with_an_eager_call() -> None:
    """In which gradients are on."""

    class Forces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(torch.tanh)

        def forward(self, x: torch.Tensor) -> Any:
            x = x.requires_grad_()
            energy = self.net(x).sum()
            return energy, torch.autograd.grad(energy, x)[0]

    model, (x, _) = Forces().double().eval(), rows()
    graph = dp.capture(model, x)
    report = check_step(graph, model, None, x, *random_placement(graph, 3, 0), NAMES, steps=1)
    assert report.not_compared == ""
    assert len(report.own) == 2


def test_checkpointed_dropout_trains_with_further_outputs() -> None:
    """The replay draws the first mask again; the rehearsal has drawn, too."""

    def change(h: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda h: F.dropout(h, 0.5).tanh(), h, use_reentrant=False)

    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
        out = model(x)
        return F.cross_entropy(out, y), {"out": out}

    model, batch = Net(change).double(), rows()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = dp.capture(model, batch, loss, sgd)
    assert len(set(graph.program.random_ops.values())) == 1
    with dp.compile(graph, planned(graph)) as step:
        seen = [step(*batch) for _ in range(2)]
    assert all(float(each[0].isfinite()) and each[1]["out"].shape == (6, 3) for each in seen)


def test_a_learned_value_in_a_mask_trains_as_in_eager() -> None:
    """`x[mask] = value` in the rehearsal as in the trace."""

    class Filled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.value = nn.Parameter(torch.randn(8, dtype=FLOAT))
            self.net = Net(torch.tanh).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.clone()
            x[x[:, 0] > 0] = self.value
            return self.net(x)

    assert_as_eager(Filled(), rows(), loss_fn)
