"""Instances become problems of whole numbers without losing anything."""

from collections import deque

import numpy as np
import pytest

from devplace.bench.as_problems import dataflow_problem, load_problem, round_load
from devplace.errors import InputError
from devplace.instances import load_instance, suites
from devplace.pipelining import loads
from devplace.problem import Placement
from devplace.simulator import simulate
from devplace.verify import verify_makespan, verify_throughput
from tests.instances import files


@pytest.mark.parametrize("path", suites.find("tarnawski"), ids=lambda path: path.stem)
def test_loads_equal_the_verifier(path):
    """The largest load of random splits is the verifier's, to the rounding of picoseconds."""
    instance = load_instance(path)
    problem = load_problem(instance)
    rng = np.random.default_rng(0)
    for _ in range(5):
        device = rng.integers(0, problem.num_devices, problem.num_nodes).astype(np.int32)
        value = loads(problem, device).max() / 10**9
        verdict = verify_throughput(instance, device.tolist())
        assert value == pytest.approx(verdict.value, abs=problem.num_nodes * 1e-9)


@pytest.mark.parametrize("path", suites.find("doppler"), ids=lambda path: path.stem)
def test_steps_equal_the_verifier(path):
    """The simulated step of random placements is the makespan by the verifier, exactly."""
    instance = load_instance(path)
    problem, unit = dataflow_problem(instance)
    rng = np.random.default_rng(0)
    for _ in range(5):
        devices = rng.integers(0, 4, len(problem.graph.ops)).astype(np.int32)
        timeline = simulate(problem, Placement(devices))
        device, order = schedule(problem, devices)
        verdict = verify_makespan(instance, device, order)
        assert verdict.is_valid
        assert timeline.makespan_ns * unit == verdict.value


def schedule(problem, devices, priority=None):
    """A placement's device and order by the op's number in the file."""
    timeline = simulate(problem, Placement(devices, priority))
    names = [int(op.name) for op in problem.graph.ops]
    device = [0] * len(names)
    for v, name in enumerate(names):
        device[name] = int(devices[v])
    return device, [[names[v] for v in row] for row in timeline.order]


@pytest.mark.parametrize(
    ("name", "one", "dealt"),
    [("chain_mm_112nodes", 4800.28, 1200.10), ("ffnn_192nodes", 226.78, 84.18)],
)
def test_known_values(name, one, dealt):
    """One device and topological round robin are worth what DOPPLER's own simulator gives them;
    up to ties, which it breaks in another order."""
    instance = load_instance(files.PUBLIC / "doppler" / f"{name}.txt")
    problem, _ = dataflow_problem(instance)
    count = len(instance.compute)
    value = verify_makespan(instance, *schedule(problem, np.zeros(count, np.int32))).value
    assert round(value / 1e10, 2) == one
    place = topological(instance)
    turn = np.array([place[int(op.name)] for op in problem.graph.ops])
    value = verify_makespan(instance, *schedule(problem, (turn % 4).astype(np.int32), -turn)).value
    assert value / 1e10 == pytest.approx(dealt, abs=0.02)


def topological(instance):
    """Place of each op in topological order, first in, first out."""
    missing = [0] * len(instance.compute)
    for _, b in instance.edges:
        missing[b] += 1
    ready, place = deque(v for v, count in enumerate(missing) if not count), {}
    while ready:
        op = ready.popleft()
        place[op] = len(place)
        for a, b in instance.edges:
            if a == op:
                missing[b] -= 1
                if not missing[b]:
                    ready.append(b)
    return place


def test_fractions_are_kept(tmp_path):
    """Numbers with decimals are scaled up until they are whole."""
    text = files.DOPPLER.replace("10,40", "10.125,40.5")
    problem, unit = dataflow_problem(load_instance(files.write(tmp_path, "d.txt", text)))
    assert unit == pytest.approx(1e-3)
    assert sorted(problem.costs.compute_ns[:, 0].tolist()) == [10_125, 20_000, 30_000]


def test_huge_numbers_are_scaled_down(tmp_path):
    """What would not fit 64 bits becomes coarser, not wrong."""
    text = files.DOPPLER.replace("10,40", "1e25,4e25")
    problem, unit = dataflow_problem(load_instance(files.write(tmp_path, "d.txt", text)))
    assert unit > 1
    longest = int(problem.costs.compute_ns.max())
    assert longest * float(unit) == pytest.approx(1e25, rel=1e-6)


def test_fractions_of_bytes_count(tmp_path):
    """A node of 10.2 bytes fits 10.9, and not 10.1; times that do not fit are refused."""
    node = {"id": 0, "cpuLatency": 1.0, "fpgaLatency": 1.0, "size": 10.2}
    for limit, fits in ((10.9, True), (10.2, True), (10.1, False)):
        text = files.tarnawski(nodes=[node], edges=[], maxSizePerFPGA=limit)
        rounded = round_load(load_instance(files.write(tmp_path, "t.json", text)))
        assert rounded.is_exact
        assert (rounded.problem.size_bytes[0] <= rounded.problem.memory_bytes) == fits
    text = files.tarnawski(nodes=[{**node, "fpgaLatency": 1e12}], edges=[])
    with pytest.raises(InputError, match="10\\^9 ms"):
        load_problem(load_instance(files.write(tmp_path, "t.json", text)))
