"""CPU devices beside GPUs, with threads in place of the GPUs."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from devplace.errors import ExecutionError, InputError, PlanError
from devplace.run.cuda import CudaExecutor
from devplace.run.cuda.device_pass import DevicePass, StateWrites
from devplace.run.cuda.host import HostClock, HostCrew, HostDevice, LateError
from devplace.run.cuda.pinned import OWN_BYTES, PinnedBoard, plain_bytes
from devplace.run.cuda.random_ops import RandomOps
from devplace.run.cuda.routes import check_cpu_ops, find_routes, has_cpu_form, neighbours
from devplace.run.cuda.timeouts import first_cause
from devplace.run.cuda.timestamps import collect
from devplace.run.unplaced import run_unplaced
from devplace.schedule import make_schedule
from devplace.schedule.write_back import write_backs
from tests.run.test_cpu import mixed_graph
from tests.run.tracing import random_placement, snap, trace

NAMES = ("cpu:0", "cuda:0", "cpu:1", "cuda:1")
LIMIT_NS = 100 * 10**9


def net(x, w, c):
    """A training step of a small net."""
    hidden = x @ w.t()
    left, right = hidden.split(2, dim=1)
    values, where = (left.relu() @ right.t()).max(dim=1)
    loss = values.sum() + c.sum() * where.sum()
    return [loss, w - 0.1 * (hidden.t() @ x), hidden[:, 1], c + loss]


def net_graph() -> tuple[Any, dict[int, Any]]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": ("input", (5, 3)), "w": ("parameter", (4, 3)), "c": ("buffer", (2,))}
    sources = {
        name: (kind, torch.randn(shape, generator=generator, dtype=torch.float64))
        for name, (kind, shape) in shapes.items()
    }
    results = [("loss", "loss"), ("w", "parameter"), ("out", "output"), ("c", "buffer")]
    graph = trace(net, sources, results)
    return graph, {index: value for index, (_, value) in enumerate(sources.values())}


class FakeGpu:
    """Does on a thread what a GPU does: waits for flags, computes, sends, and has an end event."""

    def __init__(self, crew: HostCrew, index: int) -> None:
        self.crew, self.index = crew, index
        self.buffers: dict[int, Any] = {}
        self.kept: dict[int, Any] = {}
        self.epoch = 0
        self.silent: set[int] = set()
        self.end = threading.Event()

    def send(self, transfer: int, value: Any) -> None:
        if transfer not in self.silent:
            self.crew.board.send(transfer, value, self.epoch)

    def receive(self, transfer: int) -> Any:
        if self.crew.board.buffers[transfer].numel():
            self.crew.board.wait(transfer, self.epoch, LIMIT_NS)
        return self.crew.board.buffers[transfer].clone()

    def flush(self) -> bool:
        return False

    def join(self, transfer: int) -> None:
        """Every tensor is copied when it is sent."""

    def finish(self) -> None:
        """As `join`."""

    def launch(self, epoch: int) -> Any:
        self.epoch, self.end = epoch, threading.Event()
        threading.Thread(target=self._run, args=(self.end,), daemon=True).start()
        return _Event(self.end)

    def _run(self, end: threading.Event) -> None:
        try:
            schedule = self.crew.schedule
            random = RandomOps({}, set(), torch.device("cpu"), 0)
            device = torch.device("cpu")
            state = StateWrites(write_backs(schedule)[self.index])
            one = DevicePass(schedule, self.index, device, self.buffers, self, random, state)
            for k in range(len(schedule.instructions[self.index])):
                one.run(k)
            self.kept.update((result, value.clone()) for result, value in one.finish())
        finally:
            end.set()


class _Event:
    def __init__(self, end: threading.Event) -> None:
        self._end = end

    def synchronize(self) -> None:
        assert self._end.wait(100)


class Mix:
    """A crew and fake GPUs that run a schedule together."""

    def __init__(self, schedule: Any, limit_ns: int = LIMIT_NS) -> None:
        self.schedule = schedule
        routes = find_routes(schedule, lambda src, dst: False)
        layouts = {
            transfer: torch.empty(
                schedule.graph.tensors[record.tensor].shape,
                dtype=getattr(torch, schedule.graph.tensors[record.tensor].dtype),
            )
            for transfer, record in enumerate(schedule.transfers)
            if routes[transfer] != "inside"
        }
        board = PinnedBoard(layouts, plain_bytes)
        names = schedule.device_names
        replaced = frozenset(schedule.graph.replaced)
        self.hosts = {k: HostDevice(k, replaced) for k, name in enumerate(names) if "cpu" in name}
        self.crew = HostCrew(schedule, self.hosts, board, routes, 0, limit_ns)
        self.gpus = {k: FakeGpu(self.crew, k) for k, name in enumerate(names) if "cuda" in name}
        self.epoch = 0
        self.last: list[Any] = []

    def put(self, values: dict[int, Any]) -> None:
        for op, value in values.items():
            for device in self.schedule.holders[op]:
                if device in self.hosts:
                    self.hosts[device].put(op, value)
                else:
                    self.gpus[device].buffers[op] = value.clone()

    def step(self, clocks: Any = None) -> dict[int, Any]:
        self.epoch += 1
        self.crew.join()
        for event in self.last:
            event.synchronize()  # the real ones meet on their devices
        self.crew.start(self.epoch, self.epoch, self.last, clocks)
        self.last = [gpu.launch(self.epoch) for gpu in self.gpus.values()]
        results = dict(self.crew.results())
        for event, gpu in zip(self.last, self.gpus.values(), strict=True):
            event.synchronize()
            results |= gpu.kept
        return results

    def get(self, op: int) -> Any:
        device = self.schedule.device_of_op[op]
        return {**self.hosts, **self.gpus}[device].buffers[op]


@pytest.fixture
def opened() -> Iterator[list[HostCrew]]:
    """Crews to be closed after the test."""
    crews: list[HostCrew] = []
    yield crews
    for crew in crews:
        crew.close()


@pytest.mark.parametrize("seed", range(6))
def test_cpus_and_gpus_give_the_numbers_of_the_unplaced_step(
    seed: int, opened: list[HostCrew]
) -> None:
    """Three steps on random placements over two CPU devices and two GPUs equal the unplaced one."""
    graph, values = net_graph()
    schedule = make_schedule(graph, *random_placement(graph, 4, seed), NAMES)
    mix = Mix(schedule)
    opened.append(mix.crew)
    mix.put(values)
    expected = dict(values)
    for number in (1, 2, 3):
        found = mix.step()
        assert mix.crew.failure is None
        outputs = run_unplaced(graph, expected, 0, number)
        for index, (result, value) in enumerate(zip(graph.results, outputs, strict=True)):
            if result.replaces >= 0:
                expected[result.replaces] = value
                torch.testing.assert_close(mix.get(result.replaces), value)
            else:
                torch.testing.assert_close(found[index], value)


def two_device_mix(limit_ns: int = LIMIT_NS, fail: bool = False) -> tuple[Mix, dict[int, Any]]:
    """A chain cpu:0 -> cuda:0 -> cpu:0 with state on both."""

    def chain(x: Any, a: Any, b: Any) -> list[Any]:
        first = (x * a).sin()
        second = (first @ b).cos()
        back = second * a
        return [back.sum(), a - back, b - second]

    kinds = {"x": "input", "a": "parameter", "b": "parameter"}
    sources = {name: (kind, torch.eye(4, dtype=torch.float64)) for name, kind in kinds.items()}
    results = [("loss", "loss"), ("a", "parameter"), ("b", "parameter")]
    graph = trace(chain, sources, results)
    on_gpu = {"b", "mm", "cos", "sub_1"}
    devices = [int(op.name in on_gpu) for op in graph.ops]
    schedule = make_schedule(graph, *snap(graph, devices, 2), NAMES[:2])
    mix = Mix(schedule, limit_ns)
    values = {k: torch.rand(4, 4, dtype=torch.float64) for k in range(3)}
    mix.put(values)
    return mix, values


def test_a_gpu_that_never_sends_is_given_up(opened: list[HostCrew]) -> None:
    """A CPU device waits no longer than the limit, names the transfer, and keeps its old state."""
    mix, values = two_device_mix(limit_ns=10**8)
    opened.append(mix.crew)
    up = next(k for k, route in enumerate(mix.crew.routes) if route == "up")
    mix.gpus[1].silent = {up}
    mix.step()
    failure = mix.crew.failure
    assert isinstance(failure, LateError)
    assert failure.transfer == up
    assert torch.equal(mix.get(1), values[1])


def test_a_failed_op_frees_the_gpus_and_is_named(opened: list[HostCrew]) -> None:
    """An op that fails on the CPU is named, no GPU waits on, and the next step works."""
    mix, values = two_device_mix()
    opened.append(mix.crew)
    mix.hosts[0].buffers[0] = torch.rand(3, 5)
    begin = time.monotonic()
    mix.step()
    assert time.monotonic() - begin < LIMIT_NS / 10**9
    assert isinstance(mix.crew.failure, ExecutionError)
    assert "'mul'" in str(mix.crew.failure)
    assert "cpu:0" in str(mix.crew.failure)
    assert torch.equal(mix.get(1), values[1])
    mix.crew.clear()
    mix.put(values)
    mix.step()
    assert mix.crew.failure is None
    assert not torch.equal(mix.get(1), values[1])


def test_a_stopped_step_is_not_a_failure_of_the_cpu(opened: list[HostCrew]) -> None:
    """When another device failed, CPU devices end the step at once and keep their state."""
    mix, values = two_device_mix()
    opened.append(mix.crew)
    mix.crew.start(1, 1)
    mix.crew.stop("a GPU was lost")
    begin = time.monotonic()
    mix.crew.join()
    assert time.monotonic() - begin < LIMIT_NS / 10**9
    assert mix.crew.failure is None
    assert torch.equal(mix.get(1), values[1])


def test_results_outlive_the_buffers(opened: list[HostCrew]) -> None:
    """What a step returned or keeps is not changed by the next steps' transfers."""
    graph, values = net_graph()
    for seed in range(4):
        mix = Mix(make_schedule(graph, *random_placement(graph, 4, seed), NAMES))
        opened.append(mix.crew)
        mix.put(values)
        first = mix.step()
        copies = {index: value.clone() for index, value in first.items()}
        mix.put({0: values[0] + 1})
        mix.step()
        assert all(torch.equal(first[index], copy) for index, copy in copies.items())


