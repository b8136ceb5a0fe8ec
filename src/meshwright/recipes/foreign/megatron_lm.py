"""Megatron-LM's flags (Megatron-Core 0.20.0, 2026-08-22)."""

from __future__ import annotations

from meshwright.recipes.foreign import together
from meshwright.recipes.foreign.values import ATTENTION, DECAYS, NULL_IS_1, NULL_IS_NONE, OPTIMIZERS, RINGS
from meshwright.recipes.foreign.word import Joint, Word

WORDS: tuple[Word, ...] = (
    Word("tensor_model_parallel_size", "layout.tp"),
    Word("pipeline_model_parallel_size", "layout.pp"),
    Word("virtual_pipeline_model_parallel_size", "layout.vp", NULL_IS_1),
    Word("context_parallel_size", "layout.cp"),
    Word("expert_model_parallel_size", "layout.ep"),
    Word("expert_tensor_parallel_size", "layout.etp"),
    Word("sequence_parallel", "layout.sp"),
    Word("cp_comm_type", "layout.cp_comm", RINGS),
    Word("recompute_granularity", "layout.recompute", NULL_IS_NONE),
    Word("recompute_modules", "layout.recompute_modules"),
    Word("account_for_embedding_in_pipeline_split", "layout.embedding_as_layer"),
    Word("account_for_loss_in_pipeline_split", "layout.head_as_layer"),
    Word("train_iters", "train.steps"),
    Word("eval_interval", "train.eval_every"),
    Word("eval_iters", "train.eval_steps"),
    Word("log_interval", "train.log_every"),
    Word("optimizer", "optimizer.name", OPTIMIZERS),
    Word("adam_beta1", "optimizer.beta1"),
    Word("adam_beta2", "optimizer.beta2"),
    Word("adam_eps", "optimizer.eps"),
    Word("lr_decay_style", "schedule.name", DECAYS),
    Word("lr_warmup_iters", "schedule.warmup_steps"),
    Word("lr_decay_iters", "schedule.decay_steps"),
    Word("moe_router_load_balancing_type", "moe.balancing"),
    Word("moe_aux_loss_coeff", "moe.aux_loss"),
    Word("moe_z_loss_coeff", "moe.router_z_loss"),
    Word("moe_expert_capacity_factor", "moe.capacity_factor"),
    Word("moe_router_dtype", "moe.router_dtype"),
    Word("moe_grouped_gemm", "moe.grouped_gemm"),
    Word("moe_shared_expert_overlap", "moe.shared_expert_overlap"),
    Word("overlap_moe_expert_parallel_comm", "moe.ep_overlap"),
    Word("moe_router_force_load_balancing", "moe.force_balance"),
    Word("attention_backend", "kernels.attention", ATTENTION),
    Word("cuda_graph_impl", "kernels.cuda_graphs"),
    Word("deterministic_mode", "kernels.deterministic"),
    Word("save_interval", "checkpoint.save_every"),
    Word("pretrained_checkpoint", "checkpoint.pretrained"),
    Word("num_layers", "architecture.layers"),
    Word("hidden_size", "architecture.hidden"),
    Word("ffn_hidden_size", "architecture.ffn"),
    Word("num_attention_heads", "architecture.heads"),
    Word("num_query_groups", "architecture.kv_heads"),
    Word("kv_channels", "architecture.head_dim"),
    Word("vocab_size", "architecture.vocab"),
    Word("num_experts", "architecture.experts"),
    Word("moe_router_topk", "architecture.topk"),
)

JOINTS: tuple[Joint, ...] = (
    Joint(("virtual_pipeline_model_parallel_size",), ("layout.vp", "layout.pp_schedule"), together.virtual_stages),
    Joint(
        ("recompute_granularity", "recompute_method", "recompute_num_layers"),
        ("layout.recompute", "layout.recompute_layers"),
        together.recompute,
    ),
    Joint(("moe_token_dispatcher_type", "moe_flex_dispatcher_backend"), ("moe.dispatcher",), together.dispatcher),
)
