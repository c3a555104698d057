"""Machines: validation, paths, order of devices."""

import dataclasses
import itertools

import msgspec
import pytest

from devplace.errors import MachineError
from devplace.machine import Device, Link, Machine, Pool, channels_of, load_machine, presets
from devplace.machine import machine as machine_module


def device(name: str, **fields) -> Device:
    base = {"kind": "gpu", "memory_bytes": 100, "flops_per_s": {"float32": 10}, "bytes_per_s": 10}
    return Device(name=name, **(base | fields))


def both(a: str, b: str, **fields) -> tuple[Link, Link]:
    return Link(src=a, dst=b, **fields), Link(src=b, dst=a, **fields)


def test_direct_link_is_the_path():
    """A usable direct link is what a transfer uses."""
    links = both("a", "b", bytes_per_s=7)
    machine = Machine("m", (device("a"), device("b")), links)
    assert machine.path("a", "b") == links[0]


def test_staged_path_adds_times_and_keeps_channels():
    """Through a stop, times per byte and latencies add up and both legs' channels are held."""
    links = (
        *both("a", "hub", bytes_per_s=60, latency_ns=1, channels=("x",), send_overhead_ns=3),
        *both("hub", "b", bytes_per_s=30, latency_ns=2, receive_overhead_ns=4),
    )
    machine = Machine("m", (device("a"), device("b"), device("hub")), links)
    path = machine.path("a", "b")
    assert path == Link(
        src="a",
        dst="b",
        bytes_per_s=20,
        latency_ns=3,
        channels=("x", "hub->b"),
        send_overhead_ns=3,
        receive_overhead_ns=4,
    )


def test_unusable_link_is_avoided():
    """A pair switched off is staged through another device (a slow or faulty pair)."""
    off = Link(src="a", dst="b", bytes_per_s=1000, usable=False)
    links = (off, Link(src="b", dst="a", bytes_per_s=5), *both("a", "c", bytes_per_s=10))
    links += both("b", "c", bytes_per_s=10)
    machine = Machine("m", (device("a"), device("b"), device("c")), links)
    assert machine.path("a", "b").bytes_per_s == 5
    assert channels_of(machine.path("a", "b")) == ("a->c", "c->b")


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_path_does_not_depend_on_device_order(order):
    """Equal stops are chosen by name, so listing devices differently changes no path."""
    devices = [device("a"), device("b"), device("c"), device("d")]
    links = [
        *both("a", "b", bytes_per_s=10),
        *both("a", "c", bytes_per_s=10),
        *both("d", "b", bytes_per_s=10),
        *both("d", "c", bytes_per_s=10),
        *both("b", "c", bytes_per_s=10),
    ]
    shuffled = Machine("m", (*(devices[i] for i in order), devices[3]), tuple(links[::-1]))
    assert channels_of(shuffled.path("a", "d")) == ("a->b", "b->d")


def test_pools_hold_shared_memory():
    """Two devices may name one pool; its size is given once."""
    devices = (device("cpu:0", kind="cpu", pool="ram"), device("cuda:0", pool="ram"))
    links = both("cpu:0", "cuda:0", bytes_per_s=1)
    machine = Machine("uni", devices, links, (Pool(name="ram", memory_bytes=100),))
    assert [d.pool for d in machine.devices] == ["ram", "ram"]
    assert machine.pools[0].memory_bytes == 100


A, B = device("cuda:0"), device("cuda:1")
WRONG = [
    ((), (), (), "no devices"),
    ((A, A), (), (), "'cuda:0' occurs twice"),
    ((device(""),), (), (), "needs a name"),
    ((device("g", kind="tpu"),), (), (), "'g': kind must be 'cpu' or 'gpu', got 'tpu'"),
    ((device("g", bytes_per_s=0),), (), (), "'g': bytes_per_s must be positive, got 0"),
    ((device("g", bytes_per_s=float("nan")),), (), (), "'g': bytes_per_s must be positive"),
    ((device("g", memory_bytes=-5),), (), (), "'g': memory_bytes must be positive, got -5 bytes"),
    ((device("g", reserve_bytes=-1),), (), (), "'g': reserve_bytes must not be negative"),
    ((device("g", launch_gap_ns=-1),), (), (), "'g': launch_gap_ns must not be negative"),
    ((device("g", flops_per_s={}),), (), (), "'g': flops_per_s must have a 'float32' rate"),
    ((device("g", flops_per_s={"float32": 0}),), (), (), r"'g': flops_per_s.float32 must be pos"),
    (
        (device("g", flops_per_s={"float32": 1, "fp16": 2}),),
        (),
        (),
        "'g': flops_per_s has a rate of an unknown dtype 'fp16'. Did you mean 'float16'",
    ),
    ((device("g", memory_bytes=10**23),), (), (), "'g': memory_bytes must be below"),
    ((device("g", bytes_per_s=10**23),), (), (), "'g': bytes_per_s must be below"),
    ((device("g", streams=2**31),), (), (), "'g': streams must be below"),
    ((device("g", launch_gap_ns=10**15),), (), (), "'g': launch_gap_ns must be below"),
    ((device("g", pool="rom"),), (), ("ram",), "unknown pool 'rom'. Did you mean 'ram'"),
    ((A,), (), ("ram", "ram"), "Pool names must be unique"),
    ((A, B), (), (), "no way from cuda:0 to cuda:1"),
    ((A, B), (("cuda:0", "cuda:2", 1),), (), "unknown device 'cuda:2'. Did you mean"),
    ((A, B), (("cuda:0", "cuda:0", 1),), (), "must join two devices"),
    ((A, B), (("cuda:0", "cuda:1", 0),), (), "bytes_per_s must be positive, got 0"),
    ((A, B), (("cuda:0", "cuda:1", 1), ("cuda:0", "cuda:1", 1)), (), "given twice"),
]


