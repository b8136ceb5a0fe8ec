"""Key map of Megatron-LM's flags (Megatron-Core 0.20.0, 2026-08-22), written with underscores and without dashes."""

from __future__ import annotations

import msgspec

from meshwright.recipes.key_maps import megatron_lm_composite_keys as composites
from meshwright.recipes.key_maps import wsd_keys
from meshwright.recipes.key_maps.key import CompositeKey, ConfigKey
from meshwright.recipes.key_maps.megatron_lm_choices import parser_flags
from meshwright.recipes.key_maps.megatron_lm_unmapped_flags import LIST_FLAGS, SINGLE_VALUE_FLAGS, SWITCH_FLAGS
from meshwright.recipes.key_maps.megatron_lm_unmapped_flags import REMOVED_FLAGS as PAST_FLAGS
from meshwright.recipes.key_maps.value_maps import ATTENTION_BACKENDS, DECAY_STYLES, NULL_IS_0, NULL_IS_1, OPTIMIZERS

INVERTED = {"true": "false", "false": "true"}
NULL_IS_OFF = {"null": "0.0"}
BF16_FLAG = {"true": "bf16", "false": "fp32"}
ROUTER_DTYPES = {"fp32": "fp32", "fp64": "fp32", "null": "bf16"}
STATE_DTYPES = ("fp32", "fp16", "bf16", "fp8")

