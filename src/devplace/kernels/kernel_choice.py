"""Choose the function that runs an op on a type of device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from devplace.device_kinds import kind_of
from devplace.graph.fusion.call import FusedCall
from devplace.kernels import batch_norm
from devplace.kernels.fused import kernel_of_call


def kernel_of(target: Any, device_type: str, in_place: bool = False) -> Callable[..., Any]:
    """What to call in place of an op: itself for all but groups, and batch norm on GPUs.

    Args:
        target: The op, as in the FX graph.
        device_type: torch device type it runs on.
        in_place: Whether groups write new state over the old.
    """
    if isinstance(target, FusedCall):
        return kernel_of_call(target).in_place if in_place else kernel_of_call(target)
    kernel: Callable[..., Any] = target
    has_own = kind_of(device_type).has_matrix_cores
    return batch_norm.KERNELS.get(target, kernel) if has_own else kernel
