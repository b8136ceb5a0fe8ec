"""The model that Megatron-LM's flags build. Without flags it is GPT-2's kind: layer norms, GELU, learnt positions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from meshwright.errors import InputError
from meshwright.frameworks.model_match import named, same_shape
from meshwright.frameworks.types import Settings
from meshwright.models import (
    MLA,
    Attention,
    Dense,
    Ffn,
    GatedDelta,
    Layer,
    Mamba2,
    Mixer,
    ModelSpec,
    MoE,
    find_by_shape,
)
from meshwright.models.readers.decoder import grouped
from meshwright.models.readers.fields import MAX_LAYERS, MAX_SIZE

NEEDED = ("num_layers", "hidden_size", "num_attention_heads")
OTHER_MODELS = (
    "heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json", "retro_add_retriever",
    "decoder_num_layers", "hybrid_attention_ratio", "hybrid_mlp_ratio", "enable_hyper_connections", "moe_n_hash_layers",
)  # fmt: skip
"""Flags that build models which are not known here."""
VOCABULARIES = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}
GPT2_VOCABULARY = 50257
HYBRID = {"M": "mamba", "*": "attention", "-": "mlp", "E": "experts"}


class Built(msgspec.Struct, frozen=True):
    """The model, or None with the reason why there is none; and what had to be assumed."""

    model: ModelSpec | None
    notes: tuple[str, ...] = ()


class Flags:
    """The sizes that flags give, typed, with their defaults; a size that is open or no number raises."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def on(self, key: str) -> bool:
        return key in self.settings

    def number(self, key: str, default: int | None = None) -> int:
        said = self.settings.get(key)
        if said is None or str(said.value).lower() == "none":
            if default is None:
                raise InputError("is not said", field=key)
            return default
        text = str(said.value)
        if said.unresolved or not text.isdigit() or not 0 < int(text) <= MAX_SIZE:
            raise InputError("is no size", field=key, value=text)
        return int(text)

    def optional(self, key: str) -> int | None:
        return self.number(key) if key in self.settings and str(self.settings[key].value).lower() != "none" else None

    def text(self, key: str, default: str = "") -> str:
        said = self.settings.get(key)
        if said is not None and said.unresolved:
            raise InputError("is open", field=key)
        return default if said is None else str(said.value)


def build(settings: Settings, name: str) -> Built:
    """The model of these flags; one of the catalogue where it is the same."""
    flags = Flags(settings)
    other = next((key for key in OTHER_MODELS if key in settings), "")
    if other:
        return Built(None, (f"models built with --{other.replace('_', '-')} are not modelled here",))
    if not all(key in settings for key in NEEDED) and not flags.on("hybrid_layer_pattern"):
        return Built(None)
    try:
        made, notes = _with_vocabulary(_spec(flags, name), flags)
        return Built(made, notes)
    except (InputError, ValueError, ZeroDivisionError, OverflowError):
        return Built(None)


def _spec(flags: Flags, name: str) -> ModelSpec:
    hidden = flags.number("hidden_size")
    layers = tuple(_layers(flags, hidden))
    if not 0 < len(layers) <= MAX_LAYERS:
        raise InputError("has no layers that fit in a model", field="num_layers")
    longest = flags.number("max_position_embeddings", flags.number("seq_length", 2048))
    learned = _positions(flags) == "learned_absolute"
    mtp = flags.optional("mtp_num_layers") or 0
    return ModelSpec(
        name=name,
        family="megatron",
        kind="causal_lm",
        hidden=hidden,
        groups=grouped(layers),
        tied=not flags.on("untie_embeddings_and_output_weights"),
        max_seq_length=longest,
        final_norm_params=_norm(flags, hidden),
        learned_positions=longest if learned else 0,
        mtp_layers=mtp,
        mtp_layer=layers[-1] if mtp else None,
        activation="silu" if flags.on("swiglu") else "gelu",
        source="flags of Megatron-LM",
    )


def _positions(flags: Flags) -> str:
    if flags.on("use_rotary_position_embeddings"):
        return "rope"
    if flags.on("no_position_embedding"):
        return "none"
    return flags.text("position_embedding_type", "learned_absolute")


def _norm(flags: Flags, hidden: int) -> int:
    return hidden if flags.text("normalization", "LayerNorm") == "RMSNorm" else 2 * hidden


