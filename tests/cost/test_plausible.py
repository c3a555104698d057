"""Analytic costs of real training steps against measured ones."""

import pytest

from devplace.cost import Analytic
from devplace.machine import presets

torch = pytest.importorskip("torch")

# (workload, machine, measured ms). H200: one CUDA graph, torch 2.11, tf32. P100: TensorFlow
# benchmarks, DGX-1, synthetic data, 195 images/s at batch 32.
MEASURED = [
    ("resnet-50", "h200x1", 19.9),
    ("resnet-50", "p100x1", 164.0),
    ("rnnlm", "h200x1", 24.0),
]


@pytest.mark.parametrize(("workload", "machine", "measured_ms"), MEASURED)
@pytest.mark.slow
def test_a_step_is_priced_within_a_factor_of_two(workload, machine, measured_ms):
    """The sum of all op costs on one card lies within a factor of two of the measured step."""
    from devplace import workloads
    from devplace.step_capture import capture

    work = workloads.build(workload, device="meta")
    sgd = torch.optim.SGD(work.model.parameters(), lr=0.1)
    graph = capture(work.model, work.inputs, work.loss_fn, sgd)
    table = Analytic()(graph, presets.get(machine))
    predicted_ms = table.compute_ns[:, 1].sum() / 1e6
    assert measured_ms / 2 < predicted_ms < measured_ms * 2
