"""The LSTM workloads with cuDNN's fused `nn.LSTM`, eager, on one device.

Run: `python -m experiments.gpu.lstm WORKLOAD --out FILE`.
"""

from __future__ import annotations

import argparse
from typing import Any

from experiments.gpu.lstm_models import from_unrolled
from experiments.gpu.timing import peaks, reset_peaks, time_steps
from experiments.gpu.training import Settings, bound_loss, build, prepare_torch, sgd, training_step

from experiments.gpu import rows


def measure(
    settings: Settings, progress: rows.Progress, options: argparse.Namespace
) -> dict[str, Any]:
    """Step time of the fused twin; its first loss is that of the unrolled model."""
    prepare_torch(settings)
    workload = build(settings)
    model, what = from_unrolled(workload.model)
    loss = bound_loss(settings, model, workload.loss_fn, workload.inputs)
    devices = settings.devices()[:1]
    progress.acquire()
    reset_peaks(devices)
    times = time_steps(training_step(loss, sgd(model)), devices, settings.seconds, settings.steps)
    return times | peaks(devices) | {"fused": what}


if __name__ == "__main__":
    rows.main("experiments.gpu.lstm", measure)
