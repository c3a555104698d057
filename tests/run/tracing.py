"""Tiny captured graphs made by hand, to test the executor apart from capture."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from devplace.graph import Captured, Op, OpGraph, StepResult, Tensor
from devplace.graph.program import Binding, Program

VIEWS = ("view", "t", "transpose", "permute", "split", "select", "slice", "expand", "unsqueeze")


def trace(
    function: Callable[..., Sequence[Any]],
    sources: dict[str, tuple[str, Any]],
    results: Sequence[tuple[str, str]],
) -> Captured:
    """Graph of a function of tensors.

    Args:
        function: Takes the source tensors, returns the results.
        sources: Name -> (kind, example tensor).
        results: (name, role) per returned tensor; one named like a source replaces it.
    """
    module = make_fx(function, tracing_mode="fake")(*[value for _, value in sources.values()])
    module.graph.eliminate_dead_code()
    ops: list[Op] = []
    tensors: list[Tensor] = []
    tensor_of: dict[str, int] = {}
    op_of: dict[str, int] = {}
    random_ops: dict[str, int] = {}

    def add_tensor(node: Any) -> int:
        fake = node.meta["val"]
        size = fake.numel() * fake.element_size()
        if node.op != "placeholder" and is_view(node):
            size = min(size, tensors[base_of(node)].num_bytes)
        dtype = str(fake.dtype).removeprefix("torch.")
        tensors.append(Tensor(node.name, tuple(fake.shape), dtype, size))
        tensor_of[node.name] = len(tensors) - 1
        return len(tensors) - 1

    def is_view(node: Any) -> bool:
        while node.target is operator.getitem:
            node = node.args[0]
        return str(node.target).split(".")[1] in VIEWS

    def base_of(node: Any) -> int:
        while node.target is operator.getitem:
            node = node.args[0]
        return tensor_of[node.all_input_nodes[0].name]

    names = list(sources)
    bindings = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            name = names[len(bindings)]
            kind, value = sources[name]
            kept = value if kind == "constant" else None
            bindings.append(Binding(len(ops), kind, name, len(bindings), kept))
            tensor = add_tensor(node)
            ops.append(Op(name, "source", (), (tensor,), stage="source", role=kind))
        elif node.op == "call_function" and node.target is not operator.getitem:
            op_of[node.name] = len(ops)
            parts = [node]
            if not isinstance(node.meta["val"], torch.Tensor):
                parts = [user for user in node.users if user.target is operator.getitem]
            reads = tuple(tensor_of[arg.name] for arg in node.all_input_nodes)
            made = tuple(add_tensor(part) for part in parts)
            op_of.update((part.name, len(ops)) for part in parts)
            is_random = torch.Tag.nondeterministic_seeded in node.target.tags
            if is_random:
                random_ops[node.name] = len(random_ops)
            alias = base_of(node) if is_view(node) else -1
            target = str(node.target)
            ops.append(Op(node.name, target, reads, made, alias, is_random=is_random))
    output = list(module.graph.nodes)[-1]
    kept_results = tuple(
        StepResult(name, tensor_of[node.name], role, names.index(name) if name in names else -1)
        for (name, role), node in zip(results, output.args[0], strict=True)
    )
    program = Program(
        module, tuple(bindings), tensor_of, op_of, lambda step, groups: {}, random_ops
    )
    return Captured("tiny", tuple(ops), tuple(tensors), kept_results, program=program)


def random_placement(
    graph: OpGraph, num_devices: int, seed: int
) -> tuple[list[int], list[list[int]]]:
    """A random device per op (views with their base) and a random order that can be run."""
    rng = np.random.default_rng(seed)
    devices = [int(device) for device in rng.integers(num_devices, size=len(graph.ops))]
    return snap(graph, devices, num_devices, rng)


def snap(
    graph: OpGraph,
    devices: Sequence[int],
    num_devices: int,
    rng: np.random.Generator | None = None,
) -> tuple[list[int], list[list[int]]]:
    """Put views with their base, and order the ops: at random if `rng`, else as traced."""
    devices = list(devices)
    needs: dict[int, set[int]] = {}
    root = list(range(len(graph.ops)))
    for index, op in enumerate(graph.ops):
        if op.is_view:
            root[index] = root[graph.producer[op.alias_of]]
            devices[index] = devices[root[index]]
        elif not op.is_source:
            above = {root[graph.producer[tensor]] for tensor in op.inputs}
            needs[index] = {up for up in above if not graph.ops[up].is_source}
    order: list[list[int]] = [[] for _ in range(num_devices)]
    for op in needs if rng is None else _shuffled(needs, rng):
        order[devices[op]].append(op)
    return devices, order


def _shuffled(needs: dict[int, set[int]], rng: np.random.Generator) -> Iterator[int]:
    """Every op once, each after what it needs, any of those that could be next as likely."""
    missing = {op: len(above) for op, above in needs.items()}
    readers: dict[int, list[int]] = {op: [] for op in needs}
    for op, above in needs.items():
        for up in above:
            readers[up].append(op)
    ready = [op for op, count in missing.items() if not count]
    while ready:
        chosen = int(rng.integers(len(ready)))
        ready[chosen], ready[-1] = ready[-1], ready[chosen]
        op = ready.pop()
        yield op
        for reader in readers[op]:
            missing[reader] -= 1
            if not missing[reader]:
                ready.append(reader)


def place_by_module(
    graph: OpGraph, device_of: Callable[[Op], int], num_devices: int
) -> tuple[list[int], list[list[int]]]:
    """Place each op where `device_of(op)` says, in trace order."""
    return snap(graph, [device_of(op) for op in graph.ops], num_devices)
