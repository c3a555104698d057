"""What a trace does not show: values read past it, state elsewhere, memory left behind."""

from __future__ import annotations

import array
import collections
import contextvars
import ctypes
import datetime
import functools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.step_capture.placed_steps import assert_as_eager, planned
from torch import nn

import devplace as dp
from devplace.errors import CaptureError, PlanMismatchError
from devplace.step_capture import capture

Forward = Callable[[Any, Any], Any]
CONTEXT: contextvars.ContextVar[Any] = contextvars.ContextVar("CONTEXT")


class Net(nn.Module):
    """A linear layer, with a function that makes something of it."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()
        self.way = forward

    def forward(self, x: Any) -> Any:
        return self.way(self, x)


def batch() -> tuple[torch.Tensor]:
    torch.manual_seed(1)
    return (torch.randn(6, 4).double(),)


def loss_fn(model: Any, x: Any) -> Any:
    return model(x).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def refused(forward: Forward, words: str, **options: Any) -> None:
    torch.manual_seed(0)
    model = Net(forward)
    with pytest.raises(CaptureError, match=words) as caught:
        capture(model, batch(), loss_fn, sgd(model), **options)
    assert "\n" not in str(caught.value)


def equal(forward: Forward) -> None:
    torch.manual_seed(0)
    assert_as_eager(Net(forward), batch(), loss_fn, sgd)


# ---- values


def truth(m: Any, x: Any) -> Any:
    return 2.0 if m.linear.weight.sum() > 0 else 1.0


READS: dict[str, Forward] = {
    "truth": truth,
    "item": lambda m, x: m.linear.weight.sum().item(),
    "numpy": lambda m, x: float(m.linear.weight.detach().numpy()[0, 0]),
    "array": lambda m, x: float(np.asarray(m.linear.weight.detach())[0, 0]),
    "dlpack": lambda m, x: float(np.from_dlpack(m.linear.weight.detach())[0, 0]),
    "shape": lambda m, x: float(len(m.linear.weight.nonzero())),
}


@pytest.mark.parametrize("kind", READS)
def test_a_value_that_is_read_is_refused_though_the_error_is_caught(kind: str) -> None:
    """Eager mode reads it; a step that went on without it computes something else."""

    def forward(m: Any, x: Any) -> Any:
        try:
            factor = READS[kind](m, x)
        except Exception:
            factor = 3.0
        return m.linear(x) * factor

    refused(forward, r"must not depend on tensor values: .*test_unseen.*caught")
    refused(lambda m, x: m.linear(x) * READS[kind](m, x), r"must not depend on (tensor )?values")


KNOWN: dict[str, Forward] = {
    "covariance": lambda m, x: torch.cov(m.linear(x).t()),
    "correlation": lambda m, x: torch.corrcoef(m.linear(x).t()),
    "range": lambda m, x: m.linear(x) * torch.arange(4.0)[2].item(),
    "rates": lambda m, x: m.linear(x) * sum(torch.linspace(0, 0.3, 4).tolist()),
    "size": lambda m, x: m.linear(x) / torch.tensor(x.shape).prod().item(),
    "branch": lambda m, x: m.linear(x) * (2 if torch.ones(3).sum() > 2 else 1),
}


@pytest.mark.parametrize("kind", KNOWN)
def test_values_of_what_is_computed_from_numbers_alone_are_known(kind: str) -> None:
    """No step changes them; some functions of torch look at such themselves."""
    equal(KNOWN[kind])


def test_a_value_written_in_between_is_not_known() -> None:
    """Three ones, of which one is overwritten by the batch: the sum is not 3."""

    def forward(m: Any, x: Any) -> Any:
        ones = torch.ones(3).double()
        ones[0] = x.sum()
        return m.linear(x) * ones.sum().item()

    refused(forward, "must not depend on tensor values")


def test_addresses_say_what_shares_memory() -> None:
    """As models ask which weights are tied; and nothing lies at zero."""

    def forward(m: Any, x: Any) -> Any:
        weight = m.linear.weight
        is_tied = weight.data_ptr() == next(m.parameters()).data_ptr() == weight.t().data_ptr()
        is_other = m.linear.bias.data_ptr() not in (0, weight.data_ptr(), weight[1].data_ptr())
        return m.linear(x) * (1 + is_tied + 2 * is_other)

    equal(forward)


def test_an_op_that_fails_may_be_caught() -> None:
    """It fails in eager mode, too."""

    def forward(m: Any, x: Any) -> Any:
        try:
            return m.linear(x).view(7)
        except RuntimeError:
            return m.linear(x)

    equal(forward)


def test_an_op_that_gives_nothing_is_none_that_failed() -> None:
    """It writes what it is given."""

    def forward(m: Any, x: Any) -> Any:
        made = m.linear(x).detach().clone()
        torch._foreach_add_([made], [x])
        return m.linear(x) * made

    refused(forward, r"aten._foreach_add_.List.*it writes its inputs")


def test_capture_leaves_tensors_resizable() -> None:
    """What NumPy has looked at cannot be resized."""
    scale = torch.ones(4).double()
    torch.manual_seed(0)
    model = Net(lambda m, x: m.linear(x) * scale)
    capture(model, batch(), loss_fn, sgd(model))
    assert scale.untyped_storage().resizable()


def test_what_stands_for_a_parameter_is_one() -> None:
    """Libraries ask so whether a tensor is learned."""
    equal(lambda m, x: m.linear(x) * (2 if isinstance(m.linear.weight, nn.Parameter) else 1))


@pytest.mark.parametrize("kind", ["is", "equals", "in", "class"])
def test_a_class_of_tensors_is_asked_for_by_isinstance(kind: str) -> None:
    """While a step is captured tensors are of another class."""
    ways: dict[str, Forward] = {
        "is": lambda m, x: m.linear(x) * (1 if type(x) is torch.Tensor else 2),
        "equals": lambda m, x: m.linear(x) * (1 if nn.Parameter == type(m.linear.weight) else 2),  # noqa: E721
        "class": lambda m, x: m.linear(x) * (1 if x.__class__ is torch.Tensor else 2),
        "in": lambda m, x: m.linear(x) * (1 if type(x) in (list, torch.Tensor) else 2),
    }
    refused(ways[kind], r"by isinstance: test_unseen.py:\d+ compares")
    equal(lambda m, x: m.linear(x) * (1 if type(m) is Net or isinstance(x, torch.Tensor) else 2))


def test_values_of_a_tensor_outside_are_checked_at_each_call() -> None:
    """They decide what the step is, and no load() brings new ones."""
    scale = torch.ones(4).double()
    torch.manual_seed(0)
    model = Net(lambda m, x: m.linear(x) * scale.tolist()[0])
    graph = capture(model, batch(), loss_fn, sgd(model))
    with dp.compile(graph, planned(graph)) as step:
        step(*batch())
        scale.fill_(2.0)
        with pytest.raises(PlanMismatchError, match=r"scale\._version"):
            step(*batch())


# ---- clocks


@pytest.mark.parametrize("read", [datetime.datetime.now, datetime.datetime.today])
def test_the_calendar_is_a_clock(read: Any) -> None:
    """The second run is in another year, so that the month is another one, too."""
    name = read.__name__
    refused(
        lambda m, x: m.linear(x) * getattr(datetime.datetime, name)().month, "same in each of two"
    )


def test_a_date_that_is_only_logged_does_no_harm() -> None:
    """It is an instance of the class of the standard library in both runs."""
    log: list[datetime.datetime] = []

    def forward(m: Any, x: Any) -> Any:
        log.append(datetime.datetime.now(datetime.UTC))
        assert isinstance(log[-1], datetime.datetime)
        assert isinstance(datetime.datetime(2020, 1, 1), datetime.datetime)
        return m.linear(x)

    equal(forward)


# ---- state


class Attributes(dict[str, Any]):
    """A dict with its items as attributes."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # type: ignore[assignment]


