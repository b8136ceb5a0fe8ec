"""Files of the fine-tuning front ends, with the repairs applied and checked again."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.frameworks.front_ends import older_keys
from meshwright.frameworks.front_ends.describe import FRONT_ENDS, table

AXOLOTL = """base_model: NousResearch/Meta-Llama-3-8B
datasets:
  - path: mhenrichsen/alpaca_2k_test
    type: alpaca
val_set_size: 0.05
output_dir: ./outputs/lora-out
sequence_len: 4096
sample_packing: true
eval_sample_packing: false
adapter: lora
lora_r: 32
lora_alpha: 16
lora_target_linear: true
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
gradient_checkpointing: true
flash_attention: true
"""
SWIFT_MEGATRON = """NPROC_PER_NODE=8 \\
megatron sft \\
    --load Qwen3-30B-A3B-Base-mcore \\
    --dataset 'liucong/Chinese-DeepSeek-R1-Distill-data-110k-SFT' \\
    --expert_model_parallel_size 8 \\
    --micro_batch_size 1 --global_batch_size 16 --packing true \\
    --max_epochs 3 --finetune true --lr 1e-5 --no_rope_fusion true \\
    --save megatron_output/Qwen3-30B-A3B-Base --eval_interval 200 --save_interval 200 --max_length 8192 \\
    --num_workers 8 --sequence_parallel true
"""
SWIFT = """NPROC_PER_NODE=8 swift sft --model {model} --tuner_type full --dataset AI-ModelScope/alpaca-gpt4-data-zh \\
  --bf16 true --learning_rate 1e-5 --per_device_train_batch_size 1 --max_length 2048 --output_dir output
