"""Graphs made by hand, a line for each op."""

from __future__ import annotations

from typing import Any

from devplace.graph import Op, OpGraph, StepResult, Tensor

BYTES = 4000


class Made:
    """A graph that grows op by op; ops are named by the tensor they make."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.tensors: list[Tensor] = []
        self.results: list[StepResult] = []

    def _add(self, name: str, reads: tuple[str, ...], num_bytes: int, fields: Any) -> None:
        ids = {tensor.name: k for k, tensor in enumerate(self.tensors)}
        inputs = tuple(ids[read] for read in reads)
        if fields.pop("is_view", False):
            fields["alias_of"] = inputs[0]
        fields = {"bytes_read": sum(self.tensors[t].num_bytes for t in inputs), **fields}
        if "alias_of" not in fields:
            fields["bytes_written"] = num_bytes
        self.tensors.append(Tensor(name, (num_bytes // 4,), "float32", num_bytes))
        made = (len(self.tensors) - 1,)
        self.ops.append(Op(name, **{"target": "t", **fields}, inputs=inputs, outputs=made))

    def source(self, name: str, role: str = "input", num_bytes: int = BYTES) -> None:
        """Something that is there before the step."""
        self._add(name, (), num_bytes, {"stage": "source", "role": role, "target": "source"})

    def own(self, name: str, *reads: str, num_bytes: int = BYTES, **fields: Any) -> None:
        """A product or the like."""
        self._add(name, reads, num_bytes, fields)

    def fusible(self, name: str, *reads: str, num_bytes: int = BYTES, **fields: Any) -> None:
        """An elementwise op or the like."""
        self._add(name, reads, num_bytes, {"is_fusible": True, **fields})

    def view(self, name: str, of: str, **fields: Any) -> None:
        """A view of a whole."""
        size = next(t.num_bytes for t in self.tensors if t.name == of)
        self._add(name, (of,), size, {"is_view": True, "bytes_read": 0, **fields})

    def result(self, name: str, role: Any = "output", replaces: str = "") -> None:
        """What the step leaves behind."""
        tensor = next(k for k, t in enumerate(self.tensors) if t.name == name)
        source = next((k for k, op in enumerate(self.ops) if op.name == replaces), -1)
        self.results.append(StepResult(replaces or name, tensor, role, source))

    def graph(self) -> OpGraph:
        """The graph."""
        return OpGraph("made", tuple(self.ops), tuple(self.tensors), tuple(self.results))
