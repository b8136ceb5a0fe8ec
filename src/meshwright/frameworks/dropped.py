"""Settings of a framework's file that do not survive an import: our recipe has no field for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET

from meshwright.clusters import DEFAULT_GPU, Cluster, cluster
from meshwright.errors import InputError, MeshwrightError
from meshwright.frameworks.common import FOLDERS
from meshwright.frameworks.export_recipe import write
from meshwright.frameworks.file_import import referring
from meshwright.frameworks.framework import Content, Framework, ParsedConfig
from meshwright.frameworks.load import content_of, open_file
from meshwright.frameworks.mapping import text_of
from meshwright.frameworks.model_match import OWN_MODEL
from meshwright.frameworks.schedule_units import length_keys
from meshwright.frameworks.to_recipe import ImportedRecipe, complete, import_recipe
from meshwright.frameworks.tried_fixes import without_flag
from meshwright.frameworks.types import Settings, SourcedValue
from meshwright.recipes.key_maps import composite_keys, config_keys

STRUCTURED = (".toml", ".yaml", ".yml", ".json")


OFF = ("false", "no", "none", "null", "off")
PROGRAM = ("recipe", "_target_")  # the class or recipe that reads the other settings
PRESET = ("module", "config")  # torchtitan's preset, from which the model and the defaults are imported
NO_FOLDER = "checkpoints of another framework stay apart: name a folder with checkpoint.folder=DIR, or train --out DIR"
STATE = "a restart would not load all of the training state; the initial weights are loaded without it"
MIXED = "also has the initial weights, which a restart would resume: another folder is used for the checkpoints"
NO_LOAD = "is not imported: name initial weights with checkpoint.pretrained=DIR"
WEIGHTS_ONLY = (
    "becomes the initial weights (checkpoint.pretrained), so that a restart resumes from the folder that the run saves "
    "to; the step and optimizer state of this checkpoint are not taken"
)


LOST_MODEL = """
activation activation_func activation_func_clamp_value apply_residual_connection_post_layernorm
attention_dropout glu_linear_offset hidden_dropout moe_router_group_topk
moe_router_num_groups moe_router_pre_softmax moe_router_score_function moe_router_topk_scaling_factor
moe_shared_experts mscale mscale_all_dim no_position_embedding norm_type openai_gelu position_embedding_type
qk_clip qk_l2_norm quick_geglu rope_scaling
rope_scaling_factor rope_type rotary_base_per_layer rotary_interleaved rotary_percent rotary_scaling_factor
rotary_seq_len_interpolation_factor seq_len_interpolation_factor softmax_scale softmax_type squared_relu use_mup
use_rope_scaling yarn_rotary_scaling_factor
"""
"""Settings of the model, by the last part of their key: without them, another model is trained."""


class DroppedSetting(msgspec.Struct, frozen=True):
    """A setting of a file that our recipe has no field for."""

    key: str
    value: Any
    reason: str
    file: str
    line: int


def dropped_settings(framework: Framework, content: Content, same: bool = False) -> tuple[DroppedSetting, ...]:
    """Return the settings without which the file is imported as the same recipe.

    Those that equal a default are left out, and those that an export of the imported recipe writes again with the same
    value: they follow from the model, such as its RoPE base. An export for the `same` framework keeps folders.
    """
    parsed = framework.parse(content)
    settings = parsed.settings
    found = [*lost_folders(framework, content, settings, same), *lost_arguments(parsed)]
    listed = {one.key for one in found}
    again = _exported_again(framework, content)
    found += [one for one in _other_positions(settings, again) if one.key not in listed]
    listed = {one.key for one in found}
    candidates = [(key, setting) for key, setting in _without_field(framework, settings) if key not in listed]
    for key, setting in candidates:
        if key in again and _is_equal(again[key].value, setting.value):
            continue
        place = _place(content, setting)
        if _imported(framework, place) != _imported(framework, _without(place, key, setting)):
            continue  # the parser derives a model, a goal or a field from it
        found.append(DroppedSetting(key, setting.value, "no field in our recipes", setting.file, setting.line))
    return tuple(found)


def lost_arguments(parsed: ParsedConfig) -> Iterator[DroppedSetting]:
    """Yield the arguments of a program that no recipe field carries."""
    for name, reason in parsed.program.lost.items():
        setting = parsed.program.given[name]
        yield DroppedSetting(f"--{name}", setting.value, reason, setting.file, setting.line)


def require_model(framework: Framework, dropped: Sequence[DroppedSetting]) -> None:
    """Raise InputError if a setting does not survive without which another model is trained."""
    lost = [one for one in dropped if one.key.rsplit(".", 1)[-1] in LOST_MODEL.split()]
    if not lost:
        return
    first, keys = lost[0], [framework.display_key(one.key) for one in lost]
    more = f" (as do {', '.join(keys[1:])})" if len(keys) > 1 else ""
    place = f"{first.file}:{first.line}" if first.line else first.file
    reason = f"{place} changes the model{more}, and our recipes have no field for it: another model would be trained"
    rope = first.key.endswith("position_embedding_type")
    other = f"{keys[0]} rope in {first.file}" if rope else f"remove {' '.join(keys)} from {first.file}"
    fix = (other, f"{OWN_MODEL}, with the model's own values")
    raise InputError(reason, field=keys[0], value=first.value, fix=fix)


def _exported_again(framework: Framework, content: Content) -> Mapping[str, SourcedValue]:
    """Return the settings of an export of the file's own recipe; empty if it cannot be written."""
    try:
        found = import_recipe(framework, content)
        if found.model is None:
            return {}
        on = _own_cluster(found)
        recipe, _ = referring(complete(found, on), found)
        name, text = next(iter(write(framework, recipe, found.model, on).files.items()))
        return framework.parse(content_of(text, name)).settings
    except (MeshwrightError, ValueError, KeyError):
        return {}


