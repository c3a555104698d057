"""What a step leaves behind is state of the next, unless it is a cache of what never changes."""

from __future__ import annotations

import collections
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.run.placed import at_random, compare_with_eager, sgd
from torch import nn
from torch.nn import functional as F

from devplace.errors import CaptureError
from devplace.step_capture import capture


def batches() -> list[tuple[Any, Any]]:
    torch.manual_seed(1)
    return [(torch.randn(6, 4), torch.randint(0, 3, (6,))) for _ in range(3)]


def loss_fn(model: Any, x: Any, y: Any) -> Any:
    return F.cross_entropy(model(x), y)


class Recurrent(nn.Module):
    """Goes on with the hidden values of the batch before, which it keeps in one of many ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.cell, self.head, self.kind = nn.GRUCell(4, 5), nn.Linear(5, 3), kind
        self.hidden: Any = None
        self.register_buffer("buffered", None)
        self.box: dict[str, Any] = {}
        self.seen: list[Any] = []
        self.recent: collections.deque[Any] = collections.deque(maxlen=2)
        self.state = SimpleNamespace()

    def forward(self, x: Any) -> Any:
        if self.kind == "in_object":
            return self.head(self.in_object(x))
        return self.head(getattr(self, self.kind)(x))

    def next(self, x: Any, last: Any) -> Any:
        return self.cell(x, torch.zeros(len(x), 5) if last is None else last.detach())

    def attribute(self, x: Any) -> Any:
        """None at first."""
        self.hidden = self.next(x, self.hidden)
        return self.hidden

    def pair(self, x: Any) -> Any:
        """In a tuple, as of an LSTM."""
        hidden = self.next(x, self.hidden and self.hidden[0])
        self.hidden = (hidden, hidden)
        return hidden

    def buffer(self, x: Any) -> Any:
        """A buffer that is None at first."""
        self.buffered = self.next(x, self.buffered)
        return self.buffered

    def missing(self, x: Any) -> Any:
        """An attribute that is not there at first."""
        if not hasattr(self, "late"):
            self.late = torch.zeros(len(x), 5)
        self.late = self.next(x, self.late)
        return self.late

    def registered(self, x: Any) -> Any:
        """A buffer that the first call registers."""
        hidden = self.next(x, getattr(self, "made", None))
        self.register_buffer("made", hidden.detach())
        return hidden

    def in_dict(self, x: Any) -> Any:
        self.box["h"] = hidden = self.next(x, self.box.get("h"))
        return hidden

    def in_list(self, x: Any) -> Any:
        self.seen.append(self.next(x, self.seen[-1] if self.seen else None))
        return self.seen[-1]

    def in_queue(self, x: Any) -> Any:
        self.recent.append(self.next(x, self.recent[-1] if self.recent else None))
        return self.recent[-1]

    def in_object(self, x: Any) -> Any:
        self.state.h = self.next(x, getattr(self.state, "h", None))
        return self.state.h


KINDS = ("attribute", "pair", "buffer", "missing", "registered")
KINDS += ("in_dict", "in_list", "in_queue", "in_object")


@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_hidden_values_of_the_batch_before_are_refused(kind: str, is_warm: bool) -> None:
    """Every step would begin anew; whether there are some at capture does not matter."""
    model = Recurrent(kind)
    if is_warm:
        model(batches()[0][0])
    if is_warm and kind in ("buffer", "registered"):
        return  # ordinary buffers by now
    with pytest.raises(CaptureError, match=r"changes: |read and changed") as caught:
        capture(model, batches()[0], loss_fn, sgd(list(model.parameters())))
    assert "register_buffer" in str(caught.value)
    assert "\n" not in str(caught.value)


class Rotary(nn.Module):
    """Multiplies by angles that it keeps for the length they were made for."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.head, self.kind = nn.Linear(4, 3), kind
        self.register_buffer("rates", torch.tensor([1.0, 0.1]))
        self.register_buffer("late", None, persistent=False)
        self.length, self.longest = None, 0
        self.angles: Any = None
        self.tables: dict[int, Any] = {}

    def made(self, rows: int) -> Any:
        return torch.outer(torch.arange(rows), self.rates).repeat(1, 2).cos()

    def forward(self, x: Any) -> Any:
        return self.head(x * getattr(self, self.kind)(len(x)))

    def of_length(self, rows: int) -> Any:
        """A number tells what the cache is for."""
        if self.length != rows:
            self.length, self.angles = rows, self.made(rows)
        return self.angles

    def registered(self, rows: int) -> Any:
        """A buffer that grows."""
        if rows > self.longest:
            self.longest = rows
            self.register_buffer("table", self.made(rows), persistent=False)
        return self.table[:rows]

    def once(self, rows: int) -> Any:
        if self.angles is None:
            self.angles = self.made(rows)
        return self.angles

    def in_buffer(self, rows: int) -> Any:
        if self.late is None:
            self.late = self.made(rows)
        return self.late

    def in_dict(self, rows: int) -> Any:
        if rows not in self.tables:
            self.tables[rows] = self.made(rows)
        return self.tables[rows]


