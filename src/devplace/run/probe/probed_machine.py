"""A machine with probed links."""

from __future__ import annotations

import msgspec
import numpy as np

from devplace.errors import MachineError
from devplace.machine import Link, Machine
from devplace.run.probe.channels import channels
from devplace.run.probe.fit import LinkFit, carried_ns, fit_link
from devplace.run.probe.report import HOST, PairReport, ProbeReport
from devplace.units import NS_PER_S

MEASURED = "measured by devplace probe"
FLIGHT_SHARE = 0.55
"""Of an earlier fit to steps on 2 and 4 H100: 2.4 us of a hop of 4.2 us. The overheads of
`devplace.tune.measured_costs.HOPPER` come on top."""


def link_fit(report: ProbeReport, pair: PairReport) -> LinkFit | None:
    """Latency and bandwidth of a pair as the executor carries tensors.

    Returns:
        None if nothing of it was timed.
    """
    times = carried_ns(pair, report.switch_bytes)
    return fit_link(pair.sizes, times) if times else None


def machine_from_probe(detected: Machine, report: ProbeReport) -> Machine:
    """The detected machine with measured links.

    A pair with a fault is switched off, so its transfers are staged through another device. Links
    between GPUs get the measured times per size as points. A host link's latency is the measured
    hop's less the receiver's overhead, which comes on top of it, plus the time by which a send
    starts later than an op.

    Args:
        detected: The machine the report was made on.
        report: What the probe found.

    Raises:
        MachineError: The report names a device that is not there, or a card cannot be reached.
    """
    unknown = {p.src for p in report.pairs} | {p.dst for p in report.pairs}
    unknown -= set(detected.device_names)
    if unknown:
        raise MachineError(
            f"The probe is of another machine: {detected.name!r} has no {min(unknown)!r}. Probe "
            "this one."
        )
    for pair in report.faulty:
        if HOST in (pair.src, pair.dst) and _is_gpu(detected, pair):
            raise MachineError(
                f"A card must be reachable from the host: {pair.src} -> {pair.dst} "
                f"{pair.faults[0]}. Leave the card out with CUDA_VISIBLE_DEVICES."
            )
    links = {(link.src, link.dst): link for link in detected.links}
    names = channels(report)
    for pair in report.pairs:
        key = (pair.src, pair.dst)
        made = _link(report, pair, names[key], links.get(key))
        if made is not None:
            links[key] = made
    day = f"{MEASURED} on {report.date}"
    versions = ", ".join(f"{name} {value}" for name, value in sorted(report.key.items()))
    sources = {
        **detected.sources,
        "links": f"Latency, bandwidth and shared channels {day} ({versions}).",
        "overheads": f"send_overhead_ns, receive_overhead_ns: {day}.",
    }
    if report.faulty:
        sources["faults"] = "; ".join(
            f"{pair.src} -> {pair.dst}: {', '.join(pair.faults)}" for pair in report.faulty
        )
    return Machine("probed", detected.devices, tuple(links.values()), detected.pools, sources)


def _is_gpu(machine: Machine, pair: PairReport) -> bool:
    ends = {pair.src, pair.dst}
    return any(device.name in ends and device.traits.has_graphs for device in machine.devices)


def _link(
    report: ProbeReport, pair: PairReport, names: tuple[str, ...], known: Link | None
) -> Link | None:
    if pair.faults:
        return msgspec.structs.replace(known, usable=False) if known is not None else None
    fit = link_fit(report, pair)
    if fit is None:
        return known
    if {"kernel", "engine"} <= set(pair.hop_ns):
        return _peer_link(report, pair, names)
    sender, receiver = report.device(pair.src), report.device(pair.dst)
    send = sender.send_overhead_ns if sender else 0
    receive = receiver.receive_overhead_ns if receiver else 0
    fork = sender.fork_ns if sender else 0
    return Link(
        src=pair.src,
        dst=pair.dst,
        bytes_per_s=fit.bytes_per_s,
        latency_ns=max(0, fit.latency_ns + fork - receive),
        channels=names,
        send_overhead_ns=send,
        receive_overhead_ns=receive,
    )


def _peer_link(report: ProbeReport, pair: PairReport, names: tuple[str, ...]) -> Link:
    """Small tensors by kernel, large ones by the sender's copy engine, which carries one at a time.

    Of a hop FLIGHT_SHARE of the smallest one's time is flight: the next transfer may begin in it.
    """
    by_kernel = dict(zip(pair.sizes, pair.hop_ns["kernel"], strict=True))
    by_engine = dict(zip(pair.sizes, pair.hop_ns["engine"], strict=True))
    flight = round(FLIGHT_SHARE * min(by_kernel.values()))
    switch = report.switch_bytes
    hops: list[tuple[int, float]] = [(size, t) for size, t in by_kernel.items() if size < switch]
    if switch <= pair.sizes[-1]:
        hops += [(switch - 1, float(np.interp(switch, pair.sizes, pair.hop_ns["kernel"])))]
        hops += [(switch, float(np.interp(switch, pair.sizes, pair.hop_ns["engine"])))]
        hops += [(size, time) for size, time in by_engine.items() if size > switch]
    points, last = [], 0
    for size, time in hops:
        last = max(last, round(time) - flight)
        points.append((size, last))
    (small, begin), (large, end) = hops[-2:]
    rate = (large - small) / max(1.0, end - begin) * NS_PER_S
    sender, receiver = report.device(pair.src), report.device(pair.dst)
    return Link(
        src=pair.src,
        dst=pair.dst,
        bytes_per_s=max(1, round(rate)),
        latency_ns=flight,
        channels=(f"{pair.src} engine", *names),
        send_overhead_ns=sender.send_overhead_ns if sender else 0,
        receive_overhead_ns=receiver.receive_overhead_ns if receiver else 0,
        points=tuple(points),
        engine_bytes=switch,
    )
