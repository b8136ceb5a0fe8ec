"""Fine-tune on support chats with files for Axolotl and LLaMA-Factory, on two cards with 24 GB."""

from __future__ import annotations

import json
import subprocess
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


def records(count: int, **more: float) -> str:
    rows = ({"loss": round(2 - step / 100, 4), "learning_rate": 2e-4, **more} for step in range(1, count + 1))
    return "".join(f"{row}\n" for row in rows)


def doctor(meshwright: Any, text: str, *words: str) -> dict[str, Any]:
    Path("run.log").write_text(text, encoding="utf-8")
    answer: dict[str, Any] = meshwright("doctor", "run.log", *words, "--json").json
    return answer


@pytest.mark.parametrize(
    ("norm", "rules"),
    [({}, ["loss.flat"]), ({"grad_norm": 0.0}, ["loss.zero-gradients"]), ({"grad_norm": 0.4}, [])],  # the last of GRPO
)
def test_a_loss_of_zero_is_no_matter_of_the_learning_rate(
    meshwright: Any, norm: dict[str, float], rules: list[str]
) -> None:
    found = doctor(meshwright, records(30, **{**norm, "loss": 0.0}))["findings"]
    assert [one["rule"] for one in found] == rules
    assert "optimizer.lr" not in str(found)
    if not norm:
        assert "no token is in the loss (every label is masked), or it is NaN" in found[0]["message"]


UNSLOTH = """==((====))==  Unsloth 2025.10.3: Fast Qwen3 patching. Transformers: 4.56.2.
   \\\\   /|    NVIDIA GeForce RTX 4090. Num GPUs = 2. Max memory: 23.516 GB. Platform: Linux.
O^O/ \\_/ \\    Torch: 2.8.0+cu128. CUDA: 8.9. CUDA Toolkit: 12.8. Triton: 3.4.0
==((====))==  Unsloth - 2x faster free finetuning | Num GPUs used = 1
   \\\\   /|    Num examples = 8,000 | Num Epochs = 3 | Total steps = 750
O^O/ \\_/ \\    Batch size per device = 2 | Gradient accumulation steps = 16
\\        /    Data Parallel GPUs = 1 | Total batch size (2 x 16 x 1) = 32
 "-____-"     Trainable parameters = 87,293,952 of 8,278,029,312 (1.05% trained)
"""


def test_the_banner_of_unsloth_is_read(meshwright: Any) -> None:
    answer = doctor(meshwright, UNSLOTH + records(40), "--model", "qwen3-8b")
    assert (answer["gpus"], answer["total_steps"]) == ("1xRTX4090", 750)
    assert "the log states 87,293,952 trainable parameters of 8.19B: adapters are assumed" in " ".join(answer["notes"])
    printed = "trainable params: 87,293,952 || all params: 8,278,029,312 || trainable%: 1.0545\n"
    answer = doctor(meshwright, printed + records(40), "--model", "qwen3-8b", "--gpus", "1x4090")
    assert "the log states 87,293,952 trainable parameters" in " ".join(answer["notes"])


OUT_OF_MEMORY = """  File "/home/u/trl/trainer/sft_trainer.py", line 1100, in compute_loss
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.64 GiB. GPU 0 has a total capacity of 23.52 GiB of \
which 1.83 GiB is free. Including non-PyTorch memory, this process has 21.67 GiB memory in use. Of the allocated \
memory 20.11 GiB is allocated by PyTorch, and 1.10 GiB is reserved by PyTorch but unallocated.
"""


@pytest.mark.parametrize("option", ["--model", "--recipe"])
def test_steps_on_a_card_that_cannot_hold_all_weights_were_of_adapters(meshwright: Any, option: str) -> None:
    answer = doctor(meshwright, records(40) + OUT_OF_MEMORY, option, "qwen3-8b", "--gpus", "1x4090")
    assert answer["recipe"] == "qwen3_8b_peft_config"
    (found,) = (one for one in answer["findings"] if one["rule"] == "memory.out-of-memory")
    assert "--goal sft" not in str(found["remedies"])
    assert "adapters are assumed, --goal peft" in " ".join(answer["notes"])
    answer = doctor(meshwright, records(40) + OUT_OF_MEMORY, option, "qwen3-8b", "--gpus", "1x4090", "--goal", "sft")
    assert answer["recipe"] == "qwen3_8b_sft_config"


ROW = {"messages": [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "Here."}], "tools": [{}]}
LINES = f"{json.dumps(ROW)}\n" * 2


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("nested.json", json.dumps({"data": {"train": [ROW, ROW]}})),
        ("splits.json", json.dumps({"train": [ROW, ROW], "test": [ROW]})),
        ("by_id.json", json.dumps({"c1": ROW, "c2": ROW})),
        ("over_lines.jsonl", f"{json.dumps(ROW, indent=2)}\n" * 2),
        ("windows.jsonl", LINES.encode("utf-16")),
    ],
)
def test_the_fix_of_a_file_that_is_no_list_of_rows_works(meshwright: Any, name: str, data: str | bytes) -> None:
    Path(name).write_bytes(data if isinstance(data, bytes) else data.encode())
    answer = meshwright("check", name, "--json").json
    (found,) = answer["findings"]
    command, _, dataset = found["no_fix"].split(" | ")[0].partition(", then --dataset ")
    subprocess.run(["sh", "-c", command], check=True)
    kept = meshwright("check", dataset, "--json").json
    assert kept["ok"], kept
    assert "2 conversations" in " ".join(kept["notes"])


