"""Several shapes of batches in one step, over one set of weights and optimizer state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from devplace.errors import ExecutionError, InputError, PlanMismatchError, ShapeError
from devplace.graph import Captured
from devplace.run.compile import Step, compile_step
from devplace.run.executors import make_executor
from devplace.run.state import STORED_KINDS, ModelState
from devplace.run.unplaced import run_unplaced
from devplace.schedule import make_schedule
from devplace.step_capture import capture
from tests.run.models import Clipped, mean_square
from tests.run.placed import NAMES, adam, all_on, at_random, largest_difference, sgd, train_eager

SIZES = ((6, 5), (6, 3), (2, 5))


class Sentence(nn.Module):
    """Embedding, recurrence over whatever length, batch norm, dropout, head; a frozen layer."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(9, 4), nn.Linear(4, 4)
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(dropout)
        self.frozen, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.frozen.requires_grad_(False)

    def forward(self, words: Any) -> Any:
        hidden = self.frozen(self.mix(self.embed(words)).tanh().mean(1))
        return self.head(self.drop(self.norm(hidden)))


def loss(model: Any, words: Any, kinds: Any) -> Any:
    return F.cross_entropy(model(words), kinds)


def batch(size: tuple[int, int], seed: int = 0) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(9, size, generator=generator)
    return words, torch.randint(3, size[:1], generator=generator)


def adamw(parameters: Sequence[Any]) -> Any:
    return torch.optim.AdamW(parameters, lr=0.01)


def executor_of(graph: Captured, seed: int) -> Callable[[], Any]:
    """A random placement."""
    return lambda: make_executor(make_schedule(graph, *at_random(seed)(graph), NAMES), 5)


def model_of(make_optimizer: Any, dropout: float) -> tuple[Any, Any]:
    torch.manual_seed(1)
    model = Sentence(dropout).double()
    return model, make_optimizer([p for p in model.parameters() if p.requires_grad])


@cache
def graphs_of(make_optimizer: Any, dropout: float) -> list[Captured]:
    """The three shapes, captured from a model of its own."""
    model, optimizer = model_of(make_optimizer, dropout)
    return [capture(model, batch(size), loss, optimizer) for size in SIZES]


def made(make_optimizer: Any, dropout: float = 0.0, seed: int = 0) -> tuple[Step, Any, Any]:
    """A step of three shapes, each placed at random on its own; model and optimizer."""
    graphs = graphs_of(make_optimizer, dropout)
    model, optimizer = model_of(make_optimizer, dropout)
    step = compile_step(model, optimizer, graphs[0], *at_random(seed)(graphs[0]), NAMES, 5)
    for number, graph in enumerate(graphs[1:], start=1):
        step.add(graph, executor_of(graph, seed + number))
    return step, model, optimizer


class Unplaced:
    """The same steps one op after the other: a dict of values, and the graph of each shape."""

    def __init__(self, step: Step, model: Any, optimizer: Any) -> None:
        self.graphs = {size: step._shapes[k].graph for k, size in enumerate(SIZES)}
        state = ModelState(step.first.graph, model, optimizer)
        read = state.read()
        self.values = {self.key(b): read[b.op].clone() for b in self.stored(step.first.graph)}
        self.optimizer, self.steps = optimizer, 0

    def stored(self, graph: Captured) -> list[Any]:
        return [b for b in graph.program.bindings if b.kind in STORED_KINDS]

    def key(self, binding: Any) -> Any:
        return binding.kind, binding.key, binding.slot

    def step(self, size: tuple[int, int], given: tuple[Any, Any]) -> Any:
        graph = self.graphs[size]
        self.steps += 1
        groups = self.optimizer.param_groups
        sources = {b.op: self.values[self.key(b)] for b in self.stored(graph)}
        numbers = graph.program.scalars(self.steps, groups)
        for b in graph.program.bindings:
            if b.kind == "input":
                sources[b.op] = given[int(b.slot)]
            elif b.kind == "scalar" and b.key in numbers:
                sources[b.op] = torch.tensor(numbers[b.key], dtype=torch.float64)
        results = run_unplaced(graph, sources, 5, self.steps)
        of_op = {b.op: self.key(b) for b in self.stored(graph)}
        found = None
        for result, value in zip(graph.results, results, strict=True):
            if result.replaces >= 0:
                self.values[of_op[result.replaces]] = value
            elif result.role == "loss":
                found = value
        return found


