"""ResNet image classifiers of 50 and 152 layers."""
# mypy: allow-subclassing-any

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from devplace.workloads.common import Built, class_loss, random_ids, random_images

EXPANSION = 4  # channels a bottleneck gives per channel of its 3x3 convolution


@dataclass(frozen=True)
class ResNetConfig:
    """Sizes of a ResNet.

    Attributes:
        blocks: Bottleneck blocks in each of the four stages.
        batch: Images per step; 32 as in Gao et al. (2018), Post, NeurIPS.
        image: Height and width, pixels.
        classes: Classes to tell apart.
        width: Channels of the stem; every stage is a multiple of it.
    """

    blocks: tuple[int, ...] = (3, 4, 6, 3)
    batch: int = 32
    image: int = 224
    classes: int = 1000
    width: int = 64


_SMALL = ResNetConfig(batch=4, image=64, classes=10, width=4)
CONFIGS = {
    "resnet-50": {"full": ResNetConfig(), "small": _SMALL},
    "resnet-152": {
        "full": ResNetConfig(blocks=(3, 8, 36, 3)),
        "small": replace(_SMALL, blocks=(3, 8, 36, 3)),
    },
}


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolution with a shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        channels_out = channels * EXPANSION
        self.reduce = nn.Conv2d(channels_in, channels, 1, bias=False)
        self.reduce_norm = nn.BatchNorm2d(channels)
        self.spatial = nn.Conv2d(channels, channels, 3, stride, 1, bias=False)
        self.spatial_norm = nn.BatchNorm2d(channels)
        self.expand = nn.Conv2d(channels, channels_out, 1, bias=False)
        self.expand_norm = nn.BatchNorm2d(channels_out)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False),
                nn.BatchNorm2d(channels_out),
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map `[batch, channels_in, h, w]` to `[batch, 4*channels, h/stride, w/stride]`."""
        y = self.relu(self.reduce_norm(self.reduce(x)))
        y = self.relu(self.spatial_norm(self.spatial(y)))
        y = self.expand_norm(self.expand(y))
        y += self.shortcut(x)
        return self.relu(y)


class ResNet(nn.Module):
    """Stem, four stages of bottleneck blocks, mean over the image, one linear layer.

    Source: He et al. (2016), Deep Residual Learning for Image Recognition, arXiv 1512.03385, table
    1; differs from it in: a stage halves the image in its first 3x3 convolution, not in its first
    1x1 convolution (as torchvision does).
    """

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, config.width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(config.width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        self.stages = nn.ModuleList()
        channels_in = config.width
        for stage, num_blocks in enumerate(config.blocks):
            channels = config.width * 2**stage
            blocks = []
            for block in range(num_blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                blocks.append(Bottleneck(channels_in, channels, stride))
                channels_in = channels * EXPANSION
            self.stages.append(nn.Sequential(*blocks))
        self.classifier = nn.Linear(channels_in, config.classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images `[batch, 3, h, w]` to logits `[batch, classes]`."""
        x = self.stem(images)
        for stage in self.stages:
            x = stage(x)
        return self.classifier(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


def build(config: ResNetConfig) -> Built:
    """Model, one random batch of images and labels, and the loss."""
    images = random_images(config.batch, config.image)
    labels = random_ids(config.classes, config.batch)
    return ResNet(config), (images, labels), class_loss
