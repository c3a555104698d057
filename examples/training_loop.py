"""A training loop with a schedule, clipping, accumulation, validation and checkpoints.

Run: `python examples/training_loop.py`. It uses two logical CPU devices; leave `machine` out to use
the GPUs of the computer.
"""

import torch
from torch.nn import functional as F

import devplace as dp

torch.manual_seed(0)
data = [(torch.randn(32, 16).double(), torch.randint(4, (32,))) for _ in range(6)]
held_out = (torch.randn(64, 16).double(), torch.randint(4, (64,)))


def made() -> tuple:
    """Model, optimizer and schedule of a new run."""
    torch.manual_seed(1)
    layers = [torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 4)]
    model = torch.nn.Sequential(*layers).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def validate(model: torch.nn.Module) -> float:
    """Loss on what is not trained on."""
    with torch.no_grad():
        return float(F.cross_entropy(model(held_out[0]), held_out[1]))


model, optimizer, schedule = made()
step = dp.parallelize(
    model,
    data[0],
    F.cross_entropy,
    optimizer,
    machine=2,
    budget="10s",
    micro_batches=4,  # accumulation: a quarter of the batch at a time, one update
    clip_grad_norm=1.0,
)
for _ in range(2):
    for batch in data:
        step(*batch)
        schedule.step()  # the learning rate is read at every step
    step.sync()  # weights and optimizer state back, before they are read or saved
    found = validate(model)
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "run.pt")
step.close()

model, optimizer, schedule = made()  # the ordinary loop
for _ in range(2):
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
print("validation loss as in the ordinary loop:", abs(validate(model) - found) < 1e-9)
