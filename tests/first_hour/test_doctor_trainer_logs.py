"""doctor on logs of TRL and the Trainer, the shipped table without a network, and small data."""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.first_hour.test_doctor_stated_values import figures, finding

ROOT = Path(__file__).parents[2]
PROGRAM = """
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

bnb = BitsAndBytesConfig(load_in_4bit=True)
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-4B", quantization_config=bnb)
ds = load_dataset("some/data", split="train")
args = SFTConfig(output_dir="out", max_length=4096, packing=PACKING, num_train_epochs=3,
    per_device_train_batch_size=1, gradient_accumulation_steps=BATCH, learning_rate=2e-4, bf16=True,
    gradient_checkpointing=True, lr_scheduler_type="cosine", warmup_ratio=0.03)
peft_config = LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
SFTTrainer(model=model, args=args, train_dataset=ds, peft_config=peft_config).train()
"""
SCRIPT = """accelerate launch --num_processes 2 --mixed_precision bf16 trl/scripts/sft.py \\
    --model_name_or_path Qwen/Qwen3-4B --dataset_name some/data --learning_rate 2.0e-4 --num_train_epochs 3 \\
    --packing --max_length 4096 --per_device_train_batch_size 2 --gradient_accumulation_steps 8 \\
    --gradient_checkpointing --use_peft --load_in_4bit --lora_r 32 --lora_target_modules all-linear \\
    --lr_scheduler_type cosine --output_dir out
"""
END = (
    "{'train_runtime': 5911.3, 'train_samples_per_second': 0.49, 'train_steps_per_second': 0.061, 'train_loss': 1.2, "
    "TOKENS'epoch': 3.0}\n"
)


def trl_log(
    rate: float = 2e-4, tokens: str = "'num_tokens': {seen}.0, ", diverges: bool = False, end: str = "", batch: int = 8
) -> str:
    """Return a log of TRL: 360 steps of 16.4 s and 4,096 tokens per sample, one record every 10."""
    text = "trainable params: 66,060,288 || all params: 4,088,528,384 || trainable%: 1.6158\n"
    for step in range(10, 361, 10):
        loss, norm = 1.9 * math.exp(-step / 80) + 1, 0.6
        if diverges and step >= 180:
            loss, norm = min(11.0, 1.4 * 1.35 ** ((step - 170) / 10)), 30.0
        lr = rate * 0.5 * (1 + math.cos(math.pi * step / 360))
        seen = tokens.format(seen=step * batch * 4096)
        text += (
            f"{{'loss': {loss:.4f}, 'grad_norm': {norm}, 'learning_rate': {lr:.6g}, {seen}"
            f"'mean_token_accuracy': 0.7, 'epoch': {step / 120:.2f}}}\n"
        )
    return text + END.replace("TOKENS", end)


def rules(answer: dict[str, Any]) -> list[str]:
    return [one["rule"] for one in answer["findings"]]


@pytest.mark.parametrize(
    "tokens", ["'num_tokens': {seen}.0, ", "'num_tokens': {seen}, ", "'num_input_tokens_seen': {seen}, "]
)
def test_tokens_of_a_trainers_log_give_its_speed(meshwright: Any, tmp_path: Path, tokens: str) -> None:
    (log := tmp_path / "hf.log").write_text(trl_log(1e-4, tokens))
    answer = meshwright("doctor", str(log), "--recipe", "qwen3_4b_peft_config", "--gpus", "3090", "--json")
    assert figures(answer.json)["tokens/s/GPU"] == pytest.approx(32768 / 16.42, rel=0.01)
    assert answer.json["findings"] == []
    assert answer.code == 0
    assert any("32,768 tokens per step" in note for note in answer.json["notes"])


@pytest.mark.parametrize("step_s", [0.4, 1.4, 13.0])
def test_whole_seconds_of_a_progress_bar_give_the_step_time(meshwright: Any, tmp_path: Path, step_s: float) -> None:
    text = ""
    for step in range(1, 101):
        passed = int(step * step_s)
        bar = f"{step}%|#| {step}/100 [{passed // 60:02d}:{passed % 60:02d}<01:00, {1 / step_s:.2f}it/s]"
        text += f"\r{bar}\n{{'loss': {2 - step / 200}, 'learning_rate': 0.0001, 'epoch': {step / 100}}}\n"
    (tmp_path / "bars.log").write_text(text)
    found = meshwright("doctor", str(tmp_path / "bars.log"), "--json").json
    assert figures(found)["step time"] == pytest.approx(step_s, rel=0.06)


