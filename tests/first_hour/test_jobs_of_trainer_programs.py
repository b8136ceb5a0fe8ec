"""Jobs of the user's own program around transformers' Trainer: it runs as its script says, in another folder."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from meshwright.frameworks.initial_weights import shell_word
from meshwright.launch.other_frameworks import full_path

AUTO = """{
  "bf16": {"enabled": "auto"},
  "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
  "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto",
                "warmup_num_steps": "auto", "total_num_steps": "auto"}},
  "zero_optimization": {"stage": 3},
  "gradient_accumulation_steps": "auto",
  "gradient_clipping": "auto",
  "train_batch_size": "auto",
  "train_micro_batch_size_per_gpu": "auto"
}
"""
ARGUMENTS = """--model_name_or_path meta-llama/Llama-3.2-1B --train_file data/train.jsonl \\
  --validation_file data/val.jsonl --per_device_train_batch_size 2 --gradient_accumulation_steps 4 \\
  --block_size 4096 --learning_rate 1e-5 --num_train_epochs 3 --bf16 True --gradient_checkpointing True \\
  --save_steps 20000"""
SCRIPT = f"""OUT=/scratch/$USER/out
deepspeed --num_gpus 8 run_clm.py --deepspeed configs/ds.json {ARGUMENTS} --warmup_steps 1 \\
  --preprocessing_num_workers $(nproc) --run_name "job-$SLURM_JOB_ID" --note 'costs $5' --output_dir $OUT
"""
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "intermediate_size": 5632,
    "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 32000,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
PLAIN = f"torchrun --nproc_per_node 8 train.py {ARGUMENTS} --output_dir out\n"
SLURM = ("--scheduler", "slurm", "--gpus", "8xH100", "--write")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("configs").mkdir()
    Path("data").mkdir()
    Path("configs/ds.json").write_text(AUTO)
    for name in ("train", "val"):
        rows = [{"text": f"a text with the number {number}"} for number in range(500)]
        Path(f"data/{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    Path("run.sh").write_text(SCRIPT)
    Path("plain.sh").write_text(PLAIN)
    return tmp_path


def _command(job: str) -> str:
    line = next(line for line in job.splitlines() if line.startswith("srun "))
    return line[line.index(" torchrun ") :]


def test_auto_of_a_deepspeed_file_stays_where_the_trainer_fills_it_in(meshwright: Any) -> None:
    """It was replaced by values, with the note that the file's values contradict the recipe."""
    answer = meshwright("launch", "run.sh", *SLURM, "jobs", "optimizer.lr=2e-5")
    assert answer.code == 0, answer.err
    assert json.loads(Path("jobs/ds_config.json").read_text()) == json.loads(AUTO)
    assert "contradict" not in answer.err
    assert "optimizer.beta1" not in answer.err  # those of the Trainer
    assert "--learning_rate 2e-05" in _command(Path("jobs/run.sbatch").read_text())


def test_a_value_of_the_file_still_changes_with_the_request(meshwright: Any) -> None:
    assert meshwright("launch", "run.sh", *SLURM, "jobs", "layout.offload=optimizer").code == 0
    written = json.loads(Path("jobs/ds_config.json").read_text())
    assert written["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert written["train_batch_size"] == "auto"


def test_paths_among_the_arguments_work_from_the_folder_of_the_job(meshwright: Any, here: Path) -> None:
    Path("train").mkdir()  # a word that is also the name of a split
    Path("run.sh").write_text(SCRIPT.replace("--note", "--dataset_split train --note"))
    assert meshwright("launch", "run.sh", *SLURM, "jobs").code == 0
    job = Path("jobs/run.sbatch").read_text()
    command = _command(job)
    assert f"cd {here}/jobs" not in job  # run_clm.py is where sbatch is run, and so are its relative paths
    assert f"--train_file {here}/data/train.jsonl --validation_file {here}/data/val.jsonl" in command
    assert "--dataset_split train " in command
    assert f"--deepspeed {here}/jobs/ds_config.json" in command
    assert "--model_name_or_path meta-llama/Llama-3.2-1B" in command
    assert meshwright("launch", "plain.sh", *SLURM, "other").code == 0
    assert f"--output_dir {here}/out" in _command(Path("other/plain.sbatch").read_text())


def test_the_shell_of_the_job_expands_what_that_of_the_script_would(meshwright: Any) -> None:
    assert meshwright("launch", "run.sh", *SLURM, "jobs").code == 0
    command = _command(Path("jobs/run.sbatch").read_text()).rstrip("& ")
    assert "'$(nproc)'" not in command
    words = command[command.index("--preprocessing_num_workers") :]
    env = {"PATH": "/usr/bin:/bin", "USER": "me", "SLURM_JOB_ID": "17"}
    done = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {words}"], env=env, capture_output=True, text=True, check=True
    )
    name, number, *rest = done.stdout.splitlines()
    assert name == "--preprocessing_num_workers"
    assert number.isdigit()
    assert rest == ["--run_name", "job-17", "--note", "costs $5", "--output_dir", "/scratch/me/out"]
    elsewhere = meshwright("launch", "run.sh", "--scheduler", "kubernetes", "--image", "x", "--gpus", "8xH100",
                           "--env", "USER=me", "--env", "SLURM_JOB_ID=1")  # fmt: skip
    assert elsewhere.code == 2
    assert "$(nproc)" in elsewhere.err


