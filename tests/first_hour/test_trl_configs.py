"""Commands and files of TRL, the Trainer and Axolotl: configs, arguments and validation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright import notes
from meshwright.cli.run import run

SFT = """model_name_or_path: Qwen/Qwen3-4B
datasets:
  - path: json
    data_files: chat.jsonl
    split: train
learning_rate: 2.0e-4
num_train_epochs: 3
packing: true
max_length: 4096
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
bf16: true
use_peft: true
output_dir: out
"""
TRL = """#!/bin/bash
accelerate launch --num_processes 2 --mixed_precision bf16 trl/scripts/sft.py \\
  --model_name_or_path Qwen/Qwen3-4B --dataset_name ./mixed.jsonl --learning_rate 2.0e-4 --num_train_epochs 3 \\
  --packing --max_length 4096 --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --use_peft \\
  --load_in_4bit --lora_r 32 --lora_alpha 16 --output_dir out EXTRA
"""
SHORT = "trl sft --model_name_or_path Qwen/Qwen2.5-1.5B --dataset_name trl-lib/Capybara --output_dir out "
DPO = "trl dpo --model_name_or_path Qwen/Qwen2-0.5B-Instruct --dataset_name trl-lib/ultrafeedback_binarized "


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def typed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        run(list(words))
    code = ended.value.code
    return int(str(code or 0)), capsys.readouterr().out


def check(capsys: pytest.CaptureFixture[str], text: str, *words: str, name: str = "run.sh") -> tuple[int, str]:
    Path(name).write_text(text, encoding="utf-8")
    return typed(capsys, "check", name, *(words or ("--gpus", "1xH100")))


def write_data() -> None:
    rows = [{"instruction": f"Frage {n}", "output": f"Antwort {n}"} for n in range(40)]
    Path("mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.mark.parametrize(
    "more",
    [
        "test_split_size: 0.05\neval_strategy: steps\n",
        "env:\n  WANDB_PROJECT: mine\n",
        "accelerate_config: fsdp2\nnum_processes: 2\n",
        "main_process_port: 29501\nstreaming: false\n",
        "gradient_checkpointing_kwargs:\n  use_reentrant: false\nlora_target_modules: [q_proj, v_proj]\n",
    ],
)
def test_trl_config_has_the_same_keys_alone_and_in_a_command(more: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("sft.yaml").write_text(SFT + more, encoding="utf-8")
    for name, text in (("run.sh", "trl sft --config sft.yaml\n"), ("sft.yaml", SFT + more)):
        code, printed = check(capsys, text, "--gpus", "2x3090", name=name)
        assert code == 0, printed
        assert "key.u" not in printed


def test_a_mistyped_key_of_a_dataset_is_found_through_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    Path("sft.yaml").write_text(SFT.replace("data_files", "data_file"), encoding="utf-8")
    code, printed = check(capsys, "trl sft --config sft.yaml\n")
    assert code == 1
    assert "data_files" in printed
    assert "sft.yaml:4" in printed


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_an_exported_trl_script_keeps_its_validation_and_is_clean(
    strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_data()
    text = TRL.replace("EXTRA", f"--eval_strategy {strategy}")
    _, printed = check(capsys, text, "--gpus", "2xA6000")
    assert "accelerate.trl-dataset-file" in printed
    assert "data.validation_part=0.02" in printed
    code, printed = typed(capsys, "export", "run.sh", "--gpus", "2xA6000", "--to", "accelerate", "--out", "new")
    assert code == 0
    assert "holds out 2% of the data" in printed
    assert "test_split_size: 0.02" in Path("new/run_data.yaml").read_text(encoding="utf-8")
    code, printed = typed(capsys, "check", "new/run.sh", "--gpus", "2xA6000")
    assert code == 0
    assert "trl-" not in printed
    assert "test split" not in printed


def test_an_export_without_validation_holds_nothing_out(capsys: pytest.CaptureFixture[str]) -> None:
    write_data()
    Path("run.sh").write_text(TRL.replace("EXTRA", ""), encoding="utf-8")
    typed(capsys, "export", "run.sh", "--gpus", "2xA6000", "--to", "accelerate", "--out", "new")
    assert "test_split_size" not in Path("new/run_data.yaml").read_text(encoding="utf-8")


def test_a_mixture_without_test_split_is_not_validated(capsys: pytest.CaptureFixture[str]) -> None:
    Path("sft.yaml").write_text(SFT + "eval_strategy: steps\n", encoding="utf-8")
    code, printed = check(capsys, "trl sft --config sft.yaml\n")
    assert code == 1
    assert "fix: --test_split_size 0.05" in printed
    code, printed = check(capsys, SFT + "eval_strategy: steps\n", name="sft.yaml")
    assert code == 1
    assert "test_split_size: 0.05" in printed


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.sh", SHORT + "--fp16 --bf16 true\n"),
        ("run.sh", "torchrun --nproc_per_node 8 run_clm.py --model_name_or_path meta-llama/Llama-3.2-1B "
            "--per_device_train_batch_size 2 --fp16 --bf16 --do_train --output_dir out\n"),
        ("train.py", "from transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n"
            'model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.2-1B")\n'
            'args = TrainingArguments(output_dir="out", bf16=True, fp16=True)\n'
            "Trainer(model=model, args=args).train()\n"),
        ("swift.sh", "swift sft --model Qwen/Qwen2.5-7B --dataset a --torch_dtype bfloat16 --fp16 true\n"),
    ],
)  # fmt: skip
def test_both_precisions_are_an_error(name: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = check(capsys, text, "--gpus", "8xH100", name=name)
    assert code == 1
    assert "bf16" in printed
    assert "refuses to start (value.invalid)" in printed
    assert "key.overwritten" not in printed


AXOLOTL = """base_model: NousResearch/Meta-Llama-3-8B
datasets:
  - path: mhenrichsen/alpaca_2k_test
    type: alpaca
