"""Weights of a Hugging Face folder into any layout: each rank reads the slices of the tensors that it holds.

A tensor is filled in place, one slice after the other; beside the weights there is never more than one slice in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from meshwright.engine.hf_io.files import Files
from meshwright.engine.hf_io.find import CONFIG, FIELD, read_json
from meshwright.engine.hf_io.layout_map import Box, Place, Shape, pieces, places
from meshwright.engine.hf_io.name_map import Block, Described, describe
from meshwright.errors import InputError, closest, some

SLICE = 1 << 26  # bytes read at once: bounds the memory beside the weights
# Values of a config.json that say nothing about the numbers a model computes, or that training changes on purpose.
UNTOLD = (
    *("architectures", "transformers_version", "dtype", "torch_dtype", "use_cache", "output_router_logits"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "max_position_embeddings", "task_specific"),
    *("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "rescale_prenorm_residual"),
    *("router_aux_loss_coef", "aux_loss_alpha", "output_attentions", "output_hidden_states", "return_dict"),
)


@dataclass(frozen=True)
class Loaded:
    """What a rank read from a folder."""

    folder: Path
    read: int  # tensors of the files, whole or in part
    bytes: int
    kept_initial: tuple[str, ...]  # parameters that the folder does not hold: they start as the recipe's seed says
    ignored: tuple[str, ...]  # tensors of the folder that the model has no use for
    config_differs: tuple[str, ...]  # values of config.json other than the recipe's model has


class Weights:
    """A folder opened for a model; `fill` puts its numbers into what a rank holds of a tensor."""

    def __init__(self, folder: Path, described: Described) -> None:
        self.folder, self.described = folder, described
        self.config = read_json(folder / CONFIG)
        _refuse_quantized(folder, self.config)
        self.files = Files(folder)
        self.ignored: list[str] = []
        self.blocks = self._sorted(self.files.where)
        self._check_complete()
        self._read: set[str] = set()
        self._kept: dict[str, None] = {}

    def places_of(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Place]:
        """Where the tensors of a stage lie in the model, by their names in the stage."""
        stored = {name: tuple(tensor.shape) for name, tensor in parameters}
        return places(stored, self.described.shapes, self.described.tied)

    @torch.no_grad()
    def fill(self, tensor: torch.Tensor, name: str, place: Place | None) -> bool:
        """Fills this rank's part of a tensor; says no where the folder does not hold it."""
        if place is None or place.name not in self.blocks:
            self._kept[name] = None
            return False
        blocks = self.blocks[place.name]
        boxes = self._boxes(place.name, blocks)
        for view, wanted in pieces(tensor, place):
            for block, box in zip(blocks, boxes, strict=True):
                self._copy(view, wanted, block, box)
        return True

    def report(self) -> Loaded:
        """What was read so far."""
        return Loaded(
            self.folder,
            len(self._read),
            self.files.bytes_read,
            tuple(self._kept),
            tuple(self.ignored),
            tuple(_differences(self.folder, self.config, self.described.config)),
        )

    def _sorted(self, names: Iterable[str]) -> dict[str, list[Block]]:
        """The tensors of the files by the model's tensor that they belong to, in their order in it."""
        found: dict[str, list[Block]] = {}
        unknown: list[str] = []
        composite = "text_config" in self.config or "llm_config" in self.config
        for key in names:
            whose = self.described.find(key)
            if whose is not None:
                found.setdefault(whose[0], []).append(whose[1])
            elif self.described.is_left(key, composite):
                self.ignored.append(key)
            else:
                unknown.append(key)
        if unknown:
            raise self._unknown(sorted(unknown))
        for name, blocks in found.items():
            blocks.sort(key=lambda block: (block.index or 0, block.source))
            self._check_blocks(name, blocks)
        return found

    def _check_blocks(self, name: str, blocks: Sequence[Block]) -> None:
        """Every part once: no expert missing, none twice, no tensor under two names."""
        if blocks[0].index is None and len(blocks) > blocks[0].sources:
            raise self._error(f"holds {blocks[0].name} and {blocks[1].name}, which are both {name}")
        count = self.described.shapes[name][0] if blocks[0].index is not None else 1
        wanted = {
            (index if blocks[0].index is not None else None, source)
            for index in range(count)
            for source in range(blocks[0].sources)
        }
        has = {(block.index, block.source) for block in blocks}
        if has != wanted or len(blocks) != len(wanted):
            what = f"holds {len(blocks)} tensors of {name} like {blocks[0].name}, and the model has {len(wanted)}"
            raise self._error(what, *self._count_fix(len(blocks) // blocks[0].sources))

    def _count_fix(self, experts: int) -> tuple[str, ...]:
        return (f"architecture.experts={experts}", "download the folder again if files are missing")

    def _check_complete(self) -> None:
        missing = [name for name in self.described.shapes if name not in self.blocks and not name.startswith("mtp.")]
        if not missing:
            return
        kinds = f"its {CONFIG} says model_type={self.config.get('model_type')}, the recipe's model is a "
        kinds += str(self.described.config.model_type)
        fix: tuple[str, ...] = ("a model of the folder's kind in the recipe", "download the folder again")
        if missing == ["lm_head.weight"]:
            kinds = "its head shares the weights of the embedding, and the recipe's model has a head of its own"
            fix = ("a model with tie_word_embeddings=true in the recipe",)
        raise self._error(f"does not hold {some(missing)}; {kinds}", *fix)

    def _unknown(self, keys: list[str]) -> InputError:
        reason = f"holds {some(keys)}, which the recipe's model has not"
        if keys[0].endswith("weight_scale_inv") or keys[0].endswith(("_blocks", "_scales")):
            return self._error("holds quantized weights, which are not read", "start from a folder with bf16 weights")
        near = closest(keys[0], self.described.shapes, 1)
        reason += f" (it has {near[0]})" if near else ""
        kind = self.config.get("model_type")
        return self._error(
            f"{reason}; its {CONFIG} says model_type={kind}", "a model of the folder's kind in the recipe"
        )

    def _boxes(self, name: str, blocks: Sequence[Block]) -> list[Box]:
        """The box of the model's tensor that each tensor of the files is."""
        whole = self.described.shapes[name]
        shapes = [self._shape(block, whole) for block in blocks]
        boxes = []
        for block, shape in zip(blocks, shapes, strict=True):
            box = [slice(0, size) for size in shape]
            before = (s[block.dim] for b, s in zip(blocks, shapes, strict=True) if _same_row(b, block))
            if box:
                start = sum(before)
                box[block.dim] = slice(start, start + shape[block.dim])
            if block.index is not None:
                box[0] = slice(block.index, block.index + 1)
            boxes.append(tuple(box))
        covers = tuple(max(box[dim].stop for box in boxes) for dim in range(len(whole)))
        alike = all(len(shape) == len(whole) for shape in shapes)
        if not alike or covers != whole or sum(map(_volume, boxes)) != prod(whole):
            raise self._wrong_shape(name, blocks, whole)
        return boxes

    def _shape(self, block: Block, whole: Shape) -> Shape:
        self.files.require_floats(block.name)
        shape = self.files.shape(block.name)
        if self._is_turned(block, whole):
            shape = (*shape[:-2], shape[-1], shape[-2])
        return shape if block.index is None else (1, *shape)

    def _is_turned(self, block: Block, whole: Shape) -> bool:
        return block.may_be_turned and self.files.shape(block.name) != whole

    def _wrong_shape(self, name: str, blocks: Sequence[Block], whole: Shape) -> InputError:
        first, shape = blocks[0], self.files.shape(blocks[0].name)
        where = self.folder / self.files.where[first.name]
        expected = whole if first.index is None else whole[1:]
        reason = f"{first.name} in {where} is {_spelt(shape)}, and the recipe's model has {_spelt(expected)}"
        if first.sources > 1:
            reason += f" for {first.sources} such tensors together"
        embeds = name.endswith(("embed_tokens.weight", "embeddings.weight", "wte.weight", "lm_head.weight"))
        if embeds and len(shape) == 2 and shape[1:] == whole[1:]:
            return InputError(
                f"{reason}: the vocabularies differ",
                field="architecture.vocab",
                value=whole[0],
                fix=(f"architecture.vocab={shape[0]}",),
            )
        return InputError(
            reason, field=FIELD, value=str(self.folder), fix=("a model of the folder's size in the recipe",)
        )

    def _copy(self, view: torch.Tensor, wanted: Box, block: Block, box: Box) -> None:
        """Copies what a tensor of the files has of what is wanted."""
        both = [slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(wanted, box, strict=True)]
        if any(one.start >= one.stop for one in both):
            return
        self._read.add(block.name)
        to = view[tuple(_inside(one, outer) for one, outer in zip(both, wanted, strict=True))]
        there = [_inside(one, outer) for one, outer in zip(both, box, strict=True)]
        if block.index is not None:
            to, there = to[0], there[1:]
        if not there:
            to.copy_(self.files.read(block.name))
            return
        rows, turned = there[0], self._is_turned(block, tuple(one.stop for one in box))
        step = max(1, SLICE // max(1, to.nbytes // to.shape[0]))
        for first in range(rows.start, rows.stop, step):
            last = min(first + step, rows.stop)
            others = there[:0:-1] if turned else there[1:]
            part = self.files.read(block.name, (slice(first, last), *others))
            part = part.transpose(1, 2) if turned else part
            to[first - rows.start : last - rows.start].copy_(part)

    def _error(self, what: str, *fix: str) -> InputError:
        return InputError(f"{self.folder} {what}", field=FIELD, value=str(self.folder), fix=fix)


def load_weights(stages: Sequence[Any], folder: Path, config: Any) -> Loaded:
    """Fills stages that exist already with the weights of a folder; adapters stay as they are."""
    weights = Weights(folder, describe(config, mtp=any(stage.embedding_at_end for stage in stages)))
    for stage in stages:
        parameters = dict(stage.named_parameters())
        tensors = {**parameters, **dict(stage.named_buffers())}
        where = weights.places_of(tensors.items())
        for name, tensor in tensors.items():
            if name in where or name in parameters:  # other buffers are tables that no file holds
                weights.fill(tensor, name, where.get(name))
    weights.files.close()
    return weights.report()


def _refuse_quantized(folder: Path, config: Mapping[str, Any]) -> None:
    settings = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if settings:
        kind = settings.get("quant_method", "fewer bits") if isinstance(settings, Mapping) else "fewer bits"
        raise InputError(
            f"the weights in {folder} are quantized ({kind}), and training reads bf16, fp16 or fp32 weights",
            field=FIELD,
            value=str(folder),
            fix=("start from the folder of the same model with bf16 weights",),
        )


def _language_values(config: Any) -> dict[str, Any]:
    """What a config says of the language model; of a model that sees the whole says whether its head is tied."""
    values: dict[str, Any] = config.get_text_config().to_dict()
    tied = getattr(config, "tie_word_embeddings", None)
    return values if tied is None else {**values, "tie_word_embeddings": tied}


def _differences(folder: Path, published: Mapping[str, Any], config: Any) -> list[str]:
    """Values in which a folder's config differs from the model's: their numbers would come out otherwise."""
    from transformers import AutoConfig

    inner = published.get("text_config")
    said = inner if isinstance(inner, Mapping) else published
    try:  # both as transformers reads them: it spells some values anew
        theirs = _language_values(AutoConfig.from_pretrained(folder, trust_remote_code=False))
    except (ValueError, KeyError, OSError):  # a model type that only we know
        theirs = dict(said)
    ours = _language_values(config)
    return [
        f"{name}: {theirs[name]} in the folder, {ours[name]} in the recipe's model"
        for name in sorted(said)
        if name in ours and name in theirs and name not in UNTOLD and theirs[name] != ours[name]
    ]


def _same_row(block: Block, other: Block) -> bool:
    return block.index == other.index and block.source < other.source


def _inside(part: slice, outer: slice) -> slice:
    return slice(part.start - outer.start, part.stop - outer.start)


def _volume(box: Box) -> int:
    return prod(one.stop - one.start for one in box)


def _spelt(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))
