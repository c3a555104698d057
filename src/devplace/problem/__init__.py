"""What is to be solved: a graph on a machine under the user's demands."""

from devplace.problem.core import Core, Tasks, Wires
from devplace.problem.placement import Placement
from devplace.problem.problem import Problem

__all__ = ["Core", "Placement", "Problem", "Tasks", "Wires"]
