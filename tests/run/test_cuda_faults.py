"""What goes wrong on GPUs ends in a named error, gives memory back, and spoils nothing later.

A test that cannot leave the process able to run a step does its work in another one.
"""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from devplace.errors import DeviceMemoryError, ExecutionError, GraphCaptureError, LateTensorError
from devplace.run.batch_inputs import bind_inputs
from devplace.run.compile import Step, compile_step
from devplace.run.cuda import CudaExecutor, graphs
from devplace.run.cuda.eager import EagerRunner
from devplace.run.cuda.expandable import expandable_segments
from devplace.run.state import ModelState
from devplace.schedule import make_schedule
from devplace.step_capture import capture
from tests.run import gpus
from tests.run.models import Clipped, mean_square
from tests.run.placed import adam
from tests.run.tracing import place_by_module, random_placement

NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
NAMES = ("cuda:0", "cuda:1")
MIB = 2**20

pytestmark = pytest.mark.gpu
two_gpus = gpus.needs(2)


@pytest.fixture(autouse=True)
def _without_limits() -> Iterator[None]:
    """The same weights in every run; no limit on memory afterwards."""
    torch.manual_seed(0)
    yield
    for device in range(NUM_GPUS):
        torch.cuda.set_per_process_memory_fraction(1.0, device)


class Wide(nn.Module):
    """Three layers with 64 MiB of parameters each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(3)))

    def forward(self, x: Any) -> Any:
        return self.layers(x)


def wide() -> tuple[Any, Any, Any, tuple[Any, ...]]:
    """Model and optimizer on the host, graph, batch; 192 MiB of parameters, 384 of state."""
    model = Wide()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batch = (torch.randn(1024, 4096),)
    model.cuda()
    graph = capture(model, (batch[0].cuda(),), mean_square, optimizer)
    model.cpu()
    torch.cuda.empty_cache()
    return model, optimizer, graph, batch


def make(case: tuple[Any, Any, Any, tuple[Any, ...]]) -> Step:
    """A step on one GPU."""
    model, optimizer, graph, _ = case
    placed = place_by_module(graph, lambda op: 0, 1)
    return compile_step(
        model, optimizer, graph, *placed, NAMES[:1], predicted_bytes={"cuda:0": 700 * MIB}
    )


def limit(extra_bytes: int) -> None:
    """Let this process have so much more of cuda:0 than it holds."""
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    share = (torch.cuda.memory_reserved(0) + extra_bytes) / total
    torch.cuda.set_per_process_memory_fraction(share, 0)


def warm(case: tuple[Any, Any, Any, tuple[Any, ...]]) -> int:
    """Run a step once, so that libraries have their buffers; bytes in use after it has gone."""
    step = make(case)
    step(*case[3])
    step.load()  # the model's values are wanted, not the step's
    step.close()
    del step
    gc.collect()
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_allocated(0))


def assert_runs(case: tuple[Any, Any, Any, tuple[Any, ...]]) -> None:
    """Without a limit a new step runs in this process."""
    torch.cuda.set_per_process_memory_fraction(1.0, 0)
    step = make(case)
    assert torch.isfinite(step(*case[3]))
    step.close()


def assert_untouched(model: Any, twin: Any) -> None:
    """Both models have the same values."""
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_too_little_memory_for_the_state_is_named_and_given_back() -> None:
    """Parameters and state that do not fit are refused with device and limit."""
    case = wide()
    before = warm(case)
    limit(300 * MIB)
    with pytest.raises(DeviceMemoryError, match="Holding the state needed more memory than cuda:0"):
        make(case)
    gc.collect()
    assert torch.cuda.memory_allocated(0) <= before
    assert_runs(case)


@pytest.mark.parametrize("when", ["warm-up", "capture", "replay", "timed"])
def test_memory_that_runs_out_is_named_and_given_back(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever it runs out: a typed error, nothing held, the model untouched, then a step runs."""
    case = wide()
    before = warm(case)
    twin = copy.deepcopy(case[0])
    step = make(case)
    if when == "warm-up":
        limit(50 * MIB)  # a gradient takes 64
        what = "Warming up"
    elif when == "capture":
        monkeypatch.setattr(graphs, "reserve_arena", hog)
        what = "Capturing the step"
    elif when == "replay":
        step(*case[3])
        monkeypatch.setattr(graphs.GraphRunner, "_copied", lambda self, *found: hog())
        what = "Step 2"
    else:
        step(*case[3])
        step.is_timed = True
        monkeypatch.setattr(graphs.GraphRunner, "_record", lambda self, *found: hog())
        what = "Step 2"
    with pytest.raises(DeviceMemoryError, match=f"{what} needed more memory than cuda:0") as caught:
        step(*case[3])
    monkeypatch.undo()
    assert caught.value.device == "cuda:0"
    assert caught.value.predicted_bytes == 700 * MIB
    assert caught.value.limit_bytes > 0
    gc.collect()
    assert torch.cuda.memory_allocated(0) <= before
    assert_untouched(case[0], twin)
    with pytest.raises(ExecutionError, match=r"Call step.load\(\)"):
        step(*case[3])
    with pytest.raises(ExecutionError, match=r"Call step.load\(\)"):
        step.sync()
    assert_untouched(case[0], twin)
    torch.cuda.set_per_process_memory_fraction(1.0, 0)
    step.load()
    assert torch.isfinite(step(*case[3]))
    step.sync()
    step.close()
    assert not torch.equal(next(case[0].parameters()), next(twin.parameters()))


