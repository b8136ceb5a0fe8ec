"""Writes transformers models as Megatron checkpoints, torch_dist and legacy, for tests of reading them."""

from __future__ import annotations

import argparse
import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

Tensors = dict[str, torch.Tensor]
ROWS = ("word_embeddings.weight", "output_layer.weight", "linear_qkv.weight", "linear_qkv.bias", "linear_fc1.weight")
COLUMNS = ("linear_proj.weight", "linear_fc2.weight")


def arguments(config: Any, **more: Any) -> argparse.Namespace:
    """Return the arguments of a Megatron run of this model."""
    moe = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    values = {
        "num_layers": config.num_hidden_layers, "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads, "group_query_attention": True,
        "num_query_groups": config.num_key_value_heads, "kv_channels": config.head_dim,
        "ffn_hidden_size": config.intermediate_size, "norm_epsilon": config.rms_norm_eps,
        "rotary_base": config.rope_parameters["rope_theta"],
        "max_position_embeddings": 64, "swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope",
        "add_bias_linear": False, "add_qkv_bias": config.model_type == "qwen2", "vocab_size": config.vocab_size,
        "qk_layernorm": config.model_type.startswith("qwen3"), "params_dtype": torch.bfloat16,
        "untie_embeddings_and_output_weights": not config.tie_word_embeddings, "num_experts": moe,
        "moe_router_topk": getattr(config, "num_experts_per_tok", None),
        "moe_ffn_hidden_size": getattr(config, "moe_intermediate_size", None),
    }  # fmt: skip
    return argparse.Namespace(**{**values, **more})


def megatron_tensors(model: Any) -> Tensors:
    """Return a model's tensors by Megatron-Core's names, with a padded vocabulary."""
    config, state = model.config, model.state_dict()
    groups, each, width = (
        config.num_key_value_heads,
        config.num_attention_heads // config.num_key_value_heads,
        config.head_dim,
    )
    pad = torch.zeros(5 if config.vocab_size % 2 else 6, config.hidden_size)
    found: Tensors = {
        "embedding.word_embeddings.weight": torch.cat([state["model.embed_tokens.weight"], pad]),
        "decoder.final_layernorm.weight": state["model.norm.weight"],
    }
    if not config.tie_word_embeddings:
        found["output_layer.weight"] = torch.cat([state["lm_head.weight"], pad])
    for i in range(config.num_hidden_layers):
        ours, theirs = f"model.layers.{i}.", f"decoder.layers.{i}."
        for kind in ("weight", "bias"):
            parts = [state.get(f"{ours}self_attn.{one}_proj.{kind}") for one in "qkv"]
            if parts[0] is not None:
                heads = [part.unflatten(0, (groups, n, width)) for part, n in zip(parts, (each, 1, 1), strict=True)]
                found[f"{theirs}self_attention.linear_qkv.{kind}"] = torch.cat(heads, 1).flatten(0, 2)
        found[f"{theirs}self_attention.linear_proj.weight"] = state[f"{ours}self_attn.o_proj.weight"]
        found[f"{theirs}self_attention.linear_qkv.layer_norm_weight"] = state[f"{ours}input_layernorm.weight"]
        for one in "qk":
            if f"{ours}self_attn.{one}_norm.weight" in state:
                found[f"{theirs}self_attention.{one}_layernorm.weight"] = state[f"{ours}self_attn.{one}_norm.weight"]
        norm = state[f"{ours}post_attention_layernorm.weight"]
        if f"{ours}mlp.gate.weight" in state:
            found[f"{theirs}pre_mlp_layernorm.weight"] = norm
            found[f"{theirs}mlp.router.weight"] = state[f"{ours}mlp.gate.weight"]
            for e, (up, down) in enumerate(
                zip(state[f"{ours}mlp.experts.gate_up_proj"], state[f"{ours}mlp.experts.down_proj"], strict=True)
            ):
                found[f"{theirs}mlp.experts.experts.{e}.linear_fc1.weight"] = up
                found[f"{theirs}mlp.experts.experts.{e}.linear_fc2.weight"] = down
        else:
            found[f"{theirs}mlp.linear_fc1.layer_norm_weight"] = norm
            both = [state[f"{ours}mlp.{one}_proj.weight"] for one in ("gate", "up")]
            found[f"{theirs}mlp.linear_fc1.weight"] = torch.cat(both)
            found[f"{theirs}mlp.linear_fc2.weight"] = state[f"{ours}mlp.down_proj.weight"]
    return found


