"""Time of `devplace --help`, `import devplace` and loading what planning needs, fresh processes.

Run: python benchmarks/startup.py. Goal: help in under 0.3 s.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

HELP = "import sys; sys.argv[1:] = ['--help']\nfrom devplace.cli import main; main()"
CASES = {
    "python -c pass": ["-c", "pass"],
    "import devplace": ["-c", "import devplace"],
    "devplace --help": [
        "-c",
        "import sys; sys.argv[1:] = ['--help']\nfrom devplace.cli import main; main()",
    ],
    "import all for planning": ["-c", "import devplace.placers, devplace.plan, devplace.machine"],
    "import torch": ["-c", "import torch"],
}
REPEATS = 7


def main() -> None:
    """Print the median and the fastest of several fresh starts."""
    print(f"{'start':26}{'median s':>10}{'fastest s':>11}")
    for name, arguments in CASES.items():
        times = []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
            times.append(time.perf_counter() - begin)
        print(f"{name:26}{statistics.median(times):10.3f}{min(times):11.3f}")


if __name__ == "__main__":
    main()
