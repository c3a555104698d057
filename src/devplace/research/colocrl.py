"""ColocRL: a sequence-to-sequence policy over co-located groups, learned by REINFORCE.

Paper: Mirhoseini et al. (2017), Device placement optimization with reinforcement learning, ICML,
arXiv 1706.04972. Ops are joined into groups by hand-made heuristics (`grouping.colocated`). An LSTM
reads their embeddings, another one with attention gives a device for each in turn. Of every K
placements drawn from it, with R = -sqrt(step time) and b a moving average of R,

    grad J = 1/K sum_n (R_n - b) grad log p(placement n).

A placement that fails has a constant large step time; after many updates failing samples no longer
count, so that an unlucky one cannot undo what was learned.

Hyper-parameters: that the reward is the square root and the baseline a moving average is published;
K, learning rate, decay, sizes and constants were not found. Chosen here and tuned on nmt-4: all of
them; what HDP's authors give for the same kind of network (failing signal, logits bounded by
`C tanh(l / T)` with C = 5, gradient norm 1) is taken from there.

Differs from the paper in:

- One process draws K placements at once, instead of several controllers with a parameter server.
- The encoder reads both directions, as HDP's does.
- Group embeddings are `features.group_features`: type counts where the paper learns an embedding of
  each type.
- A bonus keeps the entropy up, `entropy_weight * (deviation of R) / sqrt(groups)` for each group's:
  without it the policy collapses within a few hundred samples, even on three ops, as all groups
  share its weights. For the same reason the moving average is short: one that lags rewards whatever
  was drawn.
- `memory = "hard"` has failures cost more than all that fit (`penalties.HardLimit`) and count
  always.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from devplace.placers.counted_simulator import Evaluator
from devplace.problem import Placement, Problem
from devplace.research.environment import Environment, nothing_to_place
from devplace.research.features import group_features
from devplace.research.grouping import colocated
from devplace.research.losses import approximate_kl, reinforce
from devplace.research.options import TrainingOptions, check_settings
from devplace.research.penalties import MovingAverage, failing_signal, memory_rule, sqrt_reward
from devplace.research.policies import entropy, log_prob
from devplace.research.seq2seq import Seq2Seq
from devplace.research.training import Training


@dataclass(frozen=True)
class ColocRl:
    """REINFORCE for a sequence-to-sequence policy over co-located groups.

    Attributes:
        groups: Most groups that are placed.
        samples: K, placements per update.
        hidden: Size of the LSTMs.
        attention: Width of the attention's hidden layer.
        tanh_constant, temperature: C and T of the logits.
        learning_rate: Adam's.
        gradient_norm: The gradient is scaled down to it.
        baseline_decay: Of the moving average of rewards.
        entropy_weight: Of the bonus for entropy, see the module; 0: none.
        memory: `published`: a failing placement counts as `failing_s`; `hard`: see the module.
        failing_s: Step time of a failing placement, s.
        ignore_failing_after: Updates after which failing samples no longer count.
        training: Curves, checkpoints, early stop.
    """

    name: str = "colocrl"
    groups: int = 64
    samples: int = 10
    hidden: int = 128
    attention: int = 64
    tanh_constant: float = 5.0
    temperature: float = 1.0
    learning_rate: float = 0.005
    gradient_norm: float = 1.0
    baseline_decay: float = 0.5
    entropy_weight: float = 1.0
    memory: Literal["published", "hard"] = "published"
    failing_s: float = 100.0
    ignore_failing_after: int = 5000
    training: TrainingOptions = field(default=TrainingOptions(), repr=False)

    def __post_init__(self) -> None:
        check_settings(self, zero=("ignore_failing_after",), even=("hidden",))

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
        baseline = MovingAverage(self.baseline_decay)
        training.track(policy=policy, optimizer=optimizer, baseline=baseline, cost=cost)
        while not training.is_done:
            count = environment.room(self.samples)
            actions, drawn_from = policy.act(groups, count, training.generator, allowed)
            outcome = environment(actions.cpu().numpy())
            reward = sqrt_reward(cost(outcome))
            counts = np.ones(count, bool)
            if self.memory == "published" and training.updates >= self.ignore_failing_after:
                counts = ~outcome.failed
            advantage = reward - baseline.update(reward[counts])

            logits = policy.logits(groups, actions, allowed)
            log_probs = log_prob(logits, actions).sum(1)
            weight = torch.as_tensor(advantage * counts, dtype=torch.float32).to(training.device)
            spread = float(reward.std())
            weight_each = self.entropy_weight * spread / environment.num_groups**0.5
            bonus = weight_each * entropy(logits).sum(1).mean()
            loss = reinforce(log_probs, weight) - bonus
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), self.gradient_norm)
            optimizer.step()
            training.log(
                outcome,
                entropy=float(entropy(drawn_from).mean()),
                kl=float(approximate_kl(log_probs, log_prob(drawn_from, actions).sum(1))),
                baseline=baseline.value,
                loss=float(loss.detach()),
            )
        return environment.best()
