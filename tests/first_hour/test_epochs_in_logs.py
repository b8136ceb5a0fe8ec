"""Logs of runs by epochs, epochs of data that is not here, and folders named like a catalogue model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.engine.post_training.perplexity import _positions

LOG = """meshwright train run
step 1/40  epoch 0.05/2.00  loss 4.4531  lr 0.001  grad norm 1.2  tokens/s/rank 2,521  step time 1.62 s
step 2/40  epoch 0.10/2.00  loss 4.3531  lr 0.001  grad norm 1.1  tokens/s/rank 2,521  step time 1.62 s
step 3/40  epoch 0.15/2.00  loss 4.2531  lr 0.001  grad norm 1.1  tokens/s/rank 2,521  step time 1.62 s
"""


def test_doctor_reads_the_console_of_a_run_by_epochs(meshwright: Any, tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text(LOG)
    read = meshwright("doctor", str(tmp_path / "run.log"), "--json")
    assert read.code in (0, 1), read.err
    assert (read.json["steps"], read.json["last_step"], read.json["total_steps"]) == (3, 3, 40)


DATA = ("--dataset", "medpix")  # whose card publishes no number of samples


@pytest.mark.parametrize("more", [(), ("--price", "1.10")])
def test_epochs_of_data_that_is_not_here_say_so(meshwright: Any, more: tuple[str, ...]) -> None:
    shown = meshwright("recommend", "llama3-8b", "--gpus", "1xL40S", "--goal", "qlora", "train.epochs=2", *DATA, *more)
    assert shown.code == 0, shown.err
    assert "no figures: the samples of medpix are not known here" in shown.out
    assert "does not fit" not in shown.out


def test_a_folder_named_like_a_catalogue_model_is_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=96)
    config.save_pretrained(tmp_path / "tinyllama")
    monkeypatch.chdir(tmp_path)
    assert _positions(Path("./tinyllama")) == 96
