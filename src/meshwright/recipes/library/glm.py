"""GLM-4.5 and GLM-4.5V."""

from __future__ import annotations

from typing import Any

from meshwright.recipes.build import peft, pretrain, sft
from meshwright.recipes.registry import Published, recipe
from meshwright.recipes.types import Recipe

FINETUNE: dict[str, Any] = {"beta2": 0.95, "overlap_grad_reduce": False, "shared_expert_overlap": True}
PRETRAIN: dict[str, Any] = {
    "global_batch_size": 2048,
    "lr": 1e-4,
    "min_lr": 1e-5,
    "warmup_steps": 2000,
    "steps": 1_000_000,
    "recompute": "selective",
    "mtp_loss": 0.1,
    "shared_expert_overlap": True,
}


@recipe(family="glm", published=Published(tp=2, pp=8, ep=16, gpus=256, start={"recompute_modules": ()}))
def glm45_355b_pretrain_config() -> Recipe:
    return pretrain(
        "glm45_355b",
        256,
        tp=2,
        pp=8,
        ep=16,
        stage_layers=(10,) + (12,) * 6 + (10,),
        recompute_modules=("moe",),
        **PRETRAIN,
    )


@recipe(family="glm", published=Published(tp=1, pp=4, ep=8, gpus=32, start={"sp": False}))
def glm45_air_106b_pretrain_config() -> Recipe:
    return pretrain("glm45_air_106b", 32, tp=4, pp=4, ep=8, stage_layers=(11,) + (12,) * 2 + (11,), **PRETRAIN)


@recipe(family="glm", published=Published(tp=2, pp=8, ep=16, gpus=256, start={"recompute": "none"}))
def glm45_355b_sft_config() -> Recipe:
    return sft(
        "glm45_355b",
        256,
        tp=2,
        pp=8,
        ep=16,
        stage_layers=(10,) + (12,) * 6 + (10,),
        packing=False,
        recompute="selective",
        **FINETUNE,
    )


@recipe(family="glm", published=Published(tp=1, pp=4, ep=8, gpus=32, start={"recompute": "none"}))
def glm45_air_106b_sft_config() -> Recipe:
    return sft(
        "glm45_air_106b",
        32,
        pp=4,
        ep=8,
        stage_layers=(11,) + (12,) * 2 + (11,),
        packing=False,
        recompute="full",
        **FINETUNE,
    )


@recipe(family="glm", published=Published(tp=2, pp=4, ep=4, gpus=32, start={"recompute": "none"}))
def glm45_355b_peft_config() -> Recipe:
    return peft("glm45_355b", 32, tp=2, pp=4, ep=8, packing=False, recompute="selective", **FINETUNE)


@recipe(family="glm", published=Published(tp=1, pp=2, ep=4, gpus=8, start={"recompute": "none"}))
def glm45_air_106b_peft_config() -> Recipe:
    return peft("glm45_air_106b", 8, pp=2, ep=4, packing=False, recompute="full", **FINETUNE)


@recipe(
    family="glm",
    published=Published(tp=1, pp=8, start={"cp": 1, "recompute": "none", "stage_layers": (1, 7, 7, 7, 7, 7, 7, 3)}),
)
def glm_45v_sft_config() -> Recipe:
    return sft(
        "glm_45v",
        128,
        pp=8,
        cp=8,
        ep=16,
        global_batch_size=64,
        seq_length=8192,
        min_lr=5e-7,
        warmup_steps=10,
        steps=50,
        images=True,
        stage_layers=(5,) + (6,) * 6 + (5,),
        recompute="full",
        **FINETUNE,
    )


@recipe(family="glm", published=Published(tp=1, pp=8, start={"recompute": "none"}))
def glm_45v_peft_config() -> Recipe:
    return peft(
        "glm_45v",
        32,
        pp=8,
        ep=4,
        global_batch_size=32,
        seq_length=8192,
        min_lr=1e-5,
        warmup_steps=10,
        steps=50,
        stage_layers=(5,) + (6,) * 6 + (5,),
        images=True,
        recompute="full",
        **FINETUNE,
    )
