"""Low-rank adapters: small matrices beside frozen weights are trained, the weights are not.

Run: `python examples/lora.py`. It uses two logical CPU devices; leave `machine` out to use the GPUs
of the computer. Source of the method: Hu et al. (2021), LoRA, arXiv 2106.09685.
"""

import copy

import torch
from torch import nn
from torch.nn import functional as F

import devplace as dp


class Adapted(nn.Module):
    """A frozen linear layer, and a product of two small matrices that is added to it."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        like = {"dtype": layer.weight.dtype, "device": layer.weight.device}
        self.down = nn.Parameter(torch.randn(rank, layer.in_features, **like) * 0.02)
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank, **like))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + F.linear(F.linear(x, self.down), self.up)


def adapt(model: nn.Module) -> nn.Module:
    """Freeze a model, and put adapters on the linear layers of its feed-forward nets."""
    model.requires_grad_(False)
    for block in model.layers:
        block.linear1, block.linear2 = Adapted(block.linear1), Adapted(block.linear2)
    return model


torch.manual_seed(0)
block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
model = adapt(nn.TransformerEncoder(block, 3, enable_nested_tensor=False).double())
twin = copy.deepcopy(model)
data = [tuple(torch.randn(2, 8, 10, 32).double()) for _ in range(5)]

adapters = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(adapters, lr=1e-2)
with dp.parallelize(model, data[0], F.mse_loss, optimizer, machine=2, budget="20s") as step:
    for batch in data:
        step(*batch)
    step.sync()
trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

optimizer = torch.optim.AdamW([p for p in twin.parameters() if p.requires_grad], lr=1e-2)
for x, y in data:  # the ordinary loop
    optimizer.zero_grad()
    F.mse_loss(twin(x), y).backward()
    optimizer.step()
same = all(torch.allclose(p, twin.get_parameter(name)) for name, p in trained.items())
print(f"{len(trained)} matrices as in the ordinary loop: {same}")