def test_a_warm_up_is_tried_again_without_keeping_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first try that finds no memory is not the end; the captured step is right."""
    case = wide()
    step = make(case)
    expected = [float(step(*case[3])) for _ in range(2)]
    step.close()
    step = make(case)
    tries: list[int] = []

    def fail(self: Any, number: int) -> Any:
        tries.append(number)
        return hog()

    monkeypatch.setattr(EagerRunner, "rehearse", fail)
    torch.cuda.set_per_process_memory_fraction(0.5, 0)
    assert [float(step(*case[3])) for _ in range(2)] == expected
    assert tries == [1]
    assert step.executor.mode == "graph"  # type: ignore[attr-defined]
    step.close()


def test_allocator_settings_are_the_users_again() -> None:
    """Segments that grow are only for the time of a warm-up or a capture."""
    where = "cuda:0"
    with expandable_segments(where) as grows:
        held = torch.empty(64 * MIB, dtype=torch.uint8, device=where)
    segments = torch.cuda.memory_snapshot()
    kinds = [s["is_expandable"] for s in segments if s["address"] <= held.data_ptr()]
    assert any(kinds) == grows
    del held
    torch.cuda.empty_cache()
    plain = torch.empty(64 * MIB, dtype=torch.uint8, device=where)
    found = [s for s in torch.cuda.memory_snapshot() if s["address"] == plain.data_ptr()]
    assert [s["is_expandable"] for s in found] == [False]


def hog(*_: Any) -> Any:
    """Ask for more memory than any GPU has."""
    return torch.empty(2**50, dtype=torch.uint8, device="cuda:0")


def test_state_is_not_doubled() -> None:
    """A step's peak is parameters, state, gradients and activations, not two sets of state."""
    case = wide()
    before = warm(case)
    step = make(case)
    step(*case[3])
    (found,) = step.executor.measured_memory()  # type: ignore[attr-defined]
    step.close()
    state, gradients, activations = 3 * 3 * 64 * MIB, 3 * 64 * MIB, 6 * 16 * MIB
    assert found.step_peak_bytes - before < state + gradients + activations + 3 * 64 * MIB
    assert found.reserved_peak_bytes < 1.1 * found.step_peak_bytes


def test_an_executor_closed_after_a_failure_leaves_the_next_one_alone() -> None:
    """A step that failed in its warm-up and was closed does not disturb a new one."""
    case = wide()
    warm(case)
    step = make(case)
    limit(50 * MIB)
    with pytest.raises(DeviceMemoryError):
        step(*case[3])
    step.close()
    assert_runs(case)


