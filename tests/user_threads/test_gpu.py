"""What users met on GPUs: cuts anywhere, state, devices that are really used, wrong links."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.run import gpus
from tests.run.models import (
    Borrowing,
    Clipped,
    Containers,
    Factories,
    Labelled,
    Normed,
    Residual,
    Rotary,
    Tied,
    UShape,
    mean_square,
    next_token,
    weighted_cross_entropy,
)
from tests.run.placed import adam, largest_difference, sgd, train_eager
from tests.run.tracing import place_by_module
from tests.user_threads.helpers import mlp, priced
from tests.user_threads.test_shapes import Skips
from torch import nn

import devplace as dp
from devplace.errors import VerificationError
from devplace.graph.capture import capture
from devplace.machine import detect
from devplace.run.check import check
from devplace.run.compile import Step, compile_step

pytestmark = gpus.MARKS
two_gpus = gpus.needs(2)
GIB = 2**30


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    """Numbers in float64 and the same weights in every run."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def normal(*shape: int, count: int = 3) -> list[tuple[Any, ...]]:
    return [(torch.randn(shape, device=gpus.HOME),) for _ in range(count)]


def tokens(count: int = 3) -> list[tuple[Any, ...]]:
    return [(torch.randint(0, 7, (3, 5), device=gpus.HOME),) for _ in range(count)]


def compare_with_torch(
    model: Any,
    batches: list[tuple[Any, ...]],
    loss_fn: Any,
    make_optimizer: Callable[[Any], Any],
    place: Any,
    count: int = 2,
) -> Step:
    """Train the placed step and plain torch on the first GPU, and assert equal losses, parameters
    and buffers; gives the step."""
    model = model.to(gpus.HOME)
    twin = copy.deepcopy(model)
    optimizer = make_optimizer(list(model.parameters()))
    graph = capture(model, batches[0], loss_fn, optimizer)
    step = compile_step(model, optimizer, graph, *place(graph, count), gpus.names(count))
    losses = [float(step(*batch)) for batch in batches]
    step.sync()
    expected = train_eager(twin, make_optimizer(list(twin.parameters())), batches, loss_fn)
    assert losses == pytest.approx(expected, abs=1e-9)
    assert largest_difference(model, twin) < 1e-9
    return step


@two_gpus
def test_s14_a_cut_inside_every_block_changes_nothing_on_gpus() -> None:
    """Six residual blocks, each cut in two between GPUs."""
    model = nn.Sequential(*(Residual(6) for _ in range(6)))

    def place(graph: Any, count: int) -> Any:
        return place_by_module(graph, lambda op: int(op.module.endswith("second")), count)

    compare_with_torch(model, normal(4, 6), mean_square, sgd, place)


@two_gpus
def test_s15_skip_tensors_are_joined_outside_modules_on_gpus() -> None:
    """Add and cat of tensors from two GPUs."""
    place = gpus.modules_on({"down1": 0, "down2": 0}, default=1)
    compare_with_torch(UShape(), normal(2, 3, 6, 6), mean_square, adam, place)


@two_gpus
def test_s16_weights_used_without_their_module_on_gpus() -> None:
    """A sibling's weight in a functional call and a bare parameter in einsum, on another GPU."""
    place = gpus.modules_on({"owner": 0}, default=1)
    compare_with_torch(Borrowing(), normal(2, 2, 5, 5), mean_square, sgd, place)


@two_gpus
def test_s17_containers_iterated_in_any_order_on_gpus() -> None:
    """Layers used twice, out of order or never, over two GPUs."""
    place = gpus.modules_on({"steps.0": 1, "named": 1})
    compare_with_torch(Containers(), normal(3, 4), mean_square, adam, place)


@two_gpus
def test_s18_read_only_buffers_are_copied_once_to_gpus() -> None:
    """A table read on two GPUs is put there once and never crosses in a step."""
    step = compare_with_torch(Rotary(), normal(4, 6), mean_square, sgd, gpus.at_random)
    schedule = step.executor.schedule
    table = schedule.graph.op_index["table"]
    assert len(schedule.holders[table]) == 2
    assert step.executor.put_count[table] == 2
    (tensor,) = schedule.graph.ops[table].outputs
    assert all(transfer.tensor != tensor for transfer in schedule.transfers)


