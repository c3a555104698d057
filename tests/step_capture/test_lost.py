"""Gradients and statistics that a captured step would lose are refused by name."""

from __future__ import annotations

import contextvars
import os
import re
import threading
import types
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from tests.run.placed import at_random, compare_with_eager, sgd
from torch import nn
from torch.nn import functional as F

from devplace.errors import CaptureError
from devplace.step_capture import capture


def batch() -> tuple[Any, Any]:
    torch.manual_seed(1)
    return torch.randn(6, 4), torch.randint(0, 3, (6,))


def loss_fn(model: Any, x: Any, y: Any) -> Any:
    return F.cross_entropy(model(x), y)


def refusal(loss: Any, model: Any = None) -> str:
    net = model or nn.Linear(4, 3)
    with pytest.raises(CaptureError) as caught:
        capture(net, batch(), loss, sgd(list(net.parameters())))
    assert "\n" not in str(caught.value)
    assert all(p.grad is None for p in net.parameters())
    return str(caught.value)


def retained(m: Any, x: Any, y: Any) -> Any:
    out = m(x)
    F.cross_entropy(out, y).backward(retain_graph=True)
    return out.square().mean()


def of_another_pass(m: Any, x: Any, y: Any) -> Any:
    torch.autograd.backward([m(x).mean()])
    return loss_fn(m, x, y)


def of_some(m: Any, x: Any, y: Any) -> Any:
    m(x).mean().backward(inputs=[m.weight])
    return loss_fn(m, x, y)


@pytest.mark.parametrize("loss", [retained, of_another_pass, of_some])
def test_backward_in_the_loss_is_refused_by_its_line(loss: Any) -> None:
    """Whichever way; the gradients of the model stay as they were."""
    found = refusal(loss)
    assert "test_lost.py" in found
    assert "calls .backward() itself" in found


def test_a_gradient_in_the_loss_is_captured() -> None:
    """torch.autograd.grad adds to nothing."""

    def penalised(m: Any, x: Any, y: Any) -> Any:
        x = x.detach().requires_grad_()
        out = m(x)
        (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return F.cross_entropy(out, y) + grad.square().mean()

    data = [(x.double(), y) for x, y in [batch()] * 2]
    compare_with_eager(nn.Linear(4, 3).double(), data, penalised, sgd, at_random(0))


class Criterion(nn.Module):
    """A loss with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.zeros(3))

    def forward(self, out: Any, y: Any) -> Any:
        return F.cross_entropy(out - self.centers, y)


def test_trainable_tensors_outside_the_model_are_refused() -> None:
    """A criterion's, a module's of a closure, a plain tensor's, a temperature's."""
    criterion, teacher = Criterion(), nn.Linear(4, 3)
    log_scale = torch.zeros((), requires_grad=True)
    cases: list[tuple[Any, str]] = [
        (criterion, "'loss_fn.centers'"),
        (lambda m, x, y: criterion(m(x), y), "'criterion.centers'"),
        (lambda m, x, y: F.mse_loss(m(x), teacher(x)), "'teacher"),
        (lambda m, x, y: loss_fn(m, x, y) * log_scale.exp(), "'log_scale'"),
    ]
    for loss, name in cases:
        found = refusal(loss)
        assert name in found
        assert "one optimizer of a parameter group for each" in found
    assert log_scale.grad is None


def test_what_gets_no_gradient_outside_the_model_is_captured() -> None:
    """Frozen, under no_grad, detached; and criterion and model in one module, as the way out."""
    frozen, teacher = nn.Linear(4, 3).requires_grad_(False), nn.Linear(4, 3)

    def distilled(m: Any, x: Any, y: Any) -> Any:
        with torch.no_grad():
            goal = teacher(x)
        return F.mse_loss(m(x), goal) + F.mse_loss(m(x), frozen(x) + teacher(x).detach())

    net = nn.Linear(4, 3)
    assert capture(net, batch(), distilled, sgd(list(net.parameters())))
    both = nn.ModuleDict({"net": nn.Linear(4, 3), "criterion": Criterion()}).double()
    data = [(x.double(), y) for x, y in [batch()] * 2]
    compare_with_eager(
        both, data, lambda m, x, y: m["criterion"](m["net"](x), y), sgd, at_random(0)
    )


def test_a_scaler_in_the_loss_is_refused() -> None:
    """The update would be with scaled gradients; a scaler that is off does nothing."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    found = refusal(lambda m, x, y: scaler.scale(loss_fn(m, x, y)))
    assert "GradScaler.scale" in found
    assert "test_lost.py" in found
    off, net = torch.amp.GradScaler("cpu", enabled=False), nn.Linear(4, 3)
    assert capture(net, batch(), lambda m, x, y: off.scale(loss_fn(m, x, y)), sgd([net.weight]))


class Statistics(nn.Module):
    """Writes statistics in training that it reads in evaluation."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.f, self.kind = nn.Linear(4, 3), kind
        self.stats = [torch.zeros(3), torch.ones(3)]
        self.box = {"mean": torch.zeros(3)}
        self.mean: Any = torch.zeros(3)
        self.late: Any = None
        self.count = 0

    def forward(self, x: Any) -> Any:
        return getattr(self, self.kind)(self.f(x))

    def normed(self, h: Any) -> Any:
        return F.batch_norm(h, self.stats[0], self.stats[1], training=self.training)

    def copied(self, h: Any) -> Any:
        if self.training:
            self.stats[0].copy_(h.detach().mean(0))
            return h
        return h - self.stats[0]

    def entry(self, h: Any) -> Any:
        if self.training:
            self.stats[0] = h.detach().mean(0)
            return h
        return h - self.stats[0]

    def in_dict(self, h: Any) -> Any:
        if self.training:
            self.box["mean"] = h.detach().mean(0)
        else:
            h = h - self.box["mean"]
        return h

    def attribute(self, h: Any) -> Any:
        if self.training:
            self.mean = h.detach().mean(0)
            return h
        return h - self.mean

    def in_one_line(self, h: Any) -> Any:
        if self.training:
            self.late = (h.detach().mean(0), None)
        return h if self.training else h - self.late[0]

    def counter(self, h: Any) -> Any:
        if self.training:
            self.count += 1
        return h if self.training else h / self.count

    def for_another_method(self, h: Any) -> Any:
        self.late = h.detach()
        return h

    def predict(self, x: Any) -> Any:
        return self.f(x) - self.late.mean(0)

    def stored_and_shown(self, h: Any) -> Any:
        self.shown = h.detach()
        self.seen = [h.detach()]
        self.stats.append(h.detach())
        return h * len(self.shown)


KINDS = ("normed", "copied", "entry", "in_dict", "attribute", "in_one_line", "counter")
KINDS += ("for_another_method",)


@pytest.mark.parametrize("kind", KINDS)
def test_statistics_that_a_step_only_writes_are_refused(kind: str) -> None:
    """Evaluation would read those of before; the model is left as it was."""
    model = Statistics(kind)
    before = [model.mean, model.late, model.count, *model.stats, *model.box.values()]
    found = refusal(loss_fn, model)
    assert "register_buffer" in found
    assert "must be kept in buffers" in found
    after = [model.mean, model.late, model.count, *model.stats, *model.box.values()]
    assert all(a is b for a, b in zip(before, after, strict=True))
    assert not any(t.any() for t in (model.mean, model.stats[0], model.box["mean"]))


def test_statistics_outside_the_model_are_refused() -> None:
    """In variables of a closure and in an object, by batch norm or by hand."""
    mean, var, box = torch.zeros(3), torch.ones(3), {"mean": torch.zeros(3)}

    class Closed(Statistics):
        def closed(self, h: Any) -> Any:
            return F.batch_norm(h, mean, var, training=self.training)

        def instance(self, h: Any) -> Any:
            h = h.view(2, 3, 3)
            return F.instance_norm(h, mean, var, use_input_stats=self.training).reshape(6, 3)

        def boxed(self, h: Any) -> Any:
            if self.training:
                box["mean"] = h.detach().mean(0)
                return h
            return h - box["mean"]

    for kind, name in (("closed", "'mean'"), ("instance", "'mean'"), ("boxed", "box")):
        assert name in refusal(loss_fn, Closed(kind))
    assert not mean.any()


def test_what_nobody_reads_elsewhere_is_no_state() -> None:
    """What is kept to be looked at, and what this step itself reads again."""
    model = Statistics("stored_and_shown")
    with pytest.raises(CaptureError, match="stats is written by the step"):
        capture(model, batch(), loss_fn, sgd(list(model.parameters())))

    class Shown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f, self.calls, self.seen = nn.Linear(4, 3), 0, []

        def forward(self, x: Any) -> Any:
            self.calls += 1
            self.last = self.f(x)
            self.seen.append(self.last.detach())
            return self.last

    net = Shown()
    data = [(x.double(), y) for x, y in [batch()] * 2]
    compare_with_eager(net.double(), data, loss_fn, sgd, at_random(0))


LAST: Any = 0
LOCAL = threading.local()
BY_MODEL: Any = weakref.WeakKeyDictionary()
CONTEXT: Any = contextvars.ContextVar("CONTEXT", default=0)
COUNT = np.zeros(1)
GIVEN: dict[str, Any] = {}
SIZES: list[int] = []


class Slotted:
    """An object without a dict."""

    __slots__ = ("mean",)

    def __init__(self) -> None:
        self.mean: Any = 0


SLOT = Slotted()


def marked() -> None:
    """A function that has an attribute."""


class Elsewhere(Statistics):
    """Writes in training, and reads in evaluation, what is none of its own attributes."""

    late: Any = 0

    def of_a_class(self, h: Any) -> Any:
        if self.training:
            type(self).late = h.detach().mean(0)
            return h
        return h - type(self).late

    def of_a_function(self, h: Any) -> Any:
        function: Any = marked
        if self.training:
            function.late = h.detach().mean(0)
            return h
        return h - function.late

    def in_a_global(self, h: Any) -> Any:
        global LAST
        if self.training:
            LAST = h.detach().mean(0)
            return h
        return h - LAST

    def in_a_default(self, h: Any, given: Any = GIVEN) -> Any:
        if self.training:
            given["mean"] = h.detach().mean(0)
            return h
        return h - given["mean"]

    def of_a_thread(self, h: Any) -> Any:
        if self.training:
            LOCAL.mean = h.detach().mean(0)
            return h
        return h - LOCAL.mean

    def in_an_array(self, h: Any) -> Any:
        if self.training:
            COUNT[0] += 1
            return h
        return h / float(COUNT[0])

    def in_a_slot(self, h: Any) -> Any:
        if self.training:
            SLOT.mean = h.detach().mean(0)
            return h
        return h - SLOT.mean

    def by_length(self, h: Any) -> Any:
        if self.training:
            SIZES.append(0)
            return h
        return h / len(SIZES)

    def by_model(self, h: Any) -> Any:
        if self.training:
            BY_MODEL[self] = h.detach().mean(0)
            return h
        return h - BY_MODEL[self]

    def in_a_context(self, h: Any) -> Any:
        if self.training:
            CONTEXT.set(h.detach().mean(0))
            return h
        return h - CONTEXT.get()

    def of_a_parameter(self, h: Any) -> Any:
        weight: Any = self.f.weight
        if self.training:
            weight.mean = h.detach().mean(0)
            return h
        return h - weight.mean

    def frozen(self, h: Any) -> Any:
        self.f.weight.requires_grad_(False)
        return h

    def gradient(self, h: Any) -> Any:
        (grad,) = torch.autograd.grad(h.sum(), self.f.weight, retain_graph=True)
        self.f.weight.grad = grad
        return h


ELSEWHERE = {
    "of_a_class": "'late' of Elsewhere is written",
    "of_a_function": "'late' of marked is written",
    "in_a_global": "LAST is written",
    "in_a_default": "given is written",
    "of_a_thread": "'mean' of LOCAL is written",
    "in_an_array": "COUNT is written",
    "in_a_slot": "SLOT.mean is written",
    "by_length": "SIZES is written",
    "by_model": "BY_MODEL is written by the step",
    "in_a_context": "CONTEXT.get() is written by the step",
    "of_a_parameter": ".mean of 'f.weight' is set",
    "frozen": ".requires_grad of 'f.weight' is set",
    "gradient": ".grad of 'f.weight' is set",
}


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_what_a_step_writes_elsewhere_is_refused(kind: str) -> None:
    """In a class, function, variable of a module, default, thread, array, map or context."""
    CONTEXT.set(0)
    assert ELSEWHERE[kind] in refusal(loss_fn, Elsewhere(kind))
    assert Elsewhere.late == LAST == COUNT[0] == CONTEXT.get() == 0
    assert not GIVEN
    assert not SIZES
    assert not BY_MODEL
    assert SLOT.mean == 0
    assert not vars(LOCAL)
    assert not vars(marked)


def test_a_log_in_a_module_is_left_as_it_was() -> None:
    """Of the user's; what packages hold is refused."""
    own: Any = types.ModuleType("own")
    own.__file__, own.last = "/own.py", 0

    def logged(m: Any, x: Any, y: Any) -> Any:
        own.last = m(x).detach()
        return loss_fn(m, x, y)

    net = nn.Linear(4, 3)
    assert capture(net, batch(), logged, sgd(list(net.parameters())))
    assert own.last == 0


def test_a_log_in_a_global_is_left_as_it_was() -> None:
    """A name that a step only sets."""

    def logged(m: Any, x: Any, y: Any) -> Any:
        global LAST
        LAST = m(x).detach()
        return loss_fn(m, x, y)

    net = nn.Linear(4, 3)
    assert capture(net, batch(), logged, sgd(list(net.parameters())))
    assert LAST == 0


def test_an_update_in_the_loss_is_refused_by_its_line() -> None:
    """It would be with the gradients of the step before."""
    net = nn.Linear(4, 3)
    other = sgd(list(net.parameters()))

    def updating(m: Any, x: Any, y: Any) -> Any:
        loss = loss_fn(m, x, y)
        other.step()
        return loss

    found = refusal(updating, net)
    assert "test_lost.py" in found
    assert "calls step() of an optimizer" in found


@pytest.mark.parametrize(
    "write",
    [
        lambda: os.environ.update(DEVPLACE_LOST="2"),
        lambda: os.environ.__setitem__("DEVPLACE_LOST", "2"),
        lambda: os.environ.pop("DEVPLACE_LOST"),
    ],
)
def test_variables_of_the_process_that_a_step_sets(
    write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later steps would not."""
    monkeypatch.setenv("DEVPLACE_LOST", "1")

    def loss(m: Any, x: Any, y: Any) -> Any:
        write()
        return loss_fn(m, x, y)

    assert re.search(
        r"test_lost\.py:\d+ sets or deletes os\.environ\['DEVPLACE_LOST'\]", refusal(loss)
    )
    assert os.environ["DEVPLACE_LOST"] == "1"


def test_a_variable_of_the_process_that_is_so_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """As libraries switch off what they do not want, in each call: nothing is lost."""
    monkeypatch.setenv("DEVPLACE_LOST", "1")

    def loss(m: Any, x: Any, y: Any) -> Any:
        os.environ["DEVPLACE_LOST"] = os.environ.setdefault("DEVPLACE_LOST", "2")
        return loss_fn(m, x, y)

    net = nn.Linear(4, 3)
    assert capture(net, batch(), loss, sgd(list(net.parameters()))).ops
