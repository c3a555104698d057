"""Copies of what was traced of one micro-batch, for others of its size.

Of each size the first micro-batch is traced, as it may fill caches, the second, which may read
them, and then others until one is, node for node, what a copy of the one before would be: most
often the third. Those that follow are copies of it, made at the place where the trace is: names,
writes and draws come as if they were traced, at a tenth of the time, and all that is done to the
graph later does not know the difference. Where none is such a copy, as where gradients flow from
one micro-batch to the next, all are traced.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, track_tensor
from torch.utils._python_dispatch import _disable_current_modes

from devplace.errors import CaptureError
from devplace.step_capture.analysis import tensors_in
from devplace.step_capture.guards.values import differs
from devplace.step_capture.sources import Slots
from devplace.step_capture.tags import Marks, Tag, Tagger

Node: TypeAlias = torch.fx.Node
Made = TypeVar("Made")
_NUMBER = re.compile(r"_\d+$")


class CannotCopyError(CaptureError):
    """Each micro-batch of the step has to be traced."""


class _Part(NamedTuple):
    """What one call has traced. Tensors are told by their nodes, those without one by themselves.

    Attributes:
        given: What it was given, the model's sources last.
        nodes: Those it has made, in order.
        new_constants: Constants that were made in it, by name.
        made: What it gave.
        sources: What the model's sources are afterwards, and whether it is the same object.
        before, after: Where the tagger was.
    """

    given: list[Any]
    nodes: list[Node]
    new_constants: set[str]
    made: Any
    sources: list[tuple[Any, bool]]
    before: Marks
    after: Marks


@dataclass
class _Copy:
    """A micro-batch that is copied.

    Attributes:
        parts: What is copied, of another micro-batch.
        index, other: Of this and the other one.
        nodes: The other one's -> those here.
        memories: Storage there -> storage here, and how many bytes later all of it begins.
        starts: Where the tagger was before each part that is copied.
    """

    parts: list[_Part]
    index: int
    other: int
    nodes: dict[Node, Node] = field(default_factory=dict)
    memories: dict[int, tuple[torch.UntypedStorage, int]] = field(default_factory=dict)
    starts: list[Marks] = field(default_factory=list)
    _tags: dict[Tag, Tag] = field(default_factory=dict)

    def takes(self, given: Sequence[Any]) -> bool:
        """Take what the next part is given here; whether it can be copied then."""
        part = self.parts[len(self.starts)]
        if len(part.given) != len(given):
            return False
        for theirs, mine in zip(part.given, given, strict=True):
            if not (isinstance(theirs, torch.fx.Node) and isinstance(mine, torch.fx.Node)):
                if theirs is not mine:
                    return False
            elif self.nodes.setdefault(theirs, mine) is not mine:
                return False  # one tensor there, several here
            elif not self._lie_alike(theirs, mine):
                return False
        return True

    def fits(self, traced: _Part, root: Any) -> bool:
        """Whether the next part, which was traced here, is what a copy of the other's would be."""
        part = self.parts[len(self.starts)]
        self.starts.append(traced.before)
        return (
            len(part.nodes) == len(traced.nodes)
            and all(
                self._is_copy(theirs, mine, part, traced, root)
                for theirs, mine in zip(part.nodes, traced.nodes, strict=True)
            )
            and self._are_same(part.made, traced.made)
            and self._are_same(part.sources, traced.sources)
            and self.end() == traced.after
        )

    def _is_copy(self, theirs: Node, mine: Node, part: _Part, traced: _Part, root: Any) -> bool:
        if theirs.target in part.new_constants:
            is_new = mine.target in traced.new_constants
            if not is_new or not _are_equal(root, str(theirs.target), str(mine.target)):
                return False
        elif (theirs.op, theirs.target) != (mine.op, mine.target):
            return False
        read = torch.fx.node.map_arg((theirs.args, theirs.kwargs), self.node)
        self.nodes[theirs] = mine
        tag = theirs.meta.get("tag")
        return (
            read == (mine.args, mine.kwargs)
            and (None if tag is None else self.tag(tag)) == mine.meta.get("tag")
            and self._lie_alike(theirs, mine)
        )

    def _are_same(self, theirs: Any, mine: Any) -> bool:
        (ours, spec), (others, other_spec) = pytree.tree_flatten(theirs), pytree.tree_flatten(mine)
        return spec == other_spec and all(map(self._is_same, ours, others))

    def _is_same(self, theirs: Any, mine: Any) -> bool:
        if isinstance(theirs, torch.fx.Node):
            return self.node(theirs) is mine
        if isinstance(theirs, torch.Tensor):
            return theirs is mine
        return not differs(mine, theirs)

    def _lie_alike(self, theirs: Node, mine: Node) -> bool:
        """Whether values lie alike, each memory there having one here."""
        values = [tensors_in(node.meta.get("val")) for node in (theirs, mine)]
        if len(values[0]) != len(values[1]):
            return False
        for there, here in zip(*values, strict=True):
            if (there.shape, there.dtype) != (here.shape, here.dtype):
                return False
            if there.layout is not torch.strided or there.stride() != here.stride():
                return False
            storage, shift = here.untyped_storage(), _offset(here) - _offset(there)
            known = self.memories.setdefault(_memory(there), (storage, shift))
            if (known[0]._cdata, known[1]) != (storage._cdata, shift):
                return False
        return True

    def node(self, node: Node) -> Node:
        """What is here in the place of a node."""
        if node not in self.nodes:  # of before both, such as a parameter
            self.nodes[node] = node
            for tensor in tensors_in(node.meta.get("val")):
                self.memories.setdefault(_memory(tensor), (tensor.untyped_storage(), 0))
        return self.nodes[node]

    def value(self, value: Any) -> Any:
        """A fake value like one of the other's, in the memory that is here."""
        if isinstance(value, (tuple, list)):
            return type(value)(map(self.value, value))
        if not isinstance(value, FakeTensor) or value.layout is not torch.strided:
            return value
        theirs = value.untyped_storage()
        if theirs._cdata not in self.memories:
            new = torch.UntypedStorage(theirs.nbytes(), device="meta")
            self.memories[theirs._cdata] = new, 0
        storage, shift = self.memories[theirs._cdata]
        return _fake(value, storage, (_offset(value) + shift) // value.element_size())

    def tag(self, tag: Tag) -> Tag:
        """A tag of the other's, as it is here."""
        if tag not in self._tags:
            self._tags[tag] = tag._replace(
                micro_batch=self.index if tag.micro_batch == self.other else tag.micro_batch,
                call=self._later(tag.call, lambda marks: marks.calls.get(tag.module, 0)),
                draw=self._later(tag.draw, lambda marks: marks.draw),
                block=self._later(tag.block, lambda marks: marks.block),
            )
        return self._tags[tag]

    def end(self) -> Marks:
        """Where the tagger is after the part that is copied."""
        part, start = self.parts[len(self.starts) - 1], self.starts[-1]
        calls = {
            module: start.calls.get(module, 0) + count - part.before.calls.get(module, 0)
            for module, count in part.after.calls.items()
        }
        block = start.block + part.after.block - part.before.block
        return Marks(calls, block, self._later(part.after.draw, lambda marks: marks.draw))

    def _later(self, place: int, of: Callable[[Marks], int]) -> int:
        """A number that counts through the step, by as much later as what it counts begins here."""
        for part, start in reversed(list(zip(self.parts, self.starts, strict=False))):
            if place >= of(part.before):
                return place + of(start) - of(part.before)
        return place


class Copies:
    """Traces what is done for each micro-batch, or copies what was traced for another.

    Args:
        tagger: That of the trace.
        slots: Where the model's sources are.
        is_on: Whether anything is copied.
    """

    def __init__(self, tagger: Tagger, slots: Slots, is_on: bool) -> None:
        self._tagger = tagger
        self._slots = slots
        self._is_on = is_on
        self._of_size: dict[int, list[int]] = {}
        self._traced: dict[int, list[_Part]] = {}
        self._copied: dict[int, _Copy] = {}
        self._settled: set[int] = set()  # sizes of which the next is a copy
        self._in_use: set[int] = set()  # sizes of which one is a copy
        self._tracer: Any = None

    def run(self, index: int, size: int, function: Callable[[], Made], given: Any = None) -> Made:
        """What a function gives that is called for each micro-batch.

        If there are several functions, all are called for each micro-batch, in the same order.

        Args:
            index: Of the micro-batch.
            size: Those of one size do the same.
            function: What is to be traced or copied.
            given: A tree of what it reads that is not the same tensor in all micro-batches, but for
                the model's sources and what was made in earlier calls for this micro-batch.

        Raises:
            CannotCopyError: A micro-batch is not what a copy would be.
        """
        self._tagger.micro_batch = index
        mode = get_proxy_mode()
        if mode is None or not self._is_on:  # it is rehearsed, or each is traced
            return function()
        self._tracer = mode.tracer
        read = self._named([*pytree.tree_leaves(given), *self._slots.get()])
        if index not in self._traced and index not in self._copied:
            self._begin(index, size)
        copy, parts = self._copied.get(index), self._traced.get(index)
        is_copy = copy is not None and copy.takes(read)
        if parts is None:
            if copy is None or not is_copy:
                raise CannotCopyError("A micro-batch is given what the one before was not.")
            self._in_use.add(size)
            with _disable_current_modes():
                made: Made = self._copy(copy)
            return made
        made = self._trace(parts, function, read)
        if copy is not None:
            self._compare(index, size, is_copy and copy.fits(parts[-1], self._tracer.root))
        return made

    def _begin(self, index: int, size: int) -> None:
        """Trace the first two of a size, and then until one is what a copy would be."""
        traced = self._of_size.setdefault(size, [])
        if len(traced) > 1:
            self._copied[index] = _Copy(self._traced[traced[-1]], index, traced[-1])
        if size not in self._settled:
            traced.append(index)
            self._traced[index] = []

    def _compare(self, index: int, size: int, is_copy: bool) -> None:
        if is_copy:
            self._settled.add(size)
        elif size in self._in_use:
            raise CannotCopyError("A micro-batch is not what a copy of the one before would be.")
        else:
            self._settled.discard(size)
            del self._copied[index]

    def _named(self, values: Iterable[Any]) -> list[Any]:
        """The nodes of tensors; those without one as they are, and None for all else."""
        found = []
        for value in values:
            is_tensor = isinstance(value, torch.Tensor)
            slot: Any = get_proxy_slot(value, self._tracer, None) if is_tensor else None
            found.append(slot.proxy.node if slot else value if is_tensor else None)
        return found

    def _trace(self, parts: list[_Part], function: Callable[[], Made], read: list[Any]) -> Made:
        graph = self._tracer.graph
        constants = {node.target for node in graph.find_nodes(op="get_attr")}
        last = next(iter(reversed(graph.nodes)))  # no iterator yet before torch 2.13
        before, sources = self._tagger.marks(), self._slots.get()
        made = function()
        nodes = []
        while last.next.op != "root":
            last = last.next
            nodes.append(last)
        leaves, spec = pytree.tree_flatten(made)
        named = zip(leaves, self._named(leaves), strict=True)
        now = self._slots.get()
        part = _Part(
            read,
            nodes,
            {str(node.target) for node in nodes if node.op == "get_attr"} - constants,
            pytree.tree_unflatten([leaf if name is None else name for leaf, name in named], spec),
            [
                (name, new is old)
                for name, new, old in zip(self._named(now), now, sources, strict=True)
            ],
            before,
            self._tagger.marks(),
        )
        parts.append(part)
        return made

    def _copy(self, copy: _Copy) -> Any:
        """Copy the next part of a micro-batch, and gives what it gives."""
        graph, part = self._tracer.graph, copy.parts[len(copy.starts)]
        copy.starts.append(self._tagger.marks())
        attributes: dict[str, str] = {}
        for node in part.nodes:
            target = node.target
            if target in part.new_constants:
                if target not in attributes:
                    attributes[target] = self._new_constant(target)
                target = attributes[target]
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), copy.node)
            name = None if node.op == "get_attr" else _NUMBER.sub("", node.name)
            made = graph.create_node(node.op, target, args, kwargs, name)
            made.meta = dict(node.meta)
            if "val" in node.meta:
                made.meta["val"] = copy.value(node.meta["val"])
            if "tag" in node.meta:
                made.meta["tag"] = copy.tag(node.meta["tag"])
            copy.nodes[node] = made
            self._tagger.count()
        self._tagger.move_to(copy.end())
        self._put(part, copy)
        return pytree.tree_map_only(
            torch.fx.Node, lambda node: self._tensor(copy.node(node)), part.made
        )

    def _new_constant(self, name: str) -> str:
        """The name of another constant of the same value."""
        root = self._tracer.root
        made: str = self._tracer.get_fresh_qualname("_tensor_constant")
        setattr(root, made, getattr(root, name).clone())
        return made

    def _put(self, part: _Part, copy: _Copy) -> None:
        """Let the model's sources be what they are after a part."""
        now = self._slots.get()
        nodes = self._named(now)
        for place, (name, is_same) in enumerate(part.sources):
            new = copy.node(name) if isinstance(name, torch.fx.Node) else name
            if new is nodes[place]:
                continue
            if is_same:  # it was written
                self._track(now[place], new)
            else:
                now[place] = self._tensor(new) if isinstance(new, torch.fx.Node) else new
        self._slots.put(now)

    def _tensor(self, node: Node) -> torch.Tensor:
        """A fake tensor that the tracer knows as a node."""
        value = node.meta["val"]
        made = _fake(value, value.untyped_storage(), value.storage_offset())
        self._track(made, node)
        return made

    def _track(self, tensor: torch.Tensor, node: Node) -> None:
        track_tensor(tensor, self._tracer.proxy(node), constant=None, tracer=self._tracer)


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _offset(tensor: torch.Tensor) -> int:
    """Where a tensor begins in its memory, in bytes."""
    return int(tensor.storage_offset() * tensor.element_size())


def _are_equal(root: Any, name: str, other: str) -> bool:
    """Whether two constants of a trace have the same values."""
    with _disable_current_modes():
        one, two = getattr(root, name), getattr(root, other)
        if any(isinstance(each, FakeTensor) for each in (one, two)):
            return False
        return (one.shape, one.dtype) == (two.shape, two.dtype) and bool(torch.equal(one, two))


def _fake(like: FakeTensor, storage: torch.UntypedStorage, offset: int) -> FakeTensor:
    """A fake tensor of the same shape in a memory; `offset` in elements."""
    bare = torch.empty(0, dtype=like.dtype, device="meta")
    bare.set_(storage, offset, like.shape, like.stride())
    if like.is_conj():
        torch._C._set_conj(bare, True)
    if like.is_neg():
        torch._C._set_neg(bare, True)
    return FakeTensor(like.fake_mode, bare, like.device)
