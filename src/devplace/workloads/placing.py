"""Where a workload's tensors are made, and their random values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from devplace.errors import InputError
from devplace.step_capture.batch import open_dataclasses

Batch = TypeVar("Batch")
"""Inputs as a tuple, or as a dict of keyword inputs."""


def parse_device(device: str) -> torch.device:
    """The torch device of a name such as `meta`, `cpu`, `cuda:1`.

    Raises:
        InputError: torch knows no such device.
    """
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise InputError(f"Unknown device {device!r}. Use meta, cpu or cuda:0.") from error


@contextmanager
def seeded(seed: int, device: str | None) -> Iterator[None]:
    """Draw from a CPU generator seeded with `seed`; new tensors go to `device` unless it is None.

    The caller's random state comes back afterwards. Only the CPU's generator is touched, so an
    accelerator is neither started nor reseeded.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if device is None:
            yield
        else:
            with torch.device(device):
                yield


def move(model: nn.Module, inputs: Batch, device: torch.device) -> tuple[nn.Module, Batch]:
    """Model and inputs on `device`; tied parameters stay tied.

    Raises:
        InputError: The device is not there.
    """
    if device.type == "meta":
        _to_meta(model)
    else:
        try:
            model = model.to(device)
        except (AssertionError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise InputError(f"Device {device} cannot be used: {reason}") from error
    opened = open_dataclasses(inputs)
    return model, pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), opened)


def devices_of(model: nn.Module, inputs: Any) -> set[str]:
    """Types of the devices that hold a parameter, a buffer or an input."""
    leaves = pytree.tree_leaves(open_dataclasses(inputs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    tensors += [*model.parameters(), *model.buffers()]
    return {tensor.device.type for tensor in tensors}


def _to_meta(model: nn.Module) -> None:
    """Replace every tensor of the model by one without memory.

    `Module.to("meta")` would make one new parameter per name and so untie tied weights.
    """
    made: dict[int, torch.Tensor] = {}
    kept: list[torch.Tensor] = []  # keeps the ids in `made` from being reused
    for module in model.modules():
        for slots in (module._parameters, module._buffers):
            for name, tensor in slots.items():
                if tensor is None or tensor.device.type == "meta":
                    continue
                if id(tensor) not in made:
                    kept.append(tensor)
                    empty = torch.empty_like(tensor, device="meta")
                    is_parameter = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = (
                        nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
                    )
                slots[name] = made[id(tensor)]
