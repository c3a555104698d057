"""Imports what models of the zoo need, once for all processes that are forked from this one."""

from __future__ import annotations

from importlib.util import find_spec

import torch

import devplace as dp
from zoo.vision import import_torchvision

torch.set_num_threads(1)
if find_spec("torchvision"):
    import_torchvision()
if find_spec("timm"):
    import timm

    assert timm.__version__
if find_spec("transformers"):
    from transformers import PreTrainedModel

    assert PreTrainedModel
dp.capture(torch.nn.Linear(2, 2), torch.ones(1, 2))  # it imports parts of torch
