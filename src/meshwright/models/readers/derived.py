"""Keys that follow from others of a config, under the names that the tables of architectures use."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any

from .fields import MAX_LAYERS, Fields

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
Derived = dict[str, Any]


def _depth(fields: Fields) -> int:
    return fields.size("num_hidden_layers", most=MAX_LAYERS)


def _norms(count: bool | int) -> int:
    """Return the vectors of a number of layer norms, which have a weight and a bias."""
    return 2 * int(count)


def one_kind_of_head(fields: Fields) -> Derived:
    """Every query head has its own key and value head."""
    return {"num_key_value_heads": None, "head_dim": None}


def falcon(fields: Fields) -> Derived:
    """Key/value heads and norms depend on three flags of Falcon's generations."""
    heads, new = fields.size("num_attention_heads"), fields.flag("new_decoder_architecture")
    own = fields.optional_size("num_kv_heads") or heads
    norms = fields.optional_size("num_ln_in_parallel_attn") or (2 if new else 1)
    two = not fields.flag("parallel_attn") or norms == 2
    return {
        "num_key_value_heads": own if new else 1 if fields.flag("multi_query") else heads,
        "head_dim": None,
        "layer_norms": _norms(2 if two else 1),
    }


def gpt_bigcode(fields: Fields) -> Derived:
    """One key/value head if multi_query is set."""
    return {"num_key_value_heads": 1 if fields.flag("multi_query") else None, "head_dim": None}


def gpt_neo(fields: Fields) -> Derived:
    """attention_types lists patterns with their repetitions."""
    listed = fields.raw("attention_layers") if "attention_layers" in fields.data else None
    types = fields.raw("attention_types")
    if listed is None:
        try:
            listed = [word for words, times in types for _ in range(times) for word in words]
        except (TypeError, ValueError):
            raise fields.error("attention_types", "must be a list of [pattern, repetitions]") from None
    return {**one_kind_of_head(fields), "layer_types": listed}


def last_layer_bias(fields: Fields) -> Derived:
    """Only the last attention has an output bias (GPT-NeoX Japanese)."""
    count = _depth(fields)
    return {
        **one_kind_of_head(fields),
        "intermediate_size": None,
        "last_bias": False,
        "per_layer": [{}] * (count - 1) + [{"last_bias": True}],
    }


def four_times(fields: Fields) -> Derived:
    """The feed-forward width has no key: it is a multiple of the model width."""
    return {**one_kind_of_head(fields), "intermediate_size": None}


def opt(fields: Fields) -> Derived:
    """Two more position rows than positions; norms that flags switch off."""
    if fields.size("word_embed_proj_dim") != fields.size("hidden_size"):
        raise fields.unsupported("word_embed_proj_dim", "an embedding of another width than hidden_size is not read")
    affine = fields.flag("layer_norm_elementwise_affine")
    last = fields.flag("do_layer_norm_before") and not fields.flag("_remove_final_layer_norm")
    return {
        **one_kind_of_head(fields),
        "position_rows": fields.size("max_position_embeddings") + 2,
        "layer_norms": _norms(2 * affine),
        "final_norms": _norms(affine and last),
    }


def two_more_positions(fields: Fields) -> Derived:
    """The position table has two more rows than positions."""
    return {**one_kind_of_head(fields), "position_rows": fields.size("max_position_embeddings") + 2}


def stablelm(fields: Fields) -> Derived:
    """A parallel residual has one norm."""
    return {"layer_norms": _norms(1 if fields.flag("use_parallel_residual") else 2)}


def post_norms(fields: Fields) -> Derived:
    """Two more norms if use_post_norm is set."""
    return {"layer_norms": 4 if fields.flag("use_post_norm") else 2}


