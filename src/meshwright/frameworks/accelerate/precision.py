"""Dtypes of a fine-tuning: mixed precision, the weights as loaded, and what the optimizer updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from meshwright.frameworks.accelerate.keys import format_setting
from meshwright.frameworks.trainer import Arguments, is_on
from meshwright.frameworks.trainer_fields import FROZEN, LOADED_BY_TRL, WEIGHT_DTYPES
from meshwright.frameworks.types import Settings, SourcedValue
from meshwright.recipes.types import Engine, Goal
from meshwright.rules.rule import Finding

MARK, MARKS = "per_device_train_batch_size", ("output_dir", "num_train_epochs")
ENGINES: dict[str, Engine] = {"DEEPSPEED": "deepspeed", "MEGATRON_LM": "megatron"}
WEIGHTS = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32", "auto": "bf16"}
"""Format of loaded weights, by torch's name of the dtype."""


class Precision(msgspec.Struct, frozen=True):
    """The dtypes of a run."""

    settings: Settings  # of Accelerate, with the mixed precision that the Trainer's flags set
    weights: str  # dtype of the loaded weights that are trained; empty if unknown
    in_weight_dtype: bool  # gradients and optimizer states have the dtype of the weights
    field_values: Mapping[str, Any]


def precision_of(settings: Settings, arguments: Arguments, type_name: str, goal: Goal, keeps_dtype: bool) -> Precision:
    """Return the dtypes of weights, gradients and computation; `keeps_dtype`: FSDP does not upcast."""
    effective = {**settings, **trainer_precision(arguments)}
    weights = _weight_dtype(arguments) if goal != "peft" else ""
    in_weight_dtype = bool(weights) and (keeps_dtype or not _updates_in_fp32(type_name, effective))
    trained = _state_dtypes(weights, effective) if in_weight_dtype else _gradient_dtypes(type_name, effective)
    frozen = _frozen_dtype(arguments, effective, type_name) if goal == "peft" else {}
    return Precision(effective, weights, in_weight_dtype, {**trained, **frozen})


def _gradient_dtypes(type_name: str, settings: Settings) -> dict[str, Any]:
    """Return the gradient dtypes, which depend on mixed_precision and the distributed type."""
    setting = settings.get("mixed_precision")
    text = str(setting.value).lower() if setting else "no"
    if text == "no":
        return {}
    if type_name == "DEEPSPEED":
        return {"precision.grads": "bf16", "precision.reduce": "bf16"}
    return {"precision.reduce": "bf16"} if type_name == "FSDP" else {}


def trainer_precision(arguments: Arguments) -> dict[str, SourcedValue]:
    """Return the mixed precision that the Trainer's own flags set: they replace Accelerate's, whatever it is.

    TrainingArguments reads ACCELERATE_MIXED_PRECISION first; fp16 or bf16 replaces it if true, not if false.
    """
    if not any(name in arguments for name in (MARK, *MARKS)):
        return {}  # flags of another program, which may leave the dtype to Accelerate
    for name in ("fp16", "bf16"):
        if name in arguments and not arguments[name].unresolved and is_on(arguments, name):
            return {"mixed_precision": msgspec.structs.replace(arguments[name], value=name)}
    return {}


def overwritten_precision(settings: Settings, arguments: Arguments) -> Iterator[Finding]:
    """Yield a finding if Accelerate's config states another precision than the Trainer's flag."""
    key = "mixed_precision"
    written, flag = settings.get(key), trainer_precision(arguments).get(key)
    if all(is_on(arguments, name) for name in ("fp16", "bf16")):
        return  # the Trainer refuses to start
    if written is None or flag is None or str(written.value).lower() in ("no", "false", flag.value):
        return  # "no" leaves the choice to the program
    yield Finding(
        "key.overwritten",
        "warning",
        key,
        f"{key}={written.value} has no effect: --{flag.value} True of the Trainer ({flag.location}) replaces it, and "
        f"training computes in {flag.value}",
        (format_setting(key, flag.value),),
        file=written.file,
        line=written.line,
    )


def mixed_precision(settings: Settings) -> dict[str, SourcedValue]:
    """Return the mixed precision of a run as an argument beside the Trainer's own."""
    return {key: one for key, one in settings.items() if key == "mixed_precision"}


def is_unmixed(settings: Settings) -> bool:
    setting = settings.get("mixed_precision")
    return setting is None or str(setting.value).lower() in ("no", "false")


