"""From a model to a step for a training loop, on logical CPU devices."""

from __future__ import annotations

import copy
import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import devplace as dp
from devplace.auto import parallel_job, step_notes
from devplace.auto import parallelize as module
from devplace.auto.budget_clock import BudgetClock
from devplace.errors import (
    CaptureError,
    ExecutionError,
    InfeasibleError,
    InputError,
    MachineError,
    ProblemError,
)
from devplace.tune.confirm import TIE
from devplace.tune.measure import Measurer
from tests.run.models import Unrolled, mean_square
from tests.tune.steps import LONG_S, hostile, tagger

pytestmark = pytest.mark.usefixtures("patient")
QUICK: dict[str, Any] = {"machine": "cpux2", "budget": "30ev,1200s"}


def adam(model: Any) -> Any:
    return torch.optim.Adam(model.parameters(), lr=0.01)


@pytest.mark.slow
def test_a_training_loop_trains_as_eager_torch_does() -> None:
    """Losses, weights and optimizer state after sync are those of the plain loop."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    twin = copy.deepcopy(model)
    optimizer, other = adam(model), adam(twin)
    batches = [(torch.randn(6, 4).double(), torch.randint(0, 3, (6,))) for _ in range(4)]
    step = dp.parallelize(model, batches[0], nn.functional.cross_entropy, optimizer, **QUICK)
    assert all(
        torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True)
    )
    assert step.steps_done == 0
    for x, y in batches:
        other.zero_grad()
        expected = nn.functional.cross_entropy(twin(x), y)
        expected.backward()
        other.step()
        assert float(step(x, y)) == pytest.approx(float(expected.detach()), abs=1e-9)
    step.sync()
    step.close()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-9)
        assert torch.allclose(optimizer.state[p]["exp_avg"], other.state[q]["exp_avg"], atol=1e-9)
    assert int(optimizer.state[next(model.parameters())]["step"]) == 4


@pytest.mark.parametrize("is_training", [True, False])
def test_training_in_eval_mode_is_noted(is_training: bool) -> None:
    """A model that was left in eval mode is trained so, and the report says it."""
    model, batch, loss = tagger()
    model.train(is_training)
    with dp.parallelize(model, batch, loss, adam(model), confirm=False, **QUICK) as step:
        assert ("trained in eval mode" in str(step)) is not is_training
    with dp.parallelize(model, batch, loss, confirm=False, **QUICK) as step:
        assert "trained in eval mode" not in str(step)
        assert ("trains nothing" in str(step)) is is_training


@pytest.mark.parametrize(("steps", "is_noted"), [(24, True), (4, False)])
@pytest.mark.slow
def test_an_unrolled_model_is_told_of_stacked_gradients(steps: int, is_noted: bool) -> None:
    """The report says how many products they spare, once that is many, and not where they are."""
    model, batch = Unrolled(), (torch.randn(2, steps, 8),)
    given: dict[str, Any] = {"loss_fn": mean_square, "optimizer": adam(model), **QUICK}
    with dp.parallelize(model, batch, **given, confirm=False) as step:
        assert ("stack_gradients=True" in str(step)) is is_noted
        assert not is_noted or f"by {3 * (steps - 1)} products" in str(step)
    with dp.parallelize(model, batch, **given, confirm=False, stack_gradients=True) as step:
        assert "stack_gradients" not in str(step)


@pytest.mark.slow
def test_training_resumes_from_an_ordinary_checkpoint() -> None:
    """After loading state dicts, `load` goes on exactly where the checkpoint was made."""
    model, batch, loss = tagger()
    optimizer = adam(model)
    with dp.parallelize(model, batch, loss, optimizer, **QUICK) as step:
        for _ in range(3):
            step(*batch)
        step.sync()
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        expected = [float(step(*batch)) for _ in range(3)]
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        step.load()
        assert step.steps_done == 3
        assert [float(step(*batch)) for _ in range(3)] == expected


@pytest.mark.slow
def test_the_fastest_measured_plan_is_chosen_and_shown() -> None:
    """Every row has both numbers, and no row is faster than the chosen plan."""
    model, batch, loss = tagger()
    with dp.parallelize(model, batch, loss, adam(model), **QUICK) as step:
        found = step.confirmation
        text = str(step)
    assert found is not None
    assert found.rows[0].candidate.is_single
    measured = [row.measured_ns for row in found.rows]
    assert all(ns is not None for ns in measured)
    assert (found.best.measured_ns or 0) <= TIE * min(ns for ns in measured if ns is not None)
    assert "The ordinary step takes" in text
    assert step.plan == found.best.plan
    assert found.verdict() in text
    assert all(row.name in text for row in found.rows)
    assert step.measured_ns is not None


@pytest.mark.slow
def test_inference_gives_the_models_output() -> None:
    """Without loss and optimizer the step returns what the model returns."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    x = torch.randn(5, 4)
    with dp.parallelize(model, x, **QUICK) as infer:
        assert torch.allclose(infer(x), model(x))


