"""The order in which ops are about run decides which inputs are cold."""

from __future__ import annotations

import pytest
from tests.cost.test_profiled import captured

from devplace.cost.likely_order import likely_order
from devplace.cost.op_signature import op_calls
from devplace.cost.reuse import cold_inputs


@pytest.mark.slow
def test_each_op_comes_after_what_it_reads() -> None:
    """It is a topological order of all ops."""
    graph = captured("bert-base")
    order = likely_order(graph, [1] * len(graph.ops))
    assert sorted(order) == list(range(len(graph.ops)))
    place = {op: at for at, op in enumerate(order)}
    maker = {tensor: index for index, op in enumerate(graph.ops) for tensor in op.outputs}
    for index, op in enumerate(graph.ops):
        assert all(place[maker[tensor]] < place[index] for tensor in op.inputs)


def test_of_two_ready_ops_the_one_with_the_longer_path_comes_first() -> None:
    """By hand: gradients of weights, which nothing but the update waits for, come late."""
    graph = captured("rnnlm")
    ones = [1] * len(graph.ops)
    place = {op: at for at, op in enumerate(likely_order(graph, ones))}
    users: dict[int, list[int]] = {}
    for index, op in enumerate(graph.ops):
        for tensor in op.inputs:
            users.setdefault(tensor, []).append(index)
    rank = [0] * len(graph.ops)
    for index in reversed(range(len(graph.ops))):
        after = [user for tensor in graph.ops[index].outputs for user in users.get(tensor, [])]
        rank[index] = 1 + max((rank[user] for user in after), default=0)
    sources = [index for index, op in enumerate(graph.ops) if not op.inputs]
    assert [rank[i] for i in sorted(sources, key=place.__getitem__)] == sorted(
        (rank[i] for i in sources), reverse=True
    )


@pytest.mark.slow
def test_what_is_cold_depends_on_the_order() -> None:
    """The same ops, other orders: the calls differ only in what they find in the cache."""
    graph = captured("bert-base")
    trace = op_calls(graph)
    order = likely_order(graph, [1] * len(graph.ops))
    other = op_calls(graph, cold_inputs(graph, order))
    assert trace.keys() == other.keys()

    def bare(key: str) -> str:
        return key.replace("is_cold=True", "is_cold=False")

    assert all(bare(trace[op].key) == bare(other[op].key) for op in trace)
