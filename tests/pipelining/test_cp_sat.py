"""CP-SAT leaves Ctrl-C to Python."""

import itertools
import signal
import threading

import pytest

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


def test_ctrl_c_stops_a_solver() -> None:
    """It is raised within moments, not when the time is up."""
    solver, model = hard_model()
    solver.parameters.max_time_in_seconds = 60.0
    main = threading.main_thread().ident or 0
    timer = threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            solve(solver, model)
    finally:
        timer.cancel()
        timer.join()
    assert not [t for t in threading.enumerate() if t.name == "CP-SAT" and t.is_alive()]


def test_what_the_solver_raises_is_raised() -> None:
    """An error in its thread reaches the caller."""
    solver, _ = hard_model()
    with pytest.raises(Exception, match=r"."):
        solve(solver, "no model")
