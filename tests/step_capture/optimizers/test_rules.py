"""Every optimizer of torch.optim with dense gradients gives eager's numbers, alone or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.step_capture.placed_steps import assert_as_eager, losses, planned
from torch import nn, optim

import devplace as dp
from devplace.errors import CaptureError

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "Adadelta": [{}, {"weight_decay": 0.1, "maximize": True}],
    "Adafactor": [{}, {"lr": 0.1, "weight_decay": 0.1, "maximize": True}],
    "Adagrad": [{"lr_decay": 0.1, "initial_accumulator_value": 0.3}],
    "Adamax": [{"weight_decay": 0.1}],
    "ASGD": [{"t0": 2.0}],
    "NAdam": [{}, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RAdam": [{"weight_decay": 0.1}],
    "RMSprop": [{}, {"centered": True, "momentum": 0.9}],
    "Rprop": [{}],
    "SGD": [{"momentum": 0.9, "nesterov": True}],
    "Adam": [{"amsgrad": True}],
    "AdamW": [{}],
}
CASES = [(name, given) for name, options in OPTIONS.items() for given in options]


def net(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def batch(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(6, 8, dtype=dtype), torch.randn(6, 3, dtype=dtype)


def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), y)


def assert_same_state(mine: Any, theirs: Any, tolerance: float) -> None:
    """The same entries, of the same shapes and dtypes, for the same parameters."""
    for one, other in zip(mine, theirs, strict=True):
        got, want = one.state_dict()["state"], other.state_dict()["state"]
        assert got.keys() == want.keys()
        for key, entries in want.items():
            assert got[key].keys() == entries.keys()
            for name, value in entries.items():
                torch.testing.assert_close(got[key][name], value, rtol=tolerance, atol=tolerance)


def test_all_of_torch_are_here() -> None:
    """But those whose gradients are sparse, or that compute the loss several times."""
    kinds = (each for each in vars(optim).values() if isinstance(each, type))
    names = {k.__name__ for k in kinds if issubclass(k, optim.Optimizer)} - {"Optimizer"}
    assert names - {"LBFGS", "SparseAdam"} == set(OPTIONS) | ({"Muon"} & names)


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize(("name", "given"), CASES)
def test_each_gives_the_numbers_of_eager(name: str, given: Any, steps_before: int) -> None:
    """Parameters and state, from the first step and from a later one."""
    options = {"lr": 0.01} | given

    def make(model: nn.Module) -> Any:
        return getattr(optim, name)(model.parameters(), **options)

    both = assert_as_eager(net(), batch(), loss, make, steps_before=steps_before)
    assert_same_state(*both, 1e-12)


@pytest.mark.parametrize(("name", "given"), CASES)
def test_each_in_float32(name: str, given: Any) -> None:
    """Numbers of the step, such as its rate, are as precise as Python's."""
    options = {"lr": 0.01} | given

    def make(model: nn.Module) -> Any:
        return getattr(optim, name)(model.parameters(), **options)

    model, given_batch = net(torch.float32), batch(torch.float32)
    assert_as_eager(model, given_batch, loss, make, tolerance=1e-6)


def test_in_16_bits_only_results_are_rounded() -> None:
    """As kernels that are given numbers: the update equals torch's to the last bit."""
    model, other = net(torch.bfloat16), net(torch.bfloat16)
    given = batch(torch.bfloat16)
    mine, theirs = (optim.RMSprop(m.parameters(), lr=0.01) for m in (model, other))
    losses(model, given, loss, mine)
    for _ in range(3):
        theirs.zero_grad()
        loss(other, *given).backward()
        theirs.step()
    for got, want in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=0.01, atol=0.01)


def test_groups_have_rules_of_their_own() -> None:
    """Options that add state, and other rates, in each group."""

    def make(model: Any) -> Any:
        first = {"params": model[0].parameters(), "momentum": 0.9}
        second = {"params": model[2].parameters(), "lr": 0.1, "centered": True}
        return optim.RMSprop([first, second], lr=0.01)

    assert_same_state(*assert_as_eager(net(), batch(), loss, make), 1e-12)


@pytest.mark.parametrize("steps_before", [0, 1])
def test_several_optimizers_over_one_model(steps_before: int) -> None:
    """Matrices by one, the rest by another; each keeps its own state."""

    def make(model: nn.Module) -> Any:
        matrices = [p for p in model.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if p.ndim < 2]
        first = getattr(optim, "Muon", optim.NAdam)(matrices, lr=0.01)
        return [first, optim.AdamW(others, lr=0.02)]

    both = assert_as_eager(net(), batch(), loss, make, steps_before=steps_before)
    assert_same_state(*both, 1e-12)


@pytest.mark.skipif(not hasattr(optim, "Muon"), reason="a torch without Muon")
def test_muon_does_not_count_its_steps() -> None:
    """It has a momentum alone, as SGD."""
    model = nn.Linear(8, 3, bias=False).double()
    assert_as_eager(model, batch(), loss, lambda m: optim.Muon(m.parameters(), lr=0.01))


def test_a_schedule_changes_the_rate_of_a_traced_rule() -> None:
    """The rate is an input; anything else that changes is refused."""
    model, other = net(), net()
    mine, theirs = (optim.NAdam(m.parameters(), lr=0.1) for m in (model, other))
    graph = dp.capture(model, batch(), loss, mine)
    with dp.compile(graph, planned(graph)) as step:
        for _ in range(3):
            theirs.zero_grad()
            want = loss(other, *batch())
            want.backward()
            theirs.step()
            assert float(step(*batch())) == pytest.approx(float(want.detach()), rel=1e-12)
            for one in (mine, theirs):
                one.param_groups[0]["lr"] *= 0.5
        mine.param_groups[0]["momentum_decay"] = 0.1
        with pytest.raises(CaptureError, match=r"'momentum_decay' of parameter group 0 is 0.1"):
            step(*batch())


def test_a_parameter_in_two_optimizers_is_refused() -> None:
    """It would be updated twice."""
    model = net()
    both = [optim.SGD(model.parameters(), lr=0.1), optim.Adam(model.parameters())]
    with pytest.raises(CaptureError, match=r"by one optimizer: '0\.weight' is in several"):
        dp.capture(model, batch(), loss, both)


@pytest.mark.parametrize(("name", "why"), [("LBFGS", "several times"), ("SparseAdam", "sparse")])
def test_those_that_cannot_be_are_refused_by_name(name: str, why: str) -> None:
    """With the reason, and what there is instead."""
    model = net()
    with pytest.raises(CaptureError, match=f"got '{name}': it .*{why}"):
        dp.capture(model, batch(), loss, getattr(optim, name)(model.parameters()))


def test_capture_changes_no_optimizer_and_no_module_of_torch() -> None:
    """Twins and stand-ins are gone afterwards."""
    before = dict(vars(torch.compiler))
    model = net()
    made = optim.Adafactor(model.parameters())
    dp.capture(model, batch(), loss, made)
    assert not made.state
    assert all(p.grad is None for p in model.parameters())
    assert vars(torch.compiler) == before
