"""Tarnawski's throughput objective by hand, and against published values."""

import dataclasses

import pytest

from devplace.instances import load_instance
from devplace.instances.records import About, LoadInstance, LoadNode
from devplace.instances.tarnawski import parse_split
from devplace.verify import verify_throughput
from tests.instances.files import PUBLIC

LAYERS = PUBLIC / "tarnawski" / "throughput-inputs" / "LayerGraphs"


def node(number, accelerator, cpu, size=1.0, output=0.0, can=True, color=None):
    """A node of a small instance."""
    return LoadNode(number, f"n{number}", accelerator, cpu, size, output, can, False, color)


DIAMOND = LoadInstance(
    About("diamond", "diamond.json"),
    (
        node(0, 1.0, 10.0, output=0.25),
        node(1, 2.0, 20.0, output=0.5, color=4),
        node(2, 3.0, 30.0, output=0.75),
        node(3, 4.0, 40.0, color=4),
    ),
    ((0, 1), (0, 2), (1, 3), (2, 3)),
    2,
    1,
    2.0,
    "throughput",
)


def test_loads_by_hand():
    """Each outside producer counts once at its reader, each own one once at home."""
    # accelerator 0: 1 + 3, sends n0 (0.25) and n2 (0.75); accelerator 1: 2 + 4, takes n0 and n2
    verdict = verify_throughput(DIAMOND, (0, 1, 0, 1))
    assert verdict.value == 7.0
    assert verdict.is_valid
    assert verdict.memory_bytes == (2.0, 2.0)
    # the CPU's load is its nodes' time alone
    assert verify_throughput(DIAMOND, (0, 2, 0, 2)).value == 60.0


def test_broken_rules_are_named():
    """Memory, support, colors and devices."""
    assert "apart from the others of color 4" in verify_throughput(DIAMOND, (0, 1, 1, 0)).broken[0]
    assert "holds 4 bytes" in verify_throughput(DIAMOND, (0, 0, 0, 0)).broken[0]
    assert "on device 3 of 3" in verify_throughput(DIAMOND, (0, 1, 0, 3)).broken[0]
    assert "3 devices are given for 4" in verify_throughput(DIAMOND, (0, 1, 0)).broken[0]
    nodes = (dataclasses.replace(DIAMOND.nodes[0], can_accelerate=False), *DIAMOND.nodes[1:])
    broken = verify_throughput(dataclasses.replace(DIAMOND, nodes=nodes), (0, 1, 0, 1)).broken
    assert "only a CPU runs it" in broken[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [("bert24_inference", 20.084), ("bert24_training", 49.4049), ("resnet50_inference", 43.9183)],
)
def test_experts_have_their_published_values(name, value):
    """The human experts' splits are worth what the authors' programs say, to the last digit."""
    instance = load_instance(LAYERS / f"{name}.json")
    path = PUBLIC / "tarnawski" / "human-experts" / f"{name}_expert.json"
    device = parse_split(path.read_text(), str(path), instance)
    digits = len(str(value).partition(".")[2])
    assert round(verify_throughput(instance, device).value, digits) == value


@pytest.mark.parametrize(
    ("name", "value", "fits"),
    [
        ("bert24_inference", 92.406, True),
        ("bert24_training", 217.813, True),
        ("resnet50_inference", 201.45, False),
    ],
)
def test_one_accelerator_has_its_published_value(name, value, fits):
    """Everything on one: the sum of all times, and out of memory where that is published."""
    instance = load_instance(LAYERS / f"{name}.json")
    verdict = verify_throughput(instance, (0,) * len(instance.nodes))
    assert verdict.value == pytest.approx(value, abs=1e-9)
    assert verdict.is_valid == fits
