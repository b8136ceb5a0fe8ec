"""Maps tensor names between transformers models and hub files.

Hub files rename some tensors, or store one model tensor as many (one per expert). transformers' conversion tables are
used here in both directions, without its loader, which needs full tensors in memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from meshwright.engine.model.build import build_model
from meshwright.engine.model.mtp import mtp_depth
from meshwright.engine.patching import symbol
from meshwright.errors import InputError
from meshwright.recipes.engine_models import has_own_layers

Shape = tuple[int, ...]
LOADING = "transformers.core_model_loading"

# Prefixes of a text model inside a multimodal checkpoint, in older and newer transformers.
INNER_MODELS = (
    (r"^model\.language_model\.", "model."),
    (r"^language_model\.model\.", "model."),
    (r"^language_model\.lm_head\.", "lm_head."),
    (r"^language_model\.", "model."),
    (r"^model\.text_model\.", "model."),
    (r"^thinker\.model\.", "model."),
    (r"^thinker\.lm_head\.", "lm_head."),
)
# DeepSeek and GLM store multi-token prediction as an extra layer; our names are those of Qwen.
MTP_LAYER_NAMES = {
    "enorm.": "pre_fc_norm_embedding.",
    "hnorm.": "pre_fc_norm_hidden.",
    "eh_proj.": "fc.",
    "shared_head.norm.": "norm.",
}
STACKED_EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")  # transposed in files of Qwen3-VL's experts
ALWAYS_IGNORED = (r"rotary_emb\.inv_freq$", r"\.attn\.masked_bias$")  # tables in older files


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file, and the part of the model tensor that it represents.

    With `index` it is one of many, stacked along a new first dimension; `source` of `sources` are concatenated along
    dimension `dim` of the model tensor. If `may_be_transposed`, its last two dimensions are swapped unless its shape is
    the model's.
    """

    name: str
    index: int | None = None
    source: int = 0
    sources: int = 1
    dim: int = 0
    may_be_transposed: bool = False


@dataclass(frozen=True)
class NameMap:
    """Names and shapes of a model's tensors, for reading and writing its files; no weights."""

    model: Any = field(repr=False)  # on the meta device
    shapes: dict[str, Shape]
    tied: Mapping[str, str]  # tied names and the tensors they share
    buffer_dtypes: Mapping[str, torch.dtype]  # buffers keep the model's dtype, not the recipe's

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def text(self) -> Any:
        """The language model's config, which is nested in multimodal models."""
        return self.model.config.get_text_config()

    @cached_property
    def _transforms(self) -> tuple[list[Any], list[Any]]:
        return _by_type(_conversion_mapping()(self.model))

    @cached_property
    def _reversed(self) -> tuple[list[Any], list[Any]]:
        prefix_change = symbol(LOADING, "PrefixChange")
        found = _conversion_mapping()(self.model, add_legacy=False)
        return _by_type([t.reverse_transform() for t in reversed(found) if not isinstance(t, prefix_change)])

    @cached_property
    def _ignored_patterns(self) -> list[re.Pattern[str]]:
        """Patterns of tensor names that files may contain and the model does not use."""
        ignored = (getattr(m, "_keys_to_ignore_on_load_unexpected", None) or () for m in self.model.modules())
        return [re.compile(pattern) for pattern in (*ALWAYS_IGNORED, *(p for patterns in ignored for p in patterns))]

    def find(self, key: str) -> tuple[str, FileTensor] | None:
        """Return the model tensor that a file tensor belongs to, and which part of it."""
        unsupported: InputError | None = None
        for candidate in self._candidate_names(key):
            try:
                name, file_tensor = self._convert(candidate)
            except InputError as error:
                unsupported = error
                continue
            if name in self.shapes:
                return name, replace(file_tensor, name=key)
        if key in self.shapes:  # saved under the model's own names, which a conversion renames once more
            return key, FileTensor(key)
        if unsupported is not None:
            raise unsupported
        return None

    def is_ignorable(self, key: str, composite: bool) -> bool:
        """Return whether an unmatched file tensor may be skipped: other parts of a multimodal model, or a table."""
        if composite and not any(re.search(pattern, key) for pattern, _ in INNER_MODELS):
            return True
        tied = any(candidate in self.tied for candidate in self._candidate_names(key))
        return tied or self._mtp_name(key) is not None or any(pattern.search(key) for pattern in self._ignored_patterns)

    def file_tensors(self, name: str) -> list[FileTensor]:
        """Return the file tensors of a model tensor, in hub format."""
        rename_source_key = symbol(LOADING, "rename_source_key")
        renamings, converters = self._reversed
        named = self._hub_mtp(name)
        key, pattern = rename_source_key(named, renamings, converters, reverse=True)
        if pattern is None:
            return [FileTensor(key)]
        converter = next(c for c in converters if pattern in c.source_patterns)
        forward = converter.reverse_transform()
        try:
            stacked, dim = _operations(forward, name)
        except InputError:
            if has_own_layers(self.text.model_type):
                raise
            return [FileTensor(name)]  # transformers loads the model's own names too
        targets = converter.target_patterns
        if not all("*" in target for target in targets) == stacked or targets[0] not in key:
            raise _unsupported_conversion(name, forward)
        keys = [key.replace(targets[0], target) for target in targets]
        indices = range(self.shapes[name][0]) if stacked else (None,)
        return [
            FileTensor(one if index is None else one.replace("*", str(index)), index, source, len(keys), dim)
            for index in indices
            for source, one in enumerate(keys)
        ]

    def _candidate_names(self, key: str) -> Iterable[str]:
        yield key
        mtp_name = self._mtp_name(key)
        if mtp_name is not None:
            yield mtp_name
        for pattern, plain in INNER_MODELS:
            if re.search(pattern, key):
                yield re.sub(pattern, plain, key, count=1)

    def _convert(self, key: str) -> tuple[str, FileTensor]:
        rename_source_key = symbol(LOADING, "rename_source_key")
        renamings, converters = self._transforms
        name, pattern = rename_source_key(key, renamings, converters, self.model.base_model_prefix, self.shapes)
        if pattern is None:
            return name, FileTensor(key, may_be_transposed=name.endswith(STACKED_EXPERTS))
        converter = next(c for c in converters if pattern in c.source_patterns)
        stacked, dim = _operations(converter, name)
        number = re.search(pattern.replace("*", r"(\d+)"), key) if stacked else None
        index = int(number.group(1)) if number is not None else None
        sources = converter.source_patterns
        return name, FileTensor(key, index, sources.index(pattern), len(sources), dim, _may_be_transposed(converter))

    def _mtp_name(self, key: str) -> str | None:
        """Return our multi-token prediction name of a tensor in an extra layer; None for all others."""
        matched = re.search(r"(?:^|\.)layers\.(\d+)\.(.+)$", key)
        if matched is None or key.startswith("mtp.") or not mtp_depth(self.text):
            return None
        number, rest = int(matched.group(1)), matched.group(2)
        if number < self.text.num_hidden_layers:
            return None
        for hub_name, our_name in MTP_LAYER_NAMES.items():
            if rest.startswith(hub_name):
                return f"mtp.{our_name}{rest.removeprefix(hub_name)}"
        return f"mtp.layers.{number - self.text.num_hidden_layers}.{rest}"

    def _hub_mtp(self, name: str) -> str:
        """Return the hub name of a multi-token prediction tensor; other names unchanged."""
        if not name.startswith("mtp.") or self.text.model_type not in MTP_AS_LAYERS:
            return name
        depth, rest = self.text.num_hidden_layers, name.removeprefix("mtp.")
        for hub_name, our_name in MTP_LAYER_NAMES.items():
            if rest.startswith(our_name):
                return f"model.layers.{depth}.{hub_name}{rest.removeprefix(our_name)}"
        number, rest = rest.removeprefix("layers.").split(".", 1)
        return f"model.layers.{depth + int(number)}.{rest}"


