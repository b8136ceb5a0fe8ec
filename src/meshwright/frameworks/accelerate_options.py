"""Options of `accelerate launch` (1.15.0), which `trl sft` takes too: on its command line and in its --config file."""

from __future__ import annotations

CONFIG = "accelerate_config"  # TRL's name of --config_file: a file, or a config that TRL ships


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


VALUES = _names(
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
FLAGS = _names(
    """
    quiet cpu multi_gpu tpu enable_cpu_affinity dynamo_use_fullgraph dynamo_use_dynamic
    dynamo_use_regional_compilation use_deepspeed use_fsdp use_parallelism_config use_megatron_lm same_network module
    no_python downcast_bf16 fp8_use_autocast_during_eval
    """
)
IN_FILE = VALUES | FLAGS
"""Keys of a --config file that are the launcher's."""
TYPES = {"use_fsdp": "FSDP", "use_deepspeed": "DEEPSPEED", "use_megatron_lm": "MEGATRON_LM", "multi_gpu": "MULTI_GPU"}
"""The switch of each distributed_type."""
