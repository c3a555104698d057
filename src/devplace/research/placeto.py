"""Placeto: improves a placement one group at a time, guided by a graph embedding.

Paper: Addanki, Bojja Venkatakrishnan, Gupta, Mao, Alizadeh (2019), Placeto: learning generalizable
device placement algorithms for distributed machine learning, NeurIPS, arXiv 1906.08879. A state is
a placement and the group whose turn it is; an action gives this group a device. An episode starts
from a fixed random placement and visits every group once in topological order. With C the cost of a
placement, step i earns what it improves, and the policy gradient has a baseline for each step,

    r_i = log C_i - log C_i+1,   G_i = sum_{j >= i} g^{j-i} r_j,
    grad J = mean_i (G_i - b_i) grad log p(a_i | state i),   b_i = mean of G_i in the last episodes.

The policy sees the graph as `StateEmbedding` does: messages go down and up the graph in rounds,
then own embedding and those pooled over ancestors, descendants and parallel groups give logits.

As b_i may depend on the way to state i, and with g = 1, the whole improvement of the episode may
stand for each G_i: the gradient is the same in expectation, and only the end of the episode has to
be evaluated. `reward = "final"` does so (the released code has such an option): with many groups it
learns far more from as many evaluations. `improvement` evaluates every step, as the paper does.

Memory: a placement over the limits counts `s_per_gb` more for each GB, at most `most_s`.
That is blind to a measured run that fails within the limits; `memory = "hard"` is not.

Hyper-parameters. From the released code: 8 rounds, g = 1, baseline over 10 episodes, gradient norm
1.25, 2 s per GB up to 10 s, learning rate (to a tenth) and entropy weight that fall linearly, two
hidden layers of the policy, twice and once as wide as its input. Chosen here, as evaluations are
few: number of groups; and compared on 48 groups: kind of reward, episodes per update, learning
rates, entropy weight.

Differs from the released code in:

- The cost enters as its logarithm (an option there), so that nothing depends on the unit of time.
- Rewards are improvements, as in the paper; the environment re-released with Park has them negated.
- Neighbours and sets are averaged, not summed: sums over hundreds of groups grow out of bounds.
- `final` rewards by default.
- Start times are no feature: the evaluator, which may measure, gives step times only.
- Groups come from `grouping.colocated`; a step that changes nothing is not evaluated again.
- Rates fall over `decay_evaluations` evaluations instead of a number of episodes.
- `memory = "hard"` has what does not fit cost more than all that fits (`penalties.HardLimit`).

Curves tell of the placements at the ends of episodes, which are what the policy proposes.
"""
# mypy: allow-subclassing-any

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from devplace.placers.counted_simulator import Evaluator
from devplace.problem import Placement, Problem
from devplace.research.advantages import discounted, scaled
from devplace.research.environment import Environment, Outcome, nothing_to_place
from devplace.research.features import group_adjacency, group_bytes, group_costs, group_edges
from devplace.research.grouping import colocated
from devplace.research.losses import reinforce
from devplace.research.mlp import Mlp
from devplace.research.options import TrainingOptions, check_settings
from devplace.research.penalties import HardLimit, PublishedRule, memory_rule, soft_penalty
from devplace.research.policies import entropy, log_prob, masked, sample
from devplace.research.training import Training, Values

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]


class Episodes(NamedTuple):
    """What some episodes went through, side by side; T steps, fewer than M when the budget ended.

    Attributes:
        states: Placements before each step. int64 `[T, B, M]`
        actions: int64 `[T, B]`
        costs: Before each step and after the last. `[T + 1, B]`
        ends: Outcomes of the last placements. `[B]`
    """

    states: Tensor
    actions: Tensor
    costs: F64
    ends: Outcome


