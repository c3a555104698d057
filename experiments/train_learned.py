"""Train the policy of the placer `learned` on many graphs and machines; writes its weights.

Each problem gets a teacher: hill climbing over its groups with simulated steps, from the placement
of the untrained policy. The policy learns to decide as the teacher did, group after group
(cross-entropy, as in the imitation stage of DOPPLER). The weights with the best validation score
are kept: the mean of log(step / best single device) over problems of the validation family, placed
zero-shot. (PPO over the same problems, 1,500 updates of 32 samples, gained nothing there; nor did
soft targets that weigh each decision by what it is worth.)

Curves go to `curves.csv` and a checkpoint to `checkpoint.pt` in the log folder; after a kill,
`--resume` goes on from it, with the same result. Run:
`python experiments/train_learned.py --log-dir runs/learned [--updates N] [--seed 0] [--resume]`.
"""

from __future__ import annotations

import argparse
import csv
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import learned_problems as problems
import numpy as np
import torch
from common import provenance
from numpy.typing import NDArray
from torch import Tensor

from devplace.placers.rl import weights
from devplace.placers.rl.environment import Environment
from devplace.placers.rl.pair_policy import PairPolicy
from devplace.placers.rl.policies import log_prob

LEARNING_RATE, DECAY = 1e-3, 1e-3
ROUNDS, TRIED = 150, 16  # of the teacher: rounds, placements tried in each
EVERY = 200  # updates between validations
COLUMNS = ("update", "seconds", "train", "validation", "failures")


@dataclass(frozen=True, eq=False)
class Lesson:
    """A problem with its teacher's decisions, in the states that they lead to.

    Attributes:
        weight: Of each decision in the loss: the group's part of the work, in bounds. `[M]`
        gain: log(step of the teacher / best single device).
    """

    sample: problems.Sample
    actions: Tensor
    pairs: Tensor
    may: Tensor
    weight: Tensor
    gain: float


def climb(
    environment: Environment, actions: NDArray[np.int64], rng: np.random.Generator
) -> tuple[NDArray[np.int64], int]:
    """Hill climbing: in each round the best of some moves of a group, or of a run of groups."""
    outcome = environment(actions[None, :])
    best, key = actions, (int(outcome.overflow_bytes[0]), int(outcome.step_ns[0]))
    count = environment.num_groups
    for _ in range(ROUNDS):
        tried = np.tile(best, (TRIED, 1))
        for row in tried:
            first, device = int(rng.integers(count)), int(rng.integers(environment.num_actions))
            length = int(rng.choice([1, 1, 2, 4, 8]))
            moved = np.arange(first, min(first + length, count))
            moved = moved[environment.allowed[moved, device]]
            row[moved] = device
        outcome = environment(tried)
        at = int(np.lexsort((outcome.step_ns, outcome.overflow_bytes))[0])
        found = (int(outcome.overflow_bytes[at]), int(outcome.step_ns[at]))
        if found < key:
            best, key = tried[at], found
    return best, key[1]


def lesson(sample: problems.Sample, rng: np.random.Generator) -> Lesson:
    """Let the teacher place a problem, and note what it saw."""
    environment, scene = sample.environment, sample.scene
    rule = PairPolicy()
    actions, _, _ = rule.act(scene, torch.zeros(environment.allowed.shape), 1, None)
    best, step = climb(environment, actions[0], rng)
    progress, seen, open_to = scene.begin(1), [], []
    for group in range(scene.num_groups):
        features, free = scene.pairs(progress, group)
        free = free.copy()
        free[0, best[group]] = True
        seen.append(torch.as_tensor(features))
        open_to.append(torch.as_tensor(free))
        scene.put(progress, group, best[group : group + 1])
    part = scene.time.min(axis=1)
    weight = np.clip(part / max(1e-12, part.mean()), 0.05, 3)
    return Lesson(
        sample,
        torch.as_tensor(best[None, :]),
        torch.stack(seen, 1),
        torch.stack(open_to, 1),
        torch.as_tensor(weight / weight.sum(), dtype=torch.float32),
        float(np.log(step / sample.single_ns)),
    )


