"""Inference graphs from ONNX files; nothing is run, sizes come from ONNX's shape inference."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from devplace.errors import GraphError, InputError
from devplace.graph.graph import Op, OpGraph, Role, StepResult, Tensor
from devplace.graph.onnx_worker import read_in_child

# Outputs share the memory of the first input.
_VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"})
# fmt: off
_NO_ARITHMETIC = frozenset({
    "Cast", "Concat", "ConstantOfShape", "Constant", "Expand", "Gather", "GatherElements",
    "GatherND", "Pad", "Range", "ScatterElements", "ScatterND", "Shape", "Size", "Slice",
    "Split", "Tile", "Transpose", "Where", "OneHot", "Trilu", "EyeLike", "NonZero",
})
# fmt: on
_PICKS_ROWS = frozenset({"Gather", "GatherElements", "GatherND", "Slice"})
_BODIES = frozenset({"If", "Loop", "Scan"})
_RANDOM = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial"}
)


def read_onnx(path: str | Path, batch: int | None = None) -> OpGraph:
    """An inference step from an ONNX file, read by another process: ONNX's own code aborts on some
    damaged files.

    Weights are read-only sources, `Reshape` and its like are views, all other nodes ops. Flops are
    counted for convolutions, matrix products and recurrent layers; one per element for the rest.

    Args:
        path: The file; weights in files beside it are not read.
        batch: Size of every input's first dimension that the file leaves open.

    Raises:
        InputError: No readable ONNX model, a size that is open or cannot be inferred, a node with
            a body (`If`, `Loop`, `Scan`), or the `onnx` extra is missing.
    """
    if batch is not None and not 0 < batch < 2**63:
        raise InputError(f"The batch must be from 1 to 2^63 - 1, got {batch}.")
    return read_in_child(str(path), batch)


def read_here(path: str, batch: int | None = None) -> OpGraph:
    """As `read_onnx`, in this process."""
    model = _load(path)
    _check_names(model.graph, path)
    _close(model.graph, path, batch)
    model = _with_shapes(model, path)
    return _Builder(model, path).graph()


def _onnx() -> Any:
    try:
        import onnx
        import onnx.shape_inference
    except ImportError as error:
        raise InputError(
            "Reading ONNX files needs the package onnx: pip install 'devplace[onnx]'."
        ) from error
    return onnx


def _load(path: str) -> Any:
    onnx = _onnx()
    try:
        return onnx.load(path, load_external_data=False)
    except OSError as error:
        raise InputError(f"Cannot read {path}: {error.strerror}. Check the path.") from error
    except Exception as error:  # protobuf's decode errors have no common public base
        text = " ".join(str(error).split())[:120]
        raise InputError(f"{path} is not a whole ONNX model: {text}. Export it again.") from error


def _check_names(graph: Any, path: str) -> None:
    """Protobuf gives bytes for a name that is not UTF-8."""
    names = [graph.name, *(each.name for each in (*graph.initializer, *graph.input))]
    names += [value.name for value in (*graph.output, *graph.value_info)]
    for node in graph.node:
        names += [node.name, node.op_type, node.domain, *node.input, *node.output]
        names += [attribute.name for attribute in node.attribute]
    wrong = next((name for name in names if not isinstance(name, str)), None)
    if wrong is not None:
        raise InputError(f"{path}: the name {wrong!r} is not UTF-8. Export the model again.")


def _close(graph: Any, path: str, batch: int | None) -> None:
    """Give every input's open first dimension the batch; no other may be open."""
    weights = {weight.name for weight in graph.initializer}
    for value in graph.input:
        for place, dim in enumerate(value.type.tensor_type.shape.dim):
            if value.name in weights or dim.dim_value > 0:
                continue
            if place == 0 and batch is not None:
                dim.dim_value = batch
                continue
            remedy = "Give --batch." if place == 0 else "Export the model with fixed sizes."
            raise InputError(
                f"{path}: dimension {place} of input {value.name!r} is open "
                f"({dim.dim_param or 'no name'}); a plan is for fixed sizes. {remedy}"
            )


def _with_shapes(model: Any, path: str) -> Any:
    onnx = _onnx()
    del model.graph.value_info[:]  # they may tell of open sizes
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    try:
        return onnx.shape_inference.infer_shapes(model, check_type=True, data_prop=True)
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        raise InputError(f"{path}: its sizes do not fit together: {text}.") from error


