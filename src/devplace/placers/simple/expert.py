"""Manual placements by the authors of models or of placement papers."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import pairwise
from typing import Literal

import numpy as np

from devplace.placers.colocation_groups import (
    I32,
    by_vote,
    mean_duration_ns,
)
from devplace.placers.counted_simulator import Evaluator
from devplace.placers.modules import ModuleChain, module_chain
from devplace.placers.orders import best_score
from devplace.problem import Placement, Problem

Kind = Literal["whole", "layers", "blocks", "experts"]


@dataclass(frozen=True)
class Rule:
    """How experts place a family of models.

    Attributes:
        models: Patterns of the graph's name.
        kind: `whole`: one device; `layers`: layer k of each stack on device k; `blocks`: equal
            runs of blocks; `experts`: experts spread, the rest on the first device.
        stacks: Pattern of the containers whose numbered modules are the layers.
        first: Patterns of modules outside the stacks that go to the first device; the others go to
            that of the last layer.
        source: Who does so.
    """

    models: tuple[str, ...]
    kind: Kind
    stacks: str
    first: tuple[str, ...]
    source: str


RULES = (
    Rule(
        ("inception*", "resnet*"),
        "whole",
        "",
        (),
        "Mirhoseini et al. (2017), arXiv 1706.04972, and (2018), ICLR: one device, or contiguous "
        "parts with about as many layers each",
    ),
    Rule(
        ("rnnlm*", "nmt*", "gnmt*"),
        "layers",
        "*cells",
        ("*embedding*", "*backward_cell*"),
        "Sutskever et al. (2014), arXiv 1409.3215, section 3.5; Wu et al. (2016), arXiv "
        "1609.08144, section 3; as in Mirhoseini et al. (2017), arXiv 1706.04972",
    ),
    Rule(
        ("bert*", "gpt*", "llama*", "vit*"),
        "blocks",
        "blocks",
        ("*embedding*", "dropout", "norm:bert*", "patches"),
        "Huang et al. (2019), GPipe, arXiv 1811.06965",
    ),
    Rule(
        ("moe*",),
        "experts",
        "*experts",
        (),
        "Lepikhin et al. (2021), GShard, arXiv 2006.16668",
    ),
)
"""Published rules; the first whose pattern matches the model's name counts."""


@dataclass(frozen=True)
class Expert:
    """The published rule for this model, by its name.

    Image classifiers: all on one accelerator; where it does not fit there, contiguous parts with
    equally many modules. LSTM models: layer k of encoder and decoder on accelerator k, embeddings
    with the first, attention and softmax with the last; with fewer accelerators than layers, equal
    runs. Transformers: equal runs of blocks, embeddings first, head last. Mixtures of experts:
    experts spread evenly, all else on the first accelerator.

    Source: `RULES` has one for each. Differs from these in that only the model is divided: data
    parallelism and pipelines of micro-batches, which some combine with it, are left out; for
    mixtures of experts GShard copies all else to every device.
    """

    name: str = "expert"

    def supports(self, problem: Problem) -> str:
        """When there is a published rule for a model of this name."""
        rule = rule_of(problem)
        if rule is None:
            return "no published rule for this model; `layers` works for any stack"
        if rule.kind != "whole" and not _numbered(module_chain(problem), rule):
            return f"the model has no numbered modules in {rule.stacks}"
        return ""

    def __call__(
        self, problem: Problem, evaluate: Evaluator, rng: np.random.Generator
    ) -> Placement:
        """Place by the rule."""
        rule = rule_of(problem)
        assert rule is not None, "place() asks supports() first"
        chain, devices = module_chain(problem), problem.accelerators
        if rule.kind == "whole":
            return _whole(problem, chain, devices, evaluate)
        wish = np.array(devices, np.int32)[_places(problem, chain, rule)[chain.of_task]]
        if rule.kind == "layers":
            _follow(problem, chain, wish)
        groups = by_vote(problem, wish, mean_duration_ns(problem))
        return Placement(problem.spaces.op_devices_of_groups(groups))


def rule_of(problem: Problem) -> Rule | None:
    """The rule for this problem's model, if there is one."""
    name = problem.graph.name
    return next((rule for rule in RULES if any(fnmatch(name, p) for p in rule.models)), None)


def _whole(
    problem: Problem, chain: ModuleChain, devices: list[int], evaluate: Evaluator
) -> Placement:
    whole = chain.place(problem, np.full(len(chain.names), devices[0], np.int32))
    if len(devices) == 1 or best_score(evaluate, whole).is_feasible:
        return whole
    part = np.arange(len(chain.names)) * len(devices) // len(chain.names)
    return chain.place(problem, np.array(devices, np.int32)[part])


def _numbered(chain: ModuleChain, rule: Rule) -> dict[int, tuple[str, int]]:
    """Container and number of the modules on a path through one of the rule's stacks."""
    found = {}
    for module, name in enumerate(chain.names):
        parts = name.split(".")
        for at, part in enumerate(parts[1:], 1):
            if part.isdigit() and fnmatch(".".join(parts[:at]), rule.stacks):
                found[module] = (".".join(parts[:at]), int(part))
    return found


def _places(problem: Problem, chain: ModuleChain, rule: Rule) -> I32:
    """Index of the accelerator of each module. `[M]`"""
    numbered, count = _numbered(chain, rule), len(problem.accelerators)
    layers: dict[str, int] = {}
    for stack, number in numbered.values():
        layers[stack] = max(layers.get(stack, 0), number + 1)
    place = np.full(len(chain.names), -1, np.int32)
    for module, (stack, number) in numbered.items():
        few = rule.kind == "layers" and layers[stack] <= count
        place[module] = number if few else number * count // layers[stack]
    last = 0 if rule.kind == "experts" else int(place.max(initial=0))
    for module, name in enumerate(chain.names):
        if place[module] < 0:
            place[module] = 0 if _is_first(name, problem, rule) else last
    return place


def _follow(problem: Problem, chain: ModuleChain, wish: I32) -> None:
    """Let a dropout that all layers share sit with what it reads; changes `wish`."""
    tasks = problem.core.tasks
    shared = [name.endswith("dropout") for name in chain.names]
    for task, (begin, end) in enumerate(pairwise(tasks.in_ptr.tolist())):
        if shared[chain.of_task[task]] and end > begin:
            wish[task] = wish[tasks.carrier_maker[tasks.in_carrier[begin]]]


def _is_first(name: str, problem: Problem, rule: Rule) -> bool:
    for pattern in rule.first:
        module, _, model = pattern.partition(":")
        if fnmatch(name, module) and fnmatch(problem.graph.name, model or "*"):
            return True
    return False
