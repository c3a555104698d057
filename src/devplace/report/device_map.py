"""The placement as a map from modules to devices, as Accelerate and Transformers take it, and as
stages for torch.distributed.pipelining."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from devplace.device_kinds import is_host, named_by_number
from devplace.errors import InputError, PlanError, PlanMismatchError
from devplace.files import decode_json, read_whole
from devplace.graph import OpGraph
from devplace.graph.members import parts_of
from devplace.plan import Plan
from devplace.simulator import Timeline

MAX_BYTES = 10**7
"""Size of the largest file with a device map."""


class Held(NamedTuple):
    """A parameter or buffer: where it is, and its bytes."""

    device: str
    num_bytes: int = 1


def device_map(
    planned: Plan | Timeline, graph: OpGraph | None = None, names: Iterable[str] = ()
) -> dict[str, str]:
    """Device of every module, by the shortest module paths that say it.

    Accelerate moves what goes into a module to its device, and nothing inside it. So a block goes
    whole to the device that holds most of its bytes: a module that is one of a list (its name is a
    number), and one with parameters of its own. A path covers everything below it; no path covers
    another. `""` stands for the whole model. Other names of a tied parameter have its device.

    Args:
        planned: A plan or its timeline.
        graph: The captured step; needed for a plan that was read from a file.
        names: Names that the map must cover, such as `model.state_dict()`, also if the step does
            not use them; those of the step are known.

    Returns:
        Path -> device name, in the order of the model. The only CPU is called `cpu`.

    Raises:
        PlanError: A plan from a file without its graph, or one that does not hang together.
        PlanMismatchError: The graph is not the one that was planned.

    Example:
        >>> collapse({"a.weight": Held("cuda:0"), "a.bias": Held("cuda:0"), "b.w": Held("cuda:1")})
        {'a': 'cuda:0', 'b': 'cuda:1'}
    """
    graph, devices, shown = _placed(planned, graph)
    held = {
        op.name: Held(shown[device], sum(graph.tensors[t].num_bytes for t in op.outputs))
        for op, device in zip(graph.ops, devices, strict=True)
        if op.role in ("parameter", "buffer")
    }
    tied = graph.meta.get("tied", {})
    held |= {name: held[first] for name, first in tied.items() if first in held}
    return collapse(held, names) if held else {"": shown[devices[-1]]}


def run_elsewhere(timeline: Timeline, found: Mapping[str, str]) -> tuple[str, ...]:
    """Modules of which a plan runs ops on another device than a map puts them on.

    A map has one device for each block, and a tied weight's module goes with the weight; a plan may
    part a block, and run such a module where its input is.

    Args:
        timeline: Of the plan.
        found: Its `device_map`.

    Returns:
        Module paths, in the order in which they first run.
    """
    graph, devices, shown = _placed(timeline, None)
    differ: dict[str, None] = {}
    for op, device in zip(graph.ops, devices, strict=True):
        for part in () if op.is_source else parts_of(op):
            path = None if part.is_view else _longest(found, part.module)
            if path is not None and found[path] != shown[device]:
                differ.setdefault(part.module)
    return tuple(differ)


def split_points(planned: Plan | Timeline, graph: OpGraph | None = None) -> dict[str, str]:
    """Modules at whose beginning a pipeline's next stage begins, and its device.

    `torch.distributed.pipelining.pipeline` takes them as
    `split_spec={path: SplitPoint.BEGINNING for path in ...}`; the first stage, which begins with
    the model, is not among them.

    Args:
        planned: A plan or its timeline.
        graph: As for `device_map`.

    Returns:
        Path -> device name, in the order in which the modules run.

    Raises:
        PlanError: Modules of a device do not follow each other, so that they are no stage.
    """
    graph = _placed(planned, graph)[0]
    paths = device_map(planned, graph)
    weights = {op.module for op in graph.ops if op.role == "parameter"}
    weights |= {name.rpartition(".")[0] for name in graph.meta.get("tied", {})}
    ran: dict[str, str] = {}
    for op in graph.ops:
        for part in parts_of(op):
            if part.stage == "forward" and part.module in weights and not part.is_view:
                path = _longest(paths, part.module)
                if path is not None:
                    ran.setdefault(_called(path, part.module), paths[path])
    stages: dict[str, str] = {}
    device, seen = "", set[str]()
    for path, where in ran.items():
        if where == device:
            continue
        if where in seen:
            raise PlanError(
                f"Stages of a pipeline are parts of the model one after the other: {path!r} is on "
                f"{where} again after {device}. {_remedy(path, graph.meta.get('tied', {}))}"
            )
        if device:
            stages[path] = where
        device = where
        seen.add(where)
    return stages


def _remedy(path: str, tied: Mapping[str, str]) -> str:
    """What to do about a module that comes back to a device."""
    for name, first in tied.items():
        if name.rpartition(".")[0] == path:
            return f"It shares {first!r}, which is there: give {name!r} a weight of its own."
    return (
        "Plan with the modules of a device together, for example with the placer 'layers' or "
        "with pins."
    )


def _placed(
    planned: Plan | Timeline, graph: OpGraph | None
) -> tuple[OpGraph, list[int], list[str]]:
    """The graph, each op's device, and the names of devices."""
    if isinstance(planned, Timeline):
        problem = planned.problem
        return problem.graph, planned.devices.tolist(), user_names(problem.machine.device_names)
    graph = graph or (planned.problem.graph if planned.problem else None)
    if graph is None:
        raise PlanError(
            "A plan from a file does not say which ops are parameters. Capture the model and "
            "pass the graph."
        )
    if tuple(op.name for op in graph.ops) != planned.ops:
        raise PlanMismatchError(
            "The plan was made for another model or batch: op names differ. Plan again."
        )
    return graph, planned.as_placement().devices.tolist(), user_names(planned.device_names)


