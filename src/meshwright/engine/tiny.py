"""--tiny: scales a recipe to a laptop, with a model of the same structure and a layout for a few processes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from meshwright.engine.data import byte_level
from meshwright.engine.data.conversations import Conversation, detect_columns, parse_conversation
from meshwright.engine.data.files import find_rows
from meshwright.engine.data.row_errors import RowColumns, detects_columns
from meshwright.engine.data.tokenizers import FIELD
from meshwright.engine.model_families import family_of
from meshwright.engine.validate import data_ranks
from meshwright.errors import InputError
from meshwright.notes import note
from meshwright.recipes.capabilities import executed_values
from meshwright.recipes.overrides import change
from meshwright.recipes.types import Architecture, Kernels, Layout, Moe, Precision, Recipe, field_value, recipe_fields

SEQ_LENGTH = 64
LENGTH_ROWS = 200  # rows of the user's data that the length is chosen by
TURN_BYTES = 24  # role and special tokens of a message
STEPS = 20
MICRO_BATCHES = 4  # per rank and step, so that gradients accumulate and pipelines fill
LEARNING_RATE = {"pretrain": 3e-3, "sft": 3e-3, "peft": 1e-2}  # adapters on random weights learn slowly
OVERLAPS = ("ep_overlap", "shared_expert_overlap")
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


def tiny_recipe(
    recipe: Recipe, config: Any, world: int, pinned: Mapping[str, Any], shrink: bool = True
) -> tuple[Recipe, Any]:
    """Return recipe and model config scaled to a laptop and `world` processes; pinned values are kept.

    With shrink=False the model keeps its size: its weights come from a folder.
    """
    kept = {key: value for key, value in pinned.items() if not key.startswith("architecture.")}
    replace = msgspec.structs.replace
    family = family_of(recipe)
    layout = scaled_layout(recipe.layout, world, _section_values(kept, "layout"))
    if "layout.tp" in kept and "layout.sp" not in kept:
        layout = replace(layout, sp=layout.tp > 1)  # it follows tp, as in every plan; MoE layers cannot train without
    small = family.tiny(config, _layers(layout, family.layer_types(config))) if shrink else config
    if "layout.ep" not in kept:
        layout = replace(layout, ep=_common(layout.ep, _experts(small)))
    dp = data_ranks(layout, world)
    here = "." in recipe.data.dataset and Path(recipe.data.dataset).expanduser().is_file()  # the user's own data
    scaled = replace(
        recipe,
        architecture=Architecture(),
        layout=layout,
        data=replace(
            recipe.data,
            seq_length=_seq_length(recipe) if here else SEQ_LENGTH,
            dataset=recipe.data.dataset if here else "mock",
        ),
        train=replace(
            recipe.train,
            global_batch_size=max(MICRO_BATCHES, layout.pp) * layout.micro_batch_size * dp,
            steps=STEPS,
            epochs=recipe.train.epochs if here or "data.dataset" in kept else 0.0,  # random data has no end
            log_every=1,
        ),
        optimizer=replace(recipe.optimizer, lr=LEARNING_RATE[recipe.goal]),
        schedule=replace(recipe.schedule, warmup_steps=2, min_lr=0.0, decay_steps=0),
        # A CPU computes bf16 a hundred times slower than fp32, and has neither 8-bit nor captured kernels.
        precision=Precision(compute="fp32"),
        kernels=Kernels(loss=recipe.kernels.loss, deterministic=recipe.kernels.deterministic),
        moe=_moe(recipe.moe),
    )
    scaled = change(scaled, kept)[0]
    _note_changes(recipe, scaled, shrink)
    if dp > 1 and "train.global_batch_size" not in kept:
        _note_batch(scaled, dp)
    return scaled, small


def _note_batch(scaled: Recipe, dp: int) -> None:
    """Say that losses of trials on other ranks are of another batch."""
    batch = f"train.global_batch_size={scaled.train.global_batch_size}"
    note(f"{batch} is for {dp} data-parallel ranks; add it to a trial on other ranks to compare their losses")


def _seq_length(recipe: Recipe) -> int:
    """Return the shortest power of two at which the first answers of most of the user's conversations start.

    Half a token per byte of other tokenizers than the byte-level one is an upper bound for text.
    """
    data = recipe.data
    if recipe.goal == "pretrain" or data.images:
        return SEQ_LENGTH
    share = 1.0 if data.tokenizer in ("", byte_level.NAME) else 0.5
    try:
        rows = find_rows(Path(data.dataset).expanduser(), data.split)
        columns = RowColumns(detect_columns(rows.first(), data.columns, rows.name), detects_columns(data.columns))
        found = [parse_conversation(row, columns.of(row), where) for where, row in islice(rows, LENGTH_ROWS)]
    except InputError:  # train reports rows that cannot be read
        return SEQ_LENGTH
    sizes = sorted(_bytes_before_answer(one) for one in found if one.messages)
    if not sizes:
        return SEQ_LENGTH
    most = int(share * sizes[int(0.9 * (len(sizes) - 1))])
    return max(SEQ_LENGTH, min(1 << most.bit_length(), data.seq_length))


def _bytes_before_answer(conversation: Conversation) -> int:
    """Return about the bytes that a template writes before the first answer of a conversation."""
    messages = conversation.messages
    answer = next((i for i, one in enumerate(messages) if one["role"] == "assistant"), len(messages))
    texts = [one.get("content") for one in messages[:answer]]
    tools = len(msgspec.json.encode(conversation.tools, enc_hook=str)) if conversation.tools else 0
    return tools + sum(TURN_BYTES + len(msgspec.json.encode(one, enc_hook=str)) for one in texts)


def _note_changes(recipe: Recipe, scaled: Recipe, shrink: bool) -> None:
    """Print every value that --tiny changes, in one line."""
    values = {key: (field_value(recipe, key), field_value(scaled, key)) for key in recipe_fields()}
    changed = [
        f"{key} {_shown(old)} → {_shown(new)}"
        for key, (old, new) in values.items()
        if old != new and not key.startswith("architecture.") and not (key == "train.steps" and scaled.train.epochs)
    ]
    model = "trains a small random model of the same structure" if shrink else "keeps the model"
    note(f"--tiny {model} and changes {', '.join(changed)}; KEY=VALUE keeps a value" if changed else f"--tiny {model}")


def _shown(value: Any) -> str:
    if isinstance(value, bool | list | tuple | dict) or value == "":
        return json.dumps(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _section_values(values: Mapping[str, Any], section: str) -> dict[str, Any]:
    return {key.split(".")[1]: value for key, value in values.items() if key.startswith(f"{section}.")}


def _layers(layout: Layout, layer_types: int) -> int:
    """Return the tiny model's layers: at least two and one of each type, equally many per stage chunk."""
    chunks = layout.pp * layout.vp
    return chunks * max(1, -(-max(layer_types, 2) // chunks))


def _experts(config: Any) -> int:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return next((getattr(text, name) for name in EXPERTS if getattr(text, name, None)), 1)


def _moe(moe: Moe) -> Moe:
    """Return the same routing with what this engine executes."""
    return msgspec.structs.replace(moe, **{name: _executed(name) for name in ("dispatcher", *OVERLAPS)})


def _executed(field: str) -> Any:
    (value,) = executed_values(field, "meshwright") or ()
    return value


def scaled_layout(layout: Layout, world: int, typed: Mapping[str, Any] | None = None) -> Layout:
    """Return the layout scaled to `world` ranks around the values that the user typed."""
    kept = typed or {}
    sizes = _scaled_degrees(layout, world, kept)
    piped, stage = sizes["pp"] > 1, max(1, world // sizes["pp"])
    left = max(1, world // math.prod(sizes.values()))
    etp = int(kept.get("etp", _common(layout.etp, max(1, stage // kept.get("ep", 1)))))
    both = layout.cp_comm == "a2a+ring" and sizes["cp"] >= 4
    scaled = msgspec.structs.replace(
        layout,
        **sizes,
        vp=min(layout.vp, 2) if piped else 1,
        pp_schedule=layout.pp_schedule if piped else "1f1b",
        stage_layers=(),
        embedding_as_layer=False,
        head_as_layer=False,
        ep=_common(layout.ep, max(1, stage // etp)),
        etp=etp,
        dp_shard=-1,
        dp_replicate=_common(layout.dp_replicate, left),
        sp=layout.sp and sizes["tp"] > 1,
        cp_comm="a2a+ring" if both else layout.cp_comm.removeprefix("a2a+"),
        cp_inner=2 if both else 1,
        micro_batch_size=min(layout.micro_batch_size, 2),
        recompute_layers=min(layout.recompute_layers, 1),
        strategy="fsdp2" if layout.strategy == "megatron_fsdp" else layout.strategy,
    )
    return msgspec.structs.replace(scaled, **kept)


def _scaled_degrees(layout: Layout, world: int, kept: Mapping[str, Any]) -> dict[str, int]:
    """Return tp, pp and cp, doubled from 1 in turn as far as the recipe, `world` and typed degrees allow."""
    sizes = {axis: int(kept.get(axis, 1)) for axis in ("tp", "pp", "cp")}
    experts = kept.get("ep", 1) * kept.get("etp", 1)
    copies = kept.get("dp_replicate", 1) * max(1, kept.get("dp_shard", 1))
    grown = True
    while grown:
        grown = False
        for axis in (one for one in ("tp", "pp", "cp") if one not in kept):
            larger = {**sizes, axis: 2 * sizes[axis]}
            left, rest = divmod(world, math.prod(larger.values()))
            divides = rest == 0 and left % copies == 0 and world // larger["pp"] % experts == 0
            if divides and larger[axis] <= getattr(layout, axis):
                sizes, grown = larger, True
    return sizes


def _common(target: int, limit: int) -> int:
    """Return the largest power of two that divides `limit` and is at most `target`."""
    size = 1
    while size * 2 <= target and limit % (size * 2) == 0:
        size *= 2
    return size


def with_data_vocab(recipe: Recipe, config: Any, published: int) -> tuple[Recipe, Any]:
    """Return recipe and tiny config with a vocabulary for the data; a note says what differs from the tiny default.

    Text without a named tokenizer is read with the byte-level one, whose vocabulary fits; tokenized data keeps its ids.
    """
    from meshwright.engine.data.open_dataset import MOCK_NAMES, is_text, named_vocab

    data = recipe.data
    names = [name for name in (*data.blend, data.dataset, data.validation) if name and name not in MOCK_NAMES]
    if not names or not hasattr(config, "vocab_size"):
        return recipe, config
    if not data.tokenizer and recipe.goal == "pretrain" and any(is_text(name) for name in names):
        note(f"--tiny reads text with the byte-level tokenizer ({FIELD}=FOLDER for another)")
        recipe = msgspec.structs.replace(recipe, data=msgspec.structs.replace(data, tokenizer=byte_level.NAME))
    needed = max(named_vocab(recipe, name, published) for name in names)
    if needed > config.vocab_size:
        note(f"--tiny keeps a vocabulary of {needed} tokens, which {names[0]} needs")
        config.vocab_size = needed
    return recipe, config
