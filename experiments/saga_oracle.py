"""SAGA's schedulers beside ours on graphs without colocation; used by `equal_budget.py --saga`.

SAGA (PyPI `anrg-saga`) is somebody else's list schedulers in plain Python. Nothing of it is copied
here and nothing depends on it: its metadata says MIT, but the licence in its wheel forbids
commercial use, so see to it that your use is allowed.

Its model: a task takes cost / speed of its device, an edge size / speed of its link, and no
transfer waits for another. Devices and order of its schedules are valued by our simulator, once
with such links (there both must agree) and once with links where transfers queue, which its
schedulers do not know of. The other way round, plans of ours are valued by SAGA.

Source: Coleman, Krishnamachari (2025), PISA: an adversarial approach to comparing task graph
scheduling algorithms, IPDPS, arXiv 2403.07120.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from multiprocessing import get_context
from typing import Any

import msgspec
import numpy as np
from common import named_placer

from devplace import placers
from devplace.bench.as_problems import dataflow_problem
from devplace.cost import CostTable
from devplace.graph import StepResult
from devplace.instances import DataflowInstance, load_instance
from devplace.instances.suites import find
from devplace.machine import Machine
from devplace.placers import Budget
from devplace.problem import Placement, Problem
from devplace.schedule import waiting_ops
from devplace.simulator import simulate
from devplace.simulator.bounds import lower_bound
from devplace.simulator.in_order import simulate_in_order
from devplace.testing.hand import hand_machine, hand_problem
from devplace.testing.layered import layered_problem

SIZES = (60, 200, 500)
MACHINES = {
    "equal": ((1.0, 1.0, 1.0, 1.0), 150 * 10**9),
    "unequal": ((1.0, 1.0, 0.5, 0.25), 150 * 10**9),
    "slow links": ((1.0, 1.0, 1.0, 1.0), 12 * 10**9),
}
"""Speeds of four devices, and of the links between all of them, bytes/s."""
SCHEDULERS = (
    *("Heft", "Cpop", "ETF", "BIL", "DPS", "FCP", "FLB", "GDL", "Hbmct", "MST", "Msbc", "WBA"),
    *("MinMin", "MaxMin", "Duplex", "Sufferage", "MCT", "MET", "OLB", "FastestNode"),
)
"""All but its exhaustive search, its SMT solver, and the one that picks among given ones."""
OURS = {
    "heft": ("heft", 1),
    "etf": ("etf", 1),
    "search": ("search", 1),
    "search x16": ("search", 16),
}
"""Name of the row -> placer, and how many times the budget it has."""
SECONDS = 30.0
"""Most processor time a scheduler gets for one graph."""
TINY = 20
CLOSE = 1e-9
"""Relative; SAGA's times are floating-point numbers."""


@dataclass(frozen=True)
class Case:
    """One graph on four devices.

    Attributes:
        name: Of the graph.
        devices: One of `MACHINES`.
        free: With links where no transfer waits, as SAGA has them.
        queued: With links whose transfers queue, or None where the instance has none.
        unit: How the page shows a time: what to divide by, and the name of that.
    """

    name: str
    devices: str
    free: Problem
    queued: Problem | None
    unit: tuple[float, str]


def cases() -> Iterator[Case]:
    """Layered graphs of some sizes, and the published DOPPLER graphs."""
    for size in SIZES:
        for name, (speeds, rate) in MACHINES.items():
            queued = _plain(layered_problem(size, len(speeds)), speeds)
            queued = replace(queued, machine=_links_with(queued.machine, bytes_per_s=rate))
            free = replace(queued, machine=_links_with(queued.machine, parallel=True))
            yield Case(f"layered {size}", name, free, queued, (1e6, "ms"))
    for path in find("doppler"):
        instance = load_instance(path)
        assert isinstance(instance, DataflowInstance)
        problem, unit = dataflow_problem(instance)
        yield Case(path.stem, "equal", problem, None, (1e10 / float(unit), "1e10"))


