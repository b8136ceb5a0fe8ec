"""Fine-tune on support chats with files for Axolotl and LLaMA-Factory, on two cards with 24 GB."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

AXOLOTL = """base_model: Qwen/Qwen3-8B
plugins:
PLUGINS
load_in_4bit: true
datasets:
  - path: support.jsonl
    type: chat_template
adapter: qlora
lora_r: 32
lora_target_linear: true
sequence_len: 4096
sample_packing: true
flash_attention: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 3
learning_rate: 0.0002
bf16: auto
gradient_checkpointing: true
"""
CUT = "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"
LIGER = "axolotl.integrations.liger.LigerPlugin"


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def check(meshwright: Any, name: str, text: str) -> dict[str, Any]:
    Path(name).write_text(text, encoding="utf-8")
    answer: dict[str, Any] = meshwright("check", name, "--gpus", "2x4090", "--json").json
    return answer


@pytest.mark.parametrize(
    ("plugins", "more", "has_logits"),
    [
        (CUT, "", False),  # the plugin turns its loss on
        (CUT, "cut_cross_entropy: true", False),
        (CUT, "cut_cross_entropy: false", True),
        (LIGER, "liger_fused_linear_cross_entropy: true\ncut_cross_entropy: false", False),
        (LIGER, "", True),
    ],
)
def test_a_loss_fused_by_a_plugin_has_no_full_logits(
    meshwright: Any, plugins: str, more: str, has_logits: bool
) -> None:
    answer = check(meshwright, "ax.yaml", AXOLOTL.replace("PLUGINS", f"  - {plugins}") + more)
    assert (answer["estimate"]["memory_gib"]["logits"] > 10) is has_logits
    assert ("memory.peak" in [one["rule"] for one in answer["findings"]]) is has_logits


def test_a_loss_without_its_plugin_is_ignored(meshwright: Any) -> None:
    answer = check(meshwright, "ax.yaml", AXOLOTL.replace("plugins:\nPLUGINS\n", "") + "cut_cross_entropy: true")
    (found,) = (one for one in answer["findings"] if one["rule"] == "value.invalid")
    assert "Axolotl ignores cut_cross_entropy" in found["message"]
    assert found["fix"] == [f"plugins: [{CUT}]"]


FACTORY = """model_name_or_path: meta-llama/Llama-3.1-8B-Instruct
stage: sft
do_train: true
finetuning_type: lora
lora_target: TARGETS
dataset: support
template: llama3
cutoff_len: 2048
output_dir: out
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
bf16: true
"""


@pytest.mark.parametrize(
    ("targets", "severity", "text", "fix"),
    [
        ("q_prj", "error", "names none of the model's linear layers", "lora_target: q_proj"),
        ("q_proj,v_prj", "warning", "names v_prj (did you mean v_proj?), which", "lora_target: q_proj,v_proj"),
        ("[qkv_proj, o_proj]", "warning", "names qkv_proj (did you mean q_proj, k_proj, v_proj?), which",
            "lora_target: [q_proj, k_proj, v_proj, o_proj]"),
    ],
)  # fmt: skip
def test_adapters_that_peft_skips_are_reported(
    meshwright: Any, targets: str, severity: str, text: str, fix: str
) -> None:
    (found,) = check(meshwright, "lf.yaml", FACTORY.replace("TARGETS", targets))["findings"]
    assert (found["severity"], found["line"], found["fix"]) == (severity, 5, [fix])
    assert text in found["message"]
    assert not check(meshwright, "lf.yaml", FACTORY.replace("TARGETS", fix.split(": ")[1]))["findings"]


@pytest.mark.parametrize("targets", ["[q_proj, k_proj, v_proj, c_attn, W_pack]", "[q_proj, lm_head]", "all"])
def test_lists_of_adapters_for_several_models_are_in_order(meshwright: Any, targets: str) -> None:
    assert not check(meshwright, "lf.yaml", FACTORY.replace("TARGETS", targets))["findings"]
