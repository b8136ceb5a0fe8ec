"""Flags of Megatron-DeepSpeed's parsers (flags.tsv), as its argparse reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from meshwright.errors import InputError
from meshwright.frameworks.megatron_lm.arguments import UNREAD_ARGS, format_flag
from meshwright.frameworks.types import Settings, SourcedValue
from meshwright.rules.rule import Finding
from meshwright.similar import misspelled

TITLE = "Megatron-DeepSpeed"
RENAMED: Mapping[str, str] = {
    "num_key_value_heads": "num_query_groups",
    "ds_sequence_parallel_size": "context_parallel_size",
    "moe_expert_parallel_size": "expert_model_parallel_size",
    "topk": "moe_router_topk",
    "moe_loss_coeff": "moe_aux_loss_coeff",
    "moe_train_capacity_factor": "moe_expert_capacity_factor",
    "rotary_position_embeddings_theta": "rotary_base",
    "layernorm_epsilon": "norm_epsilon",
    "tokenizer_name_or_path": "tokenizer_model",
    "pad_vocab_size_to": "padded_vocab_size",
    "checkpoint_num_layers": "recompute_num_layers",
}
"""Flags with the flag of Megatron-LM of the same meaning."""
OTHER_NAMES: Mapping[str, str] = {
    "num_query_groups": "num_key_value_heads",
    "context_parallel_size": "ds_sequence_parallel_size",
    "expert_model_parallel_size": "moe_expert_parallel_size",
    "moe_router_topk": "topk",
    "rotary_base": "rotary_position_embeddings_theta",
    "norm_epsilon": "layernorm_epsilon",
    "zero_optimization_stage": "zero_stage",
}
"""Flags of Megatron-LM that its users write, with the flag that is read."""


FLASH_BACKENDS = ("flash", "auto")  # of Megatron-LM's --attention-backend


class Flag(msgspec.Struct, frozen=True):
    """A flag of one or both repositories."""

    names: tuple[str, ...]  # as they are written, without the leading dashes
    types: tuple[str, ...]  # flag, int, float, str or list
    choices: tuple[str, ...]  # of all repositories; empty: any


@cache
def flags() -> Mapping[str, Flag]:
    """Return the flags that the training programs accept, by key: with underscores."""
    found: dict[str, Flag] = {}
    for row in Path(__file__).with_name("flags.tsv").read_text(encoding="utf-8").splitlines()[2:]:
        name, takes, choices, _ = row.split("\t")
        key, allowed = name.replace("-", "_"), tuple(choices.split())
        before = found.get(key)
        if before is not None:
            takes_all = tuple(dict.fromkeys((*before.types, takes)))
            both = tuple(dict.fromkeys((*before.choices, *allowed))) if before.choices and allowed else ()
            found[key] = Flag(tuple(dict.fromkeys((*before.names, name))), takes_all, both)
        else:
            found[key] = Flag((name,), (takes,), allowed)
    return found


@cache
def commits() -> str:
    """Return the repositories and commits of the table, each commit shortened."""
    head = Path(__file__).with_name("flags.tsv").read_text(encoding="utf-8").splitlines()[0]
    parts = head.removeprefix("# ").split(",")[:2]
    return ", ".join(f"{one.split()[0]} {one.split()[1][:7]}" for one in parts)


def arity(key: str) -> str:
    """Return how many values a flag takes: none, one, many, or any for unknown flags."""
    flag = flags().get(key)
    if flag is None:
        return "any"
    return {"flag": "none", "list": "many"}.get(flag.types[0], "one") if len(flag.types) == 1 else "any"


def written(key: str, value: Any) -> str:
    """Return a setting as on the command line; raise InputError if there is no flag for it."""
    own = OTHER_NAMES.get(key, key)
    if key == "attention_backend" and value in FLASH_BACKENDS:  # without such a flag, attention is not fused
        return f"--{flags()['use_flash_attn_v2'].names[0]}"
    if own not in flags():
        raise InputError(f"{TITLE} has no flag for it", field=key)
    return format_flag(own, value).replace(format_flag(own, True), f"--{flags()[own].names[0]}", 1)


def display(key: str) -> str:
    """Return a key as users write it."""
    own = OTHER_NAMES.get(key, key)
    return f"--{flags()[own].names[0]}" if own in flags() else format_flag(key, True)


def flag_findings(settings: Settings, added: frozenset[str], complete: bool) -> Iterator[Finding]:
    """Yield the flags that the parser refuses.

    `added` are flags of the program itself; `complete`: it adds no others.
    """
    for key, one in settings.items():
        flag = flags().get(key)
        if key in added or key == UNREAD_ARGS or not one.line:
            continue
        if flag is None:
            yield _unknown(key, one, complete)
        elif not one.unresolved and one.value is not True and (reason := _refused(flag, one.value)):
            shown = written(key, one.value)
            yield Finding("value.invalid", "error", key, f"{shown}: {reason}", (), file=one.file, line=one.line)


def spelling_findings(args: Sequence[SourcedValue]) -> Iterator[Finding]:
    """Yield flags with a dash for an underscore, or the other way round, which the parser does not know."""
    for one in args:
        name = str(one.value).partition("=")[0]
        key = name.removeprefix("--").replace("-", "_")
        if name.startswith("--") and key in flags() and name.removeprefix("--") not in flags()[key].names:
            message = f"{TITLE} has no {name}: it is written {display(key)}"
            fix = str(one.value).replace(name, display(key), 1)
            yield Finding("key.unknown", "error", key, message, (fix,), file=one.file, line=one.line)


def _unknown(key: str, one: SourcedValue, complete: bool) -> Finding:
    shown = format_flag(key, True)
    meant = OTHER_NAMES.get(key) or next(iter(misspelled(key, tuple(flags()))), "")
    if not complete and not meant:
        message = f"{shown} is no flag of {TITLE}: the program must add it"
        return Finding("key.unused", "warning", key, message, (), file=one.file, line=one.line)
    hint = f"; did you mean {display(meant)}?" if meant else ""
    value = True if one.unresolved else one.value
    fix = (written(meant, value),) if meant and not one.unresolved else ()
    return Finding("key.unknown", "error", key, f"{TITLE} has no {shown}{hint}", fix, file=one.file, line=one.line)


def _refused(flag: Flag, value: Any) -> str:
    """Return why the parser refuses a value; empty if it does not."""
    texts = [str(one) for one in value] if isinstance(value, list) else [str(value)]
    if flag.choices and not set(texts) <= set(flag.choices):
        return f"allowed: {', '.join(flag.choices)}"
    for kind, convert, what in (("int", int, "an integer"), ("float", float, "a number")):
        if flag.types == (kind,) and not _converts(convert, texts):
            return f"expected {what}"
    return ""


def _converts(convert: Any, texts: list[str]) -> bool:
    try:
        for one in texts:
            convert(one)
    except ValueError:
        return False
    return True
