"""Text for vision models, padding, grouped lengths, other trainers' options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

CHAT = {
    "messages": [{"role": "user", "content": "My router is slow."}, {"role": "assistant", "content": "Restart it."}]
}


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(CHAT) + "\n" for _ in range(400)))
    return path


def _alpaca(folder: Path) -> Path:
    path = folder / "alpaca.json"
    path.write_text(json.dumps([{"instruction": "Say hi", "input": "", "output": "Hi."}] * 40))
    return path


def _csv(folder: Path) -> Path:
    path = folder / "rows.csv"
    path.write_text("prompt,response\nSay hi,Hi.\n")
    return path


@pytest.mark.parametrize("model", ["gemma-3-4b", "qwen3-vl-8b", "qwen2.5-vl-7b"])
@pytest.mark.parametrize("goal", ["lora", "sft"])
def test_text_trains_a_vision_model_without_images(meshwright: Any, chats: Path, model: str, goal: str) -> None:
    gpus = "8xH100"
    found = meshwright("recommend", model, "--gpus", gpus, "--goal", goal, f"data.dataset={chats}", "--json").json
    images = [change for change in found["changes"] if change["field"] == "data.images"]
    assert images[0]["to"] is False
    assert "no images" in images[0]["why"]
    assert "data.images=false" in json.dumps(found["commands"])


@pytest.mark.parametrize("make", [_alpaca, _csv])
def test_other_text_files_too(meshwright: Any, tmp_path: Path, make: Any) -> None:
    found = meshwright("estimate", "gemma3_vl_4b_sft_config", "--dataset", str(make(tmp_path)), "--json").json
    assert [one["to"] for one in found["changes"] if one["field"] == "data.images"] == [False]


@pytest.mark.parametrize(
    "row",
    [
        {**CHAT, "images": ["a.png"]},
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}, CHAT["messages"][1]]},
    ],
)
def test_a_dataset_with_images_keeps_them(meshwright: Any, chats: Path, row: dict[str, Any]) -> None:
    with chats.open("a") as file:  # the images of a late row count too
        file.write(json.dumps(row) + "\n")
    found = meshwright("estimate", "gemma3_vl_4b_sft_config", "--dataset", str(chats), "--json").json
    assert not [one for one in found["changes"] if one["field"] == "data.images"]


def test_images_that_are_asked_for_stay(meshwright: Any, chats: Path) -> None:
    words = ("estimate", "gemma3_vl_4b_sft_config", "--dataset", str(chats), "data.images=true", "--json")
    assert not [one for one in meshwright(*words).json["changes"] if one["field"] == "data.images"]


def _budget(meshwright: Any, chats: Path, *overrides: str) -> dict[str, Any]:
    words = ("recommend", "gemma-3-4b", "--gpus", "1xH100", "--goal", "lora", f"data.dataset={chats}", "train.epochs=3")
    found: dict[str, Any] = meshwright(*words, *overrides, "--json").json
    return found


def test_padding_is_priced_and_packing_suggested(meshwright: Any, chats: Path) -> None:
    padded, packed = _budget(meshwright, chats), _budget(meshwright, chats, "data.packing=true")
    grouped = _budget(meshwright, chats, "data.group_by_length=true")
    tokens = [one["budget"]["tokens"] for one in (padded, grouped, packed)]
    assert tokens[0] > 20 * tokens[1] > 20 * tokens[2] / 3
    hours = [one["budget"]["gpu_hours"] for one in (padded, grouped)]
    assert hours[0] > hours[1] > hours[0] * tokens[1] / tokens[0]  # narrow steps use the GPU less well
    pack = [one for one in padded["suggestions"] if "data.packing=true" in one["overrides"]]
    assert "times less time" in pack[0]["why"]
    assert not [one for one in packed["suggestions"] if "data.packing=true" in one["overrides"]]


def test_long_samples_need_no_packing(meshwright: Any, tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    row = {"messages": [CHAT["messages"][0], {"role": "assistant", "content": "words " * 4000}]}
    path.write_text(json.dumps(row) + "\n")
    found = _budget(meshwright, path)
    assert not [one for one in found["suggestions"] if "packing" in json.dumps(one)]


@pytest.mark.parametrize("goal", ["qlora", "lora"])
def test_adapters_may_be_trained_on_copies_of_the_weights(meshwright: Any, goal: str) -> None:
    found = meshwright("recommend", "qwen3-4b", "--gpus", "2xRTX4090", "--goal", goal, "--json").json
    assert found["layout"]["pp"] == 1
    pinned = meshwright(
        "estimate",
        "qwen3_4b_peft_config",
        "--gpus",
        "2xRTX4090",
        *(f"peft.method={goal}", "layout.dp_replicate=2", "--json"),
    )
    assert found["estimate"]["step_s"] <= 1.02 * pinned.json["estimate"]["step_s"]


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_ddp_keeps_frozen_weights_once(meshwright: Any, method: str) -> None:
    words = ("estimate", "qwen3_8b_peft_config", "--gpus", "2xRTX4090", f"peft.method={method}", "--json")
    ddp, copies = (meshwright(*words, one).json["estimate"] for one in ("layout.strategy=ddp", "layout.dp_replicate=2"))
    assert ddp["memory_gib"]["total"] == pytest.approx(copies["memory_gib"]["total"], rel=0.02)


OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.32 GiB. "
    "GPU 0 has a total capacity of 23.64 GiB of which 1.10 GiB is free. "
    "Including non-PyTorch memory, this process has 22.53 GiB memory in use. Of the allocated memory 20.11 GiB is "
    "allocated by PyTorch, and 1.72 GiB is reserved by PyTorch but unallocated.\n"
)


def test_remedies_need_less_than_the_run_did(meshwright: Any, tmp_path: Path) -> None:
    (tmp_path / "oom.txt").write_text(OOM)
    words = ("doctor", str(tmp_path / "oom.txt"), "--model", "qwen3-8b", "--gpus", "2xRTX4090", "--goal", "lora")
    finding = meshwright(*words, "--json").json["findings"][0]
    values = {one["name"]: one["value"] for one in finding["evidence"]}
    needed = values["needed by this run"]
    assert needed > values["estimate"]
    assert f"needed at least {needed:.1f} GiB" in finding["message"]
    peaks = [one["peak_gib"] for one in finding["remedies"] if one.get("peak_gib")]
    assert peaks
    assert all(peak < needed for peak in peaks)


def _hf_lines(steps: int, text: str) -> str:
    """Return a log as transformers 5 writes it: tqdm's bar, cleared and drawn again around every record."""
    out = []
    for step in range(10, steps + 1, 10):
        bar = f"{step:3d}%|█    | {step}/{steps} [00:{step // 10 * 2:02d}<01:00,  5.00it/s]"
        out.append(f"\r{bar}\r      \r{text.format(loss=3 - step / 100)}\n\r{bar}")
    return "".join(out)


