"""Jobs of other frameworks: scripts of the export, a Megatron-LM script launched, one verdict on Megatron-Bridge."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144,
    "max_position_embeddings": 40960, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 1024,
    "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 64, "num_experts_per_tok": 8,
    "num_hidden_layers": 36, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "vocab_size": 151936,
}  # fmt: skip
ON = ("--scheduler", "slurm", "--gpus", "16x8xH100")
BRIDGE = ("--to", "megatron-bridge")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a team's own MoE model and a recipe of it, as the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ourmoe").mkdir()
    (tmp_path / "ourmoe" / "config.json").write_text(json.dumps(MOE))
    (tmp_path / "moe.toml").write_text(
        f'name = "moe"\nmodel = "{tmp_path}/ourmoe/config.json"\ngoal = "pretrain"\ncluster = "16x8xH100"\n'
        "[train]\nglobal_batch_size = 1024\nsteps = 95368\n[schedule]\nwarmup_steps = 40\n"
        '[layout]\nstrategy = "zero1"\nep = 8\nmicro_batch_size = 2\n[kernels]\nloss = "chunked"\n'
    )
    return tmp_path


def program_in(text: str) -> str:
    """Return what torchrun starts, with its arguments."""
    found = re.search(r"--nproc-per-node=8 (.*?)(?: &)?$", text, re.MULTILINE)
    assert found is not None
    return found[1]


def test_a_script_of_the_export_runs_in_the_job_folder_and_sets_what_the_job_needs(meshwright: Any, here: Path) -> None:
    answer = meshwright("launch", "moe.toml", *BRIDGE, *ON, "--framework-dir", "/opt/Bridge", "--write", "job")
    job, script = (here / "job" / "moe.sbatch").read_text(), (here / "job" / "train.py").read_text()
    assert program_in(job) == "train.py"  # it reads no arguments
    assert "/opt/Bridge/train.py" not in job
    assert "export PYTHONPATH=/opt/Bridge/src:/opt/Bridge/3rdparty/Megatron-LM" in job
    assert "cfg.train.exit_signal_handler = True" in script
    assert "exit_signal_handler saves a checkpoint on SIGTERM" in answer.err
    assert "cfg.checkpoint.save_interval = " in script
    installed = meshwright("launch", "moe.toml", *BRIDGE, *ON, "--write", "job2")
    assert "Megatron-Bridge must be installed where the job runs" in installed.err
    assert program_in((here / "job2" / "moe.sbatch").read_text()) == "train.py"
    (here / "checkout" / "src").mkdir(parents=True)
    command = ("--scheduler", "torchrun", "--head", "n1", "--gpus", "2x8xH100", "--framework-dir")
    out = meshwright("launch", "moe.toml", *BRIDGE, *command, "checkout", "--write", "job3").out
    assert program_in(out) == f"{here}/job3/train.py"
    refused = meshwright("launch", "moe.toml", *BRIDGE, *command, "ourmoe", "--write", "job4")
    assert "has no src: it is not a checkout of Megatron-Bridge" in refused.err
    titan = ("--to", "torchtitan", "--framework-dir", "/opt/torchtitan", "layout.strategy=fsdp2")
    meshwright("launch", "moe.toml", *titan, *ON, "--write", "job5")
    assert (here / "job5" / "own_model.py").exists()
    assert 'export PYTHONPATH=/opt/torchtitan"' in (here / "job5" / "moe.sbatch").read_text()
    meshwright("launch", "llama3_8b_pretrain_config", *BRIDGE, *ON[:3], "8xH100", "--write", "job6")
    assert [one.name for one in (here / "job6").iterdir()] == ["llama3_8b_pretrain_config.sbatch"]  # no unread script


SCRIPT = """#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
torchrun --nnodes 16 --nproc_per_node 8 pretrain_gpt.py --use-mcore-models --num-layers 36 --hidden-size 2048 \\
  --ffn-hidden-size 6144 --num-attention-heads 32 --group-query-attention --num-query-groups 4 --kv-channels 128 \\
  --qk-layernorm --seq-length 4096 --max-position-embeddings 4096 --position-embedding-type rope \\
  --rotary-base 1000000 --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear \\
  --untie-embeddings-and-output-weights --tokenizer-type HuggingFaceTokenizer \\
  --tokenizer-model Qwen/Qwen3-30B-A3B --vocab-size 151936 --num-experts 64 --moe-ffn-hidden-size 1024 \\
  --moe-router-topk 8 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 --moe-grouped-gemm \\
  --moe-token-dispatcher-type alltoall --tensor-model-parallel-size 2 --pipeline-model-parallel-size 8 \\
  --expert-model-parallel-size 8 --sequence-parallel \\
  --pipeline-model-parallel-layout 'Ettttt|ttttt|ttttt|ttttt|tttt|tttt|tttt|ttttL' --micro-batch-size 1 \\
  --global-batch-size 1000 --train-iters 95368 --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine \\
  --lr-warmup-iters 2000 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --bf16 \\
  --recompute-activations --overlap-grad-reduce --data-path /data/corpus_text_document --split 99,1,0 \\
  --save /ckpt/moe16b --load /ckpt/moe16b --save-interval 20000 --log-interval 10
