"""Writes overrides as settings of the framework that ran."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from meshwright import frameworks
from meshwright.clusters import cluster
from meshwright.doctor.formats.printed_config import config_content
from meshwright.doctor.required_settings import with_required
from meshwright.doctor.run import LogFormat, Run
from meshwright.errors import InputError
from meshwright.frameworks.accumulation import kept_accumulation
from meshwright.frameworks.framework import Framework
from meshwright.frameworks.front_ends import in_front_end
from meshwright.frameworks.mapping import relevant_fields, to_settings
from meshwright.frameworks.schedule_units import in_file_units
from meshwright.frameworks.translated_fixes import their_fix
from meshwright.frameworks.types import Settings, SourcedValue
from meshwright.planner import case_of
from meshwright.recipes import index
from meshwright.recipes import overrides as override
from meshwright.recipes.case import Case, model_of
from meshwright.recipes.format_override import format_override
from meshwright.recipes.key_maps import ConfigKey, config_keys
from meshwright.recipes.types import Recipe, field_value, recipe_fields

ANY_RECIPE = "llama3_8b_pretrain_config"
GLOBAL_BATCH, MICRO_BATCH = "train.global_batch_size", "layout.micro_batch_size"
PYTHON_WORDS = {"true": "True", "false": "False"}
ACCUMULATION = "gradient_accumulation_steps"
TRAINER_SETTINGS: Mapping[str, Mapping[str, str]] = {
    "layout.micro_batch_size=1": {"per_device_train_batch_size": "1", ACCUMULATION: "<now × micro batch>"},
    "layout.recompute=full": {"gradient_checkpointing": "true"},
    "layout.recompute=none": {"gradient_checkpointing": "false"},
    "kernels.loss=fused_linear": {"use_liger_kernel": "true"},
}
"""Overrides -> TrainingArguments of the Hugging Face Trainer, which is in no table of keys without a backend."""
TRAINER_ARGUMENTS: Mapping[str, str] = {
    "optimizer.lr": "learning_rate",
    "schedule.warmup_steps": "warmup_steps",
    "optimizer.clip_grad": "max_grad_norm",
    "layout.micro_batch_size": "per_device_train_batch_size",
    "data.workers": "dataloader_num_workers",
    "data.prefetch": "dataloader_prefetch_factor",
    "checkpoint.save_every": "save_steps",
    "train.eval_every": "eval_steps",
    "train.steps": "max_steps",
}
"""Fields -> TrainingArguments with the same value."""
TRAINER_VALUES: Mapping[str, Mapping[str, str]] = {"precision.compute=bf16": {"bf16": "true", "fp16": "false"}}
OWN_ARGUMENTS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "unsloth": {
        "layout.recompute=full": {"use_gradient_checkpointing": '"unsloth"'},  # of get_peft_model
        "kernels.loss=fused_linear": {},  # its own loss has no logits of all tokens already
        "peft.method=qlora": {"load_in_4bit": "true"},  # of from_pretrained
        "data.seq_length": {"max_seq_length": ""},
    }
}
"""Front ends that are Python functions -> overrides, or fields whose value is the argument's -> their own arguments."""
STAND_IN = 0.000123457  # a value that no recipe has
FRAMEWORK: Mapping[LogFormat, str] = {
    "megatron": "megatron-lm",
    "torchtitan": "torchtitan",
    "automodel": "automodel",
    "kempnerforge": "kempnerforge",
    "deepspeed": "deepspeed",
}


def framework_of(run: Run) -> str | None:
    """Return the framework whose keys the fixes of a run have: that of its file, or that which wrote its log."""
    return run.header.framework or run.header.program or FRAMEWORK.get(run.kind)


def to_framework_settings(run: Run, case: Case, changed: Recipe) -> tuple[str, ...]:
    """Return the changes to the case's recipe as framework settings; empty if one cannot be expressed there.

    A log of the Trainer may come with a file whose backend has no key for a change: it is then an argument.
    """
    if own := _of_own_arguments(run, case, changed):
        return own
    found = _backend_changes(run, case, changed)
    if found or run.kind != "transformers":
        return found
    return _trainer_changes(run, case, changed) or _changes_of_file(run, case, changed)


