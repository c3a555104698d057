"""Which kernels a step spends its time in, as torch's profiler sees them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from experiments.gpu.timing import synchronize

STEPS = 3
MOST = 40
KINDS = (
    ("fused", r"^triton"),
    ("convolution", r"conv|cudnn|fprop|dgrad|wgrad|implicit_gemm|nchw|nhwc"),
    ("attention", r"flash|fmha|attention"),
    ("product", r"gemm|nvjet|cublas|cutlass|splitk"),
    ("copy", r"^mem(cpy|set)|copy"),
)
"""Kind of a kernel and what its name holds, the first that fits."""


def kind_of(name: str) -> str:
    """The kind of a kernel, by its name."""
    text = name.lower()
    return next((kind for kind, pattern in KINDS if re.search(pattern, text)), "other")


def kernel_times(step: Callable[[], Any], devices: Sequence[torch.device]) -> dict[str, Any]:
    """Time per step by kernel; steps under the profiler are somewhat slower than without.

    Args:
        step: One step, run STEPS times.
        devices: All devices it uses.

    Returns:
        `us_by_kind`: microseconds per step by KINDS, over all devices; `kernels`: the MOST longest
        as (name, calls per step, microseconds per step). Empty without GPUs.
    """
    if not any(device.type == "cuda" for device in devices):
        return {}
    step()
    synchronize(devices)
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(STEPS):
                step()
            synchronize(devices)
    except RuntimeError as error:  # this machine lets nobody look
        return {"kernels": str(error)[:200]}
    found = [
        (event.key, event.count / STEPS, event.self_device_time_total / STEPS)
        for event in profile.key_averages()
        if event.self_device_time_total > 0
    ]
    by_kind: dict[str, float] = defaultdict(float)
    for name, _, us in found:
        by_kind[kind_of(name)] += us
    longest = sorted(found, key=lambda each: -each[2])[:MOST]
    return {
        "us_by_kind": {kind: round(us, 1) for kind, us in sorted(by_kind.items())},
        "kernels": [(name[:120], round(count, 1), round(us, 1)) for name, count, us in longest],
    }
