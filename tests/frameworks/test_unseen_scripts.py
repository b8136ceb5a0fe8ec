"""Launch scripts and programs in the style of repositories of the frameworks' users."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright import check
from meshwright.errors import InputError

FLAGS = """--num-layers 20 --hidden-size 1536 --num-attention-heads 8 --seq-length 4096 \\
  --max-position-embeddings 4096 --micro-batch-size 4 --global-batch-size 512 --train-iters 1000 --lr 3e-4 --bf16 \\
  --tokenizer-type Llama2Tokenizer --tokenizer-model tok.model --data-path data/a --tensor-model-parallel-size ${TP} \\
  --swiglu --normalization RMSNorm"""
TRAIN = f"""set -eu
source ${{ENV_DIR}}/venv/bin/activate
export CUDA_DEVICE_MAX_CONNECTIONS=1
TP=${{TP:-1}}
python ${{ENV_DIR}}/src/Megatron-LM/pretrain_gpt.py {FLAGS}
"""
SUBMIT = """#!/bin/bash
#SBATCH --nodes=4
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=8
set -eu
EXPERIMENT_DIR=/home/shared/experiments/0088
NUM_GPUS=$((4 * 8))
mpirun -np $NUM_GPUS --npernode 8 -bind-to none -x ENV_DIR=$EXPERIMENT_DIR/env -x TP=2 \\
  bash PATH
"""


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_sh", ".sh")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def errors(result: object) -> list[str]:
    return [one.message for one in result.findings if one.severity == "error"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "path",
    ["train.sh", "jobs/small/train.sh", "repo/jobs/small/train.sh", "${EXPERIMENT_DIR}/copy/jobs/small/train.sh"],
)
def test_a_job_that_starts_one_script_is_read_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, jobs__small__submit_sh=SUBMIT.replace("PATH", path), jobs__small__train_sh=TRAIN)
    result = check("jobs/small/submit.sh")
    assert result.framework == "megatron-lm"
    assert errors(result) == []
    assert result.recipe.layout.tp == 2  # mpirun -x sets it
    assert "32 GPUs" in " ".join(result.notes)


@pytest.mark.parametrize("start", ["./train.sh", "srun bash -x train.sh", "nohup sh train.sh > log 2>&1 &"])
def test_ways_to_start_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, train_sh=TRAIN, run_sh=f"export ENV_DIR=/opt/env TP=4\n{start}\n")
    assert check("run.sh").recipe.layout.tp == 4


def test_a_script_that_starts_several_names_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, a_sh=TRAIN, b_sh=TRAIN, all_sh="bash a.sh\nbash b.sh\n")
    with pytest.raises(InputError) as error:
        check("all.sh")
    assert list(error.value.fix) == ["meshwright check a.sh", "meshwright check b.sh"]


def test_a_script_that_starts_itself_is_no_error_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, loop_sh="bash loop.sh\n")
    with pytest.raises(InputError, match="matches no supported framework"):
        check("loop.sh")


ARGUMENTS = f"""TP=1
ALL_PARAMS=(
  {FLAGS.replace(chr(92), "")}
)
ALL_PARAMS+=( --save ${{MODEL_DIR}}/checkpoints --save-interval 500 )
"""
BY_NAME = """#!/bin/bash
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
# Usage: sbatch --nodes=16 train.sh NAME
SCRIPT_DIR=$(dirname "$(scontrol show job $SLURM_JOB_ID | awk -F= '/Command=/{print $2}')")
source ${SCRIPT_DIR}/params/$1.sh
srun bash -c "
  torchrun --nnodes=${SLURM_JOB_NUM_NODES:-1} --nproc-per-node=8 Megatron-LM/pretrain_gpt.py ${ALL_PARAMS[*]} MORE
"
"""


def test_the_only_file_that_a_sourced_name_fits_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nodes of the header are a placeholder if the usage in a comment sets them: 8 GPUs do not fit pp=6."""
    monkeypatch.chdir(tmp_path)
    text = BY_NAME.replace("MORE", "--pipeline-model-parallel-size 6")
    write(tmp_path, train_sh=text, params__base_sh=ARGUMENTS.replace("--num-layers 20", "--num-layers 24"))
    result = check("train.sh")
    assert result.recipe.layout.pp == 6
    assert errors(result) == []


def test_of_several_files_each_is_a_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = BY_NAME.replace("MORE", "")
    write(tmp_path, train_sh=text, params__small_sh=ARGUMENTS, params__large_sh=ARGUMENTS)
    with pytest.raises(InputError, match=r"starts pretrain_gpt.py with arguments that only the job knows") as error:
        check("train.sh")
    assert list(error.value.fix) == ["meshwright check params/large.sh", "meshwright check params/small.sh"]
    assert errors(check("params/large.sh")) == []


def test_a_fork_may_have_defaults_that_megatron_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plain = f"TP=1\npython pretrain_gpt.py {FLAGS} --save ckpt"
    write(tmp_path, plain_sh=plain, fork_sh=f"{plain} --use-mpi --use-z-loss")
    assert errors(check("plain.sh")) == ["--save needs --save-interval"]
    fork = check("fork.sh")
    assert errors(fork) == []
    assert any(one.rule == "megatron-lm.save-without-interval" for one in fork.findings)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("python tools/convert.py --loader mcore $ARGS\n", "trains nothing, by the names of its programs"),
        ("python evaluate_model.py\npython run_inference.py --n 8\n", "trains nothing"),
        ("mpirun -np 8 python pretrain_gpt.py $ARGS --ckpt-convert-format torch\n", "converts a checkpoint"),
    ],
)
def test_scripts_without_training_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, job_sh=text)
    with pytest.raises(InputError, match=said):
        check("job.sh")


PROGRAM = """
from dataclasses import dataclass, field
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments

@dataclass
class ScriptArguments:
    deepspeed: str = field(metadata={"help": "config"})

script_args = HfArgumentParser(ScriptArguments).parse_args_into_dataclasses()[0]
model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.1-8B")
args = TrainingArguments(output_dir="out", learning_rate=1e-5, per_device_train_batch_size=1, bf16=True, DEEPSPEED)
Trainer(model=model, args=args, train_dataset=load()).train()
"""


@pytest.mark.parametrize("given", ["deepspeed=script_args.deepspeed", "deepspeed='/shared/configs/zero3.json'"])
def test_a_program_whose_deepspeed_config_is_elsewhere_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(PROGRAM.replace("DEEPSPEED", given))
    result = check("train.py")
    assert errors(result) == []
    assert result.model is not None


def test_easy_r1_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "data:\n  train_files: a\nalgorithm:\n  adv_estimator: grpo\nworker:\n  actor:\n    global_batch_size: 8\n"
    (tmp_path / "config.yaml").write_text(f"{text}trainer:\n  nnodes: 1\n")
    with pytest.raises(InputError, match="is a config of EasyR1, which is not read"):
        check("config.yaml")
