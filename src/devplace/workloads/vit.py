"""Vision Transformer B/16, 86.6 million parameters."""
# mypy: allow-subclassing-any

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from devplace.errors import InputError
from devplace.workloads.common import (
    Built,
    class_loss,
    init_transformer,
    random_ids,
    random_images,
)
from devplace.workloads.transformer import Block, BlockConfig

NORM_EPS = 1e-6  # released ViT code


@dataclass(frozen=True)
class VitConfig:
    """Sizes of a Vision Transformer.

    Attributes:
        layers: Transformer blocks.
        width: Features per token.
        heads: Attention heads.
        feed_forward: Inner features of a block.
        batch: Images per step; 64 lets the step fit one ordinary GPU.
        image: Height and width, pixels.
        patch: Height and width of what becomes one token, pixels.
        classes: Classes to tell apart.
        dropout: On embeddings, attention weights and both branches of a block; 0.0 as in the
            released configuration of B/16.
        fused_attention: Attention as one operation instead of its parts.
    """

    layers: int = 12
    width: int = 768
    heads: int = 12
    feed_forward: int = 3072
    batch: int = 64
    image: int = 224
    patch: int = 16
    classes: int = 1000
    dropout: float = 0.0
    fused_attention: bool = True


_SMALL = VitConfig(width=16, heads=4, feed_forward=32, batch=4, image=12, patch=4, classes=10)
CONFIGS = {"vit-b-16": {"full": VitConfig(), "small": _SMALL}}


class Vit(nn.Module):
    """Patches and a class token, blocks, and one linear layer on what the class token became.

    Source: Dosovitskiy et al. (2021), An Image is Worth 16x16 Words, arXiv 2010.11929, section 3.1
    and table 1, released code; differs from it in: one linear layer as the head, as the paper has
    it for fine-tuning, and separate products for query, key and value.
    """

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        width = config.width
        block = BlockConfig(
            width,
            config.heads,
            config.feed_forward,
            config.dropout,
            causal=False,
            fused_attention=config.fused_attention,
            pre_norm=True,
            norm_eps=NORM_EPS,
        )
        num_tokens = (config.image // config.patch) ** 2 + 1
        self.patches = nn.Conv2d(3, width, config.patch, config.patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.position_embedding = nn.Parameter(torch.empty(num_tokens, width).normal_(std=0.02))
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(block) for _ in range(config.layers))
        self.norm = nn.LayerNorm(width, NORM_EPS)
        self.head = nn.Linear(width, config.classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images `[batch, 3, h, w]` to logits `[batch, classes]`."""
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        first = self.class_token.expand(tokens.shape[0], -1, -1).to(tokens.dtype)
        x = self.dropout(torch.cat([first, tokens], 1) + self.position_embedding)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def build(config: VitConfig) -> Built:
    """Model, one random batch of images and labels, and the loss.

    Raises:
        InputError: Patches do not fill the image, or heads do not divide the width.
    """
    if config.image % config.patch:
        raise InputError(
            f"patch must divide image, got patches of {config.patch} pixels and an image of "
            f"{config.image} pixels."
        )
    if config.width % config.heads:
        raise InputError(
            f"heads must divide width, got {config.heads} heads and width {config.width}."
        )
    images = random_images(config.batch, config.image)
    labels = random_ids(config.classes, config.batch)
    return init_transformer(Vit(config)), (images, labels), class_loss
