"""How each engine pads the samples of a fine-tuning: what its steps compute besides the samples' own tokens."""

from __future__ import annotations

from typing import Literal, NamedTuple

from meshwright.recipes.types import Engine, Recipe

PaddedTo = Literal["seq_length", "step", "micro_batch", "packed"]


class Padding(NamedTuple):
    """The width of a sample: data.seq_length, or the longest sample of a step or micro batch, rounded up."""

    to: PaddedTo
    multiple: int = 1


MICRO_BATCH_MULTIPLES: dict[str, int] = {
    "fsdp1": 1,  # DataCollatorWithPadding and DataCollatorForSeq2Seq of transformers: padding=True, the longest
    "deepspeed": 1,  # the same Trainer; LLaMA-Factory rounds up to 8, Axolotl to 64
    "automodel": 1,  # datasets/utils.py: default_collater, pad_within_micro; datasets have padding="do_not_pad"
    "megatron": 16,  # Megatron-Bridge's GPTSFTDataset: pad_seq_length_to_mult=16
}
"""Engines whose collators pad to the longest sample of a micro batch, and the multiple they round its length up to."""
STEP_MULTIPLE = 64  # to which our engine rounds up the longest sample of a step that is grouped by length


def padding_of(recipe: Recipe, engine: Engine) -> Padding:
    """Return how an engine pads the samples of a recipe; memory is estimated at data.seq_length, the longest."""
    data, layout = recipe.data, recipe.layout
    if data.packing or recipe.goal == "pretrain":
        return Padding("packed")
    if engine == "meshwright":
        return Padding("step", STEP_MULTIPLE) if data.group_by_length else Padding("seq_length")
    if engine not in MICRO_BATCH_MULTIPLES or data.pad_to_max_length:
        return Padding("seq_length")
    if engine == "megatron" and (layout.pp > 1 or layout.ep > 1):  # ConfigContainer.validate: one static length
        return Padding("seq_length")
    return Padding("micro_batch", MICRO_BATCH_MULTIPLES[engine])
