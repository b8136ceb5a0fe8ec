"""Compare the model that a file describes with the one that the user or the file names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET

from meshwright.display import parameter_count
from meshwright.frameworks.mapping import same_value
from meshwright.frameworks.model_match import find_model
from meshwright.frameworks.to_recipe import ImportedRecipe
from meshwright.frameworks.types import SourcedValue
from meshwright.models import Attention, Dense, ModelSpec
from meshwright.recipes.key_maps import config_keys
from meshwright.recipes.model_changes import published_numerics
from meshwright.rules.rule import Finding, Severity

GIVEN, CONTRADICTED, NAMED = "model.differs", "model.contradicts", "model.differs-from-name"
FEW = 2  # differing fields of a model that is still the named one
PADDING = 1024  # rows that a vocabulary is padded by, at most
NUMBERS = ("rope_theta", "norm_eps")
EXTRA_KEYS: Mapping[str, Mapping[str, str]] = {
    "megatron-lm": {
        "expert_ffn": "moe_ffn_hidden_size",
        "untied": "untie_embeddings_and_output_weights",
        "qk_norm": "qk_layernorm",
    },
    "kempnerforge": {"tied": "model.tie_embeddings", "qk_norm": "model.qk_norm"},
    "automodel": {
        "layers": "model.config.num_hidden_layers",
        "hidden": "model.config.hidden_size",
        "ffn": "model.config.intermediate_size",
        "expert_ffn": "model.config.moe_intermediate_size",
        "heads": "model.config.num_attention_heads",
        "kv_heads": "model.config.num_key_value_heads",
        "head_dim": "model.config.head_dim",
        "vocab": "model.config.vocab_size",
        "rope_theta": "model.config.rope_theta",
        "norm_eps": "model.config.rms_norm_eps",
        "tied": "model.config.tie_word_embeddings",
    },
}
"""Keys of a model's shape by framework, beside those that its key map gives."""
NAME_KEYS = ("tokenizer_model", "tokenizer.tokenizer_model", "model.hf_assets_path", "model.tokenizer_path",
             "tokenizer.pretrained_model_name_or_path", "data.tokenizer_path", "pretrained_checkpoint")  # fmt: skip
"""Keys that name a model beside its sizes; the folder of a run's own checkpoints has any name."""


class Difference(NamedTuple):
    """A field in which two models differ."""

    field: str
    key: str  # the framework's; empty if it has none
    setting: SourcedValue | None
    found: Any
    expected: Any
    also: Mapping[str, Any] = {}  # further keys of the fix
    computed: bool = False  # what the model computes, not its shape


def model_findings(imported: ImportedRecipe, given: ModelSpec | None) -> list[Finding]:
    """Return how the file's model differs from the given one, or from the one that its tokenizer or weights name."""
    if imported.file_model is None:
        return []
    if given is not None:
        found = list(_differences(imported, given))
        if _has_sizes(imported) and _differ_much(imported, given):
            return _findings(imported, given, found, CONTRADICTED, "error")
        return _findings(imported, given, found, GIVEN, "warning")
    named = next(_named(imported), None)
    found = [] if named is None else list(_differences(imported, named))
    found = [one for one in found if one.field != "vocab" and not _is_extended(one)]
    shapes = [one for one in found if not one.computed]
    if not _loads_weights(imported):  # a model from random weights may compute something else
        found = shapes
    if named is None or not found or len(shapes) > FEW or not any(one.setting or one.computed for one in found):
        return []
    if _differ_much(imported, named):  # another model on purpose, with a tokenizer that both have
        return []
    return _findings(imported, named, found, NAMED, "advice")


def _named(imported: ImportedRecipe) -> Iterator[ModelSpec]:
    """Yield the catalogue models that the file's tokenizer or initial weights name."""
    for key in NAME_KEYS:
        setting = imported.parsed.settings.get(key)
        if setting is None or setting.unresolved or not isinstance(setting.value, str):
            continue
        found = find_model(setting.value) or find_model(PurePosixPath(setting.value).name)
        if found is not None:
            yield found


def _is_extended(one: Difference) -> bool:
    """Return whether the RoPE base was raised, as for longer sequences."""
    return one.field == "rope_theta" and one.found > one.expected


def _differences(imported: ImportedRecipe, model: ModelSpec) -> Iterator[Difference]:
    assert imported.file_model is not None
    own, other, keys = _fields(imported.file_model), _fields(model), _keys(imported)
    published = published_numerics(model.name)
    if not (imported.file_model.learned_positions or model.learned_positions):
        own |= {name: _stated(imported, keys[name]) for name in NUMBERS if name in keys}
        other |= {name: getattr(published, name) for name in NUMBERS}
    for field in {**own, **other}:
        found, expected = own.get(field), other.get(field)
        if found is None or expected is None or same_value(found, expected):
            continue
        if field == "vocab" and expected < found < expected + PADDING:
            continue
        key = keys.get(field, "")
        yield Difference(field, key, imported.parsed.settings.get(key), found, expected)
    for one in imported.framework.computed_differences(imported.parsed, model, imported.recipe):
        if not one.of_weights or _loads_weights(imported):
            setting = imported.parsed.settings.get(one.key)
            yield Difference(one.key, one.key, setting, one.found, one.expected, one.also, True)


def _loads_weights(imported: ImportedRecipe) -> bool:
    """Return whether the training starts from weights, as far as the file says."""
    found = imported.parsed.settings
    stated = imported.parsed.field_values.get("checkpoint.pretrained") or imported.recipe.checkpoint.pretrained
    return bool(stated) or "pretrained_checkpoint" in found or ("load" in found and "finetune" in found)


