"""Kernels of groups by torch's own compiler (Inductor).

A group is compiled for the layouts it is given, and gives its outputs in the layouts that PyTorch's
kernels would give them in. What is kept of it is the source that the compiler wrote, which calls
kernels that its own caches hold in binary form.
"""

from __future__ import annotations

import logging
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch

from devplace.device_kinds import kind_of
from devplace.errors import ExecutionError
from devplace.graph.fusion.call import FusedCall, on_device
from devplace.kernels.kernel_signature import OPTIONS, Layout, Signature

Function = Callable[[list[Any]], Sequence[Any]]
"""Takes the inputs in a list, which it empties, and gives the outputs."""
WAYS: tuple[Mapping[str, Any], ...] = (
    {},
    {"triton.persistent_reductions": False},
    {"triton.persistent_reductions": False, "max_fusion_size": 8},
)
"""Further options, tried in turn. (Triton 3.6 fails on some kernels that hold whole rows: "operand
#0 does not dominate this use".)"""


@cache
def why_no_compiler(device_type: str) -> str:
    """Why nothing can be compiled for a type of device here; empty if it can."""
    compiler = kind_of(device_type).compiler
    if not compiler:
        return f"fused groups are compiled for no {device_type} devices"
    if compiler == "triton":
        from torch.utils._triton import has_triton

        return "" if has_triton() else "triton is not installed, or knows no such GPU"
    with _quiet():
        from torch._inductor import exc
        from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            get_cpp_compiler()
        except (exc.InvalidCxxCompiler, RuntimeError, OSError):
            return "there is no C++ compiler"
    return ""


def compile_source(call: FusedCall, signature: Signature) -> str:
    """Source of a module with the kernels of a group.

    Raises:
        ExecutionError: The compiler refuses the group.
    """
    made = None
    ways = WAYS if kind_of(signature.device).compiler == "triton" else WAYS[:1]
    for way in ways:
        try:
            with _quiet():
                made = _compiled(call, signature, way)
            break
        except Exception as error:  # whatever a compiler raises
            if way is ways[-1]:
                raise ExecutionError(_reason(error)) from error
    if getattr(made, "constants", None):
        raise ExecutionError("the compiler made constants of it")
    source: str = getattr(made, "source_code", "")
    if not source:
        raise ExecutionError("the compiler gave no source")
    return source


def _compiled(call: FusedCall, signature: Signature, way: Mapping[str, Any]) -> Any:
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    choose_assembler()
    device = torch.device(signature.device)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with config.patch({**OPTIONS, **way}), torch.no_grad(), _current(device):
        with mode:
            inputs = [_fake(layout, device) for layout in signature.layouts]
            graph = _traced(call, device, inputs)
            _join_counters(graph)
            _write_over(graph, signature)
        with V.set_fake_mode(mode), tracing(TracingContext(mode)):
            return compile_fx_inner(graph, inputs, is_inference=True)


def load(source: str) -> Function:
    """The function of a compiled group; binaries that are in no cache are made.

    Raises:
        ExecutionError: They cannot be made or loaded.
    """
    try:
        with _quiet():
            from torch._inductor import config
            from torch._inductor.codecache import PyCodeCache

            choose_assembler()
            with config.patch(OPTIONS):
                function: Function = PyCodeCache.load(source).call
    except Exception as error:
        raise ExecutionError(_reason(error)) from error
    return function


def choose_assembler() -> None:
    """Let Triton know torch's assembler from the start.

    torch names it only right before the first kernel is assembled. A process that compiles has then
    asked for Triton's own, whose version becomes part of all keys of Triton's cache, and one that
    loads has not: it would assemble every kernel again (12 s for 27 groups of BERT-large).
    """
    from torch._inductor.runtime import compile_tasks

    with suppress(AttributeError):
        compile_tasks._set_triton_ptxas_path()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings that importing and using the compiler gives, and what it logs of kernels
    that it fails to compile."""
    log = logging.getLogger("torch._inductor.runtime.triton_heuristics")
    before = log.disabled
    log.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.disabled = before


def _current(device: Any) -> Any:
    return torch.cuda.device(device if kind_of(device.type).has_graphs else -1)


def _fake(layout: Layout, device: Any) -> Any:
    """A fake tensor that lies so; one that is not aligned begins one element late."""
    dtype = getattr(torch, layout.dtype)
    if layout.is_aligned:
        return torch.empty_strided(layout.shape, layout.strides, dtype=dtype, device=device)
    pairs = zip(layout.shape, layout.strides, strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in pairs)
    whole = torch.empty(max(0, span) + 1, dtype=dtype, device=device)
    return whole.as_strided(layout.shape, layout.strides, 1)


def _traced(call: FusedCall, device: Any, inputs: Sequence[Any]) -> torch.fx.GraphModule:
    """The group in the ops that the compiler knows."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    module = torch.fx.GraphModule({}, on_device(call.graph, device))
    return make_fx(module, decomposition_table=select_decomp_table())(*inputs)


def _join_counters(graph: torch.fx.GraphModule) -> None:
    """Make one op, and so one kernel, of a group of counters that rise by the same number."""
    adds = [node for node in graph.graph.nodes if node.op == "call_function"]
    shared = {(node.target, repr(node.args[1:]), repr(node.kwargs)) for node in adds}
    if len(adds) < 2 or len(shared) > 1 or adds[0].target is not torch.ops.aten.add.Tensor:
        return
    counters, amount = [node.args[0] for node in adds], adds[0].args[1]
    if adds[0].kwargs or not isinstance(amount, (int, float)):
        return
    output = next(node for node in reversed(graph.graph.nodes) if node.op == "output")
    with graph.graph.inserting_before(output):
        joined = graph.graph.call_function(torch.ops.aten._foreach_add.Scalar, (counters, amount))
        joined.meta["val"] = [node.meta["val"] for node in adds]
        for place, node in enumerate(adds):
            part = graph.graph.call_function(operator.getitem, (joined, place))
            part.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(part)
            graph.graph.erase_node(node)


def _write_over(graph: torch.fx.GraphModule, signature: Signature) -> None:
    """End with copies into the inputs that are written over, which the compiler makes writes."""
    output: Any = next(node for node in reversed(graph.graph.nodes) if node.op == "output")
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    kept = list(output.args[0])
    with graph.graph.inserting_before(output):
        for place, over in signature.writes:
            target = inputs[over]
            copy = graph.graph.call_function(torch.ops.aten.copy_.default, (target, kept[place]))
            copy.meta["val"] = target.meta["val"]
    written = {place for place, _ in signature.writes}
    kept = [node for place, node in enumerate(kept) if place not in written]
    output.args = (tuple(kept),)
    output.meta["user_visible_output_idxs"] = list(range(len(kept)))
    graph.recompile()


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]
