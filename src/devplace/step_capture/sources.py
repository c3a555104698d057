"""Parameters and buffers of a model: their names, ties, and how fakes take their place."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from devplace.errors import CaptureError

_OWN = ("_parameters", "_buffers", "_modules")
CONTAINERS = (OrderedDict, defaultdict, Counter, dict, list, deque, set, array, bytearray)


@dataclass(frozen=True)
class Sources:
    """Distinct parameters and buffers of a model, in `named_parameters`/`named_buffers` order.

    Attributes:
        parameters: First name -> parameter.
        buffers: First name -> buffer.
        shared: Other names of the same memory -> first name.
        overlapping: Name -> another one over the same storage, or itself if its elements overlap;
            neither may be written.
        hollow: Tensors on the meta device in plain attributes, by dotted name.
    """

    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    shared: dict[str, str]
    overlapping: dict[str, str]
    hollow: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def all(self) -> dict[str, torch.Tensor]:
        """Everything that fakes take the place of."""
        return self.parameters | self.buffers | self.hollow


def find_sources(model: torch.nn.Module) -> Sources:
    """Collect parameters and buffers; tied ones once, found by identity and by storage.

    Raises:
        CaptureError: Uninitialised (lazy) parameters, or different parameters on one storage.
    """
    parameters: dict[str, torch.Tensor] = {}
    buffers: dict[str, torch.Tensor] = {}
    shared: dict[str, str] = {}
    overlapping: dict[str, str] = {}
    first: dict[int, str] = {}
    by_storage: _ByStorage = {}
    named: list[tuple[str, torch.Tensor, bool]] = [
        (n, p, True) for n, p in model.named_parameters(remove_duplicate=False)
    ]
    named += [(n, b, False) for n, b in model.named_buffers(remove_duplicate=False)]
    for name, tensor, is_parameter in named:
        if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
            raise CaptureError(
                f"Lazy parameters must be initialised before capture: {name!r} has no shape yet. "
                f"Call the model once on an example batch."
            )
        if tensor.layout != torch.strided or tensor.is_nested:
            kind = "parameter" if is_parameter else "buffer"
            layout = "nested" if tensor.is_nested else tensor.layout
            raise CaptureError(
                f"Parameters and buffers must be dense: {kind} {name!r} is {layout}. Keep it as a "
                f"dense tensor (.to_dense()), or as indices and values, and use index_add."
            )
        if is_parameter and tensor.requires_grad and _repeats(tensor):
            raise CaptureError(
                f"Elements of a trained parameter must not share memory: those of {name!r} "
                f"(strides {tuple(tensor.stride())}) overlap. Train what they are made of, and "
                f"expand or as_strided it in forward."
            )
        if id(tensor) in first:
            shared[name] = first[id(tensor)]
            continue
        if _repeats(tensor):
            overlapping[name] = name
        twin = _twin(name, tensor, by_storage, overlapping)
        first[id(tensor)] = twin or name
        if twin is not None:
            shared[name] = twin
        else:
            (parameters if is_parameter else buffers)[name] = tensor
    hollow = {
        f"{path}.{key}" if path else key: value
        for path, module in model.named_modules()
        for key, value in module.__dict__.items()
        if isinstance(value, torch.Tensor)
        and value.device.type == "meta"
        and id(value) not in first
    }
    return Sources(parameters, buffers, shared, overlapping, hollow)


_ByStorage = dict[int, list[tuple[str, torch.Tensor]]]


def _twin(
    name: str, tensor: torch.Tensor, by_storage: _ByStorage, overlapping: dict[str, str]
) -> str | None:
    """Name of an earlier tensor over exactly the same memory."""
    if tensor.layout != torch.strided or tensor.numel() == 0:
        return None
    known = by_storage.setdefault(tensor.untyped_storage()._cdata, [])
    start, end = _extent(tensor)
    for other_name, other in known:
        other_start, other_end = _extent(other)
        if end <= other_start or other_end <= start:
            continue  # parts of one storage, such as the flat weights of an LSTM on CUDA
        both_trained = tensor.requires_grad and other.requires_grad
        if _same_geometry(tensor, other) and not both_trained:
            return other_name
        if tensor.requires_grad or other.requires_grad:
            raise CaptureError(
                f"Trained parameters must own their memory: {name!r} and {other_name!r} are "
                f"different tensors over one storage. Tie them by assigning the same Parameter "
                f"object to both names, or clone one."
            )
        overlapping |= {name: other_name, other_name: name}
    known.append((name, tensor))
    return None


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First and last byte, exclusive, in the storage."""
    steps = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.storage_offset()
    return start * tensor.element_size(), (start + steps + 1) * tensor.element_size()


