"""Config keys outside the key map, and the runner's command-line flags."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from meshwright.frameworks.megatron_lm.arguments import MODEL_FLAGS
from meshwright.recipes.key_maps import config_keys, override_keys
from meshwright.similar import closest, misspelled

KEY_MAP = "megatron_bridge"
UNREAD_ARGS = "*"
"""The key for arguments known only at run time, such as "$@": no setting can be reported as missing."""

# Sections whose fields are all known: any other name is rejected.
SECTIONS: Mapping[str, str] = {
    "train": """
        global_batch_size micro_batch_size rampup_batch_size decrease_batch_size_if_needed train_iters train_samples
        num_epochs exit_interval exit_duration_in_mins exit_signal exit_signal_handler
        exit_signal_handler_for_dataloader empty_unused_memory_level manual_gc manual_gc_interval manual_gc_eval
        iterations_to_skip
        skip_train eval_iters
        eval_interval check_weight_hash_across_dp_replicas_interval train_sync_interval check_optimizer_step_success
        skip_sync_grad_norm_across_mp step_batch_size_schedule
        gpu_sniff_test_interval exit_signal_handler_for_training""",
    "validation": """
        eval_interval eval_iters eval_global_batch_size eval_micro_batch_size eval_at_step_zero full_validation
        multiple_validation_sets validation_set_names skip_train test_mode
        start_eval_at_iter""",
    "optimizer": """
        optimizer lr min_lr decoupled_lr decoupled_min_lr weight_decay apply_wd_to_qk_layernorm decoupled_weight_decay
        fp16 bf16 fp8_recipe params_dtype use_precision_aware_optimizer store_param_remainders main_grads_dtype
        main_params_dtype exp_avg_dtype exp_avg_sq_dtype loss_scale initial_loss_scale min_loss_scale loss_scale_window
        hysteresis adam_beta1 adam_beta2 adam_eps sgd_momentum lion_beta1 lion_beta2 muon_momentum muon_split_qkv
        muon_use_nesterov muon_scale_mode muon_fp32_matmul_prec muon_num_ns_steps muon_tp_mode muon_extra_scale_factor
        muon_coefficient_type muon_scalar_optimizer use_distributed_optimizer overlap_param_gather
        overlap_param_gather_with_optimizer_step optimizer_cpu_offload optimizer_offload_fraction
        use_torch_optimizer_for_cpu_offload overlap_cpu_optimizer_d2h_h2d pin_cpu_grads pin_cpu_params clip_grad
        log_num_zeros_in_grad barrier_with_L1_time timers config_logger_dir reuse_grad_buf_for_mxfp8_param_ag
        use_layer_wise_distributed_optimizer use_megatron_fsdp fp8_params
        soap_beta1 soap_beta2 offload_optimizer_states
        muon_nesterov soap_shampoo_beta soap_precondition_frequency soap_use_kl_shampoo adaptive_muon_moment2_method
        adaptive_muon_beta2 adaptive_muon_eps grad_norm_skip_threshold optimizer_cuda_graph""",
    "scheduler": """
        lr_decay_style lr_wsd_decay_style lr_decay_iters lr_decay_samples lr_wsd_decay_iters lr_wsd_decay_samples
        lr_warmup_fraction lr_warmup_iters lr_warmup_samples lr_warmup_init override_opt_param_scheduler
        use_checkpoint_opt_param_scheduler start_weight_decay end_weight_decay weight_decay_incr_style
        no_weight_decay_cond_type lr_warmup_steps lr_decay_steps wd_incr_steps wsd_decay_steps max_steps""",
    "ddp": """
        grad_reduce_in_fp32 overlap_grad_reduce overlap_param_gather align_param_gather use_distributed_optimizer
        num_distributed_optimizer_instances check_for_nan_in_grad check_for_large_grads bucket_size
        pad_buckets_for_high_nccl_busbw average_in_collective fp8_param_gather fp4_param_gather
        reuse_grad_buf_for_mxfp8_param_ag use_megatron_fsdp use_custom_fsdp data_parallel_sharding_strategy
        gradient_reduce_div_fusion suggested_communication_unit_size preserve_fp32_weights keep_fp8_transpose_cache
        nccl_ub fsdp_double_buffer fsdp_db_use_persist_buf_on_alloc_fail fsdp_all_gather_in_start_param_sync
        fsdp_manual_registration outer_dp_sharding_strategy disable_symmetric_registration delay_wgrad_compute
        megatron_fsdp_main_params_dtype megatron_fsdp_main_grads_dtype megatron_fsdp_grad_comm_dtype
        megatron_fsdp_version megatron_fsdp_use_decoupled_grad reduce_scatter_with_fp32_accumulation
        param_name_patterns_for_fp32_local_accumulation
        num_buckets megatron_fsdp_cuda_graph_mode megatron_fsdp_enable_fine_grained_param_gather
        megatron_fsdp_max_pool_double_buffer""",
    "dist": """
        distributed_backend distributed_timeout_minutes distributed_timeout_seconds_after_init align_grad_reduce
        local_rank lazy_mpu_init lazy_init use_megatron_fsdp use_torch_fsdp2 nccl_communicator_config_path
        use_tp_pp_dp_mapping use_gloo_process_groups use_sharp sharp_enabled_group high_priority_stream_groups
        external_gpu_device_mapping enable_megatron_core_experimental use_decentralized_pg eval_context_parallel_size
        disable_jit_fuser distributed_backend_timeout_minutes
        flight_recorder_dump_path flight_recorder_trace_buffer_size flight_recorder_dump_on_timeout
        flight_recorder_include_stack_trace flight_recorder_include_only_active flight_recorder_extra_dump_on_exec""",
    "rng": "seed te_rng_tracker inference_rng_tracker data_parallel_random_init",
    "rerun_state_machine": """
        error_injection_rate error_injection_type rerun_mode check_for_nan_in_loss check_for_spiky_loss
        spiky_loss_factor""",
    "checkpoint": """
        save save_interval save_optim save_rng save_tokenizer_assets load load_optim load_rng
        load_main_params_from_ckpt non_persistent_save_interval non_persistent_ckpt_type non_persistent_global_ckpt_dir
        non_persistent_local_ckpt_dir non_persistent_local_ckpt_algo finetune pretrained_checkpoint ckpt_step
        use_checkpoint_args use_mp_args_from_checkpoint_args use_tokenizer_model_from_checkpoint_args
        exit_on_missing_checkpoint ckpt_format auto_detect_ckpt_format ckpt_convert_format ckpt_convert_save
        ckpt_convert_update_legacy_dist_opt_format fully_parallel_save fully_parallel_load
        ckpt_assume_constant_structure ckpt_fully_parallel_load_exchange_algo ckpt_fully_parallel_load_process_group
        ckpt_fully_parallel_save_process_group async_save async_ckpt_cpu_priority async_ckpt_io_priority
        async_write_results_mp_mode async_strategy use_persistent_ckpt_worker storage_writers_per_rank
        strict_fsdp_dtensor_load dist_ckpt_strictness dist_ckpt_optim_fully_reshardable
        distrib_optim_fully_reshardable_mem_efficient
        dist_ckpt_save_pre_mcore_014 dist_ckpt_workers replication replication_jump replication_factor most_recent_k
        save_retain_interval save_rng_state_per_dp_rank custom_manager_class also_save_hf_checkpoint hf_source_path
        hf_trust_remote_code hf_distributed_save hf_save_every_n_ranks stage_precision_aware_optimizer_state_on_cpu
        save_dgrads_interval save_wgrads_interval verify_integrity
        save_params_interval save_activations_interval save_tokens_per_expert_interval async_ckpt_use_cpu_shm
        ckpt_load_validate_sharding_integrity stream_ckpt_dequant""",
    "logger": """
        log_interval log_params_norm log_throughput log_throughput_to_tensorboard throughput_window_size log_progress
        timing_log_level timing_log_option tensorboard_dir tensorboard_log_interval tensorboard_queue_size
        log_timers_to_tensorboard log_loss_scale_to_tensorboard log_validation_ppl_to_tensorboard
        log_memory_to_tensorboard log_runtime_to_tensorboard log_world_size_to_tensorboard log_device_memory_used
        log_l2_norm_grad_to_tensorboard log_memory_interval log_max_attention_logit log_num_zeros_in_grad log_energy
        memory_keys runtime_time_unit wandb_project wandb_exp_name wandb_save_dir wandb_entity logging_level
        filter_warnings modules_to_filter set_level_for_all_loggers save_config_filepath
        skip_train_metrics_log barrier_with_L1_time
        mlflow_experiment mlflow_run_name mlflow_tracking_uri mlflow_tags mlflow_description mlflow_log_artifacts
        comet_project comet_experiment_name comet_workspace comet_api_key comet_tags
        moe_routing_trace_path moe_routing_trace_max_training_iters moe_routing_trace_capture_logits
        moe_routing_trace_capture_hidden_states moe_routing_trace_dump_weights""",
    "mixed_precision": """
        fp32 fp16 bf16 params_dtype pipeline_dtype autocast_dtype autocast_enabled grad_reduce_in_fp32 fp8 fp8_recipe
        first_last_layers_bf16 fp8_margin fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad fp8_dot_product_attention
        fp8_multi_head_attention fp8_param fp8_param_gather fp4 fp4_recipe fp4_param fp4_param_gather loss_scale
        initial_loss_scale min_loss_scale loss_scale_window hysteresis num_layers_at_start_in_bf16
        num_layers_at_end_in_bf16 reuse_grad_buf_for_mxfp8_param_ag""",
    "comm_overlap": """
        tp_comm_overlap tp_comm_overlap_cfg tp_comm_bootstrap_backend overlap_p2p_comm batch_p2p_comm
        overlap_grad_reduce overlap_param_gather overlap_param_gather_with_optimizer_step align_param_gather bucket_size
        defer_embedding_wgrad_compute wgrad_deferral_limit delay_wgrad_compute overlap_moe_expert_parallel_comm
        data_parallel_size""",
    "profiling": """
        use_nsys_profiler profile_step_start profile_step_end use_pytorch_profiler pytorch_profiler_collect_shapes
        pytorch_profiler_collect_callstack pytorch_profiler_collect_chakra profile_ranks record_memory_history
        memory_snapshot_path record_shapes nvtx_ranges""",
}
OPEN_SECTIONS = (
    "model", "dataset", "tokenizer", "peft", "env_vars", "ft", "straggler", "nvrx_straggler", "tensor_inspect",
    "inprocess_restart", "optimizer_config_override_provider", "dpo", "kd", "distill",
)  # fmt: skip
"""Sections whose fields depend on the model, data or adapter: only likely typos are reported."""

CONVENIENCE: Mapping[str, tuple[str, ...]] = {
    "train.train_iters": ("-ms", "--max_steps"),
    "train.global_batch_size": ("-gb", "--global_batch_size"),
    "train.micro_batch_size": ("-mb", "--micro_batch_size"),
    "dataset.seq_length": ("-sl", "--seq_length"),
    "model.tensor_model_parallel_size": ("-tp", "--tensor_model_parallel_size"),
    "model.pipeline_model_parallel_size": ("-pp", "--pipeline_model_parallel_size"),
    "model.context_parallel_size": ("-cp", "--context_parallel_size"),
    "model.virtual_pipeline_model_parallel_size": ("-vp", "--virtual_pipeline_model_parallel_size"),
    "model.expert_model_parallel_size": ("-ep", "--expert_model_parallel_size"),
    "model.expert_tensor_parallel_size": ("-etp", "--expert_tensor_parallel_size"),
    "optimizer.lr": ("--lr",),
    "optimizer.min_lr": ("--min_lr",),
    "scheduler.lr_warmup_iters": ("--warmup_iters",),
    "checkpoint.pretrained_checkpoint": ("--pretrained_checkpoint",),
    "checkpoint.save": ("--save_dir",),
    "checkpoint.load": ("--load_dir",),
    "checkpoint.save_interval": ("--save_interval",),
}
FLAGS = {flag: key for key, flags in CONVENIENCE.items() for flag in flags}
RUNNER = {"--recipe": "--recipe", "--model": "--model", "--mode": "--mode", "--dataset": "--dataset"}
RUNNER |= {"--step-func": "--step-func", "--step_func": "--step-func"}
SWITCHES = ("--dry-run", "--deterministic", "--dump-env", "--help", "-h")
LAUNCH = (
    "--custom_env_vars", "--custom-env-vars", "-ev",
    "--nodes", "--gpus-per-node", "--account", "--partition", "--container-image", "--mount", "--env", "--srun-arg",
    "--additional-slurm-params", "-lmc", "--peak-mem-clk", "--peak_mem_clk", "--time", "--job-name", "--time-limit",
    "--experiment-name", "--remote-job-dir", "--exclude", "--nodelist", "--reservation", "--qos", "--dependency",
    "--container-mounts", "--ssh-host", "--ssh-user", "--packager",
)  # fmt: skip
"""Flags of the SLURM launcher that take a value."""
LAUNCH_SWITCHES = ("--no-gpu-resource-request", "--detach", "--no-detach", "--wait", "--exclusive", "--no-exclusive")
MODES = {"pretrain": "pretrain", "sft": "sft", "lora": "peft", "dora": "peft"}
INSTEAD: Mapping[str, str] = {
    "--peft_scheme": "--mode lora",
    "--peft-scheme": "--mode lora",
    "--packed_sequence": "dataset.enable_offline_packing=true",
    "--packed-sequence": "dataset.enable_offline_packing=true",
    "--offline-packing": "dataset.enable_offline_packing=true",
    "--seq-length": "--seq_length",
    "--max-steps": "--max_steps",
    "--global-batch-size": "--global_batch_size",
    "--micro-batch-size": "--micro_batch_size",
    "--tp": "-tp",
    "--pp": "-pp",
    "--cp": "-cp",
    "--ep": "-ep",
    "-et": "-etp",
    "--dataset-path": "dataset.data_path=…",
    "--dataset-root": "dataset.dataset_root=…",
    "--train-data-path": "dataset.source.load_kwargs.data_files.train=…",
    "--hf-processor-path": "dataset.hf_processor_path=…",
    "--dataset_type": "--dataset mock",
    "--hf_path": "checkpoint.hf_source_path=…",
    "--wandb-name": "logger.wandb_exp_name=…",
    "--config-file": "trailing KEY=VALUE",
    "--config_file": "trailing KEY=VALUE",
}
"""Rejected flags, with their replacement."""
MODEL = """
    hf_model_id seq_length num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels
    vocab_size make_vocab_size_divisible_by should_pad_vocab share_embeddings_and_output_weights position_embedding_type
    rotary_base rotary_percent rotary_interleaved rope_scaling rope_scaling_factor seq_len_interpolation_factor
    normalization layernorm_epsilon layernorm_zero_centered_gamma add_bias_linear add_qkv_bias qk_layernorm
    gated_linear_unit activation_func bias_activation_fusion bias_dropout_fusion masked_softmax_fusion
    gradient_accumulation_fusion cross_entropy_loss_fusion cross_entropy_fusion_impl apply_rope_fusion
    attention_dropout hidden_dropout attention_softmax_in_fp32 init_method_std transformer_impl transformer_layer_spec
    pipeline_dtype params_dtype bf16 fp16 fp8 fp8_recipe fp8_margin fp8_amax_history_len fp8_amax_compute_algo fp8_param
    fp4 fp4_recipe fp4_param num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 moe_ffn_hidden_size moe_layer_freq
    moe_shared_expert_intermediate_size moe_router_score_function moe_router_topk_scaling_factor moe_router_num_groups
    moe_router_group_topk moe_router_pre_softmax moe_router_bias_update_rate moe_router_fusion moe_permute_fusion
    moe_pad_expert_input_to_capacity moe_token_drop_policy moe_input_jitter_eps moe_per_layer_logging
    moe_router_padding_for_fp8 moe_router_padding_for_quantization moe_deepep_num_sms moe_hybridep_num_sms
    moe_enable_deepep moe_apply_probs_on_input moe_layer_recompute multi_latent_attention q_lora_rank kv_lora_rank
    qk_head_dim qk_pos_emb_head_dim v_head_dim window_size softmax_scale softmax_type rotary_scaling_factor mscale
    mscale_all_dim mtp_num_layers overlap_p2p_comm batch_p2p_comm delay_wgrad_compute variable_seq_lengths
    cpu_offloading_num_layers cpu_offloading_activations cpu_offloading_weights cpu_offloading_double_buffering
    fine_grained_activation_offloading offload_modules distribute_saved_activations cuda_graph_warmup_steps
    cuda_graph_use_single_mempool cuda_graph_modules microbatch_group_size_per_vp_stage deallocate_pipeline_outputs
    tp_comm_overlap_cfg tp_comm_bootstrap_backend use_cpu_initialization perform_initialization
    tp_comm_overlap_ag tp_comm_overlap_rs mtp_hybrid_override_pattern yarn_rotary_scaling_factor
    moe_router_topk_limited_devices mamba_num_heads mamba_head_dim mamba_state_dim mamba_num_groups
    hybrid_layer_pattern hybrid_override_pattern is_hybrid_model freeze_language_model freeze_vision_model
    freeze_vision_projection hybrid_context_parallel max_seqlen_per_dp_cp_rank moe_paged_stash
    moe_expert_rank_capacity_factor restore_modelopt_state linear_attention_freq fp32_residual_connection
    activation_offload_fraction apply_dsa_kernel_fusion batch_p2p_sync cp_partition_mode csa_compress_ratios
    csa_compress_rotary_base delay_offload_until_cuda_graph disable_parameter_transpose_cache
    dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss dsa_kernel_backend dynamic_context_parallel
    fine_grained_offloading_max_inflight_offloads fp8_output_proj fp8_param_gather freeze_audio_model
    freeze_mtp_model freeze_sound_encoder freeze_sound_projection fused_single_qkv_rope has_sound
    hf_model_revision high_priority_a2a_comm_stream init_model_with_meta_device kd_config keep_mtp_spec_in_bf16
    max_vision_cuda_graph_seq_length min_dynamic_context_parallel_size min_offloaded_tensor_size moe_a2a_overlap
    moe_flex_dispatcher_num_sms moe_hybridep_num_sms_preprocessing moe_hybridep_pad_uneven_dispatch_inputs
    moe_mlp_glu_interleave_size moe_pad_experts_for_cuda_graph_inference moe_paged_stash_buffer_size_factor_cpu
    moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_page_size moe_permute_fusion_into_hybridep
    mtp_eval_in_bf16 mtp_use_repeated_layer multimodal_attn_impl overlap_dispatch_backward_with_experts_wgrad
    patch_size persist_layer_norm qk_clip quant_recipe rotary_base_per_layer separate_video_embedder
    sequence_packing_scheduler spatial_merge_size temporal_ckpt_compat temporal_patch_dim temporal_patch_size
    tp_only_amax_red use_fused_mhc use_fused_weighted_squared_relu use_transformer_engine_op_fuser vision_config
    vision_cuda_graph_impl vision_cuda_graph_scope vit_gradient_checkpointing window_attn_skip_freq yarn_beta_fast
    yarn_beta_slow yarn_correction_range_round_to_int yarn_mscale yarn_mscale_all_dim
    yarn_original_max_position_embeddings
