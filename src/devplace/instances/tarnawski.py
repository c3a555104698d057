"""Op and layer graphs of Tarnawski et al. 2020 (JSON), and splits of such graphs.

Both of its objectives have the same files, told apart by their folders only (`throughput-inputs`,
`latency-inputs`); elsewhere they count as throughput unless the caller says otherwise. Traps: in
the published throughput layer graphs, edge costs are in seconds beside latencies in milliseconds;
they are kept as they are, `edge_cost_scale` 1000 makes them physical. Sizes on edges are not costs.

Source: Tarnawski et al. (2020), "Efficient Algorithms for Device Placement of DNN Graph Operators",
arXiv 2006.16423.
"""

from __future__ import annotations

import msgspec

from devplace.instances.records import About, LoadInstance, LoadNode
from devplace.instances.text import (
    Whole,
    at_most_devices,
    check_acyclic,
    decode,
    fail,
    not_negative,
)

SOURCE = "Tarnawski et al. (2020), arXiv 2006.16423"
_SAME_COST = 1e-6


class _Node(msgspec.Struct):
    id: Whole
    cpuLatency: float  # noqa: N815
    fpgaLatency: float  # noqa: N815
    supportedOnFpga: bool | int = True  # noqa: N815
    size: float = 0.0
    isBackwardNode: bool | int = False  # noqa: N815
    colorClass: Whole | None = None  # noqa: N815
    name: str | int | None = None


class _Edge(msgspec.Struct):
    sourceId: Whole  # noqa: N815
    destId: Whole  # noqa: N815
    cost: float


class _File(msgspec.Struct):
    maxSizePerFPGA: float  # noqa: N815
    maxFPGAs: Whole  # noqa: N815
    maxCPUs: Whole  # noqa: N815
    nodes: list[_Node]
    edges: list[_Edge]


class _Share(msgspec.Struct):
    nodes: list[Whole]


class _Split(msgspec.Struct):
    fpgas: list[_Share]
    cpus: list[_Share] = []


def parse(text: str, about: About, objective: str) -> LoadInstance:
    """An instance from the text of its file.

    Raises:
        InputError: The file is malformed; names the key and the value.
    """
    path = about.path
    found = decode(text, _File, path, "Tarnawski")
    not_negative(path, "maxSizePerFPGA", found.maxSizePerFPGA)
    for key in ("maxFPGAs", "maxCPUs"):
        at_most_devices(path, key, getattr(found, key))
    index = _index(path, found.nodes)
    costs, edges = _edges(path, found, index)
    names = [str(node.id) for node in found.nodes]
    check_acyclic(path, names, edges)
    nodes = tuple(
        _node(path, k, node, costs.get(node.id, 0.0)) for k, node in enumerate(found.nodes)
    )
    backward = next((k for k, node in enumerate(nodes) if node.is_backward), None)
    if objective == "latency" and backward is not None:
        problem = f"node {nodes[backward].name!r} is a backward node; latency is for inference"
        fail(path, f"nodes[{backward}].isBackwardNode", problem, "Use the throughput objective.")
    memory = found.maxSizePerFPGA
    return LoadInstance(about, nodes, edges, found.maxFPGAs, found.maxCPUs, memory, objective)


def parse_split(text: str, path: str, instance: LoadInstance) -> tuple[int, ...]:
    """Device of each node from a file of the authors' (human experts, solvers): accelerators come
    first, then CPUs.

    Raises:
        InputError: It is malformed, or does not name each node of the instance once.
    """
    found = decode(text, _Split, path, "split")
    index = {node.id: k for k, node in enumerate(instance.nodes)}
    device: dict[int, int] = {}
    shares = [("fpgas", k, share, k) for k, share in enumerate(found.fpgas)]
    shares += [
        ("cpus", k, share, instance.num_accelerators + k) for k, share in enumerate(found.cpus)
    ]
    if len(found.fpgas) > instance.num_accelerators or len(found.cpus) > instance.num_cpus:
        have = f"{instance.num_accelerators} and {instance.num_cpus}"
        fail(path, "fpgas, cpus", f"{len(found.fpgas)} and {len(found.cpus)} for {have} devices")
    for kind, number, share, where in shares:
        for node in share.nodes:
            if node not in index:
                fail(
                    path, f"{kind}[{number}].nodes", f"node {node} is not in {instance.about.name}"
                )
            if index[node] in device:
                fail(path, f"{kind}[{number}].nodes", f"node {node} is listed twice")
            device[index[node]] = where
    lost = next((node.id for k, node in enumerate(instance.nodes) if k not in device), None)
    if lost is not None:
        fail(path, "fpgas, cpus", f"node {lost} is on no device")
    return tuple(device[k] for k in range(len(instance.nodes)))


def _index(path: str, nodes: list[_Node]) -> dict[int, int]:
    if not nodes:
        fail(path, "nodes", "there are none")
    index: dict[int, int] = {}
    for k, node in enumerate(nodes):
        if node.id in index:
            fail(
                path, f"nodes[{k}].id", f"{node.id} occurs twice, first at nodes[{index[node.id]}]"
            )
        index[node.id] = k
    return index


def _edges(
    path: str, found: _File, index: dict[int, int]
) -> tuple[dict[int, float], tuple[tuple[int, int], ...]]:
    costs: dict[int, float] = {}
    edges: dict[tuple[int, int], None] = {}
    for k, edge in enumerate(found.edges):
        for key in ("sourceId", "destId"):
            if getattr(edge, key) not in index:
                fail(path, f"edges[{k}].{key}", f"there is no node {getattr(edge, key)}")
        cost = not_negative(path, f"edges[{k}].cost", edge.cost)
        first = costs.setdefault(edge.sourceId, cost)
        if abs(first - cost) > _SAME_COST * max(first, cost):
            problem = f"node {edge.sourceId} has edges that cost {first} and {cost}"
            fail(path, f"edges[{k}].cost", problem, "All edges that leave one node cost the same.")
        edges[index[edge.sourceId], index[edge.destId]] = None
    return costs, tuple(edges)


def _node(path: str, k: int, node: _Node, output_ms: float) -> LoadNode:
    for key in ("cpuLatency", "fpgaLatency", "size"):
        not_negative(path, f"nodes[{k}].{key}", getattr(node, key))
    return LoadNode(
        id=node.id,
        name=str(node.id if node.name is None else node.name),
        accelerator_ms=node.fpgaLatency,
        cpu_ms=node.cpuLatency,
        size_bytes=node.size,
        output_ms=output_ms,
        can_accelerate=bool(node.supportedOnFpga),
        is_backward=bool(node.isBackwardNode),
        color=node.colorClass,
    )
