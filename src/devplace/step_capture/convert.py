"""Convert the cleaned FX graph to an OpGraph and its Program."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor

from devplace.errors import CaptureError
from devplace.graph.captured import Captured
from devplace.graph.graph import Op, Role, StepResult, Tensor
from devplace.graph.program import Binding, Program, may_be_indices
from devplace.step_capture.analysis import (
    count_flops,
    is_fusible,
    is_random,
    mutates,
    pays_alone,
    reads_rows_only,
    view_bases,
)
from devplace.step_capture.guards.rechecked import Place, Setting, settings
from devplace.step_capture.guards.values import ANYTHING, mapped
from devplace.step_capture.layouts import counted
from devplace.step_capture.refuse import own_generator
from devplace.step_capture.request import CaptureRequest, Input, Output, source_name
from devplace.step_capture.sources import memory
from devplace.step_capture.step import TracedStep
from devplace.step_capture.strides import unsure
from devplace.step_capture.tags import describe_place

Node: TypeAlias = torch.fx.Node


def bind_constants(gm: torch.fx.GraphModule) -> list[tuple[str, torch.Tensor]]:
    """Make every tensor attribute of the graph a placeholder; gives name and value in order."""
    graph = gm.graph
    last = graph.find_nodes(op="placeholder")
    by_value: dict[int, Node] = {}
    constants: list[tuple[str, torch.Tensor]] = []
    for node in list(graph.nodes):
        is_read = node.op == "get_attr"
        value = getattr(gm, node.target) if is_read else node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.layout != torch.strided:
            tag, what = node.meta["tag"], "reads" if is_read else "makes"
            raise CaptureError(
                f"Tensors must be dense: {describe_place(tag.module, tag.line)} {what} one that "
                f"is {value.layout}. Make it dense (.to_dense())."
            )
        if not is_read:
            continue
        if not isinstance(value, torch.Tensor):
            raise _not_a_tensor(node)
        holder = by_value.get(id(value))
        if holder is None:
            if isinstance(value, FakeTensor):
                raise CaptureError(
                    "A tensor made outside the step has no value: it is fake. Create the model "
                    "outside of FakeTensorMode."
                )
            anchor = last[-1] if last else next(iter(graph.nodes))
            place = graph.inserting_after(anchor) if last else graph.inserting_before(anchor)
            with place:
                holder = graph.placeholder(f"constant_{len(constants)}")
            holder.meta.update(val=value, tag=node.meta.get("tag"))
            by_value[id(value)] = holder
            last.append(holder)
            constants.append((f"{len(constants)}", value.detach()))
        node.replace_all_uses_with(holder)
        graph.erase_node(node)
    return constants


def _not_a_tensor(node: Node) -> CaptureError:
    tag = node.meta["tag"]
    where = describe_place(tag.module, tag.line)
    if "opaque" in str(node.target):
        return own_generator(where)
    return CaptureError(
        f"Control flow as an operator cannot be placed: {where} runs a sub-graph ({node.target}). "
        f"Use ordinary tensor operations such as torch.where."
    )


def drop_unused(gm: torch.fx.GraphModule, step: TracedStep) -> tuple[list[Input], list[Output]]:
    """Remove unchanged results, then state and scalars nothing reads.

    Raises:
        CaptureError: A buffer that changes shares its memory with another.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    output = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
    kept: list[tuple[Node, Output]] = []
    for node, described in zip(output.args[0], step.outputs, strict=True):
        if described.replaces >= 0 and node is placeholders[described.replaces]:
            continue
        if described.name in step.request.sources.overlapping:
            other = step.request.sources.overlapping[described.name]
            shared = f"shares a storage with {other!r}. Clone one of them"
            if other == described.name:
                shared = "has elements that overlap in it. Clone it"
            raise CaptureError(
                f"Buffers that change must own their memory: {described.name!r} {shared}."
            )
        kept.append((node, described))
    output.args = ([node for node, _ in kept],)
    inputs: list[Input] = []
    renumbered = {-1: -1}
    for index, (node, entry) in enumerate(zip(placeholders, step.inputs, strict=True)):
        if not node.users and entry.kind in ("state", "scalar", "constant"):
            gm.graph.erase_node(node)
            continue
        renumbered[index] = len(inputs)
        inputs.append(entry)
    outputs = [Output(o.role, o.name, renumbered[o.replaces]) for _, o in kept]
    return inputs, outputs


