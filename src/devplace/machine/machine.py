"""Machines: devices, links and memory pools."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from devplace.device_kinds import DeviceKind, kind_names, kind_of, names_kind
from devplace.errors import MachineError, did_you_mean
from devplace.units import NS_PER_S

_TIME_LIMIT_NS = 10**15  # 11 days; sums of a few stay far inside 64 bits

MAX_STREAMS = 1024
MAX_DEVICES = 2048
"""Of one machine: pairs of them are looked at one by one."""

# fmt: off
RATE_DTYPES = (
    "float32", "tf32", "float64", "float16", "bfloat16", "complex32", "complex64", "complex128",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
    "float4_e2m1fn_x2", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
    "bool",
)
# fmt: on
"""Names a rate may have: torch's dtypes, and tf32."""


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One device.

    Attributes:
        name: As the user knows it, such as `cuda:0` or `cpu:0`.
        kind: Name of its kind, `cpu` or `gpu`; see `traits`.
        memory_bytes: Memory in all.
        flops_per_s: Reachable rate of matrix work per dtype, FLOP/s; `float32` must be there.
        bytes_per_s: Memory bandwidth, bytes/s.
        model: Product name.
        reserve_bytes: Memory that is never ours: context, libraries' work buffers, other programs.
        pool: Name of a memory pool it shares with other devices, or empty.
        launch_gap_ns: Time every op costs beside its work, ns.
        streams: Ops it runs at once.
        unsupported_ops: Patterns (fnmatch) of op targets it cannot run.
        uuid: Stable identity, when detected.
        host: The computer it is in; devices with one name share a computer.
    """

    name: str
    kind: str
    memory_bytes: int
    flops_per_s: dict[str, int]
    bytes_per_s: int
    model: str = ""
    reserve_bytes: int = 0
    pool: str = ""
    launch_gap_ns: int = 0
    streams: int = 1
    unsupported_ops: tuple[str, ...] = ()
    uuid: str = ""
    host: str = ""

    @property
    def traits(self) -> DeviceKind:
        """What devices of its kind can do."""
        return kind_of(self.kind)

    @property
    def usable_bytes(self) -> int:
        """Memory left for a step."""
        return max(0, self.memory_bytes - self.reserve_bytes)


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """One direction between two devices.

    Attributes:
        src: Sender.
        dst: Receiver.
        bytes_per_s: Bandwidth, bytes/s.
        latency_ns: Time from the last byte sent to its arrival, ns.
        channels: Shared resources a transfer occupies for its whole duration (a host bridge, a
            card's lanes). Transfers on one channel are served one after another. A link with no
            channel named has one of its own.
        usable: Whether it may be used (a slow or faulty pair can be switched off).
        send_overhead_ns: Time a transfer takes of the sender's compute stream.
        receive_overhead_ns: Time a transfer takes of the receiver's compute stream.
        send_share: Part of a transfer's duration by which it delays the sender's ops besides (they
            share memory and multiprocessors), 0 to 1.
        receive_share: Likewise of the receiver's ops.
        points: Measured (bytes, ns) a transfer occupies the link, sizes ascending. Between them
            linear, below the first as the first, beyond the last by `bytes_per_s`. None: bytes /
            bandwidth.
        engine_bytes: From this size on transfers go by a copy engine and queue for channels;
            smaller ones have a lane of their own and only slow down what queues. 0: all queue.
        parallel: Transfers wait neither for each other nor for channels, as some published models
            have it; no real link is like that.
    """

    src: str
    dst: str
    bytes_per_s: int
    latency_ns: int = 0
    channels: tuple[str, ...] = ()
    usable: bool = True
    send_overhead_ns: int = 0
    receive_overhead_ns: int = 0
    send_share: float = 0.0
    receive_share: float = 0.0
    points: tuple[tuple[int, int], ...] = ()
    engine_bytes: int = 0
    parallel: bool = False

    def duration_ns(self, num_bytes: int) -> int:
        """Time a transfer occupies the link, rounded up to 1 ns."""
        if not self.points:
            return self._by_bandwidth(num_bytes)
        (size, duration), *rest = self.points
        if num_bytes <= size:
            return duration
        for next_size, next_duration in rest:
            if num_bytes <= next_size:
                more = (num_bytes - size) * (next_duration - duration)
                return duration - (-more // (next_size - size))
            size, duration = next_size, next_duration
        return duration + self._by_bandwidth(num_bytes - size)

    def _by_bandwidth(self, num_bytes: int) -> int:
        return -(-num_bytes * NS_PER_S // self.bytes_per_s)


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that several devices share."""

    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Machine:
    """Devices, the links between them, and shared memory pools.

    Attributes:
        name: Name of the machine.
        devices: Devices; their order does not matter to any result.
        links: Direct links. A pair without a usable one is staged through the device that makes
            the trip shortest (`path`).
        pools: Memory shared between devices.
        sources: Where each number comes from, text per topic.

    Raises:
        MachineError: Names the device or link and the field that is wrong.
    """

    name: str
    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()
    pools: tuple[Pool, ...] = ()
    sources: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _validate(self)

    @cached_property
    def device_names(self) -> tuple[str, ...]:
        """Names in the order of `devices`."""
        return tuple(device.name for device in self.devices)

    @cached_property
    def device_index(self) -> dict[str, int]:
        """Index of each device by name."""
        return {device.name: index for index, device in enumerate(self.devices)}

    @cached_property
    def _direct(self) -> dict[tuple[str, str], Link]:
        return {(link.src, link.dst): link for link in self.links if link.usable}

    @cached_property
    def _receivers(self) -> dict[str, set[str]]:
        """Devices that each one has a usable link to."""
        found: dict[str, set[str]] = {name: set() for name in self.device_names}
        for src, dst in self._direct:
            found[src].add(dst)
        return found

    @cached_property
    def _senders(self) -> dict[str, set[str]]:
        """Devices that have a usable link to each one."""
        found: dict[str, set[str]] = {name: set() for name in self.device_names}
        for src, dst in self._direct:
            found[dst].add(src)
        return found

    @cached_property
    def _paths(self) -> dict[tuple[str, str], Link | None]:
        return {}

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        """Names of the computers, in the order of their first devices."""
        return tuple(dict.fromkeys(device.host for device in self.devices))

    def crosses_hosts(self, link: Link) -> bool:
        """Whether a link joins two computers, that is, goes over a network."""
        src, dst = (self.devices[self.device_index[end]] for end in (link.src, link.dst))
        return src.host != dst.host

    def path(self, src: str, dst: str) -> Link | None:
        """The link a transfer from `src` to `dst` uses: the direct one, else a staged one.

        A staged link stores and forwards through one other device: times add up, so
        `1/bandwidth = 1/first + 1/second`; latencies, channels and overheads of both count.

        Returns:
            None if there is no way with at most one stop.
        """
        key = (src, dst)
        if key not in self._paths:
            self._paths[key] = self._direct.get(key) or self._staged_path(src, dst)
        return self._paths[key]

    def reaches(self, src: str, dst: str) -> bool:
        """Whether there is a path, without working it out."""
        direct = (src, dst) in self._direct
        return direct or not self._receivers[src].isdisjoint(self._senders[dst])

    def _staged_path(self, src: str, dst: str) -> Link | None:
        """The fastest; of equal ones the first by the name of the stop."""
        stops = sorted(self._receivers[src] & self._senders[dst])
        ways = [(self._direct[src, mid], self._direct[mid, dst]) for mid in stops]
        best = max(ways, key=_speed, default=None)
        return None if best is None else _staged(*best)


def channels_of(link: Link) -> tuple[str, ...]:
    """Names of the channels a link occupies; its own when it names none."""
    return link.channels or (f"{link.src}->{link.dst}",)


def _speed(way: tuple[Link, Link]) -> tuple[int, int]:
    """Bandwidth of two links one after the other, bytes/s, and their latency, ns, negated."""
    first, second = way
    rate = first.bytes_per_s * second.bytes_per_s // (first.bytes_per_s + second.bytes_per_s)
    return max(1, rate), -(first.latency_ns + second.latency_ns)


def _staged(first: Link, second: Link) -> Link:
    return Link(
        src=first.src,
        dst=second.dst,
        bytes_per_s=_speed((first, second))[0],
        latency_ns=first.latency_ns + second.latency_ns,
        channels=tuple(dict.fromkeys(channels_of(first) + channels_of(second))),
        send_overhead_ns=first.send_overhead_ns,
        receive_overhead_ns=second.receive_overhead_ns,
        send_share=first.send_share,
        receive_share=second.receive_share,
        points=_staged_points(first, second),
        engine_bytes=min(first.engine_bytes, second.engine_bytes),
        parallel=first.parallel and second.parallel,
    )


def _staged_points(first: Link, second: Link) -> tuple[tuple[int, int], ...]:
    """One way after the other."""
    if not first.points and not second.points:
        return ()
    sizes = {size for link in (first, second) for size, _ in link.points}
    return tuple(
        (size, first.duration_ns(size) + second.duration_ns(size)) for size in sorted(sizes)
    )


def unknown_dtype(owner: str, dtype: str) -> str:
    """What is wrong with the name of a rate, and the nearest right one."""
    short = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}
    near = (
        f" Did you mean {short[dtype]!r}?" if dtype in short else did_you_mean(dtype, RATE_DTYPES)
    )
    return (
        f"{owner} has a rate of an unknown dtype {dtype!r}.{near} Known: {', '.join(RATE_DTYPES)}."
    )