@pytest.mark.parametrize("kind", ["of_length", "registered", "once", "in_buffer", "in_dict"])
def test_caches_of_what_never_changes_are_captured(kind: str) -> None:
    """The step makes anew what eager mode keeps; the numbers are the same."""
    model = Rotary(kind).double()
    data = [(x.double(), y) for x, y in batches()]
    compare_with_eager(model, data, loss_fn, sgd, at_random(0))


class Cached(nn.Module):
    """Keeps what it made of something, for ever."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.head, self.kind = nn.Linear(4, 3), kind
        self.register_buffer("count", torch.zeros(()))
        self.kept: Any = None

    def forward(self, x: Any) -> Any:
        self.count += 1
        if self.kept is None:
            self.kept = getattr(self, self.kind)(x)
        return self.head(x * self.kept)

    def of_the_batch(self, x: Any) -> Any:
        return x.mean(0)

    def of_weights(self, x: Any) -> Any:
        return self.head.weight.detach().square().sum()

    def of_a_buffer(self, x: Any) -> Any:
        return self.count.clone()

    def at_random(self, x: Any) -> Any:
        return torch.rand(4)


@pytest.mark.parametrize("kind", ["of_the_batch", "of_weights", "of_a_buffer", "at_random"])
def test_caches_of_what_changes_are_refused(kind: str) -> None:
    """Eager mode keeps the first, the step would make others."""
    model = Cached(kind)
    with pytest.raises(CaptureError, match="'kept' of the model goes from None to a tensor"):
        capture(model, batches()[0], loss_fn, sgd(list(model.parameters())))
    assert model.kept is None


class Initialised(nn.Module):
    """Sets its scale by the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Any) -> Any:
        if not getattr(self, "is_ready", False):
            self.scale.copy_(x.std(0))
            self.is_ready = True
        return self.head(x / self.scale)


def test_what_only_the_first_call_does_is_refused_until_it_is_done() -> None:
    """A flag that is not there at first."""
    model = Initialised()
    with pytest.raises(CaptureError, match="'is_ready' of the model goes from not set to True"):
        capture(model, batches()[0], loss_fn, sgd(list(model.parameters())))
    model(batches()[0][0])
    compare_with_eager(
        model.double(), [(x.double(), y) for x, y in batches()], loss_fn, sgd, at_random(0)
    )


