"""Weights of the learned placer on disk: plain arrays and their provenance."""

from __future__ import annotations

import io
import json
import struct
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from devplace.errors import InputError
from devplace.files import read_whole, write_whole

SHIPPED = Path(__file__).with_name("learned.npz")
"""The weights in the package."""
RECORD = "record"
# What numpy, zipfile, zlib and json raise for other files.
UNREADABLE = (
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    NotImplementedError,
    OSError,
    OverflowError,
    RecursionError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    struct.error,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)


def write(path: Path, network: nn.Module, record: dict[str, Any]) -> None:
    """Write weights (half precision) and a record: families, seed, commit and the like."""
    arrays = {name: value.cpu().numpy() for name, value in network.state_dict().items()}
    halves: dict[str, Any] = {name: value.astype(np.float16) for name, value in arrays.items()}
    halves[RECORD] = np.array(json.dumps(record))
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **halves)
    write_whole(path, buffer.getvalue())


def read(path: Path | str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Weights and record of a file. Only numbers and text are read; nothing in it is run.

    Raises:
        InputError: No such file, or not one of weights.
    """
    try:
        with np.load(io.BytesIO(read_whole(path)), allow_pickle=False) as data:
            record = json.loads(str(data[RECORD]))
            names = [name for name in data.files if name != RECORD]
            arrays = {name: data[name].astype(np.float32) for name in names}
        if not isinstance(record, dict) or not all(np.isfinite(a).all() for a in arrays.values()):
            raise ValueError("its record is no JSON object, or weights are not finite")
        return {name: torch.as_tensor(array) for name, array in arrays.items()}, record
    except UNREADABLE as error:
        raise InputError(
            f"Cannot read weights of the learned placer from {path}: {error}. Give a file that "
            f"experiments/train_learned.py wrote, or weights=None for an untrained policy."
        ) from error


def load_into(network: nn.Module, path: Path | str) -> dict[str, Any]:
    """Put weights into a network of the same sizes; gives the record.

    Raises:
        InputError: Unreadable, or for a network of other sizes.
    """
    weights, record = read(path)
    have = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in weights.items()}
    if have != found:
        wrong = sorted(n for n in have.keys() | found.keys() if have.get(n) != found.get(n))
        raise InputError(
            f"Weights in {path} do not fit the policy: {wrong[0]} has shape "
            f"{found.get(wrong[0], 'none')}, expected {have.get(wrong[0], 'none')}. Train them "
            f"anew, or give the hidden size that they were trained with."
        )
    network.load_state_dict(weights)
    return record
