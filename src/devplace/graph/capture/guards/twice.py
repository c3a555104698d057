"""Two runs of a step, one after the other, on tensors without values: they must do the same."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from devplace.errors import CaptureError
from devplace.graph.capture.analysis import draws, written_by
from devplace.graph.capture.sources import memory
from devplace.graph.capture.tags import in_checkpoint

_DEVICE = torch.ops.prim.device.default
_ACCUMULATES = "torch::autograd::AccumulateGrad"
_DRAWN = ("drawn",)
_MOST_NUMBERS = 10_000  # of a tensor from outside that is compared by value
_PLAIN = (int, float, bool, str, complex, type(None))

Token = tuple[Any, ...]
"""What a tensor is, the same in both runs: a source, one from outside, or made by a numbered op."""


class _Call(NamedTuple):
    """An op, what it is given, with `%` for tensors, these tensors, and the memory it writes."""

    target: Any
    text: Any
    reads: tuple[Token, ...]
    written: tuple[int, ...] = ()


class Recorder(TorchDispatchMode):
    """Notes the ops of a run of the step; those of the run after it must be the same.

    What depends on nothing that changes from step to step, such as a mask, is steady: one run may
    make it and the next take it from a cache. All other ops must come in the same order.

    Args:
        sources: Tensors that stand for the step's inputs.
        place: Tells where the run is.
        before: The run before, if there was one.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        sources: Sequence[torch.Tensor],
        place: Callable[[], str],
        before: Recorder | None = None,
    ) -> None:
        super().__init__()
        self._place, self._before = place, before
        self._tokens: dict[int, Token] = {}
        self._alive: list[torch.Tensor] = []  # so that ids stay their own
        self._calls: list[_Call] = []
        self._matched = 0
        self._numbers: dict[Any, int] = before._numbers if before else {}
        self._steady: set[Token] = before._steady if before else set()
        self._own: set[int] = set()
        self._spoilt: set[int] = set()
        self._seed = _new_seed()
        self._num_sources = len(sources)
        for index, source in enumerate(sources):
            self._put(source, ("source", index))
        self._given = {memory(source) for source in sources}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        node = torch._C._current_autograd_node()
        if node is not None and node.name() == _ACCUMULATES:
            raise _adds_to_gradients(self._place())
        is_drawn = draws(func, args, kwargs)
        if is_drawn and not in_checkpoint():
            self._check_seed(self._place())
            self._seed = _new_seed()
        reads: list[Token] = [_DRAWN] if is_drawn else []
        text = self._sign((args, kwargs), reads)
        made = func(*args, **kwargs)
        written = tuple(memory(tensor) for tensor in written_by(func, args, kwargs))
        self._add(_Call(func, text, tuple(reads), written), made)
        return made

    def drawn(self, value: Any) -> Any:
        """A generator on the host gave a value."""
        self._add(_Call("a draw", repr(value), (_DRAWN,)), ())
        return value

    def finish(self, results: Sequence[Any], steady: Collection[int]) -> None:
        """The run is over.

        Args:
            results: What it gave.
            steady: Places of the sources that no step changes.

        Raises:
            CaptureError: It did not do all that the run before did.
        """
        self._check_seed("the step")
        if self._before is None:
            written = {each for call in self._calls for each in call.written}
            sources = self._alive[: self._num_sources]
            unwritten = {k for k in steady if memory(sources[k]) not in written}
            self._steady.update(("source", index) for index in unwritten)
            self._sort_out()
        reads: list[Token] = []
        self._add(_Call("the results", self._sign(results, reads), (*reads, _DRAWN)), ())

    def _check_seed(self, where: str) -> None:
        """Each draw finds the generator as the one before left it; a seed or a fork changes that.

        Ops on tensors without values draw nothing, so the generator gets a new seed for each.
        """
        if torch.default_generator.initial_seed() != self._seed:
            raise CaptureError(
                f"The step must not seed torch's generator, nor set or restore its state: what "
                f"torch.manual_seed, set_rng_state or fork_rng do in it would be lost ({where}). "
                f"Seed outside the step, or draw there and pass the numbers as an input."
            )

    @property
    def is_second(self) -> bool:
        """Whether this is the run after another."""
        return self._before is not None

    # ---- what a run does

    def _add(self, call: _Call, made: Any) -> None:
        """Note a call, and what the tensors are that it made."""
        token: Token
        if self._before is None:
            token = ("made", len(self._calls))
            self._calls.append(call)
        elif self._is_steady(call):
            token = ("steady", self._number(call))
        else:
            token = ("made", self._match(call))
        outputs = made if isinstance(made, (tuple, list)) else (made,)
        for index, tensor in enumerate(outputs):
            if isinstance(tensor, torch.Tensor):
                if not call.written and memory(tensor) not in self._given:
                    self._own.add(memory(tensor))
                self._put(tensor, (*token, index))

    def _put(self, tensor: torch.Tensor, token: Token) -> None:
        self._alive.append(tensor)
        self._tokens[id(tensor)] = token

    def _sign(self, value: Any, reads: list[Token]) -> Any:
        if isinstance(value, torch.Tensor):
            reads.append(self._tokens.get(id(value)) or self._meet(value))
            return "%"
        if isinstance(value, (tuple, list)):
            return tuple([self._sign(each, reads) for each in value])
        if isinstance(value, dict):
            return tuple([(key, self._sign(each, reads)) for key, each in value.items()])
        is_plain = isinstance(value, _PLAIN) or type(value).__module__ == "torch"
        return repr(value) if is_plain else type(value).__name__

    def _meet(self, tensor: torch.Tensor) -> Token:
        """Token of a tensor that this run has not made."""
        token: Token
        left = self._before._tokens.get(id(tensor)) if self._before else None
        if left is not None and self._before is not None:
            is_same = self._is_steady_token(left) and memory(tensor) not in self._before._spoilt
            token = left if is_same else ("left", *left)
        elif isinstance(tensor, FakeTensor):
            token = ("unknown", len(self._tokens))
        else:
            token = ("outside", _identity(tensor))
            self._given.add(memory(tensor))
        self._put(tensor, token)
        return token

    # ---- what two runs do

    def _is_steady_token(self, token: Token) -> bool:
        return token[0] in ("steady", "outside") or token in self._steady

    def _is_steady(self, call: _Call) -> bool:
        is_given = all(map(self._is_steady_token, call.reads))
        return is_given and all(each in self._own for each in call.written)

    def _number(self, call: _Call) -> int:
        """Number of a steady call; equal ones are one."""
        return self._numbers.setdefault(call[:3], len(self._numbers))

    def _sort_out(self) -> None:
        """Leave only the calls that are not steady, and number them anew."""
        names: dict[Token, Token] = {}
        calls, self._calls = self._calls, []

        def renamed(token: Token) -> Token:
            return (*names.get(token[:2], token[:2]), *token[2:])

        for index, call in enumerate(calls):
            call = call._replace(reads=tuple(map(renamed, call.reads)))
            if self._is_steady(call):
                names["made", index] = ("steady", self._number(call))
            else:
                names["made", index] = ("made", len(self._calls))
                self._calls.append(call)
                self._spoilt.update(call.written)
        self._tokens = {key: renamed(token) for key, token in self._tokens.items()}

    def _match(self, call: _Call) -> int:
        """Number of the same call in the run before.

        Raises:
            CaptureError: It did something else there.
        """
        assert self._before is not None
        calls, at = self._before._calls, self._matched
        other = calls[at] if at < len(calls) else None
        if other is None or other[:3] != call[:3]:
            raise DifferentError(call, other, self._place())
        self._matched += 1
        return at


