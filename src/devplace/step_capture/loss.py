"""How model, inputs and loss function become a scalar loss (or outputs)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from devplace.errors import CaptureError
from devplace.step_capture.batch import leaf_names, open_dataclasses

LossCall = Callable[..., Any]


def loss_call(model: torch.nn.Module, loss_fn: Callable[..., Any] | None) -> LossCall:
    """Function of a batch's `(*args, **kwargs)` to what the loss function returns.

    A torch function or an `nn.Module` is applied to the output and the last positional input;
    any other function gets `(model, *args, **kwargs)`; without one, the model gives the loss.

    Args:
        model: The model.
        loss_fn: As the user gave it.
    """
    if loss_fn is None:
        return lambda *args, **kwargs: _loss_of_output(_output(model, args, kwargs))
    if not callable(loss_fn):
        raise CaptureError(
            f"loss_fn must be a function of (model, *inputs) or a torch loss, got {loss_fn!r}."
        )
    if isinstance(loss_fn, type):
        raise CaptureError(
            f"loss_fn must be a function or an instance, got the class {loss_fn.__name__}. Pass "
            f"{loss_fn.__name__}()."
        )
    if not is_torch_loss(loss_fn):
        return lambda *args, **kwargs: _own_loss(loss_fn, model, args, kwargs)

    def apply(*args: Any, **kwargs: Any) -> Any:
        if not args:
            raise CaptureError(
                "A torch loss needs the target as last positional input, but the example inputs "
                "are all keywords. Write loss_fn(model, **inputs) yourself."
            )
        return loss_fn(model(*args[:-1], **kwargs), args[-1])

    return apply


def _output(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> torch.Tensor:
    """What a model gives for all inputs; says so if it does not take as many."""
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise CaptureError(
            f"Without loss_fn the model gets all inputs and gives the loss: {error}. Pass a loss, "
            f"such as F.cross_entropy, which takes the last input as the target."
        ) from None
    except ValueError:  # a builtin without a signature
        pass
    return model(*args, **kwargs)


def _own_loss(
    loss_fn: Callable[..., Any],
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """What a function of the user's returns; says so if it is one of the model's output."""
    try:
        inspect.signature(loss_fn).bind(model, *args, **kwargs)
    except TypeError as error:
        raise _not_of_model(str(error), len(args), kwargs) from None
    except ValueError:  # a builtin without a signature
        pass
    try:
        return loss_fn(model, *args, **kwargs)
    except (TypeError, AttributeError) as error:
        if type(model).__name__ in str(error) and not _was_called(error.__traceback__):
            raise _not_of_model(str(error), len(args), kwargs) from None
        raise


def _was_called(traceback: TracebackType | None) -> bool:
    """Whether an error came out of a module's forward pass."""
    while traceback is not None:
        if traceback.tb_frame.f_code is torch.nn.Module._call_impl.__code__:
            return True
        traceback = traceback.tb_next
    return False


def _not_of_model(what: str, num_args: int, kwargs: Mapping[str, Any]) -> CaptureError:
    names = [*(f"input {k}" for k in range(num_args)), *kwargs]
    return CaptureError(
        f"A loss function of your own is called as loss_fn(model, {', '.join(names)}), with the "
        f"model, not its output: {what.splitlines()[0]}. Write loss_fn=lambda model, x, y: "
        f"my_loss(model(x), y)."
    )


def is_torch_loss(loss_fn: Callable[..., Any]) -> bool:
    """Whether a loss function is applied to the model's output and the target."""
    while isinstance(loss_fn, functools.partial):
        loss_fn = loss_fn.func
    if isinstance(loss_fn, torch.nn.Module):
        return True
    return (getattr(loss_fn, "__module__", None) or "").startswith("torch.")


def _loss_of_output(output: Any) -> torch.Tensor:
    if isinstance(output, Mapping):
        loss = output.get("loss")
    elif hasattr(output, "loss"):
        loss = output.loss
    else:
        loss = output
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss
    got = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(output).__name__
    raise CaptureError(
        f"Training needs a scalar loss: without loss_fn the model must return one, or an object or "
        f"dict with 'loss', but it returned {got}. Pass loss_fn=lambda model, *inputs: ..."
    )


class Returned(NamedTuple):
    """What a loss function returned.

    Attributes:
        loss: A scalar.
        weight: That the sum of losses is divided by, or None.
        tree: All of it, if there is more than the loss: `(loss, named)` or a dict; else None.
        names: Name of each leaf of the tree.
        place: Leaf of the tree that is the loss.
    """

    loss: torch.Tensor
    weight: torch.Tensor | None = None
    tree: Any = None
    names: tuple[str, ...] = ()
    place: int = 0


