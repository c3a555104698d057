"""Our rows of the first table: one GPU, the expert's split, and searched plans, predicted beside
measured.

Every plan that is measured is kept with its order, so that predictions can be made again later with
other constants (`experiments/gpu/predict.py`). Only one process at a time measures (GPU_LOCK).

Run: `python -m experiments.gpu.plans WORKLOAD --out FOLDER [--number-format bf16] [--layers N]
[--batch N] [--micro-batches 1,4] [--gpus 2,4] [--budget 30s] [--placements 30] [--trace]
[--stack-gradients] [--fuse]`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from experiments.gpu.kernels import kernel_times
from experiments.gpu.timing import WARM_UP_S, GpuLock
from experiments.gpu.training import (
    FORMATS,
    OPTIMIZERS,
    Settings,
    build,
    make_optimizer,
    prepare_torch,
)
from torch.utils._pytree import tree_map

from devplace import placers
from devplace.cost import CostTable
from devplace.cost.source_values import Source
from devplace.cost.worker_process import WorkerProcess
from devplace.graph import OpGraph, serialize
from devplace.kernels.compilers import Compilers
from devplace.kernels.prepare import any_compiled, prepare
from devplace.machine import detect, toml
from devplace.placers.colocation_groups import by_vote, mean_duration_ns
from devplace.plan import Plan
from devplace.problem import Placement, Problem
from devplace.report import deviations
from devplace.run.executors import make_executor
from devplace.schedule import make_schedule
from devplace.simulator.in_order import simulate_in_order
from devplace.step_capture import capture
from devplace.step_capture.micro_batches.chunks import Known
from devplace.tune.calibration import calibrated
from devplace.tune.candidates import candidates, predicted_ns, singles
from devplace.tune.measured_costs import HOPPER, price, probed_machine
from devplace.tune.step_sources import step_sources
from devplace.tune.step_timing import fill, time_plan

SHARES = (0.1, 0.3, 0.6, 1.0)
"""Parts of the modules that a perturbed placement moves."""
TRACED = ("one graph", "layers", "search")


class Planned(NamedTuple):
    """Plans for some GPUs: the expert's, if there is one, and what the search found."""

    expert: placers.Result | None
    search: placers.Result


@dataclass
class Step:
    """A workload's step with some number of micro-batches.

    Attributes:
        count: Micro-batches.
        graph: Its ops.
        sources: What it starts from.
        seconds: What took how long.
        costs: Once it is priced.
        single: The plan for one GPU, once it is planned.
        plans: GPUs -> plans for so many.
    """

    count: int
    graph: OpGraph
    sources: Mapping[int, Source]
    seconds: dict[str, float]
    costs: CostTable | None = None
    single: Plan | None = None
    plans: dict[int, Planned] = field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        """What is written of it."""
        seconds = self.seconds
        return {"micro_batches": self.count, "ops": len(self.graph.ops), "seconds": seconds}


