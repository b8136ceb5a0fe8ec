"""Keys that follow from others of a config whose layers differ in sizes or parts, or that have further linears."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

from .derived import FULL, SLIDING, Derived, shared_indexers
from .fields import MAX_LAYERS, Fields

_OF_RATIO = {0: SLIDING, 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
NO_MIXER = "no_attention"


def _depth(fields: Fields) -> int:
    return fields.size("num_hidden_layers", most=MAX_LAYERS)


def _list(fields: Fields, key: str, count: int) -> list[Any]:
    """Return a list with at least one entry for each layer; more entries are those of prediction heads."""
    value = fields.raw(key)
    if not isinstance(value, list) or len(value) < count:
        raise fields.error(key, f"must be a list of {count} entries, one for each layer")
    return value[:count]


def _number(fields: Fields, key: str) -> int:
    """Return a number of which null is none."""
    return fields.count(key) if fields.raw(key) is not None else 0


def _per_layer_inputs(fields: Fields, count: int) -> Derived:
    """Return the linears of a layer and the table of inputs that every layer adds (Gemma 3n, Gemma 4)."""
    width = _number(fields, "hidden_size_per_layer_input")
    table = fields.size("vocab_size_per_layer_input") if width else 0
    return {
        # one linear before all layers has an equal share for each of them
        "layer_linears": 3 * fields.size("hidden_size") * width,
        "input_tables": (table * count + 1) * width,
        "input_norms": int(width > 0),
    }


def _first_reused(fields: Fields, count: int) -> int:
    """Return the first layer that uses the keys and values of an earlier one; count if there is none."""
    reused = _number(fields, "num_kv_shared_layers")
    if reused > count:
        raise fields.error("num_kv_shared_layers", f"is larger than the {count} layers")
    return count - reused


def gemma4(fields: Fields) -> Derived:
    """Full attention with other heads than sliding attention, reused keys and values, inputs of every layer."""
    count, hidden = _depth(fields), fields.size("hidden_size")
    types = fields.raw("layer_types") or [SLIDING if (place + 1) % 6 else FULL for place in range(count)]
    if not isinstance(types, list) or len(types) != count:
        raise fields.error("layer_types", f"must be a list of {count} words")
    types = [*types[:-1], FULL]  # the last layer always has full attention
    experts = fields.flag("enable_moe_block")
    first, keys_are_values = _first_reused(fields, count), fields.flag("attention_k_eq_v")
    wide = fields.flag("use_double_wide_mlp")
    width = fields.size("intermediate_size")
    overrides = _gemma4_heads(fields, types, keys_are_values)
    inputs = _per_layer_inputs(fields, count)
    return {
        **inputs,
        "layer_types": types,
        "moe_places": list(range(count)) if experts else [],
        "norms": 4 + 3 * experts + inputs["input_norms"],
        "router_vectors": hidden + fields.size("num_experts") if experts else 0,
        "reuses_keys": False,
        "keys_are_values": False,
        "per_layer": [
            {
                **overrides[place],
                "reuses_keys": place >= first,
                "keys_are_values": keys_are_values and kind == FULL,
                "intermediate_size": width * (2 if wide and place >= first > 0 else 1),
            }
            for place, kind in enumerate(types)
        ],
    }


def _gemma4_heads(fields: Fields, types: list[Any], keys_are_values: bool) -> list[Derived]:
    """Return the heads of every layer: listed by layer, or those of full attention as two keys."""
    plain = {"head_dim": fields.size("head_dim"), "num_key_value_heads": fields.size("num_key_value_heads")}
    if "per_layer_config" in fields.data:
        listed = fields.raw("per_layer_config")
        if not isinstance(listed, Mapping) or not all(isinstance(one, Mapping) for one in listed.values()):
            raise fields.error("per_layer_config", "must be an object of one object for each layer")
        if not all(str(place).isdecimal() and int(place) < len(types) for place in listed):
            raise fields.error("per_layer_config", f"its keys must be layer indices below {len(types)}")
        at = {int(place): one for place, one in listed.items()}
        found = [{**at.get(place, {})} for place in range(len(types))]
        if any(set(one) - set(plain) for one in found):
            raise fields.error("per_layer_config", f"only {' and '.join(plain)} of a layer are supported")
        return [{**plain, **one} for one in found]
    wide = {"head_dim": fields.size("global_head_dim")}
    own = fields.optional_size("num_global_key_value_heads")
    if own is not None and keys_are_values:
        wide["num_key_value_heads"] = own
    return [{**plain, **(wide if kind == FULL else {})} for kind in types]


def gemma3n(fields: Fields) -> Derived:
    """Several residual streams, a low-rank block beside attention, widths listed by layer."""
    count, hidden = _depth(fields), fields.size("hidden_size")
    streams, rank = fields.size("altup_num_inputs"), fields.size("laurel_rank")
    widths = fields.raw("intermediate_size")
    listed = _list(fields, "intermediate_size", count) if isinstance(widths, list) else [widths] * count
    first, inputs = _first_reused(fields, count), _per_layer_inputs(fields, count)
    streamed = streams * (hidden + streams + streams**2)  # router, corrections and predictions of streams
    return {
        **inputs,
        "layer_types": fields.raw("layer_types") or [SLIDING if (place + 1) % 5 else FULL for place in range(count)],
        "norms": 7 + inputs["input_norms"],
        "layer_linears": inputs["layer_linears"] + 2 * rank * hidden + streamed,
        "input_tables": inputs["input_tables"] + 2 * (streams - 1) * hidden**2,
        "reuses_keys": False,
        "per_layer": [
            {"intermediate_size": width, "reuses_keys": place >= first > 0} for place, width in enumerate(listed)
        ],
    }


def _hyper_connections(fields: Fields, outputs: int, scales: int) -> Derived:
    """Return the parameters that mix parallel residual streams, before attention, experts and the head."""
    streams, hidden = fields.size("hc_mult"), fields.size("hidden_size")
    return {
        "layer_linears": 2 * outputs * streams * hidden,
        "layer_vectors": 2 * (outputs + scales),
        "stream_head": streams * streams * hidden + streams + 1,
    }


def deepseek_v4(fields: Fields) -> Derived:
    """A window in every layer; compressed keys in most, of which an indexer selects some."""
    count, streams = _depth(fields), fields.size("hc_mult")
    types = fields.raw("layer_types")
    if types is None and "compress_ratios" in fields.data:
        ratios = _list(fields, "compress_ratios", count)
        if not all(isinstance(one, int) and one in _OF_RATIO for one in ratios):
            raise fields.error("compress_ratios", f"only {', '.join(map(str, _OF_RATIO))} are supported")
        types = [_OF_RATIO[one] for one in ratios]
    sparse, heavy = _OF_RATIO[4], _OF_RATIO[128]
    rates = fields.section("compress_rates", {sparse: 4, heavy: 128})
    return {
        **_hyper_connections(fields, (2 + streams) * streams, 3),
        "layer_types": types or [sparse if place > 2 and place % 2 else heavy for place in range(count)],
        "sparse_rate": rates.size(sparse) if fields.data.get("compress_rate_csa") is None
        else fields.size("compress_rate_csa"),
        "heavy_rate": rates.size(heavy) if fields.data.get("compress_rate_hca") is None
        else fields.size("compress_rate_hca"),
    }  # fmt: skip


def mimo_v2(fields: Fields) -> Derived:
    """Sliding attention has sinks and twice the key/value heads; published files list layers as 0 and 1."""
    count, heads = _depth(fields), fields.size("num_key_value_heads")
    types, blocks = fields.raw("layer_types"), fields.raw("mlp_layer_types")
    if types is None and "hybrid_layer_pattern" in fields.data:
        types = [SLIDING if one else FULL for one in _list(fields, "hybrid_layer_pattern", count)]
    types = types or [SLIDING if place and (place + 1) % 6 else FULL for place in range(count)]
    if blocks is None and isinstance(fields.data.get("moe_layer_freq"), list):
        blocks = ["sparse" if one else "dense" for one in _list(fields, "moe_layer_freq", count)]
    fields.read.add("moe_layer_freq")
    if not isinstance(types, list) or len(types) != count:
        raise fields.error("layer_types", f"must be a list of {count} words")
    own = fields.size("swa_num_key_value_heads") if "swa_num_key_value_heads" in fields.data else 2 * heads
    sliding = [kind == SLIDING for kind in types]
    return {
        "layer_types": types,
        "mlp_layer_types": blocks or ["dense"] + ["sparse"] * (count - 1),
        "has_sinks": False,
        "per_layer": [{"num_key_value_heads": own if one else heads, "has_sinks": one} for one in sliding],
    }


def step3p7(fields: Fields) -> Derived:
    """Sliding attention may have other query heads; published files list experts' layers as text and pad the lists."""
    count, heads = _depth(fields), fields.size("num_attention_heads")
    types = _list(fields, "layer_types", count) if fields.raw("layer_types") is not None else [FULL] * count
    other = fields.section("attention_other_setting")
    named = fields.optional_size("num_sliding_attention_heads")
    sliding = other.size("num_attention_heads") if named is None and "num_attention_heads" in other.data else named
    listed = fields.data.get("moe_layers_enum")
    found: Derived = {"layer_types": types}
    if listed is not None and fields.raw("mlp_layer_types") is None:
        places = [one.strip() for one in listed.split(",")] if isinstance(listed, str) else listed
        if not isinstance(places, list) or not all(str(one).isdigit() for one in places):
            raise fields.error("moe_layers_enum", "must be a list of layer indices, such as 3,4,5")
        routed = {int(one) for one in places}
        found["mlp_layer_types"] = ["sparse" if place in routed else "dense" for place in range(count)]
    elif fields.raw("mlp_layer_types") is not None:
        found["mlp_layer_types"] = _list(fields, "mlp_layer_types", count)
    own = [sliding or heads if kind == SLIDING else heads for kind in types]
    return {**found, "per_layer": [{"num_attention_heads": one} for one in own]}