@two_gpus
def test_s19_targets_on_the_cpu_reach_the_loss_on_another_gpu() -> None:
    """The loss with class weights runs on the second GPU; batches come from the CPU."""
    data = [(torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 4, 1])) for _ in range(3)]
    model = Labelled().to(gpus.HOME)
    twin = copy.deepcopy(model)
    optimizer = sgd(list(model.parameters()))
    graph = capture(model, gpus.to_home(data[0]), weighted_cross_entropy, optimizer)
    placed = gpus.modules_on({"body": 0}, default=1)(graph, 2)
    step = compile_step(model, optimizer, graph, *placed, gpus.names(2))
    losses = [float(step(*batch)) for batch in data]
    at_home = [gpus.to_home(batch) for batch in data]
    expected = train_eager(twin, sgd(list(twin.parameters())), at_home, weighted_cross_entropy)
    assert losses == pytest.approx(expected, abs=1e-9)


@two_gpus
def test_s20_a_step_captured_on_one_gpu_runs_on_another() -> None:
    """Factory calls and default LSTM states run where the plan says."""
    place = gpus.modules_on({}, default=1)
    compare_with_torch(Factories(), normal(3, 2, 3), mean_square, sgd, place)


@two_gpus
def test_s44_tied_weights_stay_tied_over_gpus() -> None:
    """One parameter, one gradient, one state: Adam steps equal torch's, and it is still tied."""
    model = Tied()
    compare_with_torch(model, tokens(), next_token, adam, gpus.modules_on({"head": 1}))
    assert model.head.weight is model.embed.weight


@two_gpus
def test_s49_gradients_are_clipped_over_gpus() -> None:
    """The norm over layers on two GPUs, and so the update, equals torch's."""
    model = Clipped().to(gpus.HOME)
    twin = copy.deepcopy(model)
    batch = (torch.randn(4, 4, device=gpus.HOME) * 100,)
    optimizer, other = sgd(list(model.parameters())), sgd(list(twin.parameters()))
    graph = capture(model, batch, mean_square, optimizer, clip_grad_norm=1.0)
    placed = gpus.modules_on({"two": 1})(graph, 2)
    step = compile_step(model, optimizer, graph, *placed, gpus.names(2))
    for _ in range(3):
        step(*batch)
        other.zero_grad()
        mean_square(twin, *batch).backward()
        norm = nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        other.step()
    step.sync()
    assert norm > 1.0
    assert largest_difference(model, twin) < 1e-9


@two_gpus
def test_s50_resume_under_another_plan_on_gpus(tmp_path: Path) -> None:
    """Three steps on plan A, a checkpoint file, three on plan B: equal six steps of torch."""
    data = normal(4, 2, 6, 6, count=6)
    model = Normed().to(gpus.HOME)
    twin = copy.deepcopy(model)
    optimizer = adam(list(model.parameters()))
    graph = capture(model, data[0], mean_square, optimizer)
    step = compile_step(model, optimizer, graph, *gpus.at_random(graph, 2, 1), gpus.names(2))
    losses = [float(step(*batch)) for batch in data[:3]]
    step.sync()
    step.close()
    torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "checkpoint.pt")

    saved = torch.load(tmp_path / "checkpoint.pt", map_location="cpu")
    fresh = Normed().to(gpus.HOME)
    fresh.load_state_dict(saved[0])
    resumed = adam(list(fresh.parameters()))
    resumed.load_state_dict(saved[1])
    graph = capture(fresh, data[0], mean_square, resumed)
    step = compile_step(fresh, resumed, graph, *gpus.at_random(graph, 2, 2), gpus.names(2))
    losses += [float(step(*batch)) for batch in data[3:]]
    step.sync()
    expected = train_eager(twin, adam(list(twin.parameters())), data, mean_square)
    assert losses == pytest.approx(expected, abs=1e-9)
    assert largest_difference(fresh, twin) < 1e-9


