"""PyTorch eager on one device.

Run: `python -m experiments.gpu.eager WORKLOAD --out FILE`.
"""

from __future__ import annotations

import argparse
from typing import Any

from experiments.gpu.timing import peaks, reset_peaks, time_steps
from experiments.gpu.training import (
    Settings,
    bound_loss,
    build,
    make_optimizer,
    prepare_torch,
    training_step,
)

from experiments.gpu import rows


def measure(
    settings: Settings, progress: rows.Progress, options: argparse.Namespace
) -> dict[str, Any]:
    """Step time and peak memory of the ordinary training loop."""
    prepare_torch(settings)
    progress.phase("start")
    workload = build(settings)
    optimizer = make_optimizer(settings, workload.model.parameters())
    loss = bound_loss(settings, workload.model, workload.loss_fn, workload.inputs)
    devices = settings.devices()[:1]
    progress.acquire()
    reset_peaks(devices)
    times = time_steps(training_step(loss, optimizer), devices, settings.seconds, settings.steps)
    return times | peaks(devices)


if __name__ == "__main__":
    rows.main("experiments.gpu.eager", measure)