class Numbers(list[Any]):
    """A list of a class of its own."""


HELD: dict[str, Callable[[], Any]] = {
    "array": lambda: array.array("d", [0.0]),
    "bytes": lambda: bytearray(1),
    "list": lambda: Numbers([0]),
    "user list": lambda: collections.UserList([0]),
    "user dict": lambda: collections.UserDict({0: 0}),
    "chained": lambda: collections.ChainMap({0: 0}),
    "weak": lambda: weakref.WeakKeyDictionary({Numbers: 0}),
    "ctypes": lambda: ctypes.c_int(0),
    "attributes": lambda: Attributes(value=0),
    "context": lambda: CONTEXT,
}


def counting(kind: str, held: Any, also_in_training: bool) -> Forward:
    """A model that counts its training steps, and multiplies by the number."""
    key: Any = Numbers if kind == "weak" else 0

    def by_item(m: Any, x: Any) -> Any:
        if m.training:
            held[key] += 1
            if not also_in_training:
                return m.linear(x)
        return m.linear(x) * held[key]

    def by_attribute(m: Any, x: Any) -> Any:
        if m.training:
            held.value += 1
            if not also_in_training:
                return m.linear(x)
        return m.linear(x) * held.value

    def by_context(m: Any, x: Any) -> Any:
        if m.training:
            CONTEXT.set(CONTEXT.get() + 1)
            if not also_in_training:
                return m.linear(x)
        return m.linear(x) * CONTEXT.get()

    CONTEXT.set(0)
    ways = {"ctypes": by_attribute, "attributes": by_attribute, "context": by_context}
    return ways.get(kind, by_item)