@dataclass(frozen=True)
class Placeto:
    """Policy gradient for changes of one group at a time.

    Attributes:
        groups: Most groups that are placed.
        episodes: B, episodes per update.
        rounds: Of messages down and up the graph.
        discount: g.
        baseline_episodes: How many of the last ones count for the baseline.
        learning_rate, last_learning_rate: Adam's, at first and after `decay_evaluations`.
        entropy_weight: At first; zero after `decay_evaluations`.
        decay_evaluations: Evaluations over which both fall.
        gradient_norm: The gradient is scaled down to it.
        reward: `final` or `improvement`: see the module; `final` takes `discount` as 1.
        memory: `published` or `hard`: see the module.
        s_per_gb, most_s: The published penalty, s.
        training: Curves, checkpoints, early stop.
    """

    name: str = "placeto"
    groups: int = 64
    episodes: int = 8
    rounds: int = 8
    discount: float = 1.0
    baseline_episodes: int = 10
    learning_rate: float = 0.01
    last_learning_rate: float = 0.001
    entropy_weight: float = 0.01
    decay_evaluations: int = 2400
    gradient_norm: float = 1.25
    reward: Literal["improvement", "final"] = "final"
    memory: Literal["published", "hard"] = "published"
    s_per_gb: float = 2.0
    most_s: float = 10.0
    training: TrainingOptions = field(default=TrainingOptions(), repr=False)

    def __post_init__(self) -> None:
        check_settings(self, zero=("rounds",))

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
        with training.seeded():
            policy = ImprovementPolicy(environment, self.rounds).to(training.device)
        optimizer = torch.optim.Adam(policy.parameters(), self.learning_rate)
        cost = memory_rule(
            self.memory,
            environment,
            lambda outcome: soft_penalty(outcome, self.s_per_gb, self.most_s),
        )
        start = sample(
            masked(torch.zeros(policy.allowed.shape), policy.allowed.cpu()), training.generator
        )
        kept = Values(returns=torch.zeros(0, environment.num_groups, dtype=torch.float64))
        training.track(policy=policy, optimizer=optimizer, cost=cost, kept=kept)
        while not training.is_done:
            seen = self._walk(environment, training, policy, cost, start)
            if len(seen.actions) < environment.num_groups and training.updates:
                break  # the budget ended in the middle
            returns = torch.as_tensor(self._returns(seen.costs))
            baseline = baseline_of(kept.returns, returns)
            if len(returns) == environment.num_groups:  # else the budget ended the episodes
                kept.returns = torch.cat([kept.returns, returns.T])[-self.baseline_episodes :]

            advantage = scaled((returns - baseline).numpy()).flatten().to(training.device)
            left = max(0.0, 1 - environment.evaluate.meter.num_evaluations / self.decay_evaluations)
            rate = self.last_learning_rate + left * (self.learning_rate - self.last_learning_rate)
            turns = torch.arange(len(returns)).repeat_interleave(returns.shape[1])
            logits = policy(seen.states.flatten(0, 1), turns)
            actions = seen.actions.flatten().to(training.device)
            log_probs, spread = log_prob(logits, actions), entropy(logits).mean()
            loss = reinforce(log_probs, advantage) - left * self.entropy_weight * spread
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), self.gradient_norm)
            optimizer.step()
            training.log(
                seen.ends,
                entropy=float(spread.detach()),
                baseline=float(baseline[0]),
                improvement=float(returns[0].mean()),
                loss=float(loss.detach()),
            )
        return environment.best()

    def _returns(self, costs: F64) -> F64:
        """G of each step. `[T + 1, B]` -> `[T, B]`"""
        discount = 1.0 if self.reward == "final" else self.discount
        return discounted(improvements(costs), discount)

    def _walk(
        self,
        environment: Environment,
        training: Training,
        policy: ImprovementPolicy,
        cost: PublishedRule | HardLimit,
        start: Tensor,
    ) -> Episodes:
        """Episodes side by side from the start; they stop where the budget does."""
        count = environment.room(self.episodes)
        state = start.repeat(count, 1)
        first = environment(state[:1].numpy())  # counts once: all start there
        step, overflow = first.step_ns.repeat(count), first.overflow_bytes.repeat(count)
        states, actions, costs = [], [], [cost(Outcome(step, overflow))]
        for turn in range(environment.num_groups):
            with torch.no_grad():
                logits = policy(state, torch.full((count,), turn))
            chosen = sample(logits, training.generator).cpu()
            changed = np.flatnonzero((chosen != state[:, turn]).numpy())
            if self.reward == "final":
                is_last = turn == environment.num_groups - 1
                changed = np.arange(count if is_last else 0)
            if turn and len(changed) > environment.room(len(changed)):
                break
            changed = changed[: environment.room(len(changed))]
            states.append(state)
            actions.append(chosen)
            state = state.clone()
            state[:, turn] = chosen
            if len(changed):
                found = environment(state[changed].numpy())
                step[changed], overflow[changed] = found.step_ns, found.overflow_bytes
            costs.append(cost(Outcome(step.copy(), overflow.copy())))
        return Episodes(
            torch.stack(states), torch.stack(actions), np.stack(costs), Outcome(step, overflow)
        )


def improvements(costs: F64) -> F64:
    """`r_i = log C_i - log C_i+1`: positive where the cost shrinks. `[T + 1, B]` -> `[T, B]`"""
    found: F64 = -np.diff(np.log(np.maximum(costs, 1e-12)), axis=0)
    return found


def baseline_of(last: Tensor, returns: Tensor) -> Tensor:
    """Mean return of each step in the last episodes; of these ones where there are none. `[T, 1]`

    Args:
        last: `[., M]`
        returns: `[T, B]`
    """
    before = last[:, : len(returns)].mean(0) if len(last) else returns.mean(1)
    return before[:, None]


