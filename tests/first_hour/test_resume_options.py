"""Programs of the Trainer that resume only with an option: check and a job's notes agree on what a restart does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """import argparse
from datasets import load_dataset
from transformers import AutoModelForCausalLM
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

ap = argparse.ArgumentParser()
ap.add_argument("--resume", OPTION)
args = ap.parse_args()
data = load_dataset("json", data_files="chats.jsonl", split="train")
model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.2-1B-Instruct")
cfg = SFTConfig(output_dir="out", per_device_train_batch_size=1, max_steps=9000, save_steps=100, save_total_limit=2)
trainer = SFTTrainer(model=model, args=cfg, train_dataset=data)
TRAIN
"""
PARSED = """from datasets import load_dataset
from transformers import AutoModelForCausalLM, HfArgumentParser
from trl import SFTConfig, SFTTrainer

(cfg,) = HfArgumentParser(SFTConfig).parse_args_into_dataclasses()
data = load_dataset("json", data_files="chats.jsonl", split="train")
model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.2-1B-Instruct")
trainer = SFTTrainer(model=model, args=cfg, train_dataset=data)
trainer.train(resume_from_checkpoint=cfg.resume_from_checkpoint)
"""
JOB = """#!/bin/bash
#SBATCH --nodes=1
#SBATCH --gpus-per-node=4
#SBATCH --time=08:00:00
#SBATCH --requeue
torchrun --nproc_per_node 4 sft.py {words}
"""
ARGUMENTS = "--output_dir out --max_steps 9000 --per_device_train_batch_size 1 --save_steps 100 --save_total_limit 2"
ROW = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good morning"}]}
RULE = "saving.not-resumed"
CALL = "trainer.train(resume_from_checkpoint=args.resume)"
BRANCHES = """if args.resume:
    trainer.train(resume_from_checkpoint=True)
else:
    trainer.train()"""
LAST = """if args.resume is None:
    args.resume = get_last_checkpoint("out")
"""


def written(code: str, words: str = "") -> None:
    Path("chats.jsonl").write_text(f"{json.dumps(ROW)}\n" * 100)
    Path("sft.py").write_text(code)
    Path("run.slurm").write_text(JOB.format(words=words))


def program(train: str, option: str = "default=None") -> str:
    return PROGRAM.replace("OPTION", option).replace("TRAIN", train)


def found(meshwright: Any) -> dict[str, Any] | None:
    findings = meshwright("check", "run.slurm", "--gpus", "4xA100-80", "--json").json["findings"]
    return next((one for one in findings if one["rule"] == RULE), None)


@pytest.mark.parametrize(
    ("train", "option"),
    [
        (CALL, "default=None"),
        (CALL, "type=str"),
        (CALL, 'action="store_true"'),
        (CALL, "default=False"),
        (f"resume = args.resume\n{CALL.replace('args.', '')}", "default=None"),
        (BRANCHES, "default=None"),
    ],
)
def test_an_option_that_the_command_does_not_pass_resumes_nothing(meshwright: Any, train: str, option: str) -> None:
    written(program(train, option))
    finding = found(meshwright)
    assert finding is not None
    changed, _ = finding["fix"]
    line = changed.removeprefix("sft.py: ")
    assert "checkpoint-" in line
    call = next(one.strip() for one in reversed(train.splitlines()))
    written(
        program(train.replace(call, line), option).replace(
            "import argparse", "import argparse\nfrom pathlib import Path"
        )
    )
    assert found(meshwright) is None


@pytest.mark.parametrize(
    ("train", "option", "words"),
    [
        (CALL, "default=None", "--resume out/checkpoint-100"),
        (CALL, "default=None", "--res out/checkpoint-100"),
        (CALL, "default=None", '"$@"'),
        (CALL, "default=None", "$EXTRA_ARGS"),
        (CALL, "default=True", ""),
        (CALL, 'default=os.environ.get("RESUME", None)', ""),
        (f"{LAST}{CALL}", "default=None", ""),
        ("trainer.train(resume_from_checkpoint=args.resume or get_last_checkpoint('out'))", "default=None", ""),
        (BRANCHES, 'action="store_true"', "--resume"),
    ],
)
def test_programs_that_may_resume_are_not_warned_of(meshwright: Any, train: str, option: str, words: str) -> None:
    written(program(train, option), words)
    assert found(meshwright) is None


def test_the_trainers_own_option_resumes_only_if_it_is_passed(meshwright: Any) -> None:
    written(PARSED, ARGUMENTS)
    finding = found(meshwright)
    assert finding is not None
    assert "resumes only with --resume_from_checkpoint" in finding["message"]
    written(PARSED, f"{ARGUMENTS} --resume_from_checkpoint True")
    assert found(meshwright) is None


SLURM = ("launch", "run.slurm", "--scheduler", "slurm", "--gpus", "4xA100-80", "--time", "8:00:00", "--write")


def test_the_notes_of_a_job_say_what_a_restart_does(meshwright: Any) -> None:
    written(program(CALL))
    answer = meshwright(*SLURM, "jobs")
    assert "and it begins at step 0" in answer.err
    assert "resumes only with --resume" in answer.err
    assert "write sft.py: trainer.train(resume_from_checkpoint=args.resume or any(" in answer.err
    assert "to resume" not in Path("jobs/run.sbatch").read_text()
    written(program(CALL.replace("args.resume", "args.resume or get_last_checkpoint('out')")))
    answer = meshwright(*SLURM, "other")
    assert "it resumes from its last checkpoint" in answer.err
    assert "step 0" not in answer.err
    assert "to resume" in Path("other/run.sbatch").read_text()


def test_a_program_that_is_not_here_may_not_resume(meshwright: Any) -> None:
    written("", f"--model_name_or_path meta-llama/Llama-3.2-1B --train_file chats.jsonl {ARGUMENTS}")
    Path("sft.py").unlink()
    assert "it resumes if your program does (resume_from_checkpoint)" in meshwright(*SLURM, "jobs").err
