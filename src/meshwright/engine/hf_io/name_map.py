"""What a model's tensors are called: by transformers, and in the files of the hub.

Files spell some tensors otherwise, or hold one tensor of the model as many (an expert each). transformers knows how;
here its tables are read in both directions, without its loader, which wants whole tensors.
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

Shape = tuple[int, ...]
LOADING = "transformers.core_model_loading"

# A text model inside the checkpoint of a larger one, in the spellings of older and newer transformers.
INNER_MODELS = (
    (r"^model\.language_model\.", "model."),
    (r"^language_model\.model\.", "model."),
    (r"^language_model\.lm_head\.", "lm_head."),
    (r"^language_model\.", "model."),
    (r"^model\.text_model\.", "model."),
    (r"^thinker\.model\.", "model."),
    (r"^thinker\.lm_head\.", "lm_head."),
)
# DeepSeek and GLM keep multi-token prediction as one more layer; ours is named as Qwen's is.
FURTHER_LAYER = {
    "enorm.": "pre_fc_norm_embedding.",
    "hnorm.": "pre_fc_norm_hidden.",
    "eh_proj.": "fc.",
    "shared_head.norm.": "norm.",
}
ALWAYS_LEFT = (r"rotary_emb\.inv_freq$", r"\.attn\.masked_bias$")  # tables that older files hold


@dataclass(frozen=True)
class Block:
    """A tensor of the files, and which part of a model's tensor it is.

    With `index` it is one of many stacked along a new first dimension; `source` of `sources` lie one behind the other
    along dimension `dim` of the whole. One that `may_be_turned` has its last two dimensions the other way round, unless
    its shape is the model's.
    """

    name: str
    index: int | None = None
    source: int = 0
    sources: int = 1
    dim: int = 0
    may_be_turned: bool = False


@dataclass(frozen=True)
class Described:
    """What is to be known of a model to read and write its files; it holds no weights."""

    model: Any = field(repr=False)  # on the meta device
    shapes: dict[str, Shape]
    tied: Mapping[str, str]  # names without weights of their own, and whose they share
    kept: Mapping[str, torch.dtype]  # buffers: their format is the model's, not the recipe's

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def text(self) -> Any:
        """The language model's config: in a composite model not the outermost."""
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
    def _left(self) -> list[re.Pattern[str]]:
        """Names that files may hold and the model has no use for."""
        own = (getattr(m, "_keys_to_ignore_on_load_unexpected", None) or () for m in self.model.modules())
        return [re.compile(pattern) for pattern in (*ALWAYS_LEFT, *(p for patterns in own for p in patterns))]

    def find(self, key: str) -> tuple[str, Block] | None:
        """The model's tensor that a tensor of the files belongs to, and which part of it it is."""
        for spelling in self._spellings(key):
            name, block = self._renamed(spelling)
            if name in self.shapes:
                return name, replace(block, name=key)
        return None

    def is_left(self, key: str, composite: bool) -> bool:
        """Whether a tensor that belongs to nothing may stay in its file: a model's other parts, or a table."""
        if composite and not any(re.search(pattern, key) for pattern, _ in INNER_MODELS):
            return True
        tied = any(spelling in self.tied for spelling in self._spellings(key))
        return tied or self._further_layer(key) is not None or any(pattern.search(key) for pattern in self._left)

    def spread(self, name: str) -> list[Block]:
        """The tensors that hold a model's tensor in the files of the hub."""
        rename_source_key = symbol(LOADING, "rename_source_key")
        renamings, converters = self._reversed
        named = self._hub_mtp(name)
        key, pattern = rename_source_key(named, renamings, converters, reverse=True)
        if pattern is None:
            return [Block(key)]
        converter = next(c for c in converters if pattern in c.source_patterns)
        forward = converter.reverse_transform()
        stacked, dim = _operations(forward, name)
        targets = converter.target_patterns
        if not all("*" in target for target in targets) == stacked or targets[0] not in key:
            raise _not_offered(name, forward)
        spelt = [key.replace(targets[0], target) for target in targets]
        indices = range(self.shapes[name][0]) if stacked else (None,)
        return [
            Block(one if index is None else one.replace("*", str(index)), index, source, len(spelt), dim)
            for index in indices
            for source, one in enumerate(spelt)
        ]

    def _spellings(self, key: str) -> Iterable[str]:
        yield key
        further = self._further_layer(key)
        if further is not None:
            yield further
        for pattern, plain in INNER_MODELS:
            if re.search(pattern, key):
                yield re.sub(pattern, plain, key, count=1)

    def _renamed(self, key: str) -> tuple[str, Block]:
        rename_source_key = symbol(LOADING, "rename_source_key")
        renamings, converters = self._transforms
        name, pattern = rename_source_key(key, renamings, converters, self.model.base_model_prefix, self.shapes)
        if pattern is None:
            return name, Block(key)
        converter = next(c for c in converters if pattern in c.source_patterns)
        stacked, dim = _operations(converter, name)
        number = re.search(pattern.replace("*", r"(\d+)"), key) if stacked else None
        index = int(number.group(1)) if number is not None else None
        sources = converter.source_patterns
        return name, Block(key, index, sources.index(pattern), len(sources), dim, _may_be_turned(converter))

    def _further_layer(self, key: str) -> str | None:
        """A tensor of the layer after the last as a tensor of our multi-token prediction; None for all others."""
        matched = re.search(r"(?:^|\.)layers\.(\d+)\.(.+)$", key)
        if matched is None or key.startswith("mtp.") or not mtp_depth(self.text):
            return None
        number, rest = int(matched.group(1)), matched.group(2)
        if number < self.text.num_hidden_layers:
            return None
        for theirs, ours in FURTHER_LAYER.items():
            if rest.startswith(theirs):
                return f"mtp.{ours}{rest.removeprefix(theirs)}"
        return f"mtp.layers.{number - self.text.num_hidden_layers}.{rest}"

    def _hub_mtp(self, name: str) -> str:
        """The hub's name of a tensor of multi-token prediction; other names stay."""
        if not name.startswith("mtp.") or self.text.model_type not in AS_LAYERS:
            return name
        depth, rest = self.text.num_hidden_layers, name.removeprefix("mtp.")
        for theirs, ours in FURTHER_LAYER.items():
            if rest.startswith(ours):
                return f"model.layers.{depth}.{theirs}{rest.removeprefix(ours)}"
        number, rest = rest.removeprefix("layers.").split(".", 1)
        return f"model.layers.{depth + int(number)}.{rest}"


