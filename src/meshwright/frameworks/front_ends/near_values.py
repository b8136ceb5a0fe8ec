"""Values of keys whose full list is open (plugins, files and programs add to it): only misspelled ones are refused."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from meshwright.frameworks.front_ends.templates import foreign_template, templates_of
from meshwright.frameworks.types import Settings
from meshwright.rules.rule import Finding, Severity
from meshwright.similar import closest, misspelled

SWIFT_TUNERS = (
    "lora",
    "full",
    "longlora",
    "adalora",
    "llamapro",
    "adapter",
    "vera",
    "boft",
    "fourierft",
    "reft",
    "bone",
)
"""Values of tuner_type, and of train_type in older releases; a plugin registers more."""
TEMPLATE, OWN_TEMPLATE, CHAT = "chat_template", "tokenizer_default", "chat_template"
ADDS_TOKENS = ("tokens", "special_tokens", "added_tokens_overrides")  # keys of Axolotl
SWIFT_ZERO = ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
"""Configs of DeepSpeed that ms-swift ships; any other value of deepspeed is a file or JSON."""
AXOLOTL_TYPES = ("chat_template", "completion", "alpaca", "alpaca_chat", "alpaca_instruct", "alpaca_w_system",
    "input_output", "llama2_chat", "user_defined", "context_qa", "creative_acr", "messages", "metharme", "orcamini",
    "pretrain", "pygmalion", "stepwise_supervised", "bradley_terry", "_synthetic", "concisechoice", "explainchoice",
    "gpteacher", "jeopardy", "oasst", "reflection", "summarizetldr")  # fmt: skip
"""Modules of Axolotl's prompt strategies, and DATASET_HANDLERS of its utils/data/wrappers.py.

A module of the user's own is written with dots, for supervised fine-tuning; a training with preferences tries every
name as a module.
"""
OTHER_DATA = ("rl", "skip_prepare_dataset", "plugins")  # keys with which other modules read the rows
AXOLOTL_TEMPLATES = (
    *("alpaca", "chatml", "mistral_v1", "mistral_v2v3", "mistral_v3_tekken", "mistral_v7_tekken", "gemma", "cohere"),
    *(
        "llama3",
        "llama3_2_vision",
        "llama4",
        "phi_3",
        "phi_35",
        "phi_4",
        "deepseek_v2",
        "deepseek_v3",
        "jamba",
        "jinja",
    ),
    *("qwen_25", "qwen3", "qwen3_5", "falcon_h1", "nemotron_h", "tokenizer_default", "exaone", "exaone4", "metharme"),
    *("pixtral", "llava", "qwen2_vl", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "command_a", "aya"),
    *("command_a_tool_use", "command_a_rag"),
)
"""ChatTemplate of Axolotl's utils/schemas/enums.py, and the files of utils/chat_templates/templates."""
AXOLOTL_OLD_TEMPLATES = ("inst",)
AXOLOTL_FALLBACK = "tokenizer_default_fallback_"  # before the name of the template of a tokenizer without one
_TEMPLATE_KEY = re.compile(r"(?:((?:test_|pretraining_)?datasets?\[\d+\])\.)?chat_template")
SHAREGPT = "sharegpt"  # deprecate_sharegpt_datasets of Axolotl's utils/schemas/validation.py
SHAREGPT_NOW = (
    "rows with conversations of from and value are read with field_messages: conversations and "
    "message_property_mappings: {role: from, content: value}"
)
CONVERSATION = "conversation"  # the template of a sharegpt dataset, which only releases before 0.5 read
_CONVERSATION_KEY = re.compile(rf"(?:test_)?datasets\[\d+\]\.{CONVERSATION}")
PLAIN = re.compile(r"\w+")  # no variable that is filled in later
_TYPE_KEY = re.compile(r"(test_)?datasets\[\d+\]\.type")


