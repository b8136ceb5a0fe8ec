"""Read a decoder of any architecture in the table of traits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from meshwright.errors import InputError

from ..spec import MLA, Attention, Dense, Ffn, GatedDelta, Group, Layer, Mixer, MoE
from .compressed import COMPRESSED
from .fields import MAX_LAYERS, Fields, require_divisible
from .recurrent import SCANS
from .traits import MoeTraits, Number, Switch, Traits


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
    extra_params: int = 0
    head_bias: bool = False


def read_decoder(fields: Fields, traits: Traits) -> Decoder:
    """Return the decoder that a config describes."""
    _require_supported(fields, traits)
    if traits.derive is not None:
        fields.derived.update(traits.derive(fields))
    hidden = fields.size("hidden_size")
    count = fields.size("num_hidden_layers", most=MAX_LAYERS)
    types = layer_types(fields, traits, count)
    routed = _routed_places(fields, traits.moe, count) if traits.moe else frozenset()
    layers = _layers(fields, traits, types, routed)
    mtp = fields.count("num_nextn_predict_layers", most=MAX_LAYERS) if _may_have_mtp(traits) else 0
    norms = _number(fields, traits.final_norms) + traits.embedding_norms
    return Decoder(
        hidden=hidden,
        layers=layers,
        vocab=fields.size("vocab_size"),
        tied=fields.flag("tie_word_embeddings") if traits.is_tied is None else traits.is_tied,
        max_seq_length=fields.size("max_position_embeddings"),
        final_norm_params=norms * hidden,
        activation=_activation(fields, traits),
        learned_positions=_number(fields, traits.positions),
        extra_params=_number(fields, traits.extra_params),
        head_bias=_on(fields, traits.head_bias),
        mtp_layers=mtp,
        # MTP modules repeat the model's last block, with full attention in hybrids.
        mtp_layer=_layer(fields, traits, _full_type(traits), count - 1 in routed) if mtp else None,
    )


def _require_supported(fields: Fields, traits: Traits) -> None:
    """Raise for a value of a key that would make other shapes than those of the table."""
    fields.read.update(traits.ignored)
    for key, values in traits.only.items():
        known = any(key in where for where in (fields.data, fields.defaults, fields.fallbacks))
        value = fields.raw(key) if known else values[0]
        if value not in values:
            shown = " or ".join(json.dumps(one) for one in values)
            built = key in traits.inspected or key in fields.fallbacks  # a key of transformers' config class
            # another kind of value is a mistake, unless the row names the key: gating is a switch or a word
            valid = key in traits.inspected or isinstance(value, type(values[0]))
            refuse = fields.unsupported if built and valid else fields.error
            raise refuse(key, f"this architecture is only supported with {shown}")


def _activation(fields: Fields, traits: Traits) -> str:
    key = traits.activation_key
    return key[1:] if key.startswith("=") else fields.text(key)


def _full_type(traits: Traits) -> str:
    """Return the word for a layer with full attention; the first word if there is none."""
    words = [word for word, mixer in traits.mixers.items() if mixer in FULL]
    return next(iter((*words, *traits.mixers)), "full_attention")


def _layers(fields: Fields, traits: Traits, types: tuple[str, ...], routed: frozenset[int]) -> tuple[Layer, ...]:
    """Return every layer; equal ones are built once."""
    overrides: list[dict[str, Any]] = fields.derived.get("per_layer") or [{}] * len(types)
    built: dict[tuple[Any, ...], Layer] = {}
    layers = []
    for place, (name, other) in enumerate(zip(types, overrides, strict=True)):
        for key_of_layer, value in other.items():
            if isinstance(value, (list, dict)):
                raise fields.error(key_of_layer, f"must be a number for each layer; layer {place} has {value!r:.40}")
        key = (name, place in routed, tuple(sorted(other.items())))
        if key not in built:
            built[key] = _layer(fields.at(other), traits, name, place in routed)
        layers.append(built[key])
    return tuple(layers)


def _layer(fields: Fields, traits: Traits, layer_type: str, is_moe: bool) -> Layer:
    hidden = fields.size("hidden_size")
    beside = MIXERS[traits.beside](fields, traits, hidden) if traits.beside else None
    return Layer(
        _mixer(fields, traits, layer_type, hidden),
        _ffn(fields, traits, is_moe) if _on(fields, traits.has_ffn) else None,
        cross=beside if isinstance(beside, Attention) else None,
        norm_params=_number(fields, traits.layer_norms) * hidden,
        extra_params=_number(fields, traits.layer_vectors),
        extra_matmul=_number(fields, traits.layer_matmul),
        residuals=_number(fields, traits.residuals),
    )


def _number(fields: Fields, number: Number) -> int:
    if isinstance(number, str):
        known = fields.derived.get(number)
        return int(known) if known is not None else fields.count(number)
    return number


def grouped(layers: Iterable[Layer]) -> tuple[Group, ...]:
    """Group equal layers, in the order of their first appearance."""
    places: dict[Layer, list[int]] = {}
    for place, layer in enumerate(layers):
        places.setdefault(layer, []).append(place)
    return tuple(Group(layer, tuple(at)) for layer, at in places.items())


def layer_types(fields: Fields, traits: Traits, count: int) -> tuple[str, ...]:
    """Return the type of every layer: full_attention, sliding_attention, linear_attention or a word of the traits."""
    full, sliding = "full_attention", "sliding_attention"
    if traits.mixers:
        listed = _listed_layer_types(fields, count, tuple(traits.mixers))
        return listed or (next(iter(traits.mixers)),) * count
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
    if traits.window == "pattern_first":
        return place % fields.size("sliding_window_pattern") != 0
    if traits.window == "typed_upper":
        return fields.optional_size("sliding_window") is not None and place >= fields.count("max_window_layers")
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
    if listed and (not isinstance(listed, list) or any(name != "full_attention" for name in listed)):
        raise fields.error("layer_types", "this architecture has one type of layer only")


def _mixer(fields: Fields, traits: Traits, layer_type: str, hidden: int) -> Mixer | None:
    if traits.mixers:
        return MIXERS[traits.mixers[layer_type]](fields, traits, hidden)
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
        own = f'"head_dim": N beside {fields.where}num_attention_heads in the file, if heads have a width of their own'
        fix = () if traits.heads_divide_hidden or traits.head_dim_follows else (own,)
        require_divisible(fields, "num_attention_heads", heads, "hidden_size", hidden, fix)
    if head_dim is not None and traits.head_dim_follows and head_dim != hidden // heads:
        raise fields.error(
            "head_dim", f"must be hidden_size / num_attention_heads = {hidden // heads} in this architecture"
        )
    if traits.output_gate_key and not fields.flag(traits.output_gate_key):
        raise fields.error(traits.output_gate_key, "this architecture is only supported with its output gate")
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
        sinks=_on(fields, traits.sinks),
        shared_kv=_on(fields, traits.shared_kv),
        reused_kv=_on(fields, traits.reused_kv),
        head_gate=_on(fields, traits.head_gate),
        differential=traits.differential,
        v_dim=fields.optional_size(traits.v_dim) if traits.v_dim else None,
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


def _ffn(fields: Fields, traits: Traits, is_moe: bool) -> Ffn:
    """Return the feed-forward block of a layer."""
    gated = _on(fields, traits.gated)
    if traits.moe:
        shared = {"number": (traits.moe.shared_number,), "width": (traits.moe.shared_width,)}.get(traits.moe.shared, ())
        keys = (traits.moe.experts, traits.moe.width, *shared)
        fields.read.update((*keys, *fields.aliases.get(traits.moe.experts, ())))
        fields.passed.update((traits.moe.shared_number, traits.moe.shared_width))
        if is_moe:
            return moe(fields, traits.moe, gated)
    width = fields.optional_size(traits.width) if traits.ffn_multiple else fields.size(traits.width)
    if width is None:
        width = _number(fields, traits.ffn_multiple) * fields.size("hidden_size")
    return Dense(width, gated, _on(fields, traits.mlp_bias))


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
    if traits.placed == "derived":
        return fields.places("moe_places", count)
    if traits.placed == "listed":
        listed = fields.words("mlp_layer_types", ("dense", "sparse"))
        if listed is not None and len(listed) != count:
            raise fields.error("mlp_layer_types", f"has {len(listed)} entries, but num_hidden_layers is {count}")
        if listed is not None:
            fields.read.add("first_k_dense_replace")
            return frozenset(place for place, word in enumerate(listed) if word == "sparse")
    first = fields.count("first_k_dense_replace", most=MAX_LAYERS)
    # transformers ignores moe_layer_freq, the models' own code reads it; every published file sets 1.
    frequency = fields.size("moe_layer_freq") if "moe_layer_freq" in fields.data else 1
    return frozenset(place for place in every if place >= first and place % frequency == 0)


def require_expert_groups(fields: Fields, experts: int) -> None:
    """Raise for router groups that do not divide the experts, or of which a token uses more than there are."""
    groups = fields.optional_size("n_group") if fields.data.get("n_group") else None
    if groups is None or groups == 1 or fields.data.get("topk_method") == "greedy":  # a router without groups
        return
    if experts % groups:
        raise fields.error("n_group", f"does not divide the {experts} experts")
    used = fields.optional_size("topk_group") if fields.data.get("topk_group") else None
    if used is not None and used > groups:
        raise fields.error("topk_group", f"is larger than n_group={groups}")


def moe(fields: Fields, traits: MoeTraits, gated: bool) -> MoE:
    """Return the MoE block of a config."""
    experts, topk = fields.size(traits.experts), fields.size(traits.topk)
    if topk > experts:
        raise fields.error(traits.topk, f"is larger than the {experts} experts")
    require_expert_groups(fields, experts)
    width = fields.size(traits.width)
    shared = 0
    if traits.shared == "number":
        number = traits.shared_number
        shared = (fields.count(number) if fields.raw(number) is not None else 0) * width
    elif traits.shared == "width":
        shared = fields.count(traits.shared_width)
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
        latent=fields.optional_size(traits.latent) if traits.latent else None,
        parallel=Dense(fields.size(traits.parallel), gated) if traits.parallel else None,
    )


def _on(fields: Fields, switch: Switch) -> bool:
    return fields.flag(switch) if isinstance(switch, str) else switch


def _may_have_mtp(traits: Traits) -> bool:
    return "num_nextn_predict_layers" in traits.defaults


def _windowed(fields: Fields, traits: Traits, hidden: int) -> Attention:
    return attention(fields, traits, hidden, fields.optional_size("sliding_window"))


def _chunked(fields: Fields, traits: Traits, hidden: int) -> Attention:
    window = fields.optional_size("attention_chunk_size")
    return msgspec.structs.replace(attention(fields, traits, hidden, window), chunked=window is not None)


def _block_sparse(fields: Fields, traits: Traits, hidden: int) -> Attention:
    """Return attention to the keys of the blocks that an indexer selects (MiniMax-M3)."""
    keys = fields.size("index_topk_blocks") * fields.size("index_block_size")
    heads, width = fields.size("index_n_heads"), fields.size("index_head_dim")
    base = attention(fields, traits, hidden, None)
    return msgspec.structs.replace(base, topk=keys, index_heads=heads, index_dim=width)


def _sparse_latent(fields: Fields, traits: Traits, hidden: int) -> MLA:
    """Return latent attention over the keys that an indexer selects (DeepSeek sparse attention)."""
    base = _latent_attention(fields, traits)
    heads, width = fields.size("index_n_heads"), fields.size("index_head_dim")
    return msgspec.structs.replace(base, topk=fields.size("index_topk"), index_heads=heads, index_dim=width)


def _shared_index(fields: Fields, traits: Traits, hidden: int) -> MLA:
    """Return sparse latent attention that uses the selection of an earlier layer's indexer."""
    return msgspec.structs.replace(_sparse_latent(fields, traits, hidden), index_heads=0)


MixerReader = Callable[[Fields, Traits, int], Mixer | None]
FULL = ("attention", "mla", "dsa")  # mixers of layers that see every earlier token
MIXERS: Mapping[str, MixerReader] = {
    "attention": lambda fields, traits, hidden: attention(fields, traits, hidden, None),
    "sliding": _windowed,
    "chunked": _chunked,
    "block_sparse": _block_sparse,
    "mla": lambda fields, traits, hidden: _latent_attention(fields, traits),
    "dsa": _sparse_latent,
    "dsa_shared": _shared_index,
    "delta": lambda fields, traits, hidden: gated_delta(fields),
    "none": lambda fields, traits, hidden: None,
    **COMPRESSED,
    **SCANS,
}
