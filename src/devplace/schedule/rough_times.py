"""Rough times of ops and pushes, from which executors choose where to wait for a push."""

from __future__ import annotations

from devplace.graph import Op

# Rough times of a data-centre GPU, and of a CPU beside it: an op, bytes/ns, FLOP/ns. They only
# choose among orders that are all right.
GPU_TIMES = (3_000, 2_000, 200_000)
CPU_TIMES = (10_000, 20, 500)
TRANSFER_NS = 8_000
LINK_BYTES_PER_NS = 250
# Ops wait for a push to give its memory free once it should have been over for this long again: as
# much as it took. A join costs an edge of the graph, so small tensors are left to the next wait.
PATIENCE = 2
JOINED_BYTES = 2**20

# From this size on the copy engine carries a tensor. Alone it catches up only at 32 MiB (4 MiB: 25
# us by engine, 17 by kernel), but it leaves the multiprocessors to the ops: a BERT-large step on
# two H100 took 28.3 ms with 4 MiB, 28.8 with 16 MiB, 30.8 without the engine.
COPY_ENGINE_BYTES = 4 * 2**20


def rough_op_ns(op: Op, is_on_cpu: bool) -> int:
    """About how long an op takes; 0 for views."""
    if op.is_view:
        return 0
    op_ns, bytes_per_ns, flops_per_ns = CPU_TIMES if is_on_cpu else GPU_TIMES
    moved = int(op.bytes_read + op.bytes_written)
    return op_ns + moved // bytes_per_ns + int(op.flops) // flops_per_ns


def rough_transfer_ns(num_bytes: int) -> int:
    """About how long a push takes."""
    return TRANSFER_NS + num_bytes // LINK_BYTES_PER_NS


def push_lane(num_bytes: int, receiver: int) -> int:
    """Which of its sender's streams carries a tensor.

    Large tensors share one stream, or they would share the bandwidth and all come late; small ones
    have one stream per receiver, so that they overtake large ones.
    """
    return -1 if num_bytes >= COPY_ENGINE_BYTES else receiver
