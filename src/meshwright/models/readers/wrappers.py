"""Read vision-language configs: a wrapper around a decoder config and a vision-encoder config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from meshwright.errors import InputError

from ..spec import Vision
from . import nemotron, vision
from .architectures import SAME_AS, TRAITS, with_fallbacks
from .decoder import Decoder, read_decoder
from .fields import Fields
from .unread import record_unread

_UNTIED = {"tie_word_embeddings": False}


class Wrapper(msgspec.Struct, frozen=True):
    """One vision-language architecture: its decoder, its vision encoder, and its own keys."""

    family: str
    hf_class: str
    text: tuple[str, ...]  # supported decoders; the first is the default for a text_config without model_type
    encoder: vision.EncoderReader
    encoder_defaults: Mapping[str, Any]
    encoder_aliases: Mapping[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    defaults: Mapping[str, Any] = msgspec.field(default_factory=lambda: _UNTIED)
    text_key: str = "text_config"
    flat: bool = False  # older files have the decoder's keys at the top level
    text_may_tie: bool = False  # tied if either the wrapper or the decoder sets it
    text_ties: bool = False  # tied if the decoder sets it, whatever the wrapper sets
    vision_may_miss: bool = False  # a file without vision_config is the decoder alone
    vision_by_default: bool = False  # but not if it names hf_class: that has an encoder of the default sizes
    unread: tuple[str, ...] = ()  # sections that only inspection counts


_QWEN3: tuple[vision.EncoderReader, Mapping[str, Any], Mapping[str, tuple[str, ...]]] = (
    vision.qwen3_vision,
    vision.QWEN3_DEFAULTS,
    vision.QWEN_ALIASES,
)
_QWEN35 = (vision.qwen35_vision, vision.QWEN3_DEFAULTS, vision.QWEN_ALIASES)

WRAPPERS: dict[str, Wrapper] = {
    "qwen2_5_vl": Wrapper(
        "qwen",
        "Qwen2_5_VLForConditionalGeneration",
        ("qwen2_5_vl_text",),
        vision.qwen25_vision,
        vision.QWEN25_DEFAULTS,
        vision.QWEN_ALIASES,
        flat=True,
        text_may_tie=True,
    ),
    "qwen3_vl": Wrapper("qwen", "Qwen3VLForConditionalGeneration", ("qwen3_vl_text",), *_QWEN3),
    "qwen3_vl_moe": Wrapper("qwen", "Qwen3VLMoeForConditionalGeneration", ("qwen3_vl_moe_text",), *_QWEN3),
    "qwen3_5": Wrapper("qwen", "Qwen3_5ForConditionalGeneration", ("qwen3_5_text",), *_QWEN35),
    "qwen3_5_moe": Wrapper("qwen", "Qwen3_5MoeForConditionalGeneration", ("qwen3_5_moe_text",), *_QWEN35),
    "glm4v_moe": Wrapper(
        "glm",
        "Glm4vMoeForConditionalGeneration",
        ("glm4v_moe_text",),
        vision.glm_vision,
        vision.GLM_DEFAULTS,
        vision.QWEN_ALIASES,
        text_may_tie=True,
    ),
    "gemma3": Wrapper(
        "gemma",
        "Gemma3ForConditionalGeneration",
        ("gemma3_text",),
        vision.siglip_vision,
        vision.SIGLIP_DEFAULTS,
        defaults={"tie_word_embeddings": True, "mm_tokens_per_image": 256},
    ),
    "mistral3": Wrapper(
        "ministral",
        "Mistral3ForConditionalGeneration",
        ("mistral", "ministral3"),
        vision.pixtral_vision,
        vision.PIXTRAL_DEFAULTS,
        defaults={"tie_word_embeddings": True, "spatial_merge_size": 2, "multimodal_projector_bias": False},
    ),
    "gemma4": Wrapper(
        "gemma",
        "Gemma4ForConditionalGeneration",
        ("gemma4_text",),
        vision.gemma4_vision,
        vision.GEMMA4_DEFAULTS,
        defaults={"tie_word_embeddings": True},
        vision_may_miss=True,
        unread=("audio_config",),
    ),
    "llama4": Wrapper(
        "llama",
        "Llama4ForConditionalGeneration",
        ("llama4_text",),
        vision.llama4_vision,
        vision.LLAMA4_DEFAULTS,
        text_ties=True,
        vision_may_miss=True,
        vision_by_default=True,
    ),
    "kimi_k25": Wrapper(
        "kimi",
        "KimiK25ForConditionalGeneration",
        ("deepseek_v3", "kimi_k2"),
        vision.moon_vision,
        vision.MOON_DEFAULTS,
        vision.MOON_ALIASES,
        defaults={"tie_word_embeddings": True, "projection_hidden_size": 1152},
    ),
    "kimi_k3": Wrapper(
        "kimi",
        "KimiK3ForConditionalGeneration",
        ("kimi_linear",),
        vision.moon_k3_vision,
        vision.MOON_K3_DEFAULTS,
        vision.MOON_ALIASES,
        vision_may_miss=True,
    ),
    "NemotronH_Nano_VL_V2": Wrapper(
        "nemotron",
        "NemotronH_Nano_VL_V2",
        ("nemotron_h",),
        vision.radio_vision,
        vision.RADIO_DEFAULTS,
        text_key="llm_config",
    ),
}


def read_wrapped(config: Mapping[str, Any], wrapper: Wrapper) -> tuple[Decoder, Vision | None, bool]:
    """Return the decoder, the vision encoder, and whether the decoder's embedding is tied."""
    fields = Fields(config, wrapper.defaults)
    text = _text_fields(fields, wrapper)
    decoder = nemotron.read_nemotron(text) if text.defaults is nemotron.DEFAULTS else _read_text(text, wrapper)
    text.reject_unread(wrapper.hf_class)
    record_unread(text)
    named = config.get("architectures")
    is_default = wrapper.vision_by_default and isinstance(named, list) and wrapper.hf_class in named
    if wrapper.vision_may_miss and config.get("vision_config") is None and not is_default:
        return decoder, None, _tied(fields, text, wrapper)
    if not isinstance(config.get("vision_config"), dict) and not is_default:
        raise InputError("the config has no vision_config object, which this architecture needs", field="vision_config")
    encoder_fields = fields.section("vision_config", wrapper.encoder_defaults, wrapper.encoder_aliases)
    return decoder, wrapper.encoder(encoder_fields, decoder.hidden, fields), _tied(fields, text, wrapper)


