"""Folders that transformers writes itself: every supported type trains from them, with transformers' own loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine import saved_folders
from tests.engine.ranks import run
from tests.engine.saved_folders import NOT_SAVED, TYPES, WITH_IMAGES

from meshwright.models import known_architectures
from meshwright.models.readers.architectures import BY_CLASS
from meshwright.recipes.engine_models import TRAINED

# Changes to the config and options of save_pretrained.
PLAIN: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
TIED_BF16: tuple[dict[str, Any], dict[str, Any]] = ({"tie_word_embeddings": True}, {"dtype": torch.bfloat16})
UNTIED_SHARDED: tuple[dict[str, Any], dict[str, Any]] = ({"tie_word_embeddings": False}, {"max_shard_size": "30KB"})
VARIANTS = {"plain": PLAIN, "tied_bf16": TIED_BF16, "untied_sharded": UNTIED_SHARDED}
NO_EXPERTS = {"layers_block_type": ["linear_attention", "full_attention", "mlp"]}  # yet n_shared_experts is written
QUICK = [
    ("nemotron_h", (NO_EXPERTS, {})),
    ("nemotron_h", TIED_BF16),
    ("seed_oss", UNTIED_SHARDED),  # dropout in its config
    ("mistral3", PLAIN),  # the language model of a vision-language folder
]


def train_from_saved(meshwright: Any, tmp_path: Path, kind: str, variant: Any) -> None:
    folder = tmp_path / "model"
    saved_folders.import_models(kind)
    expected = run(1, saved_folders.save, str(folder), kind, dict(variant[0]), dict(variant[1]))[0]
    answer = meshwright(*saved_folders.words(folder, kind))
    assert answer.code == 0, answer.out + answer.err
    losses = answer.json["losses"]
    assert len(losses) == 2
    if kind in WITH_IMAGES:
        assert all(0 < loss < 10 for loss in losses)
    else:
        assert losses[0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("kind", "variant"), QUICK, ids=[f"{kind}-{i}" for i, (kind, _) in enumerate(QUICK)])
def test_a_saved_folder_trains_with_transformers_loss(kind: str, variant: Any, meshwright: Any, tmp_path: Path) -> None:
    train_from_saved(meshwright, tmp_path, kind, variant)


TEXT_ALONE = ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v_moe"]  # no class of their own without the encoder


@pytest.mark.parametrize("kind", TEXT_ALONE)
def test_text_alone_trains_a_vision_language_model_with_its_loss(kind: str, meshwright: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    saved_folders.import_models(kind)
    expected = run(1, saved_folders.save, str(folder), kind, {}, {})[0]
    answer = meshwright(*(word for word in saved_folders.words(folder, kind) if word != "data.images=true"))
    assert answer.code == 0, answer.out + answer.err
    assert answer.json["losses"][0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", TYPES)
def test_every_type_trains_from_its_saved_folder(kind: str, variant: str, meshwright: Any, tmp_path: Path) -> None:
    train_from_saved(meshwright, tmp_path, kind, VARIANTS[variant])


def test_the_sweep_has_every_supported_type() -> None:
    """Types with their config class's defaults, and those that transformers runs: benchmarks/engine_types.py."""
    diffusers = {name for name in known_architectures() if name.endswith("Model")}
    own = (set(known_architectures()) & TRAINED) | diffusers
    assert own - set(BY_CLASS) == {*TYPES, *NOT_SAVED} & own


def test_a_value_that_transformers_rejects_is_named(meshwright: Any, tmp_path: Path) -> None:
    """A bad value in config.json is an error with the field's name, not a traceback."""
    config = {**TYPES["llama"], "hidden_size": 32, "rms_norm_eps": "tiny", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    answer = meshwright(*saved_folders.words(tmp_path, "llama"))
    assert answer.code == 2
    assert answer.json["error"]["field"] == "rms_norm_eps"
    assert "Traceback" not in answer.err


def test_the_adviser_reads_special_floats(meshwright: Any, tmp_path: Path) -> None:
    config = {**TYPES["nemotron_h"], "time_step_limit": [0.0, {"__float__": "Infinity"}], "n_shared_experts": 1}
    config |= NO_EXPERTS
    (tmp_path / "config.json").write_text(json.dumps(config))
    answer = meshwright("estimate", str(tmp_path), "--gpus", "1xH100", "--goal", "sft", "--json")
    assert answer.code == 0, answer.out
