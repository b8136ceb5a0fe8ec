"""The doctor's example: what a log leaves open is no reason for a finding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.web import example_files


@pytest.mark.parametrize(
    ("stated", "slow"),
    [((), False), (("layout.recompute=full",), False), (("layout.recompute=selective", "kernels.compile=true"), True)],
)
def test_a_run_is_slow_only_if_no_value_of_what_its_log_leaves_open_explains_it(
    meshwright: Any, tmp_path: Path, stated: tuple[str, ...], slow: bool
) -> None:
    log = tmp_path / "train.log"
    log.write_text(example_files.log())
    answer = meshwright("doctor", str(log), "--model", "llama3-8b", "--gpus", "8xH100", *stated, "--json").json
    found = {one["rule"]: one for one in answer["findings"]}
    assert ("speed.low-mfu" in found) is slow
    assert {"memory.out-of-memory", "loss.spikes", "speed.sustained-slowdown", "memory.growing"} <= found.keys()


def test_lines_without_anything_to_read_are_skipped_and_validations_in_any_case_are_not(
    meshwright: Any, tmp_path: Path
) -> None:
    log = tmp_path / "train.log"
    lines = example_files.log().splitlines()
    noise = "[rank0]: worker: prefetching shard 7 took 3.1 ms"
    start = "[rank0]:[titan] 2026-01-01 00:00:30,250 - root - INFO - "
    log.write_text(
        "\n".join([*lines[:34], noise, f"{start}Validate Step:  30  loss:  4.2500  memory: 1.0GiB", *lines[34:]])
    )
    answer = meshwright("doctor", str(log), "--model", "llama3-8b", "--gpus", "8xH100", "--json").json
    assert answer["steps"] == example_files.LOG_STEPS
    assert any("4.25" in str(one["measured"]) for one in answer["figures"] if "valid" in one["name"])