@pytest.mark.parametrize(
    "text",
    [
        "{{'loss': {loss}, 'grad_norm': 0.81, 'learning_rate': 2e-05, 'epoch': 0.1}}",
        "{{'loss': '{loss}', 'grad_norm': '0.81', 'learning_rate': '2e-05', 'epoch': '0.1'}}",
        "[INFO|callbacks.py:312] >> {{'loss': {loss}, 'learning_rate': 2e-05, 'epoch': 0.1, 'throughput': 1200.0}}",
    ],
)
def test_logs_of_the_hugging_face_trainer(meshwright: Any, tmp_path: Path, text: str) -> None:
    log = tmp_path / "hf.log"
    log.write_text(_hf_lines(100, text) + "\n{'train_runtime': 20.0, 'train_samples_per_second': 40.0}\n")
    found = meshwright("doctor", str(log), "--json").json
    assert (found["kind"], found["last_step"]) == ("transformers", 100)
    assert not [one for one in found["findings"] if one["severity"] == "error"]
    log.write_text(_hf_lines(50, text) + "\n{'loss': nan, 'grad_norm': nan, 'learning_rate': 2e-05, 'epoch': 0.3}\n")
    assert [one["rule"] for one in meshwright("doctor", str(log), "--json").json["findings"]] == ["loss.not-a-number"]


def test_trainer_state_of_a_checkpoint(meshwright: Any, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-30"
    folder.mkdir()
    history = [{"epoch": 0.1, "grad_norm": 0.5, "learning_rate": 2e-5, "loss": 3.0, "step": step} for step in (10, 20)]
    history.append({"epoch": 0.3, "grad_norm": float("nan"), "learning_rate": 2e-5, "loss": 0.0, "step": 30})
    state = {"global_step": 30, "max_steps": 100, "log_history": history}
    (folder / "trainer_state.json").write_text(json.dumps(state, indent=2))
    found = meshwright("doctor", str(tmp_path), "--json").json
    assert found["last_step"] == 30
    assert [one["rule"] for one in found["findings"]] == ["loss.not-a-number"]


@pytest.mark.parametrize(
    "text",
    [
        "{'loss': nan, 'grad_norm': nan, 'learning_rate': 2e-05, 'epoch': 0.3}",
        "{'loss': '0', 'grad_norm': 'nan', 'learning_rate': '2e-05', 'epoch': '0.3'}",
        "RuntimeError: Loss is NaN at step 12",
        "ValueError: loss is inf",
    ],
)
def test_nan_lines_are_explained(meshwright: Any, text: str) -> None:
    found = meshwright("explain", text, "--json").json
    assert "loss.not-a-number" in json.dumps(found)


def test_eval_steps_of_other_trainers_become_steps_between_validations(meshwright: Any) -> None:
    asked = ("recommend", "qwen3-8b", "--gpus", "1xH100", "--goal", "lora", "data.validation_part=0.05")
    refused = meshwright(*asked, "eval_steps=5")
    assert refused.code == 2
    assert "eval_steps=5: is the number of steps between two validations in other trainers" in refused.err
    assert "fix:   train.eval_every=5\n" in refused.err
    (fixed,) = [
        one
        for one in meshwright(*asked, "train.eval_every=5").out.splitlines()
        if "train.eval_every" in one and "→" in one
    ]
    assert "0 → 5" in fixed
    own = meshwright(*asked, "train.eval_every=5", "train.eval_steps=5", "--json").json
    assert "unused.eval-steps" not in {one["rule"] for one in own["findings"]}


def test_habits_are_reported_together_with_their_values(meshwright: Any) -> None:
    words = ("warmup_ratio=0.03", "gradient_accumulation_steps=4", "train.steps=1000", "learnig_rate=0.001")
    answer = meshwright("recommend", "qwen3-8b", "--gpus", "2xH100", "--goal", "lora", *words)
    assert answer.code == 2
    for part in ("schedule.warmup_steps=30", "train.global_batch_size=8", "learning_rate=0.001"):
        assert part in answer.err
    assert "…" not in answer.err


def test_words_of_axolotl_and_short_fixes(meshwright: Any) -> None:
    words = ("sample_packing=true", "sequence_len=1024", "lora_target_linear=true", "val_set_size=0.05")
    found = meshwright("recipe", "qwen3_8b_peft_config", *words, "--json")
    assert found.code == 0, found.err
    lines = meshwright(
        "explain", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    ).out.splitlines()
    assert len(lines) < 40
    assert any("meshwright doctor" in line for line in lines)
