"""The parts of a model: its layers in words, its parameters by part, and what a sequence keeps in its cache."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from .spec import MLA, Attention, Dense, Ffn, GatedDelta, Layer, LinearMixer, Mamba2, Mixer, ModelSpec

PARTS = (
    "embedding",
    "attention",
    "linear_mixers",
    "mlp",
    "experts",
    "shared_experts",
    "router",
    "norms",
    "head",
    "vision",
    "other",
)
"""Parts that the parameters of a model are counted by; together they are its total."""
LINEAR_NAMES = {
    "mamba": "Mamba scan",
    "short_conv": "short convolution",
    "lightning": "lightning attention",
    "kda": "Kimi delta attention",
    "delta": "gated delta attention",
    "attention": "full attention",
}


class CacheSize(msgspec.Struct, frozen=True):
    """Elements that generation keeps of one sequence."""

    per_token: int  # keys and values that one more token adds
    windows: int  # of the layers whose window or chunk is full at this length
    state: int  # of scans, convolutions and linear attention, whatever the length
    at_length: int  # all of them after the tokens that were asked for


def parameters_by_part(model: ModelSpec) -> dict[str, int]:
    """Return the parameters of every part; they add up to the model's total."""
    found = dict.fromkeys(PARTS, 0)
    counts = model.params
    found["embedding"], found["head"], found["vision"] = counts.embedding, counts.head, counts.vision
    found["norms"], found["other"] = model.final_norm_params, model.extra_params
    for group in model.groups:
        for part, count in layer_parts(group.layer, model.hidden):
            found[part] += group.count * count
    return found


def layer_parts(layer: Layer, hidden: int) -> Iterator[tuple[str, int]]:
    """Yield the parts of one layer with their parameters."""
    yield "norms", layer.norm_params
    yield "other", layer.extra_params + layer.extra_matmul
    for mixer in (layer.mixer, layer.cross):
        if mixer is not None:
            is_attention = isinstance(mixer, Attention | MLA) or (isinstance(mixer, LinearMixer) and mixer.per_key > 0)
            part = "attention" if is_attention else "linear_mixers"
            yield part, layer.streams * (mixer.matmul_params(hidden) + mixer.vector_params(hidden))
    ffn = layer.ffn
    if isinstance(ffn, Dense):
        yield "mlp", layer.streams * (ffn.matmul_params(hidden) + ffn.vector_params(hidden))
    elif ffn is not None:
        router = hidden * ffn.experts + (ffn.experts if ffn.router_bias else 0)
        parallel = ffn.parallel.matmul_params(hidden) + ffn.parallel.vector_params(hidden) if ffn.parallel else 0
        yield "experts", ffn.routed_params(hidden)
        yield "router", router
        yield "mlp", parallel
        yield "shared_experts", ffn.always_on_params(hidden) - router - parallel


def cache_size(model: ModelSpec, seq: int) -> CacheSize:
    """Return what generation keeps of a sequence; keys and values that an earlier layer shares count once."""
    per_token = windows = state = total = 0
    for layer, count in ((group.layer, group.count) for group in model.groups):
        for mixer in (layer.mixer, layer.cross):
            if mixer is None:
                continue
            each, window = _cached_by_token(mixer), mixer.window if isinstance(mixer, Attention) else None
            further = _cached_compressed(mixer)
            state += count * _state(mixer)
            is_full = window is not None and window <= seq
            windows += count * each * (window or 0) * is_full
            per_token += count * (further + (0 if is_full else each))
            total += count * (each * min(window or seq, seq) + further * seq)
    return CacheSize(per_token, windows, state, total + state)


def _cached_by_token(mixer: Mixer) -> int:
    """Return the elements of one token: its key and value, or what they are computed from."""
    if isinstance(mixer, MLA):
        return mixer.kv_lora + mixer.qk_rope + (mixer.index_dim if mixer.index_heads else 0)
    if not isinstance(mixer, Attention) or mixer.reused_kv:
        return 0
    is_one = mixer.shared_kv and mixer.out_lora  # one key is also the value; elsewhere they differ after their norms
    return mixer.index_dim + (mixer.kv_width if is_one else mixer.kv_width + mixer.v_width)


