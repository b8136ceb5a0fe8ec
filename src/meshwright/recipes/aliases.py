"""The one table of other frameworks' names for our fields, read in both directions.

A row pairs one of our keys with one of theirs. How keys that only make sense together are read, and which keys are
gone, stands in `aliases_joint`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal, get_args

import msgspec

from meshwright.errors import InputError, unknown

Dialect = Literal["megatron_bridge", "megatron_lm", "automodel", "torchtitan", "kempnerforge"]
DIALECTS: tuple[Dialect, ...] = get_args(Dialect)

Values = Mapping[str, str]
"""Their values with ours, the one to write first. Case does not matter in reading; what is not listed is the same."""

ON: Values = {
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
NULL_IS_TRUE: Values = {"null": "true"}
NULL_IS_EMPTY: Values = {"null": ""}
FP32_FLAG: Values = {"true": "fp32", "false": "bf16"}
FSDP_FLAG: Values = {"true": "megatron_fsdp", "false": "fsdp2"}
TORCH_DTYPES: Values = {"float32": "fp32", "bfloat16": "bf16", "torch.float32": "fp32", "torch.bfloat16": "bf16"}
OPTIMIZERS: Values = {"adam": "adamw", "dist_muon": "muon"}
DECAYS: Values = {"WSD": "wsd", "inverse-square-root": "inverse_sqrt"}
KEMPNER_DECAYS: Values = {"constant": "constant", "none": "constant"}
ATTENTION: Values = {"fused": "cudnn", "unfused": "eager", "local": "sdpa"}
ADAPTED: Values = {
    "linear_qkv": "qkv",
    "linear_proj": "proj",
    "linear_fc1": "fc1",
    "linear_fc2": "fc2",
    "in_proj": "mamba_in",
    "out_proj": "mamba_out",
}
SCHEDULES: Values = {
    "1F1B": "1f1b",
    "GPipe": "gpipe",
    "Interleaved1F1B": "interleaved_1f1b",
    "LoopedBFS": "looped_bfs",
    "InterleavedZeroBubble": "interleaved_zero_bubble",
    "ZBVZeroBubble": "zbv",
    "DualPipeV": "dualpipe_v",
}
RINGS: Values = {"p2p": "ring", "all_gather": "allgather", "a2a+p2p": "a2a+ring"}
STRATEGIES: Values = {"megatron_fsdp": "megatron_fsdp", "megatron-fsdp": "megatron_fsdp", "mfsdp": "megatron_fsdp"}
SAVES: Values = {"async": "true", "disabled": "false", "async_with_pinned_mem": "true"}
LOSSES: Values = {"cross_entropy": "vocab_parallel", "chunked_cross_entropy": "chunked"}
ROUTERS: Values = {"softmax_topk": "aux_loss", "sigmoid_topk": "bias"}

Row = str | tuple[str, Values]

MEGATRON_BRIDGE: dict[str, Row] = {
    "model.tensor_model_parallel_size": "layout.tp",
    "model.pipeline_model_parallel_size": "layout.pp",
    "model.virtual_pipeline_model_parallel_size": ("layout.vp", NULL_IS_1),
    "model.context_parallel_size": "layout.cp",
    "model.expert_model_parallel_size": "layout.ep",
    "model.expert_tensor_parallel_size": ("layout.etp", READ_NULL_AS_1),
    "model.sequence_parallel": "layout.sp",
    "model.cp_comm_type": ("layout.cp_comm", RINGS),
    "model.account_for_embedding_in_pipeline_split": "layout.embedding_as_layer",
    "model.account_for_loss_in_pipeline_split": "layout.head_as_layer",
    "model.recompute_granularity": ("layout.recompute", NULL_IS_NONE),
    "model.recompute_modules": ("layout.recompute_modules", {"null": "[]"}),
    "train.micro_batch_size": "layout.micro_batch_size",
    "dist.use_megatron_fsdp": ("layout.strategy", FSDP_FLAG),
    "ddp.use_megatron_fsdp": ("layout.strategy", FSDP_FLAG),
    "ddp.num_distributed_optimizer_instances": "layout.dp_replicate",
    "dataset.seq_length": "data.seq_length",
    "model.seq_length": "data.seq_length",
    "dataset.num_workers": "data.workers",
    "tokenizer.tokenizer_model": ("data.tokenizer", NULL_IS_EMPTY),
    "train.global_batch_size": "train.global_batch_size",
    "train.train_iters": "train.steps",
    "validation.eval_interval": ("train.eval_every", NULL_IS_0),
    "validation.eval_iters": "train.eval_steps",
    "train.eval_interval": ("train.eval_every", NULL_IS_0),
    "train.eval_iters": "train.eval_steps",
    "logger.log_interval": "train.log_every",
    "rng.seed": "train.seed",
    "model.calculate_per_token_loss": "train.per_token_loss",
    "model.mtp_loss_scaling_factor": ("train.mtp_loss", NULL_IS_0),
    "rerun_state_machine.check_for_nan_in_loss": "train.check_nan",
    "optimizer.optimizer": ("optimizer.name", OPTIMIZERS),
    "optimizer.lr": "optimizer.lr",
    "optimizer.weight_decay": "optimizer.weight_decay",
    "optimizer.adam_beta1": "optimizer.beta1",
    "optimizer.adam_beta2": "optimizer.beta2",
    "optimizer.adam_eps": "optimizer.eps",
    "optimizer.clip_grad": "optimizer.clip_grad",
    "optimizer.muon_momentum": "optimizer.muon_momentum",
    "optimizer.muon_num_ns_steps": "optimizer.muon_ns_steps",
    "optimizer.min_lr": "schedule.min_lr",
    "scheduler.lr_decay_style": ("schedule.name", DECAYS),
    "scheduler.lr_warmup_iters": "schedule.warmup_steps",
    "scheduler.lr_decay_iters": ("schedule.decay_steps", NULL_IS_0),
    "optimizer.main_params_dtype": ("precision.master", TORCH_DTYPES),
    "optimizer.exp_avg_dtype": ("precision.moments", TORCH_DTYPES),
    "optimizer.main_grads_dtype": ("precision.grads", TORCH_DTYPES),
    "ddp.grad_reduce_in_fp32": ("precision.reduce", FP32_FLAG),
    "ddp.fp8_param_gather": "precision.fp8_gather",
    "model.first_last_layers_bf16": "precision.first_last_bf16",
    "peft.dim": "peft.rank",
    "peft.alpha": "peft.alpha",
    "peft.dropout": "peft.dropout",
    "peft.target_modules": ("peft.targets", ADAPTED),
    "model.moe_router_load_balancing_type": "moe.balancing",
    "model.moe_aux_loss_coeff": "moe.aux_loss",
    "model.moe_z_loss_coeff": ("moe.router_z_loss", NULL_IS_0),
    "model.moe_expert_capacity_factor": ("moe.capacity_factor", NULL_IS_0),
    "model.moe_router_dtype": ("moe.router_dtype", {"null": "bf16"}),
    "model.moe_grouped_gemm": "moe.grouped_gemm",
    "model.moe_shared_expert_overlap": "moe.shared_expert_overlap",
    "comm_overlap.overlap_moe_expert_parallel_comm": "moe.ep_overlap",
    "model.moe_router_force_load_balancing": "moe.force_balance",
    "model.attention_backend": ("kernels.attention", ATTENTION),
    "model.cuda_graph_impl": ("kernels.cuda_graphs", READ_NULL_AS_NONE),
    "model.cuda_graph_scope": ("kernels.cuda_graph_scope", {"null": "[]"}),
    "rng.te_rng_tracker": "kernels.te_rng_tracker",
    "model.use_te_rng_tracker": "kernels.te_rng_tracker",
    "ddp.overlap_grad_reduce": "kernels.overlap_grad_reduce",
    "ddp.overlap_param_gather": "kernels.overlap_param_gather",
    "comm_overlap.tp_comm_overlap": "kernels.tp_comm_overlap",
    "model.tp_comm_overlap": "kernels.tp_comm_overlap",
    "model.deterministic_mode": "kernels.deterministic",
    "checkpoint.pretrained_checkpoint": ("checkpoint.pretrained", NULL_IS_EMPTY),
    "checkpoint.save_interval": ("checkpoint.save_every", NULL_IS_0),
    "checkpoint.most_recent_k": "checkpoint.keep",
    "checkpoint.async_save": "checkpoint.async_save",
    "model.num_layers": "architecture.layers",
    "model.hidden_size": "architecture.hidden",
    "model.ffn_hidden_size": "architecture.ffn",
    "model.num_attention_heads": "architecture.heads",
    "model.num_query_groups": "architecture.kv_heads",
    "model.kv_channels": "architecture.head_dim",
    "model.vocab_size": "architecture.vocab",
    "model.num_moe_experts": "architecture.experts",
    "model.moe_router_topk": "architecture.topk",
}

LEGACY: dict[str, Row] = {
    "training.global_batch_size": "train.global_batch_size",
    "training.micro_batch_size": "layout.micro_batch_size",
    "training.train_iters": "train.steps",
    "training.seq_length": "data.seq_length",
}
"""Spellings that older guides teach; read, never written."""

MEGATRON_LM: dict[str, Row] = {
    "tensor_model_parallel_size": "layout.tp",
    "pipeline_model_parallel_size": "layout.pp",
    "virtual_pipeline_model_parallel_size": ("layout.vp", NULL_IS_1),
    "context_parallel_size": "layout.cp",
    "expert_model_parallel_size": "layout.ep",
    "expert_tensor_parallel_size": "layout.etp",
    "sequence_parallel": "layout.sp",
    "cp_comm_type": ("layout.cp_comm", RINGS),
    "recompute_granularity": ("layout.recompute", NULL_IS_NONE),
    "recompute_modules": "layout.recompute_modules",
    "account_for_embedding_in_pipeline_split": "layout.embedding_as_layer",
    "account_for_loss_in_pipeline_split": "layout.head_as_layer",
    "train_iters": "train.steps",
    "eval_interval": "train.eval_every",
    "eval_iters": "train.eval_steps",
    "log_interval": "train.log_every",
    "optimizer": ("optimizer.name", OPTIMIZERS),
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "adam_eps": "optimizer.eps",
    "lr_decay_style": ("schedule.name", DECAYS),
    "lr_warmup_iters": "schedule.warmup_steps",
    "lr_decay_iters": "schedule.decay_steps",
    "moe_router_load_balancing_type": "moe.balancing",
    "moe_aux_loss_coeff": "moe.aux_loss",
    "moe_z_loss_coeff": "moe.router_z_loss",
    "moe_expert_capacity_factor": "moe.capacity_factor",
    "moe_router_dtype": "moe.router_dtype",
    "moe_grouped_gemm": "moe.grouped_gemm",
    "moe_shared_expert_overlap": "moe.shared_expert_overlap",
    "overlap_moe_expert_parallel_comm": "moe.ep_overlap",
    "moe_router_force_load_balancing": "moe.force_balance",
    "attention_backend": ("kernels.attention", ATTENTION),
    "cuda_graph_impl": "kernels.cuda_graphs",
    "deterministic_mode": "kernels.deterministic",
    "save_interval": "checkpoint.save_every",
    "pretrained_checkpoint": "checkpoint.pretrained",
    "num_layers": "architecture.layers",
    "hidden_size": "architecture.hidden",
    "ffn_hidden_size": "architecture.ffn",
    "num_attention_heads": "architecture.heads",
    "num_query_groups": "architecture.kv_heads",
    "kv_channels": "architecture.head_dim",
    "vocab_size": "architecture.vocab",
    "num_experts": "architecture.experts",
    "moe_router_topk": "architecture.topk",
}
"""Flags, with underscores. Those spelled like our own short names (micro_batch_size, seq_length, lr, …) need no row."""

AUTOMODEL: dict[str, Row] = {
    "distributed.strategy": ("layout.strategy", STRATEGIES),
    "distributed.tp_size": ("layout.tp", READ_NULL_AS_1),
    "distributed.pp_size": ("layout.pp", READ_NULL_AS_1),
    "distributed.cp_size": ("layout.cp", READ_NULL_AS_1),
    "distributed.ep_size": ("layout.ep", READ_NULL_AS_1),
    "distributed.dp_replicate_size": ("layout.dp_replicate", READ_NULL_AS_1),
    "distributed.sequence_parallel": "layout.sp",
    "distributed.activation_checkpointing": ("layout.recompute", ON),
    "distributed.defer_fsdp_grad_sync": "layout.defer_grad_sync",
    "distributed.reshard_after_forward": ("layout.reshard_after_forward", NULL_IS_TRUE),
    "distributed.moe.reshard_after_forward": ("layout.reshard_after_forward", NULL_IS_TRUE),
    "step_scheduler.local_batch_size": "layout.micro_batch_size",
    "distributed.pipeline.pp_schedule": ("layout.pp_schedule", SCHEDULES),
    "distributed.enable_compile": "kernels.compile",
    "step_scheduler.global_batch_size": "train.global_batch_size",
    "step_scheduler.max_steps": "train.steps",
    "step_scheduler.val_every_steps": ("train.eval_every", NULL_IS_0),
    "step_scheduler.ckpt_every_steps": ("checkpoint.save_every", NULL_IS_0),
    "dataset.seq_len": "data.seq_length",
    "lr_scheduler.lr_decay_style": ("schedule.name", DECAYS),
    "lr_scheduler.lr_warmup_steps": "schedule.warmup_steps",
    "lr_scheduler.min_lr": "schedule.min_lr",
    "clip_grad_norm.max_norm": "optimizer.clip_grad",
    "optimizer.lr": "optimizer.lr",
    "optimizer.weight_decay": "optimizer.weight_decay",
    "optimizer.eps": "optimizer.eps",
    "peft.dim": "peft.rank",
    "peft.alpha": "peft.alpha",
    "peft.dropout": "peft.dropout",
    "model.backend.attn": "kernels.attention",
    "model.backend.dispatcher": ("moe.dispatcher", {"torch": "alltoall"}),
    "model.pretrained_model_name_or_path": "checkpoint.pretrained",
    "seed": "train.seed",
}

TORCHTITAN: dict[str, Row] = {
    "parallelism.tensor_parallel_degree": "layout.tp",
    "parallelism.pipeline_parallel_degree": "layout.pp",
    "parallelism.context_parallel_degree": "layout.cp",
    "parallelism.expert_parallel_degree": "layout.ep",
    "parallelism.expert_tensor_parallel_degree": "layout.etp",
    "parallelism.data_parallel_shard_degree": "layout.dp_shard",
    "parallelism.data_parallel_replicate_degree": "layout.dp_replicate",
    "parallelism.pipeline_parallel_schedule": ("layout.pp_schedule", SCHEDULES),
    "activation_checkpoint.mode": "layout.recompute",
    "training.local_batch_size": "layout.micro_batch_size",
    "training.global_batch_size": "train.global_batch_size",
    "training.seq_len": "data.seq_length",
    "training.steps": "train.steps",
    "training.max_norm": "optimizer.clip_grad",
    "optimizer.lr": "optimizer.lr",
    "optimizer.weight_decay": "optimizer.weight_decay",
    "optimizer.beta1": "optimizer.beta1",
    "optimizer.beta2": "optimizer.beta2",
    "optimizer.eps": "optimizer.eps",
    "lr_scheduler.warmup_steps": "schedule.warmup_steps",
    "lr_scheduler.decay_type": "schedule.name",
    "compile.enable": "kernels.compile",
    "checkpoint.interval": "checkpoint.save_every",
    "checkpoint.keep_latest_k": "checkpoint.keep",
    "metrics.log_freq": "train.log_every",
    "profiling.enable_profiling": "train.profile",
    "validation.freq": "train.eval_every",
    "validation.steps": "train.eval_steps",
}

KEMPNERFORGE: dict[str, Row] = {
    "distributed.tp": "layout.tp",
    "distributed.pp": "layout.pp",
    "distributed.cp": "layout.cp",
    "distributed.ep": "layout.ep",
    "distributed.dp_shard": "layout.dp_shard",
    "distributed.dp_replicate": "layout.dp_replicate",
    "distributed.pp_schedule": "layout.pp_schedule",
    "train.batch_size": "layout.micro_batch_size",
    "train.activation_checkpointing": "layout.recompute",
    "train.seq_len": "data.seq_length",
    "train.max_steps": "train.steps",
    "train.seed": "train.seed",
    "train.compile_model": "kernels.compile",
    "train.loss_fn": ("kernels.loss", LOSSES),
    "train.z_loss_weight": "train.z_loss",
    "train.grad_clip_norm": "optimizer.clip_grad",
    "optimizer.name": "optimizer.name",
    "optimizer.lr": "optimizer.lr",
    "optimizer.weight_decay": "optimizer.weight_decay",
    "optimizer.eps": "optimizer.eps",
    "optimizer.muon_momentum": "optimizer.muon_momentum",
    "optimizer.muon_ns_steps": "optimizer.muon_ns_steps",
    "scheduler.name": ("schedule.name", KEMPNER_DECAYS),
    "scheduler.warmup_steps": "schedule.warmup_steps",
    "scheduler.decay_steps": ("schedule.decay_steps", NULL_IS_0),
    "data.dataset_path": "data.dataset",
    "data.tokenizer_path": "data.tokenizer",
    "data.num_workers": "data.workers",
    "data.pack_sequences": "data.packing",
    "eval.steps": "train.eval_steps",
    "metrics.log_interval": "train.log_every",
    "profiling.enable": "train.profile",
    "checkpoint.interval": "checkpoint.save_every",
    "checkpoint.keep_last_n": "checkpoint.keep",
    "checkpoint.async_mode": ("checkpoint.async_save", SAVES),
    "model.dim": "architecture.hidden",
    "model.n_layers": "architecture.layers",
    "model.n_heads": "architecture.heads",
    "model.n_kv_heads": "architecture.kv_heads",
    "model.ffn_hidden_dim": "architecture.ffn",
    "model.vocab_size": "architecture.vocab",
    "model.num_experts": "architecture.experts",
    "model.moe_top_k": "architecture.topk",
    "model.moe_router": ("moe.balancing", ROUTERS),
    "model.moe_aux_loss_weight": "moe.aux_loss",
    "model.moe_router_z_loss_weight": "moe.router_z_loss",
    "model.moe_capacity_factor": "moe.capacity_factor",
}

TABLES: dict[str, dict[str, Row]] = {
    "megatron_bridge": MEGATRON_BRIDGE,
    "megatron_lm": MEGATRON_LM,
    "automodel": AUTOMODEL,
    "torchtitan": TORCHTITAN,
    "kempnerforge": KEMPNERFORGE,
    "legacy": LEGACY,
}

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
"""Their one name for our (compute, matmul)."""


class Alias(msgspec.Struct, frozen=True):
    """One of their keys that means one of ours."""

    own: str
    foreign: str
    dialect: str
    values: Values = msgspec.field(default_factory=dict)

    def to_own(self, text: str) -> str:
        """Their value, as typed, in our words."""
        plain = text.strip().lower()
        return next((our for their, our in self.values.items() if their.lower() == plain), text)

    def to_foreign(self, value: Any) -> Any:
        """Our value in their words."""
        if isinstance(value, tuple):
            return [self.to_foreign(part) for part in value]
        text = str(value).lower() if isinstance(value, bool) else str(value)
        theirs = next((their for their, our in self.values.items() if our == text), text)
        if theirs == text:
            if {"true", "false"} <= set(self.values) and text not in self.values:
                raise InputError(f"{self.dialect} has no word for it in {self.foreign}", field=self.own, value=value)
            return value
        return {"null": None, "true": True, "false": False}.get(theirs, theirs)


@lru_cache(maxsize=1)
def aliases() -> tuple[Alias, ...]:
    """Every plain row of the table."""
    return tuple(
        Alias(*((row, their, dialect) if isinstance(row, str) else (row[0], their, dialect, row[1])))
        for dialect, table in TABLES.items()
        for their, row in table.items()
    )


@lru_cache(maxsize=1)
def by_foreign_key() -> dict[str, Alias]:
    """Plain rows by their key; a key that two dialects share means the same in both."""
    return {alias.foreign: alias for alias in reversed(aliases())}


@lru_cache(maxsize=1)
def _by_own_key() -> dict[tuple[str, str], Alias]:
    return {(alias.dialect, alias.own): alias for alias in reversed(aliases())}


def foreign_key(own: str, dialect: str) -> str | None:
    """Another framework's name for one of our keys, or None when it has no plain one."""
    if dialect not in DIALECTS:
        raise unknown("dialect", dialect, DIALECTS)
    alias = _by_own_key().get((dialect, own))
    return alias.foreign if alias else None


def to_foreign(own: str, value: Any, dialect: str) -> tuple[str, Any]:
    """One of our settings in another framework's words: its key and its value."""
    if foreign_key(own, dialect) is None:
        raise InputError(f"{dialect} has no single key for {own}", field=own, value=value)
    alias = _by_own_key()[dialect, own]
    return alias.foreign, alias.to_foreign(value)
