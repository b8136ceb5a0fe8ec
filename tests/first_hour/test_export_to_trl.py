"""From a recipe to TRL, and DeepSpeed configs that front ends name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

PAIR = {"prompt": "Ticket 1: my printer does not print.", "completion": " Please restart it."}
EXPORT = ("export", "qwen25_7b_peft_config", "--to", "trl")


def rows(name: str, row: dict[str, Any]) -> None:
    """Write a file of data."""
    Path(name).write_text(f"{json.dumps(row)}\n" * 4)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return what a command prints."""
    from meshwright.cli.run import run as start

    capsys.readouterr()
    with pytest.raises(SystemExit):
        start(list(words))
    found = capsys.readouterr()
    return found.out + found.err


@pytest.mark.parametrize(
    ("row", "words", "written", "absent"),
    [
        (PAIR, (), "completion_only_loss=True", "assistant_only_loss"),
        (PAIR, ("data.train_on=all",), "completion_only_loss=False", "assistant_only_loss"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, (),
            "assistant_only_loss=True", "completion_only_loss"),
        ({"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]}, (),
            "assistant_only_loss=True", "completion_only_loss"),
        ({"text": "a text"}, (), "texts without answers", "only_loss"),
        (None, (), "assistant_only_loss=True", "completion_only_loss"),
    ],
)  # fmt: skip
def test_the_loss_of_an_export_to_trl_fits_the_rows(
    capsys: pytest.CaptureFixture[str], row: dict[str, Any] | None, words: tuple[str, ...], written: str, absent: str
) -> None:
    if row is not None:
        rows("tickets.jsonl", row)
    shown = run(capsys, *EXPORT, "data.dataset=tickets.jsonl", *words)
    assert written in shown
    assert absent not in shown


PROGRAM = """from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

data = load_dataset("json", data_files="tickets.jsonl", split="train"){changed}
args = SFTConfig(output_dir="out", per_device_train_batch_size=1, max_length=2048, assistant_only_loss=True)
trainer = SFTTrainer(model="Qwen/Qwen2.5-7B-Instruct", args=args, train_dataset=data, peft_config=LoraConfig(r=16))
trainer.train()
"""
CONFIG = """model_name_or_path: Qwen/Qwen2.5-7B-Instruct
datasets:
  - path: json
    data_files: tickets.jsonl
use_peft: true
max_length: 2048
assistant_only_loss: true
per_device_train_batch_size: 1
output_dir: out
"""
REFUSED = "but the rows of the data file are texts"


@pytest.mark.parametrize(("name", "text"), [("train.py", PROGRAM.format(changed="")), ("sft.yaml", CONFIG)])
def test_a_loss_on_assistants_without_conversations_is_an_error(
    capsys: pytest.CaptureFixture[str], name: str, text: str
) -> None:
    rows("tickets.jsonl", PAIR)
    Path(name).write_text(text)
    assert REFUSED in run(capsys, "check", name, "--gpus", "1xA100-80")
    Path(name).write_text(text.replace("loss=True", "loss=False").replace("loss: true", "loss: false"))
    assert REFUSED not in run(capsys, "check", name, "--gpus", "1xA100-80")
    Path(name).write_text(text)
    rows("tickets.jsonl", {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
    assert REFUSED not in run(capsys, "check", name, "--gpus", "1xA100-80")


def test_rows_that_a_program_changes_are_not_checked(capsys: pytest.CaptureFixture[str]) -> None:
    rows("tickets.jsonl", PAIR)
    Path("train.py").write_text(PROGRAM.format(changed=".map(to_messages)"))
    assert REFUSED not in run(capsys, "check", "train.py", "--gpus", "1xA100-80")


@pytest.mark.parametrize(
    ("recipe", "words", "kind"),
    [
        ("qwen25_7b_peft_config", (), "bfloat16"),
        ("qwen25_7b_peft_config", ("precision.compute=fp16",), "float16"),
        ("qwen25_7b_peft_config", ("peft.method=qlora",), "bfloat16"),
        ("qwen25_7b_sft_config", ("layout.tp=1",), "float32"),
    ],
)
def test_an_export_to_trl_loads_frozen_weights_in_the_compute_format(
    capsys: pytest.CaptureFixture[str], recipe: str, words: tuple[str, ...], kind: str
) -> None:
    rows("tickets.jsonl", PAIR)
    assert f'dtype="{kind}"' in run(capsys, "export", recipe, "--to", "trl", "data.dataset=tickets.jsonl", *words)


ZERO = {
    "bf16": {"enabled": True},
    "fp16": {"enabled": True},
    "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}},
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 8,
}
AXOLOTL = """base_model: Qwen/Qwen2.5-7B-Instruct
adapter: lora
lora_r: 16
lora_alpha: 32
lora_target_linear: true
datasets:
  - path: mhenrichsen/alpaca_2k_test
    type: alpaca
sequence_len: 4096
micro_batch_size: 1
gradient_accumulation_steps: 4
num_epochs: 3
optimizer: adamw_torch_fused
learning_rate: 0.0002
bf16: true
gradient_checkpointing: true
deepspeed: ds.json
output_dir: ./out
"""
FACTORY = """model_name_or_path: Qwen/Qwen2.5-7B-Instruct
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 16
lora_target: all
deepspeed: ds.json
dataset: identity
template: qwen
cutoff_len: 2048
output_dir: out
per_device_train_batch_size: 1
gradient_accumulation_steps: 4
learning_rate: 1.0e-4
num_train_epochs: 3.0
bf16: true
"""
SWIFT = """NPROC_PER_NODE=1 swift sft --model Qwen/Qwen2.5-7B-Instruct --tuner_type lora \\
  --dataset AI-ModelScope/alpaca-gpt4-data-zh --per_device_train_batch_size 1 --gradient_accumulation_steps 4 \\
  --max_length 2048 --output_dir output --deepspeed ds.json
"""
FILES = [("ax.yml", AXOLOTL), ("lf.yaml", FACTORY), ("swift.sh", SWIFT)]


@pytest.mark.parametrize(("name", "text"), FILES)
def test_the_deepspeed_config_that_a_front_end_names_is_checked(
    capsys: pytest.CaptureFixture[str], name: str, text: str
) -> None:
    Path(name).write_text(text)
    Path("ds.json").write_text(json.dumps(ZERO, indent=2))
    shown = run(capsys, "check", name, "--gpus", "1xA100-80")
    assert "bf16 and fp16 are both enabled (deepspeed.two-dtypes)" in shown
    assert 'in ds.json: "fp16": {"enabled": false}' in shown
    assert "offload_param requires stage 3" in shown
    flag = "--gradient_accumulation_steps " if name == "swift.sh" else "gradient_accumulation_steps: "
    assert f"{flag}4 and gradient_accumulation_steps=8" in shown
    assert f"{flag}8" in shown
    assert ("micro_batch_size: 1 and train_micro" in shown) == (name == "ax.yml")


@pytest.mark.parametrize(("name", "text"), FILES)
def test_a_config_with_auto_has_no_findings_and_a_missing_one_is_a_note(
    capsys: pytest.CaptureFixture[str], name: str, text: str
) -> None:
    Path(name).write_text(text)
    missing = "the DeepSpeed config ds.json was not found and is not checked"
    shown = run(capsys, "check", name, "--gpus", "1xA100-80")
    assert missing in shown
    assert "✗" not in shown
    auto = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
    Path("ds.json").write_text(json.dumps({"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}, **auto}))
    shown = run(capsys, "check", name, "--gpus", "1xA100-80")
    assert missing not in shown
    assert "deepspeed." not in shown


def test_a_config_that_ms_swift_has_itself_is_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    Path("swift.sh").write_text(SWIFT.replace("ds.json", "zero2"))
    assert "was not found" not in run(capsys, "check", "swift.sh", "--gpus", "1xA100-80")


CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize("to", ["trl", "automodel"])
@pytest.mark.parametrize(
    ("row", "converted"),
    [
        ({"messages": CHAT, "system": "be brief"}, [{"role": "system", "content": "be brief"}, *CHAT]),
        ({"prompt": "a", "completion": "b", "system": "be kind"}, [{"role": "system", "content": "be kind"}, *CHAT]),
        ({"instruction": "a", "input": "", "output": "b"}, CHAT),
        ({"messages": CHAT, "system": ""}, None),
        ({"messages": CHAT, "tools": []}, None),
    ],
)
def test_columns_that_a_trainer_ignores_are_converted_or_reported(
    capsys: pytest.CaptureFixture[str], to: str, row: dict[str, Any], converted: list[dict[str, str]] | None
) -> None:
    rows("chats.jsonl", row)
    words = ("export", "qwen25_7b_peft_config", "--to", to, "--gpus", "1xH100", "data.dataset=chats.jsonl")
    shown = run(capsys, *words)
    assert ("fix: --out FOLDER" in shown) == (converted is not None), shown
    run(capsys, *words, "--out", "FOLDER")
    written = Path("FOLDER/chats.messages.jsonl")
    assert written.exists() == (converted is not None)
    if converted is not None:
        assert json.loads(written.read_text().splitlines()[0])["messages"] == converted


def test_a_saved_plan_with_context_parallelism_has_a_fix_that_accelerate_has_a_key_for(
    meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = ("recommend", "qwen3-8b", "--gpus", "2xRTX4090", "--goal", "qlora", "--seq", "8k", "--save", "sized.toml")
    assert meshwright(*plan).code == 0
    export = ("export", "sized.toml", "--to", "trl", "--out")
    (error,) = (one for one in meshwright(*export, "a", "--json").json["findings"] if one["severity"] == "error")
    assert error["rule"] == "sequence.packing-over-context"
    fixed = meshwright(*export, "b", "--json", *error["fix"])
    assert fixed.code == 0
    assert not {one.partition("=")[0] for one in error["fix"]} & {one["field"] for one in fixed.json["unmapped"]}


def test_a_printed_fix_is_one_that_the_export_accepts(meshwright: Any, here: Path) -> None:
    words = ("export", "llama3_8b_sft_config", "--model", "llama31_8b", "--to", "trl", "--gpus", "4xA100-40")
    refused = meshwright(*words, "--out", "trl")
    fix = re.search(r"\(memory\.peak\)  fix: (.*)", refused.out)
    assert refused.code == 1
    assert fix is not None, refused.out
    assert "layout.tp=4" not in fix[1]
    assert meshwright(*words, "--out", "trl", *fix[1].split()).code == 0
    assert (here / "trl" / "llama3_8b_sft_config.yaml").exists()


def test_a_loss_that_the_trainer_has_not_has_one_answer(meshwright: Any) -> None:
    words = ("export", "qwen3_600m_sft_config", "--to", "trl", "--gpus", "1xH100", "kernels.loss=chunked")
    answer = " ".join(meshwright(*words, "layout.tp=1", "layout.sp=false", "layout.recompute=none").out.split())
    lost, found = answer.partition("Findings")[::2]
    assert "kernels.loss=chunked: the Trainer computes the loss of all logits, as kernels.loss=vocab_parallel" in lost
    assert "fix: kernels.loss=vocab_parallel" in found
