"""Loads of a step's placement when steps follow each other through a full pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from devplace.pipelining.load_problem import I32, I64
from devplace.problem import Problem


@dataclass(frozen=True, eq=False)
class StepPrices:
    """What a step's ops and transfers take of each device, in shapes of `devplace.problem.core`.

    In each period of a full pipeline every device does its own share of one step, each for
    another batch. A device's load is the time of its ops (over its streams), and for
    accelerators the time of each tensor that comes in and, once, of each that goes out (by the
    slowest link it leaves by). A tensor's time on a link is what it occupies the link for, with the
    larger of the overheads at its ends; latency and queues delay a batch, not a full pipeline.
    Where there are accelerators, CPUs pay for no transfer; where there are only CPUs, they are the
    accelerators. Read-only sources are everywhere from the start and cost nothing.

    Attributes:
        problem: What is placed.

    Source: Tarnawski et al. (2020), arXiv 2006.16423, throughput objective, with each link's own
    price in place of one for all.
    """

    problem: Problem

    @cached_property
    def accelerators(self) -> list[int]:
        """Devices that pay for transfers."""
        return self.problem.accelerators

    @cached_property
    def cpus(self) -> list[int]:
        """Usable CPUs beside accelerators."""
        return [d for d in self.problem.usable_devices if d not in self.accelerators]

    @cached_property
    def pays(self) -> NDArray[np.bool_]:
        """Whether each device pays for transfers. `[D]`"""
        paying = np.zeros(len(self.problem.machine.devices), bool)
        paying[self.accelerators] = True
        return paying

    @cached_property
    def link_class(self) -> I32:
        """Row of `transfer_ns` for each ordered pair, -1 on the diagonal. `[D, D]`"""
        return self.problem.core.transfers.link_class

    @cached_property
    def transfer_ns(self) -> I64:
        """Time of each carrier on each kind of link. `[C, T]`"""
        machine, transfers = self.problem.machine, self.problem.core.transfers
        names = machine.device_names
        prices = transfers.transfer_ns.copy()
        for row in range(len(prices)):
            pairs = np.argwhere(transfers.link_class == row)
            for src, dst in pairs[:1].tolist():
                link = machine.path(names[src], names[dst])
                if link is not None:
                    prices[row] += max(link.send_overhead_ns, link.receive_overhead_ns)
        return prices

    def kinds(self, pairs: list[tuple[int, int]]) -> list[int]:
        """Rows of `transfer_ns` that these pairs of devices use."""
        return sorted({int(self.link_class[d, e]) for d, e in pairs if d != e})

    def loads_ns(self, device: I32) -> I64:
        """Load of each device, rounded up to 1 ns. `[D]`

        Args:
            device: Device of each task. `[N]`
        """
        tasks, wires = self.problem.core.tasks, self.problem.core.wires
        count = len(wires.streams)
        work = np.zeros(count, np.int64)
        np.add.at(work, device, wires.duration_ns[np.arange(len(device)), device])
        load = -(-work // wires.streams)
        maker = device[tasks.carrier_maker]
        carrier = np.repeat(np.arange(len(maker)), np.diff(tasks.cons_ptr))
        reader = device[tasks.cons]
        ways = np.unique((carrier * count + reader)[maker[carrier] != reader])
        carrier, reader = ways // count, ways % count
        price = self.transfer_ns[self.link_class[maker[carrier], reader], carrier]
        leaves = np.zeros(len(maker), np.int64)
        np.maximum.at(leaves, carrier, price)
        paying = self.pays[reader]
        np.add.at(load, reader[paying], price[paying])
        paying = self.pays[maker]
        np.add.at(load, maker[paying], leaves[paying])
        return load


def step_loads(problem: Problem, device: I32) -> I64:
    """Load of each device in a full pipeline, ns. `[D]`

    Args:
        problem: What is placed.
        device: Device of each task. `[N]`
    """
    return StepPrices(problem).loads_ns(np.asarray(device, np.int32))
