"""Broken and sound cases of the rules that are made from the table of capabilities."""

from __future__ import annotations

from typing import Any

from ..helpers import MIXTURE, WINDOWED

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "engine.ignores-defer-grad-sync": ({"pp": 2, "defer_grad_sync": False}, {"pp": 1}),
    "engine.ignores-attention-kernel": ({"spec": WINDOWED, "attention": "flash"}, {"attention": "flex"}),
    "engine.ignores-compile": ({"engine": "megatron", "strategy": "zero1", "compile": True}, {"engine": "torchtitan"}),
    "engine.ignores-cuda-graphs": ({"cuda_graphs": "full_iteration"}, {"cuda_graphs": "none"}),
    "engine.ignores-te-rng-tracker": ({"te_rng_tracker": True}, {"engine": "megatron", "strategy": "zero1"}),
    "engine.ignores-tp-comm-overlap": ({"tp": 2, "sp": True, "tp_comm_overlap": True}, {"tp_comm_overlap": False}),
    "engine.ignores-overlap-grad-reduce": ({"overlap_grad_reduce": False}, {"strategy": "megatron_fsdp"}),
    "engine.ignores-overlap-param-gather": ({"overlap_param_gather": False}, {"strategy": "megatron_fsdp"}),
    "engine.ignores-dispatcher": ({"spec": MIXTURE, "ep": 8, "dispatcher": "deepep"}, {"engine": "torchtitan"}),
    "engine.ignores-grouped-gemm": ({"spec": MIXTURE, "grouped_gemm": False}, {"grouped_gemm": True}),
    "engine.ignores-shared-expert-overlap": (
        {"spec": MIXTURE, "shared_expert_overlap": True},
        {"engine": "megatron", "strategy": "zero1"},
    ),
    "engine.ignores-ep-overlap": ({"spec": MIXTURE, "ep": 8, "ep_overlap": True}, {"ep_overlap": False}),
    "engine.ignores-grads": ({"grads": "fp32", "reduce": "bf16"}, {"grads": "bf16"}),
    "engine.ignores-reduce": ({"compute": "fp32", "reduce": "bf16"}, {"compute": "bf16"}),
    "engine.ignores-moments": ({"optimizer_name": "adamw8bit", "moments": "bf16"}, {"optimizer_name": "adamw"}),
    "engine.ignores-pad-to-max-length": ({"pad_to_max_length": True}, {"engine": "megatron", "strategy": "zero1"}),
    # unused
    "unused.pp-schedule": ({"pp_schedule": "interleaved_1f1b"}, {"pp": 2, "vp": 2}),
    "unused.embedding-as-layer": ({"embedding_as_layer": True}, {"pp": 2}),
    "unused.head-as-layer": ({"head_as_layer": True}, {"pp": 2}),
    "unused.cp-comm": ({"cp_comm": "a2a"}, {"cp": 2}),
    "unused.cp-inner": ({"cp": 4, "cp_inner": 2}, {"cp_comm": "a2a+ring"}),
    "unused.recompute-layers": ({"recompute": "selective", "recompute_layers": 2}, {"recompute": "full"}),
    "unused.muon-momentum": ({"muon_momentum": 0.9}, {"optimizer_name": "muon"}),
    "unused.muon-ns-steps": ({"muon_ns_steps": 3}, {"optimizer_name": "muon"}),
    "unused.eps": ({"optimizer_name": "lion", "eps": 1e-6}, {"optimizer_name": "adamw"}),
    "unused.beta2": ({"optimizer_name": "sgd", "beta2": 0.9}, {"optimizer_name": "lion"}),
    "unused.decay-steps": ({"schedule_name": "constant", "decay_steps": 5000}, {"schedule_name": "cosine"}),
    "unused.wsd-decay-steps": ({"wsd_decay_steps": 500}, {"schedule_name": "wsd"}),
    "unused.wsd-decay-style": ({"wsd_decay_style": "linear"}, {"schedule_name": "wsd"}),
    "unused.first-last-bf16": ({"first_last_bf16": True}, {"matmul": "fp8_tensor"}),
    "unused.temperature": ({"temperature": 2.0}, {"blend": {"a": 0.5, "b": 0.5}}),
    "data.anneal-incomplete": ({"anneal_steps": 10}, {"anneal_blend": {"a": 1.0}}),
    "unused.eval-steps": ({"eval_steps": 2}, {"eval_every": 10}),
    "unused.early-stop-patience": ({"early_stop_patience": 2}, {"eval_every": 10}),
    "unused.early-stop-delta": ({"eval_every": 10, "early_stop_delta": 0.1}, {"early_stop_patience": 2}),
    "unused.streaming": ({"streaming": True}, {"goal": "sft"}),
    "unused.group-by-length": ({"group_by_length": True}, {"goal": "sft"}),
    "unused.train-on": ({"train_on": "all"}, {"goal": "sft"}),
    "unused.chat-template": ({"chat_template": "t.jinja"}, {"goal": "sft"}),
    "unused.truncation": ({"truncation": "drop"}, {"goal": "sft"}),
    "unused.balancing": ({"balancing": "none"}, {"spec": MIXTURE}),
    "unused.aux-loss": ({"spec": MIXTURE, "balancing": "none", "aux_loss": 0.01}, {"balancing": "aux_loss"}),
    "unused.router-z-loss": ({"router_z_loss": 0.1}, {"spec": MIXTURE}),
    "unused.capacity-factor": ({"capacity_factor": 1.0}, {"spec": MIXTURE}),
    "unused.router-dtype": ({"router_dtype": "bf16"}, {"spec": MIXTURE}),
    "unused.dispatcher": ({"dispatcher": "deepep"}, {"spec": MIXTURE}),
    "unused.grouped-gemm": ({"grouped_gemm": False}, {"spec": MIXTURE}),
    "unused.ep-overlap": ({"ep_overlap": True}, {"spec": MIXTURE}),
    "unused.force-balance": ({"force_balance": True}, {"spec": MIXTURE}),
}
