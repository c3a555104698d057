"""Write graphs, machines and problems by hand, and show timelines as text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np

from devplace.cost import CostTable
from devplace.device_kinds import CPU, GPU, is_host
from devplace.errors import InputError
from devplace.graph import Op, OpGraph, StepResult, Tensor
from devplace.graph.graph import Role
from devplace.machine import Device, Link, Machine, Pool
from devplace.problem import Placement, Problem
from devplace.simulator import Timeline

_LINE = re.compile(r"(?P<name>\S+)\s*=\s*(?P<kind>[\w.]+)\s*(?:\((?P<reads>[^)]*)\))?(?P<rest>.*)")
_ROLES = tuple(role for role in get_args(Role) if role)
_RESULTS = ("loss", "output")
_NUMBERS = ("flops", "bytes_read", "bytes_written", "workspace_bytes", "call", "micro_batch")


def hand_graph(text: str, name: str = "hand") -> OpGraph:
    """A graph from one line per op: `name = kind(inputs) key=value ...`.

    A kind that is a role (`input`, `parameter`, `state`, `buffer`, `constant`, `scalar`) makes a
    source, `view` a view of its first input, anything else an op with that target. Keys:

    - `bytes=8` or `bytes=8,4`: size of each output (1 by default); several outputs are named
      `name:0`, `name:1`.
    - `ns=5` or `ns=5,7`: time on all devices or on each; read by `hand_problem`.
    - `replaces=w`: its first output is the next value of source `w`.
    - `result=loss` or `result=output`: its first output is kept.
    - `stage`, `module`, `flops`, `bytes_read`, `bytes_written`, `workspace_bytes`, `call`,
      `micro_batch`: as in `Op`.

    Raises:
        InputError: A line that cannot be read.

    Example:
        >>> graph = hand_graph('''
        ...     x = input bytes=4
        ...     a = relu(x) bytes=8 ns=5 result=output
        ... ''')
        >>> [op.name for op in graph.ops], graph.tensors[1].num_bytes
        (['x', 'a'], 8)
    """
    return _parse(text, name)[0]


def hand_machine(
    memory: Mapping[str, int],
    *,
    bytes_per_ns: float = 1.0,
    latency_ns: int = 0,
    overhead_ns: tuple[int, int] = (0, 0),
    slow: Mapping[tuple[str, str], float] | None = None,
    channel: str = "",
    streams: int = 1,
    reserve_bytes: int = 0,
    pools: Mapping[str, tuple[int, Sequence[str]]] | None = None,
    unsupported: Mapping[str, tuple[str, ...]] | None = None,
    speed: Mapping[str, int] | None = None,
) -> Machine:
    """A machine of devices that do 1 FLOP and 1 byte per ns, with links between all of them.

    Args:
        memory: Device name -> bytes. A name that starts with `cpu` is a CPU.
        bytes_per_ns: Bandwidth of every link.
        latency_ns: Latency of every link.
        overhead_ns: What a transfer takes of the sender's and the receiver's compute stream.
        slow: (sender, receiver) -> bandwidth of links that differ, bytes/ns.
        channel: Name of one channel all links share; empty: each has its own.
        streams: Ops a device runs at once.
        reserve_bytes: Memory of every device that is not ours.
        pools: Pool name -> (bytes, names of the devices that share it).
        unsupported: Device name -> patterns of op targets it cannot run.
        speed: Device name -> how many times faster it is.
    """
    pools, slow, unsupported, speed = pools or {}, slow or {}, unsupported or {}, speed or {}
    pool_of = {device: pool for pool, (_, members) in pools.items() for device in members}
    devices = tuple(
        Device(
            name=name,
            kind=(CPU if is_host(name) else GPU).name,
            memory_bytes=size,
            flops_per_s={"float32": speed.get(name, 1) * 10**9},
            bytes_per_s=speed.get(name, 1) * 10**9,
            streams=streams,
            reserve_bytes=reserve_bytes,
            pool=pool_of.get(name, ""),
            unsupported_ops=unsupported.get(name, ()),
        )
        for name, size in memory.items()
    )
    links = tuple(
        Link(
            src=a,
            dst=b,
            bytes_per_s=round(slow.get((a, b), bytes_per_ns) * 10**9),
            latency_ns=latency_ns,
            channels=(channel,) if channel else (),
            send_overhead_ns=overhead_ns[0],
            receive_overhead_ns=overhead_ns[1],
        )
        for a in memory
        for b in memory
        if a != b
    )
    shared = tuple(Pool(name=name, memory_bytes=size) for name, (size, _) in pools.items())
    return Machine("hand", devices, links, shared)


def hand_problem(text: str, machine: Machine, **demands: Any) -> Problem:
    """A problem from a graph's text (see `hand_graph`) and a machine.

    Args:
        text: Ops, with `ns=` for their times; an op without takes no time.
        machine: Where it runs.
        **demands: `limits`, `pins`, `exclude`, `soft_pins` as in `Problem`.
    """
    graph, times = _parse(text, "hand")
    count = len(machine.devices)
    compute = np.zeros((len(graph.ops), count), np.int64)
    for index, row in enumerate(times):
        if len(row) not in (1, count):
            raise InputError(f"{graph.ops[index].name!r} needs 1 or {count} times, got {len(row)}.")
        compute[index] = row
    return Problem(graph, machine, CostTable(compute, "hand"), **demands)


def hand_placement(
    problem: Problem, devices: Mapping[str, str], first: Sequence[str] = ()
) -> Placement:
    """A placement from op name -> device name; ops not named go to the first device.

    Args:
        problem: What is placed.
        devices: Where ops go.
        first: Names of ops in falling priority; empty: critical-path priority.
    """
    graph, known = problem.graph, problem.machine.device_index
    rows = np.array([known[devices[op.name]] if op.name in devices else 0 for op in graph.ops])
    placed = problem.spaces.op_devices(problem.spaces.tasks_from_ops(rows.astype(np.int32)))
    if not first:
        return Placement(placed)
    rank = {name: len(first) - k for k, name in enumerate(first)}
    return Placement(placed, np.array([rank.get(op.name, 0) for op in graph.ops], np.int64))


def show(timeline: Timeline) -> str:
    """A timeline as text: one line per device, one per transfer.

    Example:
        >>> problem = hand_problem("a = f ns=5\\nb = g(a) ns=4", hand_machine({"gpu:0": 9}))
        >>> from devplace.simulator import simulate
        >>> print(show(simulate(problem, hand_placement(problem, {}))))
        gpu:0: a@0-5 b@5-9
    """
    problem = timeline.problem
    names, ops = problem.machine.device_names, problem.graph.ops
    lines = []
    for name, row in zip(names, timeline.order, strict=True):
        runs = [f" {ops[v].name}@{timeline.start_ns[v]}-{timeline.finish_ns[v]}" for v in row]
        lines.append(f"{name}:{''.join(runs)}")
    for move in timeline.transfers:
        tensor = problem.graph.tensors[move.tensor].name
        lines.append(
            f"{names[move.src]}->{names[move.dst]}: {tensor}@{move.start_ns}-{move.arrival_ns}"
        )
    return "\n".join(lines)


def _parse(text: str, name: str) -> tuple[OpGraph, list[list[int]]]:
    ops: list[Op] = []
    tensors: list[Tensor] = []
    results: list[StepResult] = []
    times: list[list[int]] = []
    number: dict[str, int] = {}
    for line in filter(None, (row.partition("#")[0].strip() for row in text.splitlines())):
        match = _LINE.fullmatch(line)
        if match is None:
            raise InputError(f"A line must read `name = kind(inputs) key=value`, got {line!r}.")
        op_name, kind = match["name"], match["kind"]
        keys = dict(part.split("=", 1) for part in match["rest"].split())
        sizes = _integers(keys.pop("bytes", "1"))
        outputs = tuple(range(len(tensors), len(tensors) + len(sizes)))
        for k, size in enumerate(sizes):
            made = op_name if len(sizes) == 1 else f"{op_name}:{k}"
            number[made] = outputs[k]
            tensors.append(Tensor(made, (size,), "float32", size))
        times.append(_integers(keys.pop("ns", "0")))
        _add_results(results, ops, op_name, outputs[0], keys)
        inputs = [read.strip() for read in (match["reads"] or "").split(",") if read.strip()]
        unknown = [read for read in inputs if read not in number]
        if unknown:
            raise InputError(f"{op_name!r} reads {unknown[0]!r}, which no line before it makes.")
        ops.append(_make_op(op_name, kind, tuple(number[read] for read in inputs), outputs, keys))
    graph = OpGraph(name, tuple(ops), tuple(tensors), tuple(results))
    return graph, times


def _make_op(
    name: str, kind: str, inputs: tuple[int, ...], outputs: tuple[int, ...], keys: dict[str, str]
) -> Op:
    fields: dict[str, Any] = {k: int(v) if k in _NUMBERS else v for k, v in keys.items()}
    if kind in _ROLES:
        return Op(name, "source", outputs=outputs, role=kind, stage="source", **fields)  # type: ignore[arg-type]
    alias = inputs[0] if kind == "view" else -1
    return Op(name, kind, inputs=inputs, outputs=outputs, alias_of=alias, **fields)


def _add_results(
    results: list[StepResult], ops: list[Op], name: str, tensor: int, keys: dict[str, str]
) -> None:
    kept = keys.pop("result", "")
    if kept:
        if kept not in _RESULTS:
            raise InputError(f"{name!r}: result must be one of {_RESULTS}, got {kept!r}.")
        results.append(StepResult("loss" if kept == "loss" else name, tensor, kept))  # type: ignore[arg-type]
    source = keys.pop("replaces", "")
    if source:
        index = next((k for k, op in enumerate(ops) if op.name == source), -1)
        if index < 0:
            raise InputError(f"{name!r} replaces {source!r}, which no line before it makes.")
        role = ops[index].role
        results.append(StepResult(source, tensor, role, index))  # type: ignore[arg-type]


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]
