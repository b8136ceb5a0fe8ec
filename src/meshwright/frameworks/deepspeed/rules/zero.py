"""DeepSpeed's rules on ZeRO stages and offload."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.frameworks.deepspeed.format_override import format_setting
from meshwright.frameworks.deepspeed.rules.common import STAGE, ZERO, offload_device, stage_of
from meshwright.frameworks.framework import FrameworkRule, Problem, RuleContext


def _stage_too_low(ctx: RuleContext) -> Iterator[Problem]:
    """Settings that only a higher stage uses."""
    stage = stage_of(ctx)
    if stage is None or not 0 <= stage <= 3:
        return
    if stage < 3 and offload_device(ctx, "param") != "none":
        yield Problem(
            f"offload_param requires stage 3; with stage {stage} parameters stay on the GPU",
            (format_setting(STAGE, 3),),
            key=f"{ZERO}offload_param.device",
        )
    if stage < 1 and offload_device(ctx, "optimizer") != "none":
        yield Problem(
            "offload_optimizer requires stage 1 or higher; without ZeRO the optimizer stays on the GPU",
            (format_setting(STAGE, 2),),
            key=f"{ZERO}offload_optimizer.device",
        )
    if 0 < stage < 3 and offload_device(ctx, "optimizer") == "nvme":
        yield Problem(
            f"NVMe offload requires stage 3; with stage {stage} the optimizer stays on the GPU",
            (format_setting(f"{ZERO}offload_optimizer.device", "cpu"),),
            key=f"{ZERO}offload_optimizer.device",
        )
    names = [key for key in ctx.keys_under("zero_optimization") if key.startswith(f"{ZERO}stage3_")]
    if stage < 3 and names:
        listed = ", ".join(key.removeprefix(ZERO) for key in names)
        yield Problem(
            f"{listed} requires stage 3 and is ignored with stage {stage}", (format_setting(STAGE, 3),), key=names[0]
        )


def _nvme_path_missing(ctx: RuleContext) -> Iterator[Problem]:
    for part in ("param", "optimizer"):
        key = f"{ZERO}offload_{part}."
        if offload_device(ctx, part) == "nvme" and not ctx.get(f"{key}nvme_path") and stage_of(ctx) == 3:
            yield Problem(
                "device nvme requires nvme_path",
                (format_setting(f"{key}nvme_path", "/local_nvme"),),
                key=f"{key}device",
            )


def _partial_offload(ctx: RuleContext) -> Problem | None:
    key = f"{ZERO}offload_optimizer.ratio"
    ratio = ctx.get(key)
    if not isinstance(ratio, int | float) or ratio >= 1 or stage_of(ctx) == 3:
        return None
    return Problem(f"partial optimizer offload (ratio={ratio}) requires stage 3", (format_setting(key, 1.0),), key=key)


RENAMED = {
    "cpu_offload": ("offload_optimizer", '"offload_optimizer": {"device": "cpu"}'),
    "cpu_offload_param": ("offload_param", '"offload_param": {"device": "cpu"}'),
    "stage3_gather_fp16_weights_on_model_save": (
        "stage3_gather_16bit_weights_on_model_save",
        '"stage3_gather_16bit_weights_on_model_save": true',
    ),
}


def _renamed(ctx: RuleContext) -> Iterator[Problem]:
    for old, (new, fix) in RENAMED.items():
        if not ctx.is_set(ZERO + old):
            continue
        if ctx.keys_under(ZERO + new):
            yield Problem(
                f"{old} is the old name of {new}; setting both is an error",
                (f'"zero_optimization": {{{fix}}}',),
                ZERO + old,
                "error",
            )
        else:
            yield Problem(f"{old} is the old name of {new}", (f'"zero_optimization": {{{fix}}}',), key=ZERO + old)
    for old, new in (("bfloat16", "bf16"),):
        keys = [key for key in ctx.keys_under(old) if key != old]
        if keys and ctx.keys_under(new):
            yield Problem(f"{old} is ignored because {new} is set", (), key=keys[0])


def _pipeline_zero_stage(ctx: RuleContext) -> Problem | None:
    stages, stage = ctx.get("pipeline.stages"), stage_of(ctx)
    if not isinstance(stages, int) or stages < 2 or stage is None or stage < 2:
        return None
    return Problem(
        f"pipeline parallelism requires ZeRO stage 0 or 1, not {stage}", (format_setting(STAGE, 1),), key=STAGE
    )


def _gradient_sum(ctx: RuleContext) -> Problem | None:
    if ctx.get("gradient_allreduce_op") != "sum" or stage_of(ctx) != 3:
        return None
    return Problem(
        "gradient_allreduce_op=sum is not supported with stage 3", (format_setting("gradient_allreduce_op", "mean"),)
    )


RULES = (
    FrameworkRule("deepspeed.stage-too-low", "warning", (), _stage_too_low,
        symptom="none: the keys are accepted but save no memory",
        cause="each ZeRO stage uses only its own part of zero_optimization"),
    FrameworkRule("deepspeed.no-nvme-path", "error", (), _nvme_path_missing,
        symptom="AssertionError or TypeError about nvme_path when the model or the optimizer is initialized",
        cause="there is no default path for a local NVMe disk"),
    FrameworkRule("deepspeed.partial-offload", "error", ("zero_optimization.offload_optimizer.ratio",),
        _partial_offload, symptom="AssertionError: Partial offloading only supported for ZeRO Stage 3",
        cause="only stage 3 updates parameters in sub-groups, some of which can stay on the GPU"),
    FrameworkRule("deepspeed.renamed", "warning", (), _renamed, symptom="a deprecation warning in the log",
        cause="the key was renamed"),
    FrameworkRule("deepspeed.pipeline-zero-stage", "error", (STAGE,), _pipeline_zero_stage,
        symptom="AssertionError: ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism",
        cause="a pipeline stage accumulates full gradients until the last micro batch",
        supersedes=("strategy.deepspeed-pipeline",)),
    FrameworkRule("deepspeed.gradient-sum", "error", ("gradient_allreduce_op",), _gradient_sum,
        symptom="ValueError: gradient_allreduce_op='sum' is not supported with ZeRO stage 3",
        cause="stage 3 averages inside its reduction"),
)  # fmt: skip