def test_a_timed_step_has_ops_and_transfers_of_the_cpu(opened: list[HostCrew]) -> None:
    """Ops on a CPU device follow each other; what it sends begins after the op that made it."""
    mix, _ = two_device_mix()
    opened.append(mix.crew)
    clock = HostClock()
    mix.step({0: clock})
    schedule = mix.schedule
    timeline = collect(schedule, {0: clock}, {})
    names = [op.name for op in schedule.graph.ops]
    on_cpu = [names.index(name) for name in ("mul", "sin", "mul_1", "sub")]
    for op, after in itertools.pairwise(on_cpu):
        assert 0 <= timeline.start_ns[op] <= timeline.finish_ns[op] <= timeline.start_ns[after]
    down = next(k for k, route in enumerate(mix.crew.routes) if route == "down")
    sin = names.index("sin")
    assert timeline.transfer_start_ns[down] >= timeline.finish_ns[sin]
    assert timeline.transfer_start_ns.min() >= 0
    assert timeline.makespan_ns >= timeline.finish_ns.max()


@pytest.mark.parametrize("num_elements", [3, OWN_BYTES // 4])
def test_a_tensor_is_whole_when_its_flag_is_up(num_elements: int) -> None:
    """A reader on another thread never sees a flag before its payload, nor an old one after it."""
    board = PinnedBoard({7: torch.empty(num_elements)}, plain_bytes)
    rounds = 50
    seen = []

    def read() -> None:
        for step in range(1, rounds + 1):
            assert board.wait(7, step, LIMIT_NS)
            seen.append(bool((board.buffers[7] == step).all()))
            taken.set()

    taken = threading.Event()
    reader = threading.Thread(target=read)
    reader.start()
    for step in range(1, rounds + 1):
        board.send(7, torch.full((num_elements,), float(step)), step)
        assert taken.wait(100)
        taken.clear()
    reader.join()
    assert seen == [True] * rounds


def test_waiting_ends_at_the_limit_or_when_told() -> None:
    """Without a flag a wait ends at its limit, and at once if the step was given up."""
    board = PinnedBoard({0: torch.empty(2)}, plain_bytes)
    begin = time.monotonic()
    assert not board.wait(0, 1, 10**7)
    assert not board.wait(0, 1, LIMIT_NS, stop=["failed"])
    assert time.monotonic() - begin < LIMIT_NS / 10**9
    board.post(0, 3)
    assert board.wait(0, 2, 0)
    board.reset()
    assert not board.wait(0, 1, 0)


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(3.0).expand(2, 3),
        torch.tensor(5),
        torch.tensor([True, False, True]),
        torch.empty(0, 3),
        torch.arange(6, dtype=torch.float64)[::2],
        torch.randn(5).to(torch.bfloat16),
        torch.randn(3).to(torch.complex64),
    ],
)
def test_buffers_take_any_layout_and_type(value: Any) -> None:
    """What was sent is read, whatever its strides and dtype; values of other strides too."""
    board = PinnedBoard({0: torch.empty(1), 1: value, 2: value.contiguous()}, plain_bytes)
    for transfer in (1, 2):
        board.send(transfer, value, 1)
        assert torch.equal(board.buffers[transfer], value)
        assert board.holds(board.buffers[transfer][:1] if value.dim() else board.buffers[transfer])
    assert board.buffers[1].stride() == value.stride()
    assert not board.holds(value)


