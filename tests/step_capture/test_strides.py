"""A captured step lies in memory as its kernels lay it, or as it was traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.run.placed import NAMES, sgd
from tests.run.tracing import random_placement
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from devplace.graph import OpGraph
from devplace.run.check import check_step
from devplace.run.compile import compile_step
from devplace.step_capture import capture, strides
from devplace.step_capture.analysis import tensors_in
from devplace.step_capture.fakes import Fakes

FLOAT = torch.float64
Function = Callable[[torch.Tensor], torch.Tensor]


def laid(*order: int) -> Function:
    """Dimensions in this order in memory."""
    back = [order.index(dim) for dim in range(len(order))]
    return lambda x: x.permute(order).contiguous().permute(back)


LAYOUTS: dict[str, Function] = {
    "contiguous": lambda x: x,
    "channels last": laid(0, 2, 3, 1),
    "batch second": laid(1, 0, 2, 3),
    "rows last": laid(0, 1, 3, 2),
    "rows before channels": laid(0, 2, 1, 3),
    "reversed": laid(3, 2, 1, 0),
    "with gaps": lambda x: torch.cat([x, x], 3)[..., : x.shape[3]],
    "repeated": lambda x: x[:, :1].expand(-1, 4, -1, -1),
}


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=FLOAT)


def plain(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def zeros_like(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x, dtype=torch.long)


def grid(x: torch.Tensor) -> torch.Tensor:
    return x[:, :2].permute(0, 2, 3, 1).tanh()


def square(x: torch.Tensor) -> torch.Tensor:
    return x[..., :4, :4] + 9 * torch.eye(4, dtype=FLOAT)


CHANNELS_LAST_WEIGHT = ones(6, 4, 3, 3).to(memory_format=torch.channels_last)
# Of [2, 4, 6, 5].
OPS: dict[str, Function] = {
    "batch norm": lambda x: F.batch_norm(x, ones(4), ones(4), ones(4), ones(4), True),
    "batch norm, eval": lambda x: F.batch_norm(x, ones(4), ones(4), ones(4), ones(4)),
    "batch norm 1d": lambda x: F.batch_norm(x.flatten(2), None, None, ones(4), ones(4), True),
    "batch norm 3d": lambda x: F.batch_norm(x.unsqueeze(2), None, None, training=True),
    "group norm": lambda x: F.group_norm(x, 2, ones(4), ones(4)),
    "layer norm": lambda x: F.layer_norm(x, x.shape[3:], ones(5)),
    "layer norm 2d": lambda x: F.layer_norm(x, x.shape[2:]),
    "instance norm": lambda x: F.instance_norm(x, weight=ones(4), bias=ones(4)),
    "rms norm": lambda x: F.rms_norm(x, x.shape[3:]),
    "convolution": lambda x: F.conv2d(x, ones(6, 4, 3, 3), padding=1),
    "convolution, weight channels last": lambda x: F.conv2d(x, CHANNELS_LAST_WEIGHT),
    "convolution, weight turned": lambda x: F.conv2d(x, ones(4, 6, 3, 3).transpose(0, 1)),
    "convolution, grouped": lambda x: F.conv2d(x, ones(4, 1, 3, 3), groups=4),
    "convolution 1x1": lambda x: F.conv2d(x, ones(6, 4, 1, 1)),
    "convolution, transposed": lambda x: F.conv_transpose2d(x, ones(4, 6, 3, 3), stride=2),
    "convolution 1d": lambda x: F.conv1d(x.flatten(2), ones(6, 4, 3)),
    "convolution 3d": lambda x: F.conv3d(x.unsqueeze(2), ones(6, 4, 1, 3, 3)),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "bilinear": lambda x: F.interpolate(x, size=(7, 9), mode="bilinear"),
    "bicubic": lambda x: F.interpolate(x, size=(7, 9), mode="bicubic"),
    "antialias": lambda x: F.interpolate(x, size=(3, 3), mode="bilinear", antialias=True),
    "max pool": lambda x: F.max_pool2d(x, 2, 1),
    "average pool": lambda x: F.avg_pool2d(x, 2, 1),
    "adaptive pool": lambda x: F.adaptive_avg_pool2d(x, 3),
    "adaptive max pool": lambda x: F.adaptive_max_pool2d(x, 3),
    "max pool 3d": lambda x: F.max_pool3d(x.unsqueeze(1), 2, 1),
    "pixel shuffle": lambda x: F.pixel_shuffle(x, 2),
    "pixel unshuffle": lambda x: F.pixel_unshuffle(x[..., :4], 2),
    "channel shuffle": lambda x: F.channel_shuffle(x, 2),
    "cumsum": lambda x: x.cumsum(2),
    "cumprod": lambda x: x.cumprod(1),
    "cummax": lambda x: x.cummax(1)[0],
    "sort": lambda x: x.sort(1)[0],
    "topk": lambda x: x.topk(2, 1)[0],
    "median": lambda x: x.median(1)[0],
    "softmax": lambda x: x.softmax(1),
    "log softmax": lambda x: x.log_softmax(2),
    "matmul": lambda x: x @ ones(5, 3),
    "bmm": lambda x: x @ x.transpose(2, 3),
    "linear": lambda x: F.linear(x, ones(7, 5)),
    "einsum": lambda x: torch.einsum("bchw,bdhw->bcdh", x, x),
    "tensordot": lambda x: torch.tensordot(x, x, ([1], [1])),
    "cat": lambda x: torch.cat([x, plain(x)], 1),
    "cat, contiguous first": lambda x: torch.cat([plain(x), x], 2),
    "stack": lambda x: torch.stack([x, plain(x)], 1),
    "fft": lambda x: torch.fft.fft(x, dim=1).real,
    "fft as real": lambda x: torch.view_as_real(torch.fft.fft(x, dim=3)),
    "rfft2": lambda x: torch.fft.rfft2(x).imag,
    "irfft": lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=2), dim=2),
    "stft": lambda x: torch.stft(x.flatten(1), 8, 4, window=ones(8), return_complex=True).abs(),
    "flip": lambda x: x.flip(1),
    "roll": lambda x: torch.roll(x, (1, 1), (2, 3)),
    "roll over all": lambda x: torch.roll(x, 1),
    "rot90": lambda x: torch.rot90(x, 1, (2, 3)),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "attention, turned": lambda x: F.scaled_dot_product_attention(*[x.transpose(1, 2)] * 3),
    "grid sample": lambda x: F.grid_sample(x, grid(x), align_corners=False),
    "index select": lambda x: x.index_select(1, torch.tensor([0, 2, 1])),
    "gather": lambda x: x.gather(1, zeros_like(x)),
    "index": lambda x: x[:, torch.tensor([1, 0])],
    "index apart": lambda x: x[torch.tensor([1, 0]), :, torch.tensor([1, 0])],
    "embedding": lambda x: F.embedding(torch.tensor([[0, 1], [2, 3]]).t(), x[0, :, :, 0]),
    "pad": lambda x: F.pad(x, (1, 1, 1, 1)),
    "reflection pad": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "where": lambda x: torch.where(x > 0, x, plain(x)),
    "sum of two layouts": lambda x: x + plain(x),
    "sum of two layouts, contiguous first": lambda x: plain(x) + x,
    "broadcast": lambda x: ones(3, 1, 1, 1, 1) * x,
    "in place": lambda x: x.clone().add_(plain(x)).mul_(2),
    "sum": lambda x: x.sum(1),
    "mean": lambda x: x.mean((1, 3)),
    "variance": lambda x: x.var(2),
    "largest": lambda x: x.max(1)[0],
    "norm": lambda x: x.norm(dim=1),
    "glu": lambda x: F.glu(x, 1),
    "gelu": F.gelu,
    "prelu": lambda x: F.prelu(x, ones(4)),
    "triangle": lambda x: x.tril(),
    "repeat": lambda x: x.repeat(1, 2, 1, 1),
    "repeat interleave": lambda x: x.repeat_interleave(2, 1),
    "unfold": lambda x: F.unfold(x, 2),
    "fold": lambda x: F.fold(F.unfold(x, 2), (6, 5), 2),
    "distances": lambda x: torch.cdist(x, x),
    "cross product": lambda x: torch.linalg.cross(x[:, :3], x[:, 1:], dim=1),
    "inverse": lambda x: torch.linalg.inv(square(x)),
    "solve": lambda x: torch.linalg.solve(square(x), x[..., :4, :]),
    "cholesky": lambda x: torch.linalg.cholesky(x @ x.mT + 9 * torch.eye(6, dtype=FLOAT)),
    "scatter": lambda x: x.scatter_add(1, zeros_like(x), x),
    "index put": lambda x: x.index_put((torch.tensor([0, 1]),), ones()),
    "index add": lambda x: x.index_add(1, torch.tensor([0]), x[:, :1]),
    "masked": lambda x: x.masked_fill(x > 0, 0.0),
    "slice scatter": lambda x: torch.slice_scatter(x, x[:, :2], 1, 0, 2),
    "diagonal": torch.diag_embed,
    "cast": lambda x: x.float().double(),
}


class Recorded(TorchDispatchMode):
    """Strides of everything that ops make, by op; of dimensions that have one."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.namespace == "aten":
            self.made.append((str(func), [shown(t) for t in tensors_in(made)]))
        return made