@pytest.mark.slow
def test_micro_batches_are_tried_as_graphs_of_their_own() -> None:
    """`auto` measures several numbers of chunks; the loss is that of the whole batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    batch = (torch.randn(6, 4).double(), torch.randint(0, 3, (6,)))
    expected = float(nn.functional.cross_entropy(model(batch[0]), batch[1]).detach())
    options = {**QUICK, "budget": "20ev,6000s", "micro_batches": "auto"}
    with dp.parallelize(model, batch, nn.functional.cross_entropy, adam(model), **options) as step:
        assert step.confirmation is not None
        names = [row.name for row in step.confirmation.rows]
        assert any(name.startswith("2 micro-batches") for name in names)
        assert any(name.startswith("4 micro-batches") for name in names)
        assert any("8 and more micro-batches not tried" in note for note in step.notes)
        assert float(step(*batch)) == pytest.approx(expected, abs=1e-9)


@pytest.mark.slow
def test_micro_batches_are_those_of_the_whole_batch_or_refused() -> None:
    """Padded labels of a model that gives its own loss; rows that are said; pairs of rows."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(4, 3)

        def forward(self, x: Any, y: Any) -> Any:
            return nn.functional.cross_entropy(self.out(x.transpose(0, 1)), y)

    torch.manual_seed(0)
    model = Own().double()
    batch = (torch.randn(4, 6).double(), torch.tensor([0, -100, -100, 1, 2, 0]))
    options = {**QUICK, "confirm": False, "batch_dims": {0: 1}}
    expected = float(model(*batch).detach())
    with dp.parallelize(model, batch, None, adam(model), micro_batches=2, **options) as step:
        assert float(step(*batch)) == pytest.approx(expected, abs=1e-9)
        step.sync()

    def pairs(m: Any, x: Any, y: Any) -> Any:
        out = m.out(x.transpose(0, 1))
        return nn.functional.cross_entropy(out @ out.T, y.clamp(0, 2))

    with pytest.raises(CaptureError, match=r"aten\.mm\.default"):
        dp.parallelize(model, batch, pairs, adam(model), micro_batches=2, **options)
    options["micro_batches"] = "auto"
    with dp.parallelize(model, batch, pairs, adam(model), **options) as step:
        assert any("2 and more micro-batches not tried" in note for note in step.notes)


def test_what_micro_batches_may_change_is_noted() -> None:
    """Statistics of batch norm, and steps that were not compared."""
    model, batch, loss = tagger()
    options = {**QUICK, "confirm": False, "micro_batches": 2}
    with dp.parallelize(model, batch, loss, adam(model), **options) as step:
        assert "batch norm takes its statistics over each micro-batch" in str(step)
    graph = dataclasses.replace(step.graph, meta={**step.graph.meta, "unchecked": "too large"})
    assert "not compared with the whole batch: too large" in step_notes.in_chunks(graph)[0]