def lambdas(fields: Fields) -> Derived:
    """Differential attention has four vectors of a head's width."""
    heads = fields.size("num_attention_heads")
    return {"lambdas": 4 * (fields.optional_size("head_dim") or fields.size("hidden_size") // heads)}


def exaone(fields: Fields) -> Derived:
    """sliding_window_pattern is a number or letters such as LLLG, the last of which is global."""
    pattern = fields.raw("sliding_window_pattern")
    if isinstance(pattern, str):
        if not pattern or set(pattern) - set("LG") or "G" in pattern[:-1]:
            raise fields.error("sliding_window_pattern", "must be a number or letters L with one G at the end")
        pattern = len(pattern) if pattern.endswith("G") else MAX_LAYERS + 1
    # without a window the pattern does not matter
    return {"sliding_window_pattern": pattern or 1}


def stepped_experts(fields: Fields) -> Derived:
    """Experts from moe_layer_start_index to moe_layer_end_index, every moe_layer_interval layers (ERNIE 4.5)."""
    count = _depth(fields)
    last = fields.raw("moe_layer_end_index")
    end = count - 1 if last in (-1, None) else fields.count("moe_layer_end_index")
    start, step = fields.count("moe_layer_start_index"), fields.size("moe_layer_interval")
    return {"moe_places": [place for place in range(start, min(end + 1, count)) if (place + 1) % step == 0]}


def llama4(fields: Fields) -> Derived:
    """Chunked attention with RoPE and full attention without; experts in every n-th layer."""
    count = _depth(fields)
    step, interval = fields.size("interleave_moe_layer_step"), fields.size("no_rope_layer_interval")
    listed = fields.raw("no_rope_layers")
    if listed and (not isinstance(listed, list) or len(listed) != count or any(one not in (0, 1) for one in listed)):
        raise fields.error("no_rope_layers", "must be a list of 0 and 1, one for each layer")
    rope = listed or [int((place + 1) % interval != 0) for place in range(count)]
    places = fields.raw("moe_layers")
    types = fields.raw("layer_types") or ["chunked_attention" if one else FULL for one in rope]
    return {"layer_types": types, "moe_places": places if places is not None else list(range(step - 1, count, step))}


def first_of_list(*keys: str) -> Callable[[Fields], Derived]:
    """Return a function that takes one number from keys that list one for each layer, which must all be equal."""

    def derive(fields: Fields) -> Derived:
        found: Derived = {}
        for key in keys:
            value = fields.raw(key)
            if isinstance(value, list):
                if not value or len(set(map(repr, value))) > 1:
                    raise fields.error(key, "different values for each layer are not supported")
                found[key] = value[0]
        return found

    return derive


def dense_prefix(fields: Fields) -> Derived:
    """Leading dense layers have their own width and pattern of windows (Cohere 2 MoE)."""
    count = _depth(fields)
    first = fields.count("first_k_dense_replace") if "first_k_dense_replace" in fields.data else 0
    own, rest = fields.size("prefix_dense_sliding_window_pattern"), fields.size("sliding_window_pattern")
    places = [(place, own) for place in range(first)] + [(place, rest) for place in range(count - first)]
    return {
        "layer_types": fields.raw("layer_types") or [SLIDING if (at + 1) % n else FULL for at, n in places],
        "first_k_dense_replace": first,
        "dense_width": fields.optional_size("prefix_dense_intermediate_size") or fields.size("intermediate_size"),
    }


def shared_indexers(fields: Fields) -> Derived:
    """Layers with an indexer and layers that use an earlier one's selection (GLM 5)."""
    count = _depth(fields)
    types = fields.raw("indexer_types")
    pattern = fields.data.get("index_topk_pattern")
    if types is None and isinstance(pattern, str):
        types = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern]
    if types is None:
        every, skipped = (
            fields.data.get(key, fields.defaults.get(key, least))
            for key, least in (("index_topk_freq", 1), ("index_skip_topk_offset", 2))
        )
        if not isinstance(every, int) or not isinstance(skipped, int):
            raise fields.error("index_topk_freq", "must be an integer")
        types = ["shared" if max(place - skipped + 1, 0) % max(every, 1) else "full" for place in range(count)]
    if not isinstance(types, list) or set(map(str, types)) - {"full", "shared"} or len(types) != count:
        raise fields.error("indexer_types", "must be a list of full and shared, one for each layer")
    return {"layer_types": [f"{word}_indexer" for word in types]}


def jamba(fields: Fields) -> Derived:
    """Attention and experts every n-th layer, from an offset on."""
    count = _depth(fields)
    period, offset = fields.size("attn_layer_period"), fields.count("attn_layer_offset")
    step, start = fields.size("expert_layer_period"), fields.count("expert_layer_offset")
    experts = fields.size("num_experts")
    return {
        **_mamba_sizes(fields, "mamba_expand", "mamba_dt_rank"),
        "layer_types": ["attention" if place % period == offset else "mamba" for place in range(count)],
        "moe_places": [place for place in range(count) if experts > 1 and place % step == start],
        "mamba_inner_norms": 1,
    }


def _mamba_sizes(fields: Fields, expand: str, rank: str) -> Derived:
    """Return the inner width and the rank of dt, which may be \"auto\"."""
    hidden = fields.size("hidden_size")
    auto = fields.raw(rank) == "auto"
    return {
        "mamba_inner": fields.size(expand) * hidden,
        "mamba_dt_rank": ceil(hidden / 16) if auto else fields.size(rank),
    }


def mamba(fields: Fields) -> Derived:
    """A model of scans only: no attention, no feed-forward blocks."""
    hidden = fields.size("hidden_size")
    given = fields.data.get("intermediate_size")
    found = _mamba_sizes(fields, "expand", "time_step_rank")
    inner = fields.size("intermediate_size") if given is not None else found["mamba_inner"]
    return {
        **found,
        "mamba_inner": inner,
        "mamba_d_state": fields.size("state_size"),
        "mamba_d_conv": fields.size("conv_kernel"),
        "mamba_conv_bias": fields.flag("use_conv_bias"),
        "mamba_proj_bias": fields.flag("use_bias"),
        "mamba_inner_norms": 0,
        "hidden_size": hidden,
    }


def mamba2(fields: Fields) -> Derived:
    """The same, of the second version."""
    heads, width = fields.size("num_heads"), fields.size("head_dim")
    if heads * width != fields.size("expand") * fields.size("hidden_size"):
        raise fields.error("num_heads", "num_heads × head_dim must be expand × hidden_size")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": width,
        "mamba_n_groups": fields.size("n_groups"),
        "mamba_d_state": fields.size("state_size"),
        "mamba_d_conv": fields.size("conv_kernel"),
        "mamba_conv_bias": fields.flag("use_conv_bias"),
        "mamba_proj_bias": fields.flag("use_bias"),
        "mamba_rms_norm": True,
    }