@pytest.mark.parametrize("word", ["$(nproc)", '$(basename "$A" .json)-x', "`echo a`", 'say "$(echo "b c")" \\ now'])
def test_a_word_for_the_shell_is_one_word(word: str) -> None:
    quoted = shell_word(word, {}, (word,))
    run = ["bash", "-c", f"A=x/ds.json; printf '%s\\n' {quoted} | wc -l; printf '%s' {quoted}"]
    count, text = subprocess.run(run, capture_output=True, text=True, check=True).stdout.split("\n", 1)
    assert int(count) == 1
    assert text in ("ds-x", "a", 'say "b c" \\ now') or text.isdigit()


def test_the_interval_of_the_users_program_stays(meshwright: Any) -> None:
    """A requeued job saved every 24 steps in place of the 200 of the script."""
    answer = meshwright("launch", "run.sh", *SLURM, "jobs")
    assert "--save_steps 20000" in _command(Path("jobs/run.sbatch").read_text())
    assert "a checkpoint every 20,000 steps" in answer.err
    assert "--save-minutes 30 saves more often" in answer.err
    assert meshwright("launch", "run.sh", *SLURM, "asked", "--save-minutes", "30").code == 0
    assert "--save_steps 20000" not in _command(Path("asked/run.sbatch").read_text())


def test_a_script_with_torchrun_and_the_trainers_arguments_is_read(meshwright: Any) -> None:
    assert meshwright("check", "plain.sh", "--gpus", "8xH100").code == 0
    recipe = meshwright("import", "plain.sh", "--gpus", "8xH100", "--json").json
    assert 'strategy = "ddp"' in recipe["text"]
    assert meshwright("launch", "plain.sh", *SLURM, "jobs").code == 0
    job = Path("jobs/plain.sbatch").read_text()
    kept = ARGUMENTS.replace("\\\n", "").replace("data/", f"{Path.cwd()}/data/")
    assert f"train.py {' '.join(shlex.split(kept))}" in job
    assert "ACCELERATE_USE_FSDP" not in job


def test_the_trainers_own_fsdp_is_read_and_not_set_twice(meshwright: Any) -> None:
    Path("fsdp.sh").write_text(PLAIN.replace("--bf16", '--fsdp "full_shard auto_wrap" --bf16'))
    assert (
        "strategy" not in meshwright("import", "fsdp.sh", "--gpus", "8xH100", "--json").json["text"]
    )  # fsdp2, the default
    words = ("launch", "fsdp.sh", "--scheduler", "torchrun", "--gpus", "8xH100", "--write")
    same = meshwright(*words, "same")
    assert "--fsdp 'full_shard auto_wrap'" in same.out
    assert "FSDP_VERSION" not in same.out
    other = meshwright(*words, "other", "layout.offload=params")
    assert "FSDP_OFFLOAD_PARAMS=true" in other.out
    assert "--fsdp" not in other.out
    assert "FSDP_ACTIVATION_CHECKPOINTING" not in other.out  # the Trainer refuses both


def test_run_clm_counts_every_token(meshwright: Any) -> None:
    assert 'train_on = "all"' in meshwright("import", "run.sh", "--gpus", "8xH100", "--json").json["text"]


