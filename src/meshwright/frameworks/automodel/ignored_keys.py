"""Rules on settings that AutoModel ignores or replaces."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.errors import closest
from meshwright.frameworks.automodel.accessors import is_unresolved, size
from meshwright.frameworks.automodel.extra_keys import SCHEDULE_REPLACEMENTS, TOP_LEVEL_KEYS, TORCH_SCHEDULES
from meshwright.frameworks.automodel.format_override import format_setting
from meshwright.frameworks.automodel.targets import read_blocks
from meshwright.frameworks.automodel.values import strategy_name
from meshwright.frameworks.framework import FrameworkRule, Problem, RuleContext
from meshwright.frameworks.key_table import near_name
from meshwright.recipes.key_maps.automodel import PARALLEL_AXES, STRATEGY_OPTIONS
from meshwright.rules.rule import Severity


def _strategy_unknown(ctx: RuleContext) -> Problem | None:
    if strategy_name(ctx.parsed.settings) or is_unresolved(ctx, "distributed.strategy"):
        return None
    name = str(ctx.get("distributed.strategy"))
    near = closest(name, tuple(STRATEGY_OPTIONS), 1) or ["fsdp2"]
    fix = (format_setting("distributed.strategy", near[0]),)
    return Problem(f"unknown strategy {name}; AutoModel has fsdp2, megatron_fsdp (mfsdp) and ddp", fix)


def _size_below_one(ctx: RuleContext) -> Iterator[Problem]:
    for name in (*PARALLEL_AXES, "dp", "dp_replicate"):
        value = ctx.get(f"distributed.{name}_size")
        if ctx.is_set(f"distributed.{name}_size") and type(value) is int and value < 1:
            replacement = "none" if name == "dp" else 1
            yield Problem(
                f"{name}_size={value} is silently read as {'unset' if name == 'dp' else 1}",
                (format_setting(f"distributed.{name}_size", replacement),),
                key=f"distributed.{name}_size",
            )


def _pipeline_ignored(ctx: RuleContext) -> Problem | None:
    keys = ctx.keys_under("distributed.pipeline")
    if not keys or size(ctx, "pp") > 1 or is_unresolved(ctx, "distributed.pp_size"):
        return None
    if ctx.get(keys[0]) is None:
        return None
    return Problem("the pipeline block is ignored with pp_size=1", ("remove distributed.pipeline",), key=keys[0])


def _moe_ignored(ctx: RuleContext) -> Problem | None:
    keys = [key for key in ctx.keys_under("distributed.moe") if ctx.get(key) is not None]
    if not keys or size(ctx, "ep") > 1 or is_unresolved(ctx, "distributed.ep_size"):
        return None
    return Problem(
        "the moe block is silently ignored with ep_size=1", (format_setting("distributed.ep_size", 8),), key=keys[0]
    )


def _schedule_unknown(ctx: RuleContext) -> Problem | None:
    key = "distributed.pipeline.pp_schedule"
    if not ctx.is_set(key) or size(ctx, "pp") == 1 or is_unresolved(ctx, key):
        return None
    name = ctx.get(key)
    if name is None:
        if ctx.get("distributed.pipeline.pp_schedule_csv") is None:
            return None
        return Problem("pp_schedule_csv also requires pp_schedule", (format_setting(key, "1f1b"),), key=key)
    if str(name).lower() in TORCH_SCHEDULES:
        return None
    instead = SCHEDULE_REPLACEMENTS.get(str(name).lower(), "1f1b")
    return Problem(
        f"torch has no schedule {name}, although guides use this name", (format_setting(key, instead),), key=key
    )


def _compile_ignored(ctx: RuleContext) -> Problem | None:
    compiles = ctx.get("compile.enabled") is True and ctx.get("distributed.enable_compile") is not True
    if not compiles or strategy_name(ctx.parsed.settings) != "fsdp2":
        return None
    return Problem("the compile block is ignored under fsdp2", (format_setting("distributed.enable_compile", True),))


def _rng_ignored(ctx: RuleContext) -> Problem | None:
    keys = ctx.keys_under("rng")
    if not keys:
        return None
    key = "rng.seed" if ctx.is_set("rng.seed") else keys[0]
    seed, used = ctx.get("rng.seed"), ctx.get("seed", 42)
    if seed == used:
        return None  # the block repeats the seed that the run uses
    if seed is None:
        return Problem(f"the rng block is ignored; the run uses seed={used}", (), key=key)
    return Problem(f"rng.seed={seed} is ignored: the run uses seed={used}", (format_setting("seed", seed),), key=key)


def _block_ignored(ctx: RuleContext) -> Iterator[Problem]:
    blocks: dict[str, str] = {}
    for key in ctx.parsed.settings:
        top = key.split(".")[0].split("[")[0]
        known = top in TOP_LEVEL_KEYS or top in read_blocks() or top.startswith(("validation_dataset", "_"))
        if not known or top in REMOVED_BLOCKS:
            blocks.setdefault(top, key)
    for top, key in blocks.items():
        yield _ignored_block(top, key)


REMOVED_BLOCKS = {
    "slurm": ("the slurm block does not exist: submit jobs with sbatch", ()),
    "autopipeline": ("the autopipeline block was removed", ("distributed.pipeline: {}",)),
    "parallelizer": ("the parallelizer block was removed", ("distributed.moe: {}",)),
    "distributed_config": ("distributed_config was removed", (format_setting("distributed.strategy", "fsdp2"),)),
    "autocast": ("the autocast block was removed", (format_setting("distributed.autocast_dtype", "bfloat16"),)),
}


def _ignored_block(top: str, key: str) -> Problem:
    if top in REMOVED_BLOCKS:
        message, fix = REMOVED_BLOCKS[top]
        return Problem(message, fix, key=key)
    near = [one] if (one := near_name(top, tuple(sorted(TOP_LEVEL_KEYS)))) else []
    hint = f"; did you mean {near[0]}?" if near else ""
    severity: Severity | None = "error" if near else None  # a typing error: nothing of the block is used
    return Problem(f"{top} is ignored{hint}", (f"{near[0]}: …",) if near else (), key=key, severity=severity)


IGNORED_KEY_RULES = (
    FrameworkRule("automodel.strategy-unknown", "error", ("distributed.strategy",), _strategy_unknown,
        symptom="ValueError on every rank: unknown strategy", cause="the strategy class is looked up by this name"),
    FrameworkRule("automodel.size-below-one", "warning",
        tuple(f"distributed.{name}_size" for name in (*PARALLEL_AXES, "dp", "dp_replicate")), _size_below_one,
        symptom="the run starts with a different layout than the file suggests",
        cause="sizes below 1 are read as 1, or as unset, without a message"),
    FrameworkRule("automodel.pipeline-ignored", "warning", ("distributed.pipeline",), _pipeline_ignored,
        symptom="a warning in the log; the block is not used", cause="the block is used only with several stages"),
    FrameworkRule("automodel.moe-ignored", "warning", ("distributed.moe",), _moe_ignored,
        symptom="none: not even unknown keys are reported",
        cause="the block configures the MoE parallelizer, which runs only with ep_size above 1"),
    FrameworkRule("automodel.schedule-unknown", "error", ("distributed.pipeline.pp_schedule",), _schedule_unknown,
        symptom="an error about the schedule when the stages are built, after loading the model",
        cause="the name is passed to torch: case does not matter, underscores do"),
    FrameworkRule("automodel.compile-ignored", "warning", ("compile.enabled",), _compile_ignored,
        symptom="the speed of an uncompiled model",
        cause="under fsdp2, layers are compiled individually if distributed.enable_compile is set"),
    FrameworkRule("automodel.rng-ignored", "warning", ("rng.seed",), _rng_ignored,
        symptom="runs with different seeds in this block give the same numbers",
        cause="recipes read the top-level seed, which defaults to 42"),
    FrameworkRule("automodel.block-ignored", "warning", (), _block_ignored,
        symptom="none: unknown top-level blocks are accepted", cause="only the sections validate their keys"),
)  # fmt: skip
"""Rules that run on the file as written, before AutoModel drops settings."""
