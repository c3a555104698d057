"""Which ops a compiler can fuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from devplace.step_capture import capture
from devplace.step_capture.analysis import is_fusible, pays_alone

aten = torch.ops.aten
X = torch.randn(4, 6, dtype=torch.float64)
IDS = torch.tensor([0, 2, 1, 3])


def last_call(function: Callable[..., Any], *inputs: torch.Tensor) -> torch.fx.Node:
    """The last op that a function calls, other than taking an item of several outputs."""
    graph = make_fx(function, tracing_mode="fake")(*inputs).graph
    calls = [node for node in graph.nodes if hasattr(node.target, "overloadpacket")]
    return calls[-1]


FUSIBLE = {
    "pointwise": lambda x: x + 1,
    "reduction": lambda x: x.sum(1),
    "largest with place": lambda x: x.max(1)[0],
    "softmax": lambda x: aten._log_softmax.default(x, 1, False),
    "layer norm": lambda x: aten.native_layer_norm.default(x, [6], None, None, 1e-5)[0],
    "batch norm, evaluation": lambda x: aten.native_batch_norm.default(
        x, None, None, x[0], x[1], False, 0.1, 1e-5
    )[0],
    "batch norm, functional": lambda x: aten._native_batch_norm_legit_functional.default(
        x, None, None, x[0], x[1], True, 0.1, 1e-5
    )[0],
    "cast": lambda x: x.to(torch.bfloat16),
    "concatenation": lambda x: torch.cat([x, x]),
    "creator": lambda x: torch.zeros_like(x),
    "constant": lambda x: torch.full([3], 2.0),
    "rows by index": lambda x: x[torch.zeros_like(x[:, 0], dtype=torch.int64)],
    "gather": lambda x: x.gather(1, torch.zeros_like(x, dtype=torch.int64)),
    "backward of a slice": lambda x: aten.slice_backward.default(x, [9, 6], 0, 0, 4, 1),
    "hard tanh backward": lambda x: aten.hardtanh_backward.default(x, x, -1.0, 1.0),
    "dropout in evaluation": lambda x: aten.native_dropout.default(x, 0.5, False)[0],
    "pool": lambda x: F.max_pool2d(x[None], 3, 2, 1),
    "mean of windows": lambda x: F.avg_pool2d(x[None], (5, 5), 1, 2),
    "cast of prims": lambda x: torch.ops.prims.convert_element_type.default(x, torch.float32),
}
OWN_CALLS = {
    "product": lambda x: x @ x.new_ones(6, 2),
    "convolution": lambda x: F.conv1d(x[None], x.new_ones(2, 4, 3)),
    "pool of rows": lambda x: F.max_pool1d(x, 2),
    "pool of large windows": lambda x: F.avg_pool2d(x.repeat(3, 3)[None], (5, 6)),
    "dilated pool": lambda x: F.max_pool2d(x[None], 2, 1, 0, 2),
    "mean of three dimensions": lambda x: F.avg_pool3d(x[None, None], (1, 2, 2)),
    "sort": lambda x: x.sort(1)[0],
    "scan": lambda x: x.cumsum(1),
    "scatter": lambda x: x.scatter_add(1, torch.zeros_like(x, dtype=torch.int64), x),
    "write by index": lambda x: aten.index_put.default(x, [x[:, 0].long()], x, True),
    "gradient of an embedding": lambda x: aten.embedding_dense_backward.default(
        x, x[:, 0].long(), 5, -1, False
    ),
    "random": lambda x: aten.bernoulli.p(x, 0.5),
    "dropout": lambda x: aten.native_dropout.default(x, 0.5, True)[0],
    "view": lambda x: x.t(),
    "view unsaid": lambda x: aten._unsafe_view.default(x, [24]),
    "write": lambda x: x.clone().add_(1),
    "complex": lambda x: x.to(torch.complex128),
    "batch norm that writes": lambda x: aten.native_batch_norm.default(
        x, None, None, x[0], x[1], True, 0.1, 1e-5
    )[0],
}


@pytest.mark.parametrize("name", FUSIBLE)
def test_fusible(name: str) -> None:
    """One kernel could do it and its neighbours."""
    assert is_fusible(last_call(FUSIBLE[name], X))


@pytest.mark.parametrize("name", OWN_CALLS)
def test_not_fusible(name: str) -> None:
    """It stays a call of its own, or makes nothing."""
    assert not is_fusible(last_call(OWN_CALLS[name], X))


def test_a_mask_as_index_is_not_fusible() -> None:
    """How many rows it picks depends on values; an index of int64 picks a known number."""
    graph = torch.fx.Graph()
    x, index, mask = (graph.placeholder(name) for name in ("x", "index", "mask"))
    x.meta["val"], index.meta["val"], mask.meta["val"] = X, IDS, IDS > 0
    nodes = [graph.call_function(aten.index.Tensor, (x, [None, i])) for i in (index, mask)]
    for node in nodes:
        node.meta["val"] = X
    assert [is_fusible(node) for node in nodes] == [True, False]


def test_other_namespaces_and_devices_are_not_fusible() -> None:
    """Ops of other libraries are unknown; a copy between devices is no kernel."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = X
    copy = graph.call_function(aten._to_copy.default, (x,), {"device": torch.device("meta")})
    copy.meta["val"] = X.to("meta")
    other = graph.call_function(torch.ops.quantized.add_relu.default, (x, x, 1.0, 0))
    other.meta["val"] = X
    assert not is_fusible(copy)
    assert not is_fusible(other)
    assert not is_fusible(x)


def test_a_training_step_is_fusible_but_for_its_products() -> None:
    """Of an MLP with layer norm all but products, views and sources."""
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))
    batch = (X.float(), torch.tensor([0, 2, 1, 0]))
    graph = capture(model, batch, F.cross_entropy, torch.optim.AdamW(model.parameters()))
    by_node = {node.name: is_fusible(node) for node in graph.program.module.graph.nodes}
    for op in graph.ops:
        is_product = op.target in ("aten.mm.default", "aten.addmm.default")
        assert by_node.get(op.name, False) == (not (op.is_source or op.is_view or is_product))


LARGE, ROW = torch.randn(256, 256), torch.randn(256)
PAYS = {
    "sum": (True, lambda x, row: x.sum(1)),
    "turned copy": (True, lambda x, row: x.t().contiguous()),
    "update with a rate on the device": (True, lambda x, row: torch.addcmul(x, x, row[0])),
    "row added to all": (True, lambda x, row: x + row),
    "batch norm": (
        True,
        lambda x, row: aten._native_batch_norm_legit_functional.default(
            x, None, None, row, row, True, 0.1, 1e-5
        )[0],
    ),
    "two of one size": (False, lambda x, row: x * x),
    "number": (False, lambda x, row: x * 2),
    "small row added to all": (False, lambda x, row: row[:8].view(2, 4) + row[0]),
    "cast": (False, lambda x, row: x.to(torch.bfloat16)),
}


@pytest.mark.parametrize("name", PAYS)
def test_what_pays_alone(name: str) -> None:
    """PyTorch's own kernels for it leave most of a GPU's bandwidth unused, and it is large."""
    pays, function = PAYS[name]
    assert pays_alone(last_call(function, LARGE, ROW)) == pays


def test_the_update_of_a_large_weight_is_compiled() -> None:
    """Its gradient is made by a product, so nothing else is in its group."""
    net = nn.Linear(256, 256, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    graph = capture(net, (LARGE, LARGE), F.mse_loss, optimizer, fuse=True)
    assert not any(op.target == "aten.addcmul.default" for op in graph.ops)