def test_the_last_line_gives_tokens_per_second_of_one_device(meshwright: Any, tmp_path: Path) -> None:
    (log := tmp_path / "hf.log").write_text(trl_log(1e-4, "", end="'train_tokens_per_second': 1995.5, "))
    answer = meshwright("doctor", str(log), "--recipe", "qwen3_4b_peft_config", "--gpus", "3090", "--json").json
    assert figures(answer)["tokens/s/GPU"] == pytest.approx(1995.5, rel=0.01)


def test_a_batch_that_only_a_shipped_recipe_has_is_no_measurement(meshwright: Any, tmp_path: Path) -> None:
    (log := tmp_path / "hf.log").write_text(trl_log(1e-4, ""))
    answer = meshwright("doctor", str(log), "--recipe", "qwen3_4b_peft_config", "--gpus", "3090", "--json")
    assert "tokens/s/GPU" not in figures(answer.json)
    assert answer.json["findings"] == []
    assert "train.global_batch_size=N" in answer.json["not_examined"]["speed.low-mfu"]
    note = next(one for one in answer.json["notes"] if "global batch size" in one)
    assert "the step time is not compared with an estimate; train.global_batch_size=N compares it" in note
    assert "the estimate assumes" not in note, "there is no estimate to compare with"


def test_tokens_per_step_are_compared_with_the_file(meshwright: Any, tmp_path: Path) -> None:
    (log := tmp_path / "hf.log").write_text(trl_log())
    (program := tmp_path / "sft_train.py").write_text(PROGRAM.replace("BATCH", "16").replace("PACKING", "True"))
    typed = ("doctor", str(log), "--recipe", str(program), "--gpus", "3090", "--json")
    answer = meshwright(*typed).json
    message = finding(answer, "run.differs-from-file")["message"]
    assert "32,768 tokens per step fit a global batch of 8" in message
    assert "says 16" in message
    assert figures(answer)["tokens/s/GPU"] == pytest.approx(1996, rel=0.01)
    program.write_text(PROGRAM.replace("BATCH", "8").replace("PACKING", "True"))
    assert "run.differs-from-file" not in rules(meshwright(*typed).json)
    program.write_text(PROGRAM.replace("BATCH", "16").replace("PACKING", "False"))
    unpacked = meshwright(*typed).json
    assert rules(unpacked) == [], "samples that are not packed are shorter than the length"
    assert any("2,048 tokens on average" in note for note in unpacked["notes"])


def test_a_learning_rate_unlike_the_files_is_the_first_suspect(meshwright: Any, tmp_path: Path) -> None:
    (log := tmp_path / "hf.log").write_text(trl_log(2e-3, diverges=True))
    (script := tmp_path / "trl.sh").write_text(SCRIPT)
    answer = meshwright("doctor", str(log), "--recipe", str(script), "--json").json
    found = [one["message"] for one in answer["findings"] if one["rule"] == "run.differs-from-file"]
    assert any("global batch of 8" in one for one in found)
    assert any("learning rate reaches 0.002" in one for one in found)
    diverging = finding(answer, "loss.diverging")
    assert "First suspect: the learning rate reaches" in diverging["message"]
    assert "train with the 0.0002 of" in diverging["remedies"][0]["try"][0]
    assert not any("clip" in word for one in diverging["remedies"] for word in one["try"])
    assert "speed.low-mfu" not in rules(answer), "the GPUs are assumed"


def test_a_rate_far_above_the_recipes_is_the_first_suspect(meshwright: Any, tmp_path: Path) -> None:
    (log := tmp_path / "hf.log").write_text(trl_log(2e-3, diverges=True))
    answer = meshwright("doctor", str(log), "--recipe", "qwen3_4b_peft_config", "--gpus", "3090", "--json").json
    assert finding(answer, "loss.diverging")["remedies"][0]["try"] == ["optimizer.lr=0.0001"]


