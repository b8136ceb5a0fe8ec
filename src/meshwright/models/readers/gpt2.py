"""Read GPT-2 style models: LayerNorm with bias, learned positions, ungated feed-forward, tied embedding."""

from __future__ import annotations

from ..spec import Attention, Dense, Layer
from .decoder import Decoder
from .fields import MAX_LAYERS, Fields, require_divisible

MODEL_TYPES = ("gpt2", "gpt-sw3")  # one class of transformers
DEFAULTS = {
    "n_inner": None,
    "n_positions": 1024,
    "activation_function": "gelu_new",
    "tie_word_embeddings": True,
    "add_cross_attention": False,
}
ALIASES = {
    "n_embd": ("hidden_size",),
    "n_positions": ("max_position_embeddings",),
    "n_head": ("num_attention_heads",),
    "n_layer": ("num_hidden_layers",),
    "n_inner": ("intermediate_size",),
}


def read_gpt2(fields: Fields) -> Decoder:
    """Return the decoder of a GPT-2 style config."""
    hidden, heads = fields.size("n_embd"), fields.size("n_head")
    require_divisible(fields, "n_head", heads, "n_embd", hidden)
    if fields.flag("add_cross_attention"):
        raise fields.error("add_cross_attention", "only decoders without cross attention are supported")
    layer = Layer(
        Attention(heads, heads, hidden // heads, qkv_bias=True, out_bias=True),
        Dense(fields.optional_size("n_inner") or 4 * hidden, gated=False, bias=True),
        norm_params=4 * hidden,
    )
    positions = fields.size("n_positions")
    return Decoder(
        hidden=hidden,
        layers=(layer,) * fields.size("n_layer", most=MAX_LAYERS),
        vocab=fields.size("vocab_size"),
        tied=fields.flag("tie_word_embeddings"),
        max_seq_length=positions,
        final_norm_params=2 * hidden,
        activation=fields.text("activation_function"),
        learned_positions=positions,
    )
