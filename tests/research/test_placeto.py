"""Placeto."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from devplace.placers import Placeto, place
from devplace.research.advantages import discounted
from devplace.research.environment import Environment
from devplace.research.losses import reinforce
from devplace.research.placeto import (
    ImprovementPolicy,
    StateEmbedding,
    baseline_of,
    improvements,
    mean_weights,
    reachable,
)
from devplace.research.policies import log_prob
from tests.research.cases import all_actions, curves, environment, layered, logged, three_ops


def test_rewards_are_improvements() -> None:
    """A cost that falls from 4 to 1 earns log 4; one that grows loses (Park's are negated)."""
    rewards = improvements(np.array([[4.0, 1.0], [1.0, 2.0], [1.0, 2.0]]))
    assert rewards == pytest.approx(np.array([[np.log(4), -np.log(2)], [0, 0]]))


def test_returns_by_hand() -> None:
    """`G_i = r_i + g G_i+1`, from the end."""
    rewards = np.array([[1.0], [2.0], [4.0]])
    assert discounted(rewards, 0.5)[:, 0].tolist() == [1 + 1 + 1, 2 + 2, 4]
    assert discounted(rewards, 1.0)[:, 0].tolist() == [7, 6, 4]


def test_the_baseline_is_per_step() -> None:
    """Mean of the last episodes at each step; of these ones where there are none yet."""
    last = torch.tensor([[1.0, 2.0, 9.0], [3.0, 6.0, 9.0]])
    returns = torch.tensor([[5.0, 7.0], [1.0, 1.0]])
    assert baseline_of(last, returns)[:, 0].tolist() == [2.0, 4.0]
    assert baseline_of(last[:0], returns)[:, 0].tolist() == [6.0, 1.0]


def test_sets_of_a_diamond() -> None:
    """In a -> b, c -> d: ancestors of d are all others; b and c are parallel."""
    parents = torch.zeros(4, 4)
    for child, parent in ((1, 0), (2, 0), (3, 1), (3, 2)):
        parents[child, parent] = 1
    above = reachable(parents > 0)
    assert above.int().tolist() == [[0] * 4, [1, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]]
    embedding = StateEmbedding(parents > 0, 3, 2)
    ancestors, descendants, beside = embedding.pools
    assert ancestors[3].tolist() == pytest.approx([1 / 3] * 3 + [0])
    assert descendants[0].tolist() == pytest.approx([0] + [1 / 3] * 3)
    assert beside.tolist() == [[0.0] * 4, [0, 0, 1, 0], [0, 1, 0, 0], [0.0] * 4]


def test_messages_are_those_of_a_loop() -> None:
    """The embedding equals one with loops over groups, neighbours and sets."""
    torch.manual_seed(0)
    parents = torch.tensor([[0, 0, 0], [1, 0, 0], [1, 1, 0]]) > 0
    embedding, x = StateEmbedding(parents, 2, 3), torch.randn(1, 3, 2)

    def mean(rows: list[torch.Tensor], size: int) -> torch.Tensor:
        return torch.stack(rows).mean(0) if rows else torch.zeros(size)

    ways = []
    for way, table in enumerate((parents, parents.T)):
        h = list(x[0])
        for _ in range(3):
            sent = [embedding.send[way](row) for row in h]
            h = [
                x[0, i]
                + embedding.receive[way](mean([sent[j] for j in range(3) if table[i, j]], 2))
                for i in range(3)
            ]
        ways.append(torch.stack(h))
    own = torch.cat(ways, 1)
    above = reachable(parents)
    for turn in range(3):
        expected = [own[turn]]
        for k, table in enumerate((above, above.T, torch.zeros(3, 3) > 0)):
            offers = [embedding.offer[k](own[j]) for j in range(3) if table[turn, j]]
            expected.append(embedding.gather[k](mean(offers, 4)))
        found = embedding(x, torch.tensor([turn]))[0]
        assert torch.allclose(found, torch.cat(expected), atol=1e-5)


def test_the_gradient_is_that_of_the_expected_improvement() -> None:
    """On three ops, over all 8 ways of an episode: equal to the exact one, for both rewards."""
    env = environment(three_ops())
    torch.manual_seed(0)
    policy = ImprovementPolicy(env, 2)
    every, start = torch.as_tensor(all_actions(3, 2)), torch.tensor([1, 0, 1])
    states = [start.repeat(8, 1)]
    for turn in range(3):
        state = states[-1].clone()
        state[:, turn] = every[:, turn]
        states.append(state)
    costs = np.stack([env(state.numpy()).step_ns for state in states]).astype(float)
    turns = torch.arange(3).repeat_interleave(8)
    logits = policy(torch.cat(states[:3]), turns)
    log_probs = log_prob(logits, every.T.flatten()).reshape(3, 8)
    probability = log_probs.sum(0).exp()
    gain = torch.as_tensor(np.log(costs[0] / costs[-1]), dtype=torch.float32)
    exact = _gradient(policy, (probability * gain).sum())
    baseline = torch.tensor([[0.3], [-0.2], [0.1]])
    for rewards in (improvements(costs), improvements(np.stack([costs[0]] * 3 + [costs[3]]))):
        returns = torch.as_tensor(discounted(rewards, 1.0), dtype=torch.float32)
        weight = (returns - baseline) * probability.detach() * 24
        log_probs = log_prob(policy(torch.cat(states[:3]), turns), every.T.flatten())
        found = _gradient(policy, -reinforce(log_probs, weight.flatten()))
        assert torch.allclose(found, exact, atol=1e-4 * float(exact.abs().max()))


def _gradient(policy: torch.nn.Module, value: torch.Tensor) -> torch.Tensor:
    policy.zero_grad()
    value.backward(retain_graph=True)
    return torch.cat([w.grad.flatten() for w in policy.parameters() if w.grad is not None])


def _paths(monkeypatch: pytest.MonkeyPatch, placer: Placeto) -> list[list[int]]:
    """Placements that a run on a small layered graph scores."""
    seen: list[list[int]] = []
    score = Environment.__call__

    def scoring(self: Environment, actions: Any) -> Any:
        seen.extend(np.asarray(actions).tolist())
        return score(self, actions)

    monkeypatch.setattr(Environment, "__call__", scoring)
    place(layered(2), placer, "40ev", 0)
    return seen


def test_one_group_changes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With improvements, each placement of an episode differs from the one before in one group."""
    seen = _paths(monkeypatch, Placeto(reward="improvement", episodes=1, rounds=1))
    start = seen[0]
    turns = []
    for before, after in itertools.pairwise(seen):
        if after == start:
            turns.append(-1)
            continue
        (changed,) = [k for k in range(len(start)) if before[k] != after[k]]
        turns.append(changed)
    assert turns[0] >= 0
    assert all(b > a or b == -1 for a, b in itertools.pairwise(turns))


def test_final_rewards_need_one_evaluation_per_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 evaluations are four updates of the start and 8 ends, and what is left."""
    seen = _paths(monkeypatch, Placeto(rounds=1))
    assert [seen[k] for k in (9, 18, 27)] == [seen[0]] * 3


def test_only_stored_actions_are_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """The actions that are weighed lead from each state to the next, up to what was scored last."""
    import devplace.research.placeto as module

    ends: list[list[int]] = []
    score, weigh = Environment.__call__, module.log_prob

    def scoring(self: Environment, actions: Any) -> Any:
        ends[:] = np.asarray(actions).tolist()
        return score(self, actions)

    def weighing(logits: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        assert actions.reshape(-1, len(ends)).T.tolist() == ends
        return weigh(logits, actions)

    monkeypatch.setattr(Environment, "__call__", scoring)
    monkeypatch.setattr(module, "log_prob", weighing)
    place(layered(2), Placeto(rounds=1), "36ev", 0)
    assert len(ends) == 8


def test_memory_is_penalised_softly_or_hard(tmp_path: Path) -> None:
    """Both rules run on devices of which one is too small for everything."""
    for memory in ("published", "hard"):
        placer = replace(Placeto(rounds=1), memory=memory)
        found = place(three_ops(memory=3), logged(placer, tmp_path / memory), "90ev", 0)
        assert found.is_feasible
        assert len(curves(tmp_path / memory)) == 10


def test_rows_of_weights_sum_to_one() -> None:
    """Those without members stay empty."""
    assert mean_weights(torch.tensor([[1, 1], [0, 0]])).tolist() == [[0.5, 0.5], [0.0, 0.0]]
