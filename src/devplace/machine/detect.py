"""Detect the devices of this computer."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from devplace.errors import MachineError
from devplace.machine.machine import Device, Link, Machine, Pool
from devplace.machine.presets import cards, families, host_ops, hosts, wiring

# Peak float32 operations per core and cycle by the widest vector unit /proc/cpuinfo names (two
# fused multiply-adds), and the clock assumed for all: vendors' base clocks lie around it.
FLOPS_PER_CYCLE = {"avx512f": 64, "avx2": 32, "avx": 16, "asimd": 16}
CLOCK_HZ = 2_500_000_000
MAX_LOGICAL_CPUS = 4
ROUND_BYTES = 64 * 2**20
NVIDIA_DRIVER = "/proc/driver/nvidia/version"


def detect(cpu_devices: int | None = None) -> Machine:
    """Describe the machine this process runs on.

    Without GPUs: logical CPU devices that share one memory pool, the memory this process may use.
    With GPUs (those `CUDA_VISIBLE_DEVICES` leaves): `cpu:0` and every card, with its UUID, its
    memory, and what is held of it now as reserve; memory that this process's torch has cached but
    does not use is free. `cpu:0` refuses ops that only GPUs have and random ops, which draw other
    numbers there. Links join cards with peer access; others go through `cpu:0`. Speeds are
    constants of known products, not measured: the same machine gives the same description, except
    for memory in use.

    Args:
        cpu_devices: Number of logical CPU devices on a machine without GPUs; given, GPUs are left
            out. Default: one per core, 2 to 4.

    Raises:
        MachineError: `cpu_devices` is not positive.
    """
    if cpu_devices is not None and cpu_devices < 1:
        raise MachineError(
            f"The number of logical CPU devices must be positive, got {cpu_devices}. Leave it out "
            "to use one per core."
        )
    torch = _torch_with_gpus() if cpu_devices is None else None
    if torch is not None:
        return gpu_machine(torch)
    return cpu_machine(cpu_devices or min(MAX_LOGICAL_CPUS, max(2, num_cores())))


def num_cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_limit() -> int:
    """Main memory this process may use, bytes: what is built in, or its control group's limit."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    groups = Path("/sys/fs/cgroup")
    files = (groups / "memory.max", groups / "memory/memory.limit_in_bytes")
    return min([physical, *(limit for file in files if (limit := _read_limit(file)))])


def _read_limit(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) > 0 else None


def _cpu_info() -> tuple[str, int]:
    """Product name, and peak float32 operations per core and cycle."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    rows = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    fields = {key.strip(): value.strip() for key, value in rows}
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    per_cycle = next((n for flag, n in FLOPS_PER_CYCLE.items() if flag in flags), 16)
    return fields.get("model name") or platform.machine() or "CPU", per_cycle


def cpu_model() -> str:
    """Product name of this computer's processor."""
    return _cpu_info()[0]


def cpu_machine(num_devices: int) -> Machine:
    """`num_devices` logical CPU devices in one memory pool."""
    model, per_cycle = _cpu_info()
    memory = memory_limit()
    peak = CLOCK_HZ * per_cycle * min(1.0, num_cores() / num_devices)
    names = [f"cpu:{index}" for index in range(num_devices)]
    devices = tuple(families.logical_cpu(name, memory, peak, "ram", model) for name in names)
    return Machine(
        name="detected",
        devices=devices,
        links=families.logical_cpu_links(names),
        pools=(Pool(name="ram", memory_bytes=memory),),
        sources={
            "cpu": f"Peak {per_cycle} FLOP per cycle by its instruction set, {CLOCK_HZ / 1e9} GHz"
            " assumed, shared when there are more devices than cores; 8 GB/s of memory bandwidth"
            " per core and between devices, 20 us to wake another thread: assumed.",
            "memory": "Main memory or the control group's limit, shared by all.",
            "gaps": cards.GAP_SOURCE,
            "shares": cards.SHARE_SOURCE,
        },
    )


