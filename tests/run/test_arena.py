"""What a captured step reserves, from what its tensors take."""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from devplace.run.cuda import device_memory
from devplace.run.cuda.arena import (
    SMALL_SPARE_BYTES,
    Arena,
    StepPeaks,
    choose_arenas,
    copied_bytes,
    step_peaks,
)
from devplace.run.cuda.device_memory import allowed_bytes, reserve_arena
from devplace.schedule import Schedule, make_schedule
from devplace.schedule.heap import SMALL_PAGE_BYTES
from devplace.schedule.linear import PushJoins
from devplace.schedule.write_back import write_backs
from tests.run.tracing import snap, trace

KIB, MIB = 2**10, 2**20
NAMES = ("cuda:0", "cuda:1")


def schedule_of(function: Any, devices: dict[str, int] | None = None, **sources: Any) -> Schedule:
    """A function of tensors on one device, or with some of its ops, by name, on the second."""
    graph = trace(function, {k: ("input", v) for k, v in sources.items()}, [("out", "output")])
    placed = [(devices or {}).get(op.name, 0) for op in graph.ops]
    return make_schedule(graph, *snap(graph, placed, 2), NAMES)


def peaks_of(schedule: Schedule, freed: dict[int, tuple[int, ...]] | None = None) -> StepPeaks:
    """Of the first device."""
    return step_peaks(schedule, 0, write_backs(schedule)[0], PushJoins({}, (freed or {}, {})))


@pytest.mark.parametrize("num_elements", [64 * KIB, 512 * KIB])
def test_a_chain_takes_two_tensors_at_once(num_elements: int) -> None:
    """Each op's argument goes when the op is done; the two sizes of tensors count apart."""
    schedule = schedule_of(lambda x: [((x * 2 + 1) * 3).sum()], x=torch.empty(num_elements))
    two = 2 * 4 * num_elements
    is_small = num_elements == 64 * KIB
    assert peaks_of(schedule) == (StepPeaks(two, 0, two) if is_small else StepPeaks(512, two, two))


def test_a_view_keeps_the_memory_of_its_base() -> None:
    """A tensor that only a view of it is read of lives until that view was read."""
    schedule = schedule_of(
        lambda x: [((x * 2).view(256, 256).t() + (x + 1).view(256, 256)).sum()],
        x=torch.empty(64 * KIB),
    )
    assert peaks_of(schedule).small == 3 * 256 * KIB


def test_outputs_of_an_op_go_one_by_one() -> None:
    """Indices that were read are gone while the sorted values stay."""

    def function(x: Any) -> Any:
        values, indices = torch.ops.aten.sort.default(x)
        total = indices.sum()
        return [((values + 1) * 2).sum() + total]

    schedule = schedule_of(function, x=torch.empty(512 * KIB))
    assert peaks_of(schedule).large == (2 + 4) * MIB  # with the indices kept it would be 8


def test_a_pushed_tensor_keeps_its_memory_until_the_push_is_joined() -> None:
    """Joined early, its memory serves the ops that follow."""

    def function(x: Any) -> Any:
        pushed = x * 2
        return [((x + 3) * 4 + 5).sum() + (pushed + 1).sum()]

    schedule = schedule_of(function, {"add_2": 1, "sum_2": 1}, x=torch.empty(64 * KIB))
    sends = [k for k, one in enumerate(schedule.instructions[0]) if one.kind == "send"]
    assert len(sends) == 1
    transfer = schedule.instructions[0][sends[0]].transfer
    assert peaks_of(schedule).small >= 3 * 256 * KIB
    assert peaks_of(schedule, {sends[0] + 1: (transfer,)}).small == 2 * 256 * KIB


def test_what_is_written_over_its_source_takes_nothing() -> None:
    """A new parameter computed in the old one's memory, and the arguments it reads, are free."""
    value = torch.empty(64 * KIB)
    sources = {"p": ("parameter", value), "g": ("input", value)}
    graph = trace(lambda p, g: [p - g], sources, [("p", "parameter")])
    schedule = make_schedule(graph, *snap(graph, [0] * len(graph.ops), 2), NAMES)
    assert peaks_of(schedule) == StepPeaks(0, 0, 0)
    assert copied_bytes(schedule, 0) == 0


def test_results_handed_out_are_counted_once_more() -> None:
    """Their copies lie beside the step; sizes in multiples of 512 bytes."""
    schedule = schedule_of(lambda x: [x * 2], x=torch.empty(130))
    assert copied_bytes(schedule, 0) == 1024
    assert copied_bytes(schedule, 1) == 0


def test_scarce_memory_is_shared_between_large_and_small_tensors() -> None:
    """The piece and the pages of small tensors fit in what is allowed, and leave less than two
    pages; where there is plenty, the piece is what the step takes."""
    rng = random.Random(0)
    for _ in range(500):
        step, small = rng.randrange(400 * MIB), rng.randrange(60 * MIB)
        allowed = rng.randrange(600 * MIB)
        first, *others = choose_arenas(step, small, allowed)
        assert first == Arena(step)
        if not others:
            assert 1.25 * step + small <= allowed
            continue
        (arena,) = others
        assert arena.is_fixed
        pages = -(-(small + SMALL_SPARE_BYTES) // SMALL_PAGE_BYTES) * SMALL_PAGE_BYTES
        assert arena.num_bytes % SMALL_PAGE_BYTES == 0
        if arena.num_bytes:
            assert 0 <= allowed - arena.num_bytes - pages < SMALL_PAGE_BYTES
        else:
            assert allowed < pages + SMALL_PAGE_BYTES


@pytest.mark.parametrize(
    ("free", "fraction", "expected"), [(900, 0.5, 200), (100, 0.5, 100), (900, 0.25, 0)]
)
def test_allowed_is_what_limit_and_device_leave(
    free: int, fraction: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 1000 bytes with 300 reserved: the limit's rest, or what is free if that is less."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 1000))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: fraction)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 300)
    device: Any = type("Device", (), {"torch_device": "cuda:0"})()
    assert allowed_bytes(device) == expected


@pytest.mark.parametrize("is_fixed", [False, True])
def test_an_arena_that_cannot_be_had_is_done_without(
    is_fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request fails quietly, and segments grow again afterwards."""
    told: list[str] = []

    @contextmanager
    def fixed() -> Any:
        told.append("fixed")
        try:
            yield
        finally:
            told.append("growing")

    def refuse(num_bytes: int, **_: Any) -> Any:
        told.append(f"asked for {num_bytes}")
        raise torch.OutOfMemoryError

    monkeypatch.setattr(device_memory, "fixed_segments", fixed)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(torch, "empty", refuse)
    device: Any = type("Device", (), {"torch_device": "cuda:0"})()
    reserve_arena(device, Arena(64 * MIB, is_fixed))
    asked = f"asked for {64 * MIB}"
    assert told == (["fixed", asked, "growing"] if is_fixed else [asked])
    reserve_arena(device, Arena(MIB, is_fixed))  # not worth it
    assert told.count(asked) == len([one for one in told if one.startswith("asked")]) == 1
