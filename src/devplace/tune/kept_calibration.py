"""The fitted constants of this machine, as the last fit left them on disk."""

from __future__ import annotations

import logging

import msgspec

from devplace.machine import Machine
from devplace.tune.calibration import Calibration

KIND = "calibration"
_log = logging.getLogger(__name__)


def kept_calibration(machine: Machine) -> Calibration | None:
    """The constants kept for this machine; a damaged file counts as none."""
    from devplace.run.probe import probe_key
    from devplace.run.probe.kept_probe import kept_text

    text = kept_text(KIND, probe_key(machine))
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=Calibration)
    except ValueError as error:
        _log.warning("Kept calibration is not used: %s", error)
        return None
