"""Keys of older releases that a front end's table no longer has, by its tags: the release without it, and the key now.

A key in its place that starts with ! has the opposite meaning: no_rope_fusion true is apply_rope_fusion false.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

Removed = Mapping[str, tuple[str, str]]
OPPOSITE = "!"

TRL: Removed = {
    "max_target_length": ("0.14", ""), "use_num_logits_to_keep": ("0.17", ""),
    "use_liger": ("0.18", "use_liger_kernel"),
    "dataset_batch_size": ("0.18", ""), "chars_per_token": ("0.18", ""), "num_of_sequences": ("0.18", ""),
    "vllm_device": ("0.18", ""), "vllm_max_model_len": ("0.18", "vllm_max_model_length"), "vllm_dtype": ("0.18", ""),
    "vllm_enable_prefix_caching": ("0.18", ""), "max_seq_length": ("0.20", "max_length"),
    "is_encoder_decoder": ("0.26", ""), "padding_value": ("0.26", ""), "torch_dtype": ("0.27", "dtype"),
    "gradient_checkpointing_use_reentrant": ("0.27", "gradient_checkpointing_kwargs"),
    "wandb_log_unique_prompts": ("0.27", "log_unique_prompts"),
    "vllm_guided_decoding_regex": ("0.28", "vllm_structured_outputs_regex"),
    "use_liger_loss": ("0.28", "use_liger_kernel"), "max_prompt_length": ("0.29", ""),
    "generate_during_eval": ("0.29", ""), "label_pad_token_id": ("0.29", ""), "ref_model_init_kwargs": ("0.29", ""),
    "rpo_alpha": ("0.29", ""), "reference_free": ("0.29", ""), "force_use_ref_model": ("0.29", ""),
    "use_logits_to_keep": ("0.29", ""), "tools": ("0.29", ""),
}  # fmt: skip
"""TRL's since 0.9."""

SWIFT: Removed = {
    "train_type": ("4.1", "tuner_type"), "ckpt_dir": ("4.0", ""), "lora_modules": ("4.0", "adapters"),
    "metric": ("4.0", "eval_metric"), "galore_config": ("4.0", ""),
    "tensor_parallel_size": ("3.10", "vllm_tensor_parallel_size"),
    "gpu_memory_utilization": ("3.10", "vllm_gpu_memory_utilization"),
    "limit_mm_per_prompt": ("3.10", "vllm_limit_mm_per_prompt"),
    "data_parallel_size": ("3.10", "vllm_data_parallel_size"), "gc_collect_after_offload": ("3.10", ""),
    "multi_turn_func": ("3.10", "multi_turn_scheduler"), "use_async_engine": ("3.10", "vllm_use_async_engine"),
    "swanlab_lark_webhook_url": ("3.12", "swanlab_webhook_url"), "swanlab_lark_secret": ("3.12", "swanlab_secret"),
    "use_liger": ("3.3", "use_liger_kernel"), "model_layer_cls_name": ("3.3", ""),
    "train_sampler_random": ("3.3", "train_dataloader_shuffle"), "is_encoder_decoder": ("3.3", ""),
    "train_dataset_sample": ("3.3", ""), "tools_prompt": ("3.4", "agent_template"), "mini_batch_size": ("3.4", ""),
    "load_dataset_config": ("3.5", "load_data_args"), "enable_cache": ("3.5", "load_from_cache_file"),
    **dict.fromkeys(("use_lmdeploy", "lmdeploy_device", "lmdeploy_session_len", "lmdeploy_cache_max_entry_count"),
        ("3.5", "")),
    "vllm_device": ("3.6", ""), "num_infer_workers": ("3.6", ""), "eval_datasets": ("3.6", "eval_dataset"),
    "eval_datasets_args": ("3.6", "eval_dataset_args"), "metric_warmup_step": ("3.7", ""), "fsdp_num": ("3.7", ""),
    "acc_steps": ("3.7", ""), "packing_cache": ("3.7", ""), "channels": ("3.8", ""),
}  # fmt: skip
"""ms-swift's since 3.0."""

LLAMA_FACTORY: Removed = {
    "sft_packing": ("0.6", "packing"), "lora_bf16_mode": ("0.6", "pure_bf16"), "ppo_logger": ("0.6.1", ""),
    "cache_path": ("0.6.2", "tokenized_path"), "name_module_trainable": ("0.7.1", "freeze_trainable_modules"),
    "num_layer_trainable": ("0.7.1", "freeze_trainable_layers"),
    "badam_switch_block_every": ("0.7.1", "badam_switch_interval"), "dpo_beta": ("0.8", "pref_beta"),
    "dpo_loss": ("0.8", "pref_loss"), "dpo_ftx": ("0.8", "pref_ftx"), "orpo_beta": ("0.8", "pref_beta"),
    "vllm_dtype": ("0.8.2", "infer_dtype"), "reserved_label_len": ("0.8.3", ""), "visual_inputs": ("0.9", ""),
    "train_mm_proj_only": ("0.9.2", "freeze_language_model"), "image_resolution": ("0.9.2", "image_max_pixels"),
    "video_resolution": ("0.9.2", "video_max_pixels"), "image_dir": ("0.9.2", "media_dir"),
    "new_special_tokens": ("0.9.3", "add_special_tokens"),
    **dict.fromkeys(("ray_run_name", "ray_storage_path", "ray_storage_filesystem", "placement_strategy",
        "resources_per_worker", "cpu_infer", "chunk_size", "kt_optimize_rule", "kt_use_cuda_graph", "kt_maxlen",
        "kt_mode", "kt_force_think"), ("0.9.5", "")),
}  # fmt: skip
"""LLaMA-Factory's since 0.5."""

