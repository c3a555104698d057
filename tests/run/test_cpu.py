"""Logical CPU devices: same numbers, overlap, errors, random numbers, memory."""

from __future__ import annotations

import gc
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from devplace.errors import ExecutionError
from devplace.run.cpu import CpuExecutor
from devplace.run.mailbox import INLINE_BYTES
from devplace.run.unplaced import run_unplaced
from devplace.schedule import make_schedule
from tests.run.tracing import random_placement, snap, trace

NAMES = ("cpu:0", "cpu:1", "cpu:2")


@pytest.fixture
def open_executors() -> Iterator[list[CpuExecutor]]:
    """Executors to be closed after the test."""
    opened: list[CpuExecutor] = []
    yield opened
    for executor in opened:
        executor.close()


def mixed(x, w, c):
    """Views, halves, several outputs, random ops with and without a generator."""
    hidden = x @ w.t()
    left, right = hidden.split(2, dim=1)
    mask = torch.bernoulli(torch.full_like(left, 0.5))
    values, where = ((left * mask).relu() @ right.t()).max(dim=1)
    noise = torch.rand(3, device=x.device, dtype=x.dtype)
    loss = values.sum() + c.sum() * where.sum() + noise.sum()
    return [loss, w - 0.1 * (hidden.t() @ x), hidden[:, 1], mask]


def mixed_graph() -> tuple[Any, dict[int, Any]]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    sources = {
        "x": ("input", normal(5, 3)),
        "w": ("parameter", normal(4, 3)),
        "c": ("buffer", normal(2)),
    }
    results = [("loss", "loss"), ("w", "parameter"), ("out", "output"), ("mask", "output")]
    graph = trace(mixed, sources, results)
    return graph, {index: value for index, (_, value) in enumerate(sources.values())}


def make(graph: Any, placed: Any, opened: list[CpuExecutor], **options: Any) -> CpuExecutor:
    executor = CpuExecutor(make_schedule(graph, *placed, NAMES), **options)
    opened.append(executor)
    return executor


def load(executor: CpuExecutor, values: dict[int, Any]) -> CpuExecutor:
    for op, value in values.items():
        executor.put(op, value)
    return executor


@pytest.mark.parametrize("seed", range(12))
def test_any_placement_equals_the_unplaced_step_bit_for_bit(
    seed: int, open_executors: list[CpuExecutor]
) -> None:
    """Three steps with every op on a random device and in a random order change no bit."""
    graph, values = mixed_graph()
    executor = make(graph, random_placement(graph, 3, seed), open_executors, seed=7)
    load(executor, values)
    for step in (1, 2, 3):
        outcome = executor.step(step, is_timed=step == 2)
        expected = run_unplaced(graph, values, 7, step)
        values[1] = expected[1]
        assert torch.equal(executor.get(1), expected[1])
        for index in (0, 2, 3):
            assert torch.equal(outcome.results[index], expected[index])


def test_s47_masks_are_fresh_every_step_and_repeat_with_the_seed(
    open_executors: list[CpuExecutor],
) -> None:
    """Three steps draw three masks; the same seed draws them again, another seed others."""
    graph, values = mixed_graph()

    def masks(placement_seed: int, seed: int) -> list[list[float]]:
        placed = random_placement(graph, 3, placement_seed)
        executor = load(make(graph, placed, open_executors, seed=seed), values)
        return [executor.step(step).results[3].flatten().tolist() for step in (1, 2, 3)]

    first = masks(0, 1)
    assert first[0] != first[1] != first[2]
    assert masks(1, 1) == first
    assert masks(0, 2) != first


