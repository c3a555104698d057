"""Known machines, one function per family; every number's source is in `Machine.sources`."""

from __future__ import annotations

from collections.abc import Iterable

from devplace.errors import MachineError
from devplace.machine.machine import Device, Link, Machine
from devplace.machine.presets import cards, wiring
from devplace.machine.presets.cards import GIB, Card, Host

GB = 10**9
# One core of a server of about 2020 to 2025 under a one-thread torch kernel: see `cpu`.
CPU_CORE_FLOPS = 50 * GB
CPU_CORE_BYTES = 8 * GB
CPU_HOP_NS = 20_000


def _names(num: int) -> tuple[str, ...]:
    return tuple(f"cuda:{index}" for index in range(num))


def _machine(
    name: str,
    host: Host,
    gpus: Iterable[Card],
    links: tuple[Link, ...],
    wires: Iterable[wiring.Wire],
) -> Machine:
    devices = (host.device(), *(card.device(f"cuda:{i}") for i, card in enumerate(gpus)))
    sources = {device.model: text for device, text in zip(
        devices, (host.source, *(card.source for card in gpus)), strict=True
    )}  # fmt: skip
    sources["links"] = " ".join(dict.fromkeys(wire.source for wire in wires))
    sources["overheads"] = wiring.OVERHEAD_SOURCE
    sources["gaps"] = cards.GAP_SOURCE
    sources["shares"] = cards.SHARE_SOURCE
    sources["reserves"] = "Context and library buffers, 0.5 to 1.5 GiB a card, 4 GiB host: assumed."
    return Machine(name=name, devices=devices, links=links, sources=sources)


def k40(num_gpus: int = 4) -> Machine:
    """`num_gpus` Tesla K40 behind one Haswell CPU: the testbed of the HDP paper.

    Each card has its own PCIe 3.0 x16 lanes; card-to-card transfers share one host bridge.

    Source: Mirhoseini et al. (2018), A Hierarchical Model for Device Placement, section 4.
    """
    names = _names(num_gpus)
    wire = wiring.PCIE3_K40
    links = wiring.host_links(wire, names) + wiring.bridge_links(wire, names)
    gpus = (cards.K40,) * num_gpus
    return _machine(f"k40x{num_gpus}", cards.HASWELL, gpus, links, (wire,))


def p100(num_gpus: int = 4) -> Machine:
    """`num_gpus` Tesla P100 of a DGX-1: one NVLink 1 connection between neighbours."""
    names = _names(num_gpus)
    wires = (wiring.PCIE3, wiring.NVLINK1)
    links = wiring.host_links(wires[0], names) + wiring.mesh_links(
        wires[1], names, wiring.DGX1_P100
    )
    return _machine(
        f"p100x{num_gpus}", cards.BROADWELL_2, (cards.P100,) * num_gpus, links, wires
    )  # fmt: skip


def v100(num_gpus: int = 4) -> Machine:
    """`num_gpus` Tesla V100: up to 4 fully joined by pairs of NVLink 2, more as in a DGX-1."""
    names = _names(num_gpus)
    wires = (wiring.PCIE3, wiring.NVLINK2)
    full = {(a, b): 2 for a in range(num_gpus) for b in range(a + 1, num_gpus)}
    lanes = full if num_gpus <= 4 else wiring.DGX1_V100
    links = wiring.host_links(wires[0], names) + wiring.mesh_links(wires[1], names, lanes)
    return _machine(
        f"v100x{num_gpus}", cards.BROADWELL_2, (cards.V100,) * num_gpus, links, wires
    )  # fmt: skip


def _switched(
    name: str, host: Host, card: Card, num: int, pcie: wiring.Wire, nvlink: wiring.Wire
) -> Machine:
    names = _names(num)
    links = wiring.host_links(pcie, names) + wiring.switch_links(nvlink, names)
    return _machine(f"{name}x{num}", host, (card,) * num, links, (pcie, nvlink))


def a100(num_gpus: int = 4) -> Machine:
    """`num_gpus` A100 80 GB of a DGX A100, joined by NVSwitch."""
    wires = (wiring.PCIE4, wiring.NVSWITCH_A100)
    return _switched("a100", cards.EPYC_2, cards.A100, num_gpus, *wires)


def h100(num_gpus: int = 4) -> Machine:
    """`num_gpus` H100 80 GB of a DGX H100, joined by NVSwitch."""
    wires = (wiring.PCIE5, wiring.NVSWITCH_HOPPER)
    return _switched("h100", cards.SAPPHIRE_2, cards.H100, num_gpus, *wires)


