"""Losses of chunks of a batch, made so that their mean over rows is the loss of the whole batch.

A mean over tokens, as cross entropy's over targets that are not ignored, is a sum over a count, and
chunks have other counts. So in a chunk the sum is divided by the count of the whole batch, and by
the chunk's part of the rows, which the mean over chunks multiplies it with.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from devplace.errors import CaptureError

Loss = Callable[..., Any]
_LIKELIHOODS = (F.cross_entropy, F.nll_loss)
_DIVISIONS = ("div", "divide", "true_divide")
_INVERSES = ("__rdiv__", "__rtruediv__", "reciprocal")
_SIGNATURES = {f: inspect.signature(f) for f in _LIKELIHOODS}


@dataclass(frozen=True)
class Whole:
    """What the step of a whole batch tells the step of its micro-batches.

    Attributes:
        counts: For each division in a loss, whether what it divides by is to be that of the whole
            batch; None: chunks divide by numbers of their own.
        counts_of: Function of the step's flat inputs to those.
        shapes: Shape of each further output; None for what is no tensor.
    """

    counts: tuple[bool, ...] | None = None
    counts_of: Callable[..., list[Tensor]] = lambda *flat: []
    shapes: tuple[torch.Size | None, ...] = ()


def is_sum(loss_fn: Loss | None) -> bool:
    """Whether a torch loss adds up over rows, so that chunks add up too."""
    options: dict[str, Any] = {}
    while isinstance(loss_fn, functools.partial):
        options = {**loss_fn.keywords, **options}
        loss_fn = loss_fn.func
    return getattr(loss_fn, "reduction", options.get("reduction")) == "sum"


class Counts(TorchFunctionMode):  # type: ignore[misc]
    """Finds what a loss divides by, one number each time; or puts those of the whole batch there.

    Found are the weights of targets in torch's cross entropy and negative log likelihood, and
    tensors of one number that anything is divided by. They are told by the order of the calls.

    Args:
        given: For each call the number of the whole batch, None where a chunk keeps its own; None:
            they are only found.
        share: The chunk's part of the rows.

    Attributes:
        found: For each call what was found, None if it is not one number.
    """

    def __init__(self, given: Sequence[Tensor | None] | None = None, share: float = 1.0) -> None:
        super().__init__()
        self._given = given
        self._share = share
        self.found: list[Tensor | None] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a torch function; in a chunk some are divided by another number."""
        given = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func in _LIKELIHOODS:
            return self._likelihood(func, _SIGNATURES[func].bind(*args, **given).arguments)
        place = 1 if name.removesuffix("_") in _DIVISIONS else 0
        if (place == 1 or name in _INVERSES) and len(args) > place and not given:
            return self._division(func, args, place, name.endswith("_") and place == 1)
        made = func(*args, **given)
        if name == "nanmean" and self._given is not None and made.numel() == 1:
            raise CaptureError(
                "A mean over what is not NaN counts other numbers in each micro-batch: nanmean. "
                "Divide a sum by a count of the inputs (mask.sum()), or use micro_batches=1."
            )
        return made

    def _likelihood(self, func: Any, options: dict[str, Any]) -> Any:
        target, old = options["target"], (options.get("size_average"), options.get("reduce"))
        is_mean = options.get("reduction", "mean") == "mean" and old == (None, None)
        if not is_mean or target.is_floating_point():
            return func(**options)  # probabilities: the mean is over rows
        count = _weight(target, options.get("weight"), options.get("ignore_index", -100))
        whole = self._whole(count)
        if whole is None:
            return func(**options)
        return func(**options | {"reduction": "sum"}) / whole / self._share

    def _division(self, func: Any, args: Any, place: int, is_in_place: bool) -> Any:
        by = args[place]
        whole = self._whole(by)
        if whole is None:
            return func(*args)
        made = func(*args[:place], whole.reshape(by.shape), *args[place + 1 :])
        return made.div_(self._share) if is_in_place else made / self._share

    def _whole(self, own: Any) -> Tensor | None:
        """What the whole batch divides by in this call, if that is to take the place of `own`."""
        place, is_one = len(self.found), isinstance(own, Tensor) and own.numel() == 1
        is_count = is_one and not own.requires_grad and _is_plain(own)
        self.found.append(own if is_count else None)
        if not is_count or self._given is None or place >= len(self._given):
            return None
        return self._given[place]


def _is_plain(tensor: Tensor) -> bool:
    """Whether it can be kept after the call: it is none of a function that is mapped."""
    return not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _weight(target: Tensor, weights: Tensor | None, ignored: int) -> Tensor:
    counts = target != ignored
    if weights is None:
        return counts.sum()
    return (weights[torch.where(counts, target, 0)] * counts).sum()


class UnequalCountsError(CaptureError):
    """A chunk divides by other numbers, or in another order, than the whole batch."""


def joined(name: str, pieces: list[Any], shares: Sequence[float], shape: torch.Size | None) -> Any:
    """A further output of the whole batch, from those of its micro-batches.

    What has rows is joined along them; of what has the shape of the whole batch's, floating numbers
    are means over rows and integers sums.

    Args:
        name: Of the output.
        pieces: One for each micro-batch.
        shares: Part of the rows that each has.
        shape: Of the output of the whole batch; None if it is no tensor.

    Raises:
        CaptureError: It is neither.
    """
    first = pieces[0]
    if not isinstance(first, Tensor) or shape is None:
        return first
    if all(piece.shape == shape for piece in pieces) and first.dtype != torch.bool:
        if not (first.is_floating_point() or first.is_complex()):
            return functools.reduce(torch.add, pieces)
        means = [p.detach() * s for p, s in zip(pieces, shares, strict=True)]
        return functools.reduce(torch.add, means)
    for dim in range(first.ndim if first.ndim == len(shape) else 0):
        rest = [(*piece.shape[:dim], *piece.shape[dim + 1 :]) for piece in pieces]
        is_whole = sum(piece.shape[dim] for piece in pieces) == shape[dim]
        if is_whole and all(each == (*shape[:dim], *shape[dim + 1 :]) for each in rest):
            return torch.cat(pieces, dim)
    raise CaptureError(
        f"Further outputs of micro-batches must be rows, means over rows, or whole numbers that "
        f"add up: {name!r} has shape {list(shape)} and dtype {first.dtype} for the whole batch, "
        f"{list(first.shape)} for the first micro-batch. Return one of these, or use "
        f"micro_batches=1."
    )
