"""Sharding and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.frameworks.framework import Problem, RuleContext
from meshwright.frameworks.megatron_bridge.format_override import spell
from meshwright.frameworks.megatron_bridge.parsed_config import value
from meshwright.frameworks.megatron_bridge.rules.common import number, recipe_key, rule, shipped


def _fsdp_checkpoints(ctx: RuleContext) -> Problem | None:
    settings, row, key = ctx.parsed.settings, shipped(ctx), "checkpoint.ckpt_format"
    fsdp = ctx.recipe.layout.strategy == "megatron_fsdp"
    default = "fsdp_dtensor" if row is not None and "fsdp_dtensor" in row.marks else "torch_dist"
    kind = str(value(settings, key, default))
    saves = [value(settings, one, None if row is not None and row.benchmark else "there") for one in SAVED]
    if not any(saves) or (key in settings and settings[key].unresolved):
        return None
    if fsdp and kind != "fsdp_dtensor":
        place = key if key in settings else "ddp.use_megatron_fsdp" if ctx.is_set("ddp.use_megatron_fsdp") else ""
        place = place or ("dist.use_megatron_fsdp" if ctx.is_set("dist.use_megatron_fsdp") else recipe_key(ctx))
        return Problem(
            f"Megatron-FSDP saves as fsdp_dtensor only, not {kind}", (spell(key, "fsdp_dtensor"),), key=place
        )
    if not fsdp and kind == "fsdp_dtensor":
        return Problem("fsdp_dtensor is for Megatron-FSDP only", (spell(key, "torch_dist"),), key=key)
    return None


SAVED = ("checkpoint.save", "checkpoint.load")


def _fsdp_connections(ctx: RuleContext) -> Problem | None:
    setting = ctx.parsed.env.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if ctx.recipe.layout.strategy != "megatron_fsdp" or setting is None or str(setting.value) != "1":
        return None
    return Problem(
        "Megatron-FSDP refuses CUDA_DEVICE_MAX_CONNECTIONS=1",
        ("unset CUDA_DEVICE_MAX_CONNECTIONS",),
        key="CUDA_DEVICE_MAX_CONNECTIONS",
    )


def _fsdp_mapping(ctx: RuleContext) -> Problem | None:
    if ctx.recipe.layout.strategy != "megatron_fsdp" or ctx.get("dist.use_tp_pp_dp_mapping") is not True:
        return None
    return Problem(
        "Megatron-FSDP keeps the usual order of ranks", (spell("dist.use_tp_pp_dp_mapping", False),),
        key="dist.use_tp_pp_dp_mapping",
    )  # fmt: skip


def _second_fsdp(ctx: RuleContext) -> Iterator[Problem]:
    """The second version of Megatron-FSDP is for data-parallel runs in bf16 without checkpoints."""
    if ctx.recipe.layout.strategy != "megatron_fsdp" or ctx.get("ddp.megatron_fsdp_version") != 2:
        return
    layout, key = ctx.recipe.layout, "ddp.megatron_fsdp_version"
    wrong = [name for name in ("tp", "pp", "cp") if getattr(layout, name) > 1]
    wrong += ["vp"] if layout.vp > 1 else []
    wrong += ["8-bit or 4-bit formats"] if ctx.recipe.precision.matmul != "same" else []
    wrong += ["fp16"] if ctx.recipe.precision.compute != "bf16" else []
    row = shipped(ctx)
    saves = [value(ctx.parsed.settings, one, None if row and row.benchmark else "there") for one in SAVED]
    wrong += ["checkpoints"] if any(saves) else []
    if wrong:
        yield Problem(f"version 2 of Megatron-FSDP has no {', '.join(wrong)}", (spell(key, 1),), key=key)


def _async_format(ctx: RuleContext) -> Problem | None:
    kind = ctx.get("checkpoint.ckpt_format")
    if not ctx.recipe.checkpoint.async_save or kind in (None, "torch_dist", "fsdp_dtensor"):
        return None
    if not ctx.is_set("checkpoint.async_save"):
        return None
    return Problem(
        f"checkpoints of the format {kind} are not written in the background",
        (spell("checkpoint.ckpt_format", "torch_dist"), spell("checkpoint.async_save", False)),
        key="checkpoint.async_save",
    )


def _async_nowhere(ctx: RuleContext) -> Problem | None:
    row, settings = shipped(ctx), ctx.parsed.settings
    nowhere = value(settings, "checkpoint.save", None if row is not None and row.benchmark else "there") is None
    if ctx.get("checkpoint.async_save") is not True or not nowhere:
        return None
    return Problem(
        "async_save needs checkpoint.save", (spell("checkpoint.async_save", False),), key="checkpoint.async_save"
    )


def _kept(ctx: RuleContext) -> Iterator[Problem]:
    retain, every = number(ctx, "checkpoint.save_retain_interval"), ctx.recipe.checkpoint.save_every
    if retain is None:
        return
    key = "checkpoint.save_retain_interval"
    if ctx.get("checkpoint.most_recent_k", -1) not in (None, -1):
        yield Problem(
            "save_retain_interval and most_recent_k exclude each other",
            (spell("checkpoint.most_recent_k", -1),),
            key=key,
        )
    if every and retain % every:
        yield Problem(f"{retain} is not a multiple of save_interval={every}", (spell(key, every),), key=key)


def _hf_beside_fsdp(ctx: RuleContext) -> Problem | None:
    key = "checkpoint.also_save_hf_checkpoint"
    if ctx.get(key) is not True or ctx.get("checkpoint.ckpt_format") != "fsdp_dtensor":
        return None
    return Problem("a Hugging Face copy is not written beside fsdp_dtensor", (spell(key, False),), key=key)


RULES = (
    rule(
        "fsdp-checkpoints", "error", ("checkpoint.ckpt_format",), _fsdp_checkpoints,
        "an assertion about the checkpoint format",
        "shards of Megatron-FSDP are saved as they are; its recipes still ask for torch_dist",
    ),
    rule(
        "fsdp-connections", "error", ("CUDA_DEVICE_MAX_CONNECTIONS",), _fsdp_connections,
        "an assertion about CUDA_DEVICE_MAX_CONNECTIONS",
        "one connection would run gathers and matrix products one after the other",
    ),
    rule(
        "fsdp-order", "error", ("dist.use_tp_pp_dp_mapping",), _fsdp_mapping,
        "an assertion from validate",
        "its device mesh expects data ranks inside pipeline ranks",
    ),
    rule(
        "fsdp-second-version", "error", ("ddp.megatron_fsdp_version",), _second_fsdp,
        "ValueError from validate",
        "the second version is an experiment for data-parallel runs",
    ),
    rule(
        "async-format", "error", ("checkpoint.async_save",), _async_format,
        "an assertion about async_save",
        "only distributed formats are written in the background",
    ),
    rule(
        "async-nowhere", "error", ("checkpoint.async_save",), _async_nowhere,
        "an assertion that save is set",
        "there is no folder to save to",
    ),
    rule(
        "kept-checkpoints", "error", ("checkpoint.save_retain_interval",), _kept,
        "ValueError from the checkpoint section",
        "old checkpoints are thinned out in one way only",
    ),
    rule(
        "hf-beside-fsdp", "error", ("checkpoint.also_save_hf_checkpoint",), _hf_beside_fsdp,
        "ValueError from the checkpoint section",
        "weights are exported from torch_dist checkpoints only",
    ),
)  # fmt: skip
