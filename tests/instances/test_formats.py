"""Each format is read as it stands, and mistakes in it are named."""

import json

import pytest

from devplace.errors import DevplaceError, InputError
from devplace.instances import Changes, change_all, load_instance
from devplace.instances.tarnawski import parse_split
from tests.instances import files


def read(tmp_path, text, **options):
    """The instance in a file of that text."""
    return load_instance(files.write(tmp_path, "some.txt", text), **options)


def test_tarnawski_is_read_as_it_stands(tmp_path):
    """Ids are any numbers; output costs are per producer; nodes without a color stand alone."""
    found = read(tmp_path, files.tarnawski())
    assert [node.id for node in found.nodes] == [7, 3, 5]
    assert found.edges == ((0, 1), (1, 2))
    assert [node.output_ms for node in found.nodes] == [0.25, 0.5, 0.0]
    assert [node.can_accelerate for node in found.nodes] == [True, True, False]
    assert [node.color for node in found.nodes] == [None] * 3
    assert (found.num_accelerators, found.num_cpus, found.memory_bytes) == (2, 1, 100.0)
    assert (found.objective, found.unit) == ("throughput", "ms")


def test_tarnawski_objective_is_that_of_the_folder(tmp_path):
    """The content does not tell it, so the published folder or the caller does."""
    folder = tmp_path / "latency-inputs"
    folder.mkdir()
    path = files.write(folder, "net.json", files.tarnawski())
    assert load_instance(path).objective == "latency"
    assert load_instance(path).about.name == "latency-inputs/net"
    assert load_instance(path, "throughput").objective == "throughput"


def test_pipedream_is_read_as_it_stands(tmp_path):
    """Lists of sizes are summed, descriptions may hold anything, input layers count nothing."""
    found = read(tmp_path, files.PIPEDREAM)
    source, conv, linear = found.nodes
    assert (source.compute_ms, source.activation_bytes, source.is_input) == (0.0, 0.0, True)
    assert conv.name == "Conv2d(3, 4, kernel_size=(3, 3))"
    assert (conv.compute_ms, conv.activation_bytes, conv.parameter_bytes) == (3.0, 8.0, 40.0)
    assert linear.name == "Linear(in=4)"
    assert found.edges == ((0, 1), (1, 2))


def test_piper_is_read_as_it_stands(tmp_path):
    """Variants are kept by degree, with the bytes of each edge."""
    found = read(tmp_path, files.piper())
    assert [degree for degree, _ in found.nodes[0].variants] == [1, 2]
    assert dict(found.nodes[0].variants)[2][0].sync_out == ((1, 20.0),)
    assert found.edges == ((0, 1, 10.0),)
    assert (found.num_devices, found.batch, found.bandwidth) == (4, 8, 100.0)


def test_doppler_is_read_as_it_stands(tmp_path):
    """Inputs have no line of their own; kinds are optional; double edges are one."""
    text = files.DOPPLER.replace("0, 1, 0\n2, 2, 1", "0, 1, 0, 0\n2, 2, 1, 1")
    found = read(tmp_path, text)
    assert found.compute == (10, 20, 30)
    assert found.transfer == (40, 80, 120)
    assert found.kinds == ("MatMul", "MatMul", "")
    assert found.edges == ((0, 2), (1, 2), (0, 1))


def refusal(tmp_path, text):
    """The file's name if reading is refused with it, empty if it is read."""
    try:
        read(tmp_path, text)
    except InputError as error:
        return "some.txt" if "some.txt" in str(error) else f"no file is named: {error}"
    return ""


def broken_tarnawski():
    """Text of a broken file and what its error must name."""
    node = {"id": 1, "cpuLatency": 1.0, "fpgaLatency": 1.0}
    edge = {"sourceId": 7, "destId": 3, "cost": 0.25}
    yield files.tarnawski()[:200], "is not JSON", "(line"
    yield files.tarnawski(nodes=[]), "nodes", "there are none"
    yield files.tarnawski(nodes=[node, node]), "nodes[1].id", "occurs twice"
    yield files.tarnawski(nodes=[{**node, "fpgaLatency": "fast"}]), "$.nodes[0].fpgaLatency", "str"
    yield (
        files.tarnawski(nodes=[{**node, "fpgaLatency": -1}], edges=[]),
        "nodes[0].fpgaLatency",
        "-1",
    )
    yield files.tarnawski(nodes=[{**node, "size": 1e300}], edges=[]), "nodes[0].size", "1e+300"
    yield files.tarnawski(nodes=[node], edges=[edge]), "edges[0].sourceId", "no node 7"
    yield files.tarnawski(maxFPGAs=-1), "maxFPGAs", "-1"
    yield files.tarnawski(maxFPGAs=1.5), "$.maxFPGAs", "int"
    yield files.tarnawski(nodes=[{**node, "id": 10**400}], edges=[]), "$.nodes[0].id", "int"
    uneven = [edge, {**edge, "destId": 5, "cost": 0.5}]
    yield files.tarnawski(edges=uneven), "edges[1].cost", "0.25 and 0.5"
    circle = [edge, {"sourceId": 3, "destId": 7, "cost": 1}]
    yield files.tarnawski(edges=circle), "edges", "cycle"
    loop = [{"sourceId": 3, "destId": 3, "cost": 1}]
    yield files.tarnawski(edges=loop), "node 3", "cycle"
    yield json.dumps({"maxFPGAs": 1}), "missing required field", "maxSizePerFPGA"
    yield '{"maxFPGAs": NaN}', "is not JSON", "line 1"