def _plain(problem: Problem, speeds: tuple[float, ...]) -> Problem:
    """The same without colocation: parameters are read only, their updates are results."""
    graph = problem.graph
    results = tuple(
        StepResult(f"new {r.name}", r.tensor, "output") if r.replaces >= 0 else r
        for r in graph.results
    )
    time_ns = problem.costs.compute_ns[:, 0, None] / np.array(speeds)
    costs = CostTable(np.rint(time_ns).astype(np.int64), "layered")
    return Problem(replace(graph, results=results), problem.machine, costs)


def _links_with(machine: Machine, **changes: Any) -> Machine:
    links = tuple(msgspec.structs.replace(link, **changes) for link in machine.links)
    return Machine(machine.name, machine.devices, links)


def as_saga(problem: Problem) -> tuple[Any, Any]:
    """The problem as SAGA has it: task graph and network. Tasks are named by op index, as text.

    Edge sizes are times, all links have speed 1; devices have a speed and tasks a cost.
    """
    saga = import_module("saga")
    tasks, wires = problem.core.tasks, problem.core.wires
    apart = ~np.eye(problem.core.num_devices, dtype=bool)
    assert (
        len(wires.transfers.transfer_ns) == len(np.unique(wires.transfers.latency_ns[apart])) == 1
    )
    edge_ns = wires.transfers.transfer_ns[0] + wires.transfers.latency_ns[apart][0]
    cost, names = wires.duration_ns[:, 0], problem.machine.device_names
    assert not tasks.is_source.any()
    assert tasks.num_groups == tasks.num_tasks
    assert cost.min() > 0
    speeds = cost.sum() / wires.duration_ns.sum(axis=0)
    assert np.array_equal(cost[:, None] / speeds, wires.duration_ns)
    edges: dict[tuple[str, str], float] = {}
    for reader in range(tasks.num_tasks):
        for carrier in tasks.in_carrier[tasks.in_ptr[reader] : tasks.in_ptr[reader + 1]]:
            key = _name(problem, tasks.carrier_maker[carrier]), _name(problem, reader)
            edges[key] = max(edges.get(key, 0.0), float(edge_ns[carrier]))
    graph = saga.TaskGraph.create(
        [(_name(problem, task), float(cost[task])) for task in range(tasks.num_tasks)],
        [(*key, size) for key, size in edges.items()],
    )
    network = saga.Network.create(
        list(zip(names, map(float, speeds), strict=True)),
        [(a, b, 1.0) for a in names for b in names if a < b],
    )
    return graph, network


def _name(problem: Problem, task: int | np.integer[Any]) -> str:
    return f"{int(problem.core.tasks.task_op[task]):04d}"  # text sorts as numbers do


def from_saga(problem: Problem, schedule: Any) -> Placement:
    """Devices and order of a schedule of SAGA; what it added as common start or end is left out."""
    devices = np.zeros(len(problem.graph.ops), np.int32)
    order = []
    for index, name in enumerate(problem.machine.device_names):
        row = tuple(int(task.name) for task in schedule[name] if not task.name.startswith("__"))
        devices[list(row)] = index
        order.append(row)
    placed = problem.spaces.op_devices(devices[problem.core.tasks.task_op])
    return Placement(placed, order=tuple(order))


def broken_rule(graph: Any, network: Any, schedule: Any) -> str:
    """Which rule of SAGA's own model a schedule of it breaks; empty if none."""
    rows = {name: list(tasks) for name, tasks in schedule.items()}
    at = {task.name: task for row in rows.values() for task in row}
    slack = CLOSE * schedule.makespan
    if len(at) != len(graph.tasks) or sum(map(len, rows.values())) != len(graph.tasks):
        return f"{len(at)} of {len(graph.tasks)} tasks are scheduled"
    for row in rows.values():
        for first, second in pairwise(row):
            if second.start < first.end - slack:
                return f"{second.name} starts before {first.name} of the same device ends"
    speed = {frozenset((e.source, e.target)): e.speed for e in network.edges}
    for edge in graph.dependencies:
        source, target = at[edge.source], at[edge.target]
        arrival = source.end + edge.size / speed[frozenset((source.node, target.node))]
        if target.start < arrival - slack:
            return f"{target.name} starts before the output of {source.name} arrives"
    return ""


