"""Check whether a step that could not be captured runs eagerly."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from devplace.step_capture.step import TracedStep

_MAX_BYTES = 1 << 32  # of parameters and buffers, of which copies are made


class NotTriedError(Exception):
    """Why a step was not run."""


def eager_error(step: TracedStep) -> Exception | SystemExit | None:
    """Run a step on its example batch; nothing is changed. Random generators are the caller's.

    Returns:
        What it raised, or None if it runs.

    Raises:
        NotTriedError: The model or the batch has no values, or is large.
    """
    request = step.request
    sources = list(request.sources.all.values())
    tensors = [*sources, *(t for t in request.batch.leaves if isinstance(t, torch.Tensor))]
    if any(t.is_meta or isinstance(t, FakeTensor) for t in tensors):
        raise NotTriedError("model or inputs have no values")
    if sum(t.numel() * t.element_size() for t in sources) > _MAX_BYTES:
        raise NotTriedError("the model is large")
    modules = [*request.model.modules(), *step.frames.reads.modules.values()]
    with _disable_current_modes():
        held = [v for m in modules for v in vars(m).values() if isinstance(v, torch.Tensor)]
        kept = [(t, t.detach().clone()) for t in (*sources, *held)]
        try:
            step.run_eagerly()
        except (Exception, SystemExit) as error:
            return error
        finally:
            with torch.no_grad():
                for tensor, value in kept:
                    if tensor.dtype != value.dtype:  # its module was cast
                        tensor.data = value
                    if not torch.equal(tensor, value):  # norms write without counting it
                        tensor.copy_(value)
    return None
