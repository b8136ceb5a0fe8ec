"""The reader matches transformers: random small configs, defaults and layer types."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.models import Attention, GatedDelta, config_of, find, names, spec_from_config
from meshwright.models.readers import nemotron
from meshwright.models.readers.architectures import BY_CLASS, TRAITS, WITHOUT_CLASS
from meshwright.models.readers.wrappers import WRAPPERS
from meshwright.models.spec import MoE

from . import small
from .hub import built_params, hub_config

few = settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))

BUILT = [kind for kind in TRAITS if kind not in WITHOUT_CLASS]


@pytest.mark.parametrize("kind", small.STANDALONE)
@few
@given(data=st.data())
def test_random_decoders_have_the_parameters_that_transformers_builds(kind: str, data: st.DataObject) -> None:
    config = data.draw(small.decoder(kind))
    assert spec_from_config(config, "x").params.total == built_params(config)


@few
@given(config=small.nemotron())
def test_random_nemotron_hybrids_have_the_parameters_that_transformers_builds(config: dict[str, Any]) -> None:
    assert spec_from_config(config, "x").params.total == built_params(config)


QWEN_TOWER = {"depth": 4, "hidden_size": 32, "intermediate_size": 24, "num_heads": 2}
PLAIN_TOWER = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 24, "num_attention_heads": 2}
ENCODERS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": QWEN_TOWER,
    "qwen3_vl": {**QWEN_TOWER, "deepstack_visual_indexes": [1, 2]},
    "qwen3_vl_moe": {**QWEN_TOWER, "deepstack_visual_indexes": [0]},
    "qwen3_5": {**QWEN_TOWER, "num_position_embeddings": 64},
    "qwen3_5_moe": QWEN_TOWER,
    "glm4v_moe": {**QWEN_TOWER, "attention_bias": True},
    "gemma3": PLAIN_TOWER,
    "mistral3": PLAIN_TOWER,
}


@pytest.mark.parametrize("kind", ENCODERS)
@few
@given(data=st.data())
def test_random_vision_language_models_have_the_parameters_that_transformers_builds(
    kind: str, data: st.DataObject
) -> None:
    text_kind = data.draw(st.sampled_from(WRAPPERS[kind].text))
    text = data.draw(small.decoder(text_kind))
    text.pop("tie_word_embeddings", None)
    encoder = dict(ENCODERS[kind])
    if "depth" in encoder:
        encoder["out_hidden_size"] = text["hidden_size"]
    if kind == "gemma3":
        encoder["vision_use_head"] = data.draw(st.booleans())
    config = {"model_type": kind, "text_config": text, "vision_config": encoder}
    if data.draw(st.booleans()):
        config["tie_word_embeddings"] = data.draw(st.booleans())
    if kind == "mistral3":
        config["multimodal_projector_bias"] = data.draw(st.booleans())
    assert spec_from_config(config, "x").params.total == built_params(config)


@few
@given(layers=st.integers(1, 3), heads=st.integers(1, 3), inner=st.none() | st.integers(1, 40), tied=st.booleans())
def test_random_gpt2_models_have_the_parameters_that_transformers_builds(
    layers: int, heads: int, inner: int | None, tied: bool
) -> None:
    config = {
        "model_type": "gpt2",
        "n_layer": layers,
        "n_head": heads,
        "n_embd": heads * 8,
        "n_inner": inner,
        "n_positions": 32,
        "vocab_size": 99,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert spec_from_config(config, "x").params.total == built_params(config)


@few
@given(
    layers=st.integers(1, 3),
    heads=st.integers(1, 3),
    channels=st.integers(1, 9),
    flag=st.booleans(),
    sides=st.lists(st.integers(1, 3), min_size=3, max_size=3),
)
def test_random_diffusion_transformers_have_the_parameters_that_diffusers_builds(
    layers: int, heads: int, channels: int, flag: bool, sides: list[int]
) -> None:
    shared = {"num_layers": layers, "num_attention_heads": heads, "attention_head_dim": 12, "in_channels": channels}
    wan = {"_class_name": "WanTransformer3DModel", **shared, "out_channels": channels + 1, "patch_size": sides}
    wan |= {"ffn_dim": 30, "text_dim": 20, "freq_dim": 16, "cross_attn_norm": flag}
    flux = {"_class_name": "FluxTransformer2DModel", **shared, "num_single_layers": 2, "guidance_embeds": flag}
    flux |= {
        "joint_attention_dim": 20,
        "pooled_projection_dim": 10,
        "patch_size": sides[0],
        "axes_dims_rope": [4, 4, 4],
    }
    for config in (wan, flux):
        assert spec_from_config(config, "x").params.total == built_params(config)


# Keys that transformers has under no such name: read by the models' own code, or named by us.
OWN_KEYS = {
    "attn_output_gate",
    "full_attention_interval",
    "moe_layer_freq",
    "mtp_hybrid_override_pattern",
    "hybrid_override_pattern",
    "num_nextn_predict_layers",
    "sliding_window_pattern",
}


@pytest.mark.parametrize("kind", [*BUILT, "nemotron_h"])
def test_defaults_are_those_of_transformers(kind: str) -> None:
    fields = type(hub_config({"model_type": kind})).__dataclass_fields__
    ours = nemotron.DEFAULTS if kind == "nemotron_h" else TRAITS[kind].defaults
    for key, value in ours.items():
        if key in fields:
            assert fields[key].default == value, f"{kind}.{key}"
        elif key == "head_dim" or (key == "tie_word_embeddings" and kind.endswith("_text")):
            pass  # a head_dim that transformers derives when needed; a decoder whose wrapper decides about ties
        elif kind not in BY_CLASS:  # such rows state only what their config class does not
            assert key in OWN_KEYS, f"{kind}.{key} is not a key of transformers"


@pytest.mark.parametrize("kind", ENCODERS)
def test_encoder_defaults_are_those_of_transformers(kind: str) -> None:
    made = hub_config({"model_type": kind, "vision_config": {}, "text_config": {}})
    fields = type(made.vision_config).__dataclass_fields__
    for key, value in WRAPPERS[kind].encoder_defaults.items():
        if key in fields:
            default = fields[key].default
            assert (list(default) if isinstance(default, tuple) else default) == value, f"{kind}.{key}"
        else:  # read by the encoder's code when it is there
            assert key in ("vision_use_head", "deepstack_visual_indexes")
    for key, value in WRAPPERS[kind].defaults.items():
        assert type(made).__dataclass_fields__[key].default == value, f"{kind}.{key}"


@pytest.mark.parametrize("kind", [kind for kind in BUILT if "layer_types" in TRAITS[kind].defaults])
@pytest.mark.parametrize("windowed", [False, True])
def test_layer_types_match_transformers(kind: str, windowed: bool) -> None:
    config: dict[str, Any] = {
        "model_type": kind,
        "hidden_size": 64,
        "num_hidden_layers": 14,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 8,
        "vocab_size": 500,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "eos_token_id": 2,
    }
    moe = TRAITS[kind].moe
    if moe is None:
        config = {key: value for key, value in config.items() if "expert" not in key and "moe" not in key}
    elif moe.experts != "num_experts":
        config[moe.experts] = config.pop("num_experts")
        config.pop("moe_intermediate_size")
    if windowed:
        config |= {"use_sliding_window": True, "sliding_window": 77, "max_window_layers": 5}
    made = hub_config(config)
    for layer, layer_type in zip(spec_from_config(config, "x").layers, made.layer_types, strict=True):
        if layer_type == "linear_attention":
            assert isinstance(layer.mixer, GatedDelta)
        else:
            assert isinstance(layer.mixer, Attention)
            assert layer.mixer.window == (made.sliding_window if layer_type == "sliding_attention" else None)


def test_windows_of_shipped_models() -> None:
    def windows(name: str) -> list[int | None]:
        return [layer.mixer.window for layer in find(name).layers if isinstance(layer.mixer, Attention)]

    assert windows("gemma2_2b")[:4] == [4096, None, 4096, None]
    assert windows("gemma3_1b")[:7] == [512] * 5 + [None, 512]
    assert windows("gpt_oss_20b")[:4] == [128, None, 128, None]
    assert set(windows("llama3_8b")) == {None}
    assert [windows("gemma3_vl_27b").count(None), len(windows("gemma3_vl_27b"))] == [10, 62]


def test_layer_types_of_shipped_models() -> None:
    deepseek = find("deepseek_v3").layers
    assert [isinstance(layer.ffn, MoE) for layer in deepseek] == [False] * 3 + [True] * 58
    hybrid = find("qwen3_next_80b_a3b").layers
    assert [isinstance(layer.mixer, GatedDelta) for layer in hybrid] == [True, True, True, False] * 12
    nano = find("nemotron_3_nano").layers
    letters = ["E" if layer.ffn else "*" if isinstance(layer.mixer, Attention) else "M" for layer in nano]
    assert "".join(letters) == "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    flux = find("flux_12b").layers
    assert [layer.streams for layer in flux] == [2] * 19 + [1] * 38


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["ministral3_8b", "gemma3_vl_4b", "qwen3_vl_8b", "qwen25_vl_3b", "glm_45v"])
def test_a_wrapper_without_tie_setting_uses_the_decoder_setting(name: str, tied: bool) -> None:
    """Older files set it in text_config; transformers reads only the wrapper and then finds both tensors."""
    config = config_of(name)
    inner = config.pop("text_config", None) or {key: config[key] for key in config if key != "vision_config"}
    inner["tie_word_embeddings"] = tied
    inner["model_type"] = WRAPPERS[config["model_type"]].text[-1]
    outer = {"model_type": config["model_type"], "vision_config": config["vision_config"]}
    assert spec_from_config({**outer, "text_config": inner}, "x").tied is tied


def test_the_text_config_alone_reads_as_a_language_model() -> None:
    wrapped = find("qwen35_9b")
    alone = spec_from_config(config_of("qwen35_9b")["text_config"], "text")
    assert alone.kind == "causal_lm"
    assert alone.groups == wrapped.groups
    assert wrapped.params.total == alone.params.total + wrapped.params.vision
    flat = {**config_of("qwen35_9b")["text_config"], "model_type": "qwen3_5"}
    assert spec_from_config(flat, "text").groups == alone.groups


def test_the_class_name_replaces_a_missing_model_type() -> None:
    config = {key: value for key, value in small_llama().items() if key != "model_type"}
    assert spec_from_config({**config, "architectures": ["LlamaForCausalLM"]}, "x").model_type == "llama"


def small_llama() -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "vocab_size": 128,
    }


def test_every_alias_of_a_key_is_read() -> None:
    config = {**small_llama(), "model_type": "mixtral", "num_key_value_heads": 4, "num_experts": 3}
    assert spec_from_config(config, "x").moe == spec_from_config({**config, "num_local_experts": 3}, "x").moe


def test_all_shipped_models_are_read_by_the_same_reader() -> None:
    assert len(names()) == len(set(names())) >= 90
