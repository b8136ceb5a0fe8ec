"""A model whose type no reader knows: transformers builds it without data in another process, its parts are counted."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from meshwright.errors import InputError
from meshwright.notes import note

from .readers.decoder import grouped
from .readers.fields import MAX_SIZE
from .spec import MLA, Attention, Dense, Ffn, Layer, LinearMixer, Mixer, ModelSpec, MoE

TIMEOUT_S = 120.0
MAX_LAYERS = 1_000  # that are built; no published model has half as many
PROGRAM = "meshwright.engine.architecture"
WAY_OUT = "pip install transformers: then any of its causal language models is inspected"
_LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")
_FFN = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "moe", "shared_expert", "dense_h_to_4h", "dense_4h_to_h")


def has_transformers() -> bool:
    """Return whether transformers and torch are installed, without importing them."""
    return find_spec("transformers") is not None and find_spec("torch") is not None


@lru_cache(maxsize=1)
def _buildable() -> frozenset[str]:
    """Return the model types and classes that transformers builds as language models, read without importing it."""
    package = find_spec("transformers")
    where = Path(package.origin or "").parent / "models" / "auto" / "modeling_auto.py" if package else Path()
    try:
        text = where.read_text("utf-8")
    except OSError:
        return frozenset()
    found = set[str]()
    for table in ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"):
        rows = text.partition(f"{table} = OrderedDict(")[2].partition("\n)\n")[0]
        found.update(re.findall(r'"([^"]+)"', rows))
    return frozenset(found)


def can_inspect(config: Mapping[str, Any]) -> bool:
    """Return whether transformers is installed and builds a language model of this type or class."""
    classes = config.get("architectures")
    named = [config.get("model_type"), *(classes if isinstance(classes, list) else ())]
    return has_transformers() and any(name in _buildable() for name in named if isinstance(name, str))


def inspected_spec(config: Mapping[str, Any], name: str) -> ModelSpec:
    """Return the spec of a config as transformers builds it, with a note of what was assumed."""
    _require_bounded(config, "")
    found = _described(json.dumps(config, sort_keys=True, default=str))
    _require_used(config, found)
    spec, assumed = _spec(found, str(config.get("model_type") or found["class"]), name)
    by = f"transformers {found['transformers']} ({found['class']})"
    _note_once(f"{name}: no reader knows {spec.model_type}, so {by} built it without weights and its parameters were "
               f"counted; assumed: {'; '.join(assumed)}")  # fmt: skip
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
    if "error" in found:
        reason = f"unknown architecture: transformers cannot build it: {found['error']}"
        raise InputError(f"{reason}; a model's own code (trust_remote_code) is never run", "model_type")
    return found


def _spec(found: Mapping[str, Any], model_type: str, name: str) -> tuple[ModelSpec, tuple[str, ...]]:
    hidden, assumptions = int(found["hidden"]), set[str]()
    layers = tuple(_layer(row, hidden, assumptions) for row in found["layers"])
    vocab = int(found["vocab"])
    head = 0 if found["tied"] else int(found["head"])
    extra = int(found["rest"]) + (0 if found["tied"] else head - vocab * hidden)
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
    assumptions.add(_flops_note(spec, found.get("flops")))
    return spec, tuple(sorted(assumptions))


def _flops_note(spec: ModelSpec, traced: Any) -> str:
    """Return how far the FLOPs of the linears are from those of a traced forward pass, per token."""
    if not traced:
        return "FLOPs follow from the parameters (the forward pass was not traced: it needs data, or has many layers)"
    (first, one), (second, two) = traced
    linear = (one / first * second - two / second * first) / (second - first)  # without the part quadratic in tokens
    ours = 2.0 * (spec.vocab * spec.hidden + sum(g.count * _linears(g.layer, spec.hidden) for g in spec.groups))
    return f"FLOPs follow from the parameters, {ours / linear - 1:+.1%} from a traced forward pass per token"


def _linears(layer: Layer, hidden: int) -> int:
    """Return the parameters of a layer's linears that one token uses."""
    parts = [part.matmul_params(hidden) for part in (layer.mixer, layer.cross) if part is not None]
    ffn = layer.ffn
    inner = 0 if ffn is None else ffn.active_params(hidden)
    return sum(parts) + inner + layer.extra_matmul


def _layer(row: Mapping[str, Any], hidden: int, assumptions: set[str]) -> Layer:
    """Return one layer of recognised parts; all other parameters count as further linears and vectors."""
    matrices = {one[0]: one[1:] for one in row["matrices"]}
    matmul, vectors = sum(_product(shape) for shape in matrices.values()), int(row["vectors"])
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
        mixer, cross, ffn, plain = None, None, kept, 0
    return Layer(mixer, ffn, cross, extra_params=vectors - plain + routed_extra, extra_matmul=left)


