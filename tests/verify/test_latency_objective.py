"""Tarnawski's latency objective by hand."""

import dataclasses

from devplace.verify import verify_latency
from tests.verify.test_throughput_objective import DIAMOND

LATENCY = dataclasses.replace(DIAMOND, objective="latency", memory_bytes=4.0)


def test_blocks_by_hand():
    """A block takes in-communication, compute and out-communication in one piece."""
    # block 0 {n0, n2}: 1 + 3 + out 0.25 + 0.75 = 5; block 1 {n1, n3}: in 0.25 + 0.75, 2 + 4;
    # block 1 waits for block 0
    assert verify_latency(LATENCY, (0, 1, 0, 1), (0, 1, 0, 1)).value == 12.0
    # the CPU runs n1 (20) beside the others: n0 ends at 1.25, n2 alone 3 + 0.25 + 0.75 at 5.25
    instance = dataclasses.replace(
        LATENCY, nodes=tuple(dataclasses.replace(n, color=None) for n in LATENCY.nodes)
    )
    verdict = verify_latency(instance, (0, 2, 1, 2), (0, -1, 1, -1))
    assert verdict.is_valid
    assert verdict.value == 1.25 + 20.0 + 40.0


def test_blocks_that_wait_for_each_other_are_refused():
    """n0 and n3 in one block with n1 outside: it would have to end before it begins."""
    instance = dataclasses.replace(
        LATENCY, nodes=tuple(dataclasses.replace(n, color=None) for n in LATENCY.nodes)
    )
    verdict = verify_latency(instance, (0, 1, 0, 0), (0, 1, 0, 0))
    assert "in a circle" in verdict.broken[0]


def test_a_block_is_on_one_device_and_blocks_do_not_overlap():
    """A block across devices, and two blocks of one device at once, are refused."""
    instance = dataclasses.replace(
        LATENCY, nodes=tuple(dataclasses.replace(n, color=None) for n in LATENCY.nodes)
    )
    across = verify_latency(instance, (0, 1, 0, 1), (0, 0, 0, 0))
    assert "block 0 is on devices [0, 1]" in across.broken[0]
    at_once = verify_latency(instance, (2, 0, 0, 2), (-1, 1, 2, -1))
    assert any("overlap" in text for text in at_once.broken)
