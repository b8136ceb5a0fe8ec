"""Logs of programs that print only DeepSpeed's own messages."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

CONFIG = """[2026-11-01 09:59:50,100] [INFO] [config.py:1000:print]   train_batch_size ............. 256
[2026-11-01 09:59:50,100] [INFO] [config.py:1000:print]   train_micro_batch_size_per_gpu  4
[2026-11-01 09:59:50,100] [INFO] [config.py:1000:print]   world_size ................... 16
[2026-11-01 09:59:50,100] [INFO] [config.py:1000:print]   zero_optimization_stage ...... 3
"""


def deepspeed_log(seconds: tuple[float, float], overflows: bool = False, parts: bool = False) -> str:
    """Return 1,000 steps, printed every ten: the second half takes other seconds, or overflows in fp16."""
    at, lines, scale, skipped = datetime(2026, 11, 1, 10, 0, 0, 123000), [CONFIG.rstrip()], 65536, 1
    for step in range(10, 1001, 10):
        late = step > 500
        at += timedelta(seconds=10 * seconds[late])
        stamp = f"[{at:%Y-%m-%d %H:%M:%S},{at.microsecond // 1000:03d}] [INFO]"
        if overflows and late:
            skipped += 1
            lines.append(
                f"[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: {scale}, reducing to {scale // 2}"
            )
            scale = max(1, scale // 2)
        lines += [
            f"{stamp} [logging.py:96:log_dist] [Rank 0] step={step}, skipped={skipped}, lr=[0.0003, 0.0003], "
            "mom=[[0.9, 0.95], [0.9, 0.95]]",
            f"{stamp} [timer.py:260:stop] epoch=0/micro_step={4 * step}/global_step={step}, "
            f"RunningAvgSamplesPerSec=78.1, CurrSamplesPerSec={256 / seconds[late]:.2f}, MemAllocated=31.2GB, "
            "MaxMemAllocated=61.4GB",
        ]
        if parts:
            lines.append(
                f"{stamp} [logging.py:96:log_dist] [Rank 0] time (ms) | fwd: 800.0 | bwd: 2000.0 | bwd_inner: 1500.0 | "
                "bwd_allreduce: 500.0 | step: 200.0"
            )
    return "\n".join(lines) + "\n"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_slowdown_is_found_and_the_printed_config_is_read(meshwright: Any) -> None:
    Path("train.log").write_text(deepspeed_log((3.2, 4.9)))
    found = meshwright(
        "doctor", "train.log", "--model", "llama3-8b", "--gpus", "A100-80", "--goal", "sft", "--json"
    ).json
    assert (found["kind"], found["last_step"], found["gpus"]) == ("deepspeed", 1000, "2x8xA100-80")
    assert [one["rule"] for one in found["findings"]] == ["speed.sustained-slowdown"]
    measured = {one["name"]: one["measured"] for one in found["figures"]}
    assert (measured["step time"], measured["peak memory"]) == (4.9, 61.4)
    assert any("have no loss" in note for note in found["notes"])
    assert not any("does not state the layout" in note for note in found["notes"])


def test_skipped_steps_are_counted_and_remedies_are_keys_of_deepspeed(meshwright: Any) -> None:
    Path("train.log").write_text(deepspeed_log((3.2, 3.2), overflows=True))
    found = meshwright(
        "doctor", "train.log", "--model", "llama3-8b", "--gpus", "16xA100-80", "--goal", "sft", "--json"
    ).json
    finding = next(one for one in found["findings"] if one["rule"] == "loss.scale-collapsed")
    assert any('"optimizer": {"params"' in text for text in str(finding).split("'"))


def test_times_of_the_breakdown_are_parts_of_a_step() -> None:
    from meshwright.doctor.formats import deepspeed
    from meshwright.doctor.formats.text import lines_of

    run = deepspeed.read(list(lines_of(deepspeed_log((3.0, 3.0), parts=True))), "train.log")
    assert run.steps[-1].parts_s == {"forward_backward": 2.3, "collectives": 0.5, "optimizer": 0.2}
    assert run.header.overrides["train.global_batch_size"] == 256


def test_records_of_the_trainer_go_before_messages_of_deepspeed(meshwright: Any) -> None:
    records = "".join(
        f"{{'loss': {3 - step / 500:.4f}, 'grad_norm': 0.5, 'learning_rate': 0.0001, 'epoch': {step / 1000:.2f}}}\n"
        for step in range(100, 1001, 100)
    )
    Path("train.log").write_text(deepspeed_log((3.2, 3.2)) + records)
    assert meshwright("doctor", "train.log", "--json").json["kind"] == "transformers"


FLUSH = (
    "[2026-01-01 00:00:00,000] [WARNING] [stage3.py:2150:step] 2 pytorch allocator cache flushes since last step. this "
    "happens when there is high memory pressure and is detrimental to performance."
)


def test_flushes_of_the_allocator_that_deepspeed_reports_are_a_finding(meshwright: Any, tmp_path: Path) -> None:
    lines = [
        f"[2026-01-01 00:{step:02d}:00,000] [INFO] [logging.py:107:log_dist] [Rank 0] step={step}, skipped=0, "
        "lr=[3e-05], mom=[(0.9, 0.95)]"
        for step in range(1, 30)
    ]
    path = tmp_path / "ds.log"
    for text, count in ((lines, 0), ([*lines[:9], FLUSH, *lines[9:20], FLUSH, *lines[20:]], 4)):
        path.write_text("\n".join(text) + "\n")
        found = meshwright("doctor", str(path), "--json").json["findings"]
        messages = [one["message"] for one in found if one["rule"] == "memory.only-just-fits"]
        assert [message.split()[0] for message in messages] == [str(count)] * bool(count)


STATED = """***** Running training *****
  Instantaneous batch size per device = 4
  Total train batch size (w. parallel, distributed & accumulation) = 256
  Gradient Accumulation steps = 4
  Total optimization steps = 9,000
