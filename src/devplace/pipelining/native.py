"""The compiled max-load solvers, where they were built."""

from __future__ import annotations

from typing import Any

from devplace.simulator import native_module


def solvers_module() -> Any:
    """The compiled module, or None. `DEVPLACE_NATIVE=0` switches it off, as for the simulator."""
    if native_module() is None:
        return None
    try:
        from devplace.pipelining import _solvers  # type: ignore[attr-defined]
    except ImportError:
        return None
    return _solvers