class DifferentError(CaptureError):
    """The second of two runs does something else than the first.

    Attributes:
        where: Module and line where that shows.
        what: What is done there.
    """

    def __init__(self, call: _Call, before: _Call | None, where: str) -> None:
        what = f"{call.target} comes where {before.target if before else 'nothing'} came before"
        if before is not None and before.target == call.target:
            what = f"{call.target} is given other tensors than before"
            pairs = [(a, b) for a, b in zip(_flat(call.text), _flat(before.text), strict=False)]
            now, then = next(((a, b) for a, b in pairs if a != b), ("", ""))
            if now:
                what = f"{call.target} is given {now} after {then}"
        self.where, self.what = where, what
        super().__init__(
            f"A step must compute the same in each of two calls: in the second {what} at {where}. "
            f"A generator, clock or counter on the host decides; draw with torch, or pass what it "
            f"gives as an input tensor."
        )


def _flat(text: Any) -> list[Any]:
    if not isinstance(text, tuple):
        return [text]
    return [leaf for each in text for leaf in _flat(each)]


def _adds_to_gradients(where: str) -> CaptureError:
    return CaptureError(
        f"Gradients come from the returned loss alone: {where} calls .backward() itself, and what "
        f"that adds to .grad would be lost. Return the sum of the losses, or use "
        f"torch.autograd.grad for a gradient that is a part of the loss."
    )


def _new_seed() -> int:
    seed = int.from_bytes(os.urandom(7))
    torch.default_generator.manual_seed(seed)
    return seed


def _identity(tensor: torch.Tensor) -> Any:
    """What tells a tensor from outside from others: its value if it is small or not torch's."""
    with _disable_current_modes():
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            return id(tensor)
        if tensor.numel() <= _MOST_NUMBERS or not tensor.untyped_storage().resizable():
            values = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
            return tensor.shape, tensor.dtype, values.view(torch.uint8).numpy().tobytes()
    return id(tensor)
