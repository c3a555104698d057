"""What a problem accepts, refuses and derives."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from devplace.cost import Analytic, CostTable
from devplace.errors import InfeasibleError, InputError, ProblemError
from devplace.graph import Op
from devplace.graph.patterns import matches
from devplace.placers import Single, place
from devplace.problem import Placement, Problem
from devplace.testing import hand_machine, hand_placement, hand_problem

TEXT = """
    x = input bytes=4
    w = parameter bytes=30 module=enc.0
    y = aten.mm(x, w) bytes=8 ns=5 module=enc.0
    v = view(y) bytes=8 module=enc.flat
    z = aten.relu(v) bytes=8 ns=5 module=enc.1 result=output
    w2 = aten.sgd(w, y) bytes=30 ns=1 module=enc.0 replaces=w
"""
MACHINE = {"cuda:0": 1000, "cuda:1": 2000, "cpu:0": 5000}


def make(text: str = TEXT, unsupported: Any = None, **demands: Any) -> Problem:
    """The problem of these tests under some demands."""
    return hand_problem(text, hand_machine(MACHINE, unsupported=unsupported), **demands)


def allowed(problem: Problem, name: str) -> set[str]:
    """Devices an op may go to."""
    tasks = problem.core.tasks
    group = tasks.group[tasks.op_task[problem.graph.op_index[name]]]
    names = problem.machine.device_names
    return {names[d] for d in np.flatnonzero(problem.allowed[group])}


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, (1000, 2000, 5000)),
        ({"cuda:1": 7}, (1000, 7, 5000)),
        ({"cpu:0": "1KB", "cuda:0": "0.5 kb"}, (500, 2000, 1000)),
        ({"cuda:0": "10 gib"}, (1000, 2000, 5000)),
        ({0: 5, "1": "6B", "cpu": 8}, (5, 6, 8)),
        ({"cuda:0": np.int64(9)}, (9, 2000, 5000)),
        ({"cuda:0": 50, 0: 40}, (40, 2000, 5000)),
        ({"cuda:1": 0}, (1000, 0, 5000)),
    ],
)
def test_s58_limits_are_understood_in_any_order_and_spelling(
    limits: dict[Any, Any], expected: tuple[int, ...]
) -> None:
    """Integers, units of either kind and case, indices and short names; never above the memory."""
    assert make(limits=limits).limit_bytes == expected
    turned = dict(reversed(limits.items()))
    assert make(limits=turned).limit_bytes == expected


@pytest.mark.parametrize(
    ("limits", "part"),
    [
        ({"disk": 5}, "Unknown device 'disk' in limits.* Known: cuda:0, cuda:1, cpu:0"),
        ({"cuda:7": 5}, "Did you mean 'cuda:"),
        ({"cuda": 5}, "Unknown device 'cuda'"),
        ({7: 5}, "Unknown device 7"),
        ({-1: 5}, "Unknown device -1"),
        ({"cuda:0": "ten"}, "Limit of cuda:0 must be a number with a unit, got 'ten'"),
        ({"cuda:0": "10 parsecs"}, "got '10 parsecs'"),
        ({"cuda:0": -5}, "must not be negative, got -5 bytes"),
        ({"cuda:0": "-5GB"}, "got '-5GB'"),
        ({"cuda:0": 1.5}, r"got 1\.5"),
        ({"cuda:0": True}, "got True"),
        ({"cuda:0": None}, "got None"),
        ({"cuda:0": "1e400GB"}, r"below 2\^63"),
        ({"cuda:0": ""}, "got ''"),
    ],
)
def test_s58_bad_limits_are_named(limits: dict[Any, Any], part: str) -> None:
    """Unknown devices and unreadable sizes are refused by name, with what is known."""
    with pytest.raises(InputError, match=part):
        make(limits=limits)


def test_a_limit_above_the_memory_is_a_note() -> None:
    """It lowers nothing, and that is told with both sizes."""
    (note,) = make(limits={"cuda:0": "5 KiB", "cuda:1": 7}).notes
    assert "limit of 5 KiB for cuda:0 is above the 1000 B" in note
    assert make(limits={"cuda:0": 1000}).notes == ()


def test_gb_and_gib_differ() -> None:
    """GB is decimal, GiB binary."""
    machine = hand_machine({"cuda:0": 10**12})
    limits = [
        hand_problem("a = f", machine, limits={"cuda:0": text}).limit_bytes[0]
        for text in ("20GB", "20GiB", "20 gb", "20 Gib")
    ]
    assert limits == [20 * 10**9, 20 * 2**30, 20 * 10**9, 20 * 2**30]


@pytest.mark.parametrize(
    ("pattern", "bound"),
    [
        ("enc.0", {"y", "w", "w2"}),
        ("enc", {"y", "w", "w2", "z"}),
        ("enc.*", {"y", "w", "w2", "z"}),
        ("*.1", {"z"}),
        ("z", {"z"}),
        ("", {"y", "w", "w2", "z"}),
        ("w2", {"w", "w2"}),
    ],
)
def test_pins_bind_modules_and_ops(pattern: str, bound: set[str]) -> None:
    """A pin holds for what its pattern names, and for what belongs with it."""
    problem = make(pins={pattern: "cuda:1"})
    expected = {
        name: {"cuda:1"} if name in bound else set(MACHINE) for name in ("y", "w", "w2", "z")
    }
    assert {name: allowed(problem, name) for name in expected} == expected


def test_names_with_brackets_match_themselves() -> None:
    """Optimizer state is named `exp_avg[fc.weight]`; that very text is a pattern for it."""
    op = Op("exp_avg[fc.weight]", "source", module="fc[0]")
    assert matches("exp_avg[fc.weight]", op)
    assert matches("fc[0]", op)
    assert not matches("exp_avg", op)


def test_the_first_pin_that_matches_counts() -> None:
    """A narrow pin before a wide one wins; the other way round it would do nothing: refused."""
    problem = make(pins={"enc.1": "cpu:0", "enc": "cuda:0"})
    assert (allowed(problem, "z"), allowed(problem, "y")) == ({"cpu:0"}, {"cuda:0"})
    with pytest.raises(ProblemError, match=r"'enc\.1' comes after 'enc'.*Put 'enc\.1' first"):
        make(pins={"enc": "cuda:0", "enc.1": "cpu:0"})


def test_a_pin_that_names_only_views_is_a_note() -> None:
    """A module without ops of its own can be pinned; the note says that nothing changes."""
    problem = make(pins={"enc.flat": "cuda:1", "x": "cuda:1"})
    assert len(problem.notes) == 2
    assert "'enc.flat' changes nothing" in problem.notes[0]


@pytest.mark.parametrize(
    ("pins", "part"),
    [
        ({"decoder": "cuda:0"}, "'decoder' matches no module or op. Top-level modules: enc"),
        ({"enc.0": "cuda:9"}, "Unknown device 'cuda:9' in pin 'enc.0'"),
        ({"w": "cuda:0", "y": "cuda:1", "w2": "cuda:1"}, "'w2' is pinned to cuda:1 by 'w2'"),
    ],
)
def test_pins_that_cannot_hold_are_refused(pins: dict[str, str], part: str) -> None:
    """Unknown patterns, unknown devices and pins that part a colocation group are named."""
    with pytest.raises(ProblemError, match=part):
        make(pins=pins)


def test_s60_an_op_without_kernel_is_refused_or_softened() -> None:
    """A pin to a device that cannot run the op is refused; with soft pins it is moved and told."""
    cpu_only = {"cuda:0": ("aten.relu",), "cuda:1": ("aten.re*",)}
    assert allowed(make(unsupported=cpu_only), "z") == {"cpu:0"}
    with pytest.raises(ProblemError, match=r"'z' \(aten.relu\) cannot run on cuda:0"):
        make(unsupported=cpu_only, pins={"enc.1": "cuda:0"})
    soft = make(unsupported=cpu_only, pins={"enc": "cuda:0"}, soft_pins=True)
    assert allowed(soft, "z") == {"cpu:0"}
    assert allowed(soft, "y") == {"cuda:0"}
    assert soft.notes == ("pin 'enc' dropped for 'z': aten.relu cannot run on cuda:0",)


def test_an_op_that_nothing_can_run_is_named() -> None:
    """Without any device for an op the problem is refused."""
    nowhere = dict.fromkeys(MACHINE, ("aten.relu",))
    with pytest.raises(ProblemError, match=r"'z' \(aten.relu\) has none"):
        make(unsupported=nowhere)
    with pytest.raises(ProblemError, match="'z'"):
        make(unsupported={"cuda:0": ("aten.relu",)}, exclude=["cuda:1", "cpu:0"])


def test_an_unsupported_update_binds_its_whole_group() -> None:
    """A parameter may not sit where its update cannot run."""
    problem = make(unsupported={"cuda:0": ("aten.sgd",)})
    assert allowed(problem, "w") == {"cuda:1", "cpu:0"}


def test_excluded_devices_are_out() -> None:
    """Excluded devices are in no op's choices; excluding all is refused."""
    problem = make(exclude=["cpu", 1])
    assert problem.usable_devices == (0,)
    assert allowed(problem, "z") == {"cuda:0"}
    with pytest.raises(ProblemError, match="At least one device must be left"):
        make(exclude=list(MACHINE))
    with pytest.raises(ProblemError, match="Unknown device 'tpu:0' in exclude"):
        make(exclude=["tpu:0"])
    with pytest.raises(ProblemError, match="exclude must be a list"):
        make(exclude="cpu:0")
    with pytest.raises(ProblemError, match="cpu:0, which is excluded"):
        make(exclude=["cpu:0"], pins={"enc.1": "cpu:0"})


