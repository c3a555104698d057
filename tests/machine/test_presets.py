"""Known machines: complete, sourced, symmetric, in the right units."""

import re

import pytest

from devplace.errors import MachineError
from devplace.machine import load_machine, presets
from devplace.machine.presets.cards import card_of

ALL = [presets.get(name) for name in presets.NAMES]
IDS = presets.NAMES


@pytest.mark.parametrize("machine", ALL, ids=IDS)
def test_name_and_devices(machine):
    """A preset carries its own name, and cpu:0 stands beside cuda:0, cuda:1, ..."""
    assert presets.get(machine.name) == machine
    kind = next(kind for kind in ("cuda", "mps", "cpu") if f"{kind}:0" in machine.device_names)
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
        assert 10**9 < device.flops_per_s["float32"] < 2 * 10**14
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


def test_cards_are_mixed_in_one_word():
    """Each card keeps its own rates and lanes; GeForce cards meet in the host's memory, and three
    cards stand in a workstation."""
    machine = presets.get("RTX4090+rtx3090x2")
    assert machine.device_names == ("cpu:0", "cuda:0", "cuda:1", "cuda:2")
    fast, slow, third = machine.devices[1:]
    assert fast == presets.get("rtx4090").devices[1]
    assert (slow.model, slow.flops_per_s) == (third.model, third.flops_per_s)
    assert slow.flops_per_s["float32"] == 24_920_000_000_000  # 35.6 x 0.7
    assert machine.devices[0].model == "Workstation CPU, 32 cores"
    assert machine.path("cuda:0", "cuda:1").bytes_per_s == 12_500_000_000
    assert presets.get("rtx4090+rtx3090").devices[0] == presets.get("rtx4090").devices[0]


def test_unlike_cards_meet_on_the_host_bridge():
    """What the makers join stays joined; the others go over PCIe, at the slower one's speed."""
    machine = presets.get("h100x2+v100-pcie")
    assert machine.path("cuda:0", "cuda:1").bytes_per_s == 389_000_000_000
    other = machine.path("cuda:0", "cuda:2")
    assert (other.bytes_per_s, "host-bridge" in other.channels) == (12_000_000_000, True)


@pytest.mark.parametrize("name", presets.CARDS)
def test_cards_are_as_their_data_sheets(name):
    """Rates grow with narrower types, sizes are those sold, and a source is named."""
    card = presets.CARDS[name]
    float32 = card.peak_tflops["float32"]
    half = card.tensor_tflops.get("float16", card.peak_tflops.get("float16", 0))
    assert half >= float32
    assert card.tensor_tflops.get("tf32", float32) >= float32
    assert 0.9 * card.sold_gb <= card.memory_bytes / 2**30 <= card.sold_gb
    assert re.match(r"(NVIDIA|AMD|Apple Newsroom|hmc-tech), .*\.$", card.source)


def test_sizes_have_names():
    """A card that is sold in several sizes is called by its usual one, or by name and size."""
    small, usual = presets.get("m2-max-64gb"), presets.get("m2-max")
    assert (small.pools[0].memory_bytes, usual.pools[0].memory_bytes) == (64 * 2**30, 32 * 2**30)
    assert presets.get("v100-32gb").devices[1].model == "Tesla V100-SXM2-32GB"


def test_apple_memory_is_offered_once():
    """Processors and GPU share one pool; of a float64 rate nothing is known."""
    machine = presets.get("m1")
    assert machine.device_names == ("cpu:0", "mps:0")
    assert {device.pool for device in machine.devices} == {machine.pools[0].name}
    assert machine.pools[0].memory_bytes == 16 * 2**30
    assert "float64" not in machine.devices[1].flops_per_s


@pytest.mark.parametrize(
    ("reported", "gib", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", 39, "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", 79, "a100"),
        ("NVIDIA A100 80GB PCIe", 79, "a100-pcie"),
        ("NVIDIA A100-PCIE-40GB", 39, "a100-pcie-40gb"),
        ("NVIDIA GeForce RTX 3080", 10, "rtx3080"),
        ("NVIDIA GeForce RTX 3080", 12, "rtx3080-12gb"),
        ("NVIDIA GeForce RTX 3080 Ti", 12, "rtx3080ti"),
        ("NVIDIA GeForce RTX 3080 Laptop GPU", 16, "rtx3080-laptop"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 16, "rtx4070tisuper"),
        ("NVIDIA RTX 6000 Ada Generation", 48, "rtx6000-ada"),
        ("NVIDIA RTX A6000", 48, "a6000"),
        ("Tesla K40m", 11, "k40"),
        ("NVIDIA L40S", 45, "l40s"),
        ("NVIDIA L4", 22, "l4"),
        ("Tesla V100-SXM2-32GB", 32, "v100-32gb"),
        ("AMD Instinct MI300X", 192, "mi300x"),
        ("NVIDIA L40", 45, None),
        ("NVIDIA GeForce RTX 4090 D", 24, None),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 96, None),
    ],
)
def test_cards_are_known_by_what_drivers_call_them(reported, gib, name):
    """The card with these words and about this memory; never one whose name lacks or adds a word
    that tells models apart."""
    assert card_of(reported, gib * 2**30) == (presets.CARDS[name] if name else None)


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
        ("h100x1000", "family 'h100' have 1 to 8 devices, got 1000"),
        ("h100x999999999999+k40", "'h100x999999999999+k40' have 1 to 8 devices, got 1000000000000"),
        ("1000xh100", "have 2 to 16 hosts, got 1000"),
        ("v100x0", "1 to 8 devices, got 0"),
        ("rtx4900", "Did you mean 'rtx4090'"),
        ("rtx4090+rtx3900x2", "'rtx3900x2' (in 'rtx4090+rtx3900x2'). Did you mean 'rtx3090x2'"),
        ("rtx4090x5+rtx3090x4", "1 to 8 devices, got 9"),
        ("rtx4090+cpux2", "no machine called 'cpux2' (in 'rtx4090+cpux2')"),
        ("m1+m2", "an Apple chip has its own processors"),
        ("cpux65", "1 to 64 devices, got 65"),
        ("h100x4+", "called ''"),
        ("zzz", "`devplace machines` lists all"),
    ],
)
def test_unknown_names(name, message):
    """An unknown name says what is close and what there is."""
    with pytest.raises(MachineError, match=re.escape(message)):
        presets.get(name)
    with pytest.raises(MachineError, match=re.escape(message)):
        load_machine(name)
