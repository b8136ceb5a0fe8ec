"""What a model type does that its config does not say, found with a small random model of it on the CPU.

A causal model's logits do not depend on later tokens. With packed samples, positions that start again at zero must keep
documents apart. Pipeline stages need blocks that run one after the other. All are measured, so that no type needs a
table entry.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec
import torch

from meshwright.engine.model.block_split import BlockOrder, UnsplitError, trace_blocks
from meshwright.engine.model.build import runs_own_layers
from meshwright.engine.model.tiny_any import small_model, trying
from meshwright.errors import InputError
from meshwright.notes import note
from meshwright.recipes.types import Recipe

TOKENS, HALF = 32, 16
SAME = 1e-4  # relative difference of logits that counts as none
ATTENTION = (None, "eager")  # transformers' own choice first


@dataclass(frozen=True)
class Behaviour:
    """The attention implementation with which a type is causal, and whether restarted positions isolate documents."""

    attention: str | None = None  # None: transformers' own choice
    isolates: bool = False


def behaviour_of(config: Any) -> Behaviour:
    """Return the behaviour of a config's type; raise InputError if it is not causal."""
    return _measured(json.dumps(config.to_dict(), sort_keys=True, default=str), _Held(config))


def with_isolated_documents(recipe: Recipe, config: Any, pinned: Mapping[str, Any]) -> Recipe:
    """Return the recipe without packing if the model would mix the documents of a sample; a note says so.

    A user's own data.packing=true is refused instead.
    """
    runs_whole = hasattr(config, "get_text_config") and not runs_own_layers(config)
    if not recipe.data.packing or not runs_whole or behaviour_of(config).isolates:
        return recipe
    if pinned.get("data.packing"):
        raise mixed_documents(config)
    note(f"data.packing true → false: {mixed_documents(config).reason}")
    return msgspec.structs.replace(recipe, data=msgspec.structs.replace(recipe.data, packing=False))


def mixed_documents(config: Any) -> InputError:
    """Return the error for packed samples of a model that mixes their documents."""
    return InputError(
        f"transformers' {config.model_type} does not keep the documents of a packed sample apart",
        field="data.packing",
        value=True,
        fix=("data.packing=false",),
    )


class _Held:
    """A config that is equal to every other: the text beside it is the key of the cache."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held)

    def __hash__(self) -> int:
        return 0


@lru_cache(maxsize=8)
def _measured(_: str, held: _Held) -> Behaviour:
    from meshwright.engine.model.config import distinct_layer_types, tiny

    config = held.config
    try:
        small = tiny(config, max(2, distinct_layer_types(config)))
    except InputError:  # nothing to measure with
        return Behaviour()
    with trying():
        for attention in ATTENTION:
            model = small_model(small, **({} if attention is None else {"attn_implementation": attention}))
            _spread_weights(model)
            if _is_causal(model):
                return Behaviour(attention, _isolates(model))
    raise InputError(
        f"a {config.model_type} model is not causal: its logits depend on later tokens",
        field="model",
        value=config.model_type,
    )


def block_order_of(config: Any) -> BlockOrder:
    """Return how the blocks of a config's type run; raise InputError if they cannot be pipeline stages."""
    from meshwright.engine.model.config import distinct_layer_types, tiny

    kind = behaviour_of(config).attention
    try:
        small = tiny(config, max(2, distinct_layer_types(config)))
        with trying():
            model = small_model(small, **({} if kind is None else {"attn_implementation": kind}))
            _spread_weights(model)
            return trace_blocks(model)
    except (InputError, UnsplitError) as error:
        reason = error.reason if isinstance(error, InputError) else str(error)
        reason = f"transformers' {config.model_type} has no pipeline stages: {reason}"
        raise InputError(reason, field="layout.pp", fix=("layout.pp=1",)) from None


@torch.no_grad()
def _spread_weights(model: Any) -> None:
    """Make the weights so large that every part of the model changes its logits."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(drawn * parameter.shape[-1] ** -0.5)


@torch.no_grad()
def _logits(model: Any, tokens: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=tokens, use_cache=False, **kwargs).logits[0].float()
    return logits


def _tokens(model: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(3, model.config.vocab_size - 1, (1, TOKENS), generator=generator)


def _is_causal(model: Any) -> bool:
    tokens = _tokens(model)
    other = tokens.clone()
    other[:, HALF:] += 1
    return _equal(_logits(model, tokens)[:HALF], _logits(model, other)[:HALF])


def _isolates(model: Any) -> bool:
    tokens = _tokens(model)
    other = tokens.clone()
    other[:, :HALF] += 1
    positions = torch.arange(TOKENS)[None] % HALF
    try:
        first = _logits(model, tokens, position_ids=positions)[HALF:]
        changed = _logits(model, other, position_ids=positions)[HALF:]
        alone = _logits(model, tokens[:, HALF:])
    except Exception:  # it takes no positions
        return False
    return _equal(first, changed) and _equal(first, alone)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one - other).abs().max() <= SAME * one.abs().max())
