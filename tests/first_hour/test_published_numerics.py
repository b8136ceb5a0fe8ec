"""The same model on every engine: published RoPE, norms and routers from scratch, and what torchtitan changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.models import find, names, numerics
from meshwright.models.numerics import Numerics, from_config, numerics_of, published_config, unknown_values

from .mistakes import call

NOT_BUILT = ("wan_1_3b", "wan_14b", "flux_12b", "mimo_7b", "nemotron_super_49b")  # transformers has no class of them
UNKNOWN_NUMBERS = {
    "phi4_mini_3p8b": ("rope_theta", "norm_eps"),
    **dict.fromkeys(("qwen2_14b", "qwen2_32b", "qwen2_72b", "qwen25_14b", "qwen25_32b", "qwen25_72b"), ("norm_eps",)),
    "glm_45v": ("rope_theta", "norm_eps", "scoring_func"),
    "nemotron_3_5_lightning": ("norm_eps", "scoring_func"),
    "nemotron_3_ultra": ("norm_eps", "scoring_func"),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def built(name: str) -> dict[str, Any]:
    """Return the config.json that our engine writes for a catalogue model, from random weights."""
    from meshwright.engine.model.build import transformers_config

    config = published_config(name)
    found: dict[str, Any] = transformers_config(config.get("llm_config", config)).get_text_config().to_dict()
    return found


def global_rope(config: dict[str, Any]) -> dict[str, Any]:
    """Return the RoPE of a config; of layers with windows and without, that of those without."""
    rope = config.get("rope_parameters") or {}
    return dict(rope.get("full_attention") or rope.get("main") or rope)


@pytest.mark.parametrize("name", [one for one in names() if one not in NOT_BUILT])
def test_a_model_from_scratch_has_the_published_numbers(name: str) -> None:
    published, config = numerics_of(name), built(name)
    found, rope = from_config(config), global_rope(config)
    if published.rope_theta is not None and rope:
        assert rope["rope_theta"] == published.rope_theta
    scaling = published.rope_scaling or {}
    scaled = {key: rope.get(key) for key in scaling if key not in ("type", "rope_theta", "rope_type")}
    if name != "deepseek_v4_flash":  # its scaling is that of compressed layers
        assert scaled == {key: scaling[key] for key in scaled}
        assert rope.get("rope_type", "default") == (published.scaling_type or rope.get("rope_type", "default"))
    if published.partial_rotary_factor != 1.0:
        assert rope["partial_rotary_factor"] == published.partial_rotary_factor
    for field in ("norm_eps", "init_std", *numerics.SAME):
        if getattr(published, field) is not None:
            assert getattr(found, field) == getattr(published, field), field


def test_what_is_unknown_is_known() -> None:
    missing = {name: unknown_values(numerics_of(name), find(name)) for name in names()}
    assert {name: fields for name, fields in missing.items() if fields} == UNKNOWN_NUMBERS


def test_a_tiny_run_writes_the_published_rope_base_and_resumes_with_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = ("train", "llama3.2-1b", "--goal", "pretrain", "--tiny", "--out", "rr")
    with monkeypatch.context() as earlier:  # a run of a version without the table
        earlier.setattr(numerics, "_published", lambda name: {})
        assert call(*typed, "train.steps=1").code == 0
        assert rope_of("rr") == {"rope_theta": 10000.0, "rope_type": "default"}
    resumed = call(*typed, "train.steps=2", "--accept-changes")
    assert resumed.code == 0, resumed.err
    assert "the run goes on with the model that it was started with" in resumed.err
    assert "published" in resumed.err
    assert rope_of("rr") == {"rope_theta": 10000.0, "rope_type": "default"}
    assert call(*typed[:-1], "rs", "train.steps=1").code == 0
    assert rope_of("rs")["rope_theta"] == 500_000
    assert rope_of("rs")["rope_type"] == "llama3"


def rope_of(run: str) -> dict[str, Any]:
    config = json.loads(Path(run, "model", "config.json").read_text())
    found: dict[str, Any] = config["rope_parameters"]
    return found


def test_recommend_says_once_what_no_table_knows() -> None:
    answer = call("recommend", "phi4-mini", "--goal", "pretrain", "--gpus", "8xH100")
    stated = [one for one in answer.json["notes"] if "RoPE base" in one]
    assert len(stated) == 1
    assert "transformers' defaults apply" in stated[0]
    for other in (("phi4-mini", "--goal", "sft"), ("llama3-8b", "--goal", "pretrain")):
        notes = call("recommend", *other, "--gpus", "8xH100").json.get("notes") or []
        assert not [one for one in notes if "not in the catalogue" in one]


def test_an_own_config_without_a_base_is_what_it_says(folder: Path) -> None:
    config = {**published_config("llama3_8b"), "num_hidden_layers": 2}
    config.pop("rope_theta")
    (folder / "own").mkdir()
    (folder / "own" / "config.json").write_text(json.dumps(config))
    assert numerics_of("./own") == Numerics(norm_eps=1e-5)
    notes = call("recommend", "./own", "--goal", "pretrain", "--gpus", "8xH100").json.get("notes") or []
    assert not [one for one in notes if "not in the catalogue" in one]
