"""The best contiguous split: a pipeline that only goes forward."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from devplace.pipelining import contiguous_step
from devplace.placers.counted_simulator import Evaluator
from devplace.placers.partitioners.pipedream import PipeDream
from devplace.problem import Placement, Problem


@dataclass(frozen=True)
class Contiguous:
    """Ops cut into one stage per accelerator so that the largest load of a full pipeline is
    smallest; the forward pass only goes forward, backward ops sit with their forward ops.

    A dynamic programme over all cuts of the graph; over those along some topological orders where
    there are too many. Only parameters count against memory.

    Source: Tarnawski et al. (2020), Efficient Algorithms for Device Placement of DNN Graph
    Operators, arXiv 2006.16423, section 5.1. Differs from it in: too many cuts (above 60,000) are
    replaced by fewer; where accelerators differ, all count as their mean. It minimises the load of
    a full pipeline, which is not the time of one step.

    Attributes:
        seconds: Most time for each of the two programmes.
    """

    name: str = "contiguous"
    seconds: float = 60.0

    def supports(self, problem: Problem) -> str:
        """Always."""
        return ""

    def __call__(
        self, problem: Problem, evaluate: Evaluator, rng: np.random.Generator
    ) -> Placement:
        """Split once; as `pipedream` where no split fits."""
        device = contiguous_step(problem, self.seconds)
        if device is None:
            return PipeDream()(problem, evaluate, rng)
        return Placement(problem.spaces.op_devices(device))