def _validate(machine: Machine) -> None:
    if not machine.devices:
        raise MachineError(
            f"Machine {machine.name!r} has no devices. Add at least one [[devices]]."
        )
    if len(machine.devices) > MAX_DEVICES:
        raise MachineError(
            f"Machine {machine.name!r} has {len(machine.devices)} devices, at most {MAX_DEVICES} "
            f"can be planned for. Describe a part of it."
        )
    names: set[str] = set()
    pools = {pool.name for pool in machine.pools}
    for device in machine.devices:
        if device.name in names:
            raise MachineError(f"Device names must be unique: {device.name!r} occurs twice.")
        names.add(device.name)
        _validate_device(device, pools)
    if len(pools) != len(machine.pools):
        raise MachineError(
            f"Pool names must be unique, got {[pool.name for pool in machine.pools]}."
        )
    for pool in machine.pools:
        _positive(pool.memory_bytes, f"Pool {pool.name!r}", "memory_bytes", "bytes")
    seen: set[tuple[str, str]] = set()
    for link in machine.links:
        _validate_link(link, names)
        if (link.src, link.dst) in seen:
            raise MachineError(f"Link {link.src} -> {link.dst} is given twice. Keep one.")
        seen.add((link.src, link.dst))
    for src in machine.device_names:
        for dst in machine.device_names:
            if src != dst and not machine.reaches(src, dst):
                raise MachineError(
                    f"Devices must reach each other with at most one stop: no way from {src} to "
                    f"{dst}. Add a [[links]] entry."
                )


