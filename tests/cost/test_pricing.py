"""Times of ops that go on without a pause."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

from devplace.cost.pricing import Priced, Pricing, choose
from devplace.cost.signature import OpCall, op_calls
from devplace.graph import OpGraph
from devplace.graph.capture import capture

NS = {"aten.addmm.default": 9_000, "aten.relu.default": 1_000}


def graph(layers: int = 2) -> OpGraph:
    """Products of one kind, each with an activation."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(layers)))
    return capture(model, (torch.zeros(4, 8),), None, None)


class Card:
    """Times ops by name; products take twice as long where there is no pause.

    Attributes:
        mixes: Targets and times of the calls of every mix that was run.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.mixes: list[dict[str, int]] = []

    def price(self, step: OpGraph) -> Priced:
        """Times of all ops."""
        pricing = Pricing(9.0, self.path, "a card", self._time, [], self._slow_downs)
        return pricing.price(step, op_calls(step), {}, np.ones(len(step.ops), np.int64))

    def _time(self, call: OpCall) -> tuple[int, int]:
        return NS.get(str(call.target), 7), 0

    def _slow_downs(self, calls: Sequence[OpCall], total_ns: Sequence[int]) -> list[float]:
        names = [str(call.target) for call in calls]
        self.mixes.append(dict(zip(names, total_ns, strict=True)))
        return [2.0 if "mm" in name else 1.0 for name in names]


def by_target(step: OpGraph, priced: Priced) -> dict[str, set[tuple[int, int, int]]]:
    """(usual, warm, cold) times of the ops of each target."""
    found: dict[str, set[tuple[int, int, int]]] = {}
    times = np.stack([priced.compute_ns, priced.warm_ns, priced.cold_ns], axis=1).tolist()
    for op, row in zip(step.ops, times, strict=True):
        found.setdefault(op.target, set()).add(tuple(row))
    return found


def test_ops_are_slowed_down_as_their_mix_is() -> None:
    """The call that makes up nine tenths is run, with the time of all its ops, and all its times
    double; others stay."""
    card, step = Card(None), graph()
    found = by_target(step, card.price(step))
    assert card.mixes == [{"aten.addmm.default": 18_000}]
    assert found["aten.addmm.default"] == {(18_000,) * 3}
    assert found["aten.relu.default"] == {(1_000,) * 3}


def test_slow_downs_are_kept_for_their_mix(tmp_path: Path) -> None:
    """The same step is not run again; one with other numbers of the same ops is."""
    card = Card(tmp_path / "times.sqlite")
    first = by_target(graph(), card.price(graph()))
    assert by_target(graph(), card.price(graph())) == first
    assert len(card.mixes) == 1
    card.price(graph(3))
    assert card.mixes[1:] == [{"aten.addmm.default": 27_000}]


def test_a_mix_holds_the_longest_calls() -> None:
    """As many as make up nine tenths of the time, 24 at most, in a fixed order."""
    assert choose({"a": 5, "b": 85, "c": 5, "d": 5}) == ["b", "a"]
    assert choose({str(k): 1 for k in range(100)}) == sorted(map(str, range(100)))[:24]
    assert choose({}) == []
