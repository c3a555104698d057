"""The probe as a whole, on made-up devices and on logical CPU devices."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console
from tests.machine.test_detect import fake_torch
from tests.run.probe.fakes import KEY, FakeBench

from devplace.cli import probing
from devplace.errors import ExecutionError, MachineError
from devplace.machine import Machine, detect, toml
from devplace.machine.detect import gpu_machine
from devplace.run.copies import clone_tensor
from devplace.run.probe import ProbeReport, machine_from_probe, probe
from devplace.run.probe.channels import channels
from devplace.run.probe.mailboxes import CpuBench
from devplace.run.probe.probe_run import run_probe

FAULTY = ("cuda:0", "cuda:1")


def machine(num: int = 3) -> Machine:
    """What would be detected where the made-up devices are."""
    return gpu_machine(fake_torch(["NVIDIA H100 80GB HBM3"] * num))


def test_links_get_what_was_measured() -> None:
    """A hop's time is flight and occupied time, per size; bandwidth beyond the largest; it reads
    back."""
    report = run_probe(FakeBench(), KEY)
    measured = machine_from_probe(machine(), report)
    link, pair = measured.path(*FAULTY), report.pair(*FAULTY)
    assert link is not None
    assert pair is not None
    for size, hop in zip(pair.sizes, pair.hop_ns["kernel"], strict=True):
        if size < report.switch_bytes:
            assert link.duration_ns(size) + link.latency_ns == hop
    assert link.bytes_per_s == pytest.approx(100e9, rel=0.001)
    assert link.engine_bytes == report.switch_bytes
    assert "cuda:0 engine" in link.channels
    assert (link.send_overhead_ns, link.receive_overhead_ns) == (700, 900)
    assert report.date in measured.sources["links"]
    assert "measured by devplace probe" in measured.sources["links"]
    assert toml.loads(toml.dumps(measured)) == measured
    assert ProbeReport.from_json(report.to_json()) == report


@pytest.mark.parametrize("kind", ["wrong", "wrong_together", "silent"])
def test_a_faulty_pair_is_told_and_not_used(kind: str) -> None:
    """Wrong data, or none, in one direction: that direction is staged through the host."""
    bench = FakeBench(2, **{kind: [FAULTY]})  # type: ignore[arg-type]
    report = run_probe(bench, KEY)
    assert [(pair.src, pair.dst) for pair in report.faulty] == [FAULTY]
    assert FAULTY not in bench.measured
    assert "cuda:1" not in bench.peers["cuda:0"]
    assert all(FAULTY not in row.transfers for row in report.sharing)
    measured = machine_from_probe(machine(2), report)
    off = [link for link in measured.links if not link.usable]
    assert [(link.src, link.dst) for link in off] == [FAULTY]
    staged = measured.path(*FAULTY)
    assert staged is not None
    legs = [measured.path("cuda:0", "cpu:0"), measured.path("cpu:0", "cuda:1")]
    assert staged.latency_ns == sum(leg.latency_ns for leg in legs if leg is not None)
    assert "cuda:0 -> cuda:1" in measured.sources["faults"]
    assert toml.loads(toml.dumps(measured)) == measured


def test_a_card_with_a_faulty_host_link_is_refused() -> None:
    """No machine is made of a card that the host cannot reach; the message says what to do."""
    report = run_probe(FakeBench(wrong=[("cpu:0", "cuda:1")]), KEY)
    with pytest.raises(MachineError, match=r"cpu:0 -> cuda:1 returned.*CUDA_VISIBLE_DEVICES"):
        machine_from_probe(machine(), report)


def test_a_report_of_another_machine_is_refused() -> None:
    """A device that is not there is named."""
    with pytest.raises(MachineError, match="cuda:2"):
        machine_from_probe(machine(2), run_probe(FakeBench(3), KEY))


def test_failing_devices_are_told_and_closed() -> None:
    """An error of the driver becomes one of ours, and the bench is closed."""
    bench = FakeBench()

    def broken() -> None:
        raise RuntimeError("CUDA error: unspecified launch failure\nmore")

    bench.warm_up = broken  # type: ignore[method-assign]
    with pytest.raises(ExecutionError, match=r"unspecified launch failure\. Check"):
        run_probe(bench, KEY)
    assert bench.is_closed


def found_channels(*shared: str, num: int = 4) -> dict[tuple[str, str], tuple[str, ...]]:
    """Channels of made-up devices that share these."""
    return channels(run_probe(FakeBench(num, shared=shared), KEY))


def test_channels_follow_what_slows_down() -> None:
    """Sharing on the way out and in: each card's own channels; else none."""
    assert set(found_channels().values()) == {()}
    found = found_channels("out", "in")
    assert found["cuda:0", "cuda:2"] == ("cuda:0 out", "cuda:2 in")
    assert found["cuda:3", "cuda:1"] == ("cuda:3 out", "cuda:1 in")
    assert found["cpu:0", "cuda:1"] == ()


