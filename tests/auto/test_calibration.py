"""Constants fitted to measured steps."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from devplace.auto.calibration import Calibration, Observation, calibrated, fit
from devplace.cost import CostTable
from devplace.errors import InputError
from devplace.machine import Device, Link, Machine
from devplace.placers.groups import op_devices
from devplace.problem import Placement, Problem
from devplace.simulator import simulate
from tests.strategies import random_graph

TRUE = Calibration(
    send_overhead_ns=3_000,
    receive_overhead_ns=2_000,
    send_share=0.1,
    receive_share=0.05,
    engine_factor=1.4,
)
START = Calibration(
    send_overhead_ns=1_200,
    receive_overhead_ns=4_000,
    send_share=0.05,
    receive_share=0.05,
    engine_factor=1.0,
)


def machine() -> Machine:
    """Three cards whose links carry 1 byte per ns, large tensors by engine."""
    devices = tuple(
        Device(
            name=f"cuda:{d}",
            kind="gpu",
            memory_bytes=10**12,
            flops_per_s={"float32": 1},
            bytes_per_s=1,
        )
        for d in range(3)
    )
    links = tuple(
        Link(
            src=a.name,
            dst=b.name,
            bytes_per_s=10**9,
            latency_ns=500,
            points=((0, 1_000), (99, 1_100), (100, 3_000), (1_000, 5_000)),
            engine_bytes=100,
        )
        for a in devices
        for b in devices
        if a != b
    )
    return Machine("three", devices, links)


def observations(count: int) -> list[Observation]:
    """Random steps on random placements, measured by the simulator with the true constants."""
    found = []
    for seed in range(count):
        rng = np.random.default_rng(seed)
        graph, cards = random_graph(rng, 60), machine()
        works = [not op.is_source and not op.is_view for op in graph.ops]
        ns = rng.integers(2_000, 30_000, len(graph.ops)) * np.array(works)
        costs = CostTable(np.repeat(ns[:, None], 3, 1).astype(np.int64), "made up")
        problem = Problem(graph, calibrated(cards, TRUE), costs)
        groups = rng.integers(0, 3, problem.core.tasks.num_groups).astype(np.int32)
        placement = Placement(op_devices(problem, groups))
        timeline = simulate(problem, placement)
        order = tuple(tuple(row) for row in timeline.order)
        devices = tuple(int(d) for d in placement.devices)
        one = Observation(graph, costs, cards, devices, order, 1)
        found.append(Observation(graph, costs, cards, devices, order, one.predicted_ns(TRUE)))
    return found


def test_constants_are_found_again() -> None:
    """Steps measured with known constants are predicted far better after the fit than before."""
    steps = observations(8)
    before = [abs(one.predicted_ns(START) / one.measured_ns - 1) for one in steps]
    found = fit(steps, START, rounds=150)
    assert found.num_steps == 8
    assert found.median_error < 0.4 * float(np.median(before))
    assert found.worst_error < max(before)
    fresh = observations(12)[8:]
    after = [abs(one.predicted_ns(found) / one.measured_ns - 1) for one in fresh]
    assert np.median(after) < np.median(
        [abs(one.predicted_ns(START) / one.measured_ns - 1) for one in fresh]
    )


def test_a_fit_is_reproducible() -> None:
    """The same steps and seed give the same constants."""
    steps = observations(4)
    assert fit(steps, START, seed=3, rounds=20) == fit(steps, START, seed=3, rounds=20)


def test_the_right_constants_stay() -> None:
    """A fit that begins at the truth ends there, with no error."""
    found = fit(observations(4), TRUE, rounds=20)
    assert found.worst_error == 0
    plain = msgspec.structs.replace(found, num_steps=0)
    assert plain == TRUE


def test_few_steps_are_refused() -> None:
    """Three steps could mean anything."""
    with pytest.raises(InputError, match="at least 4"):
        fit(observations(3), START)


def test_only_links_between_cards_change() -> None:
    """Overheads and shares are set; times of large transfers grow, those of small ones stay."""
    link = calibrated(machine(), TRUE).path("cuda:0", "cuda:1")
    assert link is not None
    assert link.points == ((0, 1_000), (99, 1_100), (100, 4_200), (1_000, 7_000))
    assert (link.send_overhead_ns, link.receive_share) == (3_000, 0.05)
    assert link.latency_ns == 500