"""


def answer(meshwright: Any, name: str, text: str, *options: str) -> dict[str, Any]:
    """Return the answer of check for a file with this text."""
    Path(name).write_text(text, encoding="utf-8")
    found: dict[str, Any] = json.loads(meshwright("check", name, *options, "--json").out)
    return found


def rules_of(found: dict[str, Any], severity: str = "error") -> list[str]:
    return [one["rule"] for one in found["findings"] if one["severity"] == severity]


def repaired(text: str, removed: str, changes: list[str]) -> str:
    """Return a YAML file with printed changes: `a[0].b: value` and `without a[0].b`; a misspelled key is replaced."""
    config = yaml.safe_load(text)
    for change in [f"without {removed}", *changes]:
        path, _, value = change.removeprefix("without ").partition(": ")
        *parents, last = re.findall(r"[^.\[\]]+", path)
        place = config
        for part in parents:
            place = place[int(part)] if part.isdecimal() else place[part]
        if change.startswith("without "):
            place.pop(last, None)
        else:
            place[last] = yaml.safe_load(value)
    return yaml.safe_dump(config, sort_keys=False)


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("    type: alpaca", "    typ: alpaca", "datasets[0].typ"),
        ("    type: alpaca", "    type: alpaca\n    ds_typ: json", "datasets[0].ds_typ"),
        ("    type: alpaca", "    type: alpaca\n  - path: a/b\n    typ: alpaca", "datasets[1].typ"),
        ("num_epochs", "test_datasets:\n  - path: a/b\n    typee: alpaca\nnum_epochs", "test_datasets[0].typee"),
        ("lora_r: 32", "lora_rnk: 32", "lora_rnk"),
    ],
)
def test_the_repair_of_a_key_in_a_list_is_a_path_of_the_file(meshwright: Any, old: str, new: str, key: str) -> None:
    text = AXOLOTL.replace(old, new)
    found = answer(meshwright, "axo.yml", text, "--gpus", "8xH100")
    (error,) = (one for one in found["findings"] if one["rule"] == "key.unknown")
    changes = [*error["fix"], *((found.get("repair") or {}).get("overrides") or ())]
    assert error["field"] == key
    assert changes
    assert not [one for one in changes if "[]" in one]
    after = answer(meshwright, "axo.yml", repaired(text, key, changes), "--gpus", "8xH100")
    assert not rules_of(after)


def test_every_misspelled_item_of_a_list_is_named(meshwright: Any) -> None:
    text = AXOLOTL.replace("    type: alpaca", "    typ: alpaca\n  - path: a/b\n    typ: alpaca")
    found = answer(meshwright, "axo.yml", text, "--gpus", "8xH100")
    fields = [one["field"] for one in found["findings"] if one["rule"] == "key.unknown"]
    assert fields == ["datasets[0].typ", "datasets[1].typ"]


def test_a_command_of_the_previous_ms_swift_is_a_warning_with_the_names_of_today(meshwright: Any) -> None:
    found = answer(meshwright, "s.sh", SWIFT_MEGATRON, "--gpus", "8xH100")
    assert not rules_of(found)
    removed = {one["field"]: one for one in found["findings"] if one["rule"] == "key.removed"}
    assert all(one["severity"] == "warning" for one in removed.values())
    assert "since version 4.0, which named it --mcore_model; older versions accept --load" in removed["load"]["message"]
    assert {key: one["fix"] for key, one in removed.items()} == {
        "load": ["--mcore_model Qwen3-30B-A3B-Base-mcore"],
        "max_epochs": ["--num_train_epochs 3"],
        "no_rope_fusion": ["--apply_rope_fusion false"],
        "save": ["--output_dir megatron_output/Qwen3-30B-A3B-Base"],
        "eval_interval": ["--eval_steps 200"],
        "save_interval": ["--save_steps 200"],
        "num_workers": ["--dataloader_num_workers 8"],
    }
    renamed = SWIFT_MEGATRON
    for key, one in removed.items():
        renamed = re.sub(rf"--{key} \S+", one["fix"][0], renamed)
    assert not answer(meshwright, "s.sh", renamed, "--gpus", "8xH100")["findings"]


def test_a_command_with_names_of_two_releases_starts_with_neither(meshwright: Any) -> None:
    text = SWIFT_MEGATRON.replace("--save megatron", "--output_dir megatron")
    found = answer(meshwright, "s.sh", text, "--gpus", "8xH100")
    assert set(rules_of(found)) == {"key.removed"}
    load = next(one for one in found["findings"] if one["field"] == "load")
    assert "no version has both --load and --output_dir" in load["message"]
    assert "--mcore_model Qwen3-30B-A3B-Base-mcore" in found["repair"]["overrides"]


def test_train_type_is_a_warning_and_read(meshwright: Any) -> None:
    text = SWIFT.format(model="Qwen/Qwen2.5-7B-Instruct").replace("tuner_type full", "train_type lora")
    found = answer(meshwright, "s.sh", text, "--gpus", "8xA100-80")
    (removed,) = found["findings"]
    assert (removed["severity"], removed["fix"]) == ("warning", ["--tuner_type lora"])
    assert found["estimate"]["memory_gib"]["optimizer"] < 1


@pytest.mark.parametrize("name", FRONT_ENDS)
def test_no_removed_key_is_in_the_table_and_every_new_name_is(name: str) -> None:
    for of, removed in FRONT_ENDS[name].removed.items():
        known = table(of).owners[""]
        assert not [key for key in removed if key in known]
        assert not [new for _, new in removed.values() if new and new.removeprefix(older_keys.OPPOSITE) not in known]


@pytest.mark.parametrize(
    ("gpus", "model"), [("8xH100", "Qwen/Qwen2.5-72B-Instruct"), ("8xA100-80", "Qwen/Qwen2.5-32B-Instruct")]
)
def test_what_does_not_fit_in_bf16_is_an_error(meshwright: Any, gpus: str, model: str) -> None:
    found = answer(meshwright, "s.sh", SWIFT.format(model=model), "--gpus", gpus)
    assert "memory.state" in rules_of(found)


def test_what_fits_in_bf16_is_no_error_where_the_file_leaves_the_dtype_open(meshwright: Any) -> None:
    found = answer(meshwright, "s.sh", SWIFT.format(model="Qwen/Qwen2.5-7B-Instruct"), "--gpus", "8xH100")
    assert not [one for one in found["findings"] if one["rule"] == "memory.state"]
    assert any("are assumed to be, as in most checkpoints, in bf16" in one for one in found["notes"])


def test_a_file_that_accelerate_may_shard_is_no_error_where_sharding_would_fit(meshwright: Any, here: Path) -> None:
    text = "model_name_or_path: Qwen/Qwen2.5-14B\nstage: sft\ndo_train: true\nfinetuning_type: full\ntemplate: qwen\n"
    text += "dataset: alpaca_en_demo\ncutoff_len: 2048\nper_device_train_batch_size: 1\nlearning_rate: 1.0e-5\n"
    assert not rules_of(answer(meshwright, "f.yaml", text, "--gpus", "8xH100"))
    assert rules_of(answer(meshwright, "f.yaml", text, "--gpus", "1xH100"))
    named = text + "deepspeed: configs/mine.json\n"
    assert not rules_of(answer(meshwright, "f.yaml", named, "--gpus", "8xH100"))
    (here / "configs").mkdir()
    (here / "configs" / "mine.json").write_text('{"zero_optimization": {"stage": 1}, "train_batch_size": "auto"}')
    one = answer(meshwright, "f.yaml", named, "--gpus", "8xH100")["estimate"]["memory_gib"]
    (here / "configs" / "mine.json").write_text('{"zero_optimization": {"stage": 3}, "train_batch_size": "auto"}')
    three = answer(meshwright, "f.yaml", named, "--gpus", "8xH100")["estimate"]["memory_gib"]
    assert three["weights"] < one["weights"] / 3


MIXTRAL = """#!/bin/bash
CHECKPOINT=${1:-"checkpoints/llama3_8b"}
torchrun --nproc_per_node 8 --nnodes 4 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 \\
  --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 4096 \\
  --max-position-embeddings 4096 --position-embedding-type rope --swiglu --num-experts 8 --moe-router-topk 2 \\
  --moe-grouped-gemm --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights \\
  --micro-batch-size 1 --global-batch-size 128 --train-iters 1000 --lr 1e-4 --bf16 --expert-model-parallel-size 8 \\
  --pipeline-model-parallel-size 4 --use-distributed-optimizer --data-path /data/c4 --split 99,1,0 \\
  --tokenizer-type HuggingFaceTokenizer --tokenizer-model {tokenizer} --vocab-size 32000 \\
  --save $CHECKPOINT --load $CHECKPOINT --tensorboard-dir logs/llama3_8b --save-interval 100
