"""Run a step twice on fake tensors and require the same ops."""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from devplace.errors import CaptureError
from devplace.step_capture.analysis import draws, written_by
from devplace.step_capture.draws import Draws
from devplace.step_capture.sources import memory
from devplace.step_capture.tags import control_flow

_DEVICE = torch.ops.prim.device.default
_LIFT = torch.ops.aten.lift_fresh.default  # of what is made from values or over NumPy's memory
_hooks_on_saved: Any = torch._C._autograd._top_saved_tensors_default_hooks
_ACCUMULATES = "torch::autograd::AccumulateGrad"
_MAX_NUMBERS = 10_000  # of a tensor from outside that is compared by value
_MAX_HOLDERS = 6  # from a tensor up to what outlives the step
Call = tuple[Any, Sequence[Any], Mapping[str, Any], int | None]
_PLAIN = (int, float, bool, str, complex, type(None))


class _Made(NamedTuple):
    """How a value is made: two that are made alike are one.

    Attributes:
        by: An op, or a word for a source, a tensor from outside and the like.
        given: Its arguments, with `%` for tensors.
        reads: Numbers of the values that it reads.
    """

    by: Any
    given: Any = ""
    reads: tuple[int, ...] = ()


class Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Numbers the values of a run of the step; the run after it must give the same numbers.

    A value from the run before may be read if it is steady, that is, depends on nothing that
    changes from step to step, such as a mask: then it does not matter which run made it.

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
        self.results: tuple[Any, tuple[int, ...]] = ("", ())
        self.needs_backward = False
        self._place, self._before = place, before
        self._numbers: dict[_Made, int] = before._numbers if before else {}
        self._places: dict[int, str] = {}  # of what the run before has not made
        self._is_steady: list[bool] = []
        self._of: dict[int, int] = {}  # id of a tensor -> its number
        self._alive: list[torch.Tensor] = []  # so that ids stay their own
        self._calls: dict[int, Call] = {}  # by id of an output
        self._state: dict[int, int] = {}  # memory -> number of all writes to it
        self._left: dict[int, str] = {}  # id of a tensor over memory that a source left -> its name
        self._lifted: dict[int, int] = {}  # memory -> address of the values it stands for
        self.addresses: set[int] = set()  # of those that are written
        self._drawn: list[Any] = []
        self._num_draws = 0
        self._draws = Draws()
        self._draws.start()
        self._num_sources = len(sources)
        for index, source in enumerate(sources):
            self._put(source, self._number(_Made("source", index)))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.HigherOrderOperator):
            raise control_flow(func, self._place())
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        node = torch._C._current_autograd_node()
        if node is not None and node.name() == _ACCUMULATES:
            raise _adds_to_gradients(self._place())
        if not self.needs_backward and _hooks_on_saved(False):  # checkpointed: runs once more
            self.needs_backward = True
        reads: list[int] = []
        given = self._sign((args, kwargs), reads)
        if draws(func, args, kwargs):
            reads.append(self._draw())
        made = _untraced(func, args, kwargs)
        number = self._number(_Made(func, given, tuple(reads)))
        if func is _LIFT and not isinstance(args[0], FakeTensor):
            self._lifted[memory(made)] = args[0].data_ptr()
        written = written_by(func, args, kwargs)
        for tensor in written:
            place = memory(tensor)
            if place in self._lifted:
                self.addresses.add(self._lifted[place])
            self._state[place] = self._number(
                _Made("write", "", (self._state.get(place, 0), number))
            )
        for index, tensor in enumerate(made if isinstance(made, (tuple, list)) else (made,)):
            if isinstance(tensor, torch.Tensor) and not any(tensor is each for each in written):
                self._put(tensor, self._number(_Made("output", index, (number,))))
                self._calls[id(tensor)] = func, args, kwargs, None if tensor is made else index
        return made

    def call_of(self, tensor: torch.Tensor) -> Call | None:
        """Op that made a tensor which nothing has been written to; see `fakes.Call`."""
        return None if memory(tensor) in self._state else self._calls.get(id(tensor))

    def has_met(self, tensor: torch.Tensor) -> bool:
        """Whether an op has read a tensor itself."""
        return id(tensor) in self._of

    def left(self, source: torch.Tensor, name: str) -> None:
        """A source is given other memory: what shared the former keeps that in eager mode."""
        place = memory(source)
        sharing = (t for t in self._alive if t is not source and memory(t) == place)
        self._left |= {id(each): name for each in sharing}

    def sees_backward(self) -> bool:
        """Whether the backward pass is to run, too: where functions of the user's are in it.

        What else it does follows from the forward pass.
        """
        return self.needs_backward or any(t._backward_hooks for t in self._alive)

    def drawn(self, value: Any) -> Any:
        """A generator on the host gave a value, which must be that of the run before."""
        drawn = self._drawn
        if self._before is not None and self._before._drawn[len(drawn) : len(drawn) + 1] != [value]:
            raise DifferentError(f"a generator gives {value!r}, another number than", self._place())
        drawn.append(value)
        return value

    def finish(self, results: Sequence[Any], steady: Collection[int]) -> None:
        """The run is over.

        Args:
            results: What it gave.
            steady: Places of the sources that no step replaces.

        Raises:
            CaptureError: The run before gave something else.
        """
        with _disable_current_modes():  # it compares real tensors
            is_seeded = self._draws.is_seeded
        if is_seeded:
            raise _seeds("the step")
        reads: list[int] = []
        self.results = (
            self._sign((self._num_draws, len(self._drawn), *results), reads),
            tuple(reads),
        )
        if self._before is None:
            written = self._state.keys()
            is_kept = {k for k in steady if memory(self._alive[k]) not in written}
            self._find_steady(is_kept)
        elif self.results != self._before.results:
            raise self._difference()

    def made(self) -> list[weakref.ref[torch.Tensor]]:
        """The tensors that ops have made in this run."""
        rest = self._alive[self._num_sources :]
        return [weakref.ref(each) for each in rest if isinstance(each, FakeTensor)]

    def is_state(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor of a finished run is none of its sources and changes between steps."""
        number = self._of.get(id(tensor), 0)
        is_source = number <= self._num_sources
        return not is_source and not (
            self._is_steady[number] and self._is_steady[self._state.get(memory(tensor), 0)]
        )

    def _draw(self) -> int:
        """Number of a draw from torch's generator."""
        position = self._draws.take(self._place())
        self._num_draws = max(self._num_draws, position + 1)
        return self._number(_Made("draw", position))

    def _number(self, made: _Made) -> int:
        number = self._numbers.get(made)
        if number is None:
            self._numbers[made] = number = len(self._numbers) + 1
            if self._before is not None:
                self._places[number] = self._place()
        return number

    def _put(self, tensor: torch.Tensor, number: int) -> None:
        self._alive.append(tensor)
        self._of[id(tensor)] = number

    def _sign(self, value: Any, reads: list[int]) -> Any:
        """Arguments as text, with holes for tensors, whose numbers are added to `reads`."""
        if isinstance(value, torch.Tensor):
            if id(value) in self._left:
                raise _left_memory(self._left[id(value)], self._place())
            reads.append(self._of.get(id(value)) or self._meet(value))
            reads.append(self._state.get(memory(value), 0))
            return "%"
        if isinstance(value, (tuple, list)):
            return tuple([self._sign(each, reads) for each in value])
        if isinstance(value, dict):
            return tuple([(key, self._sign(each, reads)) for key, each in value.items()])
        is_plain = isinstance(value, _PLAIN) or type(value).__module__ == "torch"
        return repr(value) if is_plain else type(value).__name__

    def _meet(self, tensor: torch.Tensor) -> int:
        """Number of a tensor that this run has not made."""
        before = self._before
        is_made = isinstance(tensor, FakeTensor) or memory(tensor) in self._state
        left = before._of.get(id(tensor)) if before and is_made else None
        if before is not None and left is not None:
            writes = before._state.get(memory(tensor), 0)
            if before._is_steady[left] and before._is_steady[writes]:
                self._state.setdefault(memory(tensor), writes)
            else:
                left = self._number(_Made("left", len(self._of), (left, writes)))
            number = left
        elif isinstance(tensor, FakeTensor):
            number = self._number(_Made("unknown", len(self._of)))
        else:
            number = self._number(_Made("outside", _identity(tensor)))
        self._put(tensor, number)
        return number

    def _find_steady(self, sources: Collection[int]) -> None:
        steady = self._is_steady = [True]  # no writes
        for made in self._numbers:
            is_source = made.by == "source"
            is_one = made.given in sources if is_source else made.by not in ("draw", "unknown")
            steady.append(is_one and all(steady[each] for each in made.reads))

    def _difference(self) -> DifferentError:
        """Follow what differs from the results back to where it begins."""
        assert self._before is not None
        made = {number: each for each, number in self._numbers.items()}
        now, then = _Made("", *self.results), _Made("", *self._before.results)
        place = "the step"
        while now.by == then.by and now.given == then.given and len(now.reads) == len(then.reads):
            pairs = zip(now.reads, then.reads, strict=True)
            one, other = next(pair for pair in pairs if pair[0] != pair[1])
            place = self._places.get(one, place)
            if one not in made or other not in made:  # writes, and none before
                break
            now, then = made[one], made[other]
        return DifferentError(f"{_described(now)} comes instead of {_described(then)}", place)


class DifferentError(CaptureError):
    """The second of two runs does something else than the first.

    Attributes:
        where: Module and line where that shows.
    """

    def __init__(self, what: str, where: str) -> None:
        self.where = where
        super().__init__(
            f"A step must compute the same in each of two calls: in the second, {what} in the "
            f"first, at {where}. A generator, clock or counter on the host decides. Draw with "
            f"torch, or pass what it gives as an input tensor."
        )


def _untraced(func: Any, args: Any, kwargs: Any) -> Any:
    """Call an op without following the functions of torch's that it is made of."""
    trace = sys.gettrace()
    if trace is None:
        return func(*args, **kwargs)
    sys.settrace(None)
    try:
        return func(*args, **kwargs)
    finally:
        sys.settrace(trace)


def _described(made: _Made) -> str:
    numbers = [text for text in _flat(made.given) if str(text).lstrip("-")[:1].isdigit()]
    shown = f" of {', '.join(map(str, numbers[:4]))}" if numbers else ""
    return f"{made.by or 'another number of draws'}{shown}"


def _flat(given: Any) -> list[Any]:
    if not isinstance(given, tuple):
        return [given]
    return [leaf for each in given for leaf in _flat(each)]


def _adds_to_gradients(where: str) -> CaptureError:
    return CaptureError(
        f"Backward and the update belong to the step: {where} calls .backward() itself, and what "
        f"that adds to .grad would be lost. Let loss_fn return the loss alone, the sum of all that "
        f"is to be trained; gradients in it are had by torch.autograd.grad."
    )


def _left_memory(name: str, where: str) -> CaptureError:
    return CaptureError(
        f"Memory of a parameter or buffer must not be read once another was assigned to its .data: "
        f"{where} reads what {name!r} had before, which the step has overwritten. Keep a copy: "
        f"{name}.data.clone()."
    )


def _seeds(where: str) -> CaptureError:
    return CaptureError(
        f"The step must not seed torch's generator, nor put an old state of it back: what "
        f"manual_seed, set_rng_state or fork_rng do to random numbers would be lost at {where}. "
        f"Seed outside the step, or draw there and pass the numbers as an input."
    )


def _identity(tensor: torch.Tensor) -> Any:
    """What tells a tensor from outside from others: its value if it is small or not torch's."""
    with _disable_current_modes():
        if tensor.layout != torch.strided or tensor.is_meta:
            return id(tensor)
        if tensor.numel() <= _MAX_NUMBERS or not tensor.untyped_storage().resizable():
            values = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
            values = values.clone()  # memory that NumPy has seen cannot be resized any more
            about = tuple(tensor.shape), repr(tensor.dtype), str(tensor.device)
            return *about, values.view(torch.uint8).numpy().tobytes()
    return id(tensor)


def refuse_kept(
    made: Sequence[weakref.ref[torch.Tensor]],
    known: Collection[int],
    name_of: Callable[[Any], str | None],
) -> None:
    """Refuse a step of whose tensors some stay, though all known places were put back.

    What outlives the step must hold them: torch itself keeps some that nobody has.

    Args:
        made: Tensors without values that two runs have made.
        known: `id` of those that are noted as what the step writes.
        name_of: Name of an object that outlives the step; None for others.

    Raises:
        CaptureError: Says what holds one.
    """
    if _still_there(made, known):
        gc.collect(1)  # all generations would be slow
    held: list[Any] = list(_still_there(made, known))
    seen = {id(held), *map(id, held)}
    for _ in range(_MAX_HOLDERS):
        if not held:
            return
        found = gc.get_referrers(*held)
        above = [each for each in found if not isinstance(each, types.FrameType)]
        held = [each for each in above if id(each) not in seen]
        seen |= {id(held), id(found), id(above), *map(id, held)}
        for holder in held:
            is_context = type(holder).__name__.startswith("hamt")
            name = "a context variable" if is_context else name_of(holder)
            if name is not None:
                raise CaptureError(
                    f"State of a step must be kept in buffers of the model: a tensor that the "
                    f"step makes is still held when it is over, by way of {name}, where it cannot "
                    f"be put back. Use register_buffer and write into that, or keep it in an "
                    f"attribute of the model."
                )


def _still_there(
    made: Sequence[weakref.ref[torch.Tensor]], known: Collection[int]
) -> list[torch.Tensor]:
    there = (each() for each in made)
    return [each for each in there if each is not None and id(each) not in known]