def _changes_of_file(run: Run, case: Case, changed: Recipe) -> tuple[str, ...]:
    """Return the changes as check writes them: some in the config of the backend, some in the Trainer's arguments."""
    imported = run.header.imported
    if imported is None:
        return ()
    imported = imported if imported.model is not None else msgspec.structs.replace(imported, model=case.model)
    differing = [key for key in recipe_fields() if field_value(case.recipe, key) != field_value(changed, key)]
    overrides = [format_override(key, field_value(changed, key)) for key in differing]
    return their_fix(imported, case.recipe, overrides)


def _of_own_arguments(run: Run, case: Case, changed: Recipe) -> tuple[str, ...]:
    """Return the changes to a run of the Trainer as its arguments; empty if its config states a key that they replace.

    A scheduler or an optimizer that DeepSpeed's config does not have is the Trainer's own: its arguments set it.
    """
    differing = [key for key in recipe_fields() if field_value(case.recipe, key) != field_value(changed, key)]
    if run.kind != "transformers" or not run.header.framework or not {*differing} <= {*TRAINER_ARGUMENTS}:
        return ()
    theirs = frameworks.framework(run.header.framework)
    fields = relevant_fields(changed, case.model)
    before, after = (to_settings(theirs, one, fields)[0] for one in (case.recipe, changed))
    replaced = {key for key in {**before, **after} if before.get(key, ...) != after.get(key, ...)}
    is_stated = any(not one.file.endswith(".py") for key, one in stated_settings(run).items() if key in replaced)
    return () if is_stated else _trainer_changes(run, case, changed)


def is_impossible(run: Run, case: Case, changed: Recipe) -> bool:
    """Return whether the framework that ran has no settings for the changes, or refuses them by its own rules."""
    return framework_of(run) is not None and not to_framework_settings(run, case, changed)


def _backend_changes(run: Run, case: Case, changed: Recipe) -> tuple[str, ...]:
    """Return the changes as settings, with those they require; empty if one has no key or they are refused."""
    name = framework_of(run)
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
    ran = stated_settings(run)
    kept = _kept_batch(run, case, changed, after, config_keys(theirs.key_map))
    steps = kept_accumulation(theirs, _with_accumulation(theirs, ran, case), case.recipe, changed)
    if steps is None:  # the global batch would change
        return ()
    differing |= kept | steps
    values = in_file_units(theirs.key_map, differing, ran, changed)
    # Without a file, the settings of the case are what its rules are checked with, not the framework's defaults.
    base = ran or {key: SourcedValue(value, 0, "") for key, value in before.items()}
    return with_required(theirs, base, case, case.rebuild(changed), values) or ()


def _with_accumulation(theirs: Framework, ran: Settings, case: Case) -> Settings:
    """Return the settings of a run, with the micro batches per step of its case if they are all that is known."""
    if ran or not theirs.accumulation_key:
        return ran
    return {theirs.accumulation_key: SourcedValue(int(case.accumulation), 0, "")}


