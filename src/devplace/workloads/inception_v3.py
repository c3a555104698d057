"""Inception-V3 image classifier: branches that can run side by side."""
# mypy: allow-subclassing-any

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from devplace.errors import InputError
from devplace.workloads.common import Built, random_ids, random_images

AUXILIARY_WEIGHT = 0.4  # of the auxiliary loss, as released with TensorFlow-Slim


@dataclass(frozen=True)
class InceptionConfig:
    """Sizes of Inception-V3.

    Attributes:
        batch: Images per step; 32 as in Gao et al. (2018), Post, NeurIPS.
        image: Height and width, pixels; at least 107.
        classes: Classes to tell apart.
        dropout: Chance of dropping a feature before the last layer; 0.5 as torchvision, 0.0 turns
            it off.
        width_divisor: Every channel count is divided by it; 1 is the published network.
        auxiliary_kernel: Of the auxiliary head's second convolution; 5 needs an image of 299.
    """

    batch: int = 32
    image: int = 299
    classes: int = 1000
    dropout: float = 0.5
    width_divisor: int = 1
    auxiliary_kernel: int = 5


CONFIGS = {
    "inception-v3": {
        "full": InceptionConfig(),
        "small": InceptionConfig(
            batch=4, image=155, classes=10, width_divisor=16, auxiliary_kernel=1
        ),
    }
}

Kernel = int | tuple[int, int]


