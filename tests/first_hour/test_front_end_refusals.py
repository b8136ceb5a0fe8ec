"""Fine-tuning files that the front ends refuse at start."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.cli.run import run
from meshwright.frameworks.applied_fixes import fixed_text

FSDP = """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LAYER
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_version: 2
mixed_precision: bf16
num_machines: 1
num_processes: 8
"""
TRL = """#!/bin/bash
accelerate launch --config_file fsdp.yaml -m trl.scripts.sft \\
  --model_name_or_path MODEL --dataset_name /data/instr --max_length 4096 \\
  --per_device_train_batch_size 1 --gradient_checkpointing --learning_rate 2e-4 --use_peft --lora_r 32 \\
  --bf16 --use_liger_kernel True --num_train_epochs 3 --output_dir out \\
  MORE
"""


def check(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        run(["check", *words])
    return int(str(ended.value.code)), capsys.readouterr().out


def write_trl(model: str, layer: str = "LlamaDecoderLayer", more: str = "--logging_steps 10") -> None:
    Path("fsdp.yaml").write_text(FSDP.replace("LAYER", layer), encoding="utf-8")
    Path("run.sh").write_text(TRL.replace("MODEL", model).replace("MORE", more), encoding="utf-8")


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("model", "right"),
    [
        ("google/gemma-3-12b-it", "Gemma3DecoderLayer"),
        ("Qwen/Qwen3-VL-8B-Instruct", "Qwen3VLTextDecoderLayer"),
        ("Qwen/Qwen3-8B", "Qwen3DecoderLayer"),
    ],
)
def test_a_layer_class_of_another_model_is_an_error(model: str, right: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_trl(model)
    code, printed = check(capsys, "run.sh", "--gpus", "8xL40S")
    assert code == 1
    assert "fsdp.yaml:5" in printed
    assert f"has no class LlamaDecoderLayer: its layers are {right}" in printed
    write_trl(model, right)
    code, printed = check(capsys, "run.sh", "--gpus", "8xL40S")
    assert code == 0, printed


def test_layers_of_a_vision_encoder_may_be_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    write_trl("google/gemma-3-12b-it", "Gemma3DecoderLayer,SiglipEncoderLayer")
    code, printed = check(capsys, "run.sh", "--gpus", "8xL40S")
    assert code == 0, printed


ZERO = """{
  "bf16": {"enabled": "auto"},
  "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
  "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
  "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
  "gradient_accumulation_steps": STEPS,
  "train_batch_size": BATCH,
  "train_micro_batch_size_per_gpu": "auto"
}
"""
DEEPSPEED = """#!/bin/bash
deepspeed --num_gpus 8 run_sft.py --model_name_or_path google/gemma-3-12b-pt --deepspeed ds.json --bf16 True \\
  --per_device_train_batch_size 2 --gradient_accumulation_steps 4 --use_liger_kernel True --learning_rate 1e-5 \\
  --num_train_epochs 2 --gradient_checkpointing True --max_seq_length 8192 --save_steps 100 --output_dir /scratch/cpt
