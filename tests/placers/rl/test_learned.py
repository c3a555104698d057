"""The learned placer: its weights, and what it does without training on the problem."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.placers.rl.cases import environment, layered, three_ops
from tests.strategies import random_problem

from devplace import placers, workloads
from devplace.cost.analytic import Analytic
from devplace.errors import InfeasibleError, InputError
from devplace.graph.capture import capture
from devplace.machine import load_machine
from devplace.placers import Learned, Search, place
from devplace.placers.rl import weights
from devplace.placers.rl.environment import Environment
from devplace.placers.rl.learned import Own, Surrogate
from devplace.placers.rl.pair_policy import PairPolicy
from devplace.placers.rl.parting import FEW, edge_ns, worth_parting
from devplace.placers.rl.policies import log_prob
from devplace.placers.rl.scene import BINS, Scene, earliest_starts
from devplace.problem import Problem
from devplace.testing import check_placer, hand_machine, hand_problem


@pytest.fixture(scope="module")
def graph() -> Any:
    """A small LSTM translation step with optimizer."""
    workload = workloads.build("nmt-2", size="small")
    update = torch.optim.SGD(workload.model.parameters(), lr=0.1)
    return capture(workload.model, workload.inputs, workload.loss_fn, update)


def on(graph: Any, machine: str, slower: int = 1, **demands: Any) -> Problem:
    """The graph on a preset machine, computing slowed down."""
    made = load_machine(machine)
    costs = Analytic()(graph, made)
    return Problem(graph, made, replace(costs, compute_ns=costs.compute_ns * slower), **demands)


def test_shipped_weights_load_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are small, in the package, numbers only, and tell where they come from."""

    def refuse(*_: Any) -> None:
        raise AssertionError("no network")

    monkeypatch.setattr(socket, "socket", refuse)
    record = weights.load_into(PairPolicy(), weights.SHIPPED)
    assert weights.SHIPPED.stat().st_size < 100_000
    assert not set(record["train"]) & {*record["validation"], *record["test"]}
    assert record["provenance"]["commit"]
    assert record["updates"] > 0
    values, _ = weights.read(weights.SHIPPED)
    assert all(torch.isfinite(value).all() for value in values.values())
    assert float(values["score.layers.4.weight"].abs().max()) > 0  # zero before training


def test_weights_survive_the_disk(tmp_path: Path) -> None:
    """What is written is read again, to half precision, with its record."""
    network, again = PairPolicy(8), PairPolicy(8)
    weights.write(tmp_path / "w.npz", network, {"seed": 3})
    assert weights.load_into(again, tmp_path / "w.npz") == {"seed": 3}
    for one, other in zip(network.parameters(), again.parameters(), strict=True):
        assert torch.allclose(one, other, atol=2e-3)


def test_weights_that_cannot_be_used_are_told(tmp_path: Path) -> None:
    """No file, no weights, pickled objects, other sizes: an error each that says what to give."""
    (tmp_path / "text.npz").write_text("no")
    np.savez(tmp_path / "bare.npz", a=np.zeros(2))
    np.savez(tmp_path / "objects.npz", record=np.array({"a": 1}, dtype=object))
    for name in ("none.npz", "text.npz", "bare.npz", "objects.npz"):
        with pytest.raises(InputError, match="Cannot read weights"):
            place(three_ops(), Learned(weights=tmp_path / name), "1ev")
    weights.write(tmp_path / "other.npz", PairPolicy(8), {})
    with pytest.raises(InputError, match=r"do not fit the policy: .* expected"):
        place(three_ops(), Learned(weights=tmp_path / "other.npz"), "1ev")
    with pytest.raises(InputError, match="do not fit"):
        place(three_ops(), Learned(hidden=16), "1ev")


def test_shipped_weights_keep_the_promises_of_placers() -> None:
    """Legal, complete, reproducible and within budget, as the untrained ones."""
    check_placer(Learned(), [three_ops(), layered(3), random_problem(0, 25, 3)], evaluations=12)


