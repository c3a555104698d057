"""Fill one device after the other, as device maps do."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from devplace.placers.counted_simulator import Evaluator
from devplace.placers.modules import ModuleChain, module_chain
from devplace.problem import Placement, Problem


@dataclass(frozen=True)
class Greedy:
    """Modules in forward order; each goes to the first device with room for it.

    Room is judged by parameters, state, gradients and kept activations. The real peak is known
    only after a simulation, so devices are filled to a smaller part of their limit until it fits.
    Unlike packers that never look back, every device is tried for every module.

    Attributes:
        fill: Parts of the limit that are tried in turn.
    """

    name: str = "greedy"
    fill: tuple[float, ...] = (0.95, 0.8, 0.65, 0.5, 0.35)

    def supports(self, problem: Problem) -> str:
        """Always."""
        return ""

    def __call__(
        self, problem: Problem, evaluate: Evaluator, rng: np.random.Generator
    ) -> Placement:
        """Fill accelerators first, then the rest."""
        chain = module_chain(problem)
        devices = problem.accelerators
        devices += [d for d in problem.usable_devices if d not in devices]
        best: tuple[tuple[int, int], Placement] | None = None
        for part in self.fill:
            if best is not None and evaluate.exhausted:
                break
            placement = chain.place(problem, _fill(problem, chain, devices, part))
            score = evaluate(placement)
            if best is None or score.key < best[0]:
                best = (score.key, placement)
            if score.is_feasible:
                break
        assert best is not None
        return best[1]


def _fill(
    problem: Problem, chain: ModuleChain, devices: list[int], part: float
) -> NDArray[np.int32]:
    room = {d: problem.limit_bytes[d] * part for d in devices}
    choice = np.zeros(len(chain.names), np.int32)
    for module, need in enumerate(chain.bytes):
        fitting = [d for d in devices if room[d] >= need]
        device = fitting[0] if fitting else max(devices, key=lambda d: room[d])
        choice[module] = device
        room[device] -= int(need)
    return choice