@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
@pytest.mark.parametrize("seed", range(2))
def test_mixed_shapes_equal_the_unplaced_steps_bit_for_bit(make_optimizer: Any, seed: int) -> None:
    """Losses, weights, statistics and optimizer state, with dropout, momentum and AdamW."""
    step, model, optimizer = made(make_optimizer, dropout=0.3, seed=seed)
    reference = Unplaced(step, model, optimizer)
    for number, k in enumerate([0, 1, 1, 2, 0, 2, 1, 0]):
        given = batch(SIZES[k], number)
        assert torch.equal(step(*given), reference.step(SIZES[k], given))
    step.sync()
    read = ModelState(step.first.graph, model, optimizer).read()
    for binding in reference.stored(step.first.graph):
        assert torch.equal(read[binding.op], reference.values[reference.key(binding)]), binding.key
    assert step.steps_done == 8


@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
def test_mixed_shapes_equal_eager(make_optimizer: Any) -> None:
    """The ordinary loop over the same batches, to 1e-9; so do the counters of steps."""
    step, model, optimizer = made(make_optimizer)
    twin = copy.deepcopy(model)
    other = make_optimizer([p for p in twin.parameters() if p.requires_grad])
    batches = [batch(SIZES[k], number) for number, k in enumerate([2, 0, 1, 0, 2])]
    losses = [float(step(*each)) for each in batches]
    step.sync()
    assert losses == pytest.approx(train_eager(twin, other, batches, loss), abs=1e-9)
    assert largest_difference(model, twin) < 1e-9
    for mine, theirs in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.allclose(mine[key], theirs[key]) for key in mine)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from([0, 1, 2, "sync", "load", "save"]), max_size=8))
def test_syncing_and_loading_between_shapes_changes_nothing(story: list[Any]) -> None:
    """Whatever happens between: sync and load, or a state dict that is loaded again."""
    step, model, optimizer = made(adamw, dropout=0.3)
    reference = Unplaced(step, model, optimizer)
    for number, act in enumerate(story):
        if act == "sync":
            step.sync()
        elif act == "load":
            step.sync()
            step.load()
        elif act == "save":
            step.load_state_dict(copy.deepcopy(step.state_dict()))
        else:
            given = batch(SIZES[act], number)
            assert torch.equal(step(*given), reference.step(SIZES[act], given))
    step.close()


def test_nothing_is_copied_where_devices_agree() -> None:
    """All on one device: the tensors themselves go from shape to shape, frozen ones once."""
    model = Clipped()
    model.one.weight.requires_grad_(False)
    optimizer = sgd([p for p in model.parameters() if p.requires_grad])
    graphs = [capture(model, (torch.randn(n, 4),), mean_square, optimizer) for n in (4, 2)]
    step = compile_step(model, optimizer, graphs[0], *all_on(0)(graphs[0]), NAMES)
    step.add(
        graphs[1], lambda: make_executor(make_schedule(graphs[1], *all_on(0)(graphs[1]), NAMES))
    )
    held: list[dict[str, int]] = []
    for rows in (4, 2, 4):
        step(torch.randn(rows, 4))
        saved = step.state_dict()["model"]
        held.append({name: value.data_ptr() for name, value in saved.items()})
        shape = step._at
        read = [b for key, b in shape.bindings.items() if b.op not in shape.graph.replaced]
        assert [b.key for b in read] == ["one.weight"]
    assert held[0]["one.weight"] == held[1]["one.weight"] == held[2]["one.weight"]
    before = step.executor.get(step._at.bindings["parameter", "two.weight", ""].op)
    step._shapes[1].take(step._at)
    after = step._shapes[1].executor
    assert after.get(step._shapes[1].bindings["parameter", "two.weight", ""].op) is before
    assert step._at.executor.has_lost_state  # the other has them now


def test_an_unknown_shape_is_told_with_those_that_are_known() -> None:
    """The input, its shape, what is known, and the ways out."""
    step, *_ = made(sgd)
    words = r"'0' has shape \[4, 5\], the step knows 0 \[6, 5\], 1 \[6\]; 0 \[6, 3\], 1 \[6\]; 0 \["
    with pytest.raises(ShapeError, match=words):
        step(*batch((4, 5)))
    with pytest.raises(ShapeError, match=r"drop_last=True.*shapes=\[batch\]"):
        step(*batch((4, 5)))
    with pytest.raises(InputError, match="dtype") as other:
        step(batch(SIZES[0])[0].float(), batch(SIZES[0])[1])
    assert not isinstance(other.value, ShapeError)


