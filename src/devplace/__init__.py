"""devplace: plan, explain and run one PyTorch training step over several devices.

Example:
    graph = dp.capture(model, example_inputs, loss_fn, optimizer)
    problem = dp.Problem(graph, machine, costs)
    result = dp.place(problem, dp.placers.Search(), budget="30s", seed=0)
    result.plan.save("plan.json")
    step = dp.compile(graph, result.plan)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> where it lives; loaded when first used, so that `import devplace` stays instant.
_LAZY = {
    "Analytic": "devplace.cost.analytic",
    "Budget": "devplace.placers",
    "Captured": "devplace.graph",
    "Device": "devplace.machine",
    "Link": "devplace.machine",
    "Machine": "devplace.machine",
    "OpGraph": "devplace.graph",
    "Placement": "devplace.problem",
    "Plan": "devplace.plan",
    "Problem": "devplace.problem",
    "Result": "devplace.placers",
    "Timeline": "devplace.simulator",
    "capture": "devplace.step_capture",
    "check": "devplace.run",
    "compile": "devplace.run",
    "load_machine": "devplace.machine",
    "load_plan": "devplace.plan",
    "parallelize": "devplace.auto.parallelize",
    "confirm": "devplace.tune.confirm",
    "fit": "devplace.auto.fit",
    "fuse": "devplace.graph.fusion",
    "lower_bound": "devplace.simulator.bounds",
    "place": "devplace.placers",
    "simulate": "devplace.simulator",
}
_ROOMS = (
    "auto",
    "cost",
    "errors",
    "graph",
    "machine",
    "placers",
    "report",
    "run",
    "testing",
    "workloads",
)

if TYPE_CHECKING:
    from devplace import (
        auto,
        cost,
        errors,
        graph,
        machine,
        placers,
        report,
        run,
        testing,
        workloads,
    )
    from devplace.auto.fit import fit
    from devplace.auto.parallelize import parallelize
    from devplace.cost.analytic import Analytic
    from devplace.graph import Captured, OpGraph
    from devplace.graph.fusion import fuse
    from devplace.machine import Device, Link, Machine, load_machine
    from devplace.placers.budget import Budget
    from devplace.placers.place import place
    from devplace.placers.result import Result
    from devplace.plan import Plan, load_plan
    from devplace.problem import Placement, Problem
    from devplace.run.planned import check, compile
    from devplace.simulator import Timeline, simulate
    from devplace.simulator.bounds import lower_bound
    from devplace.step_capture import capture
    from devplace.tune.confirm import confirm

__all__ = [
    "Analytic",
    "Budget",
    "Captured",
    "Device",
    "Link",
    "Machine",
    "OpGraph",
    "Placement",
    "Plan",
    "Problem",
    "Result",
    "Timeline",
    "auto",
    "capture",
    "check",
    "compile",
    "confirm",
    "cost",
    "errors",
    "fit",
    "fuse",
    "graph",
    "load_machine",
    "load_plan",
    "lower_bound",
    "machine",
    "parallelize",
    "place",
    "placers",
    "report",
    "run",
    "simulate",
    "testing",
    "workloads",
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"devplace.{name}")
    if name in _LAZY:
        value = getattr(import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'devplace' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