def _fields(spec: ModelSpec) -> dict[str, Any]:
    """Return the sizes of a model by name; 0 experts if it has none."""
    mixers = [group.layer.mixer for group in spec.groups if isinstance(group.layer.mixer, Attention)]
    dense = [group.layer.ffn.width for group in spec.groups if isinstance(group.layer.ffn, Dense)]
    found: dict[str, Any] = {"layers": spec.num_layers, "hidden": spec.hidden, "vocab": spec.vocab}
    found |= {"tied": spec.tied, "untied": not spec.tied, "experts": spec.moe.experts if spec.moe else 0}
    if dense:
        found["ffn"] = dense[0]
    if spec.moe:
        found |= {"expert_ffn": spec.moe.width, "topk": spec.moe.topk}
    if mixers:
        first = mixers[0]
        found |= {"heads": first.heads, "kv_heads": first.kv_heads, "head_dim": first.head_dim}
        found["qk_norm"] = first.qk_norm != "none"
    return found


def _keys(imported: ImportedRecipe) -> dict[str, str]:
    rows = config_keys(imported.framework.key_map).values()
    mapped = {
        row.field.partition(".")[2]: row.key for row in rows if row.field and row.field.startswith("architecture.")
    }
    return {**mapped, **EXTRA_KEYS.get(imported.framework.name, {})}


def _stated(imported: ImportedRecipe, key: str) -> float | None:
    """Return a number as the file sets it, or as the framework does by default; None if unknown."""
    setting, row = imported.parsed.settings.get(key), config_keys(imported.framework.key_map).get(key)
    default = None if row is None or row.default is UNSET else row.default
    value = default if setting is None else None if setting.unresolved else setting.value
    with suppress(ValueError, TypeError):
        return None if value is None else float(value)
    return None


def _findings(
    imported: ImportedRecipe, model: ModelSpec, found: list[Difference], rule: str, severity: Severity
) -> list[Finding]:
    """Return one finding per field that a key sets; a model that the file names has one for all fields."""
    stated = [one for one in found if one.key and not (one.field == "tied" and "untied" in _keys(imported))]
    if stated and _has_sizes(imported):
        found_here = [_finding(imported, model, one, rule, severity) for one in stated]
        return [msgspec.structs.replace(one, message=one.message + _both_sizes(imported, model)) for one in found_here]
    named = [one for one in found if one.field != "untied"]
    if not named or imported.file_model is None:
        return []
    text = ", ".join(f"{one.field} {one.found} ({one.expected})" for one in named)
    message = f"the file's model {imported.file_model.name} differs from {model.name}: {text}"
    message += _both_sizes(imported, model)
    return [Finding(rule, severity, "model", message, (), file=_file(imported), no_fix=f"remove --model {model.name}")]


def _has_sizes(imported: ImportedRecipe) -> bool:
    """Return whether the file sets sizes of its model; one that only names a model may get another on purpose."""
    return any(key in imported.parsed.settings for key in _keys(imported).values())


def as_replaced(one: Finding) -> Finding:
    """Return a contradiction as a warning: what is made of the file has the given model in place of the file's."""
    if one.rule != CONTRADICTED:
        return one
    return msgspec.structs.replace(one, rule=GIVEN, severity="warning")


MUCH = 0.05  # difference of parameters from which on the memory of one model says nothing about the other's


def _differ_much(imported: ImportedRecipe, model: ModelSpec) -> bool:
    """Return whether the file's model and the given one have so different sizes that they contradict each other."""
    own = 0 if imported.file_model is None else imported.file_model.params.total
    return own > 0 and abs(model.params.total / own - 1) > MUCH


def _both_sizes(imported: ImportedRecipe, model: ModelSpec) -> str:
    """Return the parameters of the file's model and of the given one, if they differ much."""
    if imported.file_model is None or not _differ_much(imported, model):
        return ""
    own, given = (parameter_count(one.params.total) for one in (imported.file_model, model))
    contradiction = "they contradict each other: " if _has_sizes(imported) else ""
    return f"; {contradiction}the file trains {own} parameters, the figures here are of {model.name} with {given}"


def _finding(imported: ImportedRecipe, model: ModelSpec, one: Difference, rule: str, severity: Severity) -> Finding:
    framework, at = imported.framework, one.setting
    shown = framework.display_key(one.key)
    if isinstance(one.expected, bool):
        is_flag = framework.name == "megatron-lm"
        message = (
            f"{shown} is {'set' if one.found else 'not set'}, which" if is_flag else f"{shown}={str(one.found).lower()}"
        )
        expected = ("set" if one.expected else "not set") if is_flag else str(one.expected).lower()
        fix = framework.format_setting(one.key, None if is_flag and not one.expected else one.expected)
    else:
        expected = "not set" if one.expected is None else _number(one.expected)
        default = " is not set" if one.found is None else f" {_number(one.found)} (not set: the default)"
        message = shown + (f" {_number(one.found)}" if at else default)
        fix = framework.format_setting(one.key, int(one.expected) if one.field == "rope_theta" else one.expected)
    fix = " ".join((fix, *(framework.format_setting(key, value) for key, value in one.also.items())))
    if one.key == "num_query_groups" and "group_query_attention" not in imported.parsed.settings:
        fix = f"{framework.format_setting('group_query_attention', True)} {fix}"  # the groups are read only with it
    message = f"{message} differs from {model.name}: {expected}"
    return Finding(
        rule, severity, one.key, message, (fix,), file=at.file if at else _file(imported), line=at.line if at else 0
    )


def _number(value: Any) -> str:
    return (
        f"{value:.0f}"
        if isinstance(value, float) and value >= 1
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


def _file(imported: ImportedRecipe) -> str:
    return imported.parsed.files[0] if imported.parsed.files else ""
