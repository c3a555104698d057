"""Copies between devices keep values and the kind of layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from devplace.run.copies import CACHE_LINE_BYTES, clone_tensor, pack_tensor, shrunk_strides

BASE = torch.arange(240.0).reshape(4, 5, 12)

VIEWS = {
    "dense": BASE,
    "permuted": BASE.permute(2, 0, 1),
    "chunk": BASE.chunk(3, dim=2)[1],
    "column": BASE[:, :, 3],
    "row": BASE[:, 2],
    "stepped": BASE[:, ::2, ::3],
    "expanded part": BASE[:1, 1:3].expand(6, 2, 12),
    "single": BASE[2:3, :, 4:5],
    "scalar": BASE[1, 2, 3],
    "empty": BASE[:0],
    "overlapping": BASE.flatten().unfold(0, 6, 2),
}


@pytest.mark.parametrize("name", VIEWS)
def test_copies_are_equal_and_own_their_memory(name: str) -> None:
    """Same values in other memory, which is hardly larger for each gap."""
    view = VIEWS[name]
    copied = clone_tensor(view)
    assert torch.equal(copied, view)
    if view.numel():
        assert copied.untyped_storage().data_ptr() != view.untyped_storage().data_ptr()
    assert copied.untyped_storage().nbytes() <= 2.3 * view.numel() * view.element_size() + 8


@pytest.mark.parametrize("name", ["permuted", "chunk", "column", "row", "stepped"])
def test_copies_keep_which_dimensions_are_dense(name: str) -> None:
    """Dimensions that merge do so in the copy, others do not."""

    def merges(tensor: Any) -> list[tuple[bool, bool]]:
        strides, sizes = tensor.stride(), tensor.shape
        return [
            (strides[a] == strides[b] * sizes[b], strides[a] == 1)
            for a in range(tensor.dim())
            for b in range(tensor.dim())
            if a != b
        ]

    view = VIEWS[name]
    assert merges(clone_tensor(view)) == merges(view)


@pytest.mark.parametrize(("rows", "apart", "expected"), [(5, 13, 6), (20, 52, 36), (16, 64, 32)])
def test_long_rows_begin_where_they_began_in_their_cache_lines(
    rows: int, apart: int, expected: int
) -> None:
    """A product of rows 256 bytes apart rounds otherwise than of rows 132 apart (MKL, float32)."""
    view = torch.ones(6, apart)[:, :rows]
    assert clone_tensor(view).stride() == (expected, 1)
    assert rows * 4 < CACHE_LINE_BYTES or (expected - apart) * 4 % CACHE_LINE_BYTES == 0


def test_copies_of_pairs_can_be_read_as_complex_numbers() -> None:
    """Of a part of each row, as of queries among queries, keys and values; also turned around."""
    pairs = torch.arange(96.0).view(4, 3, 2, 2, 2)[:, 1]
    for view in (pairs, pairs.transpose(0, 1), pairs[:, :1], pairs[:, 0]):
        copied = clone_tensor(view)
        assert torch.equal(torch.view_as_complex(copied), torch.view_as_complex(view))
    assert clone_tensor(pairs).stride() == (10, 4, 2, 1)


def test_overlapping_strides_are_not_shrunk() -> None:
    """Elements shared other than by repetition, and nothing at all, have no such strides."""
    assert shrunk_strides((118, 6), (2, 1)) is None
    assert shrunk_strides((0, 6), (6, 1)) is None


def test_packed_copies_have_no_gaps_and_keep_the_order() -> None:
    """For GPUs: rows of a chunk lie side by side, transposed tensors stay transposed."""
    wide = torch.arange(40.0).view(4, 10)
    for value in (wide[:, 2:6], wide[:, 2:6].t(), wide.t(), wide[:, :1].expand(4, 3)):
        packed = pack_tensor(value)
        assert torch.equal(packed, value)
    assert pack_tensor(wide[:, 2:6]).stride() == (4, 1)
    assert pack_tensor(wide[:, 2:6].t()).stride() == (1, 4)
