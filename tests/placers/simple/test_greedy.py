"""Filling one device after the other."""

from __future__ import annotations

from tests.placers.helpers import placed

from devplace.placers import Budget, Greedy, place
from devplace.problem import Problem
from devplace.testing import hand_machine, hand_problem


def layers(sizes: list[int], memory: dict[str, int], ns: str = "1") -> Problem:
    """A chain of modules with one parameter each; nothing but parameters takes memory."""
    lines = ["x = input bytes=0"]
    for k, size in enumerate(sizes):
        read = f"y{k - 1}" if k else "x"
        lines += [f"w{k} = parameter bytes={size} module=l.{k}"]
        lines += [f"y{k} = f({read}, w{k}) bytes=0 ns={ns} module=l.{k}"]
    lines += [f"u{k} = sgd(w{k}) bytes=0 replaces=w{k} module=l.{k}" for k in range(len(sizes))]
    return hand_problem("\n".join(lines), hand_machine(memory))


def test_devices_are_filled_in_turn() -> None:
    """Modules go to the first device until it is 95 % full, then to the next."""
    problem = layers([30, 30, 30, 30, 30], {"gpu:0": 100, "gpu:1": 100})
    found = placed(place(problem, Greedy(), Budget(evaluations=10)))
    assert [found[f"y{k}"] for k in range(5)] == ["gpu:0"] * 3 + ["gpu:1"] * 2


def test_a_large_module_does_not_end_the_filling() -> None:
    """What comes after a module that did not fit still goes to the accelerator."""
    problem = layers([10, 10, 200, 10, 10], {"gpu:0": 50, "cpu:0": 1000})
    found = placed(place(problem, Greedy(), Budget(evaluations=10)))
    assert [found[f"y{k}"][:3] for k in range(5)] == ["gpu", "gpu", "cpu", "gpu", "gpu"]


def test_devices_are_filled_less_until_it_fits() -> None:
    """When the real peak is above the limit, a smaller part of it is filled."""
    lines = ["x = input bytes=0"]
    for k in range(4):
        read = f"y{k - 1}" if k else "x"
        lines += [f"w{k} = parameter bytes=20 module=l.{k}"]
        lines += [
            f"y{k} = f({read}, w{k}) bytes=0 ns=1 workspace_bytes=30 module=l.{k}",
        ]
    lines += [f"u{k} = sgd(w{k}) bytes=0 replaces=w{k} module=l.{k}" for k in range(4)]
    problem = hand_problem("\n".join(lines), hand_machine({"gpu:0": 100, "gpu:1": 100}))
    result = place(problem, Greedy(), Budget(evaluations=10))
    assert result.is_feasible
    assert result.evaluations == 3  # 95 % holds all four, 80 % too; 65 % holds three