@pytest.mark.parametrize(
    ("costs", "part"),
    [
        (np.zeros((6, 2), np.int64), r"shape \(6, 2\), expected \(6, 3\)"),
        (np.zeros((6, 3)), "int64"),
        (np.full((6, 3), -1, np.int64), "'x' has -1 ns on cuda:0"),
    ],
)
def test_costs_must_fit_graph_and_machine(costs: Any, part: str) -> None:
    """Costs of another shape, type or sign are refused."""
    with pytest.raises(ProblemError, match=part):
        replace(make(), costs=CostTable(costs, "wrong"))


def test_times_that_would_overflow_are_refused() -> None:
    """Neither costs nor transfers may add up beyond 64 bits, where numbers would be wrong."""
    problem = make()
    costs = CostTable(np.full((6, 3), 2**61, np.int64), "endless")
    with pytest.raises(ProblemError, match="64 bits"):
        replace(problem, costs=costs)
    text = TEXT.replace("y = aten.mm(x, w) bytes=8", f"y = aten.mm(x, w) bytes={10**11}")
    slow = hand_machine(MACHINE, bytes_per_ns=1e-9)
    with pytest.raises(ProblemError, match="bandwidths"):
        hand_problem(text, slow)


def test_views_travel_as_their_base_and_cost_nothing() -> None:
    """A view of the whole is no task, and a reader of it on another device gets the base once."""
    problem = make()
    tasks = problem.core.tasks
    names = [problem.graph.ops[v].name for v in tasks.task_op]
    assert names == ["w", "y", "z", "w2"]
    sent = [problem.graph.tensors[t].name for t in tasks.carrier_tensor]
    assert sent == ["w", "y"]


