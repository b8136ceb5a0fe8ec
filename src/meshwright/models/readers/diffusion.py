"""Read diffusers configs: the Wan video transformer and the FLUX image transformer."""

from __future__ import annotations

import math

import msgspec

from meshwright.errors import InputError

from ..spec import Attention, Dense, Layer
from .fields import MAX_LAYERS, Fields

WAN_DEFAULTS = {
    "patch_size": [1, 2, 2],
    "num_attention_heads": 40,
    "attention_head_dim": 128,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 4096,
    "freq_dim": 256,
    "ffn_dim": 13824,
    "num_layers": 40,
    "cross_attn_norm": True,
    "image_dim": None,
    "added_kv_proj_dim": None,
    "pos_embed_seq_len": None,
    "rope_max_seq_len": 1024,
}
FLUX_DEFAULTS = {
    "patch_size": 1,
    "in_channels": 64,
    "out_channels": None,
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "guidance_embeds": False,
}
TIME_CHANNELS = 256  # of FLUX's sinusoidal time and guidance embeddings, fixed in diffusers


class Denoiser(msgspec.Struct, frozen=True):
    """The transformer of a diffusers config."""

    hidden: int
    layers: tuple[Layer, ...]
    extra_params: int
    activation: str


def _linear(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs


def _mlp(inputs: int, outputs: int) -> int:
    """Return the parameters of two linear layers with biases, which embed time, guidance and text."""
    return _linear(inputs, outputs) + _linear(outputs, outputs)


def _patch(fields: Fields) -> int:
    """Return the values per channel of one patch."""
    sides = fields.raw("patch_size")
    if not isinstance(sides, (list, tuple)) or len(sides) != 3:
        raise fields.error("patch_size", "must be three integers: frames, height, width")
    if any(isinstance(side, bool) or not isinstance(side, int) or not 1 <= side <= 1024 for side in sides):
        raise fields.error("patch_size", "must be three integers of at least 1")
    return math.prod(sides)


def read_wan(fields: Fields) -> Denoiser:
    """Read Wan: equal layers of self-attention, cross-attention to the text and a feed-forward block."""
    heads, head_dim = fields.size("num_attention_heads"), fields.size("attention_head_dim")
    hidden = heads * head_dim
    if fields.optional_size("image_dim") or fields.optional_size("added_kv_proj_dim"):
        raise InputError(
            "image-to-video transformers are not supported, only text-to-video ones",
            field="image_dim" if fields.has("image_dim") else "added_kv_proj_dim",
            value=fields.data.get("image_dim") or fields.data.get("added_kv_proj_dim"),
        )
    attention = Attention(heads, heads, head_dim, qkv_bias=True, out_bias=True, qk_norm="full")
    layer = Layer(
        attention,
        Dense(fields.size("ffn_dim"), gated=False, bias=True),
        cross=attention,
        norm_params=2 * hidden if fields.flag("cross_attn_norm") else 0,
        extra_params=6 * hidden,  # shift, scale and gate of attention and feed-forward
    )
    patch, inputs = _patch(fields), fields.size("in_channels")
    outputs = fields.optional_size("out_channels") or inputs
    embedders = (
        _linear(inputs * patch, hidden)
        + _mlp(fields.size("freq_dim"), hidden)
        + _linear(hidden, 6 * hidden)
        + _mlp(fields.size("text_dim"), hidden)
    )
    head = _linear(hidden, outputs * patch) + 2 * hidden
    return Denoiser(hidden, (layer,) * fields.size("num_layers", most=MAX_LAYERS), embedders + head, "gelu")


def read_flux(fields: Fields) -> Denoiser:
    """Read FLUX: joint layers with separate weights for image and text, then single layers for both."""
    heads, head_dim = fields.size("num_attention_heads"), fields.size("attention_head_dim")
    hidden = heads * head_dim
    ffn = Dense(4 * hidden, gated=False, bias=True)
    joint = Layer(
        Attention(heads, heads, head_dim, qkv_bias=True, out_bias=True, qk_norm="head"),
        ffn,
        extra_params=2 * _linear(hidden, 6 * hidden),
        streams=2,
    )
    # One output projection serves attention and feed-forward: its bias is counted with the latter.
    single = Layer(
        Attention(heads, heads, head_dim, qkv_bias=True, qk_norm="head"), ffn, extra_params=_linear(hidden, 3 * hidden)
    )
    patch, inputs = fields.size("patch_size"), fields.size("in_channels")
    outputs = fields.optional_size("out_channels") or inputs
    times = 2 if fields.flag("guidance_embeds") else 1
    embedders = (
        _linear(inputs, hidden)
        + _linear(fields.size("joint_attention_dim"), hidden)
        + times * _mlp(TIME_CHANNELS, hidden)
        + _mlp(fields.size("pooled_projection_dim"), hidden)
    )
    head = _linear(hidden, 2 * hidden) + _linear(hidden, outputs * patch**2)
    layers = (joint,) * fields.size("num_layers", most=MAX_LAYERS)
    layers += (single,) * fields.count("num_single_layers", most=MAX_LAYERS)
    return Denoiser(hidden, layers, embedders + head, "gelu")
