"""Placed steps on real devices: run them, measure them, check their numbers."""

from devplace.run.check import CheckReport, check_step
from devplace.run.compile import Step, compile_step
from devplace.run.measured_timeline import MeasuredTimeline
from devplace.run.planned import check, compile

__all__ = [
    "CheckReport",
    "MeasuredTimeline",
    "Step",
    "check",
    "check_step",
    "compile",
    "compile_step",
]
