"""Graphs, predictions and plans are those that were last stated."""

from __future__ import annotations

import json

import pytest

from devplace import workloads
from tests import replay

STATED = json.loads(replay.FILE.read_text())


@pytest.mark.parametrize("name", workloads.NAMES)
@pytest.mark.slow
def test_plans_and_predictions_are_as_stated(name: str) -> None:
    """To the nanosecond and op. Where a change moves them on purpose: python -m tests.replay, and
    say in the description what moved and why."""
    if replay.versions() != STATED["versions"]:
        pytest.skip(f"stated with {STATED['versions']}: graphs of other versions are others")
    assert replay.replayed(name) == STATED["workloads"][name]
