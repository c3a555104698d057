"""Capture: a model's whole training step (or inference) as one graph. Needs torch."""

from devplace.step_capture.batch import flatten_batch
from devplace.step_capture.capture import capture

__all__ = ["capture", "flatten_batch"]