class _Builder:
    """Collects ops and tensors while it walks the nodes.

    Args:
        counted: Nodes whose layout is not the compiler's.
    """

    def __init__(self, counted: set[Node]) -> None:
        self._counted = counted
        self.ops: list[Op] = []
        self.tensors: list[Tensor] = []
        self.tensor_of: dict[str, int] = {}
        self.op_of: dict[str, int] = {}
        self.random: dict[str, int] = {}
        self._names: set[str] = set()
        self._parts: dict[str, dict[int, int]] = {}

    def _unique(self, name: str) -> str:
        while name in self._names:
            name += "'"
        self._names.add(name)
        return name

    def _tensor(self, name: str, value: torch.Tensor, base: int) -> int:
        num_bytes = value.numel() * value.element_size()
        if base >= 0:
            num_bytes = min(num_bytes, self.tensors[base].num_bytes)
        dtype = str(value.dtype).removeprefix("torch.")
        self.tensors.append(Tensor(name, tuple(value.shape), dtype, num_bytes))
        return len(self.tensors) - 1

    def source(self, node: Node, entry: Input) -> None:
        """Add a placeholder."""
        name = self._unique(source_name(entry))
        tensor = self._tensor(name, node.meta["val"], -1)
        role: Role = entry.kind
        module = entry.key.rpartition(".")[0] if role in ("parameter", "buffer", "state") else ""
        self.op_of[node.name] = len(self.ops)
        self.tensor_of[node.name] = tensor
        self.ops.append(Op(name, "source", (), (tensor,), stage="source", role=role, module=module))

    def call(self, node: Node) -> None:
        """Add a call, or let a getitem name an output of its producer."""
        if node.target is operator.getitem:
            self._part(node)
            return
        if not isinstance(node.target, torch._ops.OpOverload) or mutates(node):
            tag = node.meta["tag"]
            raise CaptureError(
                f"Op {node.target} of module {tag.module!r} ({tag.line}) cannot be placed: it "
                f"writes its inputs or runs a sub-graph. Replace it by ordinary tensor operations."
            )
        inputs = tuple(dict.fromkeys(self.tensor_of[n.name] for n in node.all_input_nodes))
        bases = view_bases(node)
        base = self.tensor_of[bases[0].name] if bases else -1
        name = self._unique(node.name)
        outputs = self._outputs(node, name, base)
        self.op_of[node.name] = len(self.ops)
        self.ops.append(self._op(node, name, inputs, outputs, base))

    def _outputs(self, node: Node, name: str, base: int) -> tuple[int, ...]:
        value = node.meta["val"]
        if isinstance(value, torch.Tensor):
            self.tensor_of[node.name] = self._tensor(name, value, base)
            return (self.tensor_of[node.name],)
        parts = {
            k: self._tensor(f"{name}:{k}", part, base)
            for k, part in enumerate(value)
            if isinstance(part, torch.Tensor)
        }
        self._parts[node.name] = parts
        return tuple(parts.values())

    def _part(self, node: Node) -> None:
        producer, index = node.args
        self.tensor_of[node.name] = self._parts[producer.name][index]
        self.op_of[node.name] = self.op_of[producer.name]

    def _op(
        self, node: Node, name: str, inputs: tuple[int, ...], outputs: tuple[int, ...], base: int
    ) -> Op:
        tag = node.meta["tag"]
        random = is_random(node)
        if random:
            self.random[node.name] = tag.draw
        flops = read = written = 0
        if base < 0:
            flops = count_flops(node)
            written = sum(self.tensors[t].num_bytes for t in outputs)
            sizes = [self.tensors[t].num_bytes for t in inputs]
            if reads_rows_only(node) and sizes:
                sizes[0] = min(sizes[0], written)
            read = sum(sizes)
        is_free = base < 0 and is_fusible(node) and self._counted.isdisjoint([node, *node.users])
        return Op(
            name=name,
            target=str(node.target),
            inputs=inputs,
            outputs=outputs,
            alias_of=base,
            flops=flops,
            bytes_read=read,
            bytes_written=written,
            stage=tag.stage,
            module=tag.module,
            call=tag.call,
            source_line=tag.line,
            micro_batch=tag.micro_batch,
            is_random=random,
            is_fusible=is_free,
            pays_alone=is_free and pays_alone(node),
            is_recomputed=tag.is_recomputed,
        )


