"""Random numbers by counters: what they are, how they are distributed, which ops draw them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.step_capture.checks import batches, sgd, small_net, xent
from torch import nn

from devplace.graph import OpGraph
from devplace.graph.program import RANDOM_KEYS
from devplace.run.seeds import op_seed
from devplace.run.unplaced import run_unplaced
from devplace.step_capture import capture

WORD = 0xFFFFFFFF
SELECT = torch.ops.aten.select.int
SIDE = 256
NUM = SIDE * SIDE
X = torch.ones(SIDE, SIDE)


class Draws(nn.Module):
    """What a function of its input draws."""

    def __init__(self, draw: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: torch.Tensor) -> Any:
        return self.draw(x)


def captured(draw: Callable[[torch.Tensor], Any], x: torch.Tensor = X) -> OpGraph:
    return capture(Draws(draw), x, fuse=True).plain


def drawn(
    draw: Callable[[torch.Tensor], Any], x: torch.Tensor = X, seed: int = 0, step: int = 1
) -> list[torch.Tensor]:
    """The outputs of a step."""
    graph = captured(draw, x)
    assert not graph.program.random_ops
    given = {"input": x}
    sources = {b.op: given.get(b.kind, b.value) for b in graph.program.bindings}
    return run_unplaced(graph, sources, seed, step)


def scalars(graph: OpGraph) -> list[str]:
    return [b.key for b in graph.program.bindings if b.kind == "scalar"]


def mix(x: int) -> int:
    """MurmurHash3's fmix32."""
    x = (x ^ x >> 16) * 0x85EBCA6B & WORD
    x = (x ^ x >> 13) * 0xC2B2AE35 & WORD
    return x ^ x >> 16


def states(seed: int, step: int, position: int, count: int) -> list[int]:
    """What is mixed a last time, in integers without a sign."""
    key = op_seed(seed, step, position)
    return [mix(i ^ key & WORD) ^ key >> 32 for i in range(count)]


def correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]).double())[0, 1])


def test_numbers_are_those_worked_out_in_integers() -> None:
    """The second op of step 3 with seed 5: 24 low bits of the hash, and 53 bits of two hashes."""

    def draw(x: torch.Tensor) -> Any:
        wide = (torch.rand(7, 3), torch.rand(7, 3, dtype=torch.float64))
        return *wide, F.dropout(x, 0.1), torch.rand_like(x)

    _, wide, dropped, single = drawn(draw, torch.ones(4, 5), seed=5, step=3)
    bits = [mix(s) & 0xFFFFFF for s in states(5, 3, 3, 20)]
    assert single.flatten().tolist() == [b / 2**24 for b in bits]
    bits = [mix(s) & 0xFFFFFF for s in states(5, 3, 2, 20)]
    assert (dropped.flatten() > 0).tolist() == [b < 0.9 * 2**24 for b in bits]
    expected = [
        (mix(s) & 0x3FFFFFF) / 2**26 + (mix(s ^ 0x6C8E9CF5) & 0x7FFFFFF) / 2**53
        for s in states(5, 3, 1, 21)
    ]
    assert wide.flatten().tolist() == expected


def test_steps_seeds_ops_and_neighbours_are_independent() -> None:
    """Pairs of numbers fill a square evenly, whichever of the four tells them apart."""

    def two(x: torch.Tensor) -> Any:
        return torch.rand_like(x), torch.rand_like(x)

    found = [each for key in ((0, 1), (0, 2), (1, 1)) for each in drawn(two, X, *key)]
    pairs = [*itertools.combinations(found, 2)]
    pairs += [(a[:, :-1], a[:, 1:]) for a in found] + [(a[:-1], a[1:]) for a in found]
    pairs += [(a.flatten()[1:], b.flatten()[:-1]) for a, b in itertools.permutations(found, 2)]
    for one, other in pairs:
        assert abs(correlation(one, other)) < 4.5 / math.sqrt(NUM)
        cells = (one * 16).int() * 16 + (other * 16).int()
        counts = torch.bincount(cells.flatten(), minlength=256).double()
        even = cells.numel() / 256
        chi_square = float(((counts - even) ** 2 / even).sum())  # 255 degrees of freedom
        assert abs(chi_square - 255) < 4.5 * math.sqrt(2 * 255)