def _positive(value: float, owner: str, name: str, unit: str) -> None:
    if not value > 0 or value != value or value == float("inf"):
        raise MachineError(
            f"{owner}: {name} must be positive, got {value} {unit}. Measure or set it."
        )
    _below(value, 2**63, owner, name, unit)


def _not_negative(value: int, owner: str, name: str, unit: str) -> None:
    if value < 0:
        raise MachineError(f"{owner}: {name} must not be negative, got {value} {unit}.")
    _below(value, _TIME_LIMIT_NS if unit == "ns" else 2**63, owner, name, unit)


def _below(value: float, limit: int, owner: str, name: str, unit: str) -> None:
    if value >= limit:
        most = f"{limit:.3g} {unit}".rstrip()
        shown = f"{value:.3g}" if value < 1e300 else "more than 1e300"
        raise MachineError(f"{owner}: {name} must be below {most}, got {shown}.")


def _validate_device(device: Device, pools: set[str]) -> None:
    owner = f"Device {device.name!r}"
    if not device.name:
        raise MachineError("Every device needs a name, such as 'cuda:0'.")
    if not names_kind(device.kind):
        raise MachineError(f"{owner}: kind must be {kind_names()}, got {device.kind!r}.")
    _positive(device.memory_bytes, owner, "memory_bytes", "bytes")
    _positive(device.bytes_per_s, owner, "bytes_per_s", "bytes/s")
    _positive(device.streams, owner, "streams", "")
    if device.streams > MAX_STREAMS:
        raise MachineError(
            f"{owner}: streams must be below {MAX_STREAMS + 1}, got {device.streams}: no device "
            f"runs so many ops at once (a GPU at most 128). Give the number that it does."
        )
    _not_negative(device.reserve_bytes, owner, "reserve_bytes", "bytes")
    _not_negative(device.launch_gap_ns, owner, "launch_gap_ns", "ns")
    if "float32" not in device.flops_per_s:
        raise MachineError(f"{owner}: flops_per_s must have a 'float32' rate. Measure or set it.")
    for dtype, rate in device.flops_per_s.items():
        if dtype not in RATE_DTYPES:
            raise MachineError(f"{owner}: {unknown_dtype('flops_per_s', dtype)}")
        _positive(rate, owner, f"flops_per_s.{dtype}", "FLOP/s")
    if device.pool and device.pool not in pools:
        hint = did_you_mean(device.pool, sorted(pools))
        raise MachineError(f"{owner}: unknown pool {device.pool!r}.{hint} Known: {sorted(pools)}.")