def _trainer_changes(run: Run, case: Case, changed: Recipe) -> tuple[str, ...]:
    """Return the changes to a run of the Trainer as its arguments, spelled as in its file; empty if one has none."""
    before = case.recipe
    differing = [key for key in recipe_fields() if field_value(before, key) != field_value(changed, key)]
    found: dict[str, str] = {}
    for key in differing:
        one = _arguments_for(run, format_override(key, field_value(changed, key)))
        if not one:
            return ()
        found |= one
    if MICRO_BATCH in differing:
        ranks = max(int(case.world) // (changed.layout.tp * changed.layout.pp * changed.layout.cp), 1)
        samples = changed.layout.micro_batch_size * ranks
        found[ACCUMULATION] = str(max(changed.train.global_batch_size // samples, 1))
    lines = _argument_lines(run, found)
    files = {one.file for one in stated_settings(run).values()}
    is_command = run.header.file.endswith(".sh") and not any(one.endswith((".yaml", ".yml")) for one in files)
    return tuple(f"--{line.replace(': ', ' ', 1)}" if is_command else line for line in lines)


def _arguments_for(run: Run, text: str) -> Mapping[str, str] | None:
    """Return the Trainer's or its front end's arguments for an override; None or none if there are none."""
    field, _, value = text.partition("=")
    own = OWN_ARGUMENTS.get(run.header.front_end, {})
    found = next(
        (one[key] for one in (own, TRAINER_SETTINGS, TRAINER_VALUES) for key in (text, field) if key in one), None
    )
    if found is not None:
        return {key: stated or value for key, stated in found.items()}
    return {TRAINER_ARGUMENTS[field]: value} if field in TRAINER_ARGUMENTS else None


def _argument_lines(run: Run, arguments: Mapping[str, str]) -> tuple[str, ...]:
    """Return arguments of the Trainer as the run's file or its front end spells them; empty if it has no such key."""
    if run.header.file.endswith(".py") or run.header.front_end in OWN_ARGUMENTS:
        return tuple(f"{key}={PYTHON_WORDS.get(value, value)}" for key, value in arguments.items())
    if run.header.front_end:
        return in_front_end(run.header.front_end, arguments)
    return tuple(f"{key}: {value}" for key, value in arguments.items())


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
        found = _arguments_for(run, text)
        return _of_trainer(run, found) if found else None
    if framework_of(run) is None:
        return ()
    given: dict[str, Any] = {"layout.recompute": "none", "layout.micro_batch_size": 2, "schedule.min_lr": 0.0}
    if batch := run.header.overrides.get(GLOBAL_BATCH):  # lengths in samples are multiples of the run's own batch
        given[GLOBAL_BATCH] = batch
    base = override.change(index.load(ANY_RECIPE), given)[0]
    changed = override.change(base, override.requested(base, (text,)))[0]
    case = case_of(base, model_of(base), cluster(base.cluster))
    return to_framework_settings(run, case, changed) or _as_in(run, case, changed, text.partition("=")[0]) or None


def _as_in(run: Run, case: Case, changed: Recipe, field: str) -> tuple[str, ...]:
    """Return the framework's key for a field whose value is the one that the recipe has already."""
    name = framework_of(run)
    if name is None:
        return ()
    theirs = frameworks.framework(name)
    after, _ = to_settings(theirs, changed, relevant_fields(changed, case.model))
    keys = config_keys(theirs.key_map)
    named = {key: value for key, value in after.items() if key in keys and keys[key].field == field}
    return tuple(theirs.format_setting(key, value) for key, value in named.items())


def settings_there(run: Run, case: Case | None, texts: tuple[str, ...]) -> tuple[str, ...]:
    """Return overrides as settings of the framework that wrote a log; empty if one cannot be expressed there."""
    if run.kind == "meshwright":
        return ()
    try:
        if run.kind == "transformers" and not run.header.framework:
            found = [general_settings(run, text) for text in texts]
        elif case is not None:
            changed = override.change(case.recipe, override.requested(case.recipe, texts, follows=False))[0]
            return to_framework_settings(run, case, changed)
        else:
            found = [general_settings(run, text) for text in texts]
    except InputError:  # not overrides
        return ()
    return tuple(line for one in found for line in one or ()) if all(found) else ()


def named_setting(run: Run, field: str, value: str) -> tuple[str, ...]:
    """Return the framework's key for a field with a value in words; empty if it has none.

    The key's value may have another unit than the field's, as samples for steps: two numbers show which word it is.
    """
    lines, others = (settings_there(run, None, (format_override(field, one),)) for one in _stand_ins(field))
    found = [_with_words(line, other, value) for line, other in zip(lines, others, strict=False)]
    return tuple(line for line in found if line) if len(lines) == len(others) and all(found) else ()


def _stand_ins(field: str) -> tuple[float, float]:
    return (11, 13) if field.endswith("_steps") else (STAND_IN, 2 * STAND_IN)


def _with_words(line: str, other: str, value: str) -> str:
    """Return a setting with words in place of what differs from that of another number; empty if nothing does."""
    one, two = (re.split(r"([\s=:]+)", text) for text in (line, other))
    if line == other or len(one) != len(two):
        return ""
    return "".join(part if part == second else value for part, second in zip(one, two, strict=True))


def _of_trainer(run: Run, arguments: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return arguments of the Trainer in the keys of the front end that started it; None if it has no such key."""
    batch, ranks = run.header.overrides.get(GLOBAL_BATCH), run.header.data_ranks
    known = {ACCUMULATION: str(batch // ranks)} if batch and ranks and ACCUMULATION in arguments else {}
    return _argument_lines(run, {**arguments, **known}) or None


def stated_settings(run: Run) -> Settings:
    """Return the settings of the framework that the log or the run's own file states; empty if it has neither."""
    if run.header.framework or not run.header.states_settings:
        return run.header.settings
    if run.header.config:
        return frameworks.framework("megatron-bridge").parse(config_content(run.header.config, run.file)).settings
    content = frameworks.content_of("\n".join(run.header.arguments), f"{run.file} (arguments)", "shell")
    return frameworks.framework("megatron-lm").parse(content).settings