@pytest.mark.slow
def test_batch_norm_keeps_its_batch() -> None:
    """Chunks would change the statistics, so `auto` leaves the batch whole and says so."""
    model, batch, loss = tagger()
    options = {**QUICK, "micro_batches": "auto"}
    with dp.parallelize(model, batch, loss, adam(model), **options) as step:
        assert step.micro_batches == 1
        assert "batch norm" in str(step)


@pytest.mark.slow
def test_one_device_needs_no_search() -> None:
    """On one logical device there is one plan, measured like any other."""
    model = nn.Linear(4, 3)
    with dp.parallelize(model, torch.randn(2, 4), machine=1, budget="50ev,1200s") as step:
        assert step.devices == ("cpu:0",)
        assert "no other plan" in str(step)


def test_without_confirming_nothing_is_claimed() -> None:
    """The best predicted plan is taken, and the report says that it was not compared."""
    model, batch, loss = tagger()
    with dp.parallelize(model, batch, loss, adam(model), confirm=False, **QUICK) as step:
        assert step.confirmation is None
        assert "not compared with other plans" in str(step)
        step(*batch)


@pytest.mark.slow
def test_verify_compares_with_the_unplaced_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """`verify` runs the check of the chosen plan before it is returned; a note says what was
    compared with an eager step."""
    checked = []
    real = parallel_job.check

    def noted(*args: Any, **kwargs: Any) -> Any:
        checked.append(real(*args, **kwargs))
        return checked[-1]

    monkeypatch.setattr(parallel_job, "check", noted)
    model, batch, loss = tagger()
    with dp.parallelize(model, batch, loss, adam(model), verify=True, **QUICK) as step:
        assert f"note: {checked[0].beside_own}" in str(step)
    assert [report.is_bit_equal for report in checked] == [True]


@pytest.mark.slow
def test_a_plan_that_kills_its_process_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are measured and one of them is used; the table names what happened."""
    command = hostile(["kill", *["ok"] * 30], tmp_path)
    monkeypatch.setattr(module, "Measurer", partial(Measurer, time_limit_s=LONG_S, command=command))
    model, batch, loss = tagger()
    with dp.parallelize(model, batch, loss, adam(model), **QUICK) as step:
        found = step.confirmation
        assert found is not None
        assert found.rows[0].measurement.kind == "killed"
        assert step.plan != found.rows[0].plan
        assert "killed by SIGKILL" in str(step)
        step(*batch)
    dp.parallelize(model, batch, loss, adam(model), **QUICK).close()


@pytest.mark.slow
def test_when_no_plan_runs_every_reason_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing measured is an error that names what happened to each plan."""
    command = hostile(["exit"] * 10, tmp_path)
    monkeypatch.setattr(module, "Measurer", partial(Measurer, time_limit_s=LONG_S, command=command))
    model = nn.Linear(4, 3)
    with pytest.raises(ExecutionError, match=r"None of 1 plans .*cpu:0 alone: .*code 7"):
        dp.parallelize(model, torch.randn(2, 4), machine=1, budget="50ev,1200s")


@pytest.mark.slow
def test_where_nothing_is_measured_in_time_the_best_predicted_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy computer ends no training script: a warning says that nothing was measured, and the
    step trains as ever."""
    command = hostile(["hang"] * 10, tmp_path)
    monkeypatch.setattr(module, "Measurer", partial(Measurer, time_limit_s=1.0, command=command))
    model, batch, loss = tagger()
    with pytest.warns(UserWarning, match="No plan was measured within .* larger budget"):
        step = dp.parallelize(model, batch, loss, adam(model), **QUICK)
    with step:
        assert step.confirmation is not None
        predicted = [row.predicted_ns for row in step.confirmation.rows]
        assert step.plan.predicted.step_ns == min(predicted)
        assert "No plan was measured in time" in str(step)
        assert step.measured_ns is None
        assert float(step(*batch)) > 0


@pytest.mark.slow
def test_the_next_best_is_used_when_the_best_fails_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that ran in its own process may not fit beside the model; then the next one does."""
    real, calls = parallel_job.compile, []

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*args, **kwargs)

    monkeypatch.setattr(parallel_job, "compile", failing)
    model, batch, loss = tagger()
    with dp.parallelize(model, batch, loss, adam(model), **QUICK) as step:
        assert step.confirmation is not None
        assert step.plan == step.confirmation.ranked[1].plan
        assert "did not run in this process: CUDA out of memory" in str(step)


