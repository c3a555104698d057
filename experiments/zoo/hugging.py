"""Models of Transformers at small size."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from zoo.case import Case, ints, square, without_dropout
from zoo.vision import import_torchvision

SMALL: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "dim": 32,
    "embedding_size": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "d_ff": 48,
    "d_kv": 8,
    "head_dim": 8,
    "hidden_dim": 48,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_decoder_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "sliding_window": 4,
    "state_size": 8,
    "image_size": 32,
    "patch_size": 8,
    "num_channels": 3,
    "layerdrop": 0.0,
}
"""What every configuration gets of what it knows."""


def _config(kind: Any, over: dict[str, Any]) -> Any:
    """A small configuration of a class."""
    known = set(inspect.signature(kind.__init__).parameters) | set(
        getattr(kind, "__annotations__", {})
    )
    for base in kind.__mro__:
        known |= set(getattr(base, "__annotations__", {}))
    known |= {name for name in SMALL if hasattr(kind(), name)}
    computed = {name for name in SMALL if isinstance(getattr(kind, name, None), property)}
    small = {name: value for name, value in SMALL.items() if name in known - computed}
    return kind(**{name: v for name, v in {**small, **over}.items() if v is not None})


def tokens(rows: int = 2, length: int = 8) -> torch.Tensor:
    """Text, without special tokens."""
    return ints(60, rows, length) + 3


def _batch(kind: str) -> dict[str, torch.Tensor]:
    """A batch by the kind of model."""
    if kind == "lm":
        text = tokens()
        return {"input_ids": text, "labels": text}
    if kind == "padded":
        mask = torch.tensor([[1] * 8, [1] * 5 + [0] * 3])
        return {"input_ids": tokens(), "attention_mask": mask, "labels": ints(2, 2)}
    if kind == "class":
        return {"input_ids": tokens(), "labels": ints(2, 2)}
    if kind == "seq2seq":
        return {"input_ids": tokens(), "labels": tokens(2, 6)}
    if kind == "image":
        return {"pixel_values": torch.randn(2, 3, 32, 32).double(), "labels": ints(2, 2)}
    if kind == "pixels":
        return {"pixel_values": torch.randn(2, 3, 32, 32).double()}
    if kind == "masked":
        mask = torch.zeros(2, 16, dtype=torch.bool)
        mask[:, ::3] = True
        return {"pixel_values": torch.randn(2, 3, 32, 32).double(), "bool_masked_pos": mask}
    if kind == "audio":
        return {"input_values": torch.randn(2, 1600).double(), "labels": ints(2, 2)}
    if kind == "text":
        return {"input_ids": tokens()}
    raise ValueError(kind)


def _make(name: str, kind: str, over: dict[str, Any]) -> Case:
    if find_spec("torchvision"):
        import_torchvision()
    import transformers

    model_kind = getattr(transformers, name)
    config = _config(model_kind.config_class, over)
    if kind == "seq2seq":
        config.decoder_start_token_id = config.pad_token_id = 0
    for key in list(vars(config)):
        is_rate = "drop" in key and isinstance(getattr(config, key), float)
        if is_rate:
            setattr(config, key, 0.0)
    model = without_dropout(model_kind(config).double()).train()
    batch = _batch(kind)
    loss_fn = None if "labels" in batch or name in _WITH_LOSS else square
    if name in _FLOAT32:
        return Case(model.float(), batch, loss_fn, dtype=torch.float32)
    return Case(model, batch, loss_fn, draws=name in _DRAWS)


_LINES = """
lm: LlamaForCausalLM MistralForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM GemmaForCausalLM
lm: Gemma2ForCausalLM PhiForCausalLM Phi3ForCausalLM GPT2LMHeadModel GPTNeoXForCausalLM
lm: OPTForCausalLM BloomForCausalLM FalconForCausalLM StableLmForCausalLM OlmoForCausalLM
lm: Olmo2ForCausalLM CohereForCausalLM GraniteForCausalLM Starcoder2ForCausalLM MptForCausalLM
lm: XGLMForCausalLM PersimmonForCausalLM NemotronForCausalLM GlmForCausalLM HeliumForCausalLM
lm: SmolLM3ForCausalLM BioGptForCausalLM CodeGenForCausalLM
lm: MixtralForCausalLM Qwen2MoeForCausalLM Qwen3MoeForCausalLM OlmoeForCausalLM
lm: GptOssForCausalLM PhimoeForCausalLM
lm: MambaForCausalLM Mamba2ForCausalLM FalconMambaForCausalLM RecurrentGemmaForCausalLM
lm: BertForMaskedLM AlbertForMaskedLM ElectraForMaskedLM RobertaForMaskedLM MPNetForMaskedLM
lm: FNetForMaskedLM RoFormerForMaskedLM MobileBertForMaskedLM SqueezeBertForMaskedLM
lm: DistilBertForMaskedLM DebertaV2ForMaskedLM NystromformerForMaskedLM EsmForMaskedLM
padded: BertForSequenceClassification XLNetForSequenceClassification
padded: DebertaForSequenceClassification FunnelForSequenceClassification
padded: ConvBertForSequenceClassification ModernBertForSequenceClassification
padded: CanineForSequenceClassification
seq2seq: T5ForConditionalGeneration BartForConditionalGeneration MBartForConditionalGeneration
seq2seq: PegasusForConditionalGeneration MarianMTModel M2M100ForConditionalGeneration
seq2seq: BlenderbotSmallForConditionalGeneration ProphetNetForConditionalGeneration
seq2seq: LongT5ForConditionalGeneration SwitchTransformersForConditionalGeneration
seq2seq: LEDForConditionalGeneration
image: ViTForImageClassification DeiTForImageClassification BeitForImageClassification
image: SwinForImageClassification Swinv2ForImageClassification ConvNextForImageClassification
image: ResNetForImageClassification RegNetForImageClassification PoolFormerForImageClassification
image: MobileNetV2ForImageClassification MobileViTForImageClassification
image: Dinov2ForImageClassification LevitForImageClassification CvtForImageClassification
image: PvtV2ForImageClassification SegformerForImageClassification HieraForImageClassification
masked: BeitForMaskedImageModeling ViTForMaskedImageModeling
pixels: ViTMAEForPreTraining DetrForObjectDetection YolosForObjectDetection
audio: Wav2Vec2ForSequenceClassification HubertForSequenceClassification
audio: WavLMForSequenceClassification
lm: Gemma3ForCausalLM Glm4ForCausalLM Ernie4_5ForCausalLM Lfm2ForCausalLM Exaone4ForCausalLM
lm: ModernBertDecoderForCausalLM RwkvForCausalLM DiffLlamaForCausalLM GPTBigCodeForCausalLM
lm: Qwen3NextForCausalLM DeepseekV3ForCausalLM JambaForCausalLM BambaForCausalLM
lm: Zamba2ForCausalLM MiniMaxForCausalLM GraniteMoeForCausalLM NemotronHForCausalLM
padded: BigBirdForSequenceClassification PerceiverForSequenceClassification
padded: YosoForSequenceClassification LukeForSequenceClassification
seq2seq: UMT5ForConditionalGeneration BigBirdPegasusForConditionalGeneration
image: FocalNetForImageClassification SwiftFormerForImageClassification
pixels: DINOv3ViTModel DPTForDepthEstimation GLPNForDepthEstimation Swin2SRForImageSuperResolution
audio: SEWDForSequenceClassification Wav2Vec2ConformerForSequenceClassification
"""
_FLOAT32 = (
    *("MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM", "OlmoeForCausalLM"),
    *("GptOssForCausalLM", "PhimoeForCausalLM"),
    *("XGLMForCausalLM", "CanineForSequenceClassification"),
    *("SwitchTransformersForConditionalGeneration", "Qwen3NextForCausalLM"),
    *("MiniMaxForCausalLM", "GraniteMoeForCausalLM", "NemotronHForCausalLM", "JambaForCausalLM"),
)
"""Grouped products of experts have no kernel in float64; XGLM and Canine make masks in float32,
where the least float64 is -inf; the router of SwitchTransformers casts its layer to float32.
"""
_WITH_LOSS = ("ViTForMaskedImageModeling",)
"""They have a loss without labels."""
_DRAWS = ("ViTMAEForPreTraining",)
"""They draw what is masked."""
_SWIN = {
    "num_layers": None,
    "num_attention_heads": None,
    "patch_size": 2,
    "embed_dim": 8,
    "window_size": 4,
    "depths": [1, 1],
    "num_heads": [1, 2],
}
_OVER: dict[str, dict[str, Any]] = {
    "BloomForCausalLM": {"hidden_size": 32},
    "MptForCausalLM": {"d_model": 32},
    "MobileBertForMaskedLM": {"intra_bottleneck_size": 16, "num_feedforward_networks": 1},
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
    "SwinForImageClassification": _SWIN,
    "Swinv2ForImageClassification": _SWIN,
    "ConvNextForImageClassification": {
        "patch_size": 4,
        "num_hidden_layers": None,
        "hidden_sizes": [8, 8, 16, 16],
        "depths": [1, 1, 1, 1],
    },
    "ResNetForImageClassification": {
        "embedding_size": 8,
        "hidden_sizes": [8, 16],
        "depths": [1, 1],
        "layer_type": "basic",
    },
    "RegNetForImageClassification": {
        "embedding_size": 8,
        "hidden_sizes": [8, 16],
        "depths": [1, 1],
        "groups_width": 8,
    },
    "PoolFormerForImageClassification": {
        "patch_size": 16,
        "hidden_sizes": [8, 8, 16, 16],
        "depths": [1, 1, 1, 1],
    },
    "PvtV2ForImageClassification": {
        "hidden_sizes": [8, 8, 16, 16],
        "depths": [1, 1, 1, 1],
        "num_attention_heads": [1, 1, 2, 2],
        "patch_sizes": [7, 3, 3, 3],
    },
    "SegformerForImageClassification": {
        "hidden_sizes": [8, 8, 16, 16],
        "depths": [1, 1, 1, 1],
        "num_attention_heads": [1, 1, 2, 2],
        "patch_sizes": [7, 3, 3, 3],
    },
    "LevitForImageClassification": {
        "patch_size": 16,
        "hidden_sizes": [16, 16, 16],
        "num_attention_heads": [2, 2, 2],
        "depths": [1, 1, 1],
        "key_dim": [8, 8, 8],
    },
    "CvtForImageClassification": {
        "drop_path_rate": [0.0, 0.0, 0.0],
        "patch_sizes": [7, 3, 3],
        "embed_dim": [8, 16, 16],
        "num_heads": [1, 1, 2],
        "depth": [1, 2, 3],
    },
    "HieraForImageClassification": {
        "embed_dim": 8,
        "image_size": [32, 32],
        "patch_size": [7, 7],
        "depths": [1, 1],
        "num_heads": [1, 1],
        "masked_unit_size": [4, 4],
        "query_stride": [2, 2],
        "num_query_pool": 1,
    },
    "DetrForObjectDetection": {
        "use_timm_backbone": False,
        "use_pretrained_backbone": False,
        "backbone": None,
        "num_queries": 4,
    },
    "YolosForObjectDetection": {"image_size": [32, 32], "num_detection_tokens": 4},
    **{
        name: {
            "conv_dim": (8, 8),
            "conv_kernel": (8, 4),
            "conv_stride": (8, 4),
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 2,
            "apply_spec_augment": False,
            "mask_time_prob": 0.0,
            "classifier_proj_size": 8,
            "hidden_size": 32,
        }
        for name in (
            "Wav2Vec2ForSequenceClassification",
            "HubertForSequenceClassification",
            "WavLMForSequenceClassification",
            "Wav2Vec2ConformerForSequenceClassification",
            "SEWDForSequenceClassification",
        )
    },
    "FunnelForSequenceClassification": {"block_sizes": [1, 1], "d_inner": 48, "d_head": 8},
    "LEDForConditionalGeneration": {
        "attention_window": 4,
        "max_encoder_position_embeddings": 64,
        "max_decoder_position_embeddings": 64,
    },
    "RecurrentGemmaForCausalLM": {
        "block_types": ["recurrent", "attention"],
        "lru_width": 32,
        "use_cache": False,  # what a training step caches would leak into the next
    },
    "SwitchTransformersForConditionalGeneration": {
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
    },
    "NystromformerForMaskedLM": {"num_landmarks": 4, "segment_means_seq_len": 8},
    "CodeGenForCausalLM": {"n_positions": 64, "rotary_dim": 4},
    "ViTForMaskedImageModeling": {"encoder_stride": 8},
    "ViTMAEForPreTraining": {
        "decoder_hidden_size": 32,
        "decoder_num_hidden_layers": 1,
        "decoder_num_attention_heads": 4,
        "decoder_intermediate_size": 48,
    },
    "EsmForMaskedLM": {"position_embedding_type": "rotary", "mask_token_id": 3},
    "BeitForMaskedImageModeling": {"vocab_size": 67, "use_mask_token": True},
    "Qwen3NextForCausalLM": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "DeepseekV3ForCausalLM": {
        "num_key_value_heads": 4,
        "head_dim": None,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "first_k_dense_replace": 2,
    },
    "JambaForCausalLM": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 1,
        "use_mamba_kernels": False,
        "mamba_dt_rank": 4,
    },
    "BambaForCausalLM": {
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_n_groups": 1,
        "mamba_d_state": 8,
        "mamba_chunk_size": 4,
        "attn_layer_indices": [1],
    },
    "Zamba2ForCausalLM": {
        "layers_block_type": ["mamba", "hybrid"],
        "mamba_ngroups": 1,
        "n_mamba_heads": 8,
        "mamba_d_state": 8,
        "mamba_headdim": 8,
        "chunk_size": 4,
        "num_mem_blocks": 1,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
    },
    "MiniMaxForCausalLM": {"block_size": 4},
    "NemotronHForCausalLM": {
        "num_hidden_layers": None,
        "layers_block_type": ["mamba", "attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 1,
        "chunk_size": 4,
        "ssm_state_size": 8,
    },
    # What is set in the first step of a short text alone: block-sparse attention is replaced.
    "BigBirdForSequenceClassification": {"attention_type": "original_full"},
    "BigBirdPegasusForConditionalGeneration": {"attention_type": "original_full"},
    "PerceiverForSequenceClassification": {
        "num_latents": 4,
        "d_latents": 16,
        "num_self_attends_per_block": 1,
        "num_cross_attention_heads": 2,
        "num_self_attention_heads": 2,
    },
    "FocalNetForImageClassification": {
        "embed_dim": 8,
        "hidden_sizes": [8, 16],
        "depths": [1, 1],
        "focal_levels": [2, 2],
        "focal_windows": [3, 3],
        "patch_size": 4,
        "num_layers": None,
    },
    "SwiftFormerForImageClassification": {"embed_dims": [8, 8, 16, 16], "depths": [1, 1, 1, 1]},
    "DPTForDepthEstimation": {
        "num_hidden_layers": 4,
        "backbone_out_indices": [0, 1, 2, 3],
        "neck_hidden_sizes": [8, 8, 8, 8],
        "fusion_hidden_size": 8,
    },
    "GLPNForDepthEstimation": {
        "hidden_sizes": [8, 8, 16, 16],
        "depths": [1, 1, 1, 1],
        "num_attention_heads": [1, 1, 2, 2],
        "decoder_hidden_size": 8,
    },
    "Swin2SRForImageSuperResolution": {
        **_SWIN,
        "patch_size": 1,
        "embed_dim": 16,
        "num_heads": [2, 2],
        "num_hidden_layers": None,
    },
}


def cases() -> dict[str, Callable[[], Case]]:
    """Name of the class -> what makes the case."""
    found: dict[str, Callable[[], Case]] = {}
    for line in _LINES.strip().splitlines():
        kind, _, names = line.partition(":")
        for name in names.split():
            found[name] = functools.partial(_make, name, kind, _OVER.get(name, {}))
    return found
