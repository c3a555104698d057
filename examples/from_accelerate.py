"""From accelerate to a placed step: accumulation and clipping become options.

Run: `python examples/from_accelerate.py`, with accelerate installed. It uses two logical CPU
devices; leave `machine` out to use the GPUs of the computer.
"""

import torch
from accelerate import Accelerator
from torch.nn import functional as F

import devplace as dp

PARTS = 2  # batches whose gradients are added up


def made() -> tuple:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 4)]
    model = torch.nn.Sequential(*layers).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = [(torch.randn(32, 16).double(), torch.randint(4, (32,))) for _ in range(5)]
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5), data


def before() -> torch.nn.Module:
    """Small batches, an update every second one."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=PARTS)
    model, optimizer, schedule, data = made()
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    for whole in data:
        for x, y in zip(*(tensor.chunk(PARTS) for tensor in whole), strict=True):
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    return accelerator.unwrap_model(model)


def after() -> torch.nn.Module:
    """The whole of each batch, in as many parts."""
    model, optimizer, schedule, data = made()
    options = {"micro_batches": PARTS, "clip_grad_norm": 1.0, "machine": 2, "budget": "10s"}
    with dp.parallelize(model, data[0], F.cross_entropy, optimizer, **options) as step:
        for batch in data:
            step(*batch)
            schedule.step()
        step.sync()
    return model


expected, found = before().state_dict(), after().state_dict()
same = all(torch.allclose(found[name], value) for name, value in expected.items())
print("weights as of accelerate:", same)
