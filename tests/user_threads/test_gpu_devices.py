"""What users met on GPUs: which device runs what, at the same time as what, in whose memory."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.run import gpus
from tests.run.models import Normed, mean_square, next_token
from tests.run.placed import adam, sgd
from tests.user_threads.helpers import mlp, priced
from torch import nn

import devplace as dp
from devplace.machine import detect
from devplace.run.compile import compile_step
from devplace.step_capture import capture

pytestmark = gpus.MARKS
two_gpus = gpus.needs_apart(2)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """The same weights and batches in every run."""
    torch.manual_seed(0)


def normal(*shape: int) -> tuple[Any, ...]:
    return (torch.randn(shape, device=gpus.HOME),)


def this_device() -> int:
    return torch.cuda.current_device() if torch.cuda.is_available() else 1


@two_gpus
def test_s55_ops_see_the_device_they_run_on() -> None:
    """A custom kernel that asks for the current device sees the planned one, forward and
    backward."""

    @torch.library.custom_op("devplace_tests::where_am_i", mutates_args=())
    def where_am_i(x: torch.Tensor) -> torch.Tensor:
        return torch.full_like(x, this_device())

    where_am_i.register_fake(torch.empty_like)
    where_am_i.register_autograd(lambda ctx, grad: where_am_i(grad))

    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return where_am_i(self.layer(x))

    model = Asking().to(gpus.HOME)
    before = model.layer.bias.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    batch = normal(3, 4)
    graph = capture(model, batch, lambda model, x: model(x).sum() / 12, optimizer)
    placed = gpus.modules_on({}, default=1)(graph, 2)
    step = compile_step(model, optimizer, graph, *placed, gpus.names(2))
    assert float(step(*batch)) == 1.0
    step.sync()
    step.close()
    # every one of the 3 rows has gradient 1, the index of the device
    torch.testing.assert_close(model.layer.bias.detach(), before - 3.0)


@gpus.real_gpu
@two_gpus
def test_s71_ops_are_observed_where_they_were_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor that an op of the step makes lies on the op's planned GPU."""
    from devplace.run.cuda.device_pass import DevicePass

    seen: dict[int, set[str]] = {}
    call = DevicePass._call

    def noting(self: Any, op: int, *rest: Any) -> Any:
        value = call(self, op, *rest)
        made = value if isinstance(value, (tuple, list)) else (value,)
        devices = {str(tensor.device) for tensor in made if isinstance(tensor, torch.Tensor)}
        seen.setdefault(op, set()).update(devices)
        return value

    monkeypatch.setattr(DevicePass, "_call", noting)
    model = Normed(dropout=0.5).to(gpus.HOME)
    batch = normal(4, 2, 6, 6)
    optimizer = adam(list(model.parameters()))
    graph = capture(model, batch, mean_square, optimizer)
    devices, order = gpus.at_random(graph, 2)
    step = compile_step(model, optimizer, graph, devices, order, gpus.names(2))
    step(*batch)
    step.close()
    planned = {op for row in order for op in row}
    assert planned <= seen.keys()
    assert all(seen[op] == {gpus.names(2)[devices[op]]} for op in planned)