class StateEmbedding(nn.Module):
    """Messages down and up the graph, then means over ancestors, descendants and parallel groups.

    With x features of a group, in each direction `h <- x + g(mean over neighbours of f(h))` for
    some rounds from h = x; f, g and the functions around each pool are two layers of neurons. The
    embedding of a group is its own e = [h_down, h_up] and `g(mean f(e))` of the three sets.

    Args:
        parents: 1 at (i, j) if group i reads what group j makes. `[M, M]`
        features: F.
        rounds: Of messages.
    """

    def __init__(self, parents: Tensor, features: int, rounds: int) -> None:
        super().__init__()
        self.rounds, self.size = rounds, 8 * features
        above = reachable(parents)
        below = above.T
        beside = ~(above | below) & ~torch.eye(len(above), dtype=torch.bool)
        self.register_buffer("down", mean_weights(parents), persistent=False)
        self.register_buffer("up", mean_weights(parents.T), persistent=False)
        self.register_buffer(
            "pools", torch.stack([mean_weights(rows) for rows in (above, below, beside)]), False
        )
        width = [features] * 3
        self.send = nn.ModuleList(Mlp(width) for _ in range(2))
        self.receive = nn.ModuleList(Mlp(width) for _ in range(2))
        double = [2 * features] * 3
        self.offer = nn.ModuleList(Mlp(double) for _ in range(3))
        self.gather = nn.ModuleList(Mlp(double) for _ in range(3))

    def forward(self, features: Tensor, turns: Tensor) -> Tensor:
        """Embedding of the group whose turn it is. `[B, M, F]`, int64 `[B]` -> `[B, 8 F]`"""
        ways = []
        for weights, send, receive in zip(
            (self.down, self.up), self.send, self.receive, strict=True
        ):
            h = features
            for _ in range(self.rounds):
                h = features + receive(weights @ send(h))
            ways.append(h)
        embeddings = torch.cat(ways, -1)
        rows = torch.arange(len(turns), device=turns.device)
        found = [embeddings[rows, turns]]
        for pool, offer, gather in zip(self.pools, self.offer, self.gather, strict=True):
            mean = (pool[turns][:, None] @ offer(embeddings)).squeeze(1)
            found.append(gather(mean))
        return torch.cat(found, -1)


class ImprovementPolicy(nn.Module):
    """From a placement and the group whose turn it is to logits of its device.

    Features of a group: mean time over devices, bytes it sends, bytes it holds, each divided by the
    largest; whether it had its turn; whether it has it now; its device (one-hot).
    """

    def __init__(self, environment: Environment, rounds: int) -> None:
        super().__init__()
        grouping = environment.grouping
        sent = np.zeros(grouping.num_groups)
        (src, _), num_bytes = group_edges(grouping)
        np.add.at(sent, src, num_bytes)
        time = group_costs(grouping)[:, environment.devices].mean(axis=1)
        columns = [column / max(1, column.max()) for column in (time, sent, group_bytes(grouping))]
        fixed = torch.as_tensor(np.stack(columns, 1), dtype=torch.float32)
        self.num_actions = environment.num_actions
        self.register_buffer("fixed", fixed, persistent=False)
        self.register_buffer("allowed", torch.as_tensor(environment.allowed), persistent=False)
        parents = torch.as_tensor(group_adjacency(grouping).T > 0)
        self.embedding = StateEmbedding(parents, 5 + self.num_actions, rounds)
        size = self.embedding.size
        self.head = Mlp([size, 2 * size, size, self.num_actions])

    def forward(self, state: Tensor, turns: Tensor) -> Tensor:
        """Logits. int64 `[B, M]`, int64 `[B]` -> `[B, A]`"""
        state, turns = state.to(self.fixed.device), turns.to(self.fixed.device)
        place = torch.arange(state.shape[1], device=state.device)
        features = [
            self.fixed.expand(len(state), -1, -1),
            (place[None] < turns[:, None]).float()[:, :, None],
            (place[None] == turns[:, None]).float()[:, :, None],
            nn.functional.one_hot(state, self.num_actions).float(),
        ]
        logits = self.head(self.embedding(torch.cat(features, 2), turns))
        return masked(logits, self.allowed[turns])


def reachable(parents: Tensor) -> Tensor:
    """Whether group j is an ancestor of group i. bool `[M, M]`"""
    found = parents.bool()
    for _ in range(max(1, len(parents)).bit_length()):
        found = found | ((found.float() @ found.float()) > 0)
    return found


def mean_weights(rows: Tensor) -> Tensor:
    """Rows that sum to one; empty ones stay empty. `[M, M]`"""
    weights = rows.float()
    return weights / weights.sum(1, keepdim=True).clamp_min(1)