def test_a_view_of_a_part_travels_as_the_part() -> None:
    """A smaller view crosses with its own size; its base keeps its memory while it is read."""
    problem = hand_problem(
        """
        a = f bytes=100 ns=1
        part = view(a) bytes=10
        whole = view(part) bytes=10
        b = g(whole) bytes=1 ns=1
        """,
        hand_machine(MACHINE),
    )
    tasks = problem.core.tasks
    assert [problem.graph.tensors[t].name for t in tasks.carrier_tensor] == ["part"]
    assert tasks.carrier_bytes.tolist() == [10]
    assert tasks.storage_bytes.tolist() == [100, 1]


def test_read_only_sources_are_on_every_reader_and_never_travel() -> None:
    """Inputs and frozen parameters are no tasks: they only take memory where they are read."""
    from devplace.simulator import simulate

    problem = hand_problem(
        """
        frozen = parameter bytes=40
        shown = view(frozen) bytes=40
        a = f(frozen) bytes=1 ns=5
        b = f(shown) bytes=1 ns=5
        """,
        hand_machine(MACHINE),
    )
    assert problem.core.tasks.num_tasks == 2
    timeline = simulate(problem, hand_placement(problem, {"b": "cuda:1"}))
    assert timeline.transfers == ()
    assert timeline.peak_bytes.tolist() == [41, 41, 0]


