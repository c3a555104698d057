"""Layer graphs of Piper (2021): JSON, with variants of a layer per degree of tensor parallelism.

Source: Tarnawski, Narayanan, Phanishayee (2021), "Piper: Multidimensional Planner for DNN
Parallelization", NeurIPS 2021.
"""

from __future__ import annotations

import re

import msgspec

from devplace.instances.records import About, Variant, VariantInstance, VariantNode
from devplace.instances.text import (
    Whole,
    at_most_devices,
    check_acyclic,
    decode,
    fail,
    not_negative,
)

SOURCE = "Tarnawski, Narayanan, Phanishayee (2021), Piper, NeurIPS 2021"

_WHOLE = re.compile(r"-?[0-9]{1,18}")


class _Variant(msgspec.Struct):
    id: str
    timePerSample: float  # noqa: N815
    parameterSize: float  # noqa: N815
    memoryUsageA: float  # noqa: N815
    memoryUsageB: float  # noqa: N815
    syncTimeFw: dict[str, float]  # noqa: N815
    syncTimeBw: dict[str, float]  # noqa: N815


class _Node(msgspec.Struct):
    id: Whole
    TMPCs: dict[str, list[_Variant]]
    name: str = ""


class _Edge(msgspec.Struct):
    sourceId: Whole  # noqa: N815
    destId: Whole  # noqa: N815
    communicationCost: float  # noqa: N815


class _File(msgspec.Struct):
    maxMemoryPerDevice: float  # noqa: N815
    maxDevices: Whole  # noqa: N815
    bandwidth: float
    mbsInBatch: Whole  # noqa: N815
    nodes: list[_Node]
    edges: list[_Edge]


def parse(text: str, about: About) -> VariantInstance:
    """An instance from the text of its file.

    Raises:
        InputError: The file is malformed; names the key and the value.
    """
    path = about.path
    found = decode(text, _File, path, "Piper")
    not_negative(path, "maxMemoryPerDevice", found.maxMemoryPerDevice)
    for key, value in (("maxDevices", found.maxDevices), ("mbsInBatch", found.mbsInBatch)):
        if value < 1:
            fail(path, key, f"must be at least 1, got {value}")
    at_most_devices(path, "maxDevices", found.maxDevices)
    if not_negative(path, "bandwidth", found.bandwidth) == 0:
        fail(path, "bandwidth", "must be above 0 bytes/s")
    if not found.nodes:
        fail(path, "nodes", "there are none")
    index: dict[int, int] = {}
    for k, node in enumerate(found.nodes):
        if index.setdefault(node.id, k) != k:
            fail(path, f"nodes[{k}].id", f"{node.id} occurs twice")
    edges = _edges(path, found.edges, index)
    check_acyclic(path, [str(node.id) for node in found.nodes], edges)
    return VariantInstance(
        about,
        tuple(_node(path, k, node, index, edges) for k, node in enumerate(found.nodes)),
        tuple((a, b, size) for (a, b), size in edges.items()),
        found.maxDevices,
        found.maxMemoryPerDevice,
        found.bandwidth,
        found.mbsInBatch,
    )


def _edges(path: str, edges: list[_Edge], index: dict[int, int]) -> dict[tuple[int, int], float]:
    sizes: dict[tuple[int, int], float] = {}
    for k, edge in enumerate(edges):
        for key in ("sourceId", "destId"):
            if getattr(edge, key) not in index:
                fail(path, f"edges[{k}].{key}", f"there is no node {getattr(edge, key)}")
        pair = index[edge.sourceId], index[edge.destId]
        if pair in sizes:
            fail(path, f"edges[{k}]", f"{edge.sourceId} -> {edge.destId} is given twice")
        where = f"edges[{k}].communicationCost"
        sizes[pair] = not_negative(path, where, edge.communicationCost)
    return sizes


def _node(
    path: str,
    k: int,
    node: _Node,
    index: dict[int, int],
    edges: dict[tuple[int, int], float],
) -> VariantNode:
    into = {a for a, b in edges if b == k}
    out = {b for a, b in edges if a == k}
    degrees: dict[int, tuple[Variant, ...]] = {}
    for text, given in node.TMPCs.items():
        where = f"nodes[{k}].TMPCs[{text!r}]"
        if not _WHOLE.fullmatch(text) or int(text) < 1:
            fail(path, where, "the key must be a number of devices")
        ids = [variant.id for variant in given]
        if len(set(ids)) < len(ids):
            fail(path, where, f"ids must be unique, got {ids}")
        degrees[int(text)] = tuple(
            _variant(path, f"{where}[{m}]", variant, index, into, out)
            for m, variant in enumerate(given)
        )
    if not any(degrees.values()):
        fail(path, f"nodes[{k}].TMPCs", f"node {node.id} has no variant to run")
    return VariantNode(node.id, node.name or str(node.id), tuple(sorted(degrees.items())))


def _variant(
    path: str,
    where: str,
    variant: _Variant,
    index: dict[int, int],
    into: set[int],
    out: set[int],
) -> Variant:
    for key in ("timePerSample", "parameterSize", "memoryUsageA", "memoryUsageB"):
        not_negative(path, f"{where}.{key}", getattr(variant, key))
    return Variant(
        variant.id,
        variant.timePerSample,
        variant.parameterSize,
        variant.memoryUsageA,
        variant.memoryUsageB,
        _sync(path, f"{where}.syncTimeFw", variant.syncTimeFw, index, into),
        _sync(path, f"{where}.syncTimeBw", variant.syncTimeBw, index, out),
    )


def _sync(
    path: str, where: str, given: dict[str, float], index: dict[int, int], ends: set[int]
) -> tuple[tuple[int, float], ...]:
    """Bytes by the other end of each edge; exactly the node's edges must be there."""
    found: dict[int, float] = {}
    for text, value in given.items():
        known = index.get(int(text)) if _WHOLE.fullmatch(text) else None
        if known is None or known not in ends:
            fail(path, where, f"there is no edge with node {text!r}")
        found[known] = not_negative(path, f"{where}[{text!r}]", value)
    for end in sorted(ends - found.keys()):
        number = next(node for node, k in index.items() if k == end)
        fail(path, where, f"the edge with node {number} is missing")
    return tuple(sorted(found.items()))