def test_a_config_with_conversations_beside_other_keys_is_a_dataset(meshwright: Any) -> None:
    Path("chats.json").write_text(json.dumps({"model": "gpt", "conversations": [ROW]}))
    assert "1 conversation (" in " ".join(meshwright("check", "chats.json", "--json").json["notes"])


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("lora_alpha: -16", "lora_alpha: 16"),
        ("lora_dropout: 5", "lora_dropout: 0.05"),
        ("weight_decay: -0.1", "weight_decay: 0.1"),
    ],
)
def test_numbers_that_peft_and_torch_refuse_are_reported(meshwright: Any, line: str, fix: str) -> None:
    text = FACTORY.replace("TARGETS", "all")
    (found,) = check(meshwright, "lf.yaml", f"{text}{line}\n")["findings"]
    assert (found["severity"], found["fix"]) == ("error", [fix])
    assert not check(meshwright, "lf.yaml", f"{text}{fix}\n")["findings"]
    assert not check(meshwright, "lf.yaml", f"{text}lora_alpha: 0\n")["findings"]  # twice the rank, for LLaMA-Factory


def test_a_dropped_conversation_is_not_counted_as_truncated_too(meshwright: Any) -> None:
    long = {"messages": [{"role": "user", "content": "a" * 300}, {"role": "assistant", "content": "b"}]}
    Path("chats.jsonl").write_text(f"{json.dumps(long)}\n{json.dumps(ROW)}\n")
    words = ("samples", "qwen3_600m_sft_config", "--dataset", "chats.jsonl", "data.tokenizer=bytes")
    answer = meshwright(*words, "data.seq_length=200")
    assert "of 2 conversations 1 is dropped" in answer.err


def test_rows_that_are_refused_and_rows_that_are_dropped_are_listed_at_once(meshwright: Any) -> None:
    empty = {"messages": [{"role": "user", "content": "Where?"}]}
    Path("chats.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in (ROW, {"messages": []}, empty, empty)))
    (found,) = meshwright("check", "chats.jsonl", "--json").json["findings"]
    assert "chats.jsonl:2: column messages must contain a list" in found["message"]
    assert "2 rows more would be dropped, first chats.jsonl:3: no message has the role assistant" in found["message"]


def test_a_log_that_is_checked_is_one_for_doctor(meshwright: Any) -> None:
    Path("run.log").write_text(records(5))
    assert "fix:   meshwright doctor run.log | " in meshwright("check", "run.log").err


def test_epochs_of_little_data_are_not_read_as_mistyped_tokens(meshwright: Any) -> None:
    Path("chats.jsonl").write_text(LINES)
    words = ("size", "qwen3-8b", "--goal", "lora", "--gpu", "4090", "--dataset", "chats.jsonl", "--epochs", "3")
    answer = meshwright(*words)
    assert "a smaller train.global_batch_size makes steps of them" in answer.out + answer.err
    assert "for billions" not in answer.out + answer.err


@pytest.mark.parametrize("name", ["chats.jsonl", "chats.json"])
def test_speakers_of_support_chats_are_renamed_by_one_command(meshwright: Any, name: str) -> None:
    chat = [{"role": "customer", "content": '"role": "customer"'}, {"role": "Support Agent", "content": "hello"}]
    rows = [{"messages": [*chat, {"role": "customer", "content": f"{n}"}, *chat[1:]]} for n in range(9)]
    text = "\n".join(map(json.dumps, rows)) if name.endswith("l") else json.dumps(rows, indent=2)
    Path(name).write_text(text, encoding="utf-8")
    words = ("check", "qwen3_600m_sft_config", "--dataset")
    shown = " ".join(meshwright(*words, name).out.split())
    assert "message 0 has the unknown role customer, message 1 has the unknown role Support Agent; known" in shown
    assert shown.count("known: system") == 1
    command, _, written = shown.partition("sed -E ")[2].partition(", then --dataset ")
    subprocess.run(f"sed -E {command}", shell=True, check=True)
    assert "unknown role" not in meshwright(*words, written.split()[0]).out
    assert '"role\\": \\"customer' in Path(written.split()[0]).read_text(), "the text of a message stays"


def test_unknown_speakers_have_no_guessed_role(meshwright: Any) -> None:
    row = {"messages": [{"role": "alice", "content": "a"}, {"role": "bob", "content": "b"}]}
    Path("chats.jsonl").write_text("\n".join([json.dumps(row)] * 3), encoding="utf-8")
    shown = meshwright("check", "qwen3_600m_sft_config", "--dataset", "chats.jsonl").out
    assert "unknown role alice" in shown
    assert "sed" not in shown
