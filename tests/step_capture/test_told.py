"""What is refused is told with the true reason: the step was run eagerly before that is said."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import devplace as dp
from devplace.errors import CaptureError

HERE = r"test_told\.py:\d+"


def told(model: nn.Module, batch: Any, loss: Any = None, **options: Any) -> str:
    """The one line that says why a training step is refused."""
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CaptureError) as caught:
        dp.capture(model, batch, loss, made, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class Fails(nn.Module):
    """Computes, and then does something."""

    def __init__(self, then: Any) -> None:
        super().__init__()
        self.layer, self.norm, self.then = nn.Linear(4, 4), nn.BatchNorm1d(4), then
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.layer(x))
        self.seen.append(1)
        return self.then(h).square().mean()


def only_without_values(h: torch.Tensor) -> torch.Tensor:
    if "Fake" in type(h).__name__:
        raise RuntimeError("cannot do that")
    return h


def always(h: torch.Tensor) -> torch.Tensor:
    raise ValueError("never right")


def test_a_step_that_runs_eagerly_is_told_that_it_does() -> None:
    """And where capture failed."""
    message = told(Fails(only_without_values), torch.randn(3, 4))
    assert message.startswith("The step runs eagerly, but cannot be captured at the model (test_")
    assert "RuntimeError: cannot do that" in message


def test_a_step_that_fails_eagerly_is_told_so() -> None:
    """With the error of eager mode."""
    message = told(Fails(always), torch.randn(3, 4))
    assert message.startswith("The step fails eagerly, too, at the model (test_told.py:")
    assert "ValueError: never right" in message


@pytest.mark.parametrize("place", ["model", "batch"])
def test_what_was_not_run_is_not_judged(place: str) -> None:
    """Without values nothing can be run."""
    model, batch = Fails(only_without_values), torch.randn(3, 4)
    model, batch = (model.to("meta"), batch) if place == "model" else (model, batch.to("meta"))
    message = told(model, batch)
    assert "Whether it runs eagerly is not known: model or inputs have no values" in message


@pytest.mark.parametrize("then", [only_without_values, always])
def test_running_it_changes_nothing(then: Any) -> None:
    """Weights, statistics, gradients, lists, and random numbers are as before."""
    model = Fails(then)
    model.then = lambda h: then(h + torch.rand_like(h))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(4)
    state, batch = torch.get_rng_state(), torch.ones(3, 4)
    told(model, batch)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert model.seen == []
    assert torch.equal(torch.get_rng_state(), state)


def test_what_fails_in_the_backward_pass_is_told_by_the_line_it_differentiates() -> None:
    """A gradient whose shape depends on values."""

    def loss(m: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.index_put(m(x).tanh(), (mask,), m(x)[:2].tanh()).square().mean()

    batch = torch.randn(4, 4), torch.tensor([True, False, True, False])
    message = told(nn.Linear(4, 4), batch, loss)
    assert message.startswith("Shapes must not depend on values")
    assert "test_told.py:" in message


def test_micro_batches_that_fail_say_how_to_cut() -> None:
    """The whole batch is captured, so the cut is the reason."""

    def loss(m: nn.Module, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return (m(x) + z).square().mean()

    batch = torch.randn(6, 8), torch.randn(3, 6, 8)
    message = told(nn.Linear(8, 8), batch, loss, micro_batches=2)
    assert "can be captured as one batch, but not with micro_batches=2" in message
    assert "batch_dims={'1': 1}" in message


def test_complex_parameters_say_how_to_keep_them() -> None:
    """As real ones."""

    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(5, dtype=torch.cfloat))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.irfft(torch.fft.rfft(x) * self.w, n=8).square().mean()

    assert "torch.view_as_complex" in told(Spectral(), torch.randn(6, 8))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", ["coo", "csr", "buffer-list"])
def test_sparse_buffers_are_refused_at_capture(layout: str) -> None:
    """In one line that names the buffer."""
    dense = (torch.rand(4, 4) > 0.5).float()
    model = nn.Linear(4, 4)
    sparse = dense.to_sparse() if layout != "csr" else dense.to_sparse_csr()
    if layout == "buffer-list":
        message = told(model, torch.randn(4, 4), lambda m, x: torch.sparse.mm(sparse, m(x)).mean())
        assert "dense" in message
        return
    model.register_buffer("graph", sparse)
    message = told(model, torch.randn(4, 4), lambda m, x: torch.sparse.mm(m.graph, m(x)).mean())
    assert "buffer 'graph' is torch.sparse_" in message


def test_a_sparse_tensor_that_a_step_makes_is_refused_by_its_line() -> None:
    """Devices hand on what has strides."""
    eye = torch.eye(4)
    message = told(
        nn.Linear(4, 4),
        torch.randn(4, 4),
        lambda m, x: torch.sparse.mm(eye.to_sparse(), m(x)).mean(),
    )
    assert "dense" in message
    assert "test_told.py" in message
    assert "makes one that is torch.sparse_coo" in message


@pytest.mark.parametrize("is_training", [True, False])
def test_control_flow_as_an_operator_is_named(is_training: bool) -> None:
    """In training torch's own trace of it has no gradients, which would be a wrong reason."""

    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = torch.cond(
                x.sum() > 0, lambda x: self.layer(x).sin(), lambda x: self.layer(x).cos(), (x,)
            )
            return made.mean()

    model = Either()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if is_training else None
    with pytest.raises(CaptureError, match=f"Control flow as an operator.*{HERE}.*'cond'"):
        dp.capture(model, torch.randn(2, 4), None, optimizer)