def _layers(flags: Flags, hidden: int) -> Iterator[Layer]:
    pattern = flags.text("hybrid_layer_pattern", flags.text("hybrid_override_pattern"))
    if pattern:
        yield from _hybrid(flags, hidden, pattern)
        return
    count = flags.number("num_layers")
    sparse = _routed(flags, count)
    norms = 2 * _norm(flags, hidden)
    experts = _experts(flags, hidden) if any(sparse) else None
    for place in range(count):
        ffn: Ffn = experts if experts is not None and sparse[place] else _dense(flags, hidden)
        yield Layer(_mixer(flags, hidden, place, count), ffn, norm_params=norms)


def _hybrid(flags: Flags, hidden: int, pattern: str) -> Iterator[Layer]:
    """One part per letter; prediction layers stand behind a slash, stages between bars."""
    main = re.sub(r"[|\s]", "", pattern.split("/")[0])
    norm = _norm(flags, hidden)
    for letter in main:
        kind = HYBRID.get(letter)
        if kind is None:
            raise InputError("is no letter of a hybrid", field="hybrid_layer_pattern", value=letter)
        mixer: Mixer | None = _mamba(flags, hidden) if kind == "mamba" else None
        mixer = _attention(flags, hidden) if kind == "attention" else mixer
        ffn: Ffn | None = _dense(flags, hidden) if kind == "mlp" else None
        ffn = _experts(flags, hidden) if kind == "experts" else ffn
        yield Layer(mixer, ffn, norm_params=norm)


def _mamba(flags: Flags, hidden: int) -> Mamba2:
    head = flags.number("mamba_head_dim", 64)
    heads = flags.optional("mamba_num_heads") or 2 * hidden // head
    return Mamba2(heads, head, flags.number("mamba_state_dim", 128), flags.number("mamba_num_groups", 8))


def _mixer(flags: Flags, hidden: int, place: int, count: int) -> Mixer:
    if flags.on("multi_latent_attention"):
        return MLA(
            heads=flags.number("num_attention_heads"),
            kv_lora=flags.number("kv_lora_rank", 32),
            qk_nope=flags.number("qk_head_dim", 128),
            qk_rope=flags.number("qk_pos_emb_head_dim", 64),
            v_head=flags.number("v_head_dim", 128),
            q_lora=flags.optional("q_lora_rank"),
            bias=_biased(flags),
        )
    variant = flags.text("experimental_attention_variant", flags.text("linear_attention_type"))
    if variant == "gated_delta_net":
        linear = _places(flags.text("linear_attention_freq", "1"), count, last=True)
        if linear[place]:
            return GatedDelta(
                flags.number("linear_num_key_heads", 16),
                flags.number("linear_num_value_heads", 32),
                flags.number("linear_key_head_dim", 128),
                flags.number("linear_value_head_dim", 128),
                flags.number("linear_conv_kernel_dim", 4),
            )
    elif variant:
        raise InputError("is not modelled", field="experimental_attention_variant", value=variant)
    return _attention(flags, hidden, _window(flags, place, count))


