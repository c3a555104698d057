"""What computing cheap ops again on every device that reads them could give, at best.

For each workload and machine: the search's plan; its transfers of deterministic ops are candidates,
each a copy of the op on the reader's device in place of the transfer (inputs travel there unless
they are there already). Copies are real ops of a changed graph, which is simulated; sets are kept
if the step gets shorter, else tried in halves. As a yardstick, the search goes on from its plan for
as long.

    python experiments/replication.py [--budget 25] [--trial 25]

Writes docs/results/replication.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections import Counter
from typing import Any

import msgspec
import numpy as np
from common import capture_workload, provenance, write

import devplace as dp
from devplace.graph import OpGraph
from devplace.problem import Placement, Problem
from devplace.simulator import Timeline, simulate

MODELS = ("bert-large", "gpt-2", "resnet-50", "inception-v3", "moe", "nmt-4", "gnmt-4")
MACHINES = ("h100x4", "k40x4")
Copy = tuple[int, int]  # op and device


class Trials:
    """Plans with copies, made from one plan without."""

    def __init__(self, problem: Problem, placement: Placement) -> None:
        self.problem, self.graph = problem, problem.graph
        self.device = placement.devices
        self.priority = placement.priority
        self.timeline = simulate(problem, placement)
        self.count = 0
        self._views: dict[int, list[int]] = {}

    def candidates(self) -> dict[str, list[Copy]]:
        """Copies no dearer than the transfers they replace: those that need nothing sent for them,
        those that need less sent, and all."""
        tasks, wires = self.problem.core.tasks, self.problem.core.wires
        arrives = {(t.tensor, int(t.dst)) for t in self.timeline.transfers}
        apart = np.bincount(tasks.group)[tasks.group] == 1
        sent: Counter[Copy] = Counter()
        for tensor, e in arrives:
            x = tasks.carrier_of[tensor]
            task = int(tasks.carrier_maker[x])
            op = self.graph.ops[tasks.task_op[task]]
            if apart[task] and not op.is_source and not op.is_random and op.stage != "update":
                sent[int(tasks.task_op[task]), e] += int(tasks.carrier_bytes[x])
        found: dict[str, list[Copy]] = {"free": [], "saving": [], "cheap": []}
        for (v, e), size in sorted(sent.items()):
            task, link = int(tasks.op_task[v]), wires.transfers.link_class[self.device[v], e]
            own = slice(tasks.out_ptr[task], tasks.out_ptr[task + 1])
            price = int((wires.transfers.transfer_ns + wires.transfers.send_ns)[link, own].sum())
            if wires.duration_ns[task, e] > price:
                continue
            needed = sum(
                int(tasks.carrier_bytes[c])
                for c in tasks.in_carrier[tasks.in_ptr[task] : tasks.in_ptr[task + 1]]
                if self.device[tasks.task_op[tasks.carrier_maker[c]]] != e
                and (int(tasks.carrier_tensor[c]), e) not in arrives
            )
            found["cheap"].append((v, e))
            if needed < size:
                found["saving"].append((v, e))
            if needed == 0:
                found["free"].append((v, e))
        return found

    def simulate(self, copies: list[Copy]) -> Timeline:
        """The better of the plan's order and the critical-path order, with copies."""
        self.count += 1
        graph, device, priority, old = self._with(copies)
        costs = self.problem.costs
        workspace = costs.workspace_bytes
        costs = dataclasses.replace(
            costs,
            compute_ns=costs.compute_ns[old],
            workspace_bytes=None if workspace is None else workspace[old],
        )
        problem = Problem(graph, self.problem.machine, costs)
        steps = [simulate(problem, Placement(device, order)) for order in (priority, None)]
        return min(steps, key=lambda step: step.makespan_ns)

    def _views_of(self, v: int) -> list[int]:
        if v not in self._views:
            mine, rows = set(self.graph.ops[v].outputs), []
            for w in range(v + 1, len(self.graph.ops)):
                op = self.graph.ops[w]
                if op.is_view and op.alias_of in mine:
                    rows.append(w)
                    mine |= set(op.outputs)
            self._views[v] = rows
        return self._views[v]

    def _with(self, copies: list[Copy]) -> tuple[OpGraph, Any, Any, Any]:
        """The graph with copies of ops and of the views of their outputs, which the readers on the
        copies' devices read; device, priority and original of each op."""
        devices: dict[int, list[int]] = {}
        for v, e in copies:
            for w in (v, *self._views_of(v)):
                devices.setdefault(w, []).append(e)
        renamed: dict[int, dict[int, int]] = {e: {} for _, e in copies}
        ops, tensors, place, old = [], list(self.graph.tensors), [], []
        for v, op in enumerate(self.graph.ops):
            own = {} if op.is_view else renamed.get(int(self.device[v]), {})
            ops.append(msgspec.structs.replace(op, inputs=tuple(own.get(t, t) for t in op.inputs)))
            place.append(int(self.device[v]))
            old.append(v)
            for e in devices.get(v, []):
                there = renamed[e]
                inputs = tuple(there.get(t, t) for t in op.inputs)
                outputs = tuple(range(len(tensors), len(tensors) + len(op.outputs)))
                for t, copy in zip(op.outputs, outputs, strict=True):
                    name = f"{self.graph.tensors[t].name}@{e}"
                    tensors.append(msgspec.structs.replace(self.graph.tensors[t], name=name))
                    there[t] = copy
                alias = there.get(op.alias_of, op.alias_of)
                ops.append(
                    msgspec.structs.replace(
                        op, name=f"{op.name}@{e}", inputs=inputs, outputs=outputs, alias_of=alias
                    )
                )
                place.append(e)
                old.append(v)
        graph = OpGraph(self.graph.name, tuple(ops), tuple(tensors), self.graph.results)
        priority = None if self.priority is None else self.priority[old]
        return graph, np.array(place, np.int32), priority, np.array(old)


