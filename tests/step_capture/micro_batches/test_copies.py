"""Micro-batches that are copied are the same as if each had been traced."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from tests.step_capture.checks import sgd
from torch import nn
from torch.utils.checkpoint import checkpoint

from devplace.graph.captured import Captured
from devplace.step_capture import capture
from devplace.step_capture.analysis import tensors_in
from devplace.step_capture.micro_batches.copies import Copies
from devplace.step_capture.sources import memory
from devplace.step_capture.step import TracedStep
from devplace.workloads import build

Module = nn.Module
Tensor = torch.Tensor


class Model(Module):
    """Applies a function to a linear layer's output and itself; 8 numbers in, 4 out."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8).double(), nn.Linear(8, 4).double()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(self.function(self, self.first(x)))
        return made


def assigned(model: Any, x: Tensor) -> Tensor:
    """A buffer that is another tensor after each call."""
    model.mean = 0.9 * model.mean + 0.1 * x.detach().mean(0)
    return x - model.mean


def written(model: Any, x: Tensor) -> Tensor:
    """A buffer of which each call writes a part, and a counter."""
    model.mean[1:].mul_(0.9).add_(x.detach().mean(0)[1:])
    model.count += 1
    return x - model.mean / model.count


def cached(model: Any, x: Tensor) -> Tensor:
    """A mask that is made once for each size, and kept."""
    size = (len(x), 8)
    if size not in model.masks:
        model.masks[size] = torch.ones(size, dtype=x.dtype).triu()
    made: Tensor = x * model.masks[size]
    return made


def constants(model: Any, x: Tensor) -> Tensor:
    """One constant from outside of the step, one that every call makes."""
    return x * model.outside[0] + torch.tensor([1.0, 2.0] * 4, dtype=x.dtype)


def both_drop(model: Any, x: Tensor) -> Tensor:
    """Dropout whose mask the backward pass draws again, and one after it."""
    drop = nn.functional.dropout
    made = checkpoint(lambda y: drop(y.sin(), 0.5).exp(), x, use_reentrant=False)
    return drop(made, 0.25)


def added_weights(model: Any, x: Tensor) -> Tensor:
    """Two parameters that have one gradient tensor."""
    return x * (model.one + model.other)


def in_place(model: Any, x: Tensor) -> Tensor:
    """Writes of what the call made, through views as well."""
    y = x * 2
    y[:, :2] += 1
    y[:, 3].mul_(2)
    return y.mul_(2).relu_()


def spectrum(model: Any, x: Tensor) -> Tensor:
    """Complex numbers, conjugated by view."""
    made = torch.fft.fft(x).conj()
    return made.real * made.imag


