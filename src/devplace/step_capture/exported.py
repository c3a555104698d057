"""Inference graphs from saved torch exports (`.pt2`); nothing is run."""

from __future__ import annotations

import logging
import math
import operator
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.export.graph_signature import InputKind, OutputKind

from devplace.errors import GraphError, InputError
from devplace.graph.graph import Op, OpGraph, Role, StepResult, Tensor
from devplace.step_capture.analysis import (
    count_flops,
    is_fusible,
    is_random,
    reads_rows_only,
    tensors_in,
    view_bases,
)
from devplace.step_capture.archive import load_program

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_ROLES: dict[Any, Role] = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
    InputKind.USER_INPUT: "input",
}


def read_pt2(path: str | Path) -> OpGraph:
    """An inference step from a file of `torch.export.save`.

    Composite ops are taken apart as capture does. Open sizes have the value they were exported
    with. Nothing in the file is run: what would have to be is refused.

    Raises:
        InputError: No readable export, one of a torch that this one cannot read, a size that is
            known only when it runs, or a node with a body.
    """
    program = _load(str(path))
    return _Builder(program, str(path)).graph()


def _load(path: str) -> Any:
    if not Path(path).is_file():
        raise InputError(f"There is no file {path!r}. Check the path.")
    try:
        with warnings.catch_warnings(), _silent_logs():
            warnings.simplefilter("ignore")  # torch's own, of its own older forms
            program = load_program(path)
            table = torch.export.default_decompositions()
            table.pop(_ATTENTION, None)  # one kernel on every device
            return program.run_decompositions(table)
    except Exception as error:  # zip, JSON, schema and version errors have no common base
        text = " ".join(str(error).split())[:160]
        raise InputError(
            f"{path} is no export that torch {torch.__version__} can read: {text}. "
            f"Save it again with torch.export.save."
        ) from error


@contextmanager
def _silent_logs() -> Iterator[None]:
    """Holds back torch's logs: it tells there, with a traceback, what is wrong with a damaged file,
    and then raises it."""
    logs = [logging.getLogger(name) for name in logging.root.manager.loggerDict]
    logs = [log for log in logs if log.name.partition(".")[0] == "torch"]

    def hold(record: logging.LogRecord) -> bool:
        return False

    for log in logs:
        log.addFilter(hold)
    try:
        yield
    finally:
        for log in logs:
            log.removeFilter(hold)


