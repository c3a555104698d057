"""What users met with other tools: cuts inside blocks, ties, buffers, clipping, resume ..."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from devplace.errors import PlanMismatchError
from devplace.run.check import check_step
from devplace.run.compile import compile_step
from devplace.step_capture import capture
from tests.run.models import (
    Borrowing,
    Clipped,
    Containers,
    Factories,
    Labelled,
    Normed,
    Residual,
    Rotary,
    Tied,
    UShape,
    mean_square,
    next_token,
    weighted_cross_entropy,
)
from tests.run.placed import (
    NAMES,
    adam,
    all_on,
    at_random,
    by_module,
    compare_with_eager,
    largest_difference,
    make_step,
    sgd,
    train_eager,
)


@pytest.fixture(autouse=True)
def _double() -> Any:
    """Numbers in float64 and the same weights in every run."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def batches(*shape: int, count: int = 3) -> list[tuple[Any, ...]]:
    return [(torch.randn(shape),) for _ in range(count)]


def test_s14_a_cut_inside_every_residual_block_changes_nothing() -> None:
    """Six residual blocks, each cut in two: losses and parameters equal eager."""
    model = nn.Sequential(*(Residual(6) for _ in range(6)))
    place = by_module(lambda path: 1 if path.endswith("second") else 0)
    compare_with_eager(model, batches(4, 6), mean_square, sgd, place)


ALL = {
    "residual": (lambda: Residual(6), lambda: (torch.randn(4, 6),), mean_square),
    "u-shape": (UShape, lambda: (torch.randn(2, 3, 6, 6),), mean_square),
    "borrowing": (Borrowing, lambda: (torch.randn(2, 2, 5, 5),), mean_square),
    "containers": (Containers, lambda: (torch.randn(3, 4),), mean_square),
    "rotary": (Rotary, lambda: (torch.randn(4, 6),), mean_square),
    "factories": (Factories, lambda: (torch.randn(3, 2, 3),), mean_square),
    "tied": (Tied, lambda: (torch.randint(0, 7, (3, 5)),), next_token),
    "normed": (Normed, lambda: (torch.randn(4, 2, 6, 6),), mean_square),
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ALL)
def test_any_placement_of_any_model_equals_eager(name: str, seed: int) -> None:
    """Every op on a random device in a random order: three steps equal torch.optim."""
    make_model, make_batch, loss = ALL[name]
    make_optimizer = (sgd, adam)[seed]
    data = [make_batch() for _ in range(3)]
    compare_with_eager(make_model(), data, loss, make_optimizer, at_random(seed))


def test_s15_skip_tensors_joined_outside_modules() -> None:
    """Add and cat of tensors from two devices work wherever they run."""
    place = by_module(lambda path: 1 if path.startswith("up") else 0)
    compare_with_eager(UShape(), batches(2, 3, 6, 6), mean_square, sgd, place)
    place = by_module(lambda path: {"": 2, "down1": 0}.get(path, 1))
    compare_with_eager(UShape(), batches(2, 3, 6, 6), mean_square, adam, place)


def test_s16_weights_used_without_calling_their_module() -> None:
    """A sibling's weight in a functional call and a bare parameter in einsum."""
    place = by_module(lambda path: 0 if path == "owner" else 1)
    compare_with_eager(Borrowing(), batches(2, 2, 5, 5), mean_square, sgd, place)


def test_s17_containers_iterated_in_any_order() -> None:
    """Layers used twice, out of order or never; the unused one stays as it is."""
    place = by_module(lambda path: sum(map(ord, path)) % 3)
    compare_with_eager(Containers(), batches(3, 4), mean_square, adam, place)


def test_s18_read_only_buffers_are_copied_once() -> None:
    """A table read on two devices is put there once and never crosses in a step."""
    place = by_module(lambda path: 1 if path == "two" else 0)
    step = compare_with_eager(Rotary(), batches(4, 6), mean_square, sgd, place)
    schedule = step.executor.schedule
    table = schedule.graph.op_index["table"]
    assert step.executor.put_count[table] == len(schedule.holders[table])
    (tensor,) = schedule.graph.ops[table].outputs
    assert all(transfer.tensor != tensor for transfer in schedule.transfers)


def test_s19_targets_and_class_weights_reach_the_loss() -> None:
    """The loss runs on another device than the model."""
    data = [(torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 4, 1])) for _ in range(3)]
    place = by_module(lambda path: 0 if path == "body" else 1)
    compare_with_eager(Labelled(), data, weighted_cross_entropy, sgd, place)


def test_s20_nothing_keeps_the_capture_device() -> None:
    """Factory calls and default LSTM states run on the device of the plan."""
    compare_with_eager(Factories(), batches(3, 2, 3), mean_square, sgd, all_on(1))


