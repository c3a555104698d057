"""Overheads of a step: graph launches and synchronization of devices."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from devplace.run.cuda.probe.port import Port, captured, launch
from devplace.run.probe.report import StepReport
from devplace.run.workers import Workers

SPIN_NS = 500_000
"""Long enough for the host to have launched the next step before this one ends."""
STEPS = 30


def measure_steps(ports: Sequence[Port], workers: Workers) -> StepReport:
    """Time steps as the graph runner does them: one thread per device, all wait for all."""
    from devplace.run.cuda.probe import probe_kernels

    spent = {}
    for port in ports:
        with port.current():
            spent[port.index] = torch.zeros(1, dtype=torch.int64, device=port.torch_device)

    def long(port: Port) -> None:
        probe_kernels.spin_kernel[(1,)](spent[port.index], SPIN_NS, num_warps=1)

    def short(port: Port) -> None:
        spent[port.index].add_(1)

    return StepReport(
        step_gap_ns=max(0, _period_ns(ports, workers, long) - SPIN_NS),
        least_step_ns=_period_ns(ports, workers, short),
    )


def _period_ns(ports: Sequence[Port], workers: Workers, record: Callable[[Port], None]) -> int:
    graphs: dict[int, Any] = {}
    for port in ports:
        with captured(port) as graph:
            record(port)
        graphs[port.index] = graph
    ends = {port.index: torch.cuda.Event() for port in ports}

    def job(port: Port) -> Callable[[], None]:
        def run() -> None:
            with port.current():
                for index, end in ends.items():
                    if index != port.index:
                        port.main.wait_event(end)
                graphs[port.index].replay()
                port.flags.host_error.copy_(port.flags.error, non_blocking=True)

        return run

    jobs = {port.index: job(port) for port in ports}

    def steps(num: int) -> None:
        for _ in range(num):
            launch(workers, jobs)
            for port in ports:
                with port.current():
                    ends[port.index].record(port.main)
        for port in ports:
            port.synchronize()

    steps(3)
    begin = time.perf_counter_ns()
    steps(STEPS)
    return (time.perf_counter_ns() - begin) // STEPS
