"""Fit latency and bandwidth to measured hops."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from devplace.run.probe.report import PairReport
from devplace.units import NS_PER_S

FASTEST = 10**15
"""Bytes/s of a link whose time does not grow with size."""
REPEATS = 50


class LinkFit(msgspec.Struct, frozen=True, kw_only=True):
    """Latency and bandwidth that fit a pair's hops.

    Attributes:
        latency_ns: Time of a hop of no bytes, ns.
        bytes_per_s: Bandwidth, bytes/s.
        worst: Largest relative error of latency + bytes / bandwidth over the sizes, of the smaller
            of fit and time.
    """

    latency_ns: int
    bytes_per_s: int
    worst: float


def carried_ns(pair: PairReport, switch_bytes: int) -> tuple[int, ...]:
    """Time per size as the executor carries it: by `engine` from `switch_bytes` on."""
    ways = pair.hop_ns
    if "kernel" in ways and "engine" in ways:
        rows = zip(pair.sizes, ways["kernel"], ways["engine"], strict=True)
        return tuple(engine if size >= switch_bytes else kernel for size, kernel, engine in rows)
    return next(iter(ways.values()), ())


def crossover_bytes(pair: PairReport) -> int | None:
    """Smallest size tried from which on the copy engine is never slower than the kernel.

    Returns:
        None if the kernel is faster at the largest size, or one of them was not measured.
    """
    kernel, engine = pair.hop_ns.get("kernel"), pair.hop_ns.get("engine")
    if kernel is None or engine is None:
        return None
    found = None
    for size, by_kernel, by_engine in reversed(list(zip(pair.sizes, kernel, engine, strict=True))):
        if by_engine > by_kernel:
            break
        found = size
    return found


def fit_link(sizes: Sequence[int], hop_ns: Sequence[int]) -> LinkFit:
    """Least squares of `latency + bytes / bandwidth` in relative error; neither is negative.

    Minimises the sum of `log(fit / time)^2`, which minds half a time as much as twice a time, by
    repeated weighted least squares.

    Args:
        sizes: Bytes, at least one above 0.
        hop_ns: Time of a hop of each size, ns, above 0.

    Example:
        >>> fit = fit_link([1000, 10**6, 10**8], [5010, 15_000, 1_005_000])
        >>> fit.latency_ns, fit.bytes_per_s
        (5000, 100000000000)
    """
    fitted = [float(time) for time in hop_ns]
    latency, per_byte = 0.0, 0.0
    for _ in range(REPEATS):
        weights = [_weight(now, time) for now, time in zip(fitted, hop_ns, strict=True)]
        latency, per_byte = _weighted_line(sizes, hop_ns, weights)
        fitted = [max(1.0, latency + size * per_byte) for size in sizes]
    rate = FASTEST if per_byte * FASTEST <= NS_PER_S else NS_PER_S / per_byte
    ratios = [now / time for now, time in zip(fitted, hop_ns, strict=True)]
    worst = max(max(ratio, 1 / ratio) for ratio in ratios) - 1
    return LinkFit(latency_ns=round(latency), bytes_per_s=max(1, round(rate)), worst=worst)


def _weight(fitted: float, time: float) -> float:
    """With it `fitted - time` counts as the slope of `log(fitted / time)^2` does."""
    near = abs(fitted / time - 1) < 1e-6
    return 1 / fitted**2 if near else math.log(fitted / time) / ((fitted - time) * fitted)


def _weighted_line(
    sizes: Sequence[int], times: Sequence[int], weights: Sequence[float]
) -> tuple[float, float]:
    """Intercept and slope of the weighted least squares line, neither negative."""
    rows = list(zip(sizes, times, weights, strict=True))
    w = sum(weight for _, _, weight in rows)
    ws = sum(weight * size for size, _, weight in rows)
    wss = sum(weight * size * size for size, _, weight in rows)
    wt = sum(weight * time for _, time, weight in rows)
    wst = sum(weight * size * time for size, time, weight in rows)
    determinant = w * wss - ws * ws
    if determinant <= 1e-12 * w * wss:  # one size only
        return 0.0, wst / wss if wss else 0.0
    latency = (wt * wss - wst * ws) / determinant
    per_byte = (wst * w - wt * ws) / determinant
    if latency < 0:
        return 0.0, wst / wss
    return (latency, per_byte) if per_byte > 0 else (wt / w, 0.0)
