"""Op times on one device model: cached, measured, or estimated."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from devplace.cost.op_signature import OpCall, op_calls
from devplace.cost.op_timing import Timing
from devplace.cost.price_cache import TimingCache
from devplace.cost.reuse import large_inputs
from devplace.errors import CacheError, MeasuringError
from devplace.graph import Captured, OpGraph
from devplace.units import NS_PER_S

I64 = NDArray[np.int64]
Timer = Callable[[OpCall], Timing]
"""Times a call. A `MeasuringError` ends the measuring, any other
error is this call's."""
MAX_SUSTAINED_NS = 250_000_000
"""Of longer steps every second, third, ... op is repeated."""
SlowDown = Callable[[Sequence[OpCall], int], float]
"""Calls of a step in order, and what they take together, ns -> by what factor the step slows down
where it is repeated without a pause."""


def workspaces(graph: Captured) -> I64:
    """Workspace of each op as the graph tells it, bytes. `[V]`"""
    return np.array([op.workspace_bytes for op in graph.ops], np.int64)


def extreme_calls(graph: Captured) -> dict[int, tuple[OpCall, OpCall]]:
    """Op with large inputs -> its call with all of them in the cache, and with none."""
    every = {op: large_inputs(graph, op) for op in range(len(graph.ops))}
    large = {op: found for op, found in every.items() if found}
    warm, cold = op_calls(graph, {}, large), op_calls(graph, large, large)
    return {op: (call, cold[op]) for op, call in warm.items()}


class Priced(NamedTuple):
    """Times (ns) and workspaces (bytes) on one model of device, int64 `[V]` each.

    Attributes:
        compute_ns: With the inputs in the cache that are there in the likely order.
        warm_ns, cold_ns: With all, and with no large inputs in the cache.
        workspace_bytes: Memory an op takes while it runs.
    """

    compute_ns: I64
    warm_ns: I64
    cold_ns: I64
    workspace_bytes: I64