class _Builder:
    """Ops and tensors in the order of the file, which ONNX says is topological."""

    def __init__(self, model: Any, path: str) -> None:
        onnx = _onnx()
        self.path, self.model, self.source = path, model, model.graph
        self.dtypes = {
            number: str(onnx.helper.tensor_dtype_to_np_dtype(number)).lower()
            for number in onnx.TensorProto.DataType.values()
            if number not in (onnx.TensorProto.UNDEFINED, onnx.TensorProto.STRING)
        }
        self.kinds = _declared(model.graph)
        self.ops: list[Op] = []
        self.tensors: list[Tensor] = []
        self.ids: dict[str, int] = {}
        self.names: set[str] = set()

    def graph(self) -> OpGraph:
        """The whole graph."""
        weights = {weight.name for weight in self.source.initializer}
        for weight in self.source.initializer:
            self._add_source(weight.name, "parameter", tuple(weight.dims), weight.data_type)
        for value in self.source.input:
            if value.name not in weights:
                shape, dtype = self._kind(value.name, "the graph's input")
                self._add_source(value.name, "input", shape, dtype)
        for number, node in enumerate(self.source.node):
            self._add(number, node)
        results = tuple(
            StepResult(value.name, self._id(value.name, "the graph's output"), "output")
            for value in self.source.output
        )
        meta = {"mode": "inference", "format": "onnx", "device": "cpu"}
        if not any(not op.is_source for op in self.ops):
            raise InputError(f"{self.path} computes nothing: it has no nodes.")
        try:
            name = self.source.name or Path(self.path).stem
            return OpGraph(name, tuple(self.ops), tuple(self.tensors), results, meta)
        except GraphError as error:
            raise InputError(f"{self.path}: {error}") from error

    def _add(self, number: int, node: Any) -> None:
        name = self._unique(node.name or f"{node.op_type}_{number}")
        if node.op_type in _BODIES:
            raise InputError(
                f"{self.path}: node {name!r} is {_article(node.op_type)}, whose body is a graph of "
                f"its own; only flat graphs can be placed. Export the model without it."
            )
        made = [output for output in node.output if output]
        if node.op_type == "Constant" and made:
            shape, dtype = self._kind(made[0], name)
            self._add_source(made[0], "constant", shape, dtype)
            return
        reads = [self._id(given, f"node {name!r}") for given in node.input if given]
        inputs = tuple(dict.fromkeys(reads))
        is_view = node.op_type in _VIEWS and bool(reads)
        outputs = tuple(self._tensor(output, *self._kind(output, name)) for output in made)
        read = sum(self.tensors[t].num_bytes for t in inputs)
        written = sum(self.tensors[t].num_bytes for t in outputs)
        if node.op_type in ("Shape", "Size"):
            read = 0
        elif node.op_type in _PICKS_ROWS:
            read = written + sum(self.tensors[t].num_bytes for t in inputs[1:])
        self.ops.append(
            Op(
                name=name,
                target=_target(node),
                inputs=inputs,
                outputs=outputs,
                alias_of=reads[0] if is_view else -1,
                flops=0 if is_view else self._flops(node, reads, outputs),
                bytes_read=0 if is_view else read,
                bytes_written=0 if is_view else written,
                module=module_of(node.name),
                is_random=node.op_type in _RANDOM,
            )
        )

    def _add_source(self, name: str, role: Role, shape: Sequence[int], dtype: int) -> None:
        outputs = (self._tensor(name, shape, dtype),)
        op = Op(
            name=self._unique(name), target="source", outputs=outputs, stage="source", role=role
        )
        self.ops.append(op)

    def _unique(self, name: str) -> str:
        """The name, with a number behind it if another op has it."""
        found, number = name, 1
        while found in self.names:
            found, number = f"{name}#{number}", number + 1
        self.names.add(found)
        return found

    def _tensor(self, name: str, shape: Sequence[int], dtype: int) -> int:
        if name in self.ids:
            raise InputError(f"{self.path}: tensor {name!r} is made twice. Export it again.")
        kind = self.dtypes.get(dtype)
        if kind is None:
            raise InputError(f"{self.path}: tensor {name!r} has no numbers in it (type {dtype}).")
        if min(shape, default=0) < 0:
            raise InputError(f"{self.path}: tensor {name!r} has a negative size: {list(shape)}.")
        size = math.prod(shape) * _bits(kind) // 8
        self.ids[name] = len(self.tensors)
        self.tensors.append(Tensor(name, tuple(shape), kind, size))
        return self.ids[name]

    def _id(self, name: str, reader: str) -> int:
        if name not in self.ids:
            raise InputError(
                f"{self.path}: {reader} reads {name!r}, which nothing before it makes. "
                f"Export the model again."
            )
        return self.ids[name]

    def _kind(self, name: str, maker: str) -> tuple[tuple[int, ...], int]:
        """Shape and dtype of a tensor."""
        found = self.kinds.get(name)
        dims = [] if found is None else list(found.shape.dim)
        has_shape = found is not None and found.HasField("shape")
        if (
            found is None
            or not has_shape
            or any(dim.WhichOneof("value") != "dim_value" for dim in dims)
        ):
            raise InputError(
                f"{self.path}: the size of {name!r}, made by {maker!r}, cannot be inferred. "
                f"Export the model with fixed sizes, or fold its constants."
            )
        return tuple(dim.dim_value for dim in dims), found.elem_type

    def _flops(self, node: Any, reads: Sequence[int], outputs: Sequence[int]) -> int:
        shapes = [self.tensors[t].shape for t in reads]
        made = self.tensors[outputs[0]].shape if outputs else ()
        options = {attribute.name: attribute for attribute in node.attribute}
        try:
            counted = _counted(node.op_type, shapes, made, options)
        except (IndexError, ValueError):
            raise InputError(
                f"{self.path}: {_article(node.op_type)} takes other inputs than {node.name!r} has: "
                f"{[list(shape) for shape in shapes]}. Export the model again."
            ) from None
        if counted is not None:
            return counted
        if node.op_type in _NO_ARITHMETIC or not outputs:
            return 0
        if not self.tensors[outputs[0]].dtype.startswith(("float", "bfloat")):
            return 0
        return max(math.prod(shape) for shape in [*shapes, made])