def test_routes_follow_devices_access_and_marks() -> None:
    """GPUs with access go straight unless the ordered pair is marked; CPUs use host memory."""
    graph, _ = net_graph()
    schedule = make_schedule(graph, *random_placement(graph, 4, 0), NAMES)

    def routes_of(access: bool, pairs: Any = frozenset()) -> dict[tuple[str, str], str]:
        found = find_routes(schedule, lambda src, dst: access, pairs)
        return {
            (NAMES[t.src], NAMES[t.dst]): route
            for t, route in zip(schedule.transfers, found, strict=True)
        }

    straight = routes_of(True)
    for (src, dst), route in straight.items():
        kinds = (src.partition(":")[0], dst.partition(":")[0])
        assert (
            route
            == {
                ("cpu", "cpu"): "inside",
                ("cpu", "cuda"): "down",
                ("cuda", "cpu"): "up",
                ("cuda", "cuda"): "peer",
            }[kinds]
        )
    assert {"down", "up", "peer"} <= set(straight.values())
    assert "peer" not in routes_of(False).values()
    assert "staged" in routes_of(False).values()
    marked = next(pair for pair, route in straight.items() if route == "peer")
    assert routes_of(True, frozenset({marked}))[marked] == "staged"
    assert routes_of(True, frozenset({(marked[1], marked[0])}))[marked] == "peer"


