"""A step sees changes in what its functions read as a whole, and in what they pass on."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from devplace.errors import CaptureError, PlanMismatchError
from tests.run.reading import batch, made, plain

Case = tuple[Any, Callable[[], Any], str]


@dataclasses.dataclass
class Options:
    """What a loss is made of."""

    beta: float = 1.0
    inner: Any = None


class Schedule:
    """A number that follows a count, used as a number."""

    def __init__(self) -> None:
        self.count = 1

    def __float__(self) -> float:
        return float(self.count)

    def __mul__(self, other: Any) -> Any:
        return self.count * other


def long_list() -> Case:
    """More numbers than fit a message, of which one is read."""
    weights, k = [1.0] * 500, 7
    return (
        lambda m, x, y: plain(m, x, y) * weights[k],
        lambda: weights.__setitem__(7, 2.0),
        "'weights[7]' is 2.0, the step was captured with 1.0",
    )


def variable_key() -> Case:
    """An item by a key that is no constant, beside a tensor."""
    weights, key = {"kl": 1.0, "mask": torch.ones(3)}, "kl"
    return (
        lambda m, x, y: plain(m, x, y) * weights[key],
        lambda: weights.update(kl=2.0),
        "\"weights['kl']\" is 2.0",
    )


def queue() -> Case:
    """The last entry of a queue."""
    recent = collections.deque([1.0], maxlen=3)
    return lambda m, x, y: plain(m, x, y) * recent[-1], lambda: recent.append(2.0), "'recent'"


def array() -> Case:
    """A table of NumPy's that a constant is made of."""
    table = np.ones((100, 3), dtype=np.float32)
    return (
        lambda m, x, y: plain(m, x, y) * torch.from_numpy(table).mean(),
        lambda: table.fill(2.0),
        "'table'",
    )


def terms() -> Case:
    """Pairs of a weight and a function."""
    pairs = [(1.0, plain), (0.5, lambda m, x, y: m(x).square().mean())]
    return (
        lambda m, x, y: sum(w * term(m, x, y) for w, term in pairs),
        lambda: pairs.__setitem__(1, (3.0, pairs[1][1])),
        "'pairs[1][0]' is 3.0",
    )


def tensors() -> Case:
    """A tensor put in place of another one in a dict that is read as a whole."""
    parts = {"a": torch.ones(()), "b": torch.ones(())}
    return (
        lambda m, x, y: plain(m, x, y) * sum(parts.values()),
        lambda: parts.update(b=torch.tensor(3.0)),
        "\"parts['b']\" is another one",
    )


def by_name() -> Case:
    """An attribute whose name is made while the step runs."""
    options, k = SimpleNamespace(beta1=1.0, comment="a"), 1
    return (
        lambda m, x, y: plain(m, x, y) * getattr(options, f"beta{k}"),
        lambda: setattr(options, "beta1", 2.0),
        "'options.beta1' is 2.0",
    )


def unpacked() -> Case:
    """All attributes of an object as a dict."""
    options = Options()
    return (
        lambda m, x, y: plain(m, x, y) * vars(options)["beta"],
        lambda: setattr(options, "beta", 2.0),
        "'options.beta' is 2.0",
    )


def as_dict() -> Case:
    """All attributes of an object in an object."""
    options = Options(inner=Options())
    return (
        lambda m, x, y: plain(m, x, y) * dataclasses.asdict(options)["inner"]["beta"],
        lambda: setattr(options.inner, "beta", 2.0),
        "'options.inner.beta' is 2.0",
    )


def as_number() -> Case:
    """An object that is made a number."""
    schedule = Schedule()
    return (
        lambda m, x, y: plain(m, x, y) * float(schedule),
        lambda: setattr(schedule, "count", 2),
        "'schedule.count' is 2",
    )


def multiplied() -> Case:
    """An object that multiplies."""
    schedule = Schedule()
    return (
        lambda m, x, y: schedule * plain(m, x, y),
        lambda: setattr(schedule, "count", 2),
        "'schedule.count' is 2",
    )


