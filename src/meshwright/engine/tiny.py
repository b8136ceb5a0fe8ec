"""--tiny: any recipe on a laptop, with a model of the same structure and its layout scaled to a few processes."""

from __future__ import annotations

from typing import Any

import msgspec

from meshwright.engine.model.config import kinds_of_layers, tiny
from meshwright.recipes.types import Architecture, Layout, Precision, Recipe

SEQ_LENGTH = 64
STEPS = 20
MICRO_BATCHES = 4  # for each rank and step: gradients accumulate and pipelines fill
LEARNING_RATE = 3e-3


def tiny_recipe(recipe: Recipe, config: Any, world: int) -> tuple[Recipe, Any]:
    """The recipe and model config scaled to a laptop and this many processes; what was changed is in the recipe."""
    layout = scaled_layout(recipe.layout, world)
    chunks = layout.pp * layout.vp
    kinds = kinds_of_layers(config)
    layers = chunks * max(1, -(-kinds // chunks))
    small = tiny(config, max(layers, 2))
    dp = world // (layout.tp * layout.pp * layout.cp)
    experts = next(
        (getattr(small, n) for n in ("num_experts", "n_routed_experts", "num_local_experts") if hasattr(small, n)), 1
    )
    layout = msgspec.structs.replace(layout, ep=_common(layout.ep, experts or 1))
    replace = msgspec.structs.replace
    return (
        replace(
            recipe,
            architecture=Architecture(),
            layout=layout,
            data=replace(recipe.data, seq_length=SEQ_LENGTH, dataset="mock"),
            train=replace(
                recipe.train,
                global_batch_size=MICRO_BATCHES * layout.micro_batch_size * dp,
                steps=STEPS,
                mtp_loss=0.0,
                log_every=1,
            ),
            optimizer=replace(recipe.optimizer, lr=LEARNING_RATE),
            schedule=replace(recipe.schedule, warmup_steps=2, min_lr=0.0, decay_steps=0),
            # A CPU computes bf16 a hundred times slower than fp32, and has neither 8-bit nor captured kernels.
            precision=Precision(compute="fp32"),
            kernels=replace(
                recipe.kernels,
                compile=False,
                attention="auto",
                cuda_graphs="none",
                cuda_graph_scope=(),
                te_rng_tracker=False,
                tp_comm_overlap=False,
            ),
            moe=replace(recipe.moe, dispatcher="alltoall", ep_overlap=False, shared_expert_overlap=False),
        ),
        small,
    )


def scaled_layout(layout: Layout, world: int) -> Layout:
    """The recipe's axes, halved until they fit the processes; every axis it uses is kept as long as there is room."""
    sizes = {"tp": 1, "pp": 1, "cp": 1}
    left = world
    grown = True
    while grown:
        grown = False
        for axis in sizes:
            if left % 2 == 0 and sizes[axis] * 2 <= getattr(layout, axis):
                sizes[axis], left, grown = sizes[axis] * 2, left // 2, True
    piped = sizes["pp"] > 1
    vp = min(layout.vp, 2) if piped else 1
    stage = world // sizes["pp"]
    etp = _common(layout.etp, stage)
    return msgspec.structs.replace(
        layout,
        **sizes,
        vp=vp,
        pp_schedule=layout.pp_schedule if piped else "1f1b",
        stage_layers=(),
        embedding_as_layer=False,
        head_as_layer=False,
        ep=_common(layout.ep, stage // etp),
        etp=etp,
        dp_shard=-1,
        dp_replicate=_common(layout.dp_replicate, left),
        sp=layout.sp and sizes["tp"] > 1,
        cp_comm=layout.cp_comm if layout.cp_comm != "a2a+ring" or sizes["cp"] >= 4 else "ring",
        cp_inner=2 if layout.cp_comm == "a2a+ring" and sizes["cp"] >= 4 else 1,
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
