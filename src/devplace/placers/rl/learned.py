"""devplace's own learned placer: one policy for all graphs and machines, trained beforehand.

What the published systems lack is what it has: ops and devices are told by what they cost (times,
memory, links) and not by the names of their types; the number of groups follows from the graph
(`parting.worth_parting`); and the policy scores (group, device) pairs, so that it works on graphs
and numbers of devices it was not trained on.

1. Groups get embeddings by messages along the edges (`pair_policy`).
2. In the order of the graph, each group takes a device. What the policy sees of a pair (`scene`):
   how long the group would queue there, transfers to what is placed, memory left, speed, load.
3. The first evaluation is of the likeliest placement: with a budget of `1ev` that is the answer,
   always the same (*zero-shot*).
4. The rest of the budget is spent on fine-tuning: samples, PPO on the network and on a number per
   pair of its own, which only this problem has. The best placement seen is returned.

The weights that ship were trained by `experiments/train_learned.py` on some model families and many
machines; `weights.read` tells which. With `weights=None` there is no training before: the policy is
that of a list scheduler to begin with.

What it gives on full-size models of families that were not in training (one seed,
docs/results/generalisation.md): zero-shot steps of about half the best single device's, some over a
memory limit, before HEFT and behind `search`; with 100 samples better than Post with 100, a little
behind Post with 2,400. Training itself gained little: the untrained rule is better zero-shot (0.49
against 0.52 of the best single device), after 100 samples the two are equal (0.45, 0.44).

To let `search` go on from its answer:

    found = place(problem, Learned(), "1ev")
    better = place(problem, Search(start=found.placement), "30s")

Sources: features of pairs as in DOPPLER (Yao et al. 2025, arXiv 2505.23131); messages along edges
as in Placeto (Addanki et al. 2019, arXiv 1906.08879); PPO of Schulman et al. (2017), arXiv
1707.06347. Their combination, the queue over bins of time and the grouping are devplace's own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from devplace.placers.evaluate import Evaluator
from devplace.placers.rl.costs import HardLimit
from devplace.placers.rl.environment import Environment, Outcome
from devplace.placers.rl.losses import approximate_kl, ppo_clip, standardised
from devplace.placers.rl.options import TrainingOptions
from devplace.placers.rl.pair_policy import PairPolicy
from devplace.placers.rl.parting import worth_parting
from devplace.placers.rl.policies import entropy, log_prob
from devplace.placers.rl.scene import Scene
from devplace.placers.rl.training import Training, Values
from devplace.placers.rl.weights import SHIPPED, load_into
from devplace.problem import Placement, Problem


@dataclass(frozen=True)
class Learned:
    """A policy over (group, device) pairs, trained beforehand, fine-tuned within the budget.

    Attributes:
        weights: File of weights (`experiments/train_learned.py` writes them); None: untrained.
        samples: Placements per update.
        steps: Gradient steps per update.
        learning_rate: Of the network (Adam).
        own_rate: Of the numbers per pair.
        clip: Of PPO's ratio.
        hidden: Size of embeddings of an untrained network.
        training: Curves, checkpoints, early stop.
    """

    name: str = "learned"
    weights: Path | str | None = SHIPPED
    samples: int = 20
    steps: int = 5
    learning_rate: float = 3e-4
    own_rate: float = 0.1
    clip: float = 0.2
    hidden: int = 32
    training: TrainingOptions = field(default=TrainingOptions(), repr=False)

    def supports(self, problem: Problem) -> str:
        """Always."""
        return ""

    def __call__(
        self, problem: Problem, evaluate: Evaluator, rng: np.random.Generator
    ) -> Placement:
        """The likeliest placement, then fine-tuning; gives the best placement seen."""
        environment = Environment(evaluate, worth_parting(problem))
        with Training(self, environment, rng) as training:
            return self._learn(environment, training)

    def _learn(self, environment: Environment, training: Training) -> Placement:
        scene = Scene(environment)
        with training.seeded():
            policy = PairPolicy(self.hidden)
        if self.weights is not None:
            load_into(policy, self.weights)
        policy.to(training.device)
        own = Own(environment.allowed.shape).to(training.device)
        optimizer = torch.optim.Adam(
            [
                {"params": policy.parameters(), "lr": self.learning_rate},
                {"params": own.parameters(), "lr": self.own_rate},
            ]
        )
        cost, kept = HardLimit(environment.limit_bytes), Values(begun=False)
        training.track(policy=policy, own=own, optimizer=optimizer, cost=cost, kept=kept)
        if not kept.begun:
            actions, _, _ = policy.act(scene, own.table.detach(), 1, None)
            cost(environment(actions[: environment.room(1)]))
            kept.begun = True
        while not training.is_done:
            count = environment.room(self.samples)
            table = own.table.detach()
            actions, pairs, may = policy.act(scene, table, count, training.generator)
            outcome = environment(actions)
            loss = Surrogate(policy, scene, own, torch.as_tensor(actions), pairs, may)
            advantage = standardised(log_reward(cost, outcome)).to(training.device)
            for _ in range(self.steps):
                optimizer.zero_grad()
                loss(advantage, self.clip).backward()
                optimizer.step()
            training.log(outcome, entropy=loss.entropy, kl=loss.divergence())
        return environment.best()


def log_reward(cost: HardLimit, outcome: Outcome) -> Tensor:
    """Minus the logarithm of the cost: graphs of all sizes weigh the same. `[B]`"""
    return torch.as_tensor(-np.log(np.maximum(cost(outcome), 1e-12)), dtype=torch.float32)


class Own(nn.Module):  # type: ignore[misc]
    """A number per pair that belongs to one problem, zero at first. `[M, A]`"""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(shape))


class Surrogate:
    """PPO's loss for samples that were scored, per group as each takes its device in turn.

    Args:
        policy, scene, own: What the samples were drawn from.
        actions: `[B, M]`
        pairs, may: From `PairPolicy.act`.

    Attributes:
        entropy: Per group before the update, nats.
    """

    def __init__(
        self,
        policy: PairPolicy,
        scene: Scene,
        own: Own,
        actions: Tensor,
        pairs: Tensor,
        may: Tensor,
    ) -> None:
        self._policy, self._scene, self._own = policy, scene, own
        self._actions, self._pairs, self._may = actions.to(pairs.device), pairs, may
        with torch.no_grad():
            logits = self.logits()
            self._before = log_prob(logits, self._actions)
            self.entropy = float(entropy(logits).mean())

    def logits(self) -> Tensor:
        """As the policy is now, for what it saw then. `[B, M, A]`"""
        groups = self._policy.embed(self._scene)
        found: Tensor = self._policy(groups, self._pairs, self._may, self._own.table)
        return found

    def __call__(self, advantage: Tensor, clip: float, bonus: float = 0.0) -> Tensor:
        """To be minimised; `bonus` is the weight of entropy."""
        logits = self.logits()
        now = log_prob(logits, self._actions)
        loss = ppo_clip(now, self._before, advantage[:, None], clip)
        return loss - bonus * entropy(logits).mean() if bonus else loss

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def divergence(self) -> float:
        """How far the policy has moved per group, nats."""
        return float(approximate_kl(log_prob(self.logits(), self._actions), self._before))