class Record(NamedTuple):
    """Options that are replaced as a whole."""

    beta: float = 1.0
    epoch: int = 0


class Margin:
    """A loss that is an object."""

    def __init__(self, margin: float) -> None:
        self.margin = margin

    def __call__(self, output: Any, y: Any) -> Any:
        return F.multi_margin_loss(output, y, margin=self.margin)


def swapped(value: Any, other: Any, use: Any, message: str) -> Case:
    """A variable that is assigned anew."""
    held: Any = value

    def change() -> None:
        nonlocal held
        held = other

    return lambda m, x, y: plain(m, x, y) * use(held, m(x), y), change, message


def text() -> Case:
    """A method of a text."""
    return swapped("train", "eval", lambda v, o, y: 2.0 if v.startswith("t") else 1.0, "'eval'")


def enumerated() -> Case:
    """The value of an enum."""
    kinds = enum.Enum("kinds", {"ONE": 1.0, "TWO": 2.0})
    return swapped(kinds.ONE, kinds.TWO, lambda v, o, y: v.value, "kinds.TWO")  # type: ignore[attr-defined]


def field() -> Case:
    """A field of a named tuple, of which another one may change."""
    holder = SimpleNamespace(options=Record())

    def change() -> None:
        holder.options = holder.options._replace(beta=2.0)

    return (
        lambda m, x, y: plain(m, x, y) * holder.options.beta,
        change,
        "'holder.options.beta' is 2",
    )


def method_of_a_tensor() -> Case:
    """A tensor of which a method makes the constant."""
    return swapped(torch.ones(3), torch.zeros(3), lambda v, o, y: v.mean(), "'held' is another one")


def method_of_an_array() -> Case:
    """An array of which a number is taken."""
    return swapped(np.ones(3), np.zeros(3), lambda v, o, y: v.mean(), "'held' is array")


def method_of_a_dict() -> Case:
    """An item by a key that is no constant, with a default."""
    weights, key = {"kl": 1.0}, "kl"
    return (
        lambda m, x, y: plain(m, x, y) * weights.get(key, 5.0),
        lambda: weights.update(kl=2.0),
        "\"weights['kl']\" is 2.0",
    )


def partial() -> Case:
    """A partial function with another argument."""
    one, other = (functools.partial(torch.mul, each) for each in (1.0, 2.0))
    return swapped(one, other, lambda v, o, y: v(o.mean()), "'held' is another one")


def called_object() -> Case:
    """An object that is called, made anew with another number."""
    return swapped(Margin(1.0), Margin(2.0), lambda v, o, y: v(o, y), "'held' is another one")


def chosen_class() -> Case:
    """A class that is made an object of."""
    return swapped(nn.L1Loss, nn.MSELoss, lambda v, o, y: v()(o, o + 2), "'held' is another one")


def weight_of_a_criterion() -> Case:
    """A buffer of a loss module, replaced."""
    criterion = nn.CrossEntropyLoss(weight=torch.ones(3))
    return (
        lambda m, x, y: criterion(m(x), y),
        lambda: setattr(criterion, "weight", torch.tensor([1.0, 5.0, 1.0])),
        "'criterion.weight' is another one",
    )


CASES = (long_list, variable_key, queue, array, terms, tensors, by_name, unpacked, as_dict)
CASES += (as_number, multiplied, text, enumerated, field, method_of_a_tensor, method_of_an_array)
CASES += (method_of_a_dict, partial, called_object, chosen_class, weight_of_a_criterion)


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_a_part_that_changes_is_named(make: Callable[[], Case]) -> None:
    """Whatever it is a part of; eager mode would compute something else."""
    loss, change, message = make()
    step = made(loss)
    step(*batch())
    change()
    with pytest.raises(PlanMismatchError, match="fixed at capture") as caught:
        step(*batch())
    assert message in str(caught.value)
    assert len(str(caught.value)) < 900


