"""Constants fitted to measured steps."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from devplace.cost import CostTable
from devplace.errors import InputError
from devplace.machine import Device, Link, Machine
from devplace.problem import Placement, Problem
from devplace.simulator import simulate
from devplace.tune.calibration import (
    CONSTANTS,
    KERNEL_GAP,
    LINK_CONSTANTS,
    Calibration,
    Observation,
    calibrated,
    fit,
    fittable,
)
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


def observations(
    count: int, true: Calibration = TRUE, num_gpus: int = 3, first_seed: int = 0
) -> list[Observation]:
    """Random steps on random placements, measured by the simulator with the true constants."""
    found = []
    for seed in range(first_seed, first_seed + count):
        rng = np.random.default_rng(seed)
        graph, cards = random_graph(rng, 60), machine()
        works = [not op.is_source and not op.is_view for op in graph.ops]
        ns = rng.integers(2_000, 30_000, len(graph.ops)) * np.array(works)
        costs = CostTable(np.repeat(ns[:, None], 3, 1).astype(np.int64), "made up")
        problem = Problem(graph, calibrated(cards, true), costs)
        groups = rng.integers(0, num_gpus, problem.core.tasks.num_groups).astype(np.int32)
        placement = Placement(problem.spaces.op_devices_of_groups(groups))
        timeline = simulate(problem, placement)
        order = tuple(tuple(row) for row in timeline.order)
        devices = tuple(int(d) for d in placement.devices)
        one = Observation(graph, costs, cards, devices, order, 1)
        found.append(replace(one, measured_ns=one.predicted_ns(true)))
    return found


def with_gaps(
    steps: list[Observation], true: Calibration, priced_ns: int = START.kernel_gap_ns
) -> list[Observation]:
    """The steps with a kernel gap at every op that works, in what was measured as in the costs."""
    found = []
    for one in steps:
        costs = replace(one.costs, kernels=one.costs.compute_ns > 0)
        priced = replace(one, costs=costs.with_kernel_gap(priced_ns))
        found.append(replace(priced, measured_ns=priced.predicted_ns(true)))
    return found


@pytest.mark.slow
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


def test_costs_follow_the_kernel_gap() -> None:
    """A prediction shifts the ops that have a gap by the difference, whatever they were priced
    with, and no others."""
    (one,) = with_gaps(observations(1, num_gpus=1), TRUE, 850)
    works = int((one.costs.compute_ns[:, 0] > 0).sum())
    more = msgspec.structs.replace(TRUE, kernel_gap_ns=850 + 300)
    assert one.predicted_ns(more) - one.predicted_ns(TRUE) == 300 * works
    half = one.costs.kernels.copy()
    half[np.flatnonzero(half[:, 0])[: works // 2]] = False
    part = replace(one, costs=replace(one.costs, kernels=half))
    assert part.predicted_ns(more) - part.predicted_ns(TRUE) == 300 * (works - works // 2)
    (other,) = with_gaps(observations(1, num_gpus=1), TRUE, 100)
    assert other.predicted_ns(more) == one.predicted_ns(more)


@pytest.mark.parametrize("gap_ns", [400, 2_000])
def test_the_gap_is_found_on_one_gpu(gap_ns: int) -> None:
    """Four steps on one GPU, measured within 2 %, give the gap; constants of transfers stay."""
    true = msgspec.structs.replace(TRUE, kernel_gap_ns=gap_ns)
    rng = np.random.default_rng(0)
    steps = [
        replace(one, measured_ns=round(one.measured_ns * rng.uniform(0.98, 1.02)))
        for one in with_gaps(observations(4, true, num_gpus=1), true)
    ]
    found = fit(steps, START)
    assert abs(found.kernel_gap_ns - gap_ns) < 250  # ops take 16 us on average, 2 % are 320 ns
    assert (found.num_steps, found.num_gap_steps) == (0, 4)
    before = msgspec.structs.replace(START, kernel_gap_ns=found.kernel_gap_ns)
    assert msgspec.structs.replace(found, num_gap_steps=0, median_error=0, worst_error=0) == before
    exact = fit(with_gaps(observations(4, true, num_gpus=1), true), START)
    assert exact.kernel_gap_ns == gap_ns
    assert exact.worst_error == 0


@pytest.mark.parametrize("gap_ns", [400, 2_000])
def test_a_wrong_gap_alone_changes_no_constant_of_transfers(gap_ns: int) -> None:
    """Where only the gap is off, it alone moves, with steps on several GPUs as well."""
    true = msgspec.structs.replace(TRUE, kernel_gap_ns=gap_ns)
    steps = with_gaps(observations(6, true), true)
    found = fit(steps, TRUE, rounds=25)
    assert abs(found.kernel_gap_ns - gap_ns) <= 0.05 * gap_ns
    for name in LINK_CONSTANTS:
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.1)
    assert found.worst_error < 0.005


@pytest.mark.parametrize("gap_ns", [400, 2_000])
@pytest.mark.slow
def test_gap_and_constants_of_transfers_are_found_together(gap_ns: int) -> None:
    """Both are off: with steps on one GPU and on several the gap is found within 15 %, and steps
    that were not fitted to are predicted far better."""
    true = msgspec.structs.replace(TRUE, kernel_gap_ns=gap_ns)
    singles = with_gaps(observations(2, true, num_gpus=1, first_seed=20), true)
    found = fit([*with_gaps(observations(8, true), true), *singles], START, rounds=150)
    assert (found.num_steps, found.num_gap_steps) == (8, 10)
    assert abs(found.kernel_gap_ns - gap_ns) <= 0.15 * gap_ns
    fresh = with_gaps(observations(4, true, first_seed=8), true)
    before, after = (
        np.median([abs(one.predicted_ns(by) / one.measured_ns - 1) for one in fresh])
        for by in (START, found)
    )
    assert after < 0.5 * before


def test_the_gap_keeps_to_the_largest_change() -> None:
    """A step that took ten times as long does not make the gap larger than four times the first."""
    steps = with_gaps(observations(4, num_gpus=1), TRUE)
    steps = [replace(one, measured_ns=10 * one.measured_ns) for one in steps]
    assert fit(steps, START).kernel_gap_ns == 4 * START.kernel_gap_ns
    steps = [replace(one, measured_ns=one.measured_ns // 100) for one in steps]
    assert fit(steps, START).kernel_gap_ns == math.ceil(START.kernel_gap_ns / 4)


def test_each_constant_needs_its_steps() -> None:
    """Three steps on one GPU give no gap; four on several without known gaps give no gap either."""
    singles = with_gaps(observations(3, num_gpus=1, first_seed=20), TRUE)
    with pytest.raises(InputError, match="at least 4"):
        fit(singles, START)
    plain = observations(4)
    assert fittable([*singles, *plain], CONSTANTS) == LINK_CONSTANTS
    found = fit([*singles, *plain], START, rounds=20)
    assert found == fit(plain, START, rounds=20)
    assert found.kernel_gap_ns == START.kernel_gap_ns
    assert fittable([*singles, *with_gaps(observations(1), TRUE)], CONSTANTS) == (KERNEL_GAP,)
    with pytest.raises(InputError, match="at least 4"):
        fit(plain, START, constants=(KERNEL_GAP,))
