"""Reading and writing the user's model and optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from devplace.errors import PlanMismatchError
from devplace.run.state import ModelState, invent
from devplace.step_capture import capture
from tests.run.models import Clipped, Normed, mean_square
from tests.run.placed import adam, at_random, make_step, sgd, train_eager


def test_scheduled_optimizers_are_synced() -> None:
    """A learning-rate scheduler wraps `optimizer.step`; syncing neither calls it nor minds."""
    model = Clipped()
    optimizer = adam(list(model.parameters()))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    batch = (torch.randn(4, 4),)
    step = make_step(model, batch, mean_square, optimizer, at_random(0))
    step(*batch)
    step.sync()
    assert [int(state["step"]) for state in optimizer.state.values()] == [1, 1, 1, 1]
    optimizer.step()
    schedule.step()
    assert schedule.get_last_lr() == [0.005]
    step(*batch)


def test_training_goes_on_in_eager_mode_after_sync() -> None:
    """Two placed steps, then two eager ones, equal four eager ones."""
    torch.manual_seed(0)
    data = [(torch.randn(4, 4, dtype=torch.float64),) for _ in range(4)]
    models: list[Any] = [Clipped().double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [adam(list(model.parameters())) for model in models]
    step = make_step(models[0], data[0], mean_square, optimizers[0], at_random(1))
    for batch in data[:2]:
        step(*batch)
    step.sync()
    train_eager(models[0], optimizers[0], data[2:], mean_square)
    train_eager(models[1], optimizers[1], data, mean_square)
    for mine, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-9, rtol=0)


def test_parameters_at_different_steps_are_refused() -> None:
    """One step number serves all parameters, so they must agree in steps since capture."""
    model = Clipped()
    optimizer = adam(list(model.parameters()))
    batch = (torch.randn(4, 4),)
    step = make_step(model, batch, mean_square, optimizer, at_random(0))
    step(*batch)
    step.sync()
    optimizer.state[model.two.weight]["step"].fill_(5)
    message = r"'one\.weight' has made 1, 'two\.weight' 5"
    with pytest.raises(PlanMismatchError, match=message):
        step.load()


def test_reading_copies_nothing_and_makes_zeros_for_state_to_come() -> None:
    """Values are the user's own tensors; state not created yet reads as zeros."""
    model = Normed()
    optimizer = sgd(list(model.parameters()))
    graph = capture(model, (torch.randn(4, 2, 6, 6),), mean_square, optimizer)
    values = ModelState(graph, model, optimizer).read()
    for binding in graph.program.bindings:
        if binding.kind == "parameter":
            assert values[binding.op] is dict(model.named_parameters())[binding.key]
        if binding.kind == "state":
            assert not values[binding.op].any()


def test_invented_values_are_sensible_and_repeat() -> None:
    """Weights keep the scale of what passes, variances are positive, counters are 0."""
    weight = invent(torch.empty(64, 400, device="meta"), "parameter", 1)
    assert (torch.randn(1000, 400) @ weight.t()).std() == pytest.approx(1.0, rel=0.1)
    assert torch.equal(weight, invent(torch.empty(64, 400, device="meta"), "parameter", 1))
    assert (invent(torch.empty(9, device="meta"), "buffer", 1) > 0).all()
    assert invent(torch.empty((), dtype=torch.int64, device="meta"), "buffer", 1) == 0
    assert not invent(torch.empty(3, device="meta"), "state", 1).any()
