"""Interconnects of the presets: links, channels and the sources of their numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from devplace.machine.machine import Link

GB = 10**9
OVERHEAD_NS = 3_000
OVERHEAD_SOURCE = (
    "send_overhead_ns, receive_overhead_ns: 3 us each, derived: on 4 H200 the steps of NMT-4,"
    " GNMT-4 and BERT-large measured 11-18 us of device time per transfer above a prediction"
    " without overheads; latency explains about 5 us, the rest is shared by both ends."
)


class Wire(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of connection, the same in both directions.

    Attributes:
        gb_per_s: Bandwidth that copies reach, GB/s.
        latency_ns: Latency of a small copy, ns.
        source: Where the numbers come from.
    """

    gb_per_s: float
    latency_ns: int
    source: str

    def link(self, src: str, dst: str, channels: tuple[str, ...] = (), lanes: int = 1) -> Link:
        """One direction of `lanes` such connections side by side."""
        return Link(
            src=src,
            dst=dst,
            bytes_per_s=round(self.gb_per_s * lanes * GB),
            latency_ns=self.latency_ns,
            channels=channels,
            send_overhead_ns=OVERHEAD_NS,
            receive_overhead_ns=OVERHEAD_NS,
        )


_PCIE_LATENCY = " Latency 10 us assumed (a 1 KiB copy with its wait takes 12 us on an H200)."
PCIE3_K40 = Wire(
    gb_per_s=10.0,
    latency_ns=10_000,
    source="PCIe 3.0 x16: pinned copies at 10.0 GB/s each way, bandwidthTest on a Tesla K40m"
    " (Microway, Tesla K40 up close)." + _PCIE_LATENCY,
)
PCIE3 = Wire(
    gb_per_s=12.0,
    latency_ns=10_000,
    source="PCIe 3.0 x16: 15.75 GB/s by the standard, 12 assumed for copies." + _PCIE_LATENCY,
)
PCIE4 = Wire(
    gb_per_s=25.0,
    latency_ns=10_000,
    source="PCIe 4.0 x16: 31.5 GB/s by the standard, 25 assumed for copies." + _PCIE_LATENCY,
)
PCIE4_GEFORCE = Wire(
    gb_per_s=25.0,
    latency_ns=12_000,
    source="PCIe 4.0 x16: 31.5 GB/s by the standard, 25 assumed for copies. Latency 12 us: half of"
    " the 24 us published between two RTX 4090 without peer access.",
)
PCIE4_X8 = Wire(
    gb_per_s=12.5,
    latency_ns=10_000,
    source="PCIe 4.0 x8: 15.75 GB/s by the standard, 12.5 assumed for copies." + _PCIE_LATENCY,
)
PCIE5_GEFORCE = Wire(
    gb_per_s=50.0,
    latency_ns=12_000,
    source="PCIe 5.0 x16: 63 GB/s by the standard, 50 assumed for copies. Latency 12 us assumed, as"
    " between two RTX 4090.",
)
PCIE5_X8 = Wire(
    gb_per_s=25.0,
    latency_ns=10_000,
    source="PCIe 5.0 x8: 31.5 GB/s by the standard, 25 assumed for copies." + _PCIE_LATENCY,
)
PCIE5 = Wire(
    gb_per_s=55.3,
    latency_ns=10_000,
    source="PCIe 5.0 x16: pinned copies at 55.3 GB/s each way, measured on an H200."
    + _PCIE_LATENCY,
)
NVLINK1 = Wire(
    gb_per_s=18.3,
    latency_ns=8_000,
    source="One NVLink 1 connection: 18.3 GB/s, p2pBandwidthLatencyTest on P100-SXM2 (Dell, Deep"
    " Learning on V100). Latency 8 us assumed.",
)
NVLINK2 = Wire(
    gb_per_s=23.9,
    latency_ns=6_000,
    source="NVLink 2: 47.9 GB/s over a pair of connections, p2pBandwidthLatencyTest on V100-SXM2"
    " (Dell, Deep Learning on V100). Latency 6 us assumed.",
)
NVSWITCH_A100 = Wire(
    gb_per_s=260.0,
    latency_ns=5_000,
    source="NVLink 3 through NVSwitch: 300 GB/s each way (NVIDIA, DGX A100 datasheet), times 0.87"
    " as measured for NVLink 4. Latency 5 us assumed.",
)
NVSWITCH_HOPPER = Wire(
    gb_per_s=389.0,
    latency_ns=4_700,
    source="NVLink 4 through NVSwitch: copies at 389 GB/s of 450, latency 4.7 us from a 1 KiB store"
    " to the flag seen by the reader; both measured between H200 cards.",
)
ETHERNET_10G = Wire(
    gb_per_s=1.1,
    latency_ns=50_000,
    source="10 Gb/s Ethernet: 1.25 GB/s by the standard, 1.1 assumed for copies. Latency 50 us:"
    " NCCL over sockets took 49 us for 1 KiB between processes of one host with H200 cards.",
)
NETWORK_400G = Wire(
    gb_per_s=45.0,
    latency_ns=20_000,
    source="400 Gb/s network: 50 GB/s by the standard, 45 assumed for copies. Latency 20 us"
    " assumed: NCCL took 19 us for 1 KiB between two H200 of one host.",
)

