"""Losses of micro-batches are divided by counts of the whole batch, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from tests.step_capture.checks import assert_same_training, sgd
from torch import nn

from devplace.errors import CaptureError
from devplace.graph.serialize import to_json
from devplace.step_capture import capture
from devplace.step_capture.micro_batches.chunks import Known
from devplace.step_capture.step import TracedStep

Loss = Callable[..., torch.Tensor]


class Net(nn.Module):
    """Tokens `[B, S, 8]` to logits of 6 classes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).tanh())


def batch(mask: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """Six rows of five tokens."""
    torch.manual_seed(1)
    mask = torch.ones(6, 5, dtype=torch.bool) if mask is None else mask
    return torch.randn(6, 5, 8).double(), torch.randint(6, (6, 5)), mask


def uneven() -> torch.Tensor:
    """The first micro-batch has few tokens; of four, one has none."""
    mask = torch.rand(6, 5) < 0.6
    mask[:2], mask[0, 0], mask[2:, 0] = False, True, True
    return mask


def empty() -> torch.Tensor:
    """No token in the first half."""
    mask = torch.ones(6, 5, dtype=torch.bool)
    mask[:3] = False
    return mask


def tokens(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Loss of each token."""
    return F.cross_entropy(m(x).flatten(0, 1), y.flatten(), reduction="none").view(y.shape)


def kept(m: Any, x: Any, y: Any, k: Any) -> Any:
    return (tokens(m, x, y) * k).sum()


RIGHT: dict[str, Loss] = {
    "mean": lambda m, x, y, k: kept(m, x, y, k) / k.sum(),
    "at least one": lambda m, x, y, k: kept(m, x, y, k) / k.sum().clamp(min=1),
    "divided in place": lambda m, x, y, k: kept(m, x, y, k).div_(k.double().sum()),
    "weights": lambda m, x, y, k: (tokens(m, x, y) * (k.double() / k.sum())).sum(),
    "inverse": lambda m, x, y, k: kept(m, x, y, k) * k.double().sum().reciprocal(),
    "one over": lambda m, x, y, k: kept(m, x, y, k) * (1 / k.double().sum()),
    "kept dimensions": lambda m, x, y, k: (
        (tokens(m, x, y) * k).sum((0, 1), keepdim=True) / k.sum((0, 1), keepdim=True)
    ).squeeze(),
    "torch.masked": lambda m, x, y, k: torch.masked.mean(tokens(m, x, y), mask=k),  # type: ignore[attr-defined]
    "ignored": lambda m, x, y, k: F.cross_entropy(
        m(x).flatten(0, 1), torch.where(k, y, -100).flatten()
    ),
    "class weights": lambda m, x, y, k: F.cross_entropy(
        m(x).flatten(0, 1),
        torch.where(k, y, 2).flatten(),
        weight=torch.arange(1.0, 7.0).double(),
        ignore_index=2,
        label_smoothing=0.1,
    ),
    "likelihood in two dimensions": lambda m, x, y, k: F.nll_loss(
        m(x).log_softmax(-1).transpose(1, 2), torch.where(k, y, -100)
    ),
    "module": lambda m, x, y, k: nn.CrossEntropyLoss(ignore_index=-1)(
        m(x).transpose(1, 2), torch.where(k, y, -1)
    ),
    "three terms": lambda m, x, y, k: (
        kept(m, x, y, k) / k.sum()
        + 0.1 * F.cross_entropy(m(x).flatten(0, 1), torch.where(k, y, -100).flatten())
        + 0.01 * m(x).pow(2).mean()
    ),
    "sum": kept,
    "sum over a count that is given": lambda m, x, y, k: kept(m, x, y, k) / torch.tensor(30.0),
}


@pytest.mark.parametrize("loss", RIGHT.values(), ids=RIGHT)
@pytest.mark.parametrize("micro_batches", [2, 4])
def test_means_over_tokens_are_those_of_the_whole_batch(loss: Loss, micro_batches: int) -> None:
    """Captured on a batch without padding, right on batches with, also where a chunk has none."""
    data = [batch(), batch(uneven()), batch(empty())]
    assert_same_training(Net().double(), data, loss, sgd, micro_batches=micro_batches)


EACH: dict[str, Loss] = {
    "mean of rows": lambda m, x, y, k: ((tokens(m, x, y) * k).sum(1) / k.sum(1)).mean(),
    "rows one by one": lambda m, x, y, k: (
        sum(kept(m, x[i : i + 1], y[i : i + 1], k[i]) / k[i].sum() for i in range(len(x))) / len(x)
    ),
    "mapped": lambda m, x, y, k: torch.vmap(
        lambda a, b, c: (F.cross_entropy(m(a), b, reduction="none") * c).sum() / c.sum()
    )(x, y, k).mean(),
}


@pytest.mark.parametrize("loss", EACH.values(), ids=EACH)
@pytest.mark.parametrize("micro_batches", [2, 4])
def test_means_over_the_tokens_of_a_row_stay(loss: Loss, micro_batches: int) -> None:
    """What is divided by a count of its own row is not touched."""
    mask = uneven()
    mask[:, 0] = True
    assert_same_training(
        Net().double(), [batch(), batch(mask)], loss, sgd, micro_batches=micro_batches
    )


WRONG: dict[str, tuple[Loss, str]] = {
    "pairs of rows": (
        lambda m, x, y, k: F.cross_entropy(
            m(x).mean(1) @ m(x).mean(1).T, torch.arange(len(x), device=x.device)
        ),
        "aten.mm.default",
    ),
    "statistics of the batch": (
        lambda m, x, y, k: tokens(m, (x - x.mean()) / x.std(), y).mean(),
        "aten.sub.Tensor",
    ),
    "perplexity": (lambda m, x, y, k: (kept(m, x, y, k) / k.sum()).exp(), "aten.exp.default"),
    "balance": (
        lambda m, x, y, k: (m(x).softmax(-1).mean((0, 1)) ** 2).sum(),
        "aten.pow.Tensor_Scalar",
    ),
    "largest": (lambda m, x, y, k: tokens(m, x, y).max(), "aten.max.default"),
    "power of a count": (
        lambda m, x, y, k: kept(m, x, y, k) * k.double().sum() ** -1,
        "aten.pow.Tensor_Scalar",
    ),
    "weights that add up to one": (
        lambda m, x, y, k: (tokens(m, x, y).flatten() * k.double().flatten().softmax(0)).sum(),
        "aten._softmax.default",
    ),
}


@pytest.mark.parametrize(("loss", "op"), WRONG.values(), ids=WRONG)
def test_what_is_no_mean_over_rows_is_refused(loss: Loss, op: str) -> None:
    """By its op and line, also where the example batch has no padding; or accepted by the user."""
    model = Net().double()
    with pytest.raises(CaptureError) as caught:
        capture(model, batch(), loss, sgd(model), 2)
    message = str(caught.value)
    assert "the loss is" in message
    assert f"{op} at " in message
    assert "test_whole_counts.py:" in message
    assert "compare_batches=False" in message
    capture(model, batch(), loss, sgd(model), 2, compare_batches=False)


def test_a_mean_over_what_is_not_nan_is_refused() -> None:
    """How many there are depends on more than inputs, and an example batch may have none."""
    model = Net().double()

    def loss(m: Any, x: Any, y: Any, k: Any) -> torch.Tensor:
        return torch.where(k, tokens(m, x, y), float("nan")).nanmean()

    with pytest.raises(CaptureError, match=r"nanmean\. Divide a sum by a count"):
        capture(model, batch(), loss, sgd(model), 2)


@pytest.mark.slow
def test_a_model_that_gives_its_own_loss_of_padded_labels() -> None:
    """As language models of Transformers do; shifted labels, in place of a copy."""

    class Lm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.emb, self.out = nn.Embedding(20, 8), nn.Linear(8, 20)

        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits, labels = self.out(self.emb(ids)), labels.clone()
            labels[:, 0] = -100
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            return {"loss": loss, "logits": logits}

    data = []
    for _ in range(2):
        ids = torch.randint(20, (4, 8))
        labels = ids.clone()
        labels[0, 2:] = labels[1, 4:] = -100
        data.append((ids, labels))
    for micro_batches in (2, 3):
        assert_same_training(
            Lm().double(),
            data,
            None,
            sgd,
            eager_loss=lambda m, *inputs: m(*inputs)["loss"],
            micro_batches=micro_batches,
        )


def test_dropout_does_not_count_as_a_difference() -> None:
    """Random ops are fixed while steps are compared."""

    def loss(m: Any, x: Any, y: Any, k: Any) -> torch.Tensor:
        noisy = F.dropout(m(x), 0.3) + torch.randn_like(m(x)) * 0.1
        return F.mse_loss(noisy, F.one_hot(y, 6).double())

    model = Net().double()
    capture(model, batch(), loss, sgd(model), 3)


def test_an_evaluation_of_the_loss_is_compared_too() -> None:
    """Without an optimizer there are no gradients, but the loss counts."""
    model = Net().double()
    capture(model, batch(uneven()), RIGHT["mean"], None, 2)
    with pytest.raises(CaptureError, match="micro_batches=2 the loss is"):
        capture(model, batch(), WRONG["perplexity"][0], None, 2)


def test_low_precision_is_no_difference() -> None:
    """Under autocast too the numbers are compared without its rounding."""
    model = Net()
    x, y, mask = batch(uneven())
    data = (x.float(), y, mask)
    capture(model, data, RIGHT["ignored"], sgd(model), 2, autocast=torch.bfloat16)
    with pytest.raises(CaptureError, match=r"aten\.mm\.default"):
        capture(model, data, WRONG["pairs of rows"][0], sgd(model), 2, autocast=torch.bfloat16)


def test_what_captures_of_one_step_share_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graphs are those of captures of their own; forward runs twice for the rehearsal, once for
    the whole batch and once for its comparison, and once for each micro-batch."""

    def mean(m: Any, x: Any, y: Any, k: Any) -> Any:
        return kept(m, x, y, k) / k.sum()

    forward = mock.Mock(side_effect=TracedStep._call)
    monkeypatch.setattr(TracedStep, "_call", lambda step, leaves: forward(step, leaves))
    net, mask = Net().double(), uneven()
    known = Known()
    for count, forwards in ((1, 2 + 1), (2, 1 + 2), (3, 3)):
        alone = capture(net, batch(mask), mean, sgd(net), count)
        forward.reset_mock()
        graph = capture(net, batch(mask), mean, sgd(net), count, known=known)
        assert forward.call_count == forwards
        assert to_json(graph) == to_json(alone)


def test_what_captures_share_hides_no_difference() -> None:
    """A loss that may not be cut is refused after one that was captured whole or may be cut."""

    def pairs(m: Any, x: Any, y: Any, k: Any) -> Any:
        return torch.pdist(m(x).flatten(1)).mean()

    net, known = Net().double(), Known()
    capture(net, batch(), pairs, sgd(net), known=known)
    for count in (2, 3):
        with pytest.raises(CaptureError, match=f"micro_batches={count}"):
            capture(net, batch(), pairs, sgd(net), count, known=known)
