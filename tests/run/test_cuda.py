"""Placed steps on CUDA devices."""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from torch import nn

from devplace import workloads
from devplace.errors import ExecutionError, InputError
from devplace.run.batch_inputs import bind_inputs
from devplace.run.check import check_step
from devplace.run.compile import compile_step
from devplace.run.cuda import CudaExecutor
from devplace.run.state import ModelState
from devplace.schedule import make_schedule
from devplace.step_capture import capture
from tests.run import gpus
from tests.run.models import Clipped, Normed, mean_square
from tests.run.placed import adam, largest_difference, sgd, train_eager
from tests.run.tracing import place_by_module, random_placement

NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
NAMES = ("cuda:0", "cuda:1")

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
        return Clipped().cuda(), (torch.randn(8, 4, device="cuda"),), mean_square
    if name == "cnn":
        return Normed(0.3).cuda(), (torch.randn(4, 2, 8, 8, device="cuda"),), mean_square
    workload = workloads.build(name, size="small", device="cuda:0")
    return workload.model, workload.inputs, workload.loss_fn


def place(graph: Any, num_devices: int, how: str) -> Any:
    """Devices and order, at random or cut by module name."""
    if how == "random":
        return random_placement(graph, num_devices, 0)
    return place_by_module(graph, lambda op: len(op.module) % num_devices, num_devices)


@pytest.mark.parametrize("make_optimizer", [sgd, adam])
@pytest.mark.parametrize("name", ["mlp", "cnn", "nmt-2", "bert-base"])
@pytest.mark.parametrize("num_devices", [1, pytest.param(2, marks=two_gpus)])
def test_steps_equal_the_unplaced_one(name: str, make_optimizer: Any, num_devices: int) -> None:
    """Five steps on a random placement give the numbers of the unplaced step, dropout included."""
    model, batch, loss = small(name)
    optimizer = make_optimizer(list(model.parameters()))
    graph = capture(model, batch, loss, optimizer)
    placed = place(graph, num_devices, "random")
    report = check_step(graph, model, optimizer, batch, *placed, NAMES[:num_devices], steps=5)
    assert report.steps == 5
    assert report.is_bit_equal


@pytest.mark.parametrize("num_devices", [1, pytest.param(2, marks=two_gpus)])
def test_new_batches_and_rates_need_no_new_capture(num_devices: int) -> None:
    """Fresh batches and a changing learning rate are followed, as torch.optim does."""
    model = Clipped().double().cuda()
    twin = copy.deepcopy(model)
    optimizer, other = adam(list(model.parameters())), adam(list(twin.parameters()))
    data = [(torch.randn(8, 4, device="cuda", dtype=torch.float64),) for _ in range(5)]
    graph = capture(model, data[0], mean_square, optimizer)
    placed = place(graph, num_devices, "modules")
    step = compile_step(model, optimizer, graph, *placed, NAMES[:num_devices])
    runners = set()
    for k, batch in enumerate(data):
        for group in (*optimizer.param_groups, *other.param_groups):
            group["lr"] = 0.01 * 0.5**k
        loss = float(step(*batch))
        (expected,) = train_eager(twin, other, [batch], mean_square)
        assert loss == pytest.approx(expected, abs=1e-9)
        runners.add(id(step.executor._runner))
    assert step.executor.mode == "graph"
    assert len(runners) == 1
    step.sync()
    step.close()
    assert largest_difference(model, twin) < 1e-9


@pytest.mark.parametrize("num_devices", [1, pytest.param(2, marks=two_gpus)])
def test_a_batch_may_be_written_over_at_once(num_devices: int) -> None:
    """Where steps are not waited for, each reads what its batch held when it was called."""
    model = Clipped().double().cuda()
    twin = copy.deepcopy(model)
    optimizer, other = adam(list(model.parameters())), adam(list(twin.parameters()))
    data = torch.randn(20, 8, 4, device="cuda", dtype=torch.float64)
    x = data[0].clone()
    graph = capture(model, (x,), mean_square, optimizer)
    placed = place(graph, num_devices, "modules")
    names = NAMES[:num_devices]
    with compile_step(model, optimizer, graph, *placed, names, waits=False) as step:
        for each in data:
            x.copy_(each)
            step(x)
        x.zero_()
        step.sync()
    train_eager(twin, other, [(each,) for each in data], mean_square)
    assert largest_difference(model, twin) < 1e-9


def test_s47_masks_are_fresh_in_every_step_and_reproducible() -> None:
    """Dropout differs from step to step, and the same seed gives the same steps."""
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 1)).cuda()
    batch = (torch.randn(16, 8, device="cuda"),)
    graph = capture(model, batch, mean_square)
    placed = place(graph, 1, "random")
    runs = []
    for seed in (0, 0, 1):
        step = compile_step(model, None, graph, *placed, NAMES[:1], seed)
        runs.append([float(step(*batch)) for _ in range(3)])
        step.close()
    assert runs[0] == runs[1]
    assert len({*runs[0], *runs[2]}) == 6


