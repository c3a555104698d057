"""Plans as files: kept whole, refused when broken, recomputed when edited."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from devplace.errors import PlanError, PlanMismatchError
from devplace.machine import Pool
from devplace.placers import Budget, Heft, place
from devplace.plan import Plan, load_plan
from devplace.plan.plan import machine_fingerprint
from devplace.problem import Problem
from devplace.report import device_map
from devplace.testing import hand_machine, hand_problem

TEXT = """
    w = parameter bytes=30 module=fc
    x = input bytes=1
    y = f(x, w) bytes=4 ns=10 stage=forward module=fc
    v = view(y) bytes=4
    g = f_back(v) bytes=1 ns=10 stage=backward module=fc
    z = other(x) bytes=1 ns=15 result=output module=side
    z2 = other(z) bytes=1 ns=2 result=output module=side
    w2 = sgd(w, g) bytes=30 ns=5 stage=update replaces=w module=fc
"""
MACHINE = {"gpu:0": 100, "gpu:1": 100}


def make_problem(text: str = TEXT, memory: dict[str, int] | None = None) -> Problem:
    """The problem of these tests, or one that differs."""
    return hand_problem(text, hand_machine(memory or MACHINE))


@pytest.fixture
def plan() -> Plan:
    """A plan that uses both devices."""
    return place(make_problem(), Heft(), Budget(evaluations=10)).plan


def written(plan: Plan, path: Path, **changes: Any) -> Path:
    """The plan's file with some fields changed; None removes a field."""
    data = json.loads(plan.to_json())
    for name, value in changes.items():
        if value is None:
            del data[name]
        else:
            data[name] = value
    path.write_text(json.dumps(data))
    return path


def test_a_saved_plan_loads_as_it_was(plan: Plan, tmp_path: Path) -> None:
    """Save and load give an equal plan that its own problem accepts and prices the same."""
    plan.save(tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    assert loaded == plan
    loaded.check(make_problem())
    assert loaded.timeline(make_problem()).makespan_ns == plan.predicted.step_ns
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_two_plans_for_the_same_are_equal_and_others_are_not(plan: Plan) -> None:
    """Equality is by content."""
    assert place(make_problem(), Heft(), Budget(evaluations=10)).plan == plan
    turned = dataclasses.replace(plan, placement=tuple(1 - d for d in plan.placement))
    assert turned != plan


def test_links_and_pipes_are_written_to_not_replaced(plan: Plan, tmp_path: Path) -> None:
    """Saving through a symbolic link changes its target; a pipe or device stays what it is."""
    (tmp_path / "there.json").write_text("old")
    (tmp_path / "link.json").symlink_to("there.json")
    plan.save(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert load_plan(tmp_path / "there.json") == plan
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    plan.save(tmp_path / "pipe")
    assert os.read(reader, 15) == plan.to_json()[:15]
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo()


def test_a_truncated_file_is_refused(plan: Plan, tmp_path: Path) -> None:
    """Cut anywhere, a plan is a PlanError, never another plan."""
    whole = plan.to_json()
    path = tmp_path / "plan.json"
    for length in range(0, len(whole) - 1, 50):
        path.write_bytes(whole[:length])
        with pytest.raises(PlanError, match="not a whole devplace plan"):
            load_plan(path)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[]", b"null", b"{}", b'"plan"', b"{" * 5000])
def test_what_is_no_plan_is_refused(content: bytes, tmp_path: Path) -> None:
    """Other files are a PlanError that names the file."""
    path = tmp_path / "other.json"
    path.write_bytes(content)
    with pytest.raises(PlanError, match=r"other\.json"):
        load_plan(path)


FIELDS = (
    "format",
    "version",
    "request",
    "fingerprints",
    "predicted",
    "devices",
    "ops",
    "placement",
    "priority",
    "order",
)


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_is_needed(plan: Plan, tmp_path: Path, name: str) -> None:
    """A plan with a field removed is refused."""
    with pytest.raises(PlanError, match=name):
        load_plan(written(plan, tmp_path / "p.json", **{name: None}))


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("value", [7.5, "text", [[]], {"a": []}, True], ids=repr)
def test_every_field_has_a_type(plan: Plan, tmp_path: Path, name: str, value: Any) -> None:
    """A field of another type is refused (a request may hold anything, a format any text)."""
    path = written(plan, tmp_path / "p.json", **{name: value})
    if name == "request" and isinstance(value, dict):
        assert load_plan(path).request == value
        return
    with pytest.raises(PlanError):
        load_plan(path)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"format": "other plan"}, "format"),
        ({"version": 2}, "version 2"),
        ({"extra": 1}, "extra"),
        ({"placement": [0] * 7}, "7 for 8 ops"),
        ({"priority": [0] * 9}, "9 for 8 ops"),
        ({"priority": [2**70] * 8}, "priority"),
        ({"placement": [0, 0, 0, 0, 0, 0, 0, 2]}, "'w2' is on device 2"),
        ({"placement": [0, 0, 0, 0, 0, 0, 0, -1]}, "'w2' is on device -1"),
        ({"order": {"gpu:0": []}}, "one list per device"),
        ({"order": {"gpu:0": [99], "gpu:1": []}}, "op 99"),
        ({"order": {"gpu:0": [-1], "gpu:1": []}}, "op -1"),
        ({"devices": ["gpu:0"]}, "device"),
        ({"devices": ["gpu:0", "gpu:0"]}, "device"),
    ],
)
def test_edits_that_do_not_hang_together_are_refused(
    plan: Plan, tmp_path: Path, changes: dict[str, Any], part: str
) -> None:
    """Each broken edit is a PlanError that says what is wrong, when the file is read."""
    with pytest.raises(PlanError, match=part):
        load_plan(written(plan, tmp_path / "p.json", **changes))