"""


def test_a_tokenizer_of_the_hub_is_kept(meshwright: Any, here: Path) -> None:
    (here / "fixed.sh").write_text(SCRIPT)
    words = ("export", "fixed.sh", "--to", "megatron-lm", "--gpus", "16x8xH100")
    for more in ((), ("data.tokenizer=Qwen/Qwen3-30B-A3B",)):
        answer = meshwright(*words, *more, "--json").json
        assert "--tokenizer-model Qwen/Qwen3-30B-A3B" in answer["files"]["fixed.sh"]
        assert (answer["ok"], answer["unmapped"], answer["not_imported"]) == (True, [], [])
    recipe = ("export", "qwen3_30b_a3b_pretrain_config", *words[2:], "data.dataset=/data/x")
    answer = meshwright(*recipe, "data.tokenizer=Qwen/Qwen3-30B-A3B", "--json").json  # the model's own
    assert "data.tokenizer" not in [one["field"] for one in answer["unmapped"]]


def test_a_file_is_launched_for_its_own_framework(meshwright: Any, here: Path) -> None:
    (here / "fixed.sh").write_text(SCRIPT)
    answer = meshwright("launch", "fixed.sh", *ON, "--framework-dir", "/opt/Megatron-LM", "--write", "job")
    assert "fixed.sh is for Megatron-LM, which the job runs; --to meshwright runs it with our engine" in answer.err
    program = program_in((here / "job" / "fixed.sbatch").read_text())
    assert program.startswith("/opt/Megatron-LM/pretrain_gpt.py")
    assert "--tokenizer-model Qwen/Qwen3-30B-A3B" in program
    ours = meshwright("launch", "fixed.sh", *ON, "--to", "meshwright", "layout.strategy=fsdp2", "--write", "ours")
    assert ours.code == 0, ours.err
    assert "meshwright train fixed.toml" in (here / "ours" / "fixed.sbatch").read_text()
    assert "which the job runs" not in ours.err
    tiny = meshwright("launch", "fixed.sh", *ON, "--tiny", "--json").json["error"]
    assert tiny["fix"][0] == "--to meshwright"
    own = meshwright("launch", "moe.toml", *ON, "--write", "own", "layout.strategy=fsdp2")
    assert own.code == 0, own.err  # a recipe is for our engine
    assert "meshwright train" in (here / "own" / "moe.sbatch").read_text()


def test_recommend_and_export_agree_on_megatron_bridge(meshwright: Any, here: Path) -> None:
    for model, engine in (
        ("meta-llama/Llama-3.1-70B", "megatron"),
        ("ourmoe/config.json", "megatron"),
        ("meta-llama/Llama-3.2-1B", "meshwright"),
    ):
        words = ("recommend", model, "--gpus", "16x8xH100", "--goal", "pretrain", "--engine", engine, "--json")
        command = shlex.split(meshwright(*words).json["commands"]["megatron-bridge"])
        assert command[:2] == ["meshwright", "export"], model
        done = meshwright(*command[1:], "--json").json
        assert done["ok"], (model, done["findings"])
        assert list((here / "megatron-bridge").iterdir())
        shutil.rmtree(here / "megatron-bridge")
    answer = meshwright("recommend", "ourmoe/config.json", "--gpus", "16x8xH100", "--goal", "pretrain")
    assert "no recipe for this model" not in answer.out
    assert re.search(r"not megatron-bridge: .*; ask with --engine megatron", answer.out)


def test_a_job_that_saves_more_often_than_its_file_says_so_and_keeps_what_the_file_keeps(
    meshwright: Any, here: Path
) -> None:
    (here / "fixed.sh").write_text(SCRIPT)
    answer = meshwright("launch", "fixed.sh", *ON, "--write", "job")
    program = program_in((here / "job" / "fixed.sbatch").read_text())
    found = re.search(r"--save-interval (\d+)", program)
    assert found is not None
    every = int(found[1])
    assert every < 500
    assert 20000 % every == 0  # else no checkpoint of the file's interval would be written
    assert "--save-retain-interval 20000" in program
    assert f"warning: the job saves every {every:,} steps, the file every 20,000" in answer.err
    assert "storage: 5 checkpoints" in answer.err
    kept = meshwright("launch", "fixed.sh", *ON, "--write", "kept", "checkpoint.save_every=20000")
    assert "warning: the job saves" not in kept.err
    assert "retain" not in (here / "kept" / "fixed.sbatch").read_text()


DENSE = """torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 16 --hidden-size 2048 --num-attention-heads 16 \\
  --seq-length 4096 --max-position-embeddings 4096 --tokenizer-type NullTokenizer --vocab-size 32000 --mock-data \\
  --micro-batch-size 2 --global-batch-size 512 --train-iters 95368 --lr 3e-4 --bf16 --use-distributed-optimizer \\
  --save /ckpt/dense --load /ckpt/dense --save-interval 20000 --save-retain-interval 20000
