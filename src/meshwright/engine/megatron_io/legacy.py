"""Megatron's legacy format: one file per model-parallel rank, merged over tensor, pipeline and expert ranks."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from meshwright.engine.faults import RunError
from meshwright.engine.megatron_io.inert_pickle import Arguments, StoredTensor, read_torch_file
from meshwright.errors import InputError

FILES = ("model_optim_rng.pt", "model_rng.pt", "model_weights.pt")
RANK = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?")
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.(linear_fc[12]\.weight)|(linear_fc[12]\.weight)(\d+))")
# Names before Megatron-Core, in order.
OLDER = (
    (r"^language_model\.", ""),
    (r"^encoder\.", "decoder."),
    (r"^transformer\.", "decoder."),
    (r"^decoder\.final_(layer)?norm\.", "decoder.final_layernorm."),
    (r"\.(self_attention|attention)\.query_key_value\.", ".self_attention.linear_qkv."),
    (r"\.(self_attention|attention)\.dense\.", ".self_attention.linear_proj."),
    (r"\.mlp\.dense_h_to_4h\.", ".mlp.linear_fc1."),
    (r"\.mlp\.dense_4h_to_h\.", ".mlp.linear_fc2."),
    (r"\.input_norm\.", ".input_layernorm."),
    (r"\.post_attention_(layer)?norm\.", ".pre_mlp_layernorm."),
    (r"^output_layer\.", "output_layer."),
)
BY_ROWS = ("word_embeddings.weight", "output_layer.weight", "linear_qkv.weight", "linear_qkv.bias", "linear_fc1.weight")
BY_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")


def rank_folders(folder: Path) -> list[Path]:
    """Return the folders of the model-parallel ranks of a checkpoint, in order."""
    return (
        sorted(one for one in folder.iterdir() if one.is_dir() and RANK.fullmatch(one.name)) if folder.is_dir() else []
    )


class Legacy:
    """The tensors of a legacy checkpoint by Megatron-Core names with global layer and expert numbers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.args: Any = Arguments()
        self._shards: dict[str, dict[int, StoredTensor]] = defaultdict(dict)  # name -> tp rank -> shard
        states = {one.name: _state(one) for one in rank_folders(folder)}
        first = next(iter(states.values()))
        self.args = first.get("args", self.args)
        self.gated = bool(getattr(self.args, "swiglu", True))
        self._check_sizes(len(states))
        experts_per_rank = int(getattr(self.args, "num_experts", None) or 0) // self._size("expert_model_parallel_size")
        for name, state in states.items():
            tp, pp, ep = self._ranks(name)
            for chunk, tensors in _chunks(state):
                first_layer = self._first_layer(states, pp, chunk)
                for key, tensor in tensors.items():
                    self._shards[_global_name(key, first_layer, ep * experts_per_rank)][tp] = tensor

    def _size(self, name: str) -> int:
        return int(getattr(self.args, name, None) or 1)

    def _check_sizes(self, folders: int) -> None:
        tp, pp, ep = map(
            self._size, ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
        )
        if folders != tp * pp * ep:
            raise RunError(
                f"{self.folder} has {folders} rank folders, but tp {tp} × pp {pp} × ep {ep} = {tp * pp * ep} wrote it",
                fix=("copy the folders of all ranks",),
            )
        if ep > 1 and self._size("expert_tensor_parallel_size") not in (1, tp) and tp > 1:
            raise InputError("another tensor parallelism for experts is not supported here", field="source",
                             value=str(self.folder), fix=("save it with --ckpt-format torch_dist",))  # fmt: skip

    def _ranks(self, name: str) -> tuple[int, int, int]:
        """Return the tp, pp and ep rank of a folder: the second number is ep if there is no pipeline."""
        match = RANK.fullmatch(name)
        assert match is not None
        tp, second, third = int(match[1]), int(match[2] or 0), int(match[3] or 0)
        if self._size("pipeline_model_parallel_size") == 1 and match[2] is not None:
            return tp, 0, second
        return tp, second, third

    def _first_layer(self, states: Mapping[str, Any], stage: int, chunk: int) -> int:
        """Return the number of layers before a stage's chunk: chunks of one round over the stages come in order."""
        counts: dict[tuple[int, int], int] = {}
        for name, state in states.items():
            _, pp, _ = self._ranks(name)
            for number, tensors in _chunks(state):
                layers = {match[1] for key in tensors if (match := LAYER.match(key))}
                counts[number, pp] = len(layers)
        return sum(count for place, count in counts.items() if place < (chunk, stage))

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return set(self._shards)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a merged tensor."""
        shards, dim = self._shards[name], _sharded_dim(name)
        shape = list(next(iter(shards.values())).shape)
        if dim is not None and dim < len(shape):
            shape[dim] *= len(shards)
        return tuple(shape)

    def read(self, name: str, *index: int) -> torch.Tensor:
        """Return a tensor, merged over the tensor-parallel ranks."""
        shards = [shard.load() for _, shard in sorted(self._shards[name].items())]
        dim = _sharded_dim(name)
        if dim is None or len(shards) == 1:
            if any(not torch.equal(one, shards[0]) for one in shards[1:]):
                raise RunError(f"the tensor-parallel ranks of {self.folder} have different values of {name}")
            merged = shards[0]
        elif name.endswith("linear_fc1.weight") and self.gated:
            merged = torch.cat([part for half in (0, 1) for part in (one.chunk(2, 0)[half] for one in shards)], 0)
        else:
            merged = torch.cat(shards, dim)
        return merged[index] if index else merged


def _sharded_dim(name: str) -> int | None:
    return 0 if name.endswith(BY_ROWS) else 1 if name.endswith(BY_COLUMNS) else None


def _state(folder: Path) -> dict[str, Any]:
    found = next((folder / name for name in FILES if (folder / name).is_file()), None)
    if found is None:
        raise RunError(f"{folder} has none of {', '.join(FILES)}")
    state = read_torch_file(found)
    if not isinstance(state, dict) or not any(str(key).startswith("model") for key in state):
        raise RunError(f"{found} has no model")
    return state


def _chunks(state: Mapping[str, Any]) -> Iterator[tuple[int, dict[str, StoredTensor]]]:
    """Yield the number and the tensors of each virtual pipeline chunk: model, or model0, model1, …"""
    for key in sorted(key for key in state if re.fullmatch(r"model\d*", str(key))):
        yield int(key.removeprefix("model") or 0), dict(_flat(state[key], ""))


def _flat(values: Any, prefix: str) -> Iterator[tuple[str, StoredTensor]]:
    """Yield tensors of nested dictionaries by their names of today."""
    for key, value in values.items() if isinstance(values, dict) else ():
        name = f"{prefix}{key}"
        if isinstance(value, StoredTensor):
            for pattern, today in OLDER:
                name = re.sub(pattern, today, name)
            if not name.endswith("_extra_state"):
                yield name, value
        else:
            yield from _flat(value, f"{name}.")


def _global_name(name: str, first_layer: int, first_expert: int) -> str:
    """Return a name with the layer's and the expert's number in the whole model."""
    match = LAYER.match(name)
    if match is None:
        return name
    rest = match[2]
    if expert := EXPERT.fullmatch(rest):
        local, matrix = int(expert[1] or expert[4] or 0), expert[2] or expert[3]
        rest = f"mlp.experts.experts.{first_expert + local}.{matrix}"
    return f"decoder.layers.{first_layer + int(match[1])}.{rest}"