sequence_len: 4096
adapter: lora
lora_r: 32
lora_alpha: 16
lora_target_linear: true
micro_batch_size: 1
gradient_accumulation_steps: 4
gradient_checkpointing: true
num_epochs: 4
learning_rate: 0.0002
flash_attention: true
"""


@pytest.mark.parametrize(
    ("name", "text", "fails"),
    [
        ("run.sh", SHORT + "--bf16 false --dtype float32 --attn_implementation flash_attention_2\n", True),
        ("run.sh", SHORT + "--bf16 false --attn_implementation flash_attention_2\n", True),
        ("run.sh", SHORT + "--dtype float32 --attn_implementation flash_attention_2\n", False),
        ("run.sh", SHORT + "--bf16 false --dtype bfloat16 --attn_implementation flash_attention_2\n", False),
        ("run.sh", SHORT + "--mixed_precision bf16 --bf16 false --attn_implementation flash_attention_2\n", False),
        ("run.sh", SHORT + "--bf16 false --attn_implementation sdpa\n", False),
        ("a.yml", AXOLOTL + "bf16: false\n", True),
        ("a.yml", AXOLOTL + "bf16: auto\n", False),
        ("a.yml", AXOLOTL, False),
        ("a.yml", AXOLOTL + "bf16: false\nfp16: true\n", False),
    ],
)
def test_flash_attention_in_fp32_fails_in_the_first_step(
    name: str, text: str, fails: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    code, printed = check(capsys, text, "--gpus", "8xH100", name=name)
    assert code == int(fails), printed
    assert ("fails in the first step (value.invalid)" in printed) is fails


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        (SHORT + "--padding_free\n", "--packing true"),
        (SHORT + "--loss_type sigmoid\n", "--loss_type nll"),
        (SHORT + "--loss_type chunked_nll --use_liger_kernel\n", "--loss_type nll"),
        (SHORT + "--packing --max_length none\n", "--max_length 1024"),
        (SHORT + "--dataset_streaming\n", "--max_steps 1000"),
        (SHORT + "--report_to wandbb\n", "--report_to wandb"),
        (SHORT + "--fsdp ful_shard\n", "--fsdp full_shard"),
        (SHORT + "--load_in_4bit --load_in_8bit --use_peft\n", "--load_in_8bit false"),
        (DPO + "--output_dir o --loss_type exo_pair\n", "--label_smoothing 0.001"),
        (DPO + "--output_dir o --use_liger_kernel --precompute_ref_log_probs\n", "--precompute_ref_log_probs false"),
        (DPO.replace("dpo", "grpo") + "--output_dir o --num_generations 1\n", "--num_generations 8"),
        (DPO.replace("dpo", "grpo") + "--output_dir o --auto_find_batch_size\n", "--auto_find_batch_size false"),
    ],
)
def test_what_the_configs_of_trl_refuse(text: str, fix: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = check(capsys, text)
    assert code == 1, printed
    assert f"fix: {fix}" in printed


CLM = "torchrun --nproc_per_node 8 run_clm.py --model_name_or_path Qwen/Qwen3-4B --per_device_train_batch_size 2 "
SWIFT = "swift sft --model Qwen/Qwen2.5-7B-Instruct --dataset a --output_dir out "
FACTORY = "llamafactory-cli train --model_name_or_path Qwen/Qwen3-4B --stage sft --do_train --dataset a --output_dir o "


@pytest.mark.parametrize(
    "text",
    [
        SHORT + "--no_remove_unused_columns --no_dataloader_pin_memory",
        SHORT + "--no-remove-unused-columns --no_gradient_checkpointing",
        SHORT + "--gradient_checkpointing 0 --packing yes --bf16=true",
        SHORT + "--num_train_epoch 2 --learning_rat 1e-5",
        SHORT + "--use_peft --lora_target_modules q_proj v_proj --lora_modules_to_save embed_tokens lm_head",
        SHORT + """--lr_scheduler_kwargs '{"num_cycles": 1}' --lr_scheduler_type cosine_with_restarts""",
        DPO + "--output_dir o --no_dataloader_pin_memory --no-remove-unused-columns --no_disable_dropout",
        CLM + "--bf16 --do_train --output_dir out --no_remove_unused_columns --no_keep_linebreaks",
        SWIFT + "--no_gradient_checkpointing --no-freeze-vit --no_remove_unused_columns --packing f",
        FACTORY + "--no_remove_unused_columns --no-dataloader-pin-memory",
        "axolotl train a.yml --no-sample-packing --no-flash-attention",
    ],
)
def test_every_form_of_an_argument_is_read(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.yml").write_text(AXOLOTL, encoding="utf-8")
    code, printed = check(capsys, text + "\n", "--gpus", "8xH200")
    assert code == 0, printed
    assert "key.u" not in printed
    assert "value.invalid" not in printed


def test_a_switch_that_is_turned_off_counts_as_off(capsys: pytest.CaptureFixture[str]) -> None:
    answers = []
    for flag in ("--no_gradient_checkpointing", "--gradient_checkpointing f", "--gradient_checkpointing false", ""):
        _, printed = check(capsys, f"{SHORT} --per_device_train_batch_size 4 {flag}\n")
        answers.append(next(line for line in printed.splitlines() if line.startswith("Memory")))
    assert len(set(answers[:3])) == 1
    assert answers[3] != answers[0]


def test_a_switch_that_is_off_by_default_has_no_opposite(capsys: pytest.CaptureFixture[str]) -> None:
    _, printed = check(capsys, SHORT + "--no_packing\n")
    assert "TRL has no --no_packing: packing is off by default" in printed
    assert "fix: without --no_packing" in printed


def test_an_optional_switch_needs_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    code, printed = check(capsys, SHORT + "--bf16 --packing\n")
    assert code == 0
    assert "--bf16 needs a value" in printed
    assert "fix: --bf16 true" in printed


def test_overrides_after_the_file_of_llama_factory_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    text = "model_name_or_path: Qwen/Qwen3-4B\nstage: sft\ndo_train: true\nfinetuning_type: lora\ndataset: a\n"
    Path("lf.yaml").write_text(text + "template: qwen3\noutput_dir: o\n", encoding="utf-8")
    code, printed = check(capsys, "llamafactory-cli train lf.yaml fp16=true bf16=true\n")
    assert code == 1
    assert "transformers accepts one of bf16 and fp16" in printed


@pytest.mark.parametrize(("gpus", "count"), [("3090", 2), ("A6000", 2), ("1x3090", 0), ("2x3090", 0)])
def test_the_count_of_a_gpu_type_alone_is_said(gpus: str, count: int, capfd: pytest.CaptureFixture[str]) -> None:
    Path("run.sh").write_text(TRL.replace("EXTRA", "").replace("./mixed.jsonl", "trl-lib/Capybara"), encoding="utf-8")
    notes.print_once.cache_clear()
    with pytest.raises(SystemExit):
        run(["check", "run.sh", "--gpus", gpus])
    said = capfd.readouterr().err
    assert (f"--gpus {gpus} names no count: the file states {count}x" in said) is bool(count)


def test_a_script_that_is_started_from_the_folder_above_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    Path("hf").mkdir()
    lines = (
        "from transformers import TrainingArguments, AutoModelForCausalLM",
        'model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-4B")',
        'args = TrainingArguments(output_dir="o", save_steps=150, eval_steps=100, eval_strategy="steps",',
        "    load_best_model_at_end=True)",
    )
    Path("hf/train.py").write_text("\n".join(lines), encoding="utf-8")
    code, printed = check(capsys, "torchrun --nproc_per_node 8 hf/train.py\n", "--gpus", "8xH100", name="hf/run.sh")
    assert code == 1
    assert "error hf/train.py:3" in printed
    code, printed = typed(capsys, "check", ".", "--gpus", "8xH100")
    assert "skipped" not in printed
    assert "2 files checked" in printed


@pytest.mark.parametrize(("flag", "fails"), [("", True), ("--no_gradient_checkpointing", False)])
def test_fsdp_and_the_default_of_trl_would_checkpoint_twice(
    flag: str, fails: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    config = "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\nfsdp_config:\n  fsdp_version: 2\n"
    Path("f.yaml").write_text(config + "  fsdp_activation_checkpointing: true\n", encoding="utf-8")
    code, printed = check(capsys, f"{SHORT} --accelerate_config f.yaml {flag}\n", "--gpus", "8xH100")
    assert code == int(fails), printed
    assert ("accelerate.double-checkpointing" in printed) is fails