def _torch_with_gpus() -> Any | None:
    """The torch module if it sees a GPU; it is not imported where there is no driver."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return None
    drivers = (NVIDIA_DRIVER, "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
    if "torch" not in sys.modules and not any(Path(path).exists() for path in drivers):
        return None
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def driver_version(file: str = NVIDIA_DRIVER) -> str:
    """Version of NVIDIA's kernel driver. Where it has no file, as in the Windows Subsystem for
    Linux, the CUDA version that its library states; empty if neither tells."""
    with suppress(OSError):
        if found := re.search(r"\s(\d+(?:\.\d+)+)\s", Path(file).read_text()):
            return found[1]
    version = ctypes.c_int()
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return f"CUDA {version.value}" if version.value else ""


def gpu_machine(torch: Any) -> Machine:
    """`cpu:0` and every visible GPU, as the given torch module reports them."""
    gpus = tuple(_gpu(torch, index) for index in range(torch.cuda.device_count()))
    names = [gpu.name for gpu in gpus]
    pcie = _pcie(gpus[0].model)
    links = wiring.host_links(pcie, names) + _peer_links(torch, gpus, pcie)
    model, per_cycle = _cpu_info()
    host = hosts.Host(
        model=model,
        memory_bytes=memory_limit(),
        cores=num_cores(),
        clock_ghz=CLOCK_HZ / 1e9,
        flops_per_cycle=per_cycle,
        bandwidth_gb=families.CPU_CORE_BYTES / 1e9 * min(num_cores(), 32),
        source="",
    ).device()
    host = msgspec.structs.replace(
        host,
        unsupported_ops=host_ops.OPS_OFF_HOST,
    )
    nvlinks = dict.fromkeys(wire.source for gpu in gpus if (wire := _nvlink(gpu.model)))
    speeds = " ".join([pcie.source, *nvlinks])
    known = {
        gpu.model: card.source
        for gpu in gpus
        if (card := cards.card_of(gpu.model, gpu.memory_bytes))
    }
    return Machine(
        name="detected",
        devices=(host, *gpus),
        links=links,
        sources={
            **known,
            "memory": "Reported by the driver; reserve: in use now, or what libraries take.",
            "cpu": "Clock and bandwidth per core assumed.",
            "links": f"Peer access asked of the driver; speeds not measured. {speeds}",
            "overheads": wiring.OVERHEAD_SOURCE,
            "gaps": cards.GAP_SOURCE,
            "shares": cards.SHARE_SOURCE,
        },
    )


def _gpu(torch: Any, index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    card = cards.card_of(properties.name, total)
    known = card is not None
    template = (card or _unknown_card(properties)).device(f"cuda:{index}")
    cached = _unused_cache(torch, index)
    # What is in use now includes this process's own context, already in `card.reserve_bytes`.
    in_use = -(-(total - free - cached) // ROUND_BYTES) * ROUND_BYTES
    reserve = max(template.reserve_bytes if known else ROUND_BYTES * 16, in_use)
    return msgspec.structs.replace(
        template,
        model=properties.name,
        memory_bytes=total,
        reserve_bytes=min(reserve, total),
        uuid=_uuid(properties),
    )


def _unused_cache(torch: Any, index: int) -> int:
    """Bytes this process's torch keeps for later; those of CUDA graphs are theirs."""
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == index and tuple(segment["segment_pool_id"]) == (0, 0)
    )


def _uuid(properties: Any) -> str:
    text = str(getattr(properties, "uuid", ""))
    return text if not text or text.startswith("GPU-") else f"GPU-{text}"


def _unknown_card(properties: Any) -> cards.Card:
    """Rates by number of multiprocessors: 128 float32 units each at 1.5 GHz, tensor cores 4x.

    Assumed, and rough: write a machine file, or measure, for a card that is not known.
    """
    peak = properties.multi_processor_count * 128 * 2 * 1.5e9 / cards.TFLOP
    has_tensor = properties.major >= 8
    half = {"float16": 4 * peak, "bfloat16": 4 * peak, "tf32": 2 * peak}
    return cards.Card(
        model=properties.name,
        memory_bytes=properties.total_memory,
        peak_tflops={"float32": peak, "float64": peak / 32},
        tensor_tflops=half if has_tensor else {},
        bandwidth_gb=properties.multi_processor_count * 12.0,
        source="",
    )


def _pcie(model: str) -> wiring.Wire:
    card = cards.card_of(model)
    return wiring.PCIE.get(card.pcie, wiring.PCIE4) if card else wiring.PCIE4


def _peer_links(torch: Any, gpus: Iterable[Device], pcie: wiring.Wire) -> tuple[Link, ...]:
    known = tuple(gpus)
    peers = [
        (a, b)
        for a in known
        for b in known
        if a.name != b.name and torch.cuda.can_device_access_peer(int(a.name[5:]), int(b.name[5:]))
    ]
    return tuple(link for a, b in peers for link in _peer_link(a, b, pcie))


def _peer_link(a: Device, b: Device, pcie: wiring.Wire) -> tuple[Link, ...]:
    wire = _nvlink(a.model) if a.model == b.model else None
    if wire is None:
        return wiring.bridge_links(pcie, (a.name, b.name))[:1]
    return wiring.switch_links(wire, (a.name, b.name))[:1]


def _nvlink(model: str) -> wiring.Wire | None:
    """What joins two cards of this model that have peer access, if it comes with NVLink."""
    card = cards.card_of(model)
    return wiring.NVLINKS.get(card.peers) if card else None
