"""Changed and extreme instances: right statuses, no internal errors, no time beyond reason."""

import json

import pytest

from devplace.bench import Effort, bench, solve
from devplace.errors import InputError
from devplace.instances import Changes, load_instance
from devplace.placers import Budget
from tests.instances import files

ENOUGH = Effort(Budget(seconds=20), threads=1)
"""For what ends with a proof, long before."""
COUNTED = Effort(Budget(evaluations=50), threads=1)


def node(number, accelerator=1.0, cpu=2.0, size=1.0):
    """A node of a Tarnawski file."""
    return {"id": number, "fpgaLatency": accelerator, "cpuLatency": cpu, "size": size}


def solved(folder, nodes, edges=(), objective="", effort=ENOUGH, **head):
    """The row of a Tarnawski file."""
    keys = {"maxFPGAs": 2, "maxCPUs": 0, **head}
    links = [{"sourceId": a, "destId": b, "cost": cost} for a, b, cost in edges]
    text = files.tarnawski(nodes=nodes, edges=links, **keys)
    return solve(load_instance(files.write(folder, "net.json", text), objective), effort)


@pytest.mark.parametrize("objective", ["throughput", "latency"])
def test_halves_of_bytes_fit_together(tmp_path, objective):
    """Two nodes of half a byte share an accelerator of one byte."""
    nodes = [node(0, size=0.5), node(1, size=0.5)]
    row = solved(tmp_path, nodes, [(0, 1, 5.0)], objective, maxFPGAs=1, maxSizePerFPGA=1.0)
    assert (row.status, row.value) == ("optimal", 2.0)
    row = solved(tmp_path, nodes, [(0, 1, 5.0)], objective, maxSizePerFPGA=1.5)
    assert (row.status, row.value) == ("optimal", 2.0)


def test_times_below_a_picosecond_are_told_apart(tmp_path):
    """1.3 + 1.3 is shorter than 1.4 + 1.3, also in units of 10^-9 ms."""
    nodes = [node(k, time * 1e-9) for k, time in enumerate([1.3, 1.4, 1.3, 1.0])]
    row = solved(tmp_path, nodes, maxSizePerFPGA=9.0)
    assert row.status == "optimal"
    assert row.value == pytest.approx(2.6e-9)
    nodes = [node(k, 1e-11) for k in range(2)]
    row = solved(tmp_path, nodes, [(0, 1, 1e-13)], maxSizePerFPGA=9.0)
    assert (row.status, row.value) == ("optimal", pytest.approx(1.01e-11))


def test_sizes_beyond_64_bits(tmp_path):
    """They fit where they fit, and are told to be infeasible where they do not."""
    row = solved(tmp_path, [node(0, size=2.0**52), node(1)], maxSizePerFPGA=2.0**51)
    assert row.status == "infeasible"
    nodes = [node(0, size=1e20), node(1, size=1e20)]
    assert solved(tmp_path, nodes, maxFPGAs=1, maxSizePerFPGA=1e20).status == "infeasible"
    assert solved(tmp_path, nodes, maxSizePerFPGA=1e20).value == 1.0


def test_long_times_beside_short_ones(tmp_path):
    """Counting heavy nodes does not overflow where CPUs take almost no time."""
    nodes = [node(k, 1e8, 1e-9) for k in range(9)]
    row = solved(tmp_path, nodes, maxCPUs=300, maxSizePerFPGA=100.0)
    assert (row.status, row.value) == ("optimal", pytest.approx(1e-9))


def test_many_edges_of_one_node_are_one_cost(tmp_path):
    """An output that is dear is paid once, so that its edges need not add up to what fits."""
    nodes = [node(k) for k in range(20)]
    edges = [(0, k, 9e7) for k in range(1, 20)]
    row = solved(tmp_path, nodes, edges, maxSizePerFPGA=100.0)
    assert (row.status, row.value) == ("optimal", 20.0)


@pytest.mark.parametrize("effort", [ENOUGH, COUNTED], ids=["timed", "counted"])
@pytest.mark.parametrize("objective", ["throughput", "latency"])
def test_what_cannot_be_packed_is_infeasible(tmp_path, objective, effort):
    """Three nodes of 3 do not fit two accelerators of 5, though 9 is less than 10."""
    pytest.importorskip("ortools")
    nodes = [node(k, size=3.0) for k in range(3)]
    row = solved(tmp_path, nodes, (), objective, effort, maxSizePerFPGA=5.0)
    assert (row.status, row.value) == ("infeasible", None)


