"""Megatron-LM flags that megatron_lm_flags.tsv does not have: of its dev branch, and of other releases.

They are listed because Megatron's parser rejects unknown flags and abbreviations. Names have underscores and no
leading dashes. Config fields without a flag are not listed.
"""

from __future__ import annotations

from typing import Literal

FlagType = Literal["flag", "str", "list"]

SWITCH_FLAGS = """
apply_dsa_kernel_fusion ckpt_fully_parallel_load_replicate_local ckpt_fully_parallel_save_replicate_local
csa_dense_mode cuda_graph_dynamic_microbatches dense_grouped_gemm dynamic_context_parallel enable_gloo_process_groups
enable_hyper_connections fallback_to_eager_attn gdn_pre_gated_delta_rule_fusion head_wise_attn_gate kda_safe_gate
log_moe_overload_factor log_per_layer_resource_usage mhc_recompute_attn_cuda_graph_split
moe_hybridep_pad_variable_tokens moe_ncclep_static_shape moe_ncclep_use_symm_mem mrope_interleaved
no_add_position_embedding no_moe_router_aux_loss_fusion no_stream_ckpt_dequant no_use_gloo_process_groups
no_use_mamba_mem_eff_path use_flashinfer_fused_rope use_fused_mhc
"""

SINGLE_VALUE_FLAGS = """
cp_partition_mode csa_compress_ratio_for_c csa_compress_ratio_for_h csa_compress_rotary_base csa_window_size
dsa_indexer_weights_proj_output_dtype exit_signal gated_attention_proj_granularity gdn_conv_pad_alignment
inference_wandb_logging_step_interval kda_lower_bound linear_attention_type linear_cp_mode
log_per_layer_resource_usage_interval min_dynamic_context_parallel_size moe_n_hash_layers
mtp_loss_scaling_factor_decay mtp_loss_scaling_factor_decay_start muon_weight_decay muon_weight_decay_method
num_residual_streams o_groups o_lora_rank original_max_position_embeddings pad_packed_seq_alignment
retriever_seq_length rotary_base_per_layer sequence_packing_scheduler thd_max_packed_sequences thd_tail_padding_policy
tokenizer_library
"""

LIST_FLAGS = """
csa_compress_ratios
"""

REMOVED_FLAGS: dict[tuple[str, FlagType], str] = {
    ("0.16", "flag"): """
        disable_chunked_prefill inference_dynamic_batching_enable_prefix_caching langrl_external_server legacy_tokenizer
        moe_use_legacy_grouped_gemm retro_add_retriever retro_no_verify_neighbor_count return_log_probs
        rl_calculate_intra_group_similarity rl_offload_kv_cache_during_training rl_remove_kv_cache_during_training
        rl_reset_cuda_graphs skip_prompt_log_probs
    """,
    ("0.16", "str"): """
        grpo_default_temperature grpo_default_top_p hybrid_attention_ratio hybrid_mlp_ratio
        inference_dynamic_batching_buffer_guaranteed_fraction inference_dynamic_batching_buffer_overflow_factor
        inference_dynamic_batching_max_requests_override inference_dynamic_batching_max_tokens_override
        inference_max_batch_size langrl_inference_server_conversation_template langrl_inference_server_type
        moe_router_topk_limited_devices retro_attention_gate retro_cyclic_train_iters retro_encoder_attention_dropout
        retro_encoder_hidden_dropout retro_encoder_layers retro_num_neighbors retro_num_retrieved_chunks
        retro_project_dir rl_sequence_packing_bin_size
    """,
    ("0.17", "flag"): """
        muon_use_nesterov no_scatter_gather_tensors_in_pipeline tokenizer_hf_include_special_tokens
        tokenizer_hf_use_fast
    """,
    ("0.17", "str"): """
        inference_dynamic_batching_cuda_graph_max_tokens
    """,
    ("0.17", "list"): """
        tiktoken_special_tokens
    """,
    ("0.18", "str"): """
        rl_generation_batch_size rl_num_parallel_generation_batches rl_num_parallel_generations
        rl_parallel_generation_tasks
    """,
}
"""Flags the parser no longer accepts, by the last version that may have had them and by type."""
