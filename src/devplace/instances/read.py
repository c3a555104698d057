"""An instance from any file: its format is found from its content."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec

from devplace.errors import InputError
from devplace.instances import doppler, pipedream_profiles, piper, tarnawski
from devplace.instances.records import (
    About,
    DataflowInstance,
    Instance,
    LoadInstance,
    PipelineInstance,
)
from devplace.instances.text import MAX_DEVICES, read_text

OBJECTIVES = ("throughput", "latency")
FORMATS = {
    "tarnawski": tarnawski.SOURCE,
    "piper": piper.SOURCE,
    "pipedream": pipedream_profiles.SOURCE,
    "doppler": doppler.SOURCE,
}
_KINDS = ("throughput-inputs", "latency-inputs")
_SOURCE_FILE = "SOURCE.txt"


@dataclass(frozen=True)
class Changes:
    """What to change of an instance; None leaves it as it is.

    Attributes:
        devices: Number of devices (accelerators).
        cpus: Number of CPUs (Tarnawski).
        memory_bytes: Memory of each device.
        edge_cost_scale: Factor on the cost of what crosses between devices.
        bandwidth: Bytes/s (PipeDream, Piper).
    """

    devices: int | None = None
    cpus: int | None = None
    memory_bytes: int | None = None
    edge_cost_scale: float | None = None
    bandwidth: float | None = None

    def text(self) -> str:
        """As options of the command line; empty if nothing changes."""
        options = {
            "--devices": self.devices,
            "--cpus": self.cpus,
            "--memory": self.memory_bytes,
            "--edge-cost-scale": self.edge_cost_scale,
            "--bandwidth": self.bandwidth,
        }
        return " ".join(f"{key} {value}" for key, value in options.items() if value is not None)


def load_instance(
    path: str | Path, objective: str = "", changes: Changes | None = None, name: str = ""
) -> Instance:
    """Read an instance file of any known format.

    Args:
        path: The file.
        objective: `throughput` or `latency`, for Tarnawski files, whose content does not tell. By
            default what the folder tells, else throughput.
        changes: What to change.
        name: Its name; by default made from the path.

    Raises:
        InputError: Unreadable, of no known format, malformed, or a change that makes no sense.
    """
    text = read_text(path)
    kind = recognise(text, str(path))
    source, licence = provenance(Path(path), kind)
    about = About(name or name_of(path), str(path), source, licence)
    if objective and objective not in OBJECTIVES:
        raise InputError(f"Unknown objective {objective!r}. Known: {', '.join(OBJECTIVES)}.")
    instance: Instance
    if kind == "tarnawski":
        is_latency = "latency-inputs" in Path(path).resolve().parts
        objective = objective or ("latency" if is_latency else "throughput")
        instance = tarnawski.parse(text, about, objective)
    elif kind == "piper":
        instance = piper.parse(text, about)
    elif kind == "pipedream":
        instance = pipedream_profiles.parse(text, about)
    else:
        instance = doppler.parse(text, about)
    if objective and objective != instance.objective:
        raise InputError(
            f"{path} is a {kind} file, whose objective is {instance.objective}, not {objective}. "
            f"Leave the objective out."
        )
    return change(instance, changes or Changes())


def recognise(text: str, path: str) -> str:
    """Which of `FORMATS` a text is.

    Raises:
        InputError: None of them; says which there are.
    """
    begin = text.lstrip()
    if begin.startswith("{"):
        keys = _keys(text)
        if keys is None or {"maxFPGAs", "maxSizePerFPGA", "maxCPUs"} & keys:
            return _json_kind(text)
        if {"maxDevices", "maxMemoryPerDevice", "mbsInBatch"} & keys:
            return "piper"
        if "fpgas" in keys and "nodes" not in keys:
            raise InputError(f"{path} is a split of an instance, not an instance. Give the latter.")
    elif re.search(r"^\s*\S+\s+--\s+.*forward_compute_time", text, re.MULTILINE):
        return "pipedream"
    elif re.fullmatch(r"\s*\d+\s*", begin.partition("\n")[0]):
        return "doppler"
    begins = f"it begins with {begin[:30]!r}" if begin else "it is empty"
    raise InputError(
        f"{path} is no instance file that devplace knows: {begins}. Known are the files of "
        + "; ".join(f"{name} ({source})" for name, source in FORMATS.items())
        + "."
    )


def _keys(text: str) -> set[str] | None:
    """Keys of the outermost object, or None if this is not JSON."""
    try:
        return set(msgspec.json.decode(text.encode(), type=dict[str, msgspec.Raw]))
    except (msgspec.MsgspecError, RecursionError):
        return None


def _json_kind(text: str) -> str:
    """For broken JSON: the format whose keys it shows, so that the error names the line."""
    return "piper" if '"TMPCs"' in text or '"maxDevices"' in text else "tarnawski"


def change(instance: Instance, changes: Changes) -> Instance:
    """The instance with some of its numbers replaced.

    Raises:
        InputError: A number it does not have, or one that is out of range.
    """
    text = changes.text()
    if not text:
        return instance
    _check(instance, changes)
    about = replace(instance.about, changed=text)
    scale = changes.edge_cost_scale
    devices, memory = changes.devices, changes.memory_bytes
    if isinstance(instance, LoadInstance):
        nodes = instance.nodes
        if scale is not None:
            nodes = tuple(replace(node, output_ms=node.output_ms * scale) for node in nodes)
        return replace(
            instance,
            about=about,
            nodes=nodes,
            num_accelerators=instance.num_accelerators if devices is None else devices,
            num_cpus=instance.num_cpus if changes.cpus is None else changes.cpus,
            memory_bytes=instance.memory_bytes if memory is None else memory,
        )
    if isinstance(instance, DataflowInstance):
        transfer = instance.transfer
        if scale is not None:
            transfer = tuple(value * scale for value in transfer)
        count = devices or instance.num_devices
        return replace(instance, about=about, transfer=transfer, num_devices=count)
    instance = replace(
        instance,
        about=about,
        num_devices=devices or instance.num_devices,
        bandwidth=changes.bandwidth or instance.bandwidth,
    )
    if memory is not None:
        instance = replace(instance, memory_bytes=memory)
    if scale is None:
        return instance
    if isinstance(instance, PipelineInstance):
        return replace(instance, edge_cost_scale=scale)
    return replace(instance, edges=tuple((a, b, size * scale) for a, b, size in instance.edges))


def change_all(instances: Sequence[Instance], changes: Changes) -> list[Instance]:
    """Many instances, each with those of the changes that mean something for it.

    Raises:
        InputError: A change that means nothing to any, or is out of range.
    """
    given = [key for key, value in asdict(changes).items() if value is not None]
    lacking = [_lacking(instance) for instance in instances]
    for key in given:
        if instances and all(key in lacks for lacks in lacking):
            change(instances[0], changes)  # says so
    return [
        change(instance, replace(changes, **dict.fromkeys(lacks)))
        for instance, lacks in zip(instances, lacking, strict=True)
    ]


def _lacking(instance: Instance) -> list[str]:
    """Changes that mean nothing for an instance."""
    if isinstance(instance, LoadInstance):
        return ["bandwidth"]
    if isinstance(instance, DataflowInstance):
        return ["cpus", "memory_bytes", "bandwidth"]
    return ["cpus"]


def _check(instance: Instance, changes: Changes) -> None:
    name = instance.about.name
    for key in _lacking(instance):
        if getattr(changes, key) is not None:
            option = "--" + key.removesuffix("_bytes")
            raise InputError(f"{option} changes nothing that {name} has. Leave it out.")
    if changes.devices == 0 and not isinstance(instance, LoadInstance):
        raise InputError(f"{name} needs at least one device, got --devices 0.")
    for option, count in (("--devices", changes.devices), ("--cpus", changes.cpus)):
        if count is not None and not 0 <= count <= MAX_DEVICES:
            raise InputError(f"{option} must be from 0 to {MAX_DEVICES}, got {count}.")
    scale = changes.edge_cost_scale
    if scale is not None and not 0 <= scale < 10**9:
        raise InputError(f"--edge-cost-scale must be from 0 to 10^9, got {scale}.")
    if changes.bandwidth is not None and not 0 < changes.bandwidth < 10**18:
        raise InputError(f"--bandwidth must be above 0 bytes/s, got {changes.bandwidth}.")


def name_of(path: str | Path) -> str:
    """Name of an instance: its file's, with the published folders in front that tell it from
    others.

    Example:
        >>> name_of("somewhere/throughput-inputs/LayerGraphs/bert24_training.json")
        'throughput-inputs/LayerGraphs/bert24_training'
    """
    parts = Path(path).with_suffix("").parts
    at = next((k for k, part in enumerate(parts) if part in _KINDS), len(parts) - 1)
    return "/".join(parts[at:])


def provenance(path: Path, kind: str) -> tuple[str, str]:
    """Source and licence from the `SOURCE.txt` of the file's folder or one above it."""
    for folder in path.resolve().parents[:4]:
        file = folder / _SOURCE_FILE
        if not file.is_file():
            continue
        found = dict(
            line.split(":", 1)
            for line in file.read_text(encoding="utf-8", errors="replace").splitlines()
            if ":" in line
        )
        values = {key.strip().lower(): value.strip() for key, value in found.items()}
        source = "; ".join(values[key] for key in ("paper", "repository") if key in values)
        return source or FORMATS[kind], values.get("licence", "unknown")
    return FORMATS[kind], "unknown: no SOURCE.txt beside the file"
