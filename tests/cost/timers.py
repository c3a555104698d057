"""Made-up times in place of measured ones."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest

from devplace.cost.op_signature import OpCall
from devplace.cost.op_timing import Timing
from devplace.cost.profiled import Profiled
from devplace.cost.remote import Spot


class FakeTimer:
    """Stands for a `RemoteTimer`; times calls by a function and notes them."""

    def __init__(self, times: Callable[[OpCall], Timing]) -> None:
        self.times = times
        self.calls: list[OpCall] = []

    def __call__(self, call: OpCall) -> Timing:
        self.calls.append(call)
        return self.times(call)

    clock = staticmethod(time.monotonic)

    def slow_down(self, calls: Sequence[OpCall], step_ns: int) -> float:
        """A factor of 1."""
        return 1.0

    def close(self) -> None:
        """Does nothing."""


def fake_times(
    monkeypatch: pytest.MonkeyPatch, times: Callable[[OpCall], Timing], card: str = ""
) -> FakeTimer:
    """Have all profiles use these times; with `card`, on GPUs too, which need not be here."""
    timer = FakeTimer(times)
    monkeypatch.setattr("devplace.cost.profiled.RemoteTimer", lambda *_: timer)
    if card:
        spot = (card, Spot("cuda:0"))
        monkeypatch.setattr(
            Profiled, "_spot", lambda self, device, *_: spot if device.kind == "gpu" else None
        )
    return timer