def test_runs_of_neighbours_are_cut_where_a_table_jumps() -> None:
    """Transfers stay together only while their places follow each other in every table."""
    assert neighbours([4, 5, 9], {4: 0, 5: 1, 9: 2}) == [[4, 5, 9]]
    assert neighbours([4, 5, 9], {4: 0, 5: 1, 9: 2}, {4: 7, 5: 8, 9: 3}) == [[4, 5], [9]]
    assert neighbours([], {}) == []


def test_random_ops_stay_off_the_cpu() -> None:
    """A random op on a CPU beside a GPU is refused by name; on the GPU it is not."""
    graph, _ = mixed_graph()
    for device, refused in ((0, True), (1, False)):
        devices = [device if op.is_random else 1 for op in graph.ops]
        schedule = make_schedule(graph, *snap(graph, devices, 2), NAMES[:2])
        if refused:
            with pytest.raises(PlanError, match=r"'bernoulli' .*cpu:0 .*random"):
                check_cpu_ops(schedule, has_cpu_form)
        else:
            check_cpu_ops(schedule, has_cpu_form)


def test_ops_without_a_cpu_form_are_refused() -> None:
    """Ops torch has for GPUs only are known, and one on a CPU device is refused by name."""
    aten = torch.ops.aten
    assert not has_cpu_form(aten._thnn_fused_lstm_cell.default)
    assert not has_cpu_form(aten._scaled_dot_product_flash_attention.default)
    assert has_cpu_form(aten.embedding.default)
    assert has_cpu_form(aten.view.default)
    assert has_cpu_form(aten._to_copy.default)
    graph, _ = net_graph()
    schedule = make_schedule(graph, *snap(graph, [0] * len(graph.ops), 1), NAMES[:1])
    with pytest.raises(PlanError, match=r"'relu' \(aten.relu.default.*no CPU form"):
        check_cpu_ops(schedule, lambda target: target is not aten.relu.default)


