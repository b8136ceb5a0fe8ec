"""KempnerForge's own constraints."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.frameworks.common import INFINITE, Ranges, format_toml, range_rule
from meshwright.frameworks.framework import FrameworkRule, Problem, RuleContext


def _invalid_sizes(ctx: RuleContext) -> Iterator[Problem]:
    """Model sizes that the config sections reject."""
    dim, heads, kv = ctx.get("model.dim"), ctx.get("model.n_heads"), ctx.get("model.n_kv_heads")
    numbers = [value for value in (dim, heads, kv) if value is not None]
    if not all(isinstance(value, int) and value > 0 for value in numbers):
        yield Problem("model sizes must be positive integers")
    elif dim % heads:
        yield Problem(f"dim={dim} is not divisible by n_heads={heads}", key="model.n_heads")
    elif kv and heads % kv:
        yield Problem(f"n_heads={heads} is not divisible by n_kv_heads={kv}", key="model.n_kv_heads")


def _too_long(ctx: RuleContext) -> Problem | None:
    length, maximum = ctx.get("train.seq_len"), ctx.get("model.max_seq_len")
    if not (isinstance(length, int) and isinstance(maximum, int)) or length <= maximum:
        return None
    return Problem(
        f"train.seq_len={length} exceeds model.max_seq_len={maximum}, the length of the RoPE table",
        (format_toml("model.max_seq_len", length),),
    )


def _no_evaluation_data(ctx: RuleContext) -> Problem | None:
    has_data = ctx.get("eval.dataset_path") or any(
        key.startswith("eval.hf_dataset_name") for key in ctx.keys_under("eval")
    )
    if ctx.get("eval.enabled") is not True or has_data:
        return None
    return Problem(
        "eval.enabled needs eval.dataset_path or eval.hf_dataset_name",
        (format_toml("eval.enabled", False),),
        key="eval.enabled",
    )


def _profiling_range(ctx: RuleContext) -> Problem | None:
    start, end = ctx.get("profiling.start_step"), ctx.get("profiling.end_step")
    if not (isinstance(start, int) and isinstance(end, int)) or end > start:
        return None
    return Problem(
        f"profiling.end_step={end} must be greater than profiling.start_step={start}",
        (format_toml("profiling.end_step", start + 3),),
    )


def _phases_and_annealing(ctx: RuleContext) -> Problem | None:
    if not (ctx.keys_under("data.phases") and ctx.get("data.anneal_start_step")):
        return None
    return Problem("data.phases and data.anneal_start_step are exclusive", key="data.anneal_start_step")


def _needs_section(ctx: RuleContext) -> Iterator[Problem]:
    for section, required in (("vlm", "vision_encoder"), ("video", "vlm")):
        if ctx.keys_under(section) and not ctx.keys_under(required):
            yield Problem(f"[{section}] needs [{required}]", key=ctx.keys_under(section)[0])


def _vision_pipeline(ctx: RuleContext) -> Problem | None:
    if not ctx.keys_under("vlm") or ctx.get("distributed.pp") in (None, 1):
        return None
    return Problem(
        "vision-language models do not support distributed.pp > 1",
        (format_toml("distributed.pp", 1),),
        key="distributed.pp",
    )


POSITIVE = (0.0, INFINITE, True)
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
        POSITIVE,
    ),
    "scheduler.min_lr_ratio": (0.0, 1.0, False),
}

RULES = (
    FrameworkRule(
        "kempnerforge.sizes",
        "error",
        ("model.dim", "model.n_heads", "model.n_kv_heads"),
        _invalid_sizes,
        symptom="ValueError while the config is parsed",
        cause="the model section validates its sizes first",
    ),
    FrameworkRule(
        "kempnerforge.seq-len-beyond-rope",
        "error",
        ("train.seq_len", "model.max_seq_len"),
        _too_long,
        symptom="ValueError from validate",
        cause="the RoPE table has max_seq_len entries",
    ),
    FrameworkRule(
        "kempnerforge.no-evaluation-data",
        "error",
        ("eval.enabled",),
        _no_evaluation_data,
        symptom="ValueError from validate",
        cause="evaluation has no default dataset",
    ),
    range_rule("kempnerforge", RANGES, format_toml, "ValueError while the section is parsed"),
    FrameworkRule(
        "kempnerforge.profiling-range",
        "error",
        ("profiling.end_step", "profiling.start_step"),
        _profiling_range,
        symptom="ValueError while the section is parsed",
        cause="the last profiled step must come after the first",
    ),
    FrameworkRule(
        "kempnerforge.phases-and-annealing",
        "error",
        ("data.anneal_start_step",),
        _phases_and_annealing,
        symptom="ValueError while the data section is parsed",
        cause="annealing is a kind of phase; only one of the two can be set",
    ),
    FrameworkRule(
        "kempnerforge.section-missing",
        "error",
        (),
        _needs_section,
        symptom="ValueError while the config is parsed",
        cause="the vision sections depend on each other",
    ),
    FrameworkRule(
        "kempnerforge.vision-pipeline",
        "error",
        ("distributed.pp",),
        _vision_pipeline,
        symptom="ValueError from validate",
        cause="pipeline stages cannot contain the vision encoder",
    ),
)
