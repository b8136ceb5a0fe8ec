"""The values that Megatron-LM's parser accepts for flags without a recipe field, or read together with others.

From megatron/training/arguments.py (`choices`), and the Literal and Enum fields of the dataclasses that it makes flags
of: core/transformer/transformer_config.py, training/config/*.py; commit d98e8a6, 2026-08-22. Values that releases since
0.9 accepted and later ones do not (zarr), and the linear loss of the dev branch, are listed too. Case matters.
"""

from __future__ import annotations

_TABLE = """
async_strategy: nvrx mcore
bert_embedder_type: megatron huggingface
ckpt_convert_format: torch torch_dist zarr
ckpt_format: torch torch_dist torch_dcp fsdp_dtensor zarr
ckpt_fully_parallel_load_exchange_algo: broadcast gather_rounds gather_object
ckpt_fully_parallel_load_process_group: dp ep_dp
ckpt_fully_parallel_save_process_group: dp ep_dp
cross_entropy_fusion_impl: native te linear
dataloader_type: single cyclic external
dist_ckpt_strictness: assume_ok_unexpected log_unexpected log_all raise_unexpected raise_all return_unexpected
    return_all ignore_all
distributed_backend: nccl gloo
dsa_kernel_backend: none tilelang cudnn
empty_unused_memory_level: 0 1 2
error_injection_type: correct_result transient_error persistent_error
exp_avg_sq_dtype: fp32 fp16 bf16 fp8
experimental_attention_variant: gdn gdn2 dsa gated_delta_net
flash_attention_version: 2 3 4
fp4_recipe: nvfp4 custom
fp8_amax_compute_algo: most_recent max
inference_dynamic_batching_async_sched_mode: legacy async
inference_dynamic_batching_cuda_graph_sizing_distribution: exponential linear
inference_dynamic_batching_logprobs_mode: raw_logprobs processed_logprobs
inference_dynamic_batching_prefix_caching_coordinator_policy: longest_prefix first_prefix_block load_balanced
    round_robin
inference_dynamic_batching_prefix_caching_eviction_policy: ref_zero lru
inference_dynamic_batching_sampling_backend: torch flashinfer
inference_dynamic_batching_unified_memory_level: 0 1
inference_grouped_gemm_backend: flashinfer torch vllm auto te
inference_moe_token_dispatcher_type: nccl nvls
inprocess_granularity: node rank
kitchen_attention_backend: sdpa fa
logits_save_dtype: fp16 bf16 fp32
mamba_inference_conv_states_dtype: bf16 fp16 fp32
mamba_inference_ssm_states_dtype: bf16 fp16 fp32
mamba_training_ssm_states_dtype: fp32 bf16
mask_type: random row
megatron_fsdp_grad_comm_dtype: fp32 fp16 bf16 auto
megatron_fsdp_main_grads_dtype: fp32 bf16 fp16 auto
megatron_fsdp_main_params_dtype: fp32 bf16 fp16 auto
megatron_fsdp_version: 1 2
moe_flex_dispatcher_backend: deepep hybridep ncclep
moe_router_load_balancing_type: aux_loss seq_aux_loss global_aux_loss sinkhorn quantile_balancing none
moe_router_score_function: softmax sigmoid sqrtsoftplus
moe_token_drop_policy: probs position
muon_fp32_matmul_prec: low medium high
muon_scalar_optimizer: adam lion
muon_scale_mode: spectral unit_rms_norm shape_scaling
muon_tp_mode: blockwise duplicated distributed
no_weight_decay_cond_type: apply_wd_to_qk_layernorm
non_persistent_ckpt_type: global local in_memory
non_persistent_local_ckpt_algo: fully_parallel atomic
normalization: LayerNorm RMSNorm
outer_dp_sharding_strategy: no_shard optim
pipeline_model_parallel_comm_backend: nccl ucc
position_embedding_type: learned_absolute rope yarn mrope relative none
refit_method: nccl gloo nvshmem
rerun_mode: disabled validate_results report_stats
rl_consumption_granularity: R G B
rl_inference_model_unified_memory_level: 0 1
rl_kv_cache_management_mode: persist offload recompute
rl_sequence_packing_algo: fifo round-robin
rl_submission_granularity: R G B
rope_type: rope yarn
sharp_enabled_group: dp dp_replica
softmax_type: vanilla off-by-one learnable
swin_backbone_type: tiny base h3
symmetric_ar_type: two_shot one_shot multimem_all_reduce
tiktoken_pattern: v1 v2
timing_log_level: 0 1 2
timing_log_option: max minmax all
tp_comm_bootstrap_backend: nccl mpi gloo
transformer_impl: local transformer_engine inference_optimized
vision_backbone_type: vit mit swin
vision_pretraining_type: classify inpaint dino
weight_decay_incr_style: constant linear cosine
"""

FLAG_CHOICES: dict[str, tuple[str, ...]] = {
    name: tuple(values.split())
    for name, _, values in (row.partition(":") for row in _TABLE.replace("\n    ", " ").strip().splitlines())
}
