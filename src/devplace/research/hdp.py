"""HDP, the hierarchical planner: a Grouper and a Placer learned together by REINFORCE.

Paper: Mirhoseini, Goldie, Pham, Steiner, Le, Dean (2018), A hierarchical model for device
placement, ICLR. A feed-forward Grouper gives every op a distribution over groups; a grouping g is
drawn from it. A Placer, sequence to sequence with attention, reads the embeddings of the groups and
gives a device for each in turn, d_t ~ softmax(C tanh(l_t / T)). With R = -sqrt(step time) of m
groupings and k placements of each, and b a moving average of R, both learn from

    grad J = 1/(m k) sum_{i, j} (R_ij - b) grad [ log p(g_i) + log p(d_ij | g_i) ].

An op's embedding is its type, the sizes of its outputs and their number, and its neighbours. A
group's is how many ops of each type it has, its summed output shapes, and its edges to and from
other groups. A placement that fails has a constant large step time; after a while failing samples
no longer count. Noise on the logits of both networks makes the first samples more varied.

Hyper-parameters. Published: C = 5, T = 10, m = 1, k = 4, Adam at a fixed rate of 0.1, gradient norm
1. From the authors' released code, which has one sample per update: min(256, 20 devices) groups,
LSTMs of 512, a hidden layer of 64 in the Grouper, 5 outputs of 5 sizes, 10 neighbours, noise of
half the logits' root mean square for 750 samples, failing signal 100 s, failures ignored after
1,000 samples, decay of the baseline 0.9. These are kept except, tuned on nmt-2:

- Adam's rate and T together: 0.0005 and 1. With more, the policy is certain within 100 samples,
  and of one device, as all groups share its weights.
- LSTMs of 128, attention of 64: as good in so few samples, and several times quicker.
- The Grouper's last weights begin 100 times larger, so that like ops begin in the same group. From
  Glorot's, every op would be in any group alike, all groups would be the same mixture, and moving
  one could not help.
- Noise of 0.03: that of the code scatters the ops of a group.
- Failing signal 10 s: beside 10 for failures, differences of the square root of a few seconds
  vanish. It must be longer than the steps that fit.
- Decay of the baseline 0.5: one that lags rewards whatever was drawn.

Differs from paper and code in:

- A bonus keeps the Placer's entropy up: `entropy_weight s / sqrt(groups)` times that of each group,
  where s is a moving average of how far rewards of placements that fit are from their mean.
- Of the released code's faults none is repeated. There the loss scores a grouping and a placement
  drawn anew, with group embeddings of zero, so nothing is learned from the reward; here those that
  were executed are scored, with the noise they were drawn with. The code loses incoming neighbours
  and adds shapes to the columns of types; here both are whole.
- Op types are one-hot; sizes are logarithms; neighbours' numbers are shares of the number of ops;
  every column but the types is scaled to mean 0 and deviation 1. The Grouper's hidden layer has a
  ReLU; the code's has none and so is no layer.
- Ops that must share a device (colocation groups) are one row; it sums types and shapes and has the
  neighbours of the first.
- The gradient's norm is bounded for each network by itself: log p(g) sums thousands of ops.
- The baseline begins at the first rewards, not at the failing signal. Placements are drawn to the
  end; the code repeats one after 500 steps. Blocks of a group's embedding are scaled one by one
  (`features.group_features`).
- `memory = "hard"` has failures cost more than all that fit (`penalties.HardLimit`) and count
  always.

The paper's ablations: `HdpNoGrouping`, a feed-forward network that gives each op a device by
itself, and `HdpRandomGrouping`, the Placer over groups drawn once.
"""
# mypy: allow-subclassing-any

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from devplace.placers.counted_simulator import Evaluator
from devplace.problem import Placement, Problem
from devplace.research import policies
from devplace.research.environment import Environment, nothing_to_place
from devplace.research.grouping import colocation
from devplace.research.losses import approximate_kl, reinforce
from devplace.research.mlp import Mlp
from devplace.research.noise import NoisySeq2Seq, noise_of, noisy
from devplace.research.op_embeddings import OpEmbeddings
from devplace.research.options import TrainingOptions, check_settings
from devplace.research.penalties import MovingAverage, failing_signal, memory_rule, sqrt_reward
from devplace.research.policies import bounded, entropy, masked, sample
from devplace.research.training import Training