class Run:
    """Policy, optimizer and random numbers, with all that a checkpoint needs."""

    def __init__(self, seed: int, updates: int) -> None:
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        self.updates = updates
        self.policy = PairPolicy()
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(), LEARNING_RATE, weight_decay=DECAY
        )
        self.rng = np.random.default_rng(seed)
        self.update, self.best, self.seconds = 0, float("inf"), 0.0

    def save(self, path: Path) -> None:
        """Write a checkpoint in one go."""
        state = {
            "policy": self.policy.state_dict(),
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
        self.optimizer.load_state_dict(state["optimizer"])
        self.rng.bit_generator.state = state["rng"]
        self.update, self.best, self.seconds = state["numbers"]

    def learn(self, lesson: Lesson) -> float:
        """One update on one problem; gives the loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = LEARNING_RATE * max(0.05, 1 - self.update / self.updates)
        groups = self.policy.embed(lesson.sample.scene)
        own = torch.zeros(lesson.sample.environment.allowed.shape)
        logits = self.policy(groups, lesson.pairs, lesson.may, own)
        loss = -(log_prob(logits, lesson.actions)[0] * lesson.weight).sum()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.optimizer.step()
        self.update += 1
        return float(loss.detach())


def score(policy: PairPolicy, samples: list[problems.Sample]) -> tuple[float, float]:
    """Zero-shot: mean log(step / best single device), 1 more where it fails; share of failures."""
    found, failures = [], 0
    for sample in samples:
        environment = sample.environment
        table = torch.zeros(environment.allowed.shape)
        actions, _, _ = policy.act(sample.scene, table, 1, None)
        outcome = environment(actions)
        failures += int(outcome.failed[0])
        found.append(np.log(int(outcome.step_ns[0]) / sample.single_ns) + float(outcome.failed[0]))
    return float(np.mean(found)), failures / len(samples)


def record_of(run: Run, options: argparse.Namespace) -> dict[str, Any]:
    """What the file of weights says of itself."""
    return {
        "train": sorted(problems.TRAIN),
        "validation": sorted(problems.VALIDATION),
        "test": sorted(problems.TEST),
        "machines": list(problems.MACHINES),
        "seed": options.seed,
        "updates": run.update,
        "problems": options.problems,
        "samples": options.problems * (ROUNDS * TRIED + 1),
        "seconds": round(run.seconds),
        "validation_score": round(run.best, 4),
        "provenance": options.provenance,
    }


def train(
    run: Run,
    options: argparse.Namespace,
    graphs: dict[str, list[Any]],
    until: int | None = None,
) -> None:
    """Learn until the updates are spent, or those up to `until`."""
    folder: Path = options.log_dir
    begun = time.monotonic() - run.seconds
    held_out = [
        problems.draw(graphs["validation"], np.random.default_rng((options.seed, 1, k)))
        for k in range(options.held_out)
    ]
    lessons = []
    for number in range(options.problems):
        rng = np.random.default_rng((options.seed, 0, number))
        lessons.append(lesson(problems.draw(graphs["train"], rng), rng))
    gain = float(np.mean([found.gain for found in lessons]))
    print(f"teacher: {gain:.3f}, untrained: {score(PairPolicy(), held_out)}", flush=True)
    recent: list[float] = []
    last = until or run.updates
    while run.update < last:
        recent.append(run.learn(lessons[int(run.rng.integers(len(lessons)))]))
        if run.update % EVERY and run.update < last:
            continue
        run.seconds = time.monotonic() - begun
        validation, failures = score(run.policy, held_out)
        if validation < run.best:
            run.best = validation
            weights.write(options.out, run.policy, record_of(run, options))
        row = (run.update, run.seconds, float(np.mean(recent)), validation, failures)
        log(folder / "curves.csv", row)
        recent.clear()
        run.save(folder / "checkpoint.pt")


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
    parser.add_argument("--out", type=Path, default=weights.SHIPPED, help="file of weights")
    parser.add_argument("--updates", type=int, default=4000)
    parser.add_argument("--problems", type=int, default=120, help="different ones in training")
    parser.add_argument("--held-out", type=int, default=12, help="problems of the validation")
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