@pytest.mark.parametrize(("devices", "links", "pools", "message"), WRONG)
def test_wrong_machines_name_culprit_and_field(devices, links, pools, message):
    """Every wrong field is refused with the device, the field and the value."""
    with pytest.raises(MachineError, match=message.replace("(", r"\(")):
        Machine(
            "m",
            devices,
            tuple(Link(src=s, dst=d, bytes_per_s=rate) for s, d, rate in links),
            tuple(Pool(name=name, memory_bytes=1) for name in pools),
        )


def test_negative_link_times_are_refused():
    """Latency and overheads cannot be negative."""
    for field in ("latency_ns", "send_overhead_ns", "receive_overhead_ns"):
        links = both("cuda:0", "cuda:1", bytes_per_s=1, **{field: -1})
        with pytest.raises(MachineError, match=f"{field} must not be negative"):
            Machine("m", (A, B), links)


def test_senselessly_long_link_times_are_refused():
    """Times that would overflow when they are added up name the field."""
    for field in ("latency_ns", "send_overhead_ns", "receive_overhead_ns"):
        links = both("cuda:0", "cuda:1", bytes_per_s=1, **{field: 2**63 - 1})
        with pytest.raises(MachineError, match=f"{field} must be below"):
            Machine("m", (A, B), links)


def test_a_name_too_long_for_a_file_is_an_unknown_machine():
    """No error of the file system for a text that is no name."""
    with pytest.raises(MachineError, match="no machine called"):
        load_machine("x" * 5000)


def test_usable_bytes_leaves_the_reserve():
    """Usable memory is what the reserve leaves, never negative."""
    assert device("g", reserve_bytes=30).usable_bytes == 70
    assert device("g", reserve_bytes=300).usable_bytes == 0


def test_slow_pair_among_four_keeps_its_own_speed():
    """One slow pair and direction among four cards stays visible as such."""
    machine = presets.get("h100x4")
    links = tuple(
        msgspec.structs.replace(link, bytes_per_s=10**6)
        if (link.src, link.dst) == ("cuda:1", "cuda:2")
        else link
        for link in machine.links
    )
    slow = dataclasses.replace(machine, links=links)
    assert slow.path("cuda:1", "cuda:2").bytes_per_s == 10**6
    assert slow.path("cuda:2", "cuda:1") == machine.path("cuda:2", "cuda:1")


def test_paths_are_worked_out_only_when_asked_for(monkeypatch):
    """A machine of many devices is checked without a link being made for each pair."""
    devices = tuple(device(f"d{k}") for k in range(40))
    links = tuple(link for k in range(1, 40) for link in both("d0", f"d{k}", bytes_per_s=10))
    made = []
    real = machine_module._staged
    monkeypatch.setattr(machine_module, "_staged", lambda *way: made.append(way) or real(*way))
    machine = Machine("star", devices, links)
    assert made == []
    assert machine.reaches("d1", "d2")
    assert channels_of(machine.path("d1", "d2")) == ("d1->d0", "d0->d2")
    assert len(made) == 1


def test_the_best_stop_is_taken():
    """The stop with the largest bandwidth, then the least latency, then the first name."""
    links = (
        *both("a", "p", bytes_per_s=10),
        *both("p", "b", bytes_per_s=10),
        *both("a", "q", bytes_per_s=20, latency_ns=3),
        *both("q", "b", bytes_per_s=20, latency_ns=3),
        *both("a", "s", bytes_per_s=20, latency_ns=2),
        *both("s", "b", bytes_per_s=20, latency_ns=2),
        *both("a", "r", bytes_per_s=20, latency_ns=2),
        *both("r", "b", bytes_per_s=20, latency_ns=2),
    )
    machine = Machine("m", tuple(device(name) for name in "abpqrs"), links)
    assert channels_of(machine.path("a", "b")) == ("a->r", "r->b")
    assert machine.path("a", "b").bytes_per_s == 10
