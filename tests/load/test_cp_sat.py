"""CP-SAT leaves Ctrl-C to Python."""

import signal
import threading

import pytest

from devplace.load.cp_sat import cp_model, solve

pytest.importorskip("ortools")


def hard_model():
    """One that takes minutes: a magic square of side 8."""
    cp = cp_model()
    model, side = cp.CpModel(), 8
    cells = [[model.new_int_var(1, side**2, "") for _ in range(side)] for _ in range(side)]
    model.add_all_different([cell for row in cells for cell in row])
    total = side * (side**2 + 1) // 2
    for row in [*cells, *zip(*cells, strict=True)]:
        model.add(sum(row) == total)
    model.maximize(sum(a * k for row in cells for k, a in enumerate(row)))
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
    with pytest.raises(KeyboardInterrupt):
        solve(solver, model)
    timer.join()
    assert not [t for t in threading.enumerate() if t.name == "CP-SAT" and t.is_alive()]


def test_what_the_solver_raises_is_raised() -> None:
    """An error in its thread reaches the caller."""
    solver, _ = hard_model()
    with pytest.raises(Exception, match=r"."):
        solve(solver, "no model")