"""


def test_deepspeed_may_refuse_no_warmup(capsys: pytest.CaptureFixture[str]) -> None:
    Path("ds.json").write_text(ZERO.replace("STEPS", '"auto"').replace("BATCH", '"auto"'), encoding="utf-8")
    Path("run.sh").write_text(DEEPSPEED, encoding="utf-8")
    code, printed = check(capsys, "run.sh", "--gpus", "8xL40S")
    assert code == 0, printed
    assert "warmup_num_steps=0: DeepSpeed 0.19 needs a positive integer; another version may accept it" in printed
    warmed = DEEPSPEED.replace("--learning_rate", "--warmup_steps 1 --learning_rate")
    Path("run.sh").write_text(warmed, encoding="utf-8")
    assert "warmup_num_steps" not in check(capsys, "run.sh", "--gpus", "8xL40S")[1]


@pytest.mark.parametrize(
    ("more", "message", "fix"),
    [
        (
            "--load_best_model_at_end --eval_strategy steps --eval_steps 50 --save_steps 80",
            "--load_best_model_at_end needs --save_steps 80 to be a multiple of --eval_steps 50",
            "--save_steps 50",
        ),
        (
            "--load_best_model_at_end --save_steps 80",
            "--load_best_model_at_end needs an evaluation before every save, but nothing is evaluated",
            "--eval_strategy steps --eval_steps 80",
        ),
        (
            "--load_best_model_at_end True --eval_strategy epoch --save_strategy steps --save_steps 80",
            "not --eval_strategy epoch and --save_strategy steps",
            "--eval_strategy steps --eval_steps 80",
        ),
        (
            "--lr_scheduler_type reduce_lr_on_plateau",
            "--lr_scheduler_type reduce_lr_on_plateau follows the validation loss",
            "--eval_strategy steps",
        ),
        ("--dataloader_prefetch_factor 2", "needs worker processes", "--dataloader_num_workers 4"),
    ],
)
def test_arguments_that_the_trainer_refuses(
    more: str, message: str, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_trl("Qwen/Qwen3-8B", "Qwen3DecoderLayer", more)
    code, printed = check(capsys, "run.sh", "--gpus", "8xL40S")
    assert code == 1
    assert message in printed
    assert f"fix: {fix}" in printed


@pytest.mark.parametrize(
    "more",
    [
        "--load_best_model_at_end --eval_strategy steps --eval_steps 50 --save_steps 100",
        "--load_best_model_at_end --eval_strategy epoch --save_strategy epoch",
        "--load_best_model_at_end false --eval_strategy steps --eval_steps 50 --save_steps 80",
        "--load_best_model_at_end --eval_strategy steps --eval_steps $EVERY --save_steps 80",
    ],
)
def test_arguments_that_the_trainer_accepts(more: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_trl("Qwen/Qwen3-8B", "Qwen3DecoderLayer", more)
    code, printed = check(capsys, "run.sh", "--gpus", "8xL40S")
    assert code == 0, printed


def test_a_program_in_python_is_compared_with_the_same_table(capsys: pytest.CaptureFixture[str]) -> None:
    text = """from transformers import Trainer, TrainingArguments, AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-1.7B")
args = TrainingArguments(output_dir="out", per_device_train_batch_size=1, num_train_epochs=1, learning_rate=1e-5,
    load_best_model_at_end=True, eval_strategy="steps", eval_steps=50, save_steps=80, bf16=True)
Trainer(model=model, args=args, train_dataset=data).train()
"""
    Path("train.py").write_text(text, encoding="utf-8")
    code, printed = check(capsys, "train.py", "--gpus", "8xH100")
    assert code == 1
    assert "needs save_steps=80 to be a multiple of eval_steps=50" in printed


def test_trl_does_not_pack_samples_of_a_vision_language_model(capsys: pytest.CaptureFixture[str]) -> None:
    write_trl("google/gemma-3-12b-it", "Gemma3DecoderLayer", "--packing")
    code, printed = check(capsys, "run.sh", "--gpus", "8xL40S")
    assert code == 1
    assert "--packing does not support vision-language models" in printed
    assert "fix: --packing false" in printed


SWIFT = """#!/bin/bash
ENV \\
swift sft --model Qwen/Qwen3-8B --tuner_type lora --dataset /data/instr.jsonl --torch_dtype bfloat16 \\
    --num_train_epochs 3 --per_device_train_batch_size 1 --learning_rate 1e-4 --lora_rank 16 --max_length 4096 \\
    --use_liger_kernel true --deepspeed zero3 --output_dir output MORE
