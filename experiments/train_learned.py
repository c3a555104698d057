"""Train the policy of the placer `learned` on many graphs and machines; writes its weights.

Three stages, all from the untrained policy, which is a list scheduler's rule:

1. *Evolution*: small random changes of the weights of the rule and of the network's last layer are
   tried on some problems with some number of groups; the weights move towards those whose likeliest
   placements had the shorter simulated steps (antithetic evolution strategies). So what is made
   better is what counts, the step placed zero-shot, and not the likeness to a teacher.
2. The weights with the best validation score are taken; the untrained ones are among them.
3. *Numbers of groups*: on each problem the policy places with every count, a teacher (hill climbing
   over the groups, from there) improves each, and the head learns which count gives short steps:
   the expected logarithm of both, with a penalty on leaving the untrained head. Kept only if the
   validation score is better with it.

The validation score is the mean of log(step / best single device) over problems of the validation
family, placed zero-shot, 1 more for each that does not fit. (Tried before and given up: PPO over
the same problems, and imitation of the hill climber. Neither was better than the untrained rule.)

Curves go to `curves.csv` and a checkpoint to `checkpoint.pt` in the log folder; after a kill,
`--resume` goes on from it, with the same result. Run:
`python experiments/train_learned.py --log-dir runs/learned [--updates N] [--seed 0] [--resume]`.
"""

from __future__ import annotations

import argparse
import copy
import csv
import os
import time
from pathlib import Path
from typing import Any

import learned_problems as problems
import numpy as np
import torch
from common import provenance
from numpy.typing import NDArray
from torch import Tensor

from devplace.placers.rl import saved_weights
from devplace.placers.rl.count_head import RULE, CountHead
from devplace.placers.rl.environment import Environment, Outcome
from devplace.placers.rl.pair_policy import PairPolicy, softly_bounded
from devplace.placers.rl.policies import divergence, masked
from devplace.placers.rl.state_features import Scene

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

PAIRS, BATCH = 16, 24  # of opposite changes tried in an update, and problems they are tried on
SPREAD, LEARNING_RATE = 0.3, 0.03  # of the changes; of Adam
LARGEST = 200  # groups at most in training; larger ones take longer and are not different
EVERY = 10  # updates between validations
ROUNDS, TRIED = 10, 16  # of the teacher: rounds, placements tried in each
HEAD_STEPS, HEAD_RATE, HEAD_PENALTY = 400, 3e-3, 0.02
COLUMNS = ("update", "seconds", "train", "validation", "failures")


def worth(outcome: Outcome, single_ns: int) -> F64:
    """log(step / best single device), 1 more where it does not fit. `[B]`"""
    found: F64 = np.log(outcome.step_ns / single_ns) + outcome.failed
    return found


@torch.no_grad()  # type: ignore[untyped-decorator]
def act_changed(policy: PairPolicy, scene: Scene, last: Tensor, line: Tensor) -> I64:
    """The likeliest placements of policies that differ in their last weights.

    Args:
        policy: What they have in common.
        scene: What is placed.
        last: Weights of the network's last layer. `[B, H]`
        line: Weights of the rule. `[B, PAIR_FEATURES]`

    Returns:
        Actions `[B, M]`.
    """
    groups, progress = policy.embed(scene), scene.begin(len(last))
    for group in range(scene.num_groups):
        features, free = scene.pairs(progress, group)
        pairs = torch.as_tensor(features)
        rows = groups[group].expand(*pairs.shape[:-1], -1)
        hidden = policy.score.layers[:-1](torch.cat([rows, pairs], -1))
        scores = (hidden @ last[:, :, None] + pairs @ line[:, :, None]).squeeze(-1)
        scores = masked(softly_bounded(scores), torch.as_tensor(free))
        scene.put(progress, group, scores.mul(1e4).round().argmax(-1).numpy())
    return progress.placed


