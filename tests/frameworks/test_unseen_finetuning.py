"""Fine-tuning files in the style of users' repositories: what their parsers accept is no error, and all are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright import check, estimate
from meshwright.errors import InputError
from meshwright.frameworks import repository

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


def test_a_program_with_a_trainer_of_its_repository_is_read(tmp_path: Path) -> None:
    text = PARSED.replace("Trainer, TrainingArguments", "TrainingArguments").replace("MORE", "train_dataset=data")
    text = f"from own.trainers import MyTrainer\n{text.replace(' Trainer(', ' MyTrainer(')}"
    program = written(tmp_path / "train.py", text)
    assert findings(program) == []
    assert check(str(program)).framework == "accelerate"


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


SWIFT_OLDER = "NPROC_PER_NODE=8 swift sft --model Qwen/Qwen3-8B --dataset d.jsonl --train_type TYPE --deepspeed ZERO"
TRAINER = (
    "torchrun --nproc_per_node 8 train.py --model_name_or_path m --output_dir o --per_device_train_batch_size BATCH "
    "--learning_rate RATE"
)


def with_values(text: str, **values: str) -> str:
    for name, value in values.items():
        text = text.replace(name, value)
    return text


@pytest.mark.parametrize(
    ("tuner", "zero", "wrong"),
    [("lora", "zero3", 0), ("my_tuner", "ds.json", 0), ("ful", "zero2_offload", 1), ("full", "zero4", 1)],
)
def test_names_that_ms_swift_does_not_have(tmp_path: Path, tuner: str, zero: str, wrong: int) -> None:
    script = written(tmp_path / "run.sh", with_values(SWIFT_OLDER, TYPE=tuner, ZERO=zero))
    assert findings(script).count("value.invalid") == wrong


@pytest.mark.parametrize(
    ("batch", "rate", "wrong"), [("16", "2e-5", 0), ("$1", "$2", 0), ("sixteen", "1.5e-05", 1), ("4", "2e-5e", 1)]
)
def test_words_where_the_trainer_parses_numbers(tmp_path: Path, batch: str, rate: str, wrong: int) -> None:
    script = written(tmp_path / "run.sh", with_values(TRAINER, BATCH=batch, RATE=rate))
    assert len([rule for rule in findings(script) if rule.endswith("argument-refused")]) == wrong


@pytest.mark.parametrize(("name", "wrong"), [("chat_template", 0), ("my_module.mine", 0), ("chat_templat", 1)])
def test_misspelled_types_of_axolotl_datasets(tmp_path: Path, name: str, wrong: int) -> None:
    text = "base_model: Qwen/Qwen3-8B\nmicro_batch_size: 1\nlearning_rate: 1e-5\nsequence_len: 2048\n"
    text += "gradient_accumulation_steps: 1\ndatasets:\n"
    config = written(tmp_path / "a.yaml", f"{text}  - path: d.jsonl\n    type: {name}\n")
    assert len(findings(config)) == wrong


@pytest.mark.parametrize(
    "line", ["max_seq_lenght: 2048", "warmup_ratio: 10", "warmup_ratio: -0.1"], ids=["older key", "above", "below"]
)
def test_mistakes_in_keys_of_older_releases(tmp_path: Path, line: str) -> None:
    base = "model_name_or_path: Qwen/Qwen2.5-7B\nlearning_rate: 1.0e-5\ndataset_name: d\ndataset_mixer: {a: 1}\n"
    base += "per_device_train_batch_size: 1\noutput_dir: out\nown_a: 1\nown_b: 2\n"
    assert findings(written(tmp_path / "sft.yaml", base)) == []
    assert len(findings(written(tmp_path / "sft.yaml", f"{base}{line}\n"))) == 1


def test_swapped_digits_of_a_precision(tmp_path: Path) -> None:
    config = "distributed_type: MULTI_GPU\ncompute_environment: LOCAL_MACHINE\nnum_processes: 4\nmixed_precision: "
    assert findings(written(tmp_path / "a.yaml", f"{config}bf16\n")) == []
    assert findings(written(tmp_path / "a.yaml", f"{config}bf61\n")) == ["value.invalid"]


def test_misspelled_keywords_of_trainers_with_other_losses(tmp_path: Path) -> None:
    program = written(tmp_path / "grpo.py", GRPO.replace("reward_funcs", "reward_functions_of_mine"))
    assert findings(program) == []
    assert findings(written(program, GRPO.replace("train_dataset", "trian_dataset"))) == ["key.unknown"]


def test_a_command_with_unknown_words_and_no_arguments(tmp_path: Path) -> None:
    text = "read -r -d '' run <<EOF\nmy.cli.train --epochs 1\nEOF\nif [[ $1 != slurm ]]; then\n"
    script = written(tmp_path / "run.sh", f"{text}    deepspeed --module $run\nfi\n")
    with pytest.raises(InputError):
        check(str(script))


def test_adapters_on_layers_of_a_models_own_code(tmp_path: Path) -> None:
    start = "torchrun --nproc_per_node 8 train.py --model_name_or_path m --output_dir o --use_peft "
    start += "--per_device_train_batch_size 1 --num_train_epochs 1 --lora_target_modules "
    script = written(tmp_path / "run.sh", f"{start}W_pack,o_proj\n")
    assert findings(script) == []
    assert "adapters on W_pack: recipes have no such layers" in " ".join(check(str(script)).notes)
    (found,) = check(str(written(tmp_path / "run.sh", f"{start}q_porj\n"))).findings
    assert found.severity == "error"
    assert found.fix == ("--lora_target_modules q_proj",)


@pytest.mark.parametrize(("second", "wrong"), [("sft", 0), ("pt", 1)])
def test_a_key_of_llama_factory_that_is_set_twice(tmp_path: Path, second: str, wrong: int) -> None:
    text = f"model_name_or_path: Qwen/Qwen3-8B\nstage: sft\nfinetuning_type: full\ndo_train: true\nstage: {second}\n"
    config = written(tmp_path / "f.yaml", f"{text}dataset: d\ntemplate: qwen\noutput_dir: o\nlearning_rate: 1.0e-5\n")
    assert findings(config).count("key.repeated") == wrong


ACCELERATE = "compute_environment: LOCAL_MACHINE\nnum_processes: 4\nmixed_precision: bf16\n"


def test_a_deepspeed_config_is_json_whatever_its_suffix(tmp_path: Path) -> None:
    named = "compute_environment: LOCAL_MACHINE\nnum_processes: 4\ndistributed_type: DEEPSPEED\n"
    named += "deepspeed_config:\n  deepspeed_config_file: zero2.yaml\n"
    written(tmp_path / "zero2.yaml", '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}')
    assert findings(written(tmp_path / "acc.yaml", named)) == []
    written(tmp_path / "zero2.yaml", "zero_optimization:\n  stage: 2\n")
    assert findings(tmp_path / "acc.yaml") == ["accelerate.not-json"]


def test_a_switch_that_the_launcher_only_tests_may_be_any_text(tmp_path: Path) -> None:
    text = f"{ACCELERATE}distributed_type: MULTI_GPU\nuse_cpu: auto\n"
    assert findings(written(tmp_path / "acc.yaml", text)) == []


def test_devices_to_replace_are_no_count(tmp_path: Path) -> None:
    written(tmp_path / "acc.yaml", f"{ACCELERATE}distributed_type: MULTI_GPU\n")
    run = "CUDA_VISIBLE_DEVICES={} accelerate launch --config_file acc.yaml dpo.py --output_dir out\n"
    assert findings(written(tmp_path / "run.sh", run.format("YOUR_DEVICES"))) == []
    assert findings(written(tmp_path / "run.sh", run.format("GPU-0a1b,GPU-2c3d"))) == ["launch.gpus"]
    assert findings(written(tmp_path / "run.sh", run.format("5,7"))) == ["launch.gpus"]


def test_a_field_of_the_repositorys_arguments_is_no_misspelled_key(tmp_path: Path) -> None:
    folder = tmp_path / "configs"
    folder.mkdir()
    base = "model_name_or_path: Qwen/Qwen2.5-7B\nlearning_rate: 1.0e-5\ndataset_name: d\n"
    config = written(folder / "kto.yaml", f"{base}per_device_train_batch_size: 1\noutput_dir: out\nloss_weight: 1.0\n")
    assert findings(config) == ["key.unknown"]
    written(tmp_path / "README.md", "")
    written(tmp_path / "trainer.py", "@dataclass\nclass OwnConfig(KTOConfig):\n    loss_weight: float = 1.0\n")
    assert findings(config) == []


def test_a_model_type_of_a_plugin_has_no_estimate(tmp_path: Path) -> None:
    run = f"NPROC_PER_NODE=8 {SWIFT} --max_length 131072 --per_device_train_batch_size 4"
    assert findings(written(tmp_path / "run.sh", run)) == ["memory.peak"]
    own = f"{run} --model_type own_mtp --external_plugins plugin.py"
    assert findings(written(tmp_path / "run.sh", own)) == []


def test_a_flag_of_ms_swift_without_its_value_is_an_error(tmp_path: Path) -> None:
    run = "swift sft --model --dataset d.jsonl --tuner_type lora --deepspeed zero2"
    assert findings(written(tmp_path / "run.sh", run)) == ["value.invalid"]
    run = "swift sft --model Qwen/Qwen3-8B --dataset --tuner_type lora --gradient_checkpointing"
    assert findings(written(tmp_path / "run.sh", run)) == ["value.invalid"]


def test_a_check_that_axolotl_added_lately_is_a_warning(tmp_path: Path) -> None:
    base = "base_model: Qwen/Qwen3-8B\nlearning_rate: 1.0e-5\nmicro_batch_size: 1\ngradient_accumulation_steps: 1\n"
    base += "val_set_size: 0.1\nmax_steps: 9\n"
    config = written(tmp_path / "a.yaml", f"{base}pretraining_dataset:\n  - path: d\n")
    assert findings(config) == []
    assert "value.invalid" in findings(config, "warning")
    assert findings(written(tmp_path / "a.yaml", f"{base}streaming: true\ndatasets:\n  - path: d\n    type: alpaca\n"))


def test_a_module_that_torchrun_starts_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "src" / "sft"
    folder.mkdir(parents=True)
    program = "from transformers import Trainer, TrainingArguments\n"
    program += 'args = TrainingArguments(output_dir="out", bf16=True, fp16=True)\nTrainer(args=args).train()\n'
    written(folder / "own_sft.py", program)
    jobs = tmp_path / "scripts"
    jobs.mkdir()
    run = written(jobs / "run.sh", "torchrun --nproc_per_node=4 -m src.sft.own_sft --mode lora\n")
    assert check(str(run)).framework == "accelerate"
    assert "value.invalid" in findings(run)


def test_trls_own_trainer_by_the_name_of_its_module_is_read(tmp_path: Path) -> None:
    program = "import trl\nfrom transformers import HfArgumentParser\n"
    program += "(args,) = HfArgumentParser((trl.RewardConfig,)).parse_args_into_dataclasses()\n"
    program += "class RewardTrainer(trl.RewardTrainer):\n    pass\n\nRewardTrainer(args=args).train()\n"
    assert findings(written(tmp_path / "rm.py", program)) == []


@pytest.mark.parametrize("module", ["openrlhf.cli.train_ppo_ray", "verl.trainer.main_ppo"])
def test_scripts_of_trainers_with_rewards_are_refused_by_name(tmp_path: Path, module: str) -> None:
    run = written(tmp_path / "run.sh", f"python3 -m {module} --pretrain Qwen/Qwen3-8B model.path=Qwen/Qwen3-8B\n")
    with pytest.raises(InputError) as caught:
        check(str(run))
    assert module in str(caught.value)
    assert "Qwen/Qwen3-8B" in caught.value.fix[0]


UNSLOTH = """from unsloth import FastLanguageModel
from trl import SFTConfig, SFTTrainer
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/Qwen3-8B", max_seq_length=2048)
SFTTrainer(model=model, tokenizer=tokenizer, args=SFTConfig(output_dir="out", max_seq_length=2048, MORE)).train()
"""


def test_misspelled_arguments_of_a_program_with_unsloth_are_errors(tmp_path: Path) -> None:
    assert findings(written(tmp_path / "a.py", UNSLOTH.replace("MORE", "learning_rate=1e-4"))) == []
    assert findings(written(tmp_path / "a.py", UNSLOTH.replace("MORE", "learning_rat=1e-4"))) == ["key.unknown"]


VALUES = """from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments
quantized = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-8B", attn_implementation="sdpa", quantization_config=quantized)
model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM"))
Trainer(model=model, args=TrainingArguments(output_dir="out")).train()
"""


@pytest.mark.parametrize(("right", "wrong"), [("CAUSAL_LM", "CASUAL_LM"), ("nf4", "nf5"), ("sdpa", "flash_attn2")])
def test_values_that_constructors_refuse_are_errors(tmp_path: Path, right: str, wrong: str) -> None:
    assert findings(written(tmp_path / "a.py", VALUES)) == []
    assert "value.invalid" in findings(written(tmp_path / "a.py", VALUES.replace(f'"{right}"', f'"{wrong}"')))


def test_a_misspelled_flag_that_no_program_of_the_repository_has_is_an_error(tmp_path: Path) -> None:
    program = (
        "from trl import TrlParser, SFTConfig, SFTTrainer\n(args,) = TrlParser((SFTConfig,)).parse_args_and_config()\n"
    )
    written(tmp_path / "own_sft.py", f"{program}SFTTrainer(model='Qwen/Qwen3-8B', args=args).train()\n")
    run = "accelerate launch own_sft.py --output_dir out --per_device_train_batchsize 4 --learning_rate fast\n"
    path = written(tmp_path / "run.sh", run)
    assert sorted(findings(path)) == ["accelerate.argument-refused", "key.unknown"]
    (tmp_path / "more").mkdir()
    path = written(tmp_path / "more" / "run.sh", run.replace(" --learning_rate fast", ""))
    own = f"{program}# per_device_train_batchsize\nSFTTrainer(model='Qwen/Qwen3-8B', args=args).train()\n"
    written(tmp_path / "more" / "own_sft.py", own)
    assert findings(path) == []


def test_bits_that_ms_swift_does_not_have_and_schedules_of_no_name_are_errors(tmp_path: Path) -> None:
    path = written(tmp_path / "run.sh", f"{SWIFT} --quant_method bnb --quant_bits 5")
    assert findings(path) == ["value.invalid"]
    assert findings(written(path, f"{SWIFT} --quant_method bnb --quant_bits 4")) == []
    assert findings(written(path, f"{SWIFT} --lr_scheduler_type cosinus")) == ["value.invalid"]


LAUNCH = "accelerate launch train.py --learning_rate 1e-4 \\\n  --bf16 true"


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("\n", "has no backslash"),
        (" \\ \n", "blanks follow"),
        (" \\ # comment\n", "a comment follows"),
        (" \\\n\n", "is empty"),
        (" \\\n# --seed 2 \\\n", "is a comment"),
    ],
)
def test_a_command_that_ends_before_its_last_flags_is_reported(tmp_path: Path, end: str, reason: str) -> None:
    written(tmp_path / "train.py", PARSED)
    script = written(tmp_path / "run.sh", f"{LAUNCH}{end}  --max_steps 100 \\\n  --seed 3\n")
    [found] = [one for one in check(str(script)).findings if one.rule == "launch.cut-command"]
    assert found.severity == "warning"
    assert reason in found.message
    assert "--max_steps, --seed" in found.message
    assert "of line 1" in found.message
    assert found.line == len(f"{LAUNCH}{end}".splitlines()) + 1


@pytest.mark.parametrize("shell", ['srun bash -c "{}"', 'eval "{}"'])
def test_line_breaks_of_a_variable_end_a_command_in_a_text(tmp_path: Path, shell: str) -> None:
    written(tmp_path / "train.py", PARSED)
    flags = "--learning_rate 1e-4{end}  --max_steps 100{end}  --seed 3{end}"
    command = shell.format("accelerate launch train.py $ARGS")
    script = written(tmp_path / "run.sh", f'ARGS="\n{flags.format(end=chr(10))}"\n{command}\n')
    [found] = [one for one in check(str(script)).findings if one.rule == "launch.cut-command"]
    assert (found.severity, found.line) == ("error", 2)
    assert found.message.startswith("line breaks of ARGS end the command that line 6 gives to a shell: --learning_rate")
    assert found.no_fix == "end every line of ARGS (line 1) with a backslash"
    end = " \\\n"
    written(script, f'ARGS=" \\\n{flags.format(end=end)}"\n{command}\n')
    assert "launch.cut-command" not in findings(script, "error")


def test_a_command_that_is_continued_is_whole(tmp_path: Path) -> None:
    written(tmp_path / "train.py", PARSED)
    script = written(tmp_path / "run.sh", f"{LAUNCH} \\\n  --max_steps 100\necho -n done\n")
    assert "launch.cut-command" not in findings(script, "warning")


@pytest.mark.parametrize(
    ("options", "severity"),
    [
        ("--num_generations 7", "error"),
        ("--num_generations 8 --eval_strategy steps --per_device_eval_batch_size 3 --val_dataset v.jsonl", "error"),
        ("--num_generations 8 --eval_strategy steps --per_device_eval_batch_size 3", ""),
        ("--num_generations 8 --generation_batch_size 20", "error"),
        ("--num_generations 4 --steps_per_generation 2", ""),
        ("--num_generations 8", ""),
    ],
)
def test_answers_of_a_prompt_fit_the_batch_of_ms_swift(tmp_path: Path, options: str, severity: str) -> None:
    start = "NPROC_PER_NODE=4 CUDA_VISIBLE_DEVICES=0,1,2,3 swift rlhf --rlhf_type grpo --model Qwen/Qwen3-8B"
    batch = "--dataset d.jsonl --per_device_train_batch_size 2 --gradient_accumulation_steps 2"
    script = written(tmp_path / "run.sh", f"{start} {batch} {options}")
    assert findings(script) == ([] if not severity else ["value.invalid"])


def test_answers_of_a_prompt_fit_the_batch_of_trl(tmp_path: Path) -> None:
    start = "trl grpo --model_name_or_path Qwen/Qwen3-8B --dataset_name d --per_device_train_batch_size 2"
    assert findings(written(tmp_path / "run.sh", f"{start} --num_generations 6 --num_processes 4")) == ["value.invalid"]
    assert findings(written(tmp_path / "run.sh", f"{start} --num_generations 8 --num_processes 4")) == []
    open_count = written(tmp_path / "run.sh", f"{start} --num_generations 6")
    assert findings(open_count) == []
    assert "value.invalid" in findings(open_count, "warning")


AXOLOTL_GRPO = """base_model: Qwen/Qwen3-8B
rl: grpo
learning_rate: 1e-5
datasets:
  - path: data.jsonl
    type: chat_template