def shown(tensor: torch.Tensor) -> Any:
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    return tuple(tensor.shape), [stride for size, stride in sides if size > 1]


def recorded(op: Function, x: torch.Tensor, layout: Function) -> Any:
    """Of an op and its backward pass."""
    with Recorded() as record:
        leaf = x.detach().requires_grad_()
        made = op(layout(leaf * 1.0))
        torch.autograd.grad(made.sum(), leaf)
    return record.made


@pytest.mark.parametrize("name", OPS)
def test_fake_tensors_lie_as_the_kernels_lay_real_ones(name: str) -> None:
    """Every op of forward and backward pass, for inputs laid out in eight ways."""
    op, x = OPS[name], torch.randn(2, 4, 6, 5, dtype=FLOAT)
    for layout in LAYOUTS.values():
        expected = recorded(op, x, layout)
        with Fakes().mode as mode:
            found = recorded(op, mode.from_tensor(x), layout)
        assert found == expected


def windows(x: torch.Tensor) -> torch.Tensor:
    """Overlapping pairs along dim 1."""
    first, stride, *rest = x.stride()
    shape = (x.shape[0], x.shape[1] - 1, 2, *x.shape[2:])
    return x.as_strided(shape, (first, stride, stride, *rest))


def in_memory(x: torch.Tensor) -> torch.Tensor:
    """Elements in the order that they lie in, whatever they are."""
    return x.as_strided((x.numel() // 2, 2), (2, 1))


def if_contiguous(x: torch.Tensor) -> torch.Tensor:
    """Something else for what lies otherwise."""
    return x.view(-1) if x.is_contiguous() else 2 * x.reshape(-1)


READERS = (windows, in_memory, if_contiguous, lambda x: x.flatten(1))


class Net(nn.Module):
    """An op in all layouts, read in all ways; each element has a weight of its own."""

    def __init__(self, op: Function) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 1, 1), 1.5, dtype=FLOAT))
        self.op = op

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = x.new_zeros(())
        for layout in LAYOUTS.values():
            made = self.op(layout(x * self.weight))
            for read in READERS:
                seen = read(made).reshape(-1)
                loss = loss + (seen * torch.arange(1, seen.numel() + 1, dtype=FLOAT)).mean()
        return loss


