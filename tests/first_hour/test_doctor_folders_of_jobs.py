"""doctor FOLDER: the notes on which log is diagnosed agree with the log whose steps are shown."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

LIMIT = "slurmstepd: error: *** JOB 42 ON node03 CANCELLED AT 2026-01-01T12:00:00 DUE TO TIME LIMIT ***"
OOM = "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


def write(path: Path, steps: int, end: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        f"[rank0]:[titan] 2026-01-01 00:{step // 60:02d}:{step % 60:02d},000 - root - INFO - step: {step:2d}  loss: "
        f"{12 - 0.01 * step:7.4f}  grad_norm:  1.2  memory: 60.10GiB(75.97%)  tps: 7,000  tflops: 400.00  mfu: 40.50%"
        for step in range(1, steps + 1)
    ]
    path.write_text("".join(f"{line}\n" for line in (*lines, end)))


def test_a_newest_job_without_steps_says_whose_steps_are_shown(meshwright: Any, tmp_path: Path) -> None:
    write(tmp_path / "slurm-99.out", 50, LIMIT)
    write(tmp_path / "slurm-100.out", 200, LIMIT)
    write(tmp_path / "slurm-101.out", 0, OOM)
    answer = meshwright("doctor", str(tmp_path), "--json").json
    assert answer["last_step"] == 200
    assert [one["rule"] for one in answer["findings"]] == ["memory.out-of-memory"]
    (note,) = (one for one in answer["notes"] if "before its first step" in one)
    assert "slurm-101.out ends before its first step" in note
    assert "slurm-100.out, from which it may have resumed" in note


def test_a_log_without_a_job_does_not_take_the_place_of_the_newest_job(meshwright: Any, tmp_path: Path) -> None:
    write(tmp_path / "train.log", 500, LIMIT)
    write(tmp_path / "slurm-100.out", 30, LIMIT)
    write(tmp_path / "slurm-101.out", 20, OOM)
    answer = meshwright("doctor", str(tmp_path), "--json").json
    assert answer["last_step"] == 20
    assert [one["rule"] for one in answer["findings"]] == ["memory.out-of-memory"]
    (note,) = (one for one in answer["notes"] if "several jobs" in one)
    assert "train.log (to step 500, time limit)" in note
    assert not any("steps were read from" in one for one in answer["notes"])
    os.utime(tmp_path / "train.log", (4e9, 4e9))
    answer = meshwright("doctor", str(tmp_path), "--json").json
    assert answer["last_step"] == 500
    assert any(f"the newest is diagnosed, {tmp_path / 'train.log'}" in one for one in answer["notes"])


def test_errors_of_a_log_that_may_be_another_training_are_named(meshwright: Any, tmp_path: Path) -> None:
    write(tmp_path / "train.log", 500)
    write(tmp_path / "train2.log", 20, OOM)
    write(tmp_path / "rank1.log", 500, OOM)
    notes = meshwright("doctor", str(tmp_path), "--json").json["notes"]
    (note,) = (one for one in notes if "among those shown" in one)
    assert note.startswith(f"the errors of {tmp_path / 'train2.log'} are among those shown: it ends at step 20")


def test_checkpoints_of_one_training_are_no_jobs(meshwright: Any, tmp_path: Path) -> None:
    for last in (1000, 1500):
        records = ", ".join(f'{{"step": {step}, "loss": {2 - step / 2000}}}' for step in range(10, last + 1, 10))
        folder = tmp_path / f"checkpoint-{last}"
        folder.mkdir()
        text = f'{{"global_step": {last},\n"max_steps": 2000,\n"log_history": [\n{records}\n]}}'
        (folder / "trainer_state.json").write_text(text.replace("}, ", "},\n"))
    answer = meshwright("doctor", str(tmp_path), "--json").json
    assert answer["last_step"] == 1500
    assert not any("several jobs" in one for one in answer["notes"])


def test_logs_of_another_framework_are_another_job(meshwright: Any, tmp_path: Path) -> None:
    write(tmp_path / "titan.log", 50, OOM)
    step = " iteration {} | elapsed time per iteration (ms): 80400.1 | lm loss: 1.7E+00 | grad norm: 0.6 |"
    (tmp_path / "megatron.log").write_text("\n".join(step.format(f"{n:8d}/   23841") for n in range(10, 1200, 10)))
    (tmp_path / "rank.log").write_text(f"{LIMIT}\n")  # of any trainer
    os.utime(tmp_path / "megatron.log", (4e9, 4e9))
    answer = meshwright("doctor", str(tmp_path), "--json").json
    assert (answer["last_step"], answer["findings"][0]["rule"]) == (1190, "run.failed-time-limit")
    assert "memory.out-of-memory" not in [one["rule"] for one in answer["findings"]]
    (note,) = (one for one in answer["notes"] if "several jobs" in one)
    assert "titan.log (to step 50, out of memory)" in note
    os.utime(tmp_path / "titan.log", (5e9, 5e9))
    answer = meshwright("doctor", str(tmp_path), "--json").json
    assert answer["last_step"] == 50
    assert "memory.out-of-memory" in [one["rule"] for one in answer["findings"]]


def test_free_memory_and_fragments_together_are_enough(meshwright: Any, tmp_path: Path) -> None:
    oom = (
        "[rank17]:torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 7.83 GiB. GPU 1 has a total capacity "
        "of 79.11 GiB of which {free} GiB is free. Including non-PyTorch memory, this process has 73.20 GiB memory in "
        "use. Of the allocated memory 64.10 GiB is allocated by PyTorch, and 6.72 GiB is reserved by PyTorch but "
        "unallocated."
    )
    for free, first in ((5.9, "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"), (0.5, "layout.recompute=selective")):
        write(tmp_path / "train.log", 0, oom.format(free=free))
        (finding,) = meshwright("doctor", str(tmp_path / "train.log"), "--json").json["findings"]
        assert finding["remedies"][0]["try"][0] == first
