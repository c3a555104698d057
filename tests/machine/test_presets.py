"""Known machines: complete, sourced, symmetric, in the right units."""

import re

import pytest

from devplace.errors import MachineError
from devplace.machine import load_machine, presets

ALL = [presets.get(name) for name in presets.NAMES]
IDS = presets.NAMES


@pytest.mark.parametrize("machine", ALL, ids=IDS)
def test_name_and_devices(machine):
    """A preset carries its own name, and cpu:0 stands beside cuda:0, cuda:1, ..."""
    assert presets.get(machine.name) == machine
    kind = "cpu" if machine.name.startswith("cpu") else "cuda"
    own = [name for name in machine.device_names if name.startswith(kind)]
    assert "cpu:0" in machine.device_names
    assert own == [f"{kind}:{i}" for i in range(len(own))]


@pytest.mark.parametrize("machine", ALL, ids=IDS)
def test_links_are_symmetric(machine):
    """Both directions of every pair have the same speed and latency."""
    for src in machine.device_names:
        for dst in machine.device_names:
            if src != dst:
                there, back = machine.path(src, dst), machine.path(dst, src)
                assert (there.bytes_per_s, there.latency_ns) == (back.bytes_per_s, back.latency_ns)


@pytest.mark.parametrize("machine", ALL, ids=IDS)
def test_numbers_have_plausible_units(machine):
    """Rates are FLOP/s and bytes/s, sizes bytes, times ns: all within what hardware does."""
    for device in machine.devices:
        assert 10**9 < device.flops_per_s["float32"] < 10**14
        assert 10**9 <= device.bytes_per_s < 10**13
        assert 2**31 < device.usable_bytes < 2**42
        assert 1_000 <= device.launch_gap_ns <= 20_000
    for link in machine.links:
        assert 10**9 < link.bytes_per_s < 10**12
        assert 1_000 <= link.latency_ns <= 50_000


@pytest.mark.parametrize("machine", ALL, ids=IDS)
def test_every_number_has_a_source(machine):
    """Sources name each product, links and gaps, and hold titles, no addresses."""
    if not machine.name.startswith("cpu"):
        assert {device.model for device in machine.devices} <= set(machine.sources)
        assert {"links", "overheads", "shares"} <= set(machine.sources)
    assert "gaps" in machine.sources
    assert not re.search(r"https?://", " ".join(machine.sources.values()))


def test_k40_is_the_hdp_testbed():
    """Card-to-card transfers share a host bridge; each card has PCIe lanes of its own."""
    machine = presets.get("k40x8")
    assert len(machine.devices) == 9
    between = machine.path("cuda:0", "cuda:1")
    other = machine.path("cuda:2", "cuda:3")
    assert set(between.channels) & set(other.channels) == {"host-bridge"}
    up, down = machine.path("cuda:0", "cpu:0"), machine.path("cpu:0", "cuda:0")
    assert not set(up.channels) & set(down.channels)
    assert "host-bridge" not in up.channels + down.channels
    assert machine.devices[1].memory_bytes == 12 * 2**30 * 15 // 16


def test_rtx4090_is_staged_through_the_host():
    """Without peer access there is no direct link, and half the speed is left."""
    machine = presets.get("rtx4090x2")
    assert ("cuda:0", "cuda:1") not in {(link.src, link.dst) for link in machine.links}
    assert machine.path("cuda:0", "cuda:1").bytes_per_s == 12_500_000_000


def test_rates_follow_the_datasheets():
    """Useful rates are the datasheet's peaks times the documented shares."""
    k40 = presets.get("k40x1").devices[1]
    assert k40.flops_per_s["float32"] == 3_003_000_000_000
    h100 = presets.get("h100x1").devices[1]
    assert h100.flops_per_s["bfloat16"] == 494_500_000_000_000
    assert h100.flops_per_s["tf32"] == 247_250_000_000_000
    assert h100.bytes_per_s == 2_680_000_000_000
    rtx = presets.get("rtx4090x1").devices[1]
    assert rtx.flops_per_s["tf32"] == rtx.flops_per_s["float32"]


def test_v100x8_is_a_cube_mesh():
    """Eight V100 have six NVLink connections each; the others are one stop away."""
    machine = presets.get("v100x8")
    out = [link for link in machine.links if (link.src, link.dst[:4]) == ("cuda:0", "cuda")]
    assert sum(link.bytes_per_s for link in out) == 6 * 23_900_000_000
    assert len(machine.path("cuda:0", "cuda:7").channels) == 2


def test_unequal_pair():
    """One fast and one slow card."""
    fast, slow = presets.get("unequal-2").devices[1:]
    assert fast.flops_per_s["float32"] > 2 * slow.flops_per_s["float32"]


@pytest.mark.parametrize("name", ["h100x3", "cpux7", "v100x1", "k40x5", "h200x8"])
def test_any_number_of_devices(name):
    """A family works with any number its machines hold."""
    machine = presets.get(name)
    assert machine.name == name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h100xx4", "Did you mean 'h100x4'"),
        ("labtop", "Did you mean 'laptop'"),
        ("k40x9", "family 'k40' have 1 to 8 devices, got 9"),
        ("v100x0", "1 to 8 devices, got 0"),
        ("zzz", "Families: k40xN"),
    ],
)
def test_unknown_names(name, message):
    """An unknown name says what is close and what there is."""
    with pytest.raises(MachineError, match=re.escape(message)):
        presets.get(name)
    with pytest.raises(MachineError, match=re.escape(message)):
        load_machine(name)
