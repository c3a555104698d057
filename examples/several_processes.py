"""One training script for one process and for several.

Run: `python examples/several_processes.py`, or with a process for each device
`torchrun --nproc-per-node 2 examples/several_processes.py`. It uses two logical CPU devices; name
another machine, such as `h100x2` or `2xh100x8`, to use GPUs.
"""

import os

import torch
from torch.distributed import checkpoint
from torch.nn import functional as F

import devplace as dp

torch.manual_seed(0)
layers = [torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4)]
model = torch.nn.Sequential(*layers).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = [(torch.randn(32, 16).double(), torch.randint(4, (32,))) for _ in range(4)]

step = dp.parallelize(
    model,
    data[0],
    F.cross_entropy,
    optimizer,
    machine="cpux2",
    budget="8ev",
    placer=dp.placers.Random(),  # leave placer and confirm out to get the fastest plan
    confirm=False,
)
losses = [float(step(*batch)) for batch in data]

# What each process holds; the next run may have another plan, or other processes.
checkpoint.save(step.state_dict(), checkpoint_id="checkpoint")

step.sync()  # all processes call it; the model of rank 0 is written
step.close()
if os.environ.get("RANK", "0") == "0":
    print("devices:", ", ".join(step.devices))
    print("losses:", *(f"{loss:.4f}" for loss in losses))
    print(f"weights: {sum(float(p.detach().abs().sum()) for p in model.parameters()):.4f}")
