"""The built-in workloads: what they are called, what they are, and how they are built.

To add one: a file with `CONFIGS` (name -> size -> frozen dataclass with a `batch` field) and
`build(config) -> (model, inputs, loss_fn)`, and one line in `_CATALOG`.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

from devplace.errors import InputError, did_you_mean
from devplace.workloads.user import load
from devplace.workloads.workload import Workload, check_batch, check_size

# name -> (module of this package, description); texts only, so that listing needs no torch.
_CATALOG = {
    "inception-v3": ("inception_v3", "Inception-V3 image classifier, batch 32, 299x299"),
    "resnet-50": ("resnet", "ResNet-50 image classifier, batch 32, 224x224"),
    "resnet-152": ("resnet", "ResNet-152 image classifier, batch 32, 224x224"),
    "rnnlm": ("rnnlm", "LSTM language model, 2 layers of 2048, batch 64, 35 steps"),
    "nmt-2": ("nmt", "LSTM translation with attention, 2+2 layers of 1024, batch 64, 40 steps"),
    "nmt-4": ("nmt", "LSTM translation with attention, 4+4 layers of 1024, batch 64, 40 steps"),
    "nmt-8": ("nmt", "LSTM translation with attention, 8+8 layers of 1024, batch 64, 40 steps"),
    "gnmt-4": ("gnmt", "GNMT: bidirectional and residual, 4+4 layers of 1024, batch 64, 40 steps"),
    "bert-base": ("bert", "BERT-base masked language model, batch 16, 128 tokens"),
    "bert-large": ("bert", "BERT-large masked language model, batch 16, 128 tokens"),
    "gpt-2": ("gpt", "GPT-2 (124M) language model, batch 8, 1024 tokens"),
    "llama": ("llama", "Llama-style language model, 12 layers of 1024, batch 8, 512 tokens"),
    "vit-b-16": ("vit", "Vision Transformer B/16 image classifier, batch 64, 224x224"),
    "moe": ("moe", "Mixture-of-experts transformer, 4 layers of 8 experts, batch 16, 128 tokens"),
}

NAMES = tuple(_CATALOG)


def describe(name: str) -> str:
    """One line about a built-in workload at full size.

    Raises:
        InputError: There is no such workload.

    Example:
        >>> describe("resnet-50")
        'ResNet-50 image classifier, batch 32, 224x224'
    """
    return _entry(name)[1]


def build(
    name: str,
    size: str = "full",
    batch: int | None = None,
    device: str = "meta",
    seed: int = 0,
    **config: Any,
) -> Workload:
    """Build a workload by name.

    Weights and inputs are drawn on the CPU from `seed`, so they are the same on every device; the
    global random state is left as it was. On `meta` nothing is allocated.

    Args:
        name: One of `NAMES`.
        size: `full` as published, or `small`: the same structure, tiny.
        batch: Samples per step, instead of the size's own.
        device: `meta`, or where model and inputs shall lie (`cpu`, `cuda:0`).
        seed: Of weights and inputs.
        **config: Other fields of the workload's config, for example `dropout=0.0` or `layers=12`.

    Raises:
        InputError: Unknown name, size, device or field; a batch or field that makes no sense.
    """
    module_name, _ = _entry(name)
    check_size(size)
    check_batch(batch)
    module = importlib.import_module(f"devplace.workloads.{module_name}")
    changes = config if batch is None else {**config, "batch": batch}
    settings = _changed(name, module.CONFIGS[name][size], changes)
    from devplace.workloads.placing import move, parse_device, seeded

    target = parse_device(device)
    with seeded(seed, "meta" if target.type == "meta" else "cpu"):
        model, inputs, loss_fn = module.build(settings)
    model, inputs = move(model.train(), inputs, target)
    return Workload(name, model, inputs, loss_fn)


def resolve(
    spec: str,
    size: str = "full",
    batch: int | None = None,
    device: str = "meta",
    seed: int = 0,
) -> Workload:
    """Build a workload given as a name or as `file.py:function`.

    Raises:
        InputError: As `build` and `load`.
    """
    make = load if ":" in spec or spec.endswith(".py") else build
    return make(spec, size=size, batch=batch, device=device, seed=seed)


def _entry(name: str) -> tuple[str, str]:
    """Module and description of a workload, or the error that names the nearest one."""
    if name not in _CATALOG:
        is_plan = name.endswith(".json")
        hint = (
            " Plans are read by explain, run and trace." if is_plan else did_you_mean(name, NAMES)
        )
        raise InputError(
            f"Unknown workload {name!r}.{hint} "
            f"Workloads: {', '.join(NAMES)}; or your own as file.py:function; "
            f"or an .onnx or .pt2 file."
        )
    return _CATALOG[name]


def _changed(name: str, settings: Any, changes: dict[str, Any]) -> Any:
    """The config with some fields replaced, each by a value of the same type."""
    known = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    for key in changes:
        if key not in known:
            raise InputError(
                f"Workload {name} has no setting {key!r}.{did_you_mean(key, known)} "
                f"Settings: {', '.join(known)}."
            )
    checked = {key: _value(name, key, changes[key], known[key]) for key in changes}
    return dataclasses.replace(settings, **checked)


def _value(name: str, key: str, value: Any, present: Any) -> Any:
    """A setting's new value, of the present one's type and in range."""
    if type(present) is float and type(value) is int:
        value = float(value)
    if type(value) is not type(present):
        kind = type(present).__name__
        raise InputError(f"{key} of workload {name} must be of type {kind}, got {value!r}.")
    if type(value) is int and value < 1:
        raise InputError(f"{key} of workload {name} must be at least 1, got {value}.")
    if key == "dropout" and not 0.0 <= value < 1.0:
        raise InputError(f"{key} of workload {name} must be from 0 to below 1, got {value}.")
    return value
