"""Mistakes of a first training script, and what a trace must not mind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.step_capture.checks import assert_same_training
from torch import nn
from torch.utils.checkpoint import checkpoint

from devplace.errors import CaptureError
from devplace.step_capture import capture


def net() -> nn.Module:
    """Three classes from six features."""
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


BATCH = (torch.randn(4, 6), torch.randint(3, (4,)))


def refuse(loss_fn: Any, message: str, batch: Any = BATCH, model: nn.Module | None = None) -> None:
    """Capture must fail with the message, on one line."""
    model = model or net()
    with pytest.raises(CaptureError, match=message) as caught:
        capture(model, batch, loss_fn, sgd(model))
    assert "\n" not in str(caught.value)


def test_a_loss_of_the_output_is_told_to_take_the_model() -> None:
    """`loss_fn(out, y)` is what a plain loop has; the message says what it must be here."""
    called = r"called as loss_fn\(model, input 0, input 1\), with the model, not its output: "
    refuse(lambda out, y: F.cross_entropy(out, y), called + ".*Write loss_fn=lambda model, x, y")

    def with_default(out: Any, y: Any, weight: float = 1.0) -> Any:
        return ((out - y) ** 2).mean() * weight

    refuse(with_default, called + ".*'Sequential'")
    refuse(lambda out, y, weight=None: F.cross_entropy(out, y, weight), called + ".*Sequential")
    refuse(lambda out, y, k=1: out.log_softmax(k).mean(), called + ".*'log_softmax'")


def test_an_error_of_the_model_is_not_taken_for_one_of_the_loss() -> None:
    """A missing attribute inside forward keeps its own message and line."""

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.haed(x)

    where = r"The step fails eagerly, too, at the model \(test_mistakes.py:\d+\).*'haed'"
    refuse(lambda model, x, y: F.cross_entropy(model(x), y), where, model=Broken())


def test_a_loss_class_is_told_to_be_made() -> None:
    """`nn.CrossEntropyLoss` without brackets."""
    refuse(nn.CrossEntropyLoss, r"got the class CrossEntropyLoss. Pass CrossEntropyLoss\(\)")


def test_backward_in_the_loss_function_is_refused() -> None:
    """The step makes gradients and update itself."""

    def whole(model: Any, x: Any, y: Any) -> Any:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    refuse(whole, "Backward and the update belong to the step.*return the loss alone")


def test_arrays_of_numpy_are_refused() -> None:
    """An array would be fixed in the graph as a number is."""
    arrays = (BATCH[0].numpy(), BATCH[1])
    refuse(F.cross_entropy, r"one is of class numpy.ndarray. Convert it with torch.as_t", arrays)


def test_a_loader_is_refused() -> None:
    """One batch is asked for, not where batches come from."""
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*BATCH))
    refuse(F.cross_entropy, r"one batch, got a DataLoader.*next\(iter\(loader\)\)", loader)
    refuse(F.cross_entropy, "one batch, got a list_iterator", iter([BATCH]))


def test_reentrant_checkpointing_is_refused() -> None:
    """It hides parameters from the gradients of a step, whole models or parts of them."""

    def whole(model: Any, x: Any, y: Any) -> Any:
        x = x.clone().requires_grad_()
        return F.cross_entropy(checkpoint(model, x, use_reentrant=True), y)

    def part(model: Any, x: Any, y: Any) -> Any:
        return F.cross_entropy(checkpoint(model[2], model[0](x), use_reentrant=True), y)

    for loss in (whole, part):
        refuse(loss, "must not be re-entrant.*Pass use_reentrant=False")


def test_hooks_of_parameters_and_optimizers_are_refused() -> None:
    """They change gradients or weights in eager mode; a captured step would not call them."""
    model = net()
    handle = model[2].weight.register_hook(lambda grad: grad * 0)
    refuse(F.cross_entropy, r"parameter '2.weight' has one", model=model)
    handle.remove()
    model[0].bias.register_post_accumulate_grad_hook(lambda parameter: None)
    refuse(F.cross_entropy, r"parameter '0.bias' has one", model=model)
    model = net()
    optimizer = sgd(model)
    handle = optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(CaptureError, match=r"this SGD has one. Remove it, and call what it does"):
        capture(model, BATCH, F.cross_entropy, optimizer)
    handle.remove()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert capture(model, BATCH, F.cross_entropy, optimizer).meta["mode"] == "train"


def test_hooks_of_modules_are_part_of_the_step() -> None:
    """Forward and backward hooks of modules give the numbers of eager mode."""
    torch.manual_seed(0)
    model = net().double()
    model[0].register_forward_hook(lambda module, given, out: out * 2)
    model[2].register_full_backward_hook(lambda module, grads, out: tuple(g * 3 for g in grads))
    batches = [(torch.randn(4, 6).double(), torch.randint(3, (4,))) for _ in range(3)]
    loss = F.cross_entropy
    assert_same_training(model, batches, loss, sgd, eager_loss=lambda m, x, y: loss(m(x), y))


def test_anomaly_mode_does_not_stop_a_capture() -> None:
    """It reads values in backward, which a trace has none of; afterwards it is on again."""
    model = net()
    with torch.autograd.set_detect_anomaly(True):
        capture(model, BATCH, F.cross_entropy, sgd(model))
        assert torch.is_anomaly_enabled()


def test_nothing_is_written_to_torchs_log(caplog: pytest.LogCaptureFixture) -> None:
    """A wrong shape is one error, not a traceback in the log beside it."""
    refuse(F.cross_entropy, "fails eagerly, too", (torch.randn(4, 7), BATCH[1]))
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
