"""CP-SAT leaves Ctrl-C to Python."""

import itertools
import signal
import threading
import time

import pytest
from tests.interrupts import ctrl_c

from devplace.pipelining.cp_sat import cp_model, solve

pytest.importorskip("ortools")


def hard_model():
    """One that takes hours: the shortest ruler of 16 marks, all of whose distances differ."""
    cp = cp_model()
    model, marks = cp.CpModel(), 16
    at = [model.new_int_var(0, marks**2, "") for _ in range(marks)]
    for one, other in itertools.pairwise(at):
        model.add(one < other)
    model.add_all_different([b - a for a, b in itertools.combinations(at, 2)])
    model.minimize(at[-1])
    return cp.CpSolver(), model


def test_the_handler_of_ctrl_c_is_left_as_it_was() -> None:
    """OR-Tools by itself leaves one that ends the process."""
    cp = cp_model()
    model = cp.CpModel()
    model.add(model.new_bool_var("x") == 1)
    before = signal.getsignal(signal.SIGINT)
    assert solve(cp.CpSolver(), model) == cp.OPTIMAL
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def is_solving() -> bool:
    """Whether the solver's thread is there."""
    return any(thread.name == "CP-SAT" for thread in threading.enumerate())


@pytest.mark.parametrize("spent_s", [0.0, 0.5])
def test_ctrl_c_stops_a_solver(spent_s: float) -> None:
    """It is raised within moments, not when the time is up; also where it comes before the first
    step of the search."""
    solver, model = hard_model()
    solver.parameters.max_time_in_seconds = 60.0
    begin = time.process_time()
    with ctrl_c(lambda: is_solving() and time.process_time() > begin + spent_s):
        solve(solver, model)
    assert not is_solving()
    assert solver.wall_time < 60


def test_what_the_solver_raises_is_raised() -> None:
    """An error in its thread reaches the caller."""
    solver, _ = hard_model()
    with pytest.raises(Exception, match=r"."):
        solve(solver, "no model")
