"""Flags and files that disagree, fixes in the front end's own keys, and headlines."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

import meshwright as mw
from meshwright.engine.data.corpus_reader import blocks

CONFIG = """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_offload_params: true
  fsdp_sharding_strategy: FULL_SHARD
mixed_precision: {kind}
num_machines: 1
num_processes: 4
"""
SCRIPT = """accelerate launch --config_file fsdp.yaml run_sft.py --model_name_or_path Qwen/Qwen3-8B \\
  --per_device_train_batch_size 2 --max_seq_length 2048 {flag} --output_dir out
"""


@pytest.mark.parametrize(
    ("kind", "flag", "computed"),
    [
        ("fp16", "--bf16 True", "bf16"),
        ("bf16", "--fp16 True", "fp16"),
        ("fp16", "--bf16", "bf16"),
        ("bf16", "--bf16 False", "bf16"),
        ("'no'", "--bf16 True", "bf16"),
        ("bf16", "--bf16 True", "bf16"),
    ],
)
def test_trainer_flag_replaces_mixed_precision_of_accelerate(
    kind: str, flag: str, computed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fsdp.yaml").write_text(CONFIG.format(kind=kind))
    Path("run.sh").write_text(SCRIPT.format(flag=flag))
    found = mw.check("run.sh", gpus="4xA100")
    assert found.recipe is not None
    assert found.recipe.precision.compute == computed
    overwritten = [one for one in found.findings if one.rule == "key.overwritten"]
    assert len(overwritten) == (kind in ("fp16", "bf16") and kind != computed)
    for one in overwritten:
        assert one.file.endswith("fsdp.yaml")
        assert one.fix == (f"mixed_precision: {computed}",)
        assert "run.sh:2" in one.message


AXOLOTL = """base_model: {model}
datasets:
  - path: medqa.csv
    type: alpaca
sequence_len: {length}
gradient_accumulation_steps: 4
micro_batch_size: {micro}
num_epochs: 2
optimizer: adamw_torch_fused
learning_rate: 2e-5
bf16: auto
gradient_checkpointing: true
"""
AXOLOTL_SHARDED = f"""{AXOLOTL}fsdp_version: 2
fsdp_config:
  offload_params: false
  auto_wrap_policy: TRANSFORMER_BASED_WRAP
"""
FACTORY = """model_name_or_path: {model}
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: medqa
template: qwen3
cutoff_len: {length}
output_dir: saves
per_device_train_batch_size: {micro}
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 2.0
bf16: true
"""
SWIFT_FILE = """model: {model}
tuner_type: lora
dataset: medqa.jsonl
learning_rate: 1.0e-4
max_length: {length}
per_device_train_batch_size: {micro}
gradient_accumulation_steps: 8
torch_dtype: bfloat16
"""
SWIFT_COMMAND = """NPROC_PER_NODE=4 swift sft --model {model} --tuner_type lora --dataset medqa.jsonl \\
  --learning_rate 1e-4 --max_length {length} --per_device_train_batch_size {micro} \\
  --gradient_accumulation_steps 8 --torch_dtype bfloat16
