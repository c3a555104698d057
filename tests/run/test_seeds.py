"""Seeds of random ops depend on seed, step and op only, and leave torch's generator alone."""

from __future__ import annotations

import itertools

import pytest
import torch

from devplace.run.seeds import call_with_default_generator, op_seed, takes_generator

aten = torch.ops.aten
PINNED = [5352869105593375612, 6200629921479507140, 6396520470166291297]


def test_seeds_are_pinned() -> None:
    """The same numbers for ever: runs of old plans stay reproducible."""
    assert [op_seed(0, 1, 0), op_seed(0, 1, 1), op_seed(1, 0, 0)] == PINNED


def test_seeds_differ_in_every_argument() -> None:
    """Neighbouring seeds, steps and ops share no seed; all fit torch's generator."""
    seeds = [op_seed(*key) for key in itertools.product(range(12), repeat=3)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert op_seed(-1, 1, 1) != op_seed(1, 1, 1)


def test_the_default_generator_is_put_back_even_after_an_error() -> None:
    """An op that draws from it, or fails, leaves torch's generator as it was."""
    before = torch.get_rng_state()
    first = call_with_default_generator(torch.rand, 5, (3,), {})
    assert torch.equal(first, call_with_default_generator(torch.rand, 5, (3,), {}))
    assert not torch.equal(first, call_with_default_generator(torch.rand, 6, (3,), {}))
    with pytest.raises(TypeError):
        call_with_default_generator(torch.rand, 5, ("three",), {})
    assert torch.equal(torch.get_rng_state(), before)


def test_which_ops_take_a_generator() -> None:
    """Read from the schema; plain functions have none."""
    assert takes_generator(aten.bernoulli.p)
    assert not takes_generator(aten.rand.default)
    assert not takes_generator(torch.rand)