@pytest.mark.parametrize(
    ("dtype", "digits"),
    [(torch.float64, 53), (torch.float32, 24), (torch.float16, 11), (torch.bfloat16, 8)],
)
def test_uniform_numbers_have_the_digits_of_their_dtype(dtype: torch.dtype, digits: int) -> None:
    """Below 1, of the right mean and variance, and the last digit is not always 0."""
    (made,) = drawn(lambda x: torch.rand(SIDE, SIDE, dtype=dtype))
    assert made.dtype == dtype
    made = made.double()
    assert 0 <= float(made.min()) < float(made.max()) < 1
    assert float(made.mean()) == pytest.approx(
        0.5 - 2.0 ** -(digits + 1), abs=4 / math.sqrt(12 * NUM)
    )
    assert float(made.var()) == pytest.approx(1 / 12, rel=0.02)
    scaled = made * 2.0**digits
    assert torch.equal(scaled, scaled.round())
    assert float((scaled % 2).mean()) == pytest.approx(0.5, abs=2 / math.sqrt(NUM))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_keeps_as_many_as_it_should(rate: float, dtype: torch.dtype) -> None:
    """What is kept is scaled, and is 1 in the mean."""
    (out,) = drawn(lambda x: F.dropout(x, rate), X.to(dtype))
    assert out.dtype == dtype
    kept = out != 0
    deviation = math.sqrt(rate * (1 - rate) / NUM)
    assert float(kept.double().mean()) == pytest.approx(1 - rate, abs=4 * deviation)
    scale = torch.ones((), dtype=dtype) / (1 - rate)
    assert torch.equal(out[kept], scale.expand(int(kept.sum())))


def test_rates_of_0_and_1_are_exact() -> None:
    """Never and always."""

    def draw(x: torch.Tensor) -> Any:
        masks = [torch.ops.aten.bernoulli.p(x, rate) for rate in (0.0, 1.0)]
        parts = [torch.native_dropout(x * 1, rate, True) for rate in (0.0, 1.0)]
        whole = [torch.bernoulli(x * rate) for rate in (0, 1)]
        return *masks, *parts[0], *parts[1], *whole

    no, yes = torch.zeros_like(X), X
    expected = [no, yes, yes, yes.bool(), no, no.bool(), no, yes]
    assert all(map(torch.equal, drawn(draw), expected))


@pytest.mark.parametrize("train", [True, None])
def test_native_dropout_gives_output_and_mask(train: bool | None) -> None:
    """As the CUDA kernel: kept inputs times `1 / (1 - p)`."""
    torch.manual_seed(0)
    x = torch.randn(SIDE, SIDE)
    out, mask = drawn(lambda x: torch.native_dropout(x * 1, 0.25, train), x)
    assert mask.dtype == torch.bool
    assert float(mask.double().mean()) == pytest.approx(0.75, abs=4 * math.sqrt(0.1875 / NUM))
    assert torch.equal(out, x * mask * (1 / 0.75))


def test_dropout_that_does_not_train_draws_nothing() -> None:
    """A model in evaluation has no keys, nor has a native dropout that is told so."""
    graph = captured(lambda x: torch.native_dropout(x * 1, 0.5, False)[0])
    assert scalars(graph) == []
    model = nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.5))
    x = batches()[0][0].float()
    assert scalars(capture(model, x, fuse=True)) == [RANDOM_KEYS]
    assert scalars(capture(model.eval(), x, fuse=True)) == []


