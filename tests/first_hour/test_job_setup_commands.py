"""Jobs keep modules and conda of a script, and programs of transformers' Trainer save in time."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

HEADER = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --time=24:00:00
#SBATCH --requeue
"""
MEGATRON = """srun torchrun --nnodes 2 \\
   --nproc_per_node 4 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29500 pretrain_gpt.py \\
  --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention \\
  --num-query-groups 8 --seq-length 4096 --max-position-embeddings 8192 --position-embedding-type rope --swiglu \\
  --rotary-base 500000 --disable-bias-linear --untie-embeddings-and-output-weights --normalization RMSNorm \\
  --tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Llama-3.1-8B --vocab-size 128256 \\
  --micro-batch-size 1 --global-batch-size 64 --train-iters 20000 --lr 3e-4 --bf16 --use-distributed-optimizer \\
  --tensor-model-parallel-size 4 --data-path /data/text_document --save /ckpt/run --load /ckpt/run --save-interval 500
"""
LAUNCH = ["--gpus", "2x4xH100", "--scheduler", "slurm", "--time", "24:00:00", "--framework-dir", "/opt/Megatron-LM"]


def written(folder: Path, setup: str, start: str = MEGATRON) -> None:
    (folder / "train.sh").write_text(
        f"{HEADER}{setup}HEAD=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)\n{start}"
    )


def launched(meshwright: Any, *arguments: str) -> str:
    answer = meshwright(*arguments)
    assert answer.code == 0, answer.err
    return str(answer.out + answer.err)


def test_a_job_keeps_the_setup_of_the_users_script_in_its_order(
    meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "env.sh").write_text("export NCCL_DEBUG=WARN\n")
    setup = (
        "module load cuda/12.4 gcc/12",
        "source ~/miniconda3/etc/profile.d/conda.sh",
        "ENVS=/opt/envs",
        "conda activate $ENVS/megatron",
        "load_more() {\n    ml nccl\n}",
        "load_more",
        "if [ -f ~/.bashrc ]; then\n    . ~/.bashrc\nfi",
        "spack load nccl || { echo 'no nccl' >&2; exit 1; }",
        'eval "$(micromamba shell hook -s bash)" && micromamba activate tools',
        "export PATH=/opt/tools/bin:$PATH",
        "export HF_HOME=$SCRATCH/hf",
        "ulimit -n 65536",
    )
    written(tmp_path, "\n".join(setup) + "\n. env.sh\n")
    answer = launched(meshwright, "launch", "train.sh", *LAUNCH, "--write", "jobs")
    text = (tmp_path / "jobs" / "train.sbatch").read_text()
    places = [text.index(f"\n{one}\n") for one in setup]
    assert places == sorted(places)
    assert f". {tmp_path / 'env.sh'}\n" in text  # the job may be submitted in another folder
    assert places[-1] < text.index(f"cd {tmp_path / 'jobs'}") < text.index("srun")
    assert "scontrol show hostnames $SLURM" not in text  # the job has a rendezvous of its own
    assert "not kept: train.sh" not in answer
    assert subprocess.run(["bash", "-n", "jobs/train.sbatch"], check=False).returncode == 0


def test_commands_that_a_job_does_not_keep_are_listed(
    meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, 'module load cuda\nrsync -a /data/ "$TMPDIR"\necho starting\n')
    with (tmp_path / "train.sh").open("a") as script:
        script.write("wait\npython tools/convert.py --load /ckpt/run\n")
    answer = launched(meshwright, "launch", "train.sh", *LAUNCH, "--write", "jobs")
    assert """not kept: train.sh:8 rsync -a /data/ "$TMPDIR": it runs before the training; --setup 'rsync""" in answer
    assert "python tools/convert.py --load /ckpt/run: it runs after the training" in answer
    assert "echo starting" not in answer
    answer = launched(
        meshwright, "launch", "train.sh", "--gpus", "2x4xH100", "--scheduler", "torchrun", "--head", "node1",
        "--framework-dir", "/opt/Megatron-LM",
    )  # fmt: skip
    assert "not kept: train.sh:7 module load cuda: run it in the shell before the command" in answer