def test_colocation_groups_hold_parameter_state_and_update() -> None:
    """A parameter, its optimizer state and the ops that make their next values are one group."""
    problem = hand_problem(
        """
        w = parameter bytes=4
        m[w] = state bytes=4
        u = parameter bytes=4
        y = f(w, u) bytes=1 ns=1
        m2 = mul(m[w], y) bytes=4 replaces=m[w]
        w2 = sgd(w, m2) bytes=4 replaces=w
        u2 = sgd(u, y) bytes=4 replaces=u
        """,
        hand_machine(MACHINE),
    )
    group = dict(
        zip(
            ["w", "m[w]", "u", "y", "m2", "w2", "u2"],
            problem.core.tasks.group.tolist(),
            strict=True,
        )
    )
    assert group["w"] == group["m[w]"] == group["m2"] == group["w2"]
    assert group["u"] == group["u2"]
    assert len(set(group.values())) == 3


def test_state_of_no_named_parameter_stands_alone() -> None:
    """State sources whose names tell no parameter are not thrown together."""
    problem = hand_problem(
        """
        m = state bytes=4
        n = state bytes=4
        m2 = mul(m) bytes=4 replaces=m
        n2 = mul(n) bytes=4 replaces=n
        """,
        hand_machine(MACHINE),
    )
    assert problem.core.tasks.group.tolist() == [0, 1, 0, 1]


def test_a_placement_must_fit_the_problem() -> None:
    """Wrong lengths and device indices are refused; broken demands are listed by op."""
    problem = make(pins={"enc.1": "cuda:0"})
    with pytest.raises(ProblemError, match="6 devices, one per op"):
        problem.task_devices(Placement(np.zeros(5, np.int32)))
    with pytest.raises(ProblemError, match="0 to 2, got 0 to 3"):
        problem.task_devices(Placement(np.array([0, 0, 0, 0, 0, 3], np.int32)))
    with pytest.raises(ProblemError, match=r"6 integers, one per op, got shape \(6,\) of float64"):
        problem.task_priority(np.zeros(6))
    broken = problem.violations(Placement(np.array([0, 0, 0, 0, 1, 1], np.int32)))
    assert broken == [
        "'z' may not go to cuda:1",
        "'w2' must sit with its colocation group",
    ]


def test_s08_a_pool_is_limited_as_a_whole() -> None:
    """Devices that share memory cannot use it twice: 120 bytes do not fit a pool of 100."""
    from devplace.errors import InfeasibleError
    from devplace.placers import Search, place

    text = "\n".join(
        f"w{k} = parameter bytes=30\nu{k} = sgd(w{k}) bytes=0 ns=1 replaces=w{k}" for k in range(4)
    )
    shared = hand_machine({"cuda:0": 100, "cpu:0": 100}, pools={"ram": (100, ("cuda:0", "cpu:0"))})
    with pytest.raises(InfeasibleError, match=r"120 B.*100 B, 20 B too little"):
        place(hand_problem(text, shared), Search(), "500ev")
    apart = hand_machine({"cuda:0": 100, "cpu:0": 100})
    assert place(hand_problem(text, apart), Search(), "500ev").is_feasible