@pytest.mark.parametrize("count", gpus.COUNTS)
def test_s76_skips_over_stages_run_on_all_gpus(count: int) -> None:
    """A residual network with skips over one and three stages, a stage after the other on the next
    GPU."""
    place = gpus.modules_on({f"stages.{k}": k % count for k in range(6)}, default=count - 1)
    compare_with_torch(Skips(), normal(2, 3, 6, 6), mean_square, sgd, place, count)


@two_gpus
def test_s26_no_parameter_crosses_a_link_on_gpus() -> None:
    """Split over two GPUs without memory pressure, weights rest where they are used."""
    model = mlp(64, 6).to(gpus.HOME)
    batch = normal(8, 64, count=1)[0]
    machine = dp.load_machine("cpux2" if gpus.ON_CPU else "h100x2")
    graph = capture(model, batch, mean_square, sgd(list(model.parameters())))
    result = dp.place(priced(graph, machine), dp.placers.Even(), "9ev")
    step = dp.compile(model, result.plan)
    step(*batch)
    puts = dict(step.executor.put_count)
    for _ in range(3):
        step(*batch)
    schedule = step.executor.schedule
    producers = [graph.ops[graph.producer[t.tensor]] for t in schedule.transfers]
    assert producers
    assert not any(op.is_source for op in producers)
    grown = {graph.ops[op].role for op, n in step.executor.put_count.items() if n > puts[op]}
    assert grown <= {"input", "scalar"}


@two_gpus
def test_s48_dropout_moved_between_gpus_verifies() -> None:
    """The check draws the same masks whichever GPU draws them, so it is exact."""
    model = Normed(dropout=0.5).to(gpus.HOME)
    (batch,) = normal(4, 2, 6, 6, count=1)
    optimizer = sgd(list(model.parameters()))
    graph = capture(model, batch, mean_square, optimizer)
    for place in (gpus.modules_on({"drop": 0}, default=1), gpus.modules_on({"drop": 1})):
        report = check(graph, model, optimizer, batch, *place(graph, 2), gpus.names(2))
        assert report.num_transfers > 0
        assert report.is_bit_equal


