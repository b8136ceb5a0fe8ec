"""What a newcomer did with repairs of launch scripts: paste them, and check again."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

BRIDGE = "torchrun --nproc-per-node=8 {nodes} scripts/training/run_recipe.py --recipe {recipe} \\\n {rest}\n"
QWEN = {"nodes": "--nnodes=8", "recipe": "qwen3_235b_a22b_sft_config"}
BRIDGE_FILES = {
    "bridge.sh": (
        BRIDGE.format(
            **QWEN,
            rest="--dataset squad model.tensor_model_parallel_size=4 model.pipeline_model_parallel_size=8 "
            "model.expert_model_parallel_size=16 train.global_batch_size=32 train.micro_batch_size=2 \\\n "
            "model.sequence_parallel=false optimizer.learning_rate=5e-6 dataset.seq_length=2048 +model.magic=1",
        ),
        "8x8xH200",
    ),
    "b3.sh": (
        BRIDGE.format(
            nodes="",
            recipe="llama3_8b_pretrain_config",
            rest="--dataset llm-pretrain-mock model.tensor_model_parallel_size=2 training.global_batch_size=64 "
            "model.sequence_paralel=true model.nothing_like_it=3",
        ),
        "8xH200",
    ),
    "b5.sh": (
        BRIDGE.format(
            **QWEN,
            rest="--dataset squad checkpoint.pretrained_checkpoint=/ckpt/q model.sequence_parallel=false "
            "train.micro_batch_size=2",
        ),
        "8x8xH200",
    ),
}


def pasted(script: str, repair: list[str]) -> str:
    """The script as a user edits it: keys removed in the spelling of the file, others appended."""
    for text in repair:
        if text.startswith("without "):
            removed = re.escape(text.removeprefix("without "))
            script, count = re.subn(rf" {removed}(=\S+| [^-\s]\S*)?(?=\s)", "", script)
            assert count, text
        else:
            key = re.escape(re.split("[= ]", text)[0])
            script = re.sub(rf" {key}[= ]\S+", "", script).rstrip("\n") + f" {text}\n"
    return script


def test_a_repair_of_a_bridge_command_pasted_into_it_leaves_no_error(
    meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, (script, gpus) in BRIDGE_FILES.items():
        Path(name).write_text(script)
        first = meshwright("check", name, "--gpus", gpus, "--json").json
        repair = first["repair"]
        for finding in first["findings"]:  # the fix of a finding is about it
            if finding["severity"] == "error" and len(finding["fix"]) < len(repair["overrides"]):
                replaced = [f"without {finding['field']}"] if finding["rule"] == "key.unknown" else []
                fix = [*finding["fix"], *(one for one in replaced if one not in finding["fix"])]
                Path("one.sh").write_text(pasted(script, fix))
                after = meshwright("check", "one.sh", "--gpus", gpus, "--json").json["findings"]
                assert (finding["rule"], finding["field"]) not in {(f["rule"], f["field"]) for f in after}, finding
        Path(name).write_text(pasted(script, repair["overrides"]))
        after = meshwright("check", name, "--gpus", gpus, "--json").json
        assert after["ok"], (name, repair, after["findings"])
        assert after["estimate"]["step_s"] == pytest.approx(repair["step_s"]), name
