"""One order of all instructions, and pushes that cannot deadlock."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from devplace.graph import OpGraph
from devplace.run.executors import accelerators_used
from devplace.schedule import PlannedTransfer, Schedule, make_schedule
from devplace.schedule.linear import (
    PushJoins,
    come_with_others,
    joined_before,
    lane_of,
    linear_order,
)
from devplace.schedule.rough_times import COPY_ENGINE_BYTES, JOINED_BYTES
from devplace.step_capture import capture
from tests.run.tracing import random_placement, trace


def chains(width: int) -> OpGraph:
    """Vectors that are mixed with their neighbours a few times."""

    def mix(*vectors: torch.Tensor) -> list[torch.Tensor]:
        now = list(vectors)
        for _ in range(4):
            now = [(now[k] + now[k - 1]).sin() for k in range(len(now))]
        return now

    names = [f"v{k}" for k in range(width)]
    sources = {name: ("input", torch.ones(2)) for name in names}
    return trace(mix, sources, [(f"out{k}", "output") for k in range(width)])


def schedule_of(seed: int, num_devices: int) -> Schedule:
    graph = chains(4)
    names = [f"cuda:{k}" for k in range(num_devices)]
    return make_schedule(graph, *random_placement(graph, num_devices, seed), names)


def ends(
    schedule: Schedule,
    joins: dict[int, tuple[int, ...]],
    lane: Callable[[PlannedTransfer], int] = lane_of,
) -> bool:
    """Whether a step ends on devices that run no push while they wait, and pushes last of all."""
    pushed: set[int] = set()
    at = [0] * len(schedule.instructions)
    sent: list[list[int]] = [[] for _ in at]
    moved = True
    while moved:
        moved = False
        for device, instructions in enumerate(schedule.instructions):
            while at[device] < len(instructions):
                kind, _, transfer = instructions[at[device]]
                if kind == "send":
                    sent[device].append(transfer)
                if kind == "receive":
                    for join in joins[transfer]:
                        to = lane(schedule.transfers[join])
                        line = [t for t in sent[device] if lane(schedule.transfers[t]) == to]
                        pushed |= set(line[: line.index(join) + 1])
                    if transfer not in pushed:
                        break
                at[device] += 1
                moved = True
            else:
                moved = moved or not pushed.issuperset(sent[device])
                pushed |= set(sent[device])
    return all(n == len(some) for n, some in zip(at, schedule.instructions, strict=True))


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10_000), num_devices=st.integers(2, 4))
@pytest.mark.slow
def test_steps_end_on_devices_without_concurrency(seed: int, num_devices: int) -> None:
    """Devices that do nothing else while they wait finish every step."""
    schedule = schedule_of(seed, num_devices)
    order = linear_order(schedule)
    assert ends(schedule, joined_before(schedule, order))


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10_000), large=st.sets(st.integers(0, 40)))
@pytest.mark.slow
def test_steps_end_whatever_shares_a_lane(seed: int, large: set[int]) -> None:
    """They do so too when some tensors for all receivers share one stream."""

    def lane(transfer: PlannedTransfer) -> int:
        return -1 if transfer.tensor in large else transfer.dst

    schedule = schedule_of(seed, 3)
    order = linear_order(schedule)
    assert ends(schedule, joined_before(schedule, order, lane), lane)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10_000), large=st.sets(st.integers(0, 40)), direct=st.booleans())
@pytest.mark.slow
def test_what_is_not_waited_for_has_come(seed: int, large: set[int], direct: bool) -> None:
    """Where lanes carry no more than waits force them to, just what has come is not waited for."""

    def lane(transfer: PlannedTransfer) -> int:
        return -1 if transfer.tensor in large else transfer.dst

    def is_pushed(transfer: int) -> bool:
        return direct or transfer % 3 > 0

    schedule = schedule_of(seed, 3)
    lines: dict[tuple[int, int], list[int]] = {}
    for instructions in schedule.instructions:
        for kind, _, t in instructions:
            if kind == "send":
                record = schedule.transfers[t]
                lines.setdefault((record.src, lane(record)), []).append(t)
    found = come_with_others(schedule, is_pushed, lane)
    for instructions in schedule.instructions:
        come: set[int] = set()
        for kind, _, t in instructions:
            if kind != "receive":
                continue
            assert is_pushed(t) or t not in found
            line = lines[schedule.transfers[t].src, lane(schedule.transfers[t])]
            if is_pushed(t):
                assert (t in found) == (t in come)
                come |= set(line[: line.index(t) + 1])


def test_large_tensors_share_the_lane_of_the_engine() -> None:
    """Small tensors for one receiver share a lane, large ones to all receivers another."""
    small, large = COPY_ENGINE_BYTES - 1, COPY_ENGINE_BYTES
    lanes = [lane_of(PlannedTransfer(0, 0, dst, size)) for dst in (1, 2) for size in (small, large)]
    assert lanes == [1, -1, 2, -1]


def test_without_joins_such_devices_hang() -> None:
    """The check above can fail: with no joins some of the same steps never end."""
    found = [schedule_of(seed, 3) for seed in range(20)]
    nothing = [{k: () for k in range(len(schedule.transfers))} for schedule in found]
    assert not all(ends(*pair) for pair in zip(found, nothing, strict=True))


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10_000), num_devices=st.integers(1, 4))
def test_order_is_complete_and_causal(seed: int, num_devices: int) -> None:
    """Every instruction comes once, in its device's order, and receives follow their sends."""
    schedule = schedule_of(seed, num_devices)
    order = linear_order(schedule)
    sent: set[int] = set()
    following = [0] * num_devices
    for device, index in order:
        assert index == following[device]
        following[device] += 1
        kind, _, transfer = schedule.instructions[device][index]
        if kind == "send":
            sent.add(transfer)
        assert kind != "receive" or transfer in sent
    assert following == [len(instructions) for instructions in schedule.instructions]


