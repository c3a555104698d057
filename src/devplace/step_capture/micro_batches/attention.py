"""What fused attention computes, and its derivatives, in double precision.

The kernels have lower precision only, and round otherwise for other numbers of rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from devplace.step_capture.analysis import op_name

Node: TypeAlias = torch.fx.Node
_PREFIX = "_scaled_dot_product_"
_BIAS = ("attn_bias", "attn_mask")
_GRADIENT = ("grad_out", "grad_out_")


def attention(node: Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Outputs of a node of `torch.ops.aten._scaled_dot_product_*` without its dropout.

    What the forward op leaves for the backward op beside its output is zero: the latter starts from
    the inputs here.

    Args:
        node: With fake outputs in `meta["val"]`, whose layouts those here have.
        args, kwargs: Its arguments, tensors in double precision.

    Returns:
        None if the node is another op.
    """
    name = op_name(node)
    schema: Any = getattr(node.target, "_schema", None)
    if not name.startswith(_PREFIX):
        return None
    given = {a.name: v for a, v in zip(schema.arguments, args, strict=False)} | dict(kwargs)
    tensors = [given["query"], given["key"], given["value"]]
    bias = next((given[n] for n in _BIAS if given.get(n) is not None), None)
    if bias is not None and bias.numel():
        query, key = tensors[:2]
        tensors.append(bias.expand(*query.shape[:-1], key.shape[-2]))
    gradient = next((given[n] for n in _GRADIENT if n in given), None)
    made = _rows(tensors, gradient, bool(given.get("is_causal")), given.get("scale"))
    if len(made) == 4 and bias is not None:
        made[3] = made[3].sum_to_size(bias.shape)
    return _laid_out(made, node.meta["val"])


def _rows(
    tensors: list[torch.Tensor], gradient: torch.Tensor | None, is_causal: bool, scale: float | None
) -> list[torch.Tensor]:
    """Row by row of the batch, as the matrix of all pairs of positions is large."""
    has_gradient = gradient is not None
    made = []
    for row in range(len(tensors[0])):
        own = [t[row : row + 1].detach() for t in tensors]
        learned = [t.requires_grad_(has_gradient) for t in own if t.is_floating_point()]
        query, key, value, mask = (*own, None)[:4]
        with torch.set_grad_enabled(has_gradient), sdpa_kernel(SDPBackend.MATH):
            out = F.scaled_dot_product_attention(
                query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=True
            )
        if gradient is None:
            made.append((out,))
        else:
            made.append(torch.autograd.grad(out, learned, gradient[row : row + 1]))
    return [torch.cat(each) for each in zip(*made, strict=True)]


def _laid_out(made: Sequence[torch.Tensor], fakes: Sequence[Any]) -> tuple[Any, ...]:
    """As many outputs as the op has, in its layouts; those that were not made are zero."""
    outputs: list[Any] = []
    for place, fake in enumerate(fakes):
        if not isinstance(fake, torch.Tensor):
            outputs.append(fake)
            continue
        dtype = made[0].dtype if place < len(made) else fake.dtype
        empty = torch.empty_strided(
            fake.shape, fake.stride(), dtype=dtype, device=made[0].device
        ).zero_()
        outputs.append(empty.copy_(made[place]) if place < len(made) else empty)
    return tuple(outputs)
