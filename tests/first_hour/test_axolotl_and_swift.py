"""Files of Axolotl and ms-swift, and logs of runs with them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from meshwright import InputError, diagnose, import_file
from meshwright.frameworks import check, content_of, framework_of
from meshwright.frameworks.result import CheckResult

AXOLOTL = """\
base_model: meta-llama/Llama-3.1-8B-Instruct
load_in_4bit: true
datasets:
  - path: tatsu-lab/alpaca
    type: alpaca
adapter: qlora
sequence_len: 2048
sample_packing: true
lora_r: 16
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
gradient_accumulation_steps: 8
micro_batch_size: 1
num_epochs: 1
optimizer: paged_adamw_32bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
gradient_checkpointing: true
attn_implementation: flash_attention_2
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def checked(text: str, name: str = "axolotl.yml", format_: str = "yaml") -> CheckResult:
    content = content_of(text, name, format_)  # type: ignore[arg-type]
    theirs = framework_of(content, front_ends=True)
    assert theirs is not None
    return check(theirs, content, gpus="1x4090")


def fixes(result: CheckResult) -> list[tuple[str, ...]]:
    return [one.fix for one in result.findings if one.severity == "error"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("lora_r: 16", "lora_rank: 16"),
        ("lora_r: 16", "rank: 16"),
        ("lora_r: 16", "r: 16"),
        ("lora_alpha: 16", "alpha: 16"),
        ("sequence_len: 2048", "max_seq_length: 2048"),
        ("sequence_len: 2048", "cutoff_len: 2048"),
        ("micro_batch_size: 1", "per_device_train_batch_size: 1"),
        ("num_epochs: 1", "num_train_epochs: 1"),
        ("adapter: qlora", "finetuning_type: qlora"),
        ("sequence_len: 2048", "sequence_length: 2048"),
    ],
)
def test_a_key_of_another_front_end_means_the_key_of_this_one(before: str, after: str) -> None:
    result = checked(AXOLOTL.replace(before, after))
    found = [one for one in result.findings if one.rule == "key.unknown"]
    assert [one.message for one in found] == [
        f"Axolotl ignores {after.split(':')[0]}; did you mean {before.split(':')[0]}?"
    ]


def test_the_fix_of_a_key_of_another_front_end_is_accepted() -> None:
    slip = AXOLOTL.replace("lora_r:", "lora_rank:")
    (fix,) = fixes(checked(slip))
    assert fix == ("lora_r: 16",)
    assert not fixes(checked(slip.replace("lora_rank: 16", *fix)))


def test_a_key_that_is_also_set_by_its_right_name_is_not_set_twice() -> None:
    (one,) = (one for one in checked(AXOLOTL + "lora_rank: 32\n").findings if one.rule == "key.unknown")
    assert one.fix == ("without lora_rank",)
    assert one.message == "Axolotl ignores lora_rank; its key lora_r is already set to 16 in line 9"


def test_a_key_with_another_word_is_not_suggested() -> None:
    texts = " ".join(one.message for one in checked(AXOLOTL + "use_liger_kernel: true\n").findings)
    assert "dpo_use_liger_kernel" not in texts
    assert "liger_fused_linear_cross_entropy" in texts


@pytest.mark.parametrize(
    ("before", "after", "fix"),
    [
        ("load_in_4bit: true", "load_in_4bit: false", ("load_in_4bit: true",)),
        ("load_in_4bit: true\n", "", ("load_in_4bit: true",)),
        ("load_in_4bit: true", "load_in_4bit: true\nload_in_8bit: true", ("load_in_8bit: false",)),
        ("adapter: qlora", "adapter: qlroa", ("adapter: qlora",)),
        ("adapter: qlora", "adapter: QLoRA", ("adapter: qlora",)),
        ("adapter: qlora", "adapter:", ("load_in_4bit: false",)),
        ("adapter: qlora", "adapter: dora", ()),
    ],
)
def test_values_that_axolotl_refuses_are_errors(before: str, after: str, fix: tuple[str, ...]) -> None:
    result = checked(AXOLOTL.replace(before, after))
    assert [one.fix for one in result.findings if one.rule == "value.invalid"] == [fix]
    assert "catalogue" not in " ".join(result.notes)


def test_a_type_of_data_that_axolotl_removed_is_an_error() -> None:
    [found] = [one for one in checked(AXOLOTL.replace("type: alpaca", "type: sharegpt")).findings
        if one.field == "datasets[0].type"]  # fmt: skip
    assert (found.severity, found.fix) == ("error", ("datasets[0].type: chat_template",))
    assert "Axolotl 0.5 and newer refuse to start with it" in found.message
    assert "message_property_mappings: {role: from, content: value}" in found.message


