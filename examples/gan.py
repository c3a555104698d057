"""Two optimizers: generator and critic of a GAN, trained by one placed step.

Run: `python examples/gan.py`. It uses two logical CPU devices; leave `machine` out to use the GPUs
of the computer.
"""

import torch
from torch.func import functional_call
from torch.nn import functional as F

import devplace as dp


class Gan(torch.nn.Module):
    """Both nets in one module, so that the step knows all weights it reads."""

    def __init__(self) -> None:
        super().__init__()
        layers = [torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2)]
        self.generator = torch.nn.Sequential(*layers)
        layers = [torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)]
        self.critic = torch.nn.Sequential(*layers)


def loss_fn(gan: Gan, real: torch.Tensor, noise: torch.Tensor) -> tuple:
    """The sum of both losses; each trains one net alone, the other is detached."""
    fake = gan.generator(noise)
    fixed = {name: weight.detach() for name, weight in gan.critic.named_parameters()}
    generator = F.softplus(-functional_call(gan.critic, fixed, (fake,))).mean()
    critic = F.softplus(-gan.critic(real)).mean() + F.softplus(gan.critic(fake.detach())).mean()
    return critic + generator, {"critic": critic, "generator": generator}


def made() -> tuple:
    """The nets, and an optimizer of each."""
    torch.manual_seed(0)
    gan = Gan().double()
    critic = torch.optim.SGD(gan.critic.parameters(), lr=0.1)
    return gan, [critic, torch.optim.Adam(gan.generator.parameters(), lr=1e-3)]


torch.manual_seed(1)
data = [(torch.randn(16, 2).double() + 3, torch.randn(16, 8).double()) for _ in range(5)]
gan, optimizers = made()
with dp.parallelize(gan, data[0], loss_fn, optimizers, machine=2, budget="10s") as step:
    placed = [step(*batch)[1] for batch in data]

gan, optimizers = made()  # the ordinary loop
for batch, found in zip(data, placed, strict=True):
    loss, parts = loss_fn(gan, *batch)
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    for name, value in parts.items():
        assert abs(float(value.detach()) - float(found[name])) < 1e-9, name
print("losses of both nets as in the ordinary loop: True")