def swift_refused(values: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield values of ms-swift that name nothing: key, reason, value instead."""
    yield from _misspelled("train_type", values.get("train_type"), SWIFT_TUNERS, "ms-swift has no such adapter")
    config = values.get("deepspeed")
    if isinstance(config, str) and re.fullmatch(r"zero[\w-]*", config) and config not in SWIFT_ZERO:
        yield "deepspeed", f"neither a file nor one of {', '.join(SWIFT_ZERO)}", ""


def axolotl_dataset_types(values: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield types of datasets that Axolotl has removed, or that are a misspelled one of its own."""
    is_older = any(values[key] for key in values if _CONVERSATION_KEY.fullmatch(key))
    for key in filter(_TYPE_KEY.fullmatch, values):
        value = values[key]
        name = re.split(r"[.:]", value, maxsplit=1)[0] if isinstance(value, str) else ""
        if name.startswith(SHAREGPT):
            if is_older:
                continue
            yield key, f"Axolotl 0.5 and newer refuse to start with it; {SHAREGPT_NOW}", "chat_template"
            continue
        reason = "Axolotl has no such type of dataset"
        near = list(_misspelled(key, name or None, AXOLOTL_TYPES, reason))
        yield from near
        is_module = not isinstance(value, str) or "." in value or any(values.get(one) for one in OTHER_DATA)
        if name and not near and name not in AXOLOTL_TYPES and not is_module and PLAIN.fullmatch(name):
            yield key, f"{reason}; allowed: {', '.join(AXOLOTL_TYPES)}, or a module of yours with dots", ""


def swift_template_findings(settings: Settings, is_command: bool) -> Iterator[Finding]:
    """Yield a template of another family than the model's; without one, ms-swift takes the model's own."""
    flag = "--template" if is_command else "template"
    shown = f"{flag} {getattr(settings.get('template'), 'value', '')}"
    yield from foreign_template(settings, "template", "model", f"without {flag}", shown)


def _misspelled(key: str, value: Any, known: tuple[str, ...], reason: str) -> Iterator[tuple[str, str, str]]:
    near = misspelled(value, known) if isinstance(value, str) and value not in known else []
    if near:
        yield key, f"{reason}; did you mean {near[0]}?", near[0]


def axolotl_data_findings(settings: Settings, is_command: bool) -> Iterator[Finding]:
    """Yield chat templates that Axolotl does not have, and datasets that only its older releases read."""
    yield from _template_findings(settings)
    types = [str(one.value) for key, one in settings.items() if _TYPE_KEY.fullmatch(key)]
    has_tokens = any(key.split("[")[0].split(".")[0] in ADDS_TOKENS for key in settings)
    template, model = (str(getattr(settings.get(key), "value", "")) for key in (TEMPLATE, "base_model"))
    if template in AXOLOTL_TEMPLATES and any(one.startswith(CHAT) for one in types) and not has_tokens:
        own = next((one for one in templates_of(model) if one in AXOLOTL_TEMPLATES), OWN_TEMPLATE)
        yield from foreign_template(settings, TEMPLATE, "base_model", f"{TEMPLATE}: {own}", f"{TEMPLATE}: {template}")
    older = next((one for key, one in settings.items() if _CONVERSATION_KEY.fullmatch(key) and one.value), None)
    for key, setting in settings.items():
        if not _TYPE_KEY.fullmatch(key) or setting.unresolved or not str(setting.value).startswith(SHAREGPT):
            continue
        if older is not None:
            message = (
                f"{key}: {setting.value} with {CONVERSATION}: {older.value}: Axolotl 0.5 and newer refuse to start "
                f"with it; older versions accept it; {SHAREGPT_NOW}"
            )
            fix = (f"{key}: chat_template",)
            yield Finding("value.invalid", "warning", key, message, fix, setting.file, setting.line)


def _template_findings(settings: Settings) -> Iterator[Finding]:
    """Yield chat templates that Axolotl does not have; those of a dataset only if its type is a chat template."""
    for key, setting in settings.items():
        found = _TEMPLATE_KEY.fullmatch(key)
        if found is None or setting.unresolved or not isinstance(setting.value, str) or not setting.value.strip():
            continue
        if found[1] and not str(getattr(settings.get(f"{found[1]}.type"), "value", "")).startswith("chat_template"):
            continue
        name = setting.value.strip().removeprefix(AXOLOTL_FALLBACK)
        start = setting.value.strip()[: -len(name)] if setting.value.strip() != name else ""
        if name in AXOLOTL_TEMPLATES:
            continue
        is_old = name in AXOLOTL_OLD_TEMPLATES
        near = () if is_old else tuple(misspelled(name, AXOLOTL_TEMPLATES) or closest(name, AXOLOTL_TEMPLATES, 1))[:1]
        hint = (
            f"did you mean {near[0]}?"
            if near
            else f"{'older versions have' if is_old else 'another version may have'} it"
        )
        severity: Severity = "error" if near else "warning"
        message = f"{key}: {setting.value}: Axolotl has no such template; {hint}"
        fix = tuple(f"{key}: {start}{one}" for one in near)
        yield Finding("value.invalid", severity, key, message, fix, setting.file, setting.line)