def _declared(graph: Any) -> Mapping[str, Any]:
    """Tensor types by name, of inputs, outputs and everything inferred."""
    values = [*graph.output, *graph.value_info, *graph.input]
    return {value.name: value.type.tensor_type for value in values}


def _counted(
    kind: str, shapes: Sequence[Sequence[int]], made: Sequence[int], options: Mapping[str, Any]
) -> int | None:
    """Flops by formula (a multiply-add counts two), or None."""
    if kind in ("Conv", "ConvInteger", "QLinearConv"):
        weight = shapes[3 if kind == "QLinearConv" else 1]
        return 2 * math.prod(made) * math.prod(weight[1:])
    if kind == "ConvTranspose":
        return 2 * math.prod(shapes[0]) * math.prod(shapes[1][1:])
    if kind in ("MatMul", "MatMulInteger"):
        return 2 * math.prod(made) * (shapes[0][-1] if shapes[0] else 1)
    if kind == "Gemm":
        transposed = "transA" in options and options["transA"].i
        return 2 * math.prod(made) * shapes[0][0 if transposed else -1]
    if kind in ("LSTM", "GRU", "RNN"):
        steps, batch = shapes[0][:2]
        return 2 * steps * batch * sum(math.prod(shape) for shape in shapes[1:3])
    if kind == "Attention" and len(shapes) > 2 and len(shapes[0]) == 4:
        query, key, value = shapes[:3]
        return 2 * math.prod(query[:3]) * key[2] * (query[3] + value[3])
    return None


def _bits(dtype: str) -> int:
    """Bits of one number."""
    if dtype == "bool":
        return 8
    if dtype.startswith("float8"):
        return 8
    found = re.search(r"(\d+)", dtype)
    return int(found.group(1)) if found else 8


def _target(node: Any) -> str:
    """Name of an op such as `onnx.max_pool`; convolutions have torch's name, by which costs go."""
    name = {"Conv": "Convolution"}.get(node.op_type, node.op_type)
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
    return f"{node.domain or 'onnx'}.{words}"


def module_of(name: str) -> str:
    """Module path in a node's name as torch's exporter gives it.

    Example:
        >>> module_of("/layer1/layer1.0/conv1/Conv"), module_of("Conv_3")
        ('layer1.0.conv1', '')
    """
    path = ""
    for part in name.split("/")[1:-1] if name.startswith("/") else ():
        is_longer = path and part.startswith(f"{path.rpartition('.')[2]}.")
        if is_longer:
            path = ".".join(filter(None, [path.rpartition(".")[0], part]))
        else:
            path = f"{path}.{part}" if path else part
    return path


def _article(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"
