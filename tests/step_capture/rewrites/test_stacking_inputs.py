"""Products with the same weight, made one: numbers, how many are left, what never is made one."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.step_capture import checks
from tests.step_capture.checks import assert_same_training, sgd
from torch import nn

from devplace import workloads
from devplace.graph import OpGraph
from devplace.step_capture import capture
from devplace.step_capture.cleanup import clean
from devplace.step_capture.rewrites import stacking_inputs as module
from devplace.step_capture.rewrites.stacking_inputs import stack_inputs

aten = torch.ops.aten
CELLS = {"lstm": nn.LSTMCell, "gru": nn.GRUCell, "rnn": nn.RNNCell}
PRODUCTS = (aten.mm.default, aten.addmm.default)
STEPS = 5


class Unrolled(nn.Module):
    """Recurrent layers over the steps of a sequence, and a head for each step.

    Args:
        kind: A cell, or `mlp`: the same linear layer for each step, with no memory.
        layers: How many, each of `width` units.
        by_step: Whether all layers do a step before the next step.
        dim: Along which the outputs are stacked; -1 if they are added up.
        both_ways: Whether the first layer, done by layers, reads the steps backwards as well.
    """

    def __init__(
        self,
        kind: str = "lstm",
        layers: int = 2,
        width: int = 6,
        by_step: bool = False,
        dim: int = 1,
        both_ways: bool = False,
    ) -> None:
        super().__init__()
        self.kind, self.width, self.by_step, self.dim = kind, width, by_step, dim
        self.cells = nn.ModuleList(self._cell() for _ in range(layers))
        self.back = self._cell() if both_ways and not by_step else None
        self.head = nn.Linear(width, 7)

    def _cell(self) -> nn.Module:
        if self.kind == "mlp":
            return nn.Linear(self.width, self.width)
        return CELLS[self.kind](self.width, self.width)

    def _step(self, cell: nn.Module, x: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        if self.kind == "mlp":
            return torch.tanh(cell(x)), None
        state = cell(x, state)
        return (state[0], state) if self.kind == "lstm" else (state, state)

    def _layer(self, cell: nn.Module, steps: list[torch.Tensor]) -> list[torch.Tensor]:
        state, made = None, []
        for x in steps:
            y, state = self._step(cell, x, state)
            made.append(y)
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = list(x.unbind(1))
        if self.by_step:
            states: list[Any] = [None] * len(self.cells)
            for k, y in enumerate(steps):
                for layer, cell in enumerate(self.cells):
                    y, states[layer] = self._step(cell, y, states[layer])
                steps[k] = y
        else:
            back = self._layer(self.back, steps[::-1])[::-1] if self.back else None
            for layer, cell in enumerate(self.cells):
                steps = self._layer(cell, steps)
                if back and not layer:
                    steps = [a + b for a, b in zip(steps, back, strict=True)]
        outputs = [self.head(y) for y in steps]
        return sum(outputs) if self.dim < 0 else torch.stack(outputs, self.dim)  # type: ignore[return-value]


def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mean over rows of a function that makes all gradients differ."""
    dim = getattr(model, "dim", 1)
    out = model(x) if dim == 1 else model(x).unsqueeze(1) if dim < 0 else model(x).transpose(0, 1)
    return (F.log_softmax(out, -1) * y[:, : out.shape[1]]).square().sum() / len(x)