"""


@pytest.mark.parametrize("tokenizer", ["/data/tok", "meta-llama/Meta-Llama-3-8B", "mistralai/Mistral-7B-v0.1"])
def test_the_folder_of_checkpoints_does_not_name_the_model(meshwright: Any, tokenizer: str) -> None:
    text = MIXTRAL.replace("{tokenizer}", tokenizer)
    found = answer(meshwright, "m.sh", text, "--gpus", "4x8xH100", "--advice")
    assert found["model"] == "mixtral_8x7b"
    assert not [one for one in found["findings"] if "llama3_8b" in one["message"] or "--num-experts 0" in one["fix"]]


def test_help_and_readme_name_all_readers(meshwright: Any) -> None:
    text = " ".join(meshwright("check", "--help").out.split())
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    for name in ("Axolotl", "LLaMA-Factory", "TRL", "ms-swift", "Hugging Face Trainer"):
        assert name in text
        assert name in readme


def test_a_program_of_trl_under_accelerate_has_the_keys_of_older_releases_too(meshwright: Any) -> None:
    text = "accelerate launch --num_processes 1 trl/scripts/sft.py --model_name_or_path Qwen/Qwen3-4B --use_peft "
    text += "--dataset_name trl-lib/Capybara --max_seq_length 2048 --output_dir out\n"
    found = answer(meshwright, "t.sh", text, "--gpus", "1xRTX4090")
    (removed,) = (one for one in found["findings"] if one["rule"] == "key.removed")
    assert (removed["severity"], removed["fix"]) == ("warning", ["--max_length 2048"])


FACTORY = """model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: alpaca_en_demo
template: llama3
cutoff_len: 2048
output_dir: saves/x
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
bf16: true
"""
TRL = """accelerate launch --num_processes 1 trl/scripts/sft.py --model_name_or_path meta-llama/Meta-Llama-3-8B \\
    --dataset_name trl-lib/Capybara --learning_rate 2.0e-4 --use_peft --lora_r 8 {bits} --num_train_epochs 1 \\
    --lora_target_modules all-linear --per_device_train_batch_size 1 --gradient_checkpointing --bf16 \\
    --max_length 2048 --output_dir out --dtype bfloat16
