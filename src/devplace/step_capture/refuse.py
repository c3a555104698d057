"""Turn what goes wrong during a trace into one sentence that names module and source line."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from devplace.errors import CaptureError
from devplace.step_capture.analysis import mutates, results, view_bases, written_by
from devplace.step_capture.eagerly import NotTriedError, eager_error
from devplace.step_capture.guards.written import no_buffer
from devplace.step_capture.optimizers.several import each_of
from devplace.step_capture.sources import memory
from devplace.step_capture.step import TracedStep
from devplace.step_capture.tags import Tagger, describe_place, is_user_file

_WRAPPERS = {
    "DataParallel": "Pass the module inside it (model.module).",
    "DistributedDataParallel": "Pass the module inside it (model.module); devplace spreads it.",
    "FullyShardedDataParallel": "Pass the unwrapped module; devplace places its parameters itself.",
    "FSDPModule": "Pass the unsharded module; devplace places its parameters itself.",
    "ScriptModule": "Pass the Python module it was scripted or traced from.",
}
_VALUE_READ = ("DataDependentOutputException", "GuardOnDataDependentSymNode")
_SHAPE = "DynamicOutputShapeException"


def unwrap(model: Any) -> torch.nn.Module:
    """The module itself: that inside a torch.compile wrapper; other wrappers are refused.

    Raises:
        CaptureError: Not an `nn.Module`, or a wrapper such as DataParallel or a ScriptModule.
    """
    inner = getattr(model, "_orig_mod", None)
    if isinstance(inner, torch.nn.Module):
        model = inner
    if not isinstance(model, torch.nn.Module):
        way = "Wrap the function in a module."
        if isinstance(model, torch.export.ExportedProgram):
            way = "Pass its module: exported.module()."
        raise CaptureError(
            f"The model must be a torch.nn.Module, got {type(model).__name__}. {way}"
        )
    for name, module in model.named_modules():
        for kind in type(module).__mro__:
            if kind.__name__ in _WRAPPERS and kind.__module__.startswith("torch."):
                where = f"module {name!r}" if name else "the model"
                raise CaptureError(
                    f"{kind.__name__} cannot be captured: {where} is one. "
                    f"{_WRAPPERS[kind.__name__]}"
                )
    return model


class GradientsNeededError(CaptureError):
    """The model takes a derivative of something that does not require gradients."""


class NotInChunksError(CaptureError):
    """Micro-batches failed where the whole batch did not."""


def explain(error: Exception | SystemExit, step: TracedStep) -> CaptureError:
    """The error to raise instead of `error`, which a trace of a step raised."""
    if isinstance(error, CaptureError):
        return error
    module, line, owner = locate(error.__traceback__, step.tagger)
    newest = step.tagger.newest
    if not line and newest is not None and newest.stage == "backward" and newest.line:
        module, line = newest.module, newest.line  # of the forward op that is differentiated
    where = describe_place(module, line)
    name, text = type(error).__name__, str(error)
    if _SHAPE in name or "DynamicOutputShape" in text:
        return CaptureError(
            f"Shapes must not depend on values: {_op_name(text)} at {where} has an output whose "
            f"size depends on the data. {_fixed_shape(_op_name(text))}"
        )
    value_read = (
        "data-dependent",
        "_local_scalar_dense",
        ".numpy() is not supported",
        "passed to FakeTensor.__format__",
    )
    if name in _VALUE_READ or any(part in text for part in value_read):
        return CaptureError(_value_read(where, owner))
    if "NestedTensor" in text or "_nested_" in text:
        return _nested(where)
    if name == "UnsupportedOperatorException" or "no fake impl" in text or "'Meta'" in text:
        return _without_fake(_op_name(text), where)
    if "torch._C.Generator" in text:  # torch 2.11; later ones make it an attribute of the graph
        return own_generator(where)
    if "backward through the graph a second time" in text:
        return CaptureError(
            "Backward and the update belong to the step: the loss function runs backward itself. "
            "Let loss_fn return the loss alone."
        )
    if "does not require grad" in text:
        return GradientsNeededError(
            f"A derivative needs an input that requires gradients: at {where} one is taken of "
            f"something that does not. Call x.requires_grad_() in forward, or on the example input."
        )
    return _unknown(error, where, step)


def _unknown(error: BaseException, where: str, step: TracedStep) -> CaptureError:
    """Error for what has no rule of its own: is it the step's fault, or that of capture?"""
    what = f"at {where}: {_first_line(error)}"
    if step.request.batch.is_cut:
        return NotInChunksError(f"The micro-batches failed {what}.")
    try:
        eager = eager_error(step)
    except NotTriedError as reason:
        return CaptureError(
            f"The step failed while it was captured {what}. Whether it runs eagerly is not known: "
            f"{reason}. Run it once on the example inputs."
        )
    if eager is not None:
        return CaptureError(
            f"The step fails eagerly, too, at {where}: {_first_line(eager)}. Make it run on the "
            f"example inputs first."
        )
    return CaptureError(
        f"The step runs eagerly, but cannot be captured {what}. Do there without values, in other "
        f"tensor operations."
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.') if lines else 'no message'}"


def _nested(where: str) -> CaptureError:
    return CaptureError(
        f"Nested tensors cannot be captured: {where} makes one, as nn.TransformerEncoder does of a "
        f"padding mask in eval mode. Use masks over padded tensors; make the encoder with "
        f"enable_nested_tensor=False."
    )


def _without_fake(op: str, where: str) -> CaptureError:
    return CaptureError(
        f"A custom operator needs a fake kernel to be captured: {op} at {where} has none. "
        f"Register one: @torch.library.register_fake({op!r})."
    )


def own_generator(where: str) -> CaptureError:
    """Error for a draw from a generator object."""
    return CaptureError(
        f"A generator object cannot be captured: {where} draws from its own torch.Generator. "
        f"Draw from the default one."
    )


def _value_read(where: str, owner: Any) -> str:
    if getattr(owner, "momentum", 0) is None and hasattr(owner, "num_batches_tracked"):
        return (
            f"Batch norm with momentum=None reads its step counter on the host: {where}. "
            f"Set momentum to a number."
        )
    return (
        f"Control flow must not depend on tensor values: {where} reads a value (.item(), "
        f".numpy(), a formatted text or 'if tensor'). Use torch.where, or compute the condition "
        f"outside the step."
    )


def _fixed_shape(op: str) -> str:
    """What to use instead of an op whose output has no fixed size."""
    if "pack_padded_sequence" in op:
        return "Run the RNN on the padded sequences, and mask what it gives."
    return "Use masks or torch.where instead of boolean indexing or nonzero."


def _op_name(text: str) -> str:
    name = r"([A-Za-z_]\w*)"
    match = re.search(f"{name}::{name}", text) or re.search(rf"{name}\.{name}", text)
    return f"{match.group(1)}::{match.group(2)}" if match else "an operator"


def locate(
    traceback: TracebackType | None, tagger: Tagger
) -> tuple[str | None, str, torch.nn.Module | None]:
    """Innermost module and user source line on a traceback."""
    module, line, owner = None, "", None
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if is_user_file(code.co_filename):
            line = f"{os.path.basename(code.co_filename)}:{traceback.tb_lineno}"
        self = traceback.tb_frame.f_locals.get("self")
        if isinstance(self, torch.nn.Module) and id(self) in tagger.module_names:
            module, owner = tagger.module_names[id(self)], self
        traceback = traceback.tb_next
    return module, line, owner


def refuse_hooks(parameters: Mapping[str, torch.Tensor], optimizer: Any) -> None:
    """Refuse hooks that a captured step would not call; those of modules are captured.

    Raises:
        CaptureError: A parameter or the optimizer has one.
    """
    for name, parameter in parameters.items():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise CaptureError(
                f"Gradient hooks on parameters cannot be captured: parameter {name!r} has one. "
                f"Remove it, and change the gradient in the loss function or by a hook of a "
                f"module; clip_grad_norm clips all gradients."
            )
    for one in each_of(optimizer):
        step = vars(one).get("step")
        if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
            raise CaptureError(
                f"The update must be that of the optimizer's class: step() of this "
                f"{type(one).__name__} was replaced by another function, which a captured step "
                f"does not call. Put it back (del optimizer.step), and do the rest after each step."
            )
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    for one in each_of(optimizer):
        if any(getattr(one, each, None) for each in hooks):
            raise CaptureError(
                f"Hooks of an optimizer's step cannot be captured: this {type(one).__name__} has "
                f"one. Remove it, and call what it does after each step."
            )


def refuse_written(gm: torch.fx.GraphModule, step: TracedStep) -> None:
    """Refuse a step that writes to a tensor which is no parameter or buffer: that would be lost.

    Raises:
        CaptureError: Names the tensor.
    """
    for node in gm.graph.nodes:
        for each in written_by(node.target, node.args, node.kwargs):
            owner = _memory_owner(each)
            if owner.op == "get_attr":
                names = step.frames.outliving.names
                raise no_buffer(names.get(id(getattr(gm, owner.target)), "a tensor"))


def refuse_stray_parameters(gm: torch.fx.GraphModule, step: TracedStep) -> None:
    """Refuse trained parameters that are read other than through the model: a list, a closure.

    Raises:
        CaptureError: Names the parameter; there it would be a constant without a gradient.
    """
    sources = step.request.sources.parameters
    owners = {memory(sources[name]): name for name in step.trained}
    for node in gm.graph.nodes:
        value = getattr(gm, node.target) if node.op == "get_attr" else None
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            continue
        name = owners.get(memory(value))
        if name is not None:
            tag = node.meta["tag"]
            raise CaptureError(
                f"Trained parameters must be read through the model: "
                f"{describe_place(tag.module, tag.line)} has {name!r} from elsewhere, such as a "
                f"list made outside of the step. Take it from the model there: "
                f"model.get_parameter({name!r}), or model.parameters()."
            )


def _memory_owner(node: torch.fx.Node) -> torch.fx.Node:
    """The node that owns the memory of another; fresh constants own theirs."""
    while "lift_fresh" not in str(node.target):
        bases = node.args[:1] if mutates(node) else view_bases(node)
        if not bases or not isinstance(bases[0], torch.fx.Node):
            break
        node = bases[0]
    return node


def refuse_written_inputs(gm: torch.fx.GraphModule, step: TracedStep) -> None:
    """Refuse a step that changes an input in place.

    Raises:
        CaptureError: Names the input, and where it is written.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    for node, out in zip(results(gm), step.outputs, strict=False):
        if out.role == "input" and node is not inputs[out.replaces]:
            tag = node.meta["tag"]
            raise CaptureError(
                f"Inputs must not be changed in place: input {out.name!r} is written at "
                f"{describe_place(tag.module, tag.line)}. Work on a copy (x = x.clone())."
            )
