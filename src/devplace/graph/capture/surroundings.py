"""What a trace needs around it, and what it must leave as it was."""

from __future__ import annotations

import contextlib
import logging
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint

from devplace.errors import CaptureError
from devplace.graph.capture.sources import unchanged
from devplace.graph.capture.tags import Tagger, describe_place, user_line


@dataclass
class HostRandom:
    """Whether Python's or NumPy's global generator was used."""

    used: bool = False


@contextlib.contextmanager
def undisturbed(model: torch.nn.Module) -> Iterator[HostRandom]:
    """Leave modules and every random generator as they were; note host-side randomness."""
    numpy_random: Any = sys.modules.get("numpy.random")
    python_state = random.getstate()
    numpy_state = _numpy_state(numpy_random)
    torch_state = torch.get_rng_state()
    on_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    cuda_states = torch.cuda.get_rng_state_all() if on_cuda else []
    noted = HostRandom()
    try:
        with unchanged(model.modules()):
            yield noted
    finally:
        noted.used = random.getstate() != python_state
        random.setstate(python_state)
        if numpy_random:
            noted.used = noted.used or _numpy_state(numpy_random) != numpy_state
            numpy_random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        if cuda_states:
            torch.cuda.set_rng_state_all(cuda_states)


def _numpy_state(numpy_random: Any) -> Any:
    if numpy_random is None:
        return None
    kind, keys, *rest = numpy_random.get_state()
    return (kind, tuple(keys.tolist()), *rest)


@contextlib.contextmanager
def trace_settings(device_type: str) -> Iterator[None]:
    """Trace without cuDNN and oneDNN, so that norms and LSTMs are ops every device has.

    Functions under torch.compile run eagerly, a surrounding `with torch.device("meta")`, under
    which the model was made, does not reach the step, and torch's anomaly mode, which reads values,
    is off. What fails is told by an error, not by tracebacks in torch's log.
    """
    was = torch._C._get_cudnn_enabled(), torch._C._get_mkldnn_enabled()
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message=".*when there are global hooks on modules")
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a")
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            # A compiled function called during a trace runs as it is, instead of raising.
            stack.enter_context(torch._dynamo.config.patch(error_on_nested_fx_trace=False))
        if torch.get_default_device().type == "meta":
            stack.enter_context(torch.device(device_type))
        stack.enter_context(torch.autograd.set_detect_anomaly(False))
        stack.enter_context(_silent("torch._subclasses.fake_tensor"))
        # Checkpointing keeps the state of GPUs' generators, too; draws are counted by the CPU's.
        keep = torch.utils.checkpoint.get_device_states
        torch.utils.checkpoint.get_device_states = lambda *args: ([], [])
        torch._C._set_cudnn_enabled(False)
        torch._C._set_mkldnn_enabled(False)
        try:
            yield
        finally:
            torch._C._set_cudnn_enabled(was[0])
            torch._C._set_mkldnn_enabled(was[1])
            torch.utils.checkpoint.get_device_states = keep


@contextlib.contextmanager
def _silent(name: str) -> Iterator[None]:
    """Nothing is written to a logger."""
    logger = logging.getLogger(name)
    was = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = was


def refuse_host_random(run: Callable[[], Any], tagger: Tagger, model: torch.nn.Module) -> None:
    """Run the step once more to find who draws on the host, and refuse it.

    Raises:
        CaptureError: Always; names module and source line where they can be found.
    """
    found: list[tuple[str, str]] = []

    def note() -> None:
        found.append((tagger.current_module, user_line()))

    def watch(frame: Any, event: str, argument: Any) -> None:
        if event == "c_call" and isinstance(getattr(argument, "__self__", None), random.Random):
            note()

    with undisturbed(model), _watched_numpy(note), contextlib.suppress(Exception):
        sys.setprofile(watch)
        try:
            run()
        finally:
            sys.setprofile(None)
    where = describe_place(*found[0]) if found else "the step"
    raise CaptureError(
        f"Random decisions on the host would be frozen by capture: {where} draws from Python's or "
        f"NumPy's generator. Draw with torch, or decide outside the step and pass it as an input."
    )


@contextlib.contextmanager
def _watched_numpy(note: Callable[[], None]) -> Iterator[None]:
    """Call `note` on every function of NumPy's global generator; a profiler does not see them."""
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is None:
        yield
        return
    own = numpy_random.RandomState
    functions = {
        name: function
        for name, function in vars(numpy_random).items()
        if isinstance(getattr(function, "__self__", None), own)
    }

    def watched(function: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            note()
            return function(*args, **kwargs)

        return call

    try:
        for name, function in functions.items():
            setattr(numpy_random, name, watched(function))
        yield
    finally:
        for name, function in functions.items():
            setattr(numpy_random, name, function)
