"""The check finds faults, and only faults."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from devplace.errors import VerificationError
from devplace.run.check import CheckReport, check_step, compare
from devplace.schedule import PlannedTransfer
from devplace.step_capture import capture
from tests.run.models import Clipped, Normed, Tied, mean_square, next_token
from tests.run.placed import NAMES, adam, at_random, sgd
from tests.run.tracing import snap


def run_check(model: Any, batch: Any, loss: Any, optimizer: Any, **options: Any) -> CheckReport:
    graph = capture(model, batch, loss, optimizer)
    seed = options.pop("placement", 0)
    return check_step(graph, model, optimizer, batch, *at_random(seed)(graph), NAMES, **options)


@pytest.mark.parametrize("placement", range(4))
@pytest.mark.parametrize("make_optimizer", [sgd, adam])
def test_random_placements_are_bit_equal_in_float64(placement: int, make_optimizer: Any) -> None:
    """Norms, dropout, convolution, any placement: not one bit differs."""
    torch.manual_seed(0)
    model = Normed(dropout=0.3).double()
    batch = (torch.randn(4, 2, 6, 6, dtype=torch.float64),)
    optimizer = make_optimizer(list(model.parameters()))
    report = run_check(model, batch, mean_square, optimizer, placement=placement)
    assert report.is_bit_equal
    assert report.steps == 3
    assert report.num_transfers > 0
    assert {tensor.role for tensor in report.tensors} == {"loss", "parameter", "buffer", "state"}
    assert report.worst.error == 0.0


def test_the_check_leaves_model_and_optimizer_alone() -> None:
    """Parameters, state and random numbers are as before."""
    torch.manual_seed(0)
    model = Tied()
    optimizer = adam(list(model.parameters()))
    before = copy.deepcopy(model.state_dict())
    batch = (torch.randint(0, 7, (3, 5)),)
    random_state = torch.get_rng_state()
    run_check(model, batch, next_token, optimizer)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not optimizer.state_dict()["state"]
    assert torch.equal(torch.get_rng_state(), random_state)


def test_s53_a_link_that_flips_bits_is_caught() -> None:
    """A copy that damages one element of one tensor fails the check, naming the worst result."""
    model = Clipped().double()

    def flip(value: Any, transfer: Any) -> Any:
        copied = value.clone()
        if value.numel() == 32:
            copied.view(-1)[5] += 1e-3
        return copied

    batch = (torch.randn(4, 4, dtype=torch.float64),)
    message = r"numbers of the unplaced one: \w+ '[\w.\[\]]+' is off by .* in step 1, allowed 1e-06"
    with pytest.raises(VerificationError, match=message):
        run_check(model, batch, mean_square, sgd(list(model.parameters())), copy=flip, placement=1)


def test_s48_a_mask_applied_twice_is_caught() -> None:
    """A dropout mask of 0 and 2 that arrives squared fails the check."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2)).double()
    optimizer = sgd(list(model.parameters()))
    batch = (torch.randn(6, 4, dtype=torch.float64),)
    graph = capture(model, batch, mean_square, optimizer)
    is_mask = [op.is_random for op in graph.ops]
    reads_mask = [any(is_mask[graph.producer[t]] for t in op.inputs) for op in graph.ops]
    devices = [int(drawn) for drawn in is_mask]
    assert sum(is_mask) == 1
    assert sum(reads_mask) >= 1

    def square(value: Any, transfer: PlannedTransfer) -> Any:
        return value * value * 2 if is_mask[graph.producer[transfer.tensor]] else value.clone()

    placed = snap(graph, devices, 3)
    assert check_step(graph, model, optimizer, batch, *placed, NAMES).is_bit_equal
    with pytest.raises(VerificationError, match="in step 1"):
        check_step(graph, model, optimizer, batch, *placed, NAMES, copy=square)


def test_a_model_without_weights_is_checked_with_invented_ones() -> None:
    """A meta model is checked on seeded random weights; no result is NaN."""
    with torch.device("meta"):
        model = Normed()
    optimizer = adam(list(model.parameters()))
    report = run_check(model, (torch.randn(4, 2, 6, 6),), mean_square, optimizer, seed=3)
    assert report.worst.error <= report.worst.limit


@pytest.mark.parametrize(
    ("found", "expected", "error", "is_bit_equal"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0, True),
        ([1.0, float("nan")], [1.0, float("nan")], 0.0, True),
        ([1.0, float("nan")], [1.0, 2.0], float("inf"), False),
        ([1.0, float("inf")], [1.0, 2.0], float("inf"), False),
        ([1.0, 2.0], [1.0, 4.0], 0.5, False),
        ([1.0], [0.0], float("inf"), False),
        ([1.0, 2.0], [1.0], float("inf"), False),
    ],
)
def test_compare(
    found: list[float], expected: list[float], error: float, is_bit_equal: bool
) -> None:
    """Errors are shares of the largest magnitude; NaN only equals NaN."""
    outcome = compare("t", "state", torch.tensor(found), torch.tensor(expected), 1)
    assert (outcome.error, outcome.is_bit_equal) == (error, is_bit_equal)