NVSWITCH_BLACKWELL = Wire(
    gb_per_s=780.0,
    latency_ns=4_700,
    source="NVLink 5 through NVSwitch: 900 GB/s each way (NVIDIA, Blackwell Architecture Technical"
    " Brief), times 0.87 and with the latency as measured for NVLink 4.",
)
NVLINK_C2C = Wire(
    gb_per_s=360.0,
    latency_ns=5_000,
    source="NVLink-C2C: 450 GB/s each way (NVIDIA, GH200 Grace Hopper Superchip data sheet), 360"
    " and a latency of 5 us assumed for copies.",
)
XGMI2 = Wire(
    gb_per_s=80.0,
    latency_ns=8_000,
    source="Infinity Fabric between MI250X dies: 50 GB/s each way by link, two links (AMD, CDNA 2"
    " whitepaper), times 0.8 assumed; the two dies of one card have four. Latency 8 us assumed.",
)
XGMI3 = Wire(
    gb_per_s=51.0,
    latency_ns=8_000,
    source="Infinity Fabric between MI300X: 64 GB/s each way between each pair (AMD, MI300X data"
    " sheet), times 0.8 assumed. Latency 8 us assumed.",
)
PCIE = {
    "3-k40": PCIE3_K40,
    "3": PCIE3,
    "4": PCIE4,
    "4-geforce": PCIE4_GEFORCE,
    "4-x8": PCIE4_X8,
    "5": PCIE5,
    "5-geforce": PCIE5_GEFORCE,
    "5-x8": PCIE5_X8,
    "c2c": NVLINK_C2C,
}
"""Between a card and its host, as `cards.csv` names it."""

NVLINKS = {
    "nvlink1": NVLINK1,
    "nvlink2": NVLINK2,
    "nvswitch3": NVSWITCH_A100,
    "nvswitch4": NVSWITCH_HOPPER,
    "nvswitch5": NVSWITCH_BLACKWELL,
    "xgmi2": XGMI2,
    "xgmi3": XGMI3,
}
"""Between cards of one model, as `cards.csv` names it."""

# Connections between each pair in a DGX-1 with V100 (NVIDIA, DGX-1 System Architecture
# whitepaper): six per card. Pairs not named have none.
DGX1_V100 = {
    **{(0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 2},
    **{(2, 6): 1, (3, 7): 1, (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2},
}
# With P100: one connection to each card of the same half, one to the twin in the other half.
DGX1_P100 = {
    (a, b): 1
    for a in range(8)
    for b in range(a + 1, 8)
    if a // 4 == b // 4 or b == a + 4
}  # fmt: skip


def host_links(wire: Wire, cards: Iterable[str], host: str = "cpu:0") -> tuple[Link, ...]:
    """Each card to the host and back, on lanes of its own."""
    return tuple(
        link
        for card in cards
        for link in (
            wire.link(host, card, (f"pcie-down:{card}",)),
            wire.link(card, host, (f"pcie-up:{card}",)),
        )
    )


def bridge_links(wire: Wire, cards: Iterable[str]) -> tuple[Link, ...]:
    """Card to card through one host bridge: one such transfer at a time, on both cards' lanes."""
    names = tuple(cards)
    return tuple(
        wire.link(src, dst, (f"pcie-up:{src}", "host-bridge", f"pcie-down:{dst}"))
        for src in names
        for dst in names
        if src != dst
    )


def switch_links(wire: Wire, cards: Iterable[str]) -> tuple[Link, ...]:
    """Every card to every card through a switch: limited by each card's own way out and in."""
    names = tuple(cards)
    return tuple(
        wire.link(src, dst, (f"nvlink-out:{src}", f"nvlink-in:{dst}"))
        for src in names
        for dst in names
        if src != dst
    )


def mesh_links(
    wire: Wire, cards: Iterable[str], lanes: Mapping[tuple[int, int], int]
) -> tuple[Link, ...]:
    """Direct connections between pairs of cards, `lanes` of them per pair of indices."""
    names = tuple(cards)
    return tuple(
        wire.link(src, dst, lanes=lanes[min(a, b), max(a, b)])
        for a, src in enumerate(names)
        for b, dst in enumerate(names)
        if (min(a, b), max(a, b)) in lanes
    )


def nvlink_links(kind: str, cards: Iterable[str]) -> tuple[Link, ...]:
    """Between cards of one model over NVLink or the like, `kind` being one of `NVLINKS`."""
    names = tuple(cards)
    if kind.startswith("nvswitch"):
        return switch_links(NVLINKS[kind], names)
    each = 2 if kind == "nvlink2" else 1
    lanes = {(a, b): each for a in range(len(names)) for b in range(a + 1, len(names))}
    if kind == "nvlink1" or (kind == "nvlink2" and len(names) > 4):
        lanes = DGX1_P100 if kind == "nvlink1" else DGX1_V100
    return mesh_links(NVLINKS[kind], names, lanes)
