"""Kinds of devices and what each can do. A new kind is a record here, and an executor's file if
steps are to run on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class DeviceKind:
    """What sets the devices of a kind apart. The defaults are those of an accelerator of which
    nothing more is known: it can be planned for.

    Attributes:
        name: In machine files, such as `gpu`.
        torch_type: torch's device type, with which the names of such devices begin: `cuda`.
        label: In messages, such as `GPU`.
        is_host: Ops run on the host's cores and in its memory, where batches lie. Devices of all
            other kinds are accelerators.
        fixed_addresses: A step finds its receive buffers and sources where they were: buffers are
            held all step long, and a new value may be computed over the old one.
        has_graphs: It has CUDA's streams, events and graphs (those of ROCm have the same names in
            torch): ops are timed by events, a plan is recorded and replayed.
        has_matrix_cores: Matrix products are fast for some layouts and sizes only, convolutions
            and batch norms have libraries' kernels, float32 may be rounded to TF32.
        has_gpu_shares: Ops reach the shares of its peaks that GPUs reach; of other kinds the
            rates are what is reached.
        compiler: What compiles fused groups; empty: nothing does.
        executor: `module:class` that runs the part of a schedule on accelerators of this kind;
            empty: it can only be planned for. (The host's own executor runs all other steps.)
    """

    name: str
    torch_type: str
    label: str
    is_host: bool = False
    fixed_addresses: bool = False
    has_graphs: bool = False
    has_matrix_cores: bool = False
    has_gpu_shares: bool = False
    compiler: Literal["", "c++", "triton"] = ""
    executor: str = ""


CPU = DeviceKind(name="cpu", torch_type="cpu", label="CPU", is_host=True, compiler="c++")
GPU = DeviceKind(
    name="gpu",
    torch_type="cuda",
    label="GPU",
    fixed_addresses=True,
    has_graphs=True,
    has_matrix_cores=True,
    has_gpu_shares=True,
    compiler="triton",
    executor="devplace.run.cuda:CudaExecutor",
)
KINDS = (CPU, GPU)


def find_kind(text: str) -> DeviceKind | None:
    """The kind with a name or torch type, or that of a device's name; None if there is none.

    Example:
        >>> find_kind("cuda:1").label, find_kind("gpu").label, find_kind("disk")
        ('GPU', 'GPU', None)
    """
    word = text.partition(":")[0]
    return next((kind for kind in KINDS if word in (kind.name, kind.torch_type)), None)


def kind_of(text: str) -> DeviceKind:
    """As `find_kind`, of what is known to have a kind; of anything else a kind with no more than
    that name."""
    word = text.partition(":")[0]
    return find_kind(text) or DeviceKind(name=word, torch_type=word, label=word)


def kind_names() -> str:
    """Names of all kinds, as messages list them.

    Example:
        >>> kind_names()
        "'cpu' or 'gpu'"
    """
    return " or ".join(repr(kind.name) for kind in KINDS)


def torch_types() -> list[str]:
    """torch device types of all kinds.

    Example:
        >>> torch_types()
        ['cpu', 'cuda']
    """
    return [kind.torch_type for kind in KINDS]


def names_kind(value: object) -> bool:
    """Whether it is a kind's name, as machine files give it."""
    return value in [kind.name for kind in KINDS]


def is_host(device: str) -> bool:
    """Whether a device's name is that of one in the host's memory.

    Example:
        >>> is_host("cpu:0"), is_host("cuda:0")
        (True, False)
    """
    return kind_of(device).is_host


def is_accelerator(device: str) -> bool:
    """Whether a device's name, or a torch device type, is that of an accelerator of a known kind.

    Example:
        >>> is_accelerator("cuda:0"), is_accelerator("cpu"), is_accelerator("meta")
        (True, False, False)
    """
    kind = find_kind(device)
    return kind is not None and not kind.is_host


def first_of(torch_type: str) -> str:
    """torch's name of the first device of a type.

    Example:
        >>> first_of("cuda"), first_of("cpu")
        ('cuda:0', 'cpu')
    """
    return torch_type if is_host(torch_type) else f"{torch_type}:0"


def named_by_number(index: int | str) -> str:
    """The device that a bare number means.

    Example:
        >>> named_by_number(1)
        'cuda:1'
    """
    return f"{GPU.torch_type}:{index}"
