"""The program of a captured graph: FX graph and the meaning of inputs and outputs.

torch objects are held here, but torch itself is not imported.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

BindingKind = Literal["parameter", "buffer", "state", "constant", "input", "scalar"]

Layouts = tuple[tuple[int, ...] | None, ...]
"""Strides of each tensor that a call gives; None for what is no tensor or may lie anyhow."""


RANDOM_KEYS = "random_keys"
"""Name of the input that a step's random numbers are computed from: an int32 tensor with a row for
each random op, which the executors make of the user's seed and the step's number."""
KEY_WORDS = 4
"""Words of a row: two that are used, and two so that every row begins at a multiple of 16 bytes."""


@dataclass(frozen=True)
class Binding:
    """What one placeholder of the FX graph stands for.

    Attributes:
        op: Index of its source op in the graph.
        kind: What it is.
        key: Parameter or buffer name; for `state` the parameter's name; for `input` the input's
            name (`0`, `1.mask`, `x`); for `scalar` its name in the step scalars, or
            `RANDOM_KEYS`.
        slot: For `state` the name in `optimizer.state[p]` (`exp_avg`, `momentum_buffer`); for
            `input` the index among the flattened example inputs (torch pytree order).
        value: For `constant` the tensor itself; for inputs and buffers that `may_be_indices` the
            example's, with which ops are timed; for others nothing.
        strides: Of the tensor at capture; None if they are not known.
    """

    op: int
    kind: BindingKind
    key: str
    slot: str | int = ""
    value: Any = None
    strides: tuple[int, ...] | None = None


SMALL_BYTES = 1 << 16


def may_be_indices(tensor: Any) -> bool:
    """Whether indices may be a tensor's values, or be made of them: integers, and small ones."""
    if tensor.is_meta or tensor.is_complex():
        return False
    return not tensor.is_floating_point() or (tensor.numel() * tensor.element_size() <= SMALL_BYTES)


@dataclass(frozen=True)
class Constant:
    """A leaf of the inputs or of the output that is not a tensor, such as an int or None."""

    value: Any


class Call(NamedTuple):
    """How an op is called.

    Attributes:
        node: FX node of the call.
        parts: Where it gives several tensors: (place among them, tensor) of those that are read.
    """

    node: Any
    parts: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Program:
    """A captured step that can be run.

    Attributes:
        module: `torch.fx.GraphModule`: placeholders in the order of `bindings`; call_function nodes
            (functional ATen overloads and `operator.getitem`); one output node whose single
            argument is a list in the order of `OpGraph.results`.
        bindings: One per placeholder.
        tensor_of: FX node name -> id of the tensor in the OpGraph (nodes with several outputs are
            not listed, their getitem nodes are).
        op_of: FX node name -> index of its op (getitem nodes: that of the op they read).
        scalars: Function of the 1-based step number and, optionally, the optimizer's present
            param_groups -> value of every scalar input (learning rate, bias corrections ...), as
            Python floats, exactly as torch.optim computes them on the host.
        random_ops: Name of each FX node that draws random numbers from a generator, in trace order
            -> position of the draw in the step, of which its seed is made. Ops of one position
            draw the same numbers, as activation checkpointing does.
        layouts: Names of FX calls whose kernels may lay out what they make otherwise than the trace
            says -> the layouts of the trace, which executors give these outputs: what reads them
            may count elements in memory.
        input_spec: torch pytree spec of `(args, kwargs)`; `capture.flatten_batch` flattens
            new batches the same way.
        input_constants: Leaf index -> value of the inputs that are not tensors; they are fixed.
        output_spec: torch pytree spec of what a step returns: the model's output (inference), or
            what the loss function gives beside the loss; None if that is the loss alone.
        output_leaves: For each leaf of the output: index into results, or a `Constant`.
        training: Whether the model was in training mode at capture.
        modes: Name of each module whose training flag the step read -> the flag.
        attributes: Module name -> attribute -> value, of plain ones that the step read.
        variables: Plain values outside the model that the step's functions name: objects with
            `name`, `value` (at capture) and `present()`.
        trainable: Name of each parameter that the step's gradients are about -> whether it
            required gradients.
        buffers_shared: Other names of the same tensor (tied weights): name -> first name.
        device: torch device type of the capture (`cpu`, `cuda`).
    """

    module: Any
    bindings: tuple[Binding, ...]
    tensor_of: Mapping[str, int]
    op_of: Mapping[str, int]
    scalars: Callable[[int, Sequence[Mapping[str, Any]] | None], dict[str, float]]
    random_ops: Mapping[str, int] = field(default_factory=dict)
    layouts: Mapping[str, Layouts] = field(default_factory=dict)
    input_spec: Any = None
    input_constants: Mapping[int, Any] = field(default_factory=dict)
    output_spec: Any = None
    output_leaves: tuple[int | Constant, ...] = ()
    training: bool = True
    modes: Mapping[str, bool] = field(default_factory=dict)
    attributes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    variables: tuple[Any, ...] = ()
    trainable: Mapping[str, bool] = field(default_factory=dict)
    buffers_shared: Mapping[str, str] = field(default_factory=dict)
    device: str = "cpu"

    @cached_property
    def calls(self) -> dict[int, Call]:
        """Op -> its call, of all ops but sources."""
        found: dict[int, Call] = {}
        for node in self.module.graph.nodes:
            if node.op != "call_function":
                continue
            op = self.op_of[node.name]
            if node.target is operator.getitem:
                part = node.args[1], self.tensor_of[node.name]
                found[op] = Call(found[op].node, (*found[op].parts, part))
            else:
                found[op] = Call(node, ())
        return found


def layouts_of(value: Any) -> Layouts:
    """Strides of a tensor or of several; such as repeat elements may lie anyhow."""
    parts = value if isinstance(value, (tuple, list)) else (value,)
    return tuple(
        tuple(part.stride()) if hasattr(part, "stride") and 0 not in part.stride() else None
        for part in parts
    )
