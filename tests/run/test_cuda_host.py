"""CPU devices beside GPUs in one step, and GPUs that meet in host memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from devplace import workloads
from devplace.errors import ExecutionError, PlanError
from devplace.run.batch_inputs import bind_inputs, bind_scalars
from devplace.run.check import check_step
from devplace.run.compile import Step, compile_step
from devplace.run.cuda import CudaExecutor
from devplace.run.cuda.routes import has_cpu_form
from devplace.run.state import ModelState
from devplace.schedule import make_schedule
from devplace.step_capture import capture
from tests.run import gpus
from tests.run.models import Clipped, Normed, mean_square
from tests.run.placed import adam, largest_difference, sgd, train_eager
from tests.run.tracing import place_by_module, snap

NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
MIXED = ("cpu:0", "cuda:0")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS == 0, reason="needs a CUDA device"),
]
two_gpus = gpus.needs(2)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """The same weights and batches in every run."""
    torch.manual_seed(0)


def small(name: str) -> tuple[Any, Any, Any]:
    """Model, batch and loss on the first GPU."""
    if name == "mlp":
        x = torch.randn(8, 4, device="cuda", dtype=torch.float64)
        return Clipped().double().cuda(), (x,), mean_square
    if name == "cnn":
        x = torch.randn(4, 2, 8, 8, device="cuda", dtype=torch.float64)
        return Normed(0.3).double().cuda(), (x,), mean_square
    workload = workloads.build(name, size="small", device="cuda:0")
    return workload.model, workload.inputs, workload.loss_fn


def mixed_placement(graph: Any, names: tuple[str, ...], seed: int) -> Any:
    """Random devices and order; what a CPU cannot do as a GPU does is on a GPU."""
    rng = np.random.default_rng(seed)
    gpus = [k for k, name in enumerate(names) if name.startswith("cuda")]
    targets: dict[int, list[Any]] = {}
    for node in graph.program.module.graph.nodes:
        if node.op == "call_function":
            targets.setdefault(graph.program.op_of[node.name], []).append(node.target)
    devices = []
    for index, op in enumerate(graph.ops):
        device = int(rng.integers(len(names)))
        if op.is_random or not all(has_cpu_form(target) for target in targets.get(index, ())):
            device = gpus[device % len(gpus)]
        devices.append(device)
    return snap(graph, devices, len(names), rng)


@pytest.mark.parametrize("make_optimizer", [sgd, adam])
@pytest.mark.parametrize("name", ["mlp", "cnn"])
@pytest.mark.parametrize(
    "names",
    [MIXED, ("cuda:0", "cpu:0", "cpu:1"), pytest.param((*MIXED, "cuda:1"), marks=two_gpus)],
)
def test_mixed_steps_equal_the_unplaced_one(
    names: tuple[str, ...], name: str, make_optimizer: Any
) -> None:
    """Five steps over CPUs and GPUs at random give the unplaced numbers, dropout included."""
    model, batch, loss = small(name)
    optimizer = make_optimizer(list(model.parameters()))
    graph = capture(model, batch, loss, optimizer)
    placed = mixed_placement(graph, names, 0)
    report = check_step(graph, model, optimizer, batch, *placed, names, steps=5)
    assert report.steps == 5
    assert report.num_transfers > 3


@pytest.mark.parametrize("name", ["nmt-2", "bert-base"])
def test_mixed_workloads_equal_the_unplaced_step(name: str) -> None:
    """Three steps of real models, every op at random on the CPU or a GPU, give its numbers."""
    model, batch, loss = small(name)
    optimizer = sgd(list(model.parameters()))
    graph = capture(model, batch, loss, optimizer)
    placed = mixed_placement(graph, MIXED, 1)
    report = check_step(graph, model, optimizer, batch, *placed, MIXED, steps=3)
    assert report.steps == 3


def stepper(
    model: Any,
    batch: Any,
    optimizer: Any,
    names: tuple[str, ...],
    place: Callable[[Any], Any],
    **options: Any,
) -> Step:
    """A step with an executor of its own."""
    graph = capture(model, batch, mean_square, optimizer)
    schedule = make_schedule(graph, *place(graph), names)
    return Step(model, optimizer, graph, CudaExecutor(schedule, **options))


def by_layer(graph: Any) -> Any:
    """The first layer on device 0, all else on device 1."""
    return place_by_module(graph, lambda op: int(not op.module.startswith("one")), 2)


@pytest.mark.parametrize("make_optimizer", [sgd, adam])
def test_an_embedding_on_the_cpu_trains_as_on_one_device(make_optimizer: Any) -> None:
    """A table that stays in main memory is looked up and updated there, as torch.optim does."""

    class Ranker(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(20_000, 64)
            self.net = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 1))

        def forward(self, items: Any) -> Any:
            return self.net(self.table(items).mean(1))

    model = Ranker().double()
    twin = copy.deepcopy(model)
    model.net.cuda()
    optimizer = make_optimizer(list(model.parameters()))
    other = make_optimizer(list(twin.parameters()))
    data = [(torch.randint(20_000, (64, 8)),) for _ in range(4)]
    graph = capture(model, (data[0][0].cuda(),), mean_square, optimizer)
    assert graph.program.device == "cuda"
    placed = place_by_module(graph, lambda op: int(not op.module.startswith("table")), 2)
    step = compile_step(model, optimizer, graph, *placed, MIXED)
    losses = [float(step(*batch)) for batch in data]
    assert step.executor.mode == "graph", step.executor.reason
    step.sync()
    step.close()
    assert model.table.weight.device.type == "cpu"
    expected = train_eager(twin, other, data, mean_square)
    assert losses == pytest.approx(expected, rel=1e-9)
    model.net.cpu()
    assert largest_difference(model, twin) < 1e-9


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("uses_graphs", [True, False])
def test_pipelined_steps_and_eager_ones_agree(waits: bool, uses_graphs: bool) -> None:
    """Thirty steps without waiting in between, and without graphs, end in the same weights."""
    runs = []
    for options in ({}, {"waits": waits, "uses_graphs": uses_graphs}):
        torch.manual_seed(0)
        model = Clipped().double().cuda()
        optimizer = sgd(list(model.parameters()))
        x = torch.randn(8, 4, device="cuda", dtype=torch.float64)
        step = stepper(
            model, (x,), optimizer, MIXED, lambda g: mixed_placement(g, MIXED, 3), **options
        )
        losses = [step(x + 0.01 * k) for k in range(30)]
        step.sync()
        step.close()
        runs.append(([float(loss) for loss in losses], model))
    assert runs[0][0] == pytest.approx(runs[1][0], rel=1e-12)
    assert largest_difference(runs[0][1], runs[1][1]) < 1e-12


def test_both_sides_overlap_and_are_timed() -> None:
    """While the CPU works on its branch the GPU works on its own; the timeline shows both.

    The branches share nothing but their input, and the CPU's takes far longer than a GPU needs to
    launch a graph for the first time (some ms).
    """
    length = {"left": 60, "right": 200}

    class Branches(nn.Module):
        def forward(self, x: Any) -> Any:
            left, right = x, x
            for _ in range(length["left"]):
                left = (left @ x).tanh()
            for _ in range(length["right"]):
                right = (right @ x).sin()  # another op, or both branches would be one
            return left + right

    x = torch.randn(600, 600, device="cuda") * 0.05
    graph = capture(Branches(), (x,))
    work = [
        k
        for k, op in enumerate(graph.ops)
        if op.target.startswith(("aten.mm", "aten.tanh", "aten.sin"))
    ]
    on_cpu = set(work[: 2 * length["left"]])
    placed = snap(graph, [int(k not in on_cpu) for k in range(len(graph.ops))], 2)
    schedule = make_schedule(graph, *placed, MIXED)
    executor = CudaExecutor(schedule)
    for op, value in {
        **ModelState(graph, Branches()).read(),
        **bind_inputs(graph, (x,), {}),
    }.items():
        executor.put(op, value)
    executor.step(1)
    timeline = executor.step(2, is_timed=True).timeline
    assert timeline is not None
    ran = [k for k, op in enumerate(graph.ops) if not op.is_source and not op.is_view]
    spans = {}
    for device in (0, 1):
        mine = [k for k in ran if schedule.device_of_op[k] == device]
        assert (timeline.start_ns[mine] >= 0).all()
        assert (timeline.finish_ns[mine] >= timeline.start_ns[mine]).all()
        spans[device] = (timeline.start_ns[mine].min(), timeline.finish_ns[mine].max())
    assert max(spans[0][0], spans[1][0]) < min(spans[0][1], spans[1][1])
    for index, (_, src, _, _) in enumerate(schedule.transfers):
        assert timeline.transfer_start_ns[index] <= timeline.transfer_finish_ns[index]
        assert timeline.transfer_start_ns[index] >= spans[src][0]
    assert timeline.finish_ns.max() <= timeline.makespan_ns < 10 * 10**9
    executor.close()


def mixed_step(**options: Any) -> tuple[Step, Any]:
    """A small step, its first layer on the CPU and its second on the GPU."""
    model = Clipped().cuda()
    x = torch.randn(8, 4, device="cuda")
    return stepper(model, (x,), sgd(list(model.parameters())), MIXED, by_layer, **options), x


def test_a_cpu_that_never_sends_is_named() -> None:
    """A GPU gives up on a tensor of the CPU, the error names it, and the step can go on later."""
    step, x = mixed_step(wait_limit_s=0.3)
    step(x)
    board = step.executor._runner.crew.board
    send = board.send
    board.send = lambda transfer, value, epoch: None
    with pytest.raises(
        ExecutionError, match=r"tensor '.*' .* from cpu:0 .*to cuda:0 .*did not arrive"
    ):
        step(x)
    board.send = send
    step.load()
    assert torch.isfinite(step(x))
    step.close()


def test_a_gpu_that_never_sends_is_named() -> None:
    """The CPU gives up on a tensor of a GPU, and the error names it."""
    step, x = mixed_step(wait_limit_s=0.3)
    step(x)
    crew = step.executor._runner.crew
    crew.board.wait = lambda transfer, epoch, limit_ns, stop: False
    with pytest.raises(
        ExecutionError, match=r"tensor '.*' .* from cuda:0 .*to cpu:0 .*did not arrive"
    ):
        step(x)
    del crew.board.wait
    step.load()
    assert torch.isfinite(step(x))
    step.close()


def test_a_failing_op_on_the_cpu_is_named_at_once() -> None:
    """An op that fails on the CPU ends the step without waiting for the limit of the GPUs."""
    step, x = mixed_step(wait_limit_s=20)
    step(x)
    host = step.executor._hosts[0]
    source = next(op for op in host.buffers if host.buffers[op].dim() == 2)
    kept = host.buffers[source]
    host.buffers[source] = torch.rand(3, 5, 7)
    begin = torch.cuda.Event(enable_timing=True)
    begin.record()
    with pytest.raises(ExecutionError, match=r"Op '.*' .* failed on cpu:0"):
        step(x)
    end = torch.cuda.Event(enable_timing=True)
    end.record()
    end.synchronize()
    assert begin.elapsed_time(end) < 10_000
    host.buffers[source] = kept
    step.load()
    assert torch.isfinite(step(x))
    step.close()


def test_ops_only_gpus_have_are_refused_on_the_cpu() -> None:
    """A fused LSTM cell placed on the CPU is refused before the first step, by name."""
    cell = nn.LSTMCell(8, 8).cuda()

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = cell

        def forward(self, x: Any) -> Any:
            return self.cell(x)[0]

    x = torch.randn(4, 8, device="cuda")
    graph = capture(Wrapped(), (x,))
    names = [op.name for op in graph.ops if "_thnn_fused_lstm_cell" in op.target]
    if not names:
        pytest.skip("this torch captures no fused cell")
    placed = snap(graph, [0 for _ in graph.ops], 2)
    with pytest.raises(PlanError, match=r"_thnn_fused_lstm_cell.*no CPU form"):
        CudaExecutor(make_schedule(graph, *placed, MIXED))


@two_gpus
def test_marked_pairs_go_through_host_memory_and_give_the_same_bits() -> None:
    """With one or both directions kept off the direct link, every loss and weight is the same."""
    pairs = [("cuda:0", "cuda:1"), ("cuda:1", "cuda:0")]
    runs = []
    for staged in ([], pairs[:1], pairs):
        torch.manual_seed(0)
        workload = workloads.build("bert-base", size="small", device="cuda:0")
        optimizer = sgd(list(workload.model.parameters()))
        graph = capture(workload.model, workload.inputs, workload.loss_fn, optimizer)
        gpus.skip_on_one(graph)
        names = ("cuda:0", "cuda:1")
        placed = mixed_placement(graph, names, 5)
        schedule = make_schedule(graph, *placed, names)
        executor = CudaExecutor(schedule, staged_pairs=frozenset(staged))
        assert executor._routes.count("staged") == sum(
            (names[t.src], names[t.dst]) in staged for t in schedule.transfers
        )
        values = ModelState(graph, workload.model, optimizer).read()
        values |= bind_inputs(graph, workload.inputs, {})
        values |= bind_scalars(graph, 1, optimizer.param_groups)
        for op, value in values.items():
            executor.put(op, value)
        results = [executor.step(k + 1).results for k in range(5)]
        assert executor.mode == "graph", executor.reason
        runs.append([value.cpu() for found in results for value in found.values()])
        runs[-1] += [executor.get(op).cpu() for op in sorted(graph.replaced)]
        executor.close()
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))
