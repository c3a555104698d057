"""Detection: logical CPUs without GPUs, and GPUs as a torch module reports them."""

import fnmatch
import subprocess
import sys
from types import SimpleNamespace

import pytest

from devplace.errors import MachineError
from devplace.machine import detect, load_machine, toml
from devplace.machine.detect import (
    cpu_machine,
    driver_version,
    gpu_machine,
    memory_limit,
    num_cores,
)

GIB = 2**30


def segment(device, unused, pool=(0, 0)):
    """One stretch of memory that torch holds, 1 GiB of it in use."""
    sizes = {"total_size": GIB + unused, "allocated_size": GIB}
    return {"device": device, "segment_pool_id": pool, **sizes}


def fake_torch(models, *, peers=True, used=GIB, cached=0, major=9):
    """A stand-in for torch with these cards."""
    properties = [
        SimpleNamespace(
            name=model,
            total_memory=80 * GIB,
            multi_processor_count=100,
            major=major,
            uuid=f"0000-{index}",
        )
        for index, model in enumerate(models)
    ]
    cuda = SimpleNamespace(
        device_count=lambda: len(models),
        get_device_properties=lambda index: properties[index],
        mem_get_info=lambda index: (80 * GIB - used, 80 * GIB),
        can_device_access_peer=lambda a, b: peers,
        memory_snapshot=lambda: [segment(0, cached), segment(2, GIB), segment(0, GIB, pool=(0, 1))],
    )
    return SimpleNamespace(cuda=cuda)


def test_logical_cpus_share_one_pool():
    """Logical CPU devices share the memory this process may use; it is not offered twice."""
    machine = detect(cpu_devices=3)
    assert machine.name == "detected"
    assert machine.device_names == ("cpu:0", "cpu:1", "cpu:2")
    assert {device.pool for device in machine.devices} == {"ram"}
    assert machine.pools[0].memory_bytes == memory_limit()
    assert toml.loads(toml.dumps(machine)) == machine


def test_detection_is_repeatable():
    """The same machine is described the same way twice."""
    assert detect(cpu_devices=2) == detect(cpu_devices=2)


def test_more_devices_than_cores_share_the_speed():
    """Logical devices beyond the cores do not create speed."""
    cores = num_cores()
    one = cpu_machine(cores).devices[0].flops_per_s["float32"]
    half = cpu_machine(2 * cores).devices[0].flops_per_s["float32"]
    assert half == pytest.approx(one / 2, rel=1e-6)


def test_number_of_devices_must_be_positive():
    """Zero devices are refused."""
    with pytest.raises(MachineError, match="devices must be positive, got 0"):
        detect(cpu_devices=0)


def test_hidden_gpus_are_not_used(monkeypatch):
    """CUDA_VISIBLE_DEVICES set to nothing gives CPU devices, two to four by default."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    machine = load_machine("detect")
    assert {device.kind for device in machine.devices} == {"cpu"}
    assert 2 <= len(machine.devices) <= 4


def test_detection_without_driver_imports_no_torch():
    """Where GPUs are hidden or missing, torch is not imported."""
    code = (
        "import sys, devplace.machine as m; m.detect(cpu_devices=2); print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


@pytest.mark.parametrize(
    "kind", ["UNIX x86_64 Kernel Module ", "UNIX Open Kernel Module for x86_64"]
)
def test_the_driver_is_named_by_its_kernel_module(kind, tmp_path):
    """The version is the number behind the module's name, not that of the compiler below."""
    file = tmp_path / "version"
    file.write_text(
        f"NVRM version: NVIDIA {kind}  580.159.04  Release Build\nGCC version: 12.2.0 \n"
    )
    assert driver_version(str(file)) == "580.159.04"


