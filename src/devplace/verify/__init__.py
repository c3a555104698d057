"""Independent checks of solutions: plain, slow, and sharing no code with what they check."""

from devplace.verify.latency_objective import verify_latency
from devplace.verify.makespan import verify_makespan
from devplace.verify.pipeline_loads import LoadVerdict, verify_loads, verify_throughput_plan
from devplace.verify.plan_verdict import StepVerdict, verify_placement, verify_plan, verify_step
from devplace.verify.stage_costs import Stage, verify_pipeline, verify_variants
from devplace.verify.throughput_objective import verify_throughput
from devplace.verify.verdict import Verdict

__all__ = [
    "LoadVerdict",
    "Stage",
    "StepVerdict",
    "Verdict",
    "verify_latency",
    "verify_loads",
    "verify_makespan",
    "verify_pipeline",
    "verify_placement",
    "verify_plan",
    "verify_step",
    "verify_throughput",
    "verify_throughput_plan",
    "verify_variants",
]
