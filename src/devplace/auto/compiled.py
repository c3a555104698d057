"""Time torch.compile on the user's own step, for comparison."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree

from devplace.device_kinds import is_host
from devplace.graph import Captured
from devplace.step_capture.batch import as_call
from devplace.step_capture.loss import loss_call, read_loss
from devplace.tune.step_timing import WARM_UP_S, median_ns, time_steps

MODE = "reduce-overhead"
SECONDS = 1.0


def compiled_step_ns(graph: Captured, inputs: Any, kwargs: Mapping[str, Any] | None = None) -> int:
    """Step time of a copy of the model under `torch.compile(mode="reduce-overhead")`, ns.

    Forward and loss are compiled, and with them the backward pass; the update is the optimizer's
    own.

    Args:
        graph: The captured step; tells model, loss, optimizer, clipping, autocast and device.
        inputs, kwargs: A batch, in a form that `capture` takes.
    """
    device, clip_grad_norm = str(graph.meta["device"]), graph.meta["clip_grad_norm"]
    autocast = getattr(torch, graph.meta["autocast"]) if graph.meta["autocast"] else None
    model, optimizer = copy.deepcopy((graph.model, graph.optimizer))
    _move(model.to(device), optimizer, device)
    args, named = pytree.tree_map_only(
        torch.Tensor, lambda tensor: tensor.to(device), as_call(inputs, kwargs)
    )
    is_inference = graph.loss_fn is None and optimizer is None
    call = model if is_inference else loss_call(model, graph.loss_fn)
    compiled = torch.compile(call, mode=MODE)
    kind = torch.device(device).type

    def step() -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        cast = torch.autocast(kind, dtype=autocast) if autocast else contextlib.nullcontext()
        with cast, torch.set_grad_enabled(optimizer is not None):
            loss = compiled(*args, **named)
        if optimizer is not None:
            _update(model, optimizer, loss, clip_grad_norm)

    wait = torch.get_device_module(kind).synchronize
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of importing the compiler
        step()
        return median_ns(time_steps(step, wait, SECONDS, 0.0 if is_host(kind) else WARM_UP_S))


def _update(model: Any, optimizer: Any, loss: Any, clip_grad_norm: float | None) -> None:
    found = read_loss(loss)
    (found.loss if found.weight is None else found.loss / found.weight).backward()
    if clip_grad_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _move(model: Any, optimizer: Any, device: str) -> None:
    """Move the state of an optimizer beside its parameters."""
    for state in optimizer.state.values() if optimizer is not None else ():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and name != "step":
                state[name] = value.to(device)