AXOLOTL: Removed = {
    "eval_table_max_new_tokens": ("0.5", "eval_max_new_tokens"), "train_on_split": ("0.8.1", ""),
    "flash_attn_fuse_qkv": ("0.12", ""), "relora_steps": ("0.12", "jagged_restart_steps"),
    "relora_anneal_steps": ("0.12", "jagged_restart_anneal_steps"),
    "relora_warmup_steps": ("0.12", "jagged_restart_warmup_steps"),
    **dict.fromkeys(("unsloth_cross_entropy_loss", "unsloth_rms_norm", "unsloth_rope", "unsloth_lora_o",
        "unsloth_lora_qkv", "unsloth_lora_mlp"), ("0.17", "")),
}  # fmt: skip
"""Axolotl's since 0.4."""

SHARES = {("axolotl", "logging_steps"): "0.4.1"}
"""Keys of steps that take a share of the training before this version, as the Trainer does; since then an integer."""
VALUES: Mapping[tuple[str, str, str], tuple[str, str]] = {
    ("llama_factory", "quantization_method", "bitsandbytes"): ("0.9.3", "bnb")
}
"""Values of older releases by table, key and value: the release without it, and the value now."""

_OF_CONFIG_JSON = (
    "padded_vocab_size", "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads",
    "group_query_attention", "num_query_groups", "max_position_embeddings", "position_embedding_type",
    "rotary_base", "rotary_percent", "normalization", "norm_epsilon", "swiglu",
    "untie_embeddings_and_output_weights", "disable_bias_linear", "add_qkv_bias", "attention_dropout",
    "hidden_dropout", "kv_channels", "qk_layernorm", "num_experts", "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size", "moe_router_topk", "moe_router_pre_softmax", "architectures",
    "original_max_position_embeddings", "partial_rotary_factor", "use_shared_expert_gate", "rotary_interleaved",
    "moe_layer_freq", "moe_router_score_function", "moe_router_bias_update_rate", "moe_router_enable_expert_bias",
    "moe_router_topk_scaling_factor", "multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim",
    "qk_pos_emb_head_dim", "llm_architectures", "mrope_section", "linear_num_value_heads", "linear_num_key_heads",
    "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim", "layer_types", "mrope_interleaved",
    "moe_router_num_groups", "moe_router_group_topk", "softmax_type", "window_size", "window_attn_skip_freq",
    "quick_geglu", "activation_func_clamp_value", "glu_linear_offset", "qk_l2_norm", "no_rope_freq",
    "moe_apply_probs_on_input",
)  # fmt: skip
_DROPPED = (
    "deterministic_mode", "use_flash_attn", "dataloader_type", "ckpt_format", "auto_detect_ckpt_format",
    "exit_on_missing_checkpoint", "distributed_timeout_minutes", "transformer_impl", "log_params_norm",
    "log_throughput", "tensorboard_log_interval", "log_timers_to_tensorboard",
    "no_log_learning_rate_to_tensorboard", "log_validation_ppl_to_tensorboard", "log_memory_to_tensorboard",
    "logging_level", "wandb_save_dir", "initialize_embedding", "num_layers_per_virtual_pipeline_stage",
    "load_safetensors", "save_retain_interval", "ckpt_fully_parallel_load", "ckpt_assume_constant_structure",
)  # fmt: skip
SWIFT_MEGATRON: Removed = {
    **dict.fromkeys((*_OF_CONFIG_JSON, *_DROPPED), ("4.0", "")),
    **{old: ("4.0", new) for old, new in {
        "load": "mcore_model", "save": "output_dir", "adapter_load": "mcore_adapter", "ref_load": "mcore_ref_model",
        "ref_adapter_load": "mcore_ref_adapter", "max_epochs": "num_train_epochs", "eval_interval": "eval_steps",
        "save_interval": "save_steps", "log_interval": "logging_steps", "num_workers": "dataloader_num_workers",
        "seq_length": "max_length", "manual_gc_interval": "manual_gc_steps", "distributed_backend": "ddp_backend",
        "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
        "microbatch_group_size_per_virtual_pipeline_stage": "microbatch_group_size_per_vp_stage",
        "no_masked_softmax_fusion": "!masked_softmax_fusion", "no_bias_dropout_fusion": "!bias_dropout_fusion",
        "no_bias_swiglu_fusion": "!bias_activation_fusion", "no_rope_fusion": "!apply_rope_fusion",
        "no_gradient_accumulation_fusion": "!gradient_accumulation_fusion", "no_data_sharding": "!data_sharding",
        "no_initialization": "!perform_initialization",
    }.items()},
    "train_type": ("4.1", "tuner_type"), "gradient_checkpointing_kwargs": ("4.1", ""),
    "extra_megatron_kwargs": ("3.10", "megatron_extra_kwargs"), "logging_leval": ("3.5", ""),
    "no_create_attention_mask_in_dataloader": ("3.7", ""),
}  # fmt: skip
"""Those of `megatron sft` since 3.0; sizes of the model are read from its config.json since 4.0."""

ADDED: Mapping[str, Mapping[str, str]] = {
    "ms_swift": {"tuner_type": "4.0", "eval_metric": "4.0"},
    "ms_swift_megatron": {
        new.removeprefix(OPPOSITE): version
        for version, new in SWIFT_MEGATRON.values()
        if version == "4.0" and new not in ("", "max_length", "tuner_type")  # 3.x had max_length too
    } | {"tuner_type": "4.0"},
}  # fmt: skip
"""Keys by table with the release that added them: none before has them, and none since has those it removed."""


def has_both(table: str, version: str, keys: Collection[str]) -> str:
    """Return the key of a file that was added when another was removed, or later; empty if there is none."""
    return next((key for key, since in ADDED[table].items() if key in keys and _order(since) >= _order(version)), "")


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