def test_setup_inside_the_command_of_the_training_is_kept(
    meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    inner = MEGATRON.removeprefix("srun ").rstrip()
    written(tmp_path, "", f"srun bash -c 'source ~/venv/bin/activate; ulimit -l unlimited; {inner}'\n")
    launched(meshwright, "launch", "train.sh", *LAUNCH, "--write", "jobs")
    text = (tmp_path / "jobs" / "train.sbatch").read_text()
    assert "\nsource ~/venv/bin/activate\nulimit -l unlimited\n" in text


PROGRAM = """from transformers import AutoModelForCausalLM, DataCollatorForLanguageModeling, Trainer, TrainingArguments

model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-4B-Base", torch_dtype="bfloat16")
args = TrainingArguments(
    output_dir="/scratch/me/out", per_device_train_batch_size=4, gradient_accumulation_steps=8, learning_rate=2e-5,
    max_steps=20000, bf16=True, gradient_checkpointing=True, deepspeed="ds.json", {saving}
)
trainer = Trainer(model=model, args=args, data_collator=DataCollatorForLanguageModeling(None, mlm=False))
trainer.train({resume})
"""
STAGE_3 = """{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}, "train_micro_batch_size_per_gpu": "auto",
"gradient_accumulation_steps": "auto", "train_batch_size": "auto"}"""
TRAINER = "srun torchrun --nnodes 4 --nproc_per_node 4 --rdzv_backend c10d --rdzv_endpoint $HEAD:29500 cpt.py\n"
RESUMES = "resume_from_checkpoint=True"


def saving_rules(meshwright: Any, folder: Path, saving: str, resume: str = RESUMES, header: str = HEADER) -> list[Any]:
    (folder / "cpt.py").write_text(PROGRAM.format(saving=saving, resume=resume))
    (folder / "ds.json").write_text(STAGE_3)
    header = header.replace("--nodes=2", "--nodes=4")
    (folder / "job.sh").write_text(f"{header}HEAD=$(scontrol show hostnames | head -n 1)\n{TRAINER}")
    answer = meshwright("check", "job.sh", "--gpus", "4x4xA100-80", "data.seq_length=4096", "--json")
    found = [one for one in answer.json["findings"] if one["rule"].startswith("saving.")]
    assert all(one["fix"] and one["file"] == "cpt.py" for one in found)
    return found


@pytest.mark.parametrize(
    ("saving", "resume", "rules"),
    [
        ('save_strategy="no"', RESUMES, ["never"]),
        ('save_strategy="no"', "", ["never", "not-resumed"]),
        ('save_strategy="steps", save_steps=20000', RESUMES, ["only-at-the-end"]),
        ('save_strategy="steps", save_steps=0.5', RESUMES, ["rarely"]),
        ("save_steps=2000, save_total_limit=2", RESUMES, ["rarely"]),
        ("save_steps=100, save_total_limit=2", "", ["not-resumed"]),
        ("save_steps=100, save_total_limit=2", "resume_from_checkpoint=None", ["not-resumed"]),
        ("save_steps=100, save_total_limit=2", "resume_from_checkpoint=last", []),
        ('save_strategy="epoch"', RESUMES, []),
    ],
)
def test_the_saving_rules_see_the_trainers_arguments(
    meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saving: str, resume: str, rules: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    found = saving_rules(meshwright, tmp_path, saving, resume)
    assert [one["rule"] for one in found] == [f"saving.{rule}" for rule in rules]


def test_an_interval_longer_than_the_time_limit_is_reported_as_never_saving(
    meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    never = "longer than the job's time limit of {} hours: the job never saves one"
    short = HEADER.replace("24:00:00", "04:00:00")
    (one,) = saving_rules(meshwright, tmp_path, "save_steps=800, save_total_limit=2", header=short)
    assert never.format(4) in one["message"]
    assert not saving_rules(meshwright, tmp_path, "save_steps=800, save_total_limit=2")
    written(tmp_path, "", MEGATRON.replace("--save-interval 500", "--save-interval 19000"))
    answer = meshwright("check", "train.sh", "--gpus", "2x4xH100", "--json").json
    (one,) = [one for one in answer["findings"] if one["rule"] == "saving.rarely"]
    assert never.format(24) in one["message"]
    written(tmp_path, "", MEGATRON.replace("--save-interval 500", "--save-interval 19000 --exit-signal-handler"))
    answer = meshwright("check", "train.sh", "--gpus", "2x4xH100", "--json").json
    (one,) = [one for one in answer["findings"] if one["rule"] == "saving.rarely"]
    assert "a failure costs up to as many" in one["message"]


def test_a_requeued_job_of_the_users_program_says_how_rarely_that_saves(
    meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saving_rules(meshwright, tmp_path, "save_steps=20000, save_total_limit=2", "")
    words = ("--gpus", "4x4xA100-80", "--scheduler", "slurm", "--time", "24:00:00", "--write", "jobs")
    answer = launched(meshwright, "launch", "job.sh", *words, "data.seq_length=4096")
    assert "a checkpoint every 20,000 steps" in answer
    assert "warning: your program sets its interval; set it in cpt.py: save_steps=67" in answer
    assert "about 30 min" not in answer, "the job runs the program as it is"


def test_requeue_is_explained(meshwright: Any) -> None:
    assert "--no-requeue" in meshwright("explain", "requeue").out
