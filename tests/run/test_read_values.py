"""A step sees another value wherever its functions read one, and leaves what they do not read."""

from __future__ import annotations

import dataclasses
import enum
import functools
import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from devplace.errors import PlanMismatchError
from tests.run.reading import batch, made, plain


class Kind(enum.Enum):
    """Which loss."""

    PLAIN = 1
    DOUBLE = 2


@dataclasses.dataclass(slots=True)
class Slotted:
    """Options without a dict."""

    beta: float = 1.0
    epoch: int = 0


class Attributed(dict[str, Any]):
    """A dict whose items are attributes."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Proxy:
    """Options behind a rule of their own, and behind a property."""

    def __init__(self, **options: Any) -> None:
        self._options = options

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._options[name]

    @property
    def doubled(self) -> float:
        """Twice an option."""
        return float(2 * self._options["beta"])


Case = tuple[Any, Callable[[], Any], Callable[[], Any], str]


def slotted() -> Case:
    """A dataclass with slots."""
    options = Slotted()
    return (
        lambda m, x, y: plain(m, x, y) * options.beta,
        lambda: setattr(options, "epoch", 1),
        lambda: setattr(options, "beta", 2.0),
        "options.beta",
    )


def attributed() -> Case:
    """A dict that has attributes."""
    options = Attributed(beta=1.0, epoch=0)
    return (
        lambda m, x, y: plain(m, x, y) * options.beta,
        lambda: options.update(epoch=1),
        lambda: options.update(beta=2.0),
        "options.beta",
    )


def proxied() -> Case:
    """Attributes by rule."""
    options = Proxy(beta=1.0, epoch=0)
    return (
        lambda m, x, y: plain(m, x, y) * options.beta,
        lambda: options._options.update(epoch=1),
        lambda: options._options.update(beta=2.0),
        "options.beta",
    )


class Renamed(Proxy):
    """Options that have other names, too."""

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, {"gain": "_options"}.get(name, name))


def renamed() -> Case:
    """An attribute under another name."""
    options = Renamed(beta=1.0, epoch=0)
    return (
        lambda m, x, y: plain(m, x, y) * options.gain["beta"],
        lambda: options._options.update(epoch=1),
        lambda: options._options.update(beta=2.0),
        "options.gain['beta']",
    )


def behind_a_property() -> Case:
    """What a property reads."""
    options = Proxy(beta=1.0)
    return (
        lambda m, x, y: plain(m, x, y) * options.doubled,
        lambda: setattr(options, "comment", "other"),
        lambda: options._options.update(beta=2.0),
        "_options",
    )


def item() -> Case:
    """One item of a dict with tensors, by index and by `get`."""
    options = {"loss": {"beta": 1.0}, "weight": torch.ones(3), "epoch": 0}
    return (
        lambda m, x, y: plain(m, x, y) * options["loss"]["beta"] * options.get("gamma", 1.0),  # type: ignore[index]
        lambda: options.update(epoch=1),
        lambda: options.update(gamma=2.0),
        "gamma",
    )


def enumerated() -> Case:
    """An enum."""
    options = SimpleNamespace(kind=Kind.PLAIN, epoch=0)
    return (
        lambda m, x, y: plain(m, x, y) * (2 if options.kind is Kind.DOUBLE else 1),
        lambda: setattr(options, "epoch", 1),
        lambda: setattr(options, "kind", Kind.DOUBLE),
        "options.kind",
    )


def of_a_class() -> Case:
    """Attributes of a class used as options."""

    class Options:
        beta = 1.0
        epoch = 0

    return (
        lambda m, x, y: plain(m, x, y) * Options.beta,
        lambda: setattr(Options, "epoch", 1),
        lambda: setattr(Options, "beta", 2.0),
        "Options.beta",
    )


def replaced() -> Case:
    """Options that are frozen are replaced as a whole."""
    holder = SimpleNamespace(options=Slotted())

    def put(**values: Any) -> None:
        holder.options = dataclasses.replace(holder.options, **values)

    return (
        lambda m, x, y: plain(m, x, y) * holder.options.beta,
        lambda: put(epoch=1),
        lambda: put(beta=2.0),
        "holder.options.beta",
    )


def passed_on() -> Case:
    """Options under another name, and given to another function."""
    options = SimpleNamespace(beta=1.0, gamma=1.0, epoch=0)

    def weighted(loss: Any, given: Any) -> Any:
        return loss * given.beta

    def loss(m: Any, x: Any, y: Any) -> Any:
        short = options
        return weighted(plain(m, x, y), options) * short.gamma

    return (
        loss,
        lambda: setattr(options, "epoch", 1),
        lambda: setattr(options, "beta", 2.0),
        "options.beta",
    )


def bound() -> Case:
    """An argument of a partial function."""
    options = SimpleNamespace(beta=1.0, epoch=0)

    def loss(m: Any, x: Any, y: Any, given: Any) -> Any:
        return plain(m, x, y) * given.beta

    return (
        functools.partial(loss, given=options),
        lambda: setattr(options, "epoch", 1),
        lambda: setattr(options, "beta", 2.0),
        "given.beta",
    )


def without_a_file() -> Case:
    """Code from `exec`, stdin or a notebook; the same function defined again is the same."""
    text = "def half(loss): return loss * beta\n"
    names: dict[str, Any] = {"plain": plain, "beta": 0.5, "epoch": 0}
    exec(text + "def loss(m, x, y): return half(plain(m, x, y))", names)
    return (
        names["loss"],
        lambda: exec("epoch = 1\n" + text, names),
        lambda: names.update(beta=2.0),
        "beta",
    )


def imported() -> Case:
    """A module imported in the function."""
    module: Any = ModuleType("own_options")
    module.__file__, module.beta, module.epoch = "/own_options.py", 1.0, 0
    sys.modules["own_options"] = module

    def loss(m: Any, x: Any, y: Any) -> Any:
        import own_options  # type: ignore[import-not-found]

        return plain(m, x, y) * own_options.beta

    return (
        loss,
        lambda: setattr(module, "epoch", 1),
        lambda: setattr(module, "beta", 2.0),
        "own_options.beta",
    )


def missing() -> Case:
    """An attribute that is not there yet."""
    options = SimpleNamespace(epoch=0)
    return (
        lambda m, x, y: plain(m, x, y) * getattr(options, "beta", 1.0),
        lambda: setattr(options, "epoch", 1),
        lambda: setattr(options, "beta", 2.0),
        "options.beta",
    )


def tensor() -> Case:
    """Another tensor in place of one that is a constant of the step, unless it is equal."""
    holder = SimpleNamespace(weight=torch.ones(3), last=torch.zeros(()))

    def loss(m: Any, x: Any, y: Any) -> Any:
        return F.cross_entropy(m(x), y, weight=holder.weight)

    def harmless() -> None:
        holder.weight, holder.last = torch.ones(3), torch.ones(())

    return loss, harmless, lambda: setattr(holder, "weight", torch.rand(3)), "holder.weight"


def module() -> Case:
    """Another criterion."""
    trainer = SimpleNamespace(criterion=nn.CrossEntropyLoss(), epoch=0)
    return (
        lambda m, x, y: trainer.criterion(m(x), y),
        lambda: setattr(trainer, "epoch", 1),
        lambda: setattr(trainer, "criterion", nn.CrossEntropyLoss(label_smoothing=0.1)),
        "trainer.criterion",
    )


def function() -> Case:
    """Another function."""
    trainer = SimpleNamespace(activation=F.relu, epoch=0)
    return (
        lambda m, x, y: F.cross_entropy(trainer.activation(m(x)), y),
        lambda: setattr(trainer, "epoch", 1),
        lambda: setattr(trainer, "activation", F.gelu),
        "trainer.activation",
    )


def in_an_inner_function() -> Case:
    """A variable that only a generator expression and a function inside name."""
    options, beta = SimpleNamespace(gamma=1.0, epoch=0), 1.0

    def loss(m: Any, x: Any, y: Any) -> Any:
        def scaled(value: Any) -> Any:
            return value * options.gamma

        return scaled(plain(m, x, y)) * sum(beta * k for k in range(3))

    def change() -> None:
        nonlocal beta
        beta = 2.0

    return loss, lambda: setattr(options, "epoch", 1), change, "beta"


class Term:
    """One of several terms of a loss."""

    def __init__(self, weight: float) -> None:
        self.weight, self.epoch = weight, 0


def in_a_list() -> Case:
    """An attribute of objects in a list."""
    terms = [Term(1.0), Term(2.0)]

    def loss(m: Any, x: Any, y: Any) -> Any:
        total = plain(m, x, y)
        for term in terms:
            total = total * term.weight
        return total

    return (
        loss,
        lambda: setattr(terms[1], "epoch", 1),
        lambda: setattr(terms[1], "weight", 3.0),
        "terms",
    )


def by_index() -> Case:
    """An item of a dict in a list, as the rate of an optimizer is."""
    holder = [SimpleNamespace(groups=[{"rate": 1.0}], epoch=0)]
    return (
        lambda m, x, y: plain(m, x, y) * holder[0].groups[0]["rate"],  # type: ignore[operator]
        lambda: setattr(holder[0], "epoch", 1),
        lambda: holder[0].groups[0].update(rate=2.0),
        "rate",
    )


def decorated() -> Case:
    """A free variable of a function behind a decorator."""
    options = SimpleNamespace(beta=1.0, epoch=0)

    def doubled(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any) -> Any:
            return 2 * function(*args)

        return call

    @doubled
    def loss(m: Any, x: Any, y: Any) -> Any:
        return plain(m, x, y) * options.beta

    return (
        loss,
        lambda: setattr(options, "epoch", 1),
        lambda: setattr(options, "beta", 2.0),
        "options.beta",
    )


def returned() -> Case:
    """An object that a function gives back."""
    options = SimpleNamespace(beta=1.0, epoch=0)

    def given() -> Any:
        return options

    return (
        lambda m, x, y: plain(m, x, y) * given().beta,
        lambda: setattr(options, "epoch", 1),
        lambda: setattr(options, "beta", 2.0),
        "options.beta",
    )


def transformed() -> Case:
    """A function under a transform of torch's."""
    options = SimpleNamespace(beta=1.0, epoch=0)
    scaled = torch.vmap(lambda row: row * options.beta)
    return (
        lambda m, x, y: scaled(m(x)).square().mean(),
        lambda: setattr(options, "epoch", 1),
        lambda: setattr(options, "beta", 2.0),
        "options.beta",
    )


