"""The DeepSpeed config that a config of Accelerate names, or that Accelerate makes of its own keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from meshwright.errors import InputError
from meshwright.frameworks.framework import Content, ParsedConfig
from meshwright.frameworks.trainer import Arguments, open_deepspeed_config
from meshwright.frameworks.trainer_fields import is_trainer
from meshwright.frameworks.types import Settings, SourcedValue
from meshwright.recipes.key_maps.accelerate import ZERO
from meshwright.recipes.key_maps.deepspeed import PRECISION_KEYS
from meshwright.recipes.types import field_value, recipe_fields
from meshwright.rules.rule import Finding

FROM_DEEPSPEED = (
    "layout.strategy",
    "layout.reshard_after_forward",
    "layout.offload",
    "layout.tp",
    "optimizer.clip_grad",
)
"""Fields set by a referenced DeepSpeed config, by its values or by DeepSpeed's defaults."""
FILLED_FROM_YAML = {
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_optimization.stage": "zero_stage",
    "zero_optimization.offload_optimizer.device": "offload_optimizer_device",
    "zero_optimization.offload_param.device": "offload_param_device",
}
"""Key of a DeepSpeed config that is auto → the key of deepspeed_config that fills it in."""

REPEATED: Mapping[str, str] = {
    f"{ZERO}gradient_accumulation_steps": "gradient_accumulation_steps",
    f"{ZERO}gradient_clipping": "max_grad_norm",
}
"""Key of the config → the argument of the Trainer that must have its value; the Trainer fills in auto."""
PRECISION = "mixed_precision"
HALVES: Mapping[str, str] = {"bf16": "bf16", "fp8": "bf16", "fp16": "fp16"}
"""Value of mixed_precision → the section that Accelerate turns on in the DeepSpeed config, an argument of the same
name."""


class DeepSpeedResult(msgspec.Struct, frozen=True):
    """A DeepSpeed config referenced by an Accelerate config: its fields, those it leaves open, and findings."""

    findings: tuple[Finding, ...]
    field_values: Mapping[str, Any] = {}
    unknown_fields: tuple[str, ...] = ()
    parsed: ParsedConfig | None = None


def read_deepspeed_config(
    content: Content, settings: Settings, arguments: Arguments, fine_tuning: bool, script: str, trl: bool
) -> DeepSpeedResult | None:
    """Return the DeepSpeed config as DeepSpeed's own reader maps it, with auto filled in; None if there is none."""
    path = settings.get(f"{ZERO}deepspeed_config_file")
    if path is None or path.value in (None, "none"):
        return None
    try:
        inner = open_deepspeed_config(content, path)
    except InputError:
        return None
    from meshwright.frameworks.check_file import check
    from meshwright.frameworks.deepspeed.definition import FRAMEWORK
    from meshwright.frameworks.deepspeed.parse import parse_json
    from meshwright.frameworks.mapping import map_to_recipe

    if inner.format != "json":
        message = f"{path.value} is not a DeepSpeed config: it must be JSON"
        key = f"{ZERO}deepspeed_config_file"
        finding = Finding("accelerate.not-json", "error", key, message, (), file=path.file, line=path.line)
        return DeepSpeedResult((finding,))
    inner = msgspec.structs.replace(inner, settings=_filled_from_yaml(inner.settings, settings))
    parsed = parse_json(inner, arguments, fine_tuning, script, trl)
    mapped = map_to_recipe(FRAMEWORK, parsed)
    stated = {*mapped.source_keys, *parsed.field_values, *FROM_DEEPSPEED}
    if any(key in parsed.settings for key in PRECISION_KEYS):
        stated |= {f"precision.{name}" for name in ("compute", "master", "moments", "grads", "reduce")}
    implied = {
        key
        for key, info in recipe_fields().items()
        if not key.startswith("precision.") and field_value(mapped.recipe, key) != info.default
    }  # by what the config states, such as the betas of its optimizer
    values = {key: field_value(mapped.recipe, key) for key in stated | implied if key not in mapped.unresolved}
    at_check = {one.id for one in FRAMEWORK.rules}  # which the check tries on the model and the GPUs of the run
    findings = (*parsed.findings, *(one for one in check(FRAMEWORK, inner).findings if one.rule not in at_check))
    return DeepSpeedResult(findings, values, mapped.unresolved, parsed)


def _filled_from_yaml(inner: Settings, settings: Settings) -> dict[str, SourcedValue]:
    """Return the settings of a DeepSpeed config with each auto that Accelerate fills in from its own YAML."""
    filled = dict(inner)
    values = {key: settings[f"{ZERO}{name}"] for key, name in FILLED_FROM_YAML.items() if f"{ZERO}{name}" in settings}
    if (mixed := settings.get("mixed_precision")) is not None:
        for name in ("bf16", "fp16"):
            values[f"{name}.enabled"] = msgspec.structs.replace(mixed, value=str(mixed.value).lower() == name)
    for key, setting in values.items():
        if key in filled and filled[key].value == "auto" and not setting.unresolved:
            filled[key] = setting
    return filled


def missing_file_note(type_name: str, settings: Settings, deepspeed: DeepSpeedResult | None) -> Iterator[str]:
    path = settings.get(f"{ZERO}deepspeed_config_file")
    if type_name == "DEEPSPEED" and path is not None and deepspeed is None:
        yield f"the DeepSpeed config {path.value} was not found and is not checked"


def repeated_arguments(type_name: str, settings: Settings, arguments: Settings, by_trl: bool) -> dict[str, str]:
    """Return the keys of a config that must agree with arguments: those that Accelerate makes a DeepSpeed config of.

    A config of DeepSpeed's own, which the config or an argument names, takes their place. TRL computes in bf16 by
    default, and what the Trainer has on replaces mixed_precision.
    """
    own = settings.get(f"{ZERO}deepspeed_config_file")
    named = (own is not None and own.value not in (None, "none")) or "deepspeed" in arguments
    if type_name != "DEEPSPEED" or named or not is_trainer(arguments):
        return {}
    return dict(REPEATED) if by_trl and "bf16" not in arguments else {**REPEATED, PRECISION: HALVES["bf16"]}
