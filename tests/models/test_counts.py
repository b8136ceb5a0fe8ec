"""Every shipped model has exactly as many parameters as the class that Hugging Face builds from its config."""

from __future__ import annotations

from typing import Any

import pytest
from tests.each import each

from meshwright.models import config_of, find, names

from .hub import built_params

# Models whose class exists in remote code only. Their modules are compared one by one below.
NO_CLASS = {
    "nemotron_nano_v2_vl_12b": "NemotronH_Nano_VL_V2 is remote code; decoder and encoder are compared apart",
    "nemotron_super_49b": "nemotron-nas is remote code; its published total is compared",
    "mimo_7b": "mimo is remote code; its layers are Qwen2's, with which they are compared",
}
COMPARED = sorted((name for name in names() if name not in NO_CLASS), key=lambda name: find(name).params.total)


def kind(name: str) -> Any:
    """Return what the reader chooses by: the model types and the keys of a config."""
    config = config_of(name)
    parts = [config, config.get("text_config") or {}, config.get("llm_config") or {}]
    return [(part.get("model_type", part.get("_class_name")), sorted(part)) for part in parts]


# Classes are built layer by layer: the smallest model of every kind each time, the larger ones with the slow tests.
SMALLEST = {str(kind(name)): name for name in reversed(COMPARED)}.values()


def test_the_table_of_models_without_a_class_is_up_to_date() -> None:
    assert set(NO_CLASS) <= set(names())
    assert len(NO_CLASS) <= 3


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SMALLEST else pytest.mark.slow) for name in COMPARED]
)
def test_total_equals_what_the_real_class_builds(name: str) -> None:
    assert find(name).params.total == built_params(config_of(name))


def test_mimo_has_the_layers_of_qwen2() -> None:
    assert find("mimo_7b").params.total == built_params({**config_of("mimo_7b"), "model_type": "qwen2"})


def test_nemotron_nano_v2_vl_is_its_decoder_its_encoder_and_its_projector() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = config_of("nemotron_nano_v2_vl_12b")
    with torch.device("meta"):
        encoder = transformers.RadioModel(transformers.RadioConfig())
    # transformers gives the encoder layer scales, fixed to one, which the checkpoint does not have.
    counted = sum(weight.numel() for key, weight in encoder.named_parameters() if "layer_scale" not in key)
    merged, projected, hidden = 4 * 1280, config["projector_hidden_size"], config["llm_config"]["hidden_size"]
    projector = merged + merged * projected + projected * hidden
    spec = find("nemotron_nano_v2_vl_12b")
    assert spec.params.vision == counted + projector
    assert spec.params.total - spec.params.vision == built_params(config["llm_config"])


@each("name", [name for name in names() if find(name).published_total])
def test_published_totals_agree_within_one_percent(name: str) -> None:
    spec = find(name)
    assert spec.published_total is not None
    # A checkpoint's total counts the multi-token-prediction modules, a model card's usually does not.
    counts = (spec.params.total, spec.params.total + spec.params.mtp)
    assert min(abs(count / spec.published_total - 1) for count in counts) < 0.01


# Totals of checkpoints that carry their multi-token-prediction modules, as their repositories show them.
WITH_PREDICTION = {
    "qwen35_800m": 0.87e9,
    "qwen35_2b": 2.27e9,
    "qwen35_4b": 4.66e9,
    "qwen35_9b": 9.65e9,
    "nemotron_3_super": 123.6e9,
}


@pytest.mark.parametrize("name", WITH_PREDICTION)
def test_mtp_modules_close_the_gap_to_the_checkpoint(name: str) -> None:
    counts = find(name).params
    assert counts.total + counts.mtp == pytest.approx(WITH_PREDICTION[name], rel=0.004)


# Active parameters of the model cards; those that exclude the embeddings are lower than ours.
ACTIVE = {
    "qwen3_30b_a3b": 3.3e9,
    "qwen3_235b_a22b": 22e9,
    "deepseek_v3": 37e9,
    "kimi_k2": 32e9,
    "olmoe_7b": 1.3e9,
    "nemotron_3_nano": 3.6e9,
    "moonlight_16b": 3e9,
    "nemotron_3_ultra": 55e9,
}


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_agree_with_the_model_card(name: str) -> None:
    assert find(name).params.active == pytest.approx(ACTIVE[name], rel=0.03)
