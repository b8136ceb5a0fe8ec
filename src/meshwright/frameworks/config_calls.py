"""Literal arguments of TRL's configs other than SFTConfig: DPOConfig, GRPOConfig and the others of its trainers.

A program with one of these losses is not estimated, and its arguments are read here only: the names that it misspells,
and the checks that the Trainer and the config make of the values.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from meshwright import similar
from meshwright.frameworks import trainer_names, weight_loading
from meshwright.frameworks.framework import Content
from meshwright.frameworks.key_table import read_table
from meshwright.frameworks.start_checks import TABLES, TRAINER_CHOICES, broken_checks, tables_of
from meshwright.frameworks.types import SourcedValue
from meshwright.rules.rule import Finding, Severity

CONFIGS: Mapping[str, str] = {
    **{f"{name.upper()}Config": name for name in ("dpo", "grpo", "kto", "rloo", "bco", "cpo", "orpo", "gkd", "xpo")},
    "RewardConfig": "reward", "OnlineDPOConfig": "online_dpo", "NashMDConfig": "nash_md", "PRMConfig": "prm",
}  # fmt: skip
"""Configs of TRL by the subcommand of their training; PPOConfig had arguments of its own in each release."""
TRL_KEYS = Path(__file__).with_name("front_ends") / "trl.tsv"


def config_findings(call: ast.Call, name: str, fields: Mapping[str, object], content: Content) -> Iterator[Finding]:
    """Yield what a config does not accept; `fields` are those of TrainingArguments."""
    path, arguments = content.path, _literals(call, content.path)
    misplaced = (weight_loading.misplaced(name, word, content) for word in call.keywords)
    yield from (one for one in misplaced if one is not None)
    known = {*fields, *read_table(TRL_KEYS).owners[""]}
    yield from _misspelled(call, name, known, path)
    yield from _names(arguments)
    if any(word.arg is None for word in call.keywords):  # **options may set what is left out
        return
    subcommand = CONFIGS[name]
    own = [one for one in tables_of("trl", arguments, subcommand)[:1] if subcommand in ("dpo", "grpo", "rloo")]
    yield from broken_checks((*own, *TABLES["trl-program"], TRAINER_CHOICES), arguments, "python")


def _literals(call: ast.Call, path: str) -> dict[str, SourcedValue]:
    """Return the arguments of a call; those that the program computes are unresolved."""
    found: dict[str, SourcedValue] = {}
    for word in call.keywords:
        if word.arg is None:
            continue
        try:
            found[word.arg] = SourcedValue(ast.literal_eval(word.value), word.value.lineno, path)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            text = ast.unparse(word.value)
            found[word.arg] = SourcedValue(text, word.value.lineno, path, unresolved="the program computes it")
    return found


def _misspelled(call: ast.Call, name: str, known: set[str], path: str) -> Iterator[Finding]:
    given = {word.arg for word in call.keywords}
    for word in call.keywords:
        if word.arg is None or word.arg in known:
            continue
        near = next((one for one in similar.misspelled(word.arg, tuple(known)) if similar.is_slip(word.arg, one)), "")
        near = near or similar.cut_short(word.arg, known)
        if not near or near in given:
            continue
        message = f"{name} has no {word.arg}: TypeError at start; did you mean {near}?"
        fix = (f"{near}={ast.unparse(word.value)}",)
        yield Finding("key.unknown", "error", word.arg, message, fix, path, word.value.lineno)


def _names(arguments: Mapping[str, SourcedValue]) -> Iterator[Finding]:
    """Yield optimizers and schedules that transformers does not have."""
    for key in trainer_names.ARGUMENTS:
        setting = arguments.get(key)
        if setting is None or setting.unresolved or not isinstance(setting.value, str):
            continue
        refused = trainer_names.refused_name(key, setting.value)
        if refused is not None:
            severity: Severity = "warning" if refused.removed else "error"
            message = refused.message("transformers", key, setting.value)
            fix = (f'{key}="{refused.meant}"',) if refused.meant else ()
            yield Finding("value.invalid", severity, key, message, fix, setting.file, setting.line)
