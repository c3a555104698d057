"""A step cut into micro-batches gives the loss and gradients of the whole batch."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.step_capture.checks import assert_same_training, batches, sgd, small_net, xent
from torch import nn

from devplace.errors import CaptureError
from devplace.step_capture import capture


def net_without_norm() -> nn.Module:
    """Linear layers only: rows do not influence each other."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()


@pytest.mark.parametrize("rows", [8, 5])
@pytest.mark.parametrize("chunks", [2, 3, 5])
def test_s79_uneven_micro_batches_give_the_mean_loss(rows: int, chunks: int) -> None:
    """Batch 8 in 3 chunks and a last batch of 5: the loss is the mean over rows."""
    graph = assert_same_training(
        net_without_norm(), batches(rows=rows), xent, sgd, micro_batches=chunks
    )
    assert graph.meta["micro_batch_sizes"] == [
        len(part) for part in torch.arange(rows).tensor_split(chunks)
    ]
    assert {op.micro_batch for op in graph.ops} == {-1, *range(chunks)}


def test_loss_sum_and_weight_is_exact_for_class_weights() -> None:
    """With (loss_sum, weight) a class-weighted loss over uneven chunks equals the whole one."""
    weights = torch.tensor([0.1, 1.0, 3.0, 0.5]).double()
    data = [(x, y, weights) for x, y in batches(rows=7)]

    def pair(m: nn.Module, x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> Any:
        return F.cross_entropy(m(x), y, weight=w, reduction="sum"), w[y].sum()

    def whole(m: nn.Module, x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(m(x), y, weight=w)

    for chunks in (1, 3):
        assert_same_training(
            net_without_norm(), data, pair, sgd, eager_loss=whole, micro_batches=chunks
        )


@pytest.mark.parametrize(
    "metric",
    [
        lambda out, y, loss: (out.argmax(1) == y).float().mean(),
        lambda out, y, loss: loss.detach() * 2,
        lambda out, y, loss: loss * 0.5,
    ],
    ids=["accuracy", "detached", "part of the loss"],
)
def test_a_metric_beside_the_loss_is_no_weight(metric: Any) -> None:
    """What depends on parameters is refused: dividing by it would train, or tell, another thing."""

    def pair(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
        out = m(x)
        loss = F.cross_entropy(out, y)
        return loss, metric(out, y, loss)

    model = net_without_norm()
    refused = pytest.raises(CaptureError, match=r"depends on parameter '.*'\. Return the loss")
    for chunks in (1, 2):
        with refused:
            capture(model, batches(rows=6)[0], pair, sgd(model), micro_batches=chunks)
    with refused:
        capture(model, batches(rows=6)[0], pair)


def test_a_weight_must_be_a_number() -> None:
    """A vector or a text beside the loss is refused by what it is."""
    model = net_without_norm()
    for second, message in (("a", "is a str"), (torch.ones(3), r"has shape \(3,\)")):
        with pytest.raises(CaptureError, match=rf"second part {message}\. Return"):
            capture(model, batches()[0], lambda m, x, y, s=second: (xent(m, x, y), s), sgd(model))


def test_masked_tokens_are_weighted_by_their_number() -> None:
    """Ignored targets, unevenly spread over chunks, do not shift the loss."""
    data = []
    for x, y in batches(rows=6):
        target = y.clone()
        target[:3] = -100
        data.append((x, target))

    def pair(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
        return F.cross_entropy(m(x), y, reduction="sum"), (y != -100).sum()

    assert_same_training(net_without_norm(), data, pair, sgd, eager_loss=xent, micro_batches=2)


def test_weight_may_be_a_number() -> None:
    """A count taken from shapes is a weight like any other."""

    def pair(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
        return F.cross_entropy(m(x), y, reduction="sum"), y.numel()

    assert_same_training(
        net_without_norm(), batches(rows=7), pair, sgd, eager_loss=xent, micro_batches=3
    )


def test_other_inputs_are_shared_whole() -> None:
    """Only inputs with the batch's rows are cut; a mask of another size is not."""
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0]).double()
    data = [({"x": x, "extra": [y]}, mask) for x, y in batches(rows=6)]

    def loss(m: nn.Module, batch: Any, mask: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(m(batch["x"] * mask), batch["extra"][0])

    graph = assert_same_training(net_without_norm(), data, loss, sgd, micro_batches=3)
    cuts = [op for op in graph.ops if "split_with_sizes" in op.target]
    assert [len(op.outputs) for op in cuts] == [3, 3]
    assert {graph.ops[graph.producer[op.alias_of]].name for op in cuts} == {
        "input[0.x]",
        "input[0.extra.0]",
    }


def test_batch_norm_statistics_chain_through_chunks() -> None:
    """Running statistics and counter are those of running the chunks one after another."""

    def eager(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        parts = zip(x.tensor_split(2), y.tensor_split(2), strict=True)
        return sum(xent(m, a, b) * (len(a) / len(x)) for a, b in parts)  # type: ignore[return-value]

    graph = assert_same_training(
        small_net(), batches(rows=7), xent, sgd, eager_loss=eager, micro_batches=2
    )
    counter = graph.op_index["1.num_batches_tracked"]
    counting = [op for op in graph.ops if counter in [graph.producer[t] for t in op.inputs]]
    assert len(counting) == 1  # adds 2
    (new,) = (r.tensor for r in graph.results if r.replaces == counter)
    assert new in counting[0].outputs


def test_clipping_sees_the_accumulated_gradient() -> None:
    """The norm is that of the whole batch's gradient, not of one chunk's."""
    assert_same_training(
        net_without_norm(),
        batches(rows=6),
        xent,
        lambda m: torch.optim.SGD(m.parameters(), lr=0.5),
        micro_batches=3,
        clip_grad_norm=0.1,
        after_backward=lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1),
    )


def test_gradients_are_added_in_chunk_order() -> None:
    """Each weight gradient adds chunk 0, 1, 2 one after another, in the parameter's module."""
    graph = assert_same_training(net_without_norm(), batches(rows=6), xent, sgd, micro_batches=3)
    adds = [op for op in graph.ops if op.stage == "backward" and op.target == "aten.add.Tensor"]
    assert [op.micro_batch for op in adds] == [1] * 4 + [2] * 4
    assert [op.module for op in adds] == ["0", "0", "2", "2"] * 2


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        (7, "7 micro-batches, but the batch has 6 rows. Use micro_batches <= 6"),
        (0, "micro_batches must be an integer of at least 1, got 0"),
        (1.5, "micro_batches must be an integer of at least 1, got 1.5"),
    ],
)
def test_impossible_number_of_micro_batches_is_refused(chunks: Any, message: str) -> None:
    """More chunks than rows, or no whole positive number, is an error that names both."""
    model = net_without_norm()
    with pytest.raises(CaptureError, match=message):
        capture(model, batches()[0], xent, sgd(model), micro_batches=chunks)


def test_inference_is_not_cut() -> None:
    """Micro-batches need a loss."""
    with pytest.raises(CaptureError, match="needs a loss"):
        capture(net_without_norm(), batches()[0][0], micro_batches=2)


WEIGHTS = torch.tensor([0.1, 1.0, 3.0, 0.5]).double()


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize(
    "loss",
    [
        F.cross_entropy,
        nn.CrossEntropyLoss(ignore_index=2),
        nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1),
        nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=0, label_smoothing=0.2),
        functools.partial(F.cross_entropy, weight=WEIGHTS, ignore_index=1),
        nn.CrossEntropyLoss(weight=WEIGHTS, reduction="sum"),
        functools.partial(F.cross_entropy, reduction="sum"),
    ],
    ids=["plain", "ignored", "weighted", "all", "partial", "sum", "partial sum"],
)
def test_torchs_cross_entropy_is_that_of_the_whole_batch(loss: Any, chunks: int) -> None:
    """Chunks differ in ignored targets and in class weights; a sum adds up."""
    options = vars(loss) if isinstance(loss, nn.Module) else getattr(loss, "keywords", {})
    ignored = options.get("ignore_index", -100)
    data = [(x, torch.where(torch.arange(7) % 3 == 0, ignored, y)) for x, y in batches(rows=7)]

    def whole(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss(m(x), y)

    assert_same_training(
        net_without_norm(), data, loss, sgd, eager_loss=whole, micro_batches=chunks
    )


def test_probabilities_as_targets_and_log_likelihood_are_cut_too() -> None:
    """The one is a mean over rows, the other one over class weights."""
    likelihood = nn.NLLLoss(weight=WEIGHTS)
    rows = batches(rows=7)
    soft = [(x, F.one_hot(y, 4).double() * 0.8 + 0.05) for x, y in rows]
    for loss, data in ((nn.CrossEntropyLoss(weight=WEIGHTS), soft), (likelihood, rows)):

        def whole(m: nn.Module, x: torch.Tensor, y: torch.Tensor, loss: Any = loss) -> torch.Tensor:
            return loss(m(x), y)  # type: ignore[no-any-return]

        assert_same_training(net_without_norm(), data, loss, sgd, eager_loss=whole, micro_batches=3)


def test_class_weights_that_are_a_buffer_of_the_model_are_read_there() -> None:
    """A criterion that is a part of the model."""
    model = nn.ModuleDict({"net": net_without_norm(), "loss": nn.CrossEntropyLoss(WEIGHTS)})

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.parts["net"](x)

    def whole(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return m.parts["loss"](m(x), y)  # type: ignore[operator, index]

    made = Whole()
    graph = capture(made, batches(rows=7)[0], model["loss"], sgd(made), micro_batches=3)
    assert "parts.loss.weight" in graph.op_index
    assert not [op for op in graph.ops if op.role == "constant" and op.name.startswith("_tensor")]
