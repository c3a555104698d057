"""The placement as a map from module paths to devices, as Accelerate and Transformers take it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from devplace.errors import PlanError, PlanMismatchError
from devplace.graph import OpGraph
from devplace.plan import Plan
from devplace.simulator import Timeline


def device_map(planned: Plan | Timeline, graph: OpGraph | None = None) -> dict[str, str]:
    """Device of every parameter and buffer, by the shortest module paths that say it.

    A path covers everything below it; no path covers another. Where a module's parameters are on
    several devices the map goes down to its children, at last to single parameters. `""` stands
    for the whole model. Other names of a tied parameter have its device.

    Args:
        planned: A plan or its timeline.
        graph: The captured step; needed for a plan that was read from a file.

    Returns:
        Path -> device name, in the order of the model. The only CPU is called `cpu`.

    Raises:
        PlanError: A plan from a file without its graph, or one that does not hang together.
        PlanMismatchError: The graph is not the one that was planned.

    Example:
        >>> collapse({"a.weight": "cuda:0", "a.bias": "cuda:0", "b.weight": "cuda:1"})
        {'a': 'cuda:0', 'b': 'cuda:1'}
    """
    if isinstance(planned, Timeline):
        graph, devices = planned.problem.graph, planned.devices.tolist()
        names = planned.problem.machine.device_names
    else:
        graph = graph or (planned.problem.graph if planned.problem else None)
        devices, names = planned.as_placement().devices.tolist(), planned.device_names
        if graph is None:
            raise PlanError(
                "A plan from a file does not say which ops are parameters. Capture the model and "
                "pass the graph."
            )
        if tuple(op.name for op in graph.ops) != planned.ops:
            raise PlanMismatchError(
                "The plan was made for another model or batch: op names differ. Plan again."
            )
    shown = user_names(names)
    held = {
        op.name: shown[device]
        for op, device in zip(graph.ops, devices, strict=True)
        if op.role in ("parameter", "buffer")
    }
    tied = graph.meta.get("tied", {})
    held |= {name: held[first] for name, first in tied.items() if first in held}
    return collapse(held) if held else {"": shown[devices[-1]]}


def user_names(device_names: Sequence[str]) -> list[str]:
    """Device names as torch users write them: the only CPU is `cpu`."""
    cpus = [name for name in device_names if name.startswith("cpu")]
    return ["cpu" if [name] == cpus else name for name in device_names]


def collapse(held: Mapping[str, str]) -> dict[str, str]:
    """Merge paths of one device into the path above them, as far as possible.

    Args:
        held: Dotted parameter name -> device.
    """
    below: dict[str, set[str]] = {}
    for name, device in held.items():
        for path in _paths(name):
            below.setdefault(path, set()).add(device)
    found: dict[str, str] = {}
    for name, device in held.items():
        path = next((p for p in _paths(name) if len(below[p]) == 1), name)
        found.setdefault(path, device)
    return found


def _paths(name: str) -> list[str]:
    """The whole model, then every module on the way down, then the parameter."""
    parts = name.split(".")
    return ["", *(".".join(parts[: k + 1]) for k in range(len(parts)))]
