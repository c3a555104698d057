"""Batch norm on GPUs: cuDNN's, as eager PyTorch takes it.

A captured batch norm is the one of all devices, and on GPUs that is PyTorch's own kernel. Eager
PyTorch takes cuDNN's there, in half the time. cuDNN's backward may need what its forward kept
("reserve"); that is no value of the captured step, so cuDNN is used where nothing is kept, which it
tells once per type and layout.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

aten = torch.ops.aten


def _batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> tuple[Any, ...]:
    if not (training and _nothing_is_kept(x, weight)):
        return aten._native_batch_norm_legit_functional.default(  # type: ignore[no-any-return]
            x, weight, bias, mean, var, training, momentum, eps
        )
    made = aten._batch_norm_with_update_functional.default(
        x, weight, bias, mean, var, momentum, eps
    )
    return (*made[:3], *made[4:])


def _batch_norm_backward(
    grad: Any,
    x: Any,
    weight: Any,
    mean: Any,
    var: Any,
    save_mean: Any,
    save_invstd: Any,
    training: bool,
    eps: float,
    mask: list[bool],
) -> tuple[Any, ...]:
    rest = (grad, x, weight, mean, var, save_mean, save_invstd, training, eps, mask)
    if not (training and all(mask) and _nothing_is_kept(x, weight)):
        return aten.native_batch_norm_backward.default(*rest)  # type: ignore[no-any-return]
    nothing = torch.empty(0, dtype=torch.uint8, device=x.device)
    return aten.batch_norm_backward.default(*rest, nothing)  # type: ignore[no-any-return]


def _nothing_is_kept(x: Any, weight: Any) -> bool:
    """Whether the forward of such a tensor keeps nothing for its backward."""
    if weight is None or x.dim() < 3 or not x.is_contiguous():
        return False
    return _keeps_nothing(x.device, x.dtype, weight.dtype, x.dim())


@cache
def _keeps_nothing(device: Any, dtype: Any, weight_dtype: Any, dims: int) -> bool:
    x = torch.zeros((2,) * dims, dtype=dtype, device=device)
    one = torch.ones(2, dtype=weight_dtype, device=device)
    reserve = aten._batch_norm_with_update_functional.default(x, one, one, one, one, 0.1, 1e-5)[3]
    return bool(reserve.numel() == 0)


KERNELS: dict[Any, Callable[..., Any]] = {
    aten._native_batch_norm_legit_functional.default: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
}
"""Op of a captured step -> what is called for it on a GPU."""
