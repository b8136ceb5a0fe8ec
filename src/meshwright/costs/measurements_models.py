"""The model of a measurement row: a catalog name, or dimensions in a short notation.

The notation of the measurement tables: `L32 H4096 F14336 A32 KV8 V128256`, with `E8 top2 Fexp14336` for experts, `MLA`,
`swiglu` or `plain`, `tied` or `untied`, and `(layers=4)` for a model truncated to fewer layers.
"""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path

import msgspec

from meshwright.errors import MeshwrightError
from meshwright.models import MLA, Attention, Dense, GatedDelta, Group, Layer, Mamba2, ModelSpec, MoE, find
from meshwright.models.spec import Ffn, Mixer

_DIMS = re.compile(r"\bL(?:\d+|None)\b|\bH\d+\b")
_NUMBER = re.compile(r"\b(L|H|F|A|KV|D|V|E|top|Fexp|Fshared|every=|vocab=)(\d+)\b")
_TRUNCATED = re.compile(r"\(layers=(\d+)\)|with (\d+) layers|\bdims, L(\d+)")
_DENSE_LAYERS = re.compile(r"dense_layers=(\d+)")
_LINEAR = re.compile(r"(\d+) linear-attention \+ \1 MLP blocks")
_SIZE = re.compile(r"(?<![A-Za-z\d.])E?(\d+(?:\.\d+)?)B(?![a-z])", re.IGNORECASE)
_EXPERTS = re.compile(r"A\d+(\.\d+)?B|\dx\d|moe", re.IGNORECASE)  # their share of the parameters is not in the name
_UNSTATED = re.compile(r"unspecified|\bHNone\b")  # the size or the shape of the model is a guess of the table
_PATTERN = re.compile(r"pattern=([M*E|/-]+)")
# Llama-like families have gated blocks and an untied head; GPT-like ones two matrices and tied embeddings.
_GATED_NAMES = ("llama", "internlm", "qwen", "mistral", "mixtral", "deepseek", "kempner", "glm", "gemma", "phi3", "yi_")
_UNTIED_NAMES = ("nemotron",)
# Checkpoints of one shape under several ids.
_SAME_SHAPE = {
    "qwen/qwen3.6-35b-a3b": "qwen35_35b_a3b",
    "qwen/qwen3.8-27b": "qwen35_27b",
    "moonshotai/kimi-k2-base": "kimi_k2",
    "black-forest-labs/flux.1-schnell": "flux_12b",
    "mistralai/ministral-3-3b-reasoning-2512": "mistralai/Ministral-3-3B-Instruct-2512",
    "deepseek-ai/deepseek-v3-base": "deepseek_v3",
    "nvidia/nemotron-h-56b-base-8k": "nemotronh_56b",
}
LLAMA_WIDTH, LLAMA_VOCAB = 4096, 128256  # width of Llama 3 at 8 billion parameters; its vocabulary
LINEAR_HEADS = 8
GPT2_VOCAB = 50304  # GPT-2's, padded to a multiple of 128: assumed for GPT-like rows without a vocabulary
_TOKENIZER_VOCABS = {"GPTSentencePiece": 256000, "Llama2Tok": 32000}


class UnknownModelError(ValueError):
    """Why a row's model cannot be built, in text that rows with the same problem share."""


@cache
def model_of_row(name: str, dims: str, params_b: float) -> ModelSpec:
    """Return the model of a row: from its dimensions if given, else from the catalog by id or name."""
    text = dims.strip()
    if _PATTERN.search(text):
        return _hybrid(name, text)
    if linear := _LINEAR.search(text):
        return _linear_attention(name, text, int(linear[1]))
    if _DIMS.search(text) and "dims" not in text:
        return _from_dims(name, text, params_b)
    spec = _named(re.sub(r"\s*(\(.*|with \d+ layers.*|[\d.]+B dims.*)$", "", text), name)
    truncated = _TRUNCATED.search(text)
    if not truncated:
        return spec
    dense = _DENSE_LAYERS.search(text)
    return _shorter(spec, int(next(g for g in truncated.groups() if g)), int(dense[1]) if dense else None)


