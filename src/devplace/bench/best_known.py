"""Best known values of published instances, with source, date and method."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

import msgspec

from devplace.errors import InputError, WriteError
from devplace.files import alone, decode_json, read_whole, write_whole
from devplace.instances import Instance, fingerprint

FILE = Path(__file__).parents[1] / "instances" / "best_known.json"


class BestKnown(msgspec.Struct, frozen=True, omit_defaults=True):
    """One value.

    Attributes:
        instance: Name; `changed` are the options that change the file.
        fingerprint: Of its numbers; what an instance is known by.
        objective, unit: What the value is.
        value: The best value known, as published or as computed by the verifier.
        who: Who found it and how.
        when: Date.
        changed: Options of the command line that change the file.
        seed: Of the run that found it, if it has one.
        bound: Best lower bound known, and `is_proved` if the value is known to be optimal.
        rounding: Half a unit of the last digit that a published value has; 0 if it is exact.
    """

    instance: str
    fingerprint: str
    objective: str
    unit: str
    value: float
    who: str
    when: str
    changed: str = ""
    seed: int | None = None
    bound: float | None = None
    is_proved: bool = False
    rounding: float = 0.0


def load_best_known(path: Path | None = None) -> dict[str, BestKnown]:
    """Best values by fingerprint, from the file that comes with devplace or another.

    Raises:
        InputError: The file was edited so that it cannot be read.
    """
    path = path or FILE
    try:
        rows = decode_json(read_whole(path), list[BestKnown])
    except OSError as error:
        raise InputError(
            f"Cannot read {path}: {error.strerror}. Install devplace again."
        ) from error
    except ValueError as error:
        raise InputError(f"{path} is damaged: {error}. Restore it.") from error
    return {row.fingerprint: row for row in rows}


def improved(
    known: BestKnown | None,
    instance: Instance,
    value: float,
    bound: float | None,
    placer: str,
    seed: int,
) -> BestKnown | None:
    """What to record for a verified value: the new record, or None if it is nothing new.

    A value counts as better if it is lower by more than the rounding of the known one.
    """
    is_proved = bound is not None and bound >= value
    if known is not None and value >= known.value - known.rounding:
        if bound is None or (known.bound is not None and bound <= known.bound):
            return None
        return msgspec.structs.replace(
            known, bound=bound, is_proved=bound >= known.value - known.rounding
        )
    if known is not None and known.bound is not None:
        bound = max(known.bound, bound or 0.0)
    return BestKnown(
        instance=instance.about.name,
        fingerprint=fingerprint(instance),
        objective=instance.objective,
        unit=instance.unit,
        value=value,
        who=f"devplace bench --placer {placer}",
        when=datetime.date.today().isoformat(),
        changed=instance.about.changed,
        seed=seed,
        bound=bound,
        is_proved=is_proved,
    )


def save_best_known(rows: Sequence[BestKnown], path: Path | None = None) -> None:
    """Add rows, replacing those of the same instance.

    Raises:
        WriteError: The file cannot be written.
    """
    path = path or FILE
    try:
        with alone(path.parent):  # so that no other process's rows are lost
            known = load_best_known(path) if path.exists() else {}
            known |= {row.fingerprint: row for row in rows}
            kept = sorted(
                known.values(), key=lambda row: (row.objective, row.instance, row.changed)
            )
            write_whole(path, msgspec.json.format(msgspec.json.encode(kept), indent=1) + b"\n")
    except OSError as error:
        raise WriteError(f"Cannot write {path}: {error.strerror}. Leave --record out.") from error
