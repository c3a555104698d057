"""Capture of a whole step of a PyTorch model as one graph."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from devplace.device_kinds import CPU, GPU, is_accelerator, kind_of, torch_types
from devplace.errors import CaptureError
from devplace.graph.captured import Captured
from devplace.graph.fusion import fuse as fuse_graph
from devplace.graph.graph import BATCH_ON
from devplace.graph.program import RANDOM_KEYS
from devplace.step_capture.batch import make_batch
from devplace.step_capture.cleanup import cast_weights_once, clean, drop_last_results
from devplace.step_capture.convert import to_graph
from devplace.step_capture.functionalize import make_functional
from devplace.step_capture.guards.frames import Frames
from devplace.step_capture.guards.twice import DifferentError
from devplace.step_capture.guards.values import shown
from devplace.step_capture.layouts import own_memory
from devplace.step_capture.loss import is_torch_loss, loss_call
from devplace.step_capture.micro_batches.chunk_loss import is_sum
from devplace.step_capture.micro_batches.chunks import Known, Traced, trace_chunks
from devplace.step_capture.micro_batches.compare import compared_graph
from devplace.step_capture.micro_batches.copies import CannotCopyError
from devplace.step_capture.micro_batches.cutting import BatchDims, named_dims
from devplace.step_capture.optimizers.rules import Update, make_update
from devplace.step_capture.optimizers.several import as_one
from devplace.step_capture.refuse import (
    GradientsNeededError,
    explain,
    refuse_hooks,
    refuse_stray_parameters,
    refuse_written,
    refuse_written_inputs,
    unwrap,
)
from devplace.step_capture.request import CaptureRequest, Input
from devplace.step_capture.rewrites.blocks import named_blocks, recompute_blocks
from devplace.step_capture.rewrites.channels_last import lay_channels_last
from devplace.step_capture.rewrites.counter_random import draw_by_counter
from devplace.step_capture.rewrites.cross_entropy import direct_cross_entropy
from devplace.step_capture.rewrites.padding import pad_products
from devplace.step_capture.rewrites.recompute import recompute
from devplace.step_capture.rewrites.splitting import split_convolution_gradients
from devplace.step_capture.rewrites.stacking import num_spared_products
from devplace.step_capture.rewrites.stacking import stack_gradients as stack
from devplace.step_capture.rewrites.stacking_inputs import stack_inputs as join_products
from devplace.step_capture.sources import Sources, find_sources
from devplace.step_capture.step import TracedStep
from devplace.step_capture.tags import Tagger, resolve_unknown
from devplace.step_capture.trace_context import trace_settings, undisturbed

Progress = Callable[[str, int], None]
_one_at_a_time = threading.RLock()  # a trace changes what is torch's for the whole process


def capture(
    model: torch.nn.Module,
    example_inputs: Any = (),
    loss_fn: Callable[..., Any] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    micro_batches: int = 1,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    batch_dims: BatchDims | None = None,
    compare_batches: bool = True,
    clip_grad_norm: float | None = None,
    autocast: torch.dtype | None = None,
    stack_gradients: bool | None = None,
    fuse: bool = False,
    stack_inputs: bool = False,
    recompute: bool | Sequence[str] = False,
    name: str | None = None,
    device: str | None = None,
    progress: Progress | None = None,
    known: Known | None = None,
) -> Captured:
    """Capture one whole step: forward, backward and parameter update as one flat graph.

    With an optimizer it is a training step, with only a loss function an evaluation of the loss,
    with neither an inference. Nothing changes: model, optimizer and every random generator are
    afterwards as before, and the model may be on the meta device. Nothing is computed, but for
    micro-batches: those are compared with the whole batch on the example inputs. The step is
    captured for CUDA if any parameter, buffer or input is there; what is too large for a GPU may
    stay on the CPU.

    Args:
        model: The module; its training flag is respected.
        example_inputs: A tensor, a tuple of positional inputs, or a dict of keyword inputs; of
            these only shapes and dtypes matter (for micro-batches, values too).
        loss_fn: `loss_fn(model, *args, **kwargs)` gives a scalar, or `(loss_sum, weight)`, or with
            further outputs `(loss, {name: tensor})` or a dict with `loss`, which the step returns
            so; a torch loss such as `F.cross_entropy` or `nn.MSELoss()` is applied to the model's
            output and the last positional input. Without it, the model must return the loss or
            have `.loss`.
        optimizer: One of torch.optim that takes dense gradients, over parameters of the model; or
            a list of several, each over its own.
        micro_batches: Number of chunks the batch is cut into. Loss and gradients are those of the
            whole batch; on the example batch both are computed and compared.
        example_kwargs: Further keyword inputs.
        batch_dims: For micro-batches: name of an input -> the dimension its rows are in, or None if
            all micro-batches read all of it. Names are `"0"` (or 0) for the first positional input,
            `"1.mask"` for an entry of the second, the keyword for others. What is not named is cut
            along its first dimension if that has as many rows as the batch, which are those of the
            first input.
        compare_batches: Whether another loss, or other gradients, of micro-batches on the example
            batch are an error. If not, nothing is compared, and the loss is the mean of those of
            micro-batches, as in any accumulation of gradients: for losses of pairs of rows, or that
            balance the load of experts.
        clip_grad_norm: Largest 2-norm of all gradients of the model, as
            `torch.nn.utils.clip_grad_norm_(model.parameters(), ...)`.
        autocast: Low-precision dtype of the forward pass (`torch.bfloat16`).
        stack_gradients: Compute the gradient of a weight that is used many times, as in unrolled
            recurrent nets, by one product of all rows instead of one for every use: fewer ops,
            other rounding than PyTorch's, and what it reads is kept until the last use. Only where
            that moves fewer bytes. By default if ops are fused.
        fuse: Make one op of ops that one compiled kernel can compute (`graph.fusion`): faster, with
            other rounding than PyTorch's. What is cheap to compute again is not kept for the
            backward pass, and random numbers are other ones of the same distribution.
        stack_inputs: Multiply all inputs of a recurrent layer by its weight at once, wherever they
            are there before the layer begins: faster on one device by analytic costs (not measured
            on GPUs), slower on several, where layers then wait for each other.
        recompute: Modules whose forward pass is computed again in the backward pass, which then
            keeps only what they read and give: less memory for more time, with the same numbers.
            True: the repeated blocks of the model, such as its layers (`named_blocks`).
        name: Name of the graph; the model's class by default.
        device: torch device type the step is captured for, `cpu` or `cuda`; by default where the
            model is. Wherever the model lies, it stays there.
        progress: Called with a stage and the number of nodes traced so far.
        known: Given to captures of one step with several numbers of micro-batches, it spares them
            to find out again what is the same. The model must stay as it is meanwhile.

    Returns:
        The graph, with what is needed to run it.

    Raises:
        CaptureError: The step cannot be one graph, or micro-batches give another loss or other
            gradients than the whole batch; says where and what to do.

    Warns:
        UserWarning: Micro-batches were not compared with the whole batch; says why.

    Complexity: Linear, 1 to 2 ms of CPU per op; more for micro-batches.
    """
    with _one_at_a_time:
        model, optimizer = unwrap(model), as_one(optimizer)
        batch = make_batch(example_inputs, example_kwargs, micro_batches, batch_dims)
        sources = find_sources(model)
        update = _read_optimizer(model, optimizer, sources)
        _check_options(update, clip_grad_norm, autocast)
        mode = "train" if update else "inference" if loss_fn is None else "eval-loss"
        if mode == "inference" and batch.sizes:
            raise CaptureError("micro_batches > 1 needs a loss; inference takes the batch as one.")
        request = CaptureRequest(
            model,
            call=model if mode == "inference" else loss_call(model, loss_fn),
            sources=sources,
            batch=batch,
            mode=mode,
            update=update,
            clip_grad_norm=clip_grad_norm,
            autocast=autocast,
            device_type=_device_type(sources, batch.leaves, device),
            optimizer=optimizer,
            loss_fn=loss_fn,
            adds_up=loss_fn is not None and is_torch_loss(loss_fn) and is_sum(loss_fn),
            stack_gradients=fuse if stack_gradients is None else stack_gradients,
            fuse=fuse,
            stack_inputs=stack_inputs,
            has_gradients=mode == "train",
            compares_batches=compare_batches,
            recompute=named_blocks(model, recompute),
        )
        known = known or Known()

        def trace(each: CaptureRequest, rehearsed: Frames | None) -> Traced:
            return _rewritten(*_traced(each, progress, rehearsed))

        if batch.is_cut:
            step, gm, unchecked = trace_chunks(request, trace, known)
        else:
            (step, gm), unchecked = _rewritten(*_whole(request, progress, known)), ""
        known.frames = step.frames
        meta = _meta(step.request, micro_batches, batch_dims, unchecked)
        if not request.stack_gradients:
            meta["spared_by_stacking"] = num_spared_products(gm.graph)
        graph = to_graph(gm, step, name or type(model).__name__, meta)
        return fuse_graph(graph) if fuse else graph


def _whole(request: CaptureRequest, progress: Progress | None, known: Known) -> Traced:
    """The trace of a whole batch; where others will compute blocks again, it is shared by all."""
    if not known.blocks:
        return _traced(request, progress, known.frames)
    if request.fuse not in known.whole:
        known.whole[request.fuse] = _traced(request, progress, known.frames, known.blocks)
    step, gm = known.whole[request.fuse]
    mine = copy(step)
    mine.request, mine.inputs = replace(step.request, recompute=request.recompute), [*step.inputs]
    return mine, _LazyGraphModule(gm, deepcopy(gm.graph))


def _traced(
    request: CaptureRequest,
    progress: Progress | None,
    rehearsed: Frames | None = None,
    blocks: Sequence[str] = (),
) -> Traced:
    """Rehearse the step, unless it was, and trace it.

    Args:
        blocks: Modules whose nodes are tagged, beside those that are computed again.
    """
    tagger = Tagger(request.model, progress, blocks or request.recompute)
    step = TracedStep(request, tagger, rehearsed=rehearsed)
    with torch.inference_mode(False), undisturbed():
        flat = _fakes(step)
        try:
            gm = _trace(step, flat, tagger)
        except GradientsNeededError:
            if request.has_gradients:
                raise
            request = replace(request, has_gradients=True)
            return _traced(request, progress, rehearsed, blocks)
        except CannotCopyError:
            return _traced(replace(request, copies_batches=False), progress, rehearsed, blocks)
    return step, gm


def _refuse_difference(step: TracedStep) -> None:
    """Refuse a step that would be another one after it has run: it keeps the values it read.

    Raises:
        CaptureError: Names the first of the values that running the step changes.
    """
    difference = step.difference
    if difference is None:
        return
    is_named = isinstance(difference, CaptureError) and not isinstance(difference, DifferentError)
    if is_named or not step.frames.changed:
        raise explain(difference, step)
    (place, now), *_ = step.frames.changed
    where = f" ({difference.where})" if isinstance(difference, DifferentError) else ""
    before, after = shown(place.value), shown(now)
    after = f"another {after.removeprefix('a ')}" if before == after else after
    raise CaptureError(
        f"What a step computes must not depend on values that it changes: {place.described} goes "
        f"from {before} to {after} in a step, and a captured step keeps the "
        f"first{where}. Keep it in a buffer (register_buffer) that is there from the start, of a "
        f"module that is part of the model (model.extra = module), or pass it as an input tensor; "
        f"if only a first step changes it, run one before the capture."
    )


def _read_optimizer(model: torch.nn.Module, optimizer: Any, sources: Sources) -> Update | None:
    if optimizer is None:
        return None
    by_id = {id(p): n for n, p in model.named_parameters(remove_duplicate=False)}
    for parameter, tensor in sources.parameters.items():
        by_id[id(tensor)] = parameter
    update = make_update(optimizer, sources.parameters, by_id)
    refuse_hooks(sources.parameters, optimizer)
    return update


def _check_options(
    update: Update | None, clip_grad_norm: float | None, autocast: torch.dtype | None
) -> None:
    is_number = isinstance(clip_grad_norm, (int, float))
    if clip_grad_norm is not None and not (is_number and update and clip_grad_norm > 0):
        raise CaptureError(
            f"clip_grad_norm must be positive and needs an optimizer, got {clip_grad_norm!r}."
        )
    if torch._C._is_any_autocast_enabled():
        raise CaptureError(
            "Autocast must be given to capture, not put around it: leave the autocast block and "
            "pass autocast=torch.bfloat16."
        )
    if autocast is not None and autocast not in (torch.bfloat16, torch.float16):
        raise CaptureError(f"autocast must be torch.bfloat16, got {autocast!r}.")
    if autocast is torch.float16 and update is not None:
        raise CaptureError(
            "Training in float16 needs loss scaling, which is not supported. Use torch.bfloat16."
        )


def _device_type(sources: Sources, leaves: list[Any], wanted: str | None) -> str:
    if wanted is not None and wanted not in torch_types():
        known = " or ".join(map(repr, torch_types()))
        raise CaptureError(f"A step is captured for {known}, got device={wanted!r}.")
    tensors = [*sources.parameters.values(), *sources.buffers.values()]
    tensors += [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    found = [t.device.type for t in tensors if t.device.type != "meta"]
    fast = [each for each in found if is_accelerator(each)]
    kind = wanted or [*fast, *found, CPU.torch_type][0]
    if kind == GPU.torch_type and not torch.cuda.is_available():
        raise CaptureError(
            "A step is captured for CUDA where torch finds a GPU, and it finds none here: capture "
            "it for the CPU (device='cpu'), which can be planned for GPUs as well."
        )
    return kind


def _meta(
    request: CaptureRequest, micro_batches: int, batch_dims: BatchDims | None, unchecked: str
) -> dict[str, Any]:
    further = {
        "batch_dims": named_dims(batch_dims),
        "unchecked": unchecked,
        "tied": request.sources.shared,
        "derivatives": request.has_gradients and request.mode != "train",
        BATCH_ON: _batch_home(request.batch.leaves),
    }
    return {key: value for key, value in further.items() if value} | {
        "mode": request.mode,
        "optimizer": request.update.kind if request.update else None,
        "micro_batches": micro_batches,
        "device": request.device_type,
        "torch": str(torch.__version__),
        "training": request.model.training,
        "clip_grad_norm": request.clip_grad_norm,
        "stack_gradients": request.stack_gradients,
        "fuse": request.fuse,
        "stack_inputs": request.stack_inputs,
        "recompute": list(request.recompute),
        "autocast": str(request.autocast).removeprefix("torch.") if request.autocast else None,
        "micro_batch_sizes": list(request.batch.sizes),
    }


def _batch_home(leaves: list[Any]) -> str:
    """Name of the GPU on which all of a batch lies; empty if it lies on the host."""
    places = {str(leaf.device) for leaf in leaves if isinstance(leaf, torch.Tensor)}
    home = places.pop() if len(places) == 1 else ""
    return home if is_accelerator(home) else ""


def _trace(step: TracedStep, flat: list[torch.Tensor], tagger: Tagger) -> torch.fx.GraphModule:
    """Trace the step and make its graph functional and clean."""

    def install() -> None:
        mode = get_proxy_mode()
        if mode is not None:
            tagger.install(mode.tracer)
            step.fakes.tracer = mode.tracer

    step.install = install
    options: dict[str, Any] = {}
    if "_disable_torch_fn_metadata_mode" in inspect.signature(make_fx).parameters:
        options["_disable_torch_fn_metadata_mode"] = True  # a Python call per torch function
    tracer = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True, **options)
    try:
        with trace_settings(step.request.device_type):
            gm = tracer(*flat)
            _drop_failed(gm.graph)
            refuse_written(gm, step)
            refuse_stray_parameters(gm, step)
            make_functional(gm, tagger)
    except (Exception, SystemExit) as error:
        raise explain(error, step) from None
    resolve_unknown(gm.graph)
    clean(gm.graph)
    own_memory(gm.graph)
    refuse_written_inputs(gm, step)
    return gm


def _rewritten(step: TracedStep, gm: torch.fx.GraphModule) -> Traced:
    """Compute blocks again, and make what shall be fast so."""
    if step.request.is_compared:
        step.compared = compared_graph(gm, step)
        drop_last_results(gm.graph, len(step.extra))
    if step.request.recompute:
        recompute_blocks(gm.graph)
    if step.request.stack_gradients:
        stack(gm.graph)
        clean(gm.graph)
    if step.request.stack_inputs:
        join_products(gm.graph)
        clean(gm.graph)
    if step.request.fuse:
        _make_fusible(gm.graph, step)
    _refuse_difference(step)
    return step, gm


def _drop_failed(graph: torch.fx.Graph) -> None:
    """Drop ops that have raised, where the step has caught that and gone on."""
    for node in reversed(list(graph.nodes)):
        schema = getattr(node.target, "_schema", None)
        gives = schema is not None and bool(schema.returns) and not schema.is_mutable
        if gives and "val" not in node.meta and not node.users:
            graph.erase_node(node)


def _make_fusible(graph: torch.fx.Graph, step: TracedStep) -> None:
    """Rewrite what would stand in the way of fast kernels."""
    if draw_by_counter(graph):
        step.inputs.append(Input("scalar", RANDOM_KEYS))
    split_convolution_gradients(graph)
    if kind_of(step.request.device_type).has_matrix_cores:
        pad_products(graph)
        lay_channels_last(graph, step.inputs)
        direct_cross_entropy(graph)
    clean(graph)
    cast_weights_once(graph, step.inputs)
    recompute(graph, spans_passes=True)
    clean(graph)


def _fake_state(request: CaptureRequest, entry: Input, device: str) -> torch.Tensor:
    param = request.sources.parameters[entry.key]
    assert request.update is not None
    fresh = request.update.rules[entry.key].fresh_of(str(entry.slot), param)
    if fresh.shape == tuple(param.shape):
        return torch.empty_like(param, dtype=fresh.dtype, device=device)
    return torch.empty(fresh.shape, dtype=fresh.dtype, device=device)


def _fakes(step: TracedStep) -> list[torch.Tensor]:
    """Fake tensors for the step's inputs, laid out in memory as the real ones."""
    request = step.request
    sources, device = request.sources, request.device_type

    def fake(like: torch.Tensor, requires_grad: bool = False) -> torch.Tensor:
        made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
        return made.requires_grad_(requires_grad)

    flat: list[torch.Tensor] = []
    with step.fakes.mode:
        for entry in step.inputs:
            if entry.kind == "parameter":
                real = sources.parameters[entry.key]
                flat.append(fake(real, real.requires_grad))
            elif entry.kind == "buffer":
                flat.append(fake(sources.buffers[entry.key]))
            elif entry.kind == "state":
                flat.append(_fake_state(request, entry, device))
            elif entry.kind == "constant":
                flat.append(fake(sources.hollow[entry.key]))
            elif entry.kind == "input":
                example = request.batch.leaves[int(entry.slot)]
                flat.append(fake(example, example.requires_grad))
            else:
                flat.append(torch.empty((), dtype=torch.float64, device=device))
    return [t if t.requires_grad else t.detach() for t in flat]
