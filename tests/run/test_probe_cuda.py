"""The link probe on CUDA devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from devplace.machine import detect, toml
from devplace.run.cuda.push import push_by_engine, push_by_kernel
from devplace.run.probe import ProbeReport, machine_from_probe, probe
from devplace.run.probe.probe_run import run_probe

NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
NAMES = tuple(f"cuda:{k}" for k in range(min(2, NUM_GPUS)))

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS == 0, reason="needs a CUDA device"),
]
two_gpus = pytest.mark.skipif(NUM_GPUS < 2, reason="needs two CUDA devices")


def probe_two(push_kernel: Any = push_by_kernel, push_engine: Any = push_by_engine) -> ProbeReport:
    """Probe the first two GPUs with these ways to carry."""
    from devplace.run.cuda.probe import CudaBench

    return run_probe(CudaBench(NAMES, push_kernel, push_engine), {"test": "yes"})


def is_first(source: Any, buffer: Any) -> bool:
    """Whether a push goes from the first GPU to the second."""
    return (source.device.index, buffer.device.index) == (0, 1)


def test_a_probe_of_all_gpus_gives_a_machine(tmp_path: Path) -> None:
    """All links carry what was sent, longer for more bytes; the machine file reads back equal."""
    machine = detect()
    report = probe(machine)
    assert report.faulty == ()
    for pair in report.pairs:
        for times in pair.hop_ns.values():
            assert 500 < times[0] < 2_000_000  # alone some us; other processes may load the host
            assert times[-1] > times[0]
    for device in report.devices:
        assert 0 < device.launch_gap_ns < device.op_ns < 20_000
        assert 0 < device.receive_overhead_ns < 20_000
    assert report.step is not None
    assert 0 < report.step.least_step_ns < 10_000_000
    measured = machine_from_probe(machine, report)
    (tmp_path / "m.toml").write_text(toml.dumps(measured))
    assert toml.load(tmp_path / "m.toml") == measured
    assert ProbeReport.from_json(report.to_json()) == report


def test_a_probe_gives_its_memory_back() -> None:
    """Only streams with their libraries' buffers stay, for the next one: it takes nothing more."""
    probe(detect())
    before = [torch.cuda.memory_allocated(k) for k in range(NUM_GPUS)]
    probe(detect())
    assert [torch.cuda.memory_allocated(k) for k in range(NUM_GPUS)] == before


@two_gpus
def test_wrong_data_by_the_kernel_is_found() -> None:
    """One wrong word in large tensors of one direction is told, and only that pair is off."""

    def faulty(source: Any, buffer: Any, flag: Any, epoch: Any) -> int:
        blocks = push_by_kernel(source, buffer, flag)
        if is_first(source, buffer) and buffer.numel() > 10_000:
            torch.cuda.current_stream(source.device).synchronize()
            buffer[9_999].add_(1)
            torch.cuda.synchronize(buffer.device)
        return blocks

    report = probe_two(push_kernel=faulty)
    (pair,) = report.faulty
    assert (pair.src, pair.dst) == NAMES
    assert "1 of 262144 words, by kernel" in pair.faults[0]
    assert pair.hop_ns == {}
    link = next(
        link for link in machine_from_probe(detect(), report).links if (link.src, link.dst) == NAMES
    )
    assert not link.usable


@two_gpus
def test_a_push_that_never_signals_ends() -> None:
    """The wait gives up, the pair is reported, and the other direction is measured."""

    def silent(source: Any, buffer: Any, flag: Any, epoch: Any) -> int:
        if is_first(source, buffer):
            torch.cuda.current_stream(source.device)
            buffer.copy_(source)
            return 1
        return push_by_engine(source, buffer, flag, epoch)

    report = probe_two(push_engine=silent)
    (pair,) = report.faulty
    assert (pair.src, pair.dst) == NAMES
    assert "did not arrive" in pair.faults[0]
    back = report.pair(*NAMES[::-1])
    assert back is not None
    assert set(back.hop_ns) == {"kernel", "engine"}
