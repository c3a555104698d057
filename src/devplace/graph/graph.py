"""The graph of a step: ops over tensors in topological order. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import msgspec

from devplace.errors import GraphError

Stage = Literal["source", "forward", "backward", "update"]
Role = Literal["", "input", "scalar", "parameter", "buffer", "state", "constant"]
ResultRole = Literal["loss", "output", "parameter", "buffer", "state"]
BATCH_ON = "batch_on"
"""Key of `OpGraph.meta`: name of the GPU on which the example batch lay; not there if it lay on the
host."""
_TOO_LARGE = 2**63  # simulators count in int64


class Tensor(msgspec.Struct, frozen=True):
    """One output of an op.

    Attributes:
        name: Unique name; the op's name, with `:k` behind it for the k-th of several outputs.
        shape: Sizes per dimension.
        dtype: torch name without prefix, such as `float32`.
        num_bytes: Bytes that hold it: what it occupies when it owns its storage, what crosses a
            link when it is sent. For a view never more than its base.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


class Member(msgspec.Struct, frozen=True, omit_defaults=True):
    """One of the ops that a fused op computes at once.

    Attributes:
        name: Name of the op.
        target: What it calls.
        stage: As of an `Op`, like what follows.
        module: Dotted path of its module.
        call: How many times the module had been called before.
        source_line: Line of the user's code.
        is_view: Whether it is a view, which costs nothing.
        is_repeated: Whether every fused op that reads it computes it for itself.
        moved_bytes: Bytes it reads and writes when it runs alone: its share of the fused op.
        reads: Which inputs of the fused op it reads, itself or through views.
    """

    name: str
    target: str
    stage: Stage
    module: str = ""
    call: int = 0
    source_line: str = ""
    is_view: bool = False
    is_repeated: bool = False
    moved_bytes: int = 0
    reads: tuple[int, ...] = ()

    @property
    def is_bound(self) -> bool:
        """Whether pins bind it: views follow what they show, and repeated ops their readers."""
        return not (self.is_view or self.is_repeated)


class Op(msgspec.Struct, frozen=True):
    """One operation, or a source (something that is there before the step).

    Attributes:
        name: Unique name.
        target: What it calls, such as `aten.mm.default`; `source` for sources.
        inputs: Ids of the tensors it reads, as indices into `OpGraph.tensors`.
        outputs: Ids of the tensors it makes.
        alias_of: Id of the tensor whose storage the outputs share, or -1 if they own theirs.
            Such an op is a view: it costs nothing and sits with its base.
        flops: Floating-point operations (a multiply-add counts two).
        bytes_read: Bytes read from memory.
        bytes_written: Bytes written to memory.
        stage: `source`, `forward`, `backward` or `update`.
        role: For sources what they hold, else empty.
        module: Dotted path of the module it belongs to; `""` is the model itself. Backward ops
            carry the module of the forward op they differentiate, updates that of the parameter.
        call: How many times the module had been called before in this step.
        source_line: `file.py:12` of the user's code, or empty.
        micro_batch: Index of the micro-batch it works on, or -1.
        is_random: Whether it draws random numbers.
        workspace_bytes: Extra memory held while it runs.
        is_fusible: Whether a compiler can compute it in one kernel with its neighbours.
        pays_alone: Whether a compiled kernel is faster than PyTorch's even for it alone.
        is_recomputed: Whether it computes again, in the backward pass, what the forward pass did.
        members: Of a fused op, what it computes, in order; module and line are those of the member
            that makes most of it.
    """

    name: str
    target: str
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    alias_of: int = -1
    flops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    stage: Stage = "forward"
    role: Role = ""
    module: str = ""
    call: int = 0
    source_line: str = ""
    micro_batch: int = -1
    is_random: bool = False
    workspace_bytes: int = 0
    is_fusible: bool = False
    pays_alone: bool = False
    is_recomputed: bool = False
    members: tuple[Member, ...] = ()

    @property
    def is_source(self) -> bool:
        """Whether it is there before the step, such as a parameter or an input."""
        return self.stage == "source"

    @property
    def targets(self) -> tuple[str, ...]:
        """What it calls: its target, or those of its members."""
        calls = tuple(member.target for member in self.members if not member.is_view)
        return calls or (self.target,)

    @property
    def is_view(self) -> bool:
        """Whether its outputs share another tensor's storage."""
        return self.alias_of >= 0


class StepResult(msgspec.Struct, frozen=True):
    """A value the step leaves behind.

    Attributes:
        name: `loss`, an output's name, or the name of the source it replaces.
        tensor: Id of the tensor.
        role: What it is.
        replaces: Index of the source op whose value it is in the next step, or -1.
    """

    name: str
    tensor: int
    role: ResultRole
    replaces: int = -1


