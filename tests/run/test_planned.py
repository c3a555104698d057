"""Plans made runnable: in the process that made them, from a file, and after a resume."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import devplace as dp
from devplace.errors import InputError, PlanError, PlanMismatchError
from devplace.graph.fusion import fuse_for
from devplace.run import check
from tests.step_capture.rewrites.test_stacking import batches, token_loss, unrolled

BATCH = (torch.linspace(-1, 1, 24).reshape(4, 6).double(), torch.tensor([0, 1, 2, 1]))


def loss_fn(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the batch."""
    return torch.nn.functional.cross_entropy(model(x), y)


def make(width: int = 8) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A small seeded model in float64 with Adam."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, width), torch.nn.Tanh(), torch.nn.Linear(width, 3)
    ).double()
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def captured(model: Any, optimizer: Any) -> dp.graph.Captured:
    """The step of one batch."""
    return dp.capture(model, BATCH, loss_fn, optimizer)


def make_plan(graph: dp.graph.Captured, seed: int = 0) -> dp.Plan:
    """A random placement on three logical CPU devices."""
    machine = dp.load_machine("cpux3")
    problem = dp.Problem(graph, machine, dp.Analytic()(graph, machine))
    return dp.place(problem, dp.placers.Random(), budget="8ev", seed=seed).plan


def eager(model: Any, optimizer: Any, steps: int) -> None:
    """Train as without devplace."""
    for _ in range(steps):
        optimizer.zero_grad()
        loss_fn(model, *BATCH).backward()
        optimizer.step()


@pytest.mark.parametrize("given", ["step", "step, others like it"])
def test_a_captured_step_brings_model_and_optimizer(given: str) -> None:
    """Three steps of it equal three eager ones; others just like them can be given."""
    model, optimizer = make()
    graph = captured(model, optimizer)
    plan = make_plan(graph)
    if given == "step, others like it":
        model, optimizer = make()
        step = dp.compile(graph, plan, model=model, optimizer=optimizer)
    else:
        step = dp.compile(graph, plan)
    for _ in range(3):
        step(*BATCH)
    step.sync()
    step.close()
    expected, expected_optimizer = make()
    eager(expected, expected_optimizer, 3)
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


def test_a_plan_from_a_file_runs_after_the_step_is_captured_again(tmp_path: Path) -> None:
    """Without a captured step it is refused, whatever is given instead; one just made as well."""
    model, optimizer = make()
    graph = captured(model, optimizer)
    made = make_plan(graph)
    made.save(tmp_path / "plan.json")
    plan = dp.load_plan(tmp_path / "plan.json")
    for other, what in ((graph.graph, "is data alone"), (model, "got Sequential")):
        for one in (made, plan):
            with pytest.raises(InputError, match=f"a captured step is needed.*{what}.*dp.capture"):
                dp.compile(other, one)  # type: ignore[arg-type]
    step = dp.compile(captured(model, optimizer), plan)
    assert float(step(*BATCH)) > float(step(*BATCH))
    step.close()


