"""Latency and bandwidth from hops."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devplace.run.probe import PairReport
from devplace.run.probe.fit import FASTEST, carried_ns, crossover_bytes, fit_link

SIZES = (1024, 2**14, 2**20, 2**25, 2**28)


@given(st.integers(100, 10**6), st.integers(10**8, 10**12))
def test_an_exact_line_is_found_again(latency_ns: int, bytes_per_s: int) -> None:
    """Times made from a latency and a bandwidth give these back."""
    times = [latency_ns + round(size * 1e9 / bytes_per_s) for size in SIZES]
    fit = fit_link(SIZES, times)
    assert fit.latency_ns == pytest.approx(latency_ns, rel=0.02, abs=20)
    assert fit.bytes_per_s == pytest.approx(bytes_per_s, rel=0.02)
    assert fit.worst < 0.02


@given(st.lists(st.integers(1, 10**9), min_size=5, max_size=5))
def test_any_times_give_a_usable_link(times: list[int]) -> None:
    """Latency is never negative, bandwidth never zero, whatever was measured."""
    fit = fit_link(SIZES, times)
    assert fit.latency_ns >= 0
    assert 1 <= fit.bytes_per_s <= FASTEST


def test_times_that_do_not_grow_are_all_latency() -> None:
    """A link as fast for 256 MiB as for 1 KiB has no time per byte."""
    fit = fit_link(SIZES, [5000] * 5)
    assert (fit.latency_ns, fit.bytes_per_s) == (5000, FASTEST)


def test_too_slow_by_half_and_too_fast_by_half_weigh_the_same() -> None:
    """Of two sizes' times x / 2 and 2 x around a flat line, the line goes through x."""
    fit = fit_link([1000, 1000], [500, 2000])
    assert fit.bytes_per_s == pytest.approx(10**9, rel=0.01)


def pair(kernel: tuple[int, ...], engine: tuple[int, ...]) -> PairReport:
    """A pair with three sizes."""
    hop_ns = {"kernel": kernel, "engine": engine}
    return PairReport(src="cuda:0", dst="cuda:1", sizes=(10, 100, 1000), hop_ns=hop_ns)


def test_each_size_is_priced_as_it_is_carried() -> None:
    """Below the executor's size the kernel's time counts, from it on the engine's."""
    assert carried_ns(pair((1, 2, 3), (7, 8, 9)), 100) == (1, 8, 9)


@pytest.mark.parametrize(
    ("engine", "size"),
    [((9, 9, 9), None), ((9, 9, 3), 1000), ((9, 2, 2), 100), ((1, 9, 1), 1000), ((1, 1, 1), 10)],
)
def test_crossover_is_where_the_engine_stays_ahead(
    engine: tuple[int, ...], size: int | None
) -> None:
    """It is the smallest size from which on the engine is never slower."""
    assert crossover_bytes(pair((1, 2, 3), engine)) == size