MTP_AS_LAYERS = ("deepseek_v3", "glm4_moe")


def _conversion_mapping() -> Any:
    return symbol("transformers.conversion_mapping", "get_model_conversion_mapping")


def _by_type(transforms: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return transformers' renamings and its converters, each in their order."""
    renaming, converter = symbol(LOADING, "WeightRenaming"), symbol(LOADING, "WeightConverter")
    return [t for t in transforms if isinstance(t, renaming)], [t for t in transforms if isinstance(t, converter)]


def build_name_map(config: Any, mtp: bool = False) -> NameMap:
    """Return the name map of a config's language model, optionally with multi-token prediction."""
    return name_map_of_model(build_model(config, torch.float32, mtp))


def name_map_of_model(model: nn.Module) -> NameMap:
    """Return the name map of a transformers model on any device."""
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    state = model.state_dict()
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return NameMap(
        model,
        {name: tuple(tensor.shape) for name, tensor in state.items() if name not in tied},
        tied,
        {name: tensor.dtype for name, tensor in state.items() if name not in parameters},
    )


def _operations(converter: Any, name: str) -> tuple[bool, int]:
    """Return whether a converter stacks tensors along a new first dimension, and its concatenation dimension."""
    operations = [type(one).__name__ for one in converter.operations]
    stacked = operations[:1] == ["MergeModulelist"] and converter.operations[0].dim == 0
    rest = converter.operations[1:] if stacked else converter.operations
    if not rest and stacked and len(converter.source_patterns) == 1:
        return True, 0
    if len(rest) == 1 and type(rest[0]).__name__ == "Concatenate":
        return stacked, int(rest[0].dim)
    if _may_be_transposed(converter):
        return False, 0
    raise _unsupported_conversion(name, converter)


def _may_be_transposed(converter: Any) -> bool:
    """Return whether some files transpose the stacked matrices; we always write the model's orientation."""
    only = converter.operations[0]
    transposes = len(converter.operations) == 1 and type(only).__name__ == "Transpose" and only.check_dims
    return transposes and {only.dim0, only.dim1} == {1, 2} and len(converter.source_patterns) == 1


def _unsupported_conversion(name: str, converter: Any) -> InputError:
    operations = ", ".join(type(one).__name__ for one in converter.operations)
    return InputError(
        f"the hub files of this model store {name} in an unsupported form ({operations})",
        field="pretrained",
        fix=("load the folder with transformers and save it with save_original_format=False",),
    )
