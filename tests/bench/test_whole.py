"""Numbers of files as whole numbers."""

import itertools

import numpy as np
import pytest

from devplace.bench.whole import whole_sizes, whole_times

RANGES = [(0, 60), (40, 60), (-20, 0), (-60, 40), (90, 99)]


def test_usual_times_keep_their_unit():
    """What is whole in the unit asked for, or nearly, stays in it."""
    assert whole_times([[1.5, 2.0], [3.0]], 10) == ([[15, 20], [30]], 10, True)


def test_short_times_get_a_finer_unit():
    """Times far below the unit are told apart, however long those of another column are."""
    (row, _), per_unit, is_close = whole_times([[1.3e-11, 1.4e-11], [1.0, 1.0]], 10**9)
    assert is_close
    assert [value / per_unit for value in row] == pytest.approx([1.3e-11, 1.4e-11], rel=1e-7)


def test_too_far_apart_is_told():
    """Where 64 bits do not reach, rounding is not called small."""
    assert not whole_times([[1e-15], [1e8]], 10**9)[2]


@pytest.mark.parametrize("seed", range(30))
def test_the_same_sets_fit(seed):
    """Of nodes of any size, those fit together that did; fewer only if it says so."""
    rng = np.random.default_rng(seed)
    low, high = RANGES[seed % len(RANGES)]
    drawn = rng.integers(0, 50, 6) * 2.0 ** rng.integers(low, high, 6)
    sizes = [float(size) for size in drawn]
    limit = float(rng.choice([0.0, max(sizes), sum(sizes) / 2, sum(sizes)]))
    found, most, _, is_exact = whole_sizes(sizes, limit)
    assert sum(found) < 2**59
    for picked in itertools.product((0, 1), repeat=6):
        fits = sum(size for size, p in zip(sizes, picked, strict=True) if p) <= limit
        fits_after = sum(size for size, p in zip(found, picked, strict=True) if p) <= most
        assert fits_after == fits or (fits and not is_exact)
