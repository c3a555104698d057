"""Every learned placer: what all of them promise. One line in `SMALL` adds a system."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from devplace import placers
from devplace.errors import InfeasibleError, InputError, ProblemError
from devplace.placers import LEARNING, Budget, place
from devplace.problem import Problem
from devplace.research.options import TrainingOptions
from devplace.research.penalties import sqrt_reward
from devplace.testing import brute_force, check_placer, hand_machine, hand_problem
from tests.research.cases import curves, layered, logged, three_ops
from tests.strategies import random_problem

# Hyper-parameters for graphs of a few ops: small networks, quick steps.
MARS: dict[str, Any] = {"hidden": 16, "encoder_hidden": 16, "segment": 8}
SMALL: dict[str, dict[str, Any]] = {
    "post": {"mix": 0.01},
    "post-ce": {"mix": 0.01},
    "post-ppo": {},
    "post-pg": {},
    "colocrl": {"hidden": 16, "attention": 8, "learning_rate": 0.01},
    "hdp": {"hidden": 16, "attention": 8, "learning_rate": 0.005},
    "hdp-no-grouping": {
        "learning_rate": 0.005,
        "entropy_weight": 1.0,
        "noise": 0.1,
        "failing_s": 100.0,
    },
    "hdp-random-grouping": {
        "hidden": 16,
        "attention": 8,
        "learning_rate": 0.005,
        "entropy_weight": 2.0,
        "noise": 0.1,
        "failing_s": 50.0,
    },
    "spotlight": {
        "hidden": 16,
        "attention": 8,
        "learning_rate": 0.01,
        "samples": 20,
        "steps": 4,
    },
    "placeto": {"rounds": 1, "memory": "hard"},
    "mars": MARS | {"pretraining_steps": 10},
    "mars-no-pretraining": MARS,
    "grouper-placer": MARS | {"coarse_groups": 8, "samples": 10},
    "encoder-placer": MARS | {"hidden": 32, "encoder_layers": 1, "learning_rate": 0.005},
}
# On graphs so small that the first samples tell much, groupers must be kept from deciding at once.
PATIENT: dict[str, dict[str, Any]] = {
    "hdp": {
        "grouper_gain": 3.0,
        "entropy_weight": 1.5,
        "grouper_entropy": 0.3,
        "noise": 0.0,
        "failing_s": 50.0,
    },
    "grouper-placer": {"samples": 20, "entropy_weight": 0.2, "learning_rate": 0.01},
}
NAMES = list(LEARNING)
S = 10**9


def small(name: str) -> Any:
    """The system with small networks, on the CPU."""
    placer: Any = placers.by_name(name)
    return replace(placer, **SMALL.get(name, {}), training=TrainingOptions(device="cpu"))


def patient(name: str) -> Any:
    """The same, slower to decide where that is needed."""
    return replace(small(name), **PATIENT.get(name, {}))


class Killed(BaseException):
    """Ends a run as a kill would: nothing is tidied up."""


def killed_at(part: float) -> Callable[[float], None]:
    """Progress that ends the run when this part of the budget is spent."""

    def progress(spent: float) -> None:
        if spent >= part:
            raise Killed

    return progress


def tight() -> Problem:
    """Half the placements fail: w, with the op that would be faster beside it on gpu:1, does not
    fit there. In seconds, as the papers' rules for failures are."""
    return hand_problem(
        f"""
        w = parameter bytes=60
        x = input bytes=1
        a = f(x) bytes=1 ns={20 * S},{15 * S}
        b = g(x, w) bytes=1 ns={20 * S},{10 * S}
        c = join(a, b) bytes=1 ns={5 * S},{8 * S} result=output
        u = sgd(w, b) bytes=0 ns=0 replaces=w
        """,
        hand_machine({"gpu:0": 100, "gpu:1": 50}),
    )


def test_every_learned_placer_is_listed() -> None:
    """Names lead to classes of that name; they are in ALL behind the others."""
    assert [placer().name for placer in placers.ALL][-len(NAMES) :] == NAMES
    for name in NAMES:
        assert placers.by_name(name).name == name
    with pytest.raises(AttributeError, match="no attribute 'Postt'"):
        placers.Postt  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(InputError, match="Did you mean 'post-ce'"):
        placers.by_name("postce")


@pytest.mark.parametrize("name", NAMES)
def test_it_keeps_the_promises_of_placers(name: str) -> None:
    """Legal, complete, reproducible and within budget on tiny and on random problems."""
    check_placer(small(name), evaluations=12)
    check_placer(small(name), [random_problem(seed, 25, 3) for seed in range(3)], evaluations=12)
    check_placer(small(name), [three_ops()], evaluations=1)