@two_gpus
def test_s53_a_link_that_changes_data_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy to the other GPU that changes one element fails the check by name."""
    model = mlp(16, 4).to(gpus.HOME)
    (batch,) = normal(8, 16, count=1)
    optimizer = sgd(list(model.parameters()))
    graph = capture(model, batch, mean_square, optimizer)
    placed = gpus.modules_on({"2": 1, "4": 1})(graph, 2)

    def changed(value: Any) -> Any:
        wrong = value.clone()
        wrong.view(-1)[:1].add_(1e-3)
        return wrong

    def push(source: Any, buffer: Any, flag: Any) -> int:
        from devplace.run.cuda.push import push

        return push(changed(source), buffer, flag)

    def run(**faulty: Any) -> None:
        check(graph, model, optimizer, batch, *placed, gpus.names(2), **faulty)

    run()
    options = {} if gpus.ON_CPU else {"push": push}
    with (
        gpus.seen_executors(monkeypatch, **options),
        pytest.raises(VerificationError, match=r"must give the numbers .* in step 1"),
    ):
        run(copy=lambda value, transfer: changed(value))


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
    (batch,) = normal(3, 4, count=1)
    graph = capture(model, batch, lambda model, x: model(x).sum() / 12, optimizer)
    placed = gpus.modules_on({}, default=1)(graph, 2)
    step = compile_step(model, optimizer, graph, *placed, gpus.names(2))
    assert float(step(*batch)) == 1.0
    step.sync()
    # every one of the 3 rows has gradient 1, the index of the device
    torch.testing.assert_close(model.layer.bias.detach(), before - 3.0)


@gpus.real_gpu
@two_gpus
def test_s71_ops_are_observed_where_they_were_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor that an op of the step makes lies on the op's planned GPU."""
    from devplace.run.cuda.device_pass import DevicePass

    observed: dict[str, set[str]] = {}
    call = DevicePass._call

    def noting(self: Any, node: Any) -> Any:
        value = call(self, node)
        made = value if isinstance(value, (tuple, list)) else (value,)
        devices = {str(tensor.device) for tensor in made if isinstance(tensor, torch.Tensor)}
        observed.setdefault(node.name, set()).update(devices)
        return value

    monkeypatch.setattr(DevicePass, "_call", noting)
    model = Normed(dropout=0.5).to(gpus.HOME)
    (batch,) = normal(4, 2, 6, 6, count=1)
    optimizer = adam(list(model.parameters()))
    graph = capture(model, batch, mean_square, optimizer)
    devices, order = gpus.at_random(graph, 2)
    step = compile_step(model, optimizer, graph, devices, order, gpus.names(2))
    step(*batch)
    step.close()
    seen = {graph.program.op_of[name]: where for name, where in observed.items()}
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
@pytest.mark.parametrize("count", gpus.COUNTS)
def test_s24_branches_on_their_own_gpus_run_at_the_same_time(count: int) -> None:
    """All branches are under way at one moment of the measured step, which is shorter than three
    quarters of their sum."""
    model = Branches(count, 2048, 12).to(gpus.HOME).float()
    batch = (torch.randn(2048, 2048, device=gpus.HOME, dtype=torch.float32),)
    graph = capture(model, batch)
    place = gpus.modules_on({f"branches.{k}": k for k in range(count)})
    step = compile_step(model, None, graph, *place(graph, count), gpus.names(count))
    step(*batch)
    step.is_timed = True
    step(*batch)
    timeline = step.timeline
    step.close()
    assert timeline is not None
    spans = []
    for k in range(count):
        ops = [
            i
            for i, op in enumerate(graph.ops)
            if op.module.startswith(f"branches.{k}.") and timeline.start_ns[i] >= 0
        ]
        spans.append((timeline.start_ns[ops].min(), timeline.finish_ns[ops].max()))
    assert max(start for start, _ in spans) < min(finish for _, finish in spans)
    assert timeline.makespan_ns < 0.75 * sum(finish - start for start, finish in spans)


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
    (batch,) = normal(4, 512, count=1)
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
    (batch,) = normal(64, 2, 32, 32, count=1)
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
    model = Language().to(gpus.HOME).float()
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
    """Memory that torch has cached counts as free; 4 GiB held by another process do not."""
    torch.empty(8, device="cuda:0")
    before = reserved_bytes()
    block = torch.empty(4 * GIB, dtype=torch.uint8, device="cuda:0")
    del block
    assert torch.cuda.memory_reserved(0) - torch.cuda.memory_allocated(0) >= 4 * GIB
    assert reserved_bytes() == before
    torch.cuda.empty_cache()

    script = """
        import torch
        held = torch.empty(4 * 2**30, dtype=torch.uint8, device="cuda:0")
        print("held", flush=True)
        input()
    """
    with python(script) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        free, total = torch.cuda.mem_get_info(0)
        held = reserved_bytes()
        other.communicate("\n")
    assert held >= 4 * GIB
    assert held > before
    assert abs(held - (total - free)) < GIB


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
        problem = dp.Problem(graph, machine, dp.Analytic()(graph, machine))
        path = sys.argv[1]
        if sys.argv[2] == "save":
            dp.place(problem, dp.placers.Single(), "9ev").plan.save(path)
        plan = dp.load_plan(path)
        try:
            plan.check(problem)
        except dp.errors.PlanMismatchError as error:
            print("refused:", error)
        else:
            print("accepted")
    """
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    cards = shown.split(",") if shown else [str(k) for k in range(gpus.NUM_GPUS)]
    path = str(tmp_path / "plan.json")
    saying = []
    for action, order in (("save", cards), ("load", cards[::-1])):
        with python(script, path, action, CUDA_VISIBLE_DEVICES=",".join(order)) as process:
            out, err = process.communicate()
        assert process.returncode == 0, err
        saying.append(out)
    assert saying[0] == "accepted\n"
    assert saying[1].startswith("refused: The plan was made for another machine")
