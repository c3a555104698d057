"""What a step takes for granted about model, optimizer and batch holds, or is refused by name."""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from devplace.errors import CaptureError, InputError, PlanMismatchError
from devplace.run.compile import compile_step
from devplace.run.copies import laid_out
from devplace.step_capture import capture
from tests.run.models import Clipped, Normed, mean_square
from tests.run.placed import NAMES, all_on, at_random, make_step, sgd, train_eager

BATCH = (torch.randn(4, 4),)


class Flat(nn.Module):
    """A head over all of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(48, 3)

    def forward(self, x: Any) -> Any:
        return self.head(x.flatten(1))


def images(k: int) -> torch.Tensor:
    """Images with channels last in memory, as they come from a file."""
    generator = torch.Generator().manual_seed(k)
    return torch.randn(2, 4, 4, 3, generator=generator).permute(0, 3, 1, 2)


@pytest.mark.parametrize(
    "first", [images(0), images(0).contiguous(), images(0)[:1].expand(2, 3, 4, 4)]
)
def test_a_batch_may_be_laid_out_otherwise_than_the_example(first: torch.Tensor) -> None:
    """`flatten` works on any layout in eager mode, so it must in a step, with the same numbers."""
    torch.manual_seed(0)
    model = Flat()
    twin = copy.deepcopy(model)
    step = make_step(model, (first,), mean_square, sgd(list(model.parameters())), at_random(0))
    data = [(images(1),), (images(2).contiguous(),), (torch.cat([images(3)] * 2, 3)[..., ::2],)]
    losses = [float(step(*batch)) for batch in data]
    expected = train_eager(twin, sgd(list(twin.parameters())), data, mean_square)
    assert losses == pytest.approx(expected, abs=1e-6)


def test_weights_may_be_laid_out_otherwise_when_they_are_loaded() -> None:
    """A model whose memory format changed after capture gives the same loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2))
    step = make_step(model, (images(0),), mean_square, sgd(list(model.parameters())), at_random(1))
    first = float(step(images(1)))
    model.to(memory_format=torch.channels_last)
    step.load()
    assert float(step(images(1))) == pytest.approx(first, abs=1e-6)


@pytest.mark.parametrize(
    ("strides", "expected"),
    [((1, 3), (1, 3)), ((7, 1), (4, 1)), ((0, 1), (4, 1)), ((4, 1), (4, 1)), (None, (2, 6))],
)
def test_a_tensor_is_laid_out_in_the_order_asked_for(strides: Any, expected: Any) -> None:
    """Values stay; dimensions come in the order of the strides, without gaps or repetition."""
    value = torch.arange(24.0).reshape(4, 6).t()[::2]
    assert (value.shape, value.stride()) == ((3, 4), (2, 6))
    made = laid_out(value, strides)
    assert torch.equal(made, value)
    assert made.stride() == expected


def refused(
    model: nn.Module, change: Callable[[], Any], message: str, undo: Callable[[], Any]
) -> None:
    """After the change a step names what is wrong; when it is undone, it goes on."""
    batch = (torch.randn(4, 2, 6, 6),) if isinstance(model, Normed) else BATCH
    step = make_step(model, batch, mean_square, sgd(list(model.parameters())), all_on(0))
    step(*batch)
    change()
    with pytest.raises(PlanMismatchError, match=message):
        step(*batch)
    undo()
    step(*batch)
    assert step.steps_done == 2


def test_a_module_that_changed_its_mode_is_named() -> None:
    """Batch norm in eval mode computes something else, though the model is in training mode."""
    model = Normed()
    message = r"module 'norm' is in eval mode.*Call model.get_submodule\('norm'\).train\(\)"
    refused(model, model.norm.eval, message, model.norm.train)


def test_a_parameter_frozen_after_capture_is_named() -> None:
    """Eager torch would no longer train it, the captured step would."""
    weight = (model := Clipped()).one.weight
    message = r"'one.weight' is frozen, the step was captured with it trained"
    refused(model, lambda: weight.requires_grad_(False), message, weight.requires_grad_)


def test_a_parameter_unfrozen_after_capture_is_named() -> None:
    """Eager torch would train it from now on, the captured step would not."""
    weight = (model := Clipped()).one.weight.requires_grad_(False)
    message = r"'one.weight' is to be trained, the step was captured with it frozen"
    refused(model, weight.requires_grad_, message, lambda: weight.requires_grad_(False))


def test_other_parameters_may_be_frozen_and_unfrozen() -> None:
    """Two steps over parts of a model, as of a GAN: what others train does not matter."""
    model = Clipped()
    model.one.requires_grad_(False)
    step = make_step(model, BATCH, mean_square, sgd(list(model.two.parameters())), all_on(0))
    model.one.requires_grad_()
    step(*BATCH)
    assert step.steps_done == 1


def test_a_parameter_group_added_after_capture_is_refused() -> None:
    """Its parameters would not be trained."""
    model = Clipped()
    optimizer = sgd(list(model.one.parameters()))
    step = make_step(model, BATCH, mean_square, optimizer, all_on(0))
    optimizer.add_param_group({"params": list(model.two.parameters())})
    with pytest.raises(CaptureError, match=r"captured 1, now 2. Capture again"):
        step(*BATCH)


