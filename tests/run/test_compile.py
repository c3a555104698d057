"""The step a training loop calls: inputs, outputs, schedules, sync, refusals."""

from __future__ import annotations

import copy
import dataclasses
import threading
from typing import Any

import pytest
import torch
from torch import nn

from devplace.errors import CaptureError, ExecutionError, InputError, PlanMismatchError
from devplace.run.compile import compile_step
from devplace.step_capture import capture
from tests.run.models import Clipped, mean_square
from tests.run.placed import (
    NAMES,
    adam,
    all_on,
    at_random,
    compare_with_eager,
    largest_difference,
    make_step,
    sgd,
    train_eager,
)


@pytest.fixture(autouse=True)
def _double() -> Any:
    """Numbers in float64 and the same weights in every run."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("make_optimizer", [sgd, adam])
def test_random_placements_equal_eager(seed: int, make_optimizer: Any) -> None:
    """Four steps on random placements equal torch.optim to 1e-9."""
    data = [(torch.randn(4, 4),) for _ in range(4)]
    compare_with_eager(Clipped(), data, mean_square, make_optimizer, at_random(seed))


def test_micro_batches_accumulate_gradients() -> None:
    """Three micro-batches over random devices equal the whole batch in eager mode."""
    model = Clipped()
    twin = copy.deepcopy(model)
    optimizer = sgd(list(model.parameters()))
    data = [(torch.randn(6, 4),) for _ in range(3)]
    graph = capture(model, data[0], mean_square, optimizer, micro_batches=3)
    step = compile_step(model, optimizer, graph, *at_random(4)(graph), NAMES)
    losses = [float(step(*batch)) for batch in data]
    step.sync()
    other = sgd(list(twin.parameters()))
    assert losses == pytest.approx(train_eager(twin, other, data, mean_square), abs=1e-9)
    assert largest_difference(model, twin) < 1e-9


def test_learning_rate_schedules_work() -> None:
    """A scheduler that changes the optimizer's groups between steps is followed."""
    model = Clipped()
    twin = copy.deepcopy(model)
    optimizer, other = adam(list(model.parameters())), adam(list(twin.parameters()))
    batch = (torch.randn(4, 4),)
    step = make_step(model, batch, mean_square, optimizer, at_random(0))
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (optimizer, other)]
    for _ in range(4):
        step(*batch)
        train_eager(twin, other, [batch], mean_square)
        for schedule in schedules:
            schedule.step()
    step.sync()
    assert largest_difference(model, twin) < 1e-9


def test_a_fixed_option_that_changed_is_refused() -> None:
    """An option that is part of the graph cannot change silently."""
    model = Clipped()
    optimizer = adam(list(model.parameters()))
    batch = (torch.randn(4, 4),)
    step = make_step(model, batch, mean_square, optimizer, at_random(0))
    optimizer.param_groups[0]["eps"] = 1e-3
    with pytest.raises(CaptureError, match="'eps' of parameter group 0"):
        step(*batch)


def test_the_model_changes_at_sync_and_only_then() -> None:
    """Parameters and optimizer state are the user's until sync, in place afterwards."""
    model = Clipped()
    optimizer = adam(list(model.parameters()))
    before = copy.deepcopy(model.state_dict())
    pointers = [p.data_ptr() for p in model.parameters()]
    batch = (torch.randn(4, 4),)
    step = make_step(model, batch, mean_square, optimizer, at_random(0))
    step(*batch)
    assert all(torch.equal(before[name], value) for name, value in model.named_parameters())
    assert not optimizer.state
    step.sync()
    assert not torch.equal(before["one.weight"], model.one.weight)
    assert [p.data_ptr() for p in model.parameters()] == pointers
    synced = model.one.weight.detach().clone()
    step(*batch)
    assert torch.equal(model.one.weight, synced)


def test_plain_sgd_makes_no_optimizer_state() -> None:
    """As in torch.optim, SGD without momentum leaves its state empty."""
    model = Clipped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (torch.randn(4, 4),)
    step = make_step(model, batch, mean_square, optimizer, at_random(0))
    step(*batch)
    step.sync()
    assert not optimizer.state_dict()["state"]


