"""A newcomer checks files of Axolotl and ms-swift, and logs of runs with them."""

from __future__ import annotations

from pathlib import Path

import pytest

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


def test_an_adapter_of_a_plugin_is_not_refused() -> None:
    text = AXOLOTL.replace("adapter: qlora", "adapter: mora\nplugins:\n  - axolotl.integrations.mora.MoraPlugin")
    result = checked(text.replace("load_in_4bit: true", "load_in_4bit: false"))
    assert not fixes(result)
    assert "mora adapters: keys and values are checked, memory is not estimated" in result.notes
