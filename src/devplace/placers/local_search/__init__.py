"""devplace's own search: annealing over `classes` of ops by chains (`explore`), then moves of
single ops on the critical path and a better order (`refine`).

The chains themselves are native code, and `placers.chains` where that was not built.
"""
