"""DeepSpeed's rules on the other sections, and on values of the wrong type."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from meshwright.errors import closest
from meshwright.frameworks.deepspeed.format_override import format_setting
from meshwright.frameworks.deepspeed.keys import SECTIONS, STRICT_SECTIONS, ignored_sections, is_section
from meshwright.frameworks.deepspeed.parse import BATCH, FROM_TRAINER
from meshwright.frameworks.deepspeed.rules.common import STAGE, ZERO, is_on, stage_of
from meshwright.frameworks.framework import FrameworkRule, Problem, RuleContext
from meshwright.frameworks.other_versions import OLDER_ACCEPT
from meshwright.frameworks.repository import starts_deepspeed_itself
from meshwright.frameworks.types import as_int

CONFIGURED = " in programs that call deepspeed.checkpointing.configure; others do not read this section"
WHOLE_NUMBERS = tuple(f"fp16.{name}" for name in ("initial_scale_power", "loss_scale_window", "hysteresis",
    "min_loss_scale"))  # fmt: skip


def _fractions(ctx: RuleContext) -> Iterator[Problem]:
    for key in WHOLE_NUMBERS:
        value = ctx.get(key)
        if isinstance(value, float) and not value.is_integer():
            yield Problem(f"{key}={value:g}: DeepSpeed since 0.17.1 requires an integer; {OLDER_ACCEPT} it", key=key)


def _contiguous_checkpoints(ctx: RuleContext) -> Iterator[Problem]:
    part = "activation_checkpointing."
    if not is_on(ctx, f"{part}contiguous_memory_optimization"):
        return
    key = f"{part}contiguous_memory_optimization"
    if not is_on(ctx, f"{part}partition_activations"):
        yield Problem(
            f"contiguous_memory_optimization requires partition_activations{CONFIGURED}",
            (format_setting(f"{part}partition_activations", True),),
            key,
        )
    if not ctx.get(f"{part}number_checkpoints"):
        layers = ctx.case.layers if ctx.case else 32
        yield Problem(
            f"contiguous_memory_optimization requires number_checkpoints{CONFIGURED}",
            (format_setting(f"{part}number_checkpoints", layers),),
            key,
        )


def _sequence_parallel(ctx: RuleContext) -> Iterator[Problem]:
    key = "sequence_parallel_size"
    size = as_int(ctx.parsed.settings.get(key))
    if not size:
        return
    world = ctx.cluster.world if ctx.cluster else ctx.parsed.gpu_request.count
    if world and world % size:
        yield Problem(f"sequence_parallel_size={size} does not divide {world} GPUs", (format_setting(key, 1),), key=key)
    if ctx.case is not None and ctx.case.heads and ctx.case.heads % size:
        yield Problem(
            f"sequence_parallel_size={size} does not divide {ctx.case.heads} attention heads",
            (format_setting(key, 1),),
            key=key,
        )


def _tp_with_stage_3(ctx: RuleContext) -> Problem | None:
    size = ctx.get("tensor_parallel.autotp_size")
    if not isinstance(size, int) or size < 2 or stage_of(ctx) != 3:
        return None
    return Problem(
        f"autotp_size={size} with stage 3 needs DeepSpeed 0.19.4 or newer; stages 0 to 2 do not",
        (format_setting(STAGE, 2),),
    )


def _not_a_section(ctx: RuleContext) -> Iterator[Problem]:
    for key, setting in ctx.parsed.settings.items():
        empty = setting.value is None and (key in ("aio", "datastates_ckpt") or key.startswith(ZERO))
        if not is_section(key) or isinstance(setting.value, dict) or empty or setting.unresolved:
            continue
        fix = f'"{key.rsplit(".", 1)[-1]}": {{"enabled": {"true" if setting.value else "false"}}}'
        yield Problem(
            f"{key} must be a section, not {setting.value!r}", (fix,) if key in STRICT_SECTIONS else (), key=key
        )


def _ignored_section(ctx: RuleContext) -> Iterator[Problem]:
    for section, key in ignored_sections(ctx.parsed.settings).items():
        near = closest(section, SECTIONS, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        yield Problem(f"DeepSpeed ignores the section {section}{hint}", key=key)


RAW_BOOLS = (
    "prescale_gradients", "dump_state", "disable_allgather", "wall_clock_breakdown", "memory_breakdown",
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "dataloader_drop_last", "torch_autocast.enabled",
    "activation_checkpointing.partition_activations", "activation_checkpointing.cpu_checkpointing",
    "activation_checkpointing.contiguous_memory_optimization",
)  # fmt: skip
RAW_NUMBERS = (
    *BATCH, "gradient_clipping", "gradient_predivide_factor", "optimizer.params.lr", "optimizer.params.eps",
    "optimizer.params.weight_decay", "scheduler.params.warmup_min_lr", "scheduler.params.warmup_max_lr",
    "scheduler.params.warmup_num_steps", "scheduler.params.total_num_steps", "sequence_parallel_size",
)  # fmt: skip
"""Values that DeepSpeed uses without conversion; the other sections convert strings."""


def _quoted_value(ctx: RuleContext) -> Iterator[Problem]:
    for key in (*RAW_BOOLS, *RAW_NUMBERS):
        setting = ctx.parsed.settings.get(key)
        if (
            setting is None
            or setting.unresolved
            or not isinstance(setting.value, str)
            or not setting.file.endswith(".json")
        ):
            continue
        text = setting.value.strip().lower()
        if key in RAW_BOOLS and text == "false":
            yield Problem(
                f'{key} is the string "{setting.value}", and any non-empty string is true',
                (_unquoted(key, text),),
                key=key,
            )
        elif key in RAW_NUMBERS and _parses_as_number(text):
            yield Problem(f'{key} is the string "{setting.value}", not a number', (_unquoted(key, text),), key=key)


def _unquoted(key: str, text: str) -> str:
    *path, last = key.split(".")
    line = f'"{last}": {text}'
    for part in reversed(path):
        line = f'"{part}": {{{line}}}'
    return line


def _parses_as_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


AUTO_KEYS = {
    *BATCH,
    *(key for keys in FROM_TRAINER.values() for key in keys),
    "optimizer.params.betas",
    "scheduler.params.warmup_min_lr",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "zero_optimization.stage",
    "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_optimizer.nvme_path",
    "zero_optimization.offload_param.device",
    "zero_optimization.offload_param.nvme_path",
    "data_types.keep_in_fp32_modules",
}


AUTO_IN_DEEPSPEED = ("expert_parallel", "zero_optimization.zenflow", "autotuning")  # DeepSpeed itself reads auto


DROPPED = ("zero_optimization.", "fp16.", "bf16.")
"""Sections in which DeepSpeed itself takes its default for auto: deepspeed/runtime/config_utils.py."""


def _auto_not_filled(ctx: RuleContext) -> Iterator[Problem]:
    files = ctx.parsed.files
    for key, setting in ctx.parsed.settings.items():
        if (
            setting.value == "auto"
            and setting.unresolved
            and key not in AUTO_KEYS
            and not key.startswith(AUTO_IN_DEEPSPEED)
        ):
            message = f"{key} is auto, but neither transformers nor accelerate fills it in"
            is_own = key.startswith(DROPPED) and starts_deepspeed_itself(Path(files[0]).parent if files else None)
            if is_own:
                message += "; a program that calls DeepSpeed itself gets the default"
            yield Problem(message, key=key, severity="warning" if is_own else None)


RULES = (
    FrameworkRule("deepspeed.whole-number", "warning", WHOLE_NUMBERS, _fractions,
        symptom="ValidationError: Input should be a valid integer, got a number with a fractional part",
        cause="the section is a pydantic model since 0.17.1"),
    FrameworkRule("deepspeed.contiguous-checkpoints", "warning", (), _contiguous_checkpoints,
        symptom="AssertionError when activation checkpointing is configured",
        cause="the contiguous buffer is allocated before the first layer runs"),
    FrameworkRule("deepspeed.sequence-parallel", "error", ("sequence_parallel_size",), _sequence_parallel,
        symptom="AssertionError about the number of heads or ranks when the process groups are created",
        cause="Ulysses exchanges sequence shards for whole attention heads"),
    FrameworkRule("deepspeed.tp-with-stage-3", "warning", ("tensor_parallel.autotp_size",), _tp_with_stage_3,
        symptom="AssertionError: the compatibility between 'autotp' and 'zero_stage = 3' has not been validated",
        cause="both shard the same matrices", supersedes=("strategy.deepspeed-tensor-parallel",)),
    FrameworkRule("deepspeed.not-a-section", "error", (), _not_a_section,
        symptom="TypeError or AttributeError while the config is read",
        cause="the keys of a section are looked up by name"),
    FrameworkRule("deepspeed.ignored-section", "warning", (), _ignored_section,
        symptom="none: unknown top-level keys are ignored", cause="only known keys are looked up"),
    FrameworkRule("deepspeed.quoted-value", "error", (), _quoted_value,
        symptom="TypeError: '>' not supported between instances of 'str' and 'int'; or a switch that is always on",
        cause="JSON distinguishes strings from numbers, and this value is used without conversion"),
    FrameworkRule("deepspeed.auto-not-filled", "error", (), _auto_not_filled,
        symptom="ValueError: … not found in kwargs. Please specify … without auto",
        cause="auto is filled in by transformers or accelerate, for a fixed list of keys only"),
)  # fmt: skip