@pytest.mark.parametrize("machine", ["k40x2", "h100x3", "v100x8", "laptop", "cpux3"])
def test_zero_shot_is_the_same_every_time(graph: Any, machine: str) -> None:
    """One evaluation, any number of devices, whatever the seed: the same plan, which fits."""
    problem = on(graph, machine, 20)
    one, other = (place(problem, Learned(), "1ev", seed) for seed in (0, 7))
    assert one.placement.devices.tolist() == other.placement.devices.tolist()
    assert one.evaluations == 1
    assert one.is_feasible


def test_zero_shot_uses_devices_it_was_not_trained_with(graph: Any) -> None:
    """On eight devices, where training had five at most, more than one does work, and the step is
    shorter than on the best single device."""
    problem = on(graph, "k40x8", 50)
    found = place(problem, Learned(), "1ev")
    assert len(set(found.placement.devices.tolist())) > 1
    assert found.step_ns < place(problem, placers.Single(), "20ev").step_ns


def test_pins_and_excluded_devices_hold(graph: Any) -> None:
    """Zero-shot and fine-tuned."""
    demands: dict[str, Any] = {"pins": {"encoder": "cuda:1"}, "exclude": ["cuda:0"]}
    problem = on(graph, "k40x4", 20, **demands)
    for budget in ("1ev", "45ev"):
        assert problem.violations(place(problem, Learned(), budget).placement) == []


def test_memory_that_would_certainly_not_do_is_kept_clear() -> None:
    """Three parameters of 60 bytes on devices of 100: one each, without trying."""
    lines = [f"w{k} = parameter bytes=60" for k in range(3)]
    lines += ["x = input bytes=1", "a0 = f(x, w0) bytes=1 ns=10"]
    lines += [f"a{k} = f(a{k - 1}, w{k}) bytes=1 ns=10" for k in (1, 2)]
    lines += [f"u{k} = sgd(w{k}, a{k}) bytes=0 ns=1 replaces=w{k}" for k in range(3)]
    problem = hand_problem("\n".join(lines), hand_machine({f"gpu:{k}": 100 for k in range(3)}))
    for trained in (weights.SHIPPED, None):
        assert place(problem, Learned(weights=trained), "1ev").is_feasible
    with pytest.raises(InfeasibleError):
        place(replace(problem, limits={"gpu:0": 20}), Learned(), "20ev")


def test_search_goes_on_from_its_answer(graph: Any) -> None:
    """`Search(start=...)` never ends with a longer step."""
    problem = on(graph, "k40x4", 20)
    found = place(problem, Learned(), "1ev")
    assert place(problem, Search(start=found.placement), "60ev").step_ns <= found.step_ns


def test_fine_tuning_improves_on_zero_shot() -> None:
    """On 48 groups and 3 devices, 600 evaluations give a shorter step than one."""
    problem = layered()
    one, many = (place(problem, Learned(), budget, 0).step_ns for budget in ("1ev", "600ev"))
    assert many < one


def test_logits_seen_again_are_those_drawn_from() -> None:
    """Scoring stored samples gives the probabilities that they were drawn with."""
    scored = environment(layered(2))
    scene, policy = Scene(scored), PairPolicy(8)
    torch.nn.init.normal_(policy.score.layers[-1].weight)
    own = Own(scored.allowed.shape)
    torch.nn.init.normal_(own.table)
    actions, pairs, may = policy.act(scene, own.table.detach(), 5, torch.Generator().manual_seed(0))
    loss = Surrogate(policy, scene, own, torch.as_tensor(actions), pairs, may)
    now = log_prob(loss.logits(), torch.as_tensor(actions))
    assert loss.divergence() == pytest.approx(0, abs=1e-6)
    progress = scene.begin(5)
    for group in range(scene.num_groups):
        features, free = scene.pairs(progress, group)
        logits = policy(
            policy.embed(scene)[group],
            torch.as_tensor(features),
            torch.as_tensor(free),
            own.table[group],
        )
        drawn = log_prob(logits, torch.as_tensor(actions[:, group]))
        assert torch.allclose(drawn, now[:, group], atol=1e-5)
        scene.put(progress, group, actions[:, group])


