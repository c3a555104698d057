"""A Llama of 8.03 billion parameters in bfloat16: `devplace fit` asks of shapes alone.

Run: `devplace fit examples/llama_8b.py:build --cards rtx4090x4,h100x8 --optimizer adamw`
Covers: a model for the command line, `devplace fit`.
"""

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, LAYERS, HEADS, KV_HEADS, FEED_FORWARD, VOCABULARY = 4096, 32, 32, 8, 14_336, 128_256
SEQ = 2048


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        kv_width = WIDTH // HEADS * KV_HEADS
        self.before, self.between = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(WIDTH, kv_width, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, FEED_FORWARD, bias=False) for _ in range(2))
        self.down = nn.Linear(FEED_FORWARD, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        parts = (self.query(y), self.key(y), self.value(y))
        q, k, v = (p.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for p in parts)
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.between(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def build() -> tuple:
    """Model, batch and loss; positions are left out, as they need no memory to speak of."""
    layers = [nn.Embedding(VOCABULARY, WIDTH), *(Block() for _ in range(LAYERS))]
    layers += [nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)]
    text = torch.zeros(1, SEQ, dtype=torch.long)
    return nn.Sequential(*layers).to(torch.bfloat16), (text, text), loss


def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())


if __name__ == "__main__":
    with torch.device("meta"):
        model, _, _ = build()
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{count:,} parameters, {2 * count / 1e9:.2f} GB of weights")
