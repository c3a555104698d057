"""Losses of learned placers against hand-worked numbers and exact enumeration."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from devplace.research import losses, policies
from devplace.research.penalties import sqrt_reward
from tests.research.cases import all_actions, environment, exact_gradient, three_ops


def setting() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of 3 ops on 2 devices, all 8 placements, their probabilities and rewards."""
    every = all_actions(3, 2)
    outcome = environment(three_ops())(every)
    rewards = torch.as_tensor(sqrt_reward(outcome.step_ns / 1.0))
    logits = torch.tensor([[0.3, -0.2], [0.0, 0.5], [-0.4, 0.1]], dtype=torch.float64)
    actions = torch.as_tensor(every)
    log_prob = policies.log_prob(logits.expand(8, 3, 2), actions).sum(1)
    return logits, actions, log_prob.exp(), rewards


@pytest.mark.parametrize("baseline", [0.0, -4.2])
def test_reinforce_is_unbiased(baseline: float) -> None:
    """Weighted by their probabilities, all 8 placements give minus the exact gradient of the
    expected reward, whatever the baseline."""
    logits, actions, probability, rewards = setting()
    variable = logits.clone().requires_grad_()
    log_prob = policies.log_prob(variable.expand(8, 3, 2), actions).sum(1)
    loss = losses.reinforce(log_prob, 8 * probability * (rewards - baseline))
    loss.backward()
    expected = exact_gradient(logits, rewards.numpy())
    assert torch.allclose(-variable.grad, expected, atol=1e-12)  # type: ignore[operator]


def test_samples_approach_the_exact_gradient() -> None:
    """The gradient from 40,000 drawn placements is the exact one within a few percent."""
    logits, _, _, rewards = setting()
    variable = logits.clone().requires_grad_()
    drawn = policies.sample(logits.expand(40_000, 3, 2), torch.Generator().manual_seed(0))
    index = (drawn * torch.tensor([4, 2, 1])).sum(1)
    log_prob = policies.log_prob(variable.expand(40_000, 3, 2), drawn).sum(1)
    losses.reinforce(log_prob, rewards[index] - rewards.mean()).backward()
    expected = exact_gradient(logits, rewards.numpy())
    error = (-variable.grad - expected).norm() / expected.norm()  # type: ignore[operator]
    assert float(error) < 0.05


@pytest.mark.parametrize("kind", ["clip", "penalty"])
def test_the_first_step_of_ppo_is_the_policy_gradient(kind: str) -> None:
    """Where old and new policy are the same, both forms of PPO have REINFORCE's gradient."""
    logits, actions, probability, rewards = setting()
    grads = []
    for which in ("reinforce", kind):
        variable = logits.clone().requires_grad_()
        per_group = policies.log_prob(variable.expand(8, 3, 2), actions)
        log_prob, weight = per_group.sum(1), 8 * probability * rewards
        if which == "reinforce":
            loss = losses.reinforce(log_prob, weight)
        elif which == "clip":
            loss = losses.ppo_clip(log_prob, log_prob.detach(), weight, 0.2)
        else:
            kl = policies.divergence(logits, variable)
            loss = losses.ppo_penalty(log_prob, log_prob.detach(), weight, kl, 3.0)
        loss.backward()
        grads.append(variable.grad)
    assert torch.allclose(grads[0], grads[1], atol=1e-12)  # type: ignore[arg-type]


def test_good_placements_become_likelier() -> None:
    """A step down any loss raises the probability of what had the higher reward."""
    for loss_of in (
        lambda now, old, adv: losses.reinforce(now, adv),
        lambda now, old, adv: losses.ppo_clip(now, old, adv, 0.2),
        lambda now, old, adv: losses.ppo_penalty(now, old, adv, torch.zeros(1), 1.0),
    ):
        logits = torch.zeros(1, 2, requires_grad=True)
        actions = torch.tensor([[0], [1]])
        now = policies.log_prob(logits.expand(2, 1, 2), actions).sum(1)
        loss_of(now, now.detach(), torch.tensor([-1.0, 1.0])).backward()
        after = logits.detach() - 0.1 * logits.grad  # type: ignore[operator]
        assert after[0, 1] > after[0, 0]