def _weight_dtype(arguments: Arguments) -> str:
    """Return the dtype in which from_pretrained loads the weights; empty if none is given, or the program computes it.

    "auto" is the dtype of the checkpoint: published weights are in bf16, with few exceptions.
    """
    setting = next((arguments[name] for name in WEIGHT_DTYPES if name in arguments), None)
    if setting is None and LOADED_BY_TRL in arguments:
        return "fp32"
    if setting is None or setting.unresolved:
        return ""
    return WEIGHTS.get(str(setting.value).lower().removeprefix("torch."), "")


def _updates_in_fp32(type_name: str, settings: Settings) -> bool:
    """Return whether the optimizer updates weights in fp32 whatever dtype they were loaded in.

    DeepSpeed and Megatron keep a copy in fp32; FSDP upcasts trainable weights if mixed precision is on. Replicas of
    the Trainer are not upcast.
    """
    return type_name in ENGINES or (type_name == "FSDP" and not is_unmixed(settings))


def _state_dtypes(weights: str, settings: Settings) -> dict[str, Any]:
    """Return the dtypes of a run whose gradients and optimizer states are in the dtype of the loaded weights."""
    halves = dict.fromkeys(("master", "moments", "grads", "reduce"), "bf16")  # a recipe's format with 16 bits
    states = {} if weights == "fp32" else halves
    compute = {"compute": weights} if is_unmixed(settings) else {}
    return {f"precision.{name}": value for name, value in {**states, **compute}.items()}


def scaled_fp16_weights(precision: Precision, arguments: Arguments) -> Iterator[Finding]:
    """Yield a finding if loss scaling would meet gradients in fp16, which torch's GradScaler rejects."""
    mixed = precision.settings.get("mixed_precision")
    name = next((name for name in WEIGHT_DTYPES if name in arguments), "")
    if (
        precision.in_weight_dtype
        and precision.weights == "fp16"
        and mixed is not None
        and str(mixed.value).lower() == "fp16"
    ):
        setting = arguments[name]
        yield Finding(
            "accelerate.fp16-weights",
            "error",
            name,
            f"{name}={setting.value} loads weights in fp16, and fp16 mixed precision scales the loss: GradScaler does "
            "not unscale gradients in fp16",
            (f'{name}="float32"',),
            file=setting.file,
            line=setting.line,
        )


def weight_notes(arguments: Arguments, precision: Precision, type_name: str) -> Iterator[str]:
    """Yield what follows from the dtype of from_pretrained, where the user may expect something else."""
    setting = next((arguments[name] for name in WEIGHT_DTYPES if name in arguments), None)
    weights = precision.weights
    if setting is None or weights == "fp32":
        return
    given = f"{next(name for name in WEIGHT_DTYPES if name in arguments)}={setting.value}"
    if setting.unresolved:
        yield f"{given} is computed by the program: fp32 weights are assumed; write precision.master=bf16 for bf16"
    elif weights and not precision.in_weight_dtype and type_name == "FSDP":
        yield f"{given}: FSDP with mixed precision converts trainable weights to fp32"
    elif weights and precision.in_weight_dtype:
        auto = ", the checkpoint's dtype, assumed to be bf16" if str(setting.value).lower() == "auto" else ""
        counted = " (counted as precision.master=bf16: recipes have no fp16 weights)" if weights == "fp16" else ""
        yield (
            f"{given}{auto}: weights, gradients and optimizer states are in {weights}{counted}; updates that are small "
            "against a weight are rounded away: dtype=float32 keeps them, with twice the memory"
        )


def _frozen_dtype(arguments: Arguments, settings: Settings, type_name: str) -> dict[str, Any]:
    """Return the dtype of frozen weights: as loaded, except where DeepSpeed and Megatron convert it.

    Without mixed precision it is also the dtype of the computation.
    """
    weights = _weight_dtype(arguments)
    if not weights or type_name in ENGINES:
        return {}
    if is_unmixed(settings):
        return {"precision.compute": weights}
    return {FROZEN: "fp32"} if weights == "fp32" else {}


def frozen_note(arguments: Arguments, field_values: Mapping[str, Any], is_command: bool) -> Iterator[str]:
    """Yield that frozen weights take twice the memory of the computation's dtype, which the user may not expect."""
    if field_values.get(FROZEN) != "fp32" or field_values.get("peft.method") == "qlora":
        return
    name = next((name for name in WEIGHT_DTYPES if name in arguments), "")
    if name:
        yield f'{name}={arguments[name].value}: the frozen weights take 4 bytes each; {name}="bfloat16" halves them'
    else:
        how = "--dtype bfloat16" if is_command else f'{LOADED_BY_TRL}={{"dtype": "bfloat16"}}'
        yield f"TRL loads a model given by name in float32: the frozen weights take 4 bytes each; {how} halves them"