def read_loss(returned: Any) -> Returned:
    """Loss, and weight or further outputs, of what the loss function returned.

    Raises:
        CaptureError: Neither a scalar, nor `(loss_sum, weight)`, nor `(loss, named outputs)`, nor a
            dict with `loss`.
    """
    is_pair = isinstance(returned, (tuple, list)) and len(returned) == 2
    if is_pair and isinstance(returned[1], Mapping):
        named = open_dataclasses(dict(returned[1]))
        names = ("loss", *leaf_names("output", named))
        return Returned(_one_number(returned[0]), None, (returned[0], named), names)
    if isinstance(returned, Mapping) and "loss" in returned:
        tree = open_dataclasses(returned)
        leaves = pytree.tree_leaves(tree)
        loss = _one_number(returned["loss"])
        place = next(k for k, leaf in enumerate(leaves) if leaf is returned["loss"])
        return Returned(loss, None, tree, tuple(leaf_names("output", tree)), place)
    loss, weight = returned if is_pair else (returned, None)
    loss = _one_number(loss)
    if weight is None:
        return Returned(loss)
    if not isinstance(weight, (torch.Tensor, int, float)):
        raise CaptureError(
            f"loss_fn must return the loss, a pair (loss_sum, weight) of scalars, or a pair (loss, "
            f"dict of further outputs): the second part is a {type(weight).__name__}. Return the "
            f"loss alone."
        )
    if not isinstance(weight, torch.Tensor):
        weight = torch.tensor(float(weight), dtype=loss.dtype, device=loss.device)
    if weight.numel() != 1:
        raise CaptureError(
            f"loss_fn must return the loss, or a pair (loss_sum, weight) of scalars: the second "
            f"part has shape {tuple(weight.shape)}. Return the loss alone, or further outputs in a "
            f"dict: (loss, {{'name': tensor}})."
        )
    return Returned(loss, _scalar(weight))


def _one_number(loss: Any) -> torch.Tensor:
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return _scalar(loss)
    is_tensor = isinstance(loss, torch.Tensor)
    got = f"shape {tuple(loss.shape)}" if is_tensor else type(loss).__name__
    has_loss = not is_tensor and isinstance(getattr(loss, "loss", None), torch.Tensor)
    part = " Return its attribute `loss`, or" if has_loss else " Return"
    raise CaptureError(
        f"The loss must be one number: loss_fn returned {got}.{part} a scalar tensor, a pair "
        f"(loss_sum, weight) of scalars, or with further outputs (loss, {{'name': tensor}})."
    )


def refuse_learned_weight(weight: torch.Tensor, parameters: Mapping[int, str]) -> None:
    """Refuse a weight that training would change: most likely it is a metric beside the loss.

    Args:
        weight: Second of the pair that the loss function returned.
        parameters: Place among the inputs of the trace -> name, of parameters that count.

    Raises:
        CaptureError: Names a parameter it depends on.
    """
    mode = get_proxy_mode()
    slot = None if mode is None else get_proxy_slot(weight, mode.tracer, None)
    if mode is None or slot is None:
        return
    inputs = mode.tracer.graph.find_nodes(op="placeholder")
    names = {inputs[place]: name for place, name in parameters.items()}
    todo, seen = [slot.proxy.node], set()
    while todo:
        node = todo.pop()
        if node in names:
            raise CaptureError(
                f"Of a pair that loss_fn returns the second is the weight that the sum of losses "
                f"is divided by, such as a number of tokens: it must not depend on "
                f"what is learned, but this one depends on parameter {names[node]!r}. Return the "
                f"loss alone, or metrics in a dict: (loss, {{'name': tensor}})."
            )
        if node not in seen:
            seen.add(node)
            todo += node.all_input_nodes


def _scalar(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(()) if tensor.ndim else tensor


def refuse_lost_gradients(
    loss: torch.Tensor,
    own: Mapping[int, str],
    outside: Mapping[int, str],
    is_met: Callable[[torch.Tensor], bool],
) -> bool:
    """Refuse gradients that a step would not have: of tensors outside the model, or re-entrant.

    Args:
        loss: What the loss function returned.
        own: `id` -> name of parameters of the model, which are other tensors during a trace.
        outside: `id` -> name of tensors outside the model, as far as there are names.
        is_met: Whether an op of the step has read a tensor.

    Returns:
        Whether the backward pass runs functions written in Python.

    Raises:
        CaptureError: A trainable tensor outside the model, or re-entrant activation checkpointing,
            is on the way from the loss back.
    """
    todo, seen, runs_python = [loss.grad_fn], set(), False
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        runs_python |= isinstance(node, torch.autograd.function.BackwardCFunction)
        if node.name() == "CheckpointFunctionBackward":
            raise CaptureError(
                "Activation checkpointing must not be re-entrant: a part of the model is run by "
                "torch.utils.checkpoint with use_reentrant=True. Pass use_reentrant=False."
            )
        leaf = getattr(node, "variable", None)
        is_real = isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor)
        if is_real and id(leaf) not in own:
            raise _trained_outside(leaf, outside.get(id(leaf)))
        if is_real and not is_met(leaf):
            raise CaptureError(
                f"What is computed from trained parameters must be computed in the step: the loss "
                f"depends on {own[id(leaf)]!r} by way of a tensor made before it, which would stay "
                f"as it is. Compute that in forward, or detach it."
            )
        todo += [after for after, _ in node.next_functions]
    return runs_python


def _trained_outside(leaf: torch.Tensor, name: str | None) -> CaptureError:
    shown = repr(name) if name else f"a tensor of shape {list(leaf.shape)}"
    return CaptureError(
        f"Trainable tensors must be parameters of the model: the loss depends on {shown}, which "
        f"is not and would get no gradient. To train it, capture one module that holds model and "
        f"criterion, with one optimizer of a parameter group for each; else freeze it "
        f"(requires_grad_(False)), or use it under torch.no_grad()."
    )
