"""CPU time of one simulation on a random graph of 10,000 ops and 19,911 edges.

Four devices, 50 GB/s, 5 us. Run: `python benchmarks/simulator.py`.
"""

from __future__ import annotations

import time

import numpy as np

from devplace.cost import CostTable
from devplace.graph import Op, OpGraph, Tensor
from devplace.machine import Device, Link, Machine
from devplace.problem import Placement, Problem
from devplace.simulator import make_kernel

NUM_OPS, WINDOW, NUM_DEVICES = 10_000, 200, 4
BANDWIDTH_BYTES_PER_S, LATENCY_NS = 50 * 10**9, 5_000


def trial_problem(num_ops: int = NUM_OPS, num_devices: int = NUM_DEVICES) -> Problem:
    """Every op reads one to three ops among the 200 before it; times and sizes are lognormal."""
    rng = np.random.default_rng(0)
    reads: list[tuple[int, ...]] = [()]
    for v in range(1, num_ops):
        count = int(rng.integers(1, 4))
        reads.append(tuple({int(x) for x in rng.integers(max(0, v - WINDOW), v, size=count)}))
    cost_ns = np.exp(rng.normal(3.0, 1.0, num_ops)) * 1000
    edge_bytes = np.exp(rng.normal(11.0, 1.5, sum(map(len, reads))))
    size = np.zeros(num_ops, np.int64)
    edges = ((producer, k) for k, producer in enumerate(p for row in reads for p in row))
    for producer, k in edges:
        size[producer] = size[producer] or int(edge_bytes[k])
    graph = OpGraph(
        "trial",
        tuple(Op(f"o{v}", "t", inputs=row, outputs=(v,)) for v, row in enumerate(reads)),
        tuple(Tensor(f"o{v}", (int(b),), "uint8", int(b)) for v, b in enumerate(size)),
    )
    names = [f"gpu:{d}" for d in range(num_devices)]
    devices = tuple(
        Device(name=n, kind="gpu", memory_bytes=10**12, flops_per_s={"float32": 1}, bytes_per_s=1)
        for n in names
    )
    links = tuple(
        Link(src=a, dst=b, bytes_per_s=BANDWIDTH_BYTES_PER_S, latency_ns=LATENCY_NS)
        for a in names
        for b in names
        if a != b
    )
    table = np.tile(cost_ns.astype(np.int64)[:, None], (1, num_devices))
    return Problem(graph, Machine("trial", devices, links), CostTable(table, "trial"))


def main() -> None:
    """Print ms of CPU per simulation, best of five."""
    problem = trial_problem()
    kernel = make_kernel(problem.core)
    contiguous = np.minimum(NUM_DEVICES - 1, np.arange(NUM_OPS) * NUM_DEVICES // NUM_OPS)
    rows = {
        "random": np.random.default_rng(1).integers(0, NUM_DEVICES, NUM_OPS),
        "contiguous": contiguous,
    }
    print(f"{len(problem.graph.ops)} ops, {problem.graph.num_edges} edges, {NUM_DEVICES} devices")
    one_device = kernel.priority(np.zeros(NUM_OPS, np.int32))
    for name, devices in rows.items():
        batch = np.tile(devices.astype(np.int32), (20, 1))
        for memory in (False, True):
            best = 1e9
            for _ in range(7):
                begin = time.process_time()
                scores = kernel.evaluate(batch, one_device, track_memory=memory)
                best = min(best, (time.process_time() - begin) / len(batch))
            with_memory = "memory tracked" if memory else "time only"
            print(
                f"{name:10s} {with_memory:14s} {best * 1e3:5.2f} ms/simulation, "
                f"step {scores.makespan_ns[0]} ns"
            )
    placement = Placement(contiguous.astype(np.int32))
    begin = time.process_time()
    kernel.trace(problem.task_devices(placement), one_device)
    print(f"full timeline {1e3 * (time.process_time() - begin):.2f} ms")


if __name__ == "__main__":
    main()
