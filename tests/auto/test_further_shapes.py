"""`parallelize` for batches of several shapes."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import devplace as dp
from devplace.auto.further_shapes import limits_beside, stated
from devplace.auto.parallelize import _wants_shapes
from devplace.errors import (
    CaptureError,
    InfeasibleError,
    InputError,
    PlanMismatchError,
    ShapeError,
)
from devplace.testing import hand_machine, hand_problem
from tests.run.placed import largest_difference

QUICK: dict[str, Any] = {
    "machine": 2,
    "budget": "30ev,1200s",
    "placer": dp.placers.Random(),
    "confirm": False,
}


class Reader(nn.Module):
    """Words of any number to a kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.one, self.two = nn.Embedding(11, 8), nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, words: Any) -> Any:
        return self.two(self.one(self.embed(words)).tanh().mean(1))


def made() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Reader().double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def batch(rows: int, length: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(100 * rows + length)
    words = torch.randint(11, (rows, length), generator=generator)
    return words, torch.randint(3, (rows,), generator=generator)


def ordinary(model: Any, optimizer: Any, x: Any, y: Any) -> float:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def homes(graph: Any, plan: Any, replaced: Any) -> dict[str, int]:
    return {graph.ops[op].name: plan.placement[op] for op in replaced}


@pytest.mark.slow
def test_stated_shapes_train_as_the_ordinary_loop_and_move_no_weights() -> None:
    """Lengths and a smaller last batch; weights and state are where the first plan has them, and
    the report names every shape."""
    model, optimizer = made()
    twin, other = made()
    shapes = [batch(6, 3), batch(4, 5)]
    step = dp.parallelize(model, batch(6, 5), F.cross_entropy, optimizer, shapes=shapes, **QUICK)
    first = homes(step.graph, step.plan, step.graph.replaced)
    assert len(set(first.values())) == 2
    for one in step.further:
        assert homes(one.graph, one.plan, one.graph.replaced) == first
    assert [list(one.inputs.values()) for one in step.further] == [[(6, 3), (6,)], [(4, 5), (4,)]]
    assert "Also 0 [6, 3], 1 [6]: predicted" in str(step)
    for size in [(6, 5), (6, 3), (6, 5), (4, 5), (6, 3)]:
        expected = ordinary(twin, other, *batch(*size))
        assert float(step(*batch(*size))) == pytest.approx(expected, abs=1e-9)
    with pytest.raises(ShapeError, match=r"\[5, 5\], the step knows 0 \[6, 5\], 1 \[6\]; 0 \[6, 3"):
        step(*batch(5, 5))
    step.sync()
    step.close()
    assert largest_difference(model, twin) < 1e-9
    assert {int(state["step"]) for state in optimizer.state.values()} == {5}


@pytest.mark.parametrize("synced", [False, True])
@pytest.mark.slow
def test_a_shape_may_be_met_in_training(synced: bool) -> None:
    """Up to max_shapes, captured then, though the model has values of before or was synced."""
    model, optimizer = made()
    twin, other = made()
    told: list[str] = []
    step = dp.parallelize(
        *(model, batch(6, 5), F.cross_entropy, optimizer),
        max_shapes=2,
        progress=told.append,
        **QUICK,
    )
    for number, size in enumerate([(6, 5), (6, 5), (3, 4), (6, 5), (3, 4)]):
        if synced and number == 2:
            step.sync()
        told.clear()
        expected = ordinary(twin, other, *batch(*size))
        found = step(batch(*size)) if number == 2 else step(*batch(*size))
        assert float(found) == pytest.approx(expected, abs=1e-9)
        assert ("capturing the step with another shape" in told) is (number == 2)
    with pytest.raises(PlanMismatchError, match="behind"):
        model.state_dict()
    with pytest.raises(ShapeError, match=r"at most max_shapes=2 shapes.*0 \[3, 4\]"):
        step(*batch(2, 4))
    step.sync()
    assert largest_difference(model, twin) < 1e-9
    assert step.steps_done == 5
    step.close()


def test_a_shape_met_in_another_mode_is_refused() -> None:
    """A model in eval mode is not trained by accident."""
    model, optimizer = made()
    step = dp.parallelize(model, batch(6, 5), F.cross_entropy, optimizer, max_shapes=2, **QUICK)
    model.eval()
    with pytest.raises(PlanMismatchError, match="eval mode"):
        step(*batch(3, 4))
    assert step.further == []
    step.close()


@pytest.mark.slow
def test_micro_batches_are_as_many_as_the_rows_allow() -> None:
    """Of 4 for the example 3 for 9 rows and 1 for 5; the numbers are those of whole batches."""
    model, optimizer = made()
    twin, other = made()
    shapes = [batch(9, 5), batch(5, 5)]
    given = model, batch(8, 5), F.cross_entropy, optimizer
    with dp.parallelize(*given, shapes=shapes, micro_batches=4, **QUICK) as step:
        assert [each.graph.meta["micro_batches"] for each in step.further] == [3, 1]
        for size in [(9, 5), (8, 5), (5, 5)]:
            expected = ordinary(twin, other, *batch(*size))
            assert float(step(*batch(*size))) == pytest.approx(expected, abs=1e-9)
        step.sync()


@pytest.mark.slow
def test_inference_takes_several_shapes() -> None:
    """Batches of one tensor; one stated twice, and that of the example, count once."""
    model = made()[0].eval()
    words = [batch(*size)[0] for size in [(6, 5), (1, 5), (6, 5), (1, 5)]]
    with dp.parallelize(model, words[0], shapes=words[1:], **QUICK) as step:
        assert len(step.further) == 1
        for each in words:
            torch.testing.assert_close(step(each), model(each))


@pytest.mark.slow
def test_a_shape_that_does_not_fit_beside_the_weights_is_named() -> None:
    """The larger batch should be the example."""
    model, optimizer = made()
    limits = {"cpu:0": "60KB", "cpu:1": "60KB"}
    with pytest.raises(InfeasibleError, match=r"0 \[600, 5\], 1 \[600\] does not.*as the example"):
        dp.parallelize(
            *(model, batch(6, 5), F.cross_entropy, optimizer),
            shapes=[batch(600, 5)],
            limits=limits,
            **QUICK,
        )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shapes": batch(6, 3)}, r"shapes\[0\] has 1"),
        ({"shapes": batch(6, 3)[0]}, "list of batches, got Tensor"),
        ({"shapes": {"x": batch(6, 3)}}, "list of batches, got dict"),
        ({"shapes": 3}, "list of batches, got int"),
        ({"shapes": [batch(6, 3)] * 2, "max_shapes": 2}, "which are 3, got 2"),
        ({"max_shapes": 0}, "positive number, got 0"),
        ({"max_shapes": True}, "positive number, got True"),
    ],
)
def test_bad_arguments_are_named(options: Any, words: str) -> None:
    """Before anything is captured."""
    model, optimizer = made()
    with pytest.raises(InputError, match=words):
        dp.parallelize(model, batch(6, 5), F.cross_entropy, optimizer, **{**QUICK, **options})