@dataclass(frozen=True)
class Hdp:
    """REINFORCE for a Grouper of ops and a Placer of groups.

    Attributes:
        groups: Most groups; None: 20 per device, at most 256.
        grouper_samples: m, groupings per update.
        placer_samples: k, placements of each grouping.
        grouper_hidden: Width of the Grouper's hidden layer.
        grouper_gain: The Grouper's last weights begin this much larger than Glorot's: at 1, every
            op would go to every group alike.
        hidden: Size of the LSTMs.
        attention: Width of the attention's hidden layer.
        tanh_constant, temperature: C and T of the Placer's logits.
        learning_rate: Adam's.
        gradient_norm: The gradient of each network is scaled down to it.
        noise: Deviation of the noise on logits, in units of their root mean square.
        noise_samples: Samples with noise.
        baseline_decay: Of the moving average of rewards.
        entropy_weight: Of the bonus for the Placer's entropy, see the module; 0: none.
        grouper_entropy: The same for the Grouper's.
        memory: `published`: a failing placement counts as `failing_s`; `hard`: see the module.
        failing_s: Step time of a failing placement, s.
        ignore_failing_after: Samples after which failing ones no longer count.
        training: Curves, checkpoints, early stop.
    """

    name: str = "hdp"
    groups: int | None = None
    grouper_samples: int = 1
    placer_samples: int = 4
    grouper_hidden: int = 64
    grouper_gain: float = 100.0
    hidden: int = 128
    attention: int = 64
    tanh_constant: float = 5.0
    temperature: float = 1.0
    learning_rate: float = 0.0005
    gradient_norm: float = 1.0
    noise: float = 0.03
    noise_samples: int = 750
    baseline_decay: float = 0.5
    entropy_weight: float = 0.3
    grouper_entropy: float = 0.0
    memory: Literal["published", "hard"] = "published"
    failing_s: float = 10.0
    ignore_failing_after: int = 1000
    training: TrainingOptions = field(default=TrainingOptions(), repr=False)

    def __post_init__(self) -> None:
        check_settings(self, zero=("noise_samples", "ignore_failing_after"), even=("hidden",))

    def supports(self, problem: Problem) -> str:
        """Wherever there are ops to place."""
        return nothing_to_place(problem)

    def __call__(
        self, problem: Problem, evaluate: Evaluator, rng: np.random.Generator
    ) -> Placement:
        """Learn until the budget is spent; gives the best placement seen."""
        environment = Environment(evaluate, colocation(problem))
        with Training(self, environment, rng) as training:
            return self._learn(environment, training)

    def _learn(self, environment: Environment, training: Training) -> Placement:
        with training.seeded():
            policy = self.policy(environment, training.generator, training.device)
        optimizer = torch.optim.Adam(policy.parameters(), self.learning_rate)
        cost = memory_rule(
            self.memory, environment, lambda outcome: failing_signal(outcome, self.failing_s)
        )
        baseline, deviation = MovingAverage(self.baseline_decay), MovingAverage(0.98)
        training.track(
            policy=policy, optimizer=optimizer, baseline=baseline, deviation=deviation, cost=cost
        )
        while not training.is_done:
            count = environment.room(self.grouper_samples * self.placer_samples)
            spent = training.evaluate.meter.num_evaluations
            noise = self.noise if spent < self.noise_samples else 0.0
            with torch.no_grad():
                draws = policy.draw(count, self.placer_samples, noise, training.generator)
            outcome = environment(np.concatenate([draw.op_actions() for draw in draws]))
            reward = sqrt_reward(cost(outcome))
            counts = self._counts(outcome.failed, spent)
            advantage = (reward - baseline.update(reward[counts])) * counts
            fit = reward[~outcome.failed]
            deviation.update(np.abs(fit - fit.mean()) if len(fit) else fit)

            log_prob, placer_entropy, grouper_entropy = policy.log_prob(draws)
            weight = torch.as_tensor(advantage, dtype=torch.float32).to(training.device)
            bonus = self.entropy_weight * policy.num_choices**0.5 * placer_entropy
            bonus = bonus + self.grouper_entropy * environment.num_groups**0.5 * grouper_entropy
            loss = reinforce(log_prob, weight) - (deviation.value or 0.0) * bonus
            optimizer.zero_grad()
            loss.backward()
            for network in policy.children():
                nn.utils.clip_grad_norm_(network.parameters(), self.gradient_norm)
            optimizer.step()
            with torch.no_grad():
                now, *_ = policy.log_prob(draws)
            training.log(
                outcome,
                entropy=float(placer_entropy.detach()),
                grouper_entropy=float(grouper_entropy.detach()),
                kl=float(approximate_kl(now, log_prob)),
                baseline=baseline.value,
                loss=float(loss.detach()),
                groups=float(np.mean([draw.groups_used() for draw in draws])),
            )
        return environment.best()

    def _counts(self, failed: NDArray[np.bool_], spent: int) -> NDArray[np.bool_]:
        """Which samples count: failing ones not after many samples. `[B]`"""
        if self.memory == "published" and spent >= self.ignore_failing_after:
            return ~failed
        return np.ones(len(failed), bool)

    def num_groups(self, environment: Environment) -> int:
        """Groups there may be."""
        most = self.groups or min(256, 20 * environment.num_actions)
        return max(1, min(most, environment.num_groups))

    def policy(
        self, environment: Environment, generator: torch.Generator, device: torch.device
    ) -> Planner | FlatPolicy:
        """The networks, new."""
        ops = OpEmbeddings(environment, self.num_groups(environment), device)
        grouper = Mlp([ops.rows.shape[1], self.grouper_hidden, ops.num_groups])
        last = grouper.layers[-1]
        with torch.no_grad():
            last.weight.mul_(self.grouper_gain)
        policy = Planner(ops, grouper, self._placer(ops))
        policy.to(device)
        return policy

    def _placer(self, ops: OpEmbeddings) -> NoisySeq2Seq:
        return NoisySeq2Seq(
            ops.group_width,
            ops.num_actions,
            self.hidden,
            self.tanh_constant,
            self.temperature,
            self.attention,
        )


