"""Exact solution by constraint programming: the placer, and the `model` that it solves."""
