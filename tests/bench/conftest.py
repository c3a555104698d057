"""What is loaded before anything is solved in a given time."""

from __future__ import annotations

from contextlib import suppress

import pytest

from devplace.errors import InputError
from devplace.pipelining.cp_sat import cp_model


@pytest.fixture(scope="session", autouse=True)
def _cp_sat_is_loaded() -> None:
    """The first import of OR-Tools takes seconds."""
    with suppress(InputError):
        cp_model()