@dataclass(frozen=True)
class HdpRandomGrouping(Hdp):
    """HDP without a Grouper: ops are in random groups of equal size, drawn once."""

    name: str = "hdp-random-grouping"

    def policy(
        self, environment: Environment, generator: torch.Generator, device: torch.device
    ) -> Planner | FlatPolicy:
        """The Placer alone, new, and the groups."""
        ops = OpEmbeddings(environment, self.num_groups(environment), device)
        fixed = torch.randperm(len(ops.rows), generator=generator) % ops.num_groups
        fixed = fixed.to(device)
        policy = Planner(ops, None, self._placer(ops), fixed)
        policy.to(device)
        return policy


@dataclass(frozen=True)
class HdpNoGrouping(Hdp):
    """HDP without groups: a feed-forward network gives each op its device by itself."""

    name: str = "hdp-no-grouping"

    def policy(
        self, environment: Environment, generator: torch.Generator, device: torch.device
    ) -> Planner | FlatPolicy:
        """The network, new."""
        ops = OpEmbeddings(environment, 1, device)
        network = Mlp([ops.rows.shape[1], self.grouper_hidden, ops.num_actions])
        policy = FlatPolicy(ops, network, self.tanh_constant, self.temperature)
        policy.to(device)
        return policy


@dataclass(frozen=True, eq=False)
class Draw:
    """One grouping, placements drawn for it, and the noise they were drawn with.

    Attributes:
        grouping: Group of each op. int64 `[G]`
        actions: Action of each group. int64 `[k, M]`
        grouper_noise: `[G, M]`, or None
        placer_noise: `[k, M, A]`, or None
    """

    grouping: Tensor
    actions: Tensor
    grouper_noise: Tensor | None
    placer_noise: Tensor | None

    def op_actions(self) -> NDArray[np.int64]:
        """Action of each op. `[k, G]`"""
        found: NDArray[np.int64] = self.actions[:, self.grouping].cpu().numpy()
        return found

    def groups_used(self) -> int:
        """Groups that are not empty."""
        return len(torch.unique(self.grouping))


