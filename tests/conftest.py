"""Settings for all tests."""

import os
import signal
from collections.abc import Iterator
from functools import partial

# Sums over several threads round in another order; tests that compare bits run ops themselves.
# Torch reads it when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Shells start background jobs with Ctrl-C ignored, and so would be all processes of the tests.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
import torch
from hypothesis import settings

# No test is timed. In CI the same examples are drawn every time, so that a change is judged by what
# it changed; elsewhere new ones are tried at every run.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(scope="session", autouse=True)
def _own_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Kernels, times and links are kept in a folder of this run, for all of its tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEVPLACE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members of fused ops are run one by one by PyTorch's kernels."""
    monkeypatch.setenv("DEVPLACE_COMPILE", "0")
    forget_kernels(monkeypatch)


def forget_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin with no kernels in this process, and leave it with those that it had before."""
    from devplace.kernels import fused

    monkeypatch.setattr(fused, "_kernels", {})
    monkeypatch.setattr(fused, "_failures", {})


@pytest.fixture
def no_kernels_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled, or taken from disk, as in a new process."""
    forget_kernels(monkeypatch)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `parallelize` measures, plans and ops, gets ten minutes each: a slow or busy computer is
    no failure."""
    from devplace.auto import parallelize
    from devplace.cost import remote
    from devplace.cost.profiled import Profiled
    from devplace.tune import measured_costs
    from devplace.tune.measure import Measurer
    from tests.tune.steps import LONG_S

    monkeypatch.setattr(parallelize, "Measurer", partial(Measurer, time_limit_s=LONG_S))
    monkeypatch.setattr(measured_costs, "Profiled", partial(Profiled, seconds=LONG_S))
    for limit in ("START_LIMIT_S", "TIME_LIMIT_S"):
        monkeypatch.setattr(remote, limit, LONG_S)


@pytest.fixture(scope="session", autouse=True)
def _one_gpu_for_several() -> Iterator[None]:
    """Of `tests/run/gpus.py`."""
    if os.environ.get("DEVPLACE_GPU_TESTS") != "one" or not torch.cuda.is_available():
        yield
        return
    from devplace.testing.one_gpu import one_gpu

    with one_gpu():
        yield


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests for GPUs are skipped where there is none, unless logical CPU devices stand in."""
    needs_gpu = item.get_closest_marker("gpu") and os.environ.get("DEVPLACE_GPU_TESTS") != "cpu"
    if needs_gpu and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