class Branches(nn.Module):
    """Equal branches that do not read each other, joined at the end."""

    def __init__(self, count: int, width: int, depth: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(mlp(width, depth) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([branch(x) for branch in self.branches]).sum(0)


@gpus.real_gpu
@gpus.not_on_one
@pytest.mark.parametrize("count", gpus.COUNTS)
def test_s24_branches_on_their_own_gpus_run_at_the_same_time(count: int) -> None:
    """All branches are under way at one moment of a measured step, which is shorter than three
    quarters of their sum.

    The best of three measured steps counts: others may use these GPUs too.
    """
    with torch.device(gpus.HOME):
        model = Branches(count, 2048, 24)  # some 30 ms each, much more than a launch
    batch = normal(8192, 2048)
    graph = capture(model, batch)
    place = gpus.modules_on({f"branches.{k}": k for k in range(count)})
    step = compile_step(model, None, graph, *place(graph, count), gpus.names(count))
    step(*batch)
    step.is_timed = True
    seen = []
    for _ in range(3):
        step(*batch)
        spans = branch_spans(graph, step.timeline, count)
        work_ns = sum(finish - start for start, finish in spans)
        seen.append((step.timeline.makespan_ns / work_ns, spans))
    step.close()
    share, spans = min(seen)
    assert max(start for start, _ in spans) < min(finish for _, finish in spans)
    assert share < 0.75


def branch_spans(graph: Any, timeline: Any, count: int) -> list[tuple[int, int]]:
    """First start and last end of each branch, ns."""
    spans = []
    for k in range(count):
        ops = [
            i
            for i, op in enumerate(graph.ops)
            if op.module.startswith(f"branches.{k}.") and timeline.start_ns[i] >= 0
        ]
        spans.append((int(timeline.start_ns[ops].min()), int(timeline.finish_ns[ops].max())))
    return spans


OPTIMIZERS: dict[str, tuple[int, Any]] = {
    "sgd": (0, lambda p: torch.optim.SGD(p, lr=0.1)),
    "momentum": (1, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "adam": (2, lambda p: torch.optim.Adam(p)),
    "amsgrad": (3, lambda p: torch.optim.Adam(p, amsgrad=True)),
}


@gpus.real_gpu
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_s10_optimizer_state_takes_what_arithmetic_says(name: str) -> None:
    """A compiled step holds the weights and 0, 1, 2 or 3 times their bytes of state on the GPU."""
    copies, make_optimizer = OPTIMIZERS[name]
    model = mlp(512, 4).to(gpus.HOME)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    batch = normal(4, 512)
    optimizer = make_optimizer(model.parameters())
    graph = capture(model, batch, mean_square, optimizer)
    gc.collect()
    before = torch.cuda.memory_allocated(gpus.HOME)
    step = compile_step(model, optimizer, graph, *gpus.at_random(graph, 1), gpus.names(1))
    held = torch.cuda.memory_allocated(gpus.HOME) - before
    step.close()
    assert 0 <= held - (1 + copies) * weights < 2**16


@gpus.real_gpu
def test_s13_later_steps_need_no_more_memory_than_the_first() -> None:
    """After the first step neither the peak nor what is reserved grows."""
    model = Normed(0.5).to(gpus.HOME)
    batch = normal(64, 2, 32, 32)
    optimizer = adam(list(model.parameters()))
    graph = capture(model, batch, mean_square, optimizer)
    step = compile_step(model, optimizer, graph, *gpus.at_random(graph, 1), gpus.names(1))
    step(*batch)
    first = torch.cuda.memory_reserved()
    peaks = []
    for _ in range(4):
        torch.cuda.reset_peak_memory_stats()
        step(*batch)
        peaks.append((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
    step.close()
    assert len(set(peaks)) == 1
    assert peaks[0][1] <= first


class Language(nn.Module):
    """An embedding and a head of the same size, for many words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50_000, 64), nn.Linear(64, 50_000, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(words))


@gpus.real_gpu
@two_gpus
def test_s04_the_head_takes_more_memory_than_the_embedding() -> None:
    """With equal weights, the GPU of the head holds more than the logits, that of the embedding
    less."""
    model = Language().to(gpus.HOME)
    batch = (torch.randint(0, 50_000, (16, 65), device=gpus.HOME),)
    logits = 16 * 64 * 50_000 * 4
    optimizer = sgd(list(model.parameters()))
    graph = capture(model, batch, next_token, optimizer)
    placed = gpus.modules_on({"embed": 0}, default=1)(graph, 2)
    gc.collect()
    torch.cuda.empty_cache()
    before = [torch.cuda.memory_reserved(k) for k in range(2)]
    step = compile_step(model, optimizer, graph, *placed, gpus.names(2))
    step(*batch)
    taken = [torch.cuda.memory_reserved(k) - before[k] for k in range(2)]
    step.close()
    assert taken[0] < logits < taken[1]


def python(script: str, *args: str, **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(script), *args]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env={**os.environ, **env}
    )


@gpus.real_gpu
def test_s09_own_unused_cache_is_free_and_what_others_hold_is_not() -> None:
    """Memory that torch has cached counts as free; a fifth of the GPU that another process holds
    does not. What others take or leave meanwhile may be half as much."""
    size = torch.cuda.get_device_properties(0).total_memory // 5
    torch.empty(8, device="cuda:0")
    before = reserved_bytes()
    block = torch.empty(size, dtype=torch.uint8, device="cuda:0")
    del block
    assert torch.cuda.memory_reserved(0) - torch.cuda.memory_allocated(0) >= size
    assert abs(reserved_bytes() - before) < size // 2
    torch.cuda.empty_cache()

    script = """
        import sys, torch
        held = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device="cuda:0")
        print("held", flush=True)
        input()
    """
    with python(script, str(size)) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        free, total = torch.cuda.mem_get_info(0)
        held = reserved_bytes()
        other.communicate("\n")
    assert held >= size
    assert held > before + size // 2
    assert abs(held - (total - free)) < size // 2


def reserved_bytes() -> int:
    return detect().devices[1].reserve_bytes


@gpus.real_gpu
@two_gpus
def test_s29_a_plan_is_refused_when_the_visible_gpus_are_in_another_order(tmp_path: Path) -> None:
    """A plan saved here is refused by a process that sees the same GPUs in reverse."""
    script = """
        import sys, torch
        import devplace as dp
        model = torch.nn.Linear(4, 4)
        graph = dp.capture(model, torch.zeros(2, 4))
        machine = dp.load_machine("detect")
        print(*[device.uuid for device in machine.devices[1:]])
        problem = dp.Problem(graph, machine, dp.Analytic()(graph, machine))
        try:
            dp.load_plan(sys.argv[1]).check(problem)
        except dp.errors.PlanMismatchError as error:
            print("refused:", error)
    """
    machine = detect()
    problem = priced(capture(nn.Linear(4, 4), torch.zeros(2, 4)), machine)
    path = tmp_path / "plan.json"
    dp.place(problem, dp.placers.Single(), "9ev").plan.save(path)
    dp.load_plan(path).check(problem)
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    cards = shown.split(",") if shown else [str(k) for k in range(gpus.NUM_GPUS)]
    with python(script, str(path), CUDA_VISIBLE_DEVICES=",".join(cards[::-1])) as process:
        out, err = process.communicate()
    assert process.returncode == 0, err
    uuids, said = out.splitlines()
    assert uuids.split() == [device.uuid for device in machine.devices[1:]][::-1]
    assert said.startswith("refused: The plan was made for another machine")
