"""`doctor` on the logs of every framework: printed fixes work, and late, slow and sudden problems are found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.first_hour.test_walk_doctor10 import figures, megatron

SCRIPT = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 4 --seq-length 8192 "
    "--micro-batch-size 1 --global-batch-size 384 --bf16 --lr 3e-4 --train-iters 1000\n"
)


def rules(answer: dict[str, Any]) -> list[str]:
    return [one["rule"] for one in answer["findings"]]


def test_the_fix_for_a_file_without_a_model_works(meshwright: Any, tmp_path: Path) -> None:
    log, script = tmp_path / "train.log", tmp_path / "run.sh"
    log.write_text(megatron())
    script.write_text(SCRIPT)
    typed = ("doctor", str(log), "--recipe", str(script), "--gpus", "96xA100-80")
    refused = meshwright(*typed)
    fix = refused.err.partition("fix:")[2].split("|")[0].split()
    assert fix[0] == "--model"
    answer = meshwright(*typed, *fix, "--json").json
    assert answer["engine"] == "megatron"
    assert figures(answer)["tokens/s/GPU"] > 0
    unnamed = meshwright("doctor", str(log), "--recipe", str(script), *fix, "--json").json
    assert any("does not state the GPUs" in note for note in unnamed["notes"])