def test_the_users_random_numbers_are_untouched(open_executors: list[CpuExecutor]) -> None:
    """Random ops leave torch's own generator as it was."""
    graph, values = mixed_graph()
    executor = load(make(graph, random_placement(graph, 3, 0), open_executors), values)
    before = torch.get_rng_state()
    executor.step(1)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_users_thread_count_is_untouched(open_executors: list[CpuExecutor]) -> None:
    """Devices run single-threaded, the user's own thread does not."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        graph, values = mixed_graph()
        load(make(graph, random_placement(graph, 3, 0), open_executors), values).step(1)
        assert torch.get_num_threads() == 2
        seen: list[int] = []
        thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert seen == [2]
    finally:
        torch.set_num_threads(before)


def test_results_need_no_gradient_and_can_be_used_in_autograd(
    open_executors: list[CpuExecutor],
) -> None:
    """A returned tensor is an ordinary one."""
    graph, values = mixed_graph()
    executor = load(make(graph, random_placement(graph, 3, 0), open_executors), values)
    loss = executor.step(1).results[0]
    assert not loss.requires_grad
    weight = torch.ones((), dtype=loss.dtype, requires_grad=True)
    (weight * loss).backward()
    assert torch.equal(weight.grad, loss)


def branches(x, a, b):
    left, right = x @ a, x @ b
    for _ in range(6):
        left, right = left @ a, right @ b
    return [left.sum() + right.sum()]


def branch_graph(size: int) -> tuple[Any, dict[int, Any]]:
    sources = {
        name: (kind, torch.full((size, size), 1.0 / size))
        for name, kind in (("x", "input"), ("a", "buffer"), ("b", "buffer"))
    }
    graph = trace(branches, sources, [("loss", "loss")])
    return graph, {index: value for index, (_, value) in enumerate(sources.values())}


def test_s24_independent_branches_overlap(open_executors: list[CpuExecutor]) -> None:
    """On two devices, the second branch starts before the first has finished."""
    graph, values = branch_graph(600)
    on_second = {f"mm_{k}" for k in range(1, 14, 2)}
    devices = [1 if op.name in on_second else 0 for op in graph.ops]
    executor = load(make(graph, snap(graph, devices, 3), open_executors), values)
    executor.step(1)
    timeline = executor.step(2, is_timed=True).timeline
    assert timeline is not None
    spans = []
    for device in (0, 1):
        mine = [k for k, op in enumerate(graph.ops) if op.name[:2] == "mm" and devices[k] == device]
        spans.append((timeline.start_ns[mine].min(), timeline.finish_ns[mine].max()))
    assert max(spans[0][0], spans[1][0]) < min(spans[0][1], spans[1][1])


def test_large_copies_are_not_made_by_the_computing_thread(
    open_executors: list[CpuExecutor],
) -> None:
    """Above the inline size the copy thread copies, below it the device's own thread."""
    for size, thread in ((8, "devplace cpu:0"), (400, "devplace cpu:0 copies")):
        graph, values = branch_graph(size)
        devices, order = snap(graph, [0 if op.name == "mm" else 1 for op in graph.ops], 3)
        names: list[str] = []

        def copy(value: Any, transfer: Any, names: list[str] = names) -> Any:
            names.append(threading.current_thread().name)
            return value.clone()

        executor = make(graph, (devices, order), open_executors, copy=copy)
        load(executor, values).step(1)
        assert (size * size * 4 > INLINE_BYTES) == thread.endswith("copies")
        assert names == [thread]


def test_the_timeline_covers_ops_and_transfers(open_executors: list[CpuExecutor]) -> None:
    """Every op has a span within the step; consumers start after their transfers arrived."""
    graph, values = mixed_graph()
    executor = load(make(graph, random_placement(graph, 3, 3), open_executors), values)
    outcome = executor.step(1, is_timed=True)
    timeline, schedule = outcome.timeline, executor.schedule
    assert timeline is not None
    for index, op in enumerate(graph.ops):
        if op.is_source or op.is_view:
            assert timeline.start_ns[index] == timeline.finish_ns[index] == -1
        else:
            assert (
                0 <= timeline.start_ns[index] <= timeline.finish_ns[index] <= timeline.makespan_ns
            )
    for index, transfer in enumerate(schedule.transfers):
        assert 0 <= timeline.transfer_start_ns[index] <= timeline.transfer_finish_ns[index]
        producer = graph.ops[graph.producer[transfer.tensor]]
        if not producer.is_source and not producer.is_view:
            finished = timeline.finish_ns[graph.producer[transfer.tensor]]
            assert timeline.transfer_start_ns[index] >= finished
    assert executor.step(2).timeline is None


def failing_graph(bad: list[bool]) -> tuple[Any, dict[int, Any]]:
    """A graph with a custom op that raises when told to."""
    sources = {"x": ("input", torch.ones(3)), "w": ("parameter", torch.ones(3))}
    graph = trace(
        lambda x, w: [(x * w).sigmoid().sum(), w - x.exp()],
        sources,
        [("loss", "loss"), ("w", "parameter")],
    )
    node = next(n for n in graph.program.module.graph.nodes if n.name == "sigmoid")

    def sigmoid(value: Any) -> Any:
        if bad[0]:
            raise ValueError("numbers ran out")
        return torch.sigmoid(value)

    node.target = sigmoid
    return graph, {0: torch.ones(3), 1: torch.ones(3)}


@pytest.mark.parametrize("keeps", [True, False])
def test_a_failing_op_is_named_and_leaves_the_state(
    keeps: bool, open_executors: list[CpuExecutor]
) -> None:
    """The error names op, device and cause; all threads stop, and the next step works."""
    bad = [True]
    graph, values = failing_graph(bad)
    devices, order = snap(graph, [{"sigmoid": 1, "sum_1": 2}.get(o.name, 0) for o in graph.ops], 3)
    executor = make(graph, (devices, order), open_executors, keeps_old_state=keeps)
    load(executor, values)
    message = r"Op 'sigmoid' \(aten.sigmoid.default, forward, the model itself\) failed on cpu:1: "
    with pytest.raises(ExecutionError, match=message + r"numbers ran out\. .*step"):
        executor.step(1)
    bad[0] = False
    if not keeps:
        with pytest.raises(ExecutionError, match="'w' and 0 others have none"):
            executor.step(1)
        load(executor, values)
    assert torch.equal(executor.get(1), torch.ones(3))
    outcome = executor.step(1)
    assert torch.equal(outcome.results[0], torch.ones(3).sigmoid().sum())
    assert torch.allclose(executor.get(1), torch.ones(3) - torch.e)


