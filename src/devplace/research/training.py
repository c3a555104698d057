"""The training loop shared by all systems: seeds, curves, checkpoints, early stopping."""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from devplace.device_kinds import torch_types
from devplace.errors import CheckpointError, InputError
from devplace.files import read_whole, write_whole
from devplace.graph.serialize import fingerprint as graph_fingerprint
from devplace.placers.counted_simulator import Evaluator
from devplace.problem import Problem
from devplace.research.curves import Curves
from devplace.research.environment import Outcome
from devplace.research.options import TrainingOptions

CHECKPOINT = "checkpoint.pt"
SEAL_BYTES = 66
# What torch.load and what takes its result over raise for other files.
UNREADABLE = (
    pickle.UnpicklingError,
    AttributeError,
    EOFError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


class Scored(Protocol):
    """What a run needs of that which scores its placements, such as an `Environment`."""

    evaluate: Evaluator
    problem: Problem

    @property
    def best_key(self) -> tuple[int, int] | None:
        """Overflow and step time of the best so far."""

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints."""

    @property
    def is_cut(self) -> bool:
        """Whether the budget allowed fewer placements than an update wanted."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From `state_dict`."""


class Training:
    """One run of a system: use as `with Training(...) as training`.

    Inside, torch computes on one thread (small networks gain nothing from more, and sums do not
    depend on the number of cores) and its global random state is left alone.

    Args:
        placer: The system, a frozen dataclass with a field `training: TrainingOptions`.
        environment: Where placements are scored.
        rng: The run's random numbers.

    Attributes:
        generator: Of all sampling, on the CPU.
        rng: The run's numpy random numbers; its state is in checkpoints too.
        device: Where networks live.
        options: The placer's training options.
    """

    def __init__(self, placer: Any, environment: Scored, rng: np.random.Generator) -> None:
        self.options: TrainingOptions = placer.training
        self.environment = environment
        self.evaluate: Evaluator = environment.evaluate
        self.rng = rng
        self._id = run_id(placer, environment.evaluate, rng)
        self._seed = int(rng.integers(2**63 - 1))
        self.generator = torch.Generator().manual_seed(self._seed)
        self.device = _device(self.options.device)
        self.is_resumed = False
        self._name = placer.name
        self._parts: dict[str, Any] = {}
        self._curves: Curves | None = None
        self._saved_at = self._logged_at = 0
        self._threads = 0
        self._updates = 0

    def __enter__(self) -> Training:
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self._save()
        if self._curves is not None:
            self._curves.close()
        torch.set_num_threads(self._threads)

    @contextmanager
    def seeded(self) -> Iterator[None]:
        """Build networks inside: their first weights depend on the run's seed only."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)
            yield

    def track(self, **parts: Any) -> None:
        """Name what a checkpoint must hold: anything with `state_dict` and `load_state_dict`.

        Where the run is resumed, they get back the state of its last checkpoint here.
        """
        self._parts = parts
        if self.options.log_dir is None:
            return
        folder = self.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(folder, error) from error
        kept = 0
        if self.options.resume and (folder / CHECKPOINT).exists():
            kept = self._load(folder / CHECKPOINT)
            self.evaluate.notes.append(f"went on from evaluation {self._saved_at} of {folder}")
        elif self.options.resume:
            self.evaluate.notes.append(
                f"started anew, as {self.options.log_dir} has no checkpoint of this run (another "
                f"problem, seed or setting is another run)"
            )
        try:
            self._curves = Curves(folder, kept, self._saved_at)
        except OSError as error:
            raise _unwritable(folder, error) from error

    @property
    def folder(self) -> Path:
        """Where this run's files go; runs that differ in anything but the budget differ in it."""
        assert self.options.log_dir is not None
        return Path(self.options.log_dir) / f"{self._name}-{self._id}"

    @property
    def is_done(self) -> bool:
        """Whether the budget is spent, or nothing better has come for `options.stall` evaluations,
        or `options.most` evaluations were made without any limit."""
        evaluate, made = self.evaluate, self.evaluate.meter.num_evaluations
        if evaluate.exhausted:
            return True
        if not evaluate.meter.budget.is_limited:
            return made >= self.options.most
        stall = self.options.stall
        last = evaluate.history.points[-1][0] if evaluate.history.points else 0
        return stall is not None and made - last >= stall

    def log(self, outcome: Outcome, **metrics: float | None) -> None:
        """Write a row of the curves, and a checkpoint when it is time.

        Call it at the end of an update, with all that was scored since the last call. A checkpoint
        is also written before an update that the budget will cut, and none after it: with a larger
        budget that update is a whole one. Columns:
        evaluations and seconds spent; best step so far and mean of these that fit, ns; share of
        them that failed; share as good as the best so far, which tells how certain the policy is.

        Args:
            outcome: Placements scored.
            metrics: Such as entropy, kl, baseline, loss; the same names in each call.
        """
        self._updates += 1
        now, most = self.evaluate.meter.num_evaluations, self.evaluate.meter.budget.evaluations
        is_next_cut = most is not None and most - now < now - self._logged_at
        self._logged_at = now
        if self._curves is None:
            return
        try:
            self._curves.add(self._row(outcome, metrics))
        except OSError as error:
            self._end_curves(error)
            return
        if is_next_cut or now - self._saved_at >= self.options.checkpoint_every:
            self._save()

    def _row(self, outcome: Outcome, metrics: dict[str, float | None]) -> dict[str, Any]:
        """A row of the curves, see `log`."""
        best = self.environment.best_key
        fits = outcome.step_ns[~outcome.failed]
        return {
            "evaluations": self.evaluate.meter.num_evaluations,
            "seconds": round(self.evaluate.meter.seconds, 3),
            "best_ns": None if best is None or best[0] else best[1],
            "mean_ns": round(float(fits.mean())) if len(fits) else None,
            "failure_rate": float(outcome.failed.mean()),
            "best_share": float(_equals(outcome, best).mean()),
            **metrics,
        }

    def _save(self) -> None:
        """Write a checkpoint in one go: after a kill the old one or the new one is there.

        Where the disk is full, the run goes on without.
        """
        if self._curves is None or self.environment.is_cut:
            return
        self._saved_at = self.evaluate.meter.num_evaluations
        state = {
            "run": self._id,
            "parts": {name: part.state_dict() for name, part in self._parts.items()},
            "evaluate": self.evaluate.state_dict(),
            "environment": self.environment.state_dict(),
            "generator": self.generator.get_state(),
            "rng": self.rng.bit_generator.state,
            "rows": self._curves.rows,
            "updates": self._updates,
        }
        buffer = io.BytesIO()
        torch.save(state, buffer)
        data = buffer.getvalue()
        try:
            self._curves.sync()
            write_whole(self.folder / CHECKPOINT, data + _seal(data))
        except OSError as error:
            self._end_curves(error)

    def _end_curves(self, error: OSError) -> None:
        """Write nothing any more."""
        self.evaluate.notes.append(
            f"curves and checkpoints end at evaluation {self.evaluate.meter.num_evaluations}: "
            f"cannot write to {self.folder}: {error.strerror}"
        )
        if self._curves is not None:
            self._curves.close()
        self._curves = None

    def _load(self, path: Path) -> int:
        """Take over a checkpoint; gives the rows of its curves.

        Raises:
            CheckpointError: Damaged, or of another run.
        """
        try:
            data = read_whole(path)
            if data[-SEAL_BYTES:] != _seal(data[:-SEAL_BYTES]):
                raise ValueError("it is not as it was written")
            state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
            if state["run"] != self._id:
                raise ValueError(f"it is of run {state['run']}, this is {self._id}")
            for name, part in self._parts.items():
                part.load_state_dict(state["parts"][name])
            self.evaluate.load_state_dict(state["evaluate"])
            self.environment.load_state_dict(state["environment"])
            self.generator.set_state(state["generator"].cpu())
            self.rng.bit_generator.state = state["rng"]
            self._updates, rows = state["updates"], int(state["rows"])
        except UNREADABLE as error:
            why = (str(error).splitlines() or [""])[0]
            raise CheckpointError(
                f"Cannot resume from {path}: it is no checkpoint of this run "
                f"({type(error).__name__}: {why[:120]}). To start anew, leave out resume or delete "
                f"the file."
            ) from error
        self._saved_at = self._logged_at = self.evaluate.meter.num_evaluations
        self.is_resumed = True
        return rows

    @property
    def updates(self) -> int:
        """Calls of `log` so far, those before a resume included."""
        return self._updates


class Values(SimpleNamespace):
    """Named numbers, lists and tensors with a `state_dict`, for what is no module: `track` it."""

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints."""
        return dict(self.__dict__)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From `state_dict`."""
        self.__dict__.update(state)


def _equals(outcome: Outcome, best: tuple[int, int] | None) -> NDArray[np.bool_]:
    """Which placements are as good as the best so far. `[B]`"""
    overflow, step = best or (0, 0)
    found: NDArray[np.bool_] = (outcome.overflow_bytes == overflow) & (outcome.step_ns == step)
    return found


def run_id(placer: Any, evaluate: Evaluator, rng: np.random.Generator) -> str:
    """Text that changes with hyper-parameters, problem and seed, and whether steps are measured;
    budget and logging do not change it."""
    problem = evaluate.problem
    found = hashlib.sha256(repr(replace(placer, training=TrainingOptions())).encode())
    found.update(graph_fingerprint(problem.graph).encode())
    for record in (problem.core.wires, problem.core.transfers):
        for field in fields(record):
            if field.name != "transfers":
                found.update(np.asarray(getattr(record, field.name)).tobytes())
    found.update(problem.core.tasks.workspace_bytes.tobytes() + problem.allowed.tobytes())
    found.update(b"measured" if evaluate.is_measured else b"")
    found.update(repr((problem.machine, rng.bit_generator.state)).encode())
    return found.hexdigest()[:12]


def _unwritable(folder: Path, error: OSError) -> InputError:
    return InputError(
        f"Cannot write curves and checkpoints to {folder}: {error.strerror}. Give another folder."
    )


def _seal(data: bytes) -> bytes:
    """What stands behind a checkpoint: a hash of it, which torch does not look at."""
    return f"\n{hashlib.sha256(data).hexdigest()}\n".encode()


def _device(wanted: str) -> torch.device:
    try:
        device = torch.device(wanted)
        if device.type not in torch_types():
            raise NotImplementedError(f"networks do not run on {device.type} devices")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # an unusable CUDA is either
        reason = str(error).splitlines()[0]
        raise InputError(
            f"A device for training must be cpu, cuda or cuda:1 and be there, got {wanted!r}: "
            f"{reason}"
        ) from error
    return device
