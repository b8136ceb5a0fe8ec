"""`doctor` on the logs of every framework: printed fixes work, and late, slow and sudden problems are found."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.doctor.fake_runs import FakeStep, healthy, write_megatron
from tests.first_hour.test_doctor_stated_values import figures, megatron

SCRIPT = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 4 --seq-length 8192 "
    "--micro-batch-size 1 --global-batch-size 384 --bf16 --lr 3e-4 --train-iters 1000\n"
)


def rules(answer: dict[str, Any]) -> list[str]:
    return [one["rule"] for one in answer["findings"]]


def test_the_fix_for_a_file_without_a_model_works(meshwright: Any, tmp_path: Path) -> None:
    log, script = tmp_path / "train.log", tmp_path / "run.sh"
    log.write_text(megatron())
    script.write_text(SCRIPT)
    typed = ("doctor", str(log), "--recipe", str(script), "--gpus", "96xA100-80")
    refused = meshwright(*typed)
    fix = refused.err.partition("fix:")[2].split("|")[0].split()
    assert fix[0] == "--model"
    answer = meshwright(*typed, *fix, "--json").json
    assert answer["engine"] == "megatron"
    assert figures(answer)["tokens/s/GPU"] > 0
    unnamed = meshwright("doctor", str(log), "--recipe", str(script), *fix, "--json").json
    assert any("does not name the GPUs" in note for note in unnamed["notes"])


def torchtitan(memory: Callable[[int], float], steps: int = 1000, extra: Callable[[int], str] = lambda step: "") -> str:
    """Return the log of a torchtitan run on 8 GPUs."""
    begin = "[rank0]:[titan] 2026-11-01 00:00:00,000 - root - INFO - "
    return "".join(
        f"{begin}step: {step:2}  loss: {2.4 + 8 / (step + 5):8.5f}  grad_norm:  0.6000  memory: {memory(step):5.2f}GiB"
        f"({memory(step) / 0.8:.2f}%)  tps: {7_000 + step % 7:,}  tflops: 400.00  mfu: 40.00%\n{extra(step)}"
        for step in range(1, steps + 1)
    )


def test_late_and_sudden_memory_growth_is_found(meshwright: Any, tmp_path: Path) -> None:
    log = tmp_path / "train.log"

    def found(text: str) -> list[tuple[str, int, str]]:
        log.write_text(text)
        answer = meshwright("doctor", str(log), "--json").json
        return [(one["rule"], one["steps"][0], one["message"]) for one in answer["findings"]]

    ((rule, start, message),) = found(torchtitan(lambda step: 50 + max(0, step - 500) / 100))
    assert (rule, start) == ("memory.growing", 502)
    assert "10 GiB per 1,000 steps since step 502" in message
    ((rule, start, message),) = found(torchtitan(lambda step: 65 if step >= 600 else 50))
    assert (rule, start) == ("memory.jumped", 600)
    assert "from 50.0 to 65.0 GiB (30%) in step 600" in message
    healthy: dict[str, Callable[[int], float]] = {
        "flat": lambda step: 50,
        "noisy": lambda step: 50 + 5 * math.sin(step * step),
        "warm-up": lambda step: 30 if step < 9 else 50,
        "evaluation": lambda step: 60 if step % 100 == 0 else 50,
        "plateau": lambda step: 50 + min(step, 300) / 50,
    }
    for name, memory in healthy.items():
        assert found(torchtitan(memory)) == [], name
    done = (
        "[titan] 2026-11-01 00:00:00,000 - root - INFO - validate step: 600  loss:  2.9000  memory: 65.00GiB(80.00%)\n"
    )
    after = torchtitan(lambda step: 65 if step > 600 else 50, extra=lambda step: done if step == 600 else "")
    assert found(after) == []  # the allocator keeps what the evaluation needed
    crashed = torchtitan(lambda step: 65 if step >= 600 else 50)
    out = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.00 GiB.\n"
    assert "higher since step 600" in next(one[2] for one in found(crashed + out) if one[0] == "memory.out-of-memory")


def held_out(step: int) -> float:
    return 2.0 + abs(step - 400) / 400


def hf(step: int) -> dict[str, float]:
    return {"loss": 2.5 - step / 1000, "grad_norm": 0.6, "learning_rate": 3e-4, "epoch": step / 100}


def hf_console() -> str:
    lines = []
    for step in range(10, 1010, 10):
        bar = f"{step // 10:3d}%|█████     | {step}/1000 [{step // 60:02d}:{step % 60:02d}<10:00,  1.00it/s]"
        lines += [str(hf(step)), bar]
        if step % 100 == 0:
            lines.append(str({"eval_loss": held_out(step), "eval_runtime": 1.5, "epoch": step / 100}))
    return "\n".join(lines)


def hf_state() -> str:
    history: list[dict[str, float]] = []
    for step in range(10, 1010, 10):
        history.append({**hf(step), "step": step})
        if step % 100 == 0:
            history.append({"eval_loss": held_out(step), "epoch": step / 100, "step": step})
    return json.dumps({"global_step": 1000, "max_steps": 1000, "log_history": history}, indent=2)


def megatron_validated(name: str = "", on: str = "") -> str:
    lines = []
    for line in megatron(lambda step: 2.5 - step / 1000).splitlines():
        lines.append(line)
        step = int(line.split("iteration")[1].split("/")[0])
        if step % 100 == 0:
            value = f"lm loss value: {held_out(step):.6E} | lm loss PPL: {math.exp(held_out(step)):.6E} | "
            lines += ["-" * 90, f" validation{name} loss at iteration {step}{on} | {value}", "-" * 90]
    return "\n".join(lines)


def test_overfitting_is_found_in_the_logs_of_every_trainer(meshwright: Any, tmp_path: Path) -> None:
    logs = {
        "megatron.log": megatron_validated(),
        "sets.log": megatron_validated("-wiki"),
        "bridge.log": megatron_validated(on=" on validation set"),
        "console.log": hf_console(),
        "trainer_state.json": hf_state(),
    }
    for name, text in logs.items():
        log = tmp_path / name
        log.write_text(text)
        answer = meshwright("doctor", str(log), "--json").json
        found = next((one for one in answer["findings"] if one["rule"] == "loss.overfitting"), None)
        assert found is not None, (name, rules(answer))
        assert found["steps"] == [400, 1000], name
        assert "checkpoint of step 400" in found["remedies"][0]["try"][0]
        assert figures(answer)["best validation loss, step 400"] == 2.0
    lines = []  # three epochs, without a progress bar
    for epoch in range(3):
        lines += [str({"loss": f"{1.2 - 0.1 * epoch - 0.05 * part}", "grad_norm": "0.5"}) for part in range(3)]
        lines.append(str({"eval_loss": f"{1.0 + 0.06 * epoch * (epoch + 1)}", "epoch": f"{epoch + 1}"}))
    (tmp_path / "console.log").write_text("\n".join(lines))
    (found,) = meshwright("doctor", str(tmp_path / "console.log"), "--json").json["findings"]
    assert found["remedies"][0]["try"] == ["use the checkpoint of the validation in line 4"]
    (tmp_path / "megatron.log").write_text(megatron_validated(on=" on test set"))
    answer = meshwright("doctor", str(tmp_path / "megatron.log"), "--json").json
    assert "loss.overfitting" in answer["not_examined"]


PROGRAM = """
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
args = TrainingArguments(output_dir="out", num_train_epochs=10, per_device_train_batch_size=1, learning_rate=6e-4,
                         bf16=True, deepspeed="ds.json")