def test_a_device_changed_in_the_placement_only_is_refused(plan: Plan, tmp_path: Path) -> None:
    """Placement and order must agree."""
    placement = list(plan.placement)
    placement[5] = 1 - placement[5]
    with pytest.raises(PlanError, match="not placed there"):
        load_plan(written(plan, tmp_path / "p.json", placement=placement))


def edited(plan: Plan, placement: list[int], order: list[list[int]], path: Path) -> Plan:
    """The plan with another placement and order, through a file."""
    rows = dict(zip(plan.device_names, order, strict=True))
    return load_plan(written(plan, path, placement=placement, order=rows))


def test_a_consistent_edit_is_accepted_and_priced(plan: Plan, tmp_path: Path) -> None:
    """An op moved by hand, in placement and order, is priced in exactly that order; the stored
    numbers are ignored."""
    problem = make_problem()
    everything_on_0 = edited(plan, [0] * 8, [[2, 4, 5, 6, 7], []], tmp_path / "p.json")
    everything_on_0.check(problem)
    timeline = everything_on_0.timeline(problem)
    assert timeline.makespan_ns == 42
    assert timeline.order == everything_on_0.order
    assert everything_on_0.predicted == plan.predicted
    other_order = edited(plan, [0] * 8, [[5, 6, 2, 4, 7], []], tmp_path / "p.json")
    other_order.check(problem)
    assert other_order.timeline(problem).order == other_order.order
    assert other_order.timeline(problem).start_ns[2] == 17


def test_an_edit_that_parts_a_colocation_group_is_refused(plan: Plan, tmp_path: Path) -> None:
    """A parameter and its update stay together, and a view with its base."""
    problem = make_problem()
    parted = edited(plan, [1, 0, 0, 0, 0, 0, 0, 0], [[2, 4, 5, 6, 7], []], tmp_path / "p.json")
    with pytest.raises(PlanError, match="'w2' must sit with its colocation group"):
        parted.check(problem)
    view_away = edited(plan, [0, 0, 0, 1, 0, 0, 0, 0], [[2, 4, 5, 6, 7], []], tmp_path / "p.json")
    with pytest.raises(PlanError, match="'v' must sit with what it is a view of"):
        view_away.check(problem)


@pytest.mark.parametrize(
    ("order", "part"),
    [
        ([[4, 2, 5, 6, 7], []], "can never finish: op 'g' on .* waits for op 'y'"),
        ([[2, 4, 6, 5, 7], []], "can never finish: op 'z2' on .* waits for op 'z'"),
        ([[2, 4, 5, 6], []], "'w2' is ordered 0 times"),
        ([[2, 2, 4, 5, 6, 7], []], "'y' is ordered 2 times"),
        ([[1, 2, 4, 5, 6, 7], []], "'x' is ordered 1 times"),
    ],
)
def test_an_order_that_cannot_run_is_refused(
    plan: Plan, tmp_path: Path, order: list[list[int]], part: str
) -> None:
    """Missing, repeated, source or never-ready ops in an order are named."""
    broken = edited(plan, [0] * 8, order, tmp_path / "p.json")
    with pytest.raises(PlanError, match=part):
        broken.check(make_problem())


