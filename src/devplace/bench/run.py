"""Solve published instances and check every answer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from devplace.bench.answer import Answer, Solution, verify
from devplace.bench.best_known import BestKnown, improved, load_best_known
from devplace.bench.solvers import DEFAULT, Effort, solver, solvers_of
from devplace.errors import InputError, VerificationError
from devplace.instances import Instance, fingerprint
from devplace.instances.records import LoadInstance

TOLERANCE = 1e-8
"""Part by which a solver's value may differ from the verifier's: it counts in whole numbers."""


@dataclass(frozen=True)
class BenchRow:
    """One instance solved.

    Attributes:
        instance: What was solved.
        value: Computed by the verifier, in the instance's unit; None if nothing was found.
        best_known: The best value known before, or None.
        bound: No solution is better; None if none is known.
        status: `optimal`, `feasible`, `infeasible` (proved) or `unknown`.
        seconds: Wall-clock time, s.
        placer: Name of the solver.
        seed: Of its randomness.
        why: For rows without a value the reason.
        solution: What was found.
        record: What is new about it for the file of best values.
    """

    instance: Instance
    value: float | None
    best_known: float | None
    bound: float | None
    status: str
    seconds: float
    placer: str
    seed: int
    why: str = ""
    solution: Solution | None = None
    record: BestKnown | None = None

    @property
    def gap(self) -> float | None:
        """How far the value is above the bound: value / bound - 1."""
        if self.value is None or self.bound is None:
            return None
        if self.bound == 0:
            return 0.0 if self.value == 0 else None
        return self.value / self.bound - 1

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "instance": self.instance.about.name,
            "objective": self.instance.objective,
            "value": self.value,
            "best_known": self.best_known,
            "bound": self.bound,
            "status": self.status,
            "seconds": round(self.seconds, 3),
            "gap": self.gap,
            "unit": self.instance.unit,
            "placer": self.placer,
            "seed": self.seed,
            "changed": self.instance.about.changed,
            "why": self.why,
        }


def bench(
    instances: Iterable[Instance],
    effort: Effort,
    placer: str = DEFAULT,
    begin: Callable[[Instance], None] | None = None,
) -> Iterator[BenchRow]:
    """Solve instances one after the other; every solution is checked by the verifier.

    Args:
        instances: What to solve.
        effort: What may be spent on each.
        placer: Name of the solver.
        begin: Called with each instance before it is solved.

    Raises:
        VerificationError: A solver's solution breaks a rule, or is not worth what it says, or
            beats its own bound.
        InputError: The solver exists for none of the instances, or solves none.
    """
    known = load_best_known()
    given = list(instances)
    able = [placer in solvers_of(instance) for instance in given]
    if given and not any(able):
        solver(given[0], placer)  # tells which there are
    refused: InputError | None = None
    is_any_solved = False
    for instance, is_able in zip(given, able, strict=True):
        if begin is not None:
            begin(instance)
        best = known.get(fingerprint(instance))
        why = f"placer {placer} does not solve it"
        if is_able:
            try:
                row = solve(instance, effort, placer, best)
            except InputError as error:  # such as no expert's split for this one
                refused, why = refused or error, str(error)
            else:
                is_any_solved = True
                yield row
                continue
        value = None if best is None else best.value
        yield BenchRow(instance, None, value, None, "unknown", 0.0, placer, effort.seed, why)
    if refused is not None and not is_any_solved:
        raise refused


def solve(
    instance: Instance, effort: Effort, placer: str = DEFAULT, known: BestKnown | None = None
) -> BenchRow:
    """Solve one instance and check the answer; as `bench`."""
    run = solver(instance, placer)
    started = time.monotonic()
    answer = _impossible(instance) or run(instance, effort)
    seconds = time.monotonic() - started
    best = None if known is None else known.value
    if answer.solution is None:
        return BenchRow(
            instance,
            None,
            best,
            answer.bound,
            answer.status,
            seconds,
            placer,
            effort.seed,
            answer.why,
        )
    value = _checked(instance, answer, placer)
    bound = None if answer.bound is None else min(answer.bound, value)
    return BenchRow(
        instance,
        value,
        best,
        value if answer.status == "optimal" else bound,
        answer.status,
        seconds,
        placer,
        effort.seed,
        solution=answer.solution,
        record=improved(known, instance, value, bound, placer, effort.seed),
    )


def _impossible(instance: Instance) -> Answer | None:
    """An instance without any device has no solution."""
    if isinstance(instance, LoadInstance) and instance.num_accelerators + instance.num_cpus == 0:
        return Answer(None, "infeasible", why="there are no devices")
    return None


def _checked(instance: Instance, answer: Answer, placer: str) -> float:
    """The value by the verifier, which must agree."""
    assert answer.solution is not None
    verdict = verify(instance, answer.solution)
    name = instance.about.name
    if verdict.broken:
        raise VerificationError(
            f"Placer {placer} gave a solution of {name} that breaks a rule: {verdict.broken[0]}. "
            f"Please report it."
        )
    slack = TOLERANCE * max(1.0, abs(verdict.value))
    said = answer.value
    if said is not None and not math.isclose(said, verdict.value, rel_tol=0, abs_tol=slack):
        raise VerificationError(
            f"Placer {placer} says its solution of {name} is worth {said!r} {instance.unit}, it is "
            f"worth {verdict.value!r}. Please report it."
        )
    if answer.bound is not None and answer.bound > verdict.value + slack:
        raise VerificationError(
            f"Placer {placer} says no solution of {name} is below {answer.bound!r} "
            f"{instance.unit}, its own is worth {verdict.value!r}. Please report it."
        )
    return verdict.value