def test_a_rate_that_still_rises_or_a_resumed_log_is_not_below_the_files(meshwright: Any, tmp_path: Path) -> None:
    lines = trl_log().splitlines(keepends=True)
    (script := tmp_path / "sft_train.py").write_text(PROGRAM.replace("BATCH", "8").replace("PACKING", "True"))
    rising = "".join(
        f"{{'loss': 1.5, 'grad_norm': 0.6, 'learning_rate': {n * 1e-6:.3g}, 'epoch': {n / 100}}}\n"
        for n in range(1, 40)
    )
    for text in (rising, "".join(lines[20:])):
        (log := tmp_path / "hf.log").write_text(text)
        answer = meshwright("doctor", str(log), "--recipe", str(script), "--gpus", "3090", "--json").json
        assert not [one for one in answer["findings"] if "learning rate reaches" in one["message"]]


def test_the_defaults_of_a_trainer_are_no_remedies(meshwright: Any, tmp_path: Path) -> None:
    (log := tmp_path / "hf.log").write_text(trl_log(diverges=True))
    answer = meshwright("doctor", str(log)).out
    assert "loss.diverging" in answer
    assert "max_grad_norm" not in answer


def test_a_better_layout_names_what_differs(meshwright: Any, tmp_path: Path) -> None:
    (log := tmp_path / "hf.log").write_text(trl_log(batch=32))
    (script := tmp_path / "trl.sh").write_text(SCRIPT)
    answer = meshwright("doctor", str(log), "--recipe", str(script), "--gpus", "2xH100", "--json").json
    message = finding(answer, "speed.better-layout")["message"]
    assert "the layout (recompute=full)" in message
    assert "(recompute=none" in message
    assert "tp=1" not in message


def test_the_model_of_a_trainers_log_is_the_typed_one(meshwright: Any, tmp_path: Path) -> None:
    (log := tmp_path / "hf.log").write_text(
        "{'loss': 2.31, 'grad_norm': 1.2, 'learning_rate': 2e-05, 'epoch': 0.01}\n"
        "{'loss': 2.10, 'grad_norm': 1.3, 'learning_rate': 2e-05, 'epoch': 0.02}\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.91 GiB. GPU 0 has a total capacity of 79.10 "
        "GiB of which 1.2 GiB is free.\n"
    )
    answer = meshwright("doctor", str(log), "--model", "mistralai/Mistral-7B-v0.1", "--gpus", "8xH100", "--json").json
    assert (answer["recipe"], answer["model"]) == (None, "mistral_7b_v01")
    assert any("data parallelism over 8 GPUs" in note for note in answer["notes"])
    tries = [text for one in finding(answer, "memory.out-of-memory")["remedies"] for text in one["try"]]
    assert tries
    assert not [text for text in tries if text.startswith(("layout.tp", "layout.pp", "layout.cp"))]


def test_the_readmes_log_agrees_with_its_model(meshwright: Any) -> None:
    log = ROOT / "examples" / "logs" / "torchtitan_slow.log"
    answer = meshwright("doctor", str(log), "--recipe", "llama3-8b", "--gpus", "8xH100", "--json").json
    shown = figures(answer)
    assert 1 < shown["MFU in the log"] / shown["MFU"] < 1.15, "torchtitan counts all of attention"
    assert rules(answer) == ["speed.slow-data"]
    assert not [note for note in answer["notes"] if "not what ran" in note]


