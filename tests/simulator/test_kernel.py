"""The native simulator against the plain Python one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies import problems, random_placement

from devplace.problem import Problem
from devplace.simulator.kernel import NativeKernel, ReferenceKernel, native_module

native = native_module()
needs_native = pytest.mark.skipif(native is None, reason="native simulator not built")


@needs_native
@settings(max_examples=400, deadline=None)
@given(problem=problems, seed=st.integers(0, 2**32 - 1))
def test_native_equals_reference_to_the_nanosecond_and_byte(problem: Problem, seed: int) -> None:
    """Starts, ends, order, transfers and memory over time are equal on random problems."""
    rng = np.random.default_rng(seed)
    placement = random_placement(problem, rng)
    device = problem.task_devices(placement)
    fast, slow = NativeKernel(native, problem.core), ReferenceKernel(problem.core)
    priority = slow.priority(device)
    np.testing.assert_array_equal(fast.priority(device), priority)
    if placement.priority is not None:
        priority = placement.priority[problem.core.tasks.task_op]
    expected, got = slow.trace(device, priority), fast.trace(device, priority)
    for name in expected.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(got, name), getattr(expected, name), err_msg=name)


@needs_native
@settings(max_examples=50, deadline=None)
@given(problem=problems, seed=st.integers(0, 2**32 - 1))
def test_batches_equal_single_runs_on_any_number_of_threads(problem: Problem, seed: int) -> None:
    """Scores of a batch are those of its rows, with or without threads and memory tracking."""
    rng = np.random.default_rng(seed)
    fast, slow = NativeKernel(native, problem.core), ReferenceKernel(problem.core)
    rows = np.stack([problem.task_devices(random_placement(problem, rng)) for _ in range(5)])
    expected = slow.evaluate(rows, None)
    for threads in (1, 3):
        got = fast.evaluate(rows, None, threads=threads)
        np.testing.assert_array_equal(got.makespan_ns, expected.makespan_ns)
        np.testing.assert_array_equal(got.peak_bytes, expected.peak_bytes)
        np.testing.assert_array_equal(got.pool_peak_bytes, expected.pool_peak_bytes)
        np.testing.assert_array_equal(got.transfer_bytes, expected.transfer_bytes)
    blind = fast.evaluate(rows, None, track_memory=False)
    np.testing.assert_array_equal(blind.makespan_ns, expected.makespan_ns)
    assert not blind.peak_bytes.any()


@needs_native
def test_bad_arrays_are_refused_not_read() -> None:
    """Device indices out of range and rows of the wrong length raise instead of crashing."""
    from tests.strategies import random_problem

    problem = random_problem(0)
    kernel = NativeKernel(native, problem.core)
    count = problem.core.tasks.num_tasks
    with pytest.raises(ValueError, match="out of range"):
        kernel.priority(np.full(count, 99, np.int32))
    with pytest.raises(ValueError, match="wrong size"):
        kernel.priority(np.zeros(count + 1, np.int32))
    with pytest.raises(ValueError, match="wrong size"):
        kernel.trace(np.zeros(count, np.int32), np.zeros(3, np.int64))
    with pytest.raises(ValueError, match="wrong size"):
        kernel.evaluate(np.zeros((2, count), np.int32), np.zeros(3, np.int64))


def test_the_fallback_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With the native simulator switched off one line is logged, however many problems."""
    from tests.strategies import random_problem

    from devplace.simulator import kernel

    monkeypatch.setenv("DEVPLACE_NATIVE", "off")
    monkeypatch.setattr(kernel, "_told", False)
    problem = random_problem(1)
    for _ in range(2):
        assert isinstance(kernel.make_kernel(problem.core), ReferenceKernel)
    assert len(caplog.records) == 1
