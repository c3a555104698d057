"""Allocator settings around a warm-up."""

from __future__ import annotations

import pytest
import torch

from devplace.run.cuda import expandable
from devplace.run.cuda.expandable import (
    expandable_segments,
    fixed_segments,
    turned_back,
    turned_on,
)


@pytest.mark.parametrize("former", ["", "max_split_size_mb:200", "expandable_segments:False"])
def test_settings_go_on_and_back(former: str) -> None:
    """What was set stays set; what was not named is off again."""
    assert turned_on(former).endswith("expandable_segments:True")
    assert turned_on(former).startswith(former)
    assert turned_back(former).startswith(former)
    assert turned_back(former).endswith("expandable_segments:False")


def test_a_user_who_has_them_on_keeps_them() -> None:
    """Settings that name such segments come back unchanged."""
    former = "expandable_segments:True,max_split_size_mb:200"
    assert turned_back(former) == former


def test_another_allocator_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch's own allocator does not serve the GPUs, nothing is set."""
    told: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    monkeypatch.setattr(expandable, "_set", lambda settings: told.append(settings) or True)
    with expandable_segments("cuda:7") as grows:
        assert not grows
    assert told == []


@pytest.mark.parametrize(
    "former", ["expandable_segments:True", "max_split_size_mb:200,expandable_segments:True"]
)
def test_one_piece_is_fixed_among_those_that_grow(
    former: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within them, a piece is asked for with the segments off; then they are on again."""
    told = [former]
    monkeypatch.setattr(expandable, "_settings", lambda: told[-1])
    monkeypatch.setattr(expandable, "_set", lambda settings: told.append(settings) or True)
    with fixed_segments():
        assert told[-1] == f"{former},expandable_segments:False"
    assert told[-1] == former


def test_where_segments_do_not_grow_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings that never named them are left alone."""
    told: list[str] = []
    monkeypatch.setattr(expandable, "_settings", lambda: "max_split_size_mb:200")
    monkeypatch.setattr(expandable, "_set", lambda settings: told.append(settings) or True)
    with fixed_segments():
        pass
    assert told == []