def test_a_parameter_replaced_after_capture_is_refused_when_loaded() -> None:
    """The optimizer does not train the new one."""
    model = Clipped()
    step = make_step(model, BATCH, mean_square, sgd(list(model.parameters())), all_on(0))
    model.one.weight = nn.Parameter(torch.zeros(8, 4))
    with pytest.raises(PlanMismatchError, match=r"'one.weight' is not in its group 0"):
        step.load()


def test_calls_from_several_threads_are_steps_one_after_another() -> None:
    """Two threads that make ten steps each give the losses of twenty steps, in some order."""
    torch.manual_seed(0)
    model = Clipped()
    twin = copy.deepcopy(model)
    step = make_step(model, BATCH, mean_square, sgd(list(model.parameters())), at_random(0))
    losses: list[float] = []

    def train() -> None:
        for _ in range(10):
            losses.append(float(step(*BATCH)))

    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = train_eager(twin, sgd(list(twin.parameters())), [BATCH] * 20, mean_square)
    assert step.steps_done == 20
    assert sorted(losses) == pytest.approx(sorted(expected), abs=1e-6)


def nested(model: Any, batch: Any, scale: Any = None) -> Any:
    """A loss of a nested batch."""
    out = model(batch["x"][0] - batch["more"]["shift"])
    return out.square().mean() if scale is None else (out * scale).square().mean()


@pytest.mark.parametrize("kind", [dict, OrderedDict, lambda pairs: defaultdict(list, pairs)])
def test_nested_dicts_may_have_their_keys_in_any_order(kind: Callable[[Any], Any]) -> None:
    """A dict of any kind is the same batch whatever was put into it first."""
    model = Clipped()
    x, shift = torch.randn(4, 4), torch.randn(4)
    batch = kind({"x": [x], "more": kind({"shift": shift, "unread": x})})
    step = make_step(model, (batch,), nested, sgd(list(model.parameters())), all_on(0))
    expected = float(nested(model, batch).detach())
    turned = kind({"more": kind({"unread": x, "shift": shift}), "x": [x]})
    assert float(step(turned)) == pytest.approx(expected, abs=1e-6)


@dataclasses.dataclass
class Example:
    """A batch as a record."""

    x: Any
    more: dict[str, Any]
    note: str = ""


@pytest.mark.parametrize("wrap", [lambda example: example, lambda example: {"batch": [example]}])
def test_dataclasses_are_batches(wrap: Callable[[Any], Any]) -> None:
    """Alone or nested, call after call, with dicts in any order in them."""
    model = Clipped()
    x, shift = torch.randn(4, 4), torch.randn(4)

    def loss(model: Any, batch: Any) -> Any:
        example = batch[0] if isinstance(batch, list) else batch
        return (model(example.x) - example.more["shift"]).square().mean()

    example = Example(x, {"shift": shift, "unread": x})
    expected = float(loss(model, example).detach())
    step = make_step(model, wrap(example), loss, sgd(list(model.parameters())), all_on(0))
    given = wrap(Example(x, {"unread": x, "shift": shift}))
    found = step(**given) if isinstance(given, dict) else step(given)
    assert float(found) == pytest.approx(expected, abs=1e-6)
    with pytest.raises(InputError, match=r"'.*note' is 'other'"):
        step(wrap(Example(x, {"shift": shift, "unread": x}, "other")))


def test_another_nesting_is_told_by_the_first_name_that_differs() -> None:
    """Numbers of inputs alone do not say what is wrong."""
    model = Clipped()
    x, shift = torch.randn(4, 4), torch.randn(4)
    batch = {"x": [x], "more": {"shift": shift}}
    step = make_step(model, (batch, None), nested, sgd(list(model.parameters())), all_on(0))
    with pytest.raises(InputError, match=r"expected 2 positional.*, without '0\.more\.shift'"):
        step({"x": [x], "more": {"move": shift}}, None)
    with pytest.raises(InputError, match=r", in other containers \(tuple, list, dict\)"):
        step({"x": (x,), "more": {"shift": shift}}, None)
    with pytest.raises(InputError, match=r"'1' is a tensor of shape \[4, 4\], captured with None"):
        step(batch, x)


def test_a_number_that_is_nan_may_be_an_input() -> None:
    """It is itself; another number is not."""
    model, x = Clipped(), torch.randn(4, 4)

    def loss(model: Any, x: Any, scale: float) -> Any:
        return (model(x) * (1.0 if scale != scale else scale)).square().mean()

    batch = (x, float("nan"))
    step = make_step(model, batch, loss, sgd(list(model.parameters())), all_on(0))
    step(x, float("nan"))
    with pytest.raises(InputError, match=r"'1' is 2\.0, captured with nan"):
        step(x, 2.0)


def test_autocast_around_a_call_is_refused_unless_it_was_captured() -> None:
    """It would do nothing, where eager mode computes in 16 bits."""
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    graphs = [capture(model, x, autocast=dtype) for dtype in (None, torch.bfloat16)]
    steps = [compile_step(model, None, g, *all_on(0)(g), NAMES) for g in graphs]
    exact, rounded = (step(x) for step in steps)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(PlanMismatchError, match="in bfloat16, and was captured without"):
            steps[0](x)
        assert torch.equal(steps[1](x), rounded)
        assert torch.equal(model(x), rounded)
    assert not torch.equal(exact, rounded.float())
    message = "in float16, and was captured in bfloat16"
    with (
        torch.autocast("cpu", dtype=torch.float16),
        pytest.raises(PlanMismatchError, match=message),
    ):
        steps[1](x)
