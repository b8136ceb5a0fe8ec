"""Value maps (framework value → recipe value) that several keys or frameworks share."""

from __future__ import annotations

from meshwright.recipes.key_maps.key import Values

RECOMPUTE_SWITCH: Values = {
    "true": "full",
    "false": "none",
    "selective": "selective",
    "on": "full",
    "yes": "full",
    "off": "none",
    "no": "none",
    "null": "none",
}
NULL_IS_0: Values = {"null": "0"}
NULL_IS_1: Values = {"null": "1"}
READ_NULL_AS_1: Values = {"1": "1", "null": "1"}
NULL_IS_NONE: Values = {"null": "none"}
READ_NULL_AS_NONE: Values = {"none": "none", "null": "none"}
READ_NULL_AS_TRUE: Values = {"true": "true", "null": "true"}
NULL_IS_EMPTY: Values = {"null": ""}
FP32_FLAG: Values = {"true": "fp32", "false": "bf16"}
FSDP_FLAG: Values = {"true": "megatron_fsdp", "false": "fsdp2"}
TORCH_DTYPES: Values = {"float32": "fp32", "bfloat16": "bf16", "torch.float32": "fp32", "torch.bfloat16": "bf16"}
OPTIMIZERS: Values = {"adam": "adamw", "dist_muon": "muon"}
DECAY_STYLES: Values = {"WSD": "wsd", "inverse-square-root": "inverse_sqrt"}
KEMPNERFORGE_SCHEDULES: Values = {"constant": "constant", "none": "constant"}
ATTENTION_BACKENDS: Values = {"fused": "cudnn", "unfused": "eager", "local": "sdpa"}
LORA_TARGETS: Values = {
    "linear_qkv": "qkv",
    "linear_proj": "proj",
    "linear_fc1": "fc1",
    "linear_fc2": "fc2",
    "in_proj": "mamba_in",
    "out_proj": "mamba_out",
}
PIPELINE_SCHEDULES: Values = {
    "1F1B": "1f1b",
    "GPipe": "gpipe",
    "Interleaved1F1B": "interleaved_1f1b",
    "LoopedBFS": "looped_bfs",
    "InterleavedZeroBubble": "interleaved_zero_bubble",
    "ZBVZeroBubble": "zbv",
    "DualPipeV": "dualpipe_v",
}
CP_COMM_TYPES: Values = {"p2p": "ring", "all_gather": "allgather", "a2a+p2p": "a2a+ring"}
STRATEGIES: Values = {"megatron_fsdp": "megatron_fsdp", "megatron-fsdp": "megatron_fsdp", "mfsdp": "megatron_fsdp"}
ASYNC_MODES: Values = {"async": "true", "disabled": "false", "async_with_pinned_mem": "true"}
KEMPNERFORGE_LOSSES: Values = {"cross_entropy": "vocab_parallel", "chunked_cross_entropy": "chunked"}
ROUTER_TYPES: Values = {"softmax_topk": "aux_loss", "sigmoid_topk": "bias"}

PRECISION_NAMES: dict[str, dict[tuple[str, str], str]] = {
    "megatron_bridge": {
        ("bf16", "same"): "bf16_mixed",
        ("fp16", "same"): "fp16_mixed",
        ("bf16", "fp8_delayed"): "bf16_with_fp8_delayed_scaling_mixed",
        ("bf16", "fp8_tensor"): "bf16_with_fp8_current_scaling_mixed",
        ("bf16", "fp8_block"): "bf16_with_fp8_subchannel_scaling_mixed",
        ("bf16", "mxfp8"): "bf16_with_mxfp8_mixed",
        ("bf16", "nvfp4"): "bf16_with_nvfp4_mixed",
    },
    "kempnerforge": {
        ("bf16", "same"): "bf16",
        ("fp16", "same"): "fp16",
        ("fp32", "same"): "fp32",
        ("bf16", "fp8_tensor"): "fp8",
    },
}
"""A framework's precision name for each (precision.compute, precision.matmul)."""
