"""What users met on GPUs: links and ops that are measured, not believed."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from tests.run import gpus
from tests.run.models import mean_square
from tests.run.placed import sgd
from tests.user_threads.helpers import mlp

import devplace as dp
from devplace.cost.profiled import Profiled
from devplace.machine import detect
from devplace.run.probe.probe_run import run_probe
from devplace.step_capture import capture

pytestmark = [*gpus.MARKS, gpus.real_gpu]
two_gpus = gpus.needs_apart(2)
MIB = 2**20


@two_gpus
def test_s30_links_are_measured_per_pair_and_direction(tmp_path: Path) -> None:
    """`devplace probe` measures every ordered pair, and the machine file it writes holds that."""
    path = tmp_path / "machine.toml"
    main = "from devplace.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", main, "probe", "--json", "-o", str(path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "DEVPLACE_CACHE": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    rows = {(row["src"], row["dst"]): row for row in json.loads(done.stdout)["pairs"]}
    for pair in itertools.permutations(gpus.names(gpus.NUM_GPUS), 2):
        assert not rows[pair]["faults"]
        assert len(rows[pair]["sizes"]) > 3
        assert rows[pair]["hop_ns"]
    machine = dp.load_machine(path)
    speeds = {(link.src, link.dst): link.bytes_per_s for link in machine.links}
    assert all(pair in speeds for pair in itertools.permutations(gpus.names(2), 2))


@two_gpus
def test_s53_the_probe_finds_a_link_that_changes_data() -> None:
    """Copies from the first GPU that flip a byte from 1 MiB on make that pair, and only it,
    unusable."""
    from devplace.run.cuda.probe import CudaBench
    from devplace.run.cuda.push import push_by_kernel

    def push(source: Any, buffer: Any, flag: Any, epoch: Any) -> int:
        wrong = source.device.index == 0 and source.numel() * source.element_size() >= MIB
        if wrong:
            source = source.clone()
            source[-1:].bitwise_xor_(1)
        return push_by_kernel(source, buffer, flag)

    report = run_probe(CudaBench(gpus.names(2), push, push), {})
    assert [(pair.src, pair.dst) for pair in report.faulty] == [gpus.names(2)]


def test_s64_profiling_needs_no_more_memory_than_an_op() -> None:
    """A model three times larger than the memory that is left is profiled op by op, to the last."""
    machine = detect()
    with torch.device("cuda:0"):
        model = mlp(4096, 24)
    batch = (torch.randn(256, 4096, device="cuda:0"),)
    graph = capture(model, batch, mean_square, sgd(list(model.parameters())))
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    model.to("meta")
    others = tuple(name for name in machine.device_names if name != "cuda:0")
    with gpus.capped({0: weights // 3}):
        costs = Profiled(cache=None, skip=others)(graph, machine)
    assert costs.origin == "profiled"
    assert costs.notes == ()
