"""Convert a model to Megatron-LM flags, verified by building it back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.errors import InputError
from meshwright.frameworks.megatron_lm.arguments import HYBRID_SPEC
from meshwright.frameworks.megatron_lm.model import build
from meshwright.frameworks.types import SourcedValue
from meshwright.models import MLA, Attention, Dense, GatedDelta, Layer, Mamba2, ModelSpec, MoE
from meshwright.recipes.types import Recipe

UNGATED = ("relu2", "gelu", "gelu_new", "gelu_fast", "gelu_python", "gelu_pytorch_tanh", "")
"""Activations of blocks without a gate that flags can name; without one, Megatron-LM computes GELU."""
LETTERS = ((Mamba2, "M"), (Attention, "*"), (Dense, "-"), (MoE, "E"))


def model_flags(model: ModelSpec, recipe: Recipe) -> dict[str, Any]:
    """Return the flags that build a model; raise InputError if they cannot."""
    if model.kind != "causal_lm" or model.vision is not None:
        raise _unsupported(model, "Megatron-LM export supports language models only")
    flags = {**_common(model, recipe), **_mixers(model), **_blocks(model)}
    flags |= _hybrid(model) if is_hybrid(model) else {}
    if model.mtp_layers and recipe.train.mtp_loss:
        flags["mtp_num_layers"] = model.mtp_layers
    _verify(model, flags)
    return flags


def is_hybrid(model: ModelSpec) -> bool:
    """Return whether layers have a mixer or an FFN, not both."""
    return any(layer.mixer is None or layer.ffn is None for layer in model.layers)


def _unsupported(model: ModelSpec, reason: str) -> InputError:
    return InputError(reason, field="model", value=model.name)


def _common(model: ModelSpec, recipe: Recipe) -> dict[str, Any]:
    norms = model.final_norm_params // model.hidden
    rotary = "rope" if not model.learned_positions else "learned_absolute"
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden,
        "vocab_size": model.vocab,
        "max_position_embeddings": max(recipe.data.seq_length, model.learned_positions),
        "position_embedding_type": "none" if model.mixers(Mamba2) else rotary,
        "normalization": "RMSNorm" if norms == 1 else None,
        "untie_embeddings_and_output_weights": not model.tied,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }


def _mixers(model: ModelSpec) -> dict[str, Any]:
    mixers = [layer.mixer for layer in model.layers if layer.mixer is not None]
    flags: dict[str, Any] = {}
    for mixer in dict.fromkeys(mixers):
        flags |= _mixer(mixer, model)
    linear = [isinstance(mixer, GatedDelta) for mixer in mixers]
    if any(linear):
        flags |= {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": format_pattern(linear)}
    windows = [mixer.window for mixer in mixers if isinstance(mixer, Attention)]
    widths = list(dict.fromkeys(window for window in windows if window))
    if len(widths) > 1:
        reason = (
            f"Megatron-LM's --window-size is one for all layers, and this model has {' and '.join(map(str, widths))}"
        )
        raise _unsupported(model, reason)
    for width in widths:
        flags["window_size"] = f"{width - 1},0"
        if not all(windows):
            flags["window_attn_skip_freq"] = format_pattern([bool(window) for window in windows])
    return flags


def _mixer(mixer: Any, model: ModelSpec) -> dict[str, Any]:
    if isinstance(mixer, MLA):
        return {
            "multi_latent_attention": True,
            "num_attention_heads": mixer.heads,
            "q_lora_rank": mixer.q_lora,
            "kv_lora_rank": mixer.kv_lora,
            "qk_head_dim": mixer.qk_nope,
            "qk_pos_emb_head_dim": mixer.qk_rope,
            "v_head_dim": mixer.v_head,
            "qk_layernorm": True,
        }
    if isinstance(mixer, Mamba2):
        return {
            "mamba_num_heads": mixer.heads,
            "mamba_head_dim": mixer.head_dim,
            "mamba_state_dim": mixer.state,
            "mamba_num_groups": mixer.groups,
        }
    if isinstance(mixer, GatedDelta):
        return {
            "linear_num_key_heads": mixer.k_heads,
            "linear_num_value_heads": mixer.v_heads,
            "linear_key_head_dim": mixer.k_head_dim,
            "linear_value_head_dim": mixer.v_head_dim,
            "linear_conv_kernel_dim": mixer.conv,
        }
    if not isinstance(mixer, Attention):
        reason = f"Megatron-LM has no {mixer.kind} layers as this model has"
        raise InputError(reason, field="model", value=model.name, fix=("--to deepspeed",))
    if mixer.qk_norm == "full":
        reason = "Megatron-LM's --qk-layernorm normalizes every head, and this model its whole queries and keys"
        raise _unsupported(model, reason)
    grouped = mixer.kv_heads != mixer.heads
    plain = model.hidden == mixer.heads * mixer.head_dim
    return {
        "num_attention_heads": mixer.heads,
        "group_query_attention": grouped,
        "num_query_groups": mixer.kv_heads if grouped else None,
        "kv_channels": None if plain else mixer.head_dim,
        "qk_layernorm": mixer.qk_norm != "none",
        "add_qkv_bias": mixer.qkv_bias and not mixer.out_bias,
        "attention_output_gate": mixer.output_gate,
        "softmax_type": "learnable" if mixer.sinks else None,
        "disable_bias_linear": not mixer.out_bias,
    }


def _blocks(model: ModelSpec) -> dict[str, Any]:
    blocks = [layer.ffn for layer in model.layers if layer.ffn is not None]
    dense = next((block for block in blocks if isinstance(block, Dense)), None)
    sparse = next((block for block in blocks if isinstance(block, MoE)), None)
    first = dense or sparse
    if first is None:
        return {}
    flags: dict[str, Any] = {
        "ffn_hidden_size": first.width,
        "swiglu": first.gated,
        "squared_relu": model.activation == "relu2",
        "disable_bias_linear": not first.bias,
    }
    if first.gated and model.activation != "silu":
        raise _unsupported(model, f"Megatron-LM has no flag for gated {model.activation}")
    if not first.gated and model.activation not in UNGATED:
        raise _unsupported(model, f"Megatron-LM has no flag for {model.activation}")
    if sparse is None:
        return flags
    routed = [isinstance(block, MoE) for block in blocks]
    return {
        **flags,
        "num_experts": sparse.experts,
        "moe_router_topk": sparse.topk,
        "moe_ffn_hidden_size": sparse.width,
        "moe_layer_freq": None if all(routed) else format_pattern(routed),
        "moe_shared_expert_intermediate_size": sparse.shared_width or None,
        "moe_shared_expert_gate": sparse.shared_gate,
        "moe_latent_size": sparse.latent,
    }


def format_pattern(mask: Sequence[bool]) -> str:
    """Format a per-layer mask as runs, such as ([0]*3+[1]*58)."""
    runs: list[tuple[bool, int]] = []
    for value in mask:
        if runs and runs[-1][0] == value:
            runs[-1] = (value, runs[-1][1] + 1)
        else:
            runs.append((value, 1))
    return "(" + "+".join(f"[{int(value)}]*{count}" for value, count in runs) + ")"


def _hybrid(model: ModelSpec) -> dict[str, Any]:
    pattern = "".join(map(_letter, model.layers))
    return {"hybrid_layer_pattern": pattern, "spec": HYBRID_SPEC, "num_layers": None, "moe_layer_freq": None}


def _letter(layer: Layer) -> str:
    block = layer.mixer if layer.mixer is not None else layer.ffn
    found = next((letter for block_type, letter in LETTERS if isinstance(block, block_type)), None)
    if found is None or (layer.mixer is not None and layer.ffn is not None):
        raise InputError("hybrid layers must be Mamba, attention, dense or experts, one per layer", field="model")
    return found


def _verify(model: ModelSpec, flags: dict[str, Any]) -> None:
    given = {
        key: SourcedValue(value, 0, "") for key, value in flags.items() if value is not None and value is not False
    }
    built = build(given, model.name).model
    if built is None or built.params.total != model.params.total or built.params.active != model.params.active:
        raise _unsupported(model, "Megatron-LM's flags cannot build this model")