trl:
  num_generations: NUMBER
micro_batch_size: 4
gradient_accumulation_steps: 2
"""


@pytest.mark.parametrize(("number", "severity"), [(6, "warning"), (131, "error"), (4, "")])
def test_answers_of_a_prompt_fit_the_batch_of_axolotl(tmp_path: Path, number: int, severity: str) -> None:
    config = written(tmp_path / "a.yml", AXOLOTL_GRPO.replace("NUMBER", str(number)))
    found = [one.severity for one in check(str(config)).findings if one.field == "trl.num_generations"]
    assert found == ([severity] if severity else [])


@pytest.mark.parametrize(
    ("template", "severity"),
    [("chatlm", "error"), ("phi3", "error"), ("vicuna", "warning"), ("chatml", ""),
     ("tokenizer_default_fallback_lama3", "error"), ("tokenizer_default_fallback_llama3", "")],
)  # fmt: skip
def test_chat_templates_of_axolotl(tmp_path: Path, template: str, severity: str) -> None:
    config = "base_model: Qwen/Qwen3-8B\nlearning_rate: 1e-5\nsequence_len: 2048\n"
    data = "datasets:\n  - path: d.jsonl\n    type: chat_template\n"
    for text in (f"{config}{data}chat_template: {template}\n", f"{config}{data}    chat_template: {template}\n"):
        found = [one.severity for one in check(str(written(tmp_path / "a.yml", text))).findings
                 if one.field.endswith("chat_template")]  # fmt: skip
        assert found == ([severity] if severity else [])


def test_auto_that_deepspeed_drops_is_no_error_of_programs_that_call_it(tmp_path: Path) -> None:
    config = deepspeed(tmp_path, zero_optimization={"stage": 2, "sub_group_size": "auto"})
    assert findings(config) == ["deepspeed.auto-not-filled"]
    written(tmp_path / "main.py", "engine, *_ = deepspeed.initialize(model=model, config=config)\n")
    written(tmp_path / "README.md", "")
    changed = deepspeed(tmp_path, zero_optimization={"stage": 3, "sub_group_size": "auto"})
    repository._texts.cache_clear()
    assert findings(changed) == []
    assert "deepspeed.auto-not-filled" in findings(changed, "warning")


def test_a_share_of_steps_was_accepted_by_older_releases_of_axolotl(tmp_path: Path) -> None:
    config = AXOLOTL_GRPO.replace("NUMBER", "8")
    assert findings(written(tmp_path / "a.yml", f"{config}logging_steps: 0.2\n")) == []
    assert findings(written(tmp_path / "a.yml", f"{config}logging_steps: 1.5\n")) == ["value.invalid"]


def test_what_a_file_of_another_program_leaves_out_is_no_error(tmp_path: Path) -> None:
    config = "model_name_or_path: Qwen/Qwen3-8B\nper_device_train_batch_size: 1\nload_in_4bit: true\n"
    assert findings(written(tmp_path / "t.yaml", config)) == ["value.invalid"]
    own = "train_file: a\nhouse_prompt: b\nmax_samples: 3\nextra_bits: 1\n"
    assert findings(written(tmp_path / "t.yaml", config + own)) == []


def test_a_llama_factory_file_may_leave_its_model_to_the_command(tmp_path: Path) -> None:
    config = "stage: sft\ndo_train: true\nfinetuning_type: lora\ntemplate: qwen\ndataset: d\noutput_dir: o\n"
    path = written(tmp_path / "t.yaml", config)
    assert findings(path) == []
    assert "key.missing" in findings(path, "warning")


def test_a_config_of_another_machine_is_found_by_the_end_of_its_path(tmp_path: Path) -> None:
    written(tmp_path / "train.py", PARSED)
    (tmp_path / "configs").mkdir()
    written(tmp_path / "configs" / "a.yaml", "learning_rate: 1e-5\nbf16: true\nfp16: true\n")
    launch = "accelerate launch --config_file /home/me/repo/configs/ddp.yaml train.py --output_dir o"
    written(tmp_path / "configs" / "ddp.yaml", "distributed_type: MULTI_GPU\nnum_processes: 4\nmixed_precision: b16\n")
    assert "value.invalid" in findings(written(tmp_path / "run.sh", launch))


def test_a_command_under_a_condition_is_compared_too(tmp_path: Path) -> None:
    written(tmp_path / "train.py", PARSED)
    text = f"{LAUNCH}\nif [ $MODE = full ]; then\n  python train.py --seed 3\n  --max_steps 100\nfi\n"
    [found] = [one for one in check(str(written(tmp_path / "run.sh", text))).findings if "cut" in one.rule]
    assert "of line 4" in found.message


def test_a_length_of_minus_one_is_that_of_older_releases_of_ms_swift(tmp_path: Path) -> None:
    path = written(tmp_path / "run.sh", f"{SWIFT} --max_length -1")
    assert findings(path) == ["value.invalid"]
    old = "swift sft --sft_type lora --model_type qwen-7b --custom_train_dataset_path d.json --batch_size 1"
    assert findings(written(path, f"{old} --max_length -1")) == []


def test_a_llama_factory_file_that_only_generates_is_refused(tmp_path: Path) -> None:
    config = "model_name_or_path: Qwen/Qwen3-8B\nadapter_name_or_path: out\ntemplate: qwen3\nfinetuning_type: lora\n"
    with pytest.raises(InputError, match="trains nothing"):
        check(str(written(tmp_path / "chat.yaml", config)))


def test_an_axolotl_file_of_trained_adapters_may_have_no_data(tmp_path: Path) -> None:
    config = "base_model: Qwen/Qwen3-8B\nsequence_len: 2048\nlearning_rate: 1e-4\nadapter: lora\n"
    assert "key.missing" in findings(written(tmp_path / "a.yml", config))
    assert "key.missing" not in findings(written(tmp_path / "a.yml", f"{config}lora_model_dir: ./out\n"))


def test_an_attention_kernel_that_a_program_registers_is_no_error(tmp_path: Path) -> None:
    own = VALUES.replace("sdpa", "own_kernel")
    assert "value.invalid" in findings(written(tmp_path / "a.py", own))
    assert findings(written(tmp_path / "a.py", f'{own}ALL_ATTENTION_FUNCTIONS.register("own_kernel", run)\n')) == []


CONFIG_CALL = """from trl import DPOConfig as Config, DPOTrainer
args = Config(output_dir="out", MORE)
DPOTrainer(model="Qwen/Qwen3-8B", args=args, train_dataset=data).train()
"""


@pytest.mark.parametrize(
    ("argument", "rule"),
    [
        ("learning_rate=1e-5, beta=0.1, max_prompt_length=4", ""),
        ("learnign_rate=1e-5", "key.unknown"),
        ("gradient_checkpoint=True", "key.unknown"),
        ('optim="adamw_8bits"', "value.invalid"),
        ("bf16=True, fp16=True", "value.invalid"),
        ('save_strategy="step"', "value.invalid"),
        ("load_best_model_at_end=True", "value.invalid"),
        ("load_best_model_at_end=True, **options", ""),
        ("warmup_ratio=5", "value.invalid"),
        ("per_device_train_batch_size=0", "value.invalid"),
        ("per_device_train_batch_size=size", ""),
    ],
)
def test_literal_arguments_of_other_configs_of_trl_are_checked(tmp_path: Path, argument: str, rule: str) -> None:
    path = written(tmp_path / "dpo.py", CONFIG_CALL.replace("MORE", argument))
    assert findings(path) == ([rule] if rule else [])


def test_yaml_of_a_trainer_that_generates_and_misspelled_dtypes(tmp_path: Path) -> None:
    config = "model_name_or_path: Qwen/Qwen3-8B\ndataset_name: d\nper_device_train_batch_size: 2\n"
    path = written(tmp_path / "grpo.yaml", f"{config}num_generations: 6\ngradient_accumulation_steps: 2\n")
    assert findings(path) == []
    assert "value.invalid" in findings(path, "warning")
    assert findings(written(path, f"{config}num_generations: 131\n")) == ["value.invalid"]
    assert findings(written(path, f"{config}torch_dtype: bfloat61\n")) == ["value.invalid"]
    assert findings(written(path, f"{config}torch_dtype: bfloat16\n")) == []


def test_a_program_that_trains_behind_a_switch_is_read(tmp_path: Path) -> None:
    program = """import argparse
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
parser = argparse.ArgumentParser()
parser.add_argument("--train", action="store_true")
options = parser.parse_args()
if options.train:
    args = TrainingArguments(output_dir="out", optim="adamw_8bits")
    Trainer(model=AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-8B"), args=args, train_dataset=data).train()
"""
    assert findings(written(tmp_path / "a.py", program)) == ["accelerate.argument-refused"]


def test_the_launcher_of_deepspeed_needs_no_config(tmp_path: Path) -> None:
    run = "deepspeed --num_gpus 4 src/train.py --output_dir o --per_device_train_batch_size 2 --bf16 --fp16\n"
    assert "value.invalid" in findings(written(tmp_path / "run.sh", run))


def test_sharegpt_with_the_template_that_older_releases_read_is_a_warning(tmp_path: Path) -> None:
    config = "base_model: Qwen/Qwen3-8B\nlearning_rate: 1e-5\nmicro_batch_size: 1\ngradient_accumulation_steps: 1\n"
    config += "sequence_len: 2048\ndatasets:\n  - path: d/d\n"
    assert "value.invalid" in findings(written(tmp_path / "a.yml", f"{config}    type: sharegpt\n"))
    path = written(tmp_path / "a.yml", f"{config}    type: sharegpt\n    conversation: chatml\n")
    assert findings(path) == []
    assert "value.invalid" in findings(path, "warning")


def test_an_unknown_section_of_accelerate_is_an_error(tmp_path: Path) -> None:
    config = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_processes: 2\n"
    assert findings(written(tmp_path / "a.yaml", f"{config}deepspeed_confg:\n  zero_stage: 2\n")) == ["key.unknown"]
    config = config.replace("MULTI_GPU", "DEEPSPEED")
    unread = written(tmp_path / "a.yaml", f"{config}deepspeed_config:\n  zero_stages: 2\n")
    assert "key.unused" in findings(unread, "warning")


def test_the_task_of_other_adapters_is_compared(tmp_path: Path) -> None:
    prompts = VALUES.replace("LoraConfig", "PromptTuningConfig")
    assert findings(written(tmp_path / "a.py", prompts)) == []
    assert "value.invalid" in findings(written(tmp_path / "a.py", prompts.replace("CAUSAL_LM", "CASUAL_LM")))


def test_the_trainer_brings_its_optimizers_to_deepspeed(tmp_path: Path) -> None:
    written(tmp_path / "train.py", PARSED.replace("args.name", '"Qwen/Qwen3-8B"'))
    config = (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_processes: 2\nmixed_precision: bf16\n"
    )
    written(tmp_path / "ds.yaml", f"{config}deepspeed_config:\n  zero_stage: 2\n")
    run = "accelerate launch --config_file ds.yaml train.py --output_dir o --bf16 --max_steps 100 --optim"
    assert findings(written(tmp_path / "run.sh", f"{run} adamw_bnb_8bit\n")) == []
    assert findings(written(tmp_path / "run.sh", f"{run} adamw_bnb_8bits\n")) != []