@pytest.mark.parametrize("kind", HELD)
def test_a_number_that_a_step_counts_up_and_uses_is_refused(kind: str) -> None:
    """The factor is 1 in the first step and 2 in the second."""
    held = HELD[kind]()
    refused(counting(kind, held, True), r"values that it changes|same in each of two")


@pytest.mark.parametrize("kind", HELD)
def test_a_number_that_training_counts_up_and_evaluation_reads_is_refused(kind: str) -> None:
    """A step would lose it; capture itself leaves it as it was."""
    held = HELD[kind]()
    refused(counting(kind, held, False), r"written by the step.*read at test_unseen")
    now = CONTEXT.get() if kind == "context" else getattr(held, "value", None)
    assert (held[Numbers if kind == "weak" else 0] if now is None else now) == 0


@pytest.mark.parametrize("kind", ["array", "bytes", "context", "ctypes"])
def test_a_number_that_changes_between_steps_is_checked(kind: str) -> None:
    """The step computes what the number was at capture."""
    held = HELD[kind]()
    model = Net(counting(kind, held, False)).eval()
    graph = capture(model, batch())
    with dp.compile(graph, planned(graph)) as step:
        step(*batch())
        if kind == "context":
            CONTEXT.set(2)
        elif kind == "ctypes":
            held.value = 2
        else:
            held[0] = 2
        with pytest.raises(PlanMismatchError, match="fixed at capture"):
            step(*batch())


def test_what_a_cached_function_gave_is_state_once_it_is_written() -> None:
    """All calls give one tensor, which training writes and evaluation reads."""

    @functools.lru_cache
    def mean() -> Any:
        return torch.zeros(4).double()

    def forward(m: Any, x: Any) -> Any:
        made = m.linear(x)
        if m.training:
            mean().copy_(made.detach().mean(0))
            return made
        return made - mean()

    refused(forward, r"what mean\(\) keeps is written by the step.*read at test_unseen")


@pytest.mark.parametrize("name", ["m0", "computed"])
def test_attributes_that_are_named_when_the_step_runs_are_state(name: str) -> None:
    """No line of code has a name that is put together, but `getattr` reads it."""

    def constant(m: Any, x: Any) -> Any:
        made = m.linear(x)
        if m.training:
            setattr(m, "m0", made.detach().mean(0))  # noqa: B010
            return made
        return made - getattr(m, "m0")  # noqa: B009

    def computed(m: Any, x: Any) -> Any:
        made, k = m.linear(x), 0
        if m.training:
            setattr(m, f"mean_{k}", made.detach().mean(0))
            return made
        return made - getattr(m, f"mean_{k}")

    refused(constant if name == "m0" else computed, r"written by the step.*read at test_unseen")


def test_memory_of_numpy_that_a_tensor_writes_is_state() -> None:
    """The tensor over it is made in the step, and stands for the array."""
    mean = np.zeros(4)

    def forward(m: Any, x: Any) -> Any:
        made = m.linear(x)
        if m.training:
            torch.from_numpy(mean).copy_(made.detach().mean(0))
            return made
        return made - torch.from_numpy(mean)

    refused(forward, "'mean' is not, but is read and changed")


def test_memory_of_numpy_that_an_array_changes_under_a_tensor_is_seen() -> None:
    """The tensor is one object with two values."""
    count = np.zeros(1)
    over = torch.from_numpy(count)

    def forward(m: Any, x: Any) -> Any:
        made = m.linear(x) - over
        count[0] += 1
        return made

    refused(forward, "values that it changes: count goes from")


