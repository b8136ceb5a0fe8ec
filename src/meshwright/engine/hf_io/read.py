"""Loads the weights of a Hugging Face folder into any layout: each rank reads only the slices that it shards.

Tensors are filled in place, slice by slice; besides the weights there is never more than one slice in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from meshwright.engine.hf_io.find import FIELD, read_json
from meshwright.engine.hf_io.layout_map import Box, Shape, TensorLocation, local_views, locate_tensors
from meshwright.engine.hf_io.name_map import FileTensor, NameMap, build_name_map
from meshwright.engine.hf_io.quantized import QuantizedFolder, open_folder
from meshwright.engine.model.build import builds_own_class
from meshwright.errors import InputError, closest, some
from meshwright.hub import CONFIG
from meshwright.models import require_known_class

# Keys of config.json that do not affect what a model computes, or that training changes on purpose.
IGNORED_CONFIG_KEYS = (
    *("architectures", "transformers_version", "dtype", "torch_dtype", "use_cache", "output_router_logits"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "max_position_embeddings", "task_specific"),
    *(
        "attention_dropout",
        "hidden_dropout",
        "residual_dropout",
        "embedding_dropout",
        "resid_pdrop",
        "embd_pdrop",
        "attn_pdrop",
        "rescale_prenorm_residual",
    ),
    *("router_aux_loss_coef", "aux_loss_alpha", "output_attentions", "output_hidden_states", "return_dict"),
)


@dataclass(frozen=True)
class LoadReport:
    """What a rank loaded from a folder."""

    folder: Path
    read: int  # file tensors, in full or in part
    bytes: int
    kept_initial: tuple[str, ...]  # parameters missing in the folder: they keep their random initialization
    ignored: tuple[str, ...]  # tensors in the folder that the model does not use
    config_differs: tuple[str, ...]  # differences between config.json and the recipe's model


class FolderWeights:
    """The weights of a folder for a model; `fill` copies them into a rank's part of a tensor."""

    def __init__(self, folder: Path, names: NameMap) -> None:
        self.folder, self.names = folder, names
        self.config = read_json(folder / CONFIG)
        if not builds_own_class():
            require_known_class(self.config, str(folder), FIELD)
        self.files = open_folder(folder)
        self.ignored: list[str] = []
        self.file_tensors = self._group_by_name(self.files.file_of)
        self._check_complete()
        self._read: set[str] = set()
        self._missing: dict[str, None] = {}

    def locate(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> dict[str, TensorLocation]:
        """Return the locations of a stage's tensors in the model, by their names in the stage."""
        stored = {name: tuple(tensor.shape) for name, tensor in parameters}
        return locate_tensors(stored, self.names.shapes, self.names.tied)

    @torch.no_grad()
    def fill(self, tensor: torch.Tensor, name: str, location: TensorLocation | None) -> bool:
        """Fill this rank's part of a tensor; return False if the folder does not have it."""
        if location is None or location.name not in self.file_tensors:
            self._missing[name] = None
            return False
        file_tensors = self.file_tensors[location.name]
        boxes = self._boxes(location.name, file_tensors)
        for view, target in local_views(tensor, location):
            for file_tensor, box in zip(file_tensors, boxes, strict=True):
                self._copy(view, target, file_tensor, box)
        return True

    def report(self) -> LoadReport:
        """Return what was loaded so far."""
        return LoadReport(
            self.folder,
            len(self._read),
            self.files.bytes_read,
            tuple(self._missing),
            tuple(self.ignored),
            tuple(_differences(self.folder, self.config, self.names.config)),
        )

    def _group_by_name(self, names: Iterable[str]) -> dict[str, list[FileTensor]]:
        """Group file tensors by model tensor, in order."""
        found: dict[str, list[FileTensor]] = {}
        unknown: list[str] = []
        composite = "text_config" in self.config or "llm_config" in self.config
        for key in names:
            match = self.names.find(key)
            if match is not None:
                found.setdefault(match[0], []).append(match[1])
            elif self.names.is_ignorable(key, composite):
                self.ignored.append(key)
            else:
                unknown.append(key)
        if unknown:
            raise self._unknown(sorted(unknown))
        for name, file_tensors in found.items():
            file_tensors.sort(key=lambda file_tensor: (file_tensor.index or 0, file_tensor.source))
            self._check_parts(name, file_tensors)
        return found

    def _check_parts(self, name: str, file_tensors: Sequence[FileTensor]) -> None:
        """Check that every part occurs exactly once: no missing or duplicate expert, no tensor under two names."""
        if file_tensors[0].index is None and len(file_tensors) > file_tensors[0].sources:
            raise self._error(f"has {file_tensors[0].name} and {file_tensors[1].name}, which are both {name}")
        count = self.names.shapes[name][0] if file_tensors[0].index is not None else 1
        expected_parts = {
            (index if file_tensors[0].index is not None else None, source)
            for index in range(count)
            for source in range(file_tensors[0].sources)
        }
        found_parts = {(file_tensor.index, file_tensor.source) for file_tensor in file_tensors}
        if found_parts != expected_parts or len(file_tensors) != len(expected_parts):
            what = f"has {len(file_tensors)} tensors of {name} like {file_tensors[0].name}, not {len(expected_parts)}"
            raise self._error(what, *self._count_fix(len(file_tensors) // file_tensors[0].sources))

    def _count_fix(self, experts: int) -> tuple[str, ...]:
        return (f"architecture.experts={experts}", "download the folder again if files are missing")

    def _check_complete(self) -> None:
        missing = [name for name in self.names.shapes if name not in self.file_tensors and not name.startswith("mtp.")]
        if not missing:
            return
        reason = f"its {CONFIG} says model_type={self.config.get('model_type')}, the recipe's model is a "
        reason += str(self.names.config.model_type)
        fix: tuple[str, ...] = ("use the folder's model family in the recipe", "download the folder again")
        if missing == ["lm_head.weight"] and not self.config.get("tie_word_embeddings", True):
            classes = ", ".join(map(str, self.config.get("architectures") or ())) or "its class"
            reason = f"{classes} has no LM head: the folder is an embedding model, or a decoder without its head"
            fix = ("use the folder of the language model (…ForCausalLM)",)
        elif missing == ["lm_head.weight"]:
            reason = "its lm_head is tied to the embedding, but the recipe's model has an untied lm_head"
            fix = ("use a model with tie_word_embeddings=true in the recipe",)
        raise self._error(f"has no {some(missing)}; {reason}", *fix)

    def _unknown(self, keys: list[str]) -> InputError:
        reason = f"has {some(keys)}, which the recipe's model does not have"
        is_plain = not isinstance(self.files, QuantizedFolder)
        if is_plain and keys[0].endswith(("weight_scale_inv", "weight_scale", "_blocks", "_scales")):
            what = "has quantized weights, but no quantization_config in its config.json says how"
            return self._error(what, "download its config.json again", "use a folder with bf16 weights")
        near = closest(keys[0], self.names.shapes, 1)
        reason += f" (it has {near[0]})" if near else ""
        method = self.config.get("model_type")
        return self._error(
            f"{reason}; its {CONFIG} says model_type={method}", "use the folder's model family in the recipe"
        )

    def _boxes(self, name: str, file_tensors: Sequence[FileTensor]) -> list[Box]:
        """Return the slices of the model tensor that each file tensor covers."""
        full = self.names.shapes[name]
        if self.names.buffer_dtypes.get(name, torch.float32).is_floating_point:  # else a table of integers
            for file_tensor in file_tensors:
                self.files.require_floats(file_tensor.name)
        shapes = [self._shape(file_tensor, full) for file_tensor in file_tensors]
        boxes = []
        for file_tensor, shape in zip(file_tensors, shapes, strict=True):
            box = [slice(0, size) for size in shape]
            before = (
                s[file_tensor.dim] for b, s in zip(file_tensors, shapes, strict=True) if _precedes(b, file_tensor)
            )
            if box:
                start = sum(before)
                box[file_tensor.dim] = slice(start, start + shape[file_tensor.dim])
            if file_tensor.index is not None:
                box[0] = slice(file_tensor.index, file_tensor.index + 1)
            boxes.append(tuple(box))
        covers = tuple(max(box[dim].stop for box in boxes) for dim in range(len(full)))
        same_rank = all(len(shape) == len(full) for shape in shapes)
        if not same_rank or covers != full or sum(map(_volume, boxes)) != prod(full):
            raise self._wrong_shape(name, file_tensors, full)
        return boxes

    def _shape(self, file_tensor: FileTensor, full: Shape) -> Shape:
        shape = self.files.shape(file_tensor.name)
        if self._is_transposed(file_tensor, full):
            shape = (*shape[:-2], shape[-1], shape[-2])
        return shape if file_tensor.index is None else (1, *shape)

    def _is_transposed(self, file_tensor: FileTensor, full: Shape) -> bool:
        return file_tensor.may_be_transposed and self.files.shape(file_tensor.name) != full

    def _wrong_shape(self, name: str, file_tensors: Sequence[FileTensor], full: Shape) -> InputError:
        first, shape = file_tensors[0], self.files.shape(file_tensors[0].name)
        where = self.folder / self.files.file_of[first.name]
        expected = full if first.index is None else full[1:]
        reason = (
            f"{first.name} in {where} is {_format_shape(shape)}, but the recipe's model has {_format_shape(expected)}"
        )
        if first.sources > 1:
            reason += f" for {first.sources} such tensors in total"
        embeds = name.endswith(("embed_tokens.weight", "embeddings.weight", "wte.weight", "lm_head.weight"))
        if embeds and len(shape) == 2 and shape[1:] == full[1:]:
            return InputError(
                f"{reason}: the vocabulary sizes differ",
                field="architecture.vocab",
                value=full[0],
                fix=(f"architecture.vocab={shape[0]}",),
            )
        return InputError(
            reason, field=FIELD, value=str(self.folder), fix=("use the folder's model size in the recipe",)
        )

    def _copy(self, view: torch.Tensor, target: Box, file_tensor: FileTensor, box: Box) -> None:
        """Copy the overlap of a file tensor with the target slices."""
        overlap = [slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(target, box, strict=True)]
        if any(one.start >= one.stop for one in overlap):
            return
        self._read.add(file_tensor.name)
        to = view[tuple(_relative_slice(one, outer) for one, outer in zip(overlap, target, strict=True))]
        source_box = [_relative_slice(one, outer) for one, outer in zip(overlap, box, strict=True)]
        if file_tensor.index is not None:
            to, source_box = to[0], source_box[1:]
        if not source_box:
            to.copy_(self.files.read(file_tensor.name))
            return
        rows, transposed = source_box[0], self._is_transposed(file_tensor, tuple(one.stop for one in box))
        step = max(1, self.files.slice_bytes // max(1, to.nbytes // to.shape[0]))
        for first in range(rows.start, rows.stop, step):
            last = min(first + step, rows.stop)
            trailing = source_box[:0:-1] if transposed else source_box[1:]
            part = self.files.read(file_tensor.name, (slice(first, last), *trailing))
            part = part.transpose(1, 2) if transposed else part
            to[first - rows.start : last - rows.start].copy_(part)

    def _error(self, what: str, *fix: str) -> InputError:
        return InputError(f"{self.folder} {what}", field=FIELD, value=str(self.folder), fix=fix)


def load_weights(stages: Sequence[Any], folder: Path, config: Any) -> LoadReport:
    """Load the weights of a folder into existing stages; adapters are unchanged."""
    weights = FolderWeights(folder, build_name_map(config, mtp=any(stage.embedding_on_last_stage for stage in stages)))
    for stage in stages:
        parameters = dict(stage.named_parameters())
        tensors = {**parameters, **dict(stage.named_buffers())}
        where = weights.locate(tensors.items())
        for name, tensor in tensors.items():
            if name in where or name in parameters:  # other buffers are tables that are not saved
                weights.fill(tensor, name, where.get(name))
    weights.files.close()
    return weights.report()


def _language_values(config: Any) -> dict[str, Any]:
    """Return the language model's config values; in multimodal models tie_word_embeddings is in the outer config."""
    values: dict[str, Any] = config.get_text_config().to_dict()
    tied = getattr(config, "tie_word_embeddings", None)
    return values if tied is None else {**values, "tie_word_embeddings": tied}


def _differences(folder: Path, published: Mapping[str, Any], config: Any) -> list[str]:
    """Return the config values in which a folder differs from the model: they change what it computes."""
    from transformers import AutoConfig

    inner = published.get("text_config")
    text_values = inner if isinstance(inner, Mapping) else published
    try:  # both as transformers parses them: it normalizes some values
        theirs = _language_values(AutoConfig.from_pretrained(folder, trust_remote_code=False))
    except (ValueError, KeyError, OSError):  # a model type that transformers does not know
        theirs = dict(text_values)
    ours = _language_values(config)
    return [
        f"{name}: {theirs[name]} in the folder, {ours[name]} in the recipe's model"
        for name in sorted(text_values)
        if name in ours and name in theirs and name not in IGNORED_CONFIG_KEYS and theirs[name] != ours[name]
    ]


def _precedes(file_tensor: FileTensor, other: FileTensor) -> bool:
    return file_tensor.index == other.index and file_tensor.source < other.source


def _relative_slice(part: slice, outer: slice) -> slice:
    return slice(part.start - outer.start, part.stop - outer.start)


def _volume(box: Box) -> int:
    return prod(one.stop - one.start for one in box)


def _format_shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))
