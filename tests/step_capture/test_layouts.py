"""Padded products and channels last: other layouts, the same numbers."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.run.placed import NAMES, adam, sgd
from tests.run.tracing import random_placement
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from devplace import workloads
from devplace.graph import OpGraph
from devplace.run.batch_inputs import bind_inputs, bind_scalars
from devplace.run.check import check_step
from devplace.run.state import ModelState
from devplace.run.unplaced import run_unplaced
from devplace.step_capture import capture
from devplace.step_capture.layouts import propagate
from devplace.step_capture.rewrites import channels_last, padding
from devplace.step_capture.tags import Tag

aten = torch.ops.aten
capturing = sys.modules["devplace.step_capture.capture"]


@pytest.fixture(autouse=True)
def _in_float64_on_a_cpu(monkeypatch: pytest.MonkeyPatch, one_by_one: None) -> None:
    """The smallest product of float64 is padded, to whole rows of 64 bytes; every convolution
    gains."""
    monkeypatch.setattr(padding, "ALIGNMENT", 64)
    monkeypatch.setattr(padding, "MIN_MULTIPLICATIONS", 1)
    monkeypatch.setattr(padding, "_DTYPES", (torch.float64,))
    monkeypatch.setattr(channels_last, "_gains", lambda node: True)


def captured(made: Any, as_for_gpu: bool, make: Any = sgd) -> tuple[OpGraph, list[Any]]:
    """A fused step and what three unplaced ones leave behind."""
    optimizer = make(list(made.model.parameters()))
    make_fusible = capturing._make_fusible

    def changed(graph: torch.fx.Graph, step: Any) -> None:
        padding.pad_products(graph)
        channels_last.lay_channels_last(graph, step.inputs)
        make_fusible(graph, step)

    with pytest.MonkeyPatch.context() as patch:
        if as_for_gpu:
            patch.setattr(capturing, "_make_fusible", changed)
        graph = capture(made.model, made.inputs, made.loss_fn, optimizer, fuse=True)
    sources = ModelState(graph, made.model, optimizer).read()
    sources |= bind_inputs(graph, made.inputs, {})
    found = []
    for number in (1, 2, 3):
        sources |= bind_scalars(graph, number, optimizer.param_groups)
        results = run_unplaced(graph, sources, 0, number)
        found += results
        pairs = zip(graph.results, results, strict=True)
        sources |= {result.replaces: value for result, value in pairs if result.replaces >= 0}
    return graph, found


def built(name: str, **config: Any) -> Any:
    """A small workload in float64."""
    made = workloads.build(name, size="small", device="cpu", **config)
    inputs = tuple(x.double() if x.is_floating_point() else x for x in made.inputs)
    return made.__class__(made.name, made.model.double(), inputs, made.loss_fn)


def num_calls(graph: OpGraph, *targets: str) -> int:
    """How often these are called, in groups too."""
    count = Counter(target for op in graph.ops for target in op.targets)
    return sum(count[target] for target in targets)


# Weights of the plain nets of convolutions that are off by one bit give errors of 4e-13, 2e-11 and
# 7e-10 after one, two and three of these steps (torch 2.13, x86).
AMPLIFIED = 1e-8
WORKLOADS: list[Any] = [
    ("gpt-2", {"layers": 2}),
    ("bert-base", {"layers": 2}),
    ("resnet-50", {}),
    pytest.param("inception-v3", {}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "config"), WORKLOADS)
@pytest.mark.slow
def test_numbers_are_the_same(name: str, config: dict[str, Any]) -> None:
    """Loss, parameters, buffers and momentum agree within 1e-12 after a step, and within 1e-8 after
    three; placed at random on three devices as unplaced."""
    made = built(name, **config)
    plain, expected = captured(made, False)
    graph, found = captured(made, True)
    assert num_calls(graph, "aten.constant_pad_nd.default") > num_calls(
        plain, "aten.constant_pad_nd.default"
    )
    images = [b.strides for b in graph.program.bindings if len(b.strides or ()) == 4]
    assert bool(images) == (name in ("resnet-50", "inception-v3"))
    assert all(strides[1] == 1 for strides in images)
    errors = [
        float((one - other).abs().max()) / max(1.0, float(other.abs().max()))
        for one, other in zip(found, expected, strict=True)
    ]
    count = len(graph.results)
    assert max(errors[:count]) < 1e-12
    assert max(errors) < AMPLIFIED
    optimizer = sgd(list(made.model.parameters()))
    placed = random_placement(graph, 3, 0)
    report = check_step(graph, made.model, optimizer, made.inputs, *placed, NAMES, steps=1)
    assert report.worst.error < 1e-9


def traced(function: Callable[..., Any], *inputs: torch.Tensor) -> torch.fx.Graph:
    """The graph of a function, its nodes tagged."""
    graph = make_fx(function, tracing_mode="fake")(*inputs).graph
    for node in graph.nodes:
        node.meta["tag"] = Tag("forward", "", 0, "")
    return graph


def run(graph: torch.fx.Graph, *inputs: torch.Tensor) -> Any:
    """What a graph gives; every node is laid out as its fake value says."""
    graph.lint()
    interpreter = torch.fx.Interpreter(torch.fx.GraphModule({}, graph))
    interpreter.garbage_collect_values = False
    made = interpreter.run(*inputs)
    for node, value in interpreter.env.items():
        if isinstance(value, torch.Tensor) and node.op != "output":
            assert value.stride() == node.meta["val"].stride(), node
    return made


def relaid(graph: torch.fx.Graph) -> None:
    """Lay the first input channels last."""
    first = next(iter(graph.nodes))
    before = first.meta["val"]
    with before.fake_mode:
        first.meta["val"] = torch.empty_like(before, memory_format=torch.channels_last)
    propagate(graph, {first: before})


IMAGE = torch.arange(2 * 3 * 4 * 5, dtype=torch.float64).view(2, 3, 4, 5)
LAST = IMAGE.to(memory_format=torch.channels_last)


def test_a_view_that_no_longer_fits_gets_a_copy() -> None:
    """Flattening an image that lies otherwise; what follows is worked out of the copy."""

    def function(x: torch.Tensor) -> Any:
        return aten.view.default(x * 2, [2, 60]) + 1

    graph = traced(function, IMAGE)
    relaid(graph)
    assert torch.equal(run(graph, LAST), function(IMAGE))
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [
        aten.mul.Tensor,
        aten.clone.default,
        aten.view.default,
        aten.add.Tensor,
    ]


def test_a_view_that_still_fits_stays() -> None:
    """Permuting, slicing, adding a dimension; joining dimensions that still lie together."""

    def function(x: torch.Tensor) -> Any:
        return aten.view.default(x, [2, 3, 20]).sum(1) + x.permute(0, 2, 3, 1)[:, 0, :1, :2].sum()

    graph = traced(function, IMAGE)
    relaid(graph)
    assert torch.equal(run(graph, LAST), function(IMAGE))
    assert not [node for node in graph.nodes if node.target is aten.clone.default]


def test_as_strided_reads_a_contiguous_copy() -> None:
    """It counts elements in memory, so any other layout would give it other elements."""

    def function(x: torch.Tensor) -> Any:
        return torch.as_strided(x + 1, (3, 4), (4, 1), 2)

    graph = traced(function, IMAGE)
    relaid(graph)
    assert torch.equal(run(graph, LAST), function(IMAGE))
    assert len([node for node in graph.nodes if node.target is aten.clone.default]) == 1


@pytest.mark.parametrize("offset", [None, 7])
def test_as_strided_reads_the_memory_as_it_was(offset: int | None) -> None:
    """Also that of a tensor that was turned around, or was a part of one."""

    def function(x: torch.Tensor) -> Any:
        x = x + 1
        turned = (x * 2).permute(0, 2, 3, 1)
        return (
            torch.as_strided(turned, (3, 4), (1, 20), offset),
            torch.as_strided(x[1, 1:], (3, 4), (4, 1), offset),
            torch.as_strided(turned.clone(), (3, 4), (4, 1), offset),
            torch.as_strided(aten.sort.default(x, 1)[0], (3, 4), (4, 1), offset),
            torch.as_strided(x.chunk(2)[1][:, 1], (3, 4), (4, 1), offset),
        )

    graph = traced(function, IMAGE)
    relaid(graph)
    assert all(map(torch.equal, run(graph, LAST), function(IMAGE)))


def test_views_as_other_numbers_get_a_copy() -> None:
    """Pairs that were side by side are complex numbers, or numbers of twice the size."""

    def function(x: torch.Tensor) -> Any:
        pairs = torch.view_as_complex((x + 1)[..., :4].reshape(2, 3, 8, 2))
        return torch.view_as_real(pairs).clone(), aten.view.dtype(x * 2, torch.int32) + 1

    graph = traced(function, IMAGE)
    relaid(graph)
    assert all(map(torch.equal, run(graph, LAST), function(IMAGE)))


def test_kernels_that_want_contiguous_inputs_get_them() -> None:
    """The norms of a weight, distances; group norm, of which PyTorch's kernel for GPUs does."""

    def function(x: torch.Tensor) -> Any:
        y, scale = x + 1, x[:, :1, :1, :1] + 2
        normed, norm = aten._weight_norm_interface.default(y, scale, 0)
        grouped = aten.native_group_norm.default(y, None, None, 2, 3, 20, 1, 1e-5)
        return normed, norm, aten._cdist_forward.default(y, y, 2.0, None), grouped[0]

    graph = traced(function, IMAGE)
    relaid(graph)
    assert all(map(torch.equal, run(graph, LAST), function(IMAGE)))
    wants = ("_weight_norm_interface", "native_group_norm", "_cdist_forward")
    readers = [
        n
        for n in graph.nodes
        if str(n.target).split(".")[1:2] and str(n.target).split(".")[1] in wants
    ]
    assert len(readers) == len(wants)
    for node in readers:
        assert all(arg.meta["val"].is_contiguous() for arg in node.all_input_nodes[:1])


