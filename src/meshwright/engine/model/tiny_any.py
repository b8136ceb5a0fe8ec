"""A small config of any model type, by what the names of its values mean; checked by a forward pass of the small model.

For types that run transformers' own forward pass; config.py has the table of the others.
"""

from __future__ import annotations

import logging as python_logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from meshwright.engine.model.layer_lists import layer_count, representative_layers, with_layers
from meshwright.errors import InputError, first_line

WIDTH, HEADS, HEAD, VOCAB, POSITIONS, WINDOW, RANK = 64, 4, 16, 256, 512, 16, 16
TOKENS = 2 * WINDOW  # of the checking forward pass
MOST_PARAMETERS = 20_000_000
WIDTHS = ("hidden_size", "n_embd", "d_model", "embedding_dim")
HEAD_COUNTS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
KEPT = re.compile(
    r"layer|period|interval|offset|conv|kernel|pattern|cycle|every|scale|multiple_of|theta|seed|iters|factor|ratio"
    r"|ngram_size|altup|hc_mult|hc_count|number_of|multiple_size|bits|version|patch_size|group_size"
)
PERIODS = re.compile(r"period|interval|every_n|layer_freq|_step$")

Rule = Callable[[int, Mapping[str, Any]], int]


def _at_most(limit: int) -> Rule:
    return lambda value, _: min(value, limit)


def _token(value: int, _: Mapping[str, Any]) -> int:
    return value if value < VOCAB else 0


def _heads(value: int, values: Mapping[str, Any]) -> int:
    """Return as many heads as there are for queries, half, or one: grouped heads stay grouped."""
    queries = next((values[name] for name in HEAD_COUNTS if isinstance(values.get(name), int)), value)
    return 1 if value == 1 else HEADS if value >= queries else HEADS // 2


def _head_dim(value: int, values: Mapping[str, Any]) -> int:
    """Return the small width of a head; wider heads of single layers stay wider."""
    usual = values.get("head_dim")
    return HEAD * max(1, value // usual) if isinstance(usual, int) and usual and value % usual == 0 else HEAD


def _inner_width(values: Mapping[str, Any]) -> int:
    """Return the small width inside a state-space mixer."""
    expand = next(
        (values[name] for name in ("mamba_expand", "expand") if isinstance(values.get(name), (int, float))), 2
    )
    return int(expand * WIDTH)


def _proportional(value: int, values: Mapping[str, Any]) -> int:
    width = next((values[name] for name in WIDTHS if isinstance(values.get(name), int)), 0)
    if value < 64 or not width:
        return value
    return max(16, -(-value * WIDTH // width // 8) * 8)


# Names and what becomes of their values; the first match counts.
RULES: tuple[tuple[re.Pattern[str], Rule], ...] = tuple(
    (re.compile(pattern), rule)
    for pattern, rule in (
        (r"token_id$|token_index$", _token),
        (r"vocab", _at_most(VOCAB)),
        (r"position|seq_len|context|model_max_length|n_ctx", _at_most(POSITIONS)),
        (r"window|chunk|indexer_budget|^local_attention$|index_topk$|index_block_size|rel_extent", _at_most(WINDOW)),
        (r"experts_per_tok|^moe_top_?k$|^moe_k$|top_k_experts|topk_blocks", _at_most(2)),
        (r"shared_experts$", _at_most(1)),
        (r"experts$|expert_num$", _at_most(8)),
        (r"^topk_group$", _at_most(1)),
        (r"n_groups?$|o_groups|split_ngram_parts|query_pre_attn", _at_most(2)),
        (r"mamba_d_ssm", lambda _, values: _inner_width(values)),
        (r"mamba_d_head|mamba_headdim", lambda _, values: _inner_width(values) // HEADS),
        (r"mamba.*heads$", _at_most(HEADS)),
        (r"heads?$|query_groups|heads_per", _heads),
        (r"rotary_dim", _at_most(HEAD // 2)),
        (r"head_?dim|head_size|dim_head|kv_channels", _head_dim),
        (r"rank$|lowrank", _at_most(RANK)),
        (r"state", _at_most(16)),
        (KEPT.pattern, lambda value, _: value),
        (r"", _proportional),
    )
)


def shrink(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with small sizes; relations between them stay."""
    small = {key: _small(key, value, values) for key, value in values.items()}
    if isinstance(values.get("attention_hidden_size"), int) and "attention_head_dim" in small:
        small["attention_head_dim"] = small["attention_hidden_size"] // HEADS
    if "head_dim" in small and "expand" in values and "num_attention_heads" not in values:  # a mixer's own heads
        small["head_dim"] = _inner_width(values) // HEADS
    return small


def _small(key: str, value: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(value, Mapping):
        return {k: _small(k, v, {**values, **value, **_usual(values)}) for k, v in value.items()}
    if key == "mrope_section" and isinstance(value, list):  # pairs of a head's channels for time, height and width
        return [HEAD // 2 - 2 * (HEAD // 6), HEAD // 6, HEAD // 6]
    if isinstance(value, list) and value and all(_is_size(one) for one in value) and max(value) >= 32:
        return [_small(key, one, values) for one in value]  # a size of every layer
    if not _is_size(value):
        return value
    return next(rule(value, values) for pattern, rule in RULES if pattern.search(key))


def _usual(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: values[key] for key in ("head_dim",) if key in values}


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def tiny_config(values: Mapping[str, Any], layers: int, make: Callable[[Mapping[str, Any]], Any]) -> Any:
    """Return a small config with this many layers or more, of which a forward pass works."""
    try:
        return checked(make(tiny_values(values, layers)))
    except InputError:  # some types need two layers of a kind, the second of which shares weights of the first
        return checked(make(tiny_values(values, layers, of_each=2)))


def tiny_values(values: Mapping[str, Any], layers: int, of_each: int = 1) -> dict[str, Any]:
    """Return small values with every kind of layer."""
    periods = [v for k, v in values.items() if PERIODS.search(k) and _is_size(v) and v <= 8]
    if periods and not any(isinstance(v, list) and len(v) == layer_count(values) for v in values.values()):
        chosen = list(range(min(max(layers, *periods), layer_count(values))))  # kinds repeat by number
    else:
        chosen = representative_layers(values, layers, of_each)
    return shrink(with_layers(values, chosen))


def checked(config: Any) -> Any:
    """Return the config if a forward pass of its model works; raise InputError with the reason."""
    try:
        with trying(), torch.no_grad():
            small_model(config)(input_ids=torch.zeros((1, TOKENS), dtype=torch.long), use_cache=False)
    except Exception as error:  # whatever a model raises whose sizes do not fit together
        raise InputError(
            f"--tiny found no small sizes for {config.model_type} ({first_line(error)})",
            field="model",
            value=config.model_type,
            fix=("train a small config.json of this type without --tiny",),
        ) from None
    return config


@contextmanager
def trying() -> Iterator[None]:
    """Compute without threads and without transformers' warnings.

    Ranks are forked from this process later, and a fork loses OpenMP's threads.
    """
    from transformers import logging

    threads, verbosity = torch.get_num_threads(), logging.get_verbosity()
    torch.set_num_threads(1)
    logging.set_verbosity(python_logging.ERROR)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        logging.set_verbosity(verbosity)


def small_model(config: Any, **options: Any) -> Any:
    """Return the model of a small config on the CPU, with random weights that do not change the generator's state."""
    from transformers import AutoModelForCausalLM

    build: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        size = sum(p.numel() for p in build(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size:,} parameters are left")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        return build(config, **options).train()