# ---- memory and gradients


def test_memory_that_a_parameter_left_is_not_read() -> None:
    """Eager mode keeps it as long as anybody has it, a step computes over it."""

    def swapped(m: Any, x: Any) -> Any:
        before = m.linear.weight.data
        m.linear.weight.data = before * 0.5
        made = m.linear(x)
        m.linear.weight.data = before
        return made

    def copied(m: Any, x: Any) -> Any:
        before = m.linear.weight.data.clone()
        m.linear.weight.data = before * 0.5
        made = m.linear(x)
        m.linear.weight.data = before
        return made

    refused(swapped, r"'linear.weight' had before.*linear.weight.data.clone")
    equal(copied)


def test_what_is_computed_from_a_parameter_before_the_step_is_refused() -> None:
    """It would stay as it is, and the weight would lose that gradient."""
    torch.manual_seed(0)
    model = Net(lambda m, x: x @ m.double_weight)
    model.double_weight = model.linear.weight * 2
    with pytest.raises(CaptureError, match=r"'linear.weight' by way of a tensor made before"):
        capture(model, batch(), loss_fn, sgd(model))


@pytest.mark.parametrize("strides", [(1, 1), (0, 1), (2, 1)])
def test_elements_of_a_parameter_do_not_share_memory(strides: tuple[int, int]) -> None:
    """Windows over one row: an update would write each element several times."""
    model = nn.Linear(4, 4).double()
    row = torch.randn(40).double()
    model.weight = nn.Parameter(torch.as_strided(row, (4, 4), strides))
    with pytest.raises(CaptureError, match=r"must not share memory: those of 'weight'"):
        capture(model, batch(), loss_fn, sgd(model))
    model.weight = nn.Parameter(torch.as_strided(row, (4, 4), (1, 8)))
    assert_as_eager(model, batch(), loss_fn, sgd)


@pytest.mark.parametrize("strides", [(1, 1), (0, 1)])
def test_elements_of_a_buffer_that_is_written_do_not_share_memory(strides: tuple[int, int]) -> None:
    """One that is only read may."""

    def made(forward: Forward) -> Net:
        torch.manual_seed(0)
        model = Net(forward)
        model.register_buffer("table", torch.ones(9).double().as_strided((4, 4), strides))
        return model

    def forward(m: Any, x: Any) -> Any:
        m.table = m.table + 1
        return m.linear(x) @ m.table

    model = made(forward)
    with pytest.raises(CaptureError, match=r"'table' has elements that overlap"):
        capture(model, batch(), loss_fn, sgd(model))
    assert_as_eager(made(lambda m, x: m.linear(x) @ m.table), batch(), loss_fn, sgd)


def test_a_step_of_an_optimizer_that_was_replaced_is_refused() -> None:
    """It may do anything; that of a scheduler only counts."""
    model = Net(lambda m, x: m.linear(x))
    optimizer = sgd(model)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    capture(model, batch(), loss_fn, optimizer)
    plain = sgd(model)
    plain.step = lambda *args: None  # type: ignore[method-assign,assignment]
    with pytest.raises(CaptureError, match=r"step\(\) of this SGD was replaced"):
        capture(model, batch(), loss_fn, plain)


# ---- micro-batches


def test_a_count_of_predictions_that_is_right_on_the_example_alone_is_refused() -> None:
    """All four rows are counted in the example; in other batches chunks count other numbers."""

    def large(m: Any, x: Any) -> Any:
        losses = m(x).square().mean(1)
        counted = losses > 0
        return (losses * counted).sum() / counted.sum()

    torch.manual_seed(0)
    model = Net(lambda m, x: m.linear(x))
    with pytest.raises(CaptureError, match="3 in a micro-batch and 6 in the whole batch"):
        capture(model, batch(), large, sgd(model), micro_batches=2)


def test_a_table_of_zeros_with_as_many_rows_as_the_batch_is_varied() -> None:
    """Its mean is that of each chunk only because it is zero in the example."""

    def with_table(m: Any, x: Any, table: Any) -> Any:
        return (m(x) + table.mean(0)).square().mean()

    torch.manual_seed(0)
    model = Net(lambda m, x: m.linear(x))
    inputs = (*batch(), torch.zeros(6, 4).double())
    with pytest.raises(CaptureError, match=r"batch_dims=\{'1': None\}"):
        capture(model, inputs, with_table, sgd(model), micro_batches=2)
