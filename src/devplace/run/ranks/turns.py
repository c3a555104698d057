"""The messages of one process in their order, as a single thread comes to them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable


class Turns:
    """Carries out receives before the sends that they come before in the order of all processes.

    A thread that runs a device's instructions comes to its sends in that order, and to a receive
    only after it was the receive's turn: the order of sends is that of a linear order of all
    instructions. So it is enough to catch up at each send, and where a tensor is needed.

    Args:
        order: Transfers that this process takes part in, in the order of `meeting_order`.
        receive: Carries out a receive.
    """

    def __init__(self, order: Iterable[int], receive: Callable[[int], None]) -> None:
        self._left = deque(order)
        self._receive = receive
        self._came: set[int] = set()

    def before_send(self, transfer: int) -> None:
        """It is now this transfer's turn, and it is sent next."""
        while self._left[0] != transfer:
            self._receive_next()
        self._left.popleft()

    def until_received(self, transfer: int) -> None:
        """Receive up to a transfer, unless that is done."""
        while transfer not in self._came:
            self._receive_next()

    def _receive_next(self) -> None:
        transfer = self._left.popleft()
        self._came.add(transfer)
        self._receive(transfer)
