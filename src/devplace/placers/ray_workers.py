"""Searches side by side on a Ray cluster, of which the best is kept."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from devplace import __version__
from devplace.errors import ExecutionError, InputError
from devplace.graph import Captured
from devplace.placers import extras
from devplace.placers.budget import Budget
from devplace.placers.margin_retry import Found
from devplace.placers.objective import Objective
from devplace.placers.placer import Placer
from devplace.problem import Problem
from devplace.simulator import simulate
from devplace.simulator.bounds import LowerBound

_LOOK_S = 0.5


@dataclass(frozen=True)
class RayWorkers:
    """Workers of a Ray cluster: each searches with the whole budget and a seed of its own.

    The first has the seed that is given, so the result is never worse than without workers, and the
    same seed, evaluations and number of workers give the same plan. A placer that learns is trained
    by each worker on its own.

    Attributes:
        count: Number of workers, a CPU each.
        address: Of a running cluster, as Ray has it (`auto`, `host:6379`, `ray://host:10001`);
            empty: a cluster on this computer, which ends with the search.

    Example:
        >>> workers = RayWorkers(4, address="auto")  # dp.place(problem, placer, workers=workers)
    """

    count: int
    address: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 1:
            raise InputError(f"Ray needs a number of workers of at least 1, got {self.count!r}.")

    def search(
        self,
        objective: Objective,
        problem: Problem,
        placer: Placer,
        budget: Budget,
        seed: int,
        bound: LowerBound,
    ) -> Found:
        """The best of what all workers find; evaluations are those of all of them.

        A worker that dies costs its own search, which a note tells. Ctrl-C takes what has come.

        Raises:
            InputError: No Ray, or no cluster there, or one with another version of devplace.
            ExecutionError: All workers died.
        """
        _refuse(placer)
        begin = time.perf_counter()
        ray, is_own = self._connect()
        plain = problem.graph.graph if isinstance(problem.graph, Captured) else problem.graph
        sent = ray.put((objective, replace(problem, graph=plain), placer, budget, bound))
        task = ray.remote(num_cpus=1, max_retries=0)(_search)
        died = (ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError)
        left = {task.remote(sent, each): k for k, each in enumerate(self.seeds(seed))}
        found: dict[int, Found] = {}
        lost: dict[int, str] = {}
        is_interrupted = False
        try:
            while left:
                for done in ray.wait(list(left), timeout=_LOOK_S)[0]:
                    worker = left.pop(done)
                    try:
                        version, came = ray.get(done)
                    except died as error:
                        lost[worker] = str(error).strip().splitlines()[0]
                    else:
                        _require_same(version)
                        timeline = simulate(problem, came.placement)
                        found[worker] = replace(came, timeline=timeline)
        except KeyboardInterrupt:
            if not found:
                raise
            is_interrupted = True
        finally:
            if is_own:
                ray.shutdown()
            else:
                for task_left in left:
                    ray.cancel(task_left, force=True)
        if not found:
            raise ExecutionError(
                f"None of {self.count} Ray workers ended its search: {lost[0]} Look into Ray's "
                f"logs, or plan without Ray."
            )
        return self._best_of(objective, found, lost, is_interrupted, time.perf_counter() - begin)

    def seeds(self, seed: int) -> list[int]:
        """The seed of every worker."""
        drawn = (
            np.random.SeedSequence((seed, k)).generate_state(1, np.uint64)[0]
            for k in range(1, self.count)
        )
        return [seed, *(int(each >> np.uint64(1)) for each in drawn)]

    def _connect(self) -> tuple[Any, bool]:
        """Ray, and whether this call began it."""
        reason = extras.missing("ray", "Ray", "ray")
        if reason:
            raise InputError(f"A search on a Ray cluster {reason}.")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        if ray.is_initialized():
            return ray, False
        where = {"address": self.address} if self.address else {"num_cpus": self.count}
        try:
            ray.init(
                **where,
                include_dashboard=None if self.address else False,
                log_to_driver=False,
                logging_level="error",
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise InputError(
                f"Ray cannot join a cluster at {self.address!r}: "
                f"{str(error).splitlines()[0].rstrip('.')}. Start one with `ray start --head`, or "
                f"search on this computer (`--ray local`)."
            ) from error
        return ray, True

    def _best_of(
        self,
        objective: Objective,
        found: dict[int, Found],
        lost: dict[int, str],
        is_interrupted: bool,
        seconds: float,
    ) -> Found:
        workers = sorted(found)
        best = min(
            workers, key=lambda k: (found[k].over_bytes, objective.value(found[k].timeline), k)
        )
        all_found = [found[k] for k in workers]
        counts = ", ".join(str(each.evaluations) for each in all_found)
        notes = [
            f"Ray worker {best} of {self.count} found the best; evaluations by worker: {counts}."
        ]
        notes += [
            f"Ray worker {k} was lost, and its search with it: {why}" for k, why in lost.items()
        ]
        return replace(
            found[best],
            evaluations=sum(each.evaluations for each in all_found),
            seconds=seconds,
            notes=(*found[best].notes, *notes),
            proved_ns=max(each.proved_ns for each in all_found),
            least_ns=max(each.least_ns for each in all_found),
            is_infeasible=any(each.is_infeasible for each in all_found),
            is_interrupted=is_interrupted or any(each.is_interrupted for each in all_found),
        )


def _search(sent: tuple[Any, ...], seed: int) -> tuple[str, Found]:
    """On a worker: the version of devplace there, and what is found, without its simulation."""
    objective, problem, placer, budget, bound = sent
    found = objective.search(problem, placer, budget, seed, None, None, bound)
    return __version__, replace(found, timeline=None, others=())


def _require_same(version: str) -> None:
    if version != __version__:
        raise InputError(
            f"Ray workers must have the devplace of this process, {__version__}: one has "
            f"{version}. Install it on all hosts of the cluster."
        )


def _refuse(placer: Placer) -> None:
    training = getattr(placer, "training", None)
    if getattr(training, "log_dir", None) is not None:
        raise InputError(
            f"Curves of {placer.name} are written by one process: leave out log_dir, or workers."
        )