@pytest.mark.slow
def test_limits_and_pins_are_kept() -> None:
    """A pinned module runs where it was pinned in every plan that is tried."""
    model, batch, loss = tagger()
    options = {**QUICK, "pins": {"embed": "cpu:1"}}
    with dp.parallelize(model, batch, loss, adam(model), **options) as step:
        assert step.confirmation is not None
        for row in step.confirmation.rows:
            index = step.graph.op_index["embedding"]
            assert row.plan.device_names[row.plan.placement[index]] == "cpu:1"
    with pytest.raises(InfeasibleError, match="No placement can fit"):
        dp.parallelize(
            model, batch, loss, adam(model), limits={"cpu:0": "1KiB", "cpu:1": "1KiB"}, **QUICK
        )


class Residual(nn.Module):
    """Layers that keep much for the backward pass."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 8 * width), nn.GELU(), nn.Linear(8 * width, width))
            for _ in range(6)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.slow
def test_what_does_not_fit_is_computed_again() -> None:
    """Under a limit that holds the step only if its layers are, they are, and the report says so;
    losses are those of eager torch."""
    torch.manual_seed(0)
    model, x = Residual(), torch.randn(1024, 32)
    twin = copy.deepcopy(model)
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
    options: dict[str, Any] = {"machine": "cpux1", "confirm": False, "budget": "200ev"}
    options["limits"] = {"cpu:0": "9MB"}  # 6 layers keep 6 x 2 x 1 MB and more
    batch = (x,)
    with pytest.raises(InfeasibleError, match="recompute=True"):
        dp.parallelize(model, batch, mean_square, optimizer, recompute=False, **options)
    with dp.parallelize(model, batch, mean_square, optimizer, **options) as step:
        assert "computed again" in str(step)
        assert step.graph.meta["recompute"] == [f"layers.{k}" for k in range(6)]
        for _ in range(2):
            other.zero_grad()
            expected = mean_square(twin, x)
            expected.backward()
            other.step()
            assert float(step(x)) == pytest.approx(float(expected.detach()), abs=1e-6)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"micro_batches": 0}, InputError, "positive number or 'auto'"),
        ({"micro_batches": "two"}, InputError, "'two'"),
        ({"machine": 0}, MachineError, "logical CPU devices"),
        ({"machine": "h100x99999"}, MachineError, "99999"),
        ({"machine": 1.5}, MachineError, "1.5"),
        ({"budget": "soon"}, InputError, "soon"),
        ({"exclude": "cpu:0"}, InputError, "list of device names"),
        ({"machine": "k40x2"}, InputError, "Only devices of this computer"),
        ({"limits": ["1GiB"]}, ProblemError, "limits must be a dictionary"),
        ({"example_kwargs": [1]}, CaptureError, "Keyword inputs must be a dict"),
        ({"progress": 3}, InputError, "progress must be a function"),
    ],
)
def test_bad_arguments_are_named(options: Any, error: Any, words: str) -> None:
    """Each is refused before anything is captured."""
    with pytest.raises(error, match=words):
        dp.parallelize(nn.Linear(4, 3), torch.randn(2, 4), **{**QUICK, **options})


def test_models_that_cannot_run_are_refused() -> None:
    """A function is no module, and a model on the meta device has no values."""
    with pytest.raises(InputError, match=r"needs a torch.nn.Module, got function"):
        dp.parallelize(lambda x: x, torch.randn(2, 4), **QUICK)
    with torch.device("meta"):
        model = nn.Linear(4, 3)
    with pytest.raises(InputError, match="'weight' is on the meta device"):
        dp.parallelize(model, torch.randn(2, 4), **QUICK)


def test_an_option_that_capture_does_not_take_is_named() -> None:
    """As Python would, before any work; a slip gets the name that was meant."""
    with pytest.raises(TypeError, match=r"argument 'autocst'.*autocast"):
        dp.parallelize(nn.Linear(4, 3), torch.randn(2, 4), autocst=torch.bfloat16, **QUICK)


def test_a_captured_step_is_taken_in_place_of_its_model() -> None:
    """Its own loss, optimizer and options hold: the step is that of the model, and whoever gives
    them again is told."""
    x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
    options = {**QUICK, "confirm": False}
    losses = []
    for way in ("model", "captured"):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        own: Any = (model, {"input": x, "target": y}, own_loss, adam(model))
        if way == "captured":
            graph = dp.capture(*own, 2, clip_grad_norm=0.1)
            step = dp.parallelize(graph, own[1], **options)
            assert step.graph == graph
        else:
            step = dp.parallelize(*own, micro_batches=2, clip_grad_norm=0.1, **options)
        with step:
            losses.append([float(step(input=x, target=y)) for _ in range(3)])
            step.sync()
    assert losses[0] == losses[1]
    for name, value in (("optimizer", adam(model)), ("micro_batches", 2), ("fuse", True)):
        with pytest.raises(InputError, match=f"has its own {name}.*dp.capture"):
            dp.parallelize(graph, own[1], **{**options, name: value})


def own_loss(model: Any, input: Any, target: Any) -> Any:
    return nn.functional.cross_entropy(model(input), target)


def test_the_budget_covers_everything() -> None:
    """Search and measuring share what capture leaves; a best single device can always be run."""
    clock = BudgetClock(10.0, None, started=0.0)
    assert clock.spent > 1
    assert clock.confirm_seconds() == 15.0
    assert clock.search_budget(2, True).seconds == 0.5
    assert BudgetClock.parse("500ev").search_budget(3, True).evaluations == 500


@pytest.mark.slow
def test_an_exported_program_is_told_to_give_its_module() -> None:
    """torch's own container of a model is none; the module in it runs."""
    model, x = nn.Linear(3, 2).eval(), torch.randn(4, 3)
    exported = torch.export.export(model, (x,))
    with pytest.raises(InputError, match=r"got ExportedProgram\. Pass its module"):
        dp.parallelize(exported, x, machine=1, budget="1ev", confirm=False)  # type: ignore[arg-type]
    with pytest.raises(CaptureError, match=r"got ExportedProgram\. Pass its module"):
        dp.capture(exported, x)  # type: ignore[arg-type]
    with dp.parallelize(exported.module(), x, machine=1, budget="1ev", confirm=False) as infer:
        assert torch.equal(infer(x), model(x))


class Filling(nn.Module):
    """Writes each call into the next row of a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("rows", torch.zeros(3, 2))
        self.register_buffer("place", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Any) -> Any:
        self.rows.index_copy_(0, self.place[None], self.linear(x))
        self.place.add_(1)
        return self.rows.sum(0)


@pytest.mark.slow
def test_a_step_that_cannot_be_repeated_is_not_timed_but_runs() -> None:
    """A cache is full after some steps of one batch; the step begins with an empty one."""
    model = Filling().eval()
    twin = copy.deepcopy(model)
    inputs = [torch.randn(1, 3) for _ in range(3)]
    with dp.parallelize(model, inputs[0], machine=2, budget="5ev", confirm=False) as step:
        assert step.measured_ns is None
        assert "cannot be repeated" in str(step)
        for x in inputs:
            torch.testing.assert_close(step(x), twin(x).detach())
        with pytest.raises(ExecutionError, match="out of bounds"):
            step(inputs[0])
        step.sync()
    assert int(model.place) == 3
