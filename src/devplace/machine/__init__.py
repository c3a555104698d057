"""Where things run: devices, links, presets, machine files and detection."""

from __future__ import annotations

import os.path
from pathlib import Path

from devplace.errors import MachineError
from devplace.machine import presets, toml
from devplace.machine.detect import detect
from devplace.machine.machine import Device, Link, Machine, Pool, channels_of, require_machine

__all__ = [
    "Device",
    "Link",
    "Machine",
    "Pool",
    "channels_of",
    "detect",
    "load_machine",
    "looks_like_file",
    "presets",
    "require_machine",
    "toml",
]


def looks_like_file(text: str) -> bool:
    """Whether a machine's name can only be that of a file."""
    return text.endswith(".toml") or "/" in text or "\\" in text


def load_machine(name_or_path: str | Path) -> Machine:
    """A machine by preset name, machine file or the word `detect`.

    A text that ends in `.toml`, holds a path separator or names a file is read as a machine file.

    Raises:
        MachineError: Neither a preset nor a file, or a file with a wrong field.

    Example:
        >>> load_machine("cpux2").device_names
        ('cpu:0', 'cpu:1')
    """
    text = str(name_or_path)
    if text == "detect":
        return detect()
    if looks_like_file(text) or isinstance(name_or_path, Path) or os.path.isfile(text):
        return toml.load(text)
    try:
        return presets.get(text)
    except MachineError as error:
        raise MachineError(f"{error} Or give a machine file (.toml), or 'detect'.") from None
