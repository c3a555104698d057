"""Inputs whose rows are elsewhere than in the first dimension, or that have none."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.step_capture.checks import assert_same_training, sgd
from torch import nn

from devplace.errors import CaptureError
from devplace.step_capture import capture
from devplace.step_capture.batch import num_rows, with_rows


class Rotated(nn.Module):
    """x [B, S, 12]; ids [3, B, S], as multi-dimensional rotary positions are."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(12, 12), nn.Linear(12, 4)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        angles = ids.double().unsqueeze(-1) * torch.tensor([1.0, 0.1, 0.01, 0.001]).double()
        return self.o((self.q(x) * torch.cat([*angles], -1).cos()).mean(1))


class Masked(nn.Module):
    """x [B, S, 16]; mask [S, S] for all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = self.q(x) @ x.transpose(1, 2)
        return (scores + mask).softmax(-1) @ x


class TimeFirst(nn.Module):
    """x [T, B, 8], as recurrent layers take it by default."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.o = nn.GRU(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o(self.rnn(x)[0][-1])


def rotated(m: nn.Module, x: Any, ids: Any, y: Any) -> torch.Tensor:
    """Loss of `Rotated`."""
    return F.cross_entropy(m(x, ids), y)


def error(m: nn.Module, x: Any, mask: Any) -> torch.Tensor:
    """Loss of `Masked`."""
    return F.mse_loss(m(x, mask), x)


def last(m: nn.Module, x: Any, y: Any) -> torch.Tensor:
    """Loss of `TimeFirst`."""
    return F.cross_entropy(m(x), y)


def rotation(rows: int) -> tuple[torch.Tensor, ...]:
    """A batch of `Rotated`."""
    ids = torch.arange(15 * rows).view(3, rows, 5) % 7
    return torch.randn(rows, 5, 12).double(), ids, torch.randint(4, (rows,))


def square(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of `Masked` with as many rows as positions."""
    return torch.randn(rows, rows, 16).double(), torch.full((rows, rows), -3.0).double().triu(1)


def refused(model: nn.Module, batch: Any, loss: Any, micro_batches: int = 2, **options: Any) -> str:
    """Message of a refusal."""
    with pytest.raises(CaptureError) as caught:
        capture(model, batch, loss, sgd(model), micro_batches, **options)
    return str(caught.value)


@pytest.mark.parametrize("rows", [3, 4])
def test_rows_in_another_dimension_are_said(rows: int) -> None:
    """With its dimension the loss is the whole batch's; without, a refusal names the input."""
    model = Rotated().double()
    for dim in (1, -2):
        assert_same_training(
            model, [rotation(rows)], rotated, sgd, micro_batches=3, batch_dims={1: dim}
        )
    message = refused(model, rotation(rows), rotated, 3)
    assert "not with micro_batches=3" in message
    assert "batch_dims={'1': 1}" in message


def test_a_table_that_has_as_many_rows_is_read_whole() -> None:
    """A mask with the batch's size is not cut where that is said; else the refusal says it."""
    model = Masked().double()
    assert_same_training(model, [square(4)], error, sgd, micro_batches=2, batch_dims={"1": None})
    for micro_batches in (2, 4):  # one is cut to what no longer fits, the other to one row
        message = refused(model, square(4), error, micro_batches)
        assert "It is the same if '1' is read whole: batch_dims={'1': None}" in message


def test_the_first_op_that_differs_is_named_with_its_input() -> None:
    """Module, line and op, the loss and what it should be."""
    model = Masked().double()
    message = refused(model, square(4), error, 4)
    assert "the loss is" in message
    assert "aten.add.Tensor at the model (test_batch_dims.py:40), of input '0', '1'" in (message)


@pytest.mark.parametrize("length", [5, 4])
@pytest.mark.slow
def test_time_first(length: int) -> None:
    """Cut along time, a recurrent net would be another one, or not fit."""
    model = TimeFirst().double()
    batch = (torch.randn(length, 4, 8).double(), torch.randint(3, (4,)))
    assert_same_training(model, [batch], last, sgd, micro_batches=2, batch_dims={0: 1})
    assert "batch_dims={'0': 1}" in refused(model, batch, last)


def test_names_cover_what_is_inside() -> None:
    """Nested containers and keywords; the longest name counts."""

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 8)

        def forward(self, ids: Any, extra: Any, labels: Any) -> Any:
            hidden = self.embed(ids) + extra["table"][0] * extra["row"][1]
            return {"loss": F.cross_entropy(hidden.flatten(0, 1), labels.flatten())}

    ids = torch.randint(8, (4, 4))
    extra = {"table": [torch.randn(4, 8).double()], "row": (1, torch.rand(4, 1, 1).double())}
    batch = {"ids": ids, "extra": extra, "labels": ids.clone()}

    def whole(m: nn.Module, **inputs: Any) -> torch.Tensor:
        return m(**inputs)["loss"]  # type: ignore[no-any-return]

    for dims in ({"extra.table": None}, {"extra": None, "extra.row": 0}):
        assert_same_training(
            Nested().double(),
            [batch],
            None,
            sgd,
            eager_loss=whole,
            micro_batches=2,
            batch_dims=dims,
        )


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ({"mask": None}, "names an input that is not there: 'mask'. Inputs are '0', '1', '2'"),
        ({1: 3}, r"a dimension that is not there: 3 of input '1', which has shape \[3, 4, 5\]"),
        ({0: 0, 1: 2}, "'1' has 5 in dimension 2, '0' has 4"),
        ({1: "whole"}, "got 1: 'whole'. Give the dimension of its rows as an integer, or None"),
        ({1: True}, "got 1: True"),
        ([1], "must be a dict of inputs' names and dimensions, got list"),
        ({0: None, 1: None, 2: None}, "needs an input tensor with a batch dimension"),
    ],
)
def test_names_and_dimensions_that_are_not_there_are_refused(dims: Any, message: str) -> None:
    """The message names input, dimension and shape."""
    model = Rotated().double()
    with pytest.raises(CaptureError, match=message):
        capture(model, rotation(4), rotated, sgd(model), 2, batch_dims=dims)


