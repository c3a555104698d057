"""Ops that can write their output over an input: elementwise and fused ones."""

from __future__ import annotations

from devplace.graph.graph import OpGraph

# Target -> name of its overload that writes into a given tensor. Each element is read before it is
# written and computed alike in both forms. These are what updates of parameters, state and
# buffers end with.
OUT_FORMS = {
    "aten.add.Tensor": "out",
    "aten.sub.Tensor": "out",
    "aten.mul.Tensor": "out",
    "aten.div.Tensor": "out",
    "aten.addcmul.default": "out",
    "aten.addcdiv.default": "out",
    "aten.lerp.Scalar": "Scalar_out",
    "aten.lerp.Tensor": "Tensor_out",
    "aten.maximum.default": "out",
    "aten.minimum.default": "out",
    "aten.sqrt.default": "out",
    "aten.neg.default": "out",
    "devplace.wide_mul.default": "out",
    "devplace.wide_div.default": "out",
    "devplace.wide_addcmul.default": "out",
    "devplace.wide_scaled_add.default": "out",
    "devplace.wide_addcdiv.default": "out",
}


def overwritten_sources(graph: OpGraph) -> dict[int, int]:
    """New values that can be computed in the memory of the source they replace.

    Returns:
        Tensor id of the new value -> source op. Whether it happens is a matter of order: no one
        else may read the old value any more.
    """
    handed_out = {graph.storage[r.tensor] for r in graph.results if r.replaces < 0}
    found: dict[int, int] = {}
    for result in graph.results:
        maker = graph.ops[graph.producer[result.tensor]]
        is_able = maker.target in OUT_FORMS or bool(maker.members)
        if result.replaces < 0 or maker.is_view or not is_able:
            continue
        old = graph.ops[result.replaces].outputs[0]
        same = (graph.tensors[old].shape, graph.tensors[old].dtype) == (
            graph.tensors[result.tensor].shape,
            graph.tensors[result.tensor].dtype,
        )
        touched = {tensor for tensor in maker.inputs if graph.storage[tensor] == old}
        # A fused op is compiled for what it reads, and only that can it write over.
        may_write = touched == {old} if maker.members else touched <= {old}
        if same and may_write and result.tensor not in handed_out:
            found.setdefault(result.tensor, result.replaces)
    return found
