"""Fine-tuning front ends of transformers' Trainer: Axolotl, LLaMA-Factory, ms-swift and TRL.

Their keys are compared with tables from their source. What they train is read as arguments of the Trainer, so that
layout, memory and values are checked by the rules for Accelerate.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import msgspec

from meshwright.errors import unknown
from meshwright.frameworks.accelerate.keys import closed, format_setting, known
from meshwright.frameworks.accelerate.parse import complete
from meshwright.frameworks.framework import Content, Framework
from meshwright.frameworks.front_ends import swift_megatron
from meshwright.frameworks.front_ends.commands import with_command_settings
from meshwright.frameworks.front_ends.describe import FRONT_ENDS
from meshwright.frameworks.front_ends.own_overrides import with_own_overrides
from meshwright.frameworks.front_ends.parse import confidence, is_megatron, parse
from meshwright.frameworks.front_ends.sharding import own_settings
from meshwright.frameworks.front_ends.synonyms import in_front_end
from meshwright.frameworks.validation_memory import validation_memory_rule

__all__ = ["FRONT_ENDS", "detect_front_end", "front_end", "in_front_end", "with_command_settings"]


def front_end(name: str, content: Content) -> Framework:
    """Return the reader of a front end's file."""
    plain = name.strip().lower().replace("_", "-")
    if plain not in FRONT_ENDS:
        raise unknown("framework", name, tuple(FRONT_ENDS))
    return (_on_megatron if is_megatron(FRONT_ENDS[plain], content) else _on_trainer)(plain)


def detect_front_end(content: Content) -> Framework | None:
    """Return the front end that a file is for; None if it is for none of them."""
    scores: Mapping[str, int] = {name: confidence(one, content) for name, one in FRONT_ENDS.items()}
    best = max(scores, key=lambda name: scores[name])
    return front_end(best, content) if scores[best] else None


VALIDATES_AS_THE_TRAINER = ("llama-factory", "trl")  # Axolotl takes the batch of training, ms-swift one sample


@cache
def _on_trainer(name: str) -> Framework:
    one = FRONT_ENDS[name]
    return Framework(
        name=one.name,
        title=one.title,
        version=f"commit {one.table.commit[:7]}",
        engine="fsdp1",
        inputs=one.inputs,
        detect=lambda content: confidence(one, content),
        parse=lambda content: parse(one, content),
        format_setting=format_setting,
        complete=complete,
        rejects_unknown=closed,
        is_extra_key=known,
        keys_of="accelerate",
        rules=(validation_memory_rule(one.name),) if one.name in VALIDATES_AS_THE_TRAINER else (),
        own_settings=lambda parsed, settings, recipe: own_settings(parsed.program, settings, recipe),
        own_overrides=lambda content, overrides: with_own_overrides(one, content, overrides),
    )


@cache
def _on_megatron(name: str) -> Framework:
    """Return the reader of trainings with Megatron-LM, whose arguments the front end takes under its own names."""
    return msgspec.structs.replace(
        _on_trainer(name),
        engine="megatron",
        formatter_for=swift_megatron.formatter_for,
        complete=swift_megatron.complete,
        rejects_unknown=lambda key: False,
        is_extra_key=lambda key: True,
        keys_of=swift_megatron.KEY_MAP,
        own_settings=swift_megatron.written,
        derived_fields=("layout.dp_shard",),
    )
