"""Memory arena of a captured step: size of the one large piece, and of small tensors."""

from __future__ import annotations

import operator
from collections import Counter, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from devplace.run.codegen import last_uses
from devplace.run.linear import lane_of
from devplace.run.schedule import NodeFacts, Schedule
from devplace.run.write_back import DeviceWrites
from devplace.simulator.heap import BLOCK_BYTES, MAX_SMALL_BYTES, SMALL_PAGE_BYTES, Piece

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
            walk.receive(transfer, node)
        elif kind == "send":
            walk.send(transfer, node)
        elif kind == "call":
            over = {write.output for write in writes.fused.get(index, ())}
            walk.make(node, writes.in_place(index) is not None, over)
        else:
            walk.load(node)
        for gone in (*writes.drops.get(index, ()), *dead.get(index, ())):
            walk.drop(gone)
    return StepPeaks(walk.small.num_bytes, walk.large.num_bytes, walk.peak_bytes)


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
        self.small, self.large = Piece(BLOCK_BYTES), Piece(BLOCK_BYTES)
        self.peak_bytes = 0
        self._schedule = schedule
        self._facts = NodeFacts(schedule.graph, schedule.device_of_op)
        self._joins = joins
        self._blocks: dict[int, tuple[int, int]] = {}  # address and size
        self._uses: Counter[int] = Counter()
        self._now = 0
        self._pending: dict[int, deque[tuple[int, Any]]] = {}
        self._joined: set[int] = set()

    def make(self, node: Any, is_in_place: bool, over: Collection[int] = ()) -> None:
        """An op gives a value, or a part or view of one; outputs `over` lie in older memory."""
        op = self._facts.op_of[node]
        is_new = not self._facts.is_view(node) and node.target is not operator.getitem
        if is_new and not is_in_place:
            for place, tensor in enumerate(self._schedule.graph.ops[op].outputs):
                if place not in over:
                    self._allocate(tensor)
        self._hold(node)

    def drop(self, node: Any) -> None:
        """Nothing needs a value any more."""
        for tensor in self._tensors(node):
            self._uses[tensor] -= 1
            if self._uses[tensor] == 0:
                self._free(tensor)

    def send(self, transfer: int, node: Any) -> None:
        """A push holds its tensor until it is joined."""
        self._hold(node)
        lane = lane_of(self._schedule.transfers[transfer])
        self._pending.setdefault(lane, deque()).append((transfer, node))

    def load(self, node: Any) -> None:
        """A value that is there anyhow."""
        self._hold(node)

    def receive(self, transfer: int, node: Any) -> None:
        """Pushes are joined before a wait."""
        self._hold(node)
        for send in self._joins.get(transfer, ()):
            self.join(send)

    def join(self, transfer: int) -> None:
        """A push, and all before it on its stream, are over."""
        pending = self._pending.get(lane_of(self._schedule.transfers[transfer]))
        while pending and transfer not in self._joined:
            first, node = pending.popleft()
            self._joined.add(first)
            self.drop(node)

    def _tensors(self, node: Any) -> tuple[int, ...]:
        """What keeps its memory while this value is there."""
        owner = self._facts.owner(node)
        if owner.op == "placeholder" or owner.name in self._schedule.graph.program.tensor_of:
            return (self._facts.tensor_id(owner),)
        return self._schedule.graph.ops[self._facts.op_of[owner]].outputs

    def _hold(self, node: Any) -> None:
        self._uses.update(self._tensors(node))

    def _allocate(self, tensor: int) -> None:
        size = _rounded(self._schedule.graph.tensors[tensor].num_bytes)
        self._now += size
        self.peak_bytes = max(self.peak_bytes, self._now)
        if size:
            self._blocks[tensor] = self._piece(size).take(size), size

    def _free(self, tensor: int) -> None:
        address, size = self._blocks.pop(tensor, (0, 0))
        self._now -= size
        if size:
            self._piece(size).give(address, size)

    def _piece(self, size: int) -> Piece:
        return self.large if size > MAX_SMALL_BYTES else self.small


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES
