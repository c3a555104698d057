"""A saved torch export (`.pt2`) as a program; nothing in the file is run.

`torch.export.load` unpickles the sample inputs and some constants, imports modules that the file
names, and evaluates its expressions of sizes. Here only the graph and the shapes of the weights are
read, both JSON, and what torch would call or evaluate in them is checked before torch sees it.
"""

from __future__ import annotations

import ast
import io
import json
import operator
import zipfile
from collections.abc import Iterator
from typing import Any

import torch
from torch._export.serde import schema, serialize
from torch.utils._pytree import tree_structure, treespec_dumps

MAX_JSON_BYTES = 10**9
_GRAPHS = ("models/model.json", "serialized_exported_program.json")
# fmt: off
_SIZES = frozenset({
    "Abs", "Add", "And", "CeilDiv", "CeilToInt", "CleanDiv", "Eq", "Equality", "false", "Float",
    "FloatPow", "FloatTrueDiv", "FloorDiv", "FloorToInt", "Ge", "GreaterThan", "Gt", "Identity",
    "Integer", "IntTrueDiv", "IsNonOverlappingAndDenseIndicator", "Le", "LessThan", "Lt", "Max",
    "Min", "Mod", "ModularIndexing", "Mul", "Ne", "Not", "Or", "Pow", "PowByNatural", "PythonMod",
    "Rational", "RoundDecimal", "RoundToInt", "StrictGreaterThan", "StrictLessThan", "Symbol",
    "ToFloat", "true", "TruncToFloat", "TruncToInt", "Unequality", "Where", "ceiling", "floor",
})
# fmt: on
_NODES = (
    *(ast.Expression, ast.Call, ast.Name, ast.Load, ast.Constant, ast.keyword, ast.UnaryOp),
    *(ast.USub, ast.UAdd, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Compare, ast.Lt, ast.LtE),
    *(ast.Gt, ast.GtE, ast.Eq, ast.NotEq),
)
_MAX_POWERS, _LONGEST = 4, 10_000


def load_program(path: str) -> Any:
    """The exported program of a file, with weights of the right shapes but without values.

    Raises:
        ValueError: Something in it is run when it is read, or it lacks what a plan needs.
        OSError, zipfile.BadZipFile: It cannot be read.
        Exception: Whatever torch raises for a file it cannot make sense of.
    """
    with zipfile.ZipFile(path) as archive:
        files = _Files(archive)
        graph = next((name for name in _GRAPHS if name in files), None)
        if graph is None:
            raise ValueError("it has no graph of a model")
        data = files.json(graph)
        if not isinstance(data, dict) or not isinstance(data.get("graph_module"), dict):
            raise ValueError("its graph is no JSON object with a graph_module")
        _make_plain(data)
        _check(data)
        if graph == _GRAPHS[0]:
            weights = _shapes(files, "data/weights/", "model_weights_config.json")
            constants = _shapes(files, "data/constants/", "model_constants_config.json")
        else:  # of torch 2.7 and before
            weights = _tensors(files.bytes("serialized_state_dict.pt"))
            constants = _tensors(files.bytes("serialized_constants.pt"))
    stored = serialize._dict_to_dataclass(schema.ExportedProgram, data)
    program = serialize.ExportedProgramDeserializer().deserialize(stored, weights, constants, None)
    _check_weights(program, {**weights, **constants})
    return program


class _Files:
    """Files of an archive by their names within its one folder."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        names = archive.namelist()
        folder = f"{names[0].partition('/')[0]}/" if names and "/" in names[0] else ""
        self._entries = {entry.filename.removeprefix(folder): entry for entry in archive.infolist()}

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def bytes(self, name: str) -> bytes:
        """The content of a file."""
        if name not in self._entries:
            raise ValueError(f"it has no {name}")
        with self._archive.open(self._entries[name]) as file:
            data = file.read(MAX_JSON_BYTES + 1)
        if len(data) > MAX_JSON_BYTES:
            raise ValueError(f"its {name} has more than {MAX_JSON_BYTES // 10**9} GB")
        return data

    def json(self, name: str) -> Any:
        """A file of JSON."""
        try:
            return json.loads(self.bytes(name))
        except RecursionError:
            raise ValueError(f"its {name} is nested too deeply") from None


def _shapes(files: _Files, folder: str, config: str) -> dict[str, Any]:
    """Tensors without values, as a list of weights or constants describes them."""
    payload = serialize._dict_to_dataclass(schema.PayloadConfig, files.json(folder + config))
    found: dict[str, Any] = {}
    for name, entry in payload.config.items():
        about = entry.tensor_meta
        if entry.use_pickle or about is None:
            stored = files.bytes(folder + entry.path_name)
            if not entry.path_name.startswith(("tensor_", "weight_")):
                raise ValueError(f"{name!r} is an object that only its own code can read")
            value = torch.load(io.BytesIO(stored), map_location="cpu", weights_only=True)
        else:
            value = torch.empty_strided(
                tuple(serialize.deserialize_size(about.sizes)),
                tuple(serialize.deserialize_stride(about.strides)),
                dtype=serialize.deserialize_scalar_type(about.dtype),
                device=serialize.deserialize_device(about.device),
            )
        found[name] = torch.nn.Parameter(value, about.requires_grad) if entry.is_param else value
    return found


def _tensors(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True) if data else {}


def _check_weights(program: Any, weights: dict[str, Any]) -> None:
    """Weights have the sizes that the graph says."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    for spec in program.graph_signature.input_specs:
        known, value = weights.get(spec.target), nodes[spec.arg.name].meta.get("val")
        if not isinstance(known, torch.Tensor) or not isinstance(value, torch.Tensor):
            continue
        if (known.shape, known.dtype) != (value.shape, value.dtype):
            sizes = f"{tuple(value.shape)} in the graph and {tuple(known.shape)} among the weights"
            raise ValueError(f"{spec.target!r} is {sizes}")


def _make_plain(data: Any) -> None:
    """Put flat tuples in place of the structure of inputs and outputs, which may name modules and
    classes that torch imports, and drop guards, which are Python."""
    module = data["graph_module"]
    inputs = [_name(spec) for spec in module["signature"]["input_specs"] if _is_given(spec)]
    outputs = [spec for spec in module["signature"]["output_specs"] if "user_output" in spec]
    taken = treespec_dumps(tree_structure(((0,) * len(inputs), {})))
    made = treespec_dumps(tree_structure((0,) * len(outputs)))
    whole = {"inputs": [], "outputs": [], "in_spec": taken, "out_spec": made}
    module["module_call_graph"] = [{"fqn": "", "signature": {**whole, "forward_arg_names": inputs}}]
    module["treespec_namedtuple_fields"] = {}
    data["guards_code"] = []


def _is_given(spec: Any) -> bool:
    return "user_input" in spec or "constant_input" in spec


def _name(spec: Any) -> str:
    """Name of what the caller gives."""
    if "constant_input" in spec:
        return str(spec["constant_input"]["name"])
    (about,) = spec["user_input"]["arg"].values()
    return str(about.get("name", about.get("as_name", "input")))


def _check(data: Any) -> None:
    """Refuse what torch would run: calls of anything but ops, and sizes that are no arithmetic."""
    for key, value in _texts(data):
        if key == "target" and not _is_op(value):
            raise ValueError(f"it calls {value!r}, which is no op that torch knows")
        if key == "as_operator" and not _is_op(value):
            raise ValueError(f"it passes on {value!r}, which is no op that torch knows")
        if key == "expr_str":
            _check_size(value)


def _texts(data: Any) -> Iterator[tuple[str, str]]:
    """All texts with their keys, however deep they lie."""
    left = [data]
    while left:
        item = left.pop()
        if isinstance(item, list):
            left += item
        elif isinstance(item, dict):
            for key, value in item.items():
                if isinstance(value, str):
                    yield key, value
                else:
                    left.append(value)


def _is_op(text: str) -> bool:
    """Whether what torch would look up by this name can only compute."""
    if text.startswith("#"):
        return False
    try:
        found = serialize.GraphModuleDeserializer().deserialize_operator(text)
    except Exception:  # names of ops are looked up by code of torch's libraries
        return False
    if isinstance(found, torch._ops.OpOverload):  # TorchScript's ops, such as `aten::save`, are not
        return bool(torch._C._dispatch_has_kernel(found.name()))
    if isinstance(found, torch._ops.HigherOrderOperator):
        return True
    return found is operator.getitem or any(found is op for op in serialize._SYM_OPS)


def _check_size(text: str) -> None:
    """Sizes are expressions that SymPy evaluates as Python."""
    try:
        tree = ast.parse(text, mode="eval") if len(text) < _LONGEST else None
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        tree = None
    nodes = [] if tree is None else list(ast.walk(tree))
    names = [node.id for node in nodes if isinstance(node, ast.Name)]
    calls = [node.func for node in nodes if isinstance(node, ast.Call)]
    texts = [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    is_plain = (
        bool(nodes)
        and all(isinstance(node, _NODES) for node in nodes)
        and all(isinstance(call, ast.Name) and call.id in _SIZES for call in calls)
        and all(name in _SIZES or _is_symbol(name) for name in names)
        and all(_is_symbol(name) or name.replace(".", "").isdecimal() for name in texts)
        and sum(name in ("Pow", "PowByNatural", "FloatPow") for name in names) <= _MAX_POWERS
    )
    if not is_plain:
        raise ValueError(f"the size {text[:60]!r} is no arithmetic on sizes")


def _is_symbol(name: str) -> bool:
    return name.isidentifier() and name.isascii() and "__" not in name
