"""Theme X: unequal devices and links."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from tests.user_threads.helpers import chain, layers_on, where
from tests.user_threads.machines import m2skew

from devplace.cost import CostTable
from devplace.errors import MachineError
from devplace.machine import Device, Machine
from devplace.placers import Search, place
from devplace.problem import Problem
from devplace.testing import hand_machine, hand_problem, tiny_problems


def test_s27_the_faster_device_is_filled_first() -> None:
    """A chain that takes 60 % of the small fast device stays there; a larger one fills it and
    only the rest goes to the slow one."""
    fits = place(hand_problem(chain([10] * 6, "10,40"), m2skew(100, 1000)), Search(), "2000ev")
    assert set(where(fits).values()) == {"cuda:0"}
    larger = place(hand_problem(chain([10] * 15, "10,40"), m2skew(100, 1000)), Search(), "4000ev")
    assert len(layers_on(larger, "cuda:0")) == 9  # 9 x 10 bytes and the activations


def test_s28_unequal_memory_is_used_to_the_full() -> None:
    """Limits 3 and 5, a model of 7.5 in 30 equal layers: 10 to 12 layers on the first device."""
    machine = hand_machine({"cuda:0": 3020, "cuda:1": 5020}, bytes_per_ns=100)
    result = place(hand_problem(chain([250] * 30), machine), Search(), "4000ev")
    first, second = layers_on(result, "cuda:0"), layers_on(result, "cuda:1")
    assert 10 <= len(first) <= 12
    assert len(first) + len(second) == 30
    assert (result.timeline.peak_bytes <= [3020, 5020]).all()


def test_s30_a_slow_pair_is_avoided() -> None:
    """Four stages that need four devices, one pair of which is slow: no tensor crosses it."""
    pairs = {("cuda:0", "cuda:1"): 0.01, ("cuda:1", "cuda:0"): 0.01}
    machine = hand_machine({f"cuda:{k}": 60 for k in range(4)}, bytes_per_ns=10, slow=pairs)
    result = place(hand_problem(chain([50] * 4, "100", 4), machine), Search(), "3000ev")
    assert len(set(where(result).values())) == 4
    assert not [t for t in result.timeline.transfers if {t.src, t.dst} == {0, 1}]


@pytest.mark.parametrize("name", ["unequal", "backfill", "shared channel"])
def test_s31_the_order_of_devices_does_not_matter(name: str) -> None:
    """With devices listed in any order the predicted step is the same."""
    problem = next(tiny.problem for tiny in tiny_problems() if tiny.name == name)
    steps = set()
    for order in itertools.permutations(range(len(problem.machine.devices))):
        machine = replace(problem.machine, devices=tuple(problem.machine.devices[d] for d in order))
        costs = CostTable(np.ascontiguousarray(problem.costs.compute_ns[:, order]), "turned")
        turned = Problem(problem.graph, machine, costs)
        steps.add(place(turned, Search(), "1500ev").step_ns)
    assert len(steps) == 1


GOOD = hand_machine({"cuda:0": 100, "cuda:1": 100})


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"flops_per_s": {"float32": 0}}, r"'cuda:0': flops_per_s.float32 must be positive, got 0"),
        ({"flops_per_s": {"float32": math.nan}}, r"'cuda:0': flops_per_s.float32 .* got nan"),
        ({"flops_per_s": {}}, r"'cuda:0': flops_per_s must have a 'float32' rate"),
        ({"bytes_per_s": 0}, r"'cuda:0': bytes_per_s must be positive, got 0 bytes/s"),
        ({"bytes_per_s": math.inf}, r"'cuda:0': bytes_per_s must be positive, got inf"),
        ({"memory_bytes": -1}, r"'cuda:0': memory_bytes must be positive, got -1 bytes"),
        ({"streams": 0}, r"'cuda:0': streams must be positive"),
    ],
)
def test_s32_missing_or_senseless_speeds_name_device_and_field(
    changes: dict[str, object], part: str
) -> None:
    """Speed 0, missing, not a number, negative memory: each refused with device and field."""
    device: Device = msgspec.structs.replace(GOOD.devices[0], **changes)
    with pytest.raises(MachineError, match=part):
        Machine("wrong", (device, GOOD.devices[1]), GOOD.links)


def test_s32_a_link_without_speed_is_refused() -> None:
    """A link of bandwidth 0 names its ends and the field."""
    link = msgspec.structs.replace(GOOD.links[0], bytes_per_s=0)
    with pytest.raises(MachineError, match="Link cuda:0 -> cuda:1: bytes_per_s must be positive"):
        Machine("wrong", GOOD.devices, (link, GOOD.links[1]))
