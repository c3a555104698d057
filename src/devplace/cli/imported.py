"""Graph files of other tools given on the command line in place of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from devplace.errors import InputError

if TYPE_CHECKING:
    from devplace.graph import OpGraph

SUFFIXES = (".onnx", ".pt2")


def is_imported(model: str) -> bool:
    """Whether a model's name is that of a file to import."""
    return model.lower().endswith(SUFFIXES)


def read_graph(model: str, batch: int | None, micro_batches: int, size: str) -> OpGraph:
    """The inference step in the file.

    Raises:
        InputError: The file cannot be read, or an option that has no meaning for it.
    """
    if micro_batches != 1 or size != "full":
        raise InputError(f"{model} is planned as it is. Leave --micro-batches and --size out.")
    if model.lower().endswith(".onnx"):
        from devplace.graph.onnx_file import read_onnx

        return read_onnx(model, batch)
    if batch is not None:
        raise InputError(f"{model} has the batch it was exported with. Leave --batch out.")
    from devplace.step_capture.exported import read_pt2

    return read_pt2(model)


def fused_import(model: str, graph: OpGraph, pins: Mapping[str, str]) -> OpGraph:
    """An imported graph with its ops fused, none over a pin.

    Raises:
        InputError: The file does not say which ops a compiler can fuse.
    """
    from devplace.graph.fusion import fuse, fuse_for

    if not any(op.is_fusible for op in graph.ops):
        raise InputError(
            f"{model} does not say which of its ops a compiler can fuse. Leave --fuse out."
        )
    return fuse_for(fuse(graph), pins)


def refuse_running(model: str) -> None:
    """An imported graph has no values and no program.

    Raises:
        InputError: The model is one.
    """
    if is_imported(model):
        raise InputError(
            f"{model} can be planned, explained and traced, with analytic costs, but not run. "
            f"Give the model as file.py:function to run it."
        )