def batch(rows: int = 4, steps: int = STEPS, width: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(rows, steps, width).double(), torch.randn(rows, steps, 7).double()


def unrolled(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return Unrolled(**options).double()


@contextmanager
def always() -> Iterator[None]:
    """Products are made one whether that pays or not."""
    with mock.patch.object(module, "_pays", return_value=True):
        yield


def joined(*args: Any, **options: Any) -> OpGraph:
    """A captured step with its products made one in the program, whether that pays or not."""
    graph = capture(*args, **options)
    gm = graph.program.module
    with always():
        stack_inputs(gm.graph)
    clean(gm.graph)
    gm.graph.lint()
    gm.recompile()
    return graph


def products(graph: OpGraph) -> Counter[tuple[str, str]]:
    """Products by module and stage, those for gradients of weights apart."""
    found: Counter[tuple[str, str]] = Counter()
    for node in graph.program.module.graph.nodes:
        if node.target in PRODUCTS:
            tag, left = node.meta["tag"], node.args[-2]
            is_gradient = tag.stage == "backward" and left.target is aten.t.default
            found[tag.module, "gradient" if is_gradient else tag.stage] += 1
    return found


def spared(model: nn.Module, given: Any, **options: Any) -> dict[Any, int]:
    """How many products there are fewer, by module and stage."""
    args = model, given, loss, sgd(model)
    before = products(capture(*args, **options))
    return dict(before - products(joined(*args, **options)))


MODELS = st.fixed_dictionaries(
    {
        "kind": st.sampled_from([*CELLS, "mlp"]),
        "layers": st.integers(1, 2),
        "by_step": st.booleans(),
        "dim": st.sampled_from([-1, 0, 1]),
        "both_ways": st.booleans(),
    }
)


@settings(max_examples=12)
@given(MODELS, st.integers(1, 3), st.integers(1, 2), st.booleans())
@pytest.mark.slow
def test_training_is_that_of_eager(
    options: dict[str, Any], steps: int, micro_batches: int, stacked: bool
) -> None:
    """Loss, parameters and state agree with torch.optim over two steps, and the graph is sound."""
    with mock.patch.object(checks, "capture", joined):
        assert_same_training(
            unrolled(**options),
            [batch(2, steps)] * 2,
            loss,
            sgd,
            tolerance=1e-10,
            micro_batches=micro_batches,
            stack_gradients=stacked,
        )


def test_steps_made_fusible_train_as_eager() -> None:
    """Joined before all else that is done for fused ops, as `capture` is to do it. Of 25 products
    of the forward pass, those of two layers and of the head are one each."""
    whole = sys.modules["devplace.step_capture.capture"]
    rest = whole._make_fusible

    def make_fusible(graph: torch.fx.Graph, step: Any) -> None:
        stack_inputs(graph)
        rest(graph, step)

    def plain(*args: Any, **options: Any) -> OpGraph:
        with always(), mock.patch.object(whole, "_make_fusible", make_fusible):
            return capture(*args, fuse=True, **options).plain

    with mock.patch.object(checks, "capture", plain):
        graph = assert_same_training(unrolled(), [batch(2)] * 2, loss, sgd, tolerance=1e-10)
    assert sum(op.target == "aten.addmm.default" for op in graph.ops) == 13


@settings(max_examples=6)
@given(MODELS)
@pytest.mark.slow
def test_new_nodes_say_what_they_are(options: dict[str, Any]) -> None:
    """The fake value of every new node has shape, strides and dtype of the real one."""
    model = unrolled(**options)
    graph = capture(model, batch(2, 3), loss, sgd(model))
    before = set(graph.program.module.graph.nodes)
    with always():
        stack_inputs(graph.program.module.graph)
    graph.program.module.recompile()
    runner = checks.Runner(graph, model)
    interpreter = torch.fx.Interpreter(graph.program.module, garbage_collect_values=False)
    with mock.patch.dict(graph.program.__dict__, module=interpreter.run), torch.no_grad():
        runner.step(1, batch(2, 3))
    for node, value in interpreter.env.items():
        if node not in before:
            fake = node.meta["val"]
            real = (value.shape, value.stride(), value.dtype)
            assert (fake.shape, fake.stride(), fake.dtype) == real
            assert node.meta["tag"].stage in ("forward", "backward", "update")


@pytest.mark.parametrize("by_step", [False, True])
@pytest.mark.slow
def test_layers_may_wait_for_each_other(by_step: bool) -> None:
    """Of two layers and a head of five steps: each has one product, and one for the gradient of its
    input where that is needed. Products of a layer's memory stay."""
    expected = {
        ("cells.0", "forward"): 4,
        ("cells.1", "forward"): 4,
        ("cells.1", "backward"): 4,
        ("head", "forward"): 4,
        ("head", "backward"): 4,
    }
    model = unrolled(by_step=by_step)
    assert spared(model, batch()) == expected
    left = products(joined(model, batch(), loss, sgd(model)))
    assert left["cells.0", "forward"] == left["cells.1", "forward"] == 1 + STEPS


@pytest.mark.parametrize(("name", "count"), [("rnnlm", 20), ("nmt-2", 18), ("gnmt-4", 54)])
@pytest.mark.slow
def test_workloads_have_as_many_fewer(name: str, count: int) -> None:
    """Each set of T products of a workload spares T - 1; T is 6 for rnnlm, else 4.

    rnnlm: inputs of both layers, and their gradients. nmt: the encoder layers and the
    output layer, and their gradients; decoder layers are fed by the step before. gnmt: both
    directions and three more layers of the encoder, all decoder layers but the first, the output
    layer, and the gradients of these.
    """
    built = workloads.build(name, size="small", device="meta")
    args = built.model, built.inputs, built.loss_fn, sgd(built.model)
    assert stack_inputs(capture(*args).program.module.graph) == count


@pytest.mark.slow
def test_micro_batches_are_not_mixed() -> None:
    """Each micro-batch has its own products, so that it can be placed on its own."""
    once = spared(unrolled(), batch())
    twice = spared(unrolled(), batch(), micro_batches=2)
    assert twice == {place: 2 * count for place, count in once.items()}


def targets(graph: OpGraph, stage: str) -> Counter[Any]:
    nodes = graph.program.module.graph.nodes
    return Counter(
        n.target for n in nodes if n.op == "call_function" if n.meta["tag"].stage == stage
    )


def test_parts_of_a_tensor_are_read_without_a_copy() -> None:
    """Steps of the input, and of the gradient of the stacked output; the outputs are stacked by
    the product itself, and only what the head reads is copied."""
    model = unrolled(layers=1, dim=1)
    args = model, batch(), loss, sgd(model)
    plain, made = capture(*args), joined(*args)
    joins = (aten.cat.default, aten.stack.default)
    for stage in ("forward", "backward"):
        before, after = targets(plain, stage), targets(made, stage)
        assert sum(after[t] for t in joins) == sum(before[t] for t in joins)
    assert targets(made, "forward")[aten.stack.default] == 1
    (stack,) = [n for n in made.program.module.graph.nodes if n.target is aten.stack.default]
    assert stack.meta["val"].shape == (4, STEPS, 6)


def test_rows_stacked_for_a_gradient_are_not_stacked_again() -> None:
    """Gradients of gates are stacked once, for the products of the weight and of the input."""
    args = (model := unrolled(layers=2)), batch(2), loss, sgd(model)
    plain = capture(*args, stack_gradients=True)
    made = joined(*args, stack_gradients=True)
    cats = [targets(each, "backward")[aten.cat.default] for each in (plain, made)]
    assert cats[0] == cats[1]


class Shared(nn.Module):
    """Towers with shared weights over some inputs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.tanh(self.layer(x)) for x in inputs], 1)


@pytest.mark.parametrize(
    ("count", "rows", "width", "pays"),
    [(3, 4, 8, False), (5, 4, 8, True), (40, 64, 1024, True), (5, 2048, 1024, False)],
)
def test_only_small_products_in_number_are_made_one(
    count: int, rows: int, width: int, pays: bool
) -> None:
    """Three launches are not 1.5 times two, for the copy is one; large products fill a GPU."""
    model = Shared(width).to("meta")
    inputs = tuple(torch.empty(rows, width, device="meta") for _ in range(count))
    graph = capture(model, inputs).program.module.graph
    assert stack_inputs(graph) == (count - 1 if pays else 0)


class Rows(nn.Module):
    """A layer over the parts of its input, one by one."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> Any:
        return [self.layer(part) for part in x]


class Tied(nn.Module):
    """A function of one weight."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6).double())
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x, self.weight)


def crossed(x: torch.Tensor, weight: torch.Tensor) -> Any:
    """Two products with each of two weights, each of which could be one, but not both."""
    other = weight * 2
    return (x[0] @ weight).tanh() @ other, (x[1] @ other).tanh() @ weight


def test_sets_do_not_wait_for_each_other() -> None:
    """After one pair is made one, the other pair would wait for itself."""
    model, x = Tied(crossed), torch.randn(2, 4, 6).double()
    graph = joined(model, x)
    assert sum(products(graph).values()) == 3
    found = graph.program.module(*_flat(graph, model, x))
    assert all(map(torch.allclose, found, crossed(x, model.weight)))


def test_a_chain_stays() -> None:
    """Each product with the weight reads the one before."""

    def chain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = x @ weight
        return x

    graph = joined(Tied(chain), torch.randn(4, 6).double())
    assert sum(products(graph).values()) == 6


def test_results_may_be_parts() -> None:
    """What the model returns are the products themselves."""
    model, x = Tied(lambda x, weight: [each @ weight for each in x.unbind(1)]), batch()[0]
    graph = joined(model, x)
    assert sum(products(graph).values()) == 1
    found = graph.program.module(*_flat(graph, model, x))
    assert all(map(torch.allclose, found, (x @ model.weight).unbind(1)))


def _flat(graph: OpGraph, model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    given = {"parameter": dict(model.named_parameters()), "input": {}}
    return [given[b.kind].get(b.key, x).detach() for b in graph.program.bindings]
