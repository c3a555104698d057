"""A step replayed from the rules of the simulator, with names instead of arrays; slow and plain.

Written from the rules alone (`docs/concepts/simulator.md`), sharing no code with the simulators it
checks. Times come from events; memory is not counted here but afterwards, from what lay where from
when until when.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from devplace.graph.graph import BATCH_ON
from devplace.machine import Link
from devplace.machine.machine import channels_of
from devplace.verify.facts import Facts, facts

if TYPE_CHECKING:
    from devplace.problem import Problem

END, ARRIVAL = 0, 1


@dataclass
class Sent:
    """One transfer; `round_` and `last_round` count the looks at memory before and after it."""

    tensor: int
    src: int
    dst: int
    request_ns: int
    begin_ns: int
    arrival_ns: int
    round_: int
    last_round: int = -1


@dataclass
class Replay:
    """What happened.

    Attributes:
        start_ns, finish_ns: Of each work op.
        first_round, last_round: Look at memory that first saw each work op running, and that which
            first saw it gone.
        sent: Transfers.
        in_place: Tensors that were computed over the source they replace.
        rounds: Number of looks.
        sequence: Work ops in the order they started.
    """

    start_ns: dict[int, int] = field(default_factory=dict)
    finish_ns: dict[int, int] = field(default_factory=dict)
    first_round: dict[int, int] = field(default_factory=dict)
    last_round: dict[int, int] = field(default_factory=dict)
    sent: list[Sent] = field(default_factory=list)
    in_place: set[int] = field(default_factory=set)
    rounds: int = 0
    sequence: list[int] = field(default_factory=list)

    @property
    def step_ns(self) -> int:
        """When the last op ends."""
        return max(self.finish_ns.values(), default=0)


def replay(
    problem: Problem,
    device: Sequence[int],
    priority: Sequence[int] | None = None,
    order: Sequence[Sequence[int]] | None = None,
) -> Replay:
    """Run one step in simulated time.

    Args:
        problem: What is placed.
        device: Device of each op.
        priority: Of each op, larger first; None: longest way to the end.
        order: Per device its ops in the order they must run, one after the other; None: whatever
            is ready runs, larger priority first. On a device with several streams it only says
            which of two ready ops goes first.
    """
    clock = _Clock(problem, device, priority, order)
    clock.run()
    return clock.seen


class _Clock:
    def __init__(
        self,
        problem: Problem,
        device: Sequence[int],
        priority: Sequence[int] | None,
        order: Sequence[Sequence[int]] | None,
    ) -> None:
        self.problem, self.facts = problem, facts(problem.graph)
        self.device = [int(d) for d in device]
        self.links = _Links(problem)
        if priority is None:
            priority = longest_ways(problem, self.facts, self.device, self.links)
        self.priority = [int(p) for p in priority]
        self.before: dict[int, int] = {}
        for d, row in enumerate(order or ()):
            if problem.machine.devices[d].streams > 1:
                for place, op in enumerate(row):
                    self.priority[op] = len(row) - place
                continue
            self.before |= dict(zip(row[1:], row, strict=False))
        self.waits: dict[int, set[object]] = {
            v: {*self.facts.reads[v], *([("after", self.before[v])] if v in self.before else [])}
            for v in self.facts.work
        }
        self.behind = {first: second for second, first in self.before.items()}
        self.ready: dict[int, list[int]] = {}
        self.running = [0] * len(problem.machine.devices)
        self.delay = [0] * len(problem.machine.devices)
        self.events: list[tuple[int, int, int, int, int]] = []
        self.now = self._batch_ns()
        self.seen = Replay()

    def run(self) -> None:
        """Sources first; then, instant by instant: ends, arrivals, starts, a look at memory."""
        ops = self.problem.graph.ops
        for v in self.facts.work:
            if not ops[v].is_source and not self.waits[v]:
                self._make_ready(v)
        for v in sorted(self.facts.work, key=self._rank):
            if ops[v].is_source:
                self.seen.start_ns[v], self.seen.first_round[v] = self.now, 0
                self._end(v)
        while True:
            for d in range(len(self.running)):
                self._start_on(d)
            self.seen.rounds += 1
            if not self.events:
                return
            self.now = self.events[0][0]
            while self.events and self.events[0][0] == self.now:
                _, kind, _, item, where = heapq.heappop(self.events)
                if kind == END:
                    self.running[self.device[item]] -= 1
                    self._end(item)
                else:
                    self._arrive(item, where)

    def _batch_ns(self) -> int:
        """Copies of the batch, one after the other, each to a device that reads the input: from
        where the batch lies, or the nearest CPU device."""
        graph, machine = self.problem.graph, self.problem.machine
        home = graph.meta.get(BATCH_ON, "")
        cpus = [d for d, device in enumerate(machine.devices) if device.traits.is_host]
        homes = [machine.device_index[home]] if home in machine.device_index else cpus
        total = 0
        for source, readers in self.facts.constants.items():
            (tensor,) = graph.ops[source].outputs
            size = graph.tensors[tensor].num_bytes
            for e in {self.device[v] for v in readers if graph.ops[source].role == "input"}:
                if machine.device_names[e] == home:
                    continue
                links = [self.links.link(d, e) for d in homes if d != e]
                waits = homes is not cpus or e not in cpus  # within the host nobody is woken
                ways = (x.duration_ns(size) + waits * x.latency_ns for x in links)
                total += min(ways, default=0)
        return total

    def _rank(self, v: int) -> tuple[int, int]:
        return (-self.priority[v], v)

    def _make_ready(self, v: int) -> None:
        self.ready.setdefault(self.device[v], []).append(v)

    def _start_on(self, d: int) -> None:
        waiting = self.ready.get(d, [])
        while waiting and self.running[d] < self.problem.machine.devices[d].streams:
            v = min(waiting, key=self._rank)
            waiting.remove(v)
            self.running[d] += 1
            took = int(self.problem.costs.compute_ns[v, d]) + self.delay[d]
            self.delay[d] = 0
            self.seen.start_ns[v] = self.now
            self.seen.first_round[v] = self.seen.rounds
            self.seen.sequence.append(v)
            for tensor, old in self.facts.over.items():
                if tensor in self.facts.owned[v] and self._is_last(v, old):
                    self.seen.in_place.add(tensor)
            heapq.heappush(self.events, (self.now + took, END, -self.priority[v], v, 0))

    def _is_last(self, v: int, old: int) -> bool:
        """Whether nothing but `v` still needs the memory of a source's tensor."""
        d = self.device[v]
        if not self.problem.machine.devices[d].traits.fixed_addresses or old in self.facts.kept:
            return False
        uses = 0
        for tensor, memory in self.facts.memory_of.items():
            if memory != old:
                continue
            uses += sum(
                self.device[r] == d and r not in self.seen.finish_ns
                for r in self.facts.readers[tensor]
            )
            uses += sum(s.tensor == tensor and s.last_round < 0 for s in self.seen.sent)
        return uses == 1

    def _end(self, v: int) -> None:
        self.seen.finish_ns[v] = self.now
        self.seen.last_round[v] = self.seen.rounds
        d = self.device[v]
        for tensor in self.facts.sends[v]:
            told: set[int] = set()
            for reader in self.facts.readers[tensor]:
                e = self.device[reader]
                if e == d:
                    self._has(reader, tensor)
                elif e not in told:
                    told.add(e)
                    self._send(tensor, d, e)
        if v in self.behind:
            self._has(self.behind[v], ("after", v))

    def _has(self, reader: int, what: object) -> None:
        self.waits[reader].discard(what)
        if not self.waits[reader]:
            self._make_ready(reader)

    def _send(self, tensor: int, d: int, e: int) -> None:
        size = self.problem.graph.tensors[tensor].num_bytes
        begin, arrival = self.links.carry(self.now, size, d, e)
        self.delay[d] += self.links.overhead(size, d, e)[0]
        self.seen.sent.append(Sent(tensor, d, e, self.now, begin, arrival, self.seen.rounds))
        heapq.heappush(self.events, (arrival, ARRIVAL, 0, tensor, e))

    def _arrive(self, tensor: int, e: int) -> None:
        sent = next(s for s in self.seen.sent if (s.tensor, s.dst) == (tensor, e))
        sent.last_round = self.seen.rounds
        size = self.problem.graph.tensors[tensor].num_bytes
        self.delay[e] += self.links.overhead(size, sent.src, e)[1]
        for reader in self.facts.readers[tensor]:
            if self.device[reader] == e:
                self._has(reader, tensor)


