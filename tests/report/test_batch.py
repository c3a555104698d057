"""What reports say of the copies of a batch."""

from __future__ import annotations

from devplace.placers import Single, place
from devplace.report import limits, summary
from devplace.simulator import simulate
from devplace.testing import hand_machine, hand_placement, hand_problem

MACHINE = hand_machine({"cuda:0": 10**9, "cuda:1": 10**9, "cpu:0": 10**9}, bytes_per_ns=10)


def text(num_bytes: int) -> str:
    return f"""
        x = input bytes={num_bytes}
        a = f(x) bytes=10 ns=10000,10000,900000
        b = g(a) bytes=10 ns=10000,10000,900000 result=output
    """


def test_a_batch_that_takes_its_time_is_told() -> None:
    """100 us before 20 us of ops; it counts neither as transfers nor as idle time."""
    problem = hand_problem(text(1_000_000), MACHINE)
    result = place(problem, Single(), "9ev")
    assert result.step_ns == 120_000
    told = summary.plan_summary(result)
    assert "copied to its devices in 100 us, before the first op" in told
    found = limits.find_limits(result.timeline)
    assert (found.path_compute_ns, found.path_wait_ns) == (20_000, 0)
    line = limits.limits_text(result.timeline, found)
    assert "the batch is copied to its devices in 100 us" in line
    assert summary.longest_idle(result.timeline) is None


def test_a_small_batch_is_not_told() -> None:
    """10 ns of 20 us."""
    problem = hand_problem(text(100), MACHINE)
    timeline = simulate(problem, hand_placement(problem, {"b": "cuda:1"}))
    assert timeline.batch_ns == 10
    assert "the batch is copied" not in limits.limits_text(timeline, limits.find_limits(timeline))
    assert "copied to its devices" not in summary.plan_summary(place(problem, Single(), "9ev"))
