"""Seeds of random ops, made from user seed, step and op, never from the placement."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from devplace.graph import Captured
from devplace.graph.program import RANDOM_KEYS

_MASK = (1 << 64) - 1
_default_generator_lock = threading.Lock()


def op_seed(seed: int, step: int, position: int) -> int:
    """Seed of the random op at `position` in trace order, in the 1-based step `step`.

    Returns:
        An integer in `[0, 2**63)`.

    Source: Steele, Lea, Flood (2014), Fast splittable pseudorandom number generators,
        doi:10.1145/2660193.2660195, the SplitMix64 finaliser, applied once per argument.
    """
    state = 0
    for value in (seed, step, position):
        state = (state + value + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


class RandomKeys:
    """The input that ops drawing by a counter read: another one in every step.

    Args:
        graph: The captured step; if nothing in it draws by a counter, there is none.
    """

    def __init__(self, graph: Captured) -> None:
        self._shapes = {
            binding.op: graph.tensors[graph.ops[binding.op].outputs[0]].shape
            for binding in graph.program.bindings
            if binding.kind == "scalar" and binding.key == RANDOM_KEYS
        }

    def of_step(self, seed: int, step: int) -> dict[int, Any]:
        """Int32 tensors `[random ops, KEY_WORDS]` on the CPU by source op.

        A row begins with the low and the high 32 bits of the op's `op_seed`.

        Args:
            seed: The user's seed.
            step: 1-based number of the step.
        """
        return {op: _keys(seed, step, *shape) for op, shape in self._shapes.items()}


def _keys(seed: int, step: int, count: int, words: int) -> Any:
    seeds = torch.tensor([op_seed(seed, step, k) for k in range(count)], device="cpu")
    keys = torch.zeros(count, words, dtype=torch.int32, device="cpu")
    keys[:, :2] = seeds.view(torch.int32).view(count, 2)  # little-endian: the low word first
    return keys


def takes_generator(target: Any) -> bool:
    """Whether an op's schema has a `generator` argument."""
    schema = getattr(target, "_schema", None)
    return schema is not None and any(arg.name == "generator" for arg in schema.arguments)


def call_with_default_generator(
    function: Callable[..., Any],
    seed: int,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    generator: Any = None,
) -> Any:
    """Call an op that can only draw from a default generator of torch, the CPU's if none is given.

    The generator is seeded for the call and put back afterwards, under a lock.
    """
    generator = torch.default_generator if generator is None else generator
    with _default_generator_lock:
        before = generator.get_state()
        try:
            generator.manual_seed(seed)
            return function(*args, **kwargs)
        finally:
            generator.set_state(before)