def executor_of(num_devices: int, **options: Any) -> CudaExecutor:
    """An executor of a small net with all values put."""
    model, batch = Clipped().cuda(), (torch.randn(8, 4, device="cuda"),)
    graph = capture(model, batch, mean_square, adam(list(model.parameters())))
    schedule = make_schedule(graph, *random_placement(graph, num_devices, 0), NAMES[:num_devices])
    executor = CudaExecutor(schedule, **options)
    values = {**ModelState(graph, model, graph.optimizer).read()}
    values.update(bind_inputs(graph, batch, {}))
    for op, record in enumerate(graph.ops):
        if record.is_source and op not in values:
            values[op] = torch.zeros(graph.tensors[record.outputs[0]].shape)
    for op, value in values.items():
        executor.put(op, value)
    return executor


@two_gpus
def test_a_late_tensor_is_named_with_producer_and_consumer() -> None:
    """A producer that never signals: the error names tensor and both ops; another step runs."""
    from devplace.run.cuda.push import push

    def silent(source: Any, buffer: Any, flag: Any, epoch: Any) -> int:
        return (
            push(source, buffer, flag, epoch) if not torch.cuda.is_current_stream_capturing() else 1
        )

    executor = executor_of(2, push=silent, wait_limit_s=0.2)
    with pytest.raises(LateTensorError, match=r"made by '.*'\) to cuda:. \(read by '"):
        executor.step(1)
    with pytest.raises(ExecutionError, match="was lost"):
        executor.get(next(iter(executor.schedule.graph.replaced)))
    executor.close()
    other = executor_of(2)
    other.step(1)
    assert other.mode == "graph"
    other.close()


def test_a_failing_launch_is_told_and_the_next_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph whose launch fails ends the step; state put again, steps run."""
    executor = executor_of(1)
    executor.step(1)
    runner: Any = executor._runner

    def refuse(*_: Any) -> None:
        raise RuntimeError("launch refused")

    monkeypatch.setattr(runner, "_launch", refuse)
    with pytest.raises(ExecutionError, match="Step 2 failed: launch refused"):
        executor.step(2)
    assert executor.has_lost_state
    monkeypatch.undo()
    executor.close()


def test_only_graphs_can_be_demanded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that no graph can hold is refused if graphs were demanded."""

    def refuse(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs.GraphRunner, "_record", refuse)
    executor = executor_of(1, needs_graphs=True)
    with pytest.raises(GraphCaptureError, match="not permitted when stream is capturing"):
        executor.step(1)
    executor.close()


def test_the_trial_before_a_capture_keeps_no_new_state() -> None:
    """The step tried before the capture changes no parameter."""
    executor = executor_of(1)
    before = {op: executor.get(op).clone() for op in executor.schedule.graph.replaced}
    with torch.no_grad():
        executor._make_eager().rehearse(1)
    assert all(torch.equal(executor.get(op), value) for op, value in before.items())
    executor.close()


def test_an_illegal_access_is_told_and_ends_only_its_process() -> None:
    """A wild pointer in a kernel: the child names a lost device; the parent goes on."""
    script = """
        import torch, triton, triton.language as tl
        from devplace.errors import DeviceLostError
        from tests.run.test_cuda_faults import executor_of, wild

        executor = executor_of(1)
        executor.step(1)
        with torch.cuda.device(0):
            wild[(1,)](executor.get(next(iter(executor.schedule.graph.replaced))))
        for call in (executor.step, lambda _: executor.synchronize(), executor.get):
            try:
                call(2)
            except DeviceLostError as error:
                print("named:", error, flush=True)
        executor.close()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False
    )
    assert done.stdout.count("named:") == 3, done.stdout + done.stderr
    assert "Restart the process" in done.stdout
    executor = executor_of(1)
    executor.step(1)
    executor.close()


if NUM_GPUS:
    import triton
    import triton.language as tl

    @triton.jit
    def wild(pointer):  # type: ignore[no-untyped-def]
        """Write far outside of any allocation."""
        far = tl.arange(0, 32).to(tl.int64) + (1 << 44)
        tl.store(pointer + far, 1.0)
