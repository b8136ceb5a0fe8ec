"""The model that Megatron-LM's flags build. The default is GPT-2 style: LayerNorm, GELU, learned positions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from meshwright.errors import InputError
from meshwright.frameworks.common import ASSUMED_VOCABULARY, DEFAULT_VOCABULARY
from meshwright.frameworks.megatron_lm.arguments import DEFAULT_TOKENIZER, FROM_CHECKPOINT, UNREAD_ARGS
from meshwright.frameworks.model_match import same_shape, tokenizer_vocabulary
from meshwright.frameworks.types import Settings, as_int
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
from meshwright.models.numerics import numerics_of
from meshwright.models.readers.decoder import grouped
from meshwright.models.readers.fields import MAX_LAYERS, MAX_SIZE

NEEDED = ("num_layers", "hidden_size", "num_attention_heads")
OTHER_MODELS = (
    "heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json", "retro_add_retriever",
    "decoder_num_layers", "hybrid_attention_ratio", "hybrid_mlp_ratio", "enable_hyper_connections", "moe_n_hash_layers",
)  # fmt: skip
"""Flags for models that are not supported here."""
GPT2_VOCABULARY = 50257
PADDED_GPT2 = 50304
"""GPT-2's vocabulary as Megatron-LM pads it: no degree of tensor parallelism is refused for a size that is assumed."""
ANOTHER_VOCABULARY = "; write architecture.vocab=N, or --model with its config.json, for another"
VOCABULARIES = {DEFAULT_TOKENIZER: GPT2_VOCABULARY, "Llama2Tokenizer": 32000}
HYBRID = {"M": "mamba", "*": "attention", "-": "mlp", "E": "experts"}


class BuiltModel(msgspec.Struct, frozen=True):
    """The model, or None with the reason, and the assumptions spec."""

    model: ModelSpec | None
    notes: tuple[str, ...] = ()