def test_frozen_parameters_stay() -> None:
    """A frozen layer does not move and gets no optimizer state."""
    model = Clipped()
    model.one.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    batch = (torch.randn(4, 4),)
    before = model.one.weight.detach().clone()
    optimizer = adam(trained)
    step = make_step(model, batch, mean_square, optimizer, at_random(0))
    step(*batch)
    step.sync()
    assert torch.equal(before, model.one.weight)
    assert set(optimizer.state) == set(trained)


@dataclasses.dataclass
class Answer:
    logits: Any
    hidden: dict[str, Any]
    note: str


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 2)

    def forward(self, batch: dict[str, Any], *, scale: int = 1) -> Answer:
        hidden = self.body(batch["x"])
        return Answer(hidden * scale, {"h": [hidden.relu(), None]}, "n")


def test_s38_nested_inputs_and_outputs_are_kept() -> None:
    """Dicts, dataclasses, lists, None and text come back as they were."""
    model = Structured().eval()
    batch = {"x": torch.randn(4, 3), "mask": None, "length": 4}
    graph = capture(model, (batch,), example_kwargs={"scale": 3})
    step = compile_step(model, None, graph, *at_random(2)(graph), NAMES)
    found, expected = step(batch, scale=3), model(batch, scale=3)
    assert isinstance(found, Answer)
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(found.hidden["h"][0], expected.hidden["h"][0])
    assert found.hidden["h"][1] is None
    assert found.note == "n"
    with pytest.raises(InputError, match="'scale' is 2, captured with 3"):
        step(batch, scale=2)


@dataclasses.dataclass(frozen=True)
class Sentences:
    words: Any
    more: dict[str, Any]


def test_a_batch_may_be_a_dataclass() -> None:
    """One that torch does not know is bound as at capture, its dicts in any order of keys."""

    def loss(model: Any, batch: Sentences) -> Any:
        return (model(batch.words) - batch.more["to"]).square().mean()

    words, more = torch.randn(6, 4), {"to": torch.randn(6, 3), "unused": torch.randn(2)}
    batch = Sentences(words, more)
    turned = Sentences(words, dict(reversed(more.items())))
    for chunks in (1, 2):
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        graph = capture(model, (batch,), loss, optimizer, chunks)
        step = compile_step(model, optimizer, graph, *at_random(2)(graph), NAMES)
        expected = loss(model, batch).detach()
        for given in (batch, turned):
            torch.testing.assert_close(step(given), expected)
        with pytest.raises(InputError, match="nested as at capture"):
            step(words)


def test_outputs_do_not_share_memory_with_parameters() -> None:
    """An output that is a view of a parameter can be changed without harm."""

    class Leaky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 2))

        def forward(self, x: Any) -> Any:
            return x + 1, self.weight.t()

    model = Leaky().eval()
    step = make_step(model, (torch.zeros(2),), None, None, at_random(0))
    step(torch.zeros(2))[1].fill_(7)
    assert torch.equal(step(torch.zeros(2))[1], torch.ones(2, 2))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.zeros(5, 4),), r"Input '0' has shape \[5, 4\], .* with \[4, 4\]"),
        ((torch.zeros(4, 4, dtype=torch.float32),), "Input '0' has dtype float32, .* float64"),
        ((), "Inputs must be nested as at capture: got 0 positional"),
        ((3.0,), "Input '0' must be a tensor as at capture, got float"),
        ((torch.zeros(4, 4), torch.zeros(4, 4)), "got 2 positional"),
    ],
)
def test_other_batches_are_refused(batch: tuple[Any, ...], message: str) -> None:
    """Shape, dtype and nesting are those of the capture; the input is named."""
    model = Clipped()
    optimizer = sgd(list(model.parameters()))
    step = make_step(model, (torch.randn(4, 4),), mean_square, optimizer, at_random(0))
    with pytest.raises(InputError, match=message):
        step(*batch)


def test_named_inputs_come_in_any_order() -> None:
    """Keyword inputs are matched by name."""

    class Two(nn.Module):
        def forward(self, *, a: Any, b: Any) -> Any:
            return a - 2 * b

    model = Two()
    one, two = torch.ones(2), torch.ones(2)
    step = make_step(model, {"a": one, "b": two}, None, None, at_random(0))
    assert torch.equal(step(b=two * 3, a=one), torch.full((2,), -5.0))
    assert torch.equal(step({"b": two * 3, "a": one}), torch.full((2,), -5.0))


