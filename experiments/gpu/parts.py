"""Each GPU's part of a plan alone on one GPU: what its ops cost there, beside what they are priced.

A plan for several GPUs is run a device at a time: its ops in its order, every tensor from another
device there at once, every push into memory of the same GPU. So the difference to the sum of prices
is that of ops in this order, not of links or of waiting. The whole step on one GPU is run in the
orders of these plans as well.

Run: `python -m experiments.gpu.parts WORKLOAD --machine FILE --out FOLDER [--number-format bf16]
[--batch N] [--micro-batches N] [--layers N] [--gpus 4] [--budget 20s] [--kernels]`. The machine
file has the links (of `devplace probe`) of as many GPUs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from experiments.gpu.timing import GpuLock
from experiments.gpu.training import FORMATS, Settings, build, prepare_torch, sgd

from devplace import placers
from devplace.cost import CostTable
from devplace.cost.likely_order import in_order_of
from devplace.cost.reuse import CacheTimes
from devplace.graph import serialize
from devplace.machine import detect, toml
from devplace.placers.simple.single import all_on
from devplace.problem import Placement, Problem
from devplace.run.cuda import executor
from devplace.run.cuda.graphs import GraphRunner
from devplace.run.executors import make_executor
from devplace.schedule import make_schedule
from devplace.simulator import simulate
from devplace.simulator.in_order import simulate_in_order
from devplace.step_capture import capture
from devplace.testing.one_gpu import one_gpu
from devplace.tune.calibration import calibrated
from devplace.tune.measured_costs import HOPPER, price
from devplace.tune.step_sources import step_sources
from devplace.tune.step_timing import fill, median_ns, time_executor


@contextmanager
def only(device: int) -> Iterator[None]:
    """Graphs are captured and run for this device alone; what it receives is there."""

    def make(mailroom: Any, devices: Any, *rest: Any) -> GraphRunner:
        mailroom.flags[device].blocks.zero_()
        torch.manual_seed(0)
        for transfer, buffer in mailroom.buffers.items():
            mine = mailroom.schedule.transfers[transfer].dst == device
            if mine and buffer.is_floating_point():
                buffer.normal_(0, 0.5)
        torch.cuda.synchronize()
        return GraphRunner(mailroom, {device: devices[device]}, *rest)

    with one_gpu(), patch.object(executor, "GraphRunner", make):
        yield


class Bench:
    """One workload."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        settings = Settings(
            options.workload,
            number_format=options.number_format,
            batch=options.batch,
            layers=options.layers,
        )
        prepare_torch(settings)
        self.begin, self.lock = time.perf_counter(), GpuLock()
        self.rows: list[dict[str, Any]] = []
        self.arrays: dict[str, Any] = {}
        workload = build(settings)
        optimizer = sgd(workload.model)
        self.graph = capture(
            workload.model,
            workload.inputs,
            workload.loss_fn,
            optimizer,
            options.micro_batches,
            autocast=torch.bfloat16 if options.number_format == "bf16" else None,
            name=options.workload,
        )
        self.sources = step_sources(self.graph, workload.model, optimizer, workload.inputs)
        probed = toml.loads(Path(options.machine).read_text())
        self.machine = calibrated(probed, HOPPER)
        self.here = detect()
        self.arrays["graph"] = np.frombuffer(serialize.to_json(self.graph), np.uint8)

    def say(self, text: str) -> None:
        """Progress."""
        print(f"[{self.options.tag} {time.perf_counter() - self.begin:.0f}] {text}", flush=True)

    def price(self) -> CostTable:
        """Costs on the machine of the plans: every GPU as the one that is here."""
        self.lock.acquire()
        costs = price(self.graph, self.here, ("cpu:0",), HOPPER.kernel_gap_ns)
        self.lock.release()
        one = self.here.device_names.index("cuda:0")
        cpu = self.here.device_names.index("cpu:0")
        columns = [one if d.kind == "gpu" else cpu for d in self.machine.devices]
        for note in costs.notes:
            self.say(note)
        kernels, caching = costs.kernels, costs.caching
        assert kernels is not None
        assert caching is not None
        return CostTable(
            costs.compute_ns[:, columns],
            costs.origin,
            kernel_gap_ns=costs.kernel_gap_ns,
            kernels=kernels[:, columns],
            caching=CacheTimes(
                caching.usual, caching.warm_ns[:, columns], caching.cold_ns[:, columns]
            ),
        )

    def run(self) -> None:
        """All rows."""
        self.costs = self.price()
        self.arrays["costs"], self.arrays["kernels"] = self.costs.compute_ns, self.costs.kernels
        gpus = [d.name for d in self.machine.devices if d.kind == "gpu"]
        self.say(f"{len(self.graph.ops)} ops")
        alone = self.problem(gpus[:1])
        single = simulate(alone, all_on(alone, self.machine.device_names.index(gpus[0])))
        problem = self.problem(gpus[: self.options.gpus])
        found = {}
        if not placers.Layers().supports(problem):
            found["layers"] = placers.place(problem, placers.Layers(), allow_infeasible=True)
        found["search"] = placers.place(problem, placers.Search(), self.options.budget, 0)
        column = self.machine.device_names.index(gpus[0])
        self.whole("critical paths", single.devices, single.order[column], column)
        self.whole("trace", single.devices, range(len(self.graph.ops)), column)
        for name, result in found.items():
            plan = result.plan
            self.say(f"{name}: {plan.predicted.step_ns / 1e6:.2f} ms")
            placement = Placement(np.array(plan.placement, np.int32))
            start = simulate_in_order(problem, placement, plan.order).start_ns
            order = in_order_of(self.graph, start)
            self.whole(f"order of {name}", single.devices, order, column)
            for device, row in enumerate(plan.order):
                if row:
                    self.part(f"{name} {device}", plan, device)
        self.save()

    def problem(self, gpus: Sequence[str]) -> Problem:
        """The step on these GPUs."""
        outside = [name for name in self.machine.device_names if name not in gpus]
        return Problem(self.graph, self.machine, self.costs, exclude=outside)

    def whole(self, name: str, placement: Any, order: Sequence[int], column: int) -> None:
        """The whole step on one GPU in this order."""
        rows: list[Any] = [()] * len(self.machine.devices)
        ops = self.graph.ops
        ran = [k for k in order if not ops[k].is_source and not ops[k].is_view]
        rows[column] = ran
        self.measure(name, placement, rows, column, 0, 0)
        if self.options.kernels:
            self.kernels(name, placement, rows)

    def part(self, name: str, plan: Any, device: int) -> None:
        """A device's part of a plan alone."""
        names = self.machine.device_names
        transfers = make_schedule(self.graph, plan.placement, plan.order, names).transfers
        sent = sum(t.src == device for t in transfers)
        received = sum(t.dst == device for t in transfers)
        self.measure(name, plan.placement, plan.order, device, sent, received)

    def measure(
        self,
        name: str,
        placement: Any,
        rows: Sequence[Sequence[int]],
        device: int,
        sent: int,
        received: int,
    ) -> None:
        """Time a device's part, and price its ops for its own order too."""
        mine = list(rows[device])
        again = self.costs.in_order(self.graph, rows)
        row = {
            "name": name,
            "ops": int(self.costs.kernels[mine, device].sum()),
            "sent": sent,
            "received": received,
            "priced_ns": int(self.costs.compute_ns[mine, device].sum()),
            "priced_in_order_ns": int(again.compute_ns[mine, device].sum()),
        }
        self.lock.acquire()
        try:
            schedule = make_schedule(self.graph, placement, rows, self.machine.device_names)
            with only(device):
                run = make_executor(schedule, 0, waits=False)
                try:
                    fill(run, self.sources)
                    row["measured_ns"] = median_ns(time_executor(run, 0.6))
                    row["mode"] = getattr(run, "mode", "")
                finally:
                    run.close()
        except Exception as error:
            row["error"] = str(error)[:300]
        finally:
            torch.cuda.empty_cache()
            self.lock.release()
        self.rows.append(row)
        self.arrays[f"{name}.order"] = np.array(mine, np.int32)
        self.arrays[f"{name}.costs"] = again.compute_ns[:, device]
        self.say(json.dumps(row))
        self.save()

    def kernels(self, name: str, placement: Any, rows: Sequence[Sequence[int]]) -> None:
        """Name, start and end of every kernel of a step, as CUPTI tells them."""
        self.lock.acquire()
        schedule = make_schedule(self.graph, placement, rows, self.machine.device_names)
        run = make_executor(schedule, 0, waits=True)
        try:
            fill(run, self.sources)
            for number in range(1, 4):
                run.step(number)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
                run.step(4)
        finally:
            run.close()
            torch.cuda.empty_cache()
            self.lock.release()
        spans = [
            (event.name, event.time_range.start, event.time_range.end)
            for event in seen.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        ]
        spans.sort(key=lambda span: span[1])
        names = sorted({span[0] for span in spans})
        self.arrays[f"{name}.kernel_names"] = np.array(names)
        of = {text: k for k, text in enumerate(names)}
        self.arrays[f"{name}.kernel_spans"] = np.array(
            [(of[text], start, end) for text, start, end in spans], np.float64
        )
        busy = sum(end - start for _, start, end in spans) / 1e3
        self.say(f"{name}: {len(spans)} kernels, {busy:.2f} ms")

    def save(self) -> None:
        """Everything so far."""
        folder = Path(self.options.out)
        folder.mkdir(parents=True, exist_ok=True)
        data = {
            "workload": self.options.workload,
            "number_format": self.options.number_format,
            "micro_batches": self.options.micro_batches,
            "batch": self.options.batch,
            "layers": self.options.layers,
            "card": torch.cuda.get_device_name(0),
            "torch": str(torch.__version__),
            "rows": self.rows,
        }
        (folder / f"{self.options.tag}.json").write_text(json.dumps(data, indent=1) + "\n")
        np.savez_compressed(folder / f"{self.options.tag}.npz", **self.arrays)


def main() -> None:
    """Measure one workload."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload")
    parser.add_argument("--machine", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--tag")
    parser.add_argument("--number-format", default="tf32", choices=FORMATS)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--budget", default="20s")
    parser.add_argument("--kernels", action="store_true", help="also the time of every kernel")
    options = parser.parse_args()
    options.tag = options.tag or f"{options.workload}-{options.micro_batches}"
    Bench(options).run()


if __name__ == "__main__":
    main()
