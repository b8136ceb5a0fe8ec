"""benchmarks/peer_speed.py: what it reads from torchtitan's log, which tries it runs, and what the page shows."""

from __future__ import annotations

import pytest
from benchmarks import peer_speed

LOG = """\
[titan] 2026-11-17 20:00:00,000 - root - INFO - step:  1  loss: 12.26000  grad_norm:  3.1000  memory: 101.10GiB(72.30%)  tps: 610  tflops: 30.10  mfu: 3.04%
[titan] 2026-11-17 20:00:04,000 - root - INFO - step:  4  loss: 12.20000  grad_norm:  3.0000  memory: 118.20GiB(84.50%)  tps: 9,900  tflops: 500.10  mfu: 50.00%
[titan] 2026-11-17 20:00:09,000 - root - INFO - step:  8  loss: 12.10000  grad_norm:  2.9000  memory: 118.30GiB(84.60%)  tps: 10,812  tflops: 540.20  mfu: 54.60%
peak allocated: 112.40GiB
"""  # noqa: E501


def test_torchtitan_log_lines_give_speed_without_compilation_and_memory() -> None:
    found = peer_speed.titan_figures(LOG)
    assert found["tokens_per_s"] == pytest.approx(10812)
    assert found["losses"] == [12.26, 12.2, 12.1]
    assert (found["peak_allocated_gib"], found["peak_reserved_gib"]) == (112.4, 118.3)
    assert peer_speed.titan_figures("torch.OutOfMemoryError: CUDA out of memory") == {}


def test_a_failed_process_keeps_its_error_line() -> None:
    text = (
        "Traceback (most recent call last):\n  File x\n[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried\nbye"
    )
    assert peer_speed.last_error(text) == "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried"


def test_after_a_torchtitan_try_that_fits_no_other_is_run() -> None:
    case = peer_speed.CASES[0]
    # values equal to the recipe's are not in the words
    words = ["llama3_8b_pretrain_config", "layout.tp=1"]
    ours, first, second, *_ = peer_speed.cells(case, words, peer_speed.Sizes(4096, 4), False, peer_speed.ROOT)
    assert "--training.global_batch_size=4" in first.words
    assert "--training.seq_len=4096" in first.words
    assert "--training.local_batch_size=4" in first.words
    failed = [first.setting | {"error": "out of memory"}]
    assert peer_speed.is_wanted(ours, [])
    assert not peer_speed.is_wanted(first, failed)
    assert peer_speed.is_wanted(second, failed)
    assert not peer_speed.is_wanted(second, [first.setting | {"tokens_per_s": 1.0}])


def test_list_prints_every_command_of_a_case_without_gpu_or_torchtitan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["peer_speed.py", "--list", "--only", "gpt-oss"])
    peer_speed.main()
    ours, plain = capsys.readouterr().out.splitlines()
    assert ours.startswith("gpt-oss-20b LoRA | ours | python -m meshwright bench ")
    assert plain.startswith("gpt-oss-20b LoRA | plain | python -m benchmarks.plain_loop ")


def test_ratios_use_the_fastest_try_of_each() -> None:
    tries = {
        "ours": [{"tokens_per_s": 12.0}],
        "plain": [{"error": "out of memory"}, {"tokens_per_s": 8.0}, {"tokens_per_s": 10.0}],
    }
    row = peer_speed.with_ratios({"name": "x", "tries": tries})
    assert row["ratios"] == {"plain": pytest.approx(1.2)}
    assert "out of memory" not in peer_speed.line(row)
