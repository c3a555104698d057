"""The learned placer: its weights, and what it does without training on the problem."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np
import pytest
import torch
from tests.placers.rl.cases import all_actions, curves, environment, layered, logged, three_ops
from tests.strategies import random_problem

from devplace import placers, workloads
from devplace.cost.analytic import Analytic
from devplace.errors import InfeasibleError, InputError
from devplace.machine import load_machine
from devplace.placers import Budget, Evaluator, Learned, Search, place
from devplace.placers.rl import saved_weights
from devplace.placers.rl.count_head import RULE
from devplace.placers.rl.environment import Environment
from devplace.placers.rl.grouping_choices import Partings, counts_around
from devplace.placers.rl.learned import (
    Own,
    Samples,
    Surrogate,
    count_logits,
    counts_by_likelihood,
    draw,
    score,
)
from devplace.placers.rl.pair_policy import PairPolicy
from devplace.placers.rl.policies import log_prob
from devplace.placers.rl.sized_groups import FEW, edge_ns, worth_parting
from devplace.placers.rl.state_features import BINS, Scene, earliest_starts
from devplace.problem import Problem
from devplace.step_capture import capture
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
    record = saved_weights.load_into(PairPolicy(), saved_weights.SHIPPED)
    assert saved_weights.SHIPPED.stat().st_size < 100_000
    assert not set(record["train"]) & {*record["validation"], *record["test"]}
    assert record["provenance"]["commit"]
    assert record["updates"] > 0
    values, _ = saved_weights.read(saved_weights.SHIPPED)
    assert all(torch.isfinite(value).all() for value in values.values())
    assert float(values["score.layers.4.weight"].abs().max()) > 0  # zero before training


def test_weights_survive_the_disk(tmp_path: Path) -> None:
    """What is written is read again, to half precision, with its record."""
    network, again = PairPolicy(8), PairPolicy(8)
    saved_weights.write(tmp_path / "w.npz", network, {"seed": 3})
    assert saved_weights.load_into(again, tmp_path / "w.npz") == {"seed": 3}
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
    saved_weights.write(tmp_path / "other.npz", PairPolicy(8), {})
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
    """On eight devices, where training had six GPUs at most, more than one does work, and steps are
    shorter than on the best single device, in the mean over three machines."""
    parts = []
    for machine in ("k40x8", "v100x8", "h100x8"):
        problem = on(graph, machine, 50)
        found = place(problem, Learned(), "1ev")
        assert len(set(found.placement.devices.tolist())) > 1
        parts.append(found.step_ns / place(problem, placers.Single(), "20ev").step_ns)
    assert geometric_mean(parts) < 0.9


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
    for trained in (saved_weights.SHIPPED, None):
        assert place(problem, Learned(weights=trained), "1ev").is_feasible
    with pytest.raises(InfeasibleError):
        place(replace(problem, limits={"gpu:0": 20}), Learned(), "20ev")


def test_search_goes_on_from_its_answer(graph: Any) -> None:
    """`Search(start=...)` never ends with a longer step."""
    problem = on(graph, "k40x4", 20)
    found = place(problem, Learned(), "1ev")
    assert place(problem, Search(start=found.placement), "60ev").step_ns <= found.step_ns


@pytest.mark.slow
def test_fine_tuning_improves_on_zero_shot() -> None:
    """On 48 groups and 3 devices, 600 evaluations give a shorter step than one."""
    problem = layered()
    one, many = (place(problem, Learned(), budget, 0).step_ns for budget in ("1ev", "600ev"))
    assert many < one


def spread(policy: PairPolicy, own: Own) -> None:
    """Give weights that are zero before training, and the numbers of a problem, random values."""
    for weight in (
        policy.score.layers[-1].weight,
        policy.counts.score.layers[-1].weight,
        own.table,
        own.counts,
    ):
        torch.nn.init.normal_(weight)
    torch.nn.init.zeros_(policy.counts.score.layers[-1].bias)


def test_logits_seen_again_are_those_drawn_from() -> None:
    """Scoring stored samples gives the probabilities that they were drawn with, for each count."""
    partings = Partings(Evaluator(layered(2), Budget()))
    torch.manual_seed(0)
    policy, own = PairPolicy(8), Own(partings)
    spread(policy, own)
    drawn = draw(policy, partings, own, 12, torch.Generator().manual_seed(0))
    assert len(drawn) > 1
    loss = Surrogate(policy, partings, own, drawn)
    assert loss.divergence() == pytest.approx(0, abs=1e-6)
    for d, logits in zip(drawn, loss.logits(), strict=True):
        scene, table = partings.scene(d.choice), own.of(partings.grouping(d.choice))
        now = log_prob(logits, torch.as_tensor(d.actions))
        progress = scene.begin(len(d.actions))
        for group in range(scene.num_groups):
            features, free = scene.pairs(progress, group)
            seen = policy(
                policy.embed(scene)[group],
                torch.as_tensor(features),
                torch.as_tensor(free),
                table[group],
            )
            taken = log_prob(seen, torch.as_tensor(d.actions[:, group]))
            assert torch.allclose(taken, now[:, group], atol=1e-5)
            scene.put(progress, group, d.actions[:, group])


def every(partings: Partings, choice: int) -> Samples:
    """All placements with a number of groups, with what the policy sees in each."""
    scene = partings.scene(choice)
    actions = all_actions(scene.num_groups, scene.num_devices)
    progress, seen, open_to = scene.begin(len(actions)), [], []
    for group in range(scene.num_groups):
        features, free = scene.pairs(progress, group)
        seen.append(torch.as_tensor(features))
        open_to.append(torch.as_tensor(free))
        scene.put(progress, group, actions[:, group])
    return Samples(choice, actions, torch.stack(seen, 1), torch.stack(open_to, 1))


def test_the_gradient_is_that_of_the_expected_reward() -> None:
    """On three ops, over every number of groups and every placement: PPO's first step, weighted by
    probabilities, is the gradient of the exact expectation, for the network, the head of counts
    and the numbers of the problem alike."""
    partings = Partings(Evaluator(three_ops(), Budget()))
    torch.manual_seed(0)
    policy, own = PairPolicy(8), Own(partings)
    spread(policy, own)
    choices = np.flatnonzero(partings.is_open).tolist()
    assert len(choices) == 2
    drawn = [every(partings, choice) for choice in choices]
    reward = -torch.as_tensor(score(partings, drawn).step_ns, dtype=torch.float32)
    parameters = [*policy.parameters(), *own.parameters()]

    def probabilities() -> torch.Tensor:
        counts = torch.softmax(count_logits(policy, partings, own), -1)
        parts = []
        for d in drawn:
            table = own.of(partings.grouping(d.choice))
            logits = policy(policy.embed(partings.scene(d.choice)), d.pairs, d.may, table)
            chosen = log_prob(logits, torch.as_tensor(d.actions)).sum(1).exp()
            parts.append(counts[d.choice] * chosen)
        return torch.cat(parts)

    probability = probabilities()
    assert float(probability.detach().sum()) == pytest.approx(1, abs=1e-5)
    expected = torch.autograd.grad((probability * reward).sum(), parameters, allow_unused=True)
    loss = Surrogate(policy, partings, own, drawn)
    rows, groups = len(reward), partings.environment(RULE).num_groups
    weighted = rows * groups * probability.detach() * reward
    found = torch.autograd.grad(loss(weighted, 0.2), parameters, allow_unused=True)
    assert own.counts.shape == expected[-1].shape
    assert float(expected[-1].abs().max()) > 0.01
    for one, other in zip(expected, found, strict=True):
        if one is not None:
            assert torch.allclose(one, -other, atol=1e-4, rtol=1e-3)


def test_the_untrained_head_chooses_the_number_of_groups_of_the_rule(graph: Any) -> None:
    """On any graph and machine; others are less likely, but none is ruled out that there is."""
    for problem in (three_ops(), layered(), on(graph, "k40x4", 20), on(graph, "laptop")):
        partings = Partings(Evaluator(problem, Budget()))
        policy, own = PairPolicy(), Own(partings)
        assert counts_by_likelihood(policy, partings, own)[0] == RULE
        rule = worth_parting(problem)
        assert partings.counts[RULE] == partings.grouping(RULE).num_groups == rule.num_groups
        chance = torch.softmax(count_logits(policy, partings, own), -1).detach()
        assert ((chance > 0.01) == torch.as_tensor(partings.is_open)).all()


def test_counts_lie_around_the_rule_s() -> None:
    """Quarter to four times as many, no fewer than devices, no more than colocation groups, 512."""
    assert counts_around(40, 10_000, 4) == (10, 20, 40, 80, 160)
    assert counts_around(40, 100, 12) == (12, 20, 40, 80, 100)
    assert counts_around(190, 10_000, 4) == (48, 95, 190, 380, 512)
    assert counts_around(3, 3, 2) == (2, 2, 3, 3, 3)
    assert counts_around(1, 1, 2) == (1, 1, 1, 1, 1)


def test_groupings_of_all_counts_are_whole(graph: Any) -> None:
    """Each has all colocation groups, at most as many groups as wanted, and more than the coarser
    ones; scenes and environments are made once."""
    partings = Partings(Evaluator(on(graph, "k40x4", 20), Budget()))
    sizes = []
    for choice in np.flatnonzero(partings.is_open).tolist():
        grouping = partings.grouping(choice)
        assert set(grouping.of_colocation.tolist()) == set(range(grouping.num_groups))
        assert 0.7 * partings.counts[choice] <= grouping.num_groups <= partings.counts[choice]
        assert partings.scene(choice) is partings.scene(choice)
        sizes.append(grouping.num_groups)
    assert sizes == sorted(set(sizes))
    assert len(sizes) == 5


@pytest.mark.slow
def test_fine_tuning_learns_the_number_of_groups(tmp_path: Path) -> None:
    """Where only whole halves do not send what is dear, coarse groups become the likeliest."""
    lines = ["x = input bytes=1"]
    lines += [f"a0_{side} = f(x) bytes=100 ns=10" for side in (0, 1)]
    for k in range(1, 12):
        lines += [f"a{k}_{side} = f(a{k - 1}_{side}) bytes=100 ns=10" for side in (0, 1)]
    lines += ["c = join(a11_0, a11_1) bytes=1 ns=1 result=output"]
    machine = hand_machine({"gpu:0": 9000, "gpu:1": 9000}, latency_ns=200)
    problem = hand_problem("\n".join(lines), machine)
    place(problem, logged(Learned(weights=None), tmp_path), "1000ev", 0)
    groups = [row["groups"] or 0.0 for row in curves(tmp_path)]
    assert groups[-1] < 0.6 * groups[0]


def test_seeds_differ_and_repeat() -> None:
    """The same seed gives the same history; another one another."""
    found = [place(layered(4), Learned(), "100ev", seed).history for seed in (1, 1, 2)]
    steps = [[(n, step) for n, _, step in history] for history in found]
    assert steps[0] == steps[1]
    assert steps[0] != steps[2]


def test_seconds_that_run_out_between_drawing_and_scoring_are_no_error() -> None:
    """A budget in seconds ends the run with the best so far."""
    found = place(layered(), Learned(weights=None), "0.2s", 0)
    assert found.evaluations >= 1


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
    scored = Environment(Evaluator(problem, Budget()), worth_parting(problem))
    scene, policy = Scene(scored), PairPolicy()
    saved_weights.load_into(policy, saved_weights.SHIPPED)
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
    with np.load(saved_weights.SHIPPED, allow_pickle=False) as data:
        assert "nmt" in json.loads(str(data["record"]))["train"]
