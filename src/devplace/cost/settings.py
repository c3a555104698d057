"""torch settings that affect op speed, copied into another process."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

# Under torch.backends; the wider ones first, because setting them sets the narrower ones.
NAMES = (
    "fp32_precision",
    "cuda.matmul.fp32_precision",
    "cudnn.fp32_precision",
    "cudnn.conv.fp32_precision",
    "cudnn.rnn.fp32_precision",
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "cudnn.benchmark",
    "cudnn.deterministic",
)


def torch_settings() -> dict[str, Any]:
    """The present settings, by name."""
    found: dict[str, Any] = {"deterministic": torch.are_deterministic_algorithms_enabled()}
    for name in NAMES:
        with contextlib.suppress(AttributeError, RuntimeError):
            found[name] = functools.reduce(getattr, name.split("."), torch.backends)
    return found


def apply_settings(settings: dict[str, Any]) -> None:
    """Make the settings of another process those of this one."""
    torch.use_deterministic_algorithms(settings["deterministic"])
    for name, value in settings.items():
        if name == "deterministic":
            continue
        *path, last = name.split(".")
        with contextlib.suppress(AttributeError, RuntimeError):
            setattr(functools.reduce(getattr, path, torch.backends), last, value)
