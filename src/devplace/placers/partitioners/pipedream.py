"""PipeDream's planner: the best contiguous split of a chain."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from devplace.placers.colocation_groups import (
    I32,
    by_vote,
    mean_duration_ns,
)
from devplace.placers.counted_simulator import Evaluator
from devplace.placers.modules import module_chain
from devplace.placers.simple.even import shares
from devplace.problem import Placement, Problem

F64 = NDArray[np.float64]


@dataclass(frozen=True)
class PipeDream:
    """Modules in forward order, cut into one stage per accelerator so that the slowest is fastest.

    A dynamic programme over the chain of modules: the value of a split is the largest of all
    stages' times (forward, backward and update of their modules) and of all cuts' times to send
    what crosses them. A stage whose modules need more memory than its device has is not considered,
    unless there is no other split. Fewer devices are used where that is as good.

    Source: Narayanan et al. (2019), PipeDream: generalized pipeline parallelism for DNN training,
    SOSP, and the straight pipeline of its released planner. Differs from it: no stage is
    replicated; the graph is made a chain by the order in which modules run instead of by antichains
    (without modules: 500 stretches of equal time in topological order); devices may be unequal, and
    the k-th stage is on the k-th accelerator in use; a cut costs what really crosses it, both ways.
    It minimises the load of a full pipeline, which is not the time of one step: with one
    micro-batch the stages of a plan run one after another.

    Attributes:
        most: Stretches of a graph without modules.
    """

    name: str = "pipedream"
    most: int = 500

    def supports(self, problem: Problem) -> str:
        """Always."""
        return ""

    def __call__(
        self, problem: Problem, evaluate: Evaluator, rng: np.random.Generator
    ) -> Placement:
        """Split once. O(M^2 D)."""
        return pipeline_over(problem, problem.accelerators, self.most)


def pipeline_over(problem: Problem, devices: list[int], most: int = 500) -> Placement:
    """The split of `PipeDream` over these devices, in this order."""
    of_task, num_bytes = _chain(problem, most)
    count = len(num_bytes)
    times = problem.core.wires.duration_ns[:, devices].T
    load = np.stack([np.bincount(of_task, row, count) for row in times]).astype(np.float64)
    room = np.array([problem.limit_bytes[d] for d in devices], np.float64)
    cuts = cut_ns(problem, of_task, count, devices)
    stage = split(load, cuts, num_bytes, room)
    if stage is None:
        stage = split(load, cuts, np.zeros(count), room)
    assert stage is not None, "without memory limits one device holds everything"
    wish = np.array(devices, np.int32)[stage][of_task]
    groups = by_vote(problem, wish.astype(np.int32), mean_duration_ns(problem))
    return Placement(problem.spaces.op_devices_of_groups(groups))


def _chain(problem: Problem, most: int) -> tuple[I32, F64]:
    """Link of the chain of each task `[N]`, and bytes each link needs `[M]`."""
    chain = module_chain(problem)
    if len(chain.names) > 1:
        return chain.of_task, chain.bytes.astype(np.float64)
    tasks = problem.core.tasks
    count = max(1, min(most, tasks.num_tasks))
    of_task = shares(mean_duration_ns(problem), count)
    return of_task, np.bincount(of_task, tasks.made_bytes, count).astype(np.float64)


def cut_ns(problem: Problem, of_task: I32, count: int, devices: list[int]) -> F64:
    """Time to send all that crosses a cut before each link of the chain; 0 for the first. `[M]`

    By the slowest link between two of the devices; forward and backward tensors alike.
    """
    tasks, transfers = problem.core.tasks, problem.core.transfers
    kinds = np.unique([transfers.link_class[d, e] for d in devices for e in devices if d != e])
    if not len(kinds):
        return np.zeros(count)
    slowest = transfers.transfer_ns[kinds].max(axis=0)
    first = of_task[tasks.carrier_maker].astype(np.int64)
    last = first.copy()
    carrier = np.repeat(np.arange(len(first)), np.diff(tasks.cons_ptr))
    np.minimum.at(first, carrier, of_task[tasks.cons])
    np.maximum.at(last, carrier, of_task[tasks.cons])
    crossing = np.zeros(count + 1)
    np.add.at(crossing, first + 1, slowest)
    np.add.at(crossing, last + 1, -slowest)
    total: F64 = np.cumsum(crossing)[:count]
    return np.maximum(total, 0)


def split(load: F64, cuts: F64, num_bytes: F64, room: F64) -> NDArray[np.int64] | None:
    """Stage of each link such that the largest load or cut is smallest, or None if nothing fits.

    Args:
        load: Time of each link on each device. `[D, M]`
        cuts: Time to send what crosses a cut before each link. `[M]`
        num_bytes: Bytes each link needs. `[M]`
        room: Bytes each device has. `[D]`

    Returns:
        Index of the device of each link, never falling. `[M]`
    """
    num_devices, count = load.shape
    used = np.concatenate([[0.0], np.cumsum(num_bytes)])
    # value[j]: the first j links on the devices so far; begin[d][j]: where stage d begins then
    value = np.full(count + 1, np.inf)
    value[0] = 0.0
    begins = []
    for device in range(num_devices):
        upto = np.concatenate([[0.0], np.cumsum(load[device])])
        cost = np.maximum(upto[None, :] - upto[:, None], value[:, None])
        cost[1:count] = np.maximum(cost[1:count], cuts[1:, None])
        cost[np.tril_indices(count + 1)] = np.inf
        cost[used[None, :] - used[:, None] > room[device]] = np.inf
        begin = cost.argmin(axis=0)
        best = cost[begin, np.arange(count + 1)]
        keep = value <= best  # this device is left out
        begins.append(np.where(keep, np.arange(count + 1), begin))
        value = np.where(keep, value, best)
    if not np.isfinite(value[count]):
        return None
    stage = np.zeros(count, np.int64)
    end = count
    for device in range(num_devices - 1, -1, -1):
        begin_at = int(begins[device][end])
        stage[begin_at:end] = device
        end = begin_at
    return stage