def _product(shape: list[int]) -> int:
    size = 1
    for one in shape:
        size *= one
    return size


def _mixers(
    row: Mapping[str, Any], matrices: Mapping[str, list[int]], hidden: int, assumptions: set[str]
) -> tuple[Mixer | None, Attention | None]:
    """Return the mixer of a layer and an attention beside a scan."""
    softmax = _softmax(row["attention"], matrices, hidden, row["type"]) if row["attention"] else None
    if softmax is None and row["attention"]:
        latent = _latent(row["attention"], matrices, hidden)
        if latent is not None:
            return latent, None
    if not row["scan"] and not (row["conv"] and softmax is None):
        if row["attention"] and softmax is None:
            assumptions.add("attention of an unknown shape costs its linears only")
        return softmax, None
    inside = {n: s for n, s in matrices.items() if not any(word in n for word in _FFN)}
    path = row["attention"]["path"] + "." if row["attention"] else "\0"
    inside = {n: s for n, s in inside.items() if not n.startswith(path)}
    kind = "mamba" if row["scan"] else "short_conv"
    into = sum(s[0] for s in inside.values() if len(s) == 2 and s[1] == hidden and s[0] != hidden)
    total = sum(_product(s) for s in inside.values())
    out = max((s[1] for s in inside.values() if len(s) == 2 and s[0] == hidden and s[1] != hidden), default=0)
    between = total - hidden * (into + out)
    if between < 0 or not total:
        return softmax, None
    assumptions.add("a scan or convolution costs 8 FLOPs per channel and keeps its input and output")
    width = out or hidden
    scan = LinearMixer(kind, into, out, between, 0, 1, 8.0 * width, 2 * width, width)
    return scan, softmax


def _softmax(
    found: Mapping[str, Any], matrices: Mapping[str, list[int]], hidden: int, layer_type: str
) -> Attention | None:
    """Return grouped-query attention if the linears of the module are those of one; else None."""
    path = found["path"] + "."
    inside = {n.removeprefix(path): s for n, s in matrices.items() if n.startswith(path) and len(s) == 2}
    heads, width = found["heads"], found["head_dim"]
    if not heads or not inside:
        return None
    total = sum(_product(s) for s in inside.values())
    width = width or hidden // heads
    for kv in _kv_candidates(inside, heads, width):
        for gate in (False, True):
            one = Attention(heads, kv, width, v_dim=found["v_dim"], output_gate=gate)
            if one.matmul_params(hidden) == total:
                window = found["window"] if layer_type != "full_attention" else None
                return msgspec.structs.replace(one, window=window if isinstance(window, int) and window > 0 else None)
    kv = next(iter(_kv_candidates(inside, heads, width)), heads)
    nearest = Attention(heads, kv, width, v_dim=found["v_dim"])
    return nearest if nearest.matmul_params(hidden) < total else None


def _latent(found: Mapping[str, Any], matrices: Mapping[str, list[int]], hidden: int) -> MLA | None:
    """Return multi-head latent attention if the module has its ranks; None if its linears are fewer."""
    names = ("heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_dim")
    heads, kv_lora, nope, rope, v_head = sizes = [found[name] for name in names]
    if not all(isinstance(size, int) for size in sizes):
        return None
    latent = MLA(heads, kv_lora, nope, rope, v_head, q_lora=found["q_lora_rank"], topk=found["index_topk"])
    total = sum(_product(s) for n, s in matrices.items() if n.startswith(found["path"] + "."))
    return latent if latent.matmul_params(hidden) <= total else None


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
        count, each = experts["count"], experts["matmul"] // experts["count"]
        for gated, parts in ((True, 3), (False, 2)):
            width, odd = divmod(each, parts * hidden)
            if not odd and width in experts["down"] and experts["matmul"] % count == 0:
                moe = MoE(count, min(topk, count), width, gated=gated)
                biased = msgspec.structs.replace(moe, bias=True)
                if experts["other"] == biased.routed_params(hidden) - moe.routed_params(hidden):
                    return biased, 0
                return moe, experts["other"]
        raise InputError("experts of an unknown shape cannot be inspected", "model_type")
    inner = {n: s for n, s in matrices.items() if any(word in n for word in _FFN) and len(s) == 2 and hidden in s}
    total = sum(_product(s) for s in inner.values())
    down = [s for n, s in inner.items() if s[0] == hidden]
    width = max((s[1] for s in down), default=0) or max((max(s) for s in inner.values()), default=0)
    for gated, parts in ((True, 3), (False, 2)):
        if width and total == parts * hidden * width:
            return Dense(width, gated), 0
    return None, 0
