"""A model whose type no reader knows: transformers builds it without data in another process, its parts are counted."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import msgspec

from meshwright.errors import InputError
from meshwright.notes import note
from meshwright.stages import stage

from .class_names import buildable, classes_of, encodes_by_default
from .readers.decoder import grouped
from .readers.fields import MAX_SIZE
from .spec import MLA, Attention, Compressor, Dense, Ffn, Layer, LinearMixer, Mixer, ModelSpec, MoE

TIMEOUT_S = 120.0
SAME_FLOPS = 0.01  # by which traced FLOPs may be higher than those of the parameters
MAX_LAYERS = 1_000  # that are built; no published model has half as many
PROGRAM = "meshwright.engine.architecture"
WAY_OUT = "pip install transformers: then any of its causal language models is inspected"
_LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")
_MASKED_MODELS = ("MODEL_FOR_MASKED_LM_MAPPING_NAMES",)
_FFN = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "moe", "shared_expert", "dense_h_to_4h", "dense_4h_to_h")


def has_transformers() -> bool:
    """Return whether transformers and torch are installed, without importing them."""
    return find_spec("transformers") is not None and find_spec("torch") is not None


def is_encoder(model_type: object) -> bool:
    """Return whether transformers trains this type as a masked language model: bert, modernbert, xlm-roberta."""
    return model_type in buildable(_MASKED_MODELS)


def is_encoder_decoder(config: Mapping[str, Any]) -> bool:
    """Return whether a config is of an encoder with a decoder, as transformers refuses it after it has built it."""
    stated = config.get("is_encoder_decoder")
    return bool(encodes_by_default(str(config.get("model_type"))) if stated is None else stated)


def not_a_decoder(model_type: str) -> InputError:
    """Return the error for a type of transformers that is no decoder: bert, t5, whisper, clip, vit."""
    reason = (
        "no decoder: transformers has this type, but not as a language model that predicts the next token, which is "
        "what is trained here; encoders, encoder-decoders and models of images or sound alone are not"
    )
    fix = ("a decoder: meshwright models lists them", "train this type with Trainer of transformers")
    return InputError(reason, field="model_type", value=model_type, fix=fix)


def can_inspect(config: Mapping[str, Any]) -> bool:
    """Return whether transformers is installed and builds a language model of this type or class."""
    named = [config.get("model_type"), *classes_of(config)]
    return has_transformers() and any(name in buildable() for name in named if isinstance(name, str))


def inspected_spec(config: Mapping[str, Any], name: str, why: str = "") -> ModelSpec:
    """Return the spec of a config as transformers builds it, with a note of what was assumed."""
    _require_bounded(config, "")
    if is_encoder_decoder(config):
        raise not_a_decoder(str(config.get("model_type")))
    stage(f"transformers builds {config.get('model_type') or name} without weights")
    found = _described(json.dumps(config, sort_keys=True, default=str))
    _require_used(config, found)
    spec, assumed = _spec(found, str(config.get("model_type") or found["class"]), name)
    by = f"transformers {found['transformers']} ({found['class']})"
    because = why or f"no reader knows {spec.model_type}"
    _note_once(f"{name}: {because}, so {by} built it without weights and its parameters were counted; assumed: "
               f"{'; '.join(assumed)}")  # fmt: skip
    return msgspec.structs.replace(spec, inspected_by=by, assumed=assumed)


@lru_cache(maxsize=64)
def _note_once(text: str) -> None:
    note(text)


def _require_bounded(values: Mapping[str, Any], where: str) -> None:
    """Raise for sizes that no model has, before anything is built."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            _require_bounded(value, f"{where}{key}.")
        elif isinstance(value, int) and not isinstance(value, bool):
            most = MAX_LAYERS if key in _LAYER_KEYS else MAX_SIZE
            if abs(value) > most:
                raise InputError(f"must be at most {most:,} to be inspected", field=where + key, value=value)
        elif isinstance(value, list) and len(value) > 10 * MAX_LAYERS:
            raise InputError(f"has {len(value):,} entries, more than can be inspected", field=where + key)