def test_numbers_in_the_file_are_never_trusted(plan: Plan, tmp_path: Path) -> None:
    """Edited predictions change nothing that is computed from the plan."""
    data = json.loads(plan.to_json())["predicted"]
    data |= {"step_ns": 1, "peak_bytes": {"gpu:0": 0}, "transfer_bytes": -5}
    loaded = load_plan(written(plan, tmp_path / "p.json", predicted=data))
    problem = make_problem()
    loaded.check(problem)
    assert loaded.timeline(problem).makespan_ns == plan.predicted.step_ns


@pytest.mark.parametrize(
    ("text", "memory", "part"),
    [
        (TEXT.replace("z2 = other(z) bytes=1 ns=2 result=output module=side", ""), None, "8 ops"),
        (TEXT.replace("z2 =", "z3 ="), None, "'z3' differs"),
        (TEXT.replace("y = f(x, w) bytes=4", "y = f(x, w) bytes=5"), None, "shapes"),
        (TEXT, {"gpu:0": 100, "gpu:1": 101}, "other memory, rates or links"),
        (TEXT, {"gpu:0": 100, "cpu:0": 100}, "gpu:0, cpu:0"),
        (TEXT, {"gpu:0": 100}, "gpu:0, gpu:1, these are gpu:0"),
    ],
)
def test_another_model_or_machine_is_named(
    plan: Plan, text: str, memory: dict[str, int] | None, part: str
) -> None:
    """A plan checked against what it was not made for says what differs."""
    with pytest.raises(PlanMismatchError, match=part):
        plan.check(make_problem(text, memory))


def test_prices_may_change_without_a_new_plan(plan: Plan) -> None:
    """Costs are not part of the fingerprint: the plan is priced anew."""
    slower = make_problem(TEXT.replace("ns=15", "ns=150"))
    plan.check(slower)
    assert plan.timeline(slower).makespan_ns >= 150


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"placement": (0,) * 7}, "7 for 8 ops"),
    ({"placement": (0,) * 7 + (2,)}, "'w2' is on device 2"),
    ({"placement": (0,) * 7 + (-1,)}, "'w2' is on device -1"),
    ({"placement": (0,) * 7 + (0.5,)}, "'w2' is on device 0.5"),
    ({"placement": (0,) * 7 + (float("nan"),)}, "'w2' is on device nan"),
    ({"placement": None}, "placement must be a list"),
    ({"order": None}, "order must be a list"),
    ({"order": 7}, "order must be a list"),
    ({"order": (7, ())}, "order must be a list"),
    ({"priority": (0,) * 7 + (2**70,)}, "priority"),
    ({"priority": (0,) * 7 + (0.5,)}, "priority 0.5"),
    ({"order": ((2, 4, 5, 6, 7),)}, "one list per device"),
    ({"order": ((2, 4, 5, 6, 99), ())}, "op 99"),
    ({"order": ((2, 4, 5, 6, 7.5), ())}, "op 7.5"),
    ({"device_names": ("gpu:0", "gpu:0")}, "one list per device"),
    ({"device_names": ("gpu:0",)}, "device"),
]


@pytest.mark.parametrize(("changes", "part"), BROKEN)
def test_a_plan_in_memory_is_checked_as_a_file_is(
    plan: Plan, changes: dict[str, Any], part: str, tmp_path: Path
) -> None:
    """Every method refuses a plan that does not hang together, with the words of a file."""
    sound = dataclasses.replace(plan, placement=(0,) * 8, order=((2, 4, 5, 6, 7), ()))
    broken = dataclasses.replace(sound, **changes)
    problem = make_problem()
    uses: list[Callable[[], Any]] = [
        broken.as_placement,
        broken.to_json,
        lambda: broken.save(tmp_path / "p.json"),
        lambda: device_map(broken),
    ]
    for use in uses:
        with pytest.raises(PlanError, match=part):
            use()
    for use in (lambda: broken.check(problem), lambda: broken.timeline(problem)):
        with pytest.raises((PlanError, PlanMismatchError)):
            use()
    assert not (tmp_path / "p.json").exists()