"""


def trainer_log(every: int, printed: int, steps: int = 1000, stamps: bool = True, records: bool = True) -> str:
    """Return a log of the Trainer without progress bars, with DeepSpeed's lines: steps slow down in the second half."""
    at, lines = datetime(2026, 11, 1, 10, 0, 0, 123000), [STATED.rstrip()]
    for step in range(1, steps + 1):
        seconds = 3.2 if 2 * step <= steps else 4.9
        at += timedelta(seconds=seconds)
        stamp = f"[{at:%Y-%m-%d %H:%M:%S},{at.microsecond // 1000:03d}]" if stamps else ""
        if step % printed == 0:
            lines += [
                f"{stamp} [INFO] [logging.py:128:log_dist] [Rank 0] step={step}, skipped=0, lr=[0.0003], mom=[]",
                f"{stamp} [INFO] [timer.py:264:stop] epoch=0/micro_step={4 * step}/global_step={step}, "
                f"RunningAvgSamplesPerSec=70.1, CurrSamplesPerSec={256 / seconds:.4f}, MemAllocated=7.31GB, "
                "MaxMemAllocated=27.02GB",
            ]
        if step == every or (records and step % every == 0):
            loss = 2.4 + 8 / (1 + step / 50)
            lines.append(f"{{'loss': {loss:.4f}, 'grad_norm': 0.5, 'learning_rate': 0.0003, 'epoch': 0.0}}")
    return "\n".join(lines) + "\n"


def doctor(meshwright: Any, text: str) -> Any:
    Path("train.log").write_text(text)
    words = ("--model", "llama3-8b", "--gpus", "2x8xA100-80", "--goal", "sft", "--json")
    return meshwright("doctor", "train.log", *words).json


@pytest.mark.parametrize(
    ("every", "printed", "stamps", "records"),
    [
        (10, 50, True, True),
        (10, 50, False, True),  # the time of one step, from CurrSamplesPerSec and the batch
        (20, 50, True, True),
        (50, 10, True, True),
        (10, 10, True, True),
        (10, 50, True, False),  # one record only
    ],
)
def test_the_trainers_records_have_the_steps_and_times_of_deepspeed(
    meshwright: Any, every: int, printed: int, stamps: bool, records: bool
) -> None:
    found = doctor(meshwright, trainer_log(every, printed, 3000, stamps, records))
    assert (found["kind"], found["last_step"]) == ("transformers", 3000)
    assert [one["rule"] for one in found["findings"]] == ["speed.sustained-slowdown"]
    measured = {one["name"]: one["measured"] for one in found["figures"]}
    assert measured["peak memory"] == 27.02
    assert measured["first loss"] == pytest.approx(2.4 + 8 / (1 + every / 50), abs=0.01)
    assert not any("no step numbers" in note for note in found["notes"])


def test_a_restarted_trainer_with_deepspeeds_lines_counts_on(meshwright: Any) -> None:
    first, again = trainer_log(10, 50, 500), trainer_log(10, 50, 1000).splitlines()
    resumed = [STATED.rstrip(), *again[next(n for n, line in enumerate(again) if "step=450," in line) + 3 :]]
    found = doctor(meshwright, first + "\n".join(resumed) + "\n")
    assert found["last_step"] == 1000


def test_a_record_of_the_first_step_shifts_none(meshwright: Any) -> None:
    text = trainer_log(10, 50).replace("{'loss'", "{'loss': 10.9, 'grad_norm': 0.5, 'epoch': 0.0}\n{'loss'", 1)
    found = doctor(meshwright, text)
    assert found["last_step"] == 1000
    assert {one["name"]: one["measured"] for one in found["figures"]}["first loss"] == 10.9
