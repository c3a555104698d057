"""Placers that cut the graph: by mapping (Scotch), few bytes between parts (METIS, KaHyPar), or
stages that follow one another (PipeDream, contiguous).

`group_graph` is the graph that is cut, `repair` moves what does not fit.
"""
