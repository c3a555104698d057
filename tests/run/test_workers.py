"""Threads of logical devices."""

from __future__ import annotations

from queue import SimpleQueue

import pytest
import torch

from devplace.run.workers import Workers


@pytest.mark.parametrize("own", [1, 2, 3])
@pytest.mark.parametrize("inside", [1, 2])
def test_ops_use_the_threads_asked_for(own: int, inside: int) -> None:
    """Whatever the caller's own number is, which stays; sums depend on it in their last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(own)
    try:
        workers = Workers(["one", "two"], inside)
        found: SimpleQueue[tuple[int, torch.Tensor]] = SimpleQueue()
        values = torch.linspace(0, 1, 100_003)
        for queue in workers.queues:
            queue.put(lambda: found.put((torch.get_num_threads(), values.std())))
        seen = [found.get() for _ in workers.queues]
        workers.close()
        assert torch.get_num_threads() == own
        torch.set_num_threads(inside)
        assert [count for count, _ in seen] == [inside, inside]
        assert all(torch.equal(value, values.std()) for _, value in seen)
    finally:
        torch.set_num_threads(before)