class Flags:
    """Typed access to size flags with defaults; an unresolved or invalid size raises InputError."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def on(self, key: str) -> bool:
        return key in self.settings

    def number(self, key: str, default: int | None = None) -> int:
        setting = self.settings.get(key)
        if setting is None or str(setting.value).lower() == "none":
            if default is None:
                raise InputError("is not set", field=key)
            return default
        text = str(setting.value)
        if setting.unresolved or not text.isdigit() or not 0 < int(text) <= MAX_SIZE:
            raise InputError("is not a valid size", field=key, value=text)
        return int(text)

    def optional(self, key: str) -> int | None:
        return self.number(key) if key in self.settings and str(self.settings[key].value).lower() != "none" else None

    def text(self, key: str, default: str = "") -> str:
        setting = self.settings.get(key)
        if setting is not None and setting.unresolved:
            raise InputError("is unresolved", field=key)
        return default if setting is None else str(setting.value)


def build(settings: Settings, name: str) -> BuiltModel:
    """Return the model these flags build; a catalog model if one has the same architecture."""
    flags = Flags(settings)
    other = next((key for key in OTHER_MODELS if key in settings), "")
    if other:
        return BuiltModel(None, (f"models built with --{other.replace('_', '-')} are not supported",))
    if not all(key in settings for key in NEEDED) and not flags.on("hybrid_layer_pattern"):
        return BuiltModel(None)
    try:
        spec, notes = _with_vocabulary(_spec(flags, name), flags)
        return BuiltModel(spec, notes)
    except (InputError, ValueError, ZeroDivisionError, OverflowError):
        return BuiltModel(None)


def _spec(flags: Flags, name: str) -> ModelSpec:
    hidden = flags.number("hidden_size")
    layers = tuple(_layers(flags, hidden))
    if not 0 < len(layers) <= MAX_LAYERS:
        raise InputError(f"must give 1 to {MAX_LAYERS} layers", field="num_layers")
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
        source="Megatron-LM flags",
    )


def _positions(flags: Flags) -> str:
    if flags.on("use_rotary_position_embeddings"):
        return "rope"
    return flags.text("position_embedding_type", "none" if flags.on("no_position_embedding") else "learned_absolute")


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
    for layer in range(count):
        ffn: Ffn = experts if experts is not None and sparse[layer] else _dense(flags, hidden)
        yield Layer(_mixer(flags, hidden, layer, count), ffn, norm_params=norms)


def _hybrid(flags: Flags, hidden: int, pattern: str) -> Iterator[Layer]:
    """One layer per letter; MTP layers follow a slash, bars separate stages."""
    main = re.sub(r"[|\s]", "", pattern.split("/")[0])
    norm = _norm(flags, hidden)
    for letter in main:
        layer_type = HYBRID.get(letter)
        if layer_type is None:
            raise InputError("is not a layer type of a hybrid model", field="hybrid_layer_pattern", value=letter)
        mixer: Mixer | None = _mamba(flags, hidden) if layer_type == "mamba" else None
        mixer = _attention(flags, hidden) if layer_type == "attention" else mixer
        ffn: Ffn | None = _dense(flags, hidden) if layer_type == "mlp" else None
        ffn = _experts(flags, hidden) if layer_type == "experts" else ffn
        yield Layer(mixer, ffn, norm_params=norm)


def _mamba(flags: Flags, hidden: int) -> Mamba2:
    head = flags.number("mamba_head_dim", 64)
    heads = flags.optional("mamba_num_heads") or 2 * hidden // head
    return Mamba2(heads, head, flags.number("mamba_state_dim", 128), flags.number("mamba_num_groups", 8))


def _mixer(flags: Flags, hidden: int, layer: int, count: int) -> Mixer:
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
        linear = _layer_mask(flags.text("linear_attention_freq", "1"), count, last=True)
        if linear[layer]:
            return GatedDelta(
                flags.number("linear_num_key_heads", 16),
                flags.number("linear_num_value_heads", 32),
                flags.number("linear_key_head_dim", 128),
                flags.number("linear_value_head_dim", 128),
                flags.number("linear_conv_kernel_dim", 4),
            )
    elif variant:
        raise InputError("is not supported", field="experimental_attention_variant", value=variant)
    return _attention(flags, hidden, _window(flags, layer, count))


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


def _window(flags: Flags, layer: int, count: int) -> int | None:
    """Return the attention window of a layer: tokens to the left plus the token itself."""
    sizes = re.findall(r"-?\d+", flags.text("window_size"))
    if not sizes or int(sizes[0]) < 0:
        return None
    sliding = (
        _layer_mask(flags.text("window_attn_skip_freq"), count, last=True)
        if flags.on("window_attn_skip_freq")
        else None
    )
    return int(sizes[0]) + 1 if sliding is None or sliding[layer] else None


def _biased(flags: Flags) -> bool:
    return not flags.on("disable_bias_linear") and not flags.on("no_add_bias_linear")


def _gated(flags: Flags) -> bool:
    return flags.on("swiglu") or flags.on("quick_geglu")


def ffn_width(flags: Flags, hidden: int) -> int:
    """Return the FFN width; the default is 4 × hidden, or two thirds of that when gated."""
    default = int(4 * hidden * 2 / 3 / 64) * 64 if flags.on("swiglu") else 4 * hidden
    return flags.number("ffn_hidden_size", default)


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
    """Return which layers have experts."""
    if not flags.on("num_experts") or flags.text("num_experts").lower() == "none":
        return [False] * count
    return _layer_mask(flags.text("moe_layer_freq", "1"), count)


def _layer_mask(text: str, count: int, last: bool = False) -> list[bool]:
    """Expand a frequency to one boolean per layer: N selects one of N (the first, or all but the last)."""
    if text.isdigit():
        every = max(1, int(text))
        return [(layer + 1) % every != 0 if last else layer % every == 0 for layer in range(count)]
    found = parse_pattern(text)
    if len(found) != count:
        raise InputError(f"has {len(found)} entries for {count} layers", value=text)
    return [bool(one) for one in found]


MAX_PATTERN_CHARS = 4_000  # a list of a thousand layers


def parse_pattern(text: str) -> list[int]:
    """Evaluate a pattern such as ([0]*3+[1]*1)*2 without eval()."""
    if len(text) > MAX_PATTERN_CHARS or not re.fullmatch(r"[\d\[\]()+*,\s]+", text):
        raise InputError("is not a list pattern of zeros and ones", value=text)
    try:
        found = _eval_list(ast.parse(text, mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise InputError("is not a list pattern of zeros and ones", value=text) from error
    return found if isinstance(found, list) else [found]


def _eval_list(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return min(node.value, MAX_LAYERS)
    if isinstance(node, ast.List | ast.Tuple):
        return [_eval_list(one) for one in node.elts]
    if isinstance(node, ast.BinOp):
        left, right = _eval_list(node.left), _eval_list(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return (left + right)[: MAX_LAYERS + 1]
        if isinstance(node.op, ast.Mult) and isinstance(left, list) != isinstance(right, list):
            many, times = (left, right) if isinstance(left, list) else (right, left)
            return (many * times)[: MAX_LAYERS + 1] if len(many) * times < 10**6 else many
    raise InputError("is not a list pattern of zeros and ones")


def _with_vocabulary(spec: ModelSpec, flags: Flags) -> tuple[ModelSpec, tuple[str, ...]]:
    """Set the vocabulary; if only the tokenizer defines it, use that of a catalog model with these sizes."""
    size = flags.optional("padded_vocab_size") or flags.optional("vocab_size")
    tokenizer = flags.settings.get("tokenizer_model")
    tokenizer_type = flags.text(
        "tokenizer_type", "" if tokenizer is not None else DEFAULT_TOKENIZER
    )  # the default of pretrain_gpt.py
    named = str(tokenizer.value) if tokenizer is not None and not tokenizer.unresolved else ""
    vocab = size or VOCABULARIES.get(tokenizer_type) or tokenizer_vocabulary(named)
    if vocab:
        spec = msgspec.structs.replace(spec, vocab=vocab)
        return _match_catalog(spec, [vocab], flags), () if size else _default_tokenizer(flags)
    found = _match_catalog(spec, None, flags)
    if found.vocab:
        return found, (f"{ASSUMED_VOCABULARY} {found.vocab:,}, as in {found.name}{ANOTHER_VOCABULARY}",)
    spec = msgspec.structs.replace(spec, vocab=PADDED_GPT2)
    return spec, (f"{ASSUMED_VOCABULARY} {PADDED_GPT2:,}, GPT-2's with padding{ANOTHER_VOCABULARY}",)


def _default_tokenizer(flags: Flags) -> tuple[str, ...]:
    """Say which tokenizer a script without one gets; one that is partly unread, or reads a checkpoint, may have one."""
    if any(map(flags.on, ("tokenizer_type", "tokenizer_model", UNREAD_ARGS, *FROM_CHECKPOINT))):
        return ()
    return (
        f"{DEFAULT_VOCABULARY}: Megatron-LM then uses {DEFAULT_TOKENIZER}, whose vocabulary of "
        f"{GPT2_VOCABULARY} is assumed (set --tokenizer-type with --tokenizer-model or --vocab-size)",
    )


def _match_catalog(spec: ModelSpec, vocab: list[int] | None, flags: Flags) -> ModelSpec:
    """Return the catalog model with this architecture, with the sequence length from the flags.

    Of several, as Llama 3 8B and Mistral 7B without a vocabulary, the first with the RoPE base that the flags set.
    """
    found = [
        one
        for one in find_by_shape(spec.hidden, spec.num_layers)
        if (vocab is None or one.vocab in vocab) and same_shape(one, msgspec.structs.replace(spec, vocab=one.vocab))
    ]
    base = as_int(flags.settings.get("rotary_base"))
    if base is not None and len(found) > 1:
        found.sort(key=lambda one: numerics_of(one.name).rope_theta != base)  # keeps the order of the catalog
    return msgspec.structs.replace(found[0], max_seq_length=spec.max_seq_length) if found else spec
