"""The order in which processes meet, and what each has of a schedule."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from devplace.errors import InputError
from devplace.run.ranks.split import part_of, split_devices
from devplace.run.ranks.turns import Turns
from devplace.schedule import Schedule, make_schedule
from devplace.schedule.linear import crosses, linear_order, meeting_order
from devplace.step_capture import capture
from tests.run.models import Unrolled, mean_square
from tests.run.tracing import random_placement

DEVICES = 4


@cache
def small_step() -> Any:
    """An unrolled LSTM of three steps."""
    torch.manual_seed(0)
    model = Unrolled()
    return capture(model, (torch.rand(2, 3, 8),), mean_square, torch.optim.SGD(model.parameters()))


def random_schedule(seed: int) -> Schedule:
    """It on random devices, in a random order."""
    names = [f"cpu:{index}" for index in range(DEVICES)]
    return make_schedule(small_step(), *random_placement(small_step(), DEVICES, seed), names)


def meetings_end(lines: list[list[Any]]) -> bool:
    """Whether processes that meet one after another come to their ends.

    Args:
        lines: Per process its meetings, in order; each is in two lines.
    """
    left = [list(line) for line in lines]
    while any(left):
        heads = [line[0] for line in left if line]
        both = next((head for head in heads if heads.count(head) == 2), None)
        if both is None:
            return False
        for line in left:
            if line and line[0] == both:
                line.pop(0)
    return True


SEEDS = st.integers(0, 10**6)
RANKS = st.lists(st.integers(0, 2), min_size=DEVICES, max_size=DEVICES)


@settings(deadline=None, max_examples=40)
@given(SEEDS, RANKS)
def test_processes_that_meet_in_the_order_never_wait_for_each_other(
    seed: int, rank_of: list[int]
) -> None:
    """Each transfer between processes is in the order once, and all lines come to their ends."""
    schedule = random_schedule(seed)
    order = meeting_order(schedule, rank_of)
    transfers = schedule.transfers
    assert sorted(order) == [t for t, r in enumerate(transfers) if crosses(r, rank_of)]
    ends = [{rank_of[transfers[t].src], rank_of[transfers[t].dst]} for t in order]
    pairs = list(zip(order, ends, strict=True))
    assert meetings_end([[t for t, both in pairs if rank in both] for rank in range(3)])


@settings(deadline=None, max_examples=40)
@given(SEEDS, RANKS)
def test_a_single_thread_comes_to_its_messages_in_the_order(seed: int, rank_of: list[int]) -> None:
    """One that runs its devices' instructions and catches up at sends and at needed tensors."""
    schedule = random_schedule(seed)
    order = meeting_order(schedule, rank_of)
    for rank in range(3):
        mine = [
            t
            for t in order
            if rank in (rank_of[schedule.transfers[t].src], rank_of[schedule.transfers[t].dst])
        ]
        done: list[int] = []
        turns = Turns(mine, done.append)
        for device, index in linear_order(schedule):
            kind, _, transfer = schedule.instructions[device][index]
            if rank_of[device] != rank or transfer not in mine:
                continue
            if kind == "send":
                turns.before_send(transfer)
                done.append(transfer)
            elif kind == "receive":
                turns.until_received(transfer)
                assert transfer in done
        assert done == mine


def test_an_order_of_each_ones_own_can_wait_for_ever() -> None:
    """Receives first, sends then: no two processes ever meet."""
    schedule = random_schedule(0)
    rank_of = [0, 0, 1, 1]
    lines = []
    for rank in range(2):
        is_sent = {
            t: rank_of[schedule.transfers[t].src] == rank for t in range(len(schedule.transfers))
        }
        lines.append(sorted(meeting_order(schedule, rank_of), key=is_sent.__getitem__))
    assert not meetings_end(lines)


@settings(deadline=None, max_examples=40)
@given(SEEDS, RANKS)
def test_parts_make_up_the_whole(seed: int, rank_of: list[int]) -> None:
    """Every instruction, result and copy of a source is one process's."""
    schedule = random_schedule(seed)
    parts = [part_of(schedule, rank_of, rank) for rank in range(3)]
    for device in range(DEVICES):
        for field in ("instructions", "results"):
            found = [getattr(part, field)[device] for part in parts if getattr(part, field)[device]]
            whole = getattr(schedule, field)[device]
            assert found == ([whole] if whole else [])
    for op, devices in schedule.holders.items():
        assert sorted(d for part in parts for d in part.holders.get(op, ())) == list(devices)


@pytest.mark.parametrize(
    ("names", "count", "expected"),
    [
        (["cpu:0", "cpu:1", "cpu:2"], 2, (0, 0, 1)),
        (["cpu:0", "cuda:0", "cuda:1", "cuda:2", "cuda:3"], 2, (0, 0, 0, 1, 1)),
        (["cpu:0", "cuda:0", "cpu:1", "cuda:1"], 2, (0, 0, 1, 1)),
        (["cuda:0", "cuda:1", "cpu:0"], 2, (0, 1, 1)),
        (["cpu:0"], 1, (0,)),
    ],
)
def test_devices_are_split_in_order(
    names: list[str], count: int, expected: tuple[int, ...]
) -> None:
    """Evenly, by GPUs where there are some; a CPU goes with the GPU behind it."""
    assert split_devices(names, count) == expected


@pytest.mark.parametrize(
    ("given_ranks", "count", "message"),
    [
        (None, 3, "there are 3 processes and 2 devices"),
        ({"cpu:0": 0}, 2, "cpu:1 have none"),
        ({"cpu:0": 0, "cpu:1": 2}, 2, "from 0 to 1: 'cpu:1' has 2"),
        ({"cpu:0": 0, "cpu:7": 1}, 2, "got 'cpu:7'"),
    ],
)
def test_wrong_ranks_are_named(given_ranks: Any, count: int, message: str) -> None:
    """Too many processes, and mappings that are none."""
    with pytest.raises(InputError, match=message):
        split_devices(["cpu:0", "cpu:1"], count, given_ranks)


def test_given_ranks_are_kept() -> None:
    """Also where a process has nothing."""
    assert split_devices(["cpu:0", "cpu:1"], 3, {"cpu:1": 0, "cpu:0": 2}) == (2, 0)