def test_rounding_where_nothing_should_be_is_not_an_error() -> None:
    """The second moment of a bias without gradient is rounding only: it is judged by the magnitude
    of its kind, not by its own."""
    noise, other = torch.tensor([1e-36]), torch.tensor([3e-36])
    alone = compare("exp_avg_sq[key.bias]", "state", noise, other, 1)
    assert alone.error > alone.limit
    among_kin = compare("exp_avg_sq[key.bias]", "state", noise, other, 1, 1e-3 * 1e-5)
    assert among_kin.error < among_kin.limit


def test_integers_must_be_equal() -> None:
    """A counter that is off by one fails."""
    outcome = compare("n", "buffer", torch.tensor(3), torch.tensor(4), 1)
    assert outcome.error > outcome.limit == 0.0


def losses(model: Any, x: Any) -> Any:
    return model(x).square().mean()


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("make_optimizer", [sgd, adam])
def test_a_captured_step_is_compared_with_an_eager_one(make_optimizer: Any, clip: Any) -> None:
    """Loss, statistics, parameters and state; also of an optimizer that has made steps, under a
    scheduler; gradients of parameters stay what they were."""
    torch.manual_seed(0)
    model = Normed(dropout=0.0).double()
    x = torch.randn(4, 2, 6, 6, dtype=torch.float64)
    optimizer = make_optimizer(list(model.parameters()))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    losses(model, x).backward()
    optimizer.step()
    schedule.step()
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    grads = [parameter.grad for parameter in model.parameters()]
    graph = capture(model, (x,), losses, optimizer, clip_grad_norm=clip)
    report = check_step(graph, model, optimizer, (x,), *at_random(0)(graph), NAMES, steps=1)
    assert not report.not_compared
    assert len(report.own) == len(graph.results)
    assert max(tensor.error for tensor in report.own) < 1e-12
    assert report.beside_own.startswith(f"{len(graph.results)} results of the first step are ")
    after = [model.state_dict(), optimizer.state_dict()]
    assert str(after) == str(before)
    now = [parameter.grad for parameter in model.parameters()]
    assert all(one is other for one, other in zip(grads, now, strict=True))


class Stale(nn.Module):
    """Scales by a number that is another one after the capture."""

    factor = torch.tensor(2.0, dtype=torch.float64)

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return self.layer(x) * self.factor


def test_a_step_that_is_not_the_users_own_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Placed and unplaced steps agree, but the model computes something else; the first wrong
    result is named."""
    model, x = Stale().double(), torch.randn(4, 4, dtype=torch.float64)
    optimizer = sgd(list(model.parameters()))
    graph = capture(model, (x,), losses, optimizer)
    monkeypatch.setattr(Stale, "factor", torch.tensor(3.0, dtype=torch.float64))
    with pytest.raises(VerificationError, match=r"of the eager one: loss 'loss' is off by 0\.55"):
        check_step(graph, model, optimizer, (x,), *at_random(0)(graph), NAMES)


def test_what_is_not_compared_with_an_eager_step_is_said() -> None:
    """Random numbers are others; a model without values has none; micro-batches may be meant."""
    x = torch.randn(4, 2, 6, 6, dtype=torch.float64)
    drops, plain = Normed(dropout=0.3).double(), Normed(dropout=0.0).double()
    report = run_check(drops, (x,), mean_square, sgd(list(drops.parameters())), steps=1)
    assert report.not_compared.startswith("it draws random numbers (aten.")
    assert report.own == ()
    assert report.beside_own.startswith("not compared with an eager step: it draws")
    hollow = Clipped().to("meta")
    batch = (torch.randn(4, 4),)
    report = run_check(hollow, batch, mean_square, sgd(list(hollow.parameters())), steps=1)
    assert report.not_compared == "the model or the batch has no values"
    optimizer = sgd(list(plain.parameters()))
    graph = capture(plain, (x,), mean_square, optimizer, 2)
    report = check_step(graph, plain, optimizer, (x,), *at_random(0)(graph), NAMES, steps=1)
    assert report.not_compared.startswith("2 micro-batches give another ")
    assert report.beside_own.startswith("other than an eager step of the whole batch: 2 micro-b")


def test_inference_is_compared_with_an_eager_call() -> None:
    """Every tensor of the output."""
    model = nn.Linear(4, 3).double()
    x = torch.randn(2, 4, dtype=torch.float64)
    graph = capture(model, (x,))
    report = check_step(graph, model, None, (x,), *at_random(0)(graph), NAMES, steps=1)
    assert [tensor.role for tensor in report.own] == ["output"]
    assert report.own[0].is_bit_equal