def test_what_does_not_depend_on_the_change_stays() -> None:
    """Nodes of other inputs have their values still."""
    graph = traced(lambda x, y: (x.relu(), aten.view.default(y * 2, [6])), IMAGE, torch.ones(2, 3))
    before = {node.name: node.meta.get("val") for node in graph.nodes}
    relaid(graph)
    after = {node.name: node.meta.get("val") for node in graph.nodes}
    assert [name for name in before if before[name] is not after[name]] == ["x_1", "relu"]


@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("sizes", [(3, 5, 7), (8, 5, 7), (3, 8, 16), (8, 8, 7), (8, 16, 24)])
def test_padded_products_give_the_same(
    sizes: tuple[int, int, int], turned: tuple[bool, bool]
) -> None:
    """Whatever is padded and however operands lie; rows are whole then, and nothing is padded that
    is whole already."""
    rows, inner, columns = sizes
    torch.manual_seed(0)
    left = torch.randn(inner, rows).double() if turned[0] else torch.randn(rows, inner).double()
    right = (
        torch.randn(columns, inner).double() if turned[1] else torch.randn(inner, columns).double()
    )
    bias = torch.randn(columns).double()

    def function(left: Any, right: Any, bias: Any) -> Any:
        left, right = (x.t() if turn else x for x, turn in zip((left, right), turned, strict=True))
        return left @ right, torch.addmm(bias, left, right)

    graph = traced(function, left, right, bias)
    padding.pad_products(graph)
    for one, other in zip(run(graph, left, right, bias), function(left, right, bias), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)
    products = [n for n in graph.nodes if n.target in (aten.mm.default, aten.addmm.default)]
    assert len(products) == 2
    for node in products:
        a, b = (arg.meta["val"] for arg in node.args[-2:])
        assert a.shape[1] % 8 == b.shape[1] % 8 == 0
        assert a.shape[0] % 8 == 0 or not turned[0]
    needs_rows = turned[0] and rows % 8
    pads = [n for n in graph.nodes if n.target is aten.constant_pad_nd.default]
    assert bool(pads) == bool(needs_rows or inner % 8 or columns % 8)