def valued_by_saga(problem: Problem, placement: Placement) -> float:
    """Makespan in SAGA's model of our devices, in the order our simulator starts them."""
    saga = import_module("saga")
    graph, network = as_saga(problem)
    timeline = simulate(problem, placement)
    schedule = saga.Schedule(graph, network)
    cost = {task.name: task.cost for task in graph.tasks}
    if "__super_source__" in cost:
        name = problem.machine.device_names[0]
        schedule.add_task(
            saga.ScheduledTask(node=name, name="__super_source__", start=0.0, end=0.0)
        )
    ops = problem.core.tasks.task_op.tolist()
    for op in sorted(ops, key=lambda op: (timeline.start_ns[op], op)):
        name, node = f"{op:04d}", problem.machine.device_names[timeline.devices[op]]
        start = schedule.get_earliest_start_time(name, node, append_only=True)
        end = start + cost[name] / network.get_node(node).speed
        schedule.add_task(saga.ScheduledTask(node=node, name=name, start=start, end=end))
    return float(schedule.makespan)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Stop what takes more of the processor with a TimeoutError."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"longer than {seconds:g} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def theirs(case: Case, scheduler: str) -> dict[str, Any]:
    """One scheduler of SAGA on one graph, valued by both."""
    schedulers = import_module("saga.schedulers")
    graph, network = as_saga(case.free)
    row: dict[str, Any] = {"scheduler": scheduler, "who": "saga"}
    random.seed(0)
    np.random.seed(0)
    begin = time.process_time()
    try:
        with within(SECONDS):
            schedule = getattr(schedulers, f"{scheduler}Scheduler")().schedule(network, graph)
    except Exception as error:  # whatever fails there is its row's result
        return {**row, "reason": f"{type(error).__name__}: {error}"[:200]}
    row["seconds"] = round(time.process_time() - begin, 2)
    row["own_ns"] = float(schedule.makespan)
    if reason := broken_rule(graph, network, schedule):
        return {**row, "reason": reason}
    placement = from_saga(case.free, schedule)
    assert placement.order is not None
    if waiting_ops(case.free.graph, placement.order) is not None:
        return {**row, "reason": "its order has a cycle"}
    for links, problem in _links(case):
        row[links] = simulate_in_order(problem, placement, placement.order).makespan_ns
        row[f"{links} by priority"] = simulate(problem, Placement(placement.devices)).makespan_ns
    return row


def ours(case: Case, name: str, budget: str, seed: int) -> dict[str, Any]:
    """One of our placers on one graph, with either kind of links."""
    placer, times = OURS[name]
    most = Budget(evaluations=times * (Budget.parse(budget).evaluations or 1))
    row: dict[str, Any] = {"scheduler": name, "who": "devplace", "seed": seed}
    for links, problem in _links(case):
        found = placers.place(problem, named_placer(placer), most, seed)
        row[links], row[f"{links} seconds"] = found.step_ns, round(found.seconds, 2)
        if links == "free":
            row["by_saga_ns"] = valued_by_saga(problem, found.placement)
    return row


def _links(case: Case) -> list[tuple[str, Problem]]:
    free = [("free", case.free)]
    return free if case.queued is None else [*free, ("queued", case.queued)]


