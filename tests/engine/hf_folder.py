"""Writes tiny Hugging Face folders with random weights, in hub or transformers names; without a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tests.engine.families import FAMILIES
from transformers.core_model_loading import revert_weight_conversion

from meshwright.engine.model.build import transformers_config

VECTOR_NOISE = 0.1  # vectors start at ones or zeros: noise makes swapped vectors detectable


def write_tiny_folder(
    path: Path,
    family_or_config: str | Mapping[str, Any] | Any,
    *,
    shards: int = 2,
    hub_names: bool = True,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write config.json, generation_config.json and the weights of a random model; return the folder.

    The model is a family of tests/engine/families.py, the values of a config.json, or a transformers config.
    """
    model = tiny_model(family_or_config, seed).to(dtype)
    path.mkdir(parents=True, exist_ok=True)
    model.config.dtype = str(dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(path)
    model.generation_config.save_pretrained(path)
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for tied in getattr(model, "all_tied_weights_keys", {}):
        tensors.pop(tied, None)
    write_shards(path, revert_weight_conversion(model, tensors) if hub_names else tensors, shards)
    return path


def tiny_model(family_or_config: str | Mapping[str, Any] | Any, seed: int = 0) -> Any:
    """Return the random transformers model that `write_tiny_folder` writes, in eval mode."""
    config = family_or_config
    if isinstance(config, str):
        config = FAMILIES[config]
    if isinstance(config, Mapping):
        config = transformers_config(config)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for tensor in [*model.parameters(), *_saved_buffers(model)]:
                if tensor.ndim < 2:
                    tensor.add_(torch.randn(tensor.shape) * VECTOR_NOISE)
    return model.eval()


def write_shards(path: Path, tensors: Mapping[str, torch.Tensor], shards: int) -> None:
    """Write tensors to `shards` files of about equal size, with an index if there are several."""
    total = sum(tensor.nbytes for tensor in tensors.values())
    files: list[dict[str, torch.Tensor]] = [{} for _ in range(shards)]
    before = 0
    for name in sorted(tensors):
        files[before * shards // total][name] = tensors[name].contiguous()
        before += tensors[name].nbytes
    if shards == 1:
        save_file(files[0], path / "model.safetensors", {"format": "pt"})
        return
    names = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    for name, part in zip(names, files, strict=True):
        save_file(part, path / name, {"format": "pt"})
    file_of = {tensor: name for name, part in zip(names, files, strict=True) for tensor in part}
    index = {"metadata": {"total_size": total}, "weight_map": file_of}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _saved_buffers(model: Any) -> list[torch.Tensor]:
    saved = set(model.state_dict())
    return [buffer for name, buffer in model.named_buffers() if name in saved and buffer.is_floating_point()]
