"""Every op of a captured step says where it comes from and what it costs."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.step_capture.checks import batches, sgd, small_net, xent
from torch import nn

from devplace.graph import Op, OpGraph
from devplace.step_capture import capture


class Block(nn.Module):
    """Attention-like block with views, splits and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        attended = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])
        return x + F.dropout(attended.squeeze(1), 0.1)


class Model(nn.Module):
    """Embedding and two blocks, the second called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 50, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in (self.blocks[0], self.blocks[1], self.blocks[1]):
            x = block(x)
        return self.head(x)


def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Language-model loss of the tokens themselves."""
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    """A training step in two micro-batches."""
    torch.manual_seed(0)
    model = Model()
    tokens = torch.randint(0, 50, (4, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return capture(model, tokens, loss, optimizer, micro_batches=2, clip_grad_norm=1.0)


def ops(graph: OpGraph, target: str, **fields: Any) -> list[Op]:
    """Ops whose target contains a text and whose fields have the values."""
    return [
        op
        for op in graph.ops
        if target in op.target and all(getattr(op, k) == v for k, v in fields.items())
    ]


def test_s34_every_op_belongs_to_a_module_that_exists(graph: OpGraph) -> None:
    """Forward, backward and update ops carry the path of a module of the model."""
    modules = {name for name, _ in Model().named_modules()}
    for op in graph.ops:
        assert op.module in modules, op
    counts = {stage: len([o for o in graph.ops if o.stage == stage]) for stage in ("backward",)}
    assert counts["backward"] > 20


def test_s34_backward_ops_carry_their_forward_op(graph: OpGraph) -> None:
    """The weight gradient of the head is the head's, with its call and micro-batch."""
    products = ops(graph, "aten.mm", module="head", stage="backward")
    assert [(op.micro_batch, op.call) for op in products] == [(0, 0), (0, 0), (1, 1), (1, 1)]
    calls = {(op.micro_batch, op.call) for op in ops(graph, "", module="blocks.1.qkv")}
    assert {(0, 0), (0, 1), (1, 2), (1, 3)} <= calls
    norm = ops(graph, "native_layer_norm_backward", module="blocks.1.norm")
    assert [op.call for op in norm] == [1, 0, 3, 2]


def test_update_ops_belong_to_the_owner_of_the_parameter(graph: OpGraph) -> None:
    """Eight ops per parameter and AdamW's decay, in the module that holds it."""
    updates = ops(graph, "", stage="update", module="blocks.0.qkv")
    assert {op.micro_batch for op in updates} == {-1}
    assert len(ops(graph, "aten.addcdiv", stage="update", module="blocks.0.qkv")) == 2


def test_source_lines_are_relative_and_the_users(graph: OpGraph) -> None:
    """Forward and backward ops name the line of the model, without any directory."""
    lines = {op.source_line for op in graph.ops if op.source_line}
    assert all(line.startswith("test_metadata.py:") for line in lines)
    forward = {op.source_line for op in ops(graph, "aten.addmm", module="blocks.0.qkv")}
    backward = {
        op.source_line for op in ops(graph, "aten.mm", module="blocks.0.qkv", stage="backward")
    }
    assert forward == backward
    assert len(forward) == 1


def test_views_alias_what_they_view(graph: OpGraph) -> None:
    """A chunk is one view op with three outputs, never larger than its base, and costs nothing."""
    (split,) = ops(graph, "aten.split", module="blocks.0", micro_batch=0, stage="forward")
    assert len(split.outputs) == 3
    assert graph.ops[graph.producer[split.alias_of]].target == "aten.view.default"
    for op in graph.ops:
        if op.is_view:
            base = graph.tensors[op.alias_of].num_bytes
            assert all(graph.tensors[t].num_bytes <= base for t in op.outputs)
            assert (op.flops, op.bytes_read, op.bytes_written) == (0, 0, 0)


def test_expanded_tensors_are_as_large_as_their_base() -> None:
    """An expand of one number holds one number."""
    model = nn.Linear(4, 4)
    graph = capture(model, torch.randn(64, 4), lambda m, x: m(x).sum(), sgd(model))
    (expand,) = ops(graph, "aten.expand")
    assert graph.tensors[expand.outputs[0]].num_bytes == 4
    assert graph.tensors[expand.outputs[0]].shape == (64, 4)


def test_products_count_two_flops_per_multiply_add() -> None:
    """A linear layer of 8 to 16 on 6 rows: 2*6*8*16 flops, and the bytes of its operands."""
    graph = capture(small_net(), batches()[0], xent)
    product = ops(graph, "aten.addmm", module="0")[0]
    assert product.flops == 2 * 6 * 8 * 16
    assert product.bytes_read == 8 * (16 + 6 * 8 + 16 * 8)
    assert product.bytes_written == 8 * 6 * 16


def test_lookups_read_only_their_rows(graph: OpGraph) -> None:
    """An embedding reads the rows it takes, not the table."""
    lookup = ops(graph, "aten.embedding.default")[0]
    rows = 2 * 6
    assert lookup.bytes_read == rows * 8 * 4 + rows * 8
    assert lookup.flops == 0


def test_attention_without_dropout_is_not_random(graph: OpGraph) -> None:
    """Only the dropout draws, although attention ops are tagged as random by torch."""
    random = {op.target for op in graph.ops if op.is_random}
    assert random == {"aten.bernoulli.p"}
    assert len(graph.program.random_ops) == 6


def test_source_roles_and_names(graph: OpGraph) -> None:
    """Parameters by name, others as role[key]; each results names the source it replaces."""
    names = {op.name: op.role for op in graph.ops if op.is_source}
    assert names["blocks.0.qkv.weight"] == "parameter"
    assert names["exp_avg[head.weight]"] == "state"
    assert names["input[0]"] == "input"
    assert names["scalar[group0.neg_step_size]"] == "scalar"
    assert graph.results[0].name == "loss"
    for result in graph.results[1:]:
        assert graph.ops[result.replaces].name == result.name


def test_meta_is_plain_json(graph: OpGraph) -> None:
    """Facts about the capture survive a round trip through JSON."""
    assert json.loads(json.dumps(graph.meta)) == graph.meta
    assert graph.meta["mode"] == "train"
    assert graph.meta["optimizer"] == "AdamW"
    assert graph.meta["micro_batches"] == 2
    assert graph.meta["training"] is True
    assert graph.meta["torch"] == torch.__version__


def test_program_names_every_node(graph: OpGraph) -> None:
    """Each FX node has its op; each tensor-valued one its tensor; outputs are in result order."""
    program = graph.program
    nodes = list(program.module.graph.nodes)
    placeholders = [n for n in nodes if n.op == "placeholder"]
    assert [graph.ops[b.op].role for b in program.bindings] == [b.kind for b in program.bindings]
    assert [program.op_of[n.name] for n in placeholders] == [b.op for b in program.bindings]
    for node in nodes:
        if node.op == "call_function":
            op = graph.ops[program.op_of[node.name]]
            if isinstance(node.meta["val"], torch.Tensor):
                tensor = graph.tensors[program.tensor_of[node.name]]
                assert program.tensor_of[node.name] in op.outputs
                assert tensor.shape == tuple(node.meta["val"].shape)
            else:
                assert node.name not in program.tensor_of
    (output,) = nodes[-1].args
    assert [program.tensor_of[n.name] for n in output] == [r.tensor for r in graph.results]


def test_op_names_stay_unique_when_a_parameter_is_named_like_an_op() -> None:
    """A root parameter called 'mul' does not collide with the op of that name."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mul = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.mul).sum()

    model = Named()
    graph = capture(model, torch.randn(4), None, sgd(model))
    assert graph.ops[graph.op_index["mul"]].role == "parameter"
    assert graph.ops[graph.program.op_of["mul"]].target == "aten.mul.Tensor"
