"""Post: independent softmax choices, learned by PPO and now and then by cross-entropy minimisation.

Paper: Gao, Chen, Li (2018), Post: Device placement with cross-entropy minimization and proximal
policy optimization, NeurIPS. The policy is a softmax for each group m of ops, with no network:

    f(d | u) = prod_m softmax(u_m)[d_m],   u = 0 at first.

Placements are drawn from it and scored. After every K of them, some gradient steps on PPO's
objective (equation 11), here the form with a penalty, per group as the policy factors:

    J(u) = mean_{n, m} [ f(d_m | u) / f(d_m | u_old) A_n ] - beta mean_m KL(f_m(u_old) || f_m(u)).

After every N = several K of them instead, cross-entropy minimisation in closed form (equation 10):
the distribution nearest to the uniform one over the elite, the best tenth of the last N, is that of
maximum likelihood, so f_m(d) = share of elite placements with group m on d; then it is mixed with
the uniform distribution, f <- (1 - eps) f + eps / D, so that nothing is ruled out.

Hyper-parameters. Published: elites 0.1, ten PPO steps, 2,400 samples, u = 0. Not published, so
chosen here and tuned on nmt-4: K, N, eps, the learning rates, the penalty.

Differs from the paper in:

- The advantage A is a reward -sqrt(step) less the mean of the K samples, scaled to unit deviation
  over them. The paper's is not known. The moving average of rewards is for the curves alone.
- Groups come from `grouping.colocated`, at most `groups` of them.
- Memory: a placement that does not fit costs more than all that fit (`penalties.HardLimit`); the
  paper has no rule for these.
- Elites are those of the last N samples and of these only, as in the paper; so the distribution may
  get worse. The best placement seen is returned.

The parts alone, which the paper compares with: `PostCe`, `PostPpo`, and `PostPg`, one plain policy
gradient step per K samples.
"""
# mypy: allow-subclassing-any

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from devplace.placers.counted_simulator import Evaluator
from devplace.problem import Placement, Problem
from devplace.research.environment import Environment, nothing_to_place
from devplace.research.grouping import colocated
from devplace.research.losses import adapted_beta, ppo_penalty, reinforce, standardised
from devplace.research.options import TrainingOptions, check_settings
from devplace.research.penalties import HardLimit, MovingAverage, sqrt_reward
from devplace.research.policies import divergence, entropy, log_prob, masked, sample
from devplace.research.training import Training, Values

F64 = NDArray[np.float64]


