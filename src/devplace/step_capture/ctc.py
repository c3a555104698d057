"""CTC loss in a step: what it keeps for its derivative has a size that no value decides.

PyTorch's kernel keeps a table (batch, time, 2 * longest target + 1). With lengths in a tensor, no
trace knows the longest; the ops here keep a table wide enough for any targets of the same shape.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

aten = torch.ops.aten


def _loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    given = (log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)
    loss, table = aten._ctc_loss.Tensor(*given)
    return loss, F.pad(table, (0, _width(targets) - table.shape[-1]))


def _backward(
    grad: torch.Tensor,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    loss: torch.Tensor,
    table: torch.Tensor,
    blank: int,
    zero_infinity: bool = False,
) -> torch.Tensor:
    table = table[..., : 2 * int(target_lengths.max()) + 1].contiguous()
    given = (grad, log_probs, targets, input_lengths, target_lengths, loss, table)
    made: torch.Tensor = aten._ctc_loss_backward.Tensor(*given, blank, zero_infinity)
    return made


def _width(targets: torch.Tensor) -> int:
    """Of the table; targets are (batch, longest), or one after the other."""
    return 2 * int(targets.shape[-1]) + 1


def _fake_loss(log_probs: Any, targets: Any, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    time, batch = log_probs.shape[:2]
    return log_probs.new_empty(batch), log_probs.new_empty(batch, time, _width(targets))


def _fake_backward(grad: Any, log_probs: Any, *rest: Any) -> torch.Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


_made: Any = torch.library.custom_op("devplace::ctc_loss", _loss, mutates_args=())
_made.register_fake(_fake_loss)
_made = torch.library.custom_op("devplace::ctc_loss_backward", _backward, mutates_args=())
_made.register_fake(_fake_backward)
FAKES: Mapping[Any, Callable[..., Any]] = {
    aten._ctc_loss.Tensor: _fake_loss,
    aten._ctc_loss_backward.Tensor: _fake_backward,
    aten._use_cudnn_ctc_loss.Tensor: lambda *given: False,  # a trace is made without cuDNN
}
"""Op -> what gives its results without values, of the right sizes."""
FIXED: Mapping[Any, Any] = {
    aten._ctc_loss.Tensor: torch.ops.devplace.ctc_loss.default,
    aten._ctc_loss_backward.Tensor: torch.ops.devplace.ctc_loss_backward.default,
}
"""Op -> the one that is in a graph in its place."""


@contextlib.contextmanager
def lengths_in_tensors() -> Iterator[None]:
    """Give CTC losses lengths in tensors, of which a trace can compute the mean."""
    original: Any = torch.ctc_loss

    def loss(
        log_probs: torch.Tensor,
        targets: torch.Tensor,
        input_lengths: Any,
        target_lengths: Any,
        *rest: Any,
        **named: Any,
    ) -> torch.Tensor:
        lengths = (
            each if isinstance(each, torch.Tensor) else torch.tensor(each, device=log_probs.device)
            for each in (input_lengths, target_lengths)
        )
        made: torch.Tensor = original(log_probs, targets, *lengths, *rest, **named)
        return made

    with mock.patch.object(torch, "ctc_loss", loss):
        yield