@pytest.fixture
def no_sockets(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Refuse every connection and lookup; the result returns those that were tried."""
    tried: list[str] = []

    def refused(*arguments: Any, **_: Any) -> Any:
        tried.append(str(arguments[:2]))
        raise OSError("refused by the test")

    monkeypatch.setattr(socket, "getaddrinfo", refused)
    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return lambda: tried


READ_ONLY = (
    "models", "models llama", "models llama3-8b", "gpus", "recipes", "recipe llama3_8b_pretrain_config",
    "rules", "rules batch.divides", "explain loss.diverging", "inspect llama3-8b", "estimate llama3_8b_pretrain_config",
    "recommend llama3-8b --goal pretrain --gpus 8xH100", "size llama3-8b --goal pretrain --gpus H100",
    "calibrate --template", "check llama3_8b_pretrain_config --gpus 8xH100", "--version", "--help",
)  # fmt: skip


@pytest.mark.parametrize("typed", READ_ONLY)
def test_shipped_data_needs_no_connection(meshwright: Any, no_sockets: Callable[[], list[str]], typed: str) -> None:
    assert meshwright(*typed.split()).code == 0
    assert no_sockets() == []


def test_no_row_of_the_shipped_table_asks_the_hub(no_sockets: Callable[[], list[str]]) -> None:
    from meshwright import api, hub
    from meshwright.costs.measurements import read_with_notes

    assert "HF_HUB_OFFLINE" not in os.environ
    with hub.no_downloads():
        read_with_notes(api.shipped_measurements())
    assert no_sockets() == []


def test_the_template_of_runs_calibrates_with_the_command_in_its_header(
    meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs.csv").write_text(meshwright("calibrate", "--template").out)
    assert meshwright("calibrate", "runs.csv", "--out", "mine.toml").code == 0
    assert Path("mine.toml").exists()


def rows(count: int) -> str:
    text = "Der Rat der Stadt hat beschlossen, die Brücke bis zum Herbst zu erneuern. " * 12
    return "".join(f'{{"prompt": "Frage {n}: {text}", "completion": "{text}"}}\n' for n in range(count))


def test_small_data_has_a_warm_up_and_validations_that_fit_it(
    meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("chat.jsonl").write_text(rows(300))
    typed = ("recommend", "qwen3-4b", "--gpus", "3090", "--goal", "lora", "--dataset", "chat.jsonl", "train.epochs=3")
    answer = meshwright(*typed, "data.validation_part=0.05", "--json").json
    steps = answer["budget"]["steps"]
    changed = {one["field"]: one for one in answer["changes"]}
    warmup = changed["schedule.warmup_steps"]
    assert int(warmup["to"]) == max(1, steps // 10)
    assert warmup["why"].startswith("follows the data: 50 warm-up steps are more than half")
    assert 1 <= int(changed["train.eval_every"]["to"]) <= steps // 4
    command = answer["commands"]["meshwright"]
    assert f"schedule.warmup_steps={warmup['to']}" in str(command)
    assert "train.eval_every=" in str(command)
    assert not [one for one in answer["findings"] if one["rule"] == "learning_rate.warmup-too-long"]
    kept = meshwright(
        *typed, "schedule.warmup_steps=40", "data.validation_part=0.05", "train.eval_every=0", "--json"
    ).json
    assert "schedule.warmup_steps=40" in str(kept["commands"]["meshwright"])
    assert "train.eval_every=" not in str(kept["commands"]["meshwright"]).replace("train.eval_every=0", "")


def test_no_option_repeats_the_plan_and_8_bit_moments_are_offered(
    meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    typed = ("recommend", "llama3.2-1b", "--gpus", "3090", "--goal", "sft", "--seq", "4k", "train.global_batch_size=8")
    shown = meshwright(*typed).out
    answer = meshwright(*typed, "--json").json
    assert answer["estimate"]["fits"]
    assert "8-bit moments (contract)" in shown
    assert "optimizer.name=adamw8bit" in shown
    plan = answer["estimate"]
    same = [
        one for one in answer["options"] if one["total_gib"] == pytest.approx(plan["memory_gib"]["total"], rel=1e-3)
    ]
    for one in same:
        assert one["command"] not in shown


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("models qwen3-moe", "qwen3_30b_a3b"),
        ("gpus 4090ti", "RTX4090"),
        ("recommend llama3-8b --goal sft --gpus 8x4090ti", "RTX4090"),
    ],
)
def test_names_of_families_and_variants_are_suggested(meshwright: Any, typed: str, meant: str) -> None:
    error = meshwright(*typed.split()).err
    assert "did you mean" in error
    assert meant in error


@pytest.mark.parametrize("verb", ["recipes", "gpus", "models", "rules", "accuracy"])
def test_usage_shows_optional_arguments_in_brackets(meshwright: Any, verb: str) -> None:
    usage = meshwright(verb, "--help").out.splitlines()[0]
    assert usage.endswith("]")
    assert meshwright("inspect", "--help").out.splitlines()[0].endswith(" MODEL")


UNPACKED = """
from datasets import load_dataset
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-4B", dtype="bfloat16")
ds = load_dataset("json", data_files="chats.jsonl", split="train")
args = SFTConfig(output_dir="out", max_length=4096, num_train_epochs=3, per_device_train_batch_size=4,
    gradient_accumulation_steps=2, learning_rate=2e-5, bf16=True)
SFTTrainer(model=model, args=args, train_dataset=ds).train()
"""


def unpacked_run(folder: Path, seconds: float) -> Path:
    """Write a program whose samples are not packed, and the log of its run, which states no tokens."""
    row = {"prompt": "How do I block my card? " * 4, "completion": "Open the app. " * 20}
    folder.mkdir(exist_ok=True)
    (folder / "chats.jsonl").write_text(f"{json.dumps(row)}\n" * 2000)
    (folder / "train.py").write_text(UNPACKED)
    text = "  Num examples = 2,000\n  Total train batch size (w. parallel, distributed & accumulation) = 8\n"
    for step in range(10, 361, 10):
        took = round(step * seconds)
        text += f"  5%|█         | {step}/750 [{took // 60:02d}:{took % 60:02d}<20:00,  {seconds:.2f}s/it]\n"
        text += f"{{'loss': {1 + 100 / (step + 100):.4f}, 'grad_norm': 0.6, 'learning_rate': 2e-05}}\n"
    (log := folder / "hf.log").write_text(text)
    return log


def test_unpacked_samples_of_the_trainer_are_as_wide_as_the_rows_of_the_data(meshwright: Any, tmp_path: Path) -> None:
    log = unpacked_run(tmp_path / "run", 0.5)  # read from another folder: the path of the data is that of the program
    words = ("--recipe", str(tmp_path / "run/train.py"), "--gpus", "1xA100-80")
    answer = meshwright("doctor", str(log), *words, "--json").json
    shown = {one["name"]: one for one in answer["figures"]}
    assert 8 * 60 / 0.5 < shown["tokens/s/GPU"]["measured"] < 8 * 120 / 0.5
    assert shown["step time"]["measured"] == 0.5
    assert shown["step time"]["estimate"] < 0.4  # of samples as wide as these, not of 2,048 tokens
    assert any("tokens on average, counted in chats.jsonl" in note for note in answer["notes"])
    assert not any("times as fast" in note or "impossible" in note for note in answer["notes"])
    fitted = meshwright("calibrate", str(log), *words, "--json")
    assert fitted.code == 0, fitted.err


def test_rows_that_are_not_here_leave_the_speed_of_unpacked_samples_open(meshwright: Any, tmp_path: Path) -> None:
    log = unpacked_run(tmp_path, 2.0)
    (tmp_path / "chats.jsonl").unlink()
    words = ("--recipe", str(tmp_path / "train.py"), "--gpus", "1xA100-80")
    answer = meshwright("doctor", str(log), *words, "--json").json
    assert not {"tokens/s/GPU", "MFU"} & {one["name"] for one in answer["figures"]}
    length = "data.seq_length=100 data.pad_to_max_length=true"
    assert any(length.replace("100", "N") in note for note in answer["notes"])
    typed = figures(meshwright("doctor", str(log), *words, *length.split(), "--json").json)
    assert typed["tokens/s/GPU"] == pytest.approx(8 * 100 / 2, rel=0.02)
    assert "micro batch is padded" in meshwright("calibrate", str(log), *words).err


def test_a_rate_far_below_that_of_the_file_is_the_first_remedy_of_a_flat_loss(meshwright: Any, tmp_path: Path) -> None:
    unpacked_run(tmp_path, 0.5)
    rest = "'grad_norm': 0.001, 'learning_rate': 1e-07"
    lines = (f"{{'loss': {1.87 + step % 3 / 100:.4f}, {rest}, 'epoch': {step / 250}}}" for step in range(10, 400, 10))
    (log := tmp_path / "flat.log").write_text("\n".join(lines) + "\n")
    words = ("--recipe", str(tmp_path / "train.py"), "--gpus", "1xA100-80", "--json")
    flat = finding(meshwright("doctor", str(log), *words).json, "loss.flat")
    assert flat["remedies"][0]["try"] == [f"train with the 2e-05 of {tmp_path / 'train.py'}"]


@pytest.mark.parametrize(("trained", "adapters"), [(40_370_176, True), (4_022_468_096, False)])
def test_trained_parameters_show_whether_the_file_is_of_adapters(
    meshwright: Any, tmp_path: Path, trained: int, adapters: bool
) -> None:
    log = unpacked_run(tmp_path, 0.5)
    log.write_text(f"  Number of trainable parameters = {trained:,}\n{log.read_text()}")
    full = (tmp_path / "train.py").read_text()
    lora = 'peft_config=LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")'
    (tmp_path / "lora.py").write_text("from peft import LoraConfig\n" + full.replace("args=args", f"args=args, {lora}"))
    for name, differs in (("train.py", adapters), ("lora.py", not adapters)):
        words = ("doctor", str(log), "--recipe", str(tmp_path / name), "--gpus", "1xA100-80", "--json")
        assert ("run.differs-from-file" in rules(meshwright(*words).json)) is differs, name


def test_a_loss_that_is_not_a_number_in_fp16_is_answered_with_bf16_first(meshwright: Any) -> None:
    Path("lora.yaml").write_text(
        "model_name_or_path: Qwen/Qwen2.5-7B-Instruct\nstage: sft\ndo_train: true\nfinetuning_type: lora\n"
        "lora_rank: 16\nlora_target: all\ntemplate: qwen\ndataset: faq\ncutoff_len: 1024\noutput_dir: out\n"
        "per_device_train_batch_size: 2\ngradient_accumulation_steps: 8\nlearning_rate: 1.0e-4\n"
        "num_train_epochs: 6.0\nfp16: true\n"
    )
    rows = [{"loss": 2 - n / 100, "grad_norm": 0.7, "learning_rate": 1e-4, "epoch": n / 26} for n in range(5, 121, 5)]
    rows += [{"loss": 0.0, "grad_norm": math.nan, "learning_rate": 5e-5, "epoch": n / 26} for n in range(125, 156, 5)]
    Path("nan.log").write_text("".join(f"{row}\n" for row in rows))
    said = meshwright("doctor", "nan.log", "--recipe", "lora.yaml", "--gpus", "2xRTX3090", "--json").json
    (found,) = [one for one in said["findings"] if one["rule"] == "loss.not-a-number"]
    assert found["remedies"][0]["there"] == ["bf16: true", "fp16: false"]


SHORT_SAMPLES = """
from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

args = SFTConfig(output_dir="out", max_length=2048, per_device_train_batch_size=1, gradient_accumulation_steps=16,
    model_init_kwargs={"dtype": "bfloat16"}, learning_rate=2e-4, bf16=True, gradient_checkpointing=True)
SFTTrainer(model="Qwen/Qwen3-8B", args=args, train_dataset=load_dataset("json", data_files="notes.jsonl")["train"],
    peft_config=LoraConfig(r=16, task_type="CAUSAL_LM", target_modules="all-linear")).train()
"""


@pytest.mark.parametrize("typed", [(), ("data.seq_length=410",)])
def test_remedies_of_short_samples_fit_the_longest_ones(
    meshwright: Any, tmp_path: Path, typed: tuple[str, ...]
) -> None:
    (file := tmp_path / "sft.py").write_text(SHORT_SAMPLES)
    text = ""
    for step in range(5, 226, 5):
        took = round(step * 21.3)
        text += f"{{'loss': '1.4', 'grad_norm': '0.5', 'learning_rate': '1e-4', 'num_tokens': '{step * 16 * 410}'}}\n"
        text += f"  5%|█         | {step}/225 [{took // 60:02d}:{took % 60:02d}<20:00, 21.30s/it]\n"
    (log := tmp_path / "trl.log").write_text(text)
    words = ("--recipe", str(file), "--gpus", "1xRTX4090", "--json")
    answer = meshwright("doctor", str(log), *words, *typed).json
    shown = {one["name"]: one for one in answer["figures"]}
    assert 3 < shown["step time"]["estimate"] < 5  # of 410 tokens; 2,048 take 18 s
    assert any("410 tokens on average" in note and "2,048" in note for note in answer["notes"])
    slow = finding(answer, "speed.low-mfu")
    assert all("layout.recompute=none" not in one["try"] for one in slow["remedies"])  # 35 GiB for the longest sample
    assert "speed.better-layout" not in [one["rule"] for one in answer["findings"]]
    assert any(one["try"] == ["dataloader_num_workers=4"] for one in slow["remedies"])