def one_case(number: int, budget: str, seeds: int) -> list[dict[str, Any]]:
    """All rows of one case."""
    logging.disable(logging.WARNING)  # SAGA tells of every end it adds
    case = list(cases())[number]
    bounds = {f"{links} bound": lower_bound(p).step_ns for links, p in _links(case)}
    rows = [
        ours(case, name, budget, seed)
        for name, (placer, _) in OURS.items()
        for seed in range(seeds if placer == "search" else 1)
    ]
    for scheduler in SCHEDULERS:
        rows.append(theirs(case, scheduler))
        print(case.name, case.devices, rows[-1], flush=True)
    base = {"graph": case.name, "devices": case.devices, "ops": len(case.free.core.tasks.task_op)}
    return [{**base, "unit": case.unit, **bounds, **row} for row in rows]


def tiny_case(seed: int) -> dict[str, Any]:
    """A random graph of five ops on two devices, solved by SAGA's exhaustive search and by ours."""
    logging.disable(logging.WARNING)
    rng = np.random.default_rng(seed)
    lines = []
    for k in range(5):
        reads = ", ".join(f"t{j}" for j in range(k) if rng.random() < 0.5)
        lines.append(f"t{k} = f({reads}) bytes={rng.integers(1, 20)} ns={rng.integers(1, 20)}")
    made = hand_problem("\n".join(lines), hand_machine({"gpu:0": 10**6, "gpu:1": 10**6}))
    problem = replace(made, machine=_links_with(made.machine, parallel=True))
    graph, network = as_saga(problem)
    brute_force = import_module("saga.schedulers").BruteForceScheduler()
    best = brute_force.schedule(network, graph).makespan
    found = placers.place(problem, named_placer("search"), "400ev", 0).step_ns
    return {"seed": seed, "brute_force_ns": float(best), "search_ns": found}


def checks(rows: list[dict[str, Any]], tiny: list[dict[str, Any]]) -> dict[str, int]:
    """How often both sides agree where their models are the same."""
    valued = [(row["free"], row["own_ns"]) for row in rows if "own_ns" in row and "free" in row]
    own = [(row["free"], row["by_saga_ns"]) for row in rows if "by_saga_ns" in row]
    exact = [(row["search_ns"], row["brute_force_ns"]) for row in tiny]
    found = {"tiny_worse": sum(a > b * (1 + CLOSE) for a, b in exact)}
    for name, pairs in (("theirs", valued), ("ours", own), ("tiny", exact)):
        found[f"{name}_valued"] = len(pairs)
        found[f"{name}_equal"] = sum(abs(a - b) <= CLOSE * b for a, b in pairs)
    found["theirs_earlier"] = sum(a < b * (1 - CLOSE) for a, b in valued)
    found["theirs_broken"] = sum("own_ns" in row and "free" not in row for row in rows)
    return found


def compare(budget: str, seeds: int, workers: int) -> dict[str, Any]:
    """Every case in a process of its own; stops if the two models do not agree."""
    try:
        installed = version("anrg-saga")
        import_module("saga.schedulers")
    except (PackageNotFoundError, ImportError) as error:
        raise SystemExit(
            f"SAGA's schedulers are not installed ({error}). Install them for this experiment "
            f"alone, if its licence allows your use: pip install anrg-saga"
        ) from error
    os.environ["PYTHONHASHSEED"] = "0"  # it goes through sets of names: ties depend on the hash
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        count = len(list(cases()))
        waiting = [pool.submit(one_case, k, budget, seeds) for k in reversed(range(count))]
        tiny_waiting = pool.map(tiny_case, range(TINY))
        for job in reversed(waiting):  # the largest began first
            rows += job.result()
        tiny = list(tiny_waiting)
    found = checks(rows, tiny)
    print(found, flush=True)
    wrong = found["theirs_valued"] - found["theirs_equal"] - found["theirs_earlier"]
    wrong += found["ours_valued"] - found["ours_equal"]
    wrong += found["tiny_valued"] - found["tiny_equal"] - found["tiny_worse"]
    if wrong:
        raise SystemExit(f"{wrong} values differ where SAGA's model and ours are the same: {rows}")
    data = {"saga": installed, "budget": budget, "checks": found}
    return {**data, "rows": rows, "tiny": tiny}
