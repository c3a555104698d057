"""Mars and the rows of its table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from devplace.placers import by_name, place
from devplace.problem import Problem
from devplace.research.advantages import scaled
from devplace.research.environment import Environment
from devplace.research.grouper_placer import GrouperPolicy
from devplace.research.losses import ppo_clip
from devplace.research.mars import EncoderPolicy, Mars
from devplace.research.options import TrainingOptions
from tests.research.cases import all_actions, curves, environment, layered, logged, three_ops

ROWS = ["mars", "encoder-placer", "grouper-placer"]
SIZES: dict[str, Any] = {"hidden": 16, "encoder_hidden": 16, "segment": 8}


def policy_of(name: str, problem: Problem, **options: Any) -> tuple[Any, Environment]:
    """The networks of a row, with weights of a fixed seed."""
    env = environment(problem)
    torch.manual_seed(0)
    placer: Any = replace(by_name(name), **SIZES, **options)  # type: ignore[type-var]
    return placer._policy(env, torch.device("cpu")), env


def all_choices(name: str, env: Environment) -> tuple[torch.Tensor, np.ndarray[Any, Any]]:
    """Everything a policy may choose, and the placement each choice leads to."""
    if name != "grouper-placer":
        every = all_actions(env.num_groups, env.num_actions)
        return torch.as_tensor(every), every
    units, coarse = env.num_groups, 2
    rows = [
        (*group, *devices)
        for group in all_actions(units, coarse).tolist()
        for devices in all_actions(coarse, env.num_actions).tolist()
    ]
    choices = torch.as_tensor(rows)
    return choices, choices[:, units:].gather(1, choices[:, :units]).numpy()


@pytest.mark.parametrize("name", ROWS)
def test_the_gradient_is_that_of_the_expected_reward(name: str) -> None:
    """On three ops: the surrogate over all choices has the exact gradient, where it starts.

    The expected reward is summed over all choices; a coarse group without members counts for
    nothing, so each of its devices stands for a share of the same choice.
    """
    policy, env = policy_of(name, three_ops(), **_two_groups(name))
    choices, actions = all_choices(name, env)
    rewards = torch.as_tensor(-np.sqrt(env(actions).step_ns), dtype=torch.float32)
    log_probs, _ = policy.weigh(choices)
    share = torch.ones(len(choices))
    if name == "grouper-placer":
        share = 0.5 ** (log_probs[:, env.num_groups :] == 0).sum(1)
    probability = log_probs.sum(1).exp() * share
    assert float(probability.sum().detach()) == pytest.approx(1.0, abs=1e-4)
    exact = _gradient(policy, (probability * rewards).sum())
    log_probs, _ = policy.weigh(choices)
    weighted = (probability.detach() * rewards * len(choices) * log_probs.shape[1])[:, None]
    found = _gradient(policy, -ppo_clip(log_probs, log_probs.detach(), weighted, 0.2))
    assert torch.allclose(found, exact, atol=1e-3 * float(exact.abs().max()))
    assert float(exact.abs().max()) > 1e-3


def _two_groups(name: str) -> dict[str, Any]:
    return {"coarse_groups": 2} if name == "grouper-placer" else {}


def _gradient(policy: torch.nn.Module, value: torch.Tensor) -> torch.Tensor:
    policy.zero_grad()
    value.backward()
    return torch.cat([w.grad.flatten() for w in policy.parameters() if w.grad is not None])


@pytest.mark.parametrize("name", ROWS)
def test_drawn_choices_weigh_what_they_weighed(name: str) -> None:
    """Log-probabilities of stored choices are those of drawing time; actions are what is placed."""
    policy, env = policy_of(name, layered(2))
    drawn = policy.draw(6, torch.Generator().manual_seed(0))
    log_probs, spread = policy.weigh(drawn.choices)
    assert torch.allclose(log_probs, drawn.log_prob, atol=1e-5)
    assert drawn.actions.shape == (6, env.num_groups)
    assert 0 < float(spread.detach()) <= np.log(max(env.num_actions, 32)) + 1e-5
    if isinstance(policy, GrouperPolicy):
        group, devices = drawn.choices.split([env.num_groups, policy.num_coarse], 1)
        for row in range(6):
            expected = [int(devices[row, g]) for g in group[row]]
            assert drawn.actions[row].tolist() == expected
    else:
        assert torch.equal(drawn.actions, drawn.choices)


def test_only_stored_choices_are_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every choice of the grouper-placer that is weighed is one whose placement was scored."""
    scored, weighed = [], []
    draw, weigh = GrouperPolicy.draw, GrouperPolicy.weigh

    def drawn(self: Any, *arguments: Any) -> Any:
        found = draw(self, *arguments)
        scored.append(found.choices)
        return found

    def weighing(self: Any, choices: torch.Tensor) -> Any:
        weighed.append(choices)
        return weigh(self, choices)

    monkeypatch.setattr(GrouperPolicy, "draw", drawn)
    monkeypatch.setattr(GrouperPolicy, "weigh", weighing)
    placer: Any = replace(by_name("grouper-placer"), **SIZES)  # type: ignore[type-var]
    place(layered(2), placer, "60ev", 0)
    assert len(scored) == 3
    assert len(weighed) == 3 * placer.epochs
    assert all(weighed[k] is scored[k // placer.epochs] for k in range(len(weighed)))


def test_coarse_groups_sum_up_their_members() -> None:
    """Contents are summed over members, edges tell which groups exchange something."""
    policy, env = policy_of("grouper-placer", layered(1), coarse_groups=3)
    group = torch.arange(env.num_groups)[None] % 2
    embeddings, is_used = policy.coarse(group)
    assert is_used.tolist() == [[True, True, False]]
    total = policy.contents[::2].sum(0)
    own = policy.contents.shape[1]
    assert torch.allclose(embeddings[0, 0, :own], total / (total.max() + 1))
    assert float(embeddings[0, 2].abs().sum()) == 0
    expected = torch.zeros(3, 3)
    for src, dst in policy.adjacency.nonzero().tolist():
        expected[src % 2, dst % 2] = 1
    assert torch.equal(embeddings[0, :, own : own + 3], expected)


def test_pretraining_changes_the_encoder_and_spends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the first evaluation the encoder has learned; the placer has not."""
    seen: list[dict[str, torch.Tensor]] = []
    draw = EncoderPolicy.draw

    def drawn(self: EncoderPolicy, count: int, generator: torch.Generator) -> Any:
        seen.append({name: value.clone() for name, value in self.state_dict().items()})
        return draw(self, count, generator)

    monkeypatch.setattr(EncoderPolicy, "draw", drawn)
    for steps in (0, 5):
        place(layered(2), Mars(pretraining_steps=steps, samples=8, **SIZES), "8ev", 0)
    without, after = seen
    for name, value in without.items():
        is_same = torch.equal(value, after[name])
        assert is_same == name.startswith("placer."), name


def test_every_op_can_be_placed_by_itself(tmp_path: Path) -> None:
    """With `groups=0` nothing is joined."""
    placer = Mars(groups=0, pretraining_steps=0, samples=4, **SIZES)
    place(layered(2), logged(placer, tmp_path), "8ev", 0)
    assert len(curves(tmp_path)) == 2


def test_both_memory_rules_run() -> None:
    """The constant of HDP can be had instead of the hard limit."""
    options = TrainingOptions(device="cpu")
    placer = Mars(memory="published", pretraining_steps=0, training=options, **SIZES)
    assert place(three_ops(), placer, "60ev", 0).is_feasible


def test_advantages_do_not_depend_on_units() -> None:
    """Seconds and milliseconds give the same weights; no difference gives zeros."""
    some = np.array([1.0, -2.0, 0.5])
    assert torch.allclose(scaled(some), scaled(some / 1000))
    assert float(scaled(some).square().mean()) == pytest.approx(1.0)
    assert scaled(np.zeros(3)).tolist() == [0, 0, 0]
    assert scaled(np.zeros(0)).tolist() == []
