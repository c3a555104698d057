"""What to do: placement and order as a file, apart from what was predicted."""

from devplace.plan.plan import Fingerprints, Plan, Prediction, load_plan, make_plan

__all__ = ["Fingerprints", "Plan", "Prediction", "load_plan", "make_plan"]
