"""Train the policy of the placer `learned` on many graphs and machines; writes its weights.

PPO on placements of small graphs with simulated steps; reward -log(step), advantages within each
problem. The weights with the best validation score are kept: the mean of log(step / best single
device) over problems of the validation family, placed zero-shot. Curves go to `curves.csv` and a
checkpoint to `checkpoint.pt` in the log folder; after a kill, `--resume` goes on from it. Run:
`python experiments/train_learned.py --log-dir runs/learned [--minutes 15] [--seed 0] [--resume]`.
"""

from __future__ import annotations

import argparse
import csv
import os
import time
from pathlib import Path
from typing import Any

import learned_problems as problems
import numpy as np
import torch
from common import provenance

from devplace.placers.rl import weights
from devplace.placers.rl.costs import HardLimit
from devplace.placers.rl.learned import Own, Surrogate, log_reward
from devplace.placers.rl.losses import standardised
from devplace.placers.rl.pair_policy import PairPolicy

SAMPLES, STEPS, CLIP, LEARNING_RATE = 32, 3, 0.2, 1e-3
BONUS = 0.003  # of entropy at first; falls to 0
EVERY = 50  # updates between validations
COLUMNS = ("update", "seconds", "train", "entropy", "validation", "failures")


class Run:
    """Policy, optimizer and random numbers, with all that a checkpoint needs."""

    def __init__(self, seed: int, updates: int) -> None:
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        self.updates = updates
        self.policy = PairPolicy()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), LEARNING_RATE)
        self.generator = torch.Generator().manual_seed(seed)
        self.rng = np.random.default_rng(seed)
        self.update, self.best, self.seconds = 0, float("inf"), 0.0

    def save(self, path: Path) -> None:
        """Write a checkpoint in one go."""
        state = {
            "policy": self.policy.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
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
        self.generator.set_state(state["generator"])
        self.rng.bit_generator.state = state["rng"]
        self.update, self.best, self.seconds = state["numbers"]

    def learn(self, sample: problems.Sample) -> tuple[float, float]:
        """One update on one problem; gives mean log(step / single) and entropy per group."""
        left = 1 - self.update / self.updates
        for group in self.optimizer.param_groups:
            group["lr"] = LEARNING_RATE * max(0.1, left)
        environment, scene = sample.environment, sample.scene
        own = Own(environment.allowed.shape)
        actions, pairs, may = self.policy.act(scene, own.table.detach(), SAMPLES, self.generator)
        outcome = environment(actions)
        reward = log_reward(HardLimit(environment.limit_bytes), outcome)
        loss = Surrogate(self.policy, scene, own, torch.as_tensor(actions), pairs, may)
        advantage = standardised(reward)
        for _ in range(STEPS):
            self.optimizer.zero_grad()
            loss(advantage, CLIP, BONUS * left).backward()
            torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
            self.optimizer.step()
        self.update += 1
        return float(-reward.mean()) - np.log(sample.single_ns / 1e9), loss.entropy


def score(policy: PairPolicy, samples: list[problems.Sample]) -> tuple[float, float]:
    """Zero-shot: mean log(step / best single device), 1 more where it fails; share of failures."""
    found, failures = [], 0
    for sample in samples:
        environment = sample.environment
        table = torch.zeros(environment.allowed.shape)
        actions, _, _ = policy.act(sample.scene, table, 1, None)
        outcome = environment(actions)
        failures += int(outcome.failed[0])
        found.append(
            np.log(int(outcome.step_ns[0]) / sample.single_ns) + float(outcome.failed[0])
        )
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
        "samples": run.update * SAMPLES,
        "seconds": round(run.seconds),
        "validation_score": round(run.best, 4),
        "provenance": options.provenance,
    }


def train(run: Run, options: argparse.Namespace, graphs: dict[str, list[Any]]) -> None:
    """Learn until the time or the updates are spent."""
    folder: Path = options.log_dir
    held_out = [
        problems.draw(graphs["validation"], np.random.default_rng((options.seed, 1, k)))
        for k in range(options.held_out)
    ]
    pool: dict[int, problems.Sample] = {}
    before, begun, recent = run.seconds, time.monotonic(), []
    while run.update < run.updates and run.seconds < 60 * options.minutes:
        number = int(run.rng.integers(options.problems))
        if number not in pool:
            pool[number] = problems.draw(
                graphs["train"], np.random.default_rng((options.seed, 0, number))
            )
        recent.append(run.learn(pool[number]))
        run.seconds = before + time.monotonic() - begun
        if run.update % EVERY and run.update < run.updates:
            continue
        validation, failures = score(run.policy, held_out)
        if validation < run.best:
            run.best = validation
            weights.write(options.out, run.policy, record_of(run, options))
        row = (run.update, run.seconds, *np.mean(recent, axis=0), validation, failures)
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
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--updates", type=int, default=1500)
    parser.add_argument("--problems", type=int, default=300, help="different ones in training")
    parser.add_argument("--held-out", type=int, default=16, help="problems of the validation")
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
