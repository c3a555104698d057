"""DOPPLER's makespan by hand."""

from devplace.instances import load_instance
from devplace.verify import verify_makespan
from tests.instances import files


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
