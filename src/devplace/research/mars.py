"""Mars: a graph encoder pre-trained by contrast, a placer that reads segments, PPO.

Paper: Lan, Chen, Li (2021), Accelerated device placement optimization with contrastive learning,
ICPP. A graph convolutional network embeds the ops. Before any placement is scored, Deep Graph
Infomax (`dgi`) trains it to tell the graph from the graph with its features shuffled. A light
sequence-to-sequence placer with attention (`segments.SegmentSeq2Seq`) then gives a device to one
embedding after the other, a segment at a time. Both learn by PPO: of every K placements drawn, with
R = -sqrt(step time), b a moving average of R and A = (R - b) / rms(R - b), some gradient steps on

    J = mean_{n, m} min(r_nm A_n, clip(r_nm, 1 - e, 1 + e) A_n) + c mean entropy,

where r_nm is the probability of the device of group m in placement n, over that when it was drawn.

Hyper-parameters: the slides and abstract give none; all are chosen here. Learning rate, groups,
gradient steps and steps of pre-training were tuned on nmt-4; the others are usual values.

Differs from the paper in, or chosen where nothing is known:

- The encoder reads every op; the placer places groups of ops (`grouping.colocated`, at most
  `groups`), each with the mean embedding of its ops. `groups=0` places every colocation group by
  itself, which takes many seconds per sample on graphs of ten thousand ops.
- Features of an op are its type and output sizes.
- Convolutions carry PReLU, corruption shuffles rows, readout is the mean under a sigmoid, the
  discriminator is bilinear: DGI's own. The encoder goes on learning with the placer.
- Attention is of the multiplicative kind, inside the segment; the decoder also reads the encoder's
  state of the group that it places.
- The share each decision has in a placement is its own ratio r_nm, not their product, which over
  hundreds of groups is clipped at once.
- Memory: `hard` has what does not fit cost more than all that fits (`penalties.HardLimit`);
  `published` is the rule of HDP, the line that Mars comes from: a failing placement counts as
  `failing_s`.

`MarsNoPretraining` is the same without DGI. The other rows of the slides' table, learned by the
same loop, are in `encoder_placer` and `grouper_placer`.
"""
# mypy: allow-subclassing-any

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from devplace.placers.counted_simulator import Evaluator
from devplace.problem import Placement, Problem
from devplace.research.advantages import scaled
from devplace.research.dgi import Discriminator, pretrain
from devplace.research.encoders import GcnEncoder, NodeGraph, node_graph
from devplace.research.environment import Environment, nothing_to_place
from devplace.research.grouping import at_most
from devplace.research.losses import approximate_kl, ppo_clip
from devplace.research.options import TrainingOptions, check_settings
from devplace.research.penalties import MovingAverage, failing_signal, memory_rule, sqrt_reward
from devplace.research.policies import entropy, log_prob
from devplace.research.segments import SegmentSeq2Seq
from devplace.research.training import Training


class Drawn(NamedTuple):
    """Placements drawn from a policy.

    Attributes:
        actions: What the environment scores. int64 `[B, M]`
        choices: What the policy chose, for `Policy.weigh`. int64 `[B, L]`
        log_prob: Of each choice. `[B, L]`
    """

    actions: Tensor
    choices: Tensor
    log_prob: Tensor