trainer = Trainer(model=AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B"), args=args)
trainer.train()
"""
SWIFT = """
NPROC_PER_NODE=1 swift sft --model Qwen/Qwen3-0.6B --tuner_type lora --dataset a.jsonl --num_train_epochs 10 \\
    --learning_rate 6e-4 --per_device_train_batch_size 1 --max_length 512
"""


def test_remedies_of_a_training_by_epochs_are_written_as_its_program_has_them(meshwright: Any, tmp_path: Path) -> None:
    (tmp_path / "console.log").write_text(hf_console())
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}')
    for name, text, length in (
        ("train.py", PROGRAM, ["without num_train_epochs", "max_steps=400"]),
        ("sft.sh", SWIFT, ["--max_steps 400"]),
    ):
        (tmp_path / name).write_text(text)
        words = ("doctor", str(tmp_path / "console.log"), "--recipe", str(tmp_path / name), "--gpus", "1xH100")
        findings = {one["rule"]: one for one in meshwright(*words, "--json").json["findings"]}
        remedies = {one["try"][0]: one["there"] for one in findings["loss.overfitting"]["remedies"]}
        assert remedies["train.steps=400"] == length
        assert "run.differs-from-file" in findings
    assert remedies["optimizer.lr=0.00015"] == ["--learning_rate 0.00015"]  # half of the log's, not of the file's


def automodel(steps: int = 60, header: bool = True) -> str:
    """Return the log of AutoModel on 8 GPUs with tp=4: tps is of all, and /gpu is divided by dp × cp = 2 only."""
    begin = "2026-11-01 00:00:00 | INFO | root | "
    lines = [f"{begin}Experiment_details:", f"{begin}World size: 8"] if header else []
    lines += [
        f"{begin}step {step} | epoch 0 | loss {2.4 + 8 / (step + 5):.4f} | grad_norm 0.6000 | lr 1.00e-05 | mem 40.00 "
        f"GiB | tps {56_000 + step % 5:.2f}({28_000 + step % 5 / 2:.2f}/gpu) | num_label_tokens 65536"
        for step in range(steps)
    ]
    return "\n".join(lines)


def test_tokens_per_second_of_automodel_are_divided_by_all_gpus(meshwright: Any, tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    on = ("--model", "llama3-8b", "--gpus", "8xH100")
    log.write_text(automodel())
    for words in ((), on):
        answer = meshwright("doctor", str(log), *words, "--json").json
        assert figures(answer)["tokens/s/GPU"] == pytest.approx(7_000, rel=0.01)
    assert any("tp × pp is 4 on 8 GPUs" in note for note in answer["notes"])
    log.write_text(automodel(header=False))
    assert any("per data-parallel rank (2)" in note for note in meshwright("doctor", str(log), "--json").json["notes"])
    answer = meshwright("doctor", str(log), *on, "layout.tp=4", "--json").json
    assert figures(answer)["tokens/s/GPU"] == pytest.approx(7_000, rel=0.01)
    assert not any("data-parallel rank" in note or "tp × pp" in note for note in answer["notes"])
    refused = meshwright("doctor", str(log), "--model", "llama3-8b", "--gpus", "1xH100")
    assert "a multiple of 2 GPUs" in refused.err
    run = tmp_path / "run"
    run.mkdir()
    record = {"epoch": 0, "lr": 1e-5, "num_label_tokens": 65536, "mem": 40.0}
    rows = [{"step": i, "loss": 2.5 - i / 1000, "tps": 56e3, "tps_per_gpu": 28e3, **record} for i in range(0, 1000, 10)]
    done = [{"step": i, "val_loss": held_out(i), **record} for i in range(0, 1000, 100)]
    (run / "training.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (run / "validation.jsonl").write_text("\n".join(map(json.dumps, done)))
    answer = meshwright("doctor", str(run), "--json").json
    assert rules(answer) == ["loss.overfitting"]
    assert answer["findings"][0]["lines"][0] == f"{run / 'validation.jsonl'}:5"


KEMPNER = """\
[rank 0] INFO     Training config: JobConfig(model=ModelConfig(dim=4096, n_layers=32, max_seq_len=8192), \
train=TrainConfig(batch_size=8, seq_len=4096, max_steps=2000, grad_accum_steps=4))
[rank 0] INFO     DeviceMesh: dims=['dp_shard', 'tp'], sizes=[4, 4], world_size=16
[rank 0] INFO     Detected GPU: NVIDIA H200 → 989.0 bf16 TFLOPS
[rank 0] INFO     Starting training: step=0, max_steps=2000, batch_size=8, grad_accum=4, world_size=16
"""


def kempnerforge() -> str:
    lines = [KEMPNER]
    for step in (1, *range(10, 1010, 10)):
        lines.append(
            f"[rank 0] INFO     [step {step}] loss={2.5 - step / 1000:.4f} | lr=3.00e-04 | grad_norm=1.250 | "
            f"tok/s={160_000 + step % 7 * 10:,} | mfu=45.0% | mem=71.2/140GB | step_time=3.28s\n"
        )
        if step % 100 == 0:
            lines.append(f"[rank 0] INFO     [step {step}] eval/loss={held_out(step):.4f} | eval/perplexity=9.9742\n")
    return "".join(lines)


def test_logs_of_kempnerforge_are_read(meshwright: Any, tmp_path: Path) -> None:
    log = tmp_path / "slurm-4711.out"
    log.write_text(kempnerforge())
    answer = meshwright("doctor", str(log), "--model", "llama3-8b", "--json").json
    assert (answer["kind"], answer["engine"], answer["gpus"]) == ("kempnerforge", "kempnerforge", "2x8xH200")
    assert (answer["last_step"], answer["total_steps"]) == (1000, 2000)
    assert figures(answer)["tokens/s/GPU"] == pytest.approx(10_000, rel=0.01)
    assert figures(answer)["peak memory"] == 71.2
    assert "loss.overfitting" in rules(answer)
    assert not any("does not state" in note for note in answer["notes"])
    bad = "[rank 0] WARNING  NaN/Inf loss at step 1000 (consecutive=1, total=1, last_good_loss=1.5000 at step 999)"
    log.write_text(f"{kempnerforge()}{bad} — skipping optimizer step\n")
    answer = meshwright("doctor", str(log), "--json").json
    nan = next(one for one in answer["findings"] if one["rule"] == "loss.not-a-number")
    assert nan["steps"] == [1001, 1001]
    log.write_text(kempnerforge() + "[rank 0] WARNING  Shutdown requested at step 1000 — saving emergency checkpoint\n")
    assert "run.failed-preemption" in rules(meshwright("doctor", str(log), "--json").json)


def test_remedies_in_the_keys_of_kempnerforge_keep_the_global_batch(meshwright: Any, tmp_path: Path) -> None:
    log = tmp_path / "slurm-4711.out"
    log.write_text(kempnerforge() + "[rank 0] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4 GiB.\n")
    answer = meshwright("doctor", str(log), "--model", "llama3-8b", "--json").json
    found = next(one for one in answer["findings"] if one["rule"] == "memory.out-of-memory")
    changed = [dict(text.split(" = ") for text in one["there"]) for one in found["remedies"] if one["there"]]
    assert any("train.batch_size" in one for one in changed)
    for sizes in changed:
        ranks = 16 // (int(sizes.get("distributed.tp", 4)) * int(sizes.get("distributed.pp", 1)))
        samples = ranks * int(sizes.get("train.batch_size", 8)) * int(sizes.get("train.grad_accum_steps", 4))
        assert samples == 4 * 8 * 4, sizes  # data ranks x batch_size x grad_accum_steps of the log


def test_logs_from_pipes_with_holes_or_without_a_training(
    meshwright: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = megatron()
    first, second = tmp_path / "run1.log", tmp_path / "run2.log"
    lines = text.splitlines(keepends=True)
    first.write_text("".join(lines[:60]))
    second.write_text("".join(lines[60:]))
    refused = meshwright("doctor", str(first), str(second))
    assert f"cat {first} {second} | meshwright doctor -" in refused.err
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert meshwright("doctor", "-", "--json").json["last_step"] == 1000
    log = tmp_path / "train.log"
    log.write_bytes(b"\0" * 64 + text.encode())  # cleared while it was written
    holed = meshwright("doctor", str(log), "--json").json
    assert (holed["steps"], holed["ok"]) == (100, True)
    assert any("64 NUL bytes" in note for note in holed["notes"])
    log.write_text(megatron(norm=lambda step: math.nan if step > 800 else 0.6))
    (nan,) = meshwright("doctor", str(log), "--json").json["findings"]
    assert nan["message"].startswith(
        "the loss is finite, but the gradient norm is NaN or infinite in step 810, in 20 log"
    )
    log.write_bytes(b"PK\x03\x04" + bytes(range(256)) * 40)
    assert "is binary" in meshwright("doctor", str(log)).err
    log.write_text("")
    assert "it is empty" in meshwright("doctor", str(log)).err
    log.write_text('{"iter": 1, "accuracy": 0.5}\n')
    assert "records have the keys iter, accuracy" in meshwright("doctor", str(log)).err
    (tmp_path / "tb").mkdir()
    (tmp_path / "tb" / "events.out.tfevents.1").write_bytes(b"x")
    assert "TensorBoard" in meshwright("doctor", str(tmp_path / "tb")).err


def test_data_that_became_slow_is_the_one_cause(meshwright: Any, tmp_path: Path) -> None:
    """Megatron's timer of the batch generator is part of forward-backward."""

    def later(one: FakeStep) -> FakeStep:
        return replace(one, seconds=one.seconds + 1, data_s=one.data_s + 1) if one.step > 300 else one

    log = tmp_path / "train.log"
    log.write_text(write_megatron(replace(healthy(1000).changed(later), total=1000)))
    found = {one["rule"]: one for one in meshwright("doctor", str(log), "--gpus", "8xH100", "--json").json["findings"]}
    slower, slow = found["speed.sustained-slowdown"], found["speed.slow-data"]
    assert "in loading data" in slower["message"]
    assert slow["steps"] == slower["steps"] == [301, 1000]


def test_one_machine_has_no_other_nodes_to_check(meshwright: Any, tmp_path: Path) -> None:
    def later(one: FakeStep) -> FakeStep:
        return replace(one, seconds=3 * one.seconds) if one.step > 300 else one

    log = tmp_path / "train.log"
    log.write_text(write_megatron(replace(healthy(1000).changed(later), total=1000)))
    machine = meshwright("doctor", str(log), "--recipe", "llama3_8b_pretrain_config", "--gpus", "8xH100").out
    assert "nvidia-smi -q -d PERFORMANCE,ECC  a hot or failing GPU slows all ranks" in machine
    assert "one node at a time" not in machine