def h200(num_gpus: int = 4) -> Machine:
    """`num_gpus` H200 of an HGX board, joined by NVSwitch."""
    wires = (wiring.PCIE5, wiring.NVSWITCH_HOPPER)
    return _switched("h200", cards.SAPPHIRE_2, cards.H200, num_gpus, *wires)


def rtx4090(num_gpus: int = 2) -> Machine:
    """`num_gpus` GeForce RTX 4090 without peer access: card to card goes through host memory."""
    names = _names(num_gpus)
    wire = wiring.PCIE4_GEFORCE
    links = wiring.host_links(wire, names)
    gpus = (cards.RTX4090,) * num_gpus
    return _machine(f"rtx4090x{num_gpus}", cards.DESKTOP, gpus, links, (wire,))


def laptop() -> Machine:
    """One CPU and one small GPU."""
    wire = wiring.PCIE4_X8
    links = wiring.host_links(wire, _names(1))
    return _machine("laptop", cards.LAPTOP_CPU, (cards.RTX3050_LAPTOP,), links, (wire,))


def unequal_2() -> Machine:
    """A P100 (`cuda:0`) and a K40 (`cuda:1`) behind one host bridge: a fast and a slow card."""
    names = _names(2)
    wire = wiring.PCIE3_K40
    links = wiring.host_links(wire, names) + wiring.bridge_links(wire, names)
    return _machine("unequal-2", cards.HASWELL, (cards.P100, cards.K40), links, (wire,))


def cpu(num_devices: int = 2) -> Machine:
    """`num_devices` equal logical CPU devices, one thread each, to run plans without a GPU.

    Each has 4 GiB of its own, so that memory limits mean something.
    """
    names = [f"cpu:{index}" for index in range(num_devices)]
    devices = tuple(
        logical_cpu(name, memory_bytes=4 * GIB, flops_per_s=2 * CPU_CORE_FLOPS) for name in names
    )
    return Machine(
        name=f"cpux{num_devices}",
        devices=devices,
        links=logical_cpu_links(names),
        sources={"cpu": CPU_SOURCE, "gaps": cards.GAP_SOURCE},
    )


CPU_SOURCE = (
    "Assumed for one core under one thread: 50 GFLOP/s float32 (peak 100 x 0.5: AVX2, 3.1 GHz),"
    " 8 GB/s of memory bandwidth, 4 GiB. Between logical devices: a copy in main memory, 8 GB/s,"
    " and 20 us to wake the other thread."
)


def logical_cpu(
    name: str, memory_bytes: int, flops_per_s: float, pool: str = "", model: str = "one CPU core"
) -> Device:
    """One thread of the host as a device; `flops_per_s` is its float32 peak, FLOP/s."""
    return Device(
        name=name,
        kind="cpu",
        model=model,
        memory_bytes=memory_bytes,
        flops_per_s=cards.cpu_rates(flops_per_s),
        bytes_per_s=CPU_CORE_BYTES,
        pool=pool,
        launch_gap_ns=cards.CPU_GAP_NS,
    )


def logical_cpu_links(names: Iterable[str]) -> tuple[Link, ...]:
    """Every logical CPU device to every other."""
    known = tuple(names)
    return tuple(
        Link(src=src, dst=dst, bytes_per_s=CPU_CORE_BYTES, latency_ns=CPU_HOP_NS)
        for src in known
        for dst in known
        if src != dst
    )


# Family -> function and the largest number of devices it describes.
FAMILIES = {
    "k40": (k40, 8),
    "p100": (p100, 8),
    "v100": (v100, 8),
    "a100": (a100, 8),
    "h100": (h100, 8),
    "h200": (h200, 8),
    "rtx4090": (rtx4090, 8),
    "cpu": (cpu, 64),
}
SINGLES = {"laptop": laptop, "unequal-2": unequal_2}


def build(family: str, num: int) -> Machine:
    """A machine of a family with `num` cards (or logical CPU devices).

    Raises:
        MachineError: Fewer than one or more than the family's machines hold.
    """
    make, most = FAMILIES[family]
    if not 1 <= num <= most:
        raise MachineError(
            f"Machines of family {family!r} have 1 to {most} devices, got {num}. "
            f"Use for example '{family}x{min(4, most)}'."
        )
    return make(num)
