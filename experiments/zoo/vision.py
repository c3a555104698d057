"""Models of torchvision and timm at small size."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from zoo.case import Case, first_of, floats, ints, without_dropout

_TORCHVISION = (
    *("alexnet", "vgg11_bn", "resnet18", "resnext50_32x4d", "squeezenet1_1", "densenet121"),
    *("googlenet", "shufflenet_v2_x0_5", "mobilenet_v2", "mobilenet_v3_small", "mnasnet0_5"),
    *("efficientnet_b0", "regnet_y_400mf", "convnext_tiny", "vit_b_16", "swin_t", "maxvit_t"),
)
_SEGMENTATION = ("lraspp_mobilenet_v3_large", "deeplabv3_mobilenet_v3_large")
_TIMM = (
    *("resnet10t", "convmixer_768_32", "mixer_s32_224", "deit_tiny_patch16_224", "cait_xxs24_224"),
    *("poolformer_s12", "efficientformer_l1", "ghostnet_050", "tinynet_e", "lcnet_035"),
    *("mobilevit_xxs", "edgenext_xx_small", "xcit_nano_12_p16_224", "coat_lite_tiny", "pit_ti_224"),
    *("gmlp_ti16_224", "repvgg_a0", "fastvit_t8", "dla46_c", "hardcorenas_a"),
    *("mambaout_femto", "hiera_tiny_224", "tiny_vit_5m_224", "convnextv2_atto", "efficientvit_b0"),
    *(
        "mobilenetv4_conv_small",
        "starnet_s1",
        "davit_tiny",
        "inception_next_atto",
        "swiftformer_xs",
    ),
    *("shvit_s1", "eva02_tiny_patch14_224", "visformer_tiny", "pvt_v2_b0", "resnest14d"),
)


def _classify(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(first_of(model(x)), y)


def _segment(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x)["out"], y)


def _register_ops() -> None:
    """torchvision's own kernels may be missing beside this torch; its models do without."""
    global _library
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


_library: Any = None


def import_torchvision() -> Any:
    """torchvision, with or without its own kernels."""
    try:
        import torchvision
    except RuntimeError:
        _register_ops()
        for name in [each for each in sys.modules if each.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        import torchvision
    return torchvision


def _torchvision(name: str) -> Case:
    models = import_torchvision().models
    size = {"vit_b_16": 32, "swin_t": 32, "maxvit_t": 64, "alexnet": 64}.get(name, 32)
    options: dict[str, Any] = {}
    if name == "vit_b_16":
        model = models.VisionTransformer(32, 8, 2, 4, 32, 48, num_classes=5)
    elif name == "maxvit_t":
        model = models.MaxVit((64, 64), 8, 4, [8, 8], [1, 1], 8, 0.0, num_classes=5)
    else:
        if name == "googlenet":
            options = {"aux_logits": False, "init_weights": False}
        model = getattr(models, name)(num_classes=5, **options)
    if name == "vgg11_bn":  # its head alone has 120 million parameters
        model.classifier = nn.Linear(25088, 5)
    return Case(
        without_dropout(model.double()).train(), (floats(2, 3, size, size), ints(5, 2)), _classify
    )


def _segmentation(name: str) -> Case:
    segmentation = import_torchvision().models.segmentation
    model = getattr(segmentation, name)(weights=None, weights_backbone=None, num_classes=4)
    batch = (floats(2, 3, 64, 64), ints(4, 2, 64, 64))
    return Case(without_dropout(model.double()).train(), batch, _segment)


def _timm(name: str) -> Case:
    import_torchvision()
    import timm

    model = timm.create_model(name, num_classes=5)
    size = model.default_cfg["input_size"][-1] if model.default_cfg.get("fixed_input_size") else 64
    model = without_dropout(model.double()).train()
    return Case(model, (floats(2, 3, size, size), ints(5, 2)), _classify)


def torchvision_cases() -> dict[str, Callable[[], Case]]:
    """Name -> what makes the case."""
    found = {name: functools.partial(_torchvision, name) for name in _TORCHVISION}
    return found | {name: functools.partial(_segmentation, name) for name in _SEGMENTATION}


def timm_cases() -> dict[str, Callable[[], Case]]:
    """Name -> what makes the case."""
    return {name: functools.partial(_timm, name) for name in _TIMM}