def test_a_half_duplex_wire_is_one_channel_of_both_directions() -> None:
    """Both directions of a pair that slow each other down name the same channel."""
    found = found_channels("both", num=2)
    assert found["cuda:0", "cuda:1"] == found["cuda:1", "cuda:0"] == ("cuda:0 - cuda:1",)


def test_a_bridge_is_a_channel_of_all_pairs_of_cards() -> None:
    """If pairs with no card in common slow each other down, all pairs share."""
    found = found_channels("bridge")
    peers = {pair: names for pair, names in found.items() if "cpu:0" not in pair}
    assert set(peers.values()) == {("bridge",)}
    assert found["cpu:0", "cuda:0"] == ()


def test_tables_show_every_pair_and_fault() -> None:
    """Each ordered pair has a row; a faulty one says what is wrong."""
    report = run_probe(FakeBench(wrong=[FAULTY]), KEY)
    console = Console(width=160)
    with console.capture() as capture:
        console.print(probing.links_table(report))
        console.print(probing.hops_table(report.pairs, "kernel"))
        console.print(probing.devices_table(report))
    text = capture.get()
    assert text.count("returned wrong data") == 2  # by kernel, by engine
    assert "5 us" in text
    assert "100 GB/s" in text
    assert "16 MiB" in text
    assert "Between steps 9 us; the shortest step takes 40 us." in probing.notes(report)


def test_the_outcome_of_a_faulty_probe_is_a_failed_verification() -> None:
    """Exit code 4, and a complaint that names the pair."""
    report = run_probe(FakeBench(wrong=[FAULTY]), KEY)
    outcome = probing.ProbeOutcome(report, machine_from_probe(machine(), report), "", None)
    assert outcome.exit_code == 4
    assert "1 of 12 links are faulty: cuda:0 -> cuda:1 returned wrong data" in outcome.complaint
    assert probing.ProbeOutcome(run_probe(FakeBench(), KEY), None, "", None).exit_code == 0


def test_logical_cpu_devices_are_probed() -> None:
    """Every ordered pair has times for all sizes, and the machine reads back equal."""
    here = detect(cpu_devices=2)
    report = probe(here)
    assert report.faulty == ()
    assert [(p.src, p.dst) for p in report.pairs] == [("cpu:0", "cpu:1"), ("cpu:1", "cpu:0")]
    assert all(min(pair.hop_ns["copy"]) > 0 for pair in report.pairs)
    assert all(device.receive_overhead_ns > 0 for device in report.devices)
    measured = machine_from_probe(here, report)
    assert toml.loads(toml.dumps(measured)) == measured


def test_a_faulty_copy_between_threads_is_found() -> None:
    """A copy that changes one byte on the way from the first to the second device is told."""

    def faulty(value: Any, transfer: Any) -> Any:
        copied = clone_tensor(value)
        if transfer.src == 0:
            copied[-1] += 1
        return copied

    report = run_probe(CpuBench(("cpu:0", "cpu:1"), faulty), KEY)
    assert [(pair.src, pair.dst) for pair in report.faulty] == [("cpu:0", "cpu:1")]
    assert "1 of 1024 bytes" in report.faulty[0].faults[0]


def test_a_copy_that_fails_ends_the_probe() -> None:
    """An error of the copy is told; no thread waits for ever."""

    def failing(value: Any, transfer: Any) -> Any:
        raise RuntimeError("no memory")

    with pytest.raises(ExecutionError, match="no memory"):
        run_probe(CpuBench(("cpu:0", "cpu:1"), failing), KEY)


def test_devices_stay_as_detected() -> None:
    """Only links change: memory and speeds are those of the detected machine."""
    here = machine()
    measured = machine_from_probe(here, run_probe(FakeBench(), KEY))
    assert measured.devices == here.devices
