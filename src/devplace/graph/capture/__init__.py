"""Capture: a model's whole training step (or inference) as one graph. Needs torch."""

from devplace.graph.capture.batch import flatten_batch
from devplace.graph.capture.capture import capture

__all__ = ["capture", "flatten_batch"]
