"""Compiled pools against PyTorch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.kernels.groups import group

from devplace.kernels.fused import failures, kernel_of_call

aten = torch.ops.aten
POOLS: dict[str, tuple[Any, ...]] = {
    "whole windows": ([3, 3], [2, 2], [0, 0]),
    "padded": ([3, 3], [1, 1], [1, 1]),
    "uneven": ([2, 3], [2, 1], [1, 0]),
    "ceiling": ([3, 3], [2, 2], [1, 1], True),
}


def largest(kind: str, x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Largest of each window, its place, and the gradient."""
    sizes, strides, padding, *ceiling = POOLS[kind]
    rest = ([1, 1], *(ceiling or [False]))
    values, places = aten.max_pool2d_with_indices(x.relu(), sizes, strides, padding, *rest)
    back = aten.max_pool2d_with_indices_backward(
        grad, x.relu(), sizes, strides, padding, *rest, places
    )
    return values, places, back * 2


def means(kind: str, x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Mean of each window, and the gradient."""
    sizes, strides, padding, *ceiling = POOLS[kind]
    rest = (*(ceiling or [False]), False)
    values = aten.avg_pool2d(x.relu(), sizes, strides, padding, *rest)
    back = aten.avg_pool2d_backward(grad, x, sizes, strides, padding, *rest, None)
    return values, back * 2


def compare(kind: str, device: str, layout: torch.memory_format) -> None:
    """Compiled groups give what PyTorch's kernels for CPUs give, for ties and not-a-number too."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-3, 4, (2, 4, 9, 11), generator=generator).float()
    x[1, 2, 3, 4] = float("nan")
    x = x.to(device).contiguous(memory_format=layout)
    out = F.max_pool2d(x, *POOLS[kind][:3], ceil_mode=len(POOLS[kind]) > 3)
    grad = torch.randn(out.shape, generator=generator).to(device).contiguous(memory_format=layout)
    for pool in (largest, means):
        made = kernel_of_call(group(lambda *given, p=pool: p(kind, *given), x, grad))(x, grad)
        expected = pool(kind, x.cpu(), grad.cpu())
        assert failures() == {}
        for one, other in zip(made, expected, strict=True):
            torch.testing.assert_close(one.cpu(), other, equal_nan=True)


@pytest.mark.parametrize("kind", POOLS)
@pytest.mark.usefixtures("no_kernels_yet")
@pytest.mark.slow
def test_on_a_cpu(kind: str) -> None:
    """Rows first in memory, or channels."""
    compare(kind, "cpu", torch.contiguous_format)
    compare(kind, "cpu", torch.channels_last)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", POOLS)
@pytest.mark.usefixtures("no_kernels_yet")
def test_on_a_gpu(kind: str) -> None:
    """Rows first in memory, or channels."""
    compare(kind, "cuda", torch.contiguous_format)
    compare(kind, "cuda", torch.channels_last)
