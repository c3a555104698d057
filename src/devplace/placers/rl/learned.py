"""devplace's own learned placer: one policy for all graphs and machines, trained beforehand.

What the published systems lack is what it has: ops and devices are told by what they cost (times,
memory, links) and not by the names of their types; the number of groups is part of the policy; and
the policy scores (group, device) pairs, so that it works on graphs and numbers of devices that it
was not trained on.

1. From a summary of graph and machine (size, transfers beside computing, parallelism, memory), a
   head chooses how many groups there are: one of five multiples, a quarter to four times, of what a
   rule gives (`parting.worth_parting`). Untrained, the rule's own is the likeliest.
2. Groups get embeddings by messages along the edges (`pair_policy`).
3. In the order of the graph, each group takes a device. What the policy sees of a pair (`scene`):
   how long the group would queue there, transfers to what is placed, memory left, speed, load.
4. The first evaluation is of the likeliest placement: with a budget of `1ev` that is the answer,
   always the same (*zero-shot*). The next ones are of the likeliest with each of the other counts.
5. The rest of the budget is spent on fine-tuning: samples, each with its own number of groups; PPO
   on the network with its head and on numbers that only this problem has, one per count and one per
   colocation group and device. The best placement seen is returned.

The weights that ship were trained by `experiments/train_learned.py` on small graphs of some model
families and many machines: evolution of the weights on simulated steps, beginning with the rule of
a list scheduler, then the head; `weights.read` tells which and when. With `weights=None` there is
no training before: the policy is that rule to begin with.

What it gives (docs/results/generalisation.md): on problems of the validation family, zero-shot
steps are 9 % shorter than those of the untrained rule. On full-size models of families that were in
neither, the gain is small and not everywhere (0.478 of the best single device against 0.490:
shorter on Inception, longer on GPT-2); one of nine plans is over a memory limit. That is before
HEFT and behind `search`. With 100 samples (0.444 trained, 0.445 untrained) it is better than Post
with 100, a little behind Post with 2,400.

To let `search` go on from its answer:

    found = place(problem, Learned(), "1ev")
    better = place(problem, Search(start=found.placement), "30s")

Sources: features of pairs as in DOPPLER (Yao et al. 2025, arXiv 2505.23131); messages along edges
as in Placeto (Addanki et al. 2019, arXiv 1906.08879); PPO of Schulman et al. (2017), arXiv
1707.06347. Their combination, the queue over bins of time, the grouping and the choice of its
count are devplace's own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from devplace.placers.counted_simulator import Evaluator
from devplace.placers.rl.count_head import RULE
from devplace.placers.rl.environment import Outcome, nothing_to_place
from devplace.placers.rl.grouping import Grouping
from devplace.placers.rl.grouping_choices import Partings, joined_outcomes
from devplace.placers.rl.losses import approximate_kl, ppo_clip, standardised
from devplace.placers.rl.options import TrainingOptions, check_settings
from devplace.placers.rl.pair_policy import PairPolicy
from devplace.placers.rl.penalties import HardLimit
from devplace.placers.rl.policies import entropy, log_prob, sample
from devplace.placers.rl.saved_weights import SHIPPED, load_into
from devplace.placers.rl.training import Training, Values
from devplace.problem import Placement, Problem


@dataclass(frozen=True)
class Learned:
    """A policy over counts of groups and (group, device) pairs, trained, then fine-tuned.

    Attributes:
        weights: File of weights (`experiments/train_learned.py` writes them); None: untrained.
        samples: Placements per update.
        steps: Gradient steps per update.
        learning_rate: Of the network (Adam).
        own_rate: Of the numbers of the problem.
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

    def __post_init__(self) -> None:
        check_settings(self, zero=("steps",))

    def supports(self, problem: Problem) -> str:
        """Wherever there are ops to place."""
        return nothing_to_place(problem)

    def __call__(
        self, problem: Problem, evaluate: Evaluator, rng: np.random.Generator
    ) -> Placement:
        """The likeliest placement, then fine-tuning; gives the best placement seen."""
        partings = Partings(evaluate)
        with Training(self, partings, rng) as training:
            return self._learn(partings, training)

    def _learn(self, partings: Partings, training: Training) -> Placement:
        with training.seeded():
            policy = PairPolicy(self.hidden)
        if self.weights is not None:
            load_into(policy, self.weights)
        policy.to(training.device)
        own = Own(partings).to(training.device)
        optimizer = torch.optim.Adam(
            [
                {"params": policy.parameters(), "lr": self.learning_rate},
                {"params": own.parameters(), "lr": self.own_rate},
            ]
        )
        cost, kept = HardLimit(partings.limit_bytes), Values(begun=False)
        training.track(policy=policy, own=own, optimizer=optimizer, cost=cost, kept=kept)
        if not kept.begun:
            for choice in counts_by_likelihood(policy, partings, own):
                if partings.room(1):
                    cost(score(partings, [likeliest(policy, partings, own, choice)]))
            kept.begun = True
        while not training.is_done:
            drawn = draw(policy, partings, own, partings.room(self.samples), training.generator)
            outcome = score(partings, drawn)
            loss = Surrogate(policy, partings, own, drawn)
            advantage = standardised(log_reward(cost, outcome)).to(training.device)
            for _ in range(self.steps):
                optimizer.zero_grad()
                loss(advantage, self.clip).backward()
                optimizer.step()
            training.log(
                outcome,
                groups=loss.groups,
                entropy=loss.entropy,
                count_entropy=loss.count_entropy,
                kl=loss.divergence(),
            )
        return partings.best()


