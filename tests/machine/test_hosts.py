"""Several hosts on a network: names, links and the network card they share."""

import pytest

from devplace.errors import MachineError
from devplace.machine import Machine, load_machine, presets, toml
from devplace.machine.presets import wiring
from devplace.plan.plan import machine_fingerprint


def test_hosts_are_numbered_on():
    """Each host has its own CPU and cards, called as if they were one computer's."""
    machine = presets.get("2xh100x2")
    assert machine.hosts == ("host0", "host1")
    assert machine.device_names == ("cpu:0", "cuda:0", "cuda:1", "cpu:1", "cuda:2", "cuda:3")
    assert [d.host for d in machine.devices] == ["host0"] * 3 + ["host1"] * 3


def test_links_within_a_host_are_those_of_one_host():
    """Speeds are the same; channels are the host's own."""
    one, two = presets.get("h100x2"), presets.get("2xh100x2")
    inside, other = two.path("cuda:0", "cuda:1"), two.path("cuda:2", "cuda:3")
    assert inside.bytes_per_s == other.bytes_per_s == one.path("cuda:0", "cuda:1").bytes_per_s
    assert not set(inside.channels) & set(other.channels)
    assert not two.crosses_hosts(inside)


def test_links_between_hosts_share_the_network_cards():
    """Two senders of one host share its way out, two receivers the way in; ways back are others."""
    machine = presets.get("2xh100x2")
    first, second = machine.path("cuda:0", "cuda:2"), machine.path("cuda:1", "cuda:3")
    back = machine.path("cuda:2", "cuda:0")
    assert machine.crosses_hosts(first)
    assert first.bytes_per_s == 45_000_000_000
    assert (
        set(first.channels) == set(second.channels) == {"network-out:host0.0", "network-in:host1.0"}
    )
    assert not set(first.channels) & set(back.channels)


def test_more_cards_are_shared_in_order():
    """With two network cards the first half of the devices has the first."""
    machine = presets.several_hosts(presets.get("h100x4"), 2, wiring.NETWORK_400G, 2)
    cards = [machine.path(f"cuda:{k}", "cuda:4").channels[0] for k in range(4)]
    assert cards == [f"network-out:host0.{k}" for k in (0, 0, 1, 1)]


def test_workstations_have_slow_ethernet():
    """Families of workstations are joined by 10 Gb/s."""
    assert presets.get("2xrtx4090x1").path("cuda:0", "cuda:1").bytes_per_s == 1_100_000_000


def test_a_machine_without_hosts_is_one_host():
    """Nothing crosses, and its fingerprint is what it was before devices had hosts."""
    machine = presets.get("k40x2")
    assert machine.hosts == ("",)
    assert not any(map(machine.crosses_hosts, machine.links))
    assert machine_fingerprint(machine) == "fe52b59e22150213"
    assert "host" not in toml.dumps(machine).split("[[devices]]", 1)[1].split("[[links]]")[0]


def test_another_host_is_another_machine():
    """The fingerprint of a machine changes with its hosts, and files keep them."""
    machine = presets.get("2xcpux2")
    from msgspec.structs import replace

    apart = tuple(replace(device, host=device.name) for device in machine.devices)
    other = Machine(machine.name, apart, machine.links, machine.pools, machine.sources)
    assert machine_fingerprint(other) != machine_fingerprint(machine)
    assert toml.loads(toml.dumps(machine)) == machine


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: load_machine("1xh100x8"), "2 to 16 hosts, got 1"),
        (lambda: load_machine("99xh100x8"), "2 to 16 hosts, got 99"),
        (
            lambda: presets.several_hosts(presets.get("cpux2"), 1, wiring.ETHERNET_10G),
            "got 1 times",
        ),
        (
            lambda: presets.several_hosts(presets.get("2xcpux2"), 2, wiring.ETHERNET_10G),
            "of 2 hosts",
        ),
    ],
)
def test_wrong_hosts_are_refused(make, message):
    """Numbers out of range are named."""
    with pytest.raises(MachineError, match=message):
        make()
