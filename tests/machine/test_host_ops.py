"""Ops that a CPU beside GPUs does not run."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from typing import Any

import torch

from devplace.machine.presets.host_ops import GPU_ONLY_OPS, OPS_OFF_HOST, RANDOM_OPS

# CUDA ops a captured training step can hold, by torch 2.11 to 2.14.
KNOWN = (
    "aten._thnn_fused_lstm_cell.default",
    "aten._thnn_fused_gru_cell.default",
    "aten._thnn_fused_lstm_cell_backward_impl.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_efficient_attention_backward.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._flash_attention_forward.default",
    "aten._efficient_attention_backward.default",
    "aten.cudnn_batch_norm.default",
    "aten._cudnn_rnn.default",
    "aten.mm.dtype",
)
# Tagged random, but of other devices, nested tensors, or without a number drawn.
NOT_OF_GPUS = ("_mps", "for_mps", "for_cpu", "overrideable", "nested", "_fused_sdp_choice")


def is_hit(target: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(target, pattern) for pattern in patterns)


def overloads() -> Iterator[Any]:
    """All functional aten ops of this torch that capture does not take apart."""
    for name in torch._C._dispatch_get_all_op_names():
        base, _, overload = name.removeprefix("aten::").partition(".")
        op = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
        composite = "CompositeImplicitAutograd"
        if (
            name.startswith("aten::")
            and op is not None
            and not op._schema.is_mutable
            and not torch._C._dispatch_has_kernel_for_dispatch_key(name, composite)
        ):
            yield op


def test_known_gpu_ops_are_listed_and_have_no_cpu_form() -> None:
    """Fused cells, flash attention, cuDNN: on the list, and nothing torch could run on a CPU."""
    for target in KNOWN:
        assert is_hit(target, GPU_ONLY_OPS), target
        _, name, overload = target.split(".")
        op = getattr(getattr(torch.ops.aten, name), overload)
        assert not torch._C._dispatch_has_computed_kernel_for_dispatch_key(op.name(), "CPU")


def test_every_random_op_is_listed() -> None:
    """Each op that torch says draws numbers is kept off the CPU."""
    seen = 0
    for op in overloads():
        is_random = torch.Tag.nondeterministic_seeded in op.tags
        if is_random and not any(part in str(op) for part in NOT_OF_GPUS):
            assert is_hit(str(op), OPS_OFF_HOST), str(op)
            seen += 1
    assert seen > 20


def test_nothing_else_is_listed() -> None:
    """No pattern hits an op that a CPU runs as a GPU does, with every torch."""
    allowed = {"aten._use_cudnn_rnn_flatten_weight.default", "aten.cudnn_is_acceptable.default"}
    since_2_14 = {
        "aten._philox_key_fold_in.default",
        "aten._philox_key_fold_in.Tensor",
        "aten._philox_key_split.default",
        "aten._scaled_grouped_mm_v2.default",
    }
    allowed |= since_2_14
    for op in overloads():
        on_cpu = torch._C._dispatch_has_computed_kernel_for_dispatch_key(op.name(), "CPU")
        if on_cpu and torch.Tag.nondeterministic_seeded not in op.tags:
            assert not is_hit(str(op), OPS_OFF_HOST) or str(op) in allowed, str(op)
    assert not is_hit("aten.native_dropout_backward.default", RANDOM_OPS)
