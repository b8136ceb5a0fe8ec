"""Key map of Megatron-Bridge (commit 067f987, 2026-08-22).

A Megatron-Bridge recipe is a complete config, so the default of every key is the value in the named recipe.
"""

from __future__ import annotations

from meshwright.recipes.key_maps import megatron_bridge_composite_keys as bridge
from meshwright.recipes.key_maps import shared_composite_keys as shared
from meshwright.recipes.key_maps.key import CompositeKey, ConfigKey
from meshwright.recipes.key_maps.value_maps import (
    ATTENTION_BACKENDS,
    CP_COMM_TYPES,
    DECAY_STYLES,
    FP32_FLAG,
    FSDP_FLAG,
    LORA_TARGETS,
    NULL_IS_0,
    NULL_IS_1,
    NULL_IS_EMPTY,
    NULL_IS_NONE,
    OPTIMIZERS,
    READ_NULL_AS_1,
    READ_NULL_AS_NONE,
    TORCH_DTYPES,
)

KEEP_ALL = "1000000"
"""checkpoint.keep for most_recent_k=-1, which deletes none."""
MLA_MODULES = dict.fromkeys(
    ("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj"), "qkv"
)
"""The Q, K and V projections of multi-head latent attention."""
RECOMPUTE_MODULES = (
    "core_attn", "layernorm", "mlp", "moe", "moe_act", "mla_up_proj", "shared_experts", "mhc", "gdn_norm_out",
    "extra_moe_act",
)  # fmt: skip
MISPLACED_KEYS = {
    "ddp.use_custom_fsdp": "ddp.use_megatron_fsdp",
    "scheduler.min_lr": "optimizer.min_lr",
    "scheduler.lr": "optimizer.lr",
    "optimizer.lr_warmup_iters": "scheduler.lr_warmup_iters",
    "train.lr": "optimizer.lr",
    "train.save_interval": "checkpoint.save_interval",
    "train.log_interval": "logger.log_interval",
    "train.seq_length": "dataset.seq_length",
    "model.micro_batch_size": "train.micro_batch_size",
    "model.global_batch_size": "train.global_batch_size",
    "checkpoint.save_dir": "checkpoint.save",
    "checkpoint.load_dir": "checkpoint.load",
    "optim.lr": "optimizer.lr",
}
"""Keys often written in the wrong section or under an older name, with the correct key."""
KEYS: tuple[ConfigKey, ...] = (
    ConfigKey("model.tensor_model_parallel_size", "layout.tp"),
    ConfigKey("model.pipeline_model_parallel_size", "layout.pp"),
    ConfigKey("model.virtual_pipeline_model_parallel_size", "layout.vp", NULL_IS_1),
    ConfigKey("model.pipeline_model_parallel_layout", type="str"),
    ConfigKey("model.num_layers_in_first_pipeline_stage"),
    ConfigKey("model.num_layers_in_last_pipeline_stage"),
    ConfigKey("model.account_for_embedding_in_pipeline_split", "layout.embedding_as_layer"),
    ConfigKey("model.account_for_loss_in_pipeline_split", "layout.head_as_layer"),
    ConfigKey("model.context_parallel_size", "layout.cp"),
    ConfigKey("model.cp_comm_type", "layout.cp_comm", {**CP_COMM_TYPES, "null": "ring"}),
    ConfigKey("model.hierarchical_context_parallel_sizes", type="list"),
    ConfigKey("model.expert_model_parallel_size", "layout.ep"),
    ConfigKey("model.expert_tensor_parallel_size", "layout.etp", READ_NULL_AS_1),
    ConfigKey("model.sequence_parallel", "layout.sp"),
    ConfigKey("train.global_batch_size", "train.global_batch_size"),
    ConfigKey("train.micro_batch_size", "layout.micro_batch_size"),
    ConfigKey("dataset.seq_length", "data.seq_length"),
    ConfigKey("dataset.sequence_length", "data.seq_length", note="name in configs saved by older versions"),
    ConfigKey("model.seq_length", "data.seq_length", note="the runner overwrites it with dataset.seq_length"),
    ConfigKey("train.train_iters", "train.steps"),
    ConfigKey("validation.eval_interval", "train.eval_every", NULL_IS_0),
    ConfigKey("validation.eval_iters", "train.eval_steps"),
    ConfigKey(
        "train.eval_interval",
        "train.eval_every",
        NULL_IS_0,
        note="older key; takes precedence over validation.eval_interval",
    ),
    ConfigKey("train.eval_iters", "train.eval_steps", note="older key; takes precedence over validation.eval_iters"),
    ConfigKey("logger.log_interval", "train.log_every"),
    ConfigKey("rng.seed", "train.seed"),
    ConfigKey("--mode", choices=("pretrain", "sft", "lora", "dora")),
    ConfigKey("--dataset"),
    ConfigKey("dataset.dataset_root", type="str"),
    ConfigKey("dataset.data_path"),
    ConfigKey("dataset.path", type="str"),
    ConfigKey(bridge.VLM_FILES, type="str"),
    ConfigKey("dataset.num_workers", "data.workers"),
    ConfigKey("dataset.enable_offline_packing", "data.packing"),
    ConfigKey("dataset.offline_packing_specs"),
    ConfigKey("dataset.offline_packing_specs.packed_sequence_size", type="int"),
    ConfigKey("dataset.pad_to_max_length", "data.pad_to_max_length"),
    ConfigKey("dataset.dataset_kwargs.pad_to_max_length", "data.pad_to_max_length"),
    ConfigKey("tokenizer.tokenizer_model", "data.tokenizer", NULL_IS_EMPTY),
    ConfigKey(
        "optimizer.optimizer", "optimizer.name", OPTIMIZERS, choices=("adam", "sgd", "muon", "dist_muon", "lion")
    ),
    ConfigKey("optimizer.lr", "optimizer.lr"),
    ConfigKey("optimizer.min_lr", "schedule.min_lr"),
    ConfigKey("optimizer.weight_decay", "optimizer.weight_decay"),
    ConfigKey("optimizer.adam_beta1", "optimizer.beta1"),
    ConfigKey("optimizer.adam_beta2", "optimizer.beta2"),
    ConfigKey("optimizer.adam_eps", "optimizer.eps"),
    ConfigKey("optimizer.clip_grad", "optimizer.clip_grad"),
    ConfigKey("optimizer.muon_momentum", "optimizer.muon_momentum"),
    ConfigKey("optimizer.muon_num_ns_steps", "optimizer.muon_ns_steps"),
    ConfigKey(
        "scheduler.lr_decay_style",
        "schedule.name",
        DECAY_STYLES,
        choices=("cosine", "linear", "constant", "inverse-square-root", "WSD"),
    ),
    ConfigKey("scheduler.lr_warmup_iters", "schedule.warmup_steps"),
    ConfigKey("scheduler.lr_decay_iters", "schedule.decay_steps", NULL_IS_0),
    ConfigKey("mixed_precision"),
    ConfigKey("mixed_precision.grad_reduce_in_fp32", type="bool"),
    ConfigKey("mixed_precision.fp8_param_gather", type="bool"),
    ConfigKey("mixed_precision.first_last_layers_bf16", type="bool"),
    ConfigKey(
        "ddp.grad_reduce_in_fp32", "precision.reduce", FP32_FLAG, note="overwritten by the mixed_precision value"
    ),
    ConfigKey("ddp.fp8_param_gather", "precision.fp8_gather", note="overwritten by the mixed_precision value"),
    ConfigKey(
        "model.first_last_layers_bf16", "precision.first_last_bf16", note="overwritten by the mixed_precision value"
    ),
    ConfigKey("optimizer.use_precision_aware_optimizer", type="bool"),
    ConfigKey("optimizer.main_params_dtype", "precision.master", TORCH_DTYPES),
    ConfigKey("optimizer.exp_avg_dtype", "precision.moments", TORCH_DTYPES),
    ConfigKey("optimizer.main_grads_dtype", "precision.grads", TORCH_DTYPES),
    ConfigKey("ddp.use_megatron_fsdp", "layout.strategy", FSDP_FLAG),
    ConfigKey("dist.use_megatron_fsdp", "layout.strategy", FSDP_FLAG),
    ConfigKey("dist.use_torch_fsdp2", type="bool"),
    ConfigKey("ddp.use_distributed_optimizer", type="bool"),
    ConfigKey("optimizer.use_distributed_optimizer", type="bool"),
    ConfigKey("ddp.num_distributed_optimizer_instances", "layout.dp_replicate"),
    ConfigKey("ddp.overlap_grad_reduce", "kernels.overlap_grad_reduce"),
    ConfigKey("ddp.overlap_param_gather", "kernels.overlap_param_gather"),
    ConfigKey("comm_overlap.tp_comm_overlap", "kernels.tp_comm_overlap"),
    ConfigKey("model.tp_comm_overlap", "kernels.tp_comm_overlap"),
    ConfigKey("model.recompute_granularity", "layout.recompute", NULL_IS_NONE),
    ConfigKey("model.recompute_method"),
    ConfigKey("model.recompute_num_layers"),
    ConfigKey("model.recompute_modules", "layout.recompute_modules", {"null": "[]"}),
    ConfigKey("model.cpu_offloading", type="bool"),
    ConfigKey("optimizer.optimizer_cpu_offload", type="bool"),
    ConfigKey("model.moe_token_dispatcher_type"),
    ConfigKey("model.moe_flex_dispatcher_backend"),
    ConfigKey("model.moe_grouped_gemm", "moe.grouped_gemm"),
    ConfigKey("model.moe_shared_expert_overlap", "moe.shared_expert_overlap"),
    ConfigKey("comm_overlap.overlap_moe_expert_parallel_comm", "moe.ep_overlap"),
    ConfigKey("model.overlap_moe_expert_parallel_comm", "moe.ep_overlap"),
    ConfigKey("model.moe_router_force_load_balancing", "moe.force_balance"),
    ConfigKey("model.moe_router_load_balancing_type", "moe.balancing"),
    ConfigKey("model.moe_router_enable_expert_bias", type="bool"),
    ConfigKey("model.moe_aux_loss_coeff", "moe.aux_loss"),
    ConfigKey("model.moe_z_loss_coeff", "moe.router_z_loss", NULL_IS_0),
    ConfigKey("model.moe_expert_capacity_factor", "moe.capacity_factor", NULL_IS_0),
    ConfigKey("model.moe_router_dtype", "moe.router_dtype", {"null": "bf16"}, choices=("fp32", "fp64", "null")),
    ConfigKey(
        "model.attention_backend",
        "kernels.attention",
        {**ATTENTION_BACKENDS, "null": "auto"},
        choices=("auto", "flash", "fused", "unfused", "local", "null"),
    ),
    ConfigKey("model.cuda_graph_impl", "kernels.cuda_graphs", READ_NULL_AS_NONE),
    ConfigKey("model.cuda_graph_scope", "kernels.cuda_graph_scope", {"null": "[]", "full": "[]"}),
    ConfigKey("rng.te_rng_tracker", "kernels.te_rng_tracker"),
    ConfigKey("model.use_te_rng_tracker", "kernels.te_rng_tracker"),
    ConfigKey("model.deterministic_mode", "kernels.deterministic"),
    ConfigKey("model.calculate_per_token_loss", "train.per_token_loss"),
    ConfigKey("model.mtp_num_layers"),
    ConfigKey("model.mtp_loss_scaling_factor", "train.mtp_loss", NULL_IS_0),
    *(ConfigKey(key, type="bool") for key in bridge.FREEZE_KEYS),
    ConfigKey("rerun_state_machine.check_for_nan_in_loss", "train.check_nan"),
    ConfigKey("peft.dim", "peft.rank"),
    ConfigKey("peft.alpha", "peft.alpha"),
    ConfigKey("peft.dropout", "peft.dropout"),
    ConfigKey("peft.target_modules", "peft.targets", {**LORA_TARGETS, **MLA_MODULES}),
    ConfigKey("checkpoint.pretrained_checkpoint", "checkpoint.pretrained", NULL_IS_EMPTY),
    ConfigKey("checkpoint.save_interval", "checkpoint.save_every", NULL_IS_0),
    ConfigKey("checkpoint.save_retain_interval", "checkpoint.milestone_every", NULL_IS_0),
    ConfigKey("checkpoint.most_recent_k", "checkpoint.keep", {"-1": KEEP_ALL}),
    ConfigKey("checkpoint.async_save", "checkpoint.async_save"),
    ConfigKey("model.num_layers", "architecture.layers"),
    ConfigKey("model.hidden_size", "architecture.hidden"),
    ConfigKey("model.ffn_hidden_size", "architecture.ffn"),
    ConfigKey("model.num_attention_heads", "architecture.heads"),
    ConfigKey("model.num_query_groups", "architecture.kv_heads"),
    ConfigKey("model.kv_channels", "architecture.head_dim"),
    ConfigKey("model.vocab_size", "architecture.vocab"),
    ConfigKey("model.num_moe_experts", "architecture.experts"),
    ConfigKey("model.moe_router_topk", "architecture.topk"),
    ConfigKey(
        "dataset.packed_sequence_specs.packed_sequence_size",
        status="removed",
        replacement="dataset.offline_packing_specs.packed_sequence_size=…",
        note="renamed to offline_packing_specs",
    ),
    ConfigKey(
        "dataset.packed_sequence_specs.pad_seq_to_mult",
        status="removed",
        replacement="dataset.offline_packing_specs.pad_seq_to_mult=…",
        note="renamed to offline_packing_specs",
    ),
    ConfigKey("dataset.pack_sequences_in_batch", status="removed", replacement="dataset.enable_in_batch_packing=…"),
    ConfigKey("dataset.maker_name", status="removed", replacement="dataset.source.schema_adapter=…"),
    ConfigKey("model.enable_cuda_graph", status="removed", replacement="model.cuda_graph_impl=local"),
    ConfigKey("model.external_cuda_graph", status="removed", replacement="model.cuda_graph_impl=transformer_engine"),
    ConfigKey("model.fp8_hybrid", status="removed", replacement="mixed_precision=bf16_with_fp8_current_scaling_mixed"),
    ConfigKey("model.fp8_e4m3", status="removed", replacement="mixed_precision=bf16_with_fp8_current_scaling_mixed"),
    *(
        ConfigKey(key, status="removed", replacement=f"{other}=…", note=f"the field is {other}")
        for key, other in MISPLACED_KEYS.items()
    ),
)


