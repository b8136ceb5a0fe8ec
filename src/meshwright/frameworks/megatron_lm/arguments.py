"""Parse Megatron-LM's command line as its argparse does: no abbreviations, no stray arguments."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from meshwright.frameworks.common import ALL_ARGUMENTS
from meshwright.frameworks.types import SourcedValue
from meshwright.recipes.key_maps import config_keys
from meshwright.recipes.key_maps.key import ConfigKey
from meshwright.rules.rule import Finding

KEY_MAP = "megatron_lm"
UNREAD_ARGS = "*"
"""The key for arguments known only at run time, such as "$@"."""
DEFAULT_TOKENIZER = "GPT2BPETokenizer"
"""What the training scripts set where --tokenizer-type is not given."""
MODEL_FLAGS: Mapping[str, str] = {
    "num_hidden_layers": "num_layers",
    "n_layers": "num_layers",
    "intermediate_size": "ffn_hidden_size",
    "num_key_value_heads": "num_query_groups",
    "num_local_experts": "num_experts",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "moe_router_topk",
    "rope_theta": "rotary_base",
    "rms_norm_eps": "norm_epsilon",
    "initializer_range": "init_method_std",
}
"""Names of a Hugging Face config.json, with the flag of the same size."""
FROM_CHECKPOINT = ("use_checkpoint_args", "use_tokenizer_model_from_checkpoint_args")
"""Flags that read the tokenizer from a checkpoint."""
HYBRID_SPEC = ("megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec")
"""Module and name of the layers of hybrid models, for --spec."""
ALIASES = {"persistent_save_interval": "save_interval", "fp4_param": "fp4_param_gather"}
WITH_UNDERSCORE = ("--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler")
MULTI_VALUE = frozenset((
    "cp_comm_type", "hierarchical_context_parallel_sizes", "recompute_modules", "cuda_graph_modules",
    "cuda_graph_scope", "moe_router_load_balancing_type", "moe_aux_loss_coeff", "data_path", "train_data_path",
))  # fmt: skip
"""Mapped flags that take several values."""
FIRST_VALUE_ONLY = ("moe_aux_loss_coeff",)
"""Multi-value flags of which only the first value is used."""
PLACEHOLDER = re.compile(r"<[A-Za-z]")
CAPITALS = re.compile(r"[A-Z]{2,}( [A-Z]+)*")
ASKS = re.compile(r"(?i)(your|please|path|the|enter|insert|replace|fill|specify|set|name|location)")
"""First word of a text that asks the user for a value: your model path, path to the data."""
PLAIN_WORD = re.compile(r"[A-Za-z][A-Za-z/_.,'-]*")
OPTION = re.compile(r"-[-A-Za-z_]")


class ParsedArgs(msgspec.Struct, frozen=True):
    """Parsed arguments, and the errors Megatron-LM's parser would raise."""

    settings: dict[str, SourcedValue]
    findings: tuple[Finding, ...]


SHELL_CHARACTERS = re.compile(r"[|&;<>()*?\[\]#~!`\s]")
"""Characters of a value that a shell would interpret; a variable such as $DATA is meant as one."""


def flag_of(key: str) -> str:
    """Return the flag of a key."""
    return next((flag for flag in WITH_UNDERSCORE if key_of(flag) == key), "--" + key.replace("_", "-"))


def format_flag(key: str, value: Any) -> str:
    """Format a setting as on the command line."""
    flag = flag_of(key)
    if value is None or value is False:
        return f"without {flag}"
    if value is True:
        return flag
    if isinstance(value, list | tuple):
        return " ".join([flag, *map(str, value)])
    text = str(value)
    return f"{flag} {shlex.quote(text)}" if SHELL_CHARACTERS.search(text) else f"{flag} {text}"


FORK_FLAGS = 5  # flags with underscores from which a command is one of a fork, and the share of all that they are
FORK_SHARE = 0.8
UNDERSCORES = "underscores"  # field of the finding on a fork's flags