def user_names(device_names: Sequence[str]) -> list[str]:
    """Device names as torch users write them: the only CPU is `cpu`."""
    cpus = [name for name in device_names if is_host(name)]
    return ["cpu" if [name] == cpus else name for name in device_names]


def collapse(held: Mapping[str, Held], names: Iterable[str] = ()) -> dict[str, str]:
    """Modules of what is held, as `device_map` says.

    Args:
        held: Dotted name of a parameter or buffer -> where it is.
        names: Further names to cover; they go where most of the nearest module above them is.
    """
    below: dict[str, Counter[str]] = {}
    for name, (device, num_bytes) in held.items():
        for path in module_paths(name):
            below.setdefault(path, Counter())[device] += num_bytes
    own = dict.fromkeys(module_paths(name)[-1] for name in (*held, *names))
    homes: dict[str, str] = {}
    used: dict[str, set[str]] = {}
    for module in own:
        ways = [*_above(module), module]
        block = next(path for path in ways if path in own or _is_numbered(path))
        near = next(path for path in (block, *reversed(ways)) if path in below)
        homes[module] = max(below[near], key=lambda device: below[near][device])
        for way in ways:
            used.setdefault(way, set()).add(homes[module])
    found: dict[str, str] = {}
    for module, home in homes.items():
        ways = [*_above(module), module]
        found[next(path for path in ways if len(used[path]) == 1)] = home
    return found


def module_paths(name: str) -> list[str]:
    """The whole model, then every module on the way down to a parameter."""
    parts = name.split(".")[:-1]
    return ["", *(".".join(parts[: k + 1]) for k in range(len(parts)))]


def _above(path: str) -> list[str]:
    """Modules above a module, the whole model first."""
    return module_paths(path) if path else []


def _is_numbered(path: str) -> bool:
    return path.rpartition(".")[2].isdigit()


def _longest(paths: Iterable[str], module: str) -> str | None:
    """The path of a map that says where a module is."""
    fitting = [p for p in paths if p in ("", module) or module.startswith(f"{p}.")]
    return max(fitting, key=len, default=None)


def _called(path: str, module: str) -> str:
    """The module that runs first of those that a path covers: of a list, one that is in it."""
    parts, depth = module.split("."), path.count(".") + 1 if path else 0
    inside = parts[depth : depth + 1]
    return ".".join(parts[: depth + 1]) if inside and inside[0].isdigit() else path


def pins_of(found: object, where: str = "device map") -> dict[str, str]:
    """A device map as pins (see `Problem`), from the modules furthest down to those above them.

    Args:
        found: Path -> device: a name, or the number of a GPU.
        where: What messages call it.

    Raises:
        InputError: It is no map, or names no device, such as `disk`.

    Example:
        >>> pins_of({"": 0, "encoder.layer.1": "cuda:1", "head": "cpu"})
        {'encoder.layer.1': 'cuda:1', 'head': 'cpu:0', '*': 'cuda:0'}
    """
    if not isinstance(found, Mapping) or not found:
        raise InputError(
            f"{where} must be an object of module paths and devices, as `devplace explain PLAN "
            f"--device-map` prints it, got {str(found)[:60]!r}."
        )
    pins: dict[str, str] = {}
    for path in sorted(found, key=lambda path: -len(module_paths(f"{path}.x" if path else "x"))):
        device = found[path]
        is_number = isinstance(device, int) and not isinstance(device, bool) and device >= 0
        name = named_by_number(device) if is_number else str(device)
        if not re.fullmatch(r"[a-z]+(:[0-9]+)?", name) or name in ("disk", "meta"):
            raise InputError(
                f"{where}: {path!r} is on {device!r}, which is no device of a plan. Use a device's "
                f"name, such as 'cuda:0' or 'cpu', or the number of a GPU."
            )
        pins[path or "*"] = name if ":" in name else f"{name}:0"
    return pins


def read_pins(path: str | Path) -> dict[str, str]:
    """The pins of a device map in a JSON file (see `pins_of`).

    Raises:
        InputError: The file cannot be read, holds no device map, or names a module twice.
    """
    try:
        data = read_whole(path, MAX_BYTES)
        found = decode_json(data, dict)
    except OSError as error:
        raise InputError(
            f"Cannot read device map {path}: {error.strerror}. Check the path."
        ) from error
    except ValueError as error:
        raise InputError(f"{path} holds no device map: {error}. Write it again.") from None
    pins = pins_of(found, f"Device map {path}")
    once = set[str]()
    for key, _ in json.loads(data, object_pairs_hook=list):  # decode_json keeps the last of equals
        if key in once:
            raise InputError(f"Device map {path} names {key!r} twice. Keep one.")
        once.add(key)
    return pins