class ConvNorm(nn.Module):
    """Convolution, batch norm, ReLU."""

    def __init__(
        self, channels_in: int, channels: int, kernel: Kernel, stride: int = 1, same: bool = True
    ) -> None:
        super().__init__()
        height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (height // 2, width // 2) if same else (0, 0)
        self.conv = nn.Conv2d(channels_in, channels, (height, width), stride, padding, bias=False)
        self.norm = nn.BatchNorm2d(channels, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[batch, channels_in, h, w]` to `[batch, channels, h', w']`."""
        return F.relu(self.norm(self.conv(x)), inplace=True)


def chain(channels_in: int, *layers: tuple[int, Kernel]) -> nn.Sequential:
    """Convolutions that keep the image size, one after another; `layers` are (channels, kernel)."""
    made = []
    for channels, kernel in layers:
        made.append(ConvNorm(channels_in, channels, kernel))
        channels_in = channels
    return nn.Sequential(*made)


class Branches(nn.Module):
    """Several branches on the same input, joined by channel."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[batch, channels_in, h, w]` to the branches' channels side by side."""
        return torch.cat([branch(x) for branch in self.branches], 1)


def pooled(channels_in: int, channels: int) -> nn.Sequential:
    """Mean over 3x3, then a 1x1 convolution."""
    return nn.Sequential(nn.AvgPool2d(3, 1, 1), ConvNorm(channels_in, channels, 1))


def block_35(channels_in: int, pool_channels: int, d: int) -> Branches:
    """Inception block at 35x35 (figure 5 of the paper); `d` divides all channels."""
    return Branches(
        chain(channels_in, (64 // d, 1)),
        chain(channels_in, (48 // d, 1), (64 // d, 5)),
        chain(channels_in, (64 // d, 1), (96 // d, 3), (96 // d, 3)),
        pooled(channels_in, pool_channels // d),
    )


def reduce_35(channels_in: int, d: int) -> Branches:
    """From 35x35 to 17x17 (figure 10)."""
    deep = chain(channels_in, (64 // d, 1), (96 // d, 3))
    deep.append(ConvNorm(96 // d, 96 // d, 3, 2, same=False))
    return Branches(ConvNorm(channels_in, 384 // d, 3, 2, same=False), deep, nn.MaxPool2d(3, 2))


def block_17(channels_in: int, c7: int, d: int) -> Branches:
    """Inception block at 17x17 with 1x7 and 7x1 convolutions (figure 6); `c7` undivided."""
    c, wide, tall = c7 // d, (1, 7), (7, 1)
    return Branches(
        chain(channels_in, (192 // d, 1)),
        chain(channels_in, (c, 1), (c, wide), (192 // d, tall)),
        chain(channels_in, (c, 1), (c, tall), (c, wide), (c, tall), (192 // d, wide)),
        pooled(channels_in, 192 // d),
    )


def reduce_17(channels_in: int, d: int) -> Branches:
    """From 17x17 to 8x8."""
    short = chain(channels_in, (192 // d, 1))
    short.append(ConvNorm(192 // d, 320 // d, 3, 2, same=False))
    deep = chain(channels_in, (192 // d, 1), (192 // d, (1, 7)), (192 // d, (7, 1)))
    deep.append(ConvNorm(192 // d, 192 // d, 3, 2, same=False))
    return Branches(short, deep, nn.MaxPool2d(3, 2))


def block_8(channels_in: int, d: int) -> Branches:
    """Inception block at 8x8 whose branches fork once more (figure 7)."""

    def fork() -> Branches:
        return Branches(ConvNorm(384 // d, 384 // d, (1, 3)), ConvNorm(384 // d, 384 // d, (3, 1)))

    return Branches(
        chain(channels_in, (320 // d, 1)),
        nn.Sequential(ConvNorm(channels_in, 384 // d, 1), fork()),
        nn.Sequential(*chain(channels_in, (448 // d, 1), (384 // d, 3)), fork()),
        pooled(channels_in, 192 // d),
    )


class AuxiliaryHead(nn.Module):
    """Second classifier on the 17x17 features, used in training only (figure 8)."""

    def __init__(self, channels_in: int, config: InceptionConfig) -> None:
        super().__init__()
        d = config.width_divisor
        self.reduce = ConvNorm(channels_in, 128 // d, 1)
        self.spatial = ConvNorm(128 // d, 768 // d, config.auxiliary_kernel, same=False)
        self.classifier = nn.Linear(768 // d, config.classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map features `[batch, channels_in, 17, 17]` to logits `[batch, classes]`."""
        x = self.spatial(self.reduce(F.avg_pool2d(x, 5, 3)))
        return self.classifier(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class InceptionV3(nn.Module):
    """Stem, eleven blocks of parallel branches, a main and an auxiliary classifier.

    Source: Szegedy et al. (2016), Rethinking the Inception Architecture for Computer Vision, arXiv
    1512.00567, table 1; channel counts as torchvision.models.inception_v3. Initial weights are
    torch's, not the truncated normal of the released code.
    """

    def __init__(self, config: InceptionConfig) -> None:
        super().__init__()
        d = config.width_divisor
        self.stem = nn.Sequential(
            ConvNorm(3, 32 // d, 3, 2, same=False),
            ConvNorm(32 // d, 32 // d, 3, same=False),
            ConvNorm(32 // d, 64 // d, 3),
            nn.MaxPool2d(3, 2),
            ConvNorm(64 // d, 80 // d, 1),
            ConvNorm(80 // d, 192 // d, 3, same=False),
            nn.MaxPool2d(3, 2),
        )
        self.fine = nn.Sequential(
            block_35(192 // d, 32, d),
            block_35(256 // d, 64, d),
            block_35(288 // d, 64, d),
            reduce_35(288 // d, d),
        )
        self.middle = nn.Sequential(*(block_17(768 // d, c7, d) for c7 in (128, 160, 160, 192)))
        self.auxiliary = AuxiliaryHead(768 // d, config)
        self.coarse = nn.Sequential(
            reduce_17(768 // d, d), block_8(1280 // d, d), block_8(2048 // d, d)
        )
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = nn.Linear(2048 // d, config.classes)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Map images `[batch, 3, h, w]` to main and auxiliary logits, each `[batch, classes]`."""
        middle = self.middle(self.fine(self.stem(images)))
        features = torch.flatten(F.adaptive_avg_pool2d(self.coarse(middle), 1), 1)
        return self.classifier(self.dropout(features)), self.auxiliary(middle)


def inception_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of the main classifier plus 0.4 times that of the auxiliary one."""
    logits, auxiliary = model(images)
    return F.cross_entropy(logits, labels) + AUXILIARY_WEIGHT * F.cross_entropy(auxiliary, labels)


def smallest_image(auxiliary_kernel: int) -> int:
    """Height and width, pixels, below which the auxiliary head has nothing to convolve.

    Example:
        >>> smallest_image(5), smallest_image(1)
        (299, 107)
    """

    def before(size: int, kernel: int = 3, stride: int = 2) -> int:
        return (size - 1) * stride + kernel

    middle = before(auxiliary_kernel, 5, 3)
    stem_pool = before(before(middle))
    return before(before(before(stem_pool, stride=1)) + 2)


def build(config: InceptionConfig) -> Built:
    """Model, one random batch of images and labels, and the loss."""
    smallest = smallest_image(config.auxiliary_kernel)
    if config.image < smallest:
        raise InputError(
            f"image of inception-v3 is {config.image} pixels, expected at least {smallest} "
            f"with auxiliary_kernel {config.auxiliary_kernel}. Raise image."
        )
    if 16 % config.width_divisor:
        raise InputError(
            f"width_divisor of inception-v3 must be 1, 2, 4, 8 or 16, got {config.width_divisor}."
        )
    images = random_images(config.batch, config.image)
    labels = random_ids(config.classes, config.batch)
    return InceptionV3(config), (images, labels), inception_loss