@pytest.mark.parametrize(
    ("value", "other", "use"),
    [
        (Margin(1.0), Margin(1.0), lambda v, o, y: v(o, y)),
        (
            functools.partial(torch.mul, 1.0),
            functools.partial(torch.mul, 1.0),
            lambda v, o, y: v(o.mean()),
        ),
        (torch.ones(3), torch.ones(3), lambda v, o, y: v.mean()),
    ],
    ids=["object", "partial", "tensor"],
)
def test_what_is_made_anew_alike_is_the_same(value: Any, other: Any, use: Any) -> None:
    """As when a cell of a notebook is run again."""
    loss, change, _ = swapped(value, other, use, "")
    step = made(loss)
    change()
    step(*batch())


def test_a_field_of_a_named_tuple_that_nobody_reads_may_change() -> None:
    """The tuple is another one then."""
    holder = SimpleNamespace(options=Record())
    step = made(lambda m, x, y: plain(m, x, y) * holder.options.beta)
    holder.options = holder.options._replace(epoch=1)
    step(*batch())


@pytest.mark.parametrize("kind", [list, dict, set, collections.deque])
def test_what_is_only_written_may_change(kind: Any) -> None:
    """A list of losses that the loss function appends to is the user's to clear."""
    log = kind()

    def loss(m: Any, x: Any, y: Any) -> Any:
        found = plain(m, x, y)
        if isinstance(log, dict):
            log.update(last=found.detach())
        elif isinstance(log, set):
            log.add("called")
        else:
            log.append(found.detach())
        return found

    step = made(loss)
    assert not log
    step(*batch())
    _ = log.update(mean=1.0) if isinstance(log, dict) else None
    _ = log.append(1.0) if isinstance(log, (list, collections.deque)) else None
    step(*batch())


class Scaled(nn.Module):
    """Multiplies by plain attributes of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.tensor = torch.ones(3)
        self.tensors = [torch.ones(3)]
        self.named = {"a": torch.ones(3), "unused": torch.ones(3)}
        self.pair = (torch.ones(3), "x")
        self.functions = {"act": F.relu}
        self.table = np.ones(3, dtype=np.float32)
        self.config = SimpleNamespace(factor=1.0, epoch=0)
        self.helper = helper

    def forward(self, x: Any) -> Any:
        h = self.layer(x) * self.tensor * self.tensors[0] * self.named["a"] * self.pair[0]
        return self.helper(self, self.functions["act"](h) * torch.from_numpy(self.table))


def helper(module: Any, x: Any) -> Any:
    """Reads an object of the module that it is given."""
    return x * module.config.factor


TWOS = np.full(3, 2.0, dtype=np.float32)
CHANGES = {
    "tensor": lambda m: setattr(m, "tensor", torch.ones(3) * 2),
    "tensors[0]": lambda m: m.tensors.__setitem__(0, torch.ones(3) * 2),
    "named['a']": lambda m: m.named.update(a=torch.ones(3) * 2),
    "pair[0]": lambda m: setattr(m, "pair", (torch.ones(3) * 2, "x")),
    "functions['act']": lambda m: m.functions.update(act=F.gelu),
    "table": lambda m: setattr(m, "table", TWOS),
    "factor": lambda m: setattr(m.config, "factor", 2.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_module_holds_in_plain_attributes_must_stay(name: str) -> None:
    """Tensors and functions in lists, dicts and tuples, and what a helper reads of a module."""
    model = Scaled()
    step = made(plain, model)
    model.config.epoch = 1
    model.named["unused"] = torch.zeros(3)
    model.named["new"] = torch.zeros(3)
    step(*batch())
    CHANGES[name](model)
    with pytest.raises(PlanMismatchError, match="fixed at capture") as caught:
        step(*batch())
    assert name in str(caught.value)


@pytest.mark.parametrize("made_of", [iter, lambda items: (each for each in items), enumerate])
def test_iterators_are_refused(made_of: Any) -> None:
    """Their next item would be taken at capture, and never again."""
    items = made_of([1.0, 2.0])
    with pytest.raises(CaptureError, match="must not draw from an iterator: 'items' is a"):
        made(lambda m, x, y: plain(m, x, y) * len(str(next(items))))
    assert next(items) in (1.0, (0, 1.0))
