"""Options of `accelerate launch` (1.15.0), which `trl sft` takes too: on its command line and in its --config file."""

from __future__ import annotations

CONFIG = "accelerate_config"  # TRL's name of --config_file: a file, or a config that TRL ships


def names(text: str) -> frozenset[str]:
    """Return the names of a text, each once."""
    return frozenset(text.split())


VALUES = names(
    f"""
    {CONFIG} config_file mixed_precision num_processes num_machines num_cpu_threads_per_process dynamo_backend
    dynamo_mode gpu_ids machine_rank main_process_ip main_process_port tee log_dir role rdzv_backend rdzv_conf
    max_restarts monitor_interval main_training_function deepspeed_config_file zero_stage offload_optimizer_device
    offload_param_device offload_optimizer_nvme_path offload_param_nvme_path gradient_clipping zero3_init_flag
    zero3_save_16bit_model deepspeed_hostfile deepspeed_exclusion_filter deepspeed_inclusion_filter
    deepspeed_multinode_launcher deepspeed_moe_layer_cls_names fsdp_version fsdp_offload_params fsdp_sharding_strategy
    fsdp_reshard_after_forward fsdp_auto_wrap_policy fsdp_backward_prefetch fsdp_state_dict_type fsdp_forward_prefetch
    fsdp_use_orig_params fsdp_cpu_ram_efficient_loading fsdp_sync_module_states fsdp_activation_checkpointing
    fsdp_activation_checkpointing_offload fp8_backend fp8_margin fp8_interval fp8_format fp8_amax_history_len
    fp8_amax_compute_algo fp8_override_linear_precision fp8_opt_level fp8_enable_fsdp_float8_all_gather
    fp8_pad_inner_dim parallelism_config_dp_replicate_size parallelism_config_dp_shard_size parallelism_config_tp_size
    parallelism_config_cp_size parallelism_config_cp_backend parallelism_config_cp_comm_strategy
    parallelism_config_sp_size parallelism_config_sp_backend parallelism_config_sp_seq_length
    parallelism_config_sp_seq_length_is_variable parallelism_config_sp_attn_implementation
    """
)
"""Options with a value; those that TRL's own arguments have (gradient_accumulation_steps) are not passed on."""
FLAGS = names(
    """
    quiet cpu multi_gpu tpu enable_cpu_affinity dynamo_use_fullgraph dynamo_use_dynamic
    dynamo_use_regional_compilation use_deepspeed use_fsdp use_parallelism_config use_megatron_lm same_network module
    no_python downcast_bf16 fp8_use_autocast_during_eval
    """
)
OTHERS = names(
    """
    aws_access_key_id aws_secret_access_key debug env fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap
    gradient_accumulation_steps help megatron_lm_attention_backend megatron_lm_attention_dropout
    megatron_lm_attention_softmax_in_fp32 megatron_lm_calculate_per_token_loss megatron_lm_context_parallel_size
    megatron_lm_decoder_last_pipeline_num_layers megatron_lm_eod_mask_loss megatron_lm_expert_model_parallel_size
    megatron_lm_expert_tensor_parallel_size megatron_lm_gradient_clipping megatron_lm_hidden_dropout
    megatron_lm_no_load_optim megatron_lm_no_save_optim megatron_lm_num_micro_batches megatron_lm_optimizer_cpu_offload
    megatron_lm_overlap_cpu_optimizer_d2h_h2d megatron_lm_pp_degree megatron_lm_recompute_activations
    megatron_lm_recompute_granularity megatron_lm_recompute_method megatron_lm_recompute_num_layers
    megatron_lm_sequence_parallelism megatron_lm_tp_degree megatron_lm_use_custom_fsdp
    megatron_lm_use_distributed_optimizer megatron_lm_use_precision_aware_optimizer
    megatron_lm_use_rotary_position_embeddings mpirun_hostfile no_tpu_cluster tpu_cluster tpu_use_sudo vm
    """
)
"""Options that trl sft does not take."""
OLDER = names("fp16 ipex mpirun_ccl tpu_name tpu_use_cluster tpu_vm tpu_zone use_mps_device use_xpu")
"""Options of earlier releases."""
OF_LAUNCHER = (VALUES | FLAGS | OTHERS | OLDER) - {CONFIG}
"""All options of `accelerate launch`, which takes no beginning of one."""
IN_FILE = VALUES | FLAGS
"""Keys of a --config file that are the launcher's."""
TYPES = {"use_fsdp": "FSDP", "use_deepspeed": "DEEPSPEED", "use_megatron_lm": "MEGATRON_LM", "multi_gpu": "MULTI_GPU"}
"""The switch of each distributed_type."""
