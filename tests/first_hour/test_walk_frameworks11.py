"""What a newcomer did with other frameworks' files: changed shapes, own architectures, fp8 words, storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

BRIDGE = """from megatron.bridge.recipes.llama import llama3_8b_pretrain_config
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain

cfg = llama3_8b_pretrain_config()
{changes}
cfg.train.train_iters = 5000
cfg.train.global_batch_size = 512
pretrain(cfg, forward_step)
"""
WIDER = ("num_layers = 40", "hidden_size = 5120", "ffn_hidden_size = 13824", "num_attention_heads = 40")
GPUS = ("--gpus", "8xH100")


def _bridge(folder: Path, *changes: str) -> str:
    path = folder / "pretrain.py"
    path.write_text(BRIDGE.format(changes="\n".join(f"cfg.{one}" for one in changes)))
    return str(path)


def _rules(answer: dict[str, Any]) -> dict[str, Any]:
    return {one["rule"]: one for one in answer["findings"]}


def test_every_command_sees_the_shape_that_a_bridge_file_changes(meshwright: Any, tmp_path: Path) -> None:
    path = _bridge(tmp_path, *(f"model.{one}" for one in WIDER))
    imported = meshwright("import", path, *GPUS).out
    assert 'model = "llama3_8b"' in imported
    assert "layers = 40\nhidden = 5120\nffn = 13824\nheads = 40" in imported
    for verb in ("check", "estimate"):
        answer = meshwright(verb, path, *GPUS, "--json").json["estimate"]
        assert answer["memory_gib"]["weights"] == pytest.approx(22.95, rel=0.02), verb
    kept = meshwright("import", _bridge(tmp_path, "model.hidden_size = 5120"), *GPUS).out
    assert "head_dim = 128" in kept  # kv_channels of the recipe's model does not follow the width
    moe = meshwright("check", _bridge(tmp_path, "model.num_moe_experts = 8"), *GPUS)
    assert "model.num_moe_experts=8: llama3_8b has no experts; the changed model was not checked" in moe.out


def test_shortened_parallel_sizes_and_late_checkpoints_of_a_bridge_file_are_findings(
    meshwright: Any, tmp_path: Path
) -> None:
    for name in ("context_parallel", "tensor_parallel_size"):
        meant = {"context_parallel": "context_parallel_size"}.get(name, "tensor_model_parallel_size")
        found = _rules(meshwright("check", _bridge(tmp_path, f"model.{name} = 2"), *GPUS, "--json").json)
        assert found["key.unknown"]["fix"] == [f"model.{meant}=2"]
    late = _bridge(tmp_path, "checkpoint.save_interval = 1000000")
    for gpus in (GPUS, ()):
        found = _rules(meshwright("check", late, *gpus, "--json").json)["saving.only-at-the-end"]
        assert (found["line"], found["field"]) == (6, "checkpoint.save_interval")
        fixed = _bridge(tmp_path, found["fix"][0])
        assert "saving.only-at-the-end" not in _rules(meshwright("check", fixed, *gpus, "--json").json)
        late = _bridge(tmp_path, "checkpoint.save_interval = 1000000")