class Planner(nn.Module):
    """Grouper and Placer.

    Args:
        ops: Embeddings.
        grouper: `[G, F]` -> logits `[G, M]`; None: the grouping is `fixed`.
        placer: The sequence-to-sequence network.
        fixed: int64 `[G]`
    """

    def __init__(
        self,
        ops: OpEmbeddings,
        grouper: Mlp | None,
        placer: NoisySeq2Seq,
        fixed: Tensor | None = None,
    ) -> None:
        super().__init__()
        self._ops, self._fixed = ops, fixed
        self.grouper, self.placer = grouper, placer
        self.num_choices = ops.num_groups

    def draw(
        self, count: int, per_grouping: int, noise: float, generator: torch.Generator
    ) -> list[Draw]:
        """Groupings with `per_grouping` placements of each, the last with what is left of `count`.

        Args:
            noise: Deviation, in units of the root mean square of the logits; 0: none.
        """
        logits = None if self.grouper is None else self.grouper(self._ops.rows)
        draws = []
        for begin in range(0, count, per_grouping):
            samples = min(per_grouping, count - begin)
            grouping, grouper_noise = self._fixed, None
            if logits is not None:
                grouper_noise = noise_of(logits.shape, noise, generator, logits.device)
                grouping = sample(noisy(logits, grouper_noise), generator)
            assert grouping is not None
            size = (samples, self._ops.num_groups, self._ops.num_actions)
            placer_noise = noise_of(size, noise, generator, grouping.device)
            actions, _ = self.placer.act(
                self._ops.groups(grouping),
                samples,
                generator,
                self._ops.allowed(grouping),
                placer_noise,
            )
            draws.append(Draw(grouping, actions, grouper_noise, placer_noise))
        return draws

    def log_prob(self, draws: list[Draw]) -> tuple[Tensor, Tensor, Tensor]:
        """log p(g) + log p(d | g) of what was drawn `[B]`; mean entropy per group and per op."""
        logits = None if self.grouper is None else self.grouper(self._ops.rows)
        found, spread, grouper_spread = [], [], []
        for draw in draws:
            placed = self.placer.logits(
                self._ops.groups(draw.grouping),
                draw.actions,
                self._ops.allowed(draw.grouping),
                draw.placer_noise,
            )
            both = policies.log_prob(placed, draw.actions).sum(1)
            if logits is not None:
                grouped = noisy(logits, draw.grouper_noise)
                both = both + policies.log_prob(grouped, draw.grouping).sum()
                grouper_spread.append(entropy(grouped).mean())
            found.append(both)
            spread.append(entropy(placed).mean())
        return torch.cat(found), _mean(spread, found[0]), _mean(grouper_spread, found[0])


class FlatPolicy(nn.Module):
    """A device for each op by itself, as if every op were a group."""

    def __init__(
        self, ops: OpEmbeddings, network: Mlp, tanh_constant: float, temperature: float
    ) -> None:
        super().__init__()
        self._ops, self.network = ops, network
        self._tanh_constant, self._temperature = tanh_constant, temperature
        self.num_choices = len(ops.rows)

    def _logits(self, noise: Tensor | None) -> Tensor:
        logits = bounded(self.network(self._ops.rows), self._tanh_constant, self._temperature)
        return masked(noisy(logits, noise), self._ops.op_allowed)

    def draw(
        self, count: int, per_grouping: int, noise: float, generator: torch.Generator
    ) -> list[Draw]:
        """`count` placements; each with noise of its own."""
        rows = self._ops.rows
        itself = torch.arange(len(rows), device=rows.device)
        draws = []
        for _ in range(count):
            drawn = noise_of((len(rows), self._ops.num_actions), noise, generator, rows.device)
            draws.append(Draw(itself, sample(self._logits(drawn), generator)[None], drawn, None))
        return draws

    def log_prob(self, draws: list[Draw]) -> tuple[Tensor, Tensor, Tensor]:
        """log p(d) of what was drawn `[B]`; mean entropy per op, and 0 as there is no Grouper."""
        every = [self._logits(draw.grouper_noise) for draw in draws]
        found = [
            policies.log_prob(logits, draw.actions[0]).sum()
            for logits, draw in zip(every, draws, strict=True)
        ]
        spread = [entropy(logits).mean() for logits in every]
        return torch.stack(found), _mean(spread, found[0]), _mean([], found[0])


def _mean(values: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack(values).mean() if values else like.new_zeros(())
