"""Forward values that the backward pass computes again instead of reading kept ones."""

from __future__ import annotations

import itertools
import operator
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.step_capture.checks import Runner, small_net, xent
from torch import nn

from devplace import workloads
from devplace.graph import OpGraph
from devplace.run.unplaced import run_unplaced
from devplace.step_capture import capture
from devplace.step_capture.analysis import is_fusible, view_bases
from devplace.step_capture.rewrites.min_cut import cheapest_cut
from devplace.step_capture.rewrites.recompute import recompute
from devplace.step_capture.tags import Tag

Case = tuple[nn.Module, Any, Callable[..., Any]]
aten = torch.ops.aten
capturing = sys.modules["devplace.step_capture.capture"]


def mlp() -> Case:
    """GELU, layer norm, dropout that drops nothing and dropout that does."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Dropout(0.0), nn.Linear(16, 16)]
    layers += [nn.SiLU(), nn.Dropout(0.5), nn.Linear(16, 4)]
    return nn.Sequential(*layers), (torch.randn(6, 8), torch.randint(0, 4, (6,))), xent


def gpt() -> Case:
    """A small GPT, two layers."""
    made = workloads.build("gpt-2", size="small", device="cpu", layers=2)
    return made.model, made.inputs, made.loss_fn


def batch_norm() -> Case:
    """Batch norm with running statistics, whose second micro-batch reads the first one's."""
    torch.manual_seed(1)
    return small_net(), (torch.randn(6, 8).double(), torch.randint(0, 4, (6,))), xent


CASES = {"mlp": mlp, "gpt": gpt, "batch norm": batch_norm}


def captured(case: Case, options: dict[str, Any], is_changed: bool = True) -> OpGraph:
    """A captured step, after the pass if that is asked for."""
    model, batch, loss_fn = case
    trace = capturing._trace

    def traced(*args: Any) -> torch.fx.GraphModule:
        gm = trace(*args)
        if is_changed:
            recompute(gm.graph)
        return gm

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capturing, "_trace", traced)
        return capture(model, batch, loss_fn, optimizer, **options)


def results(graph: OpGraph, case: Case) -> list[torch.Tensor]:
    """What one step leaves, run op by op in trace order."""
    model, batch, _ = case
    values: dict[int, Any] = dict(Runner(graph, model).values)
    scalars = graph.program.scalars(1, None)
    for binding in graph.program.bindings:
        if binding.kind == "input":
            values[binding.op] = batch[binding.slot]
        elif binding.kind == "scalar":
            values[binding.op] = torch.tensor(scalars[binding.key], dtype=torch.float64)
    return run_unplaced(graph, values, seed=3, step=1)


def kept_bytes(graph: OpGraph) -> int:
    """Bytes of forward ops' outputs that ops of later stages read, views counted as their base."""
    base = list(range(len(graph.tensors)))
    for op in graph.ops:
        for tensor in op.outputs if op.is_view else ():
            base[tensor] = base[op.alias_of]
    read = {
        base[t]
        for op in graph.ops
        if op.stage in ("backward", "update") and not op.is_view
        for t in op.inputs
    }
    forward = {t for t in read if graph.ops[graph.producer[t]].stage == "forward"}
    return sum(graph.tensors[t].num_bytes for t in forward)