def test_costs_of_one_node_must_be_equal(tmp_path):
    """Also where they are small."""
    with pytest.raises(InputError, match="cost 1e-07 and 9e-07"):
        solved(tmp_path, [node(0), node(1), node(2)], [(0, 1, 1e-7), (0, 2, 9e-7)])


@pytest.mark.parametrize("objective", ["throughput", "latency"])
def test_a_million_devices(tmp_path, objective):
    """No more are looked at than there are nodes; more are refused."""
    nodes = [node(k) for k in range(3)]
    row = solved(tmp_path, nodes, (), objective, maxFPGAs=10**6, maxCPUs=10**6)
    assert (row.status, row.value) == ("optimal", 1.0)
    with pytest.raises(InputError, match="--devices must be from 0 to 1000000"):
        load_instance(tmp_path / "net.json", "", Changes(devices=10**6 + 1))
    with pytest.raises(InputError, match="maxFPGAs: must be from 0 to 1000000"):
        solved(tmp_path, nodes, maxFPGAs=10**6 + 1)


def test_nodes_on_cpus_keep_their_number(tmp_path):
    """CPUs come after all accelerators, also after those that stay empty."""
    nodes = [{**node(0), "supportedOnFpga": False}, node(1)]
    row = solved(tmp_path, nodes, maxFPGAs=50, maxCPUs=1)
    assert row.solution.device == (50, 0)


def test_doppler_with_more_devices_than_ops(tmp_path):
    """Idle devices cost no time, and have an empty order each."""
    path = files.write(tmp_path, "d.txt", "3\n\n\n\n5,6\n5,6\n4,1\n")
    row = solve(load_instance(path, "", Changes(devices=10**5)), COUNTED)
    assert (row.status, row.value) == ("optimal", 5.0)
    assert len(row.solution.order) == 10**5


def test_doppler_with_tiny_numbers(tmp_path):
    """Times of 10^-20 are no zeros."""
    path = files.write(tmp_path, "d.txt", "2\n\n\n\n2e-20,0\n3e-20,0\n")
    row = solve(load_instance(path, "", Changes(devices=1)), COUNTED)
    assert (row.status, row.value) == ("optimal", pytest.approx(5e-20, rel=1e-9))
    row = solve(load_instance(path, "", Changes(devices=2)), COUNTED)
    assert (row.status, row.value) == ("optimal", pytest.approx(3e-20, rel=1e-9))


def pipeline(folder, layers, seconds=20, **changes):
    """The row of a PipeDream file of layers in a row: ms, activation bytes, parameter bytes."""
    lines = [
        f"node{k} -- Layer -- forward_compute_time={ms}, backward_compute_time=0, "
        f"activation_size={act}, parameter_size={par}"
        for k, (ms, act, par) in enumerate(layers)
    ]
    lines += [f"\tnode{k} -- node{k + 1}" for k in range(len(layers) - 1)]
    path = files.write(folder, "p.txt", "\n".join(lines) + "\n")
    effort = Effort(Budget(seconds=seconds), threads=1)
    return solve(load_instance(path, "", Changes(**changes)), effort)


def test_pipedream_keeps_to_memory(tmp_path):
    """One copy per later device: the first of two stages holds one, the last none."""
    layers = [(4.0, 10.0, 90.0), (4.0, 20.0, 130.0)]
    fast = {"devices": 2, "bandwidth": 1.0}  # too slow for replicas
    assert pipeline(tmp_path, layers, **fast, memory_bytes=100).value == 0.004
    row = pipeline(tmp_path, layers, **fast, memory_bytes=99)
    assert (row.status, row.value) == ("optimal", 0.008)
    row = pipeline(tmp_path, layers, devices=2, memory_bytes=0)  # two replicas of one stage
    assert (row.status, row.value) == ("optimal", pytest.approx(0.004 + 4 * 220 / 2e9 / 2))