class Strided(Model):
    """Reads the batch by places in its memory."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.as_strided(x.shape, x.stride(), x.storage_offset()))


def vector(size: int = 8) -> nn.Parameter:
    return nn.Parameter(torch.linspace(0.5, 1.5, size, dtype=torch.float64))


MODELS: dict[str, Callable[[], Module]] = {
    "plain": lambda: Model(lambda m, x: x.tanh()),
    "batch norm": lambda: Model(lambda m, x: m.norm(x), norm=nn.BatchNorm1d(8).double()),
    "norm used twice": lambda: Model(
        lambda m, x: m.norm(m.norm(x)), norm=nn.BatchNorm1d(8).double()
    ),
    "assigned buffer": lambda: Model(assigned, mean=torch.zeros(8).double()),
    "written buffer": lambda: Model(
        written, mean=torch.zeros(8).double(), count=torch.zeros(()).double()
    ),
    "cached mask": lambda: Model(cached, masks={}),
    "constants": lambda: Model(constants, outside=[torch.tensor(3.0).double()]),
    "dropout": lambda: Model(both_drop),
    "one gradient twice": lambda: Model(added_weights, one=vector(), other=vector()),
    "in place": lambda: Model(in_place),
    "complex": lambda: Model(spectrum),
    "strides": lambda: Strided(lambda m, x: x.tanh()),
    "lstm": lambda: Model(lambda m, x: m.cell(x)[0], cell=nn.LSTMCell(8, 8).double()),
}


def mean(m: Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(m(x), y, ignore_index=0)


def pair(m: Module, x: Tensor, y: Tensor) -> Any:
    return F.cross_entropy(m(x), y, reduction="sum", ignore_index=0), (y != 0).sum()


def beside(m: Module, x: Tensor, y: Tensor) -> Any:
    out = m(x)
    return F.cross_entropy(out, y), {
        "rows": out,
        "kind": "test",
        "mean": out.mean(),
        "hits": (out > 0).sum(),
    }


def batch(rows: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(rows, 8).double(), torch.randint(4, (rows,))


def told(graph: Captured) -> list[Any]:
    """All that a captured step says: its ops, and the calls behind them."""
    program = graph.program
    assert program is not None

    def number(each: torch.fx.Node) -> str:
        return each.name

    calls = [
        (n.name, n.op, str(n.target), *torch.fx.node.map_arg((n.args, n.kwargs), number))
        for n in program.module.graph.nodes
        if n.op != "get_attr"
    ]
    bindings = [(b.op, b.kind, b.key, b.slot, b.strides) for b in program.bindings]
    constants = [b.value.tolist() for b in program.bindings if b.kind == "constant"]
    facts = [graph.meta, program.random_ops, program.layouts, program.output_leaves]
    return [graph.ops, graph.tensors, graph.results, calls, bindings, constants, *facts]


def both(
    make: Callable[[], Module], *args: Any, is_copied: bool = True, **options: Any
) -> tuple[Captured, Captured]:
    """The step with copies, if there are to be some, and with every micro-batch traced."""

    def made() -> Captured:
        model = make()
        return capture(model, args[0], args[1], sgd(model), *args[2:], **options)

    with mock.patch("devplace.step_capture.step.Copies", without):
        slow = made()
    with mock.patch.object(Copies, "_copy", autospec=True, side_effect=Copies._copy) as copies:
        copied = made()
    assert copies.called == is_copied
    return copied, slow


def without(tagger: Any, slots: Any, is_on: bool) -> Copies:
    """Traces every micro-batch."""
    return Copies(tagger, slots, False)


def traced(call: Callable[[], Any]) -> list[int]:
    """Micro-batches whose forward pass is traced in a capture."""
    forward = mock.Mock(side_effect=TracedStep._forward)
    with mock.patch.object(TracedStep, "_forward", lambda *a, **kw: forward(*a, **kw)):
        call()
    return [call.args[1] for call in forward.mock_calls]


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        *((name, mean) for name in MODELS),
        *((name, pair) for name in ("written buffer", "dropout", "one gradient twice")),
        *((name, beside) for name in ("batch norm", "constants")),
    ],
)
def test_copies_are_what_would_be_traced(name: str, loss: Any) -> None:
    """Ops, names, order, draws, constants and results are the same, and all calls of torch."""
    copied, slow = both(MODELS[name], batch(8), loss, 4, compare_batches=False)
    assert told(copied) == told(slow)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "parts"), [(19, 5), (30, 8), (23, 6)])
@pytest.mark.parametrize("name", ["cached mask", "written buffer", "dropout"])
@pytest.mark.parametrize("loss", [mean, pair])
def test_uneven_micro_batches_are_copied_within_their_size(
    name: str, rows: int, parts: int, loss: Any
) -> None:
    """Four rows and three are different steps; a cache is filled by the first of each size."""
    copied, slow = both(MODELS[name], batch(rows), loss, parts, compare_batches=False)
    assert told(copied) == told(slow)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["batch norm", "dropout", "in place", "lstm"])
@pytest.mark.parametrize(
    "options",
    [
        {"fuse": True},
        {"recompute": ["first"]},
        {"recompute": ["first", "last"], "fuse": True},
        {"clip_grad_norm": 1.0},
        {"autocast": torch.bfloat16},
        {"stack_inputs": True, "stack_gradients": True},
    ],
    ids=str,
)
def test_what_is_rewritten_does_not_know_copies(name: str, options: dict[str, Any]) -> None:
    """The same goes for every way to capture."""
    copied, slow = both(MODELS[name], batch(8), mean, 4, compare_batches=False, **options)
    assert told(copied) == told(slow)


@pytest.mark.parametrize(
    "name", ["in place", "written buffer", "assigned buffer", "strides", "complex"]
)
def test_memory_is_shared_as_if_traced(name: str) -> None:
    """What is the same storage in a trace is the same in copies, and begins at the same place."""
    seen: list[list[Any]] = []

    def look(gm: torch.fx.GraphModule, *rest: Any) -> None:
        numbers: dict[int, int] = {}
        seen.append(
            [
                (numbers.setdefault(memory(value), len(numbers)), value.storage_offset())
                for node in gm.graph.nodes
                for value in tensors_in(node.meta.get("val"))
            ]
        )

    with mock.patch("devplace.step_capture.capture.refuse_written", look):
        both(MODELS[name], batch(8), mean, 4, compare_batches=False)
    whole, slow, _, copied = seen
    assert copied == slow != whole


def test_only_the_first_three_of_a_size_are_traced() -> None:
    """Whole batch first: twice to rehearse, once to compare; then 0 to 2 of 8 micro-batches."""
    model, whole = MODELS["plain"](), [0, 0, 0]

    def step(rows: int, parts: int, loss: Any = mean) -> list[int]:
        def call() -> Any:
            return capture(model, batch(rows), loss, sgd(model), parts, compare_batches=False)

        return traced(call)

    assert step(16, 8) == step(16, 8, pair) == [*whole, 0, 1, 2]
    assert step(14, 5) == [*whole, 0, 1, 2, 4]  # 3, 3, 3, 3 and 2 rows
    assert step(13, 5) == [*whole, 0, 1, 2, 3, 4]  # 3, 3, 3, 2 and 2


def carries_gradients(model: Any, x: Tensor) -> Tensor:
    """A buffer through which each backward pass reaches one micro-batch more."""
    made = x + model.sum + model.one
    model.sum = model.sum + model.one
    return made


def keeps_a_view(model: Any, x: Tensor) -> Tensor:
    """A buffer that becomes a part of what the call was given."""
    model.rest = x.detach()[-2:]
    return x


class OfMemory(Model):
    """Reads the batch by places in its memory, by another op than `as_strided`."""

    def forward(self, x: Tensor) -> Tensor:
        place = x.storage_offset() + 1
        return super().forward(
            self.function(torch.as_strided_copy(x, (len(x), 7), (8, 1), place), x)
        )


class Scatters(Model):
    """Writes into the batch by places in its memory."""

    def forward(self, x: Tensor) -> Tensor:
        part = x[:, :7] * 2
        return super().forward(x.as_strided_scatter(part, part.shape, (8, 1), x.storage_offset()))


class Branches(Model):
    """A layer for large micro-batches only."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.extra(x) if len(x) > 2 else x)