MODEL_KEYS = (
    ConfigKey("num_layers", "architecture.layers"),
    ConfigKey("hidden_size", "architecture.hidden"),
    ConfigKey(
        "ffn_hidden_size", "architecture.ffn", note="4 × hidden, or two thirds of that with --swiglu, when unset"
    ),
    ConfigKey("num_attention_heads", "architecture.heads"),
    ConfigKey("num_query_groups", "architecture.kv_heads", default=1, note="read with --group-query-attention only"),
    ConfigKey("kv_channels", "architecture.head_dim", note="hidden / heads when unset"),
    ConfigKey("vocab_size", "architecture.vocab"),
    ConfigKey("num_experts", "architecture.experts"),
    ConfigKey("moe_router_topk", "architecture.topk", default=2),
    ConfigKey("rotary_base", "architecture.rope_theta", default=10000),
    ConfigKey("norm_epsilon", "architecture.norm_eps", default=1e-5),
    ConfigKey("init_method_std", "train.init_std", {"null": "0.0"}, note="0.02 when unset"),
    ConfigKey("mtp_num_layers", default=None),
    ConfigKey("mtp_loss_scaling_factor", default=0.1),
)
PARALLEL_KEYS = (
    ConfigKey("tensor_model_parallel_size", "layout.tp", default=1),
    ConfigKey("pipeline_model_parallel_size", "layout.pp", default=1),
    ConfigKey("context_parallel_size", "layout.cp", default=1),
    ConfigKey("expert_model_parallel_size", "layout.ep", default=1),
    ConfigKey("expert_tensor_parallel_size", "layout.etp", note="as --tensor-model-parallel-size when unset"),
    ConfigKey("sequence_parallel", "layout.sp", default=False),
    ConfigKey("num_virtual_stages_per_pipeline_rank", default=None),
    ConfigKey("num_layers_per_virtual_pipeline_stage", default=None),
    ConfigKey("pipeline_model_parallel_layout", default=None, since="0.13"),
    ConfigKey("decoder_first_pipeline_num_layers", type="int"),
    ConfigKey("decoder_last_pipeline_num_layers", type="int"),
    ConfigKey("account_for_embedding_in_pipeline_split", "layout.embedding_as_layer", default=False),
    ConfigKey("account_for_loss_in_pipeline_split", "layout.head_as_layer", default=False),
    ConfigKey("cp_comm_type", default="p2p"),
    ConfigKey("hierarchical_context_parallel_sizes", default=None),
    ConfigKey("use_distributed_optimizer", default=False),
    ConfigKey("use_megatron_fsdp", default=False),
    ConfigKey("use_torch_fsdp2", default=False),
    ConfigKey(
        "data_parallel_sharding_strategy",
        default="optim_grads_params",
        note="no_shard until 0.17",
        choices=("no_shard", "optim", "optim_grads", "optim_grads_params"),
    ),
    ConfigKey("torch_fsdp2_no_reshard_after_forward", "layout.reshard_after_forward", INVERTED, default=False),
    ConfigKey("num_distributed_optimizer_instances", "layout.dp_replicate", default=1),
    ConfigKey("overlap_grad_reduce", "kernels.overlap_grad_reduce", default=False),
    ConfigKey("overlap_param_gather", "kernels.overlap_param_gather", default=False),
    ConfigKey("tp_comm_overlap", "kernels.tp_comm_overlap", default=False),
)
TRAINING_KEYS = (
    ConfigKey("micro_batch_size", "layout.micro_batch_size"),
    ConfigKey("global_batch_size", "train.global_batch_size", note="micro batch × data-parallel ranks when unset"),
    ConfigKey("seq_length", "data.seq_length"),
    ConfigKey("train_iters", "train.steps"),
    ConfigKey("train_samples", type="int"),
    ConfigKey("optimizer", "optimizer.name", OPTIMIZERS, default="adam",
              choices=("adam", "sgd", "muon", "dist_muon", "adaptive_muon", "lion", "soap")),
    ConfigKey("lr", "optimizer.lr"),
    ConfigKey("min_lr", "schedule.min_lr", default=0.0),
    ConfigKey("lr_decay_style", "schedule.name", DECAY_STYLES, default="linear",
              choices=("constant", "linear", "cosine", "inverse-square-root", "WSD")),
    ConfigKey("lr_warmup_iters", "schedule.warmup_steps", default=0),
    ConfigKey("lr_warmup_samples", type="int"),
    ConfigKey("lr_warmup_fraction", type="float"),
    ConfigKey("lr_decay_iters", "schedule.decay_steps", NULL_IS_0, default=None, note="as --train-iters when unset"),
    ConfigKey("lr_decay_samples", type="int"),
    ConfigKey("lr_wsd_decay_iters", type="int"),
    ConfigKey("lr_wsd_decay_samples", type="int"),
    ConfigKey("lr_wsd_decay_style", choices=wsd_keys.STYLES),
    ConfigKey("weight_decay", "optimizer.weight_decay", default=0.01),
    ConfigKey("adam_beta1", "optimizer.beta1", default=0.9),
    ConfigKey("adam_beta2", "optimizer.beta2", default=0.999),
    ConfigKey("adam_eps", "optimizer.eps", default=1e-8),
    ConfigKey("clip_grad", "optimizer.clip_grad", default=1.0),
    ConfigKey("muon_momentum", "optimizer.muon_momentum", default=0.9, since="0.15"),
    ConfigKey("muon_num_ns_steps", "optimizer.muon_ns_steps", default=5, since="0.15"),
    ConfigKey("calculate_per_token_loss", "train.per_token_loss", default=False),
    ConfigKey("no_check_for_nan_in_loss_and_grad", "train.check_nan", INVERTED, default=False),
    ConfigKey("seed", "train.seed", default=1234),
    ConfigKey("sft", default=False, since="0.14"),
)  # fmt: skip
PRECISION_KEYS = (
    ConfigKey("bf16", default=False),
    ConfigKey("fp16", default=False),
    ConfigKey("grad_reduce_in_bf16", "precision.reduce", BF16_FLAG, default=False),
    ConfigKey("main_grads_dtype", "precision.grads", default="fp32", choices=("fp32", "bf16")),
    ConfigKey("main_params_dtype", "precision.master", default="fp32", choices=("fp32", "fp16")),
    ConfigKey("exp_avg_dtype", "precision.moments", default="fp32", choices=STATE_DTYPES),
    ConfigKey("fp8_format", default=None, choices=("e4m3", "hybrid"), since="2023-08"),
    ConfigKey("fp8_recipe", default="delayed", choices=("tensorwise", "delayed", "mxfp8", "blockwise", "custom")),
    ConfigKey("fp4_format", default=None, choices=("e2m1",), since="0.15"),
    ConfigKey("fp8_param_gather", "precision.fp8_gather", default=False),
    ConfigKey("first_last_layers_bf16", "precision.first_last_bf16", default=False),
)
MEMORY_KEYS = (
    ConfigKey("recompute_granularity", default=None, choices=("full", "selective")),
    ConfigKey("recompute_method", default=None, choices=("uniform", "block")),
    ConfigKey("recompute_num_layers", default=None),
    ConfigKey("recompute_activations", default=False, note="the same as --recompute-granularity selective"),
    ConfigKey("recompute_modules", default=None),
    ConfigKey("optimizer_cpu_offload", default=False, since="0.11"),
    ConfigKey("cpu_offloading_num_layers", default=0),
    ConfigKey("fine_grained_activation_offloading", default=False, since="0.16"),
)
KERNEL_KEYS = (
    ConfigKey("attention_backend", "kernels.attention", ATTENTION_BACKENDS, default="auto",
              choices=("auto", "flash", "fused", "unfused", "local"), since="0.10"),
    ConfigKey("cuda_graph_impl", "kernels.cuda_graphs", default="none",
              choices=("none", "local", "transformer_engine", "full_iteration"), since="0.15"),
    ConfigKey("cuda_graph_modules", default=None, since="0.18"),
    ConfigKey("cuda_graph_scope", default=None),
    ConfigKey("te_rng_tracker", "kernels.te_rng_tracker", default=False),
    ConfigKey("cross_entropy_loss_fusion", default=False),
    ConfigKey("cross_entropy_fusion_impl", default="native"),
    ConfigKey("deterministic_mode", "kernels.deterministic", default=False),
)  # fmt: skip
MOE_KEYS = (
    ConfigKey("moe_router_load_balancing_type", default="aux_loss"),
    ConfigKey("moe_router_enable_expert_bias", default=False),
    ConfigKey("moe_aux_loss_coeff", "moe.aux_loss", default=0.0),
    ConfigKey("moe_z_loss_coeff", "moe.router_z_loss", NULL_IS_OFF, default=None),
    ConfigKey("moe_expert_capacity_factor", "moe.capacity_factor", NULL_IS_OFF, default=None),
    ConfigKey("moe_router_dtype", "moe.router_dtype", ROUTER_DTYPES, default=None, choices=("fp32", "fp64")),
    ConfigKey("moe_token_dispatcher_type", default="allgather", choices=("allgather", "alltoall", "flex")),
    ConfigKey("moe_flex_dispatcher_backend", default=None, since="0.16"),
    ConfigKey("moe_enable_deepep", default=False, note="now --moe-flex-dispatcher-backend deepep"),
    ConfigKey("moe_grouped_gemm", "moe.grouped_gemm", default=False),
    ConfigKey("moe_shared_expert_overlap", "moe.shared_expert_overlap", default=False),
    ConfigKey("overlap_moe_expert_parallel_comm", "moe.ep_overlap", default=False),
    ConfigKey("moe_router_force_load_balancing", "moe.force_balance", default=False),
)
RUN_KEYS = (
    ConfigKey("mock_data", default=False),
    ConfigKey("data_path", default=None),
    ConfigKey("train_data_path", default=None),
    *(ConfigKey(key, default=None) for key in composites.DATA_LISTS.values()),
    ConfigKey("tokenizer_type", default=None, choices=(
        "BertWordPieceLowerCase", "BertWordPieceCase", "GPT2BPETokenizer", "SentencePieceTokenizer",
        "GPTSentencePieceTokenizer", "HuggingFaceTokenizer", "Llama2Tokenizer", "TikTokenizer", "MultimodalTokenizer",
        "NullTokenizer", "NullMultimodalTokenizer", "SFTTokenizer")),
    ConfigKey("tokenizer_model", "data.tokenizer", default=""),
    ConfigKey("num_workers", "data.workers", default=2),
    ConfigKey("save", default=None),
    ConfigKey("load", default=None),
    ConfigKey("finetune", default=False),
    ConfigKey("pretrained_checkpoint", default=None),
    ConfigKey("save_interval", "checkpoint.save_every", NULL_IS_0, default=None),
    ConfigKey("save_retain_interval", "checkpoint.milestone_every", NULL_IS_0, default=None),
    ConfigKey("async_save", "checkpoint.async_save", default=False),
    ConfigKey("eval_interval", default=None),
    ConfigKey("eval_iters", default=100),
    ConfigKey("log_interval", "train.log_every", default=100),
    ConfigKey("profile", "train.profile", default=False),
)  # fmt: skip
REMOVED_KEYS = (
    ConfigKey("fp8_hybrid", status="removed", since="2022-12", until="2023-08", replacement="--fp8-format hybrid"),
    ConfigKey("fp8_e4m3", status="removed", since="2022-12", until="2023-08", replacement="--fp8-format e4m3"),
    ConfigKey("cpu_optimizer", status="removed", note="this flag never existed",
              replacement="--optimizer-cpu-offload --use-precision-aware-optimizer"),
    ConfigKey("cpu_optimizer_type", type="str", status="removed", note="this flag never existed",
              replacement="--optimizer-cpu-offload --use-precision-aware-optimizer"),
    ConfigKey("use_legacy_models", status="removed", until="2026-05-06", note="only Megatron-Core models remain"),
    ConfigKey("use_mcore_models", status="ignored", note="Megatron-Core models are the default since 2024-05"),
    ConfigKey("use_flash_attn", status="ignored", replacement="--attention-backend flash"),
    ConfigKey("virtual_pipeline_model_parallel_size", "layout.vp", NULL_IS_1, type="int", status="removed",
              note="derived from the number of virtual stages; there is no flag",
              replacement="--num-virtual-stages-per-pipeline-rank N"),
    ConfigKey("batch_size", type="int", status="removed", replacement="--micro-batch-size N"),
    ConfigKey("warmup", type="str", status="removed", replacement="--lr-warmup-fraction F"),
    ConfigKey("model_parallel_size", type="int", status="removed", replacement="--tensor-model-parallel-size N"),
    ConfigKey("checkpoint_activations", status="removed",
              replacement="--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    ConfigKey("checkpoint_num_layers", type="int", status="removed", replacement="--recompute-num-layers N"),
    ConfigKey("activations_checkpoint_method", type="str", status="removed", replacement="--recompute-method …"),
    ConfigKey("distribute_checkpointed_activations", status="removed", replacement="--distribute-saved-activations"),
    ConfigKey("no_query_key_layer_scaling", status="removed", note="off is the default now"),
    ConfigKey("DDP_impl", type="str", status="removed"),
    ConfigKey("data_impl", status="removed", until="2023-08", type="str", note="datasets are always memory-mapped"),
    ConfigKey("use_contiguous_parameters_in_local_ddp", status="removed"),
    ConfigKey("disable_te_fused_rope", status="removed", replacement="--no-rope-fusion"),
    ConfigKey("no_contiguous_buffers_in_local_ddp", status="removed"),
    ConfigKey("empty_unused_memory_each_iter", status="removed", replacement="--empty-unused-memory-level 1"),
    ConfigKey("standalone_embedding_stage", status="removed",
              replacement="--account-for-embedding-in-pipeline-split"),
    ConfigKey("pipeline_model_parallel_split_rank", type="int", status="removed"),
    ConfigKey("use_custom_fsdp", status="removed", until="0.12", replacement="--use-megatron-fsdp"),
    ConfigKey("overlap_p2p_communication", status="removed", note="always on with virtual stages"),
    ConfigKey("log_batch_size_to_tensorboard", status="removed"),
    ConfigKey("log_learning_rate_to_tensorboard", status="removed"),
    ConfigKey("use_dist_ckpt", status="ignored", replacement="--ckpt-format torch_dist"),
    ConfigKey("dist_ckpt_format", status="ignored", replacement="--ckpt-format …", type="str"),
    ConfigKey("ckpt_fully_parallel_save", status="ignored", note="on unless --no-ckpt-fully-parallel-save is set"),
    ConfigKey("fp8_interval", status="ignored", type="int"),
    ConfigKey("no_async_tensor_model_parallel_allreduce", status="removed", until="0.16"),
    ConfigKey("moe_extended_tp", status="removed", replacement="--expert-tensor-parallel-size N"),
    ConfigKey("moe_layer_recompute", type="flag", note="now --recompute-granularity selective --recompute-modules moe"),
)  # fmt: skip

SCRIPT_ARRAYS: dict[str, tuple[ConfigKey, ...]] = {
    "GPT_MODEL_ARGS": MODEL_KEYS,
    "MODEL_PARALLEL_ARGS": PARALLEL_KEYS,
    "TRAINING_ARGS": TRAINING_KEYS,
    "PRECISION_ARGS": PRECISION_KEYS,
    "MEMORY_ARGS": MEMORY_KEYS,
    "KERNEL_ARGS": KERNEL_KEYS,
    "MOE_ARGS": MOE_KEYS,
    "RUN_ARGS": RUN_KEYS,
}
"""Mapped flags, by the bash array that a generated script puts them in."""

_LISTED: tuple[ConfigKey, ...] = (
    *(config_key for group in SCRIPT_ARRAYS.values() for config_key in group),
    *REMOVED_KEYS,
    *(
        ConfigKey(name, type=takes, status="removed", until=until)
        for (until, takes), names in PAST_FLAGS.items()
        for name in names.split()
    ),
    *(ConfigKey(name, type="flag") for name in SWITCH_FLAGS.split()),
    *(ConfigKey(name, type="str") for name in SINGLE_VALUE_FLAGS.split()),
    *(ConfigKey(name, type="list") for name in LIST_FLAGS.split()),
)


def _with_parser_flags(listed: tuple[ConfigKey, ...]) -> tuple[ConfigKey, ...]:
    """Return keys with the values that the parser accepts, and the flags of the parser that are not listed."""
    flags, names = parser_flags(), {one.key for one in listed}
    known = [
        one if one.choices or one.key not in flags else msgspec.structs.replace(one, choices=flags[one.key].choices)
        for one in listed
    ]
    others = [ConfigKey(one.name, type=one.type, choices=one.choices) for one in flags.values()]
    return (*known, *(one for one in others if one.key not in names))


KEYS: tuple[ConfigKey, ...] = _with_parser_flags(_LISTED)

COMPOSITE_KEYS: tuple[CompositeKey, ...] = (
    CompositeKey(("num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage",
        "pipeline_model_parallel_layout"), ("layout.vp", "layout.pp_schedule", "layout.stage_layers"),
        composites.read_stages, composites.write_stages, composites.override_stages),
    CompositeKey(("cp_comm_type", "hierarchical_context_parallel_sizes"), ("layout.cp_comm", "layout.cp_inner"),
        composites.read_context, composites.write_context),
    CompositeKey(("use_distributed_optimizer", "use_megatron_fsdp", "use_torch_fsdp2",
        "data_parallel_sharding_strategy"), ("layout.strategy",), composites.read_strategy, composites.write_strategy),
    CompositeKey(("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_activations"),
        ("layout.recompute", "layout.recompute_layers"), composites.read_recompute, composites.write_recompute,
        composites.override_recompute),
    CompositeKey(("recompute_modules",), ("layout.recompute_modules",), composites.read_modules,
        composites.write_modules),
    CompositeKey(("optimizer_cpu_offload", "cpu_offloading_num_layers", "fine_grained_activation_offloading"),
        ("layout.offload",), composites.read_offload, composites.write_offload),
    CompositeKey(("bf16", "fp16"), ("precision.compute",), composites.read_compute, composites.write_compute),
    CompositeKey(("fp8_format", "fp8_recipe", "fp4_format"), ("precision.matmul",), composites.read_matmul,
        composites.write_matmul),
    CompositeKey(("cuda_graph_modules", "cuda_graph_scope"), ("kernels.cuda_graph_scope",), composites.read_scope,
        composites.write_scope),
    CompositeKey(("cross_entropy_loss_fusion", "cross_entropy_fusion_impl"), ("kernels.loss",), composites.read_loss,
        composites.write_loss),
    CompositeKey(("moe_router_load_balancing_type", "moe_router_enable_expert_bias"), ("moe.balancing",),
        composites.read_balancing, composites.write_balancing),
    CompositeKey(("moe_token_dispatcher_type", "moe_flex_dispatcher_backend", "moe_enable_deepep"),
        ("moe.dispatcher",), composites.read_dispatcher, composites.write_dispatcher),
    CompositeKey(("mtp_num_layers", "mtp_loss_scaling_factor"), ("train.mtp_loss",), composites.read_mtp,
        composites.write_mtp),
    CompositeKey(("mock_data", "data_path", "train_data_path", *composites.DATA_LISTS.values()),
        ("data.dataset", "data.blend"), composites.read_data, composites.write_data),
    CompositeKey(("sft",), ("data.packing",), composites.read_sft, composites.write_sft),
    CompositeKey(("lr_wsd_decay_iters", "lr_wsd_decay_style"), wsd_keys.FIELDS,
        *wsd_keys.readers("lr_wsd_decay_iters", "lr_wsd_decay_style", "exponential")),
    CompositeKey(("save", "load", "finetune", "pretrained_checkpoint"),
        ("checkpoint.pretrained", "checkpoint.resume", "checkpoint.folder"), composites.read_checkpoint,
        composites.write_checkpoint),
    CompositeKey(("eval_interval", "eval_iters"), ("train.eval_every", "train.eval_steps"), composites.read_eval,
        composites.write_eval),
)  # fmt: skip