@pytest.mark.parametrize("uses_graphs", [True, False])
@pytest.mark.parametrize("num_devices", [1, pytest.param(2, marks=two_gpus)])
def test_a_timed_step_shows_the_plan(num_devices: int, uses_graphs: bool) -> None:
    """Ops follow each other in plan order, and tensors arrive before they are used."""
    executor = executor_of(num_devices, "random", uses_graphs=uses_graphs)
    executor.step(1)
    timeline = executor.step(2, is_timed=True).timeline
    plain = executor.step(3)
    assert timeline is not None
    schedule = executor.schedule
    for instructions in schedule.instructions:
        calls = [op for kind, op, _ in instructions if kind == "call"]
        ops = [op for op in calls if not schedule.graph.ops[op].is_view]
        for op, following in itertools.pairwise(ops):
            assert 0 <= timeline.start_ns[op] <= timeline.finish_ns[op]
            assert timeline.finish_ns[op] <= timeline.start_ns[following]
    assert (timeline.transfer_start_ns <= timeline.transfer_finish_ns).all()
    assert timeline.finish_ns.max() <= timeline.makespan_ns < 10**9
    assert all(value.isfinite() for value in plain.results.values())
    executor.close()


def executor_of(num_devices: int, how: str = "modules", **options: Any) -> CudaExecutor:
    """An executor of the small net with all values put."""
    model = Clipped().cuda()
    batch = (torch.randn(8, 4, device="cuda"),)
    graph = capture(model, batch, mean_square)
    placed = place(graph, num_devices, how)
    schedule = make_schedule(graph, *placed, NAMES[:num_devices])
    executor = CudaExecutor(schedule, **options)
    for op, value in {**ModelState(graph, model).read(), **bind_inputs(graph, batch, {})}.items():
        executor.put(op, value)
    return executor


@two_gpus
def test_a_producer_that_never_signals_is_named() -> None:
    """A tensor that does not come ends the step in an error that names it, not in a hang."""
    from devplace.run.cuda.push import push

    def silent(source: Any, buffer: Any, flag: Any, epoch: Any) -> int:
        return (
            push(source, buffer, flag, epoch) if not torch.cuda.is_current_stream_capturing() else 1
        )

    executor = executor_of(2, "random", push=silent, wait_limit_s=0.2)
    with pytest.raises(ExecutionError, match=r"Transfer of tensor '.*' .* did not arrive"):
        executor.step(1)
    executor.close()


def test_a_step_that_cannot_be_captured_runs_eagerly() -> None:
    """An op that waits for the host ends the capture; the step still runs and is right."""

    @torch.library.custom_op("devplace_tests::host_square", mutates_args=())
    def host_square(x: torch.Tensor) -> torch.Tensor:
        return (x.cpu() ** 2).to(x.device)

    @host_square.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    class Host(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return host_square(x + 1) * 2

    x = torch.randn(8, device="cuda")
    graph = capture(Host(), (x,))
    step = compile_step(Host(), None, graph, *place(graph, 1, "random"), NAMES[:1])
    for _ in range(2):
        assert torch.allclose(step(x), (x + 1) ** 2 * 2)
    assert step.executor.mode == "eager"
    assert "cannot be captured" in step.executor.reason
    step.close()
    assert torch.randn(3, device="cuda").isfinite().all()


@two_gpus
def test_eager_and_graph_modes_agree() -> None:
    """Both modes give the same loss."""
    losses = []
    for uses_graphs in (True, False):
        torch.manual_seed(0)
        executor = executor_of(2, "random", uses_graphs=uses_graphs)
        losses.append([float(next(iter(executor.step(k).results.values()))) for k in (1, 2)])
        executor.close()
    assert losses[0] == losses[1]


@gpus.needs_apart(2)
def test_s06_devices_outside_the_plan_are_not_touched() -> None:
    """A step on cuda:1 makes no context on cuda:0."""
    script = """
        import ctypes, torch
        from dataclasses import replace
        from tests.run.models import Clipped, mean_square
        from tests.run.tracing import random_placement
        from devplace.step_capture import capture
        from devplace.run.compile import compile_step
        model, x = Clipped(), torch.randn(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        graph = capture(model, (x,), mean_square, optimizer)
        # taken for a capture on CUDA, which would itself make a context on the current device
        graph = replace(graph, program=replace(graph.program, device="cuda"))
        step = compile_step(model, optimizer, graph, *random_placement(graph, 1, 0), ["cuda:1"])
        for _ in range(3):
            print(float(step(x)), step.executor.mode)
        step.sync()
        step.close()
        cuda, flags, active = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint(), ctypes.c_int()
        states = []
        for k in range(2):
            cuda.cuDevicePrimaryCtxGetState(k, ctypes.byref(flags), ctypes.byref(active))
            states.append(active.value)
        print("active", states)
        assert states == [0, 1]
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@gpus.not_on_one
def test_a_device_that_is_not_there_is_refused() -> None:
    """A plan for more GPUs than there are is refused by name."""
    graph = capture(Clipped(), (torch.randn(8, 4),), mean_square)
    name = f"cuda:{NUM_GPUS}"
    schedule = make_schedule(graph, *place(graph, 1, "random"), (name,))
    with pytest.raises(InputError, match=name):
        CudaExecutor(schedule)
