"""Small models that need care."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def mean_square(model: Any, x: Any) -> Any:
    """Mean of the squared output."""
    return model(x).square().mean()


def next_token(model: Any, tokens: Any) -> Any:
    """Cross entropy of the next token."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def weighted_cross_entropy(model: Any, x: Any, target: Any) -> Any:
    """Cross entropy with class weights and an ignored class."""
    return F.cross_entropy(model.body(x), target, weight=model.weight, ignore_index=2)


class Residual(nn.Module):
    """Two linear layers with a skip."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, x: Any) -> Any:
        return x + self.second(self.first(x).relu())


class Unrolled(nn.Module):
    """An LSTM cell and a head, used once per step of a sequence of 8 features."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(8, 8), nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        state, outputs = (x.new_zeros(len(x), 8), x.new_zeros(len(x), 8)), []
        for step in x.unbind(1):
            state = self.cell(step, state)
            outputs.append(self.head(state[0]))
        return torch.stack(outputs)


class UShape(nn.Module):
    """Two convolutions down, two up, joined by add and cat."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.up1, self.up2 = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: Any) -> Any:
        one = self.down1(x).relu()
        two = self.down2(one).relu()
        return self.up2(torch.cat([self.up1(two) + two, one], dim=1))


class Borrowing(nn.Module):
    """A sibling's weight used functionally, and a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.owner = nn.Conv2d(2, 2, 3, padding=1)
        self.mix = nn.Parameter(torch.randn(2, 2))

    def forward(self, x: Any) -> Any:
        borrowed = F.conv2d(x, self.owner.weight, padding=1)
        return torch.einsum("bchw,cd->bdhw", self.owner(x) + borrowed, self.mix)


class Containers(nn.Module):
    """Layers in containers, used in odd orders or never."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.named = nn.ModuleDict({"a": nn.Linear(4, 4), "unused": nn.Linear(4, 4)})

    def forward(self, x: Any) -> Any:
        for index in (2, 0, 2):
            x = self.steps[index](x).tanh()
        return self.named["a"](x)


class Rotary(nn.Module):
    """A non-persistent table used by two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(4, 6), persistent=False)
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Any) -> Any:
        return self.two(self.one(x * self.table) * self.table) * self.table


class Labelled(nn.Module):
    """Class weights beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.rand(5) + 0.5)
        self.body = nn.Linear(4, 5)


class Factories(nn.Module):
    """Ops that make tensors, and an LSTM with default state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4)

    def forward(self, x: Any) -> Any:
        out, _ = self.lstm(x)
        ramp = torch.arange(4, device=x.device, dtype=x.dtype)
        return out * ramp + out.new_full((4,), 2.0) + torch.zeros(4, device=x.device)


class Tied(nn.Module):
    """Embedding tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(7, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Any) -> Any:
        return self.head(self.body(self.embed(tokens)).tanh())


class Normed(nn.Module):
    """Convolution, batch norm, dropout, head."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 3, 3, bias=False), nn.BatchNorm2d(3)
        self.drop, self.head = nn.Dropout(dropout), nn.Linear(3, 2)

    def forward(self, x: Any) -> Any:
        return self.head(self.drop(self.norm(self.conv(x)).relu().mean((2, 3))))


class Clipped(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        return self.two(self.one(x).relu())