COMPOSITE_KEYS: tuple[CompositeKey, ...] = (
    CompositeKey(
        ("model.virtual_pipeline_model_parallel_size",),
        ("layout.vp", "layout.pp_schedule"),
        shared.virtual_stages,
        bridge.virtual_stages,
    ),
    CompositeKey(
        ("model.recompute_granularity", "model.recompute_method", "model.recompute_num_layers"),
        ("layout.recompute", "layout.recompute_layers"),
        shared.recompute,
        bridge.recompute,
    ),
    CompositeKey(
        ("model.moe_token_dispatcher_type", "model.moe_flex_dispatcher_backend"),
        ("moe.dispatcher",),
        shared.dispatcher,
        bridge.dispatcher,
    ),
    CompositeKey(
        ("mixed_precision",),
        ("precision.compute", "precision.matmul"),
        shared.mixed_precision,
        bridge.precision,
    ),
    CompositeKey(
        ("model.cpu_offloading", "optimizer.optimizer_cpu_offload"),
        ("layout.offload",),
        shared.offload,
        bridge.offload,
    ),
    CompositeKey(
        (
            "ddp.use_megatron_fsdp",
            "dist.use_megatron_fsdp",
            "dist.use_torch_fsdp2",
            "ddp.use_distributed_optimizer",
            "optimizer.use_distributed_optimizer",
        ),
        ("layout.strategy",),
        bridge.strategy,
        bridge.strategy_keys,
    ),
    CompositeKey(bridge.EVAL_KEYS, ("train.eval_every", "train.eval_steps"), bridge.evaluation, bridge.evaluation_keys),
    CompositeKey(
        ("model.mtp_num_layers", "model.mtp_loss_scaling_factor"),
        ("train.mtp_loss",),
        bridge.prediction,
        bridge.prediction_keys,
    ),
    CompositeKey(
        ("model.moe_router_load_balancing_type", "model.moe_router_enable_expert_bias"),
        ("moe.balancing",),
        bridge.balancing,
        bridge.balancing_keys,
    ),
    CompositeKey(tuple(bridge.FREEZE_KEYS), ("train.freeze",), bridge.frozen, bridge.frozen_keys),
    CompositeKey(
        (
            "dataset.enable_offline_packing",
            "dataset.offline_packing_specs",
            "dataset.offline_packing_specs.packed_sequence_size",
        ),
        ("data.packing",),
        bridge.packing,
        bridge.packing_keys,
    ),
    CompositeKey(bridge.DATA_KEYS, ("data.dataset",), bridge.dataset, bridge.dataset_keys),
    CompositeKey(
        ("model.pipeline_model_parallel_layout",), ("layout.stage_layers",), bridge.stage_layers, bridge.stage_keys
    ),
    CompositeKey(
        ("model.hierarchical_context_parallel_sizes",), ("layout.cp_inner",), bridge.hierarchy, bridge.hierarchy_keys
    ),
)