def to_graph(
    gm: torch.fx.GraphModule, step: TracedStep, name: str, meta: Mapping[str, Any]
) -> Captured:
    """Build the captured step from a functional graph."""
    inputs, outputs = drop_unused(gm, step)
    constants = bind_constants(gm)
    entries = inputs + [Input("constant", key) for key, _ in constants]
    hollow = step.request.sources.hollow
    values = [hollow[e.key] if e.kind == "constant" else _example(step.request, e) for e in inputs]
    values += [value for _, value in constants]
    builder = _Builder(counted(gm.graph))
    bindings: list[Binding] = []
    results: list[StepResult] = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            entry, value = entries[len(bindings)], values[len(bindings)]
            strides = tuple(node.meta["val"].stride())
            bindings.append(
                Binding(len(builder.ops), entry.kind, entry.key, entry.slot, value, strides)
            )
            builder.source(node, entry)
        elif node.op == "call_function":
            builder.call(node)
        elif node.op == "output":
            for kept, out in zip(node.args[0], outputs, strict=True):
                replaces = bindings[out.replaces].op if out.replaces >= 0 else -1
                label = builder.ops[replaces].name if replaces >= 0 else out.name
                tensor = builder.tensor_of[kept.name]
                results.append(StepResult(label, tensor, out.role, replaces))  # type: ignore[arg-type]
    gm.graph.lint()
    gm.recompile()
    program = _program(gm, step, builder, bindings, meta)
    request = step.request
    return Captured(
        name,
        tuple(builder.ops),
        tuple(builder.tensors),
        tuple(results),
        dict(meta),
        program=program,
        model=request.model,
        optimizer=request.optimizer,
        loss_fn=request.loss_fn,
    )


def _example(request: CaptureRequest, entry: Input) -> torch.Tensor | None:
    """The example value of an input or buffer, if indices may be made of it."""
    value = None
    if entry.kind == "input":
        value = request.batch.leaves[int(entry.slot)]
    elif entry.kind == "buffer":
        value = request.sources.buffers[entry.key]
    if value is None or isinstance(value, FakeTensor) or not may_be_indices(value):
        return None
    return value.detach()


def _program(
    gm: torch.fx.GraphModule,
    step: TracedStep,
    builder: _Builder,
    bindings: list[Binding],
    meta: Mapping[str, Any],
) -> Program:
    request = step.request
    return Program(
        module=gm,
        bindings=tuple(bindings),
        tensor_of=builder.tensor_of,
        op_of=builder.op_of,
        scalars=request.update.scalars if request.update else _no_scalars,
        random_ops=builder.random,
        layouts=unsure(gm.graph, step.fakes.strides),
        input_spec=request.batch.spec,
        input_constants={
            i: leaf
            for i, leaf in enumerate(request.batch.leaves)
            if not isinstance(leaf, torch.Tensor)
        },
        output_spec=step.output_spec,
        output_leaves=step.output_leaves,
        training=bool(meta["training"]),
        **_fixed_values(step, [b.value for b in bindings if b.kind == "constant"]),
        trainable=_trainable(request),
        buffers_shared=dict(request.sources.shared),
        device=request.device_type,
    )


def _trainable(request: CaptureRequest) -> dict[str, bool]:
    """Whether gradients are required, by parameter: the optimizer's, all if they are clipped."""
    if request.update is None:
        return {}
    takes_all = request.clip_grad_norm is not None
    return {
        name: parameter.requires_grad
        for name, parameter in request.sources.parameters.items()
        if takes_all or name in request.update.rules
    }


def _fixed_values(step: TracedStep, constants: Sequence[Any]) -> dict[str, Any]:
    """What the step read of plain values and of training flags; tensors if they are constants."""
    memories = {memory(value) for value in constants}

    def used(part: Any) -> Any:
        is_other = isinstance(part, torch.Tensor) and memory(part) not in memories
        return ANYTHING if is_other else part

    modes: dict[str, bool] = {}
    attributes: dict[str, dict[str, Any]] = {}
    variables: list[Place | Setting] = [*settings()]
    for key, tensor in step.frames.values_read.items():
        if not tensor.is_inference():  # those have no versions
            name = step.frames.outliving.names.get(key, "a tensor")
            version = partial(getattr, tensor, "_version")
            variables.append(Setting(f"{name}._version (its values are read)", version, version()))
    for place in step.frames.found():
        value = mapped(used, place.value)
        if value is ANYTHING:
            continue
        if place.module is None:
            variables.append(replace(place, value=value))
        elif place.key == "training":
            modes[place.module] = value
        else:
            attributes.setdefault(place.module, {})[place.key] = value
    return {"modes": modes, "attributes": attributes, "variables": tuple(variables)}


def _no_scalars(step: int, param_groups: Any = None) -> dict[str, float]:
    return {}
