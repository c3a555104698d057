"""Small instance files of every format, as text and on disk."""

import json
from pathlib import Path

PUBLIC = Path(__file__).parents[2] / "benchmarks" / "instances"


def tarnawski(**changes):
    """Three nodes in a row on two accelerators and a CPU."""
    data = {
        "maxSizePerFPGA": 100.0,
        "maxFPGAs": 2,
        "maxCPUs": 1,
        "nodes": [
            {"id": 7, "cpuLatency": 10.0, "fpgaLatency": 1.5, "size": 40, "supportedOnFpga": True},
            {"id": 3, "cpuLatency": 20.0, "fpgaLatency": 2.5, "size": 40, "supportedOnFpga": 1},
            {"id": 5, "cpuLatency": 0.5, "fpgaLatency": 9.0, "supportedOnFpga": False},
        ],
        "edges": [
            {"sourceId": 7, "destId": 3, "cost": 0.25, "size": 1},
            {"sourceId": 3, "destId": 5, "cost": 0.5},
        ],
    }
    return json.dumps({**data, **changes})


def variant(name="vanilla", seconds=1.0, a=10.0, b=1.0, sync_in=None, sync_out=None, weights=0.0):
    """One way to run a layer."""
    return {
        "id": name,
        "timePerSample": seconds,
        "parameterSize": weights,
        "memoryUsageA": a,
        "memoryUsageB": b,
        "syncTimeFw": sync_in or {},
        "syncTimeBw": sync_out or {},
    }


def piper(**changes):
    """Two layers that may be spread over two devices."""
    first = {
        "1": [variant(sync_out={"1": 0.0}), variant("recomputed", 1.5, 4, 1, None, {"1": 0.0})],
        "2": [variant(seconds=0.6, a=5, sync_out={"1": 20.0})],
    }
    second = {"1": [variant(seconds=2.0, sync_in={"0": 0.0}, weights=40.0)]}
    data = {
        "maxMemoryPerDevice": 1000.0,
        "maxDevices": 4,
        "bandwidth": 100.0,
        "mbsInBatch": 8,
        "nodes": [{"id": 0, "TMPCs": first}, {"id": 1, "name": "head", "TMPCs": second}],
        "edges": [{"sourceId": 0, "destId": 1, "communicationCost": 10.0}],
    }
    return json.dumps({**data, **changes})


PIPEDREAM = """\
node1 -- Input -- forward_compute_time=9.0, backward_compute_time=0.0, activation_size=8.0, \
parameter_size=0.0
node2 -- Conv2d(3, 4, kernel_size=(3, 3)) -- forward_compute_time=1.0, \
backward_compute_time=2.0, activation_size=[6.0; 2.0], parameter_size=40.0 -- stage_id=0
node3 -- Linear(in=4) -- forward_compute_time=0.5, backward_compute_time=0.5, \
activation_size=4.0, parameter_size=16.0

\tnode1 -- node2
\tnode2 -- node3
"""

DOPPLER = """\
5
0, 1,
0, 1, 0
2, 2, 1
10,40,MatMul
20,80,MatMul
30,120
"""


def write(folder, name, text):
    """The text as a file."""
    path = folder / name
    path.write_text(text)
    return path