@dataclass(frozen=True, repr=False)
class OpGraph:
    """A whole step: ops in topological order, the tensors between them, and the results.

    Attributes:
        name: Name of the model.
        ops: Ops; every input of an op is made by an earlier op.
        tensors: All tensors, in the order of the ops that make them.
        results: Values kept after the step.
        meta: Facts about the capture (optimizer, micro-batches, mode, device type), as plain JSON.
        plain: Of a fused graph, the one that was fused; not part of the file form nor of equality.

    Raises:
        GraphError: Empty, not in topological order, dangling or duplicate tensors, bad sizes.
    """

    name: str
    ops: tuple[Op, ...]
    tensors: tuple[Tensor, ...]
    results: tuple[StepResult, ...] = ()
    meta: dict[str, Any] = field(default_factory=dict)
    plain: OpGraph | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        _validate(self)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.name!r} with {len(self.ops)} ops, {len(self.tensors)} "
            f"tensors and {len(self.results)} results)"
        )

    @cached_property
    def producer(self) -> tuple[int, ...]:
        """Index of the op that makes each tensor."""
        made = [-1] * len(self.tensors)
        for index, op in enumerate(self.ops):
            for tensor in op.outputs:
                made[tensor] = index
        return tuple(made)

    @cached_property
    def storage(self) -> tuple[int, ...]:
        """Id of the tensor in whose memory each tensor lies: its own, or that of a view's base."""
        found = list(range(len(self.tensors)))
        for op in self.ops:
            for tensor in op.outputs if op.is_view else ():
                found[tensor] = found[op.alias_of]
        return tuple(found)

    @cached_property
    def carrier(self) -> tuple[int, ...]:
        """Id of the tensor that crosses a link where each tensor is needed on another device.

        A view of the whole crosses as its base and is made again there; a view of a part crosses
        by itself, and so does what `as_strided` gives: it counts elements of the storage, which a
        copy may lay out anew.
        """
        found = list(range(len(self.tensors)))
        for op in self.ops:
            if not op.is_view or "as_strided" in op.target:
                continue
            base = found[op.alias_of]
            for tensor in op.outputs:
                if self.tensors[tensor].num_bytes >= self.tensors[base].num_bytes:
                    found[tensor] = base
        return tuple(found)

    @cached_property
    def needs(self) -> tuple[tuple[int, ...], ...]:
        """Per op the ops whose results it needs: no sources, and views looked through."""
        owner = [self.producer[tensor] for tensor in self.storage]
        runs = [not (op.is_source or op.is_view) for op in self.ops]
        return tuple(
            tuple(sorted({owner[tensor] for tensor in op.inputs if runs[owner[tensor]]}))
            if runs[index]
            else ()
            for index, op in enumerate(self.ops)
        )

    @cached_property
    def op_index(self) -> dict[str, int]:
        """Index of each op by name."""
        return {op.name: index for index, op in enumerate(self.ops)}

    @cached_property
    def replaced(self) -> dict[int, int]:
        """Source op index -> id of the tensor that takes its place after the step."""
        return {r.replaces: r.tensor for r in self.results if r.replaces >= 0}

    @property
    def is_fused(self) -> bool:
        """Whether any of its ops is a fused group."""
        return any(op.members for op in self.ops)

    @property
    def num_edges(self) -> int:
        """Number of (tensor, consumer) pairs."""
        return sum(len(op.inputs) for op in self.ops)


def require_graph(graph: object) -> None:
    """Refuse what is no graph, such as the model itself.

    Raises:
        GraphError: Says what it is and how to get a graph.
    """
    if not isinstance(graph, OpGraph):
        raise GraphError(
            f"A graph must be an OpGraph, got {type(graph).__name__}. Capture the step: "
            "dp.capture(model, batch, loss_fn, optimizer)."
        )


def _validate(graph: OpGraph) -> None:
    if not graph.ops:
        raise GraphError(f"Graph {graph.name!r} has no ops. Check that the model computes.")
    made = [False] * len(graph.tensors)
    names: set[str] = set()
    for op in graph.ops:
        if op.name in names:
            raise GraphError(f"Op names must be unique: {op.name!r} occurs twice.")
        names.add(op.name)
        if op.is_source and op.inputs:
            raise GraphError(f"Sources are there before the step: {op.name!r} must read nothing.")
        for tensor in op.inputs:
            if not 0 <= tensor < len(made):
                raise GraphError(f"Op {op.name!r} reads tensor {tensor}, which does not exist.")
            if not made[tensor]:
                raise GraphError(
                    f"Ops must be in topological order without cycles: {op.name!r} reads "
                    f"{graph.tensors[tensor].name!r} before it is made."
                )
        if op.alias_of >= 0 and op.alias_of not in op.inputs:
            raise GraphError(f"View {op.name!r} must read the tensor it is a view of.")
        counts = (op.flops, op.bytes_read, op.bytes_written, op.workspace_bytes)
        if min(counts) < 0 or max(counts) >= _TOO_LARGE:
            raise GraphError(f"Flops and bytes must be 0 to 2^63 - 1: op {op.name!r} has {counts}.")
        for tensor in op.outputs:
            if not 0 <= tensor < len(made) or made[tensor]:
                raise GraphError(f"Op {op.name!r} makes tensor {tensor} twice or out of range.")
            made[tensor] = True
    _validate_tensors(graph, made)


def _validate_tensors(graph: OpGraph, made: list[bool]) -> None:
    names: set[str] = set()
    for tensor, is_made in zip(graph.tensors, made, strict=True):
        if not is_made:
            raise GraphError(f"Tensor {tensor.name!r} is made by no op.")
        if not 0 <= tensor.num_bytes < _TOO_LARGE:
            raise GraphError(
                f"Sizes must be 0 to 2^63 - 1: tensor {tensor.name!r} has {tensor.num_bytes} bytes."
            )
        if min(tensor.shape, default=0) < 0:
            raise GraphError(f"Sizes must be 0 or more: tensor {tensor.name!r} is {tensor.shape}.")
        if tensor.name in names:
            raise GraphError(f"Tensor names must be unique: {tensor.name!r} occurs twice.")
        names.add(tensor.name)
    replaced: set[int] = set()
    for result in graph.results:
        if not 0 <= result.tensor < len(made):
            raise GraphError(f"Result {result.name!r} names tensor {result.tensor}: no such one.")
        if result.replaces >= len(graph.ops) or (
            result.replaces >= 0 and not graph.ops[result.replaces].is_source
        ):
            raise GraphError(f"Result {result.name!r} replaces something that is not a source.")
        if result.replaces in replaced:
            name = graph.ops[result.replaces].name
            raise GraphError(f"Two results replace {name!r}: {result.name!r} is the second.")
        replaced |= {result.replaces} - {-1}