def _text_fields(fields: Fields, wrapper: Wrapper) -> Fields:
    nested = fields.data.get(wrapper.text_key)
    if nested is None and wrapper.flat:
        traits = TRAITS[wrapper.text[0]]
        return Fields(fields.data, traits.defaults, traits.aliases)
    if not isinstance(nested, dict):
        raise InputError(
            f"the config has no {wrapper.text_key} object, which this architecture needs", wrapper.text_key
        )
    model_type = _text_model_type(nested, wrapper)
    if model_type == "nemotron_h":
        return fields.section(wrapper.text_key, nemotron.DEFAULTS, nemotron.ALIASES)
    model_type = SAME_AS.get(model_type, model_type)
    section = fields.section(wrapper.text_key, TRAITS[model_type].defaults, TRAITS[model_type].aliases)
    return with_fallbacks(section, model_type)


def _text_model_type(nested: Mapping[str, Any], wrapper: Wrapper) -> str:
    model_type = nested.get("model_type", wrapper.text[0])
    outer = [name.removesuffix("_text") for name in wrapper.text]
    if model_type in wrapper.text:
        return str(model_type)
    if model_type in outer and len(wrapper.text) == 1:
        return wrapper.text[0]
    raise InputError(
        f"unknown text model for this architecture; known: {', '.join(wrapper.text)}",
        field=f"{wrapper.text_key}.model_type",
        value=model_type,
    )


def _read_text(text: Fields, wrapper: Wrapper) -> Decoder:
    model_type = wrapper.text[0] if text.where == "" else _text_model_type(text.data, wrapper)
    return read_decoder(text, TRAITS[SAME_AS.get(model_type, model_type)])


def _tied(fields: Fields, text: Fields, wrapper: Wrapper) -> bool:
    """Return the wrapper's value, or the decoder section's if the wrapper does not set it."""
    if wrapper.text_ties:
        return text.flag("tie_word_embeddings")
    if wrapper.text_may_tie:
        return fields.flag("tie_word_embeddings") or text.flag("tie_word_embeddings")
    if not fields.has("tie_word_embeddings") and text.has("tie_word_embeddings"):
        return text.flag("tie_word_embeddings")
    return fields.flag("tie_word_embeddings")