INDEXER = {
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
}
"""Keys of MiniMax-M3's indexer, and their names in the section of its published file."""


def minimax_m3(fields: Fields) -> Derived:
    """Sparse attention and experts by lists of 0 and 1, as published files have them, or by names."""
    count = _depth(fields)
    section = fields.section("sparse_attention_config")
    found: Derived = {key: section.size(name) for key, name in INDEXER.items() if name in section.data}
    kinds = (
        ("layer_types", section, "sparse_attention_freq", ("full_attention", "minimax_m3_sparse")),
        ("mlp_layer_types", fields, "moe_layer_freq", ("dense", "sparse")),
    )
    for key, owner, flags, names in kinds:
        if fields.raw(key) is None and owner.data.get(flags) is not None:
            listed = _list(owner, flags, count)
            if not all(one in (0, 1) for one in listed):
                raise owner.error(flags, "must be a list of 0 and 1, one for each layer")
            found[key] = [names[int(one)] for one in listed]
    fields.read.update((*INDEXER, "moe_layer_freq", "first_k_dense_replace", "moe_intermediate_size"))
    found.setdefault("mlp_layer_types", fields.raw("mlp_layer_types") or ["sparse"] * count)
    width = fields.data.get("moe_intermediate_size")
    if width is not None and width != fields.size("intermediate_size"):
        raise fields.error("moe_intermediate_size", "contradicts intermediate_size, the width of the experts")
    return found


