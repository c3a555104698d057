"""Choose the dimension along which each input is split into micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from devplace.errors import CaptureError

BatchDims = Mapping[Any, int | None]
"""Input's name -> the dimension its rows are in, or None if it has none. A name covers what is
inside: `"1"` or `1` the second positional input, `"batch.mask"` an entry of a keyword input."""


def named_dims(batch_dims: BatchDims | None) -> dict[str, int | None]:
    """Dimensions by name.

    Raises:
        CaptureError: Not a dict of names and dimensions.
    """
    if batch_dims is None:
        return {}
    if not isinstance(batch_dims, Mapping):
        raise CaptureError(
            f"batch_dims must be a dict of inputs' names and dimensions, got "
            f"{type(batch_dims).__name__}. Write batch_dims={{'1': 1, 'mask': None}}."
        )
    for name, dim in batch_dims.items():
        is_name = isinstance(name, (str, int)) and not isinstance(name, bool)
        is_dim = dim is None or (isinstance(dim, int) and not isinstance(dim, bool))
        if not (is_name and is_dim):
            raise CaptureError(
                f"batch_dims must be a dict of inputs' names and dimensions, got {name!r}: "
                f"{dim!r}. Give the dimension of its rows as an integer, or None for an input "
                f"that is not cut."
            )
    return {str(name): dim for name, dim in batch_dims.items()}


def cut_inputs(
    names: Sequence[str],
    leaves: Sequence[Any],
    micro_batches: int,
    batch_dims: BatchDims | None = None,
) -> tuple[tuple[int, ...], tuple[int | None, ...]]:
    """Rows of each micro-batch (empty if there is one), and per leaf the dimension it is cut along.

    Raises:
        CaptureError: More micro-batches than rows, or a dimension that is not there.
    """
    if isinstance(micro_batches, bool) or not isinstance(micro_batches, int) or micro_batches < 1:
        raise CaptureError(
            f"micro_batches must be an integer of at least 1, got {micro_batches!r}."
        )
    if micro_batches == 1:
        _given(names, leaves, named_dims(batch_dims))  # refused even if nothing is cut
        return (), (None,) * len(leaves)
    rows, dims = row_dims(names, leaves, batch_dims)
    if micro_batches > rows:
        raise CaptureError(
            f"A batch cannot be cut into more micro-batches than rows: {micro_batches} "
            f"micro-batches, but the batch has {rows} rows. Use micro_batches <= {rows}."
        )
    small, larger = divmod(rows, micro_batches)
    return tuple(small + 1 if i < larger else small for i in range(micro_batches)), dims


def row_dims(
    names: Sequence[str], leaves: Sequence[Any], batch_dims: BatchDims | None = None
) -> tuple[int, tuple[int | None, ...]]:
    """Rows of a batch, and per leaf the dimension they are in, or None.

    The rows are those of the first input that `batch_dims` gives a dimension for, else of the first
    tensor in its first dimension; what has as many in its first dimension has them there.

    Raises:
        CaptureError: No input has rows, or inputs have different ones.
    """
    given = _given(names, leaves, named_dims(batch_dims))
    first = next((k for k, dim in given.items() if dim is not None), None)
    if first is None:
        tensors = (k for k, leaf in enumerate(leaves) if _has_rows(leaf) and k not in given)
        first = next(tensors, None)
    if first is None:
        raise CaptureError(
            "micro_batches needs an input tensor with a batch dimension; none given."
        )
    rows = int(leaves[first].shape[given.get(first) or 0])
    for k, dim in given.items():
        if dim is not None and leaves[k].shape[dim] != rows:
            raise CaptureError(
                f"Inputs that are cut must have as many rows: {names[k]!r} has "
                f"{leaves[k].shape[dim]} in dimension {dim}, {names[first]!r} has {rows}. Give "
                f"the dimension of its rows in batch_dims, or None."
            )
    usual = {k: 0 for k, leaf in enumerate(leaves) if _has_rows(leaf) and leaf.shape[0] == rows}
    dims = {**usual, **given}
    return rows, tuple(dims.get(k) for k in range(len(leaves)))


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.ndim >= 1


def _given(
    names: Sequence[str], leaves: Sequence[Any], wanted: Mapping[str, int | None]
) -> dict[int, int | None]:
    """Leaf -> dimension, counted from the front, of those that are named."""
    found: dict[int, int | None] = {}
    for name in sorted(wanted, key=len):  # the longest name counts
        dim, inside = wanted[name], [k for k, n in enumerate(names) if _covers(name, n)]
        if not inside:
            raise CaptureError(
                f"batch_dims names an input that is not there: {name!r}. Inputs are "
                f"{', '.join(map(repr, names))}."
            )
        for k in inside:
            leaf = leaves[k]
            if not _has_rows(leaf):
                continue  # numbers are never cut
            if dim is not None and not -leaf.ndim <= dim < leaf.ndim:
                raise CaptureError(
                    f"batch_dims names a dimension that is not there: {dim} of input "
                    f"{names[k]!r}, which has shape {list(leaf.shape)}."
                )
            found[k] = None if dim is None else dim % leaf.ndim
    return dict(sorted(found.items()))


def _covers(name: str, leaf: str) -> bool:
    return leaf == name or leaf.startswith(f"{name}.")
