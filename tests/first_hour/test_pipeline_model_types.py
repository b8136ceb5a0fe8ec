"""Pipeline stages of model types that run transformers' own forward pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.engine.families import FAMILIES
from tests.first_hour.test_unknown_model_type import config_file


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("kind", "overrides", "reason"),
    [
        ("gemma4_text", (), "no pipeline stages for this gemma4_text model (pp=2): its layers also receive"),
        ("granitemoe", ("moe.aux_loss=0.01",), "cannot balance the experts of this granitemoe model on several stages"),
    ],
)
def test_a_pipeline_that_cannot_be_is_refused_before_the_model_is_built(
    meshwright: Any, tmp_path: Path, kind: str, overrides: tuple[str, ...], reason: str
) -> None:
    words = ("train", config_file(tmp_path, kind), "--tiny", "--nproc", "2", "layout.pp=2", *overrides)
    refused = meshwright(*words)
    assert refused.code == 1
    assert reason in refused.out + refused.err
    assert "building the model" not in refused.err


@pytest.mark.parametrize(
    ("kind", "changes", "error"),
    [
        ("deepseek_v3", {"n_group": 3}, "n_group=3: does not divide the"),
        ("deepseek_v3", {"n_group": 2, "topk_group": 9}, "topk_group=9: is larger than n_group=2"),
        ("deepseek_v3", {"n_group": [4]}, "n_group=[4]: must be an integer"),
        ("nemotron_h", {"n_group": 7}, "n_group=7: does not divide the"),
        ("qwen3_moe", {"mlp_only_layers": ["a"]}, "mlp_only_layers=['a']: 'a' is not a layer index below"),
    ],
)
def test_a_config_that_contradicts_itself_gets_one_error(
    meshwright: Any, tmp_path: Path, kind: str, changes: dict[str, Any], error: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**FAMILIES[kind], **changes}))
    refused = meshwright("inspect", "config.json")
    assert refused.code == 2
    assert error in refused.err
    assert refused.err.count("error:") == 1


def test_a_config_that_transformers_cannot_compute_with_is_no_traceback(meshwright: Any, tmp_path: Path) -> None:
    """Without layer_types and a window, transformers divides by sliding_window_pattern."""
    values = {**FAMILIES["llama"], "model_type": "exaone4", "sliding_window": None, "sliding_window_pattern": None}
    (tmp_path / "config.json").write_text(json.dumps({**values, "architectures": ["Exaone4ForCausalLM"]}))
    refused = meshwright("train", "config.json", "--tiny", "train.steps=1")
    assert refused.code == 2
    assert "transformers rejects the config of this exaone4: ZeroDivisionError" in refused.err
