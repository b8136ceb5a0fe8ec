"""Megatron-Core's GPT models as Llama, Qwen and Mixtral models of transformers: config and tensors."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch

from meshwright.errors import InputError, closest

FIELD = "source"
MISSING = object()
LATEST = "latest_checkpointed_iteration.txt"


class Tensors(Protocol):
    """The tensors of a checkpoint in either format."""

    args: Any

    def names(self) -> set[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def read(self, name: str, *index: int) -> torch.Tensor: ...


def is_megatron(folder: Path) -> bool:
    """Return whether a folder is a Megatron checkpoint, or a run with several."""
    from meshwright.engine.megatron_io.legacy import rank_folders
    from meshwright.engine.megatron_io.torch_dist import METADATA

    return (folder / LATEST).is_file() or (folder / METADATA).is_file() or bool(rank_folders(folder))


def open_megatron(folder: Path, which: str | None = None) -> Tensors:
    """Open a Megatron checkpoint; of a run's folder, the latest one or that of an iteration."""
    from meshwright.engine.megatron_io.legacy import Legacy, rank_folders
    from meshwright.engine.megatron_io.torch_dist import METADATA, TorchDist

    if (folder / LATEST).is_file():
        folder = _iteration(folder, which)
    elif which is not None:
        reason = f"chooses among the checkpoints of a run, but {folder} is one checkpoint"
        raise InputError(reason, field="--checkpoint", value=which, fix=("leave out --checkpoint",))
    if (folder / METADATA).is_file():
        return TorchDist(folder)
    if rank_folders(folder):
        return Legacy(folder)
    raise InputError(
        "is neither a torch_dist (.metadata) nor a legacy (mp_rank_00) checkpoint; zarr and fsdp_dtensor are not read",
        field=FIELD,
        value=str(folder),
        fix=("save it with --ckpt-format torch_dist",),
    )


def _iteration(run: Path, which: str | None) -> Path:
    named = (run / LATEST).read_text().strip() if which in (None, "latest") else str(which)
    folder = run / ("release" if named == "release" else f"iter_{int(named):07d}" if named.isdigit() else named)
    if folder.is_dir():
        return folder
    known = sorted(one.name for one in run.iterdir() if one.is_dir() and re.fullmatch(r"iter_\d{7,}|release", one.name))
    numbers = [name.removeprefix("iter_").lstrip("0") or name for name in known]
    near = closest(named, numbers) or numbers[-1:]
    raise InputError(
        f"no such checkpoint; the run has {', '.join(numbers) or 'none'}",
        field="--checkpoint",
        value=named,
        fix=tuple(f"--checkpoint {one}" for one in near),
    )


UNSUPPORTED = {
    "multi_latent_attention": "multi-latent attention",
    "mtp_num_layers": "multi-token prediction",
    "moe_shared_expert_intermediate_size": "shared experts",
    "heterogeneous_layers_config_path": "heterogeneous layers",
    "hybrid_override_pattern": "Mamba layers",
}