def test_messages_of_sharegpt_need_their_keys_mapped(tmp_path: Path, meshwright: Any) -> None:
    row = '{"conversations": [{"from": "human", "value": "Where is it?"}, {"from": "gpt", "value": "On its way."}]}\n'
    (tmp_path / "chats.jsonl").write_text(row * 20)
    text = AXOLOTL.replace("tatsu-lab/alpaca", "chats.jsonl").replace("type: alpaca", "type: sharegpt")
    mapping = {"message_property_mappings.role: from", "message_property_mappings.content: value"}
    chat = "type: chat_template\n    field_messages: conversations"
    mapped = f"{chat}\n    message_property_mappings: {{role: from, content: value}}"
    older = f"{chat}\n    message_field_role: from\n    message_field_content: value"
    for kind, needed in ((chat, mapping), (mapped, set()), (older, set())):
        (tmp_path / "axolotl.yml").write_text(text.replace("type: sharegpt", kind))
        found = meshwright("check", "axolotl.yml", "--gpus", "1x4090", "--json").json["findings"]
        fixes = {line for one in found if one["rule"] == "data.columns-not-read" for line in one["fix"]}
        assert fixes == {f"datasets[0].{line}" for line in needed}
    (tmp_path / "axolotl.yml").write_text(text)
    repair = meshwright("check", "axolotl.yml", "--gpus", "1x4090", "--json").json["repair"]
    assert {f"datasets[0].{line}" for line in ("field_messages: conversations", *mapping)} <= {*repair["overrides"]}


@pytest.mark.parametrize(
    "command",
    [
        "axolotl train axolotl.yml",
        "accelerate launch -m axolotl.cli.train axolotl.yml",
        "accelerate launch --num_processes 1 -m axolotl.cli.train axolotl.yml --micro_batch_size 1",
        "python -m axolotl.cli.preprocess axolotl.yml\npython -m axolotl.cli.train axolotl.yml",
    ],
)
def test_every_command_of_axolotl_is_checked_with_its_file(command: str, tmp_path: Path, meshwright: Any) -> None:
    (tmp_path / "axolotl.yml").write_text(AXOLOTL.replace("type: alpaca", "type: sharegpt"))
    (tmp_path / "run.sh").write_text(f"{command}\n")
    result = meshwright("check", "run.sh", "--gpus", "1x4090", "--json").json
    assert result["framework"] == "axolotl"
    [found] = [one for one in result["findings"] if one["field"] == "datasets[0].type"]
    assert found["fix"] == ["datasets[0].type: chat_template"]


def test_all_datasets_of_a_file_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meshwright: Any) -> None:
    rows = {"few": 8, "many": 4000}
    for name, count in rows.items():
        row = '{"instruction": "Where is it?", "output": "On its way."}\n'
        (tmp_path / f"{name}.jsonl").write_text(row * count)
    listed = "".join(f"  - path: {name}.jsonl\n    type: alpaca\n" for name in rows)
    text = AXOLOTL.replace("  - path: tatsu-lab/alpaca\n    type: alpaca\n", listed)
    text = text.replace("packing: true", "packing: false")
    (tmp_path / "axolotl.yml").write_text(text)
    (tmp_path / "elsewhere").mkdir()
    for folder in (tmp_path, tmp_path / "elsewhere"):  # paths are relative to the file
        monkeypatch.chdir(folder)
        found = meshwright("check", str(tmp_path / "axolotl.yml"), "--gpus", "1x4090", "--json").json
        assert "data.few-steps" not in [one["rule"] for one in found["findings"]]
    (tmp_path / "axolotl.yml").write_text(text.replace(listed, listed.partition("  - path: many")[0]))
    found = meshwright("check", str(tmp_path / "axolotl.yml"), "--gpus", "1x4090", "--json").json
    assert "data.few-steps" in [one["rule"] for one in found["findings"]]


def test_an_adapter_of_a_plugin_is_not_refused() -> None:
    text = AXOLOTL.replace("adapter: qlora", "adapter: mora\nplugins:\n  - axolotl.integrations.mora.MoraPlugin")
    result = checked(text.replace("load_in_4bit: true", "load_in_4bit: false"))
    assert not fixes(result)
    assert "mora adapters: keys and values are checked, memory is not estimated" in result.notes