"""
TRL_FILE = """model_name_or_path: {model}
dataset_name: medqa
max_length: {length}
per_device_train_batch_size: {micro}
gradient_accumulation_steps: 8
use_peft: true
bf16: true
"""
JOBS = {
    "gemma.yaml": (AXOLOTL_SHARDED, "google/gemma-3-4b-it", 2048, 2),
    "long.yaml": (AXOLOTL_SHARDED, "Qwen/Qwen3-8B", 8192, 4),
    "lora.yaml": (f"{AXOLOTL}adapter: lora\nlora_r: 16\nlora_target_linear: true\n", "Qwen/Qwen3-0.6B", 4096, 8),
    "plugin.yaml": (f"{AXOLOTL_SHARDED}plugins:\n  - my.Plugin\n", "google/gemma-3-4b-it", 2048, 2),
    "factory.yaml": (FACTORY, "Qwen/Qwen3-0.6B", 4096, 8),
    "swift.yaml": (SWIFT_FILE, "Qwen/Qwen3-0.6B", 4096, 8),
    "swift.sh": (SWIFT_COMMAND, "Qwen/Qwen3-0.6B", 4096, 8),
    "trl.yaml": (TRL_FILE, "Qwen/Qwen3-0.6B", 4096, 8),
    "factory_long.yaml": (FACTORY, "Qwen/Qwen3-0.6B", 16384, 1),
    "swift_long.sh": (SWIFT_COMMAND, "Qwen/Qwen3-0.6B", 16384, 1),
    "trl_long.yaml": (TRL_FILE, "Qwen/Qwen3-0.6B", 16384, 1),
}


def _written(text: str, fixes: tuple[str, ...], is_command: bool) -> str:
    """Return a file or command with every line or flag of a fix in the place of its earlier value."""
    if is_command:
        for flag, value in (one.split(" ") for one in fixes):
            text = re.sub(rf"{flag} \S+", "", text).rstrip() + f" {flag} {value}\n"
        return text
    content = yaml.safe_load(text)
    for one in fixes:
        for key, value in yaml.safe_load(one).items():
            content[key] = {**content.get(key, {}), **value} if isinstance(value, dict) else value
    return yaml.safe_dump(content)


@pytest.mark.parametrize("name", JOBS)
def test_fixes_for_front_ends_are_in_their_own_keys_and_work(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    template, model, length, micro = JOBS[name]
    text = template.format(model=model, length=length, micro=micro)
    Path(name).write_text(text)
    before = mw.check(name, gpus="4x3090", advice=True)
    assert any(one.rule.startswith("memory.") for one in before.findings)
    for one in (found for found in before.findings if found.fix):
        Path(name).write_text(_written(text, one.fix, name.endswith(".sh")))
        after = mw.check(name, gpus="4x3090", advice=True)
        new = {found.rule for found in after.findings} - {found.rule for found in before.findings}
        assert one.rule not in {found.rule for found in after.findings}, one.fix
        assert not {"key.unknown", "key.unused", "value.invalid"} & new, after.findings


@pytest.mark.parametrize(
    ("name", "typed", "own"),
    [
        ("gemma.yaml", "use_liger_kernel=True", "liger_fused_linear_cross_entropy=True"),
        ("gemma.yaml", "per_device_train_batch_size=1", "micro_batch_size=1"),
        ("factory.yaml", "max_seq_length=512", "cutoff_len=512"),
    ],
)
def test_overrides_of_front_ends_are_checked_with_their_tables(
    name: str, typed: str, own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    template, model, length, micro = JOBS[name]
    Path(name).write_text(template.format(model=model, length=length, micro=micro))
    before = mw.check(name, gpus="4x3090")
    with pytest.raises(mw.InputError, match=own.split("=")[0]) as refused:
        mw.check(name, gpus="4x3090", overrides=[typed])
    fix = refused.value.fix[0].split(" ")
    assert own in fix
    after = mw.check(name, gpus="4x3090", overrides=fix)
    assert not [one for one in after.findings if one.rule.startswith(("key.", "value."))]
    assert before.estimate is not None
    assert after.estimate is not None
    assert after.estimate.memory.total < before.estimate.memory.total


@pytest.mark.parametrize("header", ["Question,Answer ", " Question,Antwort", "prompt,response "])
def test_column_names_with_spaces_around_them_are_found(
    meshwright: Any, header: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.csv").write_text(f"{header}\nWhat is insulin used for?,It lowers the blood sugar.\n")
    command = ["samples", "qwen3_600m_sft_config", "--dataset", "bad.csv", "--count", "1", "data.tokenizer=bytes"]
    found = meshwright(*command)
    if found.code:  # the fix is pasted as it is printed
        fix = next(line for line in found.err.splitlines() if line.startswith("fix:")).removeprefix("fix:")
        found = meshwright(*command, *shlex.split(fix))
    assert found.code == 0, found.err
    assert "blood sugar" in found.out


def test_a_text_column_with_spaces_around_its_name_is_found(tmp_path: Path) -> None:
    file = tmp_path / "texts.csv"
    file.write_text("id, text\n1,It lowers the blood sugar.\n")
    assert [one.data for one in blocks([file], "text")] == [["It lowers the blood sugar."]]


ZERO2 = """{
  "bf16": {"enabled": "auto"},
  "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
  "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
  "gradient_accumulation_steps": "auto",
  "train_micro_batch_size_per_gpu": "auto"
}"""
STATED = ["data.seq_length=1024", "layout.recompute=full", "layout.micro_batch_size=1", "precision.reduce=fp32"]


@pytest.mark.parametrize(
    ("name", "words", "expected"),
    [
        ("gemma.yaml", [], "within the error of the estimate"),
        ("ds.json", ["--model", "Qwen/Qwen3-8B", *STATED], "it may not fit"),
    ],
)
def test_headline_does_not_contradict_the_memory(
    meshwright: Any, name: str, words: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    template, model, length, micro = JOBS["gemma.yaml"]
    Path("gemma.yaml").write_text(template.format(model=model, length=length, micro=micro))
    Path("ds.json").write_text(ZERO2)
    found = meshwright("check", name, "--gpus", "4x3090", *words)
    headline = found.out.splitlines()[0]
    assert found.code == 0, found.err  # an estimate within its error, or of an assumed value, is no error
    assert re.search(r": no errors; memory: (may|probably does|does) not fit$", headline)
    assert expected in " ".join(found.out.split())
    assert meshwright("check", name, "--gpus", "4x3090", "--fail-on", "warning", *words).code == 1


def test_full_name_of_bitsandbytes_has_a_fix_and_unsloth_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = FACTORY.format(model="Qwen/Qwen3-8B", length=2048, micro=1)
    Path("lf.yaml").write_text(f"{text}quantization_bit: 4\nquantization_method: bitsandbytes\n")
    found = mw.check("lf.yaml", gpus="1x3090").findings
    assert ("quantization_method: bnb",) in [one.fix for one in found]
    Path("u.py").write_text(
        "from unsloth import FastLanguageModel\nfrom trl import SFTTrainer, SFTConfig\n"
        "model, tokenizer = FastLanguageModel.from_pretrained(model_name='unsloth/Qwen3-8B', max_seq_length=2048)\n"
        "SFTTrainer(model=model, args=SFTConfig(per_device_train_batch_size=2, output_dir='out'))\n"
    )
    assert any("Unsloth's own kernels" in note for note in mw.check("u.py", gpus="1x3090").notes)
