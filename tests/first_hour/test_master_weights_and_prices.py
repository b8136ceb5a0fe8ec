"""From AutoModel to Megatron-Bridge: master weights, prices, job scripts and the words for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

SFT = """\
step_scheduler:
  global_batch_size: 64
  local_batch_size: 1
  ckpt_every_steps: 200
  num_epochs: 2
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: meta-llama/Llama-3.3-70B-Instruct
  torch_dtype: bfloat16
distributed:
  _target_: nemo_automodel.components.distributed.fsdp2.FSDP2Manager
  tp_size: 4
  cp_size: 1
  sequence_parallel: true
loss_fn:
  _target_: nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy
dataset:
  _target_: nemo_automodel.components.datasets.llm.squad.make_squad_dataset
  dataset_name: rajpurkar/squad
  split: train
packed_sequence:
  packed_sequence_size: 8192
optimizer:
  _target_: torch.optim.AdamW
  lr: 1.0e-5
"""


@pytest.fixture
def sft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("sft70b.yaml").write_text(SFT)
    return "sft70b.yaml"


def test_a_plan_for_megatron_keeps_master_weights_in_fp32(meshwright: Any, sft: str) -> None:
    words = ("--gpus", "4x8xH100")
    plan = meshwright("recommend", sft, *words, "--engine", "megatron", "--save", "sized.toml")
    assert plan.code == 0
    assert "precision.master bf16 → fp32: megatron keeps the weights that its optimizer updates in fp32" in plan.out
    written = meshwright("export", "sized.toml", "--to", "megatron-bridge", *words)
    assert written.code == 0
    assert "main_params_dtype" not in written.out


def test_an_export_says_that_master_weights_stay_in_fp32_and_that_a_hub_name_is_no_folder(
    meshwright: Any, sft: str
) -> None:
    written = meshwright("export", sft, "--to", "megatron-bridge", "--gpus", "32xH100")
    assert "main_params_dtype" not in written.out
    assert "precision.master bf16 → fp32" in written.out + written.err
    note = "dataset.dataset_root=rajpurkar/squad must be a folder with training.jsonl and validation.jsonl"
    assert note in written.out + written.err


def test_bf16_master_weights_of_a_megatron_bridge_file_are_an_error(
    meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = (
        "import torch",
        "from megatron.bridge.recipes import llama31_70b_sft_config",
        "cfg = llama31_70b_sft_config()",
        "cfg.optimizer.use_precision_aware_optimizer = True",
        "cfg.optimizer.main_params_dtype = torch.bfloat16",
    )
    Path("override.py").write_text("\n".join(lines) + "\n")
    found = meshwright("check", "override.py", "--gpus", "32xH100")
    assert found.code == 1
    assert "override.py:5 megatron does not support master=bf16" in found.out
    assert "optimizer.main_params_dtype=float32" in found.out


def test_prices_by_gpu_type_keep_their_currency_where_one_type_has_none(meshwright: Any) -> None:
    words = ("size", "llama2-13b", "--goal", "pretrain", "--tokens", "300B", "--days", "60")
    found = meshwright(*words, "--gpus", "H100,A100-40", "--price", "H100=2.2,A100=1.1", "--currency", "EUR")
    assert found.code == 0
    assert "--price has none for A100-40: without cost; A100-40=PRICE adds it" in found.out
    assert "EUR" in found.out


def test_a_cluster_file_is_explained_by_its_keys(meshwright: Any) -> None:
    found = meshwright("explain", "cluster file").out
    assert "--gpus FILE.toml" in found
    assert all(key in found for key in ("gpus_per_node", "network_gb_s_per_node", "host_gib", "price"))


SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=l13b
#SBATCH --nodes=32
#SBATCH --gpus-per-node=8
#SBATCH --time=48:00:00
#SBATCH --exclusive
srun torchrun --nproc_per_node=8 --nnodes=32 pretrain_gpt.py --num-layers 40 --hidden-size 5120 \\
  --ffn-hidden-size 13824 --num-attention-heads 40 --seq-length 4096 --max-position-embeddings 4096 --swiglu \\
  --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights \\
  --tokenizer-type NullTokenizer --vocab-size 31999 --tensor-model-parallel-size 2 --sequence-parallel \\
  --use-distributed-optimizer --micro-batch-size 1 --global-batch-size 1024 --train-iters 1000 --lr 3e-4 --bf16 \\
  --grad-reduce-in-bf16 --mock-data --use-mcore-models --clip-grad 1.0 --lr-decay-style cosine
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("train_13b.sh").write_text(SCRIPT)
    return "train_13b.sh"


def test_a_new_job_names_the_sbatch_lines_that_it_does_not_keep(meshwright: Any, script: str) -> None:
    words = ("launch", script, "--scheduler", "slurm", "--gpus", "256xH100")
    found = meshwright(*words)
    lost = "not kept: #SBATCH --job-name=l13b --time=48:00:00 --exclusive of train_13b.sh"
    keep = "--name l13b --time 48:00:00 --sbatch exclusive"
    assert f"{lost}; {keep} keeps them" in found.out + found.err
    again = meshwright(*words, *keep.split())
    assert "not kept: #SBATCH" not in again.out + again.err
    assert "#SBATCH --exclusive" in again.out


def test_check_names_warnings_that_only_advice_prints(meshwright: Any, script: str) -> None:
    found = meshwright("check", script, "--gpus", "256xH100").out
    assert "left out as matters of choice: precision.bf16-reduction" in found
    assert "--advice prints them" in found
    assert "left out" not in meshwright("check", script, "--gpus", "256xH100", "--advice").out


def test_torchtitan_gets_a_flavor_with_the_scripts_own_rope_theta(meshwright: Any, script: str) -> None:
    Path(script).write_text(SCRIPT.replace("--mock-data", "--mock-data --rotary-base 500000"))
    found = meshwright("export", script, "--to", "torchtitan", "--gpus", "256xH100")
    assert found.code == 0
    assert "rope_theta=500000.0" in found.out
    assert 'custom_import = "own_model"' in found.out
    assert "architecture.rope_theta" not in found.out + found.err