def broken_pipedream():
    """As above."""
    text = files.PIPEDREAM
    yield text.replace("=1.0", "=fast"), "line 2", "'fast'"
    yield text.replace("parameter_size=16.0", ""), "line 3", "no parameter_size"
    yield text.replace("node2 -- node3", "node2 -- node9"), "line 6", "'node9'"
    yield text.replace("node3 -- Linear", "node2 -- Linear"), "line 3", "node2 is given twice"
    yield text.replace("\tnode1 -- node2", "what is this"), "line 5", "'what is this'"
    yield text.replace("=2.0", "=-2.0"), "line 2, backward_compute_time", "-2.0"
    yield text + "\tnode3 -- node2\n", "edges", "cycle"


def broken_piper():
    """As above."""
    yield files.piper(maxDevices=0), "maxDevices", "0"
    yield files.piper(bandwidth=0), "bandwidth", "above 0"
    yield files.piper(mbsInBatch=0), "mbsInBatch", "0"
    yield files.piper(mbsInBatch=10**400), "$.mbsInBatch", "<= 9223372036854775807"
    lone = {"id": 0, "TMPCs": {"1": [files.variant()]}}
    yield files.piper(nodes=[lone, {"id": 1, "TMPCs": {}}]), "syncTimeBw", "edge with node 1"
    yield files.piper(nodes=[lone], edges=[]).replace('"1"', '"one"'), "'one'", "number of devices"
    twice = {"id": 0, "TMPCs": {"1": [files.variant(), files.variant()]}}
    yield files.piper(nodes=[twice], edges=[]), "nodes[0].TMPCs['1']", "unique"
    stray = {"id": 0, "TMPCs": {"1": [files.variant(sync_in={"9": 1})]}}
    yield files.piper(nodes=[stray], edges=[]), "syncTimeFw", "'9'"
    yield files.piper(nodes=[{"id": 0, "TMPCs": {}}], edges=[]), "nodes[0].TMPCs", "no variant"


def broken_doppler():
    """As above."""
    text = files.DOPPLER
    yield text.replace("5\n", "6\n", 1), "line 1", "2 inputs and 3 ops"
    yield text.replace("2, 2, 1", "2, 2"), "line 4", "2 consumers for 3 producers"
    yield text.replace("2, 2, 1", "2, 2, 8"), "line 4", "no op 8"
    yield text.replace("20,80", "much,80"), "line 6", "'much'"
    yield text.replace("20,80,MatMul", "20"), "line 6", "'20'"
    yield text.replace("20,80", "20,-80"), "line 6, transfer", "-80"
    yield text.replace("2, 2, 1", "2, 0, 1"), "edges", "cycle"
    yield text.replace("0, 1,\n", "0, x\n"), "line 2", "'x'"
    yield "5\n0\n", "line 2", "ends before"


def broken_others():
    """As above, for what is of no format."""
    yield "", "no instance file", "it is empty"
    yield "hello", "no instance file", "'hello'"
    yield "{}", "no instance file", "tarnawski"
    yield "[1, 2]", "no instance file", "[1, 2]"
    yield '{"fpgas": [], "cpus": []}', "a split of an instance", "Give the latter"


BROKEN = [
    *broken_tarnawski(),
    *broken_pipedream(),
    *broken_piper(),
    *broken_doppler(),
    *broken_others(),
]


@pytest.mark.parametrize(("text", "where", "what"), BROKEN)
def test_mistakes_are_named(tmp_path, text, where, what):
    """The error names file, place and value."""
    with pytest.raises(InputError) as caught:
        read(tmp_path, text)
    message = str(caught.value)
    assert "some.txt" in message
    assert where in message
    assert what in message


@pytest.mark.parametrize(
    "text", [files.tarnawski(), files.PIPEDREAM, files.piper(), files.DOPPLER], ids=len
)
def test_damage_never_ends_in_a_traceback(tmp_path, text):
    """A file cut anywhere, or with any character replaced, is read or refused by name."""
    for at in range(0, len(text), 3):
        for damaged in (text[:at], text[:at] + "x" + text[at + 1 :], text[:at] + text[at + 9 :]):
            assert refusal(tmp_path, damaged) in ("", "some.txt")