OOM = """\
{first}
  0%|          | 0/702 [00:00<?, ?it/s]
{{'loss': 1.3301, 'grad_norm': 0.61, 'learning_rate': 2e-05, 'epoch': 0.01}}
  0%|          | 1/702 [00:21<4:10:05, 21.41s/it]
Traceback (most recent call last):
  File "/opt/venv/lib/python3.11/site-packages/transformers/trainer.py", line 2245, in train
  File "/opt/venv/lib/python3.11/site-packages/torch/nn/functional.py", line 3104, in cross_entropy
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.91 GiB. GPU 0 has a total capacity of 23.64 GiB of \
which 1.83 GiB is free. Including non-PyTorch memory, this process has 21.80 GiB memory in use. Of the allocated \
memory 20.51 GiB is allocated by PyTorch, and 812.33 MiB is reserved by PyTorch but unallocated.
"""
AXOLOTL_LINE = "[2026-11-10 10:04:20,003] [INFO] [axolotl.train.train:164] [PID:1187] [RANK:0] Starting trainer..."
FACTORY_LINE = "[INFO|2026-11-10 10:04:20] llamafactory.train.sft:164 >> Starting"


@pytest.mark.parametrize(
    ("first", "batch", "liger"),
    [
        (AXOLOTL_LINE, "micro_batch_size: 1", "liger_fused_linear_cross_entropy: true"),
        (FACTORY_LINE, "per_device_train_batch_size: 1", "enable_liger_kernel: true"),
        ("***** Running training *****", "per_device_train_batch_size: 1", "use_liger_kernel: true"),
    ],
)
def test_doctor_writes_the_keys_of_the_front_end_that_wrote_the_log(
    first: str, batch: str, liger: str, tmp_path: Path
) -> None:
    log = tmp_path / "train.log"
    log.write_text(OOM.format(first=first), encoding="utf-8")
    (finding,) = (one for one in diagnose(str(log)).findings if one.id == "memory.out-of-memory")
    lines = [line for remedy in finding.remedies for line in remedy.there]
    assert {batch, liger, "gradient_checkpointing: true"} <= set(lines)
    assert "<now × micro batch>" in " ".join(lines)


@pytest.mark.parametrize("named", ["axolotl.yml", "run.sh"])
def test_doctor_estimates_a_front_ends_file_as_check_does(named: str, tmp_path: Path, meshwright: Any) -> None:
    (tmp_path / "axolotl.yml").write_text(AXOLOTL.replace("sequence_len: 2048", "sequence_len: 8192"))
    (tmp_path / "run.sh").write_text("axolotl train axolotl.yml\n")
    log = "{'loss': 1.4, 'grad_norm': 0.5, 'learning_rate': 0.0002, 'epoch': 0.1}\n"
    (tmp_path / "oom.log").write_text(
        f"{log}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.91 GiB. GPU 0 has a total capacity of "
        "23.64 GiB of which 1.62 GiB is free.\n"
    )
    known = meshwright("check", named, "--gpus", "1x4090", "--json").json
    found = meshwright("doctor", "oom.log", "--recipe", named, "--gpus", "1x4090", "--json").json
    [crash] = [one for one in found["findings"] if one["rule"] == "memory.out-of-memory"]
    [total] = [one["value"] for one in crash["evidence"] if one["name"] == "estimate"]
    assert total == pytest.approx(known["estimate"]["memory_gib"]["total"], rel=0.01)
    fixes = [" ".join(one["there"]) for one in crash["remedies"]]
    assert any("liger_fused_linear_cross_entropy: true" in one for one in fixes)
    assert not any("layout.offload" in " ".join(one["try"]) for one in crash["remedies"]), "it has no key for one GPU"


