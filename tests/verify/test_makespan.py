"""DOPPLER's makespan by hand and against known values."""

from collections import deque

import pytest

from devplace.instances import load_instance
from devplace.verify import verify_makespan
from tests.instances import files


def round_robin(instance):
    """Ops dealt out in topological (first in, first out) order, run in that order."""
    count, k = len(instance.compute), instance.num_devices
    missing = [0] * count
    for _, b in instance.edges:
        missing[b] += 1
    ready, order = deque(v for v in range(count) if not missing[v]), []
    while ready:
        order.append(ready.popleft())
        for a, b in instance.edges:
            if a == order[-1]:
                missing[b] -= 1
                if not missing[b]:
                    ready.append(b)
    device = [0] * count
    rows = [[] for _ in range(k)]
    for place, op in enumerate(order):
        device[op] = place % k
        rows[place % k].append(op)
    return device, rows


def test_by_hand(tmp_path):
    """Transfers run side by side; an op waits for its slowest input."""
    instance = load_instance(files.write(tmp_path, "d.txt", files.DOPPLER))
    device, order = (0, 0, 1), ([0, 1], [2], [], [])
    # op 0 ends at 10 and arrives at 50, op 1 ends at 30 and arrives at 110; then 30
    assert verify_makespan(instance, device, order).value == 140
    assert verify_makespan(instance, (0, 0, 0), ([0, 1, 2], [], [], [])).value == 60


def test_rules(tmp_path):
    """Each op once, on its device, in an order that can finish."""
    instance = load_instance(files.write(tmp_path, "d.txt", files.DOPPLER))
    for device, order, what in (
        ((0, 0, 1), ([0, 1], [], [], []), "do not list each op once"),
        ((0, 0, 1), ([0, 1, 2], [], [], []), "on its device"),
        ((0, 0, 0), ([2, 0, 1], [], [], []), "op 2 waits"),
        ((0, 0, 0), ([0, 1, 2],), "1 orders"),
    ):
        assert what in verify_makespan(instance, device, order).broken[0]


@pytest.mark.parametrize(
    ("name", "one", "dealt", "digits"),
    [("chain_mm_112nodes", 4800.28, 1200.10, 1), ("ffnn_192nodes", 226.78, 84.18, 2)],
)
def test_known_values(name, one, dealt, digits):
    """One device and topological round robin are worth what DOPPLER's own simulator gives them
    (chain_mm to 0.01: its ties are broken in another order)."""
    instance = load_instance(files.PUBLIC / "doppler" / f"{name}.txt")
    device, rows = round_robin(instance)
    assert round(verify_makespan(instance, device, rows).value / 1e10, digits) == dealt
    order = sorted(
        range(len(device)), key=[op for row in zip(*rows, strict=False) for op in row].index
    )
    everything = [order, *[[] for _ in range(instance.num_devices - 1)]]
    value = verify_makespan(instance, [0] * len(device), everything).value
    assert round(value / 1e10, 2) == one
