"""Machines of known cards; every number's source is in `Machine.sources`."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from devplace.errors import MachineError, did_you_mean
from devplace.machine.machine import Device, Link, Machine, Pool
from devplace.machine.presets import cards, hosts, wiring
from devplace.machine.presets.cards import CARDS, Card
from devplace.machine.presets.hosts import GB, GIB, HOSTS, Host

MAX_CARDS = 8
MAX_CPUS = 64
# One core of a server of about 2020 to 2025 under a one-thread torch kernel: see `cpu`.
CPU_CORE_FLOPS = 50 * GB
CPU_CORE_BYTES = 8 * GB
CPU_HOP_NS = 20_000
CPU_SOURCE = (
    "Assumed for one core under one thread: 50 GFLOP/s float32 (peak 100 x 0.5: AVX2, 3.1 GHz),"
    " 8 GB/s of memory bandwidth, 4 GiB. Between logical devices: a copy in main memory, 8 GB/s,"
    " and 20 us to wake the other thread."
)
_UNIFIED_SOURCE = (
    "One memory for processors and GPU, as a pool; the GPU may use three quarters (assumed, about"
    " what Metal recommends). Copies within it: half of its useful bandwidth, 5 us (assumed)."
)


def of_cards(name: str, found: Iterable[Card]) -> Machine:
    """A host with these cards, `cuda:0` and on.

    Cards of one model are joined as their maker joins them (`Card.peers`); others over PCIe,
    through one host bridge at the slowest card's speed; GeForce cards not at all, so that what
    they send goes through the host's memory.
    """
    gpus = tuple(found)
    names = tuple(f"cuda:{index}" for index in range(len(gpus)))
    placed = tuple(zip(names, gpus, strict=True))
    wires = [wiring.PCIE[card.pcie] for card in gpus]
    links = [
        link for n, wire in zip(names, wires, strict=True) for link in wiring.host_links(wire, (n,))
    ]
    for card in {card.model: card for card in gpus if card.peers in wiring.NVLINKS}.values():
        group = [n for n, other in placed if other.model == card.model]
        links += wiring.nvlink_links(card.peers, group)
        wires += [wiring.NVLINKS[card.peers]] * (len(group) > 1)
    joined = {(link.src, link.dst) for link in links}
    able = [(n, wiring.PCIE[card.pcie]) for n, card in placed if card.peers]
    if len({card.peers for card in gpus} - {""}) > 1 or "bridge" in {card.peers for card in gpus}:
        slowest = min((wire for _, wire in able), key=lambda wire: wire.gb_per_s)
        found_links = wiring.bridge_links(slowest, [n for n, _ in able])
        links += [link for link in found_links if (link.src, link.dst) not in joined]
    return _machine(name, _host(gpus), gpus, tuple(links), wires)


def _host(gpus: tuple[Card, ...]) -> Host:
    """That of the cards if all have the same; a workstation's where they do not, or more than two
    stand in a desktop, whose processor has lanes for two at most."""
    wanted = {card.host for card in gpus}
    (name,) = wanted if len(wanted) == 1 else ("workstation",)
    return HOSTS["workstation" if name == "desktop" and len(gpus) > 2 else name]


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


def apple(name: str, card: Card) -> Machine:
    """An Apple chip: `cpu:0` and `mps:0` in one pool of memory."""
    pool = Pool(name="unified memory", memory_bytes=card.memory_bytes)
    host = msgspec.structs.replace(
        HOSTS[card.host], memory_bytes=card.memory_bytes, bandwidth_gb=card.bandwidth_gb
    )
    cpu, gpu = host.device(), card.device("mps:0")
    gpu = msgspec.structs.replace(gpu, reserve_bytes=card.memory_bytes // 4)
    devices = tuple(msgspec.structs.replace(d, pool=pool.name) for d in (cpu, gpu))
    wire = wiring.Wire(gb_per_s=card.bytes_per_s / GB / 2, latency_ns=5_000, source=_UNIFIED_SOURCE)
    return Machine(
        name=name,
        devices=devices,
        links=(wire.link("cpu:0", "mps:0"), wire.link("mps:0", "cpu:0")),
        pools=(pool,),
        sources={
            cpu.model: host.source,
            gpu.model: card.source,
            "links": wire.source,
            "overheads": wiring.OVERHEAD_SOURCE,
            "gaps": cards.GAP_SOURCE,
            "shares": cards.SHARE_SOURCE,
        },
    )


def unequal_2() -> Machine:
    """A P100 (`cuda:0`) and a K40 (`cuda:1`) behind one host bridge: a fast and a slow card."""
    names = ("cuda:0", "cuda:1")
    wire = wiring.PCIE3_K40
    links = wiring.host_links(wire, names) + wiring.bridge_links(wire, names)
    return _machine(
        "unequal-2", HOSTS["haswell"], (CARDS["p100"], CARDS["k40"]), links, (wire,)
    )  # fmt: skip


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


def logical_cpu(
    name: str, memory_bytes: int, flops_per_s: float, pool: str = "", model: str = "one CPU core"
) -> Device:
    """One thread of the host as a device; `flops_per_s` is its float32 peak, FLOP/s."""
    return Device(
        name=name,
        kind="cpu",
        model=model,
        memory_bytes=memory_bytes,
        flops_per_s=hosts.cpu_rates(flops_per_s),
        bytes_per_s=CPU_CORE_BYTES,
        pool=pool,
        launch_gap_ns=hosts.CPU_GAP_NS,
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


def by_name(text: str) -> Machine:
    """The machine of a word such as `rtx4090+rtx3090x2`, `h100x8`, `m2-max-64gb` or `cpux2`.

    Raises:
        MachineError: An unknown card, or more of them than a machine holds.
    """
    name = text.lower()
    if name in ("laptop", "unequal-2"):
        return unequal_2() if name == "unequal-2" else of_cards(name, [CARDS["rtx3050-laptop"]])
    parts = [_counted(part, text) for part in name.split("+")]
    if parts[0][0] == "cpu" and len(parts) == 1:
        _within(parts[0][1], MAX_CPUS, "Machines of family 'cpu'")
        return cpu(parts[0][1])
    one = f"of family {parts[0][0]!r}" if len(parts) == 1 else f"such as {_short(text)!r}"
    _within(sum(count for _, count in parts), MAX_CARDS, f"Machines {one}")
    found = [CARDS[card] for card, count in parts for _ in range(count)]
    if any(card.pcie == "unified" for card in found):
        if len(found) > 1:
            raise MachineError(
                f"Machine {text!r}: an Apple chip has its own processors and memory and stands "
                f"alone. Name one."
            )
        return apple(name, found[0])
    return of_cards(name, found)


def _counted(part: str, text: str) -> tuple[str, int]:
    """Card and count of `rtx3090x2`; a name alone is one card."""
    match = re.fullmatch(r"(.+)x([0-9]{1,18})", part)
    base, count = (match.group(1), int(match.group(2))) if match else (part, 1)
    if part in CARDS:
        return part, 1
    if base in CARDS or (base == "cpu" and match and text.lower() == part):
        return base, count
    written = f"x{count}" if match and count < 1000 else ""  # not of rtx4900
    alone = part == text.lower()
    near = [f"{card}{written}" for card in CARDS] + ["laptop", "unequal-2", "cpux2"] * alone
    where = "" if alone else f" (in {_short(text)!r})"
    raise MachineError(
        f"There is no machine called {_short(part)!r}{where}.{did_you_mean(part, near)} "
        f"`devplace machines` lists all. Cards are counted and mixed as in 'rtx4090+rtx3090x2'."
    )


def _within(count: int, most: int, what: str) -> None:
    if not 1 <= count <= most:
        raise MachineError(
            f"{what} have 1 to {most} devices, got {count}. Name fewer, or write a machine file."
        )


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:56]}..."