def test_a_model_without_weights_is_refused() -> None:
    """A meta model can be planned, not run."""
    with torch.device("meta"):
        model = Clipped()
    optimizer = sgd(list(model.parameters()))
    with pytest.raises(InputError, match=r"parameter 'one.weight' is on the meta device"):
        make_step(model, (torch.randn(4, 4),), mean_square, optimizer, at_random(0))


def test_a_model_without_weights_can_be_measured() -> None:
    """With invented values a meta model runs; writing them back is refused."""
    with torch.device("meta"):
        model = Clipped()
    optimizer = adam(list(model.parameters()))
    batch = (torch.randn(4, 4),)
    step = make_step(model, batch, mean_square, optimizer, at_random(0), invent_seed=1)
    assert torch.isfinite(step(*batch))
    with pytest.raises(InputError, match=r"cannot hold values: 'one\.weight'"):
        step.sync()


def test_another_model_is_refused() -> None:
    """Missing parameters and other shapes are named."""
    model = Clipped()
    optimizer = sgd(list(model.parameters()))
    graph = capture(model, (torch.randn(4, 4),), mean_square, optimizer)
    place = all_on(0)(graph)
    other = Clipped()
    other.two = nn.Linear(8, 5)
    with pytest.raises(PlanMismatchError, match=r"'two.weight' has shape \[5, 8\]"):
        compile_step(other, sgd(list(other.parameters())), graph, *place, NAMES)
    del other.two
    with pytest.raises(PlanMismatchError, match=r"parameter 'two.weight' is missing"):
        compile_step(other, sgd(list(other.parameters())), graph, *place, NAMES)


def test_another_optimizer_is_refused() -> None:
    """One of another class, over another model, or none at all would give other numbers."""
    model = Clipped()
    optimizer = sgd(list(model.parameters()))
    graph = capture(model, (torch.randn(4, 4),), mean_square, optimizer)
    placed = all_on(0)(graph)
    with pytest.raises(PlanMismatchError, match="SGD, got Adam"):
        compile_step(model, adam(list(model.parameters())), graph, *placed, NAMES)
    with pytest.raises(PlanMismatchError, match="SGD, got none"):
        compile_step(model, None, graph, *placed, NAMES)
    with pytest.raises(PlanMismatchError, match="Build it from this model"):
        compile_step(model, sgd(list(Clipped().parameters())), graph, *placed, NAMES)


def test_a_closed_step_refuses_to_run() -> None:
    """It would wait for ever for threads that are gone."""
    model, batch = Clipped(), (torch.randn(4, 4),)
    optimizer = sgd(list(model.parameters()))
    graph = capture(model, batch, mean_square, optimizer)
    step = compile_step(model, optimizer, graph, *all_on(0)(graph), NAMES)
    step.close()
    step.close()
    with pytest.raises(ExecutionError, match="closed"):
        step(*batch)
    step.sync()


def test_a_graph_read_from_a_file_cannot_run() -> None:
    """As data alone a graph can only be planned."""
    model = Clipped()
    graph = capture(model, (torch.randn(4, 4),), mean_square, sgd(list(model.parameters())))
    with pytest.raises(InputError, match="To run it, a captured step is needed"):
        compile_step(model, None, graph.graph, *all_on(0)(graph), NAMES)


def test_the_timeline_is_measured_when_asked() -> None:
    """`is_timed` gives the timeline of the last step."""
    model = Clipped()
    optimizer = sgd(list(model.parameters()))
    batch = (torch.randn(4, 4),)
    step = make_step(model, batch, mean_square, optimizer, at_random(0))
    step(*batch)
    assert step.timeline is None
    step.is_timed = True
    step(*batch)
    assert step.timeline is not None
    assert step.timeline.makespan_ns > 0
    assert step.steps_done == 2


_seen_threads: list[str] = []


@torch.library.custom_op("devplace_test::where_am_i", mutates_args=())
def where_am_i(x: torch.Tensor) -> torch.Tensor:
    """Notes the thread it runs on."""
    _seen_threads.append(threading.current_thread().name)
    return x.clone()


