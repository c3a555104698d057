"""Graphs as files and fingerprints."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec

from devplace.errors import GraphError
from devplace.files import decode_json, read_whole, write_whole
from devplace.graph.graph import Op, OpGraph, StepResult, Tensor

FORMAT_VERSION = 1


class _GraphFile(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    version: int
    name: str
    ops: tuple[Op, ...]
    tensors: tuple[Tensor, ...]
    results: tuple[StepResult, ...]
    meta: dict[str, Any]


def to_json(graph: OpGraph) -> bytes:
    """The graph as JSON, without what is needed to run it."""
    return msgspec.json.encode(
        _GraphFile(
            "devplace graph",
            FORMAT_VERSION,
            graph.name,
            graph.ops,
            graph.tensors,
            graph.results,
            dict(graph.meta),
        )
    )


def from_json(data: bytes, where: str = "graph") -> OpGraph:
    """The graph from `to_json`.

    Raises:
        GraphError: Truncated, another format or version, or not a valid graph.
    """
    try:
        found = decode_json(data, _GraphFile)
    except ValueError as error:
        raise GraphError(f"{where} is not a devplace graph: {error}. Capture it again.") from error
    if found.format != "devplace graph" or found.version != FORMAT_VERSION:
        raise GraphError(
            f"{where} has format {found.format!r} version {found.version}, expected "
            f"'devplace graph' version {FORMAT_VERSION}. Capture it again."
        )
    return OpGraph(found.name, found.ops, found.tensors, found.results, found.meta)


def save(graph: OpGraph, path: str | Path) -> None:
    """Write the graph to a file.

    Raises:
        GraphError: The file cannot be written.
    """
    try:
        write_whole(path, to_json(graph))
    except OSError as error:
        raise GraphError(f"Cannot write graph {path}: {error.strerror}. Check the path.") from error


def load(path: str | Path) -> OpGraph:
    """Read a graph from a file.

    Raises:
        GraphError: Missing or unreadable.
    """
    try:
        data = read_whole(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise GraphError(f"Cannot read graph {path}: {reason}. Check the path.") from error
    return from_json(data, str(path))


def fingerprint(graph: OpGraph) -> str:
    """Text that changes when ops, shapes, dtypes or results change; names of files do not count."""
    rows: list[Any] = [
        [op.name, op.target, op.inputs, op.outputs, op.alias_of, op.stage, op.role]
        for op in graph.ops
    ]
    rows += [[t.shape, t.dtype, t.num_bytes] for t in graph.tensors]
    rows += [[r.name, r.tensor, r.replaces] for r in graph.results]
    text = json.dumps(rows, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
