"""Read Nemotron-H: each layer is a Mamba-2 mixer, attention, a dense block or experts, given by a pattern."""

from __future__ import annotations

from meshwright.errors import InputError

from ..spec import Attention, Dense, Layer, Mamba2, MoE
from .decoder import Decoder, require_expert_groups
from .fields import MAX_LAYERS, Fields, require_divisible

DEFAULTS = {
    "tie_word_embeddings": False,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "attention_bias": False,
    "mlp_hidden_act": "relu2",
    "mlp_bias": False,
    "sliding_window": None,
    "intermediate_size": 21504,
    "ssm_state_size": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "use_bias": False,
    "n_routed_experts": 8,
    "n_shared_experts": 1,  # not read: their total width has a separate key
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "moe_latent_size": None,
    "num_experts_per_tok": 2,
    "num_nextn_predict_layers": 0,
    "mtp_layers_block_type": None,
    "mtp_hybrid_override_pattern": "*E",
    "hybrid_override_pattern": None,
    "layers_block_type": None,
}
ALIASES = {
    "head_dim": ("attention_head_dim",),
    "n_groups": ("mamba_n_groups", "mamba_num_groups"),
    "conv_kernel": ("mamba_d_conv",),
    "use_conv_bias": ("mamba_conv_bias",),
    "ssm_state_size": ("mamba_state_dim",),
    "n_routed_experts": ("num_local_experts",),
    "layers_block_type": ("layer_types",),
    "num_nextn_predict_layers": ("num_mtp_layers", "mtp_num_hidden_layers"),
}
_LETTERS = {"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-", "moe": "E"}


def read_nemotron(fields: Fields) -> Decoder:
    """Return the decoder of a Nemotron-H, Nemotron Nano v2 or Nemotron 3 config."""
    hidden = fields.size("hidden_size")
    pattern = layer_pattern(fields, "layers_block_type", "hybrid_override_pattern")
    if "num_hidden_layers" in fields.data and fields.data["num_hidden_layers"] is not None:
        count = fields.size("num_hidden_layers", most=MAX_LAYERS)
        if count != len(pattern):
            raise InputError(f"the layer pattern has {len(pattern)} layers", field="num_hidden_layers", value=count)
    mtp = fields.count("num_nextn_predict_layers", most=MAX_LAYERS)
    predicted = layer_pattern(fields, "mtp_layers_block_type", "mtp_hybrid_override_pattern") if mtp else ""
    kinds = {letter: _layer(fields, letter, hidden) for letter in sorted({*pattern, *predicted})}
    return Decoder(
        hidden=hidden,
        layers=tuple(kinds[letter] for letter in pattern),
        vocab=fields.size("vocab_size"),
        tied=False,  # whatever tie_word_embeddings says: transformers' class has no tied weights
        max_seq_length=fields.size("max_position_embeddings"),
        final_norm_params=hidden,
        activation=fields.text("mlp_hidden_act"),
        mtp_layers=mtp,
        mtp_layer=_joined([kinds[letter] for letter in predicted], fields) if mtp else None,
    )


def layer_pattern(fields: Fields, list_key: str, text_key: str) -> str:
    """Return the layers as letters: M Mamba-2, * attention, - dense block, E experts."""
    words = fields.words(list_key, _LETTERS)
    text = fields.raw(text_key)
    if isinstance(text, list) and all(isinstance(letter, str) and len(letter) == 1 for letter in text):
        text = "".join(text)  # transformers takes both
    if words is not None:
        return "".join(_LETTERS[word] for word in words)
    if text is None:
        raise InputError(
            "the config is missing the layer pattern, which this architecture needs", field=fields.where + text_key
        )
    if not isinstance(text, str) or not 0 < len(text) <= MAX_LAYERS or set(text) - set("M*-E"):
        raise fields.error(text_key, "must be a string of the letters M, *, - and E, one for each layer")
    return text


def _layer(fields: Fields, letter: str, hidden: int) -> Layer:
    if letter == "M":
        return Layer(_mamba(fields), None, norm_params=hidden)
    if letter == "*":
        return Layer(_attention(fields), None, norm_params=hidden)
    if letter == "-":
        return Layer(None, Dense(fields.size("intermediate_size"), False, fields.flag("mlp_bias")), norm_params=hidden)
    return Layer(None, _experts(fields), norm_params=hidden)


def _mamba(fields: Fields) -> Mamba2:
    heads, groups = fields.size("mamba_num_heads"), fields.size("n_groups")
    require_divisible(fields, "n_groups", groups, "mamba_num_heads", heads)
    return Mamba2(
        heads=heads,
        head_dim=fields.size("mamba_head_dim"),
        state=fields.size("ssm_state_size"),
        groups=groups,
        conv=fields.size("conv_kernel"),
        conv_bias=fields.flag("use_conv_bias"),
        proj_bias=fields.flag("use_bias"),
    )


def _attention(fields: Fields) -> Attention:
    heads = fields.size("num_attention_heads")
    kv_heads = fields.optional_size("num_key_value_heads") or heads
    require_divisible(fields, "num_key_value_heads", kv_heads, "num_attention_heads", heads)
    if fields.flag("attention_bias"):
        raise fields.error("attention_bias", "this architecture is only supported without attention biases")
    return Attention(heads, kv_heads, fields.size("head_dim"), fields.optional_size("sliding_window"))


def _experts(fields: Fields) -> MoE:
    experts, topk = fields.size("n_routed_experts"), fields.size("num_experts_per_tok")
    if topk > experts:
        raise fields.error("num_experts_per_tok", f"is larger than the {experts} experts")
    require_expert_groups(fields, experts)
    return MoE(
        experts,
        topk,
        fields.size("moe_intermediate_size"),
        shared_width=fields.size("moe_shared_expert_intermediate_size"),
        gated=False,
        balance_bias=True,
        dense_bias=fields.flag("mlp_bias"),
        latent=fields.optional_size("moe_latent_size"),
    )


def _joined(parts: list[Layer], fields: Fields) -> Layer:
    """Merge a pattern with at most one mixer and one feed-forward block into one layer."""
    mixers = [part.mixer for part in parts if part.mixer is not None]
    ffns = [part.ffn for part in parts if part.ffn is not None]
    if len(mixers) > 1 or len(ffns) > 1:
        raise fields.error("mtp_hybrid_override_pattern", "must have at most one mixer and one feed-forward block")
    norms = sum(part.norm_params for part in parts)
    return Layer(mixers[0] if mixers else None, ffns[0] if ffns else None, norm_params=norms)
