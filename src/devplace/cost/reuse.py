"""Cache reuse: which inputs of an op are still in cache, and the time that saves.

Reads graphs but does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from devplace.graph import OpGraph

I64 = NDArray[np.int64]
ColdInputs = Mapping[int, frozenset[int]]
"""Op -> tensors among its inputs that come from memory."""

# An input touched longer ago than this many bytes of other traffic comes from memory, not from a
# cache (an H100 has 50 MB of L2, an H200 60). Smaller inputs cost no more either way.
FRESH_BYTES = 32 * 2**20
MIN_COLD_BYTES = 2**19
NONE: frozenset[int] = frozenset()


def cold_inputs(graph: OpGraph, order: Sequence[int]) -> dict[int, frozenset[int]]:
    """Which inputs of each op are no longer in the cache of a device that runs ops in this order.

    Args:
        graph: The step.
        order: Ops of the device; views and sources among them do nothing.
    """
    tensors, storage = graph.tensors, graph.storage
    seen: dict[int, int] = {}
    touched, found = 0, {}
    for index in order:
        op = graph.ops[index]
        if op.is_view or op.is_source:
            continue
        found[index] = frozenset(
            tensor
            for tensor in op.inputs
            if tensors[tensor].num_bytes >= MIN_COLD_BYTES
            and touched - seen.get(storage[tensor], -FRESH_BYTES) >= FRESH_BYTES
        )
        for tensor in (*op.inputs, *op.outputs):
            touched += tensors[tensor].num_bytes
            seen[storage[tensor]] = touched
    return found


def large_inputs(graph: OpGraph, op: int) -> frozenset[int]:
    """Inputs of an op that take longer to read from memory than from a cache."""
    tensors = graph.tensors
    large = (t for t in graph.ops[op].inputs if tensors[t].num_bytes >= MIN_COLD_BYTES)
    return frozenset(large)


@dataclass(frozen=True)
class CacheTimes:
    """Times of ops as the cache makes them.

    Attributes:
        usual: The cold inputs that the times of a cost table are for.
        warm_ns: Times with all inputs in the cache. int64, shape `[V, D]`.
        cold_ns: Times with no large input in the cache. int64, shape `[V, D]`.
    """

    usual: ColdInputs
    warm_ns: I64
    cold_ns: I64

    def plus(self, more_ns: I64) -> CacheTimes:
        """Times that are so much longer. `[V, D]`"""
        return replace(self, warm_ns=self.warm_ns + more_ns, cold_ns=self.cold_ns + more_ns)

    def in_order(self, graph: OpGraph, usual_ns: I64, order: Sequence[Sequence[int]]) -> I64:
        """Times on devices that run their ops in this order, ns. `[V, D]`

        With some of its large inputs in the cache, an op takes a time between the two in proportion
        to the bytes that come from memory.

        Args:
            graph: The step.
            usual_ns: The times of the cost table. `[V, D]`
            order: Per device the ops it runs.
        """
        found = usual_ns.copy()
        for device, row in enumerate(order):
            cold = cold_inputs(graph, row)
            for op in row:
                if cold.get(op, NONE) != self.usual.get(op, NONE):
                    part = _share(graph, op, cold[op])
                    warm, late = int(self.warm_ns[op, device]), int(self.cold_ns[op, device])
                    found[op, device] = warm + round((late - warm) * part)
        return found


def _share(graph: OpGraph, op: int, cold: frozenset[int]) -> float:
    """Part of the bytes of an op's large inputs that come from memory."""
    sizes = {tensor: graph.tensors[tensor].num_bytes for tensor in large_inputs(graph, op)}
    return sum(sizes[tensor] for tensor in cold) / sum(sizes.values())
