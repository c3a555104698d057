"""Models of Transformers with several inputs: images and text, speech and text, time series."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from zoo.case import Case, floats, ints, without_dropout
from zoo.hugging import tokens
from zoo.vision import import_torchvision

_TEXT = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_IMAGE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
_VIDEO = {**_IMAGE, "num_frames": 4, "num_labels": 2}
_SPEECH = {
    "vocab_size": 67,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_target_positions": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}
_SERIES = {
    "prediction_length": 3,
    "context_length": 8,
    "lags_sequence": [1, 2],
    "num_time_features": 1,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
}
_PATCHES = {
    "num_input_channels": 2,
    "context_length": 16,
    "patch_length": 4,
    "patch_stride": 4,
    "prediction_length": 4,
    "d_model": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "num_layers": 1,
    "ffn_dim": 16,
}
_LANGUAGE = {**_TEXT, "num_key_value_heads": 2, "head_dim": 8}
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "CLIPModel": ("CLIPConfig", {"text_config": _TEXT, "vision_config": _IMAGE}),
    "SiglipModel": ("SiglipConfig", {"text_config": _TEXT, "vision_config": _IMAGE}),
    "BlipForConditionalGeneration": (
        "BlipConfig",
        {
            "text_config": {**_TEXT, "encoder_hidden_size": 32, "sep_token_id": 2},
            "vision_config": _IMAGE,
        },
    ),
    "LlavaForConditionalGeneration": (
        "LlavaConfig",
        {
            "text_config": {**_LANGUAGE, "model_type": "llama"},
            "vision_config": {**_IMAGE, "model_type": "clip_vision_model"},
            "image_token_index": 66,
            "vision_feature_layer": -1,
        },
    ),
    "PaliGemmaForConditionalGeneration": (
        "PaliGemmaConfig",
        {
            "text_config": {**_LANGUAGE, "model_type": "gemma"},
            "vision_config": {**_IMAGE, "model_type": "siglip_vision_model"},
            "image_token_index": 66,
            "projection_dim": 32,
        },
    ),
    "VisionEncoderDecoderModel": (
        "VisionEncoderDecoderConfig",
        {
            "encoder": {**_IMAGE, "model_type": "vit"},
            "decoder": {
                **_TEXT,
                "model_type": "bert",
                "is_decoder": True,
                "add_cross_attention": True,
            },
            "decoder_start_token_id": 1,
            "pad_token_id": 0,
        },
    ),
    "LayoutLMv3ForSequenceClassification": (
        "LayoutLMv3Config",
        {**_TEXT, "input_size": 32, "patch_size": 8, "coordinate_size": 6, "shape_size": 4},
    ),
    "ViltForImagesAndTextClassification": (
        "ViltConfig",
        {**_TEXT, "image_size": 32, "patch_size": 8, "num_images": 1, "num_labels": 2},
    ),
    "WhisperForConditionalGeneration": (
        "WhisperConfig",
        {**_SPEECH, "num_mel_bins": 8, "max_source_positions": 20},
    ),
    "Speech2TextForConditionalGeneration": (
        "Speech2TextConfig",
        {
            **_SPEECH,
            "input_feat_per_channel": 8,
            "conv_channels": 16,
            "max_source_positions": 40,
        },
    ),
    "VideoMAEForVideoClassification": ("VideoMAEConfig", {**_VIDEO, "tubelet_size": 2}),
    "VideoMAEForPreTraining": (
        "VideoMAEConfig",
        {
            **_VIDEO,
            "tubelet_size": 2,
            "decoder_hidden_size": 32,
            "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 4,
            "decoder_intermediate_size": 48,
        },
    ),
    "TimesformerForVideoClassification": ("TimesformerConfig", _VIDEO),
    "VivitForVideoClassification": ("VivitConfig", {**_VIDEO, "tubelet_size": [2, 8, 8]}),
    "TimeSeriesTransformerForPrediction": ("TimeSeriesTransformerConfig", _SERIES),
    "InformerForPrediction": ("InformerConfig", _SERIES),
    "PatchTSTForPrediction": ("PatchTSTConfig", _PATCHES),
    "PatchTSMixerForPrediction": ("PatchTSMixerConfig", _PATCHES),
    "DecisionTransformerModel": (
        "DecisionTransformerConfig",
        {
            "state_dim": 4,
            "act_dim": 2,
            "hidden_size": 32,
            "max_ep_len": 20,
            "n_layer": 2,
            "n_head": 4,
        },
    ),
}
"""Model -> its configuration."""


def _images() -> torch.Tensor:
    return floats(2, 3, 32, 32)


def _videos() -> dict[str, torch.Tensor]:
    return {"pixel_values": floats(2, 4, 3, 32, 32), "labels": ints(2, 2)}


def _captions() -> dict[str, torch.Tensor]:
    text = tokens()
    return {"input_ids": text, "pixel_values": _images(), "labels": text}


def _pictures_in_text() -> dict[str, torch.Tensor]:
    text = torch.cat([torch.full((2, 16), 66), tokens()], 1)
    kinds, mask = torch.zeros_like(text), torch.ones_like(text)
    return _captions() | {
        "input_ids": text,
        "labels": text,
        "token_type_ids": kinds,
        "attention_mask": mask,
    }


def _series() -> dict[str, torch.Tensor]:
    return {
        "past_values": floats(2, 10),
        "past_time_features": floats(2, 10, 1),
        "past_observed_mask": torch.ones(2, 10).double(),
        "future_values": floats(2, 3),
        "future_time_features": floats(2, 3, 1),
    }


def _batch(name: str) -> dict[str, torch.Tensor]:
    """A batch for a model."""
    if name in ("CLIPModel", "SiglipModel"):
        return {"input_ids": tokens(), "pixel_values": _images()}
    if name == "BlipForConditionalGeneration":
        return _captions()
    if name == "PaliGemmaForConditionalGeneration":
        return _pictures_in_text()
    if name == "LlavaForConditionalGeneration":
        return {k: v for k, v in _pictures_in_text().items() if k != "token_type_ids"}
    if name == "VisionEncoderDecoderModel":
        return {"pixel_values": _images(), "labels": tokens()}
    if name == "LayoutLMv3ForSequenceClassification":
        boxes = ints(1000, 2, 8, 4).sort(-1).values
        images = {"pixel_values": _images(), "labels": ints(2, 2)}
        return {"input_ids": tokens(), "bbox": boxes, **images}
    if name == "ViltForImagesAndTextClassification":
        return {"input_ids": tokens(), "pixel_values": _images()[:, None], "labels": ints(2, 2)}
    if name == "WhisperForConditionalGeneration":
        return {"input_features": floats(2, 8, 40), "labels": tokens(2, 6)}
    if name == "Speech2TextForConditionalGeneration":
        return {"input_features": floats(2, 40, 8), "labels": tokens(2, 6)}
    if name == "VideoMAEForPreTraining":
        masked = (torch.arange(32) % 2 == 0)[None].repeat(2, 1)
        return {"pixel_values": floats(2, 4, 3, 32, 32), "bool_masked_pos": masked}
    if "ForVideo" in name:
        return _videos()
    if name.startswith("Patch"):
        return {"past_values": floats(2, 16, 2), "future_values": floats(2, 4, 2)}
    if name == "DecisionTransformerModel":
        return {
            "states": floats(2, 5, 4),
            "actions": floats(2, 5, 2),
            "rewards": floats(2, 5, 1),
            "returns_to_go": floats(2, 5, 1),
            "timesteps": ints(20, 2, 5),
            "attention_mask": torch.ones(2, 5, dtype=torch.long),
        }
    return _series()


def _contrastive(model: nn.Module, **inputs: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(**inputs, return_loss=True).loss
    return loss


def _actions(model: nn.Module, **inputs: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(**inputs).action_preds - inputs["actions"]).square().mean()
    return loss


_LOSSES = {
    "CLIPModel": _contrastive,
    "SiglipModel": _contrastive,
    "DecisionTransformerModel": _actions,
}


def _without_dropout(config: Any) -> None:
    """Set the rates of a configuration and of those in it to 0."""
    for key, value in list(vars(config).items()):
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
        if hasattr(value, "to_dict"):
            _without_dropout(value)


def _make(name: str) -> Case:
    if find_spec("torchvision"):
        import_torchvision()
    import transformers

    kind, options = _CONFIGS[name]
    config = getattr(transformers, kind)(**options)
    _without_dropout(config)
    model = without_dropout(getattr(transformers, name)(config).double()).train()
    return Case(model, _batch(name), _LOSSES.get(name), draws=name == "InformerForPrediction")


def cases() -> dict[str, Callable[[], Case]]:
    """Name of the class -> what makes the case."""
    return {name: functools.partial(_make, name) for name in _CONFIGS}