@pytest.mark.parametrize("shape", [(3, 7), (1, 7), (3, 1), (1, 1), (7,), (1,), ()])
@pytest.mark.parametrize("is_turned", [False, True])
def test_what_is_added_to_a_padded_product_may_be_repeated(
    shape: tuple[int, ...], is_turned: bool
) -> None:
    """A matrix, a row, a column, a number."""
    torch.manual_seed(0)
    left = torch.randn(5, 3).double().t() if is_turned else torch.randn(3, 5).double()
    tensors = (torch.randn(shape).double(), left, torch.randn(5, 7).double())
    graph = traced(torch.addmm, *tensors)
    padding.pad_products(graph)
    torch.testing.assert_close(run(graph, *tensors), torch.addmm(*tensors), rtol=1e-13, atol=1e-13)


def test_kernels_that_want_whole_rows_of_a_product_get_them() -> None:
    """Distances of the rows of a padded product."""

    def function(x: Any, y: Any) -> Any:
        return torch.pdist(x @ y)

    tensors = (torch.randn(3, 5).double(), torch.randn(5, 7).double())
    graph = traced(function, *tensors)
    padding.pad_products(graph)
    torch.testing.assert_close(run(graph, *tensors), function(*tensors), rtol=1e-13, atol=1e-13)


