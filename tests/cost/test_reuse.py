"""What a cache still holds, and the times that makes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.cost.test_profiled import captured
from tests.cost.timers import FakeTimer, fake_times

from devplace.cost import CostTable, op_timing, reuse
from devplace.cost.op_signature import OpCall
from devplace.cost.profiled import Profiled
from devplace.cost.reuse import CacheTimes, cold_inputs, large_inputs
from devplace.graph import OpGraph
from devplace.machine import Machine, presets
from devplace.testing import hand_graph

MIB = 2**20


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.slow
def test_cold_inputs_equal_a_slow_count(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Walking back from each op to the last touch of its input, summing what was touched since."""
    monkeypatch.setattr(reuse, "FRESH_BYTES", 2000)
    monkeypatch.setattr(reuse, "MIN_COLD_BYTES", 100)
    graph = captured("bert-base")
    order = np.random.default_rng(seed).permutation(len(graph.ops)).tolist()
    ran = [op for op in order if not graph.ops[op].is_view and not graph.ops[op].is_source]
    found = cold_inputs(graph, order)
    assert found.keys() == set(ran)
    assert any(found.values())
    assert any(not cold for cold in found.values())
    for at in range(0, len(ran), 7):
        op = ran[at]
        inputs = [t for t in graph.ops[op].inputs if graph.tensors[t].num_bytes >= 100]
        cold = {t for t in inputs if is_cold(graph, ran[:at], t, 2000)}
        assert found[op] == cold


def root(graph: OpGraph, tensor: int) -> int:
    op = graph.ops[graph.producer[tensor]]
    return root(graph, op.alias_of) if op.is_view else tensor


def is_cold(graph: OpGraph, before: list[int], tensor: int, fresh: int) -> bool:
    since = 0
    for op in reversed(before):
        for touched in reversed((*graph.ops[op].inputs, *graph.ops[op].outputs)):
            if root(graph, touched) == root(graph, tensor):
                return since >= fresh
            since += graph.tensors[touched].num_bytes
    return True


GRAPH = hand_graph(
    f"""
    a = input bytes={4 * MIB}
    b = input bytes={12 * MIB}
    c = f(a, b) bytes=8
    d = f(c) bytes={64 * MIB}
    e = f(a, b, d) bytes=8 result=output
    """
)


def test_times_lie_between_warm_and_cold_by_bytes() -> None:
    """By hand: a quarter of the bytes cold is a quarter of the way; what is as usual stays."""
    usual = {2: frozenset({0, 1}), 3: frozenset[int](), 4: frozenset[int]()}
    times = np.array([[0], [0], [70], [9], [50]], np.int64)
    warm = np.array([[0], [0], [20], [9], [50]], np.int64)
    cold = np.array([[0], [0], [70], [9], [130]], np.int64)
    table = CostTable(times, "measured", caching=CacheTimes(usual, warm, cold))
    # alone, c reads both from memory, as usual; then d's 64 MiB push a and b out for e: 16 of 80
    found = table.in_order(GRAPH, [(2, 3, 4)])
    assert found.compute_ns.tolist() == [[0], [0], [70], [9], [50 + 16]]
    assert found.caching is None
    # on another device, e alone reads all from memory
    assert table.in_order(GRAPH, [(4,)]).compute_ns.tolist() == [[0], [0], [70], [9], [130]]
    assert table.compute_ns is times
    assert large_inputs(GRAPH, 4) == {0, 1, 3}


def test_a_kernel_gap_shifts_warm_and_cold_times_too() -> None:
    """The gap comes with the op, whatever the cache holds."""
    times = np.array([[5], [9]], np.int64)
    kernels = np.array([[False], [True]])
    caching = CacheTimes({}, times - 1, times + 1)
    table = CostTable(times, "measured", kernels=kernels, caching=caching)
    more = table.with_kernel_gap(10)
    assert more.caching is not None
    assert more.caching.warm_ns.tolist() == [[4], [18]]
    assert more.caching.cold_ns.tolist() == [[6], [20]]


def test_costs_that_know_no_cache_stay() -> None:
    """Analytic costs are those of any order."""
    table = CostTable(np.ones((5, 1), np.int64), "analytic")
    assert table.in_order(GRAPH, [(4, 3, 2)]) is table


def times(call: OpCall) -> op_timing.Timing:
    """Stands for a GPU: an op takes 1 us, and a ns for each KiB that comes from memory."""
    specs = [*call.args, *call.kwargs.values()]
    cold = [spec for spec in specs if getattr(spec, "is_cold", False)]
    return op_timing.Timing(1000 + sum(4 * int(np.prod(spec.shape)) >> 10 for spec in cold))


@pytest.fixture
def priced(monkeypatch: pytest.MonkeyPatch) -> tuple[OpGraph, Machine, CostTable, FakeTimer]:
    """Products of 4 MiB matrices on a made-up GPU, all ops timed."""
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(12)))
    from devplace.step_capture import capture

    graph = capture(model.to("meta"), (torch.empty(1024, 1024, device="meta"),))
    timer = fake_times(monkeypatch, times, "card")
    machine = presets.get("h200x1")
    return graph, machine, Profiled(cache=None, kernel_gap_ns=0)(graph, machine), timer


def test_an_order_gives_the_times_of_its_cache(
    priced: tuple[OpGraph, Machine, CostTable, FakeTimer],
) -> None:
    """Every distinct op is timed warm, cold and as usual, once each; another order's costs equal
    those measured for it."""
    graph, machine, table, timer = priced
    keys = [call.key for call in timer.calls]
    assert len(keys) == len(set(keys))
    assert table.caching is not None
    gpu = machine.device_names.index("cuda:0")
    works = [op for op, cold in cold_inputs(graph, range(len(graph.ops))).items() if cold]
    assert works
    rows = [[] for _ in machine.devices]
    rows[gpu] = works
    found = table.in_order(graph, rows).compute_ns[:, gpu]
    for op, cold in cold_inputs(graph, works).items():
        read = sum(graph.tensors[tensor].num_bytes >> 10 for tensor in cold)
        assert found[op] == 1000 + read


def test_without_time_for_it_an_order_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where warm and cold times were not reached, the usual one is kept."""
    graph = captured("rnnlm")
    machine = presets.get("h200x1")
    fake_times(monkeypatch, times, "card")
    table = Profiled(seconds=0, cache=None)(graph, machine)
    rows = [list(range(len(graph.ops))) for _ in machine.devices]
    assert np.array_equal(table.in_order(graph, rows).compute_ns, table.compute_ns)
    bare = replace(table, caching=None)
    assert bare.in_order(graph, rows) is bare
