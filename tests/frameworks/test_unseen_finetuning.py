"""Fine-tuning files in the style of users' repositories: what their parsers accept is no error, and all are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright import check, estimate
from meshwright.errors import InputError

SWIFT = "swift sft --model Qwen/Qwen3-8B --dataset d.jsonl --tuner_type lora --swanlab_mode cloud"
PARSED = """from transformers import HfArgumentParser, Trainer, TrainingArguments, AutoModelForCausalLM
(args,) = HfArgumentParser((TrainingArguments,)).parse_args_into_dataclasses()
trainer = Trainer(model=AutoModelForCausalLM.from_pretrained(args.name), args=args, MORE)
trainer.train()
"""
GRPO = """from trl import GRPOConfig, GRPOTrainer
args = GRPOConfig(output_dir="out", num_generations=8, bf16=True)
trainer = GRPOTrainer(model="Qwen/Qwen2.5-7B", reward_funcs=[len], args=args, train_dataset=data)
trainer.train()
"""


def findings(path: Path, severity: str = "error") -> list[str]:
    return [one.rule for one in check(str(path)).findings if one.severity == severity]


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize("end", [" \\", " \\\n", " \\\n  \\", "\\"])
def test_a_backslash_at_the_end_of_a_script_is_dropped(tmp_path: Path, end: str) -> None:
    assert findings(written(tmp_path / "run.sh", SWIFT + end)) == []


def test_a_backslash_before_a_blank_is_an_argument(tmp_path: Path) -> None:
    assert findings(written(tmp_path / "run.sh", f"{SWIFT} \\ ")) == ["value.invalid"]


def deepspeed(tmp_path: Path, **sections: object) -> Path:
    config = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}, **sections}
    return written(tmp_path / "ds.json", json.dumps(config, indent=1))


def test_keys_of_fp16_in_the_section_of_bf16_are_of_older_releases(tmp_path: Path) -> None:
    config = deepspeed(tmp_path, bf16={"enabled": "auto", "loss_scale": 0, "hysteresis": 2})
    assert findings(config) == []
    assert findings(config, "warning") == ["key.removed", "key.removed"]
    assert findings(deepspeed(tmp_path, bf16={"enabeld": True})) == ["key.unknown"]


def test_a_fractional_loss_scale_is_of_older_releases(tmp_path: Path) -> None:
    config = deepspeed(tmp_path, fp16={"enabled": True, "min_loss_scale": 1e-10, "loss_scale_window": 100.0})
    assert findings(config) == []
    assert findings(config, "warning") == ["deepspeed.whole-number"]
    assert findings(deepspeed(tmp_path, fp16={"enabled": True, "hysteresis": "two"})) == ["value.invalid"]


def test_contiguous_checkpoints_are_no_error_of_programs_that_do_not_configure_them(tmp_path: Path) -> None:
    config = deepspeed(tmp_path, activation_checkpointing={"contiguous_memory_optimization": True})
    assert findings(config) == []


def test_a_list_under_the_plural_of_a_key_is_one_of_the_program(tmp_path: Path) -> None:
    base = "model_name_or_path: Qwen/Qwen2.5-7B\nlearning_rate: 1.0e-5\ndataset_name: d\n"
    base += "per_device_train_batch_size: 1\noutput_dir: out\n"
    assert findings(written(tmp_path / "sft.yaml", f"{base}dataset_configs: [all]\n")) == []
    assert findings(written(tmp_path / "sft.yaml", f"{base}dataset_confg: all\n")) == ["key.unknown"]


def test_a_program_whose_arguments_come_from_a_parser_is_read(tmp_path: Path) -> None:
    program = written(tmp_path / "train.py", PARSED.replace("MORE", "train_dataset=data"))
    assert findings(program) == []
    assert check(str(program)).framework == "accelerate"
    assert findings(written(tmp_path / "train.py", PARSED.replace("MORE", "train_datset=data"))) == ["key.unknown"]


def test_a_program_without_any_stated_argument_is_read(tmp_path: Path) -> None:
    text = "from trl import SFTTrainer\ndef main(args):\n    SFTTrainer(model=load(args), args=args, NAME=1).train()\n"
    program = written(tmp_path / "sft.py", text.replace("NAME=1", "train_dataset=data"))
    assert findings(program) == []
    assert "come from the command" in " ".join(check(str(program)).notes)
    assert findings(written(tmp_path / "sft.py", text.replace("NAME", "train_datset"))) == ["key.unknown"]


def test_a_trainer_of_another_package_is_none_of_transformers(tmp_path: Path) -> None:
    text = "from pytorch_lightning import Trainer\nfrom transformers import AutoModelForCausalLM\n"
    text += "model = AutoModelForCausalLM.from_pretrained('gpt2')\nTrainer(devices=8).train(model)\n"
    with pytest.raises(InputError, match="matches no supported framework"):
        check(str(written(tmp_path / "train.py", text)))


def test_programs_with_other_losses_are_checked_and_not_planned(tmp_path: Path) -> None:
    program = written(tmp_path / "grpo.py", GRPO)
    assert findings(program) == []
    assert "trains with TRL's GRPO: keys and values are checked" in " ".join(check(str(program)).notes)
    with pytest.raises(InputError, match="neither read nor planned"):
        estimate(str(program), gpus="8xH100")


def test_scripts_that_start_programs_with_other_losses_are_checked(tmp_path: Path) -> None:
    written(
        tmp_path / "acc.yaml", "distributed_type: MULTI_GPU\ncompute_environment: LOCAL_MACHINE\nnum_processes: 4\n"
    )
    start = "accelerate launch --config_file acc.yaml dpo.py --model_name_or_path m --output_dir o --bf16\n"
    script = written(tmp_path / "run.sh", start)
    assert findings(script) == []
    assert findings(written(tmp_path / "run.sh", f"export CUDA_VISIBLE_DEVICES=5,7\n{start}")) == ["launch.gpus"]
