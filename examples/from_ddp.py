"""From DistributedDataParallel to one placed step: the same numbers from one process.

Run: `python examples/from_ddp.py`. It uses two logical CPU devices; leave `machine` out to use the
GPUs of the computer. `several_processes.py` keeps `torchrun` and a process for each device.
"""

import os

import torch
from torch import distributed, multiprocessing
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import devplace as dp

RANKS = 2


def made() -> tuple:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 4)]
    model = torch.nn.Sequential(*layers).double()
    data = [(torch.randn(32, 16).double(), torch.randint(4, (32,))) for _ in range(5)]
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), data


def before(rank: int, store: str) -> None:
    """One of the processes: its rows of each batch, gradients averaged over all."""
    distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=RANKS)
    model, optimizer, data = made()
    wrapped = DistributedDataParallel(model)
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(wrapped(x.chunk(RANKS)[rank]), y.chunk(RANKS)[rank]).backward()
        optimizer.step()
    if rank == 0:
        torch.save(model.state_dict(), "ddp.pt")
    distributed.destroy_process_group()


def after() -> dict:
    """The model as it is, the whole batch, no processes."""
    model, optimizer, data = made()
    with dp.parallelize(
        model, data[0], F.cross_entropy, optimizer, machine=2, budget="10s"
    ) as step:
        for batch in data:
            step(*batch)
        step.sync()
    return model.state_dict()


if __name__ == "__main__":
    multiprocessing.spawn(before, (os.path.abspath("store"),), RANKS)
    expected, found = torch.load("ddp.pt"), after()
    same = all(torch.allclose(found[name], value) for name, value in expected.items())
    print("weights as of DistributedDataParallel:", same)
