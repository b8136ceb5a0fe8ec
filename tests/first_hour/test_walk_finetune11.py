"""An eleventh walk through a fine-tuning: the last step of epochs, folders with tokenizers, words of other trainers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

PRETRAIN = "qwen3_600m_pretrain_config"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with five documents, 30 samples of 64 bytes."""
    rows = [{"text": " ".join(f"word {i} {j}" for j in range(40))} for i in range(5)]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_the_last_step_of_pretraining_epochs_is_averaged_over_its_real_samples(here: Path, meshwright: Any) -> None:
    """The 30 samples have the same mean loss in one step of 32, two of them padding, as in 30 / 5 steps."""
    words = ("train", PRETRAIN, "--tiny", "--dataset", "texts.jsonl", "train.epochs=1", "optimizer.lr=1e-9", "--json")
    sizes = ("layout.micro_batch_size=1", "train.global_batch_size={}")
    padded, full = (meshwright(*words, *(one.format(batch) for one in sizes)).json for batch in (32, 5))
    assert (len(padded["losses"]), len(full["losses"])) == (1, 6)
    assert padded["losses"][0] == pytest.approx(sum(full["losses"]) / 6, rel=1e-4)
    assert padded["grad_norms"][0] == pytest.approx(max(full["grad_norms"]), rel=0.1)