def test_a_plan_file_still_fits_when_training_is_resumed(tmp_path: Path) -> None:
    """Steps the optimizer has made are no part of the graph: the plan made before the first step
    runs on a loaded checkpoint, and goes on as eager training does."""
    model, optimizer = make()
    make_plan(captured(model, optimizer)).save(tmp_path / "plan.json")
    eager(model, optimizer, 3)
    expected, expected_optimizer = make()
    eager(expected, expected_optimizer, 5)
    resumed, resumed_optimizer = make()
    resumed.load_state_dict(copy.deepcopy(model.state_dict()))
    resumed_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    plan = dp.load_plan(tmp_path / "plan.json")
    step = dp.compile(captured(resumed, resumed_optimizer), plan)
    step(*BATCH)
    step(*BATCH)
    step.sync()
    step.close()
    for mine, theirs in zip(resumed.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


def test_a_plan_for_another_width_is_refused() -> None:
    """The message says that shapes differ."""
    model, optimizer = make()
    plan = make_plan(captured(model, optimizer))
    wider, other = make(width=9)
    with pytest.raises(PlanMismatchError, match="differ"):
        dp.compile(captured(wider, other), plan)


@pytest.mark.parametrize("options", [{"clip_grad_norm": 0.01}, {"autocast": torch.bfloat16}])
def test_a_plan_from_a_file_runs_with_the_options_of_its_capture(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """Without them it is another step; with them it clips, or computes in 16 bits."""
    model, optimizer = make()
    model = model.float()
    batch = (BATCH[0].float(), BATCH[1])
    graph = dp.capture(model, batch, loss_fn, optimizer, **options)
    machine = dp.load_machine("cpux2")
    problem = dp.Problem(graph, machine, dp.Analytic()(graph, machine))
    dp.place(problem, dp.placers.Even(), budget="1ev").plan.save(tmp_path / "plan.json")
    plan = dp.load_plan(tmp_path / "plan.json")
    with pytest.raises(PlanMismatchError, match=f"another step.*{next(iter(options))}"):
        dp.compile(dp.capture(model, batch, loss_fn, optimizer), plan)
    with dp.compile(graph, plan) as first:
        expected = [float(first(*batch)) for _ in range(3)]
    again = dp.capture(model, batch, loss_fn, optimizer, **options)
    with dp.compile(again, plan) as step:
        assert [float(step(*batch)) for _ in range(3)] == expected


def test_a_plan_with_stacked_gradients_runs_with_that_option(tmp_path: Path) -> None:
    """It holds other ops, so without the option it is another step."""
    model, batch = unrolled(), batches()[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = dp.capture(model, batch, token_loss, optimizer, stack_gradients=True)
    machine = dp.load_machine("cpux2")
    problem = dp.Problem(graph, machine, dp.Analytic()(graph, machine))
    plan = dp.place(problem, dp.placers.Even(), budget="1ev").plan
    assert dp.check(graph, plan, batch).is_bit_equal
    plan.save(tmp_path / "plan.json")
    loaded = dp.load_plan(tmp_path / "plan.json")
    with pytest.raises(PlanMismatchError, match="stack_gradients"):
        dp.compile(dp.capture(model, batch, token_loss, optimizer), loaded)
    with dp.compile(graph, plan) as first:
        expected = [float(first(*batch)) for _ in range(3)]
    again = dp.capture(model, batch, token_loss, optimizer, stack_gradients=True)
    with dp.compile(again, loaded) as step:
        assert [float(step(*batch)) for _ in range(3)] == expected


def test_a_fused_plan_with_pins_from_a_file_is_fused_around_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan file has the pins, so capturing again gives its groups."""
    monkeypatch.setenv("DEVPLACE_COMPILE", "0")
    layers = (torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 4))
    model, x, y = torch.nn.Sequential(*layers), torch.randn(6, 8), torch.randint(4, (6,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss, pins = torch.nn.CrossEntropyLoss(), {"1": "cpu:1", "2": "cpu:0"}
    graph = dp.capture(model, (x, y), loss, optimizer, fuse=True)
    parted = fuse_for(graph, pins)
    assert len(parted.ops) > len(graph.ops)
    machine = dp.load_machine("cpux2")
    problem = dp.Problem(parted, machine, dp.Analytic()(parted, machine), pins=pins)
    dp.place(problem, dp.placers.Even(), budget="1ev").plan.save(tmp_path / "plan.json")
    plan = dp.load_plan(tmp_path / "plan.json")
    with dp.compile(parted, plan) as first:
        expected = [float(first(x, y)) for _ in range(3)]
    again = dp.capture(model, (x, y), loss, optimizer, fuse=True)
    with dp.compile(again, plan) as step:
        assert [float(step(x, y)) for _ in range(3)] == expected


def test_another_loss_than_the_plans_is_refused() -> None:
    """Unless it computes the same."""
    model, optimizer = make()
    plan = make_plan(captured(model, optimizer))

    def double(model: Any, x: Any, y: Any) -> Any:
        return 2 * loss_fn(model, x, y)

    def same(model: Any, x: Any, y: Any) -> Any:
        return torch.nn.functional.cross_entropy(model(x), y)

    with pytest.raises(PlanMismatchError, match="another step"):
        dp.compile(dp.capture(model, BATCH, double, optimizer), plan)
    with dp.compile(dp.capture(model, BATCH, same, optimizer), plan) as step:
        assert float(step(*BATCH)) > float(step(*BATCH))


def test_what_is_no_plan_is_told_apart() -> None:
    """A path, a result, or something else."""
    graph = captured(*make())
    plan = make_plan(graph)
    for given, way in (
        ("plan.json", r"dp\.load_plan\('plan\.json'\)"),
        (SimpleNamespace(plan=plan), r"result\.plan"),
        (3, "dp.place"),
    ):
        with pytest.raises(InputError, match=f"must be a dp.Plan, got .*{way}"):
            dp.compile(graph, given)  # type: ignore[arg-type]


def test_a_plan_with_other_op_names_is_not_run() -> None:
    """A plan is compiled and checked only with the step whose ops it names."""
    graph = captured(*make())
    plan = make_plan(graph)
    other = dataclasses.replace(plan, ops=("nonsense", *plan.ops[1:]), problem=None)
    with pytest.raises(PlanMismatchError, match="'nonsense' is not there"):
        dp.compile(graph, other)
    with pytest.raises(PlanMismatchError, match="'nonsense' is not there"):
        check(graph, other, BATCH)
    torn = dataclasses.replace(plan, placement=(0.5, *plan.placement[1:]))
    with pytest.raises(PlanError, match=r"is on device 0\.5"):
        dp.compile(graph, torn)
