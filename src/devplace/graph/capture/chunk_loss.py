"""torch's losses over chunks of a batch, so that their sum is the loss of the whole batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Loss = Callable[..., Any]
_IGNORED = -100
"""Default `ignore_index` of torch."""


def is_sum(loss_fn: Loss | None) -> bool:
    """Whether a torch loss adds up over rows, so that chunks add up too."""
    return loss_fn is not None and _settings(loss_fn).get("reduction") == "sum"


def summed(loss_fn: Loss) -> Loss:
    """As the loss, for a chunk; a cross entropy gives the sum over its targets and their weight.

    Its mean is over targets by their class weights, without those ignored, and chunks differ in
    these. Other means of torch are over rows.
    """
    function = _cross_entropy(loss_fn)
    if function is None or _settings(loss_fn).get("reduction", "mean") != "mean":
        return loss_fn

    def pair(output: Tensor, target: Tensor) -> Any:
        if target.is_floating_point():  # probabilities: the mean is over rows
            return loss_fn(output, target)
        options = _settings(loss_fn)  # now: its weight may be a buffer of the model
        kept = {k: v for k, v in options.items() if k in _OPTIONS and v is not None}
        return (
            function(output, target, reduction="sum", **kept),
            _weight(target, kept.get("weight"), kept.get("ignore_index", _IGNORED)),
        )

    return pair


_OPTIONS = ("weight", "ignore_index", "label_smoothing")


def _weight(target: Tensor, weights: Tensor | None, ignored: int) -> Tensor:
    counts = target != ignored
    if weights is None:
        return counts.sum()
    return (weights[torch.where(counts, target, 0)] * counts).sum()


def _inner(loss_fn: Loss) -> Any:
    while isinstance(loss_fn, functools.partial):
        loss_fn = loss_fn.func
    return loss_fn


def _cross_entropy(loss_fn: Loss) -> Loss | None:
    """The function behind torch's cross entropy and negative log likelihood; None for others."""
    inner = _inner(loss_fn)
    forward = getattr(type(inner), "forward", None)
    known = ((F.cross_entropy, torch.nn.CrossEntropyLoss), (F.nll_loss, torch.nn.NLLLoss))
    has_arguments = isinstance(loss_fn, functools.partial) and bool(loss_fn.args)
    if has_arguments:
        return None
    return next((f for f, kind in known if inner is f or forward is kind.forward), None)


def _settings(loss_fn: Loss) -> Mapping[str, Any]:
    """Options of a loss, as keywords of a partial function or attributes of a module."""
    found: dict[str, Any] = {}
    while isinstance(loss_fn, functools.partial):
        found = {**loss_fn.keywords, **found}
        loss_fn = loss_fn.func
    if isinstance(loss_fn, torch.nn.Module):
        names = ("reduction", *_OPTIONS)
        found = {name: getattr(loss_fn, name) for name in names if hasattr(loss_fn, name)}
    return found
