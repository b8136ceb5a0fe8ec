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
}
