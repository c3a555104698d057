"""Guard host generators, clocks and loss scalers, which belong outside the step."""

from __future__ import annotations

import contextlib
import datetime
import functools
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from devplace.errors import CaptureError
from devplace.step_capture.guards.code_names import is_users

_LATER_S = (415 * 24 + 5) * 3600 + 7 * 60 + 11
"""How much later it is in the second run, by the functions of `time`: another year, month, day of
the week, hour, minute and second."""
_ASKED = ("clock_gettime",) if hasattr(time, "clock_gettime") else ()
_CLOCKS = {
    f"{name}{unit}": _LATER_S * times
    for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time", *_ASKED)
    for unit, times in (("", 1), ("_ns", 1_000_000_000))
}

_CALENDARS = {"localtime": 0, "gmtime": 0, "ctime": 0, "asctime": 0, "strftime": 1}


@contextlib.contextmanager
def host_watched(
    drawn: Callable[[Any], Any], place: Callable[[], str], is_second: bool = False
) -> Iterator[None]:
    """Refuse draws from the generators of Python's and NumPy's modules, and tell of others.

    Args:
        drawn: Gets each value that an object of `random.Random` gives.
        place: Tells where the step is.
        is_second: Whether it is later by the clock than it is.
    """

    def refused(function: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            raise draws_on_host(place())

        return call

    def told(function: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: drawn(function(*args, **kwargs))

    def unscaled(function: Any) -> Callable[..., Any]:
        def scale(scaler: Any, outputs: Any) -> Any:
            if scaler.is_enabled():
                raise _scaled(place())
            return function(scaler, outputs)

        return scale

    def later(function: Any) -> Callable[..., Any]:
        return lambda *args: function(*args) + _CLOCKS[function.__name__]

    numpy_random: Any = sys.modules.get("numpy.random")
    with contextlib.ExitStack() as stack:

        def put(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
            stack.enter_context(mock.patch.object(owner, name, make(getattr(owner, name))))

        def stepped(*args: Any) -> None:
            raise _updates(place())

        stack.callback(register_optimizer_step_pre_hook(stepped).remove)
        put(torch.amp.GradScaler, "scale", unscaled)
        for kind in (random.Random, random.SystemRandom):
            for name in ("random", "getrandbits"):
                put(kind, name, told)
        globals_ = [(random, random.Random)]
        if numpy_random is not None:
            globals_.append((numpy_random, numpy_random.RandomState))
        for module, kind in globals_:
            for name, function in tuple(vars(module).items()):
                if isinstance(getattr(function, "__self__", None), kind):
                    put(module, name, refused)
        if is_second:
            now = time.time() + _LATER_S
            for name in _CLOCKS:
                put(time, name, later)
            for name, at in _CALENDARS.items():
                put(time, name, functools.partial(_at_time, at, now))
            for module in tuple(sys.modules.values()):
                names = vars(module) if module is datetime or is_users(_file_of(module)) else {}
                for name, value in tuple(names.items()):
                    if value is datetime.datetime:
                        put(module, name, lambda kind: _Later)
        yield


def _file_of(module: Any) -> str:
    return getattr(module, "__file__", None) or "<>"


class _AsDatetime(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.__mro__[1])


class _Later(datetime.datetime, metaclass=_AsDatetime):
    """The class of the standard library in the second run: its present is later."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> Any:
        return super().now(tz) + datetime.timedelta(seconds=_LATER_S)

    @classmethod
    def utcnow(cls) -> Any:
        return cls.now(datetime.UTC).replace(tzinfo=None)

    @classmethod
    def today(cls) -> Any:
        return cls.now()


def _at_time(at: int, now: float, get: Callable[..., Any]) -> Callable[..., Any]:
    """A function of `time` that takes the present where its argument at some place is missing."""

    def call(*args: Any) -> Any:
        if len(args) > at:
            return get(*args)
        return get(*args, time.localtime(now) if get.__name__ in ("strftime", "asctime") else now)

    return call


def global_generators() -> list[tuple[str, Any]]:
    """Generators that the functions of Python's and NumPy's modules draw from, by name."""
    numpy_random: Any = sys.modules.get("numpy.random")
    own: Any = random.random
    found = [("random", own.__self__)]
    return found + ([("numpy.random", numpy_random.mtrand._rand)] if numpy_random else [])


def draws_on_host(where: str, name: str = "") -> CaptureError:
    """Error for a draw from a generator of Python's or NumPy's, which may have a name."""
    generator = f" ({name})" if name else ""
    return CaptureError(
        f"Random decisions on the host would be frozen by capture: {where} draws from Python's or "
        f"NumPy's generator{generator}. Draw with torch, or decide outside the step and pass it as "
        f"an input."
    )


def _updates(where: str) -> CaptureError:
    return CaptureError(
        f"Backward and the update belong to the step: {where} calls step() of an optimizer. Give "
        f"that optimizer to capture, and let loss_fn return the loss alone."
    )


def _scaled(where: str) -> CaptureError:
    return CaptureError(
        f"The loss must be returned unscaled: {where} calls GradScaler.scale, and a step updates "
        f"with the gradients of what it is given. Return the loss itself; with "
        f"autocast=torch.bfloat16 no scaling is needed."
    )