def _attention(flags: Flags, hidden: int, window: int | None = None) -> Attention:
    heads = flags.number("num_attention_heads")
    groups = flags.number("num_query_groups", 1) if flags.on("group_query_attention") else heads
    if not flags.on("kv_channels") and hidden % heads:
        raise InputError("does not divide the hidden size", field="num_attention_heads", value=heads)
    return Attention(
        heads,
        groups,
        flags.number("kv_channels", hidden // heads),
        window=window,
        qkv_bias=_biased(flags) or flags.on("add_qkv_bias"),
        out_bias=_biased(flags),
        qk_norm="head" if flags.on("qk_layernorm") else "none",
        output_gate=flags.on("attention_output_gate"),
        sinks=flags.text("softmax_type") == "learnable",
    )


def _window(flags: Flags, place: int, count: int) -> int | None:
    """The window of a layer: tokens to the left and the token itself."""
    sizes = re.findall(r"-?\d+", flags.text("window_size"))
    if not sizes or int(sizes[0]) < 0:
        return None
    sliding = (
        _places(flags.text("window_attn_skip_freq"), count, last=True) if flags.on("window_attn_skip_freq") else None
    )
    return int(sizes[0]) + 1 if sliding is None or sliding[place] else None


def _biased(flags: Flags) -> bool:
    return not flags.on("disable_bias_linear") and not flags.on("no_add_bias_linear")


def _gated(flags: Flags) -> bool:
    return flags.on("swiglu") or flags.on("quick_geglu")


def ffn_width(flags: Flags, hidden: int) -> int:
    """Their width of a feed-forward block: four times the model's, or two thirds of that when it is gated."""
    usual = int(4 * hidden * 2 / 3 / 64) * 64 if flags.on("swiglu") else 4 * hidden
    return flags.number("ffn_hidden_size", usual)


def _dense(flags: Flags, hidden: int) -> Dense:
    return Dense(ffn_width(flags, hidden), _gated(flags), _biased(flags))


def _experts(flags: Flags, hidden: int) -> MoE:
    return MoE(
        flags.number("num_experts"),
        flags.number("moe_router_topk", 2),
        flags.number("moe_ffn_hidden_size", ffn_width(flags, hidden)),
        shared_width=flags.optional("moe_shared_expert_intermediate_size") or 0,
        gated=_gated(flags),
        bias=_biased(flags),
        balance_bias=flags.on("moe_router_enable_expert_bias"),
        dense_bias=_biased(flags),
        shared_gate=flags.on("moe_shared_expert_gate"),
        latent=flags.optional("moe_latent_size"),
    )


def _routed(flags: Flags, count: int) -> list[bool]:
    """Which layers have experts."""
    if not flags.on("num_experts") or flags.text("num_experts").lower() == "none":
        return [False] * count
    return _places(flags.text("moe_layer_freq", "1"), count)


def _places(text: str, count: int, last: bool = False) -> list[bool]:
    """A frequency as a truth per layer: N means one of N (the first, or all but the last), a pattern says each."""
    if text.isdigit():
        every = max(1, int(text))
        return [(place + 1) % every != 0 if last else place % every == 0 for place in range(count)]
    found = pattern_of(text)
    if len(found) != count:
        raise InputError(f"has {len(found)} places for {count} layers", value=text)
    return [bool(one) for one in found]


def pattern_of(text: str) -> list[int]:
    """A pattern such as ([0]*3+[1]*1)*2, without running it."""
    if not re.fullmatch(r"[\d\[\]()+*,\s]{1,400}", text):
        raise InputError("is no pattern of zeros and ones", value=text)
    try:
        found = _list(ast.parse(text, mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise InputError("is no pattern of zeros and ones", value=text) from error
    return found if isinstance(found, list) else [found]


def _list(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return min(node.value, MAX_LAYERS)
    if isinstance(node, ast.List | ast.Tuple):
        return [_list(one) for one in node.elts]
    if isinstance(node, ast.BinOp):
        left, right = _list(node.left), _list(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return (left + right)[: MAX_LAYERS + 1]
        if isinstance(node.op, ast.Mult) and isinstance(left, list) != isinstance(right, list):
            many, times = (left, right) if isinstance(left, list) else (right, left)
            return (many * times)[: MAX_LAYERS + 1] if len(many) * times < 10**6 else many
    raise InputError("is no pattern of zeros and ones")


def _with_vocabulary(made: ModelSpec, flags: Flags) -> tuple[ModelSpec, tuple[str, ...]]:
    """The model with its vocabulary; where the tokenizer alone knows it, that of a known model with these sizes."""
    said = flags.optional("padded_vocab_size") or flags.optional("vocab_size")
    told = flags.settings.get("tokenizer_model")
    kind = flags.text("tokenizer_type", "" if told is not None else "GPT2BPETokenizer")  # what pretrain_gpt.py falls to
    owner = named(str(told.value)) if told is not None and not told.unresolved else None
    vocab = said or VOCABULARIES.get(kind) or (owner.vocab if owner else None)
    if vocab:
        made = msgspec.structs.replace(made, vocab=vocab)
        return _known(made, [vocab]), ()
    found = _known(made, None)
    if found.vocab:
        return found, (f"the vocabulary is the tokenizer's: taken to be the {found.vocab} of {found.name}",)
    made = msgspec.structs.replace(made, vocab=GPT2_VOCABULARY)
    return made, (f"the vocabulary is the tokenizer's: taken to be GPT-2's, {GPT2_VOCABULARY} (--vocab-size says it)",)


def _known(made: ModelSpec, vocab: list[int] | None) -> ModelSpec:
    """The catalogue's model of this shape, with the length that the flags give it."""
    for spec in find_by_shape(made.hidden, made.num_layers):
        if vocab is not None and spec.vocab not in vocab:
            continue
        if same_shape(spec, msgspec.structs.replace(made, vocab=spec.vocab)):
            return msgspec.structs.replace(spec, max_seq_length=made.max_seq_length)
    return made
