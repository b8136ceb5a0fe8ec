"""Writes overrides as settings of the framework that ran."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright import frameworks
from meshwright.clusters import cluster
from meshwright.doctor.run import LogFormat, Run
from meshwright.frameworks.front_ends import in_front_end
from meshwright.frameworks.mapping import relevant_fields, to_settings
from meshwright.frameworks.schedule_units import in_file_units
from meshwright.frameworks.types import Settings
from meshwright.planner import case_of
from meshwright.recipes import index
from meshwright.recipes import overrides as override
from meshwright.recipes.case import Case, model_of
from meshwright.recipes.key_maps import ConfigKey, config_keys
from meshwright.recipes.types import Recipe, field_value

ANY_RECIPE = "llama3_8b_pretrain_config"
GLOBAL_BATCH = "train.global_batch_size"
ACCUMULATION = "gradient_accumulation_steps"
TRAINER_SETTINGS: Mapping[str, Mapping[str, str]] = {
    "layout.micro_batch_size=1": {"per_device_train_batch_size": "1", ACCUMULATION: "<now × micro batch>"},
    "layout.recompute=full": {"gradient_checkpointing": "true"},
    "kernels.loss=fused_linear": {"use_liger_kernel": "true"},
}
"""Overrides -> TrainingArguments of the Hugging Face Trainer, which is in no table of keys without a backend."""
FRAMEWORK: Mapping[LogFormat, str] = {
    "megatron": "megatron-lm",
    "torchtitan": "torchtitan",
    "automodel": "automodel",
    "kempnerforge": "kempnerforge",
}


def to_framework_settings(run: Run, case: Case, changed: Recipe) -> tuple[str, ...]:
    """Return the changes to the case's recipe as framework settings; empty if one cannot be expressed there."""
    name = run.header.framework or FRAMEWORK.get(run.kind)
    if name is None:
        return ()
    theirs = frameworks.framework(name)
    fields = relevant_fields(changed, case.model)
    before, _ = to_settings(theirs, case.recipe, fields)
    after, unmapped = to_settings(theirs, changed, fields)
    inexpressible = {one.field for one in unmapped if field_value(case.recipe, one.field) != one.value} - {
        *theirs.derived_fields
    }
    if inexpressible:
        return ()
    differing = {key: value for key, value in after.items() if before.get(key, ...) != value}
    differing |= {key: None for key in before if key not in after}
    differing |= _kept_batch(run, case, changed, after, config_keys(theirs.key_map))
    stated = in_file_units(theirs.key_map, differing, stated_settings(run), changed)
    return tuple(theirs.format_setting(key, value) for key, value in stated.items())


def _kept_batch(
    run: Run, case: Case, changed: Recipe, after: Settings, keys: Mapping[str, ConfigKey]
) -> dict[str, Any]:
    """Return the global batch that a file leaves to be computed from the local one, if a change of that alters it."""
    stated = stated_settings(run)
    if not stated or changed.layout.micro_batch_size == case.recipe.layout.micro_batch_size:
        return {}
    found = {name: value for name, value in after.items() if name in keys and keys[name].field == GLOBAL_BATCH}
    return {} if {*found} & {*stated} else found


def general_settings(run: Run, text: str) -> tuple[str, ...] | None:
    """Return an override as a setting of the framework that wrote a log; None if it has no such setting.

    Nothing is known about the run but its format: the change is made to a small recipe whose value differs.
    """
    if run.kind == "transformers":
        found = TRAINER_SETTINGS.get(text)
        return None if found is None else _of_trainer(run, found)
    if FRAMEWORK.get(run.kind) is None:
        return ()
    base = override.change(index.load(ANY_RECIPE), {"layout.recompute": "none", "layout.micro_batch_size": 2})[0]
    changed = override.change(base, override.requested(base, (text,)))[0]
    case = case_of(base, model_of(base), cluster(base.cluster))
    return to_framework_settings(run, case, changed) or None


def _of_trainer(run: Run, arguments: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return arguments of the Trainer in the keys of the front end that started it; None if it has no such key."""
    batch, ranks = run.header.overrides.get(GLOBAL_BATCH), run.header.data_ranks
    known = {ACCUMULATION: str(batch // ranks)} if batch and ranks and ACCUMULATION in arguments else {}
    if run.header.front_end:
        return in_front_end(run.header.front_end, {**arguments, **known}) or None
    return tuple(f"{key}: {value}" for key, value in {**arguments, **known}.items())


def stated_settings(run: Run) -> Settings:
    """Return the settings of the framework that the log or the run's own file states; empty if it has neither."""
    if run.header.framework or not run.header.arguments:
        return run.header.settings
    content = frameworks.content_of("\n".join(run.header.arguments), f"{run.file} (arguments)", "shell")
    return frameworks.framework("megatron-lm").parse(content).settings
