"""Searches side by side on a Ray cluster that a computer begins for itself."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from tests.strategies import random_problem

from devplace.errors import ExecutionError, InputError
from devplace.placers import Evaluator, Random, Search, TrainingOptions, by_name, place
from devplace.placers.ray_workers import RayWorkers
from devplace.problem import Placement, Problem

BUDGET = "300ev"


@pytest.fixture(scope="module")
def _cluster() -> Iterator[None]:
    """One for all tests of this file; Ray leaves files of its own open."""
    ray = pytest.importorskip("ray")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
        yield
        ray.shutdown()


@dataclass(frozen=True)
class Dies:
    """A random placement, but for workers whose random numbers begin in a way: these are killed."""

    victims: tuple[int, ...]
    name = "dies"

    def supports(self, _: Problem) -> str:
        """Anything."""
        return ""

    def __call__(
        self, problem: Problem, evaluate: Evaluator, rng: np.random.Generator
    ) -> Placement:
        """End like a process that runs out of memory, or place."""
        if first_draw(rng) in self.victims:
            os.kill(os.getpid(), signal.SIGKILL)
        return Random()(problem, evaluate, rng)


def first_draw(rng: np.random.Generator) -> int:
    return int(rng.integers(2**62))


def dying(workers: RayWorkers, *victims: int) -> Dies:
    seeds = workers.seeds(0)
    return Dies(tuple(first_draw(np.random.default_rng(seeds[k])) for k in victims))


def test_seeds_begin_with_the_given_one_and_differ() -> None:
    """A worker more changes no other's seed."""
    assert RayWorkers(5).seeds(7)[:3] == RayWorkers(3).seeds(7)
    assert RayWorkers(5).seeds(7)[0] == 7
    assert len(set(RayWorkers(5).seeds(7) + RayWorkers(5).seeds(8))) == 10


@pytest.mark.slow
@pytest.mark.usefixtures("_cluster")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["search", "random"])
def test_the_best_of_all_searches_is_kept(name: str) -> None:
    """It is the best of places with each worker's seed; twice the same; evaluations add up."""
    problem, placer, workers = random_problem(3), by_name(name), RayWorkers(4)
    alone = [place(problem, placer, BUDGET, seed) for seed in workers.seeds(0)]
    found = [place(problem, placer, BUDGET, 0, workers=workers) for _ in range(2)]
    assert found[0].step_ns == min(each.step_ns for each in alone)
    assert found[0].evaluations == sum(each.evaluations for each in alone)
    assert found[0].plan.placement == found[1].plan.placement
    assert found[0].plan.request["workers"] == 4
    first = next(k for k, each in enumerate(alone) if each.step_ns == found[0].step_ns)
    assert f"Ray worker {first} of 4 found the best" in found[0].notes[-1]


@pytest.mark.slow
@pytest.mark.usefixtures("_cluster")
@pytest.mark.filterwarnings("ignore")
def test_a_worker_that_dies_costs_its_own_search() -> None:
    """The others' best is the result, and a note tells of the loss; without any other, an error."""
    problem, workers = random_problem(3), RayWorkers(3)
    found = place(problem, dying(workers, 1), BUDGET, 0, workers=workers)
    seeds = workers.seeds(0)
    alone = [place(problem, dying(workers), BUDGET, seeds[k]) for k in (0, 2)]
    assert found.step_ns == min(each.step_ns for each in alone)
    assert found.evaluations == sum(each.evaluations for each in alone)
    assert any("Ray worker 1 was lost" in note for note in found.notes)
    with pytest.raises(ExecutionError, match="None of 3 Ray workers ended its search"):
        place(problem, dying(workers, 0, 1, 2), BUDGET, 0, workers=workers)


@pytest.mark.slow
@pytest.mark.usefixtures("_cluster")
@pytest.mark.filterwarnings("ignore")
def test_what_a_worker_refuses_is_told() -> None:
    """An error of the placer is that error, not a lost worker."""

    @dataclass(frozen=True)
    class Refuses(Dies):
        def __call__(self, *_: object) -> Placement:
            raise InputError("No such thing.")

    with pytest.raises(InputError, match="No such thing"):
        place(random_problem(3), Refuses(()), BUDGET, 0, workers=RayWorkers(2))


def test_what_makes_no_sense_is_refused() -> None:
    """No workers, curves of several processes, and measuring elsewhere."""
    problem = random_problem(3)
    with pytest.raises(InputError, match="at least 1, got 0"):
        RayWorkers(0)
    with pytest.raises(InputError, match="measure runs steps in this process"):
        place(problem, Search(), BUDGET, measure=lambda _: 1, workers=RayWorkers(2))
    learned = by_name("spotlight").__class__(training=TrainingOptions(log_dir="curves"))  # type: ignore[call-arg, arg-type]
    with pytest.raises(InputError, match="leave out log_dir, or workers"):
        place(problem, learned, BUDGET, workers=RayWorkers(2))