"""
SWIFT_LORA = SWIFT.format(model="LLM-Research/Meta-Llama-3-8B").replace("NPROC_PER_NODE=8 ", "").replace("full", "lora")
PROGRAM = """from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

bits = BitsAndBytesConfig({bits})
model = AutoModelForCausalLM.from_pretrained("meta-llama/Meta-Llama-3-8B", quantization_config=bits, dtype="bfloat16")
args = SFTConfig(output_dir="out", per_device_train_batch_size=1, max_length=2048, bf16=True, num_train_epochs=1)
adapters = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
trainer = SFTTrainer(model=model, args=args, train_dataset=load_dataset("trl-lib/Capybara"), peft_config=adapters)
trainer.train()
"""
EIGHT, FOUR, SIXTEEN, FULL = (8.2, 9.0), (5.0, 5.8), (14.9, 15.6), (29.8, 30.3)
"""GiB of the frozen weights of an 8B model: 7.0 B in layers, 1.05 B in 16 bits, and small adapters."""


@pytest.mark.parametrize(
    ("name", "text", "between"),
    [
        ("f.yaml", FACTORY, SIXTEEN),
        ("f.yaml", FACTORY + "quantization_bit: 8\n", EIGHT),
        ("f.yaml", FACTORY + "quantization_bit: 4\n", FOUR),
        ("f.yaml", FACTORY.replace("-Instruct", "-Instruct-GPTQ"), FOUR),
        ("f.yaml", FACTORY.replace("-Instruct", "-Instruct-AWQ"), FOUR),
        ("f.yaml", FACTORY.replace("-Instruct", "-Instruct-GPTQ-Int8"), EIGHT),
        ("t.sh", TRL.format(bits=""), SIXTEEN),
        ("t.sh", TRL.format(bits="").replace(" --dtype bfloat16", ""), FULL),  # TRL's default dtype is float32
        ("t.sh", TRL.format(bits="--load_in_8bit"), EIGHT),
        ("t.sh", TRL.format(bits="--load_in_4bit"), FOUR),
        ("a.yml", AXOLOTL + "load_in_8bit: true\n", EIGHT),
        ("a.yml", AXOLOTL + "load_in_4bit: true\n", SIXTEEN),
        ("a.yml", AXOLOTL.replace("adapter: lora", "adapter: qlora") + "load_in_4bit: true\n", FOUR),
        ("s.sh", SWIFT_LORA + "\n", SIXTEEN),
        ("s.sh", SWIFT_LORA.replace("--bf16", "--quant_method bnb --quant_bits 8 --bf16"), EIGHT),
        ("p.py", PROGRAM.replace("{bits}", "load_in_8bit=True"), EIGHT),
        ("p.py", PROGRAM.replace("{bits}", "load_in_4bit=True"), FOUR),
    ],
)
def test_frozen_weights_are_counted_in_the_bits_that_a_file_loads(
    meshwright: Any, name: str, text: str, between: tuple[float, float]
) -> None:
    found = answer(meshwright, name, text, "--gpus", "1xRTX4090", "--model", "llama3-8b")
    assert between[0] < found["estimate"]["memory_gib"]["weights"] < between[1]
    said = [note for note in found["notes"] if "LLM.int8" in note]
    assert bool(said) == (between == EIGHT)


@pytest.mark.parametrize(
    ("name", "text", "fix"),
    [
        ("f.yaml", FACTORY + "quantization_bit: 8\n", ["quantization_bit: 4"]),
        ("t.sh", TRL.format(bits="--load_in_8bit"), ["--load_in_8bit False", "--load_in_4bit True"]),
        ("s.sh", SWIFT_LORA.replace("--bf16", "--quant_method bnb --quant_bits 8 --bf16"), ["--quant_bits 4"]),
    ],
)
def test_fewer_bits_are_offered_in_the_keys_of_the_file(meshwright: Any, name: str, text: str, fix: list[str]) -> None:
    found = answer(meshwright, name, text, "--gpus", "1xRTX3060", "--model", "llama3-8b")
    assert fix in [one["fix"] for one in found["findings"] if one["rule"] == "memory.peak"]


def test_our_engine_refuses_8_bit_weights_and_offers_qlora(meshwright: Any) -> None:
    text = meshwright("recommend", "llama3-8b", "--goal", "lora", "--gpus", "1xRTX4090", "peft.method=lora8bit").out
    assert "it supports lora, dora, rslora, qlora (peft.method-supported)" in " ".join(text.split())
    assert "Repair   peft.method=qlora" in text


def test_an_export_loads_8_bit_weights(meshwright: Any, here: Path) -> None:
    options = (
        "peft.method=lora8bit",
        "layout.recompute=full",
        "data.seq_length=1024",
        "--gpus",
        "1xH100",
        "--out",
        "x",
    )
    assert not meshwright("export", "llama3_8b_peft_config", "--to", "accelerate", *options).code
    written = "".join(one.read_text() for one in (here / "x").iterdir() if one.suffix == ".py")
    assert "BitsAndBytesConfig(load_in_8bit=True)" in written


ROWS = {
    "messages": {"messages": [{"role": "user", "content": "Hallo"}, {"role": "assistant", "content": "Guten Tag"}]},
    "sharegpt": {"conversations": [{"from": "human", "value": "Hallo"}, {"from": "gpt", "value": "Guten Tag"}]},
    "alpaca": {"instruction": "Say hello", "input": "", "output": "Hallo"},
    "qa": {"question": "Who?", "answer": "Me"},
    "pairs": {"prompt": "Who?", "completion": "Me"},
    "text": {"text": "Es war einmal"},
    "odd": {"frage": "Wer?", "antwort": "Ich"},
}


def write_rows(kind: str, path: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("\n".join([json.dumps(ROWS[kind])] * 3) + "\n", encoding="utf-8")


def columns_error(found: dict[str, Any]) -> dict[str, Any] | None:
    return next((one for one in found["findings"] if one["rule"] == "data.columns-not-read"), None)


@pytest.mark.parametrize(
    ("rows", "kind", "fix"),
    [
        ("messages", "alpaca", ["datasets[0].type: chat_template"]),
        ("messages", "completion", ["datasets[0].type: chat_template"]),
        ("messages", "alpaca:chat", ["datasets[0].type: chat_template"]),
        ("alpaca", "chat_template", ["datasets[0].type: alpaca"]),
        ("alpaca", "alpaca_chat.load_qa", ["datasets[0].type: alpaca"]),
        ("qa", "alpaca", ["datasets[0].type: alpaca_chat.load_qa"]),
        ("text", "alpaca", ["datasets[0].type: completion"]),
        (
            "pairs",
            "alpaca",
            ["datasets[0].type.field_instruction: prompt", "datasets[0].type.field_output: completion"],
        ),
        ("odd", "alpaca", []),
        ("messages", "chat_template", None),
        ("alpaca", "alpaca", None),
        ("qa", "alpaca_chat.load_qa", None),
        ("text", "completion", None),
    ],
)
def test_a_type_of_axolotl_reads_the_columns_of_the_file(
    meshwright: Any, rows: str, kind: str, fix: list[str] | None
) -> None:
    write_rows(rows, "rows.jsonl")
    text = AXOLOTL.replace("mhenrichsen/alpaca_2k_test", "rows.jsonl").replace("type: alpaca", f"type: {kind}")
    error = columns_error(answer(meshwright, "axo.yml", text, "--gpus", "8xH100"))
    assert (error is None) == (fix is None)
    if error is None or fix is None:
        return
    assert all(f"{name}" in error["message"] for name in ROWS[rows])
    assert error["fix"] == fix
    if fix and ".field_" not in fix[0]:
        after = answer(meshwright, "axo.yml", repaired(text, "none", fix), "--gpus", "8xH100")
        assert columns_error(after) is None


def test_shares_of_chats_get_the_names_of_their_messages(meshwright: Any) -> None:
    write_rows("sharegpt", "rows.jsonl")
    text = AXOLOTL.replace("mhenrichsen/alpaca_2k_test", "rows.jsonl")
    error = columns_error(answer(meshwright, "axo.yml", text, "--gpus", "8xH100"))
    assert error is not None
    assert error["fix"][:2] == ["datasets[0].type: chat_template", "datasets[0].field_messages: conversations"]


@pytest.mark.parametrize(
    ("rows", "entry", "hint"),
    [
        ("messages", {}, '"formatting": "sharegpt", "columns": {"messages": "messages"}'),
        ("alpaca", {"formatting": "sharegpt"}, '"formatting": "alpaca"'),
        ("pairs", {}, '"columns": {"prompt": "prompt", "response": "completion"}'),
        ("alpaca", {}, None),
        ("sharegpt", {"formatting": "sharegpt"}, None),
        ("pairs", {"columns": {"prompt": "prompt", "response": "completion"}}, None),
    ],
)
def test_an_entry_of_llama_factory_reads_the_columns_of_the_file(
    meshwright: Any, rows: str, entry: dict[str, Any], hint: str | None
) -> None:
    write_rows(rows, "data/mine.jsonl")
    Path("data/dataset_info.json").write_text(json.dumps({"mine": {"file_name": "mine.jsonl", **entry}}))
    text = FACTORY.replace("alpaca_en_demo", "mine")
    error = columns_error(answer(meshwright, "f.yaml", text, "--gpus", "1xH100"))
    assert (error is None) == (hint is None)
    assert error is None or hint is None or hint in error["message"]


@pytest.mark.parametrize(("rows", "is_read"), [("alpaca", False), ("odd", False), ("messages", True), ("pairs", True)])
def test_trl_reads_messages_or_prompts_with_completions_or_text(meshwright: Any, rows: str, is_read: bool) -> None:
    write_rows(rows, "rows.jsonl")
    text = "model_name_or_path: Qwen/Qwen3-4B\ndatasets:\n  - path: json\n    data_files: rows.jsonl\nuse_peft: true\n"
    text += "learning_rate: 2.0e-4\nmax_length: 2048\nper_device_train_batch_size: 1\noutput_dir: out\n"
    error = columns_error(answer(meshwright, "t.yaml", text, "--gpus", "1xH100"))
    assert (error is None) == is_read


@pytest.mark.parametrize(("rows", "is_read"), [("odd", False), ("messages", True), ("alpaca", True), ("qa", True)])
def test_ms_swift_maps_the_usual_columns(meshwright: Any, rows: str, is_read: bool) -> None:
    write_rows(rows, "rows.jsonl")
    text = SWIFT_LORA.replace("AI-ModelScope/alpaca-gpt4-data-zh", "rows.jsonl")
    error = columns_error(answer(meshwright, "s.sh", text, "--gpus", "1xH100"))
    assert (error is None) == is_read
    assert error is None or error["fix"] == ["""--columns '{"antwort": "response"}'"""]
