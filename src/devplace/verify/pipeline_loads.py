"""Loads of a step in a full pipeline, from their definition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import TYPE_CHECKING

from devplace.verify.device_demands import broken_demands
from devplace.verify.facts import facts

if TYPE_CHECKING:
    from devplace.plan import Plan
    from devplace.problem import Problem


@dataclass(frozen=True)
class LoadVerdict:
    """Loads of a placement, computed anew.

    Attributes:
        loads_ns: Load of each device.
        broken: Rules broken, in words; empty for a valid placement. Memory is checked by
            `verify_plan` and `verify_placement`.
    """

    loads_ns: tuple[int, ...]
    broken: tuple[str, ...]

    @property
    def value_ns(self) -> int:
        """The largest load."""
        return max(self.loads_ns, default=0)


def verify_loads(problem: Problem, device: Sequence[int]) -> LoadVerdict:
    """Loads in a full pipeline of steps.

    A device's load is the time of its ops over its streams; accelerators pay besides for every
    tensor that comes in the time of its link, and for every own tensor that is read elsewhere,
    once, the time of the slowest link that it takes. A link's time is what it is occupied for and
    the larger of its two overheads. Where there are only CPUs, they count as accelerators.

    Args:
        problem: What is placed.
        device: Device of each op.
    """
    broken = broken_demands(problem, device)
    if broken:
        return LoadVerdict((), tuple(broken))
    graph, machine, costs = problem.graph, problem.machine, problem.costs
    found = facts(graph)
    usable = [d for d in machine.devices if d.name not in problem.exclude]
    only_cpus = all(d.traits.is_host for d in usable)
    loads = []
    for at, place in enumerate(machine.devices):
        mine = [v for v in found.work if device[v] == at and not graph.ops[v].is_source]
        load = Fraction(sum(int(costs.compute_ns[v, at]) for v in mine), place.streams)
        if not place.traits.is_host or only_cpus:
            load = Fraction(ceil(load))
            for tensor, readers in found.readers.items():
                home = device[found.owner[tensor]]
                ends = {device[v] for v in readers} - {home}
                if at == home and ends:
                    load += max(_price(problem, tensor, home, end) for end in ends)
                elif at in ends:
                    load += _price(problem, tensor, home, at)
        loads.append(ceil(load))
    return LoadVerdict(tuple(loads), ())


def verify_throughput_plan(problem: Problem, plan: Plan) -> LoadVerdict:
    """Loads of a plan; `broken` also tells where the largest differs from what it predicts."""
    verdict = verify_loads(problem, plan.placement)
    said = plan.predicted.max_load_ns
    if verdict.broken or said == verdict.value_ns:
        return verdict
    text = f"the plan predicts a largest load of {said} ns, it is {verdict.value_ns}"
    return LoadVerdict(verdict.loads_ns, (text,))


def _price(problem: Problem, tensor: int, src: int, dst: int) -> int:
    names = problem.machine.device_names
    link = problem.machine.path(names[src], names[dst])
    assert link is not None, "devices of a machine reach each other"
    size = problem.graph.tensors[tensor].num_bytes
    return link.duration_ns(size) + max(link.send_overhead_ns, link.receive_overhead_ns)
