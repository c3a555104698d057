"""A Hugging Face style device map, greedy by memory, trained through `accelerate`'s hooks.

`infer_auto_device_map` and `dispatch_model` are what `device_map="balanced"` uses.

Run: `python -m experiments.gpu.device_map WORKLOAD --gpus 2 --out FILE`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from experiments.gpu.timing import peaks, reset_peaks, time_steps
from experiments.gpu.training import Settings, bound_loss, build, prepare_torch, sgd, training_step
from torch import Tensor, nn

from devplace.workloads import Workload
from experiments.gpu import rows

# Classes that stay on one device, as a model's author would list them for Hugging Face: first what
# has a residual or a concatenation inside; then, if hooks cannot train that, whole decoder steps.
WHOLE = (
    "Block",
    "Bottleneck",
    "Branches",
    "ConvNorm",
    "AuxiliaryHead",
    "LSTMCell",
    "Attention",
    "AdditiveAttention",
)
COARSE = (*WHOLE, "DecoderStep", "GnmtDecoderStep")
COARSEST = (*COARSE, "Encoder", "GnmtEncoder")
LIMITS = 24  # limits per device tried, from an even share to everything


def balanced_map(model: nn.Module, num_devices: int, whole: tuple[str, ...]) -> dict[str, int]:
    """Module name -> device number: greedy under the equal limit that gives the evenest split.

    Differs from `device_map="balanced"` in: the limit is searched for instead of estimated, and
    the first device may get more, since accelerate keeps room there for offloaded layers, of which
    there are none. With the estimate the first device can stay empty, or two hold everything.

    Raises:
        ValueError: With these classes whole everything is on one device.
    """
    from accelerate import infer_auto_device_map
    from accelerate.utils import compute_module_sizes, get_max_layer_size

    sizes = compute_module_sizes(model)
    reserve, _ = get_max_layer_size(list(model.named_children()), sizes, list(whole))
    total = sizes[""]
    maps: list[dict[str, Any]] = []
    for step in range(LIMITS + 1):
        limit = total / num_devices * (num_devices ** (step / LIMITS))
        for room in (0, reserve):
            limits = {k: int(limit) + (room if k == 0 else 0) for k in range(num_devices)}
            maps.append(dict(infer_auto_device_map(model, limits, list(whole))))
    fitting = [one for one in maps if all(isinstance(device, int) for device in one.values())]
    held = [held_bytes(model, one, num_devices) for one in fitting]
    # Of equally even maps the one that leaves the first device least empty.
    best = fitting[min(range(len(held)), key=lambda k: (max(held[k]), -held[k][0]))]
    if len(set(best.values())) < 2:
        raise ValueError(f"with {', '.join(whole)} kept whole everything is on one device")
    return best


def held_bytes(model: nn.Module, device_map: dict[str, int], num_devices: int) -> list[int]:
    """Parameter bytes on each device, a tied one counted once."""
    held: list[dict[int, int]] = [{} for _ in range(num_devices)]
    for name, device in device_map.items():
        for parameter in model.get_submodule(name).parameters():
            held[device][id(parameter)] = parameter.numel() * parameter.element_size()
    return [sum(sizes.values()) for sizes in held]


def dispatch(
    workload: Workload, device_map: dict[str, int], settings: Settings
) -> Callable[[], Tensor]:
    """The model on its devices, and the loss of one batch.

    Where all outputs are on one device the loss is computed there, as Hugging Face models do.
    """
    from accelerate import dispatch_model

    is_cpu = settings.device_type == "cpu"
    places = {name: "cpu" if is_cpu else f"cuda:{k}" for name, k in device_map.items()}
    main_device = "cpu" if is_cpu else "cuda:0"
    model = dispatch_model(workload.model, places, main_device=main_device, force_hooks=True)
    hook = model._hf_hook
    hook.io_same_device = False
    with torch.no_grad():
        outputs = model(*workload.inputs[:-1])
    ends = {out.device for out in (outputs if isinstance(outputs, tuple) else (outputs,))}
    inputs = list(workload.inputs)
    if len(ends) == 1:
        inputs[-1] = inputs[-1].to(ends.pop())
    else:
        hook.io_same_device = True
    return bound_loss(settings, model, workload.loss_fn, inputs)


def attempt(settings: Settings, progress: rows.Progress, whole: tuple[str, ...]) -> dict[str, Any]:
    """Step time with one list of classes that stay whole."""
    workload = build(settings, "cpu")
    device_map = balanced_map(workload.model, settings.gpus, whole)
    used = len(set(device_map.values()))
    devices = settings.devices()
    inputs = tuple(tensor.to(devices[0]) for tensor in workload.inputs)
    workload = Workload(workload.name, workload.model, inputs, workload.loss_fn)
    progress.acquire()
    loss = dispatch(workload, device_map, settings)
    reset_peaks(devices)
    step = training_step(loss, sgd(workload.model))
    times = time_steps(step, devices, settings.seconds, settings.steps)
    return times | peaks(devices) | {"device_map": device_map, "gpus_used": used}


def measure(
    settings: Settings, progress: rows.Progress, options: argparse.Namespace
) -> dict[str, Any]:
    """Step time with the finest map that the hooks can train, and why finer ones failed."""
    prepare_torch(settings)
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
