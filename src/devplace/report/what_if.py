"""What would make a step faster: changes to machine or model, each simulated with the same plan."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from devplace.graph.members import module_shares
from devplace.machine import Link
from devplace.placers import Result
from devplace.problem import Problem
from devplace.report.blocks import block_of
from devplace.simulator.in_order import simulate_in_order
from devplace.units import format_time

SHOWN = 3
_BLOCKS = 4
_LEAST = 0.01
_WHOLE = 10**6


@dataclass(frozen=True)
class Change:
    """One change, and the step with it."""

    what: str
    step_ns: int
    saved: float

    @property
    def text(self) -> str:
        """As a line."""
        return f"{self.what}: {format_time(self.step_ns)}, {self.saved:.0%} less"


def changes(result: Result) -> tuple[Change, ...]:
    """The three changes that shorten the step most, of: all links twice as fast, each device twice
    as fast, each of the blocks that take most of the critical path half the work.

    Placement and order stay, so that a new plan may gain more, and no change seems to gain what
    only another order does. Changes of less than 1 % are left out.

    Complexity: ten simulations at most, of machines of up to five devices in use.
    """
    timeline = result.timeline
    problem = timeline.problem
    tried: list[tuple[str, Problem]] = []
    if timeline.transfers:
        links = tuple(_doubled(link) for link in problem.machine.links)
        machine = replace(problem.machine, links=links)
        tried.append(("links twice as fast", replace(problem, machine=machine)))
    for d, name in enumerate(problem.machine.device_names):
        if timeline.order[d]:
            compute = problem.costs.compute_ns.copy()
            compute[:, d] //= 2
            tried.append((f"{name} twice as fast", _priced(problem, compute)))
    for block, shares in _critical_blocks(result):
        compute = problem.costs.compute_ns.copy()
        for op, share in shares.items():
            compute[op] -= np.rint(compute[op] * (share / 2 / _WHOLE)).astype(np.int64)
        tried.append((f"half the work in {block}", _priced(problem, compute)))
    found = []
    for what, changed in tried:
        step_ns = simulate_in_order(changed, result.placement, result.plan.order).makespan_ns
        saved = 1 - step_ns / max(1, timeline.makespan_ns)
        if saved >= _LEAST:
            found.append(Change(what, step_ns, saved))
    return tuple(sorted(found, key=lambda change: change.step_ns)[:SHOWN])


def _priced(problem: Problem, compute_ns: np.ndarray) -> Problem:
    return replace(problem, costs=replace(problem.costs, compute_ns=compute_ns))


def _doubled(link: Link) -> Link:
    points = tuple((size, duration // 2) for size, duration in link.points)
    return msgspec.structs.replace(link, bytes_per_s=2 * link.bytes_per_s, points=points)


def _critical_blocks(result: Result) -> list[tuple[str, Counter[int]]]:
    """Blocks (else modules) with most time on the critical path; op -> its share, of `_WHOLE`."""
    timeline = result.timeline
    spent: Counter[str] = Counter()
    shares: dict[str, Counter[int]] = {}
    critical = set(timeline.critical_path())
    for index, op in enumerate(timeline.problem.graph.ops):
        for module, share in ({} if op.is_source else module_shares(op, _WHOLE)).items():
            name = block_of(module) or module
            if name:
                shares.setdefault(name, Counter())[index] += share
                if index in critical:
                    time_ns = int(timeline.finish_ns[index] - timeline.start_ns[index])
                    spent[name] += time_ns * share // _WHOLE
    return [(name, shares[name]) for name, _ in spent.most_common(_BLOCKS)]