def wide_chain(width: int) -> OpGraph:
    """A vector that one device makes and the next ones read, then much else to do."""

    def work(x: torch.Tensor) -> list[torch.Tensor]:
        far, near = x + 1, x
        for _ in range(16):
            near = near.sin()
        return [far.cos(), near]

    sources = {"x": ("input", torch.ones(width))}
    return trace(work, sources, [("far", "output"), ("near", "output")])


def test_large_pushes_are_joined_once_they_should_be_over() -> None:
    """A push of 2 MiB is joined before a later op that begins after twice its time; one of 4 KiB
    is left to the next wait."""
    for width, joined in ((2**19, 1), (2**10, 0)):
        graph = wide_chain(width)
        ops = [i for i, op in enumerate(graph.ops) if not op.is_source]
        far = next(i for i in ops if graph.ops[i].target.startswith("aten.cos"))
        order = [[i for i in ops if i != far], [far]]
        device_of = [int(i == far) for i in range(len(graph.ops))]
        schedule = make_schedule(graph, device_of, order, ("cuda:0", "cuda:1"))
        found = PushJoins.of(schedule).when_over
        assert [len(found[0]), len(found[1])] == [joined, 0]
        for index, sends in found[0].items():
            sent = [i for i, (kind, _, t) in enumerate(schedule.instructions[0]) if t in sends]
            assert max(sent) + 1 < index
            assert all(schedule.transfers[t].num_bytes >= JOINED_BYTES for t in sends)


def test_a_step_captured_on_a_cpu_stays_on_logical_devices() -> None:
    """Plans for described GPUs run on logical CPU devices, also where there are GPUs."""
    model = torch.nn.Linear(4, 2)
    graph = capture(model, (torch.randn(3, 4),))
    work = [i for i, op in enumerate(graph.ops) if not op.is_source and not op.is_view]
    schedule = make_schedule(graph, [0] * len(graph.ops), [work], ("cuda:0",))
    assert not accelerators_used(schedule)