class Bench:
    """One workload on this machine."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.settings = Settings(
            options.workload,
            number_format=options.number_format,
            size=options.size,
            batch=options.batch,
            layers=options.layers,
            device=options.device,
            optimizer=options.optimizer,
        )
        self.kind = self.settings.device_type
        prepare_torch(self.settings)
        # The model is on the CPU, so that no GPU holds it twice, the batch where that of the other
        # rows is.
        built = build(self.settings, "cpu")
        inputs = tree_map(lambda each: each.to(self.settings.device), built.inputs)
        self.workload = replace(built, inputs=inputs)
        self.optimizer = make_optimizer(self.settings, built.model.parameters())
        self.known = Known()
        self.lock = GpuLock()
        self.child = WorkerProcess()
        self.arrays: dict[str, Any] = {}
        self.begin = time.perf_counter()
        self.data: dict[str, Any] = {
            "workload": options.workload + (" stacked" if options.stack_gradients else ""),
            "number_format": options.number_format,
            "layers": options.layers,
            "batch": options.batch,
            "card": torch.cuda.get_device_name(0) if self.kind == "cuda" else "cpu",
            "torch": str(torch.__version__),
            "seed": 0,
            "captures": [],
            "rows": [],
        }

    def say(self, text: str) -> None:
        """Progress, with the seconds since the start."""
        print(f"[{self.options.tag} {time.perf_counter() - self.begin:.0f}] {text}", flush=True)

    def run(self) -> None:
        """All rows; what fails is written down. All is made ready before anything is measured, so
        that the GPUs are asked for twice: for prices and for plans."""
        counts = [int(count) for count in self.options.micro_batches.split(",")]
        steps = [s for count in counts if (s := self.attempt(count, self.made_ready, count))]
        if self.options.warm:
            self.data["captures"] = [step.facts() for step in steps]
            self.save()
            return
        self.child.start()
        self.lock.acquire()
        probed = probed_machine(detect(cpu_devices=2 if self.kind == "cpu" else None))
        self.machine = calibrated(probed, HOPPER)
        self.data["probed"] = toml.dumps(probed)
        steps = [s for step in steps if (s := self.attempt(step.count, self.priced, step))]
        self.child.end()
        self.lock.release()
        steps = [s for step in steps if (s := self.attempt(step.count, self.planned, step))]
        self.meet()
        for step in steps:
            self.attempt(step.count, self.measured, step)
        self.lock.release()

    def attempt(self, count: int, function: Callable[[Any], Step], argument: Any) -> Step | None:
        """What a function gives; if it fails, that is written down with the number of
        micro-batches."""
        try:
            return function(argument)
        except Exception as error:
            traceback.print_exc()
            self.data["rows"].append({"micro_batches": count, "error": str(error)[:300]})
            return None
        finally:
            self.save()

    def made_ready(self, count: int) -> Step:
        """The step with this number of micro-batches, captured, its kernels compiled."""
        begin = time.perf_counter()
        is_new = self.options.fuse and not any_compiled(self.kind)
        with Compilers() if is_new else nullcontext() as compilers:  # they load torch meanwhile
            graph = self.captured(count)
            seconds = {"capture": time.perf_counter() - begin}
            gpus = [f"cuda:{k}" for k in range(max(map(int, self.options.gpus.split(","))))]
            devices = gpus if self.kind == "cuda" else ["cpu"]
            done = prepare(graph, devices, compilers=compilers)
        sources = step_sources(graph, self.workload.model, self.optimizer, self.workload.inputs)
        seconds["kernels"] = done.seconds
        self.say(f"{count}: {done}")
        return Step(count, graph, sources, seconds)

    def priced(self, step: Step) -> Step:
        """The step with measured prices, which are kept."""
        begin = time.perf_counter()
        skipped = ("cpu:0",) if self.kind == "cuda" else ()
        gap_ns = HOPPER.kernel_gap_ns
        costs = price(step.graph, self.machine, skipped, gap_ns, child=self.child)
        step.costs = costs
        step.seconds["profile"] = time.perf_counter() - begin
        self.say(f"{len(step.graph.ops)} ops, {step.seconds}, notes {costs.notes}")
        count = step.count
        self.arrays[f"{count}.graph"] = np.frombuffer(serialize.to_json(step.graph), np.uint8)
        self.arrays[f"{count}.costs"] = costs.compute_ns
        if costs.kernels is not None:
            self.arrays[f"{count}.kernels"] = costs.kernels
            self.arrays[f"{count}.kernel_gap"] = np.array(costs.kernel_gap_ns)
        if costs.caching is not None:
            usual = [(op, t) for op, cold in costs.caching.usual.items() for t in sorted(cold)]
            self.arrays[f"{count}.usual"] = np.array(usual, np.int32).reshape(-1, 2)
            self.arrays[f"{count}.warm"] = costs.caching.warm_ns
            self.arrays[f"{count}.cold"] = costs.caching.cold_ns
        return step

    def planned(self, step: Step) -> Step:
        """The step with its plans for one GPU and for several."""
        step.single = singles(self.problem(step, 1), {})[0].plan
        counts = [int(used) for used in self.options.gpus.split(",") if int(used) > 1]
        step.plans = {used: self.plan(step, used) for used in counts}
        return step

    def measured(self, step: Step) -> Step:
        """The step with all its plans timed."""
        assert step.single is not None
        self.measure(step, "one graph", 1, step.single)
        for used, plans in step.plans.items():
            self.several(step, used, plans)
        last = int(self.options.micro_batches.split(",")[-1])
        if step.count == last and self.options.placements:
            used = max(step.plans)
            self.perturbed(step, step.plans[used].search.plan, used)
        self.data["captures"].append(step.facts())
        return step

    def captured(self, count: int) -> OpGraph:
        """The step with this number of micro-batches."""
        return capture(
            self.workload.model,
            self.workload.inputs,
            self.workload.loss_fn,
            self.optimizer,
            count,
            autocast=torch.bfloat16 if self.options.number_format == "bf16" else None,
            name=self.options.workload,
            device=self.kind,
            known=self.known,
            **self.options_of_capture(),
        )

    def options_of_capture(self) -> dict[str, Any]:
        """Options of capture that say how ops are made; `fuse` has its own about gradients."""
        found = {"stack_inputs": self.options.stack_inputs, "fuse": self.options.fuse}
        if self.options.stack_gradients or not self.options.fuse:
            found["stack_gradients"] = self.options.stack_gradients
        return found

    def plan(self, step: Step, used: int) -> Planned:
        """The expert's split, if there is one, and a search on this many GPUs."""
        problem = self.problem(step, used)
        expert = None
        if self.options.expert and not placers.Layers().supports(problem):
            expert = placers.place(problem, placers.Layers(), allow_infeasible=True)
        begin = time.perf_counter()
        search = placers.place(problem, placers.Search(), self.options.budget, 0)
        step.seconds[f"search {used}"] = time.perf_counter() - begin
        self.say(
            f"{used} GPUs: {search.step_ns / 1e6:.2f} ms after {search.evaluations} evaluations,"
            f" bound {search.bound.step_ns / 1e6:.2f}"
        )
        return Planned(expert, search)

    def meet(self) -> None:
        """Wait until so many processes are through with planning: the machine is quiet then."""
        folder = Path(self.options.out)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.options.tag}.planned").touch()
        while len([*folder.glob("*.planned")]) < self.options.together:
            time.sleep(0.5)

    def several(self, step: Step, used: int, planned: Planned) -> None:
        """Measure the plans for this many GPUs."""
        if planned.expert is not None:
            self.measure(step, "layers", used, planned.expert.plan)
        search = planned.search
        begin = time.perf_counter()
        tried = [c for c in candidates(search) if not c.is_single][: self.options.best]
        if not tried:  # on one GPU
            return
        times = [self.measure(step, c.name, used, c.plan, search.bound.step_ns) for c in tried]
        fastest = times.index(min(times))
        if fastest:  # measured again: the least of several times is too small
            self.measure(step, "confirmed", used, tried[fastest].plan, search.bound.step_ns)
        step.seconds[f"confirm {used}"] = time.perf_counter() - begin

    def problem(self, step: Step, used: int) -> Problem:
        """The step on the first so many GPUs."""
        keep = {f"{self.kind}:{k}" for k in range(used)}
        outside = [name for name in self.machine.device_names if name not in keep]
        return Problem(step.graph, self.machine, step.costs, exclude=outside)

    def measure(self, step: Step, name: str, used: int, plan: Plan, bound_ns: int = 0) -> float:
        """Time a plan and keep it; gives its time, ns, or infinity if it did not run."""
        key = f"{step.count}.{used}.{name}"
        row: dict[str, Any] = {
            "micro_batches": step.count,
            "name": name,
            "gpus": used,
            "predicted_ns": predicted_ns(self.problem(step, used), plan),
            "predicted_peak": plan.predicted.peak_bytes,
            "bound_ns": bound_ns,
        }
        self.lock.acquire()
        torch.cuda.empty_cache()
        begin = time.perf_counter()
        try:
            timing = time_plan(
                step.graph,
                plan.placement,
                plan.order,
                plan.device_names,
                step.sources,
                self.options.seconds,
                warm_up_s=WARM_UP_S,
            )
            row |= {
                "measured_ns": timing.step_ns,
                "round_ns": timing.round_ns,
                "peak": timing.peak_bytes,
                "mode": timing.mode,
                "reason": timing.reason,
                "seconds": time.perf_counter() - begin,
            }
        except Exception as error:
            traceback.print_exc()
            row["error"] = f"{type(error).__name__}: {error}"[:300]
        else:
            if self.options.trace and name in TRACED:
                self.trace(step, key, plan, used)
            if self.options.kernels and name == "one graph":
                row |= self.kernels(step, plan)
        finally:
            torch.cuda.empty_cache()
        self.data["rows"].append(row)
        self.arrays[f"{key}.placement"] = np.array(plan.placement, np.int8)
        for device, order in enumerate(plan.order):
            self.arrays[f"{key}.order{device}"] = np.array(order, np.int32)
        measured = row.get("measured_ns", 0) / 1e6
        self.say(f"{key}: predicted {row['predicted_ns'] / 1e6:.2f}, measured {measured:.2f} ms")
        self.save()
        return float(row.get("measured_ns", "inf"))

    def kernels(self, step: Step, plan: Plan) -> dict[str, Any]:
        """Time of each kernel of a plan."""
        schedule = make_schedule(step.graph, plan.placement, plan.order, plan.device_names)
        executor = make_executor(schedule, 0, waits=False)
        try:
            fill(executor, step.sources)
            number = itertools.count(1).__next__
            devices = [torch.device(name) for name in plan.device_names if self.kind in name]
            return kernel_times(lambda: executor.step(number()), devices)
        finally:
            executor.close()

    def trace(self, step: Step, key: str, plan: Plan, used: int) -> None:
        """Keep when everything happened in one step, and say where it differs from the plan."""
        schedule = make_schedule(step.graph, plan.placement, plan.order, plan.device_names)
        executor = make_executor(schedule, 0, waits=False)
        try:
            fill(executor, step.sources)
            for number in range(1, 4):
                executor.step(number)
            timeline = executor.step(4, is_timed=True).timeline
        finally:
            executor.close()
        assert timeline is not None
        planned = simulate_in_order(
            self.problem(step, used), Placement(np.array(plan.placement, np.int32)), plan.order
        )
        found = deviations(planned, timeline, schedule.transfers)
        self.data.setdefault("deviations", {})[key] = found.as_json(most=8)
        sent = [(t.tensor, t.src, t.dst) for t in schedule.transfers]
        self.arrays |= {
            f"{key}.trace.start": timeline.start_ns,
            f"{key}.trace.finish": timeline.finish_ns,
            f"{key}.trace.sent": np.array(sent, np.int32),
            f"{key}.trace.transfer_start": timeline.transfer_start_ns,
            f"{key}.trace.transfer_finish": timeline.transfer_finish_ns,
        }

    def perturbed(self, step: Step, plan: Plan, used: int) -> None:
        """Placements near the best one and far from it."""
        problem = self.problem(step, used)
        rng = np.random.default_rng(0)
        modules = [op.module.rpartition(".")[0] or op.module for op in step.graph.ops]
        names = sorted(set(modules))
        of_op = np.array([names.index(module) for module in modules])
        devices = np.array(problem.accelerators, np.int32)
        best = np.array(plan.placement, np.int32)
        for number in range(self.options.placements):
            moved = rng.random(len(names)) < SHARES[number % len(SHARES)]
            target = rng.choice(devices, len(names))
            wish = np.where(moved[of_op], target[of_op], best).astype(np.int32)
            tasks = problem.core.tasks.task_op
            groups = by_vote(problem, wish[tasks], mean_duration_ns(problem))
            fixed = _Fixed(Placement(problem.spaces.op_devices_of_groups(groups)))
            found = placers.place(problem, fixed, allow_infeasible=True)
            self.measure(step, f"random {number}", used, found.plan)

    def save(self) -> None:
        """Write everything so far."""
        folder = Path(self.options.out)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.options.tag}.json"
        path.write_text(json.dumps(self.data, indent=1) + "\n")
        np.savez_compressed(folder / f"{self.options.tag}.npz", **self.arrays)


