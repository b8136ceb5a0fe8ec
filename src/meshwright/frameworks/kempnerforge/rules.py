"""What KempnerForge refuses that only its own sections can see."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.frameworks.common import INFINITE, Ranges, format_toml, range_rule
from meshwright.frameworks.framework import FrameworkRule, Problem, RuleContext


def _no_table(ctx: RuleContext) -> Iterator[Problem]:
    """Sizes that the sections refuse by themselves."""
    dim, heads, kv = ctx.get("model.dim"), ctx.get("model.n_heads"), ctx.get("model.n_kv_heads")
    numbers = [value for value in (dim, heads, kv) if value is not None]
    if not all(isinstance(value, int) and value > 0 for value in numbers):
        yield Problem("model sizes are whole numbers above 0")
    elif dim % heads:
        yield Problem(f"dim={dim} is not divisible by n_heads={heads}", key="model.n_heads")
    elif kv and heads % kv:
        yield Problem(f"n_heads={heads} is not divisible by n_kv_heads={kv}", key="model.n_kv_heads")


def _too_long(ctx: RuleContext) -> Problem | None:
    length, longest = ctx.get("train.seq_len"), ctx.get("model.max_seq_len")
    if not (isinstance(length, int) and isinstance(longest, int)) or length <= longest:
        return None
    return Problem(
        f"seq_len={length} is longer than model.max_seq_len={longest}, the length of the rotary table",
        (format_toml("model.max_seq_len", length),),
    )


def _no_data_to_evaluate(ctx: RuleContext) -> Problem | None:
    named = ctx.get("eval.dataset_path") or any(
        key.startswith("eval.hf_dataset_name") for key in ctx.keys_under("eval")
    )
    if ctx.get("eval.enabled") is not True or named:
        return None
    return Problem(
        "evaluation is on and has neither eval.dataset_path nor eval.hf_dataset_name",
        (format_toml("eval.enabled", False),),
        key="eval.enabled",
    )


def _profile_ends_first(ctx: RuleContext) -> Problem | None:
    start, end = ctx.get("profiling.start"), ctx.get("profiling.end")
    if not (isinstance(start, int) and isinstance(end, int)) or end > start:
        return None
    return Problem(
        f"profiling.end={end} must come after profiling.start={start}", (format_toml("profiling.end", start + 3),)
    )


def _annealed_and_phased(ctx: RuleContext) -> Problem | None:
    if not (ctx.keys_under("data.phases") and ctx.get("data.anneal_start_step")):
        return None
    return Problem("data.phases and data.anneal_start_step exclude each other", key="data.anneal_start_step")


def _needs_section(ctx: RuleContext) -> Iterator[Problem]:
    for section, needed in (("vlm", "vision_encoder"), ("video", "vlm")):
        if ctx.keys_under(section) and not ctx.keys_under(needed):
            yield Problem(f"[{section}] needs [{needed}]", key=ctx.keys_under(section)[0])


def _vision_in_stages(ctx: RuleContext) -> Problem | None:
    if not ctx.keys_under("vlm") or ctx.get("distributed.pp") in (None, 1):
        return None
    return Problem("models that see have no pipeline here", (format_toml("distributed.pp", 1),), key="distributed.pp")


ABOVE_0 = (0.0, INFINITE, True)
RANGES: Ranges = {
    **dict.fromkeys(
        (
            "train.batch_size",
            "train.seq_len",
            "train.max_steps",
            "train.grad_accum_steps",
            "train.grad_clip_norm",
            "scheduler.rex_alpha",
            "checkpoint.interval",
            "metrics.log_interval",
            "eval.interval",
            "eval.steps",
            "data.mix_temperature",
            "model.moe_expert_ffn_multiplier",
            "model.moe_frequency",
        ),
        ABOVE_0,
    ),
    "scheduler.min_lr_ratio": (0.0, 1.0, False),
}

RULES = (
    FrameworkRule(
        "kempnerforge.sizes",
        "error",
        ("model.dim", "model.n_heads", "model.n_kv_heads"),
        _no_table,
        symptom="ValueError while the config is read",
        cause="the model section checks its own sizes before anything else runs",
    ),
    FrameworkRule(
        "kempnerforge.longer-than-rotary-table",
        "error",
        ("train.seq_len", "model.max_seq_len"),
        _too_long,
        symptom="ValueError from validate",
        cause="positions are read from a table of max_seq_len entries",
    ),
    FrameworkRule(
        "kempnerforge.nothing-to-evaluate",
        "error",
        ("eval.enabled",),
        _no_data_to_evaluate,
        symptom="ValueError from validate",
        cause="evaluation has no data set of its own to fall back on",
    ),
    range_rule("kempnerforge", RANGES, format_toml, "ValueError while the section is read"),
    FrameworkRule(
        "kempnerforge.profile-ends-first",
        "error",
        ("profiling.end", "profiling.start"),
        _profile_ends_first,
        symptom="ValueError while the section is read",
        cause="the last profiled step must come after the first",
    ),
    FrameworkRule(
        "kempnerforge.annealed-and-phased",
        "error",
        ("data.anneal_start_step",),
        _annealed_and_phased,
        symptom="ValueError while the data section is read",
        cause="annealing is one kind of phase; only one of the two may be asked for",
    ),
    FrameworkRule(
        "kempnerforge.section-missing",
        "error",
        (),
        _needs_section,
        symptom="ValueError while the config is read",
        cause="a part of a model that sees builds on another part",
    ),
    FrameworkRule(
        "kempnerforge.vision-in-stages",
        "error",
        ("distributed.pp",),
        _vision_in_stages,
        symptom="ValueError from validate",
        cause="the stages cannot hold the vision encoder",
    ),
)
