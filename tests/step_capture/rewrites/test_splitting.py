"""The two gradients of a convolution, by ops of their own."""

from __future__ import annotations

import importlib
from typing import Any
from unittest import mock

import pytest
import torch
from tests.step_capture.checks import Runner, sgd
from torch import nn

from devplace.graph import OpGraph
from devplace.step_capture import capture

capturing = importlib.import_module(capture.__module__)


class Convolutions(nn.Module):
    """Convolutions of all kinds, one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.grouped = nn.Conv2d(8, 8, 3, stride=2, groups=4)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        self.up = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.line = nn.Conv1d(6, 4, 5, dilation=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.depthwise(self.grouped(self.first(x).relu()).relu())
        return self.line(self.up(x).relu().flatten(2)).square().mean(1)


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).mean()


def captured(dtype: torch.dtype) -> tuple[nn.Module, tuple[torch.Tensor], OpGraph]:
    torch.manual_seed(0)
    model = Convolutions().to(dtype)
    batch = (torch.randn(2, 3, 11, 11, dtype=dtype),)
    return model, batch, capture(model, batch, loss, sgd(model), fuse=True)


def gradients(graph: OpGraph) -> dict[str, int]:
    """Module -> how many ops compute gradients of its convolution."""
    found: dict[str, int] = {}
    for op in graph.ops:
        if op.target == "aten.convolution_backward.default":
            found[op.module] = found.get(op.module, 0) + 1
    return found


def test_each_gradient_has_an_op_of_its_own_unless_only_one_is_wanted() -> None:
    _, _, graph = captured(torch.float64)
    assert gradients(graph) == {"first": 1, "grouped": 2, "depthwise": 2, "up": 2, "line": 2}


def test_only_the_gradient_by_the_input_is_waited_for_by_other_modules() -> None:
    _, _, graph = captured(torch.float64)
    readers: dict[int, set[str]] = {}
    for op in graph.ops:
        for tensor in op.inputs:
            readers.setdefault(graph.producer[tensor], set()).add(op.module)
    outside = [
        index
        for index, op in enumerate(graph.ops)
        if op.target == "aten.convolution_backward.default" and readers[index] != {op.module}
    ]
    assert len(outside) == 4  # of eight; the first module needs none


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_are_those_of_the_one_op(dtype: torch.dtype) -> None:
    model, batch, split = captured(dtype)
    with mock.patch.object(capturing, "split_convolution_gradients"):
        _, _, whole = captured(dtype)
    assert set(gradients(whole).values()) == {1}
    trained: list[Any] = []
    for graph in (split, whole):
        assert graph.plain is not None
        runner = Runner(graph.plain, model)
        for number in range(1, 4):
            runner.step(number, batch)
        trained.append(runner.named("parameter"))
    for name, value in trained[0].items():
        assert torch.equal(value, trained[1][name]), name
        assert not torch.equal(value, dict(model.named_parameters())[name]), name
