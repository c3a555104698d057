"""Whether `parallelize` gives a step, and says the same, when it is called again and again.

On a busy computer (`--busy 8` starts that many busy processes): always a step, and no speed-up
above the number of devices is reported. On a quiet one (`--busy 0`): the same plan wins in 19 of 20
calls. Ends with exit code 1 where that is not so.

Run: `python experiments/parallelize_again.py --busy 8`.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
import warnings
from collections import Counter
from typing import Any

import torch
from torch import nn

import devplace as dp

NUM_DEVICES = 2
SAME = 0.95
"""Part of the calls on a quiet computer that choose the same plan."""


def problem() -> tuple[Any, Any, Any]:
    """Model, batch and loss: two towers of some ms that can run side by side."""
    torch.manual_seed(0)

    def tower() -> nn.Module:
        layers = (part for _ in range(4) for part in (nn.Linear(512, 512), nn.Tanh()))
        return nn.Sequential(*layers)

    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.head = tower(), tower(), nn.Linear(1024, 10)

        def forward(self, x: Any) -> Any:
            return self.head(torch.cat([self.left(x), self.right(x)], 1))

    batch = (torch.randn(128, 512), torch.randint(0, 10, (128,)))
    return Towers(), batch, nn.functional.cross_entropy


def once(budget: str) -> tuple[str, str, list[float]]:
    """The winner of a call, what the report says, and the speed-ups in it."""
    model, batch, loss = problem()
    optimizer = torch.optim.Adam(model.parameters())
    with (
        warnings.catch_warnings(record=True) as told,
        dp.parallelize(model, batch, loss, optimizer, machine=NUM_DEVICES, budget=budget) as step,
    ):
        value = float(step(*batch))
        assert value == value
        report = str(step)
        found = step.confirmation
        winner = found.best.name if found is not None and found.ranked else "(not measured)"
    said = [float(number) for number in re.findall(r"([0-9.]+)(?: times|x) ", report)]
    return winner, "\n".join([*(f"warning: {w.message}" for w in told), report]), said


def main() -> int:
    """Call it some times and tell what was said."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--busy", type=int, default=8, help="busy processes beside it")
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--budget", default="20s")
    given = parser.parse_args()
    spin = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(spin) for _ in range(given.busy)]
    winners: Counter[str] = Counter()
    too_good = 0
    try:
        for number in range(given.calls):
            begin = time.monotonic()
            winner, report, said = once(given.budget)
            winners[winner] += 1
            too_good += any(one > NUM_DEVICES for one in said)
            took = time.monotonic() - begin
            print(f"{number + 1}: {winner}, {took:.0f} s\n{report}\n", flush=True)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    most = max(winners.values())
    print(f"{dict(winners)}; speed-ups above {NUM_DEVICES}: {too_good}")
    return int(too_good > 0 or (given.busy == 0 and most < SAME * given.calls))


if __name__ == "__main__":
    raise SystemExit(main())
