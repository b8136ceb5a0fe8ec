"""The quick reference: common situations and the recipe for each, checked by the tests."""

from __future__ import annotations

import msgspec


class Situation(msgspec.Struct, frozen=True):
    """A common goal, its question, and the recipe that must answer it."""

    want: str
    model: str
    gpus: str
    goal: str
    recipe: str
    seq: int | None = None
    benchmark: bool = False


SITUATIONS = (
    Situation("Try it for the first time", "llama3-8b", "2xH100", "sft", "llama3_8b_sft_config"),
    Situation("Fine-tune a 7-8B model", "llama3-8b", "8xH100", "sft", "llama3_8b_sft_config"),
    Situation("Fine-tune a 7-8B model", "qwen3-8b", "8xH100", "sft", "qwen3_8b_sft_config"),
    Situation("LoRA on 1 GPU", "llama3-8b", "1xH100", "peft", "llama3_8b_peft_config"),
    Situation("LoRA on 1 GPU", "qwen3-8b", "1xH100", "peft", "qwen3_8b_peft_config"),
    Situation("Pretrain a dense 70B", "llama3-70b", "64xH100", "pretrain", "llama3_70b_pretrain_config"),
    Situation("Train a small MoE", "qwen3-30b-a3b", "8xH100", "pretrain", "qwen3_30b_a3b_pretrain_config"),
    Situation(
        "Train a large MoE (235B+)", "qwen3-235b-a22b", "256xH100", "pretrain", "qwen3_235b_a22b_pretrain_config"
    ),
    Situation(
        "Benchmark throughput",
        "llama3-8b",
        "8xGB200",
        "pretrain",
        "llama3_8b_pretrain_8gpu_gb200_bf16_config",
        benchmark=True,
    ),
    Situation(
        "Long-context training", "llama3-8b", "16xH100", "pretrain", "llama3_8b_128k_pretrain_config", seq=131072
    ),
    Situation("Fine-tune a vision-language model", "qwen3-vl-8b", "8xH100", "sft", "qwen3_vl_8b_sft_config"),
    Situation("Fine-tune a vision-language model", "gemma3-vl-12b", "8xH100", "sft", "gemma3_vl_12b_sft_config"),
    Situation("Train a diffusion model", "wan-1.3b", "8xH100", "pretrain", "wan_1_3B_pretrain_config"),
    Situation("Train a diffusion model", "flux-12b", "8xH100", "pretrain", "flux_12b_pretrain_config"),
)
