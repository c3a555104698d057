"""A process that dies, hangs, raises or differs ends all others, soon and with the same cause."""

from __future__ import annotations

import re
import socket
import time
from typing import Any

import pytest

from tests.run.ranks.launch import launch
from tests.run.ranks.programs import LONG_S

pytestmark = pytest.mark.slow
HOST = re.escape(socket.gethostname())
SHORT_S = 16.0
"""The shortest time limit there is: of one that does not answer, half of it is waited for."""
HANGS = "it hangs, or was not called"
SOON_S = 120.0
"""In which processes end that a slow computer runs, and which wait for nothing much longer."""


@pytest.mark.parametrize(
    ("how", "timeout_s", "cause"),
    [
        ("die", LONG_S, "its connection to rank [02] on host .* is gone"),
        ("freeze", SHORT_S, f"{HANGS}: rank [02] on host .* has waited for it for 8 s"),
        ("hang", SHORT_S, f"{HANGS}: rank [02] on host .* has waited for it for 8 s"),
        ("raise", LONG_S, "its connection to rank [02] on host .* is gone"),
        ("shape", LONG_S, r"ShapeError: Input '0' has shape \[1, 2, 6, 6\]"),
        ("absent", SHORT_S, "it did not come to compile within 8 s"),
    ],
)
def test_others_end_and_name_rank_host_and_cause(
    tmp_path: Any, how: str, timeout_s: float, cause: str
) -> None:
    """Of three processes the second fails; the two others say so in one error, in time."""
    found = launch(tmp_path, 3, "failing", how=how, timeout_s=timeout_s, left=1)
    for one in (found[0], found[2]):
        assert one.code == 1, (one.error, one.output)
        host = "" if how == "absent" else f" on host {HOST}"  # nobody has heard of it
        assert re.match(f"RankError: .*rank 1{host}: {cause}", one.error), one.error
    assert found[0].error == found[2].error
    with socket.socket() as again:  # what they listened on is free again
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", found[0].port))
    odd = tmp_path / "rank1.odd"
    if odd.exists():
        assert max(found[0].ended, found[2].ended) - float(odd.read_text()) < SOON_S


def test_an_op_that_fails_ends_all(tmp_path: Any) -> None:
    """An index out of range: the process of the op names it, the others name that process."""
    found = launch(tmp_path, 3, "failing", how="op", timeout_s=LONG_S)
    assert [one.code for one in found] == [1, 1, 1]
    (rank,) = (k for k, one in enumerate(found) if one.error.startswith("ExecutionError: Op "))
    others = [one for k, one in enumerate(found) if k != rank]
    for one in others:
        assert re.match(f"RankError: .*rank {rank} on host {HOST}: ExecutionError: Op ", one.error)
        assert one.ended < found[rank].ended + SOON_S  # not only when messages time out


def test_others_hear_from_the_process_that_holds_the_store(tmp_path: Any) -> None:
    """The first process fails and ends; others, which look later, still learn from it why."""
    found = launch(tmp_path, 3, "failing", how="shape", timeout_s=LONG_S, odd=0, poll_s=2.5)
    assert [one.code for one in found] == [1, 1, 1]
    assert found[0].error.startswith("ShapeError: Input '0' has shape [1, 2, 6, 6]")
    for one in found[1:]:
        cause = rf"RankError: .*rank 0 on host {HOST}: ShapeError: Input '0' has shape \[1, 2, 6, 6"
        assert re.match(cause, one.error), one.error


@pytest.mark.parametrize(
    ("how", "difference"),
    [
        ("torch", "the same torch: rank 1 on host .* has 2.0.0"),
        ("model", "the same captured step: rank 1 on host .* has 'rnnlm' with [0-9]+ ops"),
        ("plan", "the same plan: rank 1"),
    ],
)
def test_a_difference_is_one_error_everywhere(tmp_path: Any, how: str, difference: str) -> None:
    """All processes say which one differs from the first, and in what."""
    found = launch(tmp_path, 3, "failing", how=how, timeout_s=LONG_S)
    assert [one.code for one in found] == [1, 1, 1]
    assert len({one.error for one in found}) == 1
    assert re.search(f"^PlanMismatchError: .*must have {difference}", found[0].error)


def test_without_the_order_processes_wait_for_each_other(tmp_path: Any) -> None:
    """If each receives before it sends, a step never ends and is killed; in the order it ends."""
    found = launch(tmp_path, 2, "crosswise", in_order=False, mark=".odd", limit_s=20)
    killed = time.time()
    assert (found[0].code, found[0].error) == (None, "")  # the other may see that one killed
    assert found[1].code != 0
    begun = [float((tmp_path / f"rank{rank}.odd").read_text()) for rank in range(2)]
    assert killed - max(begun) > 15
    found = launch(tmp_path, 2, "crosswise", in_order=True)
    assert [one.code for one in found] == [0, 0], [one.output for one in found]
