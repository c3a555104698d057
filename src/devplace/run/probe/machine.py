"""A machine whose links are as measured."""

from __future__ import annotations

import msgspec

from devplace.errors import MachineError
from devplace.machine import Link, Machine
from devplace.run.probe.channels import channels
from devplace.run.probe.fit import LinkFit, carried_ns, fit_link
from devplace.run.probe.report import HOST, PairReport, ProbeReport

MEASURED = "measured by devplace probe"


def link_fit(report: ProbeReport, pair: PairReport) -> LinkFit | None:
    """Latency and bandwidth of a pair as the executor carries tensors.

    Returns:
        None if nothing of it was timed.
    """
    times = carried_ns(pair, report.switch_bytes)
    return fit_link(pair.sizes, times) if times else None


def machine_from_probe(detected: Machine, report: ProbeReport) -> Machine:
    """The detected machine with measured links.

    A pair with a fault is switched off, so its transfers are staged through another device. A
    link's latency is the measured hop's less the receiver's overhead, which comes on top of it,
    plus the time by which a send starts later than an op.

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
    return any(device.name in ends and device.kind == "gpu" for device in machine.devices)


def _link(
    report: ProbeReport, pair: PairReport, names: tuple[str, ...], known: Link | None
) -> Link | None:
    if pair.faults:
        return msgspec.structs.replace(known, usable=False) if known is not None else None
    fit = link_fit(report, pair)
    if fit is None:
        return known
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
