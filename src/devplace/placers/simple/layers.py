"""Layers spread over devices, the usual expert placement."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from devplace.placers.counted_simulator import Evaluator
from devplace.placers.modules import ModuleChain, module_chain
from devplace.problem import Placement, Problem


@dataclass(frozen=True)
class Layers:
    """Layer k of every stack of n on the k-th n-th of the accelerators, as experts place LSTM and
    transformer models; another module sits with the last layer that feeds it.

    Source: Sutskever, Vinyals, Le (2014), Sequence to sequence learning with neural networks, arXiv
    1409.3215, section 3.5, and Wu et al. (2016), arXiv 1609.08144, section 3: one layer per GPU.
    """

    name: str = "layers"

    def supports(self, problem: Problem) -> str:
        """When the model has a stack: numbered modules in one container."""
        if not _stacks(module_chain(problem)):
            return "the model has no stack of numbered modules (a ModuleList or Sequential)"
        return ""

    def __call__(
        self, problem: Problem, evaluate: Evaluator, rng: np.random.Generator
    ) -> Placement:
        """Split over all accelerators."""
        return layers_over(problem, module_chain(problem), problem.accelerators)


def layers_over(problem: Problem, chain: ModuleChain, devices: list[int]) -> Placement:
    """Every stack's layers over `devices`, in equal counts."""
    stacks, feeds = _stacks(chain), _feeds(problem, chain)
    place = np.zeros(len(chain.names), np.int32)
    for module, name in enumerate(chain.names):
        layer = _layer(name)
        if layer is not None and layer[0] in stacks:
            place[module] = layer[1] * len(devices) // stacks[layer[0]]
        else:
            place[module] = max((int(place[m]) for m in feeds[module] if m < module), default=0)
    return chain.place(problem, np.array(devices, np.int32)[place])


def _layer(name: str) -> tuple[str, int] | None:
    """Container and number of the outermost numbered module on a path."""
    parts = name.split(".")
    at = next((k for k, part in enumerate(parts) if part.isdigit()), None)
    return None if at is None else (".".join(parts[:at]), int(parts[at]))


def _stacks(chain: ModuleChain) -> dict[str, int]:
    """Container -> number of layers."""
    layers = {layer for name in chain.names if (layer := _layer(name)) is not None}
    counts = Counter(container for container, _ in layers)
    last = {c: max(number for name, number in layers if name == c) for c in counts}
    return {container: last[container] + 1 for container, count in counts.items() if count > 1}


def _feeds(problem: Problem, chain: ModuleChain) -> list[set[int]]:
    """Modules whose forward ops make what each module's forward ops read."""
    tasks, graph = problem.core.tasks, problem.graph
    is_forward = np.array([graph.ops[op].stage == "forward" for op in tasks.task_op])
    maker: NDArray[np.int64] = tasks.carrier_maker
    feeds: list[set[int]] = [set() for _ in chain.names]
    for task, (first, last) in enumerate(pairwise(tasks.in_ptr.tolist())):
        if is_forward[task]:
            makers = maker[tasks.in_carrier[first:last]]
            feeds[chain.of_task[task]].update(chain.of_task[makers[is_forward[makers]]].tolist())
    return feeds
