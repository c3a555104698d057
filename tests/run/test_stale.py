"""Reading a model while its step has newer values is refused, not stale in silence."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from devplace.errors import PlanMismatchError
from devplace.run.compile import Step
from devplace.step_capture import capture
from tests.run.models import Clipped, mean_square
from tests.run.placed import at_random, make_step

BATCH = (torch.linspace(-1, 1, 16).reshape(4, 4),)
Made = tuple[Step, nn.Module, torch.optim.Optimizer]


def made() -> Made:
    """A step with its model and optimizer."""
    torch.manual_seed(0)
    model = Clipped()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return make_step(model, BATCH, mean_square, optimizer, at_random(0)), model, optimizer


READINGS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Any]] = {
    "state_dict": lambda model, _: model.state_dict(),
    "state_dict of a part": lambda model, _: model.one.state_dict(),
    "state_dict of the optimizer": lambda _, optimizer: optimizer.state_dict(),
    "state_dict of a wrapper": lambda model, _: nn.Sequential(model).state_dict(),
    "evaluation": lambda model, _: model.eval()(*BATCH),
    "evaluation of a part": lambda model, _: model.one(*BATCH),
    "evaluation without gradients": lambda model, _: torch.no_grad()(model)(*BATCH),
    "a copy": lambda model, _: copy.deepcopy(model),
    "a file": lambda model, _: torch.save(model, io.BytesIO()),
}
every_reading = pytest.mark.parametrize("read", READINGS.values(), ids=READINGS)


@every_reading
def test_reading_without_sync_is_refused(read: Callable[..., Any]) -> None:
    """Whatever reads the values says how many steps they lack; after `sync` it reads them."""
    step, model, optimizer = made()
    with step:
        read(model, optimizer)
        model.train()
        step(*BATCH)
        step(*BATCH)
        with pytest.raises(PlanMismatchError, match=r"Clipped .* 2 steps behind.*step.sync\(\)"):
            read(model, optimizer)
        step.sync()
        read(model, optimizer)
        model.train()
        step(*BATCH)
        with pytest.raises(PlanMismatchError, match="1 step behind"):
            read(model, optimizer)
        step.load()
        read(model, optimizer)


@every_reading
@pytest.mark.slow
def test_what_a_closed_step_took_with_it_is_told_once(read: Callable[..., Any]) -> None:
    """Closed, or dropped, without sync: the first reading warns, and later ones do not."""
    for end in (Step.close, None):
        step, model, optimizer = made()
        step(*BATCH)
        if end is not None:
            end(step)
        else:
            step.executor.close()
            del step
            gc.collect()
        with pytest.warns(
            UserWarning, match=r"without sync\(\): what these trained is lost"
        ) as told:
            read(model, optimizer)
        assert told[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            read(model, optimizer)


def test_a_synced_step_leaves_nothing_on_the_model() -> None:
    """Copies and files of the model hold nothing of the step, and stay readable."""
    step, model, _ = made()
    step(*BATCH)
    step.sync()
    assert not any(module._forward_pre_hooks for module in model.modules())
    again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    step(*BATCH)
    again(*BATCH)
    step.close()
    with pytest.warns(UserWarning, match="is lost"):
        late = copy.deepcopy(model)
    late.state_dict()
    assert late.one is not model.one


def test_a_checkpoint_may_be_loaded_and_read_before_load() -> None:
    """What the user has written to the model since is what is read."""
    step, model, optimizer = made()
    saved, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    with step:
        step(*BATCH)
        model.load_state_dict(saved)
        optimizer.load_state_dict(state)
        assert torch.equal(model.state_dict()["one.weight"], saved["one.weight"])
        step.load()
        step(*BATCH)
        step.sync()


def test_an_inference_and_a_failed_capture_leave_the_model_readable() -> None:
    """Steps that train nothing keep nothing back; capturing reads no values."""
    step, model, optimizer = made()
    infer = make_step(model, BATCH, None, None, at_random(0))
    with infer, step:
        infer(*BATCH)
        model.state_dict()
        step(*BATCH)
        capture(model, BATCH, mean_square, optimizer)
        step.sync()