def _stacked(tensors: Tensors) -> Tensors:
    """Return the tensors with one axis for all layers, and one for all experts, as torch_dist has them."""
    found: Tensors = {}
    groups: dict[str, dict[tuple[int, ...], torch.Tensor]] = {}
    for name, tensor in tensors.items():
        words = name.split(".")
        numbers = tuple(int(word) for word in words if word.isdigit())
        if not numbers:
            found[name] = tensor
        else:
            groups.setdefault(".".join(word for word in words if not word.isdigit()), {})[numbers] = tensor
    for name, parts in groups.items():
        lead = [max(place[i] for place in parts) + 1 for i in range(len(next(iter(parts))))]
        shape = next(iter(parts.values())).shape
        found[name] = torch.stack([parts[place] for place in sorted(parts)]).reshape(*lead, *shape)
    return found


def write_torch_dist(folder: Path, tensors: Tensors, args: Any) -> None:
    """Write a torch_dist checkpoint: chunks per layer and expert, and half of the rows in each of two files."""
    folder.mkdir(parents=True)
    files = {name: io.BytesIO() for name in ("__0_0.distcp", "__1_0.distcp")}
    index, places = {}, {}
    stacked = {**_stacked(tensors), "optimizer.state.exp_avg": torch.zeros(3)}
    for name, tensor in stacked.items():
        names = [one for one in tensors if ".".join(w for w in one.split(".") if not w.isdigit()) == name]
        lead = sum(word.isdigit() for word in names[0].split(".")) if names else 0
        chunks = []
        for place in (
            torch.cartesian_prod(*map(torch.arange, tensor.shape[:lead])).reshape(-1, lead).tolist() if lead else [[]]
        ):
            part = tensor[tuple(place)]
            at = 0
            for file, piece in zip(files, part.chunk(2, 0) if part.shape[0] % 2 == 0 else (part,), strict=False):
                offset = torch.Size([*place, at, *[0] * (part.dim() - 1)])
                chunks.append(ChunkStorageMetadata(offset, torch.Size([1] * lead + [*piece.shape])))
                data = io.BytesIO()
                torch.save(piece.reshape([1] * lead + [*piece.shape]).clone(), data)
                places[MetadataIndex(name, offset)] = _StorageInfo(file, files[file].tell(), len(data.getvalue()))
                files[file].write(data.getvalue())
                at += piece.shape[0]
        properties = TensorProperties(dtype=tensor.dtype)
        index[name] = TensorStorageMetadata(properties, tensor.shape, chunks)
    for name, file in files.items():
        (folder / name).write_bytes(file.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(index, None, places)))
    torch.save({"args": args, "iteration": 7, "checkpoint_version": 3.0}, folder / "common.pt")


def write_legacy(folder: Path, tensors: Tensors, args: Any, tp: int = 1, pp: int = 1, ep: int = 1) -> None:
    """Write a legacy checkpoint of tp × pp × ep ranks."""
    args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.expert_model_parallel_size = tp, pp, ep
    layers = args.num_layers // pp
    experts = (args.num_experts or 0) // ep
    for t in range(tp):
        for p in range(pp):
            for e in range(ep):
                name = f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "") + (f"_{e:03d}" if ep > 1 else "")
                state = dict(_rank(tensors, t, tp, p, pp, layers, e, experts))
                (folder / name).mkdir(parents=True)
                torch.save({"args": args, "model": state, "rng_state": [object]}, folder / name / "model_optim_rng.pt")


def _rank(tensors: Tensors, t: int, tp: int, p: int, pp: int, layers: int, e: int, experts: int) -> Any:
    for name, tensor in tensors.items():
        words = name.split(".")
        if words[1] == "layers":
            if int(words[2]) // layers != p:
                continue
            words[2] = str(int(words[2]) % layers)
        elif (words[0] == "embedding" and p != 0) or (words[0] != "embedding" and p != pp - 1):
            continue
        if "experts" in words:
            number = int(words[6])
            if number // experts != e:
                continue
            words[4:7] = ["experts", "local_experts", str(number % experts)]
        if name.endswith("linear_fc1.weight"):
            tensor = torch.cat([half.chunk(tp, 0)[t] for half in tensor.chunk(2, 0)])
        elif name.endswith(ROWS):
            tensor = tensor.chunk(tp, 0)[t]
        elif name.endswith(COLUMNS):
            tensor = tensor.chunk(tp, 1)[t]
        yield ".".join(words), tensor.clone()
