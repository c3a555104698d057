"""Tiny problems solved by hand: the optimum and why it is one."""

from __future__ import annotations

from dataclasses import dataclass

from devplace.problem import Problem
from devplace.testing.hand import hand_machine, hand_problem


@dataclass(frozen=True, eq=False)
class TinyProblem:
    """A problem with a known answer.

    Attributes:
        name: Short name.
        problem: The problem.
        step_ns: The shortest step within the memory limits, under critical-path order.
        why: Why it is the shortest.
    """

    name: str
    problem: Problem
    step_ns: int
    why: str


def tiny_problems() -> tuple[TinyProblem, ...]:
    """All tiny problems; at most 10 colocation groups and 3 devices each."""
    return (
        _chain(),
        _branches(),
        _dear_transfer(),
        _too_large_for_one(),
        _backfill(),
        _update_stays_home(),
        _unequal(),
        _pinned(),
        _shared_channel(),
    )


def _chain() -> TinyProblem:
    problem = hand_problem(
        """
        x = input bytes=10
        a = f(x) bytes=10 ns=5
        b = f(a) bytes=10 ns=5
        c = f(b) bytes=10 ns=5 result=output
        """,
        hand_machine({"gpu:0": 100, "gpu:1": 100}),
    )
    return TinyProblem("chain", problem, 15, "A chain has no two ops that could overlap: 3 x 5.")


def _branches() -> TinyProblem:
    problem = hand_problem(
        """
        x = input bytes=1
        a = f(x) bytes=1 ns=20
        b = f(x) bytes=1 ns=20
        c = join(a, b) bytes=1 ns=5 result=output
        """,
        hand_machine({"gpu:0": 100, "gpu:1": 100}, latency_ns=2),
    )
    why = "Both branches at once, 20; one result crosses, 1 byte + 2 latency; then 5."
    return TinyProblem("branches", problem, 28, why)


def _dear_transfer() -> TinyProblem:
    problem = hand_problem(
        """
        x = input bytes=1
        a = f(x) bytes=50 ns=20
        b = f(x) bytes=50 ns=20
        c = join(a, b) bytes=1 ns=5 result=output
        """,
        hand_machine({"gpu:0": 200, "gpu:1": 200}),
    )
    why = "Two devices: 20 + 50 + 5 = 75. One device: 20 + 20 + 5."
    return TinyProblem("dear transfer", problem, 45, why)


def _too_large_for_one() -> TinyProblem:
    problem = hand_problem(
        """
        v = parameter bytes=60
        w = parameter bytes=60
        x = input bytes=1
        a = f(x, v) bytes=4 ns=10
        b = f(a, w) bytes=4 ns=10 result=loss
        v2 = sgd(v, b) bytes=0 ns=1 replaces=v
        w2 = sgd(w, b) bytes=0 ns=1 replaces=w
        """,
        hand_machine({"gpu:0": 100, "gpu:1": 100}),
    )
    why = "v and w need both devices: a 10, 4 bytes cross, b 10, the loss crosses 4, update 1."
    return TinyProblem("too large for one", problem, 29, why)


def _backfill() -> TinyProblem:
    sizes = (1, 1, 20, 1, 1)
    lines = [f"w{k} = parameter bytes={size}" for k, size in enumerate(sizes)]
    lines += ["x = input bytes=0", "y0 = f(x, w0) bytes=0 ns=1,10"]
    lines += [f"y{k} = f(y{k - 1}, w{k}) bytes=0 ns=1,10" for k in range(1, 5)]
    lines += [f"u{k} = sgd(w{k}, y{k}) bytes=0 ns=0 replaces=w{k}" for k in range(5)]
    problem = hand_problem("\n".join(lines), hand_machine({"gpu:0": 5, "cpu:0": 100}))
    why = "Only the third layer (20 of 5 bytes) must leave the fast device: 4 x 1 + 10."
    return TinyProblem("backfill", problem, 14, why)


def _update_stays_home() -> TinyProblem:
    problem = hand_problem(
        """
        w = parameter bytes=30
        x = input bytes=1
        y = f(x, w) bytes=1 ns=10 stage=forward
        g = f_back(y) bytes=1 ns=10 stage=backward
        z = other(x) bytes=1 ns=15 result=output
        w2 = sgd(w, g) bytes=30 ns=5 stage=update replaces=w
        """,
        hand_machine({"gpu:0": 100, "gpu:1": 100}),
    )
    why = "w, its update and the chain y, g take 25 on one device; z fits beside on the other."
    return TinyProblem("update stays home", problem, 25, why)


def _unequal() -> TinyProblem:
    problem = hand_problem(
        """
        x = input bytes=1
        a = f(x) bytes=1 ns=10,40
        b = f(x) bytes=1 ns=10,40
        c = f(x) bytes=1 ns=10,40
        d = f(x) bytes=1 ns=10,40
        e = f(x) bytes=1 ns=10,40
        """,
        hand_machine({"fast:0": 100, "slow:0": 100}),
    )
    why = "Five ops of 10: four on the fast device while the slow one does the fifth in 40."
    return TinyProblem("unequal", problem, 40, why)


def _pinned() -> TinyProblem:
    problem = hand_problem(
        """
        x = input bytes=1
        a = f(x) bytes=3 ns=10,20
        b = f(a) bytes=3 ns=10,20 module=head
        c = f(b) bytes=3 ns=10,20 result=output
        """,
        hand_machine({"gpu:0": 100, "gpu:1": 100}, latency_ns=1),
        pins={"head": "gpu:1"},
    )
    why = "a 10, crosses in 4, b 20 where it is pinned, back in 4, c 10."
    return TinyProblem("pinned", problem, 48, why)


def _shared_channel() -> TinyProblem:
    problem = hand_problem(
        """
        x = input bytes=1
        a = f(x) bytes=10 ns=30
        b = f(x) bytes=10 ns=30
        c = f(x) bytes=10 ns=30
        d = join(a, b, c) bytes=1 ns=1 result=output
        """,
        hand_machine({"gpu:0": 100, "gpu:1": 100, "gpu:2": 100}, channel="bridge"),
    )
    why = "Three branches at once, 30; two results cross one bridge one after the other, 20; 1."
    return TinyProblem("shared channel", problem, 51, why)
