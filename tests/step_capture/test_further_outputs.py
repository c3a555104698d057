"""Parts of a loss and metrics that a training step gives beside the loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.step_capture.checks import Runner, batches, sgd
from torch import nn

from devplace.errors import CaptureError
from devplace.step_capture import capture


def net() -> nn.Module:
    """Linear layers only."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def parts(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
    """Loss with a part of it, a metric, a count, rows, a vector and a number."""
    out = m(x)
    part, right = F.cross_entropy(out, y), out.argmax(1) == y
    further = {
        "part": part,
        "accuracy": right.double().mean(),
        "right": right.sum(),
        "rows": out,
        "columns": {"by class": out.mean(0), "turned": out.T},
        "name": "net",
    }
    return part + 0.1 * out.pow(2).mean(), further


def as_dict(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
    """The same as one dict, the loss last."""
    loss, further = parts(m, x, y)
    return {**further, "loss": loss}


@pytest.mark.parametrize("loss_fn", [parts, as_dict])
@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_further_outputs_are_those_of_the_whole_batch(loss_fn: Any, micro_batches: int) -> None:
    """Rows are joined, counts added up, the rest is the mean over rows."""
    model, data = net(), batches(rows=7)[0]
    graph = capture(model, data, loss_fn, sgd(model), micro_batches)
    found = Runner(graph, model).step(1, data, param_groups=sgd(model).param_groups)
    loss, further = parts(model, *data)
    named = {result.name: value for result, value in zip(graph.results, found, strict=True)}
    prefix = "output"
    wanted = {
        "loss": loss,
        f"{prefix}.part": further["part"],
        f"{prefix}.accuracy": further["accuracy"],
        f"{prefix}.right": further["right"],
        f"{prefix}.rows": further["rows"],
        f"{prefix}.columns.by class": further["columns"]["by class"],
        f"{prefix}.columns.turned": further["columns"]["turned"],
    }
    assert graph.results[0].role == "loss"
    for name, value in wanted.items():
        torch.testing.assert_close(named[name], value.detach(), rtol=1e-12, atol=1e-12)
    loss.backward()
    for result, value in zip(graph.results, found, strict=True):
        if result.role == "parameter":
            before = model.get_parameter(result.name)
            torch.testing.assert_close(value, before.detach() - 0.1 * before.grad)


def test_a_part_that_micro_batches_cannot_give_is_refused_by_name() -> None:
    """Neither mean, nor count, nor rows: the largest loss; or a shape that fits nowhere."""
    model, data = net(), batches()[0]

    def largest(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
        rows = F.cross_entropy(m(x), y, reduction="none")
        return rows.mean(), {"largest": rows.max()}

    def pairs(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
        out = m(x)
        return F.cross_entropy(out, y), {"pairs": out @ out.T}

    with pytest.raises(CaptureError, match=r"'output.largest' is .* instead of"):
        capture(model, data, largest, sgd(model), 2)
    with pytest.raises(CaptureError, match=r"'output.pairs' has shape \[6, 6\]"):
        capture(model, data, pairs, sgd(model), 2)


def test_an_evaluation_gives_them_too() -> None:
    """Without an optimizer."""
    model, data = net(), batches()[0]
    graph = capture(model, data, parts)
    assert [r.role for r in graph.results] == ["loss", *["output"] * 6]


def test_without_a_loss_in_the_dict_it_is_refused() -> None:
    """The message says what may be returned."""
    model = net()
    with pytest.raises(CaptureError, match=r"returned dict\. Return a scalar"):
        capture(model, batches()[0], lambda m, x, y: {"a": F.cross_entropy(m(x), y)}, sgd(model))
