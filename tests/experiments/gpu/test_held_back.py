"""Parts of a measured step."""

from __future__ import annotations

import numpy as np
from experiments.gpu.held_back import split

DATA = {
    "workload": "w",
    "number_format": "tf32",
    "layers": None,
    "batch": None,
    "rows": [
        {"micro_batches": 1, "gpus": 1, "name": "one graph", "measured_ns": 100},
        {"micro_batches": 2, "gpus": 1, "name": "one graph", "measured_ns": 140},
        {"micro_batches": 2, "gpus": 2, "name": "search", "measured_ns": 100},
    ],
}
KEY = "2.2.search"


def test_parts_of_a_step_add_up() -> None:
    """By hand: timing makes the step of 100 ns one of 200; the GPUs work 180 and 140 of these."""
    arrays = {
        f"{KEY}.trace.start": np.array([0, 100, 60]),
        f"{KEY}.trace.finish": np.array([80, 200, 200]),
        f"{KEY}.order0": np.array([0, 1]),
        f"{KEY}.order1": np.array([2]),
        f"{KEY}.order2": np.array([], np.int32),
    }
    found = split(DATA, arrays, KEY)
    assert found is not None
    parts = [found[k] for k in ("share_ns", "divided_ns", "slower_ns", "waiting_ns")]
    assert parts == [50, 20, 10, 20]
    assert sum(parts) == found["measured_ns"] == 100
    assert found["traced_ns"] == 200


def test_a_step_on_one_gpu_has_no_parts() -> None:
    """Nor has one whose step on one GPU was not measured."""
    arrays = {"1.1.one graph.trace.start": np.array([0])}
    assert split(DATA, arrays, "1.1.one graph") is None
    rows = [row for row in DATA["rows"] if row["gpus"] == 2]
    assert split({**DATA, "rows": rows}, {}, KEY) is None