@dataclass(frozen=True)
class Post:
    """Cross-entropy minimisation and PPO in turns, for a softmax per group.

    Attributes:
        groups: Most groups that are placed.
        per_update: K, samples between PPO updates.
        per_batch: N, samples between cross-entropy updates; 0: none of these.
        elite: Share of the N that is elite.
        mix: eps, weight of the uniform distribution after a cross-entropy update.
        steps: Gradient steps per PPO update; 0: none of these.
        learning_rate: Of these steps (Adam).
        kl_target: Divergence per group that the penalty aims at, nats.
        baseline_decay: Of the moving average of rewards in the curves; nothing is learned from it.
        is_plain: Plain policy gradient: one step per K samples, without PPO's ratio and penalty.
        training: Curves, checkpoints, early stop.
    """

    name: str = "post"
    groups: int = 64
    per_update: int = 20
    per_batch: int = 200
    elite: float = 0.1
    mix: float = 0.01
    steps: int = 10
    learning_rate: float = 0.05
    kl_target: float = 0.01
    baseline_decay: float = 0.9
    is_plain: bool = False
    training: TrainingOptions = field(default=TrainingOptions(), repr=False)

    def __post_init__(self) -> None:
        check_settings(self, zero=("per_batch", "steps"))

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
        policy = Choices(torch.as_tensor(environment.allowed))
        optimizer = torch.optim.Adam(policy.parameters(), self.learning_rate)
        cost, baseline = HardLimit(environment.limit_bytes), MovingAverage(self.baseline_decay)
        kept = Values(beta=1.0, actions=torch.zeros(0, environment.num_groups).long(), costs=[])
        training.track(policy=policy, optimizer=optimizer, cost=cost, baseline=baseline, kept=kept)
        while not training.is_done:
            count = environment.room(self.per_update)
            if self.per_batch:
                count = min(count, self.per_batch - len(kept.actions))
            actions = sample(policy().detach().expand(count, -1, -1), training.generator)
            outcome = environment(actions.numpy())
            costs = cost(outcome)
            advantage = sqrt_reward(costs)
            advantage = advantage - baseline.update(advantage)
            kept.actions = torch.cat([kept.actions, actions])
            kept.costs = [*kept.costs, *costs.tolist()]

            before = policy().detach()
            if self.per_batch and len(kept.actions) == self.per_batch:
                shares = elite_shares(
                    kept.actions, np.array(kept.costs), self.elite, policy.allowed
                )
                policy.set(mixed(shares, policy.allowed, self.mix))
                optimizer.state.clear()  # momentum of the distribution before
                kept.actions, kept.costs = kept.actions[:0], []
            elif self.steps:
                scaled = standardised(torch.as_tensor(advantage, dtype=torch.float32))
                self._improve(policy, optimizer, actions, scaled, kept.beta)
                moved = float(divergence(before, policy().detach()).mean())
                kept.beta = adapted_beta(kept.beta, moved, self.kl_target)
            if not self.per_batch:
                kept.actions, kept.costs = kept.actions[:0], []
            training.log(
                outcome,
                entropy=float(entropy(policy().detach()).mean()),
                kl=float(divergence(before, policy().detach()).mean()),
                baseline=baseline.value,
                beta=kept.beta,
            )
        return environment.best()

    def _improve(
        self,
        policy: Choices,
        optimizer: torch.optim.Optimizer,
        actions: Tensor,
        advantage: Tensor,
        beta: float,
    ) -> None:
        """Gradient steps on the samples just scored; one for the plain policy gradient."""
        old = policy().detach()
        old_log_prob = log_prob(old.expand(*actions.shape, -1), actions)
        for _ in range(1 if self.is_plain else self.steps):
            logits = policy()
            now = log_prob(logits.expand(*actions.shape, -1), actions)
            if self.is_plain:
                loss = reinforce(now.sum(1), advantage)
            else:
                kl = divergence(old, logits)
                loss = ppo_penalty(now, old_log_prob, advantage[:, None], kl, beta)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@dataclass(frozen=True)
class PostCe(Post):
    """Post without PPO: cross-entropy minimisation alone."""

    name: str = "post-ce"
    steps: int = 0


@dataclass(frozen=True)
class PostPpo(Post):
    """Post without cross-entropy minimisation: PPO alone."""

    name: str = "post-ppo"
    per_batch: int = 0


@dataclass(frozen=True)
class PostPg(Post):
    """The policy gradient alone, for the same policy."""

    name: str = "post-pg"
    per_batch: int = 0
    learning_rate: float = 0.3
    is_plain: bool = True


class Choices(nn.Module):
    """The policy: logits u, zero at first. `[M, A]`

    Args:
        allowed: Devices each group may go to. bool `[M, A]`
    """

    def __init__(self, allowed: Tensor) -> None:
        super().__init__()
        self.allowed = allowed
        self.u = nn.Parameter(torch.zeros(allowed.shape))

    def forward(self) -> Tensor:
        """Logits. `[M, A]`"""
        return masked(self.u, self.allowed)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def set(self, shares: Tensor) -> None:
        """Take over a distribution. `[M, A]`"""
        self.u.copy_(shares.clamp_min(1e-12).log())


def elite_shares(actions: Tensor, costs: F64, elite: float, allowed: Tensor) -> Tensor:
    """Equation 10: how often each group is on each device in the cheapest placements. `[M, A]`

    Args:
        actions: `[N, M]`
        costs: `[N]`
        elite: Share of the placements that count; at least one does. Of equal ones the earlier.
        allowed: Only for its shape, `[M, A]`.
    """
    count = max(1, round(elite * len(costs)))
    best = actions[torch.as_tensor(np.argsort(costs, kind="stable")[:count])]
    return nn.functional.one_hot(best, allowed.shape[1]).float().mean(0)


def mixed(shares: Tensor, allowed: Tensor, mix: float) -> Tensor:
    """`(1 - eps) f + eps / D`, where D counts the devices a group may go to. `[M, A]`"""
    uniform = allowed.float() / allowed.sum(1, keepdim=True)
    return (1 - mix) * shares + mix * uniform
