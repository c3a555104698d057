"""The captured step on one device in trace order: what a placed step is compared with.

It shares no code with the executors except seeds, the choice of kernels and their layouts, so a
fault there is not a fault here too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from devplace.device_kinds import is_host
from devplace.graph import Captured
from devplace.kernels import kernel_of
from devplace.run.copies import as_traced
from devplace.run.seeds import RandomKeys, call_with_default_generator, op_seed, takes_generator


def run_unplaced(
    graph: Captured, sources: Mapping[int, Any], seed: int, step: int, device: str = "cpu"
) -> list[Any]:
    """Run the captured step node by node.

    Args:
        graph: The captured step.
        sources: Value of every source op; random keys are made of `seed` and `step`.
        seed: Seed of the random ops.
        step: 1-based number of the step.
        device: torch device that the sources are on.

    Returns:
        One value per result of the graph.
    """
    program = graph.program
    bindings = iter(program.bindings)
    position = program.random_ops
    waiting = {node: len(node.users) for node in program.module.graph.nodes}
    values: dict[Any, Any] = {}
    place = torch.device(device)
    keys = RandomKeys(graph).of_step(seed, step)
    sources = {**sources, **{op: key.to(place) for op, key in keys.items()}}

    def argument(arg: Any) -> Any:
        if isinstance(arg, torch.fx.Node):
            return values[arg]
        return place if isinstance(arg, torch.device) else arg

    with torch.no_grad():
        for node in program.module.graph.nodes:
            if node.op == "placeholder":
                values[node] = sources[next(bindings).op]
                continue
            args = torch.fx.node.map_aggregate(node.args, argument)
            if node.op == "output":
                return list(args[0])
            kwargs = dict(torch.fx.node.map_aggregate(node.kwargs, argument))
            if node.name in position:
                drawn_with = op_seed(seed, step, position[node.name])
                values[node] = _draw(node.target, drawn_with, args, kwargs, place)
            else:
                kernel = kernel_of(node.target, place.type)
                values[node] = kernel(*args, **kwargs)
            if node.name in program.layouts:
                values[node] = as_traced(values[node], program.layouts[node.name])
            for arg in node.all_input_nodes:
                waiting[arg] -= 1
                if waiting[arg] == 0:
                    del values[arg]
    raise AssertionError("an FX graph ends with its output")


def _draw(target: Any, seed: int, args: Any, kwargs: dict[str, Any], device: Any) -> Any:
    if takes_generator(target):
        return target(*args, **kwargs, generator=torch.Generator(device).manual_seed(seed))
    default = torch.default_generator
    if not is_host(device.type):
        default = torch.cuda.default_generators[device.index]
    return call_with_default_generator(target, seed, args, kwargs, default)
