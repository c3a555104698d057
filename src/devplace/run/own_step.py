"""The user's own step, run eagerly, as the reference for a captured one."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

from devplace.graph import Captured
from devplace.graph.program import RANDOM_KEYS
from devplace.step_capture.batch import as_call, open_dataclasses, open_objects
from devplace.step_capture.guards.frames import left_alone
from devplace.step_capture.loss import loss_call
from devplace.step_capture.optimizers.several import as_one, each_of
from devplace.step_capture.refuse import unwrap
from devplace.step_capture.sources import Slots, Sources, find_sources
from devplace.step_capture.trace_context import undisturbed


@dataclass(frozen=True)
class OwnStep:
    """What an eager step leaves behind.

    Attributes:
        results: Value per result of the captured step; None for one that it does not leave, as
            state that the optimizer makes only when it needs it.
        gradients: Parameter -> its gradient.
    """

    results: tuple[Any, ...]
    gradients: Mapping[str, Any]


def why_not_run(graph: Captured, model: Any, inputs: Any, kwargs: Any = None) -> str:
    """Why a captured step cannot be compared with the user's own; empty if it can."""
    program, model = graph.program, unwrap(model)
    for name in program.random_ops:
        op = graph.ops[program.op_of[name]]
        where = f"module {op.module!r}" if op.module else "the model itself"
        return f"it draws random numbers ({op.target} of {where}), other ones than PyTorch's"
    if any(binding.key == RANDOM_KEYS for binding in program.bindings):
        return "it draws random numbers, other ones than PyTorch's"
    tensors = [*model.parameters(), *model.buffers()]
    leaves = pytree.tree_leaves(open_dataclasses(as_call(inputs, kwargs)))
    tensors += [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if any(tensor.is_meta for tensor in tensors):
        return "the model or the batch has no values"
    other = next((t.device.type for t in tensors if t.device.type != program.device), None)
    if other is not None:
        return f"it is captured for {program.device!r}, but tensors of the model lie on {other!r}"
    return ""


def run_own(
    graph: Captured, model: Any, optimizer: Any, inputs: Any, kwargs: Any = None
) -> OwnStep:
    """Run one step eagerly on copies of all values: the whole batch, `torch.autograd`, and the
    optimizer's own `step`. Model, optimizer and random generators are as before.

    Args:
        graph: The captured step; tells the loss function, clipping and autocast.
        model, optimizer, inputs, kwargs: As for `check_step`.
    """
    model, optimizer = unwrap(model), as_one(optimizer)
    with _on_twins(graph, model) as (sources, twins, slots):
        heads, loss = _heads(graph, model, inputs, kwargs)
        after = dict(zip(twins, slots.get(), strict=True))
        gradients = _gradients(graph, optimizer, sources, twins, loss)
    state: dict[Any, Any] = {}
    if optimizer is not None:
        state = _update(optimizer, sources, twins)
    results = (t if t is None else t.detach() for t in _results(graph, heads, after, state))
    return OwnStep(tuple(results), gradients)


@contextlib.contextmanager
def own_loop(
    graph: Captured, model: Any, optimizer: Any, inputs: Any, kwargs: Any = None
) -> Iterator[Callable[[], None]]:
    """The user's own step as something to call again and again: it trains copies of all values.

    Afterwards model, optimizer, random generators, and what functions write to are as before.

    Args:
        graph: The captured step; tells the loss function, clipping and autocast.
        model, optimizer, inputs, kwargs: As for `check_step`.
    """
    model, optimizer = unwrap(model), as_one(optimizer)
    with _on_twins(graph, model) as (sources, twins, _):
        own = [] if optimizer is None else _own_optimizers(optimizer, sources, twins)

        def step() -> None:
            _, loss = _heads(graph, model, inputs, kwargs)
            _gradients(graph, optimizer, sources, twins, loss)
            for one in own:
                type(one).step(one)

        step()  # shows what the user's functions write to
        follower = sys.gettrace()
        sys.settrace(None)
        try:
            yield step
        finally:
            sys.settrace(follower)


@contextlib.contextmanager
def _on_twins(graph: Captured, model: Any) -> Iterator[tuple[Sources, dict[str, Any], Slots]]:
    """The model with copies of its tensors in their places."""
    sources = find_sources(model)
    twins = _twins(sources)
    with undisturbed(), left_alone(model, graph.loss_fn):
        slots = Slots(model, sources)
        slots.put(list(twins.values()))
        yield sources, twins, slots


def _twins(sources: Sources) -> dict[str, Any]:
    """Copies that lie as the originals and share memory as these do, by name."""
    copies = copy.deepcopy([tensor.detach() for tensor in sources.all.values()])
    return {
        name: twin.requires_grad_(tensor.requires_grad)
        for (name, tensor), twin in zip(sources.all.items(), copies, strict=True)
    }


def _heads(graph: Captured, model: Any, inputs: Any, kwargs: Any) -> tuple[list[Any], Any]:
    """Loss or outputs, detached; and the loss as it is."""
    program, mode = graph.program, graph.meta["mode"]
    args, named = as_call(inputs, kwargs)
    autocast: Any = contextlib.nullcontext()
    if graph.meta["autocast"]:
        autocast = torch.autocast(program.device, dtype=getattr(torch, graph.meta["autocast"]))
    has_gradients = mode == "train" or "derivatives" in graph.meta
    with torch.set_grad_enabled(has_gradients), autocast:
        if mode == "inference":
            leaves = pytree.tree_leaves(open_objects(model(*args, **named)))
            return [each.detach() for each in leaves if isinstance(each, torch.Tensor)], None
        loss = _one_number(loss_call(model, graph.loss_fn)(*args, **named))
    return [loss.detach()], loss


def _one_number(returned: Any) -> Any:
    """The loss of what a loss function returned: it, `(loss_sum, weight)`, or beside others."""
    if isinstance(returned, Mapping):
        returned = returned["loss"]
    if isinstance(returned, (tuple, list)) and len(returned) == 2:
        loss, weight = returned
        returned = loss if isinstance(weight, Mapping) else loss / weight
    return returned.reshape(())


def _gradients(
    graph: Captured, optimizer: Any, sources: Sources, twins: Mapping[str, Any], loss: Any
) -> dict[str, Any]:
    """Of every parameter that the loss depends on; also put where the optimizer looks for it."""
    if optimizer is None:
        return {}
    updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
    limit = graph.meta["clip_grad_norm"]
    names = [
        name
        for name, tensor in sources.parameters.items()
        if tensor.requires_grad and (limit is not None or id(tensor) in updated)
    ]
    given = torch.autograd.grad(loss, [twins[name] for name in names], allow_unused=True)
    for name, gradient in zip(names, given, strict=True):
        twins[name].grad = gradient
    if limit is not None:
        torch.nn.utils.clip_grad_norm_([twins[name] for name in names], limit)
    return {name: twins[name].grad for name in names if twins[name].grad is not None}


def _update(optimizer: Any, sources: Sources, twins: Mapping[str, Any]) -> dict[Any, Any]:
    """Let a twin of the optimizer step; gives its state by parameter and slot."""
    state: dict[Any, Any] = {}
    for own in _own_optimizers(optimizer, sources, twins):
        type(own).step(own)  # a scheduler has put a counting function on the instance
        state |= own.state
    return {
        (name, slot): value
        for name in sources.parameters
        for slot, value in state.get(twins[name], {}).items()
    }


def _own_optimizers(optimizer: Any, sources: Sources, twins: Mapping[str, Any]) -> list[Any]:
    """Twins of the optimizer, or of each of several, over twins of the parameters."""
    twin_of = {id(tensor): twins[name] for name, tensor in sources.parameters.items()}

    def twin(parameter: Any) -> Any:
        return twin_of.setdefault(id(parameter), parameter.detach())

    found = []
    for one in each_of(optimizer):
        own = object.__new__(type(one))
        own.__dict__.update(one.__dict__)
        own.param_groups = [
            {**group, "params": [twin(p) for p in group["params"]]} for group in one.param_groups
        ]
        known = {twin(p): copy.deepcopy(kept) for p, kept in one.state.items()}
        own.state = defaultdict(dict, known)
        found.append(own)
    return found


def _results(
    graph: Captured, heads: list[Any], after: Mapping[str, Any], state: Mapping[Any, Any]
) -> list[Any]:
    """Per result of the graph its value."""
    bindings = {binding.op: binding for binding in graph.program.bindings}
    rest = iter(heads)
    found: list[Any] = []
    for result in graph.results:
        if result.replaces < 0:
            found.append(next(rest, None))
            continue
        binding = bindings[result.replaces]
        key: Any = (binding.key, binding.slot) if binding.kind == "state" else binding.key
        found.append((state if binding.kind == "state" else after).get(key))
    return found