@pytest.mark.parametrize("size", [4, 400])
def test_a_failing_copy_is_named(size: int, open_executors: list[CpuExecutor]) -> None:
    """A copy that fails, on either thread, names tensor and devices."""
    graph, values = branch_graph(size)
    devices = [0 if op.name == "mm" else 1 for op in graph.ops]

    def copy(value: Any, transfer: Any) -> Any:
        raise OSError("link down")

    executor = make(graph, snap(graph, devices, 3), open_executors, copy=copy)
    load(executor, values)
    with pytest.raises(ExecutionError, match=r"tensor 'mm' .* from cpu:0 to cpu:1 failed: link"):
        executor.step(1)


def test_a_step_without_values_is_refused(open_executors: list[CpuExecutor]) -> None:
    """Running before the sources were put names one of them."""
    graph, _ = mixed_graph()
    executor = make(graph, random_placement(graph, 3, 0), open_executors)
    with pytest.raises(ExecutionError, match="'x' and 2 others have none"):
        executor.step(1)


def test_values_are_freed_after_their_last_use(open_executors: list[CpuExecutor]) -> None:
    """An intermediate is gone before a later op runs, and old parameters if so wanted."""
    graph, values = mixed_graph()
    alive: dict[str, bool] = {}
    seen: dict[str, Any] = {}
    for node in graph.program.module.graph.nodes:
        if node.name in ("mm_1", "sub"):
            original = node.target

            def spy(*args: Any, name: str = node.name, original: Any = original) -> Any:
                made = original(*args)
                seen[name] = weakref.ref(made)
                alive[name] = "mm_1" in seen and seen["mm_1"]() is not None
                return made

            node.target = spy
    placed = snap(graph, [0] * len(graph.ops), 3)
    executor = load(make(graph, placed, open_executors), values)
    executor.step(1)
    assert alive == {"mm_1": True, "sub": False}


def test_an_interrupt_ends_the_step_and_leaves_the_state(
    open_executors: list[CpuExecutor],
) -> None:
    """Ctrl-C during a step stops all devices; nothing is applied and the next step works."""
    graph, values = mixed_graph()
    node = next(n for n in graph.program.module.graph.nodes if n.name == "relu")
    relu, interrupts = node.target, [True]

    def interrupting(value: Any) -> Any:
        if interrupts.pop() if interrupts else False:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            time.sleep(0.2)
        return relu(value)

    node.target = interrupting
    executor = load(make(graph, random_placement(graph, 3, 0), open_executors), values)
    with pytest.raises(KeyboardInterrupt):
        executor.step(1)
    assert torch.equal(executor.get(1), values[1])
    expected = run_unplaced(graph, values, 0, 1)
    assert torch.equal(executor.step(1).results[0], expected[0])
    assert torch.equal(executor.get(1), expected[1])


@pytest.mark.parametrize("keeps", [True, False])
def test_old_parameters_are_freed_only_if_not_kept(
    keeps: bool, open_executors: list[CpuExecutor]
) -> None:
    """Without `keeps_old_state` the old value is gone before the step ends."""
    sources = {"x": ("input", torch.ones(3)), "w": ("parameter", torch.ones(3))}
    graph = trace(
        lambda x, w: [(x.exp() + 1).sum(), w - 1],
        sources,
        [("loss", "loss"), ("w", "parameter")],
    )
    alive: list[bool] = []
    held: list[Any] = []
    node = next(n for n in graph.program.module.graph.nodes if n.name == "sum_1")
    node.target = lambda value: (alive.append(held[0]() is not None), value.sum())[1]
    index = graph.op_index
    order = [[index["sub"], index["exp"], index["add"], index["sum_1"]], [], []]
    placed = ([0] * len(graph.ops), order)
    executor = make(graph, placed, open_executors, keeps_old_state=keeps)
    load(executor, {0: torch.ones(3), 1: torch.ones(3)})
    held.append(weakref.ref(executor.get(1)))
    executor.step(1)
    assert alive == [keeps]


@pytest.mark.slow
def test_threads_end_with_the_executor() -> None:
    """A dropped executor leaves no thread behind."""
    before = set(threading.enumerate())
    graph, values = mixed_graph()
    executor = CpuExecutor(make_schedule(graph, *random_placement(graph, 3, 0), NAMES))
    load(executor, values).step(1)
    started = set(threading.enumerate()) - before
    assert len(started) == 6
    del executor
    gc.collect()
    for thread in started:
        thread.join(timeout=100)
        assert not thread.is_alive()