def test_what_doctor_advises_for_axolotl_is_accepted_by_check(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(OOM.format(first=AXOLOTL_LINE), encoding="utf-8")
    (finding,) = (one for one in diagnose(str(log)).findings if one.id == "memory.out-of-memory")
    lines = [line for remedy in finding.remedies for line in remedy.there]
    replaced = {line.split(":")[0] for line in lines}
    kept = [line for line in AXOLOTL.splitlines() if line.split(":")[0] not in replaced]
    assert not checked("\n".join((*kept, *lines))).findings


def test_keys_of_a_plugin_need_the_plugin() -> None:
    text = AXOLOTL + "liger_fused_linear_cross_entropy: true\n"
    (fix,) = fixes(checked(text))
    assert fix == ("plugins: [axolotl.integrations.liger.LigerPlugin]",)
    assert not fixes(checked(text + fix[0]))


FACTORY = """\
model_name_or_path: meta-llama/Llama-3.1-8B-Instruct
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
dataset: alpaca_en_demo
template: llama3
cutoff_len: 2048
output_dir: out
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
bf16: true
"""
SWIFT = "swift sft --model Qwen/Qwen3-8B --tuner_type lora --dataset chats.jsonl --max_length 2048 --lora_rank 8\n"


@pytest.mark.parametrize(
    ("text", "name", "format_", "train_on"),
    [
        (AXOLOTL, "a.yml", "yaml", "answers"),
        (AXOLOTL + "train_on_inputs: true\n", "a.yml", "yaml", "all"),
        (AXOLOTL.replace("type: alpaca", "type: chat_template"), "a.yml", "yaml", "answers"),
        (AXOLOTL.replace("type: alpaca", "type: completion"), "a.yml", "yaml", "all"),
        (FACTORY, "f.yaml", "yaml", "answers"),
        (FACTORY + "train_on_prompt: true\n", "f.yaml", "yaml", "all"),
        (FACTORY.replace("stage: sft", "stage: pt"), "f.yaml", "yaml", "all"),
        (SWIFT, "s.sh", "shell", "answers"),
        (SWIFT.replace("swift sft", "swift pt"), "s.sh", "shell", "all"),
    ],
)
def test_front_ends_mask_prompts_unless_their_file_says_otherwise(
    text: str, name: str, format_: str, train_on: str
) -> None:
    content = content_of(text, name, format_)  # type: ignore[arg-type]
    theirs = framework_of(content, front_ends=True)
    assert theirs is not None
    parsed = theirs.parse(content)
    assert parsed.field_values["data.train_on"] == train_on
    assert not [note for note in parsed.notes if "TRL" in note]


def trainer_log(slope: float, rate: float, validation_slope: float) -> str:
    """Return 80 records with a noise of 0.01, and a validation after every 20."""
    noise = random.Random(7)
    lines = []
    for record in range(80):
        loss = 2.31 - slope * record + noise.gauss(0, 0.01)
        lines.append(f"{{'loss': {loss:.4f}, 'grad_norm': 0.2, 'learning_rate': {rate}, 'epoch': {record / 50:.2f}}}")
        if record % 20 == 19:
            lines.append(f"{{'eval_loss': {2.312 - validation_slope * record:.4f}, 'epoch': {record / 50:.2f}}}")
    return "\n".join(lines)


@pytest.mark.parametrize(("rate", "text"), [(2e-7, "the learning rate 2e-07 is small"), (2e-4, "does not learn")])
def test_a_plateau_with_a_flat_validation_is_found(rate: float, text: str, tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(trainer_log(0.0, rate, 0.0), encoding="utf-8")
    (finding,) = (one for one in diagnose(str(log)).findings if one.id == "loss.flat")
    assert text in finding.message
    assert "learning rate" in str(finding.remedies) or "optimizer.lr" in str(finding.remedies)


@pytest.mark.parametrize(
    ("slope", "validation_slope"), [(0.0005, 0.0005), (0.0002, 0.0002), (0.002, 0.001), (0.0, 1e-3)]
)
def test_a_loss_that_falls_slowly_is_no_plateau(slope: float, validation_slope: float, tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(trainer_log(slope, 2e-5, validation_slope), encoding="utf-8")
    assert not [one for one in diagnose(str(log)).findings if one.id == "loss.flat"]


def test_a_key_that_a_version_renamed_is_named_with_the_version() -> None:
    text = SWIFT.replace("--tuner_type", "--train_type")
    (finding,) = (one for one in checked(text, "s.sh", "shell").findings if one.rule == "key.removed")
    assert finding.message == (
        "ms-swift has no --train_type since version 4.1, which named it --tuner_type; "
        "older versions accept --train_type"
    )
    assert finding.fix == ("--tuner_type lora",)


@pytest.mark.parametrize("key", ["--train_type", "--tuner_type"])
def test_import_names_ms_swift_as_check_does(key: str, tmp_path: Path) -> None:
    script = tmp_path / "swift.sh"
    options = " --quant_bits 4 --per_device_train_batch_size 1 --gradient_accumulation_steps 16"
    script.write_text(SWIFT.replace("--tuner_type", key).rstrip() + options + "\n", encoding="utf-8")
    with pytest.raises(InputError) as found:
        import_file(str(script), gpus="1x4090")
    assert "is a config of ms-swift, which only check reads" in str(found.value)
    (fix,) = found.value.fix
    assert fix.startswith("meshwright recommend qwen3_8b --goal peft --gpus 1x4090 --dataset chats.jsonl")
    assert {"peft.method=qlora", "lora_rank=8", "train.global_batch_size=16"} <= set(fix.split())


@pytest.mark.parametrize(("model", "text"), [("gpt_oss_20b", "(faster; fits without)"), ("qwen3_32b", "(needed)")])
def test_models_say_whether_offload_is_needed_or_faster(model: str, text: str, meshwright: Any) -> None:
    assert text in meshwright("models", model, "--gpus", "1x4090", "--goal", "qlora").out
