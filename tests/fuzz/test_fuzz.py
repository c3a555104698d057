"""Whatever is in a file, its reader refuses it in words or takes it; it never dies, hangs, or takes
nonsense. `DEVPLACE_FUZZ=100000`, or `make fuzz`, tries more inputs than here."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from devplace.errors import DevplaceError
from tests.fuzz.mutate import mutated
from tests.fuzz.readers import NAMES, Reader, all_readers

COUNT = int(os.environ.get("DEVPLACE_FUZZ", "1000"))
LIMIT_S = 10
KEPT = os.environ.get("DEVPLACE_FUZZ_KEEP")
"""Folder for inputs that failed."""


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raises TimeoutError in what takes more of the processor's time, or 12 times as long; what
    does not even see signals kills the process, with a traceback."""

    def ring(number: int, frame: Any) -> None:
        raise TimeoutError(f"it took longer than {seconds} s")

    before = [(number, signal.signal(number, ring)) for number in (signal.SIGPROF, signal.SIGALRM)]
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.alarm(12 * seconds)
    faulthandler.dump_traceback_later(24 * seconds, exit=True)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()
        for number, handler in before:
            signal.signal(number, handler)


def check(reader: Reader, data: bytes, folder: Path, seed: int) -> str | None:
    """What is wrong with how a reader takes an input; None if nothing is."""
    path = folder / reader.file
    path.write_bytes(data)
    try:
        with time_limit(LIMIT_S):
            reader.read(path)
    except DevplaceError as error:
        if "\n" in str(error) or not str(error):
            return f"its message is not one line: {str(error)!r}"
        return None
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reader]:
    """All readers by name."""
    return {reader.name: reader for reader in all_readers(tmp_path_factory.mktemp("good"))}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_damaged_files_are_refused_in_words(
    name: str, readers: dict[str, Reader], tmp_path: Path
) -> None:
    """No traceback, abort or hang, and nothing that makes no sense is accepted."""
    reader = readers[name]
    for good in reader.good:
        assert check(reader, good, tmp_path, -1) is None
    failures: dict[str, tuple[int, bytes]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(COUNT):
            rng = random.Random(f"{name} {seed}")
            data = mutated(rng.choice(reader.good), rng)
            wrong = check(reader, data, tmp_path, seed)
            if wrong is not None:
                failures.setdefault(wrong[:60], (seed, data))
                if KEPT:
                    Path(KEPT, f"{name}-{seed}").write_bytes(data)
    shown = [f"seed {seed}: {wrong}: {data[:300]!r}" for wrong, (seed, data) in failures.items()]
    assert not failures, "\n".join(shown)
