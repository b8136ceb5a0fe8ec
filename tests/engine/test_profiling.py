"""The profiler records the stated steps of rank 0 and costs nothing when it is off."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.children import child, children

from meshwright.engine.profiling import window
from meshwright.engine.rank_env import Process
from meshwright.errors import InputError


def profiled(folder: Path, steps: int, **options: Any) -> tuple[str, list[str], int, int]:
    with window(folder=folder, **({"enabled": True, "wait": 1, "warmup": 1, "active": 2} | options)) as recorded:
        for _ in range(steps):
            torch.ones(8, 8).mm(torch.ones(8, 8))
            recorded.step()
    return recorded.table, sorted(path.name for path in folder.glob("trace*")), recorded.first, recorded.last


def test_the_stated_steps_are_recorded(tmp_path: Path) -> None:
    table, files, first, last = child(tmp_path, lambda: profiled(tmp_path, 6))
    assert (first, last) == (3, 4)
    assert files == ["trace_rank0_steps3-4.json.gz"]
    assert "aten::mm" in table
    events = json.loads(gzip.decompress((tmp_path / files[0]).read_bytes()))["traceEvents"]
    assert sum(event.get("name") == "aten::mm" for event in events) == 2  # one in each recorded step


@pytest.mark.parametrize(
    ("options", "files"),
    [
        ({"enabled": False}, []),
        ({"process": Process(rank=1, world=2)}, []),
        ({"process": Process(rank=1, world=2), "all_ranks": True}, ["trace_rank1_steps3-4.json.gz"]),
    ],
)
def test_only_rank_0_records_unless_all_ranks_are_requested(
    tmp_path: Path, options: dict[str, Any], files: list[str]
) -> None:
    table, found, _, _ = child(tmp_path, lambda: profiled(tmp_path, 6, **options))
    assert found == files
    assert bool(table) == bool(files)


def test_a_run_shorter_than_the_window_is_reported(tmp_path: Path) -> None:
    (ended,) = children(tmp_path, lambda: profiled(tmp_path, 1))
    assert ended.code == 0
    assert "ended after 1 step, before the profiled steps 3–4 were completed" in ended.stderr
    assert ended.result[1] == []


def test_a_trace_that_cannot_be_written_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (ended,) = children(tmp_path, lambda: profiled(tmp_path / "file", 6))
    assert ended.code == 0
    assert "cannot be written" in ended.stderr


@pytest.mark.parametrize("bad", [{"wait": -1}, {"active": 0}])
def test_an_invalid_window_is_refused(tmp_path: Path, bad: dict[str, int]) -> None:
    with pytest.raises(InputError):
        profiled(tmp_path, 1, **bad)
