"""What the processors of one machine do, and where the numbers come from."""

from __future__ import annotations

import msgspec

from devplace.machine.machine import Device

GIB = 2**30
GB = 10**9
CPU_FLOPS_SHARE = 0.5
CPU_BANDWIDTH_SHARE = 0.7
CPU_GAP_NS = 5_000


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
            reserve_bytes=min(4 * GIB, self.memory_bytes // 4),
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


def _apple(cores: int) -> Host:
    return Host(
        model=f"Apple CPU, {cores} performance cores",
        memory_bytes=0,
        cores=cores,
        clock_ghz=3.2,
        flops_per_cycle=32,
        bandwidth_gb=0,
        source="Assumed: 3.2 GHz, four 4-wide FMA units a core; the memory is the GPU's.",
    )


HOSTS: dict[str, Host] = {
    "haswell": Host(
        model="Intel Xeon E5 v3 (Haswell)",
        memory_bytes=128 * GIB,
        cores=16,
        clock_ghz=2.3,
        flops_per_cycle=32,
        bandwidth_gb=68,
        source="One Haswell CPU at 2.3 GHz as named in the HDP paper; 16 cores, 4 channels of"
        " DDR4-2133 and 128 GiB assumed (Intel Xeon E5-2698 v3).",
    ),
    "dgx1": Host(
        model="2 x Intel Xeon E5-2698 v4",
        memory_bytes=512 * GIB,
        cores=40,
        clock_ghz=2.2,
        flops_per_cycle=32,
        bandwidth_gb=153.6,
        source="NVIDIA, DGX-1 System Architecture whitepaper (2 x 20 cores, 512 GB); DDR4-2400,"
        " 2 x 4 channels.",
    ),
    "dgx-a100": Host(
        model="2 x AMD EPYC 7742",
        memory_bytes=1024 * GIB,
        cores=128,
        clock_ghz=2.25,
        flops_per_cycle=32,
        bandwidth_gb=409.6,
        source="NVIDIA, DGX A100 datasheet (2 x 64 cores, 1 TB); DDR4-3200, 2 x 8 channels.",
    ),
    "dgx-h100": Host(
        model="2 x Intel Xeon Platinum 8480C",
        memory_bytes=2048 * GIB,
        cores=112,
        clock_ghz=2.0,
        flops_per_cycle=64,
        bandwidth_gb=614.4,
        source="NVIDIA, DGX H100 datasheet (2 x 56 cores, 2 TB); DDR5-4800, 2 x 8 channels.",
    ),
    "desktop": Host(
        model="Desktop CPU, 16 cores",
        memory_bytes=64 * GIB,
        cores=16,
        clock_ghz=4.5,
        flops_per_cycle=32,
        bandwidth_gb=83.2,
        source="Assumed: 16 cores of the AMD Ryzen 9 7950X kind, DDR5-5200, 2 channels, 64 GiB.",
    ),
    "laptop": Host(
        model="Laptop CPU, 8 cores",
        memory_bytes=16 * GIB,
        cores=8,
        clock_ghz=3.2,
        flops_per_cycle=32,
        bandwidth_gb=51.2,
        source="Assumed: 8 cores of the AMD Ryzen 7 5800H kind, DDR4-3200, 2 channels, 16 GiB.",
    ),
    "workstation": Host(
        model="Workstation CPU, 32 cores",
        memory_bytes=256 * GIB,
        cores=32,
        clock_ghz=3.6,
        flops_per_cycle=32,
        bandwidth_gb=204.8,
        source="Assumed: 32 cores of the AMD Ryzen Threadripper PRO 5975WX kind, DDR4-3200, 8"
        " channels, 256 GiB; 128 PCIe lanes, so 16 for every card.",
    ),
    "grace": Host(
        model="NVIDIA Grace",
        memory_bytes=480 * GIB,
        cores=72,
        clock_ghz=3.1,
        flops_per_cycle=32,
        bandwidth_gb=512,
        source="NVIDIA, GH200 Grace Hopper Superchip data sheet (72 cores, 480 GB of LPDDR5X at up"
        " to 512 GB/s); 3.1 GHz and four 4-wide vector units a core assumed.",
    ),
    **{f"apple-{cores}": _apple(cores) for cores in (4, 6, 8, 12, 16)},
}
"""By the name that cards say they stand beside."""
