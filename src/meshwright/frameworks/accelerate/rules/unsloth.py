"""Unsloth's own check of the number format: its trainer refuses another one than that of the loaded model."""

from __future__ import annotations

from meshwright.frameworks.framework import FrameworkRule, Problem, RuleContext
from meshwright.frameworks.trainer_fields import LOADED_BY_UNSLOTH, WEIGHT_DTYPES
from meshwright.rules.model_families import overflows_in_fp16

HALVES = {"fp16": "float16", "bf16": "bfloat16"}


def _loaded_dtype(ctx: RuleContext) -> tuple[str, str]:
    """Return the dtype in which Unsloth loads the model, and why; empty if it is not known here."""
    given = ctx.parsed.program.given
    stated = next((given[name] for name in WEIGHT_DTYPES if name in given), None)
    if stated is not None:
        return ("", "") if stated.unresolved else (str(stated.value).removeprefix("torch."), f"dtype={stated.value}")
    if ctx.cluster is None:
        return "", ""
    gpu = ctx.cluster.gpu
    has_bf16 = "bf16" in gpu.peak_tflops
    return ("bfloat16" if has_bf16 else "float16"), f"on {gpu.name}, which has {'' if has_bf16 else 'no '}bf16"


def _other_precision(ctx: RuleContext) -> Problem | None:
    given = ctx.parsed.program.given
    if LOADED_BY_UNSLOTH not in given or ctx.recipe.goal != "peft":  # all weights: it follows the model
        return None
    if ctx.case is not None and overflows_in_fp16(ctx.case):  # it trains these in float32, whatever is set
        return None
    loaded, why = _loaded_dtype(ctx)
    for flag, other in (("fp16", "bf16"), ("bf16", "fp16")):
        setting = given.get(flag)
        if setting is not None and setting.value is True and loaded == HALVES[other]:
            message = (
                f"{flag}=True, but Unsloth loads the model in {loaded} ({why}), and its trainer refuses to compute in "
                f"{HALVES[flag]}"
            )
            return Problem(message, (f"{flag}=False", f"{other}=True"), key=flag)
    return None


RULES = (
    FrameworkRule(
        "accelerate.unsloth-precision",
        "error",
        ("fp16", "bf16"),
        _other_precision,
        symptom="TypeError: Unsloth: Model is in bfloat16 precision but you want to use float16 precision",
        cause="Unsloth's trainer compares the format of the loaded model with fp16 and bf16; dtype=None loads bf16 on "
        "every GPU that has it",
        supersedes=("precision.fp16",),
    ),
)
