"""Random ops on a GPU: one generator each, reseeded before every step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from devplace.run.seeds import op_seed, takes_generator


class RandomOps:
    """The random ops of one device.

    A CUDA graph reads seed and offset of its generators when it is launched, so a generator of its
    own per op gives each op the numbers of its seed, in a graph and out of it.

    Args:
        positions: Name of each FX node that draws on any device -> position of its draw.
        used: Names of those on this device.
        device: Its torch device.
        seed: The user's seed.
    """

    def __init__(
        self, positions: Mapping[str, int], used: set[str], device: Any, seed: int
    ) -> None:
        self._device = device
        self._seed = seed
        self._positions = {name: k for name, k in positions.items() if name in used}
        self._generators = {name: torch.Generator(device) for name in self._positions}

    def start_step(self, number: int) -> None:
        """Seed all generators for step `number`."""
        for name, position in self._positions.items():
            self._generators[name].manual_seed(op_seed(self._seed, number, position))

    def draws(self, name: str) -> bool:
        """Whether this FX node draws random numbers."""
        return name in self._positions

    def draw(self, name: str, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a random op with its generator."""
        generator = self._generators[name]
        if takes_generator(target):
            return target(*args, **kwargs, generator=generator)
        with self._as_default(generator):
            return target(*args, **kwargs)

    @contextmanager
    def capturing(self, graph: Any) -> Iterator[None]:
        """Make a CUDA graph read these generators; the user's own one stays out of it.

        A capture that fails leaves the default generator it began with unusable, so a scrap one
        takes its place.
        """
        for generator in self._generators.values():
            graph.register_generator_state(generator)
        with self._as_default(torch.Generator(self._device)):
            yield

    @contextmanager
    def _as_default(self, generator: Any) -> Iterator[None]:
        default = torch.cuda.default_generators[self._device.index]
        before = default.graphsafe_get_state()
        default.graphsafe_set_state(generator)
        try:
            yield
        finally:
            default.graphsafe_set_state(before)
