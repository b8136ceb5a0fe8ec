"""Rules for Megatron-FSDP and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.frameworks.framework import Problem, RuleContext
from meshwright.frameworks.megatron_bridge.format_override import format_override
from meshwright.frameworks.megatron_bridge.parsed_config import get_value
from meshwright.frameworks.megatron_bridge.rules.common import bridge_recipe, get_int, recipe_key, rule


def _fsdp_checkpoints(ctx: RuleContext) -> Problem | None:
    settings, row, key = ctx.parsed.settings, bridge_recipe(ctx), "checkpoint.ckpt_format"
    fsdp = ctx.recipe.layout.strategy == "megatron_fsdp"
    default = "fsdp_dtensor" if row is not None and "fsdp_dtensor" in row.marks else "torch_dist"
    ckpt_format = str(get_value(settings, key, default))
    saves = [get_value(settings, one, None if row is not None and row.benchmark else "there") for one in SAVED]
    if not any(saves) or (key in settings and settings[key].unresolved):
        return None
    if fsdp and ckpt_format != "fsdp_dtensor":
        at_key = key if key in settings else "ddp.use_megatron_fsdp" if ctx.is_set("ddp.use_megatron_fsdp") else ""
        at_key = at_key or ("dist.use_megatron_fsdp" if ctx.is_set("dist.use_megatron_fsdp") else recipe_key(ctx))
        return Problem(
            f"Megatron-FSDP supports only checkpoint.ckpt_format=fsdp_dtensor, not {ckpt_format}",
            (format_override(key, "fsdp_dtensor"),),
            key=at_key,
        )
    if not fsdp and ckpt_format == "fsdp_dtensor":
        return Problem(
            "checkpoint.ckpt_format=fsdp_dtensor needs Megatron-FSDP", (format_override(key, "torch_dist"),), key=key
        )
    return None


SAVED = ("checkpoint.save", "checkpoint.load")


def _fsdp_connections(ctx: RuleContext) -> Problem | None:
    setting = ctx.parsed.env.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if ctx.recipe.layout.strategy != "megatron_fsdp" or setting is None or str(setting.value) != "1":
        return None
    return Problem(
        "Megatron-FSDP rejects CUDA_DEVICE_MAX_CONNECTIONS=1",
        ("unset CUDA_DEVICE_MAX_CONNECTIONS",),
        key="CUDA_DEVICE_MAX_CONNECTIONS",
    )


def _fsdp_mapping(ctx: RuleContext) -> Problem | None:
    if ctx.recipe.layout.strategy != "megatron_fsdp" or ctx.get("dist.use_tp_pp_dp_mapping") is not True:
        return None
    return Problem(
        "Megatron-FSDP does not support use_tp_pp_dp_mapping", (format_override("dist.use_tp_pp_dp_mapping", False),),
        key="dist.use_tp_pp_dp_mapping",
    )  # fmt: skip


def _fsdp_version_2(ctx: RuleContext) -> Iterator[Problem]:
    """Megatron-FSDP version 2 supports only bf16 data parallelism without checkpoints."""
    if ctx.recipe.layout.strategy != "megatron_fsdp" or ctx.get("ddp.megatron_fsdp_version") != 2:
        return
    layout, key = ctx.recipe.layout, "ddp.megatron_fsdp_version"
    unsupported = [name for name in ("tp", "pp", "cp") if getattr(layout, name) > 1]
    unsupported += ["vp"] if layout.vp > 1 else []
    unsupported += ["FP8 or FP4"] if ctx.recipe.precision.matmul != "same" else []
    unsupported += ["fp16"] if ctx.recipe.precision.compute != "bf16" else []
    row = bridge_recipe(ctx)
    saves = [get_value(ctx.parsed.settings, one, None if row and row.benchmark else "there") for one in SAVED]
    unsupported += ["checkpoints"] if any(saves) else []
    if unsupported:
        yield Problem(
            f"Megatron-FSDP version 2 does not support {', '.join(unsupported)}", (format_override(key, 1),), key=key
        )


def _async_format(ctx: RuleContext) -> Problem | None:
    ckpt_format = ctx.get("checkpoint.ckpt_format")
    if not ctx.recipe.checkpoint.async_save or ckpt_format in (None, "torch_dist", "fsdp_dtensor"):
        return None
    if not ctx.is_set("checkpoint.async_save"):
        return None
    return Problem(
        f"checkpoint.async_save does not support ckpt_format={ckpt_format}",
        (format_override("checkpoint.ckpt_format", "torch_dist"), format_override("checkpoint.async_save", False)),
        key="checkpoint.async_save",
    )


def _async_without_path(ctx: RuleContext) -> Problem | None:
    row, settings = bridge_recipe(ctx), ctx.parsed.settings
    no_path = get_value(settings, "checkpoint.save", None if row is not None and row.benchmark else "there") is None
    if ctx.get("checkpoint.async_save") is not True or not no_path:
        return None
    return Problem(
        "checkpoint.async_save needs checkpoint.save",
        (format_override("checkpoint.async_save", False),),
        key="checkpoint.async_save",
    )


def _retention(ctx: RuleContext) -> Iterator[Problem]:
    retain, every = get_int(ctx, "checkpoint.save_retain_interval"), ctx.recipe.checkpoint.save_every
    if retain is None:
        return
    key = "checkpoint.save_retain_interval"
    if ctx.get("checkpoint.most_recent_k", -1) not in (None, -1):
        yield Problem(
            "save_retain_interval and most_recent_k are exclusive",
            (format_override("checkpoint.most_recent_k", -1),),
            key=key,
        )
    if every and retain % every:
        yield Problem(
            f"save_retain_interval={retain} is not a multiple of save_interval={every}",
            (format_override(key, every),),
            key=key,
        )


def _hf_copy_of_fsdp(ctx: RuleContext) -> Problem | None:
    key = "checkpoint.also_save_hf_checkpoint"
    if ctx.get(key) is not True or ctx.get("checkpoint.ckpt_format") != "fsdp_dtensor":
        return None
    return Problem(
        "also_save_hf_checkpoint does not support ckpt_format=fsdp_dtensor", (format_override(key, False),), key=key
    )


def _state_not_loaded(ctx: RuleContext) -> Problem | None:
    """A restart resumes from checkpoint.load, if it is the folder of checkpoint.save, without what these leave out."""
    folders = [ctx.parsed.settings.get(key) for key in SAVED]
    off = [key for key in ("checkpoint.load_optim", "checkpoint.load_rng") if ctx.get(key) is False]
    fixes = [format_override(key, True) for key in off]
    if ctx.get("checkpoint.finetune") is True:
        off, fixes = ["checkpoint.finetune", *off], [format_override("checkpoint.finetune", False), *fixes]
    if not off or any(one is None for one in folders) or len({str(one.value) for one in folders if one}) > 1:
        return None
    stated = " ".join(format_override(key, ctx.get(key)) for key in off)
    return Problem(
        f"{stated}, with checkpoint.load the folder of checkpoint.save: a restart does not load all that was saved; "
        "remove it and name initial weights with checkpoint.pretrained_checkpoint",
        (" ".join(fixes),),
        key=off[0],
    )


RULES = (
    rule(
        "fsdp-checkpoints", "error", ("checkpoint.ckpt_format",), _fsdp_checkpoints,
        "AssertionError about the checkpoint format",
        "Megatron-FSDP shards are saved as DTensors; its recipes still set torch_dist",
    ),
    rule(
        "fsdp-connections", "error", ("CUDA_DEVICE_MAX_CONNECTIONS",), _fsdp_connections,
        "AssertionError about CUDA_DEVICE_MAX_CONNECTIONS",
        "a single connection would serialize all-gathers and GEMMs",
    ),
    rule(
        "fsdp-rank-order", "error", ("dist.use_tp_pp_dp_mapping",), _fsdp_mapping,
        "AssertionError from validate",
        "its device mesh expects data-parallel ranks inside pipeline ranks",
    ),
    rule(
        "fsdp-version-2", "error", ("ddp.megatron_fsdp_version",), _fsdp_version_2,
        "ValueError from validate",
        "version 2 is experimental",
    ),
    rule(
        "async-format", "error", ("checkpoint.async_save",), _async_format,
        "AssertionError about async_save",
        "only distributed formats support asynchronous saves",
    ),
    rule(
        "async-without-path", "error", ("checkpoint.async_save",), _async_without_path,
        "AssertionError: save is not set",
        "there is no checkpoint directory",
    ),
    rule(
        "state-not-loaded", "warning", ("checkpoint.load_optim", "checkpoint.load_rng"), _state_not_loaded,
        "the loss jumps after each restart",
        "the settings are for a first start from other weights, and apply to each restart as well",
    ),
    rule(
        "retention", "error", ("checkpoint.save_retain_interval",), _retention,
        "ValueError from the checkpoint section",
        "only one retention policy can be active",
    ),
    rule(
        "hf-copy-of-fsdp", "error", ("checkpoint.also_save_hf_checkpoint",), _hf_copy_of_fsdp,
        "ValueError from the checkpoint section",
        "weights are exported from torch_dist checkpoints only",
    ),
)  # fmt: skip