def test_sizes_that_add_up_beyond_64_bits_are_refused() -> None:
    """Two tensors of 2^62 bytes are each in range; a sum of them would look negative."""
    text = f"a = f bytes={2**62} ns=1\nb = f bytes={2**62} ns=1"
    with pytest.raises(ProblemError, match="sizes of a step must fit 64 bits"):
        hand_problem(text, hand_machine({"gpu:0": 99}))


def test_a_limit_of_0_says_not_used() -> None:
    """Nothing goes to such a device, not even ops without bytes, and a pin to it is refused. Where
    no other device is left, nothing fits."""
    text = "a = f ns=5\nb = f(a) ns=5"
    machine = hand_machine({"cuda:0": 9, "cuda:1": 9})
    problem = hand_problem(text, machine, limits={"cuda:1": "0GB"})
    assert problem.usable_devices == (0,)
    assert not problem.allowed[:, 1].any()
    with pytest.raises(ProblemError, match="cuda:1, which has a limit of 0"):
        hand_problem(text, machine, limits={1: 0}, pins={"a": "cuda:1"})
    for demands in ({"limits": {"1": 0}, "exclude": ["cuda:0"]}, {"limits": {0: 0, 1: 0}}):
        with pytest.raises(InfeasibleError, match="proved"):
            place(hand_problem(text, machine, **demands), Single())


TIED = """
    x = input bytes=4
    table = parameter bytes=30 module=emb
    e = aten.embedding(x, table) bytes=8 ns=5 module=emb
    low = aten.to(table) bytes=15 ns=1 module=
    h = aten.relu(e) bytes=8 ns=5 module=body
    y = aten.mm(h, low) bytes=8 ns=5 module=
    back = aten.mm(y, low) bytes=8 ns=5 stage=backward module=
    g = aten.mm(y, h) bytes=30 ns=5 stage=backward module=
    u = aten.sgd(table, g) bytes=30 ns=1 stage=update replaces=table
"""


def pinned(pins: dict[str, str], text: str = TIED, **meta: Any) -> dict[str, str]:
    """Ops that may go to one device only, with that device."""
    machine = hand_machine(MACHINE)
    graph = hand_problem(text, machine).graph
    graph = replace(graph, meta={**graph.meta, **meta})
    problem = Problem(graph, machine, hand_problem(text, machine).costs, pins=pins)
    work = {op.name: allowed(problem, op.name) for op in graph.ops if op.role != "input"}
    return {name: next(iter(found)) for name, found in work.items() if len(found) == 1}


def test_pins_of_a_module_hold_for_products_of_its_weights_wherever_called_from() -> None:
    """The pinned table's products, of a copy of lower precision too, follow it; what only reads
    their results does not."""
    there = {"table": "cuda:1", "e": "cuda:1", "low": "cuda:1", "u": "cuda:1"}
    assert pinned({"emb": "cuda:1"}) == {**there, "y": "cuda:1", "back": "cuda:1"}


def test_a_pin_of_the_caller_holds_where_the_weight_has_none() -> None:
    """A pattern for everything else comes after that of the weight's module."""
    found = pinned({"emb": "cuda:1", "": "cuda:0"})
    assert found["y"] == found["back"] == "cuda:1"
    assert found["h"] == found["g"] == "cuda:0"


