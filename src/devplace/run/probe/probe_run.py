"""The probe: what it checks and times, and in which order."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Protocol

from devplace.errors import ExecutionError
from devplace.run.probe.channels import Pair, measure_sharing
from devplace.run.probe.report import DeviceReport, PairReport, ProbeReport, StepReport


class Bench(Protocol):
    """Devices that can be measured.

    Attributes:
        names: Their names.
        pairs: The directions to probe.
        switch_bytes: From this size on `engine` carries, if there is such a way.
        tells_sharing: Whether it can say which transfers slow each other down.
    """

    names: tuple[str, ...]
    pairs: tuple[Pair, ...]
    switch_bytes: int
    tells_sharing: bool

    def ways(self, pair: Pair) -> tuple[str, ...]:
        """How tensors can be carried there."""
        ...

    def warm_up(self) -> None:
        """Whatever happens once: contexts, buffers, compiled kernels."""
        ...

    def check(self, pairs: Sequence[Pair], way: str) -> list[str]:
        """Carry random data on all of these at once; what is wrong per pair, or empty texts."""
        ...

    def hops(self, pair: Pair) -> tuple[tuple[int, ...], dict[str, tuple[int, ...]]]:
        """Sizes, and time of a hop per way and size, ns."""
        ...

    def device(self, name: str, peers: Sequence[str]) -> DeviceReport:
        """What transfers cost a device; `peers` are those it may send to."""
        ...

    def together_ns(self, pairs: Sequence[Pair]) -> Sequence[int]:
        """Time of a large transfer on each of these at the same time, ns."""
        ...

    def step(self) -> StepReport | None:
        """What a step costs."""
        ...

    def close(self) -> None:
        """Give back memory and threads."""
        ...


class _Parts:
    """Takes the time of the probe's parts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = round(time.perf_counter() - begin, 4)


def run_probe(bench: Bench, key: dict[str, str]) -> ProbeReport:
    """Check every pair, and measure those that carry what was sent.

    Args:
        bench: The devices.
        key: What the report is true of.

    Raises:
        ExecutionError: The devices themselves failed.
    """
    parts = _Parts()
    try:
        with parts.part("warm-up"):
            bench.warm_up()
        with parts.part("data check"):
            faults = _check(bench)
        with parts.part("pairs"):
            pairs = tuple(_measure(bench, pair, faults[pair]) for pair in bench.pairs)
        good = [(pair.src, pair.dst) for pair in pairs if not pair.faults]
        with parts.part("sharing"):
            sharing = measure_sharing(good, bench.together_ns) if bench.tells_sharing else ()
        with parts.part("overheads"):
            devices = tuple(
                bench.device(name, [dst for src, dst in good if src == name])
                for name in bench.names
            )
        with parts.part("step"):
            step = bench.step()
    except RuntimeError as error:
        raise ExecutionError(
            f"The probe failed: {str(error).splitlines()[0]}. Check the devices with the vendor's "
            "tool, or leave one out with CUDA_VISIBLE_DEVICES."
        ) from error
    finally:
        bench.close()
    return ProbeReport(
        key=key,
        date=datetime.now(UTC).date().isoformat(),
        devices=devices,
        pairs=pairs,
        sharing=sharing,
        step=step,
        switch_bytes=bench.switch_bytes,
        seconds=parts.seconds,
    )


def _check(bench: Bench) -> dict[Pair, list[str]]:
    """Every pair alone, then both directions at once."""
    faults: dict[Pair, list[str]] = {pair: [] for pair in bench.pairs}
    for pair in bench.pairs:
        for way in bench.ways(pair):
            faults[pair] += [text for text in bench.check([pair], way) if text]
    for pair in bench.pairs:
        back = pair[::-1]
        if pair > back or back not in faults or faults[pair] or faults[back]:
            continue
        for way in bench.ways(pair):
            texts = bench.check([pair, back], way)
            for which, text in zip((pair, back), texts, strict=True):
                faults[which] += [f"{text}, with both directions in use"] if text else []
    return faults


def _measure(bench: Bench, pair: Pair, faults: list[str]) -> PairReport:
    src, dst = pair
    if faults:
        return PairReport(src=src, dst=dst, faults=tuple(faults))
    try:
        sizes, hop_ns = bench.hops(pair)
    except ExecutionError as error:
        return PairReport(src=src, dst=dst, faults=(str(error),))
    return PairReport(src=src, dst=dst, sizes=sizes, hop_ns=hop_ns)