def test_one_function_finds_full_paths(here: Path) -> None:
    Path("corpus.bin").touch()
    Path("qwen3_600m").mkdir()
    assert full_path("corpus") == f"{here}/corpus"  # a prefix of Megatron's files
    assert full_path("corpus", bare=False) == "corpus"
    assert full_path("qwen3_600m", bare=False) == "qwen3_600m"
    assert full_path("./qwen3_600m", bare=False) == f"{here}/qwen3_600m"
    assert full_path("runs/new", new=True) == f"{here}/runs/new"
    assert full_path("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert full_path("") == ""


def test_accepting_changes_is_for_our_engine(meshwright: Any) -> None:
    answer = meshwright("launch", "run.sh", *SLURM, "jobs", "--accept-changes")
    assert answer.code == 2
    assert "--accept-changes" in answer.err


@pytest.mark.parametrize("option", [("--gpus", "8xH100"), ("--engine", "torchtitan"), ("--goal", "sft")])
def test_a_dataset_is_checked_without_options_of_a_recipe(option: tuple[str, str], meshwright: Any) -> None:
    answer = meshwright("check", "data/train.jsonl", *option)
    assert answer.code == 2
    assert f"{option[0]}={option[1]}: has no effect on a dataset" in answer.err
    assert f"meshwright check RECIPE {' '.join(option)} data.dataset=data/train.jsonl" in answer.err
    assert meshwright("check", "data/train.jsonl").code == 0


PROGRAM = """from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

tok = AutoTokenizer.from_pretrained("meta-llama/Llama-3.2-1B")
model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.2-1B")
ds = load_dataset("json", data_files="data/train.jsonl", split="train")
ds = ds.map(lambda row: tok(row["text"], truncation=True, max_length=4096), batched=True)
args = TrainingArguments(output_dir="out", per_device_train_batch_size=2, learning_rate=1e-5, bf16=True, max_steps=100,
    gradient_checkpointing=True, deepspeed="configs/ds.json")
Trainer(model=model, args=args, train_dataset=ds).train()
"""


@pytest.mark.parametrize("target", ["mine.py", "mine.sh"])
def test_a_program_that_names_its_config_in_code_is_run_with_it(meshwright: Any, target: str) -> None:
    Path("mine.py").write_text(PROGRAM)
    Path("mine.sh").write_text("torchrun --nproc_per_node 8 mine.py\n")
    answer = meshwright("launch", target, *SLURM, "jobs", "layout.offload=optimizer", "optimizer.lr=2e-5")
    assert answer.code == 0, answer.err
    (job,) = Path("jobs").glob("*.sbatch")
    assert _command(job.read_text()).split(" &")[0].endswith("mine.py")
    written = json.loads(Path("jobs/configs/ds.json").read_text())
    assert written["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert written["train_batch_size"] == "auto"
    assert "set it in mine.py: learning_rate=2e-05" in answer.err
    assert not list(Path("jobs").glob("*.py"))


@pytest.mark.parametrize(("model", "gpus"), [("llama3-70b", "16x8xH200"), ("qwen3-8b", "8xH100")])
def test_a_job_without_the_launcher_has_its_defaults(meshwright: Any, model: str, gpus: str) -> None:
    job = ("launch", model, "--goal", "sft", "--to", "accelerate", "--gpus", gpus, "--write", "asked")
    asked = ("train.global_batch_size=128", "layout.recompute=full", "layout.tp=1")
    assert meshwright(*job, "--scheduler", "slurm", *asked).code == 0
    text = next(Path("asked").glob("*.sbatch")).read_text()
    assert "torchrun" in text
    assert "export FSDP_VERSION=2" in text
    assert "export FSDP_CPU_RAM_EFFICIENT_LOADING=true" in text  # else every rank of a node loads all weights


def test_a_pod_keeps_what_the_program_writes_on_a_volume_and_reads_its_relative_paths_there(meshwright: Any) -> None:
    """Its notes said that checkpoints below a mounted volume are lost, and named folders of this machine to mount."""
    Path("configs/model").mkdir()
    Path("configs/model/config.json").write_text(json.dumps(LLAMA))
    own = ARGUMENTS.replace("meta-llama/Llama-3.2-1B", "configs/model").replace("data/", "/shared/data/")
    command = f"deepspeed --num_gpus 8 run_clm.py --deepspeed configs/ds.json {own} --output_dir"
    Path("run.sh").write_text(f"{command} /shared/out")
    words = ("launch", "run.sh", "--gpus", "8xH100", "--scheduler", "kubernetes", "--image", "x", "--write", "job")
    volume = ("--mount", "claim:/shared", "--framework-dir", "/shared/code")
    lost = meshwright(*words).err
    assert "checkpoints in /shared/out are lost with the container: add --mount CLAIM:/shared/out" in lost
    kept = meshwright(*words, *volume, "--overwrite").err
    assert "lost with" not in kept
    assert str(Path.cwd()) not in kept
    Path("run.sh").write_text(f"{command} out")
    assert "lost with" not in meshwright(*words, *volume, "--overwrite").err
    assert "lost with" in meshwright(*words, "--overwrite").err