def test_an_op_that_a_pin_names_goes_where_it_says() -> None:
    """A head with a module of its own may be pinned apart from the table it is tied to; where only
    one of them is pinned, both go there, by either name."""
    line = "y = aten.mm(h, low) bytes=8 ns=5 module="
    text = TIED.replace(line, line + "head")
    tied = {"head.weight": "table"}
    both = pinned({"emb": "cuda:1", "head": "cuda:0"}, text, tied=tied)
    assert (both["e"], both["y"], both["table"]) == ("cuda:1", "cuda:0", "cuda:1")
    assert pinned({"emb": "cuda:1"}, text, tied=tied)["y"] == "cuda:1"
    head = pinned({"head": "cuda:0"}, text, tied=tied)
    assert (head["y"], head["e"], head["table"]) == ("cuda:0", "cuda:0", "cuda:0")


def one_link(**options: object) -> Problem:
    """Tensors of 9, 10 and 11 bytes over one link of 1 byte/ns."""
    machine = hand_machine({"gpu:0": 99, "gpu:1": 99})
    links = tuple(msgspec.structs.replace(link, **options) for link in machine.links)
    text = "a = f bytes=9,10,11 ns=1\nb = g(a:0, a:1, a:2) bytes=1 ns=1 result=output"
    return hand_problem(text, replace(machine, links=links))


def test_from_its_size_on_a_tensor_goes_by_copy_engine() -> None:
    """One of just that size does, one of a byte less has a lane of its own; without an engine all
    queue, and on a parallel link none does."""
    sizes = one_link().core.tasks.carrier_bytes
    for options, queues in (
        ({"engine_bytes": 10}, [0, 1, 1]),
        ({}, [1, 1, 1]),
        ({"parallel": True, "engine_bytes": 10}, [2, 2, 2]),
    ):
        core = one_link(**options).core
        row = core.wires.transfers.queues[core.wires.transfers.link_class[0, 1]]
        found = {int(size): int(kind) for size, kind in zip(sizes, row, strict=True)}
        assert [found[size] for size in (9, 10, 11)] == queues


def test_a_channel_is_held_for_bytes_by_bandwidth() -> None:
    """A measured transfer takes longer than its bytes at full rate, for which alone others wait for
    the channel; one that is measured as faster holds it no longer than it takes."""
    core = one_link(points=((9, 5), (10, 20), (11, 21))).core
    wires, row = core.wires, core.wires.transfers.link_class[0, 1]
    sizes = core.tasks.carrier_bytes.tolist()
    taken = dict(zip(sizes, wires.transfers.transfer_ns[row].tolist(), strict=True))
    held = dict(zip(sizes, wires.transfers.channel_ns[row].tolist(), strict=True))
    assert [taken[size] for size in (9, 10, 11)] == [5, 20, 21]
    assert [held[size] for size in (9, 10, 11)] == [5, 10, 11]


def test_what_is_no_graph_machine_or_costs_is_refused_with_the_way_to_one() -> None:
    """A model, a machine's name and plain numbers are what is given by mistake."""
    problem = make()
    graph, machine, costs = problem.graph, problem.machine, problem.costs
    wrong: list[tuple[Any, str]] = [
        (lambda: Problem("model", machine, costs), "dp.capture"),  # type: ignore[arg-type]
        (lambda: Problem(graph, "cpux2", costs), "load_machine('cpux2')"),  # type: ignore[arg-type]
        (lambda: Problem(graph, machine, [[1]]), "dp.Analytic()"),  # type: ignore[arg-type]
        (lambda: Analytic()("model", machine), "dp.capture"),  # type: ignore[arg-type]
        (lambda: Analytic()(graph, 2), "load_machine(NAME)"),  # type: ignore[arg-type]
    ]
    for call, way in wrong:
        with pytest.raises(InputError, match=re.escape(way)):
            call()


def test_graphs_plans_and_results_are_shown_in_a_line() -> None:
    """What a step has in numbers, not all its ops."""
    result = place(make(), Single())
    assert repr(result.timeline.problem.graph).endswith("with 6 ops, 6 tensors and 2 results)")
    assert repr(result.plan) == "Plan(6 ops on cpu:0, predicted 11 ns per step)"
    assert repr(result).startswith("Result(single: ")
    assert "step 11 ns predicted" in repr(result)
