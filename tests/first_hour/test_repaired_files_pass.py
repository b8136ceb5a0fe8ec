"""Continued pretraining, repairs of files, FP8 and slow links."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

AUTOMODEL = """
recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler:
  global_batch_size: {batch}
  local_batch_size: 1
  max_steps: 3000
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.{built}
  pretrained_model_name_or_path: Qwen/Qwen3-30B-A3B
distributed:
  _target_: nemo_automodel.components.distributed.fsdp2.FSDP2Manager
  dp_size: none
  tp_size: 1
  cp_size: 4
  ep_size: {ep}
  sequence_parallel: false
loss_fn:
  _target_: nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy
dataset:
  _target_: nemo_automodel.components.datasets.llm.megatron_dataset.MegatronPretraining
  seq_length: {seq}
optimizer:
  _target_: torch.optim.AdamW
  lr: 1.0e-5
  weight_decay: 0.1
"""
MEGATRON = (
    "#!/bin/bash\nexport CUDA_DEVICE_MAX_CONNECTIONS=8\n"
    "torchrun --nproc-per-node 8 --nnodes 16 pretrain_gpt.py --num-layers 36 --hidden-size 4096 "
    "--ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8 --seq-length 8192 "
    "--swiglu --max-position-embeddings 8192 --position-embedding-type rope --rotary-base 500000 "
    "--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 5 "
    "--use-distributed-optimizer --vocab-size 128256 --micro-batch-size 1 --global-batch-size 1000 "
    "--train-iters 5000 --lr 3e-4 --min-lr 3e-5 --lr-warmup-iters 100 --bf16 --mock-data --save-interval 500\n"
)
GPUS = ("--gpus", "16x8xH100")


def _file(folder: Path, batch: int = 256, ep: int = 8, seq: int = 8192, built: str = "from_pretrained") -> Path:
    path = folder / "am.yaml"
    path.write_text(AUTOMODEL.format(batch=batch, ep=ep, seq=seq, built=built))
    return path


def _rules(answer: dict[str, Any], severity: str = "") -> list[str]:
    return [one["rule"] for one in answer["findings"] if not severity or one["severity"] == severity]


@pytest.mark.parametrize(
    ("model", "words", "warned"),
    [
        ("qwen3-30b-a3b", ("--goal", "pretrain", "checkpoint.pretrained=Qwen/Qwen3-30B-A3B"), True),
        ("llama3-8b", ("--goal", "pretrain", "checkpoint.pretrained=/weights/llama"), True),
        ("llama3-8b", ("--goal", "pretrain"), False),
        ("llama3-8b", ("--goal", "sft"), True),
        ("llama3-8b", ("--goal", "sft", "checkpoint.pretrained=random"), False),
    ],
)
def test_trained_weights_have_positions_whatever_the_goal(
    meshwright: Any, model: str, words: tuple[str, ...], warned: bool
) -> None:
    answer = meshwright("recommend", model, *GPUS, "--seq", "64k", *words, "--json").json
    assert ("sequence.beyond-model" in _rules(answer, "warning")) == warned


@pytest.mark.parametrize(("built", "warned"), [("from_pretrained", True), ("from_config", False)])
def test_an_automodel_file_that_loads_weights_has_their_positions(
    meshwright: Any, tmp_path: Path, built: str, warned: bool
) -> None:
    answer = meshwright("check", str(_file(tmp_path, seq=65536, built=built)), *GPUS, "--json").json
    assert ("sequence.beyond-model" in _rules(answer)) == warned


@pytest.mark.parametrize(("batch", "ep"), [(250, 3), (100, 5), (256, 3)])
def test_the_repair_of_a_file_passes_when_it_is_pasted(meshwright: Any, tmp_path: Path, batch: int, ep: int) -> None:
    path = _file(tmp_path, batch, ep, 32768)
    answer = meshwright("check", str(path), *GPUS, "--json")
    assert answer.code == 1
    assert "memory.peak" in _rules(answer.json, "error")
    repair = answer.json["repair"]
    for one in answer.json["findings"]:
        if one["rule"] in repair["removes"]:
            assert set(one["fix"]) <= set(repair["overrides"])
    settings = yaml.safe_load(path.read_text())
    for text in repair["overrides"]:
        (key, value), *_ = yaml.safe_load(text).items()
        *sections, name = key.split(".")
        place = settings
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    path.write_text(yaml.safe_dump(settings))
    after = meshwright("check", str(path), *GPUS, "--json")
    assert (after.code, _rules(after.json, "error")) == (0, [])
    assert after.json["estimate"]["memory_gib"]["total"] == pytest.approx(repair["total_gib"])


def test_the_repair_of_a_script_names_flags_and_variables(meshwright: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(MEGATRON)
    answer = meshwright("check", str(path), *GPUS, "--json").json
    flags = [text for text in answer["repair"]["overrides"] if text.startswith("--")]
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=1" in answer["repair"]["overrides"]
    text = MEGATRON.replace("CONNECTIONS=8", "CONNECTIONS=1")
    for removed in (one.removeprefix("without ") for one in answer["repair"]["overrides"] if "without" in one):
        text = re.sub(rf"{removed} \S+", "", text)
    path.write_text(f"{text.rstrip()} {' '.join(flags)}\n")
    assert meshwright("check", str(path), *GPUS, "--json").code == 0
    shown = meshwright("estimate", str(path), *GPUS).out
    assert "Repair" not in shown


def test_advice_adds_only_advice_to_the_findings_of_a_file(meshwright: Any, tmp_path: Path) -> None:
    path = _file(tmp_path, ep=4, seq=40960)
    path.write_text(
        path.read_text().replace("sequence_parallel", "activation_checkpointing: true\n  sequence_parallel")
    )
    plain, more = (meshwright("check", str(path), *GPUS, *words, "--json").json for words in ((), ("--advice",)))
    assert "memory.tight" in _rules(plain, "warning")
    assert _rules(plain) == [one["rule"] for one in more["findings"] if one["severity"] != "advice"]
    assert _rules(meshwright("estimate", str(path), *GPUS, "--json").json) == _rules(plain)
    assert "peft.settings-unused" not in _rules(more)  # the file has no adapter


def test_fp8_is_one_format_everywhere(meshwright: Any) -> None:
    words = ("recommend", "llama3-8b", "--goal", "pretrain")
    assert meshwright(*words, "--gpus", "8xH100", "precision.matmul=fp8", "--json").json["error"]["fix"] == [
        "precision.matmul=fp8_tensor"
    ]
    for gpus in ("8xH100", "8xB200"):
        answer = meshwright(*words, "--gpus", gpus, "--json").json
        (fp8,) = [text for one in answer["suggestions"] for text in one["overrides"] if "matmul" in text]
        assert fp8 == "precision.matmul=fp8_tensor"
        followed = meshwright(*words, "--gpus", gpus, fp8, "--json").json
        assert not [rule for rule in _rules(followed, "warning") if rule.startswith("precision.")]


def _log(folder: Path, slow_from: int, port_error_at: int) -> str:
    """Write a log of all ranks' steps, which become slower at one step; the link of rank 72 reports an error at one."""
    lines = ["[rank0]:[titan] 2026-11-01 00:00:00,000 - root - INFO - Training starts at step 1"]
    for step in range(10, 310, 10):
        if step == port_error_at:
            lines.append("[rank72]:gpu-010:3411:3500 [0] NCCL WARN NET/IB : mlx5_3:1 Got async event : port error")
        tps = 5_850 if step >= slow_from else 7_600 + step % 3
        lines += [
            f"[rank{rank}]:[titan] 2026-11-01 00:00:00,000 - root - INFO - step: {step:2}  loss:  4.{400 - step}  "
            f"grad_norm:  1.08{step % 7}  memory: 62.20GiB(78.00%)  tps: {tps:,}  tflops: 347.10  mfu: 35.10%"
            for rank in (0, 72)
        ]
    path = folder / f"{slow_from}-{port_error_at}.log"
    path.write_text("\n".join(lines))
    return str(path)


def test_a_slowdown_names_the_link_that_reported_errors_there(meshwright: Any, tmp_path: Path) -> None:
    for port_error_at, blamed in ((160, True), (40, False)):
        answer = meshwright("doctor", _log(tmp_path, 160, port_error_at), "--json").json
        (slow,) = [one for one in answer["findings"] if one["rule"] == "speed.sustained-slowdown"]
        assert ("port error" in slow["message"]) == blamed
        assert any("[rank72]:" in line for line in slow["lines"]) == blamed
        assert any("the node of [rank72]" in str(one) for one in slow["remedies"]) == blamed


def test_evidence_names_the_rank(meshwright: Any, tmp_path: Path) -> None:
    path = Path(_log(tmp_path, 900, 0))
    timeout = "[E1101 ProcessGroupNCCL.cpp:632] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=48211)"
    path.write_text(f"{path.read_text()}\n[rank72]:{timeout}\n")
    (hang,) = [one for one in meshwright("doctor", str(path), "--json").json["findings"] if "hang" in one["rule"]]
    assert hang["lines"][0].endswith(f"[rank72]: {timeout}")