@pytest.mark.parametrize("data", [b"\xff\xfe\x00", b"\x00" * 9, b"5" * 5000, b"{" * 5000])
def test_binary_and_huge_numbers_are_refused(tmp_path, data):
    """What is no text, or no number that fits, is an input error."""
    path = tmp_path / "some.bin"
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"some\.bin"):
        load_instance(path)


def test_missing_file_and_folder_are_named(tmp_path):
    """A path that is no file is told."""
    with pytest.raises(InputError, match="No such file"):
        load_instance(tmp_path / "none.json")
    with pytest.raises(InputError, match="is a folder"):
        load_instance(tmp_path)


def test_changes_apply(tmp_path):
    """Devices, CPUs, memory and edge costs are replaced, and the instance says so."""
    changes = Changes(devices=5, cpus=0, memory_bytes=60, edge_cost_scale=1000.0)
    found = read(tmp_path, files.tarnawski(), changes=changes)
    assert (found.num_accelerators, found.num_cpus, found.memory_bytes) == (5, 0, 60)
    assert found.nodes[0].output_ms == 250.0
    assert found.about.changed == "--devices 5 --cpus 0 --memory 60 --edge-cost-scale 1000.0"
    found = read(tmp_path, files.DOPPLER, changes=Changes(devices=2, edge_cost_scale=0.5))
    assert (found.num_devices, found.transfer) == (2, (20, 40, 60))
    found = read(tmp_path, files.piper(), changes=Changes(memory_bytes=5, bandwidth=7.0))
    assert (found.memory_bytes, found.bandwidth) == (5, 7.0)
    found = read(tmp_path, files.PIPEDREAM, changes=Changes(devices=8, edge_cost_scale=1.0))
    assert (found.num_devices, found.edge_cost_scale) == (8, 1.0)


@pytest.mark.parametrize(
    ("text", "changes", "what"),
    [
        (files.DOPPLER, Changes(memory_bytes=1), "--memory"),
        (files.DOPPLER, Changes(cpus=1), "--cpus"),
        (files.tarnawski(), Changes(bandwidth=1.0), "--bandwidth"),
        (files.tarnawski(), Changes(edge_cost_scale=-1.0), "-1.0"),
        (files.tarnawski(), Changes(edge_cost_scale=float("nan")), "nan"),
        (files.piper(), Changes(devices=0), "--devices 0"),
        (files.piper(), Changes(bandwidth=0.0), "--bandwidth"),
    ],
)
def test_changes_that_make_no_sense_are_refused(tmp_path, text, changes, what):
    """A number the instance does not have, or out of range, is named."""
    with pytest.raises(InputError, match=what):
        read(tmp_path, text, changes=changes)


def test_many_instances_take_what_means_something(tmp_path):
    """A suite of several formats is changed where it can be; what means nothing to any is told."""
    tarnawski, doppler = read(tmp_path, files.tarnawski()), read(tmp_path, files.DOPPLER)
    changes = Changes(devices=3, memory_bytes=77)
    first, second = change_all([tarnawski, doppler], changes)
    assert (first.num_accelerators, first.memory_bytes) == (3, 77)
    assert (second.num_devices, second.about.changed) == (3, "--devices 3")
    with pytest.raises(InputError, match="--bandwidth"):
        change_all([tarnawski, doppler], Changes(bandwidth=1.0))


def test_objective_of_other_formats_cannot_be_chosen(tmp_path):
    """Only Tarnawski files leave it open."""
    with pytest.raises(InputError, match="makespan, not latency"):
        read(tmp_path, files.DOPPLER, objective="latency")
    with pytest.raises(InputError, match="Unknown objective"):
        read(tmp_path, files.DOPPLER, objective="cost")


def test_splits_are_checked(tmp_path):
    """A split names each node once, on devices there are."""
    instance = read(tmp_path, files.tarnawski())
    split = {"fpgas": [{"nodes": [3]}, {"nodes": [7]}], "cpus": [{"nodes": [5]}]}
    assert parse_split(json.dumps(split), "split", instance) == (1, 0, 2)
    for change, what in (
        ({"cpus": []}, "node 5 is on no device"),
        ({"cpus": [{"nodes": [5, 3]}]}, "node 3 is listed twice"),
        ({"cpus": [{"nodes": [5, 8]}]}, "node 8 is not in"),
        ({"cpus": [{"nodes": [5]}, {"nodes": []}]}, "2 and 2 for 2 and 1"),
    ):
        with pytest.raises(DevplaceError, match=what):
            parse_split(json.dumps({**split, **change}), "split", instance)