ROTARY = ("rope", "learned_absolute")  # positions that every export of such a model writes


def _other_positions(settings: Settings, again: Settings) -> Iterator[DroppedSetting]:
    """Yield the kind of positions if the model of the recipe has another: no field of ours states it."""
    reason = "our recipes have no field for this kind of positions"
    for key, setting in settings.items():
        name, value = key.rsplit(".", 1)[-1], text_of(setting.value)
        written = again.get(key)
        if name == "position_embedding_type" and not setting.unresolved and value != _text(written):
            if value not in ROTARY or written is not None:
                yield DroppedSetting(key, setting.value, reason, setting.file, setting.line)
        elif name == "no_position_embedding" and not _is_rotary(settings):
            yield DroppedSetting(key, setting.value, reason, setting.file, setting.line)


def _is_rotary(settings: Settings) -> bool:
    return "use_rotary_position_embeddings" in settings or _text(settings.get("position_embedding_type")) == "rope"


def _own_cluster(found: ImportedRecipe) -> Cluster:
    """Return the GPUs that a file requests, or eight usual ones."""
    return cluster(f"{found.parsed.gpu_request.count or 8}x{found.parsed.gpu_request.gpu or DEFAULT_GPU}")


def _is_equal(one: Any, other: Any) -> bool:
    """Return whether two settings are the same text or the same number: 1e-5 and 0.00001."""
    if text_of(one) == text_of(other):
        return True
    try:
        return float(text_of(one)) == float(text_of(other))
    except ValueError:
        return False


def _text(setting: SourcedValue | None) -> str | None:
    return None if setting is None else text_of(setting.value)


