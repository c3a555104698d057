"""What one card and one host processor do: datasheet peaks, useful shares, and their sources.

A useful rate is the datasheet's peak times a share:

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

import msgspec

from devplace.machine.machine import Device

GIB = 2**30
TFLOP = 10**12
GB = 10**9
CUDA_CORE_SHARE = 0.7
TENSOR_CORE_SHARE = 0.5
CPU_FLOPS_SHARE = 0.5
CPU_BANDWIDTH_SHARE = 0.7
CPU_GAP_NS = 5_000

GAP_SOURCE = (
    "launch_gap_ns, GPUs of 2022 on: 2.3 us, fitted to one-CUDA-graph training steps of BERT-large,"
    " RNNLM, NMT and GNMT on an H200 (an empty kernel alone takes 1.2 us there). Older cards:"
    " assumed, 3 us for graph launches, 10 us for K40 (stream launches of its time). CPU: 5 us,"
    " assumed; a small torch op takes 1.3 us on a Xeon of 2023, the rest is the executor's loop."
)
SHARE_SOURCE = (
    f"Rates are datasheet peaks x {CUDA_CORE_SHARE} (CUDA cores), x {TENSOR_CORE_SHARE} (tensor"
    " cores), memory x the share named per card: measured on an H200, assumed for the other cards."
    f" CPUs: cores x clock x FLOP per cycle x {CPU_FLOPS_SHARE}, memory x {CPU_BANDWIDTH_SHARE}"
    " (assumed)."
)


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU model.

    Attributes:
        model: Product name.
        memory_bytes: Memory a process can see.
        peak_tflops: Datasheet peak per dtype outside tensor cores, TFLOP/s.
        tensor_tflops: Datasheet dense peak per dtype in tensor cores, TFLOP/s.
        bandwidth_gb: Datasheet memory bandwidth, GB/s.
        bandwidth_share: Share of it that is reached.
        reserve_bytes: CUDA context and library work buffers (assumed).
        launch_gap_ns: Time every op costs beside its work, ns.
        source: Where the datasheet numbers come from.
        patterns: Parts of the product name a driver reports for it.
    """

    model: str
    memory_bytes: int
    peak_tflops: dict[str, float]
    bandwidth_gb: float
    source: str
    tensor_tflops: dict[str, float] = {}
    bandwidth_share: float = 0.8
    reserve_bytes: int = GIB
    launch_gap_ns: int = 2_300
    patterns: tuple[str, ...] = ()

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


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """The processors of one machine, used as one device.

    Attributes:
        model: Product name.
        memory_bytes: Main memory.
        cores: Cores in all.
        clock_ghz: Base clock, GHz.
        flops_per_cycle: float32 operations per core and cycle (two 8-wide FMA units make 32).
        bandwidth_gb: Memory bandwidth in all, GB/s.
        source: Where the numbers come from.
    """

    model: str
    memory_bytes: int
    cores: int
    clock_ghz: float
    flops_per_cycle: int
    bandwidth_gb: float
    source: str

    def device(self, name: str = "cpu:0") -> Device:
        """These processors as a device called `name`."""
        peak = self.cores * self.clock_ghz * GB * self.flops_per_cycle
        return Device(
            name=name,
            kind="cpu",
            model=self.model,
            memory_bytes=self.memory_bytes,
            reserve_bytes=4 * GIB,
            flops_per_s=cpu_rates(peak),
            bytes_per_s=round(self.bandwidth_gb * CPU_BANDWIDTH_SHARE * GB),
            launch_gap_ns=CPU_GAP_NS,
        )


