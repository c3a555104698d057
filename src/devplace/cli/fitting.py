"""`devplace fit`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from devplace.cli.imported import is_imported
from devplace.cli.session import (
    PlanRequest,
    build_model,
    capture_options,
    prints_on_stderr,
    working,
)
from devplace.cli.trust import remember
from devplace.errors import InfeasibleError, InputError

if TYPE_CHECKING:
    from devplace.auto.fit import Fit


@dataclass(frozen=True)
class FitOutcome:
    """A step on one machine or several."""

    fits: list[Fit]

    @property
    def exit_code(self) -> int:
        """0 if it fits somewhere, else 3."""
        return 0 if any(each.best for each in self.fits) else InfeasibleError.exit_code

    @property
    def complaint(self) -> str:
        """That nothing fits, with what helps."""
        if not self.exit_code:
            return ""
        from devplace.report.fit import verdict

        found = "; ".join(f"{each.machine}: {verdict(each)}" for each in self.fits)
        return f"{found}. Lower the batch size, or name a machine with more memory (--cards)."

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        from devplace.report.fit import fit_json

        found = [fit_json(each) for each in self.fits]
        return found[0] if len(found) == 1 else {"model": found[0]["model"], "machines": found}

    def print(self) -> None:
        """For people."""
        from devplace.cli.console import console
        from devplace.report.fit import fit_lines, fit_table, machines_table, verdict

        if len(self.fits) == 1:
            for line in fit_lines(self.fits[0]):
                click.echo(line)
            console().print(fit_table(self.fits[0]))
            return
        for each in self.fits:
            click.echo(f"{each.machine}: {verdict(each)}")
        console().print(machines_table(self.fits))


def fit(request: PlanRequest, machines: Sequence[str], seed: int) -> FitOutcome:
    """Try the step on each machine; the largest batch is looked for if there is only one."""
    if is_imported(request.model):
        raise InputError(
            f"{request.model} is a captured graph, and fit captures a step in several ways. Use "
            f"devplace plan, which says whether it fits."
        )
    from devplace.auto.fit import fit_steps, largest_batches
    from devplace.auto.planning import find_target
    from devplace.auto.step_variants import StepVariants

    with working("looking at the machines"):
        targets = [
            find_target(name, request.limits, exclude=request.exclude, device="cpu")
            for name in machines
        ]
    with prints_on_stderr(), working("loading torch and the model") as note:
        workload, optimizer = build_model(request, "meta")
        steps = StepVariants(
            workload.model,
            workload.inputs,
            workload.loss_fn,
            optimizer,
            capture_options(request),
            note,
        )
        found = [fit_steps(steps, target, seed) for target in targets]
        if len(found) == 1:
            found = [replace(found[0], largest=largest_batches(steps, targets[0]))]
    remember(request.model)
    return FitOutcome(found)
