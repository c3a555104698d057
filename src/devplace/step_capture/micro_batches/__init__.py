"""Micro-batches: trace the step once for each, and compare them with the whole batch."""
