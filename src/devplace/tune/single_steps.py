"""Measured single-GPU step times, kept from call to call."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from devplace.machine import Machine
from devplace.tune.calibration import Calibration

KIND = "single-steps"
MAX_KEPT = 32
_log = logging.getLogger(__name__)


class SingleStep(msgspec.Struct, frozen=True, kw_only=True):
    """A measured step on one GPU, as far as constants of a machine matter to it.

    Attributes:
        graph: Fingerprint of the step.
        device: Where it ran.
        base_ns: Sum of its ops' times without kernel gaps, and of the copies of its batch, ns.
        num_kernels: How many of its ops have a kernel gap.
        measured_ns: Time of a step.
    """

    graph: str
    device: str
    base_ns: int
    num_kernels: int
    measured_ns: int

    @property
    def num_gpus(self) -> int:
        """One."""
        return 1

    @property
    def has_kernel_gaps(self) -> bool:
        """Whether the kernel gap matters to it."""
        return self.num_kernels > 0

    def predicted_ns(self, calibration: Calibration) -> int:
        """Step time by these constants."""
        return max(1, self.base_ns + self.num_kernels * calibration.kernel_gap_ns)


def remembered(machine: Machine, fresh: Sequence[SingleStep]) -> list[SingleStep]:
    """Fresh steps together with those kept for this machine, which are kept from now on.

    A step of one graph and device counts once: as measured last.
    """
    from devplace.run.probe import probe_key
    from devplace.run.probe.kept_probe import keep_text

    kept = kept_steps(machine)
    steps = {(one.graph, one.device): one for one in kept}
    for one in fresh:
        steps.pop((one.graph, one.device), None)
        steps[one.graph, one.device] = one
    found = list(steps.values())[-MAX_KEPT:]
    if found != kept:
        keep_text(KIND, probe_key(machine), msgspec.json.encode(found).decode())
    return found


def kept_steps(machine: Machine) -> list[SingleStep]:
    """Steps kept for this machine; a damaged file counts as none."""
    from devplace.run.probe import probe_key
    from devplace.run.probe.kept_probe import kept_text

    text = kept_text(KIND, probe_key(machine))
    if text is None:
        return []
    try:
        return msgspec.json.decode(text, type=list[SingleStep])
    except ValueError as error:
        _log.warning("Kept steps on one GPU are not used: %s", error)
        return []
