"""The example batch: flattening, names, and cutting it into micro-batches."""

from __future__ import annotations

import dataclasses
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree

from devplace.errors import CaptureError
from devplace.step_capture.micro_batches.cutting import BatchDims, cut_inputs, row_dims

_PLAIN = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device)
_MAX_OBJECTS = 1000


class Record:
    """Stand-in for a dataclass instance while it is flattened.

    Args:
        kind: Its class.
        fields: Its fields, and other attributes that it has.
        keys: Those that are items too, of a class that is a dict as well.
    """

    def __init__(self, kind: type, fields: dict[str, Any], keys: tuple[str, ...] = ()) -> None:
        self.kind = kind
        self.fields = fields
        self.keys = keys


def _flatten_record(record: Record) -> tuple[list[Any], Any]:
    return list(record.fields.values()), (record.kind, tuple(record.fields), record.keys)


def _flatten_record_with_keys(record: Record) -> tuple[list[Any], Any]:
    values, context = _flatten_record(record)
    return [(pytree.GetAttrKey(n), v) for n, v in zip(record.fields, values, strict=True)], context


def _unflatten_record(values: Any, context: Any) -> Any:
    kind, names, keys = context
    made = kind.__new__(kind) if issubclass(kind, dict) else object.__new__(kind)
    put = OrderedDict.__setitem__ if issubclass(kind, OrderedDict) else dict.__setitem__
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)
        if name in keys:
            put(made, name, value)
    return made


# Our own class only: registering the user's would clash with a later registration of theirs.
pytree.register_pytree_node(
    Record,
    _flatten_record,
    _unflatten_record,
    serialized_type_name="devplace.step_capture.batch.Record",
    flatten_with_keys_fn=_flatten_record_with_keys,
)


def _is_plain_dataclass(value: Any) -> bool:
    is_record = dataclasses.is_dataclass(value) and not isinstance(value, type)
    if not is_record or type(value) in pytree.SUPPORTED_NODES:
        return False
    if isinstance(value, dict):
        record: Any = value
        return set(value) <= {each.name for each in dataclasses.fields(record)}
    return not isinstance(value, (list, tuple, Mapping))


def _is_object(value: Any) -> bool:
    """Whether a value is an object of any class that keeps tensors in its attributes."""
    known = (*_PLAIN, type, torch.Tensor, torch.nn.Module, types.FunctionType, types.MethodType)
    is_other = not isinstance(value, known) and type(value) not in pytree.SUPPORTED_NODES
    if not is_other or isinstance(value, (list, tuple, Mapping)) or hasattr(value, "__array__"):
        return False
    return type(getattr(value, "__dict__", None)) is dict and _holds_tensors(value)


def open_dataclasses(tree: Any) -> Any:
    """Replace dataclass instances by nodes torch's pytree knows; unflattening restores them."""
    return _opened(tree, _is_plain_dataclass)


def open_objects(tree: Any) -> Any:
    """As `open_dataclasses`, and objects of other classes that hold tensors, such as caches."""
    return _opened(tree, lambda value: _is_plain_dataclass(value) or _is_object(value))


def _opened(tree: Any, is_record: Callable[[Any], bool]) -> Any:
    inside: list[Any] = []

    def visit(leaf: Any) -> Any:
        is_known = any(leaf is each for each in inside)  # an object that holds itself
        if is_known or not is_record(leaf):
            return leaf
        fields = {}
        if dataclasses.is_dataclass(leaf):
            fields = {f.name: getattr(leaf, f.name) for f in dataclasses.fields(leaf)}
        fields |= getattr(leaf, "__dict__", {})
        keys = tuple(leaf) if isinstance(leaf, dict) else ()
        inside.append(leaf)
        opened = {n: pytree.tree_map(visit, v, is_leaf=is_record) for n, v in fields.items()}
        inside.pop()
        return Record(type(leaf), opened, keys)

    return pytree.tree_map(visit, tree, is_leaf=is_record)