class MegatronModel:
    """A Megatron checkpoint as a transformers model: its config, and its tensors by transformers' names."""

    def __init__(self, tensors: Tensors, config: dict[str, Any] | None = None) -> None:
        self.tensors, self.args = tensors, tensors.args
        self.given = config

    def _arg(self, name: str, default: Any = None) -> Any:
        found = getattr(self.args, name, MISSING)
        return default if found is MISSING or found is None or type(found).__name__ == "Inert" else found

    @cached_property
    def config(self) -> dict[str, Any]:
        """The model's config.json: the given one, else from the run's arguments."""
        return self.given if self.given is not None else self._config_of_arguments()

    def _config_of_arguments(self) -> dict[str, Any]:
        if self._arg("num_layers") is None or self._arg("hidden_size") is None:
            reason = "has no arguments of its run, so its model is unknown"
            raise self._refused(reason, ("--model NAME or config.json",))
        self._require_known_parts()
        heads, hidden = int(self._arg("num_attention_heads")), int(self._arg("hidden_size"))
        grouped = self._arg("group_query_attention", False)
        groups = int(self._arg("num_query_groups", heads)) if grouped else heads
        vocab = int(self._arg("vocab_size", 0)) or self._padded_vocab()
        config: dict[str, Any] = {
            "model_type": self._model_type(),
            "hidden_size": hidden,
            "num_hidden_layers": int(self._arg("num_layers")),
            "num_attention_heads": heads,
            "num_key_value_heads": groups,
            "head_dim": int(self._arg("kv_channels", hidden // heads)),
            "intermediate_size": int(self._arg("ffn_hidden_size")),
            "vocab_size": min(vocab, self._padded_vocab()),
            "max_position_embeddings": int(self._arg("max_position_embeddings", self._arg("seq_length", 4096))),
            "rms_norm_eps": float(self._arg("norm_epsilon", self._arg("layernorm_epsilon", 1e-5))),
            "rope_theta": float(self._arg("rotary_base", 10000)),
            "tie_word_embeddings": not self._arg("untie_embeddings_and_output_weights", False),
        }
        if self._arg("use_rope_scaling", False):
            factor = float(self._arg("rope_scaling_factor", 8.0))
            config["rope_scaling"] = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0,
                                      "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
        return config | self._expert_config()

    def _expert_config(self) -> dict[str, Any]:
        experts = self._arg("num_experts")
        if not experts:
            return {}
        width = int(self._arg("moe_ffn_hidden_size", self._arg("ffn_hidden_size")))
        chosen = {"num_experts_per_tok": int(self._arg("moe_router_topk", 2))}
        if self._model_type() == "mixtral":
            return chosen | {"num_local_experts": int(experts), "intermediate_size": width}
        return chosen | {"num_experts": int(experts), "moe_intermediate_size": width,
                         "norm_topk_prob": not self._arg("moe_router_pre_softmax", False)}  # fmt: skip

    def _model_type(self) -> str:
        if self._arg("num_experts"):
            return "qwen3_moe" if self._arg("qk_layernorm", False) else "mixtral"
        if self._arg("qk_layernorm", False):
            return "qwen3"
        return "qwen2" if self._arg("add_qkv_bias", False) else "llama"

    def _require_known_parts(self) -> None:
        problems = [what for name, what in UNSUPPORTED.items() if self._arg(name)]
        needed = {
            "a gated activation (--swiglu)": self._arg("swiglu", False),
            "RMSNorm (--normalization RMSNorm)": str(self._arg("normalization", "LayerNorm")) == "RMSNorm",
            "rotary positions": str(self._arg("position_embedding_type", "learned_absolute")) == "rope",
            "linear layers without biases (--disable-bias-linear)": not self._arg("add_bias_linear", True),
        }
        problems += [f"a model without {what}" for what, present in needed.items() if not present]
        if problems:
            raise self._refused(f"{', '.join(problems)}: not a Llama, Qwen or Mixtral model, which are converted")

    def _refused(self, reason: str, fix: tuple[str, ...] = ("convert it with Megatron-Bridge",)) -> InputError:
        return InputError(reason, field=FIELD, value=str(getattr(self.tensors, "folder", "")), fix=fix)

    def _padded_vocab(self) -> int:
        return self.tensors.shape("embedding.word_embeddings.weight")[0]

    # Tensors by transformers' names.

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor of the transformers model."""
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
        if match is None:
            return self._outer(name)
        layer, part = int(match[1]), match[2]
        if part.startswith("self_attn.") and part.split(".")[1] in ("q_proj", "k_proj", "v_proj"):
            return self._attention(layer, *part.split(".")[1:])
        readers: dict[str, Callable[[], torch.Tensor]] = {
            "input_layernorm.weight": lambda: self._norm(
                layer, "self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"
            ),
            "post_attention_layernorm.weight": lambda: self._norm(
                layer, "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"
            ),
            "self_attn.o_proj.weight": lambda: self._layer(layer, "self_attention.linear_proj.weight"),
            "self_attn.q_norm.weight": lambda: self._norm(layer, "self_attention.q_layernorm.weight"),
            "self_attn.k_norm.weight": lambda: self._norm(layer, "self_attention.k_layernorm.weight"),
            "mlp.gate_proj.weight": lambda: self._gated(layer).chunk(2, 0)[0].clone(),
            "mlp.up_proj.weight": lambda: self._gated(layer).chunk(2, 0)[1].clone(),
            "mlp.down_proj.weight": lambda: self._layer(layer, "mlp.linear_fc2.weight"),
            "mlp.gate.weight": lambda: self._layer(layer, "mlp.router.weight"),
            "mlp.experts.gate_up_proj": lambda: self._experts(layer, "linear_fc1.weight"),
            "mlp.experts.down_proj": lambda: self._experts(layer, "linear_fc2.weight"),
        }
        if part not in readers:
            raise self._refused(f"has no tensor for {name}", ("--model of the model that was trained",))
        return readers[part]()

    def _outer(self, name: str) -> torch.Tensor:
        vocab = int(self.config["vocab_size"])
        if name == "model.embed_tokens.weight":
            return self._rows("embedding.word_embeddings.weight", vocab)
        if name == "lm_head.weight":
            return self._rows("output_layer.weight", vocab)
        if name == "model.norm.weight":
            return self._shifted(self._first("decoder.final_layernorm.weight", "decoder.final_norm.weight"))
        raise self._refused(f"has no tensor for {name}", ("--model of the model that was trained",))

    def _rows(self, name: str, count: int) -> torch.Tensor:
        """Return the rows of tokens; those after them pad the vocabulary."""
        full = self._first(name)
        if full.shape[0] < count:
            raise self._refused(f"{name} has {full.shape[0]} tokens, fewer than the model's {count}", ("--model …",))
        return full[:count].clone()

    def _first(self, *names: str) -> torch.Tensor:
        found = next((name for name in names if name in self.tensors.names()), None)
        if found is None:
            raise self._refused(f"has no {names[0]}")
        return self.tensors.read(found)

    def _layer(self, layer: int, *parts: str) -> torch.Tensor:
        """Return a layer's tensor: of its own name, or out of one that stacks all layers."""
        for part in parts:
            if (name := f"decoder.layers.{layer}.{part}") in self.tensors.names():
                return self.tensors.read(name)
            if (name := f"decoder.layers.{part}") in self.tensors.names():
                return self.tensors.read(name, layer)
        raise self._refused(f"has no {parts[0]} of layer {layer}")

    def _gated(self, layer: int) -> torch.Tensor:
        """Return gate and up projection: one tensor, or one for each."""
        halves = [f"mlp.linear_fc1.weight_{half}" for half in ("w", "v")]
        if any(f"decoder.layers.{where}{halves[0]}" in self.tensors.names() for where in ("", f"{layer}.")):
            return torch.cat([self._layer(layer, half) for half in halves], 0)
        return self._layer(layer, "mlp.linear_fc1.weight")

    def _norm(self, layer: int, *parts: str) -> torch.Tensor:
        return self._shifted(self._layer(layer, *parts))

    def _shifted(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a norm's weight; with --apply-layernorm-1p the checkpoint has what is added to one."""
        return weight + 1 if self._arg("apply_layernorm_1p", False) else weight

    def _attention(self, layer: int, projection: str, kind: str) -> torch.Tensor:
        """Return the rows of query, key or value out of groups of [queries, key, value]."""
        fused = self._layer(layer, f"self_attention.linear_qkv.{kind}")
        config = self.config
        groups, heads = int(config["num_key_value_heads"]), int(config["num_attention_heads"])
        width = int(config.get("head_dim") or config["hidden_size"] // heads)
        each = heads // groups
        if fused.shape[0] != groups * (each + 2) * width:
            raise self._refused(
                f"linear_qkv has {fused.shape[0]} rows, not {groups * (each + 2) * width}", ("--model …",)
            )
        grouped = fused.reshape(groups, each + 2, width, *fused.shape[1:])
        part = {"q_proj": grouped[:, :each], "k_proj": grouped[:, each : each + 1], "v_proj": grouped[:, each + 1 :]}
        return part[projection].flatten(0, 2).contiguous()

    def _experts(self, layer: int, matrix: str) -> torch.Tensor:
        count = int(self.config.get("num_local_experts") or self.config.get("num_experts") or 0)
        names = self.tensors.names()
        stacked = (
            f"decoder.layers.{layer}.mlp.experts.experts.{matrix}",
            f"decoder.layers.mlp.experts.experts.{matrix}",
        )
        if stacked[0] in names:
            return torch.stack([self.tensors.read(stacked[0], expert) for expert in range(count)])
        if stacked[1] in names:
            return torch.stack([self.tensors.read(stacked[1], layer, expert) for expert in range(count)])
        return torch.stack([self._layer(layer, f"mlp.experts.experts.{expert}.{matrix}") for expert in range(count)])
