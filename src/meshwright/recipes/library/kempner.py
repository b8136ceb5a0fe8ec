"""KempnerForge's presets, on nodes of four H200.

That trainer keeps weights and Adam states in bf16 alone. These recipes keep fp32 masters and moments, unless the preset
itself asks for bf16; otherwise batch, learning rate and layout are the preset's.
"""

from __future__ import annotations

from typing import Any

from meshwright.recipes.build import pretrain
from meshwright.recipes.registry import Published, recipe
from meshwright.recipes.types import Recipe

PRESET: dict[str, Any] = {"recompute": "full", "compile": True, "seed": 42}
TP4_TRIAL: dict[str, Any] = {"tp": 4, "steps": 20, "recompute": "full", "seed": 42}


@recipe(family="kempner", published=Published(measured="kempnerforge", tp=1, pp=1, ep=1, gpus=1), purpose="smoke_test")
def kempner_7b_1gpu_config() -> Recipe:
    """One GPU, to see that everything starts; bf16 state, for fp32 masters of 8B weights leave no room."""
    return pretrain(
        "kempner_7b",
        "1xH200",
        micro_batch_size=2,
        global_batch_size=8,
        warmup_steps=2000,
        steps=100_000,
        master="bf16",
        moments="bf16",
        grads="bf16",
        **PRESET,
    )


@recipe(family="kempner", published=Published(measured="kempnerforge", tp=1, pp=1, ep=1, gpus=4))
def kempner_7b_4gpu_config() -> Recipe:
    """The single-node baseline with the highest MFU: sharding only."""
    return pretrain(
        "kempner_7b", "4xH200", micro_batch_size=8, global_batch_size=128, warmup_steps=2000, steps=100_000, **PRESET
    )


@recipe(family="kempner", published=Published(measured="kempnerforge", tp=4, pp=1, ep=1, gpus=12), purpose="trial")
def kempner_7b_12gpu_tp4_config() -> Recipe:
    """TP inside the node, sharding across, for an uncommon GPU count."""
    return pretrain(
        "kempner_7b",
        "3x4xH200",
        tp=4,
        dp_shard=3,
        micro_batch_size=4,
        global_batch_size=96,
        warmup_steps=50,
        steps=500,
        save_every=100,
        **PRESET,
    )


@recipe(family="kempner", published=Published(tp=1, pp=1, ep=1, gpus=16))
def kempner_7b_16gpu_adamw_config() -> Recipe:
    """Long preemptible runs."""
    return pretrain(
        "kempner_7b",
        "4x4xH200",
        micro_batch_size=8,
        global_batch_size=512,
        warmup_steps=2000,
        steps=100_000,
        save_every=500,
        **PRESET,
    )


@recipe(family="kempner", published=Published(tp=1, pp=1, ep=1, gpus=16), purpose="trial")
def kempner_7b_16gpu_fp8_config() -> Recipe:
    """FP8 compute with bf16 masters."""
    return pretrain(
        "kempner_7b",
        "4x4xH200",
        micro_batch_size=8,
        global_batch_size=256,
        warmup_steps=10,
        steps=50,
        matmul="fp8_tensor",
        master="bf16",
        **PRESET,
    )


@recipe(family="kempner", published=Published(tp=1, pp=1, ep=1, gpus=16), purpose="trial")
def kempner_7b_16gpu_muon_config() -> Recipe:
    """Muon, z-loss and chunked cross-entropy together."""
    return pretrain(
        "kempner_7b",
        "4x4xH200",
        micro_batch_size=4,
        global_batch_size=256,
        lr=0.003,
        min_lr=0.0003,
        warmup_steps=10,
        steps=50,
        optimizer_name="muon",
        loss="chunked",
        z_loss=1e-4,
        **PRESET,
    )


@recipe(family="kempner", published=Published(measured="kempnerforge", tp=1, pp=1, ep=1, gpus=32), purpose="trial")
def kempner_7b_32gpu_fsdp_config() -> Recipe:
    """The simple multi-node baseline."""
    return pretrain(
        "kempner_7b",
        "8x4xH200",
        micro_batch_size=4,
        global_batch_size=512,
        warmup_steps=10,
        steps=50,
        save_every=25,
        keep=2,
        **PRESET,
    )


@recipe(family="kempner", published=Published(measured="kempnerforge", tp=1, pp=1, ep=1, gpus=8), purpose="trial")
def kempner_13b_8gpu_fsdp_config() -> Recipe:
    """Sharding only, as long as 13B fits."""
    return pretrain(
        "kempner_13b",
        "2x4xH200",
        micro_batch_size=4,
        global_batch_size=128,
        warmup_steps=50,
        steps=20,
        recompute="full",
        seed=42,
    )


@recipe(family="kempner", published=Published(tp=4, pp=1, ep=1, gpus=24), purpose="trial")
def kempner_13b_24gpu_validation_config() -> Recipe:
    """Full validation: evaluation, profiler trace and synchronous checkpoints."""
    return pretrain(
        "kempner_13b",
        "6x4xH200",
        tp=4,
        dp_shard=6,
        micro_batch_size=2,
        global_batch_size=48,
        warmup_steps=50,
        steps=1000,
        recompute="full",
        seed=42,
        profile=True,
        eval_every=200,
        eval_steps=20,
        save_every=200,
        async_save=False,
    )


