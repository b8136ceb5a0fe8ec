"""Paths that a file takes from environment variables: a job for the same framework takes them from there too."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import msgspec

from meshwright.frameworks.framework import Framework, ParsedConfig
from meshwright.frameworks.types import Settings, SourcedValue
from meshwright.recipes.key_maps import composite_keys, config_keys
from meshwright.recipes.overrides import PRETRAINED

ENVIRONMENT_PATHS = (
    PRETRAINED, "checkpoint.folder", "data.dataset", "data.validation", "data.tokenizer", "data.chat_template",
)  # fmt: skip
"""Fields whose text may refer to a variable; a number of an unknown variable would make another training."""
REFERENCE = re.compile(r"\$\{(\w+)\}")
_SHELL = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?::?\?[^{}]*)?\}|([A-Za-z_]\w*))")
_PYTHON = re.compile(r"os\.(?:environ\[|environ\.get\(|getenv\()['\"]([A-Za-z_]\w*)['\"][\])]")
_COMPUTED = re.compile(r"[$`()*?;|<>\"']")
"""Characters of a text that more than variables decide: a command, a pattern, a default."""


LOADING = ("pretrained_checkpoint", "load")


def reference_of(setting: SourcedValue) -> str:
    """Return an unresolved text with its variables as ${NAME}; empty if more than variables decides it."""
    if not setting.unresolved or not isinstance(setting.value, str):
        return ""
    if found := _PYTHON.fullmatch(setting.value):
        return f"${{{found[1]}}}"
    text = _SHELL.sub(lambda found: f"${{{found[1] or found[2]}}}", setting.value)
    is_computed = setting.file.endswith(".py") or _COMPUTED.search(REFERENCE.sub("", text)) is not None
    return text if REFERENCE.search(text) and not is_computed else ""


def variables_in(words: Iterable[str]) -> list[str]:
    """Return the variables that words refer to as ${NAME}."""
    return list(dict.fromkeys(name for word in words for name in REFERENCE.findall(word)))


def required_variables(argv: Iterable[str], described: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that arguments refer to, with what each is: a job stops if one of them is unset."""
    return {name: described.get(name, "part of a path of this job") for name in variables_in(argv)}


def with_references(framework: Framework, parsed: ParsedConfig) -> ParsedConfig:
    """Return a file whose paths from the environment are texts with ${NAME}."""
    keys = {row.key for row in config_keys(framework.key_map).values() if row.field in ENVIRONMENT_PATHS}
    for one in composite_keys(framework.key_map):
        in_words = framework.key_map == "megatron_lm" and PRETRAINED not in one.fields  # a blend may be in one variable
        keys |= set(one.keys) if set(ENVIRONMENT_PATHS) & set(one.fields) and not in_words else set()

    def with_texts(settings: Settings) -> Settings:
        texts = {key: reference_of(one) if key in keys else "" for key, one in settings.items()}
        found = {key: SourcedValue(text, settings[key].line, settings[key].file) for key, text in texts.items() if text}
        return {**settings, **found}

    mappable = None if parsed.mappable is None else with_texts(parsed.mappable)
    return msgspec.structs.replace(parsed, settings=with_texts(parsed.settings), mappable=mappable)


def open_weights(framework: Framework, parsed: ParsedConfig) -> SourcedValue | None:
    """Return the setting that names a file's initial weights if only the run knows its value."""
    keys = [row.key for row in config_keys(framework.key_map).values() if row.field == PRETRAINED]
    for one in composite_keys(framework.key_map):
        # A folder that a run saves to and resumes from has no initial weights of another run.
        loads = [key for key in one.keys if key != "load" or "finetune" in parsed.settings]
        keys += [key for key in loads if key in LOADING] if PRETRAINED in one.fields else []
    found = (parsed.settings[key] for key in keys if key in parsed.settings)
    return next((one for one in found if one.unresolved), None)
