"""What AutoModel drops or replaces in a file as it is written, with a word or without."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.errors import closest
from meshwright.frameworks.automodel.accessors import is_open, size
from meshwright.frameworks.automodel.extra_keys import INSTEAD, SCHEDULES, TOP
from meshwright.frameworks.automodel.format_override import spell
from meshwright.frameworks.automodel.values import strategy_of
from meshwright.frameworks.framework import FrameworkRule, Problem, RuleContext
from meshwright.recipes.key_maps.automodel import PARALLEL_AXES, STRATEGY_OPTIONS


def _strategy_unknown(ctx: RuleContext) -> Problem | None:
    if strategy_of(ctx.parsed.settings) or is_open(ctx, "distributed.strategy"):
        return None
    name = str(ctx.get("distributed.strategy"))
    near = closest(name, tuple(STRATEGY_OPTIONS), 1) or ["fsdp2"]
    fix = (spell("distributed.strategy", near[0]),)
    return Problem(f"there is no strategy {name}; there are fsdp2, megatron_fsdp (mfsdp) and ddp", fix)


def _below_one(ctx: RuleContext) -> Iterator[Problem]:
    for name in (*PARALLEL_AXES, "dp", "dp_replicate"):
        value = ctx.get(f"distributed.{name}_size")
        if ctx.is_set(f"distributed.{name}_size") and type(value) is int and value < 1:
            meant = "none" if name == "dp" else 1
            yield Problem(
                f"{name}_size={value} is taken as {'unset' if name == 'dp' else 1} without a word",
                (spell(f"distributed.{name}_size", meant),),
                key=f"distributed.{name}_size",
            )


def _pipeline_ignored(ctx: RuleContext) -> Problem | None:
    said = ctx.keys_under("distributed.pipeline")
    if not said or size(ctx, "pp") > 1 or is_open(ctx, "distributed.pp_size"):
        return None
    if ctx.get(said[0]) is None:
        return None
    return Problem("the pipeline block is ignored with pp_size=1", ("remove distributed.pipeline",), key=said[0])


def _moe_dropped(ctx: RuleContext) -> Problem | None:
    said = [key for key in ctx.keys_under("distributed.moe") if ctx.get(key) is not None]
    if not said or size(ctx, "ep") > 1 or is_open(ctx, "distributed.ep_size"):
        return None
    return Problem(
        "the moe block is dropped without a word: ep_size=1", (spell("distributed.ep_size", 8),), key=said[0]
    )


def _schedule_raises(ctx: RuleContext) -> Problem | None:
    key = "distributed.pipeline.pp_schedule"
    if not ctx.is_set(key) or size(ctx, "pp") == 1 or is_open(ctx, key):
        return None
    name = ctx.get(key)
    if name is None:
        if ctx.get("distributed.pipeline.pp_schedule_csv") is None:
            return None
        return Problem("a schedule from a CSV file still needs a name in pp_schedule", (spell(key, "1f1b"),), key=key)
    if str(name).lower() in SCHEDULES:
        return None
    instead = INSTEAD.get(str(name).lower(), "1f1b")
    return Problem(
        f"torch knows no schedule {name}; the guides that name it are wrong", (spell(key, instead),), key=key
    )


def _compile_ignored(ctx: RuleContext) -> Problem | None:
    compiles = ctx.get("compile.enabled") is True and ctx.get("distributed.enable_compile") is not True
    if not compiles or strategy_of(ctx.parsed.settings) != "fsdp2":
        return None
    return Problem("the compile block is ignored under fsdp2", (spell("distributed.enable_compile", True),))


def _rng_unread(ctx: RuleContext) -> Problem | None:
    said = ctx.keys_under("rng")
    if not said:
        return None
    key = "rng.seed" if ctx.is_set("rng.seed") else said[0]
    wanted, used = ctx.get("rng.seed"), ctx.get("seed", 42)
    if wanted is None or wanted == used:
        return Problem(f"no recipe reads the rng block; the run is seeded with seed={used}", (), key=key)
    return Problem(
        f"no recipe reads rng.seed={wanted}: the run is seeded with {used}", (spell("seed", wanted),), key=key
    )


def _block_unread(ctx: RuleContext) -> Iterator[Problem]:
    blocks: dict[str, str] = {}
    for key in ctx.parsed.settings:
        top = key.split(".")[0].split("[")[0]
        if top not in TOP and not top.startswith("validation_dataset"):
            blocks.setdefault(top, key)
    for top, key in blocks.items():
        yield _unread(top, key)


MOVED = {
    "slurm": ("there is no slurm block: jobs are submitted with sbatch", ()),
    "autopipeline": ("nothing reads the autopipeline block any more", ("distributed.pipeline: {}",)),
    "parallelizer": ("nothing reads the parallelizer block any more", ("distributed.moe: {}",)),
    "distributed_config": ("nothing reads distributed_config any more", (spell("distributed.strategy", "fsdp2"),)),
    "autocast": ("nothing reads the autocast block any more", (spell("distributed.autocast_dtype", "bfloat16"),)),
}


def _unread(top: str, key: str) -> Problem:
    if top in MOVED:
        message, fix = MOVED[top]
        return Problem(message, fix, key=key)
    near = closest(top, sorted(TOP), 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return Problem(f"nothing reads {top}{hint}", (f"{near[0]}: …",) if near else (), key=key)


BEFORE = (
    FrameworkRule(
        "automodel.strategy-unknown",
        "error",
        ("distributed.strategy",),
        _strategy_unknown,
        symptom="ValueError: unknown strategy, on every rank",
        cause="the section is handed to one of three strategies by this name",
    ),
    FrameworkRule(
        "automodel.size-below-one",
        "warning",
        tuple(f"distributed.{name}_size" for name in (*PARALLEL_AXES, "dp", "dp_replicate")),
        _below_one,
        symptom="the run starts with another layout than the file seems to ask for",
        cause="sizes below one are read as one, or as unset, without a message",
    ),
    FrameworkRule(
        "automodel.pipeline-ignored",
        "warning",
        ("distributed.pipeline",),
        _pipeline_ignored,
        symptom="a warning in the log; nothing of the block is used",
        cause="the block is read only when there are several stages",
    ),
    FrameworkRule(
        "automodel.moe-ignored",
        "warning",
        ("distributed.moe",),
        _moe_dropped,
        symptom="nothing: not even an unknown key is told",
        cause="the block belongs to the parallelizer of experts, which only works with ep_size above 1",
    ),
    FrameworkRule(
        "automodel.schedule-unknown",
        "error",
        ("distributed.pipeline.pp_schedule",),
        _schedule_raises,
        symptom="an error about the schedule when the stages are built, after the model was loaded",
        cause="names go to torch as they are: case does not matter, underscores do",
    ),
    FrameworkRule(
        "automodel.compile-ignored",
        "warning",
        ("compile.enabled",),
        _compile_ignored,
        symptom="the speed of an uncompiled model",
        cause="under fsdp2 layers are compiled one by one, by a switch of the distributed section",
    ),
    FrameworkRule(
        "automodel.rng-ignored",
        "warning",
        ("rng.seed",),
        _rng_unread,
        symptom="runs with different seeds in this block give the same numbers",
        cause="recipes read the top-level seed, 42 when it is not there",
    ),
    FrameworkRule(
        "automodel.block-ignored",
        "warning",
        (),
        _block_unread,
        symptom="nothing: unknown blocks at the top pass silently",
        cause="only the sections themselves check their keys",
    ),
)
"""Rules over a file as it is written, before what AutoModel drops is dropped."""
