"""Pipeline stages of model types that run transformers' own forward pass, as users type them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.first_hour.test_walk_any22 import config_file


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