def test_without_a_file_the_driver_is_named_by_its_library(tmp_path, monkeypatch):
    """Without a kernel module's file the library is asked; without both nothing is known."""
    missing = str(tmp_path / "none")

    def library(name):
        assert name == "libcuda.so.1"
        return SimpleNamespace(cuDriverGetVersion=lambda at: setattr(at._obj, "value", 13000))

    monkeypatch.setattr("ctypes.CDLL", library)
    assert driver_version(missing) == "CUDA 13000"
    monkeypatch.setattr("ctypes.CDLL", lambda name: SimpleNamespace())
    assert driver_version(missing) == ""


def test_known_gpus_take_the_preset_speeds():
    """Names, identities and memory come from the driver, speeds from the known product."""
    machine = gpu_machine(fake_torch(["NVIDIA H100 80GB HBM3"] * 2, used=5 * GIB))
    gpu = machine.devices[1]
    assert machine.device_names == ("cpu:0", "cuda:0", "cuda:1")
    assert (gpu.uuid, gpu.memory_bytes, gpu.reserve_bytes) == ("GPU-0000-0", 80 * GIB, 5 * GIB)
    assert gpu.flops_per_s["bfloat16"] == 494_500_000_000_000
    assert machine.path("cuda:0", "cuda:1").bytes_per_s == 389_000_000_000
    assert toml.loads(toml.dumps(machine)) == machine


def test_s09_own_unused_cache_is_free():
    """What torch has cached and does not use is no reserve; what is in use is, and so is what the
    CUDA graphs of this process hold."""
    plain, with_cache = (
        gpu_machine(fake_torch(["NVIDIA H100 80GB HBM3"], used=5 * GIB + cached, cached=cached))
        for cached in (0, 3 * GIB)
    )
    assert with_cache == plain
    assert plain.devices[1].reserve_bytes == 5 * GIB


def test_the_host_beside_gpus_refuses_what_only_these_can_run():
    """A detected host does not take fused cells or random ops; a machine without GPUs does."""
    machine = gpu_machine(fake_torch(["NVIDIA H100 80GB HBM3"]))
    host, gpu = machine.devices
    assert any(fnmatch.fnmatchcase("aten.native_dropout.default", p) for p in host.unsupported_ops)
    assert not any(fnmatch.fnmatchcase("aten.embedding.default", p) for p in host.unsupported_ops)
    assert gpu.unsupported_ops == ()
    assert all(device.unsupported_ops == () for device in detect(cpu_devices=2).devices)


def test_cards_without_peer_access_are_staged():
    """Without peer access there is no direct link."""
    machine = gpu_machine(fake_torch(["NVIDIA GeForce RTX 4090"] * 2, peers=False))
    pairs = {(link.src, link.dst) for link in machine.links}
    assert ("cuda:0", "cuda:1") not in pairs
    assert machine.path("cuda:0", "cuda:1").bytes_per_s == 12_500_000_000


def test_pcie_peers_share_the_host_bridge():
    """Peers of unequal kind are joined over PCIe."""
    machine = gpu_machine(fake_torch(["Tesla V100-SXM2-16GB", "NVIDIA A100-SXM4-80GB"]))
    assert "host-bridge" in machine.path("cuda:0", "cuda:1").channels


def test_unknown_cards_get_rates_by_size():
    """A card that is not known gets rough rates from its multiprocessors."""
    gpu = gpu_machine(fake_torch(["Some New GPU"], major=10)).devices[1]
    assert gpu.model == "Some New GPU"
    assert 10**13 < gpu.flops_per_s["float32"] < gpu.flops_per_s["bfloat16"]
    old = gpu_machine(fake_torch(["Some Old GPU"], major=6)).devices[1]
    assert "bfloat16" not in old.flops_per_s


@pytest.mark.gpu
def test_real_gpus_are_found():
    """On a machine with GPUs every visible one is described, with its UUID."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    machine = detect()
    assert len(machine.devices) == 1 + torch.cuda.device_count()
    assert machine.devices[1].uuid.startswith("GPU-")