AS_LAYERS = ("deepseek_v3", "glm4_moe")


def _conversion_mapping() -> Any:
    return symbol("transformers.conversion_mapping", "get_model_conversion_mapping")


def _by_type(transforms: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return transformers' renamings and its converters, each in their order."""
    renaming, converter = symbol(LOADING, "WeightRenaming"), symbol(LOADING, "WeightConverter")
    return [t for t in transforms if isinstance(t, renaming)], [t for t in transforms if isinstance(t, converter)]


def describe(config: Any, mtp: bool = False) -> Described:
    """What is to be known of the language model of a config; with `mtp` it has multi-token prediction."""
    return describe_model(build_model(config, torch.float32, mtp))


def describe_model(model: nn.Module) -> Described:
    """What is to be known of a transformers model, on any device."""
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    state = model.state_dict()
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return Described(
        model,
        {name: tuple(tensor.shape) for name, tensor in state.items() if name not in tied},
        tied,
        {name: tensor.dtype for name, tensor in state.items() if name not in parameters},
    )


def _operations(converter: Any, name: str) -> tuple[bool, int]:
    """Whether a converter stacks tensors along a new first dimension, and along which it puts sources together."""
    kinds = [type(one).__name__ for one in converter.operations]
    stacked = kinds[:1] == ["MergeModulelist"] and converter.operations[0].dim == 0
    rest = converter.operations[1:] if stacked else converter.operations
    if not rest and stacked and len(converter.source_patterns) == 1:
        return True, 0
    if len(rest) == 1 and type(rest[0]).__name__ == "Concatenate":
        return stacked, int(rest[0].dim)
    if _may_be_turned(converter):
        return False, 0
    raise _not_offered(name, converter)


def _may_be_turned(converter: Any) -> bool:
    """Whether stacked matrices lie the other way round in some files; written, they lie as they do in the model."""
    only = converter.operations[0]
    turns = len(converter.operations) == 1 and type(only).__name__ == "Transpose" and only.check_dims
    return turns and {only.dim0, only.dim1} == {1, 2} and len(converter.source_patterns) == 1


def _not_offered(name: str, converter: Any) -> InputError:
    kinds = ", ".join(type(one).__name__ for one in converter.operations)
    return InputError(
        f"the files of this model hold {name} in another form ({kinds}), which is not read or written here",
        field="pretrained",
        fix=("load the folder with transformers and save it with save_original_format=False",),
    )
