"""Where each traced node comes from: stage, module, call, source line and micro-batch."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from devplace.errors import CaptureError
from devplace.graph.graph import Stage
from devplace.step_capture.analysis import is_random
from devplace.step_capture.draws import Draws
from devplace.step_capture.writes import write_node

UNKNOWN = "?"
_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_LOSSES = os.path.join(_PACKAGE, "micro_batches", "chunk_loss.py")  # between user code and torch
_GUARDS = os.path.join(_PACKAGE, "guards") + os.sep  # between a step's functions and its ops
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_STDLIB = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_SKIP, _STOP, _USER = 0, 1, 2
_PROGRESS_EVERY = 500


class Tag(NamedTuple):
    """Origin of a node; `module` is `UNKNOWN` until it is taken from the node's inputs.

    Random ops have the position of their `draw` in the step; ops of one position draw the same.
    `block` numbers calls of blocks that are computed again; -1: the node is in none. The copies
    that do so, of blocks or of single ops, are `is_recomputed`.
    """

    stage: Stage
    module: str
    call: int = 0
    line: str = ""
    micro_batch: int = -1
    draw: int = -1
    block: int = -1
    is_recomputed: bool = False


class Marks(NamedTuple):
    """How far the numbers of tags have come.

    Attributes:
        calls: Calls of each module so far.
        block: Calls of blocks that are computed again.
        draw: Position of the next draw.
    """

    calls: Mapping[str, int]
    block: int
    draw: int


@cache
def _frame_kind(filename: str) -> int:
    if filename.startswith(_PACKAGE):
        return _SKIP if filename.startswith((_GUARDS, _LOSSES)) else _STOP
    in_stdlib = filename.startswith(_STDLIB) and "-packages" not in filename
    return _SKIP if filename.startswith(("<", _TORCH)) or in_stdlib else _USER


def is_user_file(filename: str) -> bool:
    """Whether a file is the user's: not torch, the standard library or this package."""
    return _frame_kind(filename) == _USER


def user_line() -> str:
    """`file.py:12` of the innermost frame of user code, or empty when capture itself is nearer."""
    frame = sys._getframe(1)
    if frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back  # type: ignore[assignment]
    own = True
    while frame is not None:
        filename = frame.f_code.co_filename
        kind = _frame_kind(filename)
        if kind == _USER:
            return f"{os.path.basename(filename)}:{frame.f_lineno}"
        if kind == _STOP and not own:
            return ""
        own = own and kind == _STOP
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def describe_place(module: str | None, line: str) -> str:
    """Text that names a module and source line, as far as they are known."""
    if module is None:
        return line or "an unknown place"
    shown = f"module {module!r}" if module else "the model"
    return f"{shown} ({line})" if line else shown


def control_flow(target: Any, where: str) -> CaptureError:
    """Error for an op that has sub-graphs."""
    return CaptureError(
        f"Control flow as an operator cannot be placed: {where} runs torch's {target.name()!r}, "
        f"whose sub-graphs run as values decide. Compute both branches and take torch.where of "
        f"them, or decide outside the step."
    )


