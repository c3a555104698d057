"""Machine files: exact round trips, and errors with file, line and field."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devplace.errors import MachineError
from devplace.machine import Device, Link, Machine, Pool, load_machine, presets, toml
from devplace.machine.machine import RATE_DTYPES
from devplace.machine.quantity import (
    BANDWIDTHS,
    FLOP_RATES,
    SIZES,
    TIMES,
    format_quantity,
    parse_quantity,
)
from devplace.machine.toml_lines import field_lines

GOOD = """\
name = "pair"

[sources]
links = "measured"

[[pools]]
name = "ram"
memory = "64 GiB"

[[devices]]
name = "cpu:0"
pool = "ram"
memory = "64 GiB"
flops = "1 TFLOP/s"
bandwidth = "50 GB/s"

[[devices]]
name = "cuda:0"
memory = "12GB"
limit = "11 GB"
bandwidth = "200 GB/s"
launch_gap = "2.5us"
unsupported_ops = ["aten.linalg*"]
[devices.flops]
float32 = "4.29 TFLOP/s"
float16 = 8000000000000

[[links]]
src = "cpu:0"
dst = "cuda:0"
both = true
bandwidth = "12 GB/s"
latency = "5us"
"""


def test_reads_every_form():
    """Texts with units, whole numbers, sub-tables, limits, defaults and `both` are understood."""
    machine = toml.loads(GOOD)
    cpu, gpu = machine.devices
    assert (machine.name, machine.sources) == ("pair", {"links": "measured"})
    assert machine.pools == (Pool(name="ram", memory_bytes=64 * 2**30),)
    assert (cpu.kind, cpu.pool, cpu.flops_per_s) == ("cpu", "ram", {"float32": 10**12})
    assert gpu == Device(
        name="cuda:0",
        kind="gpu",
        memory_bytes=12 * 10**9,
        reserve_bytes=10**9,
        flops_per_s={"float32": 4_290_000_000_000, "float16": 8 * 10**12},
        bytes_per_s=200 * 10**9,
        launch_gap_ns=2_500,
        unsupported_ops=("aten.linalg*",),
    )
    there, back = machine.links
    assert there == Link(src="cpu:0", dst="cuda:0", bytes_per_s=12 * 10**9, latency_ns=5_000)
    assert (back.src, back.dst, back.bytes_per_s) == ("cuda:0", "cpu:0", 12 * 10**9)


def test_record_names_and_plain_numbers_work_too():
    """`bytes_per_s = 12000000000` is the same as `bandwidth = "12 GB/s"`."""
    text = GOOD.replace('bandwidth = "12 GB/s"', "bytes_per_s = 12_000_000_000")
    assert toml.loads(text) == toml.loads(GOOD)


@pytest.mark.parametrize("name", presets.NAMES)
def test_presets_round_trip(name, tmp_path):
    """Every preset written as a file reads back equal."""
    machine = presets.get(name)
    file = tmp_path / "machine.toml"
    file.write_text(toml.dumps(machine), encoding="utf-8")
    assert toml.load(file) == machine
    assert load_machine(file) == machine


SIZE = st.integers(1, 2**62)
TIME = st.integers(0, 10**15 - 1)  # the limit of a machine description
WORD = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)


@given(
    *(SIZE, SIZE, TIME, TIME, SIZE, st.booleans(), WORD, st.sampled_from(RATE_DTYPES[1:])),
    st.dictionaries(WORD, WORD, max_size=2),
)
def test_any_machine_round_trips(memory, speed, gap, reserve, rate, usable, word, dtype, sources):
    """Whatever the numbers and texts, writing and reading gives the same machine."""
    device = Device(
        name=f"cuda:{word}",
        kind="gpu",
        memory_bytes=memory,
        flops_per_s={"float32": speed, dtype: rate},
        bytes_per_s=rate,
        model=word,
        reserve_bytes=reserve,
        launch_gap_ns=gap,
        unsupported_ops=(word,),
    )
    host = Device(
        name="cpu:0", kind="cpu", memory_bytes=1, flops_per_s={"float32": 1}, bytes_per_s=1
    )
    links = (
        Link(src=device.name, dst="cpu:0", bytes_per_s=speed, latency_ns=gap, channels=(word,)),
        Link(src="cpu:0", dst=device.name, bytes_per_s=rate),
    )
    third = Link(src="cpu:1", dst="cpu:0", bytes_per_s=rate, usable=usable)
    more = Device(
        name="cpu:1", kind="cpu", memory_bytes=1, flops_per_s={"float32": 1}, bytes_per_s=1
    )
    ways = (
        Link(src="cpu:0", dst="cpu:1", bytes_per_s=1),
        Link(src=device.name, dst="cpu:1", bytes_per_s=1),
        Link(src="cpu:1", dst=device.name, bytes_per_s=1),
    )
    machine = Machine(word, (device, host, more), (*links, third, *ways), (), sources)
    assert toml.loads(toml.dumps(machine)) == machine


WRONG = [
    ('"12 GB/s"', '"-3 GB/s"', "m.toml:32: links[0].bandwidth must be positive, got -3 GB/s. Meas"),
    ('"12 GB/s"', "0", "m.toml:32: links[0].bandwidth must be positive, got 0 B/s"),
    ('"12 GB/s"', "nan", "m.toml:32: links[0].bandwidth must be positive, got nan"),
    ('"12 GB/s"', '"nan GB/s"', "m.toml:32: links[0].bandwidth must be positive, got nan"),
    ('"12 GB/s"', '"12 GX/s"', "m.toml:32: links[0].bandwidth has an unknown unit 'GX/s'"),
    ('"12 GB/s"', '"12 GB"', "m.toml:32: links[0].bandwidth has an unknown unit 'GB'"),
    ('"12 GB/s"', '"fast"', "m.toml:32: links[0].bandwidth must be a number with a unit"),
    ('"12 GB/s"', "true", "m.toml:32: links[0].bandwidth must be a number with a unit, got True"),
    ('"12 GB/s"', '"0.001 B/s"', "m.toml:32: links[0].bandwidth must be at least 1 B/s"),
    ('latency = "5us"', 'latency = "-5us"', "m.toml:33: links[0].latency must be zero or more"),
    ('bandwidth = "12 GB/s"\n', "", "m.toml:28: links[0] needs a field 'bandwidth'"),
    ('bandwidth = "200 GB/s"\n', "", "m.toml:17: devices[1] (cuda:0) needs a field 'bandwidth'"),
    ('flops = "1 TFLOP/s"\n', "", "m.toml:10: devices[0] (cpu:0) needs a field 'flops'"),
    ('"4.29 TFLOP/s"', "0", "m.toml:25: devices[1].flops.float32 must be positive, got 0"),
    ("float16 = ", "bf16 = ", "m.toml:26: devices[1].flops.bf16 has a rate of an unknown dtype"),
    ("float32 = ", "float23 = ", "m.toml:24: devices[1].flops must have a 'float32' rate"),
    ('memory = "12GB"', "memory = -5", "m.toml:19: devices[1].memory must be positive, got -5 B"),
    ('memory = "12GB"', "memroy = 5", "m.toml:19: unknown field devices[1].memroy. Did you mean"),
    ('limit = "11 GB"', 'limit = "13 GB"', "m.toml:20: devices[1].limit must be at most its mem"),
    ('memory = "12GB"', 'memory = "12"', "m.toml:19: devices[1].memory is a text without a unit"),
    ('limit = "11 GB"', 'limit="1 GB"\nreserve="1 GB"', "m.toml:20: devices[1] has both 'limit'"),
    ('limit = "11 GB"', "streams = 0", "m.toml:20: devices[1].streams must be positive, got 0"),
    ('limit = "11 GB"', "streams = true", "m.toml:20: devices[1].streams must be a whole number"),
    ('limit = "11 GB"', 'kind = "tpu"', "m.toml:20: devices[1].kind must be 'cpu' or 'gpu'"),
    ('limit = "11 GB"', "model = 3", "m.toml:20: devices[1].model must be a text, got 3"),
    ('limit = "11 GB"', "memory_bytes=1", "m.toml:20: devices[1].memory_bytes is given twice"),
    ('name = "cuda:0"', 'name = "npu:0"', "m.toml:17: devices[1] (npu:0) needs a field 'kind'"),
    ('name = "cuda:0"', 'name = "cpu:0"', "m.toml:18: devices[1].name must be unique: 'cpu:0'"),
    ('pool = "ram"', 'pool = "rum"', "m.toml:12: unknown pool 'rum' in devices[0].pool. Did you"),
    ('dst = "cuda:0"', 'dst = "cuda:1"', "m.toml:30: unknown device 'cuda:1' in links[0].dst. Did"),
    ('dst = "cuda:0"', 'dst = "cpu:0"', "m.toml:30: links[0] must join two devices, got 'cpu:0'"),
    ("both = true", "both = 1", "m.toml:31: links[0].both must be true or false, got 1"),
    ("both = true", "", "m.toml: Devices must reach each other"),
    ("both = true", 'channels = "x"', "m.toml:31: links[0].channels must be a list of texts"),
    ("[[pools]]", "[[pols]]", "m.toml:6: unknown field 'pols'. Did you mean 'pools'?"),
    ("[[pools]]", "[pools]", "m.toml:6: pools must be written as [[pools]] entries"),
    ('links = "measured"', "links = 3", "m.toml:3: sources must be a table of texts"),
    ('name = "pair"', "name = 3", "m.toml:1: name must be a text, got 3"),
    ('name = "pair"', "name = pair", "m.toml:1: not valid TOML"),
    ('latency = "5us"', 'latency = "5us', "m.toml:33: not valid TOML"),
]


@pytest.mark.parametrize(("old", "new", "message"), WRONG, ids=[row[2] for row in WRONG])
def test_wrong_files_name_line_and_field(old, new, message):
    """A mistake is answered with file, line, field, value and the next step."""
    assert old in GOOD
    with pytest.raises(MachineError, match=f"^{re.escape(message)}"):
        toml.loads(GOOD.replace(old, new, 1), "m.toml")


def test_missing_file(tmp_path):
    """A file that is not there or not text is a plain error with its name."""
    with pytest.raises(MachineError, match=r"Cannot read machine file .*No such file"):
        load_machine(tmp_path / "none.toml")
    binary = tmp_path / "b.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(MachineError, match="not UTF-8"):
        load_machine(binary)


def test_name_defaults_to_the_file():
    """Without a name the machine is called like its file."""
    assert toml.loads(GOOD.replace('name = "pair"\n', "", 1), "dir/box.toml").name == "box"


@given(st.integers(1, 2**62), st.sampled_from([SIZES, BANDWIDTHS, FLOP_RATES, TIMES]))
def test_quantities_round_trip(value, units):
    """Formatting never loses a unit of the base."""
    assert parse_quantity(format_quantity(value, units), units, "x") == value


def test_lines_of_sub_tables():
    """Fields of a sub-table belong to the entry above it."""
    lines = field_lines(GOOD)
    assert lines["devices", 1, ""] == 17
    assert lines["devices", 1, "flops"] == 24
    assert lines["devices", 1, "flops.float16"] == 26
    assert lines["links", 0, "latency"] == 33


def test_a_byte_order_mark_is_no_content(tmp_path):
    """A file as some editors save it is read like any other."""
    file = tmp_path / "m.toml"
    file.write_text(GOOD, encoding="utf-8-sig")
    assert toml.load(file) == toml.loads(GOOD)


def test_a_field_of_the_wrong_form_is_named_with_its_line():
    """Also where a table was expected; and nothing known is told as that."""
    with pytest.raises(MachineError, match=r"^m\.toml:2: devices must be written as"):
        toml.loads('name = "x"\ndevices = 3\n', "m.toml")
    text = '[[links]]\nsrc = "a"\ndst = "b"\nbandwidth = 1\n'
    with pytest.raises(MachineError, match=r"unknown device 'a' .* Known: none is given"):
        toml.loads(text, "m.toml")