def check(case: Case, options: dict[str, Any]) -> tuple[int, int]:
    """What must hold of any step; gives bytes kept before and after."""
    before, after = (captured(case, options, kind) for kind in (False, True))
    for one, other in zip(results(before, case), results(after, case), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert own_calls(before) == own_calls(after)
    assert not reads_of_copies(after)
    assert kept_bytes(after) <= kept_bytes(before)
    return kept_bytes(before), kept_bytes(after)


def own_calls(graph: OpGraph) -> Counter[Any]:
    """How often each op that cannot be fused is called, by stage and module."""
    nodes = [n for n in graph.program.module.graph.nodes if n.op == "call_function"]
    own = [n for n in nodes if not is_fusible(n) and not view_bases(n)]
    return Counter((n.target, n.meta["tag"]) for n in own)


def reads_of_copies(graph: OpGraph) -> list[str]:
    """Forward ops that read a tensor of the backward pass."""
    late = {t for op in graph.ops if op.stage in ("backward", "update") for t in op.outputs}
    return [op.name for op in graph.ops if op.stage == "forward" and late & set(op.inputs)]


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_numbers_are_the_same(name: str, micro_batches: int) -> None:
    """The same ops on the same values: every result is equal bit by bit."""
    check(CASES[name](), {"micro_batches": micro_batches})


@pytest.mark.slow
def test_under_autocast_log_softmax_is_not_kept() -> None:
    """Logits of a GPT are kept in bf16, not their log-softmax in float32; other ops keep theirs."""
    case = gpt()
    options = {"autocast": torch.bfloat16}
    before, after = check(case, options)
    made = workloads.build("gpt-2", size="small", device="cpu", layers=2)
    rows, vocabulary = made.inputs[1].numel(), 50
    assert before - after >= rows * vocabulary * (4 - 2)
    again = [op for op in captured(case, options).ops if "log_softmax.d" in op.target]
    assert [op.stage for op in again] == ["forward", "backward"]
    assert again[0].module == again[1].module


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_loss_is_not_computed_again(micro_batches: int) -> None:
    """Sums that are a few bytes long are kept, though what they sum up is computed again."""
    options = {"autocast": torch.bfloat16, "micro_batches": micro_batches}
    graph = captured(gpt(), options)
    losses = [op for op in graph.ops if op.target == "aten.nll_loss_forward.default"]
    assert [op.stage for op in losses] == ["forward"] * micro_batches


def test_copies_tell_where_they_come_from() -> None:
    """A copy has module, call, line and micro-batch of its original, and stage `backward`."""
    graph = captured(gpt(), {"micro_batches": 2, "autocast": torch.bfloat16})
    norms = [op for op in graph.ops if op.target == "aten._log_softmax.default"]
    origins = Counter((op.module, op.call, op.source_line, op.micro_batch) for op in norms)
    assert sorted(op.stage for op in norms) == ["backward"] * 2 + ["forward"] * 2
    assert set(origins.values()) == {2}


LAYERS: list[Callable[[], nn.Module]] = [
    lambda: nn.Linear(6, 6),
    lambda: nn.LayerNorm(6),
    lambda: nn.BatchNorm1d(6),
    lambda: nn.Dropout(0.3),
    nn.GELU,
    nn.ReLU,
    nn.Tanh,
    nn.SiLU,
    nn.Softplus,
    lambda: nn.Softmax(1),
    lambda: nn.Hardtanh(-0.5, 0.5),
]


class Residual(nn.Module):
    """Any layers; some outputs are added to earlier ones, or cut in two and put together again."""

    def __init__(self, kinds: list[tuple[int, int]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LAYERS[kind]() for kind, _ in kinds)
        self.links = [link for _, link in kinds]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = [x]
        for layer, link in zip(self.layers, self.links, strict=True):
            x = layer(seen[-1])
            if link == 1:
                x = x + seen[len(seen) // 2]
            if link == 2:
                first, second = x.chunk(2, 1)
                x = torch.cat([second * first, first.exp().t().t()], 1)
            seen.append(x)
        return x


@settings(max_examples=25, deadline=None)
@given(
    kinds=st.lists(
        st.tuples(st.integers(0, len(LAYERS) - 1), st.integers(0, 2)), min_size=1, max_size=9
    ),
    micro_batches=st.integers(1, 2),
)
@pytest.mark.slow
def test_any_model(kinds: list[tuple[int, int]], micro_batches: int) -> None:
    """Equal numbers, no more bytes kept, no own call twice, no forward op behind a copy."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 6), Residual(kinds), nn.Linear(6, 3))
    batch = (torch.randn(8, 6), torch.randint(0, 3, (8,)))
    check((model, batch, F.cross_entropy), {"micro_batches": micro_batches})


def hand_made(rows: int = 8) -> torch.fx.Graph:
    """A product p in bf16, cast to float32 c, e = exp(c), s = sum of e; the backward pass reads e
    and c in a product of both, and the result is s."""
    graph = torch.fx.Graph()

    def add(name: str, stage: Any, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        node = graph.create_node("call_function", target, args, kwargs, name)
        given = torch.fx.node.map_arg((args, kwargs), lambda each: each.meta["val"])
        node.meta.update(val=target(*given[0], **given[1]), tag=Tag(stage, "m", 1, "f.py:1", 0))
        return node

    x = graph.placeholder("x")
    x.meta.update(val=torch.ones(rows, rows, dtype=torch.bfloat16), tag=Tag("source", ""))
    product = add("product", "forward", aten.mm.default, x, x)
    cast = add("cast", "forward", aten._to_copy.default, product, dtype=torch.float32)
    power = add("power", "forward", aten.exp.default, cast)
    total = add("total", "forward", aten.sum.default, power)
    view = add("view", "backward", aten.t.default, power)
    grad = add("grad", "backward", aten.mul.Tensor, view, cast)
    graph.output([total, grad])
    return graph


def test_a_hand_made_graph() -> None:
    """Cast and power are computed again from the product: 2 bytes an element are kept, not 8."""
    graph = hand_made()
    recompute(graph)
    graph.lint()
    calls = [(n.name, n.meta["tag"].stage) for n in graph.nodes if n.op == "call_function"]
    assert calls == [
        ("product", "forward"),
        ("cast", "forward"),
        ("power", "forward"),
        ("total", "forward"),
        ("cast_1", "backward"),
        ("power_1", "backward"),
        ("view_1", "backward"),
        ("grad", "backward"),
    ]
    again = next(n for n in graph.nodes if n.name == "cast_1")
    assert again.args[0].name == "product"
    assert again.meta["tag"] == Tag("backward", "m", 1, "f.py:1", 0, is_recomputed=True)


def test_kernels_of_both_passes_need_no_copy() -> None:
    """With only pointwise ops between them, both passes are one kernel if that may be."""
    graph = hand_made()
    before = [node.name for node in graph.nodes]
    recompute(graph, spans_passes=True)
    assert [node.name for node in graph.nodes] == before


def test_what_must_be_kept_anyway_is_read() -> None:
    """If a product of the backward pass reads the cast, that is kept, and the power comes from it:
    nothing is gained by keeping the product too."""
    graph = hand_made()
    cast = next(n for n in graph.nodes if n.name == "cast")
    grad = next(n for n in graph.nodes if n.name == "grad")
    with graph.inserting_after(grad):
        late = graph.call_function(aten.mm.default, (cast, cast))
    late.meta.update(val=cast.meta["val"], tag=grad.meta["tag"])
    output = next(n for n in graph.nodes if n.op == "output")
    output.args = ([*output.args[0], late],)
    recompute(graph)
    again = [n for n in graph.nodes if n.target is aten.exp.default][1]
    assert again.args[0] is cast
    assert late.args == (cast, cast)


def smallest_of(sets: list[frozenset[int]]) -> frozenset[int]:
    """The one set that all others contain."""
    smallest = min(sets, key=len)
    assert all(smallest <= each for each in sets)
    return smallest


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_cheapest_cut_by_brute_force(data: st.DataObject) -> None:
    """No set of nodes has a smaller cut, and none as small has fewer nodes on the sink's side."""
    count = data.draw(st.integers(3, 8))
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b and a != 1 and b != 0]
    arcs = tuple(
        (a, b, data.draw(st.integers(-1, 5))) for a, b in pairs if data.draw(st.integers(0, 2)) == 0
    )
    arcs = tuple((a, b, max(c, 0)) if a == 0 else (a, b, c) for a, b, c in arcs)
    best: list[frozenset[int]] = []
    lowest = 10**9
    for chosen in itertools.product([False, True], repeat=count - 2):
        behind = frozenset({1} | {k + 2 for k, is_in in enumerate(chosen) if is_in})
        cut = [c for a, b, c in arcs if a not in behind and b in behind]
        if -1 in cut or sum(cut) > lowest:
            continue
        best = [*(best if sum(cut) == lowest else []), behind]
        lowest = sum(cut)
    assert cheapest_cut(arcs) == smallest_of(best)


def test_two_outputs_of_one_op() -> None:
    """A layer norm is computed again as a whole; items that are not read are not made."""
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.SiLU(), nn.Linear(6, 3))
    batch = (torch.randn(8, 6), torch.randint(0, 3, (8,)))
    graph = captured((model, batch, lambda m, x, y: F.cross_entropy(m(x), y)), {})
    nodes = graph.program.module.graph.nodes
    copies = [
        n
        for n in nodes
        if n.target is aten.native_layer_norm.default and n.meta["tag"].stage == "backward"
    ]
    assert len(copies) == 1
    assert all(user.target is operator.getitem for user in copies[0].users)


@pytest.mark.slow
def test_large_regions_are_cut_in_pieces() -> None:
    """1200 pointwise ops in a row, whose values the backward pass reads: numbers stay, and from
    each piece less is kept."""

    class Long(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = y = self.first(x)
            for _ in range(300):
                y = torch.sigmoid(y * x) + torch.tanh(y)
            return y.mean()

    torch.manual_seed(0)
    before, after = check((Long(), (torch.randn(3, 4),), lambda m, x: m(x)), {})
    assert after < before / 50