where_am_i.register_fake(torch.empty_like)
where_am_i.register_autograd(lambda ctx, grad: where_am_i(grad))


def test_s55_ops_run_on_the_thread_of_their_device() -> None:
    """A custom op placed on device 1 runs there, forward and backward."""

    class Noting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(3, 3)

        def forward(self, x: Any) -> Any:
            return where_am_i(self.body(x))

    model = Noting()
    optimizer = sgd(list(model.parameters()))
    batch = (torch.randn(2, 3),)
    graph = capture(model, batch, mean_square, optimizer)
    targets = [op.target for op in graph.ops]
    assert sum("where_am_i" in target for target in targets) == 2
    step = compile_step(model, optimizer, graph, *all_on(1)(graph), NAMES)
    _seen_threads.clear()
    step(*batch)
    assert _seen_threads == ["devplace cpu:1"] * 2


def test_a_step_that_lost_its_state_refuses_until_it_is_loaded() -> None:
    """After a failure that cost the state, calls and `sync` are refused and write nothing."""
    model, batch = Clipped(), (torch.randn(8, 4),)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = make_step(model, batch, mean_square, optimizer, all_on(0), keeps_old_state=False)
    before = copy.deepcopy(model.state_dict())
    step(*batch)
    executor = step.executor
    failing = executor._codes  # type: ignore[attr-defined]

    def fail(*_: Any) -> Any:
        raise RuntimeError("out of luck")

    executor._codes = [dataclasses.replace(code, function=fail) for code in failing]  # type: ignore[attr-defined]
    with pytest.raises(ExecutionError, match="out of luck"):
        step(*batch)
    executor._codes = failing  # type: ignore[attr-defined]
    with pytest.raises(ExecutionError, match=r"out of luck\. Call step.load\(\)"):
        step(*batch)
    with pytest.raises(ExecutionError, match=r"Call step.load\(\)"):
        step.sync()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    step.load()
    step(*batch)
    step.sync()
    step.close()
    assert not all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_value_that_cannot_be_fetched_leaves_the_model_as_it_is() -> None:
    """`sync` has every value before it writes the first."""
    model, batch = Clipped(), (torch.randn(8, 4),)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = make_step(model, batch, mean_square, optimizer, all_on(0))
    before = copy.deepcopy(model.state_dict())
    step(*batch)
    get, calls = step.executor.get, []

    def fail_late(op: int) -> Any:
        calls.append(op)
        if len(calls) == 3:
            raise ExecutionError("lost")
        return get(op)

    step.executor.get = fail_late  # type: ignore[method-assign]
    with pytest.raises(ExecutionError, match="lost"):
        step.sync()
    step.close()
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("is_dict", [False, True])
def test_further_outputs_come_back_as_the_loss_function_gives_them(
    micro_batches: int, is_dict: bool
) -> None:
    """`(loss, {name: tensor})` or a dict with `loss`, at every step, with what is no tensor."""

    def both(m: nn.Module, x: torch.Tensor) -> Any:
        out = m(x)
        further = {"size": out.abs().mean(), "rows": out, "unit": "mm"}
        loss = mean_square(m, x)
        return {**further, "loss": loss} if is_dict else (loss, further)

    model = Clipped()
    twin = copy.deepcopy(model)
    optimizer = sgd(list(model.parameters()))
    data = [(torch.randn(6, 4),) for _ in range(2)]
    graph = capture(model, data[0], both, optimizer, micro_batches)
    step = compile_step(model, optimizer, graph, *at_random(4)(graph), NAMES)
    for (x,) in data:
        given = step(x)
        loss, further = (given["loss"], given) if is_dict else given
        assert further["unit"] == "mm"
        with torch.no_grad():
            assert float(loss) == pytest.approx(float(mean_square(twin, x)), abs=1e-9)
            assert float(further["size"]) == pytest.approx(float(twin(x).abs().mean()), abs=1e-9)
            assert torch.allclose(further["rows"], twin(x))
        train_eager(twin, sgd(list(twin.parameters())), [(x,)], mean_square)
        step.sync()
        assert not further["rows"].requires_grad
    step.close()
