"""Compile all kernels of a step ahead of time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import NamedTuple

from devplace.device_kinds import first_of
from devplace.graph.captured import Captured
from devplace.graph.fusion.call import FusedCall
from devplace.graph.graph import OpGraph
from devplace.kernels.compilers import Compilers, Job, Tell, is_known, store_of
from devplace.kernels.fused import why_not_compiled
from devplace.kernels.kernel_signature import Signature, place_of, signature_of
from devplace.kernels.store import KernelStore


class Prepared(NamedTuple):
    """What was done.

    Attributes:
        kernels: Distinct kernels of the step, on all devices.
        compiled: Of these, how many were not on disk.
        refused: Of these, how many could not be compiled; their ops run one by one.
        seconds: Time it took, s.
    """

    kernels: int
    compiled: int
    refused: int
    seconds: float

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know."""
        found = []
        if self.compiled:
            found.append(f"{self.compiled} kernels were compiled in {self.seconds:.1f} s")
        if self.refused:
            found.append(
                f"{self.refused} of {self.kernels} groups of ops could not be compiled: their ops "
                f"run one by one"
            )
        return tuple(found)


def prepare(
    graph: OpGraph,
    devices: Sequence[str],
    tell: Tell | None = None,
    compilers: Compilers | None = None,
) -> Prepared:
    """Compile the kernels of a fused step for the layouts of its capture, and keep them on disk.

    Args:
        graph: A captured step.
        devices: torch devices it may run on; of several cards of one model every one is named.
        tell: Told how far it is.
        compilers: Processes that were started before, which stay; by default some are started if
            there is enough to do.

    Returns:
        What was done. Layouts that only a real step shows are compiled when they are met.
    """
    begin = time.monotonic()
    usable = [device for device in devices if not why_not_compiled(device)]
    jobs = list(_jobs(graph, usable))
    missing = [job for job in jobs if not is_known(job)]
    if missing:
        with nullcontext(compilers) if compilers else Compilers(len(missing)) as workers:
            workers.compile(missing, tell or (lambda text: None))
    refused = sum(store_of(job).read_failure(job.signature.key) is not None for job in jobs)
    return Prepared(len(jobs), len(missing), refused, time.monotonic() - begin)


def any_compiled(device_type: str) -> bool:
    """Whether kernels of this computer's first device of a type are on disk: then those of a step
    may be, and no compiling process need be started before that is known."""
    return KernelStore(place_of(first_of(device_type))).folder.is_dir()


def _jobs(graph: OpGraph, devices: Sequence[str]) -> Iterator[Job]:
    if not isinstance(graph, Captured):
        return
    seen: set[Signature] = set()
    for node in graph.program.module.graph.nodes:
        if not isinstance(node.target, FusedCall) or "val" not in node.meta:
            continue
        tensors = [arg.meta["val"] for arg in node.args]
        for device in devices:
            signature = signature_of(node.target, device, tensors)
            if signature not in seen:
                seen.add(signature)
                yield Job(node.target, signature)