def parse_args(args: Sequence[SourcedValue], arity_of: Callable[[str], str] | None = None) -> ParsedArgs:
    """Parse flags with their values; the last one wins, as in argparse.

    `arity_of` returns how many values a flag of another parser takes, as `arity` does for Megatron-LM's.
    """
    count_of = arity_of or arity
    args = with_placeholders(args)
    underscored = _first_underscored(args) if arity_of is None else None
    settings: dict[str, SourcedValue] = {}
    uses: dict[str, list[SourcedValue]] = {}
    findings: list[Finding] = [] if underscored is None else [_underscores(underscored)]
    at = 0
    while at < len(args):
        arg = args[at]
        if not _is_flag(arg):
            at += 1
            if arg.unresolved:
                if UNREAD_ARGS not in settings or str(arg.value) not in ALL_ARGUMENTS:
                    settings[UNREAD_ARGS] = arg
            elif UNREAD_ARGS not in settings or settings[UNREAD_ARGS].line != arg.line:
                findings.append(_stray(arg))
            continue
        name, equals, glued = str(arg.value).partition("=")
        if arg.unresolved and "$" in name:  # such as --$DTYPE
            settings[UNREAD_ARGS] = arg
            at += 1
            continue
        key = key_of(name)
        found = [_like(arg, glued)] if equals else list(_values(args, at + 1, count_of(key)))
        at += 1 + (0 if equals else len(found))
        setting = _value(key, arg, found, count_of(key))
        if arity_of is None and underscored is None:
            findings.extend(_check_underscores(name, key, arg, setting))
        if setting is None:
            findings.append(_missing_value(key, arg))
            continue
        uses.setdefault(key, []).append(setting)
        settings[key] = setting
    findings.extend(one for key, found in uses.items() for one in _report_replaced(key, found))
    return ParsedArgs(settings, tuple(findings))


def with_placeholders(args: Sequence[SourcedValue]) -> list[SourcedValue]:
    """Return the arguments with each <PATH TO DATA> or PATH TO DATA, to be filled in, as one unresolved value."""
    found: list[SourcedValue] = []
    open_one = False
    for arg in args:
        text = str(arg.value)
        if open_one:
            before = found.pop()
            found.append(msgspec.structs.replace(before, value=f"{before.value} {text}"))
            open_one = ">" not in text
        elif PLACEHOLDER.match(text) and any(">" in str(one.value) for one in args):
            found.append(msgspec.structs.replace(arg, unresolved="a placeholder to fill in"))
            open_one = ">" not in text
        elif found and text.isalpha() and text.isupper() and CAPITALS.fullmatch(str(found[-1].value)):
            before = found.pop()  # PATH TO THE DATA in a variable without quotes
            joined = f"{before.value} {text}"
            found.append(msgspec.structs.replace(before, value=joined, unresolved="a placeholder to fill in"))
        elif found and _goes_on(found[-1], arg):
            before = found.pop()  # your model path in a variable without quotes
            joined = f"{before.value} {text}"
            found.append(msgspec.structs.replace(before, value=joined, unresolved="a placeholder to fill in"))
        else:
            found.append(arg)
    return found


def _goes_on(before: SourcedValue, arg: SourcedValue) -> bool:
    """Return whether a word continues a text that asks for a value, from the same line."""
    first, *others = str(before.value).split() or [""]
    same_place = (before.file, before.line) == (arg.file, arg.line)
    plain = all(PLAIN_WORD.fullmatch(one) for one in (*others, str(arg.value)))
    return same_place and plain and bool(ASKS.fullmatch(first))


def key_of(flag: str) -> str:
    """Return the canonical key of a flag; `--disable-x` is an alias of `--no-x`."""
    key = flag.lstrip("-").replace("-", "_")
    key = ALIASES.get(key, key)
    other = "no_" + key.removeprefix("disable_")
    key_map = config_keys(KEY_MAP)
    return other if key not in key_map and key.startswith("disable_") and other in key_map else key


def _is_flag(arg: SourcedValue) -> bool:
    return bool(OPTION.match(str(arg.value)))


def _like(arg: SourcedValue, text: str) -> SourcedValue:
    return SourcedValue(text, arg.line, arg.file, arg.unresolved)


def arity(key: str) -> str:
    """Return how many values a flag takes: none, one, many, or any for unknown flags."""
    config_key = config_keys(KEY_MAP).get(key)
    if key in MULTI_VALUE or (config_key is not None and config_key.type == "list"):
        return "many"
    if config_key is None:
        return "any"
    return "none" if _is_switch(config_key) else "one"


def _is_switch(config_key: ConfigKey) -> bool:
    """Return whether a flag takes no value; removed flags without a recorded type count as switches."""
    return (
        config_key.type == "flag"
        or isinstance(config_key.default, bool)
        or (config_key.status != "read" and not config_key.type)
    )