class _Fixed:
    """A given placement as a placer."""

    name = "given"

    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    def supports(self, problem: Problem) -> str:
        """Always."""
        return ""

    def __call__(self, problem: Problem, evaluate: Any, rng: Any) -> Placement:
        """The placement."""
        return self._placement


def main() -> None:
    """Measure one workload."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload")
    parser.add_argument("--out", required=True)
    parser.add_argument("--tag")
    parser.add_argument("--number-format", default="tf32", choices=FORMATS)
    parser.add_argument("--optimizer", default="sgd", choices=OPTIMIZERS)
    parser.add_argument("--size", default="full")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--micro-batches", default="1")
    parser.add_argument("--gpus", default="2,4")
    parser.add_argument("--budget", default="30s")
    parser.add_argument("--placements", type=int, default=0)
    parser.add_argument("--no-expert", dest="expert", action="store_false", help="searched only")
    parser.add_argument("--best", type=int, default=2, help="plans of a search to measure")
    parser.add_argument(
        "--together", type=int, default=1, help="processes that plan before any measures"
    )
    parser.add_argument("--seconds", type=float, default=0.6)
    parser.add_argument("--stack-gradients", action="store_true")
    parser.add_argument("--fuse", action="store_true", help="fuse ops")
    parser.add_argument("--stack-inputs", action="store_true", help="join products of inputs")
    parser.add_argument("--warm", action="store_true", help="only capture and compile")
    parser.add_argument("--kernels", action="store_true", help="time every kernel on one GPU")
    parser.add_argument("--trace", action="store_true", help="time every op of some plans")
    options = parser.parse_args()
    options.tag = options.tag or f"{options.workload}-{options.number_format}"
    Bench(options).run()


if __name__ == "__main__":
    main()
