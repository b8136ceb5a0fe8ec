"""Read a decoder of any architecture in the table of traits."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from meshwright.errors import InputError

from ..spec import MLA, Attention, Dense, Ffn, GatedDelta, Group, Layer, Mixer, MoE
from .fields import MAX_LAYERS, Fields, require_divisible
from .traits import MoeTraits, Switch, Traits


class Decoder(msgspec.Struct, frozen=True):
    """The language model of a config."""

    hidden: int
    layers: tuple[Layer, ...]
    vocab: int
    tied: bool
    max_seq_length: int
    final_norm_params: int
    activation: str
    learned_positions: int = 0
    mtp_layers: int = 0
    mtp_layer: Layer | None = None


def read_decoder(fields: Fields, traits: Traits) -> Decoder:
    """Return the decoder that a config describes."""
    hidden = fields.size("hidden_size")
    count = fields.size("num_hidden_layers", most=MAX_LAYERS)
    types = layer_types(fields, traits, count)
    ffns = _ffns(fields, traits, count)
    norms = traits.layer_norms * hidden
    mixers = {name: _mixer(fields, traits, name, hidden) for name in set(types) | {"full_attention"}}
    layers = tuple(Layer(mixers[name], ffn, norm_params=norms) for name, ffn in zip(types, ffns, strict=True))
    mtp = fields.count("num_nextn_predict_layers", most=MAX_LAYERS) if _may_have_mtp(traits) else 0
    return Decoder(
        hidden=hidden,
        layers=layers,
        vocab=fields.size("vocab_size"),
        tied=fields.flag("tie_word_embeddings"),
        max_seq_length=fields.size("max_position_embeddings"),
        final_norm_params=traits.final_norms * hidden,
        activation=fields.text(traits.activation_key),
        mtp_layers=mtp,
        # MTP modules repeat the model's last block, with full attention in hybrids.
        mtp_layer=Layer(mixers["full_attention"], ffns[-1], norm_params=norms) if mtp else None,
    )


def grouped(layers: Iterable[Layer]) -> tuple[Group, ...]:
    """Group equal layers, in the order of their first appearance."""
    places: dict[Layer, list[int]] = {}
    for place, layer in enumerate(layers):
        places.setdefault(layer, []).append(place)
    return tuple(Group(layer, tuple(at)) for layer, at in places.items())


def layer_types(fields: Fields, traits: Traits, count: int) -> tuple[str, ...]:
    """Return full_attention, sliding_attention or linear_attention for every layer."""
    full, sliding = "full_attention", "sliding_attention"
    if traits.mixer == "delta_hybrid":
        listed = _listed_layer_types(fields, count, (full, "linear_attention"))
        interval = fields.size("full_attention_interval")
        return listed or tuple("linear_attention" if (i + 1) % interval else full for i in range(count))
    if traits.window in ("none", "every", "switched"):
        _reject_mixed_layer_types(fields)
        return (full,) * count
    listed = _listed_layer_types(fields, count, (full, sliding))
    if listed:
        return listed
    return tuple(sliding if _has_window(fields, traits, place) else full for place in range(count))


def _has_window(fields: Fields, traits: Traits, place: int) -> bool:
    if traits.window == "alternate":
        return place % 2 == 0
    if traits.window == "pattern":
        return (place + 1) % fields.size("sliding_window_pattern") != 0
    if traits.window == "upper":
        return fields.flag("use_sliding_window") and place >= fields.count("max_window_layers")
    if traits.window == "no_rope":
        return fields.flag("use_sliding_window") and not _has_rope(fields, place)
    return fields.optional_size("sliding_window") is not None


def _has_rope(fields: Fields, place: int) -> bool:
    listed = fields.raw("no_rope_layers")
    if listed is None:
        return (place + 1) % fields.size("no_rope_layer_interval") != 0
    if not isinstance(listed, list) or place >= len(listed) or listed[place] not in (0, 1):
        raise fields.error("no_rope_layers", "must be a list of 0 and 1, one for each layer")
    return bool(listed[place])


def _listed_layer_types(fields: Fields, count: int, known: tuple[str, ...]) -> tuple[str, ...] | None:
    listed = fields.words("layer_types", known)
    if listed is not None and len(listed) != count:
        raise InputError(
            f"has {len(listed)} entries, but num_hidden_layers is {count}", field=fields.where + "layer_types"
        )
    return listed


def _reject_mixed_layer_types(fields: Fields) -> None:
    """Raise if layer_types contradicts an architecture whose layers are all equal."""
    listed = fields.data.get("layer_types")
    if listed and any(name != "full_attention" for name in listed):
        raise fields.error("layer_types", "this architecture has one type of layer only")


def _mixer(fields: Fields, traits: Traits, layer_type: str, hidden: int) -> Mixer:
    if traits.mixer == "mla":
        return _latent_attention(fields, traits)
    if layer_type == "linear_attention":
        return gated_delta(fields)
    window = None
    if traits.window in ("every", "switched") or layer_type == "sliding_attention":
        window = _window(fields, traits)
    return attention(fields, traits, hidden, window)


def _window(fields: Fields, traits: Traits) -> int | None:
    if traits.window in ("switched", "upper", "no_rope") and not fields.flag("use_sliding_window"):
        return None
    return fields.optional_size("sliding_window")


def attention(fields: Fields, traits: Traits, hidden: int, window: int | None) -> Attention:
    """Return the softmax attention of a config."""
    heads = fields.size("num_attention_heads")
    kv_heads = fields.optional_size("num_key_value_heads") or heads
    require_divisible(fields, "num_key_value_heads", kv_heads, "num_attention_heads", heads)
    head_dim = fields.optional_size("head_dim")
    if head_dim is None or traits.heads_divide_hidden or traits.head_dim_follows:
        require_divisible(fields, "num_attention_heads", heads, "hidden_size", hidden)
    if head_dim is not None and traits.head_dim_follows and head_dim != hidden // heads:
        raise fields.error(
            "head_dim", f"must be hidden_size / num_attention_heads = {hidden // heads} in this architecture"
        )
    if traits.output_gate and not fields.flag("attn_output_gate"):
        raise fields.error("attn_output_gate", "this architecture is only supported with its output gate")
    has_qk_norm = not traits.qk_norm_key or fields.flag(traits.qk_norm_key)
    return Attention(
        heads,
        kv_heads,
        head_dim or hidden // heads,
        window=window,
        qkv_bias=_on(fields, traits.qkv_bias),
        out_bias=_on(fields, traits.out_bias),
        qk_norm=traits.qk_norm if has_qk_norm else "none",
        output_gate=traits.output_gate,
        sinks=traits.sinks,
    )


def _latent_attention(fields: Fields, traits: Traits) -> MLA:
    fields.optional_size("num_key_value_heads")
    return MLA(
        heads=fields.size("num_attention_heads"),
        kv_lora=fields.size("kv_lora_rank"),
        qk_nope=fields.size("qk_nope_head_dim"),
        qk_rope=fields.size("qk_rope_head_dim"),
        v_head=fields.size("v_head_dim"),
        q_lora=fields.optional_size("q_lora_rank"),
        bias=fields.flag("attention_bias"),
    )


def gated_delta(fields: Fields) -> GatedDelta:
    """Return the gated-delta linear attention of a config."""
    k_heads, v_heads = fields.size("linear_num_key_heads"), fields.size("linear_num_value_heads")
    require_divisible(fields, "linear_num_key_heads", k_heads, "linear_num_value_heads", v_heads)
    return GatedDelta(
        k_heads,
        v_heads,
        fields.size("linear_key_head_dim"),
        fields.size("linear_value_head_dim"),
        fields.size("linear_conv_kernel_dim"),
    )


def _ffns(fields: Fields, traits: Traits, count: int) -> tuple[Ffn, ...]:
    """Return the feed-forward block of every layer."""
    routed = _routed_places(fields, traits.moe, count) if traits.moe else frozenset()
    if traits.moe:
        fields.read.update((traits.moe.experts, traits.moe.width, *fields.aliases.get(traits.moe.experts, ())))
    sparse = moe(fields, traits.moe, traits.gated) if traits.moe and routed else None
    if sparse is not None and len(routed) == count:
        return (sparse,) * count
    dense = Dense(fields.size("intermediate_size"), traits.gated, _on(fields, traits.mlp_bias))
    return tuple(sparse if sparse and place in routed else dense for place in range(count))


def _routed_places(fields: Fields, traits: MoeTraits, count: int) -> frozenset[int]:
    """Return the indices of the MoE layers."""
    every = frozenset(range(count))
    if traits.placed == "all":
        fields.read.update(("mlp_only_layers", "decoder_sparse_step"))
        return every
    if traits.placed == "stepped":
        step = fields.size("decoder_sparse_step")
        kept_dense = fields.places("mlp_only_layers", count)
        if not fields.count(traits.experts):
            return frozenset()
        return frozenset(place for place in every - kept_dense if (place + 1) % step == 0)
    first = fields.count("first_k_dense_replace", most=MAX_LAYERS)
    # transformers ignores moe_layer_freq, the models' own code reads it; every published file sets 1.
    frequency = fields.size("moe_layer_freq") if "moe_layer_freq" in fields.data else 1
    return frozenset(place for place in every if place >= first and place % frequency == 0)


def moe(fields: Fields, traits: MoeTraits, gated: bool) -> MoE:
    """Return the MoE block of a config."""
    experts, topk = fields.size(traits.experts), fields.size("num_experts_per_tok")
    if topk > experts:
        raise fields.error("num_experts_per_tok", f"is larger than the {experts} experts")
    width = fields.size(traits.width)
    shared = 0
    if traits.shared == "number":
        shared = (fields.count("n_shared_experts") if fields.raw("n_shared_experts") is not None else 0) * width
    elif traits.shared == "width":
        shared = fields.size("shared_expert_intermediate_size")
    return MoE(
        experts,
        topk,
        width,
        shared_width=shared,
        gated=gated,
        bias=traits.bias,
        router_bias=traits.router_bias,
        balance_bias=traits.balance_bias,
        dense_bias=_on(fields, traits.dense_bias),
        shared_gate=traits.shared_gate,
    )


def _on(fields: Fields, switch: Switch) -> bool:
    return fields.flag(switch) if isinstance(switch, str) else switch


def _may_have_mtp(traits: Traits) -> bool:
    return "num_nextn_predict_layers" in traits.defaults