def test_rates_may_be_tensors() -> None:
    """Of the op's own shape, or one for each column."""

    def draw(x: torch.Tensor) -> Any:
        rates = torch.tensor([0.0, 0.25, 0.5, 1.0])
        return torch.bernoulli(rates.expand(SIDE, 4)), torch.empty(SIDE, 4).bernoulli_(rates)

    for found in drawn(draw):
        shares = found.mean(0).tolist()
        assert shares == pytest.approx([0.0, 0.25, 0.5, 1.0], abs=4 * math.sqrt(0.25 / SIDE))
        assert (shares[0], shares[3]) == (0.0, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_uniform_fills_its_range(dtype: torch.dtype) -> None:
    """From -1 to 3, evenly."""
    (made,) = drawn(lambda x: torch.empty(SIDE, SIDE, dtype=dtype).uniform_(-1, 3))
    assert made.dtype == dtype
    assert -1 <= float(made.min()) < -0.99
    assert 2.97 < float(made.max()) <= 3
    assert float(made.double().mean()) == pytest.approx(1, abs=4 * 4 / math.sqrt(12 * NUM))


def test_numbers_do_not_depend_on_the_layout() -> None:
    """Channels last and transposed: the same numbers at the same indices, laid out as captured."""
    x = torch.ones(2, 3, 4, 5)
    for turned in (x.to(memory_format=torch.channels_last), x.permute(3, 1, 0, 2)):
        for draw in (torch.rand_like, lambda x: F.dropout(x, 0.5)):
            (made,), (plain,) = drawn(draw, turned), drawn(draw, turned.contiguous())
            assert torch.equal(made, plain)
            assert made.stride() == turned.stride()


def test_micro_batches_draw_numbers_of_their_own() -> None:
    """Two equal halves of a batch are dropped differently, with nodes tagged as theirs."""
    model = nn.Sequential(small_net(), nn.Dropout(0.5))
    batch = [torch.cat([t[:3], t[:3]]) for t in batches()[0]]
    graph = capture(model, tuple(batch), xent, sgd(model), micro_batches=2, fuse=True)
    graph = graph.plain
    ops = {op.name: op for op in graph.ops}
    masks = [name for name in ops if name.startswith("lt")]
    assert [ops[name].micro_batch for name in masks] == [0, 1]
    assert {(ops[name].stage, ops[name].module) for name in masks} == {("forward", "1")}
    rows = [n.args for n in graph.program.module.graph.nodes if n.target is SELECT]
    assert [row[2] for row in rows if row[0].op == "placeholder"] == [0, 1]


def test_other_random_ops_keep_their_generators() -> None:
    """Normal numbers; their seed is that of their place among all that draw."""
    graph = captured(lambda x: (torch.rand(3), torch.randn(3), torch.randint(9, (3,))))
    assert [name.partition("_")[0] for name in graph.program.random_ops] == ["randn", "randint"]
    values = run_unplaced(graph, {b.op: X for b in graph.program.bindings}, 0, 1)
    generator = torch.Generator().manual_seed(op_seed(0, 1, 1))
    assert torch.equal(values[1], torch.randn(3, generator=generator))


def test_without_fuse_nothing_changes() -> None:
    """Random ops stay as they were traced."""
    graph = capture(Draws(lambda x: F.dropout(x, 0.5)), X)
    assert len(graph.program.random_ops) == 1
    assert scalars(graph) == []
    assert graph.meta["fuse"] is False


def test_new_nodes_say_what_they_are() -> None:
    """The fake value of every node has shape, strides and dtype of the real one."""
    graph = captured(lambda x: (F.dropout(x.t(), 0.5), torch.rand(3, dtype=torch.float64)))
    interpreter = torch.fx.Interpreter(graph.program.module, garbage_collect_values=False)
    interpreter.run(X, torch.arange(8, dtype=torch.int32).view(2, 4))
    for node, value in interpreter.env.items():
        if isinstance(value, torch.Tensor):
            fake = node.meta["val"]
            assert (fake.shape, fake.stride(), fake.dtype) == (
                value.shape,
                value.stride(),
                value.dtype,
            )