def _values(args: Sequence[SourcedValue], at: int, count: str) -> Iterator[SourcedValue]:
    """Yield the values of a flag."""
    if count == "none":
        return
    for arg in args[at:]:
        if _is_flag(arg) and not _is_number(arg):
            return
        yield arg
        if count == "one":
            return


def _is_number(arg: SourcedValue) -> bool:
    return bool(re.fullmatch(r"-?[0-9.]+(e-?[0-9]+)?", str(arg.value)))


def _value(key: str, flag: SourcedValue, found: Sequence[SourcedValue], count: str) -> SourcedValue | None:
    """Return the value of a flag with its location; None if a required value is missing."""
    if count == "none" or (count == "any" and not found):
        return _like(flag, "") if flag.unresolved else SourcedValue(True, flag.line, flag.file)
    if not found and (count == "one" or key in FIRST_VALUE_ONLY):
        return None
    reason = "; ".join(dict.fromkeys(arg.unresolved for arg in (flag, *found) if arg.unresolved))
    texts = [str(arg.value) for arg in found]
    line, file = (flag.line, flag.file) if not found or found[0].file != flag.file else (found[0].line, flag.file)
    if reason:
        return SourcedValue(" ".join(texts), line, file, reason)
    return SourcedValue(texts if count == "many" and key not in FIRST_VALUE_ONLY else texts[0], line, file)


def _first_underscored(args: Sequence[SourcedValue]) -> SourcedValue | None:
    """Return the first flag with underscores if nearly all of several words have them, as in forks; else None."""
    known = config_keys(KEY_MAP)
    names = [(str(arg.value).partition("=")[0].lstrip("-"), arg) for arg in args if _is_flag(arg)]
    several = [(name, arg) for name, arg in names if re.search(r"\w[-_]\w", name) and key_of(name) in known]
    found = [arg for name, arg in several if "_" in name and "-" not in name]
    return found[0] if len(found) >= FORK_FLAGS and len(found) > FORK_SHARE * len(several) else None


def _underscores(arg: SourcedValue) -> Finding:
    message = (
        f"flags such as {str(arg.value).partition('=')[0]} have underscores, as forks write them (Megatron-LLM); "
        "those of Megatron-LM use dashes: they are read as the same flags"
    )
    return _finding("key.unknown", UNDERSCORES, message, arg, severity="warning")


def _check_underscores(name: str, key: str, arg: SourcedValue, setting: SourcedValue | None) -> Iterator[Finding]:
    if "_" not in name or name in WITH_UNDERSCORE or key not in config_keys(KEY_MAP):
        return
    right = format_flag(key, True if setting is None or setting.unresolved else setting.value)
    yield _finding("key.unknown", key, f"Megatron-LM has no {name}: its flags use dashes", arg, (right,))


def _stray(arg: SourcedValue) -> Finding:
    text = str(arg.value)
    return _finding("value.stray", "", f"{text!r} belongs to no flag: the parser fails on it", arg)


def _missing_value(key: str, arg: SourcedValue) -> Finding:
    return _finding("value.missing", key, f"{format_flag(key, True)} needs a value", arg)


def _report_replaced(key: str, uses: Sequence[SourcedValue]) -> Iterator[Finding]:
    """Yield a finding on the values of a flag that its last one replaces, with the lines of both."""
    last = uses[-1]
    replaced = [one for one in uses[:-1] if not one.unresolved and one.value != last.value]
    if last.unresolved or not replaced:
        return
    first, *others = replaced
    texts = [format_flag(key, first.value), *(f"{format_flag(key, one.value)}{_place(one, first)}" for one in others)]
    are = "are" if others else "is"
    message = f"{' and '.join(texts)} {are} overridden by a later {format_flag(key, last.value)}{_place(last, first)}"
    yield _finding("value.replaced", key, message, first, severity="warning")


def _place(one: SourcedValue, first: SourcedValue) -> str:
    """Return the line of a value, if it is not that of the first, where the finding is."""
    if (one.file, one.line) == (first.file, first.line):
        return ""
    return f" (line {one.line})" if one.file == first.file else f" ({one.file}:{one.line})"


def _finding(
    rule: str, key: str, message: str, at: SourcedValue, fix: tuple[str, ...] = (), severity: Any = "error"
) -> Finding:
    return Finding(rule, severity, key, message, fix, file=at.file, line=at.line)
