"""What one card does: data sheet peaks, useful shares, and their sources.

The cards are the lines of `cards.csv`. Rates there are peaks in TFLOP/s, `a/b`: `a` outside of the
card's matrix units, `b` in them, dense, with float32 accumulation. A number alone is `a` for
float32 and float64, else `b`. No float64: 1/64 of float32, as NVIDIA's whitepapers have it of all
cards for graphics since Ampere; `-`: none at all. Several sizes of memory: the first is the usual
one. Blank: `bandwidth_share` 0.8, `launch_gap_ns` 2,300, `reserve_bytes` 1 GiB.

A useful rate is the peak times a share:

- `CUDA_CORE_SHARE` for matrix work outside tensor cores. cuBLAS float32 products of 2048 and more
  reach 0.76 of the peak on an H200 (51.1 of 67 TFLOP/s).
- `TENSOR_CORE_SHARE` for matrix work in tensor cores (tf32, float16, bfloat16). Single large
  products reach 0.77 to 0.80 (379-404 of 495 tf32, 786 of 989 bfloat16 TFLOP/s on an H200); the
  `mm` and `addmm` ops of a BERT-large training step (batch 32, sequence 128) reach 0.43 and 0.54.
- `bandwidth_share` of each card for memory. Adding two float32 arrays of 256 MiB reaches 0.91 of
  an H200's 4.8 TB/s, arrays of 16 MiB 0.79; the additions of an NMT step about 0.75.

The H200 numbers were measured with torch 2.11, CUDA 13.0, each op repeated in a CUDA graph.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec

from devplace.machine.machine import Device
from devplace.machine.presets.hosts import CPU_BANDWIDTH_SHARE, CPU_FLOPS_SHARE, GB, GIB

TFLOP = 10**12
CUDA_CORE_SHARE = 0.7
TENSOR_CORE_SHARE = 0.5
_DTYPES = ("float32", "float64", "tf32", "float16", "bfloat16")

GAP_SOURCE = (
    "launch_gap_ns, NVIDIA's cards of 2022 on: 2.3 us, fitted to one-CUDA-graph training steps of"
    " BERT-large, RNNLM, NMT and GNMT on an H200 (an empty kernel alone takes 1.2 us there). Older"
    " cards: assumed, 3 us for graph launches, 10 us for K40 (stream launches of its time). Other"
    " makers: 5 us, assumed. CPU: 5 us, assumed; a small torch op takes 1.3 us on a Xeon of 2023,"
    " the rest is the executor's loop."
)
SHARE_SOURCE = (
    f"Rates are data sheet peaks x {CUDA_CORE_SHARE} (CUDA cores), x {TENSOR_CORE_SHARE} (tensor"
    " cores), memory x 0.8 unless the card's source says otherwise: measured on an H200, assumed"
    f" for the other cards. CPUs: cores x clock x FLOP per cycle x {CPU_FLOPS_SHARE}, memory x"
    f" {CPU_BANDWIDTH_SHARE} (assumed)."
)


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU model.

    Attributes:
        model: Product name, as its driver reports it.
        memory_bytes: Memory a process can see.
        peak_tflops: Data sheet peak per dtype outside of matrix units (tensor cores), TFLOP/s.
        tensor_tflops: Data sheet dense peak per dtype in matrix units, TFLOP/s.
        bandwidth_gb: Data sheet memory bandwidth, GB/s.
        source: Where the data sheet numbers come from.
        sold_gb: Memory as it is sold, GB.
        bandwidth_share: Share of the bandwidth that is reached.
        reserve_bytes: CUDA context and library work buffers (assumed).
        launch_gap_ns: Time every op costs beside its work, ns.
        pcie: How it is joined with the host, a name of `wiring.PCIE`.
        peers: How it is joined with its like, a name of `wiring.peer_links`; empty: through the
            host's memory.
        host: What processors stand beside it, a name of `hosts.HOSTS`.
    """

    model: str
    memory_bytes: int
    peak_tflops: dict[str, float]
    bandwidth_gb: float
    source: str
    sold_gb: int = 0
    tensor_tflops: dict[str, float] = {}
    bandwidth_share: float = 0.8
    reserve_bytes: int = GIB
    launch_gap_ns: int = 2_300
    pcie: str = "4"
    peers: str = ""
    host: str = "desktop"

    @property
    def flops_per_s(self) -> dict[str, int]:
        """Useful rate per dtype, FLOP/s."""
        rates = {d: round(v * CUDA_CORE_SHARE * TFLOP) for d, v in self.peak_tflops.items()}
        tensor = {d: round(v * TENSOR_CORE_SHARE * TFLOP) for d, v in self.tensor_tflops.items()}
        if "tf32" in tensor:
            # On GeForce cards tf32 is no faster than float32; allowing it never slows an op.
            tensor["tf32"] = max(tensor["tf32"], rates["float32"])
        return {d: max(rates.get(d, 0), tensor.get(d, 0)) for d in {**rates, **tensor}}

    @property
    def bytes_per_s(self) -> int:
        """Useful memory bandwidth, bytes/s."""
        return round(self.bandwidth_gb * self.bandwidth_share * GB)

    def device(self, name: str) -> Device:
        """This card as a device called `name`."""
        return Device(
            name=name,
            kind="gpu",
            model=self.model,
            memory_bytes=self.memory_bytes,
            reserve_bytes=self.reserve_bytes,
            flops_per_s=self.flops_per_s,
            bytes_per_s=self.bytes_per_s,
            launch_gap_ns=self.launch_gap_ns,
        )