def _cached_compressed(mixer: Mixer) -> int:
    """Return the elements of compressed keys for one token, rounded up."""
    further = mixer.compressor if isinstance(mixer, Attention) else None
    return -(-(mixer.head_dim + further.index_dim) // further.rate) if further and isinstance(mixer, Attention) else 0


def _state(mixer: Mixer) -> int:
    if isinstance(mixer, Mamba2):
        return mixer.inner * mixer.state + mixer.conv_width * mixer.conv
    if isinstance(mixer, GatedDelta):
        conv = (2 * mixer.k_width + mixer.v_width) * mixer.conv
        return mixer.v_heads * mixer.k_head_dim * mixer.v_head_dim + conv
    return mixer.state if isinstance(mixer, LinearMixer) else 0


def kind_of_mixer(mixer: Mixer | None) -> str:
    """Return the kind of a token mixer in a few words."""
    if mixer is None:
        return "no mixer"
    if isinstance(mixer, MLA):
        return "sparse latent attention" if mixer.topk else "latent attention"
    if isinstance(mixer, Mamba2):
        return "Mamba-2 scan"
    if isinstance(mixer, GatedDelta):
        return "gated delta attention"
    if isinstance(mixer, LinearMixer):
        return LINEAR_NAMES.get(mixer.kind, mixer.kind.replace("_", " "))
    if mixer.context_width:
        return "cross attention"
    if mixer.compressor:
        return "sparse compressed attention" if mixer.compressor.topk else "compressed attention"
    if mixer.window:
        return "chunked attention" if mixer.chunked else "sliding attention"
    if mixer.topk:
        return "block-sparse attention"
    return "differential attention" if mixer.differential else "full attention"


def sizes_of_mixer(mixer: Mixer | None) -> list[str]:
    """Return heads, widths and features of a token mixer, a phrase each."""
    if mixer is None:
        return []
    if isinstance(mixer, MLA):
        ranks = f"ranks {f'{mixer.q_lora:,} (q), ' if mixer.q_lora else ''}{mixer.kv_lora:,} (kv)"
        index = f"top {mixer.topk:,} keys" if mixer.topk else ""
        by = f"indexer of {mixer.index_heads} heads" if mixer.index_heads else "an earlier layer's indexer"
        heads = f"{mixer.heads} heads of {mixer.qk_nope}+{mixer.qk_rope}, values of {mixer.v_head}"
        return [heads, ranks, *([f"{index} ({by})"] if index else [])]
    if isinstance(mixer, Mamba2):
        return [f"{mixer.heads} heads of {mixer.head_dim}", f"state {mixer.state}", f"{mixer.groups} groups"]
    if isinstance(mixer, GatedDelta):
        keys, values = f"{mixer.k_heads} key heads of {mixer.k_head_dim}", f"{mixer.v_heads} value heads"
        return [keys, f"{values} of {mixer.v_head_dim}"]
    if isinstance(mixer, LinearMixer):
        if mixer.per_key:
            return [f"{mixer.heads} heads", "unusual projections"]
        heads = f"{mixer.heads:,} {'channels' if mixer.kind in ('mamba', 'short_conv') else 'heads'}"
        return [heads, *([f"state {mixer.state:,}"] if mixer.state else [])]
    return _sizes_of_attention(mixer)


def _sizes_of_attention(mixer: Attention) -> list[str]:
    heads = f"{mixer.heads} heads of {mixer.head_dim}"
    kv = "multi-query" if mixer.kv_heads == 1 < mixer.heads else f"{mixer.kv_heads} KV heads"
    compressor = mixer.compressor
    phrases = {
        heads: True,
        kv: mixer.kv_heads != mixer.heads and not mixer.reused_kv,
        "keys and values of an earlier layer": mixer.reused_kv,
        f"values of {mixer.v_dim}": bool(mixer.v_dim) and mixer.v_dim != mixer.head_dim,
        f"window {mixer.window or 0:,}": bool(mixer.window) and not mixer.chunked,
        f"chunks of {mixer.window or 0:,}": mixer.chunked,
        f"top {mixer.topk or 0:,} keys (indexer of {mixer.index_heads} heads)": bool(mixer.topk),
        "q/k norm": mixer.qk_norm != "none",
        "QKV bias": mixer.qkv_bias,
        "sinks": mixer.sinks,
        "keys are values": mixer.shared_kv,
        "output gate": mixer.output_gate or mixer.head_gate,
        f"query rank {mixer.q_lora or 0:,}": mixer.q_lora is not None,
        f"1 compressed key per {compressor.rate if compressor else 0} tokens": compressor is not None,
        f"top {(compressor.topk if compressor else 0) or 0:,} of them": bool(compressor and compressor.topk),
    }
    return [text for text, applies in phrases.items() if applies]


def kind_of_ffn(ffn: Ffn | None) -> str:
    """Return the kind of a feed-forward block in a few words."""
    if ffn is None:
        return "no MLP"
    if isinstance(ffn, Dense):
        return "dense MLP"
    return "experts and dense MLP" if ffn.parallel else "experts"


def sizes_of_ffn(ffn: Ffn | None) -> list[str]:
    """Return widths and features of a feed-forward block, a phrase each."""
    if ffn is None:
        return []
    if isinstance(ffn, Dense):
        return [f"width {ffn.width:,}", "gated" if ffn.gated else "plain", *(["biases"] if ffn.bias else [])]
    return [
        f"{ffn.experts} experts of {ffn.width:,}, top {ffn.topk}",
        *(["shared expert of " + f"{ffn.shared_width:,}"] if ffn.shared_width else []),
        *([f"in a latent of {ffn.latent:,}"] if ffn.latent else []),
        *([f"dense MLP of {ffn.parallel.width:,} beside them"] if ffn.parallel else []),
        *(["plain"] if not ffn.gated else []),
        *(["balancing bias"] if ffn.balance_bias else []),
    ]


def kind_of_layer(layer: Layer) -> str:
    """Return a layer as its blocks in a few words, e.g. "sliding attention, dense MLP"."""
    beside = [kind_of_mixer(layer.cross)] if layer.cross is not None else []
    blocks = [kind_of_mixer(layer.mixer)] if layer.mixer is not None else []
    blocks = [" + ".join([*blocks, *beside])] if blocks or beside else []
    if layer.ffn is not None:
        blocks.append(kind_of_ffn(layer.ffn))
    return ", ".join(blocks) or "linears"


def layer_runs(model: ModelSpec) -> list[tuple[int, tuple[int, ...]]]:
    """Return the layers in order as repeated sequences of groups: (times, groups), e.g. 8 × (0, 0, 0, 1)."""
    order = [0] * model.num_layers
    for number, group in enumerate(model.groups):
        for place in group.places:
            order[place] = number
    runs: list[tuple[int, tuple[int, ...]]] = []
    start = 0
    while start < len(order):
        times, period = _longest_repeat(order, start)
        runs.append((times, tuple(order[start : start + period])))
        start += times * period
    return runs


LONGEST_PERIOD = 16


def _longest_repeat(order: list[int], start: int) -> tuple[int, int]:
    """Return how often which number of layers repeats from a place on: what covers most, the shortest if equal."""
    best = (1, 1)
    for period in range(1, min(LONGEST_PERIOD, len(order) - start) + 1):
        block, times = order[start : start + period], 1
        while order[start + times * period : start + (times + 1) * period] == block:
            times += 1
        if (times > 1 or period == 1) and times * period > best[0] * best[1]:
            best = (times, period)
    return best