@pytest.mark.parametrize("objective", placers.OBJECTIVES)
@pytest.mark.parametrize("name", NAMES)
def test_it_spends_no_more_than_its_budget(name: str, objective: str) -> None:
    """What is counted is never above the evaluations allowed, for both objectives."""
    for problem in (three_ops(), random_problem(1, 25, 3)):
        for evaluations in (1, 2, 3, 10):
            budget = Budget(evaluations=evaluations)
            found = place(problem, small(name), budget, objective=objective, allow_infeasible=True)
            assert found.evaluations <= evaluations


@pytest.mark.parametrize("problem", [three_ops(), tight()], ids=["three ops", "tight"])
@pytest.mark.parametrize("name", NAMES)
def test_the_optimal_placement_becomes_almost_certain(
    name: str, problem: Problem, tmp_path: Path
) -> None:
    """On graphs with one optimum, more than 90 % of the last samples are that optimum."""
    placer = logged(patient(name), tmp_path)
    found = place(problem, placer, "1800ev" if name == "hdp" else "1200ev", 0)
    assert found.step_ns == brute_force(problem).step_ns
    last = [row["best_share"] for row in curves(tmp_path)][-15:]
    assert float(np.mean([share for share in last if share is not None])) > 0.9


@pytest.mark.parametrize("name", NAMES)
def test_failures_become_rare(name: str, tmp_path: Path) -> None:
    """Where half the placements fail at first, few of the last samples do."""
    place(tight(), logged(patient(name), tmp_path), "600ev", 1)
    rates = [row["failure_rate"] or 0.0 for row in curves(tmp_path)]
    assert float(np.mean(rates[-5:])) < 0.15
    assert rates[0] > 0.2


@pytest.mark.parametrize("name", NAMES)
def test_where_nothing_fits_it_says_so(name: str) -> None:
    """Only failures: the nearest placement comes back, or the error that tells what is missing."""
    problem = hand_problem(
        "w = parameter bytes=90\nv = parameter bytes=90\na = f(w, v) ns=5 bytes=90\n"
        "u = sgd(w, a) replaces=w bytes=0\nz = sgd(v, a) replaces=v bytes=0",
        hand_machine({"gpu:0": 100, "gpu:1": 100}),
    )
    with pytest.raises(InfeasibleError):
        place(problem, small(name), "40ev", 0)
    assert not place(problem, small(name), "40ev", 0, allow_infeasible=True).is_feasible


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_it_beats_random_sampling(name: str) -> None:
    """On 48 groups and 3 devices, at the same budget: a shorter step than random's best."""
    problem = layered()
    budget = "1200ev" if name in ("hdp", "hdp-random-grouping") else "600ev"
    learned = place(problem, patient(name), budget, 0)
    assert learned.step_ns < place(problem, placers.Random(), budget, 0).step_ns


@pytest.mark.parametrize("name", NAMES)
def test_a_killed_run_goes_on_as_if_nothing_had_been(name: str, tmp_path: Path) -> None:
    """Killed at two thirds and resumed: the same placement, history and curves."""
    problem, options = layered(4), {"checkpoint_every": 40}
    whole = place(problem, logged(small(name), tmp_path / "whole", **options), "300ev", 3)
    with pytest.raises(Killed):
        place(
            problem,
            logged(small(name), tmp_path / "killed", **options),
            "300ev",
            3,
            progress=killed_at(0.66),
        )
    again = logged(small(name), tmp_path / "killed", resume=True, **options)
    resumed = place(problem, again, "300ev", 3)
    assert resumed.placement.devices.tolist() == whole.placement.devices.tolist()
    assert [(n, step) for n, _, step in resumed.history] == [
        (n, step) for n, _, step in whole.history
    ]
    rows = [curves(tmp_path / run) for run in ("whole", "killed")]
    for row in (*rows[0], *rows[1]):
        del row["seconds"]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("name", NAMES)
def test_global_settings_of_torch_are_left_alone(name: str) -> None:
    """Neither torch's random state nor its number of threads is another one afterwards."""
    torch.manual_seed(5)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    place(three_ops(), small(name), "24ev", 0)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