def _peaks(row: Mapping[str, str]) -> tuple[dict[str, float], dict[str, float]]:
    """Peaks outside of matrix units and in them, TFLOP/s."""
    plain: dict[str, float] = {}
    matrix: dict[str, float] = {}
    for dtype in _DTYPES:
        text = row[dtype].strip("-")
        if text and "/" not in text:
            text = f"{text}/" if dtype in ("float32", "float64") else f"/{text}"
        outside, _, inside = text.partition("/")
        plain |= {dtype: float(outside)} if outside else {}
        matrix |= {dtype: float(inside)} if inside else {}
    if not row["float64"]:
        plain["float64"] = plain["float32"] / 64
    return plain, matrix


def _cards() -> dict[str, Card]:
    """Name -> card; a size that is not the usual one has its own name, as `a2000-6gb`."""
    found: dict[str, Card] = {}
    with (Path(__file__).parent / "cards.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            plain, matrix = _peaks(row)
            sizes = [int(size) for size in row["gb"].split("/")]
            for size in sizes:
                name = row["name"] if size == sizes[0] else f"{row['name']}-{size}gb"
                found[name] = Card(
                    model=row["model"].replace(f"{sizes[0]}GB", f"{size}GB"),
                    sold_gb=size,
                    memory_bytes=round(float(row["gib"] or size) * GIB),
                    peak_tflops=plain,
                    tensor_tflops=matrix,
                    bandwidth_gb=float(row["gb_per_s"]),
                    bandwidth_share=float(row["share"] or 0.8),
                    launch_gap_ns=round(float(row["gap_us"] or 2.3) * 1000),
                    reserve_bytes=round(float(row["reserve_gib"] or 1) * GIB),
                    pcie=row["pcie"],
                    peers=row["peers"],
                    host=row["host"],
                    source=f"{row['source']}.",
                )
    return found


CARDS: Mapping[str, Card] = MappingProxyType(_cards())
"""By the name that machines are called by."""

# Words of a product name that make it another product, and those that say nothing.
_TELLING = {
    "ti",
    "super",
    "laptop",
    "max",
    "q",
    "d",
    "ada",
    "pro",
    "ultra",
    "nvl",
    "pcie",
    "mobile",
}
_MAKERS = {"nvidia", "tesla", "geforce", "amd", "instinct", "gpu", "apple", "quadro"}


def _words(model: str) -> set[str]:
    """What of a product name tells it from others; sizes do not."""
    found = {word.lower() for word in re.split(r"[^A-Za-z0-9]+", model) if word}
    return {word for word in found - _MAKERS if not re.fullmatch(r"\d+gb?", word)}


def card_of(model: str, memory_bytes: int = 0) -> Card | None:
    """The card that a driver calls `model`: the one with most words in common, then of the nearest
    memory; None where no card has all its words there, or there is one more that tells."""
    reported = _words(model)
    # Makers mark forms of a server's card by a small letter, as in K40m.
    reported |= {w[:-1].lower() for w in re.findall(r"\b[A-Z]+\d+[a-z]\b", model)}
    fitting = [
        (len(words), -abs(card.memory_bytes - memory_bytes), index)
        for index, card in enumerate(CARDS.values())
        if (words := _words(card.model)) <= reported and not (reported - words) & _TELLING
    ]
    return list(CARDS.values())[max(fitting)[2]] if fitting else None