def cpu_executor(**options: Any) -> tuple[CudaExecutor, Any, dict[int, Any]]:
    """A `CudaExecutor` with CPU devices only, as it runs what no graph can hold."""
    graph, values = net_graph()
    names = ("cpu:0", "cpu:1", "cpu:2")
    schedule = make_schedule(graph, *random_placement(graph, 3, 1), names)
    executor = CudaExecutor(schedule, uses_graphs=False, **options)
    for op, value in values.items():
        executor.put(op, value)
    return executor, graph, values


def test_a_step_without_graphs_runs_cpu_devices_too() -> None:
    """Op by op, CPU devices give the unplaced numbers, keep state, and are timed."""
    executor, graph, values = cpu_executor()
    expected = dict(values)
    for number in (1, 2):
        outcome = executor.step(number, is_timed=number == 2)
        outputs = run_unplaced(graph, expected, 0, number)
        for index, (result, value) in enumerate(zip(graph.results, outputs, strict=True)):
            if result.replaces >= 0:
                expected[result.replaces] = value
                torch.testing.assert_close(executor.get(result.replaces), value)
            else:
                torch.testing.assert_close(outcome.results[index], value)
    assert executor.mode == "eager"
    assert outcome.timeline is not None
    ran = [k for k, op in enumerate(graph.ops) if not op.is_source and not op.is_view]
    assert (outcome.timeline.start_ns[ran] >= 0).all()
    assert (outcome.timeline.finish_ns[ran] >= outcome.timeline.start_ns[ran]).all()
    executor.close()


def test_a_late_tensor_is_told_with_both_ends() -> None:
    """The error names the tensor, its producer's and its consumer's device, and the limit."""
    executor, graph, _ = cpu_executor(wait_limit_s=0.5)

    class Stuck:
        mode = "graph"

        def host_failure(self) -> None:
            return None

        def failed_transfer(self) -> int:
            return 0

    executor._runner = Stuck()  # type: ignore[assignment]
    tensor, src, dst, _ = executor.schedule.transfers[0]
    names = executor.schedule.device_names
    name = graph.tensors[tensor].name
    expected = rf"'{name}' .*from {names[src]} .*to {names[dst]} .*within 0.5 s"
    with pytest.raises(ExecutionError, match=expected):
        executor.synchronize()


def test_the_cause_of_late_tensors_is_told_not_what_followed() -> None:
    """Of two devices that waited in vain for each other, the one that began is blamed."""
    mix, _ = two_device_mix()
    mix.crew.close()
    down = next(k for k, route in enumerate(mix.crew.routes) if route == "down")
    up = next(k for k, route in enumerate(mix.crew.routes) if route == "up")
    for late in ([down, up], [up, down], [down]):
        assert first_cause(mix.schedule, late) == down
    assert first_cause(mix.schedule, [up]) == up


def test_devices_that_are_neither_are_refused() -> None:
    """Ops on something that is neither a GPU nor a CPU are refused by name."""
    graph, _ = net_graph()
    schedule = make_schedule(graph, *snap(graph, [0] * len(graph.ops), 1), ("tpu:0",))
    with pytest.raises(InputError, match="tpu:0"):
        CudaExecutor(schedule)
