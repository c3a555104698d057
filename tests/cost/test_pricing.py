"""Which ops are measured, how others are estimated, and what a step without a pause takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from devplace.testing import hand_graph

NS = {"aten.addmm.default": 9_000, "aten.relu.default": 1_000}


def graph(layers: int = 2) -> OpGraph:
    """Products of one kind, each with an activation."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(layers)))
    return capture(model, (torch.zeros(4, 8),), None, None)


class Card:
    """Times ops by name; a step of more than four ops takes half as long again without a pause.

    Attributes:
        steps: Targets of the calls of every step that was run.
        times_ns: What its calls take together, as it was told.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.steps: list[list[str]] = []
        self.times_ns: list[int] = []

    def price(self, step: OpGraph, seconds: float = 9.0) -> Priced:
        """Times of all ops."""
        made = Pricing(seconds, self.path, "a card", self._time, [], self._slow_down)
        return made.price(step, op_calls(step), {}, np.ones(len(step.ops), np.int64))

    def _time(self, call: OpCall) -> Timing:
        return Timing(NS[str(call.target)])

    def _slow_down(self, calls: Sequence[OpCall], step_ns: int) -> float:
        self.steps.append([str(call.target) for call in calls])
        self.times_ns.append(step_ns)
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
    assert card.times_ns == [whole_ns // 4]


def call(key: str) -> OpCall:
    """A call that is known by its key."""
    return OpCall(key, (), {}, key)


def priced(
    targets: Sequence[str],
    keys: Sequence[str],
    base_ns: Sequence[int],
    times: Mapping[str, int],
    extremes: Mapping[int, tuple[str, str]] | None = None,
    rounds: int = 99,
) -> tuple[Priced, list[str], list[str]]:
    """Times of ops of these targets, keys and estimates.

    Args:
        times: Measured times by key; what is missing cannot be measured.
        extremes: Op -> keys of its calls with all and with no inputs in the cache.
        rounds: Calls that there is time for.

    Returns:
        The times, keys in the order in which they were measured, and notes.
    """
    step = hand_graph("\n".join(f"o{k} = {target}" for k, target in enumerate(targets)))
    measured: list[str] = []
    notes: list[str] = []

    def time(each: OpCall) -> Timing:
        measured.append(each.key)
        return Timing(times[each.key])

    def clock() -> float:
        return float(len(measured))

    made = Pricing(rounds, None, "a card", time, notes, clock=clock)
    pairs = {op: (call(a), call(b)) for op, (a, b) in (extremes or {}).items()}
    calls = {op: call(key) for op, key in enumerate(keys)}
    return made.price(step, calls, pairs, np.array(base_ns, np.int64)), measured, notes


def test_calls_with_the_largest_share_are_measured_first() -> None:
    """A share is the estimates of all ops with that call, added up: 4 + 4 are more than 6, and 6
    more than three of 1. Time for two leaves the last to its estimate, and that is told."""
    keys, base_ns = ["z", "y", "x", "z", "x", "z"], [1, 6, 4, 1, 4, 1]
    times = {"x": 40, "y": 60, "z": 10}
    found, measured, notes = priced("ffffff", keys, base_ns, times)
    assert measured == ["x", "y", "z"]
    assert found.compute_ns.tolist() == [times[key] for key in keys]
    assert notes == []
    found, measured, notes = priced("ffffff", keys, base_ns, times, rounds=2)
    assert measured == ["x", "y"]
    assert found.compute_ns.tolist() == [10, 60, 40, 10, 40, 10]  # ten times their estimates, too
    assert notes == ["1 of 3 distinct ops were not measured within 2 s; they are estimated."]


def test_what_cannot_be_measured_is_scaled_as_its_like() -> None:
    """By the median of measured / estimated of the same target, else of all: `f` took three times
    its estimate, `g` as long, so another `f` of 20 takes 60 and an `h` of 5 twice 5."""
    found, _, notes = priced("fgfh", "abcd", [10, 10, 20, 5], {"a": 30, "b": 10})
    assert found.compute_ns.tolist() == [30, 10, 60, 10]
    assert [note.split(" could")[0] for note in notes] == ["1 distinct ops"] * 2


def test_an_estimate_is_at_least_a_nanosecond() -> None:
    """Also where its like take nothing, or where it was estimated at nothing itself; and what was
    estimated at nothing counts as one where it was measured."""
    found, *_ = priced("fff", "abc", [10, 2, 0], {"a": 1})
    assert found.compute_ns.tolist() == [1, 1, 1]
    found, *_ = priced("ff", "ab", [0, 2], {"a": 7})
    assert found.compute_ns.tolist() == [7, 14]


def test_the_usual_time_lies_between_warm_and_cold() -> None:
    """Measured times of ops whose inputs are all, or none, in the cache are noisy: a warm one above
    the usual counts as the usual, as does a cold one below. Where one of the two is missing neither
    counts."""
    times = {"a": 10, "b": 10, "c": 10, "warm": 6, "slow": 12, "cold": 15, "fast": 8}
    extremes = {0: ("warm", "cold"), 1: ("slow", "fast"), 2: ("warm", "missing")}
    found, *_ = priced("fff", "abc", [1, 1, 1], times, extremes)
    assert found.compute_ns.tolist() == [10, 10, 10]
    assert found.warm_ns.tolist() == [6, 10, 10]
    assert found.cold_ns.tolist() == [15, 10, 10]
