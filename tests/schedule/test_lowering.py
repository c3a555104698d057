"""Schedules: what crosses, how often, and which orders are refused."""

from __future__ import annotations

import pytest
import torch

from devplace.errors import PlanError
from devplace.schedule import Schedule, make_schedule
from tests.run.tracing import random_placement, snap, trace

NAMES = ("cpu:0", "cpu:1", "cpu:2")


def chain(x, w):
    hidden = x @ w
    left, right = hidden.split(2, dim=1)
    return [left.relu() + right, w - hidden.t() @ hidden, hidden.t().contiguous()]


@pytest.fixture
def graph():
    """A matmul whose result is read by halves and as a whole; `w` is replaced."""
    sources = {
        "x": ("input", torch.ones(4, 4)),
        "w": ("parameter", torch.ones(4, 4)),
    }
    return trace(chain, sources, [("loss", "loss"), ("w", "parameter"), ("out", "output")])


def place(graph, **device_of):
    devices = [device_of.get(op.name, 0) for op in graph.ops]
    return snap(graph, devices, 3)


def crossing(schedule: Schedule) -> list[tuple[str, int, int]]:
    tensors = schedule.graph.tensors
    return sorted((tensors[t.tensor].name, t.src, t.dst) for t in schedule.transfers)


def test_one_device_needs_no_transfers(graph) -> None:
    """With everything on one device nothing crosses."""
    schedule = make_schedule(graph, *place(graph), NAMES)
    assert schedule.transfers == ()


def test_a_whole_view_crosses_as_its_base_once(graph) -> None:
    """Two readers on one device, one through a transpose, get one copy of the base."""
    schedule = make_schedule(graph, *place(graph, mm_1=1, clone=1), NAMES)
    assert crossing(schedule) == [("mm", 0, 1), ("mm_1", 1, 0)]


def test_a_partial_view_crosses_as_its_own_copy(graph) -> None:
    """A device that reads one half of a split gets that half only."""
    schedule = make_schedule(graph, *place(graph, relu=1), NAMES)
    assert ("getitem", 0, 1) in crossing(schedule)
    half = next(t for t in schedule.transfers if t.dst == 1)
    assert half.num_bytes == 4 * 2 * 4


def test_read_only_sources_never_cross(graph) -> None:
    """The input is held by its readers beforehand; the updated parameter crosses from its home."""
    schedule = make_schedule(graph, *place(graph, mm=2), NAMES)
    names = [name for name, _, _ in crossing(schedule)]
    assert "x_1" not in names
    assert schedule.holders[0] == (2,)
    assert schedule.holders[1] == (0,)


def test_a_new_parameter_returns_to_its_home(graph) -> None:
    """A parameter updated elsewhere crosses back to where the step expects it."""
    schedule = make_schedule(graph, *place(graph, sub=1), NAMES)
    assert ("sub", 1, 0) in crossing(schedule)


@pytest.mark.parametrize("seed", range(10))
def test_no_tensor_crosses_twice_to_one_device(graph, seed: int) -> None:
    """Whatever the placement, there is at most one transfer per tensor and receiver."""
    schedule = make_schedule(graph, *random_placement(graph, 3, seed), NAMES)
    keys = [(t.tensor, t.dst) for t in schedule.transfers]
    assert len(keys) == len(set(keys))
    assert all(t.src != t.dst for t in schedule.transfers)


def test_an_order_against_the_data_is_refused_naming_two_ops(graph) -> None:
    """Two devices that each wait for the other are found before the run."""
    devices, order = place(graph, relu=1, add=0)
    order[0].remove(graph.op_index["mm"])
    order[0].append(graph.op_index["mm"])
    with pytest.raises(PlanError, match=r"never finish: op '\w+' on cpu:\d waits for op '\w+'"):
        make_schedule(graph, devices, order, NAMES)


def test_a_cycle_through_two_devices_is_refused() -> None:
    """Orders that are fine one by one can wait for each other in a ring."""

    def two(x, y):
        a, b = x.relu(), y.sigmoid()
        return [a.exp() + b.tanh(), a, b]

    sources = {"x": ("input", torch.ones(2)), "y": ("input", torch.ones(2))}
    graph = trace(two, sources, [("loss", "loss"), ("a", "output"), ("b", "output")])
    on = {"relu": 0, "tanh": 0, "add": 0, "sigmoid": 1, "exp": 1}
    devices = [on.get(op.name, 0) for op in graph.ops]
    index = graph.op_index
    order = [
        [index["tanh"], index["relu"], index["add"]],
        [index["exp"], index["sigmoid"]],
        [],
    ]
    with pytest.raises(PlanError, match="'tanh' on cpu:0 waits for op 'sigmoid' on cpu:1"):
        make_schedule(graph, devices, order, NAMES)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda d, o: o[0].pop(), "is ordered 0 times, expected 1"),
        (lambda d, o: o[0].append(o[0][0]), "is ordered 2 times, expected 1"),
        (lambda d, o: o[1].append(o[0].pop()), "is ordered on cpu:1 but placed on device 0"),
        (lambda d, o: o.pop(), "2 lists, 3 devices"),
        (lambda d, o: o[0].append(999), "names op 999; ops are whole numbers"),
        (lambda d, o: d.__setitem__(0, 7), "is placed on device 7"),
    ],
)
def test_an_incomplete_order_is_refused(graph, spoil, message: str) -> None:
    """Missing, repeated and misplaced ops are named."""
    devices, order = place(graph)
    spoil(devices, order)
    with pytest.raises(PlanError, match=message):
        make_schedule(graph, devices, order, NAMES)


def test_a_view_apart_from_its_base_is_refused(graph) -> None:
    """A view shares memory, so it cannot sit on another device than its base."""
    devices, order = place(graph)
    devices[graph.op_index["split"]] = 1
    with pytest.raises(PlanError, match="View 'split' is placed on cpu:1, apart from 'mm'"):
        make_schedule(graph, devices, order, NAMES)
