"""What a probe of a machine's links found, as a record with a JSON form."""

from __future__ import annotations

from typing import Any

import msgspec

from devplace.device_kinds import is_accelerator
from devplace.files import decode_json

FORM = 1
"""Number of the JSON form; raised when its meaning changes."""

HOST = "cpu:0"
MAX_SMALL_HOP_NS = 1_000_000
"""A hop of the smallest size takes some microseconds. GPUs that several processes use give each of
them slices of time in turn: on two H200 beside other work, 1 KiB took 4.6 to 6.9 ms by engine."""


class PairReport(msgspec.Struct, frozen=True, kw_only=True):
    """One direction between two devices.

    Attributes:
        src: Sender.
        dst: Receiver.
        sizes: Sizes tried, bytes, ascending; empty if nothing was timed.
        hop_ns: Way to carry (`kernel`, `engine`, `copy`) -> time of one hop per size, ns: from the
            end of the work before it on the sender to the end of the receiver's wait.
        faults: What went wrong; a pair with any is not to be used.
    """

    src: str
    dst: str
    sizes: tuple[int, ...] = ()
    hop_ns: dict[str, tuple[int, ...]] = {}
    faults: tuple[str, ...] = ()


class DeviceReport(msgspec.Struct, frozen=True, kw_only=True):
    """What transfers cost a device beside their time on the link, inside one CUDA graph.

    Attributes:
        name: Its name.
        send_overhead_ns: What a send adds to the chain of ops it leaves from, ns.
        receive_overhead_ns: What waiting for a tensor that is already there adds to the chain, ns.
        fork_ns: How much later a send starts than an op in its place would, ns.
        op_ns: Time of one smallest op in a chain of them, gap included, ns; 0 if not measured.
        launch_gap_ns: Part of it between the end of one op and the start of the next, ns.
    """

    name: str
    send_overhead_ns: int
    receive_overhead_ns: int
    fork_ns: int = 0
    op_ns: int = 0
    launch_gap_ns: int = 0


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a step costs beside its ops.

    Attributes:
        step_gap_ns: From the end of a long step to the start of the next, ns.
        least_step_ns: Time of a step with one smallest op per device: what launching takes, ns.
    """

    step_gap_ns: int
    least_step_ns: int


class Sharing(msgspec.Struct, frozen=True, kw_only=True):
    """Large transfers at the same time.

    Attributes:
        transfers: (sender, receiver) of each.
        slowdown: Mean of time together / time alone; about 2 when two share, 1 when not.
    """

    transfers: tuple[tuple[str, str], ...]
    slowdown: float


class ProbeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a probe found.

    Attributes:
        key: What it is true of: devices, driver, versions.
        date: Day it was made, `YYYY-MM-DD`.
        devices: Per device.
        pairs: Per ordered pair, host links included.
        sharing: Which transfers slow each other down.
        step: What a step costs, if it was measured.
        switch_bytes: From this size on the executor carries by `engine`.
        seconds: Part of the probe -> time it took, s.
        form: Number of the JSON form.
    """

    key: dict[str, str]
    date: str
    devices: tuple[DeviceReport, ...]
    pairs: tuple[PairReport, ...]
    sharing: tuple[Sharing, ...] = ()
    step: StepReport | None = None
    switch_bytes: int = 0
    seconds: dict[str, float] = {}
    form: int = FORM

    @property
    def faulty(self) -> tuple[PairReport, ...]:
        """Pairs that must not be used."""
        return tuple(pair for pair in self.pairs if pair.faults)

    @property
    def disturbance(self) -> str:
        """Why the times are not those of the links: other processes used the GPUs; empty if none
        did."""
        for pair in self.pairs:
            for way, times in pair.hop_ns.items():
                fast = is_accelerator(pair.src) or is_accelerator(pair.dst)
                if fast and times and times[0] > MAX_SMALL_HOP_NS:
                    return (
                        f"A hop of {pair.sizes[0]} bytes from {pair.src} to {pair.dst} took "
                        f"{times[0] / 1e6:.1f} ms by {way}, more than {MAX_SMALL_HOP_NS // 10**6} "
                        f"ms: other processes use these GPUs. The probe is not kept; probe again "
                        f"when they are free."
                    )
        return ""

    def pair(self, src: str, dst: str) -> PairReport | None:
        """The report of one direction, if there is one."""
        return next((p for p in self.pairs if (p.src, p.dst) == (src, dst)), None)

    def device(self, name: str) -> DeviceReport | None:
        """The report of one device, if there is one."""
        return next((device for device in self.devices if device.name == name), None)

    def to_json(self) -> bytes:
        """As JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes | str) -> ProbeReport:
        """Read back what `to_json` wrote.

        Raises:
            ValueError: It is none, or one of another form.
        """
        found: Any = decode_json(data, cls)
        if found.form != FORM:
            raise ValueError(f"A probe report of form {found.form}, not {FORM}.")
        return cls(**msgspec.structs.asdict(found))
