"""Random graphs, machines, placements and orders for property tests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from devplace.cost import CostTable
from devplace.graph import Op, OpGraph, StepResult, Tensor
from devplace.machine import Device, Link, Machine, Pool
from devplace.problem import Placement, Problem


def random_graph(rng: np.random.Generator, num_ops: int) -> OpGraph:
    """Sources (some replaced), multi-output ops, views of wholes and parts, results."""
    ops: list[Op] = []
    tensors: list[Tensor] = []
    results: list[StepResult] = []

    def add(name: str, count: int, size: int | None, **fields: object) -> Op:
        outputs = tuple(range(len(tensors), len(tensors) + count))
        for k in outputs:
            num_bytes = int(rng.integers(0, 2000)) if size is None else size
            tensors.append(Tensor(f"{name}:{k}", (num_bytes,), "uint8", num_bytes))
        op = Op(name=name, **{"target": "t", **fields}, outputs=outputs)  # type: ignore[arg-type]
        ops.append(op)
        return op

    replaced = []
    for k in range(int(rng.integers(1, 4))):
        role = str(rng.choice(["parameter", "input", "buffer"]))
        add(f"s{k}", 1, None, stage="source", role=role)
        if role == "parameter":
            replaced.append(k)
    for k in range(num_ops):
        reads = tuple(sorted({int(t) for t in rng.integers(0, len(tensors), rng.integers(0, 4))}))
        if reads and rng.random() < 0.25:
            base = reads[0]
            whole = tensors[base].num_bytes
            size = whole if rng.random() < 0.5 else whole // 2
            add(f"v{k}", int(rng.integers(1, 3)), size, inputs=(base,), alias_of=base)
        else:
            add(
                f"o{k}",
                int(rng.integers(1, 3)),
                None,
                inputs=reads,
                workspace_bytes=int(rng.integers(0, 500)),
            )
    updates = {}
    for k in replaced:
        if rng.random() < 0.5:
            other = (int(rng.integers(0, len(tensors))),) if rng.random() < 0.5 else ()
            size = tensors[k].num_bytes
            update = add(f"u{k}", 1, size, inputs=(k, *other), target="aten.add.Tensor")
            updates[k] = update.outputs[0]
            if rng.random() < 0.3:
                add(f"w{k}", 1, None, inputs=(k,))
    own = [t for op in ops if not op.is_source and not op.is_view for t in op.outputs]
    for source in replaced:
        if own:
            new = updates.get(source, int(rng.choice(own)))
            results.append(StepResult(f"s{source}", new, "parameter", source))
    if own:
        results.append(StepResult("loss", int(rng.choice(own)), "loss"))
    return OpGraph("random", tuple(ops), tuple(tensors), tuple(results))


def random_machine(rng: np.random.Generator, num_devices: int) -> Machine:
    """Unequal devices and links, shared channels, streams, overheads, a pool."""
    with_pool = bool(rng.random() < 0.5)
    devices = tuple(
        Device(
            name=f"gpu:{d}",
            kind=str(rng.choice(["gpu", "cpu"])),
            memory_bytes=int(rng.integers(1000, 100000)),
            flops_per_s={"float32": 1},
            bytes_per_s=1,
            streams=int(rng.choice([1, 1, 2])),
            pool="ram" if with_pool and d < 2 else "",
        )
        for d in range(num_devices)
    )
    links = tuple(
        Link(
            src=a.name,
            dst=b.name,
            bytes_per_s=int(rng.choice([10**9, 3 * 10**8, 7 * 10**9])),
            latency_ns=int(rng.integers(0, 500)),
            channels=(("bridge",) if rng.random() < 0.3 else ()) + ((f"{a.name}-up",)),
            send_overhead_ns=int(rng.integers(0, 50)),
            receive_overhead_ns=int(rng.integers(0, 50)),
            send_share=float(rng.choice([0.0, 0.1])),
            receive_share=float(rng.choice([0.0, 0.25])),
            points=((10, 50), (200, 300), (1000, 700)) if rng.random() < 0.3 else (),
            engine_bytes=int(rng.choice([0, 0, 300])),
            parallel=bool(rng.random() < 0.2),
        )
        for a in devices
        for b in devices
        if a != b
    )
    pools = (Pool(name="ram", memory_bytes=50000),) if with_pool else ()
    return Machine("random", devices, links, pools)


def random_problem(seed: int, num_ops: int = 30, num_devices: int = 3) -> Problem:
    """A whole random problem; durations are small, so that ties are common."""
    rng = np.random.default_rng(seed)
    graph = random_graph(rng, num_ops)
    machine = random_machine(rng, num_devices)
    compute = rng.integers(0, 400, (len(graph.ops), num_devices)) // 50 * 50
    for index, op in enumerate(graph.ops):
        if op.is_source or op.is_view:
            compute[index] = 0
    costs = CostTable(compute.astype(np.int64), "random")
    if rng.random() < 0.3:
        workspaces = rng.integers(0, 500, len(graph.ops))
        held = rng.integers(0, 300, num_devices)
        costs = replace(costs, workspace_bytes=workspaces, held_bytes=held)
    return Problem(graph, machine, costs)


def tiny_case(seed: int, most_ops: int = 10) -> Problem:
    """A tiny problem on up to 3 devices; often with memory limits, pins or an excluded device."""
    rng = np.random.default_rng(seed)
    problem = random_problem(seed, int(rng.integers(1, most_ops + 1)), int(rng.integers(1, 4)))
    names, tasks = problem.machine.device_names, problem.core.tasks
    if rng.random() < 0.3:
        held = float(tasks.storage_bytes.sum() + tasks.const_bytes.sum())
        share = rng.uniform(0.3, 1.2, len(names))
        limits = {n: max(1, int(held * s)) for n, s in zip(names, share, strict=True)}
        problem = replace(problem, limits=limits)
    if rng.random() < 0.3 and tasks.num_tasks:
        ops = rng.choice(tasks.task_op, min(2, tasks.num_tasks), replace=False)
        pinned = problem.graph.ops[int(ops[0])].name
        problem = replace(problem, pins={pinned: str(rng.choice(names))})
    elif rng.random() < 0.2 and len(names) > 1:
        problem = replace(problem, exclude=[str(rng.choice(names))])
    return problem


def random_placement(problem: Problem, rng: np.random.Generator) -> Placement:
    """Random devices (whole colocation groups), random priorities or none."""
    tasks = problem.core.tasks
    per_group = rng.integers(0, len(problem.machine.devices), tasks.num_groups)
    devices = problem.spaces.op_devices(per_group[tasks.group].astype(np.int32))
    priority = rng.integers(0, 20, len(problem.graph.ops)) if rng.random() < 0.5 else None
    return Placement(devices, priority)


problems = st.builds(
    random_problem,
    seed=st.integers(0, 2**32 - 1),
    num_ops=st.integers(1, 40),
    num_devices=st.integers(1, 4),
)