@pytest.mark.parametrize(
    ("text", "memory", "part"),
    [
        (TEXT.replace("z2 = other(z) bytes=1 ns=2 result=output module=side", ""), None, "8 ops"),
        (TEXT.replace("z2 =", "z3 ="), None, "'z3' differs"),
        (TEXT, {"gpu:0": 100}, "gpu:0, gpu:1, these are gpu:0"),
        (TEXT, {"gpu:0": 100, "gpu:1": 100, "gpu:2": 100}, "these are gpu:0, gpu:1, gpu:2"),
    ],
)
def test_a_timeline_needs_the_plans_ops_and_devices(
    plan: Plan, text: str, memory: dict[str, int] | None, part: str
) -> None:
    """A plan is not simulated on other ops or devices."""
    with pytest.raises(PlanMismatchError, match=part):
        plan.timeline(make_problem(text, memory))


def test_a_timeline_keeps_the_demands_of_its_problem(plan: Plan) -> None:
    """A plan that a pin forbids is not simulated as if it were allowed."""
    side = plan.device_names[plan.placement[5]]
    other = next(name for name in plan.device_names if name != side)
    problem = hand_problem(TEXT, hand_machine(MACHINE), pins={"side": other})
    with pytest.raises(PlanError, match=f"may not go to {side}"):
        plan.timeline(problem)


def test_a_plan_is_refused_where_less_memory_is_free(plan: Plan) -> None:
    """What others hold of a device is no other machine, but the plan must fit beside it: the
    device, what is wanted and what is free are named, in bytes too."""
    problem = make_problem()
    device = plan.device_names[plan.placement[0]]
    peak = plan.predicted.peak_bytes[device]
    plan.check(replaced_reserve(problem, device, 100 - peak))
    less = replaced_reserve(problem, device, 100 - peak + 1)
    assert not plan.timeline(less).is_feasible
    with pytest.raises(PlanMismatchError, match=f"{device} .*{peak} bytes.*{peak - 1} bytes") as e:
        plan.check(less)
    assert e.value.exit_code == 5
    limited = hand_problem(TEXT, hand_machine(MACHINE), limits={device: peak - 1})
    with pytest.raises(PlanMismatchError, match=f"{device} must hold"):
        plan.check(limited)


def replaced_reserve(problem: Problem, name: str, reserve_bytes: int) -> Problem:
    """The problem with so much of a device held by others."""
    devices = tuple(
        msgspec.structs.replace(d, reserve_bytes=reserve_bytes) if d.name == name else d
        for d in problem.machine.devices
    )
    machine = dataclasses.replace(problem.machine, devices=devices)
    return dataclasses.replace(problem, machine=machine)


def test_a_plan_alone_has_no_timeline(plan: Plan, tmp_path: Path) -> None:
    """A plan read from a file needs a problem to be priced."""
    plan.save(tmp_path / "p.json")
    with pytest.raises(PlanError, match="needs a problem"):
        load_plan(tmp_path / "p.json").timeline()


def test_a_failed_save_keeps_the_old_file(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk error while writing leaves the former plan whole and no half-written file."""
    path = tmp_path / "plan.json"
    plan.save(path)
    before = path.read_bytes()

    def fail(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(PlanError, match="No space left"):
        plan.save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_paths_that_cannot_be_used_are_named(plan: Plan, tmp_path: Path) -> None:
    """A missing file and a folder that does not exist are PlanErrors."""
    with pytest.raises(PlanError, match="No such file"):
        load_plan(tmp_path / "missing.json")
    with pytest.raises(PlanError, match="No such file"):
        plan.save(tmp_path / "no" / "plan.json")
    with pytest.raises(PlanError, match="Cannot write"):
        plan.save(tmp_path)


def test_a_machine_with_another_pool_is_another_machine() -> None:
    """The fingerprint tells pools of other sizes, and none, apart; devices and links alike; the
    order in which they are written does not count."""
    machine = hand_machine(MACHINE, pools={"ram": (100, ("gpu:0",)), "more": (50, ("gpu:1",))})
    turned = dataclasses.replace(machine, pools=machine.pools[::-1])
    assert machine_fingerprint(turned) == machine_fingerprint(machine)
    larger = tuple(
        msgspec.structs.replace(pool, memory_bytes=pool.memory_bytes + 1) for pool in machine.pools
    )
    spare = (*machine.pools, Pool(name="spare", memory_bytes=10))
    found = [dataclasses.replace(machine, pools=pools) for pools in (machine.pools, larger, spare)]
    assert len(set(map(machine_fingerprint, found))) == 3
