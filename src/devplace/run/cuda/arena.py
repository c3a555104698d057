"""Memory arena of a captured step: size of the one large piece, and of small tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from devplace.schedule import DeviceWrites, Schedule
from devplace.schedule.heap import BLOCK_BYTES, SMALL_PAGE_BYTES, Heap, block_bytes
from devplace.schedule.linear import PushJoins
from devplace.schedule.live import memory_changes, replay

# Beside the small tensors of the plan: those that ops and the capture itself need. With 4 MiB some
# captures of BERT and GPT-2 still lacked a page.
SMALL_SPARE_BYTES = 12 * 2**20
# A step is given just what it takes only where so much more (one part in four) is left: then what
# gaps and workspaces need beyond that piece will be found too.
SPARE_PARTS = 4


@dataclass(frozen=True)
class Arena:
    """The piece of memory that a captured step begins with.

    Attributes:
        num_bytes: Its size.
        is_fixed: Whether it is all that the step may take, so that it must not be made of pages.
    """

    num_bytes: int
    is_fixed: bool = False


def choose_arenas(step_bytes: int, small_bytes: int, allowed_bytes: int) -> list[Arena]:
    """What to reserve for a step, the first to be tried first.

    Args:
        step_bytes: What it takes at once, small tensors apart.
        small_bytes: What small tensors take at once, and what is needed beside the step.
        allowed_bytes: What the process may still take.

    Returns:
        What it takes; where memory is scarce also all that is left beside small tensors, which
        comes without the rests of large pages.

    Example:
        >>> choose_arenas(40 << 20, 3 << 20, 80 << 20)
        [Arena(num_bytes=41943040, is_fixed=False)]
        >>> [arena.is_fixed for arena in choose_arenas(70 << 20, 3 << 20, 80 << 20)]
        [False, True]
    """
    wanted = step_bytes + step_bytes // SPARE_PARTS + small_bytes + SMALL_SPARE_BYTES
    if wanted <= allowed_bytes:
        return [Arena(step_bytes)]
    pages = -(-(small_bytes + SMALL_SPARE_BYTES) // SMALL_PAGE_BYTES)
    left = allowed_bytes // SMALL_PAGE_BYTES - pages
    return [Arena(step_bytes), Arena(max(0, left) * SMALL_PAGE_BYTES, is_fixed=True)]


class StepPeaks(NamedTuple):
    """What the tensors of a step take on a GPU, bytes.

    Attributes:
        small: Memory for those of up to 1 MiB, with the gaps between them.
        large: Memory for the others, with the gaps between them.
        at_once: Most that all of them take at once.
    """

    small: int
    large: int
    at_once: int


def step_peaks(
    schedule: Schedule, device: int, writes: DeviceWrites, joins: PushJoins
) -> StepPeaks:
    """What a step of a GPU takes, without sources, received tensors and workspaces of ops.

    Args:
        schedule: What every device does.
        device: Index of the GPU.
        writes: Its write-backs.
        joins: Where pushes are waited for.

    Complexity: O(I + E) for I instructions with E arguments.
    """
    heap = Heap(small_page_bytes=BLOCK_BYTES, large_page_bytes=BLOCK_BYTES)
    replay(memory_changes(schedule, device, writes, joins), schedule.graph, heap, {})
    return StepPeaks(heap.small.num_bytes, heap.large.num_bytes, heap.peak_bytes)


def copied_bytes(schedule: Schedule, device: int) -> int:
    """What the copies of a step's results take that a device hands out, beside the step."""
    graph = schedule.graph
    return sum(
        block_bytes(graph.tensors[tensor].num_bytes)
        for index, tensor in schedule.results[device]
        if graph.results[index].replaces < 0 and graph.tensors[tensor].num_bytes
    )
