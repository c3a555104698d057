"""Options of training that are the same for every system. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from devplace.errors import InputError


@dataclass(frozen=True)
class TrainingOptions:
    """How a run is watched, kept and stopped; none of it changes what is learned.

    Attributes:
        log_dir: Folder for curves (`curves.csv`, TensorBoard's files) and checkpoints, each run in
            a folder of its own inside; None: nothing is written.
        resume: Go on from the checkpoint of the same run, if there is one. The result is that of a
            run that was never stopped.
        checkpoint_every: Evaluations between checkpoints.
        stall: Stop when nothing better was found for this many evaluations; None: never.
        most: Evaluations when the budget sets no limit at all.
        device: Where networks compute: `cpu`, `cuda` or `cuda:1`. On a GPU the same seed need not
            give the same plan, and steps measured there beside it are disturbed.

    Raises:
        InputError: A count that is not positive, or `resume` without `log_dir`.
    """

    log_dir: Path | str | None = None
    resume: bool = False
    checkpoint_every: int = 200
    stall: int | None = None
    most: int = 2400
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("checkpoint_every", "stall", "most"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} must be at least 1, got {value}.")
        if self.resume and self.log_dir is None:
            raise InputError("To resume a run, give the log_dir that it wrote to.")
