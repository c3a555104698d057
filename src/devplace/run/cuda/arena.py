"""How a captured step gets its memory: how much of it in one piece, what small tensors need."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from devplace.run.codegen import last_uses
from devplace.run.cuda.pieces import PLACE_BYTES
from devplace.run.linear import lane_of
from devplace.run.schedule import NodeFacts, Schedule
from devplace.run.write_back import DeviceWrites

# What torch gives up to this size comes in pages of SMALL_PAGE_BYTES; the rest in pieces.
SMALL_BYTES = 2**20
SMALL_PAGE_BYTES = 2 * 2**20
# Beside the small tensors of the plan: those that ops need for themselves, and gaps between all.
SMALL_SPARE_BYTES = 4 * 2**20
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


def choose_arena(step_bytes: int, small_bytes: int, allowed_bytes: int) -> Arena:
    """What to reserve for a step.

    Args:
        step_bytes: What it takes at once, small tensors apart.
        small_bytes: What small tensors take at once, and what is needed beside the step.
        allowed_bytes: What the process may still take.

    Returns:
        What it takes; where memory is scarce, all that is left beside small tensors.

    Example:
        >>> choose_arena(40 << 20, 3 << 20, 80 << 20)
        Arena(num_bytes=41943040, is_fixed=False)
        >>> choose_arena(70 << 20, 3 << 20, 80 << 20)
        Arena(num_bytes=75497472, is_fixed=True)
    """
    wanted = step_bytes + step_bytes // SPARE_PARTS + small_bytes + SMALL_SPARE_BYTES
    if wanted <= allowed_bytes:
        return Arena(step_bytes)
    pages = -(-(small_bytes + SMALL_SPARE_BYTES) // SMALL_PAGE_BYTES)
    left = allowed_bytes // SMALL_PAGE_BYTES - pages
    return Arena(max(0, left) * SMALL_PAGE_BYTES, is_fixed=True)


class StepPeaks(NamedTuple):
    """Most that the tensors of a step take at once on a GPU, bytes.

    Attributes:
        small: Those of up to SMALL_BYTES.
        large: The others.
    """

    small: int
    large: int


def step_peaks(
    schedule: Schedule,
    device: int,
    writes: DeviceWrites,
    joins: Mapping[int, tuple[int, ...]],
    freed: Mapping[int, tuple[int, ...]],
) -> StepPeaks:
    """What a step of a GPU takes, without sources, received tensors and workspaces of ops.

    Args:
        schedule: What every device does.
        device: Index of the GPU.
        writes: When its values are not needed any more because they were written back.
        joins: Of `joined_before`.
        freed: Of `freed_before`, of this device.

    Complexity: O(I + E) for I instructions with E arguments.
    """
    walk = _Walk(schedule, joins)
    dead = last_uses(schedule, device)
    for index, (kind, node, transfer) in enumerate(schedule.instructions[device]):
        for send in freed.get(index, ()):
            walk.join(send)
        if kind == "receive":
            walk.receive(transfer)
        elif kind == "send":
            walk.send(transfer, node)
        elif kind == "call":
            walk.make(node)
        for gone in (*writes.drops.get(index, ()), *dead.get(index, ())):
            walk.drop(gone)
    return StepPeaks(*walk.peaks)


def copied_bytes(schedule: Schedule, device: int) -> int:
    """What the copies of a step's results take that a device hands out, beside the step."""
    facts = NodeFacts(schedule.graph, schedule.device_of_op)
    found = (
        _rounded(facts.num_bytes(node))
        for index, node in schedule.results[device]
        if schedule.graph.results[index].replaces < 0
    )
    return sum(found)


class _Walk:
    """The tensors of one device that are alive, instruction by instruction."""

    def __init__(self, schedule: Schedule, joins: Mapping[int, tuple[int, ...]]) -> None:
        self.peaks = [0, 0]
        self._schedule = schedule
        self._facts = NodeFacts(schedule.graph, schedule.device_of_op)
        self._joins = joins
        self._sizes: dict[int, list[int]] = {}
        self._uses: Counter[int] = Counter()
        self._made: set[Any] = set()
        self._now = [0, 0]
        self._pending: dict[int, deque[tuple[int, int]]] = {}
        self._joined: set[int] = set()

    def make(self, node: Any) -> None:
        """An op gives a value, or a part or a view of one."""
        root = self._facts.root(node)
        self._made.add(node)
        if not self._facts.is_view(node) and root not in self._sizes:
            self._sizes[root] = [0, 0]
            for out in self._schedule.graph.ops[root].outputs:
                size = _rounded(self._schedule.graph.tensors[out].num_bytes)
                self._sizes[root][size > SMALL_BYTES] += size
            self._now = [a + b for a, b in zip(self._now, self._sizes[root], strict=True)]
            self.peaks = [max(a, b) for a, b in zip(self.peaks, self._now, strict=True)]
        self._uses[root] += 1

    def drop(self, node: Any) -> None:
        """Nothing needs a value any more."""
        if node in self._made:
            self._let_go(self._facts.root(node))

    def send(self, transfer: int, node: Any) -> None:
        """A push holds its tensor until it is joined."""
        root = self._facts.root(node)
        self._uses[root] += 1
        lane = lane_of(self._schedule.transfers[transfer])
        self._pending.setdefault(lane, deque()).append((transfer, root))

    def receive(self, transfer: int) -> None:
        """Pushes are joined before a wait."""
        for send in self._joins.get(transfer, ()):
            self.join(send)

    def join(self, transfer: int) -> None:
        """A push, and all before it on its stream, are over."""
        pending = self._pending.get(lane_of(self._schedule.transfers[transfer]))
        while pending and transfer not in self._joined:
            first, root = pending.popleft()
            self._joined.add(first)
            self._let_go(root)

    def _let_go(self, root: int) -> None:
        self._uses[root] -= 1
        if self._uses[root] == 0:
            sizes = self._sizes.pop(root, [0, 0])
            self._now = [a - b for a, b in zip(self._now, sizes, strict=True)]


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // PLACE_BYTES) * PLACE_BYTES