def hy_v4(fields: Fields) -> Derived:
    """Sparse latent attention with sinks and an output gate; hyper-connections."""
    streams, heads = fields.size("hc_mult"), fields.size("num_attention_heads")
    found = _hyper_connections(fields, 2 * streams, 2)
    gate = heads * fields.size("v_head_dim") * fields.size("hidden_size")
    linears, vectors = found["layer_linears"] + gate, found["layer_vectors"] + heads
    return {**found, **shared_indexers(fields), "layer_linears": linears, "layer_vectors": vectors}


def norm_after_experts(fields: Fields) -> Derived:
    """Layers with experts have a third norm (A.X K1)."""
    count, first = _depth(fields), fields.count("first_k_dense_replace")
    return {"norms": 2, "per_layer": [{"norms": 2 if place < first else 3} for place in range(count)]}


def block_configs(fields: Fields) -> Derived:
    """Every layer has its own width and key/value heads, or no attention or feed-forward block (Nemotron NAS)."""
    count, heads = _depth(fields), fields.size("num_attention_heads")
    blocks = _list(fields, "block_configs", count)
    found = [_block(fields, block, heads) for block in blocks]
    types = [NO_MIXER if one["num_key_value_heads"] is None else FULL for one in found]
    return {"layer_types": types, "has_block": True, "norms": 2, "head_dim": None, "per_layer": found}


def _block(fields: Fields, block: Any, heads: int) -> Derived:
    parts: list[Any] = [block.get(name) for name in ("attention", "ffn")] if isinstance(block, Mapping) else []
    if len(parts) != 2 or not all(isinstance(part, Mapping) for part in parts):
        raise fields.error("block_configs", "must be a list of objects with attention and ffn")
    attention, ffn = parts
    for part in parts:
        for key in ("replace_with_linear", "sparsify", "window_length", "num_sink_tokens"):
            if part.get(key):
                raise fields.error("block_configs", f"{key} is not supported")
    group, factor = attention.get("n_heads_in_group"), ffn.get("ffn_mult")
    has_attention, has_block = not attention.get("no_op"), not ffn.get("no_op")
    if has_attention and (not isinstance(group, int) or isinstance(group, bool) or group < 1 or heads % group):
        raise fields.error("block_configs", f"n_heads_in_group {group!r} does not divide the {heads} heads")
    if has_block and (isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < 1000):
        raise fields.error("block_configs", f"ffn_mult {factor!r} must be a positive number")
    width = 256 * ceil(int(2 * factor * fields.size("hidden_size") / 3) / 256) if has_block else None
    return {
        "num_key_value_heads": heads // group if has_attention else None,
        "intermediate_size": width,
        "has_block": has_block,
        "norms": has_attention + has_block,
    }
