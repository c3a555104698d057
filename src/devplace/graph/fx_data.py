"""FX graphs as plain data, for other processes and for keys.

torch.fx pickles a graph as source code and traces it again, which is slow and renames nodes, and
op overloads do not pickle at all; so nodes travel as a plain list.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from dataclasses import dataclass, field
from typing import Any

import torch

from devplace.errors import InputError
from devplace.graph.functional_ops import functional, original

NodeData = tuple[str, str, Any, Any, Any]
"""Kind, name, target, arguments and named arguments of a node."""


@dataclass(frozen=True)
class _Ref:
    """Stands for a node of the graph."""

    index: int


@dataclass(frozen=True)
class _Op:
    """Stands for an op overload such as `aten::mm` `default`.

    Attributes:
        origins: Of an op that is not torch's own: modules and libraries that may register it.
        of: Of the functional form of an op that writes its arguments: that op.
    """

    name: str
    overload: str
    origins: tuple[str, ...] = field(default=(), repr=False, compare=False)
    of: _Op | None = None


@dataclass(frozen=True)
class UnknownOp:
    """An op that this process does not know, in its place in a graph.

    Attributes:
        name: Such as `mylib::twice.default`.
    """

    name: str

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuses.

        Raises:
            InputError: Always; says what to do.
        """
        raise InputError(_unknown(self.name))


def nodes_as_data(graph: torch.fx.Graph) -> list[NodeData]:
    """The nodes of a graph, in order; what they carry in `meta` is left out."""
    index = {node: k for k, node in enumerate(graph.nodes)}

    def plain(arg: Any) -> Any:
        return _Ref(index[arg]) if isinstance(arg, torch.fx.Node) else arg

    return [
        (
            node.op,
            node.name,
            _target_out(node.target),
            torch.fx.node.map_aggregate(node.args, plain),
            torch.fx.node.map_aggregate(node.kwargs, plain),
        )
        for node in graph.nodes
    ]


def graph_from_data(nodes: list[NodeData], keeps_unknown: bool = False) -> torch.fx.Graph:
    """The graph that `nodes_as_data` made data of.

    Modules and libraries that register ops of others than torch are imported for that.

    Args:
        nodes: Of `nodes_as_data`.
        keeps_unknown: Whether ops that are not known all the same become an `UnknownOp`.

    Raises:
        InputError: An op is not known in this process.
    """
    graph = torch.fx.Graph()
    made: list[Any] = []

    def resolved(arg: Any) -> Any:
        return made[arg.index] if isinstance(arg, _Ref) else arg

    for kind, name, target, args, kwargs in nodes:
        args = torch.fx.node.map_aggregate(args, resolved)
        kwargs = torch.fx.node.map_aggregate(kwargs, resolved)
        found = _target_in(target, keeps_unknown)
        node = graph.create_node(kind, found, args, dict(kwargs), name)
        node.name = name
        made.append(node)
    return graph


def _target_out(target: Any) -> Any:
    if isinstance(target, torch._ops.OpOverload):
        name, of = target._schema.name, original(target)
        origins = _origins(name) if of is None else ()
        return _Op(name, target._overloadname, origins, None if of is None else _target_out(of))
    return target


def _target_in(target: Any, keeps_unknown: bool) -> Any:
    if not isinstance(target, _Op):
        return target
    if target.of is not None:
        of = _target_in(target.of, keeps_unknown)
        return of if isinstance(of, UnknownOp) else functional(of)
    found = _overload(target)
    for origin in target.origins if found is None else ():
        with contextlib.suppress(Exception, SystemExit):  # of the user's code
            _load(origin)
        found = _overload(target)
        if found is not None:
            break
    if found is not None:
        return found
    unknown = UnknownOp(f"{target.name}.{target.overload}")
    if keeps_unknown:
        return unknown
    raise InputError(_unknown(unknown.name))


def _overload(op: _Op) -> Any:
    namespace, _, name = op.name.partition("::")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), name), op.overload)
    except AttributeError:
        return None


def _unknown(name: str) -> str:
    return (
        f"Op {name} is not known in a fresh process: it was registered by your code. Register it "
        "in a module that can be imported, or measure in this process."
    )


def _origins(name: str) -> tuple[str, ...]:
    """Modules and libraries that may register an op, likeliest first."""
    namespace = name.partition("::")[0]
    if namespace in ("aten", "prims", "prim"):
        return ()
    from torch._library.custom_ops import OPDEFS

    if name in OPDEFS:
        modules = [OPDEFS[name]._init_fn.__module__]
    else:
        dump = torch._C._dispatch_dump(name)
        files = {part.partition(":")[0] for part in dump.split("registered at ")[1:]}
        modules = [
            each
            for each, module in list(sys.modules.items())
            if getattr(module, "__file__", None) in files
        ]
    modules = [each for each in (*modules, namespace) if _can_import(each)]
    return (*modules, *sorted(torch.ops.loaded_libraries))


def _can_import(module: str) -> bool:
    found = sys.modules.get(module)
    return module != "__main__" and getattr(found, "__spec__", None) is not None


def _load(origin: str) -> None:
    if os.path.isfile(origin):
        torch.ops.load_library(origin)
    else:
        importlib.import_module(origin)