"""


def intervals(job: Path) -> list[int]:
    """Return --save-interval and --save-retain-interval of a written job."""
    return [int(one) for one in re.findall(r"--save-(?:retain-)?interval (\d+)", program_in(job.read_text()))]


def test_the_interval_of_a_requeued_job_divides_the_one_of_kept_checkpoints(meshwright: Any, here: Path) -> None:
    on = ("--scheduler", "slurm", "--gpus", "8xH100")
    (here / "kept.sh").write_text(DENSE)
    answer = meshwright("launch", "kept.sh", *on, "--write", "job")
    assert answer.code == 0, answer.err
    every, kept = intervals(here / "job" / "kept.sbatch")
    assert every < 1000
    assert (kept, kept % every) == (20000, 0)
    few = "the latest and those of every 20,000 steps are kept"
    assert f"the job saves every {every:,} steps, the file every 20,000; {few}" in answer.err
    (here / "prime.sh").write_text(DENSE.replace("20000", "19001"))  # a prime
    answer = meshwright("launch", "prime.sh", *on, "--write", "prime")
    assert answer.code == 0, answer.err
    every, kept = intervals(here / "prime" / "prime.sbatch")
    assert kept % every == 0
    assert 19001 < kept < 19001 + every
    assert f"every {kept:,} steps are kept (checkpoint.keep): a multiple of the job's interval" in answer.err
    typed = meshwright("launch", "kept.sh", *on, "--write", "typed", "checkpoint.save_every=365")
    assert "--save-retain-interval 20000 is not a multiple of --save-interval 365" in typed.err


def test_an_export_to_torchtitan_names_the_model_and_a_fix_without_errors(meshwright: Any, here: Path) -> None:
    (here / "fixed.sh").write_text(SCRIPT)
    words = ("export", "fixed.sh", "--to", "torchtitan", "--gpus", "16x8xH100", "--json")
    error = meshwright(*words).json["error"]
    assert "torchtitan 0.2 does not support pipelined qwen3_moe" in error["message"]
    fixed = meshwright(*words, *error["fix"][0].split()).json
    assert fixed["ok"], fixed["findings"]
    assert 'hf_assets_path = "./assets/hf/Qwen3-30B-A3B"' in fixed["files"]["config.toml"]
    (lost,) = [one for one in fixed["unmapped"] if one["field"] == "data.tokenizer"]
    assert "download it to ./assets/hf/Qwen3-30B-A3B" in lost["reason"]
    own = meshwright("export", "ourmoe/config.json", "--goal", "pretrain", *words[2:]).json
    assert "interval = 1000" in own["files"]["config.toml"]  # of a run of 100 steps
    assert "checkpoint.save_every" not in [one["field"] for one in own["unmapped"]]


def test_a_job_has_the_whole_name_of_its_model(meshwright: Any, here: Path) -> None:
    meshwright("launch", "meta-llama/Llama-3.1-70B", "--goal", "pretrain", *BRIDGE, *ON, "--write", "job")
    assert [one.name for one in (here / "job").iterdir()] == ["Llama-3.1-70B_pretrain.sbatch"]