def _head_sizes(fields: Fields, inner: int) -> Derived:
    """Return the sizes of Mamba-2 heads; a head's width may be \"auto\"."""
    heads = fields.size("mamba_n_heads")
    if inner % heads:
        raise fields.error("mamba_n_heads", f"does not divide the inner width {inner}")
    width = inner // heads if fields.raw("mamba_d_head") == "auto" else fields.size("mamba_d_head")
    if width * heads != inner:
        raise fields.error("mamba_d_head", f"mamba_n_heads × mamba_d_head must be the inner width {inner}")
    return {"mamba_d_head": width}


def bamba(fields: Fields) -> Derived:
    """Attention at listed layers, Mamba-2 elsewhere."""
    count = _depth(fields)
    places = fields.places("attn_layer_indices", count)
    return {
        **_head_sizes(fields, fields.size("mamba_expand") * fields.size("hidden_size")),
        "layer_types": [FULL if place in places else LINEAR for place in range(count)],
        "mamba_rms_norm": True,
    }


def granite_hybrid(fields: Fields) -> Derived:
    """Mamba-2 or attention in every layer; experts if there are any, and a shared block."""
    experts = fields.count("num_local_experts")
    return {
        **_head_sizes(fields, fields.size("mamba_expand") * fields.size("hidden_size")),
        "layer_types": fields.raw("layer_types") or [LINEAR] * _depth(fields),
        "moe_places": list(range(_depth(fields))) if experts else [],
        "mamba_rms_norm": True,
    }


def falcon_h1(fields: Fields) -> Derived:
    """Mamba-2 and attention side by side in every layer."""
    inner = fields.optional_size("mamba_d_ssm") or fields.size("mamba_expand") * fields.size("hidden_size")
    return _head_sizes(fields, inner)


def lfm2(fields: Fields) -> Derived:
    """Short convolutions with attention at listed layers; the width is adjusted to a multiple."""
    count = _depth(fields)
    types, width = fields.raw("layer_types"), fields.size("intermediate_size")
    places = (
        fields.places("full_attn_idxs", count) if fields.raw("full_attn_idxs") is not None else frozenset(range(count))
    )
    if fields.flag("block_auto_adjust_ff_dim"):
        width = int(2 * width / 3)
        factor = fields.raw("block_ffn_dim_multiplier")
        if factor is not None:
            if isinstance(factor, bool) or not isinstance(factor, (int, float)) or factor <= 0:
                raise fields.error("block_ffn_dim_multiplier", "must be a positive number")
            multiple = fields.size("block_multiple_of")
            width = multiple * ceil(int(factor * width) / multiple)
    listed = [FULL if place in places else "conv" for place in range(count)]
    return {"layer_types": types or listed, "adjusted_width": width}