CASES = (
    returned,
    transformed,
    in_an_inner_function,
    in_a_list,
    by_index,
    decorated,
    slotted,
    attributed,
    proxied,
    behind_a_property,
    item,
    enumerated,
    of_a_class,
    replaced,
)
CASES += (renamed, passed_on, bound, without_a_file, imported, missing, tensor, module, function)


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    sys.modules.pop("own_options", None)


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_what_is_read_must_stay_and_what_is_beside_it_may_change(make: Callable[[], Case]) -> None:
    """However the value is reached, and whatever else its holder has."""
    loss, harmless, harmful, name = make()
    step = made(loss)
    step(*batch())
    harmless()
    step(*batch())
    harmful()
    with pytest.raises(PlanMismatchError, match="fixed at capture") as caught:
        step(*batch())
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


class Scaled(torch.autograd.Function):
    """Multiplies by a global."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        """Scaled."""
        return x * FACTOR

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Scaled too."""
        return grad * FACTOR


FACTOR = 1.0


@functools.cache
def cached(power: int) -> float:
    """A power of a global."""
    return FACTOR**power


@pytest.mark.parametrize(
    "loss",
    [
        lambda m, x, y: F.cross_entropy(Scaled.apply(m(x)), y),
        lambda m, x, y: plain(m, x, y) * cached(2),
    ],
)
def test_functions_with_gradients_and_caches_are_followed(
    loss: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they read counts as if the loss function did."""
    step = made(loss)
    step(*batch())
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    with pytest.raises(PlanMismatchError, match=r"'FACTOR' is 2\.0"):
        step(*batch())


@pytest.mark.parametrize(
    "read",
    [
        lambda: os.environ["DEVPLACE_BETA"],
        lambda: os.environ.get("DEVPLACE_BETA", "1.0"),
        lambda: os.getenv("DEVPLACE_BETA"),
    ],
)
def test_variables_of_the_process_count(read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the step asks for; others may change."""
    monkeypatch.setenv("DEVPLACE_BETA", "1.0")
    step = made(lambda m, x, y: plain(m, x, y) * float(read()))
    monkeypatch.setenv("DEVPLACE_OTHER", "1.0")
    step(*batch())
    monkeypatch.setenv("DEVPLACE_BETA", "2.0")
    with pytest.raises(PlanMismatchError, match=r"os\.environ\['DEVPLACE_BETA'\].* is '2\.0'"):
        step(*batch())


class Trained(nn.Module):
    """A module around the model, whose method is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 3)
        self.alpha, self.epoch = 1.0, 0

    def training_step(self, model: Any, x: Any, y: Any) -> Any:
        """Weighted."""
        return plain(model, x, y) * self.alpha


def test_what_hooks_read_must_stay() -> None:
    """They are functions of the step like others."""
    options, model = SimpleNamespace(beta=1.0, epoch=0), nn.Linear(4, 3)
    model.register_forward_hook(lambda module, args, output: output * options.beta)
    step = made(plain, model)
    options.epoch = 1
    step(*batch())
    options.beta = 2.0
    with pytest.raises(PlanMismatchError, match=r"options\.beta"):
        step(*batch())


class Sized(nn.Module):
    """Notes the size of its batch before it reads it, in training."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rows, self.calls = nn.Linear(4, 3), 1, 0

    def forward(self, x: Any) -> Any:
        """Scaled by the size."""
        if self.training:
            self.rows = len(x)
        self.calls = self.calls + 1
        return self.layer(x) / self.rows


def test_what_a_step_sets_before_it_reads_it_may_change() -> None:
    """Also if it had that value at capture; a step that only reads it sees the change."""
    model = Sized()
    model(batch()[0])
    step = made(plain, model)
    model.rows = 2
    step(*batch())
    model.rows = len(batch()[0])
    step = made(plain, model.eval())
    step(*batch())
    model.rows = 2
    with pytest.raises(PlanMismatchError, match="'rows' of the model is 2"):
        step(*batch())


def test_what_a_filled_cache_was_made_of_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its function is not called while the step is captured."""
    cached(3)
    step = made(lambda m, x, y: plain(m, x, y) * cached(3))
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    with pytest.raises(PlanMismatchError, match=r"'FACTOR' is 2\.0"):
        step(*batch())


def test_plain_attributes_of_a_module_around_the_model_must_stay() -> None:
    """As of a Lightning module; those that its method does not read may change."""
    around = Trained()
    step = made(around.training_step, around.net)
    around.epoch = 1
    step(*batch())
    around.alpha = 2.0
    with pytest.raises(PlanMismatchError, match=r"self\.alpha"):
        step(*batch())


def test_a_refused_number_says_where_logging_goes() -> None:
    """A counter that only a message shows is no fault of the loss: its message would never come."""
    trainer = SimpleNamespace(step=0)

    def loss(m: Any, x: Any, y: Any) -> Any:
        str(f"step {trainer.step}")
        return plain(m, x, y)

    step = made(loss)
    trainer.step = 1
    with pytest.raises(PlanMismatchError, match="is logged outside: a step does not call loss_fn"):
        step(*batch())


def test_the_default_dtype_must_stay() -> None:
    """What a step makes without a dtype has that of its capture."""
    step = made(lambda m, x, y: plain(m, x, y) * torch.ones(()))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if before is torch.float32 else torch.float32)
    try:
        with pytest.raises(PlanMismatchError, match=r"get_default_dtype\(\)' is torch\.float"):
            step(*batch())
    finally:
        torch.set_default_dtype(before)
    step(*batch())
