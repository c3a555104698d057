"""What users met on GPUs: cuts anywhere, state, devices that are really used, wrong links."""

from __future__ import annotations

import copy
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
from devplace.run.check import check_step
from devplace.run.compile import Step, compile_step
from devplace.step_capture import capture

pytestmark = gpus.MARKS
two_gpus = gpus.needs(2)


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
    step.close()
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
    step.close()
    at_home = [gpus.to_home(batch) for batch in data]
    expected = train_eager(twin, sgd(list(twin.parameters())), at_home, weighted_cross_entropy)
    assert losses == pytest.approx(expected, abs=1e-9)


@two_gpus
@pytest.mark.filterwarnings("ignore:RNN module weights")  # of torch's own step
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
    step.close()
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
    step.close()
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
    step = dp.compile(graph, result.plan)
    step(*batch)
    puts = dict(step.executor.put_count)
    for _ in range(3):
        step(*batch)
    step.close()
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
        report = check_step(graph, model, optimizer, batch, *place(graph, 2), gpus.names(2))
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

    def push(source: Any, buffer: Any, flag: Any, epoch: Any) -> int:
        from devplace.run.cuda.push import push

        return push(changed(source), buffer, flag, epoch)

    def run(**faulty: Any) -> None:
        check_step(graph, model, optimizer, batch, *placed, gpus.names(2), **faulty)

    run()
    options = {} if gpus.ON_CPU else {"push": push}
    with (
        gpus.seen_executors(monkeypatch, **options),
        pytest.raises(VerificationError, match=r"must give the numbers .* in step 1"),
    ):
        run(copy=lambda value, transfer: changed(value))