def lfm2_moe(fields: Fields) -> Derived:
    """Dense blocks first, then experts."""
    return {"moe_places": list(range(min(fields.count("num_dense_layers"), _depth(fields)), _depth(fields)))}


def minimax(fields: Fields) -> Derived:
    """Full and linear attention in turn, unless listed."""
    types = fields.raw("layer_types")
    return {"layer_types": types or [LINEAR if place % 2 else FULL for place in range(_depth(fields))]}


def kimi_linear(fields: Fields) -> Derived:
    """Kimi delta attention with latent attention at listed layers; published files nest the sizes."""
    count = _depth(fields)
    nested = fields.section("linear_attn_config")
    found: Derived = {}
    for key, inner in (
        ("head_dim", "head_dim"),
        ("num_heads", "num_heads"),
        ("conv_kernel_dim", "short_conv_kernel_size"),
    ):
        found[f"linear_{key}"] = nested.size(inner) if inner in nested.data else fields.size(f"linear_{key}")
    found["linear_full_rank_gate"] = "use_full_rank_gate" in nested.data and nested.flag("use_full_rank_gate")
    types = fields.raw("layer_types")
    if types is None and "full_attn_layers" in nested.data:
        full = nested.places("full_attn_layers", count + 1)  # counted from 1
        types = [FULL if place + 1 in full else LINEAR for place in range(count)]
    types = types or [FULL if place and place % 4 == 0 else LINEAR for place in range(count)]
    return {**found, "layer_types": types, **_kimi_k3(fields, types)}


def _kimi_k3(fields: Fields, types: Any) -> Derived:
    """What Kimi K3 adds: gates of latent attention, norms of latent experts, attention over earlier residuals."""
    hidden, latent = fields.size("hidden_size"), fields.optional_size("routed_expert_hidden_size")
    residuals = 2 * hidden if fields.optional_size("attn_res_block_size") else 0  # a norm and one query
    gate = 0
    if fields.flag("mla_use_output_gate"):
        gate = hidden * fields.size("num_attention_heads") * fields.size("v_head_dim")
    norm = latent if latent and fields.flag("latent_moe_use_norm") else 0
    if norm and fields.has("mlp_layer_types"):
        raise fields.error("mlp_layer_types", "experts in a latent space are placed by first_k_dense_replace")
    added = {"layer_linears": 0, "layer_vectors": 2 * residuals, "residual_vectors": residuals}
    if (not gate and not norm) or not isinstance(types, list):
        return added
    dense = fields.count("first_k_dense_replace")
    per_layer = [
        {"layer_linears": gate if kind == FULL else 0, "layer_vectors": 2 * residuals + (norm if place >= dense else 0)}
        for place, kind in enumerate(types)
    ]
    return {**added, "per_layer": per_layer}


def listed_types(interval: int) -> Callable[[Fields], Derived]:
    """Return a function that puts full attention into every n-th layer, unless layer_types lists the layers."""

    def derive(fields: Fields) -> Derived:
        count = _depth(fields)
        types = fields.raw("layer_types")
        return {"layer_types": types or [LINEAR if (place + 1) % interval else FULL for place in range(count)]}

    return derive


def layer_heads(fields: Fields) -> Derived:
    """Every layer has its own number of query heads (Laguna)."""
    listed, count = fields.raw("num_attention_heads_per_layer"), _depth(fields)
    if listed is None:
        return {}
    if not isinstance(listed, list) or len(listed) != count or not all(isinstance(one, int) for one in listed):
        raise fields.error("num_attention_heads_per_layer", f"must be a list of {count} numbers")
    return {"per_layer": [{"num_attention_heads": heads} for heads in listed]}


def dbrx(fields: Fields) -> Derived:
    """The sizes of attention and experts are nested."""
    attention = fields.section("attn_config", {"kv_n_heads": 1})
    block = fields.section("ffn_config", {"ffn_hidden_size": 3584, "moe_num_experts": 4, "moe_top_k": 1})
    return {
        "num_key_value_heads": attention.size("kv_n_heads"),
        "head_dim": None,
        "intermediate_size": block.size("ffn_hidden_size"),
        "num_experts": block.size("moe_num_experts"),
        "num_experts_per_tok": block.size("moe_top_k"),
    }