def _require_used(config: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Raise if the built model has other sizes than the file: transformers ignores keys that it does not know."""
    for key in found.get("ignored", ()):
        reason = f"transformers ignores this key in {found['class']}: the file describes another architecture"
        raise InputError(reason, field=key, value=config.get(key))
    given = set(_numbers(config))
    sizes = {"width": found["hidden"], "number of layers": len(found["layers"])}
    for what, size in sizes.items():
        if size not in given:
            reason = f"transformers builds {found['class']} with a {what} of {size:,}, which the file does not contain"
            raise InputError(f"{reason}: it describes another architecture", field="model_type")


def _numbers(value: Any) -> Iterator[int]:
    """Yield all integers of a config and the lengths of its lists."""
    if isinstance(value, Mapping):
        for one in value.values():
            yield from _numbers(one)
    elif isinstance(value, list):
        yield len(value)
        for one in value:
            yield from _numbers(one)
    elif isinstance(value, int):
        yield value


@lru_cache(maxsize=32)
def _described(config: str) -> dict[str, Any]:
    """Return the description that the inspecting process prints."""
    import subprocess  # here, not above: plans of catalogue models do not need it, and it takes milliseconds

    command = [sys.executable, "-m", PROGRAM]
    try:
        done = subprocess.run(command, input=config, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise InputError(f"transformers did not build this config within {TIMEOUT_S:.0f} s", "model_type") from None
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise InputError(f"transformers could not build this config: {lines[-1][:200]}", "model_type") from None
    if found.get("kind") == "NotADecoderError":
        raise not_a_decoder(found["error"])
    if "error" in found:
        reason = f"unknown architecture: transformers cannot build it: {found['error']}"
        raise InputError(f"{reason}; a model's own code (trust_remote_code) is never run", "model_type")
    return found


def _spec(found: Mapping[str, Any], model_type: str, name: str) -> tuple[ModelSpec, tuple[str, ...]]:
    hidden, assumptions = int(found["hidden"]), set[str]()
    layers = _with_outside([_layer(row, hidden, assumptions) for row in found["layers"]], found.get("rest_linears", 0))
    vocab = int(found["vocab"])
    head = 0 if found["tied"] else int(found["head"])
    norms = int(found.get("rest_norms", 0))
    extra = int(found["rest"]) - norms - found.get("rest_linears", 0) + (0 if found["tied"] else head - vocab * hidden)
    spec = ModelSpec(
        name=name,
        family=model_type.partition("_")[0].partition("-")[0],
        kind="causal_lm",
        hidden=hidden,
        groups=grouped(layers),
        vocab=vocab,
        tied=bool(found["tied"]),
        head_bias=bool(found["head_bias"]),
        max_seq_length=int(found["positions"]) or 1_048_576,
        final_norm_params=norms,
        extra_params=extra,
        model_type=model_type,
        hf_class=str(found["class"]),
        activation=str(found["activation"]),
    )
    if spec.params.total != found["total"]:
        counts = f"{spec.params.total:,} instead of {found['total']:,} parameters"
        raise InputError(f"the inspection of this architecture is incomplete: it counts {counts}", "model_type")
    if found["other_encoders"]:
        assumptions.add("encoders of images or sound count as parameters without FLOPs")
    if not found["positions"]:
        assumptions.add("no limit of positions")
    if (width := int(found.get("layer_width", hidden))) != hidden:
        assumptions.add(f"activations have the embedding's width {hidden}; the layers' is {width}")
    spec, traced = _as_traced(spec, found["traced"])
    return spec, tuple(sorted({*assumptions, traced}))


def _with_outside(layers: list[Layer], linears: int) -> tuple[Layer, ...]:
    """Return the layers with the linears outside of them, which tokens pass too: in equal parts if they divide."""
    each, odd = divmod(linears, len(layers))
    shares = [linears, *[0] * (len(layers) - 1)] if odd else [each] * len(layers)
    pairs = zip(layers, shares, strict=True)
    return tuple(msgspec.structs.replace(one, extra_matmul=one.extra_matmul + more) for one, more in pairs)


def _as_traced(spec: ModelSpec, traced: Any) -> tuple[ModelSpec, str]:
    """Return the model with the FLOPs of a traced forward pass that its parameters do not explain, and what was done.

    Weights that a token passes several times (loops over layers) cost more than their parameters say. Scans and experts
    are left alone: torch traces the slow path of a scan, and code of experts that computes more than the chosen ones.
    """
    if "untraced" in traced:
        return spec, f"FLOPs follow from the parameters (the forward pass was not traced: {traced['untraced']})"
    layers = [spec.layers[place] for place in traced["places"]]
    linear = _linear_part(traced["flops"])
    ours = 2.0 * (spec.vocab * spec.hidden + sum(_linears(layer, spec.hidden) for layer in layers))
    mixers = [mixer for layer in layers for mixer in (layer.mixer, layer.cross)]
    scans = any(isinstance(mixer, LinearMixer) and not mixer.per_key for mixer in mixers)
    share = ours / linear - 1 if linear > 0 else 0.0
    experts = any(isinstance(layer.ffn, MoE) for layer in layers)
    if share <= -SAME_FLOPS and (scans or experts):
        return spec, f"FLOPs follow from the parameters ({'scans' if scans else 'experts'} are not traced as they run)"
    if share > -SAME_FLOPS:
        return spec, f"FLOPs follow from the parameters, {share:+.1%} from a traced forward pass per token"
    more = (linear - ours) / len(layers)
    groups = [msgspec.structs.replace(g, layer=msgspec.structs.replace(g.layer, extra_flops=more)) for g in spec.groups]
    note = f"work that the parameters do not explain is {-share:.1%} of the FLOPs of a traced forward pass: added"
    return msgspec.structs.replace(spec, groups=tuple(groups)), note


def _linear_part(traced: list[list[float]]) -> float:
    """Return the FLOPs by token of a pass, which also has a constant part and one by pairs of tokens."""
    (first, one), (second, two), (third, three) = traced
    rate, later = (two - one) / (second - first), (three - two) / (third - second)
    quadratic = (later - rate) / (third - first)
    return rate - quadratic * (first + second)


def _linears(layer: Layer, hidden: int) -> int:
    """Return the parameters of a layer's linears that one token uses."""
    parts = [part.matmul_params(hidden) for part in (layer.mixer, layer.cross) if part is not None]
    ffn = layer.ffn
    inner = 0 if ffn is None else ffn.active_params(hidden)
    return sum(parts) + inner + layer.extra_matmul


def _layer(row: Mapping[str, Any], hidden: int, assumptions: set[str]) -> Layer:
    """Return one layer of recognised parts; all other parameters count as further linears and vectors.

    Parameters that an earlier layer shares are subtracted from the vectors: this layer computes with them too.
    """
    matrices = {one[0]: one[1:] for one in row["matrices"]}
    matmul, norms = sum(_product(shape) for shape in matrices.values()), int(row.get("norms", 0))
    vectors = int(row["vectors"]) - norms - int(row.get("shared", 0))
    mixer, cross = _mixers(row, matrices, hidden, assumptions)
    ffn, routed_extra = _ffn(row, matrices, hidden, assumptions)
    parts = [part for part in (mixer, cross) if part is not None]
    used = sum(part.matmul_params(hidden) for part in parts)
    plain = sum(part.vector_params(hidden) for part in parts)
    if isinstance(ffn, MoE):
        used += ffn.always_on_params(hidden)
    elif ffn is not None:
        used += ffn.matmul_params(hidden)
    left = matmul - used
    if left < 0:  # a part was taken for larger than it is: keep the counts, not the parts
        assumptions.add("layers whose parts were not recognised are linears that every token uses")
        kept = ffn if isinstance(ffn, MoE) else None
        left = matmul - (kept.always_on_params(hidden) if kept else 0)
        if left < 0:
            kept, left = None, matmul + (row["experts"]["matmul"] + row["experts"]["other"] if row["experts"] else 0)
            routed_extra = 0
        unusual = _unusual(row["attention"], matrices, hidden, assumptions) if row["attention"] else None
        mixer = unusual if unusual is not None and unusual.between <= left else None
        left -= mixer.matmul_params(hidden) if mixer is not None else 0
        cross, ffn, plain = None, kept, 0
    further = vectors - plain + routed_extra
    return Layer(mixer, ffn, cross, norm_params=norms, extra_params=further, extra_matmul=left)


def _product(shape: list[int]) -> int:
    size = 1
    for one in shape:
        size *= one
    return size


def _mixers(
    row: Mapping[str, Any], matrices: Mapping[str, list[int]], hidden: int, assumptions: set[str]
) -> tuple[Mixer | None, Attention | MLA | None]:
    """Return the mixer of a layer and an attention beside a scan."""
    found = row["attention"]
    if found and found.get("kv_lora_rank"):
        latent = _latent(found, matrices, hidden)
        if latent is not None:
            return latent, latent if found.get("number") == 2 else None
    softmax = _softmax(found, matrices, hidden, row) if found else None
    recurrent = row.get("recurrent")
    if recurrent and found and recurrent["path"].startswith(found["path"] + "."):
        recurrent = None  # a convolution of keys or queries
    if not recurrent and (found or not (row["scan"] or row["conv"])):
        return (softmax or _unusual(found, matrices, hidden, assumptions), None) if found else (None, None)
    scan = _scan(row, recurrent, matrices, hidden, assumptions)
    return (softmax, None) if scan is None else (scan, softmax)


def _scan(
    row: Mapping[str, Any],
    recurrent: Mapping[str, Any] | None,
    matrices: Mapping[str, list[int]],
    hidden: int,
    assumptions: set[str],
) -> LinearMixer | None:
    """Return the scan, convolution or linear attention of a layer by its counts."""
    inside = {n: s for n, s in matrices.items() if not any(word in n for word in _FFN)}
    path = row["attention"]["path"] + "." if row["attention"] else "\0"
    inside = {n: s for n, s in inside.items() if not n.startswith(path)}
    if recurrent:
        inside = {n: s for n, s in matrices.items() if n.startswith(recurrent["path"] + ".")}
    into = sum(s[0] for s in inside.values() if len(s) == 2 and s[1] == hidden and s[0] != hidden)
    total = sum(_product(s) for s in inside.values())
    out = max((s[1] for s in inside.values() if len(s) == 2 and s[0] == hidden and s[1] != hidden), default=0)
    between = total - hidden * (into + out)
    if between < 0 or not total:
        return None
    width = out or hidden
    if recurrent is None:
        assumptions.add("a scan or convolution of an unknown kind costs 8 FLOPs per channel")
        return LinearMixer("mamba" if row["scan"] else "short_conv", into, out, between, 0, 1, 8.0 * width, 2 * width)
    kind, heads, core, state = _recurrence(recurrent, width, assumptions)
    return LinearMixer(kind, into, out, between, 0, heads, core, 2 * width, state)


def _recurrence(found: Mapping[str, Any], width: int, assumptions: set[str]) -> tuple[str, int, float, int]:
    """Return kind, heads, FLOPs per token and state of a module that computes a recurrence; as the readers count."""
    numbers, convolution = found["numbers"], 2.0 * found["conv"]
    heads = int(numbers.get("num_heads") or numbers.get("num_v_heads") or numbers.get("num_attention_heads") or 1)
    head_dim, lowered = int(numbers.get("head_dim") or width // heads), found["class"].lower()
    if state := numbers.get("ssm_state_size"):
        if found["by_channel"]:
            return "mamba", width, 7.0 * width * state + convolution, width * state
        return "mamba", heads, 7.0 * width * state, width * state
    if "lightning" in lowered:
        block = int(numbers.get("block_size") or 256)
        return "lightning", heads, 4.0 * width * block / 2 + 4.0 * width * head_dim, width * head_dim
    keys, values = numbers.get("head_k_dim"), numbers.get("head_v_dim")
    if keys and values:
        return "delta", heads, 8.0 * heads * keys * values + convolution, heads * keys * values
    if "delta" in lowered:
        return "kda", heads, 8.0 * width * head_dim + convolution, width * head_dim
    if convolution and not found["by_channel"] and "conv" in lowered:
        return "short_conv", width, convolution + 2.0 * width, int(found["conv"])
    assumptions.add(f"the recurrence of {found['class']} costs 8 FLOPs per channel, and its convolution")
    return "scan", heads, 8.0 * width + convolution, width


GATES_AND_SHARING: tuple[Mapping[str, Any], ...] = (
    {}, {"output_gate": True}, {"shared_kv": True}, {"reused_kv": True}, {"head_gate": True},
)  # fmt: skip
"""What an attention may have beside its projections."""


def _softmax(
    found: Mapping[str, Any], matrices: Mapping[str, list[int]], hidden: int, row: Mapping[str, Any]
) -> Attention | None:
    """Return grouped-query attention if the linears of the module are those of one; else None."""
    path = found["path"] + "."
    inside = {n.removeprefix(path): s for n, s in matrices.items() if n.startswith(path) and len(s) == 2}
    heads, width = found["heads"], found["head_dim"]
    if not heads or not inside:
        return None
    features = {"differential": bool(found.get("differential"))} | _masked(found, row)
    if found.get("compress_rate") or (found.get("q_lora_rank") and not found.get("kv_lora_rank")):
        return _compressed(found, inside, hidden, features)
    index = _index_of_blocks(found)
    total = sum(_product(s) for s in inside.values())
    width = width or hidden // heads
    for kv in _kv_candidates(inside, heads, width):
        for shape in GATES_AND_SHARING:
            one = Attention(heads, kv, width, v_dim=found["v_dim"], **shape, **features, **index)
            if one.matmul_params(hidden) == total:
                return one
    kv = next(iter(_kv_candidates(inside, heads, width)), heads)
    nearest = Attention(heads, kv, width, v_dim=found["v_dim"], **features, **index)
    return nearest if nearest.matmul_params(hidden) < total else None


def _index_of_blocks(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return how an indexer selects blocks of keys for this attention, if it has one."""
    if not (found.get("index_blocks") and found["index_heads"] and found["index_dim"]):
        return {}
    return {"topk": found["index_blocks"], "index_heads": found["index_heads"], "index_dim": found["index_dim"]}


def _unusual(
    found: Mapping[str, Any], matrices: Mapping[str, list[int]], hidden: int, assumptions: set[str]
) -> LinearMixer | None:
    """Return attention whose linears are not the usual ones: their parameters, and what scores and values cost."""
    heads = found["heads"]
    inside = sum(_product(s) for n, s in matrices.items() if n.startswith(found["path"] + "."))
    if not heads:
        assumptions.add("attention of an unknown shape costs its linears only")
        return None
    width = found["head_dim"] or hidden // heads
    per_key = 2.0 * heads * (width + (found["v_dim"] or width))
    assumptions.add("attention with unusual projections sees every earlier token")
    return LinearMixer("attention", 0, 0, inside, heads=heads, kept=4 * heads * width, per_key=per_key)


def _masked(found: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the window or chunk that the queries of a layer see."""
    if isinstance(row.get("chunk"), int):
        return {"window": row["chunk"], "chunked": True}
    window = found["window"] if row["type"] != "full_attention" else None
    return {"window": window if isinstance(window, int) and window > 0 else None}


def _compressed(
    found: Mapping[str, Any], inside: Mapping[str, list[int]], hidden: int, features: Mapping[str, Any]
) -> Attention | None:
    """Return attention with low-rank queries over a window and compressed keys (DeepSeek-V4); None if it differs."""
    rate, rank = found.get("compress_rate"), found.get("q_lora_rank")
    groups, low = found.get("o_groups") or 1, found.get("o_lora_rank") or 0
    index = {"topk": found["index_topk"], "index_heads": found["index_heads"], "index_dim": found["index_dim"]}
    compressor = None
    if rate:
        compressor = Compressor(rate, **index) if found["index_heads"] else Compressor(rate)
    heads, width = found["heads"], found["head_dim"]
    one = Attention(
        heads, 1, width, shared_kv=True, q_lora=rank, out_lora=low, out_groups=groups, compressor=compressor, **features
    )
    total = sum(_product(s) for s in inside.values())
    return one if width and one.matmul_params(hidden) <= total else None


def _latent(found: Mapping[str, Any], matrices: Mapping[str, list[int]], hidden: int) -> MLA | None:
    """Return multi-head latent attention if the module has its ranks; None if its linears are fewer."""
    names = ("heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_dim")
    heads, kv_lora, nope, rope, v_head = sizes = [found[name] for name in names]
    if not all(isinstance(size, int) for size in sizes):
        return None
    latent = MLA(heads, kv_lora, nope, rope, v_head, q_lora=found["q_lora_rank"], topk=found["index_topk"])
    total = sum(_product(s) for n, s in matrices.items() if n.startswith(found["path"] + "."))
    index = (found.get("index_heads") or 0, found.get("index_dim") or 0)
    for each in (msgspec.structs.replace(latent, index_heads=index[0], index_dim=index[1]), latent):
        if each.matmul_params(hidden) <= total:
            return each
    return None


def _kv_candidates(inside: Mapping[str, list[int]], heads: int, width: int) -> list[int]:
    """Return possible numbers of key/value heads: from a key projection, or all that divide the heads."""
    for name, (rows, *_) in inside.items():
        if name.rpartition(".")[0].endswith(("k_proj", "key", "wk")) and rows % width == 0 and rows:
            return [rows // width]
    return [kv for kv in range(heads, 0, -1) if heads % kv == 0]


def _ffn(
    row: Mapping[str, Any], matrices: Mapping[str, list[int]], hidden: int, assumptions: set[str]
) -> tuple[Ffn | None, int]:
    """Return the feed-forward block, and parameters of experts that it does not represent."""
    experts = row["experts"]
    if experts:
        topk = row["topk"] if isinstance(row["topk"], int) else 1
        if row["topk"] is None:
            assumptions.add("one expert per token")
        count, each, idle = experts["count"], experts["matmul"] // experts["count"], 0
        if experts.get("routes", count) > count:  # some experts return their input: they compute nothing
            topk = max(1, round(topk * count / experts["routes"]))
            idle = experts["other"]
            assumptions.add(f"of the experts that a token chooses, {topk} compute on average")
        other = experts["other"] - idle
        widths = [(gated, *divmod(each, parts * hidden)) for gated, parts in ((True, 3), (False, 2))]
        fitting = [(gated, width) for gated, width, odd in widths if not odd and width]
        usual = [(gated, width) for gated, width in fitting if width in experts["down"]]
        for gated, width in (*usual, *fitting):
            moe = MoE(count, min(topk, count), width, gated=gated, idle=idle)
            biased = msgspec.structs.replace(moe, bias=True)
            if other == biased.routed_params(hidden) - moe.routed_params(hidden):
                return biased, 0
            if not usual:
                assumptions.add("experts of several kinds count as one of the same size")
            return moe, other
        raise InputError("experts of an unknown shape cannot be inspected", "model_type")
    inner = {n: s for n, s in matrices.items() if any(word in n for word in _FFN) and len(s) == 2 and hidden in s}
    total = sum(_product(s) for s in inner.values())
    down = [s for n, s in inner.items() if s[0] == hidden]
    width = max((s[1] for s in down), default=0) or max((max(s) for s in inner.values()), default=0)
    for gated, parts in ((True, 3), (False, 2)):
        if width and total == parts * hidden * width:
            return Dense(width, gated), 0
    return None, 0
