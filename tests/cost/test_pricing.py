"""Times of ops that go on without a pause."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from devplace.cost import pricing
from devplace.cost.op_signature import OpCall, op_calls
from devplace.cost.op_timing import Timing
from devplace.cost.pricing import Priced, Pricing
from devplace.graph import OpGraph
from devplace.step_capture import capture

NS = {"aten.addmm.default": 9_000, "aten.relu.default": 1_000}


def graph(layers: int = 2) -> OpGraph:
    """Products of one kind, each with an activation."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(layers)))
    return capture(model, (torch.zeros(4, 8),), None, None)


class Card:
    """Times ops by name; a step of more than four ops takes half as long again without a pause.

    Attributes:
        steps: Targets of the calls of every step that was run.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.steps: list[list[str]] = []

    def price(self, step: OpGraph, seconds: float = 9.0) -> Priced:
        """Times of all ops."""
        made = Pricing(seconds, self.path, "a card", self._time, [], self._slow_down)
        return made.price(step, op_calls(step), {}, np.ones(len(step.ops), np.int64))

    def _time(self, call: OpCall) -> Timing:
        return Timing(NS[str(call.target)])

    def _slow_down(self, calls: Sequence[OpCall], step_ns: int) -> float:
        self.steps.append([str(call.target) for call in calls])
        return 1.5 if len(calls) > 4 else 1.0


def by_target(step: OpGraph, priced: Priced) -> dict[str, set[tuple[int, int, int]]]:
    """(usual, warm, cold) times of the ops of each target that does some work."""
    found: dict[str, set[tuple[int, int, int]]] = {}
    times = np.stack([priced.compute_ns, priced.warm_ns, priced.cold_ns], axis=1).tolist()
    for op, row in zip(step.ops, times, strict=True):
        if op.target in NS:
            found.setdefault(op.target, set()).add(tuple(row))
    return found


def test_all_times_are_those_of_a_step_without_a_pause() -> None:
    """Its ops are run in their order, and all times grow by the factor that this gives."""
    card = Card(None)
    assert by_target(graph(2), card.price(graph(2))) == {key: {(ns,) * 3} for key, ns in NS.items()}
    slower = {key: {(ns * 3 // 2,) * 3} for key, ns in NS.items()}
    assert by_target(graph(3), card.price(graph(3))) == slower
    assert card.steps == [[*NS] * 2, [*NS] * 3]


def test_the_factor_is_kept_for_its_step(tmp_path: Path) -> None:
    """The same step is not run again; one with other numbers of the same ops is."""
    card = Card(tmp_path / "times.sqlite")
    first = by_target(graph(3), card.price(graph(3)))
    assert by_target(graph(3), card.price(graph(3))) == first
    assert len(card.steps) == 1
    card.price(graph(2))
    assert len(card.steps) == 2


def test_of_a_long_step_a_part_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fourth op of one that takes three and a half times as long as a round may."""
    whole_ns = 6 * sum(NS.values())
    monkeypatch.setattr(pricing, "MAX_SUSTAINED_NS", whole_ns * 2 // 7)
    card = Card(None)
    card.price(graph(6))
    assert card.steps == [([*NS] * 6)[::4]]