def test_clipping_by_hand() -> None:
    """Ratios 1.5 and 0.5 at clip 0.2: 1.2 for a good action, 0.5 where the bad side is not cut."""
    old = torch.zeros(4)
    now = torch.tensor([1.5, 0.5, 1.5, 0.5]).log()
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0])
    expected = -(1.2 + 0.5 - 1.5 - 0.8) / 4
    assert losses.ppo_clip(now, old, advantage, 0.2).item() == pytest.approx(expected)


def test_penalty_by_hand() -> None:
    """Ratio 2, advantage 3, divergence 0.5, beta 4: -6 + 2."""
    loss = losses.ppo_penalty(
        torch.tensor([math.log(2.0)]), torch.zeros(1), torch.tensor([3.0]), torch.tensor([0.5]), 4.0
    )
    assert loss.item() == pytest.approx(-4.0)
    assert losses.adapted_beta(1.0, kl=0.016, target=0.01) == 2.0
    assert losses.adapted_beta(1.0, kl=0.006, target=0.01) == 0.5
    assert losses.adapted_beta(1.0, kl=0.012, target=0.01) == 1.0


def test_entropy_and_divergence_by_hand() -> None:
    """(1/2, 1/2) has log 2; KL((1/2, 1/2) || (3/4, 1/4)) = 1/2 log 4/3; forbidden actions add
    nothing."""
    even, skewed = torch.tensor([0.0, 0.0]), torch.tensor([3.0, 1.0]).log()
    assert policies.entropy(even).item() == pytest.approx(math.log(2))
    expected = 0.5 * math.log(4 / 3)
    assert policies.divergence(even, skewed).item() == pytest.approx(expected)
    three = policies.masked(torch.zeros(3), torch.tensor([True, False, True]))
    assert policies.entropy(three).item() == pytest.approx(math.log(2))
    assert policies.divergence(three, three).item() == 0


def test_estimated_divergence_approaches_the_exact_one() -> None:
    """From 100,000 samples the estimate of KL is within 2 %."""
    old, new = torch.tensor([0.0, 0.4, -0.3]), torch.tensor([0.2, 0.1, 0.1])
    drawn = policies.sample(old.expand(100_000, 3), torch.Generator().manual_seed(1))
    estimate = losses.approximate_kl(
        policies.log_prob(new.expand(100_000, 3), drawn),
        policies.log_prob(old.expand(100_000, 3), drawn),
    )
    assert float(estimate) == pytest.approx(float(policies.divergence(old, new)), rel=0.02)


def test_bounded_logits_leave_a_chance() -> None:
    """With C = 5 the likelier of two devices has at most 1 / (1 + e^-10)."""
    logits = policies.bounded(torch.tensor([1e6, -1e6]), 5.0, 10.0)
    assert logits.tolist() == [5.0, -5.0]
    most = torch.softmax(logits.double(), -1)[0].item()
    assert most == pytest.approx(1 / (1 + math.exp(-10)))


def test_standardised_advantages() -> None:
    """Mean 0 and deviation 1; all zero where nothing differs."""
    found = losses.standardised(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert float(found.mean()) == pytest.approx(0, abs=1e-6)
    assert float(found.square().mean()) == pytest.approx(1)
    assert losses.standardised(torch.full((3,), 7.0)).tolist() == [0, 0, 0]


def test_sampling_follows_the_policy() -> None:
    """Frequencies of 50,000 draws are the softmax; what is forbidden is never drawn."""
    logits = policies.masked(torch.tensor([0.0, 5.0, 1.0]), torch.tensor([True, False, True]))
    drawn = policies.sample(logits.expand(50_000, 3), torch.Generator().manual_seed(0)).numpy()
    shares = np.bincount(drawn, minlength=3) / 50_000
    assert shares[1] == 0
    assert shares[2] == pytest.approx(math.e / (1 + math.e), abs=0.01)
