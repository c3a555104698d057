"""Groups of ops that one compiled kernel computes, as ops of a graph."""

from devplace.graph.fusion.fuse import fuse
from devplace.graph.fusion.pins import fuse_for

__all__ = ["fuse", "fuse_for"]