def _named(identity: str, name: str) -> ModelSpec:
    key = identity.lower()
    if key in _extra_models():
        return _from_dims(name, _extra_models()[key], 0.0)
    for text in (_SAME_SHAPE.get(key, identity), name):
        try:
            return find(text)
        except MeshwrightError:
            continue
    if _UNSTATED.search(f"{identity} {name}"):
        raise UnknownModelError(f"the source does not state the shape of its model, {name.split('(')[0]}")
    size = _SIZE.search(identity) or _SIZE.search(name)
    if size and not _EXPERTS.search(f"{identity} {name}"):
        return _of_size(name, float(size[1]))
    raise UnknownModelError(f"model not in the catalog: {identity or name}")


def _of_size(name: str, billions: float) -> ModelSpec:
    """Return a model of Llama 3's proportions, for one of which only the number of parameters is known."""
    hidden = 128 * max(round(LLAMA_WIDTH * (billions / 8) ** (1 / 3) / 128), 4)
    layer = Layer(Attention(hidden // 128, 8, 128), Dense(7 * hidden // 2, True), norm_params=2 * hidden)
    layers = max(round((1e9 * billions - 2 * LLAMA_VOCAB * hidden) / layer.params(hidden)), 1)
    groups = (Group(layer, tuple(range(layers))),)
    return ModelSpec(
        name, name, "causal_lm", hidden, groups, vocab=LLAMA_VOCAB, final_norm_params=hidden, model_type="size"
    )


@cache
def _extra_models() -> dict[str, str]:
    table = tomllib.loads(Path(__file__).with_name("measurements_models.toml").read_text())
    return {key: str(value) for key, value in table.items()}


def _numbers(text: str) -> dict[str, int]:
    """Return the numbers of the notation by letter; a vocabulary may be written V250k or by its tokenizer."""
    found = {key.rstrip("="): int(value) for key, value in _NUMBER.findall(text)}
    found.setdefault("V", found.get("vocab", 0))
    if re.search(r"\bV250k\b", text):
        found["V"] = 250880  # BLOOM's
    for tokenizer, size in _TOKENIZER_VOCABS.items():
        if not found["V"] and tokenizer in text:
            found["V"] = size
    found["V"] = found["V"] or GPT2_VOCAB
    return found


def _from_dims(name: str, text: str, params_b: float) -> ModelSpec:
    n = _numbers(text)
    if not n.get("H"):
        raise UnknownModelError("model dimensions not stated")
    hidden = n["H"]
    width = n.get("F") or 4 * hidden
    layers = n.get("L") or round((params_b * 1e9 - n["V"] * hidden) / (12 * hidden**2))  # GPT blocks: 12 H^2 each
    if layers < 1:
        raise UnknownModelError("number of layers not stated")
    gated, tied = _gated(name, text), _tied(name, text)
    layer = _layer(_attention(n, "MLA" in text), _ffn(n, width, gated), hidden)
    every = n.get("every", 1)
    if every > 1:
        plain = _layer(_attention(n, False), Dense(width, gated), hidden)
        places = {True: tuple(range(every - 1, layers, every)), False: ()}
        places[False] = tuple(i for i in range(layers) if i not in places[True])
        groups: tuple[Group, ...] = (Group(plain, places[False]), Group(layer, places[True]))
    else:
        groups = (Group(layer, tuple(range(layers))),)
    return ModelSpec(
        name, name, "causal_lm", hidden, groups, vocab=n["V"], tied=tied, final_norm_params=hidden, model_type="dims"
    )


def _attention(n: dict[str, int], latent: bool) -> Mixer:
    heads = n.get("A") or max(n["H"] // 128, 1)
    if latent:
        return MLA(heads, kv_lora=512, qk_nope=128, qk_rope=64, v_head=128, q_lora=1536)  # DeepSeek-V3's
    return Attention(heads, n.get("KV") or heads, n.get("D") or max(n["H"] // heads, 1))


def _ffn(n: dict[str, int], width: int, gated: bool) -> Ffn:
    if n.get("E"):
        return MoE(n["E"], n.get("top", 1), n.get("Fexp") or width, n.get("Fshared", 0), gated)
    return Dense(width, gated)


def _layer(mixer: Mixer | None, ffn: Ffn | None, hidden: int) -> Layer:
    return Layer(mixer, ffn, norm_params=hidden * ((mixer is not None) + (ffn is not None)))


def _gated(name: str, text: str) -> bool:
    if re.search(r"swiglu|geglu", text, re.IGNORECASE):
        return True
    if re.search(r"\bplain\b|squared-ReLU|\btok=", text):
        return False
    return any(word in name.lower() for word in _GATED_NAMES)


def _tied(name: str, text: str) -> bool:
    if re.search(r"\buntied\b", text):
        return False
    if re.search(r"\btied\b", text):
        return True
    return not any(word in name.lower() for word in (*_GATED_NAMES, *_UNTIED_NAMES))


def _hybrid(name: str, text: str) -> ModelSpec:
    """Parse Megatron's hybrid pattern: M Mamba-2 (default sizes), * attention, - feed-forward, E experts."""
    n = _numbers(text)
    found = _PATTERN.search(text)
    if not found or not n.get("H"):
        raise UnknownModelError("model dimensions not stated")
    hidden = n["H"]
    width = n.get("F") or 4 * hidden
    kinds: dict[str, Layer] = {
        "M": _layer(Mamba2(2 * hidden // 64, 64, 128, 8), None, hidden),
        "*": _layer(_attention(n, False), None, hidden),
        "-": _layer(None, Dense(width, _gated(name, text)), hidden),
        "E": _layer(None, _ffn(n, width, _gated(name, text)), hidden),
    }
    order = found[1].split("/")[0].replace("|", "")  # multi-token-prediction layers follow the slash
    groups = tuple(
        Group(kinds[mark], tuple(i for i, m in enumerate(order) if m == mark)) for mark in kinds if mark in order
    )
    return ModelSpec(
        name, "hybrid", "causal_lm", hidden, groups, vocab=n["V"], tied=_tied(name, text), final_norm_params=hidden
    )


def _linear_attention(name: str, text: str, layers: int) -> ModelSpec:
    """Return a model whose every block has linear attention and a gated feed-forward part, in FLA's proportions."""
    n = _numbers(text)
    if not n.get("H"):
        raise UnknownModelError("model dimensions not stated")
    hidden, key = n["H"], 1.0 if "kda" in name else 0.75
    keys, values = round(key * hidden / LINEAR_HEADS), round((1.0 if "kda" in name else 1.5) * hidden / LINEAR_HEADS)
    mixer = GatedDelta(LINEAR_HEADS, LINEAR_HEADS, keys, values)
    group = Group(_layer(mixer, Dense(n.get("F") or 4 * hidden, True), hidden), tuple(range(layers)))
    return ModelSpec(
        name, "hybrid", "causal_lm", hidden, (group,), vocab=LLAMA_VOCAB, tied=True, final_norm_params=hidden
    )


def _shorter(spec: ModelSpec, count: int, dense: int | None) -> ModelSpec:
    """Return the model truncated to its first layers; `dense` is how many of its leading dense layers stay."""
    layers = list(spec.layers)
    if dense is not None:
        routed = [layer for layer in layers if isinstance(layer.ffn, MoE)]
        layers = [layer for layer in layers if not isinstance(layer.ffn, MoE)][:dense] + routed
    if count > len(layers):
        raise UnknownModelError(f"{spec.name} has fewer than {count} layers")
    places: dict[Layer, list[int]] = {}
    for place, layer in enumerate(layers[:count]):
        places.setdefault(layer, []).append(place)
    return msgspec.structs.replace(spec, groups=tuple(Group(layer, tuple(at)) for layer, at in places.items()))