class Run:
    """Policy, optimizer and random numbers, with all that a checkpoint needs."""

    def __init__(self, seed: int, updates: int) -> None:
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        self.updates = updates
        self.policy = PairPolicy()
        self.best_policy = copy.deepcopy(self.policy.state_dict())
        self.changed = [self.policy.score.layers[-1].weight, self.policy.rule.weight]
        self.length = float(self.policy.rule.weight.detach().norm())
        self.optimizer = torch.optim.Adam(self.changed, LEARNING_RATE)
        self.rng = np.random.default_rng(seed)
        self.update, self.best, self.seconds = 0, float("inf"), 0.0

    def save(self, path: Path) -> None:
        """Write a checkpoint in one go."""
        state = {
            "policy": self.policy.state_dict(),
            "best_policy": self.best_policy,
            "optimizer": self.optimizer.state_dict(),
            "rng": self.rng.bit_generator.state,
            "numbers": (self.update, self.best, self.seconds),
        }
        torch.save(state, path.with_suffix(".tmp"))
        os.replace(path.with_suffix(".tmp"), path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint."""
        state = torch.load(path, weights_only=True)
        self.policy.load_state_dict(state["policy"])
        self.best_policy = state["best_policy"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.rng.bit_generator.state = state["rng"]
        self.update, self.best, self.seconds = state["numbers"]

    def evolve(self, samples: list[problems.Sample]) -> float:
        """One update; gives the mean of what the changed policies were worth."""
        for group in self.optimizer.param_groups:
            group["lr"] = LEARNING_RATE * max(0.05, 1 - self.update / self.updates)
        changes = [self._changes(each) for each in self.changed]
        tried = [each.detach() + change for each, change in zip(self.changed, changes, strict=True)]
        ranks, total = np.zeros(2 * PAIRS), 0.0
        for number in self.rng.integers(len(samples), size=BATCH):
            sample = samples[int(number)]
            choice = self._choice(sample)
            actions = act_changed(self.policy, sample.partings.scene(choice), *tried)
            found = worth(sample.partings.environment(choice)(actions), sample.single_ns)
            total += float(found.mean())
            ranks += (found - found.mean()) / max(0.02, float(found.std()))
        slope = torch.as_tensor(ranks / BATCH, dtype=torch.float32)
        for each, change in zip(self.changed, changes, strict=True):
            each.grad = (slope[:, None] * change).mean(0, keepdim=True) / SPREAD
        self.optimizer.step()
        self._keep_length()
        self.update += 1
        return total / BATCH

    def _changes(self, of: Tensor) -> Tensor:
        """Normal changes, and the same with the other sign. `[2 PAIRS, n]`"""
        half = self.rng.normal(0, SPREAD, (PAIRS, of.shape[1]))
        return torch.as_tensor(np.concatenate([half, -half]), dtype=torch.float32)

    def _choice(self, sample: problems.Sample) -> int:
        """The rule's number of groups, or every other time any that there is."""
        counts, is_open = sample.partings.counts, sample.partings.is_open
        every = [k for k in range(len(counts)) if is_open[k] and counts[k] <= LARGEST]
        chosen = int(self.rng.choice(every)) if every else RULE
        return RULE if self.rng.random() < 0.5 else chosen

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _keep_length(self) -> None:
        """Scale the scores, which changes no likeliest placement: samples stay as varied."""
        scale = self.length / float(self.policy.rule.weight.norm())
        for each in self.changed:
            each.mul_(scale)


def greedy(policy: PairPolicy, sample: problems.Sample, choice: int) -> tuple[I64, Outcome]:
    """The likeliest placement with a number of groups. `[1, M]`"""
    environment = sample.partings.environment(choice)
    table = torch.zeros(environment.allowed.shape)
    actions, _, _ = policy.act(sample.partings.scene(choice), table, 1, None)
    return actions, environment(actions)


def score(policy: PairPolicy, samples: list[problems.Sample]) -> tuple[float, float]:
    """Zero-shot: mean of `worth`; share of failures."""
    outcomes = [greedy(policy, each, likeliest(policy.counts, each))[1] for each in samples]
    found = [
        float(worth(outcome, each.single_ns)[0])
        for outcome, each in zip(outcomes, samples, strict=True)
    ]
    return float(np.mean(found)), float(np.mean([outcome.failed[0] for outcome in outcomes]))


@torch.no_grad()  # type: ignore[untyped-decorator]
def likeliest(head: CountHead, sample: problems.Sample) -> int:
    """Which number of groups a head chooses."""
    partings = sample.partings
    logits = head(torch.as_tensor(partings.summary), torch.as_tensor(partings.is_open))
    return int(logits.argmax())


def climb(environment: Environment, actions: I64, rng: np.random.Generator) -> tuple[I64, Outcome]:
    """The teacher: in each round the best of some moves of a group, or of a run of groups.

    Args:
        actions: Where it begins. `[1, M]`
    """
    best, kept = actions[0], environment(actions)
    count = environment.num_groups
    for _ in range(ROUNDS):
        tried = np.tile(best, (TRIED, 1))
        for row in tried:
            first, device = int(rng.integers(count)), int(rng.integers(environment.num_actions))
            length = int(rng.choice([1, 1, 2, 4, 8]))
            moved = np.arange(first, min(first + length, count))
            row[moved[environment.allowed[moved, device]]] = device
        outcome = environment(tried)
        at = int(np.lexsort((outcome.step_ns, outcome.overflow_bytes))[0])
        found = Outcome(outcome.step_ns[at : at + 1], outcome.overflow_bytes[at : at + 1])
        if key(found) < key(kept):
            best, kept = tried[at], found
    return best, kept


def key(outcome: Outcome) -> tuple[int, int]:
    """Smaller is better."""
    return int(outcome.overflow_bytes[0]), int(outcome.step_ns[0])


def worth_of_counts(policy: PairPolicy, sample: problems.Sample, rng: np.random.Generator) -> F64:
    """Mean of what the policy's and the teacher's placements are worth, by count. `[C]`"""
    found = np.zeros(len(sample.partings.counts))
    for choice in np.flatnonzero(sample.partings.is_open).tolist():
        actions, outcome = greedy(policy, sample, choice)
        _, better = climb(sample.partings.environment(choice), actions, rng)
        both = [float(worth(each, sample.single_ns)[0]) for each in (outcome, better)]
        found[choice] = float(np.mean(both))
    return found


def learn_counts(head: CountHead, samples: list[problems.Sample], worths: list[F64]) -> None:
    """Teach the head which counts are worth most: expectation, and divergence from what it was."""
    summary = torch.as_tensor(np.stack([each.partings.summary for each in samples]))
    is_open = torch.as_tensor(np.stack([each.partings.is_open for each in samples]))
    value = torch.as_tensor(np.stack(worths), dtype=torch.float32)
    value = value - value[:, RULE : RULE + 1]
    with torch.no_grad():
        first = head(summary, is_open)
    optimizer = torch.optim.AdamW(head.parameters(), HEAD_RATE, weight_decay=1e-2)
    for _ in range(HEAD_STEPS):
        logits = head(summary, is_open)
        expected = (torch.softmax(logits, -1) * value).sum(-1).mean()
        loss = expected + HEAD_PENALTY * divergence(first, logits).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def record_of(run: Run, options: argparse.Namespace, scores: dict[str, float]) -> dict[str, Any]:
    """What the file of weights says of itself."""
    return {
        "train": sorted(problems.TRAIN),
        "validation": sorted(problems.VALIDATION),
        "test": sorted(problems.TEST),
        "machines": list(problems.MACHINES),
        "seed": options.seed,
        "updates": run.update,
        "problems": options.problems,
        "samples": run.update * BATCH * 2 * PAIRS,
        "seconds": round(run.seconds),
        "validation_score": {name: round(value, 4) for name, value in scores.items()},
        "provenance": options.provenance,
    }


def train(
    run: Run,
    options: argparse.Namespace,
    graphs: dict[str, list[Any]],
    until: int | None = None,
) -> None:
    """Evolve until the updates are spent, or those up to `until`; then teach the head."""
    begun = time.monotonic() - run.seconds
    held_out = drawn(graphs["validation"], options.seed, 1, options.held_out)
    samples = drawn(graphs["train"], options.seed, 0, options.problems)
    untrained = score(PairPolicy(), held_out)[0]
    run.best = min(run.best, untrained)
    print(f"untrained: {untrained:.4f}", flush=True)
    recent: list[float] = []
    last = until or run.updates
    while run.update < last:
        recent.append(run.evolve(samples))
        if run.update % EVERY and run.update < last:
            continue
        run.seconds = time.monotonic() - begun
        validation, failures = score(run.policy, held_out)
        if validation < run.best:
            run.best = validation
            run.best_policy = copy.deepcopy(run.policy.state_dict())
        row = (run.update, run.seconds, float(np.mean(recent)), validation, failures)
        log(options.log_dir / "curves.csv", row)
        recent.clear()
        run.save(options.log_dir / "checkpoint.pt")
    if run.update >= run.updates:
        finish(run, options, samples, held_out, untrained)


def finish(
    run: Run,
    options: argparse.Namespace,
    samples: list[problems.Sample],
    held_out: list[problems.Sample],
    untrained: float,
) -> None:
    """Teach the head of the best policy, and write the weights."""
    policy = PairPolicy()
    policy.load_state_dict(run.best_policy)
    scores = {"untrained": untrained, "evolved": run.best}
    rng = np.random.default_rng((options.seed, 2))
    worths = [worth_of_counts(policy, each, rng) for each in samples]
    before = copy.deepcopy(policy.counts.state_dict())
    learn_counts(policy.counts, samples, worths)
    scores["with head"], _ = score(policy, held_out)
    if scores["with head"] > scores["evolved"]:
        policy.counts.load_state_dict(before)
    print(scores, flush=True)
    saved_weights.write(options.out, policy, record_of(run, options, scores))


def drawn(graphs: list[Any], seed: int, part: int, count: int) -> list[problems.Sample]:
    """Random problems, always the same."""
    return [problems.draw(graphs, np.random.default_rng((seed, part, k))) for k in range(count)]


def log(path: Path, row: tuple[float, ...]) -> None:
    """Add a row to the curves."""
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if is_new:
            writer.writerow(COLUMNS)
        writer.writerow([f"{value:.4g}" if isinstance(value, float) else value for value in row])
    print(dict(zip(COLUMNS, (f"{value:.4g}" for value in row), strict=True)), flush=True)


def main() -> None:
    """Capture the graphs, train, write the weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log-dir", type=Path, required=True, help="for curves and checkpoint")
    parser.add_argument("--out", type=Path, default=saved_weights.SHIPPED, help="file of weights")
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--problems", type=int, default=150, help="different ones in training")
    parser.add_argument("--held-out", type=int, default=48, help="problems of the validation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    options.provenance = provenance()  # before the weights are written: they lie in the package
    options.log_dir.mkdir(parents=True, exist_ok=True)
    run = Run(options.seed, options.updates)
    if options.resume:
        run.load(options.log_dir / "checkpoint.pt")
    else:
        (options.log_dir / "curves.csv").unlink(missing_ok=True)
    families = {"train": problems.TRAIN, "validation": problems.VALIDATION}
    graphs = {part: problems.capture_all(family) for part, family in families.items()}
    print(sum(map(len, graphs.values())), "graphs", flush=True)
    train(run, options, graphs)


if __name__ == "__main__":
    main()
