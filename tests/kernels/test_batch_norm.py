"""Kernels that stand in for an op on GPUs; here they run on the CPU, which has all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from devplace.kernels import batch_norm, kernel_of

aten = torch.ops.aten
FORWARD = aten._native_batch_norm_legit_functional.default
BACKWARD = aten.native_batch_norm_backward.default


def case(seed: int, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Input, weight, bias and running statistics."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    weight, bias, mean = (torch.randn(shape[1], generator=generator) for _ in range(3))
    return x, weight, bias, mean, torch.rand(shape[1], generator=generator) + 0.5


def test_other_ops_stay_themselves() -> None:
    """Only batch norms are replaced."""
    assert kernel_of(aten.mm.default, "cuda") is aten.mm.default
    assert kernel_of(FORWARD, "cuda") is not FORWARD


@pytest.mark.parametrize("keeps_nothing", [True, False])
@pytest.mark.parametrize("shape", [(4, 3, 5, 6), (2, 3, 7), (6, 3)])
def test_batch_norm_gives_the_same_values(
    shape: tuple[int, ...], keeps_nothing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All results of forward and backward, whichever kernel is taken; inputs stay."""
    monkeypatch.setattr(batch_norm, "_keeps_nothing", lambda *_: keeps_nothing)
    x, weight, bias, mean, var = case(0, shape)
    before = mean.clone(), var.clone()
    args = (x, weight, bias, mean, var, True, 0.1, 1e-5)
    expected, found = FORWARD(*args), kernel_of(FORWARD, "cuda")(*args)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert torch.equal(mean, before[0])
    assert torch.equal(var, before[1])
    grad = torch.randn(shape)
    saved = (grad, x, weight, None, None, expected[1], expected[2], True, 1e-5)
    for mask in ([True, True, True], [True, True, False]):
        wanted, got = BACKWARD(*saved, mask), kernel_of(BACKWARD, "cuda")(*saved, mask)
        for is_wanted, one, other in zip(mask, got, wanted, strict=True):
            if is_wanted:
                torch.testing.assert_close(one, other)


def test_what_is_kept_is_asked_once_per_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU nothing is kept; other layouts, missing weights and rows are not asked about."""
    asked = []
    monkeypatch.setattr(batch_norm, "_keeps_nothing", lambda *key: not asked.append(key))
    x = torch.zeros(2, 3, 4, 4)
    assert batch_norm._nothing_is_kept(x, torch.ones(3))
    assert not batch_norm._nothing_is_kept(x.to(memory_format=torch.channels_last), torch.ones(3))
    assert not batch_norm._nothing_is_kept(x, None)
    assert not batch_norm._nothing_is_kept(x[:, :, 0, 0], torch.ones(3))
    assert len(asked) == 1
    monkeypatch.undo()
    assert batch_norm._keeps_nothing(x.device, x.dtype, x.dtype, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_on_a_gpu_the_values_are_those_of_the_captured_op(dtype: torch.dtype) -> None:
    """cuDNN keeps nothing for contiguous tensors, and agrees with PyTorch's kernel."""
    x, weight, bias, mean, var = (t.cuda() for t in case(1, (8, 3, 9, 10)))
    x = x.to(dtype)
    assert batch_norm._keeps_nothing(x.device, x.dtype, weight.dtype, 4)
    args = (x, weight, bias, mean, var, True, 0.1, 1e-5)
    expected, found = FORWARD(*args), kernel_of(FORWARD, "cuda")(*args)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).to(x)
    saved = (grad, x, weight, None, None, expected[1], expected[2], True, 1e-5, [True] * 3)
    again = (grad, x, weight, None, None, found[1], found[2], True, 1e-5, [True] * 3)
    pairs = zip(kernel_of(BACKWARD, "cuda")(*again), BACKWARD(*saved), strict=True)
    # Terms of about 1 cancel, so what counts is the rounding of each of them in `dtype`.
    rounding = 2 * max(torch.finfo(dtype).eps, 1e-5)
    for one, other in pairs:
        terms = x.numel() // one.numel()
        torch.testing.assert_close(one, other, rtol=rounding, atol=rounding * terms**0.5)
