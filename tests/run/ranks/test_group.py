"""What a process makes of the store that it shares with others, whatever the order of events."""

from __future__ import annotations

import json
from typing import Any

import pytest

from devplace.errors import PlanMismatchError, RankError
from devplace.run.ranks import group as module
from devplace.run.ranks.group import Group


class Played:
    """A store in which the others' next entries come right after each look into it.

    Args:
        entries: Of each look; an error is raised by the look after the one before.
    """

    def __init__(self, *entries: dict[str, str] | RuntimeError) -> None:
        self.values: dict[str, str] = {}
        self.entries = list(entries)

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def check(self, keys: list[str]) -> bool:
        found = all(key in self.values for key in keys)
        come = self.entries.pop(0) if self.entries else {}
        if isinstance(come, RuntimeError):
            raise come
        self.values |= come
        return found


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch) -> Group:
    """The second of two processes, without a store."""
    monkeypatch.setattr(module, "_failures", [])
    monkeypatch.setattr(module.atexit, "register", lambda _: None)
    group = Group.__new__(Group)
    group.rank, group.size, group.hosts, group.failure = 1, 2, ["a", "b"], ""
    group._limit_s, group._exchanged = 300.0, 0
    return group


def given(value: Any) -> str:
    """What the first process gives under the topic `plan`."""
    return json.dumps({"plan": value})


def test_a_difference_that_another_tells_first_is_still_the_same_error(second: Group) -> None:
    """The first process gives its part, finds the difference and fails, all between two looks of
    this one: which finds the difference too, and not that another process has failed."""
    second._store = Played({"plan/1/0": given("x"), "failure": "rank 0 on host a: another plan"})
    with pytest.raises(PlanMismatchError, match="rank 1 on host b has y, rank 0 on host a x"):
        second.require_equal("plan", {"plan": "y"})


def test_a_process_that_fails_before_it_gives_its_part_ends_the_exchange(second: Group) -> None:
    """Its part will never come."""
    second._store = Played({"failure": "rank 0 on host a: no memory"})
    with pytest.raises(RankError, match="rank 0 on host a: no memory"):
        second.require_equal("plan", {"plan": "y"})


@pytest.mark.parametrize("looks", range(4))
def test_a_store_that_goes_is_its_holders_failure(second: Group, looks: int) -> None:
    """In whichever look that shows, it is an error of the first process."""
    second._store = Played(*[{}] * looks, RuntimeError("Connection reset by peer"))
    with pytest.raises(RankError, match=r"rank 0 on host a: the store .* gone \(Connection reset"):
        second.require_equal("plan", {"plan": "y"})
