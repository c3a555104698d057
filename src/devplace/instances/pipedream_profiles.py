"""Layer profiles of PipeDream (2019): one line per layer, then one per edge.

`nodeN -- description -- forward_compute_time=ms, backward_compute_time=ms, activation_size=B (or a
list [a; b]), parameter_size=B[ -- stage_id=k]`, and `<tab>nodeA -- nodeB`. Trap: layers whose
description begins with `Input` carry the time of loading data; its planner sets all of theirs to 0,
and so does this reader. A `stage_id` is the outcome of an earlier plan and is left out.

Source: Narayanan et al. (2019), "PipeDream: Generalized Pipeline Parallelism for DNN Training",
SOSP 2019.
"""

from __future__ import annotations

import re

from devplace.instances.records import About, Layer, PipelineInstance
from devplace.instances.text import check_acyclic, fail, not_negative

SOURCE = "Narayanan et al. (2019), PipeDream, SOSP 2019"
_KEYS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_VALUE = re.compile(r"(\w+)\s*=\s*(\[[^\]]*\]|[^,\s]+)")


def parse(text: str, about: About) -> PipelineInstance:
    """An instance from the text of its file.

    Raises:
        InputError: The file is malformed; names the line and the value.
    """
    path = about.path
    layers: dict[str, Layer] = {}
    pairs: list[tuple[int, str, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        parts = [part.strip() for part in re.split(r"\s+--\s*|\s*--\s+", line.strip())]
        if parts == [""]:
            continue
        if len(parts) == 2 and "=" not in parts[1]:
            pairs.append((number, parts[0], parts[1]))
            continue
        layer = _layer(path, number, parts)
        if layer.id in layers:
            fail(path, f"line {number}", f"layer {layer.id} is given twice")
        layers[layer.id] = layer
    if not layers:
        fail(path, "line 1", "there are no layers")
    index = {name: k for k, name in enumerate(layers)}
    edges: dict[tuple[int, int], None] = {}
    for number, producer, consumer in pairs:
        for name in (producer, consumer):
            if name not in index:
                fail(path, f"line {number}", f"there is no layer {name!r}")
        edges[index[producer], index[consumer]] = None
    check_acyclic(path, list(layers), edges)
    return PipelineInstance(about, tuple(layers.values()), tuple(edges))


def _layer(path: str, number: int, parts: list[str]) -> Layer:
    where = f"line {number}"
    if len(parts) < 3:
        fail(
            path,
            where,
            f"expected a layer or an edge, got {' -- '.join(parts)[:80]!r}",
            "Layers are 'nodeN -- text -- forward_compute_time=...', edges 'nodeA -- nodeB'.",
        )
    at = next((k for k, part in enumerate(parts) if _KEYS[0] in part), None)
    if at is None or at < 2:
        fail(path, where, f"layer {parts[0]!r} has no {_KEYS[0]}")
    given = dict(_VALUE.findall(parts[at]))
    values = {}
    for key in _KEYS:
        if key not in given:
            fail(path, where, f"layer {parts[0]!r} has no {key}")
        values[key] = _number(path, where, key, given[key])
    name = " -- ".join(parts[1:at])
    is_input = name.startswith("Input")
    count = 0.0 if is_input else 1.0
    return Layer(
        id=parts[0],
        name=name,
        compute_ms=count * (values["forward_compute_time"] + values["backward_compute_time"]),
        activation_bytes=count * values["activation_size"],
        parameter_bytes=count * values["parameter_size"],
        is_input=is_input,
    )


def _number(path: str, where: str, key: str, text: str) -> float:
    """A number, or the sum of a list `[a; b; c]`."""
    total = 0.0
    for part in re.split(r"[;,]", text.strip("[]")) if text.strip("[] ") else []:
        try:
            value = float(part)
        except ValueError:
            fail(path, where, f"{key} must be a number, got {part.strip()!r}")
        total += not_negative(path, f"{where}, {key}", value)
    return total