@recipe(family="kempner", published=Published(measured="kempnerforge", tp=4, pp=2, ep=1, gpus=32), purpose="trial")
def kempner_13b_32gpu_tp4_pp2_config() -> Recipe:
    """Two pipeline stages of 20 layers."""
    return pretrain(
        "kempner_13b",
        "8x4xH200",
        pp=2,
        dp_shard=4,
        micro_batch_size=4,
        global_batch_size=64,
        warmup_steps=50,
        **TP4_TRIAL,
    )


@recipe(family="kempner", published=Published(measured="kempnerforge", tp=4, pp=2, ep=1, gpus=32), purpose="trial")
def kempner_29b_32gpu_tp4_pp2_config() -> Recipe:
    """Two pipeline stages of 28 layers."""
    return pretrain("kempner_29b", "8x4xH200", pp=2, dp_shard=4, lr=0.0002, min_lr=2e-5, warmup_steps=50, **TP4_TRIAL)


@recipe(family="kempner", published=Published(tp=4, pp=1, ep=1, gpus=32), purpose="trial")
def kempner_70b_32gpu_tp4_config() -> Recipe:
    """The preferred 70B: no pipeline bubble."""
    return pretrain(
        "kempner_70b",
        "8x4xH200",
        tp=4,
        dp_shard=8,
        micro_batch_size=2,
        global_batch_size=64,
        lr=0.00015,
        min_lr=1.5e-5,
        warmup_steps=50,
        steps=20,
        **PRESET,
    )


@recipe(family="kempner", published=Published(tp=4, pp=4, ep=1, gpus=32), purpose="trial")
def kempner_70b_32gpu_tp4_pp4_config() -> Recipe:
    """Four pipeline stages of 20 layers for tight memory."""
    return pretrain(
        "kempner_70b",
        "8x4xH200",
        pp=4,
        dp_shard=2,
        global_batch_size=8,
        lr=0.00015,
        min_lr=1.5e-5,
        warmup_steps=50,
        **TP4_TRIAL,
    )


@recipe(family="kempner", purpose="smoke_test")
def kempner_debug_config() -> Recipe:
    """A model of 20M parameters: the smoke test for any machine."""
    return pretrain(
        "kempner_debug",
        "1xH200",
        micro_batch_size=4,
        global_batch_size=4,
        seq_length=512,
        warmup_steps=10,
        steps=100,
        seed=42,
    )


@recipe(family="kempner", purpose="smoke_test")
def kempner_debug_moe_config() -> Recipe:
    """The smoke test with experts: 4 of them, top 2."""
    return pretrain(
        "kempner_debug_moe",
        "1xH200",
        micro_batch_size=4,
        global_batch_size=4,
        seq_length=512,
        warmup_steps=5,
        steps=50,
        seed=42,
        aux_loss=0.01,
    )


@recipe(family="kempner", published=Published(tp=4, pp=1, ep=1, gpus=8), purpose="trial")
def kempner_moe_8gpu_stress_config() -> Recipe:
    """Dropless routing that fills two nodes."""
    return pretrain(
        "kempner_moe",
        "2x4xH200",
        dp_shard=2,
        micro_batch_size=10,
        global_batch_size=20,
        warmup_steps=5,
        aux_loss=0.01,
        **TP4_TRIAL,
    )


@recipe(family="kempner", published=Published(tp=4, pp=1, ep=1, gpus=24), purpose="trial")
def kempner_moe_24gpu_config() -> Recipe:
    """Long accumulation without recompute."""
    return pretrain(
        "kempner_moe",
        "6x4xH200",
        tp=4,
        dp_shard=6,
        micro_batch_size=2,
        global_batch_size=384,
        warmup_steps=10,
        steps=100,
        seed=42,
        aux_loss=0.01,
    )


@recipe(family="kempner", published=Published(tp=4, pp=1, ep=2, gpus=32), purpose="trial")
def kempner_moe_ep_32gpu_config() -> Recipe:
    """Expert parallel across nodes.

    There ep is a factor of its own (TP 4 × EP 2 × FSDP 4, 12 samples a rank); here it re-cuts the data ranks, so that
    8 of them take 6 samples each.
    """
    return pretrain(
        "kempner_moe",
        "8x4xH200",
        ep=2,
        micro_batch_size=6,
        global_batch_size=48,
        warmup_steps=5,
        aux_loss=0.01,
        **TP4_TRIAL,
    )


@recipe(family="kempner", purpose="trial")
def kempner_hf_wikitext_config() -> Recipe:
    """A model of 77M parameters on a small real data set."""
    return pretrain(
        "kempner_wikitext",
        "1xH200",
        micro_batch_size=16,
        global_batch_size=16,
        seq_length=1024,
        warmup_steps=50,
        steps=500,
        dataset="wikitext",
        **PRESET,
    )