UNCOPIED: dict[str, Callable[[], Module]] = {
    "strides": MODELS["strides"],
    "strides of a copy": lambda: OfMemory(lambda m, x: x.tanh()),
    "strides of a scatter": lambda: Scatters(lambda m, x: x.tanh()),
    "carried gradients": lambda: Model(
        carries_gradients, sum=torch.zeros(8).double(), one=vector()
    ),
    "a view is kept": lambda: Model(keeps_a_view, rest=torch.zeros(2, 8).double()),
    "branches": lambda: Branches(lambda m, x: x, extra=nn.Linear(8, 8).double()),
}


@pytest.mark.parametrize("loss", [mean, pair])
@pytest.mark.parametrize("name", UNCOPIED)
def test_what_cannot_be_copied_is_traced(name: str, loss: Any) -> None:
    """Where no micro-batch is what a copy of the one before would be, all are traced."""

    def made(rows: int) -> Captured:
        model = UNCOPIED[name]()
        return capture(model, batch(rows), loss, sgd(model), 6, compare_batches=False)

    for rows in (12, 17):
        step = made(rows)
        with mock.patch("devplace.step_capture.step.Copies", without):
            assert told(step) == told(made(rows))


def test_nodes_are_counted_for_progress_as_if_traced() -> None:
    """Who follows a capture sees the same numbers."""
    seen: list[list[tuple[str, int]]] = [[], []]
    for kind, found in zip((Copies, without), seen, strict=True):
        model = nn.Sequential(*(nn.Tanh() for _ in range(60)), nn.Linear(8, 4)).double()
        tell = functools.partial(lambda found, *each: found.append(each), found)
        with mock.patch("devplace.step_capture.step.Copies", kind):
            capture(model, batch(8), mean, sgd(model), 8, compare_batches=False, progress=tell)
    assert seen[0] == seen[1] != []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert-base", "llama", "nmt-2", "resnet-50", "moe"])
def test_workloads_are_the_same_if_copied(name: str) -> None:
    """Of every kind of net, with and without fusion."""
    work = build(name, size="small", batch=8, device="cpu")
    for fuse in (False, True):
        copied, slow = both(
            lambda: work.model, work.inputs, work.loss_fn, 4, compare_batches=False, fuse=fuse
        )
        assert told(copied) == told(slow)