def test_pipedream_with_almost_no_bandwidth(tmp_path):
    """Replicas and cuts that would take for ever are not chosen, and do not overflow."""
    layers = [(4.0, 1e6, 1e9), (4.0, 1e6, 1e9)]
    row = pipeline(tmp_path, layers, devices=3, bandwidth=1e-5, edge_cost_scale=1.0)
    assert (row.status, row.value) == ("optimal", 0.008)


def test_pipedream_with_a_million_devices(tmp_path):
    """Fewer numbers of replicas are tried, and the value is not called optimal unless it is."""
    row = pipeline(tmp_path, [(4.0, 0.0, 0.0)] * 3, 0.3, devices=10**6)
    assert row.status == "feasible"
    assert 0.012 / 10**6 <= row.bound <= row.value <= 0.013 / 10**6 * 1.05


def without_edges(data):
    """No edges, and so nothing that the variants add to them."""
    data["edges"] = []
    for layer in data["nodes"]:
        for choices in layer["TMPCs"].values():
            for choice in choices:
                choice["syncTimeFw"], choice["syncTimeBw"] = {}, {}


def test_piper_with_layers_that_take_no_time(tmp_path):
    """The bound is 0 and only what is sent takes time: it still ends, with the best value."""
    data = json.loads(files.piper())
    for layer in data["nodes"]:
        layer["TMPCs"] = {"1": layer["TMPCs"]["1"][:1]}
        layer["TMPCs"]["1"][0]["timePerSample"] = 0.0
    data["maxMemoryPerDevice"], data["mbsInBatch"] = 21.0, 1  # not both in one stage
    data["nodes"][0]["TMPCs"]["1"][0] |= {"memoryUsageA": 0.0, "memoryUsageB": 11.0}
    row = solve(load_instance(files.write(tmp_path, "q.json", json.dumps(data))), ENOUGH)
    assert row.status == "infeasible"  # two stages hold two samples, a batch has one
    data["mbsInBatch"] = 2
    row = solve(load_instance(files.write(tmp_path, "q.json", json.dumps(data))), ENOUGH)
    assert (row.status, row.value) == ("optimal", pytest.approx(2 * 10 / 100))


def test_piper_in_other_units(tmp_path):
    """Memory in fractions of a unit, and times of 10^-20 s, change no choice."""
    data = json.loads(files.piper())
    plain = solve(load_instance(files.write(tmp_path, "q.json", json.dumps(data))), ENOUGH)
    data["maxMemoryPerDevice"] *= 2.0**-40
    data["bandwidth"] *= 2.0**60
    for layer in data["nodes"]:
        for choices in layer["TMPCs"].values():
            for choice in choices:
                choice["timePerSample"] *= 2.0**-60
                choice["memoryUsageA"] *= 2.0**-40
                choice["memoryUsageB"] *= 2.0**-40
    row = solve(load_instance(files.write(tmp_path, "q.json", json.dumps(data))), ENOUGH)
    assert (row.status, row.value) == ("optimal", plain.value * 2.0**-60)
    assert row.solution == plain.solution


def test_piper_with_a_degree_without_variants(tmp_path):
    """That degree is not to be had; the others are."""
    data = json.loads(files.piper())
    without_edges(data)
    plain = solve(load_instance(files.write(tmp_path, "q.json", json.dumps(data))), ENOUGH)
    data["nodes"][1]["TMPCs"]["2"] = []
    row = solve(load_instance(files.write(tmp_path, "q.json", json.dumps(data))), ENOUGH)
    assert (row.status, row.value) == ("optimal", plain.value)


def test_one_instance_without_an_expert_leaves_the_others():
    """Its row says why; where none has one, that is an error."""
    folder = files.PUBLIC / "tarnawski" / "throughput-inputs"
    given = [
        load_instance(folder / "OperatorGraphs" / "bert_l-3_inference.json"),
        load_instance(folder / "LayerGraphs" / "bert24_inference.json"),
    ]
    lost, found = bench(given, ENOUGH, "expert")
    assert (lost.status, lost.value) == ("unknown", None)
    assert "no expert" in lost.why
    assert found.value == pytest.approx(20.084, abs=1e-3)
    with pytest.raises(InputError, match="no expert"):
        list(bench(given[:1], ENOUGH, "expert"))
