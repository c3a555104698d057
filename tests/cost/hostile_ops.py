"""Ops of a user's own, most with kernels that do harm; a measuring process imports this module."""

from __future__ import annotations

import os

import torch

# For `torch.library.Library`, which a module may use in place of decorators.
library = torch.library.Library("devplace_hostile", "FRAGMENT")
library.define("aborts_by_library(Tensor x) -> Tensor")


def _abort(x: torch.Tensor) -> torch.Tensor:
    os.abort()


library.impl("aborts_by_library", _abort, "CPU")
library.impl("aborts_by_library", torch.empty_like, "Meta")


@torch.library.custom_op("devplace_hostile::aborts", mutates_args=())
def aborts(x: torch.Tensor) -> torch.Tensor:
    """Aborts the process."""
    os.abort()


@torch.library.custom_op("devplace_hostile::aborts_on_integers", mutates_args=())
def aborts_on_integers(x: torch.Tensor) -> torch.Tensor:
    """Aborts the process; what it makes are indices of others."""
    os.abort()


@torch.library.custom_op("devplace_hostile::hangs", mutates_args=())
def hangs(x: torch.Tensor) -> torch.Tensor:
    """Does not end."""
    import time

    time.sleep(1000)
    return x.clone()


@torch.library.custom_op("devplace_hostile::raises", mutates_args=())
def raises(x: torch.Tensor) -> torch.Tensor:
    """Raises what no op of torch's does."""
    raise KeyError("no such kernel")


@torch.library.custom_op("devplace_hostile::picks", mutates_args=())
def picks(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Aborts the process unless rows are those of the batch: even and not all the same."""
    if (rows % 2).any() or (rows == rows[0]).all():
        os.abort()
    return table[rows]


@torch.library.custom_op("devplace_hostile::roots", mutates_args=())
def roots(x: torch.Tensor) -> torch.Tensor:
    """Aborts the process where a number is negative."""
    if (x < 0).any():
        os.abort()
    return x.sqrt()


@torch.library.custom_op("devplace_hostile::asserts", mutates_args=())
def asserts(x: torch.Tensor) -> torch.Tensor:
    """Ends the process's use of a GPU where a number is negative."""
    torch._assert_async((x >= 0).all())
    return x.sqrt()


@torch.library.custom_op("devplace_hostile::doubles", mutates_args={"x"})
def doubles(x: torch.Tensor) -> None:
    """Does no harm; it writes its argument."""
    x.mul_(2)


for op in (aborts, aborts_on_integers, asserts, hangs, raises, roots):
    op.register_fake(torch.empty_like)


@picks.register_fake
def _(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return table.new_empty((*rows.shape, *table.shape[1:]))
