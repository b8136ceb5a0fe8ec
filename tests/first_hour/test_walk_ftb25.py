"""A fine-tuner's walk: flags and files that disagree, fixes in the front end's own keys, and headlines."""

from __future__ import annotations

from pathlib import Path

import pytest

import meshwright as mw

CONFIG = """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_offload_params: true
  fsdp_sharding_strategy: FULL_SHARD
mixed_precision: {kind}
num_machines: 1
num_processes: 4
"""
SCRIPT = """accelerate launch --config_file fsdp.yaml run_sft.py --model_name_or_path Qwen/Qwen3-8B \\
  --per_device_train_batch_size 2 --max_seq_length 2048 {flag} --output_dir out
"""


@pytest.mark.parametrize(
    ("kind", "flag", "computed"),
    [
        ("fp16", "--bf16 True", "bf16"),
        ("bf16", "--fp16 True", "fp16"),
        ("fp16", "--bf16", "bf16"),
        ("bf16", "--bf16 False", "bf16"),
        ("'no'", "--bf16 True", "bf16"),
        ("bf16", "--bf16 True", "bf16"),
    ],
)
def test_trainer_flag_replaces_mixed_precision_of_accelerate(
    kind: str, flag: str, computed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fsdp.yaml").write_text(CONFIG.format(kind=kind))
    Path("run.sh").write_text(SCRIPT.format(flag=flag))
    found = mw.check("run.sh", gpus="4xA100")
    assert found.recipe is not None
    assert found.recipe.precision.compute == computed
    overwritten = [one for one in found.findings if one.rule == "key.overwritten"]
    assert len(overwritten) == (kind in ("fp16", "bf16") and kind != computed)
    for one in overwritten:
        assert one.file.endswith("fsdp.yaml")
        assert one.fix == (f"mixed_precision: {computed}",)
        assert "run.sh:2" in one.message
