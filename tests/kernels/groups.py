"""Groups made by hand, and a compiler that takes no time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from devplace.errors import ExecutionError
from devplace.graph.fusion.call import FusedCall, Pairs
from devplace.kernels import fused


def group(function: Callable[..., Sequence[Any]], *tensors: Any, over: Pairs = ()) -> FusedCall:
    """A group that computes what a function does."""
    graph = make_fx(function, tracing_mode="fake")(*tensors).graph
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    output.args = (tuple(output.args[0]),)
    return FusedCall(graph, over)


def double(x: Any) -> Any:
    """One input, one output."""
    return (x * 2,)


class Compiler:
    """Stands for the compiler: its kernels give their inputs.

    Attributes:
        calls: Names of the groups that it was asked for.
        refuses: Whether it refuses all.
    """

    def __init__(self, patch: pytest.MonkeyPatch, source: str = "", refuses: bool = False) -> None:
        self.calls: list[str] = []
        self.refuses = refuses
        self.source = source or "def call(args):\n    return tuple(args)\n"
        patch.setattr(fused, "compile_source", self)

    def __call__(self, call: FusedCall, signature: Any) -> str:
        self.calls.append(call.name)
        if self.refuses:
            raise ExecutionError("too hard")
        return self.source


def in_a_new_process(patch: pytest.MonkeyPatch) -> None:
    """Forget what was loaded; what is on disk stays."""
    patch.setattr(fused, "_kernels", {})
    patch.setattr(fused, "_failures", {})


X = torch.arange(6.0)
