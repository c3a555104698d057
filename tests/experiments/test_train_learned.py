"""Training of the learned placer's weights."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from devplace.placers.rl import saved_weights
from devplace.placers.rl.count_head import RULE
from devplace.placers.rl.pair_policy import PairPolicy
from devplace.placers.rl.state_features import PAIR_FEATURES

FOLDER = str(Path(__file__).parents[2] / "experiments")


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module, with few changes tried and few updates between validations."""
    monkeypatch.syspath_prepend(FOLDER)
    import train_learned

    for name, value in (("EVERY", 2), ("ROUNDS", 3), ("PAIRS", 2), ("BATCH", 2)):
        monkeypatch.setattr(train_learned, name, value)
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        yield train_learned
    torch.set_num_threads(threads)
    for name in ("train_learned", "learned_problems", "common"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def graph() -> Any:
    """A small training graph."""
    sys.path.insert(0, FOLDER)
    try:
        from learned_problems import capture_small

        return capture_small("rnnlm", None, 1)
    finally:
        sys.path.remove(FOLDER)


def options_for(folder: Path) -> argparse.Namespace:
    """Options of a training of two problems."""
    folder.mkdir(exist_ok=True)
    return argparse.Namespace(
        log_dir=folder,
        out=folder / "w.npz",
        seed=1,
        problems=2,
        held_out=1,
        provenance={"commit": "none"},
    )


@pytest.mark.slow
def test_a_resumed_training_ends_as_one_that_was_not_stopped(
    training: Any, graph: Any, tmp_path: Path
) -> None:
    """Stopped after 4 of 8 updates and resumed: the same policy, and weights that can be read."""
    parts = {"train": [graph], "validation": [graph]}

    def policy_of(run: Any) -> list[float]:
        return [float(value.sum()) for value in run.policy.state_dict().values()]

    whole = training.Run(1, 8)
    training.train(whole, options_for(tmp_path / "whole"), parts)
    stopped = training.Run(1, 8)
    training.train(stopped, options_for(tmp_path / "stopped"), parts, until=4)
    assert not (tmp_path / "stopped" / "w.npz").exists()
    resumed = training.Run(1, 8)
    resumed.load(tmp_path / "stopped" / "checkpoint.pt")
    training.train(resumed, options_for(tmp_path / "stopped"), parts)
    assert resumed.update == whole.update == 8
    assert policy_of(resumed) == policy_of(whole)
    found = [saved_weights.read(tmp_path / name / "w.npz") for name in ("whole", "stopped")]
    assert found[0][1]["seed"] == 1
    for name, value in found[0][0].items():
        assert torch.equal(value, found[1][0][name])
    assert (tmp_path / "stopped" / "curves.csv").read_text().count("\n") == 5


def test_weights_are_never_worse_than_untrained_ones_on_validation(
    training: Any, graph: Any, tmp_path: Path
) -> None:
    """Whatever training made, what is written scores at least as well as the untrained policy."""
    parts = {"train": [graph], "validation": [graph]}
    run, options = training.Run(1, 2), options_for(tmp_path / "run")
    with torch.no_grad():
        run.policy.rule.weight.mul_(-1)  # the worst of rules
    training.train(run, options, parts)
    policy = PairPolicy()
    record = saved_weights.load_into(policy, options.out)
    held_out = training.drawn(parts["validation"], options.seed, 1, options.held_out)
    assert training.score(policy, held_out) <= training.score(PairPolicy(), held_out)
    scores = record["validation_score"]
    assert min(scores["evolved"], scores["with head"]) <= scores["untrained"]


def test_changed_policies_act_as_policies_with_those_weights(training: Any, graph: Any) -> None:
    """A population placed at once gives each member's likeliest placement."""
    from learned_problems import draw

    sample = draw([graph], np.random.default_rng(3))
    scene, policy = sample.partings.scene(RULE), PairPolicy()
    last, line = torch.randn(3, 32), torch.randn(3, PAIR_FEATURES)
    together = training.act_changed(policy, scene, last, line)
    for row in range(3):
        with torch.no_grad():
            policy.score.layers[-1].weight.copy_(last[row : row + 1])
            policy.rule.weight.copy_(line[row : row + 1])
        alone, _ = training.greedy(policy, sample, RULE)
        assert alone[0].tolist() == together[row].tolist()


def test_evolution_moves_towards_shorter_steps(training: Any, graph: Any) -> None:
    """From the opposite of the rule, which queues, twelve updates make the likeliest placements
    shorter on the problems that they are made on."""
    run = training.Run(0, 1000)
    samples = training.drawn([graph], 5, 0, 2)
    with torch.no_grad():
        run.policy.rule.weight.zero_()
        run.policy.rule.weight[0, :2] = torch.tensor([0.3, -0.3])
    run.length = float(run.policy.rule.weight.detach().norm())
    before, _ = training.score(run.policy, samples)
    for _ in range(12):
        run.evolve(samples)
    assert training.score(run.policy, samples)[0] < before


def test_the_teacher_is_never_worse_than_the_policy(training: Any, graph: Any) -> None:
    """Hill climbing starts from the policy's placement and keeps only what is better."""
    from learned_problems import draw

    sample = draw([graph], np.random.default_rng(3))
    actions, outcome = training.greedy(PairPolicy(), sample, RULE)
    environment = sample.partings.environment(RULE)
    best, better = training.climb(environment, actions, np.random.default_rng(0))
    assert training.key(better) <= training.key(outcome)
    assert training.key(environment(best[None, :])) == training.key(better)


def test_the_head_learns_the_count_that_is_worth_most(training: Any, graph: Any) -> None:
    """Where one count is worth more on some problems and the rule's on others, it chooses so."""
    from learned_problems import draw

    drawn = [draw([graph], np.random.default_rng(k)) for k in range(30)]
    samples = [each for each in drawn if each.partings.is_open[1]]
    parted = [len(each.partings.problem.usable_devices) > 2 for each in samples]
    assert 2 < sum(parted) < len(parted) - 2
    worths = [np.array([0, -0.5 if often else 0.5, 0, 0, 0]) for often in parted]
    head = PairPolicy().counts
    training.learn_counts(head, samples, worths)
    chosen = [training.likeliest(head, each) == 1 for each in samples]
    assert np.mean(np.array(chosen) == np.array(parted)) > 0.9
