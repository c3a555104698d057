"""Ops of steps captured on GPUs that a CPU beside them cannot run as they do.

Source: native_functions.yaml of PyTorch 2.13, ops with a CUDA form and no CPU form, and ops tagged
nondeterministic_seeded; a test compares with the torch that is installed. CPUs have had
`_philox_key_*` and `_scaled_grouped_mm_v2` since 2.14.
"""

from __future__ import annotations

GPU_ONLY_OPS = (
    "aten.*cudnn*",
    "aten.*miopen*",
    "aten._thnn_fused_*",
    "aten._scaled_dot_product_flash_attention.*",
    "aten._scaled_dot_product_flash_attention_backward.*",
    "aten._scaled_dot_product_efficient_attention*",
    "aten._flash_attention_*",
    "aten._efficient_attention_*",
    "aten._fused_rms_norm_backward.*",
    "aten._masked_scale.*",
    "aten._conv_depthwise2d.*",
    "aten.conv_depthwise3d.*",
    "aten.batch_norm_stats.*",
    "aten.batch_norm_elemt.*",
    "aten.batch_norm_gather_stats*",
    "aten.batch_norm_backward_reduce.*",
    "aten.batch_norm_backward_elemt.*",
    "aten.*mm.dtype*",
    "aten._scaled_grouped_mm*",
    "aten._weight_int4pack_mm.*",
    "aten._convert_weight_to_int4pack.*",
    "aten._mixed_dtypes_linear.*",
    "aten._cslt_*",
    "aten.*sparse_semi_structured*",
    "aten._triton_*",
    "aten._philox_key_*",
)
# A CPU draws other numbers than a GPU from the same seed.
RANDOM_OPS = (
    "aten.native_dropout.*",
    "aten._fused_dropout.*",
    "aten.bernoulli*",
    "aten.rand*",
    "aten.normal*",
    "aten.uniform*",
    "aten.multinomial.*",
    "aten.exponential*",
    "aten.rrelu_with_noise.*",
    "aten.rrelu_with_noise_functional.*",
    "aten._standard_gamma.*",
    "aten._sample_dirichlet.*",
    "aten.poisson.*",
    "aten.binomial.*",
    "aten.cauchy*",
    "aten.log_normal*",
    "aten.geometric*",
)
OPS_OFF_HOST = GPU_ONLY_OPS + RANDOM_OPS