def as_call(
    example_inputs: Any, example_kwargs: Mapping[str, Any] | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of an example batch.

    A tensor is one positional argument, a tuple or list are the positional ones, a dict the
    keyword ones.

    Raises:
        CaptureError: `example_inputs` is something else, or a keyword is given twice.
    """
    if not isinstance(example_kwargs, (Mapping, type(None))):
        raise CaptureError(
            f"Keyword inputs must be a dict of names and values, got "
            f"{type(example_kwargs).__name__}. Give positional ones as example_inputs."
        )
    extra = dict(example_kwargs or {})
    if isinstance(example_inputs, Mapping) and type(example_inputs) is not torch.Tensor:
        twice = sorted(set(example_inputs) & set(extra))
        if twice:
            raise CaptureError(f"Keyword inputs must be given once: {twice[0]!r} is in both.")
        return (), {**example_inputs, **extra}
    if isinstance(example_inputs, (tuple, list)) and not hasattr(example_inputs, "_fields"):
        return tuple(example_inputs), extra
    return (example_inputs,), extra


def flatten_batch(
    example_inputs: Any, example_kwargs: Mapping[str, Any] | None = None
) -> tuple[list[Any], Any]:
    """Flatten a batch as capture does: leaves, and the torch pytree spec of `(args, kwargs)`.

    Raises:
        CaptureError: A leaf is a container torch's pytree does not know.
    """
    return flatten_opened(open_dataclasses(as_call(example_inputs, example_kwargs)))


def flatten_opened(call: tuple[Any, Any]) -> tuple[list[Any], Any]:
    """As `flatten_batch`, of `(args, kwargs)` whose dataclasses are open.

    Raises:
        CaptureError: A leaf is a container torch's pytree does not know.
    """
    leaves, spec = pytree.tree_flatten(call)
    for leaf in leaves:
        check_leaf(leaf, "Inputs")
    return leaves, spec


def check_leaf(leaf: Any, what: str) -> None:
    """Refuse arrays, data loaders, and containers that hide tensors from torch's pytree.

    Raises:
        CaptureError: Says how to register the class, convert the array, or take a batch.
    """
    if isinstance(leaf, (torch.Tensor, *_PLAIN)):
        return
    kind, is_input = type(leaf), what == "Inputs"
    if hasattr(kind, "__next__") or hasattr(leaf, "batch_sampler"):
        raise CaptureError(
            f"Inputs must be one batch, got a {kind.__name__}. Take one out of it: "
            f"next(iter(loader))."
            if is_input
            else f"Outputs must be tensors, got a {kind.__name__}. Return a tuple or a list."
        )
    if isinstance(leaf, torch.nn.Module):
        raise CaptureError(
            f"{what} must be tensors, got a module of {kind.__name__}. Name it in the loss "
            f"function, or make it a part of the model."
        )
    if hasattr(leaf, "__array__") and getattr(leaf, "ndim", 0) > 0:
        raise CaptureError(
            f"{what} must be tensors: one is of class {kind.__module__}."
            f"{kind.__name__}. Convert it with torch.as_tensor."
        )
    if _holds_tensors(leaf):
        raise CaptureError(
            f"{what} must be tensors in tuples, lists, dicts or dataclasses: {kind.__name__!r} "
            f"holds tensors but is unknown to torch. {_registration(leaf, is_input)}"
        )


def _holds_tensors(value: Any) -> bool:
    """Whether tensors are in an object, or in objects in it, as far as can be seen."""
    todo, seen = [value], {id(value)}
    while todo and len(seen) < _MAX_OBJECTS:
        for part in _inside(todo.pop()):
            if isinstance(part, torch.Tensor):
                return True
            if id(part) not in seen and not isinstance(part, (*_PLAIN, type)):
                seen.add(id(part))
                todo.append(part)
    return False


def _inside(value: Any) -> list[Any]:
    if isinstance(value, (types.ModuleType, types.FunctionType)):
        return []
    inside = list(getattr(value, "__dict__", {}).values())
    inside += [getattr(value, n, None) for n in getattr(type(value), "__slots__", ())]
    if isinstance(value, Mapping):
        inside += value.values()
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        inside += value
    return inside


def _registration(value: Any, is_input: bool) -> str:
    """What makes a container known to torch, or an ordinary one of it."""
    name = type(value).__name__
    verb = "Pass" if is_input else "Return"
    convert, flatten, build = "", "([x.a, x.b], None)", f"lambda values, _: {name}(*values)"
    if isinstance(value, Mapping):
        convert, flatten = f"{verb} dict(...) of it, or register it", "(list(x.values()), list(x))"
        build = f"lambda values, keys: {name}(zip(keys, values))"
    elif isinstance(value, (list, tuple)):
        plain = "tuple" if isinstance(value, tuple) else "list"
        convert, flatten = f"{verb} {plain}(...) of it, or register it", "(list(x), None)"
        build = f"lambda values, _: {name}(values)"
    return (
        f"{convert or 'Register it'}: torch.utils._pytree.register_pytree_node({name}, "
        f"lambda x: {flatten}, {build})."
    )


@dataclass(frozen=True)
class Batch:
    """A flattened example batch.

    Attributes:
        leaves: Tensors and constants.
        spec: torch pytree spec of `(args, kwargs)`.
        names: Name of each leaf, such as `0`, `1.mask`, `x`.
        sizes: Rows per micro-batch; empty when there is one.
        dims: Per leaf the dimension it is cut along, or None.
    """

    leaves: list[Any]
    spec: Any
    names: list[str]
    sizes: tuple[int, ...]
    dims: tuple[int | None, ...]

    @property
    def is_cut(self) -> bool:
        """Whether there are several micro-batches."""
        return bool(self.sizes)

    @property
    def shares(self) -> list[float]:
        """Part of the rows that each micro-batch has."""
        return [size / sum(self.sizes) for size in self.sizes]

    def whole(self) -> Batch:
        """The same batch as one."""
        return replace(self, sizes=(), dims=(None,) * len(self.leaves))

    @property
    def tensor_slots(self) -> list[int]:
        """Indices of the leaves that are tensors."""
        return [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]


def make_batch(
    example_inputs: Any,
    example_kwargs: Mapping[str, Any] | None,
    micro_batches: int,
    batch_dims: BatchDims | None = None,
) -> Batch:
    """Flatten the example inputs and decide how they are cut.

    Raises:
        CaptureError: Unknown containers, more micro-batches than rows, or names and dimensions
            in `batch_dims` that are not there.
    """
    leaves, spec = flatten_batch(example_inputs, example_kwargs)
    args, kwargs = open_dataclasses(as_call(example_inputs, example_kwargs))
    top = [*((str(i), arg) for i, arg in enumerate(args)), *kwargs.items()]
    names = [name for key, tree in top for name in leaf_names(key, tree)]
    for name, leaf in zip(names, leaves, strict=True):
        if isinstance(leaf, torch.Tensor) and (leaf.layout != torch.strided or leaf.is_nested):
            kind = "nested" if leaf.is_nested else leaf.layout
            raise CaptureError(f"Inputs must be dense: {name!r} is {kind}. Make it a dense tensor.")
    sizes, dims = cut_inputs(names, leaves, micro_batches, batch_dims)
    return Batch(leaves, spec, names, sizes, dims)


def num_rows(
    example_inputs: Any,
    example_kwargs: Mapping[str, Any] | None = None,
    batch_dims: BatchDims | None = None,
) -> int:
    """Rows of a batch.

    Raises:
        CaptureError: No input has rows, or inputs have different ones.
    """
    batch = make_batch(example_inputs, example_kwargs, 1, batch_dims)
    return row_dims(batch.names, batch.leaves, batch_dims)[0]


def with_rows(
    rows: int,
    example_inputs: Any,
    example_kwargs: Mapping[str, Any] | None = None,
    batch_dims: BatchDims | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The shapes of a batch with another number of rows: positional and keyword inputs, of which
    those that have rows are on the meta device.

    Raises:
        CaptureError: No input has rows, or inputs have different ones.
    """
    batch = make_batch(example_inputs, example_kwargs, 1, batch_dims)
    _, dims = row_dims(batch.names, batch.leaves, batch_dims)
    leaves = [
        leaf if dim is None else _with_length(leaf, dim, rows)
        for leaf, dim in zip(batch.leaves, dims, strict=True)
    ]
    args, kwargs = pytree.tree_unflatten(leaves, batch.spec)
    return args, kwargs


def _with_length(leaf: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    index = torch.zeros(length, dtype=torch.int64, device="meta")
    made = leaf.detach().to("meta").index_select(dim, index)
    return made.requires_grad_(leaf.requires_grad)


def leaf_names(prefix: str, tree: Any) -> list[str]:
    """Dotted name of every leaf of a tree, in flattening order, such as `x.mask.0`."""
    try:
        paths = [_path_text(path) for path, _ in pytree.tree_flatten_with_path(tree)[0]]
    except ValueError:  # a registered class without names for its parts
        paths = [str(i) for i in range(len(pytree.tree_leaves(tree)))]
    return [f"{prefix}.{path}" if path else prefix for path in paths]


def _path_text(path: tuple[Any, ...]) -> str:
    parts = []
    for key in path:
        known = [getattr(key, a) for a in ("key", "idx", "name") if hasattr(key, a)]
        parts.append(str(known[0] if known else key))
    return ".".join(parts)
