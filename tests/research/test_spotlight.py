"""Spotlight: its surrogate, its penalty, and what it scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from devplace.errors import InputError
from devplace.placers import place
from devplace.research.features import group_features
from devplace.research.options import TrainingOptions
from devplace.research.penalties import sqrt_reward
from devplace.research.policies import log_prob
from devplace.research.seq2seq import Seq2Seq
from devplace.research.spotlight import Spotlight
from tests.research.cases import all_actions, curves, environment, layered, logged, three_ops

SMALL: dict[str, Any] = {"hidden": 8, "attention": 4, "training": TrainingOptions(device="cpu")}


def test_the_first_gradient_is_that_of_exact_enumeration() -> None:
    """Three ops on two devices: before the policy moves, the surrogate over all 8 placements,
    weighted by probability, has minus the gradient of the expected reward, per stage."""
    env = environment(three_ops())
    groups = torch.as_tensor(group_features(env.grouping))[None]
    torch.manual_seed(0)
    policy = Seq2Seq(groups.shape[2], 2, hidden=8, temperature=1.0)
    every = all_actions(3, 2)
    actions = torch.as_tensor(every)
    reward = torch.as_tensor(sqrt_reward(env(every).step_ns / 1.0), dtype=torch.float32)
    logits = policy.logits(groups, actions)
    probability = log_prob(logits, actions).sum(1).exp()
    parameters = list(policy.parameters())
    exact = torch.autograd.grad((probability * reward).sum(), parameters, retain_graph=True)
    weight = len(every) * probability.detach() * reward
    loss = Spotlight(entropy_weight=0.0)._loss(logits, logits.detach(), actions, weight, 1.0)
    found = torch.autograd.grad(loss, parameters)
    assert sum(float(grad.norm()) for grad in exact) > 0
    for one, other in zip(found, exact, strict=True):  # the surrogate is a mean over 3 stages
        assert torch.allclose(-3 * one, other, atol=1e-5)


def test_the_loss_by_hand() -> None:
    """One group, two devices, old and new (1/2, 1/2): -A, less the entropy's weight times log 2."""
    logits = torch.zeros(1, 1, 2)
    loss = Spotlight(entropy_weight=0.1)._loss(
        logits, logits, torch.zeros(1, 1, dtype=torch.int64), torch.tensor([3.0]), 2.0
    )
    assert loss.item() == pytest.approx(-3.0 - 0.1 * np.log(2))


def test_the_penalty_holds_the_divergence_near_its_target(tmp_path: Any) -> None:
    """Where updates move too far, beta doubles until they do not."""
    placer = Spotlight(**{**SMALL, "kl_target": 1e-4}, learning_rate=0.05)
    place(layered(2), logged(placer, tmp_path), "100ev", 0)
    rows = curves(tmp_path)
    betas, moved = [row["beta"] for row in rows], [row["kl"] for row in rows]
    for before, beta, kl in zip([1.0, *betas], betas, moved, strict=False):
        assert before is not None
        assert kl is not None
        factor = 2 if kl > 1.5e-4 else 0.5 if kl < 1e-4 / 1.5 else 1
        assert beta == before * factor
    assert max(beta for beta in betas if beta is not None) > 4


def test_a_wrong_memory_rule_is_told() -> None:
    """Only `published` and `hard` are known."""
    with pytest.raises(InputError, match="must be published or hard, got 'soft'"):
        place(three_ops(), Spotlight(**SMALL, memory="soft"), "20ev", 0)  # type: ignore[arg-type]
