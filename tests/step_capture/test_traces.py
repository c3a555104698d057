"""A capture leaves nothing behind in the user's objects, and refuses what it cannot keep."""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from typing import Any
from unittest import mock

import pytest
import torch
from tests.run.placed import adam, at_random, make_step
from torch import nn
from torch.nn import functional as F

from devplace.errors import CaptureError
from devplace.step_capture import capture


def model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def batch() -> tuple[Any, Any]:
    torch.manual_seed(1)
    return torch.randn(6, 4), torch.randint(0, 3, (6,))


class Notes:
    """Keeps losses in every way, and its number of calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.recent: deque[Any] = deque(maxlen=3)
        self.by_name: dict[str, list[Any]] = defaultdict(list)
        self.all: list[Any] = []
        self.last: Any = None
        self.mean = torch.zeros(())
        self.row: dict[str, Any] = {"loss": None}

    def loss(self, model: Any, x: Any, y: Any) -> Any:
        """Plain."""
        loss = F.cross_entropy(model(x), y)
        value = loss.detach()
        self.calls = self.calls + 1
        self.recent.append(value)
        self.by_name["loss"].append(value)
        self.all.append(value)
        self.last = value if self.last is None else value * 1
        self.mean = 0.9 * self.mean + 0.1 * value
        self.row["loss"] = value
        list(self.row)
        return loss


def test_what_a_loss_function_collects_is_as_before() -> None:
    """Lists, queues, dicts, attributes and counters; they may go on changing."""
    notes, net = Notes(), model()
    mean = notes.mean
    step = make_step(net, batch(), notes.loss, adam(list(net.parameters())), at_random(0))
    assert notes.calls == 0
    assert not notes.recent
    assert not notes.by_name.get("loss")
    assert not notes.all
    assert notes.last is None
    assert notes.mean is mean
    assert notes.row == {"loss": None}
    notes.loss(net, *batch())
    step(*batch())


@functools.lru_cache(maxsize=None)  # noqa: UP033
def lower(size: int) -> Any:
    """A mask that is made once."""
    return torch.tril(torch.ones(size, size))


class Masked(nn.Module):
    """Takes its mask from a cache of one kind or another."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.kind = kind
        self.masks: dict[int, Any] = {}

    def forward(self, x: Any) -> Any:
        return self.head(getattr(self, self.kind)(len(x)) @ x)

    def shared(self, size: int) -> Any:
        """By `lru_cache`."""
        return lower(size)

    def own(self, size: int) -> Any:
        """By a dict of the module."""
        if size not in self.masks:
            self.masks[size] = torch.tril(torch.ones(size, size))
        return self.masks[size]

    def common(self, size: int) -> Any:
        """By a dict of the file."""
        if size not in MASKS:
            MASKS[size] = torch.tril(torch.ones(size, size))
        return MASKS[size]


MASKS: dict[int, Any] = {}


@pytest.mark.parametrize("is_filled", [False, True])
@pytest.mark.parametrize("kind", ["shared", "own", "common"])
def test_caches_of_masks_hold_no_tensors_without_values(kind: str, is_filled: bool) -> None:
    """Filled before or not; eager mode goes on with them, and they may grow."""
    MASKS.clear()
    lower.cache_clear()

    class Read(Masked):
        def forward(self, x: Any) -> Any:
            if self.kind == "shared":
                return self.head(self.shared(len(x)) @ x)
            return self.head((self.own if self.kind == "own" else self.common)(len(x)) @ x)

    net = Read(kind)
    x, y = batch()
    if is_filled:
        net(x)
    optimizer = adam(list(net.parameters()))
    step = make_step(net, (x, y), lambda m, x, y: F.cross_entropy(m(x), y), optimizer, at_random(0))
    first = float(F.cross_entropy(net(x), y).detach())
    net(x[:2])
    assert abs(float(step(x, y)) - first) < 1e-5


def refusal(loss: Any) -> str:
    net = model()
    with pytest.raises(CaptureError) as caught:
        capture(net, batch(), loss, adam(list(net.parameters())))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_running_mean_that_the_loss_is_divided_by_is_refused() -> None:
    """As an attribute, one that begins as None, and in a dict: the step would keep the first."""

    class Mean:
        def __init__(self, first: Any) -> None:
            self.mean = first

        def loss(self, m: Any, x: Any, y: Any) -> Any:
            loss = F.cross_entropy(m(x), y)
            now = loss.detach()
            self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
            return loss / self.mean

    state = {"mean": torch.ones(())}

    def in_dict(m: Any, x: Any, y: Any) -> Any:
        loss = F.cross_entropy(m(x), y)
        state["mean"] = 0.9 * state["mean"] + 0.1 * loss.detach()
        return loss / state["mean"]

    said = "self.mean goes from a tensor of shape [] to another tensor of shape []"
    assert said in refusal(Mean(torch.ones(())).loss)
    assert "self.mean goes from None to a tensor of shape []" in refusal(Mean(None).loss)
    assert "state['mean'] goes from a tensor of shape [] to another" in refusal(in_dict)
    assert float(state["mean"]) == 1.0


def test_an_object_that_has_every_attribute_is_no_endless_search() -> None:
    """A stand-in for a logger makes a new object for each name; one that keeps what it is given, as
    `mock` does, is refused."""

    class Logger:
        def __getattr__(self, name: str) -> Any:
            return Logger()

        def __call__(self, *given: Any, **options: Any) -> Any:
            return Logger()

    logger: Any = Logger()

    def show(given: Any, loss: Any) -> None:
        given.log(given.run.name, loss, step=given.run.step)

    def loss(m: Any, x: Any, y: Any) -> Any:
        loss = F.cross_entropy(m(x), y)
        show(logger, loss.detach())
        logger.log({"loss": loss.detach()}, step=logger.step)
        return loss

    net = model()
    assert capture(net, batch(), loss, adam(list(net.parameters())))
    logger = mock.MagicMock()
    assert "is still held when it is over, by way of logger" in refusal(loss)