def test_what_was_written_to_is_refused_in_every_shape() -> None:
    """A write to a weight is seen by whichever shape comes next; loading it mends that."""
    step, model, _ = made(adamw)
    step(*batch(SIZES[0]))
    with torch.no_grad():
        model.head.weight.zero_()
    for size in (SIZES[1], SIZES[0], SIZES[2]):
        with pytest.raises(PlanMismatchError, match=r"'head\.weight'.*written"):
            step(*batch(size))
    step.load()
    for size in SIZES:
        step(*batch(size))
    step.sync()


def test_a_mode_that_changed_is_refused_in_every_shape() -> None:
    """Evaluation mode is not the captured one."""
    step, model, _ = made(sgd)
    model.eval()
    for size in SIZES:
        with pytest.raises(PlanMismatchError, match="eval mode"):
            step(*batch(size))


def test_another_step_over_the_model_still_takes_turns() -> None:
    """Shapes of one step do not, another step does."""
    step, model, optimizer = made(sgd)
    graph = capture(model, batch((3, 3)), loss, optimizer)
    other = compile_step(model, optimizer, graph, *at_random(7)(graph), NAMES)
    step(*batch(SIZES[1]))
    with pytest.raises(PlanMismatchError, match="take turns"):
        other(*batch((3, 3)))
    step.sync()
    other.load()
    other(*batch((3, 3)))
    with pytest.raises(PlanMismatchError, match="take turns"):
        step(*batch(SIZES[2]))


def test_a_failed_step_leaves_the_state_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it was the first one of its shape: the next step of another goes on."""
    step, model, optimizer = made(adamw)
    reference = Unplaced(step, model, optimizer)
    given = batch(SIZES[0], 1)
    assert torch.equal(step(*given), reference.step(SIZES[0], given))
    broken = batch(SIZES[1], 2)[0].clone().fill_(99), batch(SIZES[1], 2)[1]  # no such word
    with pytest.raises(ExecutionError):
        step(*broken)
    for size in (SIZES[2], SIZES[1]):
        given = batch(size, 3)
        assert torch.equal(step(*given), reference.step(size, given))


def test_shapes_that_train_other_weights_are_refused() -> None:
    """A layer that only long batches use cannot be shared with short ones."""

    class Sometimes(Clipped):
        def forward(self, x: Any) -> Any:
            return super().forward(x) if len(x) > 2 else self.two(torch.cat([x, x], 1))

    model = Sometimes()
    optimizer = sgd(list(model.parameters()))
    graphs = [capture(model, (torch.randn(n, 4),), mean_square, optimizer) for n in (4, 2)]
    for one, two in (graphs, reversed(graphs)):
        step = compile_step(model, optimizer, one, *all_on(0)(one), NAMES)
        with pytest.raises(
            PlanMismatchError, match=r"trains parameter 'one\.weight' with 0 \[4, 4\]"
        ):
            step.add(two, executor_of(two, 0))


def test_inference_of_several_shapes_gives_the_models_output() -> None:
    """Without state nothing has to move."""
    torch.manual_seed(0)
    model = Sentence(0.5).eval()
    graphs = [capture(model, batch(size)[:1]) for size in SIZES]
    step = compile_step(model, None, graphs[0], *at_random(0)(graphs[0]), NAMES)
    for graph in graphs[1:]:
        step.add(graph, executor_of(graph, 3))
    for size in (*SIZES, *SIZES):
        words = batch(size, 4)[0]
        torch.testing.assert_close(step(words), model(words))


def test_an_executor_is_made_when_its_shape_is_met() -> None:
    """And not before, nor twice."""
    model, made_for = Clipped(), []
    optimizer = adam(list(model.parameters()))
    graphs = [capture(model, (torch.randn(n, 4),), mean_square, optimizer) for n in (4, 2)]

    def make() -> Any:
        made_for.append(2)
        return executor_of(graphs[1], 0)()

    step = compile_step(model, optimizer, graphs[0], *all_on(0)(graphs[0]), NAMES)
    step.add(graphs[1], make)
    step(torch.randn(4, 4))
    assert made_for == []
    for rows in (2, 4, 2):
        step(torch.randn(rows, 4))
    assert made_for == [2]
    step.close()
