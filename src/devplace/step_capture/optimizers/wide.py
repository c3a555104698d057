"""Elementwise ops of updates on 16-bit tensors, one of whose arguments is a 0-dim number.

Given a Python number, kernels compute in float32 and round the result; a 0-dim tensor they round
first. Casts of whole tensors would take twice a parameter's bytes each, three of them side by
side. So where no compiler fuses casts away, the ops here compute piece by piece, and take no
memory but that of their result and `PIECE` elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from devplace.step_capture.strides import is_dense

LOW_PRECISION = (torch.bfloat16, torch.float16)
PIECE = 1 << 22
"""Elements computed at once: 16 MiB in float32, which caches of large GPUs hold."""
Tensor: TypeAlias = torch.Tensor
Exact: TypeAlias = Callable[..., Any]
"""Op of `FORMS` and its tensors -> the result, in the dtype of the first."""


def _addcdiv(
    first: Tensor, upper: Tensor, lower: Tensor, number: Tensor, out: Tensor | None = None
) -> Tensor:
    return torch.addcdiv(first, upper * number, lower, out=out)


def _scaled_add(first: Tensor, second: Tensor, number: Tensor, out: Tensor | None = None) -> Tensor:
    return torch.add(first, (second * number).to(first.dtype), out=out)


FORMS: Mapping[str, Exact] = {
    "mul": torch.mul,
    "div": torch.div,
    "addcmul": torch.addcmul,
    "scaled_add": _scaled_add,
    "addcdiv": _addcdiv,
}
"""What each computes. The number comes last and is a factor: of the quotient in `addcdiv`, of the
second tensor in `scaled_add`, which rounds that product before it adds."""


def by_casts(op: str, *tensors: Tensor) -> Tensor:
    """Casts of whole tensors to float32 and back, which compilers fuse away."""
    if op == "scaled_add":
        return tensors[0] + by_casts("mul", *tensors[1:])
    wide = [each.float() if each.dtype in LOW_PRECISION else each for each in tensors]
    return FORMS[op](*wide).to(tensors[0].dtype)


def in_pieces(op: str, *tensors: Tensor) -> Tensor:
    """One op, to the same bits; of tensors of 32 or 64 bits the plain one."""
    if tensors[0].dtype not in LOW_PRECISION:
        return by_casts(op, *tensors)
    made: Tensor = getattr(torch.ops.devplace, f"wide_{op}")(*tensors)
    return made


def _computed(op: str, *tensors: Tensor) -> Tensor:
    return _into(op, *tensors, out=torch.empty_like(tensors[0]))


def _into(op: str, *tensors: Tensor, out: Tensor) -> Tensor:
    """Compute into a tensor, which may be one of those read if it is laid out like them.

    A number in a tensor of one dimension makes 16-bit tensors be computed in its float32: GPUs cast
    while they read, CPUs piece by piece.
    """
    *whole, number = tensors
    if _are_dense_alike([*whole, out]):
        flat = [each.as_strided((each.numel(),), (1,)) for each in (*whole, out)]
        number = number.float().reshape(1)
        for *parts, piece in zip(*(each.split(PIECE) for each in flat), strict=True):
            FORMS[op](*parts, number, out=piece)
    else:
        out.copy_(by_casts(op, *tensors))
    return out


def _are_dense_alike(tensors: list[Tensor]) -> bool:
    last = tensors[-1]
    alike = all(each.shape == last.shape and each.stride() == last.stride() for each in tensors)
    return alike and is_dense(last)


def _defined() -> Any:
    library = torch.library.Library("devplace", "FRAGMENT")
    for op, count in {"mul": 2, "div": 2, "addcmul": 3, "scaled_add": 3, "addcdiv": 4}.items():
        given = ", ".join(f"Tensor {name}" for name in "abcd"[:count])
        library.define(f"wide_{op}({given}) -> Tensor")
        library.define(f"wide_{op}.out({given}, *, Tensor(a!) out) -> Tensor(a!)")
        for kind in ("CPU", "CUDA"):
            library.impl(f"wide_{op}", _named(_computed, op), kind)
            library.impl(f"wide_{op}.out", _named(_into, op), kind)
        library.impl(f"wide_{op}", lambda first, *rest: torch.empty_like(first), "Meta")
    return library


def _named(function: Callable[..., Tensor], op: str) -> Callable[..., Tensor]:
    return lambda *tensors, **named: function(op, *tensors, **named)


_library = _defined()