def cpu_rates(peak_flops_per_s: float) -> dict[str, int]:
    """Useful rates of a processor by its float32 peak; half of it for float64.

    Half precision has no faster units on most processors: it runs at the float32 rate.
    """
    rate = round(peak_flops_per_s * CPU_FLOPS_SHARE)
    return {"float32": rate, "float64": rate // 2, "float16": rate, "bfloat16": rate}


K40 = Card(
    model="Tesla K40",
    memory_bytes=11_520 * 2**20,
    peak_tflops={"float32": 4.29, "float64": 1.43, "float16": 4.29, "bfloat16": 4.29},
    bandwidth_gb=288,
    bandwidth_share=0.7,
    reserve_bytes=GIB // 2,
    launch_gap_ns=10_000,
    patterns=("K40",),
    source="NVIDIA, Tesla K40 GPU Accelerator Board Specification, BD-06902-001 (12 GB, 11.25 GiB"
    " with ECC; 2880 cores at 745 MHz; 288 GB/s). Share of bandwidth 0.7: bandwidthTest copies at"
    " 202.7 GB/s (Microway, Tesla K40 up close). No half precision units: assumed float32 rate.",
)
P100 = Card(
    model="Tesla P100-SXM2-16GB",
    memory_bytes=16 * GIB,
    peak_tflops={"float32": 10.6, "float64": 5.3, "float16": 21.2, "bfloat16": 10.6},
    bandwidth_gb=732,
    bandwidth_share=0.75,
    launch_gap_ns=3_000,
    patterns=("P100",),
    source="NVIDIA, Tesla P100 datasheet (SXM2: 10.6/21.2/5.3 TFLOP/s, 732 GB/s, 16 GB)."
    " Share of bandwidth 0.75 assumed.",
)
V100 = Card(
    model="Tesla V100-SXM2-16GB",
    memory_bytes=16 * GIB,
    peak_tflops={"float32": 15.7, "float64": 7.8, "float16": 31.4, "bfloat16": 15.7},
    tensor_tflops={"float16": 125},
    bandwidth_gb=900,
    launch_gap_ns=3_000,
    patterns=("V100",),
    source="NVIDIA, Tesla V100 datasheet (SXM2: 15.7/125/7.8 TFLOP/s, 900 GB/s, 16 GB)."
    " Share of bandwidth 0.8 assumed.",
)
A100 = Card(
    model="NVIDIA A100-SXM4-80GB",
    memory_bytes=80 * GIB,
    peak_tflops={"float32": 19.5, "float64": 9.7},
    tensor_tflops={"tf32": 156, "float16": 312, "bfloat16": 312, "float64": 19.5},
    bandwidth_gb=2039,
    reserve_bytes=GIB * 3 // 2,
    launch_gap_ns=3_000,
    patterns=("A100",),
    source="NVIDIA, A100 Tensor Core GPU datasheet (SXM4 80 GB: dense peaks, 2039 GB/s)."
    " Share of bandwidth 0.8 assumed.",
)
_HOPPER_PEAK = {"float32": 67.0, "float64": 34.0}
_HOPPER_TENSOR = {"tf32": 494.5, "float16": 989.0, "bfloat16": 989.0, "float64": 67.0}
H100 = Card(
    model="NVIDIA H100 80GB HBM3",
    memory_bytes=80 * GIB,
    peak_tflops=_HOPPER_PEAK,
    tensor_tflops=_HOPPER_TENSOR,
    bandwidth_gb=3350,
    reserve_bytes=GIB * 3 // 2,
    patterns=("H100",),
    source="NVIDIA, H100 Tensor Core GPU datasheet (SXM5: the sparse peaks halved, 3.35 TB/s)."
    " Share of bandwidth 0.8 as measured on an H200.",
)
H200 = Card(
    model="NVIDIA H200",
    memory_bytes=140 * GIB,
    peak_tflops=_HOPPER_PEAK,
    tensor_tflops=_HOPPER_TENSOR,
    bandwidth_gb=4800,
    reserve_bytes=GIB * 3 // 2,
    patterns=("H200",),
    source="NVIDIA, H200 Tensor Core GPU datasheet (SXM5: the sparse peaks halved, 4.8 TB/s,"
    " 141 GB; a process sees 140 GiB). Share of bandwidth 0.8 measured: 0.79 to 0.91.",
)
RTX4090 = Card(
    model="NVIDIA GeForce RTX 4090",
    memory_bytes=24 * GIB,
    peak_tflops={"float32": 82.6, "float64": 1.29},
    tensor_tflops={"tf32": 82.6, "float16": 165.2, "bfloat16": 165.2},
    bandwidth_gb=1008,
    patterns=("RTX 4090",),
    source="NVIDIA, Ada GPU Architecture whitepaper (RTX 4090: dense peaks with float32"
    " accumulation, 1008 GB/s, 24 GB). Share of bandwidth 0.8 assumed.",
)
RTX3050_LAPTOP = Card(
    model="NVIDIA GeForce RTX 3050 Laptop GPU",
    memory_bytes=4 * GIB,
    peak_tflops={"float32": 7.13, "float64": 0.11},
    tensor_tflops={"tf32": 7.13, "float16": 14.25, "bfloat16": 14.25},
    bandwidth_gb=192,
    reserve_bytes=GIB // 2,
    patterns=("RTX 3050",),
    source="hmc-tech, GeForce RTX 3050 Laptop 80 W comparison (7.13 TFLOP/s, dense tensor peaks);"
    " 128 bit GDDR6 at 12 Gbit/s = 192 GB/s, 4 GB. Share of bandwidth 0.8 assumed.",
)
CARDS = (K40, P100, V100, A100, H100, H200, RTX4090, RTX3050_LAPTOP)

HASWELL = Host(
    model="Intel Xeon E5 v3 (Haswell)",
    memory_bytes=128 * GIB,
    cores=16,
    clock_ghz=2.3,
    flops_per_cycle=32,
    bandwidth_gb=68,
    source="One Haswell CPU at 2.3 GHz as named in the HDP paper; 16 cores, 4 channels of"
    " DDR4-2133 and 128 GiB assumed (Intel Xeon E5-2698 v3).",
)
BROADWELL_2 = Host(
    model="2 x Intel Xeon E5-2698 v4",
    memory_bytes=512 * GIB,
    cores=40,
    clock_ghz=2.2,
    flops_per_cycle=32,
    bandwidth_gb=153.6,
    source="NVIDIA, DGX-1 System Architecture whitepaper (2 x 20 cores, 512 GB); DDR4-2400, 2 x 4"
    " channels.",
)
EPYC_2 = Host(
    model="2 x AMD EPYC 7742",
    memory_bytes=1024 * GIB,
    cores=128,
    clock_ghz=2.25,
    flops_per_cycle=32,
    bandwidth_gb=409.6,
    source="NVIDIA, DGX A100 datasheet (2 x 64 cores, 1 TB); DDR4-3200, 2 x 8 channels.",
)
SAPPHIRE_2 = Host(
    model="2 x Intel Xeon Platinum 8480C",
    memory_bytes=2048 * GIB,
    cores=112,
    clock_ghz=2.0,
    flops_per_cycle=64,
    bandwidth_gb=614.4,
    source="NVIDIA, DGX H100 datasheet (2 x 56 cores, 2 TB); DDR5-4800, 2 x 8 channels.",
)
DESKTOP = Host(
    model="Desktop CPU, 16 cores",
    memory_bytes=64 * GIB,
    cores=16,
    clock_ghz=4.5,
    flops_per_cycle=32,
    bandwidth_gb=83.2,
    source="Assumed: 16 cores of the AMD Ryzen 9 7950X kind, DDR5-5200, 2 channels, 64 GiB.",
)
LAPTOP_CPU = Host(
    model="Laptop CPU, 8 cores",
    memory_bytes=16 * GIB,
    cores=8,
    clock_ghz=3.2,
    flops_per_cycle=32,
    bandwidth_gb=51.2,
    source="Assumed: 8 cores of the AMD Ryzen 7 5800H kind, DDR4-3200, 2 channels, 16 GiB.",
)