def _repeats(tensor: torch.Tensor) -> bool:
    """Whether two elements may lie in one place."""
    span = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < span:
            return bool(tensor.numel())
        span += (size - 1) * stride
    return False


def _same_geometry(one: torch.Tensor, other: torch.Tensor) -> bool:
    key, other_key = ((t.shape, t.stride(), t.storage_offset(), t.dtype) for t in (one, other))
    return key == other_key


def restore(container: Any, old: Any) -> None:
    """Give a list, queue, set or dict the entries of an earlier copy, if it has others."""
    base: Any = next(kind for kind in CONTAINERS if isinstance(container, kind))
    if base in (array, bytearray):
        container[:] = old
    elif base in (list, deque):
        if len(container) == len(old) and all(a is b for a, b in zip(container, old, strict=True)):
            return
        base.clear(container)
        base.extend(container, old)
    elif base is set:
        if container != old:
            base.clear(container)
            base.update(container, old)
    elif container.keys() != old.keys() or any(container[k] is not v for k, v in old.items()):
        base.clear(container)
        base.update(container, old)


def copied(container: Any) -> Any:
    """What is in a list, queue, set or dict now."""
    if isinstance(container, (array, bytearray)):
        return container[:]
    if isinstance(container, (set, Mapping)):
        return set(container) if isinstance(container, set) else dict(container)
    return list(container)


def memory(tensor: torch.Tensor) -> int:
    """What is the same of tensors over one memory; a tensor without a storage has its own."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return id(tensor)


class Slots:
    """All places in a model, and in others, that hold one of its sources, to put tensors there."""

    def __init__(
        self,
        model: torch.nn.Module,
        sources: Sources,
    ) -> None:
        names = list(sources.all)
        index = {n: i for i, n in enumerate(names)}
        by_id = {id(t): index[n] for n, t in sources.all.items()}
        for name, first in sources.shared.items():
            by_id[id(_lookup(model, name))] = index[first]
        self._by_id = by_id
        self._places: list[list[tuple[Any, Any]]] = [[] for _ in names]
        self._tensors: Sequence[torch.Tensor] = ()
        for module in model.modules():
            self.take_in(module)

    def take_in(self, module: torch.nn.Module) -> None:
        """Add the places in a module, and put there what is in the others."""
        for container in (module._parameters, module._buffers, *_attribute_containers(module)):
            items = enumerate(container) if isinstance(container, list) else container.items()
            for key, value in tuple(items):
                place = self._by_id.get(id(value)) if isinstance(value, torch.Tensor) else None
                if place is not None:
                    self._places[place].append((container, key))
                    if self._tensors:
                        container[key] = self._tensors[place]

    def put(self, tensors: Sequence[torch.Tensor]) -> None:
        """Put the k-th tensor in every place of the k-th source."""
        self._tensors = tensors
        for places, tensor in zip(self._places, tensors, strict=True):
            for container, key in places:
                container[key] = tensor

    def get(self) -> list[Any]:
        """What is in the first place of each source now; None if it is empty."""
        return [
            container[key] if isinstance(container, list) else container.get(key)
            for (container, key), *_ in self._places
        ]


def _attribute_containers(module: torch.nn.Module) -> list[Any]:
    """Plain attributes that may hold parameters too, such as the `_flat_weights` of an LSTM."""
    own = module.__dict__
    skip = (module._parameters, module._buffers, module._modules)
    inner = [
        v for v in own.values() if type(v) in (list, dict) and v and not any(v is s for s in skip)
    ]
    return [own, *inner]


def _lookup(model: torch.nn.Module, name: str) -> torch.Tensor:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    found = module._parameters.get(leaf)
    tensor = found if found is not None else module._buffers[leaf]
    assert tensor is not None
    return tensor
