"""Whether a further device ever makes the plan of `search` slower, at the same budget.

Run: `python experiments/more_devices.py [--problems 2000]` writes docs/results/more_devices.json;
`tables.py` makes the page. Random small steps of recurrent stacks on devices of random speeds, with
dear or cheap transfers; every device in turn is added to those before it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from common import provenance, write

import devplace as dp
from devplace.placers import Search, place
from devplace.testing.layered import layered_problem

BUDGET = "2000ev"
PLACER = Search(least_gain=0.0)
SEED = 0
OPS = (10, 41)
DEVICES = (2, 6)
SPEEDS = (1, 1, 1, 2, 3)
"""How many times as long a device takes."""
WORK = (0.05, 0.3, 1.0, 5.0)
"""By how much the times of ops are multiplied; those of transfers stay."""


def main() -> None:
    """Search every problem on more and more of its devices."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, default=2000)
    options = parser.parse_args()
    pairs, slower = 0, []
    for seed in range(options.problems):
        steps = [place(one, PLACER, BUDGET, seed=SEED).step_ns for one in _problems(seed)]
        pairs += len(steps) - 1
        for count, (few, more) in enumerate(pairwise(steps), start=2):
            if more > few:
                slower.append({"problem": seed, "devices": count, "part": more / few - 1})
        if seed % 20 == 19 or seed == options.problems - 1:
            _write(seed + 1, pairs, slower)


def _problems(seed: int) -> Iterator[dp.Problem]:
    """One problem on its first device, its first two, and so on."""
    rng = np.random.default_rng(seed)
    problem = layered_problem(int(rng.integers(*OPS)), int(rng.integers(*DEVICES)), seed)
    names = problem.machine.device_names
    speed = rng.choice(SPEEDS, len(names)) * rng.choice(WORK)
    times = (problem.costs.compute_ns * speed).astype(np.int64)
    problem = replace(problem, costs=replace(problem.costs, compute_ns=times))
    for count in range(1, len(names) + 1):
        yield replace(problem, exclude=list(names[count:]))


def _write(problems: int, pairs: int, slower: list[dict[str, Any]]) -> None:
    data = {"problems": problems, "pairs": pairs, "slower": slower}
    data |= {"budget": BUDGET, "seed": SEED, "ops": OPS, "devices": DEVICES}
    write("more_devices", {**data, "provenance": provenance()})


if __name__ == "__main__":
    main()