def test_several_processes_run_one_shape() -> None:
    """They are refused by name, before they plan."""
    group: Any = object()
    with pytest.raises(InputError, match="Several processes run a step of one shape"):
        _wants_shapes([batch(6, 3)], 1, nn.Linear(1, 1), group)
    assert not _wants_shapes([], 1, nn.Linear(1, 1), group)


def test_a_captured_step_has_one_shape() -> None:
    """The model is to be given in its place."""
    model, optimizer = made()
    graph = dp.capture(model, batch(6, 5), F.cross_entropy, optimizer)
    with pytest.raises(InputError, match="A captured step has one shape"):
        dp.parallelize(graph, batch(6, 5), shapes=[batch(3, 5)], **QUICK)


class Picky(Reader):
    """Cannot be captured for three words."""

    def forward(self, words: Any) -> Any:
        if words.shape[1] == 3:
            words = words[words.sum() :]
        return super().forward(words)


def test_a_shape_that_cannot_be_captured_is_told_before_the_search() -> None:
    """By the capture of it."""
    model = Picky()
    told: list[str] = []
    with pytest.raises(CaptureError):
        dp.parallelize(
            *(model, batch(6, 5), F.cross_entropy, torch.optim.SGD(model.parameters())),
            shapes=[batch(6, 3)],
            progress=told.append,
            **QUICK,
        )
    assert told == ["capturing the step", "capturing the step with another shape"]


def test_a_shape_that_cannot_be_captured_when_it_is_met_leaves_the_step_as_it_was() -> None:
    """It goes on, and the model is still known to be behind."""
    model = Picky()
    given = model, batch(6, 5), F.cross_entropy, torch.optim.SGD(model.parameters())
    with dp.parallelize(*given, max_shapes=3, **QUICK) as step:
        step(*batch(6, 5))
        with pytest.raises(CaptureError):
            step(*batch(6, 3))
        with pytest.raises(PlanMismatchError, match="1 step behind"):
            model.state_dict()
        step(*batch(6, 5))
        assert step.steps_done == 2
        step.sync()
    assert step.further == []


def test_what_shapes_keep_of_a_gpu_is_off_the_limit_of_the_next() -> None:
    """Not on CPU devices, which give their memory back; never 0, which would leave a device out."""
    text = """
        x = input bytes=4
        w = parameter bytes=30
        y = aten.mm(x, w) bytes=8 result=output
    """
    problem = hand_problem(text, hand_machine({"cuda:0": 1000, "cuda:1": 500, "cpu:0": 90}))
    problem = replace(problem, limits={"cpu:0": "80B", 0: 900})
    assert limits_beside({"cuda:0": 300, "cuda:1": 600}, problem) == {
        "cpu:0": "80B",
        0: 900,
        "cuda:0": 600,
        "cuda:1": 1,
    }
    beside = replace(problem, limits=limits_beside({"cuda:0": 300, "cuda:1": 600}, problem))
    assert beside.limit_bytes == (600, 1, 80)
    assert limits_beside({}, problem) == problem.limits


def test_batches_are_read_as_the_example_is() -> None:
    """A tensor, a tuple or a dict of keyword inputs."""
    x = torch.ones(2)
    assert stated([x], x, None) == [((x,), {})]
    assert stated([(x, x)], (x, x), None) == [((x, x), {})]
    assert stated([{"x": x}], {"x": x}, None) == [((), {"x": x})]


def test_the_copied_model_is_as_before() -> None:
    """Planning for further shapes changes nothing of the user's."""
    model, optimizer = made()
    before = copy.deepcopy(model.state_dict())
    dp.parallelize(
        model, batch(6, 5), F.cross_entropy, optimizer, shapes=[batch(2, 5)], **QUICK
    ).close()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not optimizer.state