def best_copies(trials: Trials, seconds: float) -> tuple[dict[str, int], int, list[Copy]]:
    """Step of each whole set, and the best step found by halving sets, with its copies."""
    begin, found = time.monotonic(), trials.candidates()
    best, kept, whole = trials.timeline.makespan_ns, [], {}
    for name, copies in found.items():
        whole[name] = trials.simulate(copies).makespan_ns if copies else best
        if whole[name] < best:
            best, kept = whole[name], list(copies)
    queue = [found["saving"], found["cheap"]]
    while queue and time.monotonic() - begin < seconds:
        more = sorted(set(queue.pop(0)) - set(kept))
        if not more:
            continue
        step = trials.simulate(kept + more).makespan_ns
        if step < best:
            best, kept = step, kept + more
        elif len(more) > 1:
            queue += [more[: len(more) // 2], more[len(more) // 2 :]]
    return whole, best, kept


def row(graph: OpGraph, machine: str, budget: float, trial: float) -> dict[str, Any]:
    """One workload on one machine."""
    wanted = dp.load_machine(machine)
    problem = Problem(graph, wanted, dp.Analytic()(graph, wanted))
    plan = dp.place(problem, dp.placers.Search(), f"{budget}s", seed=0)
    onward = dp.placers.Search(start=plan.placement)
    longer = dp.place(problem, onward, f"{trial}s", seed=1)
    trials = Trials(problem, plan.placement)
    whole, best, kept = best_copies(trials, trial)
    targets = Counter(graph.ops[v].target for v, _ in kept)
    return {
        "model": graph.name,
        "machine": machine,
        "step_ns": plan.step_ns,
        "transfers": len(plan.timeline.transfers),
        "candidates": {name: len(copies) for name, copies in trials.candidates().items()},
        "whole_set_ns": whole,
        "best_ns": best,
        "copies": len(kept),
        "targets": dict(targets.most_common(5)),
        "trials": trials.count,
        "searched_on_ns": longer.step_ns,
    }


def main() -> None:
    """All rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=float, default=25.0, help="s for the search")
    parser.add_argument("--trial", type=float, default=25.0, help="s for copies, and to search on")
    options = parser.parse_args()
    rows = []
    for model in MODELS:
        graph = capture_workload(model)
        for machine in MACHINES:
            rows.append(row(graph, machine, options.budget, options.trial))
            last = rows[-1]
            gain, other = (1 - last[k] / last["step_ns"] for k in ("best_ns", "searched_on_ns"))
            print(
                f"{model:13} {machine:7} copies {gain:7.2%}  searching on {other:7.2%}", flush=True
            )
    settings = {"budget_s": options.budget, "trial_s": options.trial, "seed": 0}
    write("replication", {"provenance": provenance(), "settings": settings, "rows": rows})


if __name__ == "__main__":
    main()