"""


@pytest.mark.parametrize("attention", ["--attn_impl sdpa", "--attn_impl eager", ""])
@pytest.mark.parametrize("feature", ["packing", "padding_free"])
def test_swift_packs_with_flash_attention_only(
    feature: str, attention: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = SWIFT.replace("ENV", "NPROC_PER_NODE=8")
    Path("run.sh").write_text(text.replace("MORE", f"--{feature} true {attention}"), encoding="utf-8")
    code, printed = check(capsys, "run.sh", "--gpus", "8xL40S")
    assert code == 1
    assert f"--{feature} true needs flash attention, not {attention or '--attn_impl (not set)'}" in printed
    assert "--attn_impl flash_attn" in printed
    Path("run.sh").write_text(text.replace("MORE", f"--{feature} true --attn_impl flash_attn"), encoding="utf-8")
    code, printed = check(capsys, "run.sh", "--gpus", "8xL40S")
    assert code == 0, printed


AXOLOTL = """base_model: Qwen/Qwen3-8B
datasets:
  - path: /data/instr.jsonl
    type: chat_template
sequence_len: 16384
micro_batch_size: 1
gradient_accumulation_steps: 1
num_epochs: 1
optimizer: adamw_torch_fused
learning_rate: 1e-5
adapter: lora
lora_r: 16
lora_target_linear: true
bf16: true
gradient_checkpointing: true
"""


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("val_set_size: 0\neval_steps: 50", "val_set_size: 0 leaves nothing to evaluate every eval_steps: 50"),
        ("val_set_size: 0.02\neval_steps: 50\nevals_per_epoch: 4", "eval_steps: 50 and evals_per_epoch: 4 exclude"),
        (
            "early_stopping_patience: 3\nevals_per_epoch: 4",
            "early_stopping_patience: 3 needs eval_steps and save_steps",
        ),
        ("warmup_steps: 10\nwarmup_ratio: 0.1", "warmup_steps: 10 and warmup_ratio: 0.1 exclude each other"),
        ("save_strategy: epoch\nsave_steps: 10", "save_steps: 10 needs save_strategy: steps, not save_strategy: epoch"),
        ("streaming: true", "streaming needs max_steps"),
        ("rl: dpo\nsample_packing: true\nflash_attention: true", "sample_packing: true does not work with rl: dpo"),
        ("activation_offloading: true\ngradient_checkpointing: false", "needs gradient_checkpointing"),
    ],
)
def test_files_that_axolotl_refuses(more: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    kept = "\n".join(line for line in AXOLOTL.splitlines() if line.split(":")[0] not in more)
    Path("axo.yaml").write_text(f"{kept}\n{more}\n", encoding="utf-8")
    code, printed = check(capsys, "axo.yaml", "--gpus", "8xH100")
    assert code == 1
    assert message in printed
    assert "Axolotl refuses to start" in printed


@pytest.mark.parametrize("switch", ["eager_attention: true", "attn_implementation: eager"])
def test_eager_attention_of_axolotl_needs_the_memory_of_its_scores(
    switch: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = f"val_set_size: 0.02\nsample_packing: true\n{switch}\n"
    Path("axo.yaml").write_text(AXOLOTL + more, encoding="utf-8")
    _, printed = check(capsys, "axo.yaml", "--gpus", "8xL40S")
    assert "does not fit" in printed
    assert "eager attention stores 16384 × 16384 scores per head" in printed
    assert "packed samples attend to each other before version 0.18" in printed


def test_axolotl_without_attention_mixes_packed_samples(capsys: pytest.CaptureFixture[str]) -> None:
    Path("axo.yaml").write_text(f"{AXOLOTL}sample_packing: true\n", encoding="utf-8")
    code, printed = check(capsys, "axo.yaml", "--gpus", "8xH100")
    assert code == 0
    assert "packed samples attend to each other" in printed
    Path("axo.yaml").write_text(f"{AXOLOTL}sample_packing: true\nflash_attention: true\n", encoding="utf-8")
    code, printed = check(capsys, "axo.yaml", "--gpus", "8xH100")
    assert "attend to each other" not in printed


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("finetuning_type: full\nquantization_bit: 4", "quantization_bit: 4 needs finetuning_type: lora or oft"),
        ("finetuning_type: full\nuse_dora: true", "use_dora: true needs finetuning_type: lora"),
        ("finetuning_type: lora\ndo_eval: true", "an evaluation needs eval_dataset or val_size"),
        ("finetuning_type: lora\nstreaming: true", "streaming: true needs max_steps"),
        ("finetuning_type: lora\npure_bf16: true\ndeepspeed: ds_z3_config.json", "does not work with ZeRO-3"),
    ],
)
def test_files_that_llama_factory_refuses(more: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = "model_name_or_path: Qwen/Qwen3-8B\nstage: sft\ndo_train: true\ndataset: alpaca\ntemplate: qwen3\n"
    text += "cutoff_len: 2048\noutput_dir: out\nlearning_rate: 1e-5\nnum_train_epochs: 1\nbf16: true\n"
    Path("lf.yaml").write_text(f"{text}{more}\n", encoding="utf-8")
    code, printed = check(capsys, "lf.yaml", "--gpus", "8xH100")
    assert code == 1
    assert message in printed


@pytest.mark.parametrize(
    ("more", "message", "fix"),
    [
        ("", "early_stopping_steps: 3 compares evaluations, and eval_strategy (not set: no) has none", "without"),
        (
            "val_size: 0.1",
            "early_stopping_steps: 3 compares evaluations",
            "eval_strategy: steps eval_steps: 100 metric_for_best_model: eval_loss",
        ),
        (
            "val_size: 0.1\neval_strategy: steps\neval_steps: 50",
            "early_stopping_steps: 3 needs metric_for_best_model or load_best_model_at_end",
            "metric_for_best_model: eval_loss",
        ),
        (
            "load_best_model_at_end: true",
            "load_best_model_at_end: true needs an evaluation before every save, but nothing is evaluated",
            "load_best_model_at_end: false without early_stopping_steps",
        ),
        ("val_size: 0.1\neval_strategy: steps\nload_best_model_at_end: true", "", ""),
        ("val_size: 0.1\neval_strategy: epoch\nmetric_for_best_model: eval_loss", "", ""),
    ],
)
def test_early_stopping_needs_evaluations_and_a_metric(
    more: str, message: str, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "model_name_or_path: Qwen/Qwen3-8B\nstage: sft\nfinetuning_type: lora\ndataset: alpaca\ntemplate: qwen3\n"
    text += "cutoff_len: 2048\noutput_dir: out\nlearning_rate: 1e-4\nbf16: true\nearly_stopping_steps: 3\n"
    Path("lf.yaml").write_text(f"{text}{more}\n", encoding="utf-8")
    code, printed = check(capsys, "lf.yaml", "--gpus", "1xA100-80")
    assert code == int(bool(message)), printed
    assert message in printed
    assert f"fix: {fix}" in printed or not fix


def test_a_program_that_stops_early_needs_a_metric(capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text(STOPS_EARLY, encoding="utf-8")
    code, printed = check(capsys, "train.py", "--gpus", "1xA100-80")
    assert code == 1
    assert "early_stopping_patience=3 needs metric_for_best_model or load_best_model_at_end" in printed
    assert "fix: metric_for_best_model='eval_loss'" in printed
    best = STOPS_EARLY.replace("eval_steps=50", "eval_steps=50, load_best_model_at_end=True, save_steps=50")
    Path("train.py").write_text(best, encoding="utf-8")
    code, printed = check(capsys, "train.py", "--gpus", "1xA100-80")
    assert code == 0, printed


STOPS_EARLY = """from datasets import load_dataset
from transformers import AutoModelForCausalLM, EarlyStoppingCallback, Trainer, TrainingArguments