def log_reward(cost: HardLimit, outcome: Outcome) -> Tensor:
    """Minus the logarithm of the cost: graphs of all sizes weigh the same. `[B]`"""
    return torch.as_tensor(-np.log(np.maximum(cost(outcome), 1e-12)), dtype=torch.float32)


class Own(nn.Module):  # type: ignore[misc]
    """Numbers that belong to one problem, zero at first, added to the policy's logits.

    One per count of groups, and one per colocation group and device: the number of a group is the
    mean over its members, so that what is learned with one count holds with the others.
    """

    def __init__(self, partings: Partings) -> None:
        super().__init__()
        members, devices = partings.problem.core.tasks.num_groups, partings.num_actions
        self.table = nn.Parameter(torch.zeros(members, devices))
        self.counts = nn.Parameter(torch.zeros(len(partings.counts)))

    def of(self, grouping: Grouping) -> Tensor:
        """A number per pair. `[M, A]`"""
        group = torch.as_tensor(grouping.of_colocation, device=self.table.device).long()
        total = self.table.new_zeros(grouping.num_groups, self.table.shape[1])
        members = torch.bincount(group, minlength=grouping.num_groups)
        return total.index_add(0, group, self.table) / members[:, None]


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples with the same number of groups.

    Attributes:
        choice: Which of `Partings.counts`.
        actions: int64 `[B, M]`
        pairs, may: From `PairPolicy.act`.
    """

    choice: int
    actions: NDArray[np.int64]
    pairs: Tensor
    may: Tensor


def count_logits(policy: PairPolicy, partings: Partings, own: Own) -> Tensor:
    """Logits of counts of groups. `[C]`"""
    device = own.counts.device
    summary = torch.as_tensor(partings.summary, device=device)
    found: Tensor = policy.counts(summary, torch.as_tensor(partings.is_open, device=device))
    return found + own.counts


@torch.no_grad()  # type: ignore[untyped-decorator]
def counts_by_likelihood(policy: PairPolicy, partings: Partings, own: Own) -> list[int]:
    """Choices of `Partings.counts` that there are, the likeliest first."""
    order = torch.argsort(count_logits(policy, partings, own), descending=True, stable=True)
    return [choice for choice in order.tolist() if partings.is_open[choice]]


def likeliest(policy: PairPolicy, partings: Partings, own: Own, choice: int) -> Samples:
    """The likeliest placement with a number of groups, the same every time."""
    table = own.of(partings.grouping(choice)).detach()
    return Samples(choice, *policy.act(partings.scene(choice), table, 1, None))


@torch.no_grad()  # type: ignore[untyped-decorator]
def draw(
    policy: PairPolicy, partings: Partings, own: Own, count: int, generator: torch.Generator
) -> list[Samples]:
    """Samples: for each a number of groups, then devices; ordered by the number of groups."""
    logits = count_logits(policy, partings, own).expand(count, -1)
    chosen = sample(logits, generator).cpu().numpy()
    found = []
    for choice, times in zip(*np.unique(chosen, return_counts=True), strict=True):
        scene, table = partings.scene(int(choice)), own.of(partings.grouping(int(choice)))
        found.append(Samples(int(choice), *policy.act(scene, table, int(times), generator)))
    return found


def score(partings: Partings, drawn: list[Samples]) -> Outcome:
    """What samples cost, in their order."""
    return joined_outcomes([partings.environment(d.choice)(d.actions) for d in drawn])


class Surrogate:
    """PPO's loss for samples that were scored: of the number of groups and of each group's device.

    Summed over the decisions of a sample, as a part of the decisions of the rule's grouping.

    Args:
        policy, partings, own, drawn: What was drawn, and from what.

    Attributes:
        groups: Mean number of groups.
        entropy: Per group before the update, nats.
        count_entropy: Of the number of groups before the update, nats.
    """

    def __init__(
        self, policy: PairPolicy, partings: Partings, own: Own, drawn: list[Samples]
    ) -> None:
        self._policy, self._partings, self._own, self._drawn = policy, partings, own, drawn
        self._scale = len(self._choices()) * max(1, partings.environment(RULE).num_groups)
        with torch.no_grad():
            logits = self.logits()
            self._before = self._log_probs(logits)
            self._count_before = self._count_log_prob()
            self.groups = float(np.mean([d.actions.shape[1] for d in drawn for _ in d.actions]))
            self.entropy = float(torch.cat([entropy(each).flatten() for each in logits]).mean())
            self.count_entropy = float(entropy(count_logits(policy, partings, own)))

    def logits(self) -> list[Tensor]:
        """As the policy is now, for what it saw then; for each count `[B, M, A]`."""
        found = []
        for d in self._drawn:
            groups = self._policy.embed(self._partings.scene(d.choice))
            own = self._own.of(self._partings.grouping(d.choice))
            found.append(self._policy(groups, d.pairs, d.may, own))
        return found

    def _choices(self) -> list[int]:
        return [d.choice for d in self._drawn for _ in d.actions]

    def _log_probs(self, logits: list[Tensor]) -> list[Tensor]:
        """For each count `[B, M]`."""
        actions = [torch.as_tensor(d.actions, device=d.pairs.device) for d in self._drawn]
        return [log_prob(each, taken) for each, taken in zip(logits, actions, strict=True)]

    def _count_log_prob(self) -> Tensor:
        """Of each sample's number of groups. `[B]`"""
        every = torch.log_softmax(count_logits(self._policy, self._partings, self._own), -1)
        return every[self._choices()]

    def __call__(self, advantage: Tensor, clip: float) -> Tensor:
        """To be minimised."""
        counted = self._count_log_prob()
        total = ppo_clip(counted, self._count_before, advantage, clip) * len(counted)
        parts = advantage.split([len(d.actions) for d in self._drawn])
        now = self._log_probs(self.logits())
        for each, before, part in zip(now, self._before, parts, strict=True):
            total = total + ppo_clip(each, before, part[:, None], clip) * each.numel()
        return total / self._scale

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def divergence(self) -> float:
        """How far the policy has moved per decision, nats."""
        now = [*self._log_probs(self.logits()), self._count_log_prob()]
        before = [*self._before, self._count_before]
        return float(
            approximate_kl(
                torch.cat([each.flatten() for each in now]),
                torch.cat([each.flatten() for each in before]),
            )
        )