def test_s44_tied_weights_on_two_devices_stay_tied() -> None:
    """One parameter, one gradient, one state: three Adam steps equal eager, still tied."""
    model = Tied()
    data = [(torch.randint(0, 7, (3, 5)),) for _ in range(3)]
    place = by_module(lambda path: 1 if path == "head" else 0)
    compare_with_eager(model, data, next_token, adam, place)
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("seed", range(3))
def test_s46_batch_norm_statistics_follow_eager(seed: int) -> None:
    """Running mean, variance and counter after three steps equal eager."""
    compare_with_eager(Normed(), batches(4, 2, 6, 6), mean_square, sgd, at_random(seed))


def test_s47_dropout_is_fresh_every_step_and_repeats_with_the_seed() -> None:
    """Losses differ between steps at learning rate 0, and come again with the same seed."""
    model = Normed(dropout=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    (batch,) = batches(4, 2, 6, 6, count=1)

    def losses(place: Any, seed: int) -> list[float]:
        step = make_step(model, batch, mean_square, optimizer, place, seed=seed)
        return [float(step(*batch)) for _ in range(3)]

    first = losses(at_random(0), 1)
    assert len(set(first)) == 3
    assert losses(at_random(1), 1) == first
    assert losses(at_random(0), 2) != first


def test_s48_moved_dropout_verifies_but_a_mask_applied_twice_does_not() -> None:
    """The check draws the same masks on both sides, so only real faults fail."""
    model = Normed(dropout=0.5)
    optimizer = sgd(list(model.parameters()))
    (batch,) = batches(4, 2, 6, 6, count=1)
    graph = capture(model, batch, mean_square, optimizer)
    report = check_step(graph, model, optimizer, batch, *at_random(5)(graph), NAMES)
    assert report.is_bit_equal
    assert report.num_transfers > 0


def test_s49_gradients_are_clipped_over_devices() -> None:
    """The norm over layers on two devices, and so the update, equals eager."""
    model = Clipped()
    twin = copy.deepcopy(model)
    (batch,) = batches(4, 4, count=1)
    batch = (batch[0] * 100,)
    optimizer, other = sgd(list(model.parameters())), sgd(list(twin.parameters()))
    graph = capture(model, batch, mean_square, optimizer, clip_grad_norm=1.0)
    place = by_module(lambda path: 1 if path == "two" else 0)
    step = compile_step(model, optimizer, graph, *place(graph), NAMES)
    for _ in range(3):
        step(*batch)
        other.zero_grad()
        mean_square(twin, *batch).backward()
        norm = nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        other.step()
    step.sync()
    assert norm > 1.0
    assert largest_difference(model, twin) < 1e-9


@pytest.mark.parametrize("captured_when", ["before loading", "after loading"])
@pytest.mark.parametrize("make_optimizer", [sgd, adam])
def test_s50_resume_under_another_plan(captured_when: str, make_optimizer: Any) -> None:
    """Three steps on plan A, checkpoint, three on plan B: equal six eager steps."""
    data = batches(4, 2, 6, 6, count=6)
    model = Normed()
    twin = copy.deepcopy(model)
    optimizer = make_optimizer(list(model.parameters()))
    step = make_step(model, data[0], mean_square, optimizer, at_random(1))
    losses = [float(step(*batch)) for batch in data[:3]]
    step.sync()
    checkpoint = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    fresh = Normed()
    resumed = make_optimizer(list(fresh.parameters()))
    if captured_when == "before loading":
        second = make_step(fresh, data[0], mean_square, resumed, at_random(2))
    fresh.load_state_dict(checkpoint[0])
    resumed.load_state_dict(checkpoint[1])
    if captured_when == "before loading":
        second.load()
    else:
        second = make_step(fresh, data[0], mean_square, resumed, at_random(2))
    losses += [float(second(*batch)) for batch in data[3:]]
    second.sync()

    other = make_optimizer(list(twin.parameters()))
    expected = train_eager(twin, other, data, mean_square)
    assert losses == pytest.approx(expected, abs=1e-9)
    assert largest_difference(fresh, twin) < 1e-9
    _assert_same_state(resumed, other)


def _assert_same_state(first: Any, second: Any) -> None:
    ours, theirs = first.state_dict(), second.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for key, entry in theirs["state"].items():
        assert ours["state"][key].keys() == entry.keys()
        for slot, value in entry.items():
            mine = ours["state"][key][slot]
            assert mine.dtype == value.dtype
            torch.testing.assert_close(mine, value, atol=1e-9, rtol=0)


def test_s51_lazily_created_state_does_not_change_the_step() -> None:
    """The first Adam step uses the same graph as later ones and equals eager."""
    model = Clipped()
    compare_with_eager(model, batches(4, 4, count=1), mean_square, adam, at_random(0))


def test_s37_the_captured_mode_is_kept() -> None:
    """A training step on a model now in eval mode is refused, and runs again in train mode."""
    model = Normed(dropout=0.5)
    (batch,) = batches(4, 2, 6, 6, count=1)
    step = make_step(model, batch, mean_square, sgd(list(model.parameters())), at_random(0))
    step(*batch)
    model.eval()
    with pytest.raises(PlanMismatchError, match=r"in eval mode, .* in train mode\. Call model.tr"):
        step(*batch)
    model.train()
    step(*batch)
