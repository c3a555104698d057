"""Cost of running an op beside its arithmetic: `python benchmarks/executor.py`.

Chains of tiny ops (4 elements, one thread each device); microseconds per op, best of several runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from devplace.run.compile import Step, compile_step
from devplace.run.unplaced import run_unplaced
from devplace.step_capture import capture

NUM_OPS = 4000


class Chain(torch.nn.Module):
    """Many dependent tiny ops."""

    def forward(self, x: Any) -> Any:
        for _ in range(NUM_OPS):
            x = x.neg()
        return x


def best_us_per_op(call: Callable[[], Any], runs: int = 15) -> float:
    """Shortest of several runs, microseconds per op of the chain."""
    call()
    times = []
    for _ in range(runs):
        start = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - start)
    return min(times) / NUM_OPS / 1000


def make_chain(hops: int) -> tuple[Step, Any]:
    """The chain on two devices, changing sides `hops` times."""
    x = torch.ones(4)
    model = Chain()
    graph = capture(model, (x,))
    compute = [k for k, op in enumerate(graph.ops) if not op.is_source and not op.is_view]
    devices = [0] * len(graph.ops)
    for position, op in enumerate(compute):
        devices[op] = position * (hops + 1) // len(compute) % 2
    order = [[op for op in compute if devices[op] == device] for device in (0, 1)]
    return compile_step(model, None, graph, devices, order, ("cpu:0", "cpu:1")), graph


def main() -> None:
    """Print one line per way of running the chain."""
    torch.set_num_threads(1)
    x = torch.ones(4)
    with torch.no_grad():
        print(f"eager loop            {best_us_per_op(lambda: Chain()(x)):6.2f} us/op")
    step, graph = make_chain(0)
    sources = {binding.op: x for binding in graph.program.bindings}
    unplaced = best_us_per_op(lambda: run_unplaced(graph, sources, 0, 1), runs=5)
    print(f"unplaced, node by node{unplaced:6.2f} us/op")
    print(f"one device            {best_us_per_op(lambda: step(x)):6.2f} us/op")
    step.is_timed = True
    print(f"one device, timed     {best_us_per_op(lambda: step(x)):6.2f} us/op")
    step.is_timed = False
    base = best_us_per_op(lambda: step(x))
    for hops in (40, 400):
        hopping, _ = make_chain(hops)
        took = best_us_per_op(lambda: hopping(x))  # noqa: B023
        per_hop = (took - base) * NUM_OPS / hops
        print(f"{hops:3d} hops              {took:6.2f} us/op, {per_hop:6.1f} us per hop")


if __name__ == "__main__":
    main()
