"""A LoRA rank without what turns LoRA on: front ends then train all weights, and so does the estimate."""

from __future__ import annotations

from pathlib import Path

import pytest

import meshwright as mw

COMMON = "output_dir: out\nlearning_rate: 1.0e-5\nbf16: true\ngradient_checkpointing: true\n"
SIZES = "per_device_train_batch_size: 1\nnum_train_epochs: 1\n"
FLAGS = " --per_device_train_batch_size 1 --num_train_epochs 1 --gradient_checkpointing true --output_dir o"
TRL = f"model_name_or_path: Qwen/Qwen3-4B\ndataset_name: trl-lib/Capybara\nmax_length: 2048\n{COMMON}{SIZES}"
FACTORY = (
    "model_name_or_path: Qwen/Qwen3-4B\nstage: sft\ndo_train: true\ndataset: alpaca\ntemplate: qwen3\n"
    f"cutoff_len: 2048\nfinetuning_type: TYPE\n{COMMON}{SIZES}"
)
AXOLOTL = (
    "base_model: Qwen/Qwen3-4B\ndatasets: [{path: tatsu-lab/alpaca, type: alpaca}]\nsequence_len: 2048\n"
    f"micro_batch_size: 1\ngradient_accumulation_steps: 1\noptimizer: adamw_torch\nADAPTER\n{COMMON}"
)
SWIFT = (
    f"swift sft --model Qwen/Qwen3-4B --dataset alpaca --max_length 2048 --learning_rate 1e-5 --tuner_type TYPE{FLAGS}"
)
COMMAND = f"trl sft --model_name_or_path Qwen/Qwen3-4B --dataset_name trl-lib/Capybara --max_length 2048{FLAGS}"
FULL_GIB, ADAPTERS_GIB = 29, 17  # at least of weights, gradients and states; at most with adapters


def state_gib(path: Path) -> tuple[float, list[mw.Finding]]:
    checked = mw.check(str(path), gpus="1xH200")
    assert checked.estimate is not None
    memory = checked.estimate.memory
    unused = [one for one in checked.findings if one.rule == "key.unused"]
    return memory.weights + memory.gradients + memory.optimizer, unused


@pytest.mark.parametrize(
    ("name", "text", "on", "fix"),
    [
        ("trl.yaml", TRL + "lora_r: 16\n", TRL + "lora_r: 16\nuse_peft: true\n", "use_peft: true"),
        ("trl.sh", f"{COMMAND} --lora_r 16\n", f"{COMMAND} --lora_r 16 --use_peft\n", "--use_peft"),
        ("axolotl.yml", AXOLOTL.replace("ADAPTER", "lora_r: 16"),
            AXOLOTL.replace("ADAPTER", "adapter: lora\nlora_alpha: 16\nlora_target_linear: true\nlora_r: 16"),
            "adapter: lora"),
        ("factory.yaml", FACTORY.replace("TYPE", "full") + "lora_rank: 16\n",
            FACTORY.replace("TYPE", "lora") + "lora_rank: 16\n", None),
        ("swift.sh", SWIFT.replace("TYPE", "full") + " --lora_rank 16\n",
            SWIFT.replace("TYPE", "lora") + " --lora_rank 16\n", None),
    ],
)  # fmt: skip
def test_adapter_settings_alone_train_all_weights(
    name: str, text: str, on: str, fix: str | None, tmp_path: Path
) -> None:
    (path := tmp_path / name).write_text(text)
    gib, unused = state_gib(path)
    assert gib > FULL_GIB
    assert len(unused) == 1
    assert "no effect" in unused[0].message
    assert "all weights are trained" in unused[0].message
    assert (unused[0].severity, unused[0].fix) == (("warning", (fix,)) if fix else ("advice", ()))
    path.write_text(on)
    gib, unused = state_gib(path)
    assert gib < ADAPTERS_GIB
    assert unused == []


@pytest.mark.parametrize(
    ("name", "text", "fix"),
    [
        ("trl.yaml", TRL + "load_in_4bit: true\n", "use_peft: true"),
        ("trl.sh", f"{COMMAND} --load_in_4bit\n", "--use_peft"),
    ],
)
def test_trl_refuses_quantized_weights_without_adapters(name: str, text: str, fix: str, tmp_path: Path) -> None:
    (path := tmp_path / name).write_text(text)
    found = [one for one in mw.check(str(path), gpus="1xH200").findings if one.field == "load_in_4bit"]
    assert [(one.severity, one.fix) for one in found] == [("error", (fix,))]


def test_empty_keys_of_a_full_training_are_not_reported(tmp_path: Path) -> None:
    empty = "adapter:\nlora_r:\nlora_alpha:\nlora_dropout:\nlora_target_linear:"  # as in Axolotl's examples
    (path := tmp_path / "fft.yml").write_text(AXOLOTL.replace("ADAPTER", empty))
    assert state_gib(path)[1] == []


PROGRAM = """from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer
bnb = BitsAndBytesConfig(load_in_4bit=True)
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-4B", quantization_config=bnb)
args = SFTConfig(output_dir="out", per_device_train_batch_size=1, bf16=True, max_length=2048)
SFTTrainer(model=model, args=args, train_dataset=data).train()
"""


def test_a_program_that_quantizes_needs_adapters(tmp_path: Path) -> None:
    (path := tmp_path / "train.py").write_text(PROGRAM)
    found = [one for one in mw.check(str(path), gpus="1xRTX4090").findings if one.field == "load_in_4bit"]
    assert [one.severity for one in found] == ["error"]
    assert "refuses to train quantized weights without adapters" in found[0].message
    for adapters in (
        PROGRAM.replace("args=args", "args=args, peft_config=config").replace(
            "bnb =", 'from peft import LoraConfig\nconfig = LoraConfig(task_type="CAUSAL_LM")\nbnb ='
        ),
        PROGRAM.replace("SFTTrainer(model", "model = with_lora(model)\nSFTTrainer(model"),
    ):
        path.write_text(adapters)
        assert not [one for one in mw.check(str(path), gpus="1xRTX4090").findings if one.field == "load_in_4bit"]
