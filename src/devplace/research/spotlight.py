"""Spotlight: placement as a decision process of many stages, learned by PPO with a penalty on KL.

Paper: Gao, Chen, Li (2018), Spotlight: Optimizing device placement for training deep neural
networks, ICML. At stage m the state s_m is where the groups before m are; the action a_m is the
device of group m; the only reward comes at the end, R = -sqrt(step time). A recurrent network with
attention gives pi(a_m | s_m). Of every K placements drawn from it, with A_n their advantage, some
gradient steps on PPO's surrogate with a penalty, stage by stage:

    J = mean_{n, m} [ pi(a_m | s_m) / pi_old(a_m | s_m) A_n - beta KL(pi_old || pi at s_m) ].

That the policy improves is guaranteed while the divergence at each stage stays small, so beta
follows it: doubled when KL is above 1.5 targets, halved when below target / 1.5. States and actions
are those that were drawn and scored.

Hyper-parameters: none of K, steps, learning rate, sizes and KL's target was found; neither was how
beta changes, for which PPO's own rule is taken. Chosen here: all of them; KL's target was tuned
on nmt-4, the bonus for entropy is what tiny graphs need.

Differs from the paper in:

- The encoder reads both directions and has one layer; the paper's network is said to have two.
- The advantage is the reward less the mean of the K, scaled to unit deviation. The paper's is not
  known.
- Groups come from `grouping.colocated`, at most `groups` of them.
- A bonus keeps the entropy up (`entropy_weight`), as all groups share the policy's weights.
- Memory: the paper has no rule for placements that fail. `published` gives them a constant step
  time, as ColocRL does; `hard` has them cost more than all that fit (`penalties.HardLimit`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from devplace.placers.counted_simulator import Evaluator
from devplace.problem import Placement, Problem
from devplace.research.environment import Environment, nothing_to_place
from devplace.research.features import group_features
from devplace.research.grouping import colocated
from devplace.research.losses import adapted_beta, ppo_penalty, standardised
from devplace.research.options import TrainingOptions, check_settings
from devplace.research.penalties import failing_signal, memory_rule, sqrt_reward
from devplace.research.policies import divergence, entropy, log_prob
from devplace.research.seq2seq import Seq2Seq
from devplace.research.training import Training, Values


@dataclass(frozen=True)
class Spotlight:
    """PPO with a penalty for a policy that places one group after the other.

    Attributes:
        groups: Most groups that are placed.
        samples: K, placements per update.
        steps: Gradient steps per update.
        hidden: Size of the LSTMs.
        attention: Width of the attention's hidden layer.
        tanh_constant, temperature: C and T of the logits, `C tanh(l / T)`.
        learning_rate: Adam's.
        gradient_norm: The gradient is scaled down to it.
        kl_target: Divergence per stage that the penalty aims at, nats.
        entropy_weight: Of the mean entropy per stage.
        memory: `hard` or `published`, see the module.
        failing_s: Step time of a failing placement, s, if `published`.
        training: Curves, checkpoints, early stop.
    """

    name: str = "spotlight"
    groups: int = 64
    samples: int = 10
    steps: int = 8
    hidden: int = 128
    attention: int = 64
    tanh_constant: float = 5.0
    temperature: float = 1.0
    learning_rate: float = 0.002
    gradient_norm: float = 1.0
    kl_target: float = 0.01
    entropy_weight: float = 0.1
    memory: Literal["published", "hard"] = "hard"
    failing_s: float = 100.0
    training: TrainingOptions = field(default=TrainingOptions(), repr=False)

    def __post_init__(self) -> None:
        check_settings(self, even=("hidden",))

    def supports(self, problem: Problem) -> str:
        """Wherever there are ops to place."""
        return nothing_to_place(problem)

    def __call__(
        self, problem: Problem, evaluate: Evaluator, rng: np.random.Generator
    ) -> Placement:
        """Learn until the budget is spent; gives the best placement seen."""
        environment = Environment(evaluate, colocated(problem, self.groups))
        with Training(self, environment, rng) as training:
            return self._learn(environment, training)

    def _learn(self, environment: Environment, training: Training) -> Placement:
        groups = torch.as_tensor(group_features(environment.grouping))[None].to(training.device)
        allowed = torch.as_tensor(environment.allowed).to(training.device)
        with training.seeded():
            policy = Seq2Seq(
                groups.shape[2],
                environment.num_actions,
                self.hidden,
                self.tanh_constant,
                self.temperature,
                self.attention,
            ).to(training.device)
        optimizer = torch.optim.Adam(policy.parameters(), self.learning_rate)
        cost = memory_rule(
            self.memory, environment, lambda outcome: failing_signal(outcome, self.failing_s)
        )
        kept = Values(beta=1.0)
        training.track(policy=policy, optimizer=optimizer, cost=cost, kept=kept)
        while not training.is_done:
            count = environment.room(self.samples)
            actions, old = policy.act(groups, count, training.generator, allowed)
            outcome = environment(actions.cpu().numpy())
            reward = torch.as_tensor(sqrt_reward(cost(outcome)), dtype=torch.float32)
            advantage = standardised(reward).to(training.device)

            for _ in range(self.steps):
                logits = policy.logits(groups, actions, allowed)
                loss = self._loss(logits, old, actions, advantage, kept.beta)
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(policy.parameters(), self.gradient_norm)
                optimizer.step()
            with torch.no_grad():
                moved = divergence(old, policy.logits(groups, actions, allowed)).mean()
            kept.beta = adapted_beta(kept.beta, float(moved), self.kl_target)
            training.log(
                outcome,
                entropy=float(entropy(old).mean()),
                kl=float(moved),
                baseline=float(reward.mean()),
                loss=float(loss.detach()),
                beta=kept.beta,
            )
        return environment.best()

    def _loss(
        self, logits: Tensor, old: Tensor, actions: Tensor, advantage: Tensor, beta: float
    ) -> Tensor:
        """`-J` less the bonus for entropy. Logits `[B, M, A]`, actions `[B, M]`, advantage `[B]`"""
        surrogate = ppo_penalty(
            log_prob(logits, actions),
            log_prob(old, actions),
            advantage[:, None],
            divergence(old, logits),
            beta,
        )
        return surrogate - self.entropy_weight * entropy(logits).mean()