class _Links:
    """Who waits for whom on the wires."""

    def __init__(self, problem: Problem) -> None:
        self.machine = problem.machine
        self.lanes: dict[tuple[int, int, bool], int] = {}
        self.channels: dict[str, int] = {}

    def link(self, d: int, e: int) -> Link:
        names = self.machine.device_names
        link = self.machine.path(names[d], names[e])
        assert link is not None, "a machine has a way between any two devices"
        return link

    def overhead(self, size: int, d: int, e: int) -> tuple[int, int]:
        """Time a transfer takes of the sender's and of the receiver's ops."""
        link = self.link(d, e)
        took = link.duration_ns(size)
        return (
            link.send_overhead_ns + round(link.send_share * took),
            link.receive_overhead_ns + round(link.receive_share * took),
        )

    def carry(self, now: int, size: int, d: int, e: int) -> tuple[int, int]:
        """When a transfer begins and arrives; others will wait for it."""
        link = self.link(d, e)
        took = link.duration_ns(size)
        if link.parallel:
            return now, now + took + link.latency_ns
        is_engine = size >= link.engine_bytes
        begin = max(now, self.lanes.get((d, e, is_engine), 0))
        names = channels_of(link)
        if is_engine:
            begin = max([begin, *(self.channels.get(name, 0) for name in names)])
        self.lanes[d, e, is_engine] = begin + took
        occupied = min(took, msgspec.structs.replace(link, points=()).duration_ns(size))
        for name in names:
            self.channels[name] = max(self.channels.get(name, 0), begin) + occupied
        return begin, begin + took + link.latency_ns


def longest_ways(problem: Problem, found: Facts, device: Sequence[int], links: _Links) -> list[int]:
    """Time from each op's start to the end of the step if nothing ever waited."""
    way = [0] * len(problem.graph.ops)
    for v in reversed(found.work):
        d, tail = device[v], 0
        for tensor in found.sends[v]:
            size = problem.graph.tensors[tensor].num_bytes
            for reader in found.readers[tensor]:
                e = device[reader]
                link = links.link(d, e) if e != d else None
                crossing = link.duration_ns(size) + link.latency_ns if link else 0
                tail = max(tail, way[reader] + crossing)
        own = 0 if problem.graph.ops[v].is_source else int(problem.costs.compute_ns[v, d])
        way[v] = own + tail
    return way
