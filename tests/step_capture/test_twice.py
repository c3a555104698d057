"""A step that would compute something else in its next call is refused, whatever decides."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.run.placed import at_random, compare_with_eager, make_step, sgd
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from devplace.errors import CaptureError
from devplace.step_capture import capture

HERE = r"test_twice\.py:\d+"
STATE = torch.get_rng_state()


class Net(nn.Module):
    """A layer with something done to its output."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.change = nn.Linear(4, 3), change

    def forward(self, x: Any) -> Any:
        return self.change(self.layer(x))


def batch() -> tuple[Any, Any]:
    torch.manual_seed(1)
    return torch.randn(6, 4), torch.randint(0, 3, (6,))


def loss_fn(model: Any, x: Any, y: Any) -> Any:
    return F.cross_entropy(model(x), y)


def refusal(change: Callable[[Any], Any], model: Any = None) -> str:
    net = model or Net(change)
    with pytest.raises(CaptureError) as caught:
        capture(net, batch(), loss_fn, sgd(list(net.parameters())))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def seeded(h: Any) -> Any:
    torch.manual_seed(7)
    return h + torch.randn_like(h)


def forked(h: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return h + torch.randn_like(h)


def restored(h: Any) -> Any:
    was = torch.get_rng_state()
    torch.set_rng_state(STATE)
    noise = torch.randn_like(h)
    torch.set_rng_state(was)
    return h + noise


def drawn_again(h: Any) -> Any:
    """Without any seed: what is drawn in the fork is drawn once more after it."""
    with torch.random.fork_rng():
        noise = torch.randn_like(h)
    return h + noise - torch.randn_like(h)


def by_the_generator(h: Any) -> Any:
    torch.default_generator.manual_seed(1)
    return F.dropout(h, 0.5)


@pytest.mark.parametrize("change", [seeded, forked, restored, by_the_generator])
def test_seeds_set_in_a_step_are_refused(change: Any) -> None:
    """Restored or not, and whatever the user's seed was before."""
    before = torch.get_rng_state()
    for seed in (0, 7):
        torch.manual_seed(seed)
        found = refusal(change)
        assert "must not seed torch's generator" in found
    torch.set_rng_state(before)


def test_a_fork_without_a_seed_draws_the_same_twice() -> None:
    """So its noise cancels, as in eager mode."""
    x, y = batch()
    compare_with_eager(Net(drawn_again).double(), [(x.double(), y)] * 2, loss_fn, sgd, at_random(0))


def test_a_fork_without_draws_is_no_seed() -> None:
    """As around an initialisation that the step does not come to."""

    def change(h: Any) -> Any:
        with torch.random.fork_rng():
            h = h * 2
        return F.dropout(h, 0.5)

    net = Net(change)
    assert capture(net, batch(), loss_fn, sgd(list(net.parameters()))).program.random_ops
    net = Net(lambda h: checkpoint(torch.tanh, F.dropout(h, 0.5), use_reentrant=False))
    assert capture(net, batch(), loss_fn, sgd(list(net.parameters()))).program.random_ops


PYTHONS, NUMPYS, OLD = random.Random(3), np.random.default_rng(3), np.random.RandomState(3)
OWN: dict[str, Callable[[Any], Any]] = {
    "a number": lambda h: h * PYTHONS.random(),
    "a branch": lambda h: h * 2 if PYTHONS.random() < 0.999 else h,
    "a choice": lambda h: h * PYTHONS.choice([2.0, 2.0]),
    "secrets": lambda h: h * secrets.SystemRandom().random(),
    "numpy": lambda h: h * float(NUMPYS.random()),
    "a branch of numpy": lambda h: h * 2 if NUMPYS.random() < 0.999 else h,
    "an old one of numpy": lambda h: h * 2 if OLD.rand() < 0.999 else h,
}


@pytest.mark.parametrize("name", OWN)
def test_own_generators_of_the_host_are_refused(name: str) -> None:
    """Also where two runs happen to take the same branch; they go on as if nothing had been."""
    before = PYTHONS.getstate(), str(NUMPYS.bit_generator.state), str(OLD.get_state())
    found = refusal(OWN[name])
    assert "at module" in found or "generator" in found
    assert before == (PYTHONS.getstate(), str(NUMPYS.bit_generator.state), str(OLD.get_state()))


def test_a_generator_that_the_step_makes_with_a_seed_is_a_constant() -> None:
    """Its numbers are the same in every call."""
    net = Net(lambda h: h * random.Random(5).random() * float(np.random.default_rng(5).random()))
    compare_with_eager(
        net.double(), [(x.double(), y) for x, y in [batch()] * 2], loss_fn, sgd, at_random(0)
    )


def test_the_seed_that_is_set_may_be_read() -> None:
    """It is that of the user's, not one by which draws are counted."""
    net = Net(lambda h: h * (torch.initial_seed() % 100)).double()
    data = [(x.double(), y) for x, y in [batch()] * 2]
    torch.manual_seed(11)
    compare_with_eager(net, data, loss_fn, sgd, at_random(0))


START = time.monotonic()


class Counting:
    """Counts its calls where no variable shows it."""

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, h: Any) -> Any:
        self.calls += 1
        return h * self.calls


