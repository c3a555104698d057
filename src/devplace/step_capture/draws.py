"""Which numbers each random op of a trace draws: torch's generator says, as it does in eager mode.

While a step is traced nothing is drawn, so the seed of torch's default generator is free to count.
Each random op takes the present number and puts the next one. Code that keeps the generator's state
and puts it back, as activation checkpointing does, then draws the same numbers again, and an op
that draws after a seed of the user's is found where it does.
"""

from __future__ import annotations

import torch

from devplace.errors import CaptureError

_FIRST = 0x6465_7670_6C61_6365  # a seed that nobody else sets


class Draws:
    """Positions of the draws of one trace: 0, 1, 2 ... unless the generator is put back."""

    def __init__(self) -> None:
        self._count = 0

    def start(self) -> None:
        """Begin with the first draw; the caller puts torch's generator back after the trace."""
        torch.default_generator.manual_seed(_FIRST)

    def take(self, where: str) -> int:
        """The position of a draw made now.

        Raises:
            CaptureError: The generator has been seeded, or put into a state of before the trace.
        """
        position = self.place
        if not 0 <= position <= self._count:
            raise CaptureError(
                f"The step must not seed torch's generator: {where} draws under a seed set in the "
                f"step, which would be lost. Seed outside the step, or pass the numbers as an "
                f"input."
            )
        self.move_to(position + 1)
        return position

    @property
    def place(self) -> int:
        """The position of the next draw, unless the generator has been seeded."""
        return int(torch.default_generator.initial_seed()) - _FIRST

    def move_to(self, place: int) -> None:
        """Let the next draw have a position, as if those before had been made."""
        self._count = max(self._count, place)
        torch.default_generator.manual_seed(_FIRST + place)

    @property
    def is_seeded(self) -> bool:
        """Whether the generator is in a state that no draw has left."""
        seed = torch.default_generator.initial_seed()
        fresh = torch.Generator().manual_seed(seed).get_state()
        is_own = 0 <= seed - _FIRST <= self._count
        return not is_own or not torch.equal(fresh, torch.default_generator.get_state())
