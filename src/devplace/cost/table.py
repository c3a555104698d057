"""The cost table: time and workspace of every op on every device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from devplace.cost.reuse import CacheTimes
from devplace.errors import InputError
from devplace.graph import OpGraph
from devplace.machine import Machine


@dataclass(frozen=True)
class CostTable:
    """Time of every op on every device.

    Attributes:
        compute_ns: Time each op occupies each device, launch gap included; 0 for sources and
            views. int64, shape `[V, D]`, in the order of `graph.ops` and `machine.devices`.
        origin: Where the numbers come from, such as `analytic`.
        workspace_bytes: Measured workspace of every op while it runs, instead of what the graph
            tells. int64, shape `[V]`, or None.
        held_bytes: What a step holds of every device it uses beside its tensors: work buffers of
            libraries, flags. int64, shape `[D]`, or None for nothing.
        has_gaps: Whether tensors of GPUs come out of torch's heaps, so that the peaks of
            finished plans include the gaps there (`Timeline.gap_bytes`).
        notes: What the user should know of these numbers.
        kernel_gap_ns: Kernel gap that is part of `compute_ns` where `kernels` says so, ns.
        kernels: Which times hold the kernel gap. bool, shape `[V, D]`, or None for none.
        caching: How times change with what a cache still holds, or None if that is not known.
    """

    compute_ns: NDArray[np.int64]
    origin: str
    workspace_bytes: NDArray[np.int64] | None = None
    held_bytes: NDArray[np.int64] | None = None
    has_gaps: bool = False
    notes: tuple[str, ...] = ()
    kernel_gap_ns: int = 0
    kernels: NDArray[np.bool_] | None = None
    caching: CacheTimes | None = None

    def in_order(self, graph: OpGraph, order: Sequence[Sequence[int]]) -> CostTable:
        """The costs of devices that run their ops in this order; these, if `caching` is not known.

        Args:
            graph: The step these are costs of.
            order: Per device the indices of the ops it runs, as in a plan.
        """
        if self.caching is None:
            return self
        times = self.caching.in_order(graph, self.compute_ns, order)
        return replace(self, compute_ns=times, caching=None)

    def with_kernel_gap(self, kernel_gap_ns: int) -> CostTable:
        """These costs with another kernel gap; unchanged if none of them holds one.

        Raises:
            InputError: It is negative.
        """
        if kernel_gap_ns < 0:
            raise InputError(
                f"kernel_gap_ns must be 0 or more, got {kernel_gap_ns}. Leave it out to get the "
                "default."
            )
        if self.kernels is None or kernel_gap_ns == self.kernel_gap_ns:
            return self
        added = self.kernels * np.int64(kernel_gap_ns - self.kernel_gap_ns)
        return replace(
            self,
            compute_ns=self.compute_ns + added,
            kernel_gap_ns=kernel_gap_ns,
            caching=self.caching and self.caching.plus(added),
        )


class CostModel(Protocol):
    """Anything that prices a graph on a machine."""

    def __call__(self, graph: OpGraph, machine: Machine) -> CostTable:
        """Price every op on every device."""
        ...
