"""LLaMA-Factory, TRL and Unsloth files: refused keys, dtypes of frozen weights, templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright.similar import misspelled

FACTORY = """\
model_name_or_path: google/gemma-3-4b-it
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: support_chats
template: gemma3
cutoff_len: 2048
output_dir: saves
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
bf16: true
"""


def test_keys_that_llama_factory_refuses_are_errors_with_the_key_that_is_meant(meshwright: Any, tmp_path: Path) -> None:
    file = tmp_path / "lf.yaml"
    file.write_text(f"{FACTORY}lora_alfa: 16\n", encoding="utf-8")
    answer = meshwright("check", str(file), "--gpus", "2x4090")
    assert answer.code == 1
    assert "LLaMA-Factory has no lora_alfa; did you mean lora_alpha?" in answer.out
    assert "fix: lora_alpha: 16" in answer.out


@pytest.mark.parametrize(("typed", "meant"), [("lora_alfa", "lora_alpha"), ("lora_alpa", "lora_alpha")])
def test_a_key_spelled_by_its_sound_is_a_typing_error(typed: str, meant: str) -> None:
    assert misspelled(typed, ("lora_alpha", "lora_rank", "lora_dropout")) == [meant]


MISTRAL = "mistralai/Mistral-7B-Instruct-v0.3"
TRL = """\
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer
trainer = SFTTrainer(
    model={model},
    args=SFTConfig(output_dir="out", num_train_epochs=3, per_device_train_batch_size=2, gradient_accumulation_steps=8,
                   learning_rate=2e-4, bf16=True, max_length=2048, {options}assistant_only_loss=True),
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
)
trainer.train()
"""
LOADED = f'AutoModelForCausalLM.from_pretrained("{MISTRAL}", {{0}})'


@pytest.mark.parametrize(
    ("model", "options", "fix"),
    [
        (LOADED.format("torch_dtype=torch.float32"), "", "torch_dtype='bfloat16'"),
        (f'"{MISTRAL}"', 'model_init_kwargs={"dtype": "float32"}, ', "dtype='bfloat16'"),
        (f'"{MISTRAL}"', "model_init_kwargs=dict(dtype=torch.float32), ", "dtype='bfloat16'"),
        (f'"{MISTRAL}"', "", "model_init_kwargs={'dtype': 'bfloat16'}"),
        (LOADED.format('dtype="bfloat16"'), "", ""),
        (f'"{MISTRAL}"', 'model_init_kwargs={"dtype": "auto"}, ', ""),
        (f'"{MISTRAL}"', 'model_init_kwargs={"dtype": torch.bfloat16}, ', ""),
    ],
)
def test_frozen_weights_are_counted_in_the_dtype_that_a_program_loads_them_in(
    model: str, options: str, fix: str, tmp_path: Path
) -> None:
    file = tmp_path / "sft.py"
    file.write_text(TRL.format(model=model, options=options), encoding="utf-8")
    found = mw.check(str(file), gpus="1x4090")
    assert found.estimate is not None
    assert found.estimate.memory.weights == pytest.approx(27.2 if fix else 13.7, abs=0.3)
    assert [one.fix for one in found.findings if one.rule == "memory.state"] == ([(fix,)] if fix else [])


SWIFT = "swift sft --model {model} --dataset chats.jsonl --tuner_type lora --torch_dtype {dtype} --max_length 2048"
FRONT_ENDS = {
    "trl.yaml": f"model_name_or_path: {MISTRAL}\ndataset_name: a/b\nuse_peft: true\nlearning_rate: 1e-4\nbf16: true\n"
    "per_device_train_batch_size: 1\nmax_length: 2048\noutput_dir: out\n",
    "trl.sh": f"trl sft --model_name_or_path {MISTRAL} --dataset_name a/b --use_peft --learning_rate 1e-4 "
    "--per_device_train_batch_size 1 --max_length 2048 --output_dir out\n",
    "swift.sh": f"{SWIFT} --per_device_train_batch_size 1 --learning_rate 1e-4 --output_dir out\n".format(
        model=MISTRAL, dtype="float32"
    ),
    "axolotl.yaml": f"base_model: {MISTRAL}\ndatasets:\n  - path: a/b\n    type: chat_template\nadapter: lora\n"
    "lora_r: 8\nlora_alpha: 16\nlora_target_linear: true\nsequence_len: 2048\nmicro_batch_size: 1\n"
    "gradient_accumulation_steps: 8\nnum_epochs: 3\nlearning_rate: 1e-4\noutput_dir: out\nbf16: false\n"
    "gradient_checkpointing: true\n",
}


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("trl.yaml", ("dtype: bfloat16",)),
        ("trl.sh", ("--dtype bfloat16",)),
        ("swift.sh", ("--torch_dtype bfloat16",)),
        ("axolotl.yaml", ("adapter: qlora", "load_in_4bit: true")),
    ],
)
def test_front_ends_that_load_frozen_weights_in_fp32_do_not_fit(
    name: str, fix: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_text(FRONT_ENDS[name], encoding="utf-8")
    found = mw.check(str(file), gpus="1x4090")
    assert found.estimate is not None
    assert found.estimate.memory.weights > 27
    assert [one.fix for one in found.findings if one.rule == "memory.state"] == [fix]


def test_llama_factory_loads_frozen_weights_in_the_dtype_of_the_computation(tmp_path: Path) -> None:
    file = tmp_path / "lf.yaml"
    file.write_text(FACTORY, encoding="utf-8")
    found = mw.check(str(file), gpus="1x4090")
    assert found.estimate is not None
    assert found.estimate.memory.weights == pytest.approx(8.1, abs=0.2)


@pytest.mark.parametrize(
    ("model", "template", "rule", "severity", "fix"),
    [
        ("google/gemma-3-4b-it", "llama3", "data.template-of-another-family", "warning", "template: gemma3"),
        ("meta-llama/Llama-3.1-8B-Instruct", "qwen", "data.template-of-another-family", "warning", "template: llama3"),
        (
            "unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit",
            "qwen",
            "data.template-of-another-family",
            "warning",
            "template: llama3",
        ),
        ("meta-llama/Llama-3.2-3B-Instruct", "llama3", "", "", ""),
        ("/models/Qwen2.5-7B-Instruct/", "gemma", "data.template-of-another-family", "warning", "template: qwen"),
        ("google/gemma-3-4b-it", "gemma-3", "value.invalid", "error", "template: gemma3"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "lama3", "value.invalid", "error", "template: llama3"),
        ("Qwen/Qwen2.5-7B-Instruct", "chatml", "", "", ""),
        ("google/gemma-3-4b-it", "gemma", "", "", ""),
        ("google/gemma-3-4b-it", "alpaca", "", "", ""),
        ("Qwen/Qwen2.5-7B", "llama3", "", "", ""),  # a base model has no format of its own
    ],
)
def test_the_chat_template_of_another_family_is_named(
    model: str, template: str, rule: str, severity: str, fix: str, tmp_path: Path
) -> None:
    file = tmp_path / "lf.yaml"
    text = FACTORY.replace("template: gemma3", f"template: {template}").replace("google/gemma-3-4b-it", model)
    file.write_text(text, encoding="utf-8")
    found = [one for one in mw.check(str(file), gpus="2x4090").findings if one.field == "template"]
    assert [(one.rule, one.severity, one.fix) for one in found] == ([(rule, severity, (fix,))] if rule else [])


def test_fp16_of_a_family_that_overflows_is_a_warning_with_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "lf.yaml"
    file.write_text(FACTORY.replace("bf16: true", "fp16: true"), encoding="utf-8")
    found = [one for one in mw.check(str(file), gpus="2x4090").findings if one.rule == "precision.fp16-overflow"]
    assert [one.severity for one in found] == ["warning"]
    assert "65,504" in found[0].message
    assert "bf16: true" in " ".join(found[0].fix)
    file.write_text(FACTORY.replace("bf16: true", "fp16: true").replace("google/gemma-3-4b-it", "Qwen/Qwen3-4B"))
    assert not [one for one in mw.check(str(file), gpus="2x4090").findings if one.rule == "precision.fp16-overflow"]


UNSLOTH = """\
from unsloth import FastLanguageModel
from unsloth.chat_templates import train_on_responses_only
from trl import SFTConfig, SFTTrainer
model, tokenizer = FastLanguageModel.from_pretrained("{model}", max_seq_length=2048, dtype={dtype}, load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=16, lora_alpha=16, target_modules=["q_proj", "v_proj"])
trainer = SFTTrainer(model=model, args=SFTConfig(per_device_train_batch_size=1, max_steps=60, {flags}, output_dir="o"))
{last}trainer.train()
"""
LLAMA = "unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit"


@pytest.mark.parametrize(
    ("dtype", "flags", "gpus", "fix"),
    [
        ("None", "fp16=True", "1x4090", ("fp16=False", "bf16=True")),
        ("None", "bf16=True", "1x4090", ()),
        ("None", "bf16=True", "1xV100", ("bf16=False", "fp16=True")),
        ("None", "fp16=True", "1xV100", ()),
        ("torch.float16", "bf16=True", "1x4090", ("bf16=False", "fp16=True")),
        ("torch.float16", "fp16=True", "1x4090", ()),
        ("None", "fp16=not is_bfloat16_supported(), bf16=is_bfloat16_supported()", "1x4090", ()),
    ],
)
def test_unsloth_refuses_another_precision_than_that_of_the_loaded_model(
    dtype: str, flags: str, gpus: str, fix: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / "train.py"
    file.write_text(UNSLOTH.format(model=LLAMA, dtype=dtype, flags=flags, last=""), encoding="utf-8")
    found = [one for one in mw.check(str(file), gpus=gpus).findings if one.rule == "accelerate.unsloth-precision"]
    assert [(one.severity, one.fix) for one in found] == ([("error", fix)] if fix else [])


def test_unsloth_message_is_explained(meshwright: Any) -> None:
    answer = meshwright(
        "explain", "TypeError: Unsloth: Model is in bfloat16 precision but you want to use float16 precision"
    )
    assert answer.code == 0
    assert "Unsloth's trainer computes in the format in which the model was loaded" in answer.out


def test_train_on_responses_only_is_read(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    masks = 'trainer = train_on_responses_only(trainer, instruction_part="a", response_part="b")\n'
    for last, counted in ((masks, "answers"), ("", "all")):
        file.write_text(UNSLOTH.format(model=LLAMA, dtype="None", flags="bf16=True", last=last), encoding="utf-8")
        found = mw.check(str(file), gpus="1x4090")
        assert found.recipe is not None
        assert found.recipe.data.train_on == counted
        assert any("counts every token" in note for note in found.notes) == (counted == "all")


def test_the_fix_with_partial_state_names_its_import(tmp_path: Path) -> None:
    file = tmp_path / "sft.py"
    loaded = LOADED.format('device_map="auto", load_in_4bit=True')
    file.write_text(TRL.format(model=loaded, options=""), encoding="utf-8")
    found = [one for one in mw.check(str(file), gpus="2x4090").findings if one.rule == "accelerate.device-map"]
    assert "`from accelerate import PartialState`" in found[0].message


LOG = """\
***** Running training *****
  Num examples = 2,000
  Num Epochs = 3
  Total train batch size (w. parallel, distributed & accumulation) = 32
  Gradient Accumulation steps = 8
  Total optimization steps = 189