model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
data = load_dataset("my/data")
args = TrainingArguments(output_dir="o", bf16=True, eval_strategy="steps", eval_steps=50)
Trainer(model, args, train_dataset=data["train"], eval_dataset=data["test"],
    callbacks=[EarlyStoppingCallback(early_stopping_patience=3)]).train()
"""


@pytest.mark.parametrize(
    ("words", "fix"),
    [(("--gpus", "8xL40S"), "CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7"), (("--gpus", "4xL40S"), "NPROC_PER_NODE=4")],
)
def test_more_processes_than_visible_gpus_are_an_error(
    words: tuple[str, ...], fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = SWIFT.replace("ENV", "NPROC_PER_NODE=8 CUDA_VISIBLE_DEVICES=0,1,2,3").replace("MORE", "")
    Path("run.sh").write_text(text, encoding="utf-8")
    code, printed = check(capsys, "run.sh", *words)
    assert code == 1
    assert "NPROC_PER_NODE=8, but CUDA_VISIBLE_DEVICES=0,1,2,3 (line 2) gives 4 GPUs per node" in printed
    assert f"fix: {fix}" in printed
    fixed = fixed_text(text, "run.sh", [fix])
    assert fixed.applied == (fix,)
    Path("run.sh").write_text(fixed.text, encoding="utf-8")
    code, printed = check(capsys, "run.sh", *words)
    assert code == 0, printed


def test_accelerate_needs_a_visible_gpu_per_process(capsys: pytest.CaptureFixture[str]) -> None:
    write_trl("Qwen/Qwen3-8B", "Qwen3DecoderLayer")
    text = Path("run.sh").read_text("utf-8")
    Path("run.sh").write_text(text.replace("\n", "\nexport CUDA_VISIBLE_DEVICES=0,1\n", 1), encoding="utf-8")
    code, printed = check(capsys, "run.sh", "--gpus", "8xL40S")
    assert code == 1
    assert "num_processes=8, but CUDA_VISIBLE_DEVICES=0,1 (line 2) gives 2 GPUs per node" in printed
    assert "fix: export CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7" in printed


@pytest.mark.parametrize("steps", ['"auto"', "6"])
def test_the_fix_of_a_batch_is_in_the_file_that_sets_it(steps: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("ds.json").write_text(ZERO.replace("STEPS", steps).replace("BATCH", "96"), encoding="utf-8")
    Path("run.sh").write_text(DEEPSPEED, encoding="utf-8")
    code, printed = check(capsys, "run.sh", "--gpus", "8xL40S")
    assert code == 1
    assert "fix: --gradient_accumulation_steps 6" in printed
    Path("run.sh").write_text(DEEPSPEED.replace("accumulation_steps 4", "accumulation_steps 6"), encoding="utf-8")
    code, printed = check(capsys, "run.sh", "--gpus", "8xL40S")
    assert code == 0, printed


@pytest.mark.parametrize("prefix", ["", "fsdp_"])
def test_layers_that_axolotl_wraps_are_those_of_the_model(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    fsdp = f"""fsdp_version: 2
fsdp_config:
  auto_wrap_policy: TRANSFORMER_BASED_WRAP
  {prefix}transformer_layer_cls_to_wrap: LlamaDecoderLayer
"""
    Path("axo.yaml").write_text(AXOLOTL + fsdp, encoding="utf-8")
    code, printed = check(capsys, "axo.yaml", "--gpus", "8xH100")
    assert code == 1
    assert "the model has no layers of the class" in printed
    assert f"fsdp_config.{prefix}transformer_layer_cls_to_wrap: Qwen3DecoderLayer" in printed


def test_fixes_in_two_files_are_tried_together(capsys: pytest.CaptureFixture[str]) -> None:
    text = ZERO.replace("STEPS", '"auto"').replace("BATCH", "96")
    text = text.replace('"bf16": {"enabled": "auto"}', '"fp16": {"enabled": true},\n  "bf16": {"enabled": true}')
    Path("ds.json").write_text(text, encoding="utf-8")
    Path("run.sh").write_text(DEEPSPEED, encoding="utf-8")
    code, printed = check(capsys, "run.sh", "--gpus", "8xL40S")
    assert code == 1
    assert '"fp16": {"enabled": false}' in printed
    assert "--gradient_accumulation_steps 6" in printed
    assert "removes 3 findings" in printed  # the other format is refused with and without --bf16
    assert "leaves deepspeed.zero-warmup" in printed