def _validate_link(link: Link, names: set[str]) -> None:
    owner = f"Link {link.src} -> {link.dst}"
    for end in (link.src, link.dst):
        if end not in names:
            known = ", ".join(sorted(names))
            hint = did_you_mean(end, sorted(names))
            raise MachineError(f"{owner}: unknown device {end!r}.{hint} Known: {known}.")
    if link.src == link.dst:
        raise MachineError(f"{owner}: a link must join two devices.")
    _positive(link.bytes_per_s, owner, "bytes_per_s", "bytes/s")
    _not_negative(link.engine_bytes, owner, "engine_bytes", "bytes")
    for name in ("latency_ns", "send_overhead_ns", "receive_overhead_ns"):
        _not_negative(getattr(link, name), owner, name, "ns")
    for name in ("send_share", "receive_share"):
        share = getattr(link, name)
        if not 0.0 <= share <= 1.0:
            raise MachineError(f"{owner}: {name} must be from 0 to 1, got {share}.")
    for size, duration in link.points:
        _not_negative(size, owner, "points", "bytes")
        _not_negative(duration, owner, "points", "ns")
    sizes = [size for size, _ in link.points]
    times = [duration for _, duration in link.points]
    if sizes != sorted(set(sizes)) or times != sorted(times):
        raise MachineError(
            f"{owner}: points must have growing sizes and times that do not fall, got "
            f"{list(link.points)}. Measure again, or leave them out."
        )


def require_machine(machine: object) -> None:
    """Refuse what is no machine, such as its name.

    Raises:
        MachineError: Says what it is and how to get a machine.
    """
    if not isinstance(machine, Machine):
        name = repr(machine) if isinstance(machine, str) else "NAME"
        raise MachineError(
            f"A machine must be a Machine, got {machine!r:.60}. Load it: dp.load_machine({name})."
        )
