"""Megatron-LM's flags (Megatron-Core 0.20.0, 2026-08-22), without their dashes and with underscores."""

from __future__ import annotations

from meshwright.recipes.foreign import megatron_joints as joint
from meshwright.recipes.foreign.megatron_flags import MANY_VALUES, ONE_VALUE, SWITCHES
from meshwright.recipes.foreign.megatron_flags import PAST as PAST_FLAGS
from meshwright.recipes.foreign.values import ATTENTION, DECAYS, NULL_IS_0, NULL_IS_1, OPTIMIZERS
from meshwright.recipes.foreign.word import Joint, Word

INVERTED = {"true": "false", "false": "true"}
NULL_IS_OFF = {"null": "0.0"}
BF16_FLAG = {"true": "bf16", "false": "fp32"}
ROUTER_DTYPES = {"fp32": "fp32", "fp64": "fp32", "null": "bf16"}
STATE_DTYPES = ("fp32", "fp16", "bf16", "fp8")

MODEL = (
    Word("num_layers", "architecture.layers"),
    Word("hidden_size", "architecture.hidden"),
    Word("ffn_hidden_size", "architecture.ffn", note="4 × hidden, or two thirds of that with --swiglu, when unsaid"),
    Word("num_attention_heads", "architecture.heads"),
    Word("num_query_groups", "architecture.kv_heads", default=1, note="read with --group-query-attention only"),
    Word("kv_channels", "architecture.head_dim", note="hidden / heads when unsaid"),
    Word("vocab_size", "architecture.vocab"),
    Word("num_experts", "architecture.experts"),
    Word("moe_router_topk", "architecture.topk", default=2),
    Word("mtp_num_layers", default=None),
    Word("mtp_loss_scaling_factor", default=0.1),
)
PARALLEL = (
    Word("tensor_model_parallel_size", "layout.tp", default=1),
    Word("pipeline_model_parallel_size", "layout.pp", default=1),
    Word("context_parallel_size", "layout.cp", default=1),
    Word("expert_model_parallel_size", "layout.ep", default=1),
    Word("expert_tensor_parallel_size", "layout.etp", note="as --tensor-model-parallel-size when unsaid"),
    Word("sequence_parallel", "layout.sp", default=False),
    Word("num_virtual_stages_per_pipeline_rank", default=None),
    Word("num_layers_per_virtual_pipeline_stage", default=None),
    Word("pipeline_model_parallel_layout", default=None, since="0.13"),
    Word("decoder_first_pipeline_num_layers", takes="int"),
    Word("decoder_last_pipeline_num_layers", takes="int"),
    Word("account_for_embedding_in_pipeline_split", "layout.embedding_as_layer", default=False),
    Word("account_for_loss_in_pipeline_split", "layout.head_as_layer", default=False),
    Word("cp_comm_type", default="p2p"),
    Word("hierarchical_context_parallel_sizes", default=None),
    Word("use_distributed_optimizer", default=False),
    Word("use_megatron_fsdp", default=False),
    Word("use_torch_fsdp2", default=False),
    Word(
        "data_parallel_sharding_strategy",
        default="optim_grads_params",
        note="no_shard until 0.17",
        choices=("no_shard", "optim", "optim_grads", "optim_grads_params"),
    ),
    Word("torch_fsdp2_no_reshard_after_forward", "layout.reshard_after_forward", INVERTED, default=False),
    Word("num_distributed_optimizer_instances", "layout.dp_replicate", default=1),
    Word("overlap_grad_reduce", "kernels.overlap_grad_reduce", default=False),
    Word("overlap_param_gather", "kernels.overlap_param_gather", default=False),
    Word("tp_comm_overlap", "kernels.tp_comm_overlap", default=False),
)
TRAINING = (
    Word("micro_batch_size", "layout.micro_batch_size"),
    Word("global_batch_size", "train.global_batch_size", note="micro batch × data-parallel ranks when unsaid"),
    Word("seq_length", "data.seq_length"),
    Word("train_iters", "train.steps"),
    Word("train_samples", takes="int"),
    Word("optimizer", "optimizer.name", OPTIMIZERS, default="adam",
         choices=("adam", "sgd", "muon", "dist_muon", "adaptive_muon", "lion", "soap")),
    Word("lr", "optimizer.lr"),
    Word("min_lr", "schedule.min_lr", default=0.0),
    Word("lr_decay_style", "schedule.name", DECAYS, default="linear",
         choices=("constant", "linear", "cosine", "inverse-square-root", "WSD")),
    Word("lr_warmup_iters", "schedule.warmup_steps", default=0),
    Word("lr_warmup_samples", takes="int"),
    Word("lr_warmup_fraction", takes="float"),
    Word("lr_decay_iters", "schedule.decay_steps", NULL_IS_0, default=None, note="as --train-iters when unsaid"),
    Word("lr_decay_samples", takes="int"),
    Word("weight_decay", "optimizer.weight_decay", default=0.01),
    Word("adam_beta1", "optimizer.beta1", default=0.9),
    Word("adam_beta2", "optimizer.beta2", default=0.999),
    Word("adam_eps", "optimizer.eps", default=1e-8),
    Word("clip_grad", "optimizer.clip_grad", default=1.0),
    Word("muon_momentum", "optimizer.muon_momentum", default=0.9, since="0.15"),
    Word("muon_num_ns_steps", "optimizer.muon_ns_steps", default=5, since="0.15"),
    Word("calculate_per_token_loss", "train.per_token_loss", default=False),
    Word("no_check_for_nan_in_loss_and_grad", "train.check_nan", INVERTED, default=False),
    Word("seed", "train.seed", default=1234),
    Word("sft", default=False, since="0.14"),
)  # fmt: skip
PRECISION = (
    Word("bf16", default=False),
    Word("fp16", default=False),
    Word("grad_reduce_in_bf16", "precision.reduce", BF16_FLAG, default=False),
    Word("main_grads_dtype", "precision.grads", default="fp32", choices=("fp32", "bf16")),
    Word("main_params_dtype", "precision.master", default="fp32", choices=("fp32", "fp16")),
    Word("exp_avg_dtype", "precision.moments", default="fp32", choices=STATE_DTYPES),
    Word("fp8_format", default=None, choices=("e4m3", "hybrid"), since="2023-08"),
    Word("fp8_recipe", default="delayed", choices=("tensorwise", "delayed", "mxfp8", "blockwise", "custom")),
    Word("fp4_format", default=None, choices=("e2m1",), since="0.15"),
    Word("fp8_param_gather", "precision.fp8_gather", default=False),
    Word("first_last_layers_bf16", "precision.first_last_bf16", default=False),
)
MEMORY = (
    Word("recompute_granularity", default=None, choices=("full", "selective")),
    Word("recompute_method", default=None, choices=("uniform", "block")),
    Word("recompute_num_layers", default=None),
    Word("recompute_activations", default=False, note="the same as --recompute-granularity selective"),
    Word("recompute_modules", default=None),
    Word("optimizer_cpu_offload", default=False, since="0.11"),
    Word("cpu_offloading_num_layers", default=0),
    Word("fine_grained_activation_offloading", default=False, since="0.16"),
)
KERNELS = (
    Word("attention_backend", "kernels.attention", ATTENTION, default="auto",
         choices=("auto", "flash", "fused", "unfused", "local"), since="0.10"),
    Word("cuda_graph_impl", "kernels.cuda_graphs", default="none",
         choices=("none", "local", "transformer_engine", "full_iteration"), since="0.15"),
    Word("cuda_graph_modules", default=None, since="0.18"),
    Word("cuda_graph_scope", default=None),
    Word("te_rng_tracker", "kernels.te_rng_tracker", default=False),
    Word("cross_entropy_loss_fusion", default=False),
    Word("cross_entropy_fusion_impl", default="native"),
    Word("deterministic_mode", "kernels.deterministic", default=False),
)  # fmt: skip
EXPERTS = (
    Word("moe_router_load_balancing_type", default="aux_loss"),
    Word("moe_router_enable_expert_bias", default=False),
    Word("moe_aux_loss_coeff", "moe.aux_loss", default=0.0),
    Word("moe_z_loss_coeff", "moe.router_z_loss", NULL_IS_OFF, default=None),
    Word("moe_expert_capacity_factor", "moe.capacity_factor", NULL_IS_OFF, default=None),
    Word("moe_router_dtype", "moe.router_dtype", ROUTER_DTYPES, default=None, choices=("fp32", "fp64")),
    Word("moe_token_dispatcher_type", default="allgather", choices=("allgather", "alltoall", "flex")),
    Word("moe_flex_dispatcher_backend", default=None, since="0.16"),
    Word("moe_enable_deepep", default=False, note="today --moe-flex-dispatcher-backend deepep"),
    Word("moe_grouped_gemm", "moe.grouped_gemm", default=False),
    Word("moe_shared_expert_overlap", "moe.shared_expert_overlap", default=False),
    Word("overlap_moe_expert_parallel_comm", "moe.ep_overlap", default=False),
    Word("moe_router_force_load_balancing", "moe.force_balance", default=False),
)
RUN = (
    Word("mock_data", default=False),
    Word("data_path", default=None),
    Word("train_data_path", default=None),
    Word("tokenizer_type", default=None, choices=(
        "BertWordPieceLowerCase", "BertWordPieceCase", "GPT2BPETokenizer", "SentencePieceTokenizer",
        "GPTSentencePieceTokenizer", "HuggingFaceTokenizer", "Llama2Tokenizer", "TikTokenizer", "MultimodalTokenizer",
        "NullTokenizer", "NullMultimodalTokenizer", "SFTTokenizer")),
    Word("tokenizer_model", "data.tokenizer", default=""),
    Word("num_workers", "data.workers", default=2),
    Word("save", default=None),
    Word("load", default=None),
    Word("finetune", default=False),
    Word("pretrained_checkpoint", default=None),
    Word("save_interval", "checkpoint.save_every", NULL_IS_0, default=None),
    Word("save_retain_interval", "checkpoint.milestone_every", NULL_IS_0, default=None),
    Word("async_save", "checkpoint.async_save", default=False),
    Word("eval_interval", default=None),
    Word("eval_iters", default=100),
    Word("log_interval", "train.log_every", default=100),
    Word("profile", "train.profile", default=False),
)  # fmt: skip
PAST = (
    Word("fp8_hybrid", fate="gone", since="2022-12", until="2023-08", instead="--fp8-format hybrid"),
    Word("fp8_e4m3", fate="gone", since="2022-12", until="2023-08", instead="--fp8-format e4m3"),
    Word("cpu_optimizer", fate="gone", note="it never existed",
         instead="--optimizer-cpu-offload --use-precision-aware-optimizer"),
    Word("cpu_optimizer_type", takes="text", fate="gone", note="it never existed",
         instead="--optimizer-cpu-offload --use-precision-aware-optimizer"),
    Word("use_legacy_models", fate="gone", until="2026-05-06", note="only Megatron-Core models are left"),
    Word("use_mcore_models", fate="ignored", note="Megatron-Core models are the default since 2024-05"),
    Word("use_flash_attn", fate="ignored", instead="--attention-backend flash"),
    Word("virtual_pipeline_model_parallel_size", "layout.vp", NULL_IS_1, takes="int", fate="gone",
         note="it is computed from the number of virtual stages and has no flag",
         instead="--num-virtual-stages-per-pipeline-rank N"),
    Word("batch_size", takes="int", fate="gone", instead="--micro-batch-size N"),
    Word("warmup", takes="text", fate="gone", instead="--lr-warmup-fraction F"),
    Word("model_parallel_size", takes="int", fate="gone", instead="--tensor-model-parallel-size N"),
    Word("checkpoint_activations", fate="gone",
         instead="--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    Word("checkpoint_num_layers", takes="int", fate="gone", instead="--recompute-num-layers N"),
    Word("activations_checkpoint_method", takes="text", fate="gone", instead="--recompute-method uniform"),
    Word("distribute_checkpointed_activations", fate="gone", instead="--distribute-saved-activations"),
    Word("no_query_key_layer_scaling", fate="gone", note="off is the default now"),
    Word("DDP_impl", takes="text", fate="gone"),
    Word("data_impl", fate="gone", until="2023-08", takes="text", note="data sets are always mapped"),
    Word("use_contiguous_parameters_in_local_ddp", fate="gone"),
    Word("disable_te_fused_rope", fate="gone", instead="--no-rope-fusion"),
    Word("no_contiguous_buffers_in_local_ddp", fate="gone"),
    Word("empty_unused_memory_each_iter", fate="gone", instead="--empty-unused-memory-level 1"),
    Word("standalone_embedding_stage", fate="gone",
         instead="--account-for-embedding-in-pipeline-split"),
    Word("pipeline_model_parallel_split_rank", takes="int", fate="gone"),
    Word("use_custom_fsdp", fate="gone", until="0.12", instead="--use-megatron-fsdp"),
    Word("overlap_p2p_communication", fate="gone", note="it is on wherever there are virtual stages"),
    Word("log_batch_size_to_tensorboard", fate="gone"),
    Word("log_learning_rate_to_tensorboard", fate="gone"),
    Word("use_dist_ckpt", fate="ignored", instead="--ckpt-format torch_dist"),
    Word("dist_ckpt_format", fate="ignored", instead="--ckpt-format torch_dist", takes="text"),
    Word("ckpt_fully_parallel_save", fate="ignored", note="it is on unless --no-ckpt-fully-parallel-save is given"),
    Word("fp8_interval", fate="ignored", takes="int"),
    Word("no_async_tensor_model_parallel_allreduce", fate="gone", until="0.16"),
    Word("moe_extended_tp", fate="gone", instead="--expert-tensor-parallel-size N"),
    Word("moe_layer_recompute", takes="flag", note="today --recompute-granularity selective --recompute-modules moe"),
)  # fmt: skip

GROUPS: dict[str, tuple[Word, ...]] = {
    "GPT_MODEL_ARGS": MODEL,
    "MODEL_PARALLEL_ARGS": PARALLEL,
    "TRAINING_ARGS": TRAINING,
    "PRECISION_ARGS": PRECISION,
    "MEMORY_ARGS": MEMORY,
    "KERNEL_ARGS": KERNELS,
    "MOE_ARGS": EXPERTS,
    "RUN_ARGS": RUN,
}
"""The rows that mean something here, by the array that a script keeps them in."""

WORDS: tuple[Word, ...] = (
    *(word for group in GROUPS.values() for word in group),
    *PAST,
    *(
        Word(name, takes=takes, fate="gone", until=until)
        for (until, takes), names in PAST_FLAGS.items()
        for name in names.split()
    ),
    *(Word(name, takes="flag") for name in SWITCHES.split()),
    *(Word(name, takes="text") for name in ONE_VALUE.split()),
    *(Word(name, takes="list") for name in MANY_VALUES.split()),
)

JOINTS: tuple[Joint, ...] = (
    Joint(
        (
            "num_virtual_stages_per_pipeline_rank",
            "num_layers_per_virtual_pipeline_stage",
            "pipeline_model_parallel_layout",
        ),
        ("layout.vp", "layout.pp_schedule", "layout.stage_layers"),
        joint.read_stages,
        joint.write_stages,
    ),
    Joint(
        ("cp_comm_type", "hierarchical_context_parallel_sizes"),
        ("layout.cp_comm", "layout.cp_inner"),
        joint.read_context,
        joint.write_context,
    ),
    Joint(
        ("use_distributed_optimizer", "use_megatron_fsdp", "use_torch_fsdp2", "data_parallel_sharding_strategy"),
        ("layout.strategy",),
        joint.read_strategy,
        joint.write_strategy,
    ),
    Joint(
        ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_activations"),
        ("layout.recompute", "layout.recompute_layers"),
        joint.read_recompute,
        joint.write_recompute,
    ),
    Joint(("recompute_modules",), ("layout.recompute_modules",), joint.read_modules, joint.write_modules),
    Joint(
        ("optimizer_cpu_offload", "cpu_offloading_num_layers", "fine_grained_activation_offloading"),
        ("layout.offload",),
        joint.read_offload,
        joint.write_offload,
    ),
    Joint(("bf16", "fp16"), ("precision.compute",), joint.read_compute, joint.write_compute),
    Joint(("fp8_format", "fp8_recipe", "fp4_format"), ("precision.matmul",), joint.read_matmul, joint.write_matmul),
    Joint(
        ("cuda_graph_modules", "cuda_graph_scope"), ("kernels.cuda_graph_scope",), joint.read_scope, joint.write_scope
    ),
    Joint(
        ("cross_entropy_loss_fusion", "cross_entropy_fusion_impl"), ("kernels.loss",), joint.read_loss, joint.write_loss
    ),
    Joint(
        ("moe_router_load_balancing_type", "moe_router_enable_expert_bias"),
        ("moe.balancing",),
        joint.read_balancing,
        joint.write_balancing,
    ),
    Joint(
        ("moe_token_dispatcher_type", "moe_flex_dispatcher_backend", "moe_enable_deepep"),
        ("moe.dispatcher",),
        joint.read_dispatcher,
        joint.write_dispatcher,
    ),
    Joint(("mtp_num_layers", "mtp_loss_scaling_factor"), ("train.mtp_loss",), joint.read_mtp, joint.write_mtp),
    Joint(
        ("mock_data", "data_path", "train_data_path"), ("data.dataset", "data.blend"), joint.read_data, joint.write_data
    ),
    Joint(("sft",), ("data.packing",), joint.read_sft, joint.write_sft),
    Joint(
        ("save", "load", "finetune", "pretrained_checkpoint"),
        ("checkpoint.pretrained", "checkpoint.resume"),
        joint.read_checkpoint,
        joint.write_checkpoint,
    ),
    Joint(("eval_interval", "eval_iters"), ("train.eval_every", "train.eval_steps"), joint.read_eval, joint.write_eval),
)
