"""Megatron-LM's command line as its parser takes it apart: no abbreviations, nothing left over."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from meshwright.frameworks.types import SourcedValue
from meshwright.recipes.key_maps import config_keys
from meshwright.recipes.key_maps.key import ConfigKey
from meshwright.rules.rule import Finding

TABLE = "megatron_lm"
REST = "*"
"""The key of arguments that only running the script would tell, such as "$@"."""
ALIASES = {"persistent_save_interval": "save_interval", "fp4_param": "fp4_param_gather"}
WITH_UNDERSCORE = ("--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler")
MANY = frozenset((
    "cp_comm_type", "hierarchical_context_parallel_sizes", "recompute_modules", "cuda_graph_modules",
    "cuda_graph_scope", "moe_router_load_balancing_type", "moe_aux_loss_coeff", "data_path", "train_data_path",
))  # fmt: skip
"""Flags with a meaning here that take several values."""
FIRST = ("moe_aux_loss_coeff",)
"""Flags whose first value is the one that means something here."""
OPTION = re.compile(r"-[-A-Za-z_]")


class Taken(msgspec.Struct, frozen=True):
    """What a list of arguments says, and what the parser would stop at."""

    settings: dict[str, SourcedValue]
    findings: tuple[Finding, ...]


def spell(key: str, value: Any) -> str:
    """One setting as it stands on the command line."""
    flag = "--" + key.replace("_", "-")
    if value is None or value is False:
        return f"without {flag}"
    if value is True:
        return flag
    if isinstance(value, list | tuple):
        return " ".join([flag, *map(str, value)])
    return f"{flag} {value}"


def take(args: Sequence[SourcedValue]) -> Taken:
    """Flags with their values; the last one wins, as it does there."""
    settings: dict[str, SourcedValue] = {}
    findings: list[Finding] = []
    at = 0
    while at < len(args):
        word = args[at]
        if not _is_flag(word):
            at += 1
            if word.unresolved:
                settings[REST] = word
            elif REST not in settings or settings[REST].line != word.line:
                findings.append(_stray(word))
            continue
        name, equals, glued = str(word.value).partition("=")
        key = key_of(name)
        found = [_like(word, glued)] if equals else list(_values(args, at + 1, key))
        at += 1 + (0 if equals else len(found))
        findings.extend(_misspelt(name, key, word))
        said = _said(key, word, found)
        if said is None:
            findings.append(_empty(key, word))
            continue
        findings.extend(_said_before(key, said, settings.get(key)))
        settings[key] = said
    return Taken(settings, tuple(findings))


def key_of(flag: str) -> str:
    """The canonical key of a flag; `--disable-x` is their other word for `--no-x`."""
    key = flag.lstrip("-").replace("-", "_")
    key = ALIASES.get(key, key)
    other = "no_" + key.removeprefix("disable_")
    known = config_keys(TABLE)
    return other if key not in known and key.startswith("disable_") and other in known else key


def _is_flag(word: SourcedValue) -> bool:
    return bool(OPTION.match(str(word.value)))


def _like(word: SourcedValue, text: str) -> SourcedValue:
    return SourcedValue(text, word.line, word.file, word.unresolved)


def arity(key: str) -> str:
    """How many values a flag takes: none, one or many; unknown ones take what follows."""
    word = config_keys(TABLE).get(key)
    if key in MANY or (word is not None and word.type == "list"):
        return "many"
    if word is None:
        return "any"
    return "none" if _is_switch(word) else "one"


def _is_switch(word: ConfigKey) -> bool:
    """Whether a flag stands alone; of those that are gone, all that do not say what they took."""
    return word.type == "flag" or isinstance(word.default, bool) or (word.status != "read" and not word.type)


def _values(args: Sequence[SourcedValue], at: int, key: str) -> Iterator[SourcedValue]:
    """The words that belong to a flag."""
    kind = arity(key)
    if kind == "none":
        return
    for word in args[at:]:
        if _is_flag(word) and not _is_number(word):
            return
        yield word
        if kind == "one":
            return


def _is_number(word: SourcedValue) -> bool:
    return bool(re.fullmatch(r"-?[0-9.]+(e-?[0-9]+)?", str(word.value)))


def _said(key: str, flag: SourcedValue, found: Sequence[SourcedValue]) -> SourcedValue | None:
    """The flag's value where it stands; None when a value is wanted and none is there."""
    kind = arity(key)
    if kind == "none" or (kind == "any" and not found):
        return _like(flag, "") if flag.unresolved else SourcedValue(True, flag.line, flag.file)
    if not found and (kind == "one" or key in FIRST):
        return None
    why = "; ".join(dict.fromkeys(word.unresolved for word in (flag, *found) if word.unresolved))
    texts = [str(word.value) for word in found]
    line, file = (flag.line, flag.file) if not found or found[0].file != flag.file else (found[0].line, flag.file)
    if why:
        return SourcedValue(" ".join(texts), line, file, why)
    return SourcedValue(texts if kind == "many" and key not in FIRST else texts[0], line, file)


def _misspelt(name: str, key: str, word: SourcedValue) -> Iterator[Finding]:
    if "_" not in name or name in WITH_UNDERSCORE or key not in config_keys(TABLE):
        return
    right = "--" + key.replace("_", "-")
    yield _finding("key.unknown", key, f"Megatron-LM has no {name}: its flags have dashes", word, (right,))


def _stray(word: SourcedValue) -> Finding:
    text = str(word.value)
    return _finding("value.stray", "", f"{text!r} belongs to no flag: the parser stops at it", word)


def _empty(key: str, word: SourcedValue) -> Finding:
    return _finding("value.missing", key, f"{spell(key, True)} wants a value and none follows", word)


def _said_before(key: str, said: SourcedValue, before: SourcedValue | None) -> Iterator[Finding]:
    if before is None or before.unresolved or said.unresolved or before.value == said.value:
        return
    message = f"{spell(key, before.value)} is replaced by {spell(key, said.value)} further on"
    yield _finding("value.replaced", key, message, before, severity="warning")


def _finding(
    rule: str, key: str, message: str, at: SourcedValue, fix: tuple[str, ...] = (), severity: Any = "error"
) -> Finding:
    return Finding(rule, severity, key, message, fix, file=at.file, line=at.line)