# Weigh choices of other shapes; their own tests say that these are the stored ones.
OTHER_CHOICES = {
    *("placeto", "grouper-placer", "post-ce"),
    *("hdp", "hdp-no-grouping", "hdp-random-grouping"),
}


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OTHER_CHOICES])
def test_the_stored_actions_are_the_ones_scored(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call that weighs log-probabilities gets actions that the environment has scored.

    (HDP's released code drew new ones for its loss.)
    """
    from devplace.research.environment import Environment

    scored: set[tuple[int, ...]] = set()
    weighed: set[tuple[int, ...]] = set()
    import devplace.research.policies as policies

    original_call, original_log_prob = Environment.__call__, policies.log_prob

    def score(self: Environment, actions: Any) -> Any:
        scored.update(tuple(row) for row in np.asarray(actions).tolist())
        return original_call(self, actions)

    def weigh(logits: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        weighed.update(tuple(row) for row in actions.tolist())
        return original_log_prob(logits, actions)

    monkeypatch.setattr(Environment, "__call__", score)
    module = __import__(f"devplace.research.{LEARNING[name][0]}", fromlist=["log_prob"])
    assert hasattr(module, "log_prob")
    monkeypatch.setattr(module, "log_prob", weigh)
    place(layered(4), small(name), "60ev", 0)
    assert weighed
    assert weighed <= scored


@pytest.mark.parametrize("name", NAMES)
def test_measured_rewards_are_learned_from(name: str) -> None:
    """With a measurement that likes the last device, so do the samples that come later."""
    problem = layered(3)
    seen: list[float] = []

    def measure(placement: Any) -> int | None:
        devices = problem.task_devices(placement)
        seen.append(float((devices == 2).mean()))
        return round(10**9 * (2 - seen[-1]))

    place(problem, small(name), "400ev", 0, measure=measure)
    assert np.mean(seen[-40:]) > np.mean(seen[:40]) + 0.1


@pytest.mark.parametrize(
    ("name", "setting", "value", "rule"),
    [
        ("colocrl", "samples", 0, "a whole number, at least 1, got 0"),
        ("spotlight", "hidden", 7, "an even number, at least 2, got 7"),
        ("hdp", "groups", 0, "a whole number, at least 1, got 0"),
        ("hdp", "failing_s", 0.0, "a number, more than 0, got 0.0"),
        ("post", "elite", 1.5, "a number, more than 0, 1 at most, got 1.5"),
        ("post-ce", "per_update", 2.5, "a whole number, at least 1, got 2.5"),
        ("placeto", "reward", "best", "improvement or final, got 'best'"),
        ("placeto", "decay_evaluations", 0, "a whole number, at least 1, got 0"),
        ("mars", "epochs", 0, "a whole number, at least 1, got 0"),
        ("mars", "memory", "soft", "published or hard, got 'soft'"),
        ("encoder-placer", "learning_rate", float("nan"), "a number, 0 or more, got nan"),
        ("grouper-placer", "coarse_groups", -1, "a whole number, at least 1, got -1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    name: str, setting: str, value: Any, rule: str
) -> None:
    """When the placer is made: which setting, what it must be, what it is."""
    with pytest.raises(InputError, match=re.escape(f"{setting} of placer {name} must be {rule}")):
        replace(placers.by_name(name), **{setting: value})


@pytest.mark.parametrize("name", NAMES)
def test_without_ops_there_is_nothing_to_learn(name: str) -> None:
    """A graph of sources alone is refused in a sentence, by every system."""
    problem = hand_problem("x = input bytes=1", hand_machine({"gpu:0": 9, "gpu:1": 9}))
    with pytest.raises(ProblemError, match="sources and views only"):
        place(problem, placers.by_name(name), "20ev", 0)


def test_rewards_rise_as_steps_shrink() -> None:
    """The reward of the optimum of three ops is the highest of all 8."""
    steps = np.array([28, 45, 100])
    assert sqrt_reward(steps / 1e9).argmax() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_networks_can_be_on_a_gpu(name: str, tmp_path: Path) -> None:
    """Where `device` is a GPU, a system learns, checkpoints and goes on there."""
    spent = [0]
    for evaluations, resume in ((60, False), (100, True)):
        training = TrainingOptions(log_dir=tmp_path, resume=resume, device="cuda")
        found = place(three_ops(), replace(small(name), training=training), f"{evaluations}ev", 0)
        assert found.is_feasible
        assert spent[-1] < found.evaluations <= evaluations
        spent.append(found.evaluations)
    (file,) = tmp_path.rglob("checkpoint.pt")
    devices = {tensor.device.type for tensor in _tensors(torch.load(file, weights_only=True))}
    assert "cuda" in devices or name.startswith("post")  # whose policy is a table on the CPU


def _tensors(value: Any) -> list[torch.Tensor]:
    """All in nested dictionaries and lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value
    is_nested = isinstance(value, dict | list | tuple)
    return [tensor for one in inner for tensor in _tensors(one)] if is_nested else []
