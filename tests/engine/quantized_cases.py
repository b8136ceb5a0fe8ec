"""Writes tiny quantized folders as publishers ship them: gpt-oss in mxfp4, others in fp8 with block or row scales."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tests.engine.hf_folder import write_shards, write_tiny_folder

FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FP8_MAX = 448.0
GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def to_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the blocks and scales of an expert matrix [experts, in, out], as gpt-oss stores them."""
    groups = weight.float().transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = torch.floor(torch.log2(groups.abs().amax(-1).clamp_min(1e-30) / 4.0)).clamp(-127, 127)
    scaled = groups / torch.exp2(exponents)[..., None]
    codes = (scaled.abs()[..., None] - FP4).abs().argmin(-1) + 8 * (scaled < 0)
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return blocks, (exponents + 127).to(torch.uint8)


def to_fp8(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix in fp8 and its factors, one per block; the last blocks may be smaller."""
    rows, columns = weight.shape
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    padded = torch.zeros(grid[0] * block[0], grid[1] * block[1])
    padded[:rows, :columns] = weight
    blocks = padded.view(grid[0], block[0], grid[1], block[1])
    scales = blocks.abs().amax((1, 3)).clamp_min(1e-12) / FP8_MAX
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return codes.reshape(padded.shape)[:rows, :columns].contiguous(), scales


def write_mxfp4(path: Path, seed: int = 0, shards: int = 2) -> Path:
    """Write a tiny gpt-oss folder whose experts are in mxfp4."""
    write_tiny_folder(path, GPT_OSS, shards=1, seed=seed, dtype=torch.bfloat16)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in _take(path).items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = to_mxfp4(tensor)
        else:
            tensors[name] = tensor
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    return _finish(path, tensors, settings, shards)


def write_fp8(path: Path, config: Any, block: tuple[int, int], compressed: bool = False, shards: int = 2) -> Path:
    """Write a tiny folder whose layers' matrices are in fp8: block scales, or one scale per row (compressed)."""
    write_tiny_folder(path, config, shards=1, dtype=torch.bfloat16)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in _take(path).items():
        matrix = tensor.ndim == 2 and ".layers." in name and name.endswith("proj.weight")
        if matrix and compressed:
            tensors[name], scale = to_fp8(tensor.float(), (1, tensor.shape[1]))
            tensors[f"{name}_scale"] = scale.bfloat16()
        elif matrix:
            tensors[name], tensors[f"{name}_scale_inv"] = to_fp8(tensor.float(), block)
        else:
            tensors[name] = tensor
    settings: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    settings["weight_block_size"] = list(block)
    if compressed:
        weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
        settings = {"quant_method": "compressed-tensors", "format": "float-quantized"}
        settings["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return _finish(path, tensors, settings, shards)


def _take(path: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    return tensors


def _finish(path: Path, tensors: dict[str, torch.Tensor], settings: dict[str, Any], shards: int) -> Path:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    write_shards(path, tensors, shards)
    return path