@dataclass(frozen=True)
class Pricing:
    """Pricing on one model of device.

    Attributes:
        seconds: Time to measure, s.
        cache: SQLite file of earlier times; None keeps nothing.
        place: All that times depend on.
        timer: Times a call.
        notes: Takes what the user should know.
        slow_down: Tells how much slower the device is without a pause; None: it is not.
        clock: Time spent on measuring, s.
    """

    seconds: float
    cache: Path | None
    place: str
    timer: Timer
    notes: list[str]
    slow_down: SlowDown | None = None
    clock: Callable[[], float] = time.monotonic

    def price(
        self,
        graph: Captured,
        calls: Mapping[int, OpCall],
        extremes: Mapping[int, tuple[OpCall, OpCall]],
        base_ns: I64,
    ) -> Priced:
        """Times and workspaces of all ops."""
        known = self._known(calls, extremes, base_ns)
        compute_ns, workspace = base_ns.copy(), workspaces(graph)
        missing = []
        for index, call in calls.items():
            if call.key in known:
                compute_ns[index], workspace[index] = known[call.key]
            else:
                missing.append(index)
        _scale(graph, [i for i in calls if calls[i].key in known], missing, base_ns, compute_ns)
        warm_ns, cold_ns = compute_ns.copy(), compute_ns.copy()
        for index, (warm, cold) in extremes.items():
            if calls[index].key in known and warm.key in known and cold.key in known:
                warm_ns[index] = min(compute_ns[index], known[warm.key][0])
                cold_ns[index] = max(compute_ns[index], known[cold.key][0])
        if self.slow_down is not None:
            timed = [calls[i] for i in sorted(calls) if calls[i].key in known]
            whole_ns = sum(known[call.key][0] for call in timed)
            every = 1 + whole_ns // MAX_SUSTAINED_NS
            factor = self._sustained(timed[::every], whole_ns // every)
            some = list(calls)
            for times in (compute_ns, warm_ns, cold_ns):
                times[some] = np.rint(times[some] * factor).astype(np.int64)
        return Priced(compute_ns, warm_ns, cold_ns, workspace)

    def _sustained(self, calls: Sequence[OpCall], step_ns: int) -> float:
        """By what factor the step is slower without a pause; kept on disk as the time that a
        second's work takes."""
        assert self.slow_down is not None
        cache, key = TimingCache(self.cache), f"a second of {[call.key for call in calls]}"
        with suppress(CacheError):  # told before
            for ns, _ in cache.read(self.place, [key]).values():
                return ns / NS_PER_S
        try:
            ns = round(self.slow_down(calls, step_ns) * NS_PER_S)
        except (MeasuringError, RuntimeError) as error:
            self.notes.append(f"How much slower the step is without a pause is not known: {error}")
            return 1.0
        with suppress(CacheError):
            cache.write(self.place, {key: (ns, 0)})
        return ns / NS_PER_S

    def _known(
        self,
        calls: Mapping[int, OpCall],
        extremes: Mapping[int, tuple[OpCall, OpCall]],
        base_ns: I64,
    ) -> dict[str, tuple[int, int]]:
        cache = TimingCache(self.cache)
        until = self.clock() + self.seconds
        usual = _by_share(calls.items(), base_ns)
        others = _by_share(((i, call) for i, pair in extremes.items() for call in pair), base_ns)
        try:
            known = cache.read(self.place, list({**usual, **others}))
        except CacheError as error:
            self.notes.append(str(error))
            cache, known = TimingCache(None), {}
        if cache.dropped:
            self.notes.append(f"{cache.dropped} damaged rows of {cache.path} were measured again.")
        fresh = self._measure([call for key, call in usual.items() if key not in known], until)
        known = {**known, **fresh}
        left = [call for key, call in others.items() if key not in known]
        more = self._measure(left, until, is_extra=True)
        try:
            cache.write(self.place, {**fresh, **more})
        except CacheError as error:
            self.notes.append(str(error))
        return {**known, **more}

    def _measure(
        self, calls: Sequence[OpCall], until: float, is_extra: bool = False
    ) -> dict[str, tuple[int, int]]:
        """Times of calls, most important first, until the time is up; what is missing of extra ones
        is not told."""
        found: dict[str, tuple[int, int]] = {}
        failed: Counter[str] = Counter()
        why = ""
        for call in calls:
            if self.clock() >= until:
                why = f"within {self.seconds:g} s"
                break
            try:
                found[call.key] = self.timer(call)[:2]
            except MeasuringError as error:
                why = f"because {error}"
                break
            except Exception as error:  # whatever an op of the user's raises
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                failed[f"{call.target}: {reason}"] += 1
        if is_extra:
            return found
        if why:
            count = len(calls) - len(found) - failed.total()
            self.notes.append(
                f"{count} of {len(calls)} distinct ops were not measured {why}; they are estimated."
            )
        for what, count in failed.items():
            self.notes.append(
                f"{count} distinct ops could not be measured and are estimated: {what}"
            )
        return found


def _by_share(calls: Iterable[tuple[int, OpCall]], base_ns: I64) -> dict[str, OpCall]:
    """Distinct calls by key, those first whose ops take the most time in all."""
    share: Counter[str] = Counter()
    by_key: dict[str, OpCall] = {}
    for index, call in calls:
        share[call.key] += int(base_ns[index])
        by_key[call.key] = call
    return {key: by_key[key] for key, _ in share.most_common()}


def _scale(
    graph: OpGraph, known: list[int], missing: list[int], base_ns: I64, compute_ns: I64
) -> None:
    """Scale estimates by measured / base of ops of the same target, else of all ops."""
    if not known or not missing:
        return
    ratio = compute_ns[known] / np.maximum(base_ns[known], 1)
    targets = np.array([graph.ops[i].target for i in known])
    overall = float(np.median(ratio))
    for index in missing:
        same = ratio[targets == graph.ops[index].target]
        factor = float(np.median(same)) if len(same) else overall
        compute_ns[index] = max(1, round(int(base_ns[index]) * factor))