def test_number_of_groups_follows_from_graph_and_machine(graph: Any) -> None:
    """Few ops stay apart; where sending is dear beside computing, fewer groups are left."""
    assert worth_parting(layered()).num_groups == 48 <= FEW
    cheap, dear = (worth_parting(on(graph, "k40x4", s)).num_groups for s in (100, 1))
    assert 2 <= dear < cheap


def test_edges_cost_what_their_tensors_take() -> None:
    """Transfer, latency and each reader once, by hand: 20 bytes at 1 byte/ns and 5 ns."""
    scored = environment(
        hand_problem(
            "x = input bytes=1\na = f(x) bytes=20 ns=10\nb = g(a) bytes=1 ns=10\n"
            "c = h(a, b) bytes=1 ns=10 result=output",
            hand_machine({"gpu:0": 100, "gpu:1": 100}, latency_ns=5),
        )
    )
    edges, ns = edge_ns(scored.grouping)
    costs = {(int(s), int(d)): float(t) for (s, d), t in zip(edges.T, ns[0], strict=True)}
    assert costs == {(0, 1): 25.0, (0, 2): 25.0, (1, 2): 6.0}


def test_what_is_seen_of_a_pair_by_hand() -> None:
    """Two equal branches: the second would queue beside the first, and not on the other device."""
    problem = hand_problem(
        "x = input bytes=1\na = f(x) bytes=1 ns=16\nb = g(x) bytes=1 ns=16\n"
        "c = join(a, b) bytes=1 ns=16 result=output",
        hand_machine({"gpu:0": 100, "gpu:1": 100}, latency_ns=2),
    )
    starts = earliest_starts(problem, np.array([16.0, 16.0, 16.0]))
    assert starts.tolist() == [0, 0, 16]
    scene = Scene(environment(problem))
    progress = scene.begin(1)
    scene.put(progress, 0, np.array([0]))
    features, may = scene.pairs(progress, 1)
    # the path is 32 ns, a bin 2 ns; both ops' middles are in one bin: 14 of 16 queue for either,
    # and the 2 that the bin still has are gone on gpu:0
    assert BINS == 16
    assert features[0, :, 0].tolist() == pytest.approx([10 * 16 / 48, 10 * 14 / 48])
    assert features[0, :, 1].tolist() == [0, 0]  # a and b exchange nothing
    scene.put(progress, 1, np.array([1]))
    features, _ = scene.pairs(progress, 2)
    assert features[0, :, 1].tolist() == pytest.approx([10 * 3 / 48, 10 * 3 / 48])  # 1 byte + 2 ns
    assert may.all()


def test_equal_devices_are_told_apart_by_what_is_on_them_only(graph: Any) -> None:
    """Renaming equal devices renames the answer: scores know no device by its number."""
    problem = on(graph, "cpux3", 20)
    scored = Environment(placers.Evaluator(problem, placers.Budget()), worth_parting(problem))
    scene, policy = Scene(scored), PairPolicy()
    weights.load_into(policy, weights.SHIPPED)
    rows = []
    for swap in (np.array([0, 1, 2]), np.array([2, 0, 1])):
        progress = scene.begin(1)
        for group in range(6):
            scene.put(progress, group, swap[np.array([group % 3])])
        pairs, may = scene.pairs(progress, 6)
        logits = policy(
            policy.embed(scene)[6], torch.as_tensor(pairs), torch.as_tensor(may), torch.zeros(3)
        )
        rows.append(logits.detach()[0, torch.as_tensor(swap)])
    assert torch.allclose(rows[0], rows[1], atol=1e-4)


def test_the_record_is_text() -> None:
    """Families, machines and seed can be read with numpy alone."""
    with np.load(weights.SHIPPED, allow_pickle=False) as data:
        assert "nmt" in json.loads(str(data["record"]))["train"]
