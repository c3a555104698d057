"""Time one hop between two GPUs, by ping-pong inside two graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from devplace.errors import ExecutionError
from devplace.run.cuda.device import Flags
from devplace.run.cuda.probe.port import (
    WAIT_LIMIT_NS,
    Port,
    captured,
    copy_bytes,
    launch,
    least_gaps,
    stamped,
)
from devplace.run.cuda.push import Push, wait
from devplace.run.cuda.timestamps import DeviceClock
from devplace.run.workers import Workers

# Size -> rounds at that size: fewer of what takes longer.
ROUNDS = {
    2**10: 16,
    2**14: 16,
    2**18: 12,
    2**20: 12,
    2**22: 8,
    2**25: 4,
    2**28: 2,
}
SMALL = 2**10
HOST_LARGEST = 2**25
REPLAYS = 3


class Leg(NamedTuple):
    """Some rounds with the same size and way there; a small tensor by kernel comes back."""

    way: str
    num_bytes: int
    rounds: int


class PingPong:
    """Two graphs that throw tensors of all sizes there and small ones back.

    The sender stamps the time between legs. Everything is in one chain, so no branch of a graph
    needs to run beside another.

    Args:
        src: Sender.
        dst: Receiver.
        pushes: Way -> what carries.
        blocks: (way, bytes) -> how much the push adds to its flag.
        legs: What is thrown, in this order.
    """

    def __init__(
        self,
        src: Port,
        dst: Port,
        pushes: Mapping[str, Push],
        blocks: Mapping[tuple[str, int], int],
        legs: Sequence[Leg],
    ) -> None:
        self._ends = (src, dst)
        self._pushes = pushes
        self._legs = legs
        slots = list(range(sum(leg.rounds for leg in legs)))
        due = [blocks[leg.way, leg.num_bytes] for leg in legs for _ in range(leg.rounds)]
        self._flags: list[Flags] = []
        for port in self._ends:
            with port.current():
                self._flags.append(Flags(slots, port.torch_device))
        with src.current():
            self._flags[0].set_blocks(dict.fromkeys(slots, blocks["kernel", SMALL]))
            self._clock = DeviceClock(len(legs) + 1, src.torch_device)
        with dst.current():
            self._flags[1].set_blocks(dict(enumerate(due)))
        self._graphs = [self._capture_sender(), self._capture_receiver()]

    def leg_ns(self, workers: Workers) -> list[float]:
        """Time of a round of each leg, the least of some replays, ns.

        Raises:
            ExecutionError: Something did not arrive.
        """
        rows = []
        for _ in range(REPLAYS + 1):
            jobs = {
                port.index: lambda port=port, graph=graph: _replay(port, graph)
                for port, graph in zip(self._ends, self._graphs, strict=True)
            }
            launch(workers, jobs)
            for port in self._ends:
                port.synchronize_all()
            if any(int(flags.error) for flags in self._flags):
                raise ExecutionError(
                    f"a tensor or its answer did not arrive within {WAIT_LIMIT_NS / 1e9:g} s"
                )
            rows.append([when for _, _, when in self._clock.records()])
        rounds = [leg.rounds for leg in self._legs]
        return [gap / n for gap, n in zip(least_gaps(rows[1:]), rounds, strict=True)]

    def _capture_sender(self) -> Any:
        src, dst = self._ends
        slot = 0
        with captured(src) as graph:
            self._flags[0].epoch.add_(1)
            self._clock.stamp("begin")
            for leg in self._legs:
                words = leg.num_bytes // 4
                for _ in range(leg.rounds):
                    flag = self._flags[1].counter(slot)
                    self._pushes[leg.way](
                        src.out[:words], dst.into[:words], flag, self._flags[0].epoch
                    )
                    wait(self._flags[0], [slot], WAIT_LIMIT_NS)
                    slot += 1
                self._clock.stamp("leg")
        return graph

    def _capture_receiver(self) -> Any:
        src, dst = self._ends
        words = SMALL // 4
        with captured(dst) as graph:
            self._flags[1].epoch.add_(1)
            for slot in range(sum(leg.rounds for leg in self._legs)):
                wait(self._flags[1], [slot], WAIT_LIMIT_NS)
                flag = self._flags[0].counter(slot)
                self._pushes["kernel"](
                    dst.out[:words], src.into[:words], flag, self._flags[1].epoch
                )
        return graph


def _replay(port: Port, graph: Any) -> None:
    with port.current():
        graph.replay()


def hop_times(
    src: Port,
    dst: Port,
    pushes: Mapping[str, Push],
    blocks: Mapping[tuple[str, int], int],
    sizes: Sequence[int],
    workers: Workers,
) -> dict[str, tuple[int, ...]]:
    """Way -> time of one hop per size, ns.

    A round less the way back; that one is half of a round of small tensors both ways, for clocks
    of two devices cannot be compared.
    """
    warm = Leg("kernel", SMALL, ROUNDS[SMALL])
    legs = [Leg(way, size, ROUNDS[size]) for way in pushes for size in sizes]
    times = PingPong(src, dst, pushes, blocks, [warm, *legs]).leg_ns(workers)[1:]
    back = times[legs.index(Leg("kernel", SMALL, ROUNDS[SMALL]))] / 2
    hops = [max(1, round(time - back)) for time in times]
    return {
        way: tuple(hop for leg, hop in zip(legs, hops, strict=True) if leg.way == way)
        for way in pushes
    }


def host_times(port: Port, target: Any, source: Any, sizes: Sequence[int]) -> tuple[int, ...]:
    """Time of a copy between a GPU and pinned memory per size, in a chain of them, ns."""

    def record(clock: DeviceClock) -> None:
        stream = torch.cuda.current_stream(port.torch_device)
        for size in (SMALL, *sizes):
            clock.stamp("begin")
            for _ in range(ROUNDS[size]):
                copy_bytes(target, source, size, stream)
        clock.stamp("begin")

    gaps = least_gaps(stamped(port, record, len(sizes) + 2, REPLAYS))[1:]
    return tuple(max(1, round(gap / ROUNDS[s])) for gap, s in zip(gaps, sizes, strict=True))