READ = ["batch norm", "batch norm 1d", "group norm", "convolution", "roll", "flip", "fft", "cumsum"]
READ += ["sort", "attention, turned", "cat", "grid sample", "sum of two layouts", "max pool"]


def captured(name: str) -> tuple[Any, Any, Any, OpGraph]:
    torch.manual_seed(0)
    model, x = Net(OPS[name]), torch.randn(2, 4, 6, 5, dtype=FLOAT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, x, optimizer, capture(model, (x,), lambda m, x: m(x), optimizer)


def check_beside_eager(model: Any, x: Any, optimizer: Any, graph: OpGraph) -> None:
    report = check_step(
        graph, model, optimizer, (x,), *random_placement(graph, 3, 0), NAMES, steps=1
    )
    assert not report.not_compared
    assert max(tensor.error for tensor in report.own) < 1e-9


@pytest.mark.parametrize("name", READ)
def test_views_and_counted_elements_are_those_of_eager(name: str) -> None:
    """Views, branches on layouts and `as_strided` of what kernels lay out as they like."""
    check_beside_eager(*captured(name))


@pytest.mark.parametrize("name", ["batch norm 1d", "roll"])
def test_a_layout_that_was_not_learned_is_kept_by_the_executors(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of large tensors: the step computes what was traced, whatever the kernels make of it."""
    monkeypatch.setattr(strides, "MAX_BYTES", 0)
    monkeypatch.setitem(globals(), "READERS", (windows, READERS[3]))
    model, x, optimizer, graph = captured(name)
    assert graph.program.layouts
    check_beside_eager(model, x, optimizer, graph)


class Sliced(nn.Module):
    """Counts elements of inputs and of a parameter, with gaps between them or repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6, dtype=FLOAT)[:, :4])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        seen = x.as_strided((3, 2, 4), (6, 6, 1)) * self.weight[0]
        repeated = y.as_strided((2, 3), (0, 1), 1)
        own = self.weight.as_strided((4, 2), (6, 1), 1)
        return (seen.sum() + (repeated.sum() * own).sum()).square()


@pytest.mark.parametrize("is_fused", [False, True])
def test_elements_of_sources_are_counted_as_at_capture(is_fused: bool, one_by_one: None) -> None:
    """Devices hold copies without gaps."""
    torch.manual_seed(0)
    x = torch.randn(5, 6, dtype=FLOAT)[:4, :4]
    y = torch.randn(4, dtype=FLOAT).expand(3, 4)
    model = Sliced()
    optimizer = sgd(list(model.parameters()))
    graph = capture(model, (x, y), lambda m, x, y: m(x, y), optimizer, fuse=is_fused)
    placed = random_placement(graph, 3, 0)
    report = check_step(graph, model, optimizer, (x, y), *placed, NAMES, steps=2)
    assert report.is_bit_equal
    assert all(tensor.error < 1e-12 for tensor in report.own)
    with compile_step(model, optimizer, graph, *placed, NAMES) as step:
        expected = model(x, y)
        assert torch.allclose(step(x, y), expected, rtol=1e-12)


def test_learning_layouts_leaves_random_numbers_alone() -> None:
    """Kernels that draw are run, too."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    before = torch.get_rng_state()
    capture(model, (torch.randn(2, 4),))
    torch.randn(2, 4)
    torch.set_rng_state(before)
    x = torch.randn(2, 4)
    after = torch.get_rng_state()
    capture(model, (x,))
    assert torch.equal(torch.get_rng_state(), after)