"""
BLOWN_UP = (
    (2.4121, "1.9021"), (1.8012, "1.4010"), (1.6003, "2.9021"), (3.9121, "48.221"), (7.8312, "311.02"),
    (9.4120, "nan"), (0.0, "nan"), (0.0, "nan"),
)  # fmt: skip


def _log(lines: tuple[tuple[float, str], ...]) -> str:
    rows = (
        f"{{'loss': {loss}, 'grad_norm': {norm}, 'learning_rate': 0.002, 'epoch': {0.16 * at:.2f}}}"
        for at, (loss, norm) in enumerate(lines, 1)
    )
    return LOG + "\n".join(rows) + "\n"


def test_a_run_that_blew_up_gets_the_rate_of_check_first_and_its_climb_is_found(tmp_path: Path) -> None:
    program, log = tmp_path / "sft.py", tmp_path / "run.log"
    text = TRL.format(model=LOADED.format('dtype="bfloat16"'), options="").replace("2e-4", "2e-3")
    program.write_text(text, encoding="utf-8")
    log.write_text(_log(BLOWN_UP), encoding="utf-8")
    advised = [
        one.fix for one in mw.check(str(program), gpus="2x4090", advice=True).findings if "learning_rate" in one.rule
    ]
    assert advised == [("learning_rate=0.0001",)]
    found = {one.id: one for one in mw.diagnose(str(log), recipe=str(program), gpus="2x4090").findings}
    assert found["loss.not-a-number"].remedies[0].try_ == ("optimizer.lr=0.0001",)
    assert "rising since step 30" in found["loss.not-a-number"].message
    assert "the loss rose from 1.6 around step 30 to 9.412 in step 60" in found["loss.diverging"].message


def test_a_short_log_that_bounces_does_not_diverge(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    losses = (2.4, 1.8, 1.6, 3.9, 1.7, 1.9)
    log.write_text(_log(tuple((loss, "1.0") for loss in losses)), encoding="utf-8")
    assert "loss.diverging" not in {one.id for one in mw.diagnose(str(log)).findings}


def test_recommend_for_a_small_dataset_suggests_a_batch_with_more_updates(
    meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    row = '{"messages": [{"role": "user", "content": "%s"}, {"role": "assistant", "content": "%s"}]}\n'
    Path("chats.jsonl").write_text(row % ("why " * 100, "so " * 200) * 2000, encoding="utf-8")
    answer = meshwright("recommend", "mistral-7b", "--gpus", "2xRTX4090", "--goal", "lora", "--dataset", "chats.jsonl")
    (line,) = (one for one in answer.out.splitlines() if "more updates of your data" in one)
    assert "train.global_batch_size=8 train.epochs=3" in line
    assert "128 samples per step leave only" in line


def test_check_of_a_front_end_file_counts_the_dataset_that_is_typed(
    meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    row = '{"messages": [{"role": "user", "content": "%s"}, {"role": "assistant", "content": "%s"}]}\n'
    Path("chats.jsonl").write_text(row % ("why " * 100, "so " * 200) * 640, encoding="utf-8")
    text = FACTORY.replace("num_train_epochs: 3.0", "num_train_epochs: 30.0\nmax_samples: 100\nsave_steps: 500")
    Path("lf.yaml").write_text(text.replace("cutoff_len: 2048", "cutoff_len: 32768"), encoding="utf-8")
    answer = meshwright("check", "lf.yaml", "--gpus", "2x4090", "--dataset", "chats.jsonl")
    assert "(max_samples leaves 100 samples): 210 steps of 16 samples;" in answer.out  # seven steps in each epoch
    assert "; save_steps=500 is never reached: nothing is saved before the end" in answer.out
    assert "more than 5 epochs mostly memorize the data, 3 are usual" in answer.out
    assert "data.seq_length=512 estimates this data" in answer.out
    assert "of 16 samples" not in meshwright("check", "lf.yaml", "--gpus", "2x4090").out
    Path("lf.yaml").write_text(f"{text}\nval_size: 0.1\neval_strategy: steps\neval_steps: 200\n", encoding="utf-8")
    both = meshwright("check", "lf.yaml", "--gpus", "2x4090", "--dataset", "chats.jsonl").out
    assert "(max_samples, val_size leave 90 samples): 180 steps of 16 samples" in both
    assert "; eval_steps=200 and save_steps=500 are never reached: nothing is validated or saved before" in both
    Path("lf.yaml").write_text(text.replace("max_samples: 100", ""), encoding="utf-8")
    all_rows = meshwright("check", "lf.yaml", "--gpus", "2x4090", "--dataset", "chats.jsonl").out
    assert "1,200 steps of 16 samples" in all_rows
    assert "never reached" not in all_rows
    command = "swift sft --model Qwen/Qwen3-8B --train_type lora --dataset x --split_dataset_ratio 0.1 --output_dir o "
    command += "--save_steps 999 --max_length 2048 --gradient_accumulation_steps 8 --num_train_epochs 1\n"
    Path("run.sh").write_text(command, encoding="utf-8")
    script = meshwright("check", "run.sh", "--gpus", "1xA100-80", "--dataset", "chats.jsonl").out
    assert "(split_dataset_ratio leaves 576 samples): 72 steps of 8 samples; save_steps=999 is never reached" in script


@pytest.mark.parametrize(("has_gpu", "is_kept"), [(False, False), (True, True)])
def test_tiny_runs_eagerly_on_a_cpu_though_the_command_of_a_plan_compiles(
    has_gpu: bool, is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from meshwright.api import training
    from meshwright.engine import train

    started: list[dict[str, Any]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "train", lambda recipe, spec, pinned: started.append(dict(pinned)))
    monkeypatch.setattr(training, "_has_gpu", lambda: has_gpu)
    mw.train("llama3_8b_peft_config", tiny=True, overrides=["kernels.compile=true"])
    assert ("kernels.compile" in started[0]) == is_kept


TINY_4090 = "1x4090"
NAMED = TRL.replace("{model}", f'"{MISTRAL}"')
FOUR_BITS = 'BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="bfloat16")'
IN_16_BITS = 'model_init_kwargs={"dtype": "bfloat16", "attn_implementation": "sdpa"}, '


def test_the_fix_for_4_bit_weights_of_a_model_given_by_name_works_as_typed(tmp_path: Path) -> None:
    file = tmp_path / "sft.py"
    text = NAMED.replace(MISTRAL, "Qwen/Qwen3-8B").replace("batch_size=2", "batch_size=1")
    file.write_text(text.format(options=IN_16_BITS), encoding="utf-8")
    (fix,) = next(one.fix for one in mw.check(str(file), gpus=TINY_4090).findings if one.rule.startswith("memory."))
    line, _, argument = fix.partition("; ")
    assert argument == (
        "model_init_kwargs={'dtype': 'bfloat16', 'attn_implementation': 'sdpa', 'quantization_config': "
        + FOUR_BITS
        + "}"
    )
    file.write_text(f"{line}\n{text.replace('{options}', argument + ', ')}", encoding="utf-8")
    found = mw.check(str(file), gpus=TINY_4090)
    assert found.estimate is not None
    assert 5 < found.estimate.memory.weights < 7
    assert not [one for one in found.findings if one.rule.startswith(("memory.", "key."))]


@pytest.mark.parametrize(
    ("options", "rule", "severity"),
    [
        ("load_in_4bit=True, ", "key.unknown", "error"),  # of no release
        ('model_init_kwargs={"load_in_4bit": True}, ', "key.removed", "warning"),  # which transformers 4 accepts
        ('model_init_kwargs={"load_in_4bit": True}, warmup_steps=0.03, ', "key.removed", "error"),
        ('model_init_kwargs={"quantization_config": {"load_in_4bit": True}}, ', "", ""),
    ],
)
def test_bits_that_no_constructor_accepts_are_reported_where_they_stand(
    options: str, rule: str, severity: str, tmp_path: Path
) -> None:
    file = tmp_path / "sft.py"
    file.write_text(NAMED.format(options=options), encoding="utf-8")
    found = mw.check(str(file), gpus=TINY_4090)
    assert found.estimate is not None
    assert found.estimate.memory.weights < 7
    reported = [one for one in found.findings if one.field == "load_in_4bit"]
    assert [(one.rule, one.severity) for one in reported] == ([(rule, severity)] if rule else [])
    assert all(f"'quantization_config': {FOUR_BITS}" in one.fix[0] for one in reported)


def test_the_fix_for_a_model_that_the_program_loads_is_an_argument_of_from_pretrained(tmp_path: Path) -> None:
    file = tmp_path / "sft.py"
    loaded = LOADED.replace(MISTRAL, "Qwen/Qwen3-14B").format('dtype="bfloat16"{bits}')
    text = TRL.replace("{model}", loaded.replace("{bits}", "")).replace("{options}", "")
    file.write_text(text, encoding="utf-8")
    fixes = [one.fix for one in mw.check(str(file), gpus=TINY_4090).findings if one.rule == "memory.state"]
    assert fixes == [(f"from transformers import BitsAndBytesConfig; quantization_config={FOUR_BITS}",)]
    file.write_text(text.replace('dtype="bfloat16"', 'dtype="bfloat16", load_in_4bit=True'), encoding="utf-8")
    (found,) = [one for one in mw.check(str(file), gpus=TINY_4090).findings if one.field == "load_in_4bit"]
    assert (found.rule, found.severity, found.fix) == ("key.removed", "warning", fixes[0])


def test_what_a_program_needs_is_counted_for_the_program_and_is_not_the_cluster_that_was_given(
    meshwright: Any, tmp_path: Path
) -> None:
    file = tmp_path / "sft.py"
    file.write_text(NAMED.format(options="").replace("assistant_only_loss=True", "seed=1"), encoding="utf-8")
    answer = meshwright("recommend", str(file), "--gpus", "1xRTX4090")
    assert answer.code == 1
    assert "precision.frozen=same  removes the finding" in answer.out  # weights are loaded in fp32: 27 GiB
    assert "1xRTX4090 would fit" not in answer.out
    assert "no count up to 16,384 fits this training unchanged: see Repair" in answer.out
