"""HDP: embeddings, the joint gradient, stored draws, ablations."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from devplace.placers import place
from devplace.problem import Problem
from devplace.research import features
from devplace.research.environment import Environment
from devplace.research.grouping import Grouping
from devplace.research.hdp import (
    Draw,
    FlatPolicy,
    Hdp,
    HdpNoGrouping,
    HdpRandomGrouping,
    Planner,
)
from devplace.research.losses import reinforce
from devplace.research.op_embeddings import OpEmbeddings
from devplace.research.options import TrainingOptions
from devplace.research.penalties import sqrt_reward
from devplace.testing import hand_machine, hand_problem
from tests.research.cases import environment, layered, three_ops

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "hidden": 8,
    "attention": 4,
    "grouper_hidden": 8,
    "training": TrainingOptions(device="cpu"),
}


def planner(env: Environment, groups: int, **others: Any) -> Planner:
    """Small networks."""
    torch.manual_seed(0)
    found = Hdp(groups=groups, **SMALL, **others).policy(env, torch.Generator(), CPU)
    assert isinstance(found, Planner)
    return found


def pinned() -> Problem:
    """Two ops of which the first must be on gpu:1, and one that is free."""
    return hand_problem(
        """
        x = input bytes=1
        a = f(x) bytes=1 ns=10,10
        b = g(a) bytes=1 ns=10,10
        c = h(b) bytes=1 ns=10,10 result=output
        """,
        hand_machine({"gpu:0": 100, "gpu:1": 100}),
        pins={"a": "gpu:1"},
    )


def test_the_joint_gradient_is_that_of_exact_enumeration() -> None:
    """Three ops, two groups, two devices: over all 8 groupings and 4 placements of each, the loss
    weighted by probability has minus the gradient of the expected reward."""
    env = environment(three_ops())
    policy = planner(env, groups=2)
    draws = [
        Draw(torch.tensor(grouping), torch.tensor([actions]), None, None)
        for grouping in itertools.product(range(2), repeat=3)
        for actions in itertools.product(range(2), repeat=2)
    ]
    outcome = env(np.concatenate([draw.op_actions() for draw in draws]))
    rewards = torch.as_tensor(sqrt_reward(outcome.step_ns / 1.0), dtype=torch.float32)
    parameters = list(policy.parameters())

    log_prob, *_ = policy.log_prob(draws)
    assert float(log_prob.exp().sum().detach()) == pytest.approx(1, abs=1e-5)
    exact = torch.autograd.grad((log_prob.exp() * rewards).sum(), parameters, retain_graph=True)
    weights = len(draws) * log_prob.exp().detach() * (rewards + 5.3)  # any baseline
    found = torch.autograd.grad(reinforce(log_prob, weights), parameters)
    assert sum(float(grad.norm()) for grad in exact) > 0
    for one, other in zip(found, exact, strict=True):
        assert torch.allclose(-one, other, atol=1e-5)


@pytest.mark.parametrize("placer", [Hdp, HdpRandomGrouping, HdpNoGrouping])
def test_the_executed_draws_are_the_ones_scored(
    placer: type[Hdp], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groupings and placements in the loss are those the environment ran, with their noise: their
    probabilities are those they were drawn with. (The released code drew new ones.)"""
    ran: list[Any] = []
    scored: list[Any] = []
    run = Environment.__call__
    for policy in (Planner, FlatPolicy):
        original = policy.log_prob

        def weigh(self: Any, draws: list[Draw], original: Any = original) -> Any:
            if torch.is_grad_enabled():
                scored.append(np.concatenate([draw.op_actions() for draw in draws]).tolist())
            return original(self, draws)

        monkeypatch.setattr(policy, "log_prob", weigh)

    def call(self: Environment, actions: Any) -> Any:
        ran.append(np.asarray(actions).tolist())
        return run(self, actions)

    monkeypatch.setattr(Environment, "__call__", call)
    place(layered(2), placer(**SMALL, grouper_samples=2, placer_samples=3), "22ev", 0)
    assert [len(rows) for rows in ran] == [6, 6, 6, 4]
    assert scored == ran


def test_noise_is_the_same_when_drawn_and_scored() -> None:
    """Logits at drawing time, noise included, equal those of the stored draw."""
    policy = planner(environment(layered(2)), groups=4)
    groups = torch.randn(1, 4, policy.placer.encoder.input_size)
    noise = 0.5 * torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(1))
    actions, drawn = policy.placer.act(groups, 5, torch.Generator().manual_seed(0), None, noise)
    assert torch.allclose(drawn, policy.placer.logits(groups, actions, None, noise), atol=1e-5)
    assert not torch.allclose(drawn, policy.placer.logits(groups, actions), atol=1e-3)


def test_group_embeddings_are_those_of_the_features() -> None:
    """For any grouping without empty groups, the quick embedding is `features.group_features`."""
    env = environment(layered(3))
    ops = OpEmbeddings(env, 5, CPU)
    grouping = torch.as_tensor(np.random.default_rng(0).permutation(env.num_groups) % 5)
    _, first = np.unique(grouping.numpy(), return_index=True)
    rank = np.argsort(np.argsort(first))  # a Grouping is numbered by first task
    renumbered = rank[grouping.numpy()].astype(np.int32)
    expected = features.group_features(Grouping(env.problem, renumbered))
    found = ops.groups(torch.as_tensor(renumbered).long())[0].numpy()
    assert found.shape == (5, ops.group_width)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_op_embeddings_by_hand() -> None:
    """Types are one-hot; the other columns have mean 0 and deviation 1, or are constant."""
    ops = OpEmbeddings(environment(three_ops()), 2, CPU)
    assert ops.rows.shape == (3, 3 + 46)
    assert ops.rows[:, :3].tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    columns = ops.rows[:, 3:]
    deviation = columns.std(0, correction=0)
    assert columns.mean(0).abs().max() < 1e-6
    assert all(d == pytest.approx(1, abs=1e-5) or d < 1e-6 for d in deviation.tolist())


def test_groups_with_pinned_ops_go_where_these_may() -> None:
    """The Placer never draws a device that a member may not take; empty groups are free."""
    env = environment(pinned())
    ops = OpEmbeddings(env, 3, CPU)
    allowed = ops.allowed(torch.tensor([1, 1, 0]))
    assert allowed is not None
    assert allowed.tolist() == [[True, True], [False, True], [True, True]]
    policy = planner(env, groups=2)
    for draw in policy.draw(40, 1, 0.5, torch.Generator().manual_seed(0)):
        assert draw.op_actions()[0, 0] == 1


def test_random_groups_are_of_equal_size_and_stay() -> None:
    """Every draw has the same groups, whose sizes differ by at most 1."""
    env = environment(layered(3))
    policy = HdpRandomGrouping(groups=5, **SMALL).policy(env, torch.Generator().manual_seed(0), CPU)
    draws = policy.draw(8, 4, 0.5, torch.Generator().manual_seed(0))
    assert torch.equal(draws[0].grouping, draws[1].grouping)
    sizes = torch.bincount(draws[0].grouping)
    assert len(sizes) == 5
    assert int(sizes.max() - sizes.min()) <= 1


def test_there_are_no_more_groups_than_ops() -> None:
    """20 per device, at most 256, at most one per op."""
    assert Hdp().num_groups(environment(three_ops())) == 3
    assert Hdp().num_groups(environment(layered(12))) == 48
    assert Hdp(groups=7).num_groups(environment(layered(12))) == 7
    assert Hdp().num_groups(environment(layered(30))) == 60
