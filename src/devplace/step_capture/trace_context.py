"""Global torch settings of a trace, restored afterwards."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch.fx._lazy_graph_module import _use_lazy_graph_module


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Leave torch's random generators as they were, and let a step read the seed that is set."""
    state, seed = torch.get_rng_state(), torch.initial_seed()
    on_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    cuda_states = torch.cuda.get_rng_state_all() if on_cuda else []
    try:
        with (
            mock.patch.object(torch, "initial_seed", return_value=seed),
            mock.patch.object(torch.random, "initial_seed", return_value=seed),
        ):
            yield
    finally:
        torch.set_rng_state(state)
        if cuda_states:
            torch.cuda.set_rng_state_all(cuda_states)


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
        stack.enter_context(_use_lazy_graph_module(True))  # nobody reads its Python code
        stack.enter_context(_silent("torch._subclasses.fake_tensor"))
        # Checkpointing keeps the state of GPUs' generators, too; draws are counted by the CPU's.
        states: Any = mock.patch.object(torch.utils.checkpoint, "get_device_states")
        stack.enter_context(states).return_value = [], []
        torch._C._set_cudnn_enabled(False)
        torch._C._set_mkldnn_enabled(False)
        try:
            yield
        finally:
            torch._C._set_cudnn_enabled(was[0])
            torch._C._set_mkldnn_enabled(was[1])


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