class Lazy(nn.Module):
    """Makes a layer when it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: Any) -> Any:
        if not hasattr(self, "first"):
            self.first = nn.Linear(4, 4)
        return self.head(self.first(x))


def test_a_layer_made_by_the_first_call_is_refused() -> None:
    """The step would make it in every step."""
    model = Lazy()
    with pytest.raises(CaptureError, match="must be there before the step: 'first' of the model"):
        capture(model, batches()[0], loss_fn, sgd(list(model.parameters())))
    assert not hasattr(model, "first")


STATES: dict[str, Any] = {
    "list": [torch.zeros(())],
    "empty list": [],
    "queue": collections.deque([torch.zeros(())], maxlen=1),
}


@pytest.mark.parametrize("name", STATES)
def test_a_running_mean_in_a_container_is_refused(name: str) -> None:
    """Its present value may be just what stands for the next one."""
    means = STATES[name]
    before = list(means)

    def normed(m: Any, x: Any, y: Any) -> Any:
        loss = loss_fn(m, x, y)
        last = means[-1] if means else torch.zeros(())
        means.append(0.9 * last + 0.1 * loss.detach())
        return loss / (1 + last)

    model = nn.Linear(4, 3)
    with pytest.raises(CaptureError, match="means goes from"):
        capture(model, batches()[0], normed, sgd(list(model.parameters())))
    assert list(means) == before


def test_a_log_of_losses_is_no_state_and_a_mean_over_it_is() -> None:
    """Tensors of earlier steps are in the list beside the one that the trace leaves."""
    log = [torch.tensor(1.0), torch.tensor(2.0)]

    def logged(m: Any, x: Any, y: Any) -> Any:
        log.append(loss_fn(m, x, y).detach())
        return loss_fn(m, x, y) / (len(log) > 0)

    def averaged(m: Any, x: Any, y: Any) -> Any:
        log.append(loss_fn(m, x, y).detach())
        return loss_fn(m, x, y) / torch.stack(log[-2:]).mean()

    model = nn.Linear(4, 3)
    graph = capture(model, batches()[0], logged, sgd(list(model.parameters())))
    assert [result.role for result in graph.results].count("loss") == 1
    with pytest.raises(CaptureError, match="log goes from"):
        capture(model, batches()[0], averaged, sgd(list(model.parameters())))
    assert [float(each) for each in log] == [1.0, 2.0]


class Counting(nn.Module):
    """Counts in an array, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.count = nn.Linear(4, 3), np.ones(3, dtype=np.float32)

    def forward(self, x: Any) -> Any:
        self.count *= 2
        return self.head(x) * torch.from_numpy(self.count)


def test_an_array_that_a_step_writes_is_refused_and_left_as_it_was() -> None:
    """Arrays are changed in place, which a trace must not do to the user's."""
    model, table = Counting(), np.ones(3, dtype=np.float32)

    def scaled(m: Any, x: Any, y: Any) -> Any:
        table[:] += 1
        return loss_fn(m, x, y) * float(table.sum())

    for net, loss, name in ((model, loss_fn, "'count'"), (nn.Linear(4, 3), scaled, "table")):
        with pytest.raises(CaptureError, match=rf"{name}.* goes from array\(\[1"):
            capture(net, batches()[0], loss, sgd(list(net.parameters())))
    assert model.count.tolist() == table.tolist() == [1, 1, 1]


def test_data_of_tensors_outside_the_model_is_not_assigned() -> None:
    """They would be left without values."""
    average, slow, plain = torch.zeros(3), nn.Linear(4, 3), nn.Linear(4, 3)
    plain.average = torch.zeros(3)

    def of_a_tensor(m: Any, x: Any, y: Any) -> Any:
        average.data = average.data * 0.9 + m(x).mean(0).detach()
        return F.cross_entropy(m(x) - average, y)

    def of_a_module(m: Any, x: Any, y: Any) -> Any:
        for old, new in zip(slow.parameters(), m.parameters(), strict=True):
            old.data = 0.9 * old.data + 0.1 * new.data
        return F.cross_entropy(m(x) - slow(x).detach(), y)

    def of_an_attribute(m: Any, x: Any, y: Any) -> Any:
        m.average.data = m.average.data + m(x).mean(0).detach()
        return F.cross_entropy(m(x) - m.average, y)

    for loss in (of_a_tensor, of_a_module, of_an_attribute):
        with pytest.raises(CaptureError, match=r"\.data of a tensor of shape .* is assigned"):
            capture(plain, batches()[0], loss, sgd(list(plain.parameters())))
    left: list[Any] = [average, plain.average, *slow.parameters()]
    assert not any(tensor.is_meta for tensor in left)