HOST: dict[str, Callable[[Any], Any]] = {
    "time": lambda h: h * (time.time() % 7),
    "an hour": lambda h: h * 2 if time.monotonic() - START < 1e6 else h,
    "perf_counter": lambda h: h + time.perf_counter(),
    "year": lambda h: h + time.localtime().tm_year,
    "day": lambda h: h + float(time.strftime("%w")),
    "hours": lambda h: h + time.time_ns() // 3_600_000_000_000,
    "calls": Counting(),
}


@pytest.mark.parametrize("name", HOST)
def test_clocks_and_counters_are_refused_with_module_and_line(name: str) -> None:
    """Their values would be those of the capture for ever."""
    found = refusal(HOST[name])
    assert "two calls" in found or "values that it changes" in found
    assert "test_twice.py" in found


def test_what_differs_is_named_by_op_and_line() -> None:
    """The first op from which the results differ."""
    stamp = iter(range(1, 100)).__next__

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Net(lambda h: (h.relu() * stamp()).tanh())

        def forward(self, x: Any) -> Any:
            return self.inner(x)

    net = Layer()
    with pytest.raises(CaptureError, match=rf"aten\.mul.*module 'inner' \({HERE}\)"):
        capture(net, batch(), loss_fn, sgd(list(net.parameters())))


def test_hooks_installed_by_the_first_call_are_captured() -> None:
    """The step is the same before and after, and the model is left without hooks."""
    seen: list[Any] = []

    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Any) -> Any:
            if not getattr(self, "hooked", False):
                self.a.register_forward_hook(lambda module, args, out: seen.append(out))
                self.hooked = True
            seen.clear()
            out = self.b(self.a(x).relu())
            return out + seen.pop().mean()

    torch.manual_seed(0)
    net = Hooked()
    capture(net, batch(), loss_fn, sgd(list(net.parameters())))
    assert not hasattr(net, "hooked")
    assert not net.a._forward_hooks
    compare_with_eager(
        net.double(), [(x.double(), y) for x, y in [batch()] * 3], loss_fn, sgd, at_random(0)
    )


def test_hooks_that_pile_up_are_refused() -> None:
    """Each call would add one more."""

    def change(h: Any) -> Any:
        net.layer.register_forward_hook(lambda module, args, out: out * 2)
        return h

    net = Net(change)
    assert "two calls" in refusal(change, net)
    assert not net.layer._forward_hooks


def test_what_python_does_in_the_backward_pass_counts() -> None:
    """In a function with a gradient, a hook of a tensor, and a checkpointed part."""
    calls = [0]

    def counted() -> int:
        calls[0] += 1
        return calls[0]

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad * counted()

    def hooked(h: Any) -> Any:
        h.register_hook(lambda grad: grad * counted())
        return h.tanh()

    def twice(h: Any) -> Any:
        return h * counted() if torch._C._current_autograd_node() else h * 2

    changes = (Own.apply, hooked, lambda h: checkpoint(twice, h, use_reentrant=False))
    for change in changes[:2]:
        found = refusal(change)
        assert "two calls" in found or "values that it changes" in found
        assert calls == [0]
    net = Net(changes[2])
    assert capture(net, batch(), loss_fn, sgd(list(net.parameters())))


def test_clocks_and_generators_are_left_as_they_were() -> None:
    """Whether the capture succeeds or not."""
    before = time.time, random.random, random.Random.random, np.random.rand
    refusal(lambda h: h * random.random())
    step = make_step(
        net := Net(torch.tanh), batch(), loss_fn, sgd(list(net.parameters())), at_random(0)
    )
    step(*batch())
    assert before == (time.time, random.random, random.Random.random, np.random.rand)
    assert "random" in vars(random.Random) or random.Random.random is before[2]
