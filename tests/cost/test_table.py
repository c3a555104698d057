"""Cost tables."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from devplace.cost import CostTable
from devplace.errors import InputError

TIMES = np.array([[0, 0], [7, 107], [9, 9]], np.int64)
KERNELS = np.array([[False, False], [False, True], [False, False]])


def test_another_kernel_gap_shifts_what_holds_one() -> None:
    """Only marked times change, by the difference; there and back is the same table."""
    table = CostTable(TIMES, "measured", notes=("n",), kernel_gap_ns=100, kernels=KERNELS)
    more = table.with_kernel_gap(150)
    assert more.compute_ns.tolist() == [[0, 0], [7, 157], [9, 9]]
    assert more.compute_ns.dtype == np.int64
    assert (more.kernel_gap_ns, more.origin, more.notes) == (150, "measured", ("n",))
    assert more.with_kernel_gap(0).compute_ns.tolist() == [[0, 0], [7, 7], [9, 9]]
    assert np.array_equal(more.with_kernel_gap(0).with_kernel_gap(100).compute_ns, TIMES)
    assert np.array_equal(table.compute_ns, TIMES)


def test_costs_without_a_kernel_gap_stay() -> None:
    """Where no time holds a gap, none is added."""
    table = CostTable(TIMES, "roofline")
    assert table.with_kernel_gap(500) is table
    none = replace(table, kernels=np.zeros_like(KERNELS))
    assert np.array_equal(none.with_kernel_gap(500).compute_ns, TIMES)


def test_a_negative_kernel_gap_is_refused() -> None:
    """A gap is a time."""
    with pytest.raises(InputError, match="0 or more, got -1"):
        CostTable(TIMES, "measured").with_kernel_gap(-1)