"""
DATASET = """
    seq_length sequence_length num_workers blend blend_per_split data_path split path_to_cache random_seed
    reset_position_ids reset_attention_mask eod_mask_loss dataloader_type data_sharding pin_memory persistent_workers
    drop_last mmap_bin_files num_dataset_builder_threads skip_getting_attention_mask_from_dataset dataset_name
    dataset_root dataset_kwargs enable_offline_packing enable_in_batch_packing offline_packing_specs pad_to_max_length
    do_validation do_test val_proportion rewrite max_train_samples hf_processor_path source validation_source
    test_source micro_batch_size path task_encoder per_dataset_sequences_path trust_remote_code
    cache_dir create_attention_mask dataloader_save dataset_sampling defer_in_batch_packing_to_step
    defer_npy_index_mmap fast_cache_load fixed_pack_idx hf_dataset hf_output_root hf_rewrite
    hf_validation_proportion in_batch_packing_pad_to_multiple_of preprocessing sample_count seed token_dtype_code
    tokenizer
"""
RENAMED = {"num_experts": "num_moe_experts", "norm_epsilon": "layernorm_epsilon"}  # flags that the config renames
HUGGING_FACE_NAMES: Mapping[str, str] = {
    "model.num_experts": "model.num_moe_experts",
    **{f"model.{theirs}": f"model.{RENAMED.get(flag, flag)}" for theirs, flag in MODEL_FLAGS.items()},
}
"""Names of a Hugging Face config that no model here has: a Python file sets them without an effect."""
SUFFIXES = ("._target_", "._call_", "._partial_", "._args_", "._name_")
SIMILARITY = 88
"""Similarity in percent above which an unknown name counts as a typo."""


@cache
def fields(section: str) -> frozenset[str]:
    """Return the known fields of a section."""
    listed = {"model": MODEL, "dataset": DATASET}.get(section, SECTIONS.get(section, "")).split()
    mapped = [key.split(".", 1)[1] for key in config_keys(KEY_MAP) if key.startswith(f"{section}.")]
    return frozenset((*listed, *mapped))


@cache
def sections() -> frozenset[str]:
    """Return the names at the top level of a config."""
    return frozenset((*SECTIONS, *OPEN_SECTIONS, *(key.partition(".")[0] for key in config_keys(KEY_MAP))))


def is_section(name: str) -> bool:
    """Return whether a name at the top level is one of a config, or one with a typing error."""
    return name in sections() or name.startswith("_") or bool(misspelled(name, sections()))


def is_extra_key(key: str) -> bool:
    """Return whether a key outside the key map exists in Megatron-Bridge."""
    if key.startswith(("-", "+", "~")) or key in ("recipe", UNREAD_ARGS) or key.endswith(SUFFIXES):
        return True  # reported by separate rules, or not settings
    if key in HUGGING_FACE_NAMES:
        return False
    section, _, name = key.partition(".")
    if not name:
        return section in SECTIONS or section in OPEN_SECTIONS
    if section in SECTIONS:
        return name.split(".")[0].split("[")[0] in fields(section)
    return section in OPEN_SECTIONS and (name in fields(section) or not _is_typo(name, section))


def is_unlisted(key: str) -> bool:
    """Return whether a key of the model or dataset is accepted although no version that is known here has it."""
    section, _, name = key.partition(".")
    return section in ("model", "dataset") and name.isidentifier() and name not in fields(section) and is_extra_key(key)


def unlisted_note(key: str) -> str:
    """Return the note on such a key: assigning an attribute that a config object does not have has no effect."""
    section, _, name = key.partition(".")
    near = closest(name, fields(section) - {"sequence_length"}, 1)
    hint = f"did you mean {section}.{near[0]}?" if near else "without such a field the line has no effect"
    return f"{key} was not checked: no {section} field of that name is known; {hint}"


def _is_typo(name: str, section: str) -> bool:
    return "." not in name and (
        bool(misspelled(name, fields(section))) or _is_shortened(name, section) or _names_a_mapped_field(name, section)
    )


def _names_a_mapped_field(name: str, section: str) -> bool:
    """Return whether other frameworks name a field so that this section sets by another name: seq_len, seqlen."""
    found = override_keys().get(name)
    return found is not None and any(
        bool(found.field) and one.field == found.field
        for key, one in config_keys(KEY_MAP).items()
        if key.startswith(f"{section}.")
    )


LEFT_OUT = {"model", "size"}  # words of a parallel size that other frameworks leave out


def _is_shortened(name: str, section: str) -> bool:
    """Return whether a name is that of a parallel size without some words: context_parallel, tensor_parallel_size."""
    words = name.split("_")
    full = (one.split("_") for one in fields(section) if "parallel" in one)
    return "parallel" in words and any(
        [word for word in one if word not in LEFT_OUT] == [word for word in words if word not in LEFT_OUT]
        for one in full
    )