def lost_folders(framework: Framework, content: Content, settings: Any, same: bool) -> Iterator[DroppedSetting]:
    """Yield the folders of checkpoints that are not kept: an export for the same framework keeps them."""
    keys = FOLDERS.get(framework.key_map, ("", "", ""))
    save, load, finetune = (settings.get(key) for key in keys)
    weights = finetune is not None and text_of(finetune.value).lower() not in OFF  # the weights of --load are imported
    ours = f"checkpoints/{Path(content.path).stem}"
    resumed = save is not None and _text(load) == _text(save)
    for key, setting in zip(keys, (save, load), strict=False):
        if setting is None or text_of(setting.value).lower() in OFF:
            continue
        loads = setting is load
        kept = same or text_of(setting.value) == ours
        if loads and not resumed:
            reads = framework.key_map == "megatron_lm"
            if not (weights and reads):
                yield DroppedSetting(key, setting.value, WEIGHTS_ONLY if reads else NO_LOAD, setting.file, setting.line)
        elif not kept or (weights and resumed):
            reason = MIXED if weights and resumed else NO_FOLDER
            yield DroppedSetting(key, setting.value, reason, setting.file, setting.line)


def _without_field(framework: Framework, settings: Any) -> Iterator[tuple[str, SourcedValue]]:
    """Yield the settings that no row of the key map carries over, except those that are off or equal to a default."""
    table = config_keys(framework.key_map)
    together = {key for one in composite_keys(framework.key_map) for key in one.keys}
    together |= set(length_keys(framework.key_map, settings).values())  # lengths in samples, imported in steps
    for key, setting in settings.items():
        row = table.get(key)
        if key in together or (row is not None and (row.field or row.status != "read")):
            continue
        if text_of(setting.value).lower() in OFF or key.rsplit(".", 1)[-1] in PROGRAM or key in PRESET:
            continue
        if _has_no_effect(key.rsplit(".", 1)[-1], setting, settings):
            continue
        default = UNSET if row is None else row.default
        if default is UNSET or text_of(default) != text_of(setting.value):
            yield key, setting


DEFAULTS = {"rotary_percent": 1.0, "rope_scaling_factor": 8.0, "moe_router_topk_scaling_factor": 1.0}
"""Values of model settings that change nothing."""


def _has_no_effect(name: str, setting: SourcedValue, settings: Settings) -> bool:
    """Return whether a setting of the model is its default, or not used by the model's other settings."""
    if name in DEFAULTS and _is_equal(setting.value, DEFAULTS[name]):
        return True
    if name == "no_position_embedding" and _is_rotary(settings):
        return True
    scores = [one.value for key, one in settings.items() if key.rsplit(".", 1)[-1] == "moe_router_score_function"]
    return name == "moe_router_pre_softmax" and scores == ["sigmoid"]  # the order matters for a softmax only


def _imported(framework: Framework, content: Content) -> Any:
    """Return everything that an import takes from a file, comparable; None if it cannot be read."""
    try:
        found = import_recipe(framework, content)
    except (MeshwrightError, ValueError, KeyError):
        return None
    parsed = found.parsed
    recipe = complete(found, _own_cluster(found))  # lengths in samples become steps
    return msgspec.json.encode((recipe, found.model, parsed.gpu_request, parsed.engine, parsed.unknown_fields))


def _place(content: Content, setting: SourcedValue) -> Content:
    """Return the file that a setting is in: this one, or the config that this script names."""
    if setting.file == content.path or content.settings or not setting.file.endswith(STRUCTURED):
        return content
    try:
        return open_file(setting.file)
    except MeshwrightError:
        return content


def _without(content: Content, key: str, setting: SourcedValue) -> Content:
    """Return the content without a setting of the file itself, or of the command that a script starts."""
    if content.settings:
        name = key.rsplit(".", 1)[-1]
        same = [k for k, one in content.settings.items() if one.line == setting.line and k.rsplit(".", 1)[-1] == name]
        kept = {k: one for k, one in content.settings.items() if k not in (*same, key)}
        return msgspec.structs.replace(content, settings=kept)
    launches = [msgspec.structs.replace(launch, args=without_flag(launch.args, key)) for launch in content.launches]
    return msgspec.structs.replace(content, launches=tuple(launches))
