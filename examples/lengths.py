"""Sequences of any length, in buckets, and a last batch that is smaller.

Run: `python examples/lengths.py`. It uses two logical CPU devices; leave `machine` out to use the
GPUs of the computer.
"""

import copy

import torch
from torch.nn import functional as F

import devplace as dp

WORDS, ROWS, BUCKETS, NONE = 40, 8, (8, 16), -100  # cross_entropy ignores targets of -100


class Reader(torch.nn.Module):
    """Guesses the next word; what comes later changes nothing before."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(WORDS, 16), torch.nn.Linear(16, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(words).cumsum(dim=1).tanh())


def loss_fn(model: Reader, words: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(words).flatten(0, 1), targets.flatten(), ignore_index=NONE)


def padded(texts: list[torch.Tensor], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Words, and the word after each; behind the end of a text there is none."""
    words, targets = (torch.full((len(texts), length), fill) for fill in (0, NONE))
    for row, text in enumerate(texts):
        words[row, : len(text) - 1], targets[row, : len(text) - 1] = text[:-1], text[1:]
    return words, targets


torch.manual_seed(1)
texts = sorted((torch.randint(WORDS, (int(n),)) for n in torch.randint(3, 17, (36,))), key=len)
batches = [texts[k : k + ROWS] for k in range(0, len(texts), ROWS)]  # four of 8, one of 4
given = [padded(b, next(n for n in BUCKETS if len(b[-1]) <= n + 1)) for b in batches]

model = Reader().double()
twin = copy.deepcopy(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
others = [padded(texts[:ROWS], BUCKETS[0]), given[-1]]  # the other bucket, and the last batch
options = {"shapes": others, "machine": 2, "budget": "10s"}
with dp.parallelize(model, given[-2], loss_fn, optimizer, **options) as step:
    losses = [float(step(*batch)) for batch in given]

optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2)  # the ordinary loop, without buckets
for batch, found in zip(batches, losses, strict=True):
    optimizer.zero_grad()
    loss = loss_fn(twin, *padded(batch, len(batch[-1]) - 1))
    loss.backward()
    optimizer.step()
    assert abs(float(loss.detach()) - found) < 1e-9
print("losses as in the ordinary loop: True")