class _Builder:
    def __init__(self, program: Any, path: str) -> None:
        self.program, self.path = program, path
        self.ops: list[Op] = []
        self.tensors: list[Tensor] = []
        self.made: dict[Any, tuple[int, ...]] = {}

    def graph(self) -> OpGraph:
        """The whole graph."""
        kinds = {spec.arg.name: spec for spec in self.program.graph_signature.input_specs}
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                self._add_source(node, kinds[node.name])
            elif node.op == "call_function":
                self._add(node)
        meta = {"mode": "inference", "format": "pt2", "device": "cpu"}
        meta["torch"] = str(torch.__version__)
        try:
            return OpGraph(
                Path(self.path).stem, tuple(self.ops), tuple(self.tensors), self._results(), meta
            )
        except GraphError as error:
            raise InputError(f"{self.path}: {error}") from error

    def _add_source(self, node: Any, spec: Any) -> None:
        if not tensors_in(node.meta.get("val")):
            return  # a number or a flag, fixed by the export
        name = str(spec.target or node.name)
        outputs = self._tensors(node, name)
        self.ops.append(
            Op(
                name=name,
                target="source",
                outputs=outputs,
                stage="source",
                role=_ROLES.get(spec.kind, "constant"),
                module=name.rpartition(".")[0] if spec.target else "",
            )
        )

    def _add(self, node: Any) -> None:
        values = tensors_in(node.meta.get("val"))
        if not values:
            return  # sizes and checks
        if node.target is operator.getitem:
            self.made[node] = self._picked(node)
            return
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            raise InputError(
                f"{self.path}: node {node.name!r} ({node.target}) has a body that is a graph of "
                f"its own; only flat graphs can be placed. Export the model without it."
            )
        inputs = tuple(dict.fromkeys(t for n in node.all_input_nodes for t in self._of(n)))
        bases = [t for base in view_bases(node) for t in self._of(base)]
        outputs = self._tensors(node, node.name)
        is_view = bool(bases)
        read = sum(self.tensors[t].num_bytes for t in inputs)
        written = sum(self.tensors[t].num_bytes for t in outputs)
        if reads_rows_only(node) and inputs:
            read += written - self.tensors[inputs[0]].num_bytes
        self.ops.append(
            Op(
                name=node.name,
                target=str(node.target),
                inputs=inputs,
                outputs=outputs,
                alias_of=bases[0] if is_view else -1,
                flops=0 if is_view else self._flops(node),
                bytes_read=0 if is_view else max(0, read),
                bytes_written=0 if is_view else written,
                module=_module(node),
                is_random=is_random(node),
                is_fusible=not is_view and is_fusible(node),
            )
        )

    def _flops(self, node: Any) -> int:
        if node.target is _ATTENTION:
            query, key, value = (n.meta["val"].shape for n in node.args[:3])
            sizes = [self._size(size, node.name) for size in (*query[:-1], key[-2])]
            return 2 * math.prod(sizes) * int(query[-1] + value[-1])
        try:
            return count_flops(node)
        except (TypeError, ValueError, IndexError, RuntimeError):
            return 0  # a formula that this torch has for other arguments

    def _of(self, node: Any) -> tuple[int, ...]:
        return self.made.get(node, ())

    def _picked(self, node: Any) -> tuple[int, ...]:
        """One of several outputs: those of its maker are counted over tensors only."""
        maker, place = node.args
        value = maker.meta["val"]
        before = len(tensors_in(list(value[:place])))
        return self._of(maker)[before : before + 1]

    def _tensors(self, node: Any, name: str) -> tuple[int, ...]:
        values = tensors_in(node.meta["val"])
        first = len(self.tensors)
        for k, value in enumerate(values):
            shape = tuple(self._size(size, name) for size in value.shape)
            count = 1
            for size in shape:
                count *= size
            self.tensors.append(
                Tensor(
                    name if len(values) == 1 else f"{name}:{k}",
                    shape,
                    str(value.dtype).removeprefix("torch."),
                    count * value.dtype.itemsize,
                )
            )
        self.made[node] = tuple(range(first, len(self.tensors)))
        return self.made[node]

    def _size(self, size: Any, name: str) -> int:
        """A size, or the one it was exported with."""
        if isinstance(size, int):
            return size
        hint = getattr(size.node, "hint", None)
        if hint is None:
            raise InputError(
                f"{self.path}: a size of {name!r} is known only when it runs ({size}). "
                f"Export the model with fixed sizes."
            )
        return int(hint)

    def _results(self) -> tuple[StepResult, ...]:
        (output,) = [node for node in self.program.graph.nodes if node.op == "output"]
        specs: Sequence[Any] = self.program.graph_signature.output_specs
        names = {op.name: index for index, op in enumerate(self.ops) if op.is_source}
        results = []
        for number, (node, spec) in enumerate(zip(output.args[0], specs, strict=True)):
            made = self._of(node) if isinstance(node, torch.fx.Node) else ()
            if not made:
                continue
            if spec.kind == OutputKind.BUFFER_MUTATION:
                target = str(spec.target)
                results.append(StepResult(target, made[0], "buffer", names.get(target, -1)))
            else:
                results.append(StepResult(f"output_{number}", made[0], "output"))
        return tuple(results)


def _module(node: Any) -> str:
    """Path of the innermost module the node came from."""
    stack = node.meta.get("nn_module_stack") or {}
    path = [str(entry[0]) for entry in stack.values()]
    return path[-1].removeprefix("L['self'].").removeprefix("L['self']") if path else ""
