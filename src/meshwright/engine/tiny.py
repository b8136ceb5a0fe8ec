"""--tiny: any recipe on a laptop, with a model of the same structure and its layout scaled to a few processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from meshwright.engine.model_families import family_of
from meshwright.engine.validate import data_ranks
from meshwright.recipes.overrides import change
from meshwright.recipes.types import Architecture, Kernels, Layout, Moe, Precision, Recipe

SEQ_LENGTH = 64
STEPS = 20
MICRO_BATCHES = 4  # for each rank and step: gradients accumulate and pipelines fill
LEARNING_RATE = {"pretrain": 3e-3, "sft": 3e-3, "peft": 1e-2}  # adapters of random weights have little to go by
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


def tiny_recipe(
    recipe: Recipe, config: Any, world: int, pinned: Mapping[str, Any], shrink: bool = True
) -> tuple[Recipe, Any]:
    """The recipe and model config scaled to a laptop and this many processes; pinned values stay as they are.

    The model of a folder that somebody named is taken as it is: `shrink` says no.
    """
    kept = {key: value for key, value in pinned.items() if not key.startswith("architecture.")}
    replace = msgspec.structs.replace
    layout = replace(scaled_layout(recipe.layout, world), **_of_section(kept, "layout"))
    kind = family_of(recipe)
    small = kind.tiny(config, _layers(layout, kind.kinds_of_layers(config))) if shrink else config
    if "layout.ep" not in kept:
        layout = replace(layout, ep=_common(layout.ep, _experts(small)))
    dp = data_ranks(layout, world)
    scaled = replace(
        recipe,
        architecture=Architecture(),
        layout=layout,
        data=replace(recipe.data, seq_length=SEQ_LENGTH, dataset="mock"),
        train=replace(
            recipe.train,
            global_batch_size=max(MICRO_BATCHES, layout.pp) * layout.micro_batch_size * dp,
            steps=STEPS,
            log_every=1,
        ),
        optimizer=replace(recipe.optimizer, lr=LEARNING_RATE[recipe.goal]),
        schedule=replace(recipe.schedule, warmup_steps=2, min_lr=0.0, decay_steps=0),
        # A CPU computes bf16 a hundred times slower than fp32, and has neither 8-bit nor captured kernels.
        precision=Precision(compute="fp32"),
        kernels=Kernels(loss=recipe.kernels.loss, deterministic=recipe.kernels.deterministic),
        moe=_moe(recipe.moe),
    )
    return change(scaled, kept)[0], small


def _of_section(values: Mapping[str, Any], section: str) -> dict[str, Any]:
    return {key.split(".")[1]: value for key, value in values.items() if key.startswith(f"{section}.")}


def _layers(layout: Layout, kinds: int) -> int:
    """Layers of the tiny model: at least one of each kind and two, as many on every stage chunk."""
    chunks = layout.pp * layout.vp
    return chunks * max(1, -(-max(kinds, 2) // chunks))


def _experts(config: Any) -> int:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return next((getattr(text, name) for name in EXPERTS if getattr(text, name, None)), 1)


def _moe(moe: Moe) -> Moe:
    """The same routing; tokens travel by the one way a CPU has."""
    return msgspec.structs.replace(moe, dispatcher="alltoall", ep_overlap=False, shared_expert_overlap=False)


def scaled_layout(layout: Layout, world: int) -> Layout:
    """The recipe's axes, grown from one as far as the processes allow; every axis it uses gets its turn."""
    sizes = {"tp": 1, "pp": 1, "cp": 1}
    left, grown = world, True
    while grown:
        grown = False
        for axis in sizes:
            if left % 2 == 0 and sizes[axis] * 2 <= getattr(layout, axis):
                sizes[axis], left, grown = sizes[axis] * 2, left // 2, True
    piped, stage = sizes["pp"] > 1, world // sizes["pp"]
    etp = _common(layout.etp, stage)
    both = layout.cp_comm == "a2a+ring" and sizes["cp"] >= 4
    return msgspec.structs.replace(
        layout,
        **sizes,
        vp=min(layout.vp, 2) if piped else 1,
        pp_schedule=layout.pp_schedule if piped else "1f1b",
        stage_layers=(),
        embedding_as_layer=False,
        head_as_layer=False,
        ep=_common(layout.ep, stage // etp),
        etp=etp,
        dp_shard=-1,
        dp_replicate=_common(layout.dp_replicate, left),
        sp=layout.sp and sizes["tp"] > 1,
        cp_comm="a2a+ring" if both else layout.cp_comm.removeprefix("a2a+"),
        cp_inner=2 if both else 1,
        micro_batch_size=min(layout.micro_batch_size, 2),
        recompute_layers=min(layout.recompute_layers, 1),
        strategy="fsdp2" if layout.strategy == "megatron_fsdp" else layout.strategy,
    )


def _common(wanted: int, limit: int) -> int:
    """The largest power of two that divides the limit and is not above what is wanted."""
    size = 1
    while size * 2 <= wanted and limit % (size * 2) == 0:
        size *= 2
    return size