class Tagger:
    """Tags every node of a trace.

    Forward nodes get the innermost module being called; backward nodes the tag of the forward op
    they differentiate, found through autograd sequence numbers; the rest what `owner` says.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        progress: Callable[[str, int], None] | None = None,
        blocks: Sequence[str] = (),
    ) -> None:
        self.module_names = {id(m): name for name, m in model.named_modules()}
        self.stage: Stage = "forward"
        self.micro_batch = -1
        self.owner: str | None = None
        self.fixed: Tag | None = None
        self.draws = Draws()
        self.newest: Tag | None = None
        self._stack: list[tuple[str, int, int]] = [("", 0, -1)]  # module, its call, block
        self._calls: dict[str, int] = {}
        self._blocks = tuple(blocks)
        self._block_calls = 0
        self._by_sequence: dict[int, Tag] = {}
        self._progress = progress
        self._count = 0

    def restart(self) -> None:
        """Forget the calls so far: what comes is the run to be tagged."""
        self.stage, self.micro_batch, self.owner = "forward", -1, None
        self._stack, self._calls, self._block_calls = [("", 0, -1)], {}, 0
        self.draws = Draws()  # the rehearsal has left torch's generator elsewhere
        self.draws.start()

    def marks(self) -> Marks:
        """How far the numbers of tags have come."""
        return Marks(dict(self._calls), self._block_calls, self.draws.place)

    def move_to(self, marks: Marks) -> None:
        """Go on from there."""
        self._calls, self._block_calls = dict(marks.calls), marks.block
        self.draws.move_to(marks.draw)

    def count(self) -> None:
        """Tell how many nodes there are, now and then: there is one more."""
        self._count += 1
        if self._progress is not None and self._count % _PROGRESS_EVERY == 0:
            self._progress("trace", self._count)

    @contextlib.contextmanager
    def module_hooks(self) -> Iterator[None]:
        """Follow module calls through global hooks, so that no module is touched."""
        handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        name = self.module_names.get(id(module))
        if name is None:
            self._stack.append(self._stack[-1])
            return
        call = self._calls.get(name, 0)
        self._calls[name] = call + 1
        block = self._stack[-1][2]
        if block < 0 and any(b in ("", name) or name.startswith(f"{b}.") for b in self._blocks):
            block = self._block_calls
            self._block_calls += 1
        self._stack.append((name, call, block))

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if len(self._stack) > 1:
            self._stack.pop()

    @property
    def current_module(self) -> str:
        """Path of the innermost module being called."""
        return self._stack[-1][0]

    def tag(self) -> Tag:
        """Tag of a node made now."""
        if self.fixed is not None:
            return self.fixed
        if self.stage == "update" or self.owner is not None:
            return Tag(self.stage, self.owner or "", 0, "", self.micro_batch)
        node = torch._C._current_autograd_node()
        if node is not None or self.stage == "backward":
            sequence = node._sequence_nr() if node is not None else -1
            forward = self._by_sequence.get(sequence)
            if forward is not None:
                return forward._replace(stage="backward")
            return Tag("backward", UNKNOWN, 0, "", self.micro_batch)
        module, call, block = self._stack[-1]
        tag = Tag("forward", module, call, user_line(), self.micro_batch, block=block)
        # The newest autograd node was made for this op, or for an earlier one which keeps it.
        self._by_sequence.setdefault(torch.autograd._get_sequence_nr() - 1, tag)
        return tag

    def install(self, tracer: Any) -> None:
        """Make `tracer` tag each node it creates."""
        create = tracer.create_node

        def create_node(
            kind: str, target: Any, args: Any = (), kwargs: Any = None, *rest: Any, **options: Any
        ) -> Any:
            if isinstance(target, torch._ops.HigherOrderOperator):
                raise control_flow(target, describe_place(self.current_module, user_line()))
            where = describe_place(self.current_module, "")
            other = write_node(create_node, kind, target, args, kwargs or {}, where)
            if other is not None:
                return other
            node = create(kind, target, args, kwargs, *rest, **options)
            tag = self.tag()
            node.meta["tag"] = self.newest = tag
            if self.fixed is None and is_random(node):
                node.meta["tag"] = tag._replace(draw=self._draw(tag))
            self.count()
            return node

        tracer.create_node = create_node

    def _draw(self, tag: Tag) -> int:
        return self.draws.take(
            describe_place(None if tag.module == UNKNOWN else tag.module, tag.line)
        )


def resolve_unknown(graph: torch.fx.Graph) -> None:
    """Give gradient sums made by the autograd engine the tag of what they add."""
    for node in graph.nodes:
        tag = node.meta.get("tag")
        if node.op in ("placeholder", "output"):
            continue
        if tag is None or tag.module == UNKNOWN:
            base = tag or Tag("forward", UNKNOWN)
            known = [n.meta["tag"] for n in node.all_input_nodes if "tag" in n.meta]
            known = [t for t in known if t.module != UNKNOWN and t.stage != "source"]
            near = known[-1] if known else Tag(base.stage, "")
            node.meta["tag"] = near._replace(stage=base.stage, draw=base.draw)


def recomputed(tag: Tag) -> Tag:
    """The tag of a copy that the backward pass computes."""
    return tag._replace(stage="backward", is_recomputed=True)
