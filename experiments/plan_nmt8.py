"""What it takes to plan NMT-8 for eight devices from the command line: time and memory, in all.

Runs `devplace plan nmt-8 --machine k40x8 --budget 30s --seed 0` as a process of its own and writes
docs/results/plan_nmt8.json. Run on an idle machine: `python experiments/plan_nmt8.py`.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time

from common import provenance, write

COMMAND = ["plan", "nmt-8", "--machine", "k40x8", "--budget", "30s", "--seed", "0", "--json"]


def main() -> None:
    """Plan once and write what it took."""
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", "from devplace.cli import main; main()", *COMMAND],
        capture_output=True,
        text=True,
        check=True,
    )
    seconds = time.monotonic() - begin
    plan = json.loads(done.stdout)
    data = {
        "provenance": provenance(),
        "command": "devplace " + " ".join(COMMAND),
        "seconds": round(seconds, 1),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        "step_ns": plan["step_ns"],
        "single_ns": plan["single_ns"],
        "lower_bound_ns": plan["lower_bound_ns"],
        "evaluations": plan["evaluations"],
    }
    write("plan_nmt8", data)
    print(json.dumps({k: v for k, v in data.items() if k != "provenance"}, indent=1))


if __name__ == "__main__":
    main()