class Policy(Protocol):
    """What the loop needs of the networks of a row of the table; they are a `nn.Module` too."""

    def draw(self, count: int, generator: torch.Generator) -> Drawn:
        """Draw `count` placements, without gradient."""
        ...

    def weigh(self, choices: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability of each stored choice `[B, L]`, and mean entropy, with gradient."""
        ...


@dataclass(frozen=True)
class Mars:
    """PPO for a pre-trained graph encoder and a segment-level sequence-to-sequence placer.

    Attributes:
        groups: Most groups that are placed; 0: every colocation group.
        segment: Groups that the placer reads at a time.
        samples: K, placements per update.
        epochs: Gradient steps per update.
        clip: e, how far a ratio counts.
        entropy_weight: c.
        hidden: Size of the placer's LSTMs.
        encoder_hidden, encoder_layers: Size and number of the graph convolutions.
        tanh_constant: Logits are bounded by it.
        learning_rate: Adam's.
        gradient_norm: The gradient is scaled down to it.
        baseline_decay: Of the moving average of rewards.
        pretraining_steps: Most gradient steps of DGI; 0: no pre-training.
        pretraining_rate: Adam's in these.
        memory: `hard` or `published`: see the module.
        failing_s: Step time that a failing placement counts as, s.
        training: Curves, checkpoints, early stop.
    """

    name: str = "mars"
    groups: int = 64
    segment: int = 32
    samples: int = 20
    epochs: int = 4
    clip: float = 0.2
    entropy_weight: float = 0.01
    hidden: int = 64
    encoder_hidden: int = 64
    encoder_layers: int = 2
    tanh_constant: float = 5.0
    learning_rate: float = 0.003
    gradient_norm: float = 1.0
    baseline_decay: float = 0.9
    pretraining_steps: int = 60
    pretraining_rate: float = 0.003
    memory: Literal["published", "hard"] = "hard"
    failing_s: float = 100.0
    training: TrainingOptions = field(default=TrainingOptions(), repr=False)

    def __post_init__(self) -> None:
        check_settings(self, zero=("groups", "pretraining_steps"), even=("hidden",))

    def supports(self, problem: Problem) -> str:
        """Wherever there are ops to place."""
        return nothing_to_place(problem)

    def __call__(
        self, problem: Problem, evaluate: Evaluator, rng: np.random.Generator
    ) -> Placement:
        """Learn until the budget is spent; gives the best placement seen."""
        environment = Environment(evaluate, at_most(problem, self.groups))
        with Training(self, environment, rng) as training:
            return self._learn(environment, training)

    def _learn(self, environment: Environment, training: Training) -> Placement:
        with training.seeded():
            policy = self._policy(environment, training.device)
        optimizer = torch.optim.Adam(policy.parameters(), self.learning_rate)
        cost = memory_rule(
            self.memory, environment, lambda outcome: failing_signal(outcome, self.failing_s)
        )
        baseline = MovingAverage(self.baseline_decay)
        training.track(policy=policy, optimizer=optimizer, baseline=baseline, cost=cost)
        if not training.updates:  # else the encoder came out of the checkpoint
            self._pretrain(policy, training)
        while not training.is_done:
            drawn = policy.draw(environment.room(self.samples), training.generator)
            outcome = environment(drawn.actions.cpu().numpy())
            reward = sqrt_reward(cost(outcome))
            advantage = scaled(reward - baseline.update(reward)).to(training.device)[:, None]
            for _ in range(self.epochs):
                log_probs, spread = policy.weigh(drawn.choices)
                loss = ppo_clip(log_probs, drawn.log_prob, advantage, self.clip)
                loss = loss - self.entropy_weight * spread
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(policy.parameters(), self.gradient_norm)
                optimizer.step()
            training.log(
                outcome,
                entropy=float(spread.detach()),
                kl=float(approximate_kl(log_probs, drawn.log_prob)),
                baseline=baseline.value,
                loss=float(loss.detach()),
            )
        return environment.best()

    def _policy(self, environment: Environment, device: torch.device) -> Any:
        """The networks, with their first weights: a module that is a `Policy`."""
        return EncoderPolicy(self, environment, device).to(device)

    def _pretrain(self, policy: Any, training: Training) -> None:
        """Deep Graph Infomax on the encoder; ends early when the budget is spent."""
        if not self.pretraining_steps:
            return
        with training.seeded():
            discriminator = Discriminator(self.encoder_hidden).to(training.device)
        parameters = [*policy.encoder.parameters(), *discriminator.parameters()]
        pretrain(
            lambda nodes: policy.encoder(policy.graph, nodes),
            discriminator,
            torch.optim.Adam(parameters, self.pretraining_rate),
            policy.graph.nodes,
            self.pretraining_steps,
            training.generator,
            is_over=lambda: training.is_done,
        )


@dataclass(frozen=True)
class MarsNoPretraining(Mars):
    """Mars whose encoder learns from the samples only."""

    name: str = "mars-no-pretraining"
    pretraining_steps: int = 0


class EncoderPolicy(nn.Module):
    """Graph convolutions over the ops, then the segment-level placer over groups of them."""

    def __init__(self, placer: Mars, environment: Environment, device: torch.device) -> None:
        super().__init__()
        self.graph: NodeGraph = node_graph(environment.grouping, device)
        self.allowed = torch.as_tensor(environment.allowed).to(device)
        features = self.graph.nodes.shape[1]
        self.encoder = GcnEncoder(features, placer.encoder_hidden, placer.encoder_layers)
        self.placer = SegmentSeq2Seq(
            placer.encoder_hidden,
            environment.num_actions,
            placer.hidden,
            placer.segment,
            placer.tanh_constant,
        )

    def embeddings(self) -> Tensor:
        """Of each group. `[M, H]`"""
        return self.graph.group_means(self.encoder(self.graph))

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def draw(self, count: int, generator: torch.Generator) -> Drawn:
        """See `Policy`."""
        actions, logits = self.placer.act(self.embeddings(), count, generator, self.allowed)
        return Drawn(actions, actions, log_prob(logits, actions))

    def weigh(self, choices: Tensor) -> tuple[Tensor, Tensor]:
        """See `Policy`."""
        logits = self.placer.logits(self.embeddings(), choices, self.allowed)
        return log_prob(logits, choices), entropy(logits).mean()
