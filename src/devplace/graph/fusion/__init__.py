"""Groups of ops that one compiled kernel computes, as ops of a graph."""

from devplace.graph.fusion.fuse import fuse

__all__ = ["fuse"]
