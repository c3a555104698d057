"""Time and memory of `fit` for a Llama-like model of 6.7 billion parameters, from shapes alone.

    python benchmarks/fit.py [MACHINE]

32 layers of 4096, one sequence of 2,048 tokens, AdamW; a100x4 by default. Prints what was found,
seconds, and the most memory that the process took.
"""

from __future__ import annotations

import resource
import sys
import time

import torch

from devplace import workloads
from devplace.auto.fit import fit
from devplace.report.fit import fit_lines


def main() -> None:
    """Measure once: a capture this large varies little."""
    begun, used = time.perf_counter(), time.process_time()
    sizes = {"layers": 32, "width": 4096, "heads": 32, "feed_forward": 11008, "seq": 2048}
    work = workloads.build("llama", batch=1, **sizes)
    optimizer = torch.optim.AdamW(work.model.parameters())
    machine = sys.argv[1] if len(sys.argv) > 1 else "a100x4"
    found = fit(work.model, work.inputs, work.loss_fn, optimizer, machine, name="llama")
    print("\n".join(fit_lines(found)))
    seconds = time.perf_counter() - begun
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux
    print(f"{seconds:.0f} s, {time.process_time() - used:.0f} s of CPU, {peak_kib / 2**20:.2f} GiB")


if __name__ == "__main__":
    main()
