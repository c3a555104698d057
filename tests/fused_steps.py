"""Hand-written steps with ops that a compiler can fuse."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from devplace.graph import OpGraph
from devplace.testing import hand_graph

FUSIBLE = ("add", "mul", "relu", "full", "sgd", "aten.add.Tensor", "aten.mul.Tensor")

LAYERS = """
x = input bytes=100
w1 = parameter bytes=100 module=one
w2 = parameter bytes=100 module=four
h = aten.mm.default(x, w1) bytes=100 module=one ns=10
r = relu(h) bytes=100 module=two bytes_read=100 bytes_written=100 ns=3
v = view(r) bytes=100 module=flat
m = mul(v) bytes=100 module=three bytes_read=50 bytes_written=50 ns=3
y = aten.mm.default(m, w2) bytes=100 module=four result=output ns=10
"""
"""Of modules one (product), two and three (fused, over a view of module flat), four (product)."""

TRAINING = """
x = input bytes=8
w = parameter bytes=8 module=fc
h = aten.mm.default(x, w) bytes=8 module=fc
a = relu(h) bytes=8 module=act bytes_read=8 bytes_written=8
l = aten.mm.default(a, x) bytes=8 module=loss result=loss
g1 = aten.mm.default(l, a) bytes=8 module=fc stage=backward
g2 = aten.mm.default(l, x) bytes=8 module=fc stage=backward
g = aten.add.Tensor(g1, g2) bytes=8 module=fc stage=backward bytes_read=16 bytes_written=8
u = sgd(w, g) bytes=8 module=fc stage=update replaces=w bytes_read=16 bytes_written=8
"""
"""Two terms of one gradient, whose sum and the update are one fused group."""


def fusible(text: str) -> OpGraph:
    """The graph of a text (see `hand_graph`); ops with targets of `FUSIBLE` can be fused."""
    graph = hand_graph(text)
    ops = (
        msgspec.structs.replace(op, is_fusible=True) if op.target in FUSIBLE else op
        for op in graph.ops
    )
    return replace(graph, ops=tuple(ops))
