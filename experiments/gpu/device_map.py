"""A Hugging Face style device map, greedy by memory, trained through `accelerate`'s hooks.

`get_balanced_memory` and `infer_auto_device_map` are what `device_map="balanced"` uses.

Run: `python -m experiments.gpu.device_map WORKLOAD --gpus 2 --out FILE`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from experiments.gpu import rows
from experiments.gpu.timing import peaks, reset_peaks, time_steps
from experiments.gpu.training import Settings, bound_loss, build, sgd, training_step, use_tf32
from torch import Tensor, nn

from devplace.workloads import Workload

# Classes that stay on one device, as a model's author would list them for Hugging Face: first what
# has a residual or a concatenation inside; then, if hooks cannot train that, whole decoder steps.
WHOLE = ("Block", "Bottleneck", "Branches", "ConvNorm", "AuxiliaryHead", "LSTMCell", "Attention")
COARSE = (*WHOLE, "DecoderStep", "GnmtDecoderStep")
COARSEST = (*COARSE, "Encoder", "GnmtEncoder")
ROOM_BYTES = 10**12  # far above any model: only the balance limits a device


def balanced_map(model: nn.Module, num_devices: int, whole: tuple[str, ...]) -> dict[str, int]:
    """Module name -> device number, parameters split about evenly in the order of definition."""
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    room = dict.fromkeys(range(num_devices), ROOM_BYTES)
    limits = get_balanced_memory(model, room, list(whole))
    return infer_auto_device_map(model, limits, list(whole))


def dispatch(
    workload: Workload, device_map: dict[str, int], settings: Settings
) -> Callable[[], Tensor]:
    """The model on its devices, and the loss of one batch.

    Where all outputs are on one device the loss is computed there, as Hugging Face models do.
    """
    from accelerate import dispatch_model

    if settings.device_type == "cpu":
        every = dict.fromkeys(device_map, "cpu")
        model = dispatch_model(workload.model, every, main_device="cpu", force_hooks=True)
    else:
        model = dispatch_model(workload.model, device_map, main_device=0, force_hooks=True)
    hook = model._hf_hook
    hook.io_same_device = False
    with torch.no_grad():
        outputs = model(*workload.inputs[:-1])
    places = {out.device for out in (outputs if isinstance(outputs, tuple) else (outputs,))}
    inputs = list(workload.inputs)
    if len(places) == 1:
        inputs[-1] = inputs[-1].to(places.pop())
    else:
        hook.io_same_device = True
    return bound_loss(settings, model, workload.loss_fn, inputs)


def attempt(settings: Settings, progress: rows.Progress, whole: tuple[str, ...]) -> dict[str, Any]:
    """Step time with one list of classes that stay whole."""
    workload = build(settings, "cpu")
    device_map = balanced_map(workload.model, settings.gpus, whole)
    devices = settings.devices()
    inputs = tuple(tensor.to(devices[0]) for tensor in workload.inputs)
    workload = Workload(workload.name, workload.model, inputs, workload.loss_fn)
    progress.acquire()
    try:
        loss = dispatch(workload, device_map, settings)
        reset_peaks(devices)
        optimizer = sgd(workload.model)
        step = training_step(loss, optimizer)
        times = time_steps(step, devices, settings.seconds, settings.steps)
    finally:
        progress.release()
    return times | peaks(devices) | {"device_map": device_map, "whole": list(whole)}


def measure(
    settings: Settings, progress: rows.Progress, options: argparse.Namespace
) -> dict[str, Any]:
    """Step time with the finest map that the hooks can train, and why finer ones failed."""
    use_tf32()
    failures: list[str] = []
    for whole in (WHOLE, COARSE, COARSEST):
        try:
            row = attempt(settings, progress, whole)
        except (RuntimeError, ValueError, TypeError, KeyError) as error:
            failures.append(rows.first_line(error))
            continue
        return row | {"finer_maps_failed": failures}
    raise RuntimeError("; ".join(dict.fromkeys(failures)))


if __name__ == "__main__":
    rows.main("experiments.gpu.device_map", measure)
