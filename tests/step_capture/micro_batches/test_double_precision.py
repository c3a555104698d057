"""Graphs computed in double precision: what is fixed, and what is never read out of bounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from devplace.step_capture.micro_batches.double_precision import (
    KernelError,
    NotEvaluatedError,
    check_indices,
    evaluate,
    peak_bytes,
    why_too_large,
)

CPU = torch.device("cpu")


def traced(function: Any, *given: torch.Tensor) -> torch.fx.GraphModule:
    """A functional graph with a list of results."""
    return make_fx(lambda *a: [function(*a)], tracing_mode="fake")(*given)


def value(function: Any, *given: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Its result, and whether all was computed in double precision."""
    (made,), is_exact = evaluate(traced(function, *given), given.__getitem__, CPU)
    return made, is_exact


def test_numbers_have_double_precision() -> None:
    """Also behind casts to a lower one."""
    x = torch.rand(4, 4)
    made, is_exact = value(lambda x: (x.bfloat16() @ x.bfloat16()).float().exp(), x)
    assert is_exact
    torch.testing.assert_close(made, (x.double() @ x.double()).exp(), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)) / 0.5, lambda x: x),
        (lambda x: torch.native_dropout(x, 0.3, True)[0], lambda x: x),
        (lambda x: x + torch.rand_like(x), lambda x: x + 0.5),
        (lambda x: x[torch.randperm(4)], lambda x: x),
        (lambda x: F.batch_norm(x, None, None, training=True, eps=3.0), lambda x: x / 2),
    ],
)
def test_what_is_drawn_is_the_same_for_every_row(function: Any, expected: Any) -> None:
    """Random ops are fixed, and statistics of a batch too."""
    x = torch.rand(4, 3)
    torch.testing.assert_close(value(function, x)[0], expected(x.double()))


@pytest.mark.parametrize("mask", [None, "causal", "bias", "bits"])
@pytest.mark.parametrize("heads", [4, 2])
def test_attention_of_a_fused_kernel_is_exact(mask: str | None, heads: int) -> None:
    """Also where the kernel has a lower precision, with its derivatives and layouts."""
    query, key, other = torch.randn(3, 2, 6, 4, 8), torch.randn(2, 6, heads, 8), torch.randn(2, 6)
    given: dict[str, Any] = {"is_causal": True} if mask == "causal" else {}
    if mask == "bias":
        given["attn_mask"] = other[:, None, None, :]
    elif mask == "bits":
        given["attn_mask"] = other[:, None, None, :] > -1

    def attend(q: torch.Tensor, k: torch.Tensor) -> list[torch.Tensor]:
        rows = [each.transpose(1, 2) for each in (q, k, k.sin())]
        out = F.scaled_dot_product_attention(*rows, **given, scale=0.3, enable_gqa=True)
        return [out.transpose(1, 2).reshape(2, 6, 32)]

    def step(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        (out,) = attend(q.bfloat16(), k.bfloat16())
        return torch.cat([g.flatten() for g in torch.autograd.grad(out.sin().sum(), (q, k))])

    own = query[0].requires_grad_(), key.requires_grad_()
    gm = make_fx(lambda *a: [step(*a)], tracing_mode="fake", _allow_non_fake_inputs=True)(*own)
    assert any("flash_attention" in str(node.target) for node in gm.graph.nodes)
    (made,), is_exact = evaluate(gm, [t.detach() for t in own].__getitem__, CPU)
    wide = [t.detach().double().requires_grad_() for t in own]
    given = {n: t.double() if mask == "bias" else t for n, t in given.items()}
    exact = torch.autograd.grad(attend(*wide)[0].sin().sum(), wide)
    assert is_exact
    torch.testing.assert_close(made, torch.cat([g.flatten() for g in exact]), rtol=1e-9, atol=1e-12)


def test_a_kernel_that_raises_is_named() -> None:
    """By its op, with its own words."""
    table, index = torch.rand(3, 2), torch.tensor([0, 5])
    with pytest.raises(KernelError, match=r"aten.embedding.default does not run: index out of"):
        value(lambda i, t: F.embedding(i, t), index, table)


@pytest.mark.parametrize(
    ("function", "given", "is_right"),
    [
        (lambda i, t: F.embedding(i, t), ([2, 0], (3, 2)), True),
        (lambda i, t: F.embedding(i, t), ([2, 3], (3, 2)), False),
        (lambda i, t: F.embedding(i, t), ([2, -1], (3, 2)), False),
        (lambda i, t: t[i], ([2, -3], (3, 2)), True),
        (lambda i, t: t[i], ([2, -4], (3, 2)), False),
        (lambda i, t: t.gather(1, i[:, None]), ([1, 1], (2, 2)), True),
        (lambda i, t: t.gather(1, i[:, None]), ([1, 2], (2, 2)), False),
        (lambda i, t: t.scatter(1, i[:, None], 1.0), ([1, 2], (2, 2)), False),
        (lambda i, t: F.cross_entropy(t, i), ([1, -100], (2, 2)), True),
        (lambda i, t: F.cross_entropy(t, i), ([1, 2], (2, 2)), False),
        (lambda i, t: t * i.cumsum(0)[:, None], ([7, 9], (2, 2)), True),
        (lambda i, t: F.embedding_bag(t[0].long(), t, i), ([0, 1], (2, 2)), False),
    ],
)
def test_indices_are_checked_before_a_gpu_reads(function: Any, given: Any, is_right: bool) -> None:
    """Outside of a tensor a GPU's kernel would end the process's use of it; unknown is refused."""
    index, shape = torch.tensor(given[0]), given[1]
    gm = traced(function, index, torch.rand(shape))
    values: dict[Any, Any] = {}
    places = iter((index, torch.rand(shape)))

    def run() -> None:
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(places)
            elif node.op == "call_function":
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.get)
                check_indices(node, args)
                values[node] = node.target(*args, **kwargs)

    if is_right:
        run()
    else:
        with pytest.raises(NotEvaluatedError, match="reads"):
            run()


def test_large_graphs_are_left_out() -> None:
    """By operations, and by bytes in double precision at the most."""
    gm = traced(lambda x: (x + 1).exp(), torch.zeros(1000))
    assert peak_bytes(gm) == 16_000
    assert why_too_large(gm, CPU, False) == ""
    large = traced(lambda x: x @ x, torch.empty(4096, 4096, device="meta"))
    assert "1.4e+11 floating-point operations, limit 1e+11" in why_too_large(large, CPU, False)
    wide = traced(lambda x: x + 1, torch.empty(1 << 26, device="meta"))
    assert why_too_large(wide, CPU, False) == ""
    assert "a step takes 1.1 GB in double precision, limit 0.5 GB" in why_too_large(wide, CPU, True)