def test_names_are_checked_for_one_batch_too() -> None:
    """A wrong name is told before it matters; a right one changes nothing."""
    model = Rotated().double()
    assert "not there: 'mask'" in refused(model, rotation(4), rotated, 1, batch_dims={"mask": 1})
    graph = capture(model, rotation(4), rotated, sgd(model), batch_dims={1: 1})
    assert graph.meta["batch_dims"] == {"1": 1}


def test_offsets_that_no_longer_fit_are_refused() -> None:
    """Offsets into a flat list of ids cannot be cut like rows: the kernel's own words are told."""

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(20, 4, mode="sum")

        def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
            return self.bag(ids, offsets)

    model = Bag().double()
    batch = (torch.randint(20, (12,)), torch.tensor([0, 3, 6, 9]), torch.randn(4, 4).double())
    message = refused(model, batch, lambda m, i, o, y: F.mse_loss(m(i, o), y))
    assert "aten._embedding_bag.default does not run: offsets" in message


def test_it_is_compared_without_weights_where_it_is_small() -> None:
    """Values are made up for a model on the meta device."""
    with torch.device("meta"):
        model = Masked()
    x, mask = square(4)
    for batch in ((x.float(), mask.float()), (x.float().to("meta"), mask.float().to("meta"))):
        assert "batch_dims={'1': None}" in refused(model, batch, error)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            graph = capture(model, batch, error, sgd(model), 2, batch_dims={1: None})
        assert "unchecked" not in graph.meta


def test_it_is_said_where_it_is_not_compared() -> None:
    """A model too large to be computed for a comparison is captured with a warning."""
    with torch.device("meta"):
        model = nn.Linear(30000, 30000)
    x = torch.empty(4, 30000, device="meta")
    with pytest.warns(UserWarning, match=r"not compared .* whole batch: a step takes .* limit"):
        graph = capture(model, (x, x), F.mse_loss, sgd(model), 2)
    assert "limit" in graph.meta["unchecked"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graph = capture(model, (x, x), F.mse_loss, sgd(model), 2, compare_batches=False)
    assert "unchecked" not in graph.meta


def test_a_batch_gets_another_number_of_rows() -> None:
    """What has rows has others, on the meta device, in the dimension they are in."""
    mask, ids = torch.zeros(5, 5), torch.zeros(3, 2, 5, dtype=torch.int64)
    inputs, kwargs = {"x": (torch.zeros(2, 5), 7), "mask": mask, "ids": ids}, None
    dims = {"ids": 1}
    assert num_rows(inputs, kwargs, dims) == 2
    args, found = with_rows(9, inputs, kwargs, dims)
    assert args == ()
    assert found["x"][0].shape == (9, 5)
    assert found["x"][0].is_meta
    assert found["x"][1] == 7
    assert found["ids"].shape == (3, 9, 5)
    assert found["ids"].dtype == torch.int64
    assert found["mask"] is mask


def test_a_batch_without_rows_has_no_other_number() -> None:
    """A number alone cannot be made larger."""
    with pytest.raises(CaptureError, match="batch dimension"):
        with_rows(9, (7,))