def test_an_operand_of_two_products_is_padded_once() -> None:
    """As a weight that both read; also where one of them reads it turned around."""

    def function(x: Any, weight: Any, y: Any) -> Any:
        return x @ weight, y @ weight.t()

    tensors = (torch.randn(3, 5).double(), torch.randn(5, 7).double(), torch.randn(4, 7).double())
    graph = traced(function, *tensors)
    padding.pad_products(graph)
    for one, other in zip(run(graph, *tensors), function(*tensors), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)
    padded = [n.args[0].name for n in graph.nodes if n.target is aten.constant_pad_nd.default]
    assert sorted(padded) == sorted(set(padded))
    assert len(padded) == 3


def test_small_products_and_those_with_factors_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding costs copies; `beta` and `alpha` are not looked into."""

    def function(x: Any, y: Any, bias: Any) -> Any:
        return x @ y, torch.addmm(bias, x @ y, y.t() @ x.t(), beta=2.0)

    tensors = (torch.randn(3, 5).double(), torch.randn(5, 3).double(), torch.randn(3).double())
    for least, count in ((3 * 5 * 3 + 1, 0), (3 * 5 * 3, 2)):
        monkeypatch.setattr(padding, "MIN_MULTIPLICATIONS", least)
        graph = traced(function, *tensors)
        before = [node.target for node in graph.nodes]
        padding.pad_products(graph)
        slices = [n for n in graph.nodes if n.target is aten.slice.Tensor]
        assert len(slices) >= count
        assert count or [node.target for node in graph.nodes] == before


def test_channels_last_is_for_nets_of_plain_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grouped, thin, or in full float32, they gain nothing; nor where most of the work does not."""
    monkeypatch.undo()

    def gains(groups: int = 1, channels: int = 16, dtype: Any = torch.bfloat16) -> bool:
        with FakeTensorMode():
            x = torch.empty(2, channels, 8, 8, dtype=dtype)
            weight = torch.empty(channels, channels // groups, 3, 3, dtype=dtype)
        graph = torch.fx.Graph()
        nodes = [graph.placeholder(name) for name in "xw"]
        nodes[0].meta["val"], nodes[1].meta["val"] = x, weight
        args = (*nodes, None, [1, 1], [1, 1], [1, 1], False, [0, 0], groups)
        node = graph.call_function(aten.convolution.default, args)
        node.meta["val"] = x
        return channels_last._pays([node])

    assert gains()
    assert not gains(groups=2)
    assert not gains(channels=8)
    assert not gains(dtype=torch.float64)
    assert not channels_last._pays([])
    for allowed in (False, True):
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", allowed)
        assert gains(dtype=torch.float32) == allowed


def test_state_of_a_convolution_lies_as_its_weight() -> None:
    """Moments, and what takes their places: so all are read and written in one order."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)).double()
    made = workloads.Workload(
        "net", model, (torch.randn(2, 3, 4, 4).double(),), lambda m, x: m(x).square().mean()
    )
    graph, _ = captured(made, True, adam)
    strides = {b.op: b.strides for b in graph.program.bindings}
    found = {graph.ops[k].name: s for k, s in strides.items() if len(s or ()) == 4}
    weights = ["0.weight", "exp_avg[0.weight]", "exp_avg_sq[0.weight]"]
    assert found == {"input[0]": (48, 1, 12, 3), **dict.fromkeys(weights, (27, 1, 9, 3))}
    output = next(node for node in reversed(graph.program.module.graph.nodes))
    for result, node in zip(graph.results, output.args[0], strict=True):
        if graph.ops[result.replaces].name in weights:
            assert node.meta["val"].stride() == (27, 1, 9, 3)
