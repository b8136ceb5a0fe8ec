"""Throughput is consistent, files survive full disks and incomplete lines, and progress is readable."""

from __future__ import annotations

import errno
import io
import json
import os
import resource
import statistics
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.costs.helpers import case, llama
from tests.engine.children import child

from meshwright.costs.estimate import estimate
from meshwright.engine.metrics import (
    PARTS,
    Clock,
    ConsoleSink,
    Constants,
    JsonlSink,
    Meter,
    Reporter,
    StepRecord,
    TensorBoardSink,
    compare_with_estimate,
    constants,
    header,
    memory_parts,
    open_sinks,
    optimizer_tensors,
)
from meshwright.engine.metrics.clock import Timing
from meshwright.engine.metrics.jsonl import Lines, read, repair
from meshwright.engine.metrics.live import duration
from meshwright.engine.rank_env import Process
from meshwright.errors import InputError

CPU = torch.device("cpu")
PLAIN = Constants(tokens_per_step=4096, flops_per_token=6e9, world=8, peak_flops=1e15, steps=100)
SECONDS = st.floats(1e-3, 1e4)


def record(step: int = 1, **changes: Any) -> StepRecord:
    values: dict[str, Any] = {
        "step": step, "loss": 2.5, "lr": 3e-4, "grad_norm": 1.25, "tokens": 4096, "step_s": 2.0,
        "tokens_per_s_per_gpu": 256.0, "tflops_per_gpu": 1.5, "mfu": 0.41,
        "parts_s": {"data": 0.1, "forward_backward": 1.6, "optimizer": 0.2, "other": 0.1},
        "memory_gib": {"peak": 61.2}, "remaining_s": 7500.0,
    }  # fmt: skip
    return StepRecord(**(values | changes))


# Throughput


@given(SECONDS, st.integers(1, 10**7), st.integers(1, 4096), st.floats(1e3, 1e13), st.floats(1e12, 1e16))
def test_throughput_is_consistent_with_itself(s: float, tokens: int, world: int, flops: float, peak: float) -> None:
    speed = Meter(Constants(tokens, flops, world, peak)).add(s)
    assert speed.tokens_per_s_per_gpu * s * world == pytest.approx(tokens)
    assert speed.tflops_per_gpu * 1e12 == pytest.approx(speed.tokens_per_s_per_gpu * flops)
    assert speed.mfu == pytest.approx(speed.tflops_per_gpu * 1e12 / peak)


@given(SECONDS, st.floats(1.1, 10))
def test_a_slower_step_has_proportionally_less_of_everything(s: float, times: float) -> None:
    fast, slow = Meter(PLAIN).add(s), Meter(PLAIN).add(s * times)
    for name in ("tokens_per_s_per_gpu", "tflops_per_gpu", "mfu"):
        assert getattr(fast, name) == pytest.approx(times * getattr(slow, name))


@given(st.lists(SECONDS, min_size=2, max_size=60), st.integers(1, 20))
def test_the_steady_speed_is_the_median_of_the_window_without_the_first_step(times: list[float], window: int) -> None:
    meter = Meter(PLAIN, window)
    for s in times:
        meter.add(s)
    middle = statistics.median(times[1:][-window:])
    assert meter.steady is not None
    assert meter.steady.step_s == middle
    assert meter.remaining_s(40) == pytest.approx(60 * middle)
    assert meter.remaining_s(100) == 0


def test_the_end_of_a_run_is_not_predicted_from_the_step_that_compiles() -> None:
    meter = Meter(Constants(tokens_per_step=10, flops_per_token=1.0, world=1, steps=60, estimate_step_s=0.2))
    meter.add(20.7)
    assert meter.remaining_s(1) == pytest.approx(59 * 0.2)
    meter.add(0.15)
    assert meter.remaining_s(2) == pytest.approx(58 * 0.15)


def test_a_meter_reports_none_for_what_it_does_not_know() -> None:
    meter = Meter(Constants(tokens_per_step=10, flops_per_token=1.0, world=1))
    assert meter.steady is None
    assert meter.remaining_s(0) is None
    assert meter.add(1.0).mfu is None
    assert meter.add(2.0, tokens=30).tokens_per_s_per_gpu == 15
    with pytest.raises(InputError):
        meter.add(0.0)


@pytest.mark.parametrize("goal", ["pretrain", "sft", "peft"])
def test_a_run_as_fast_as_its_estimate_reads_as_its_estimate(goal: str) -> None:
    one = case(llama(), "8xH100", goal, steps=50)
    expected = estimate(one)
    known = constants(one, expected)
    speed = Meter(known).add(expected.step_s)
    assert speed.tokens_per_s_per_gpu == pytest.approx(expected.tokens_per_s_per_gpu)
    assert speed.tflops_per_gpu == pytest.approx(expected.tflops_per_gpu)
    assert speed.mfu == pytest.approx(expected.mfu)
    assert (known.steps, known.mfu_convention) == (50, expected.mfu_convention)
    assert constants(one, expected, on_gpu=False).peak_flops is None


# Parts of a step


@given(st.lists(st.tuples(st.sampled_from(PARTS[:-1]), st.floats(0, 10)), max_size=8), st.floats(0, 5))
def test_the_parts_of_a_step_add_up(spans: list[tuple[str, float]], rest: float) -> None:
    timing, now = Timing(0.0), 0.0
    for name, seconds in spans:
        timing.spans.append((name, now, now + seconds))
        now += seconds
    timing.end = now + rest
    time = timing.read()
    assert sum(time.parts_s.values()) == pytest.approx(time.step_s)
    assert tuple(time.parts_s) == PARTS
    assert time.parts_s["other"] == pytest.approx(rest, abs=1e-9)


def test_the_clock_counts_a_part_as_often_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(100))
    monkeypatch.setattr("meshwright.engine.metrics.clock.time.perf_counter", lambda: float(next(ticks)))
    clock = Clock(CPU)
    clock.start()
    for name in ("data", "forward_backward", "data", "forward_backward", "optimizer"):
        with clock.part(name):
            pass
    time = clock.finish().read()
    assert time.step_s == 11
    assert time.parts_s == {"data": 2, "forward_backward": 2, "optimizer": 1, "other": 6}
    with pytest.raises(ValueError, match="unknown part"), clock.part("lunch"):
        pass


# Reporting


class Kept:
    """A sink that keeps its records."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self.closed = False

    def step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def close(self) -> None:
        self.closed = True


def test_steps_are_reported_in_order_with_their_values() -> None:
    kept, loss = Kept(), torch.tensor(0.0)
    reporter = Reporter(Meter(PLAIN), Clock(CPU), [kept], memory=lambda: {"peak": 3.0})
    for step in range(1, 4):
        reporter.clock.start()
        loss += 1.0  # in place, as a training may
        reporter.end_step(step, loss=loss, lr=0.1 * step, grad_norm=None, extra={"balance": torch.tensor(0.5)})
    reporter.close()
    assert [(one.step, one.loss) for one in kept.steps] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert kept.closed
    assert reporter.last == kept.steps[-1]
    assert kept.steps[0].memory_gib == {"peak": 3.0}
    assert kept.steps[0].extra == {"balance": 0.5}


def test_only_rank_0_writes(tmp_path: Path) -> None:
    assert open_sinks(Process(rank=1, world=2), "tiny", PLAIN, tmp_path, tensorboard=True) == []
    assert not list(tmp_path.iterdir())
    types = [type(sink) for sink in open_sinks(Process(), "tiny", PLAIN, tmp_path)]
    assert types == [JsonlSink, ConsoleSink]


class Slow(Timing):
    """A step that the GPU has not finished."""

    def ready(self) -> bool:
        return False


def test_a_step_is_pending_for_a_bounded_number_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.engine.metrics.clock.Timing", Slow)
    kept, reported = Kept(), []
    reporter = Reporter(Meter(PLAIN), Clock(CPU), [kept])
    for step in range(1, 6):
        reporter.clock.start()
        reporter.end_step(step, loss=1.0, lr=0.1)
        reported.append(len(kept.steps))
    assert reported == [0, 0, 1, 2, 3]
    reporter.flush()
    assert len(kept.steps) == 5


# Files


def test_the_metrics_file_is_json_lines_after_a_header(tmp_path: Path) -> None:
    for first in (1, 3):  # a run, and its continuation
        sink = JsonlSink(tmp_path, header("tiny", PLAIN, first))
        for step in (first, first + 1):
            sink.step(record(step, loss=float("nan") if step == 2 else 1.0))
            lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
            assert json.loads(lines[-1])["step"] == step  # on the disk before the next step
        sink.close()
    lines = list(read(tmp_path / "metrics.jsonl"))
    assert [line["kind"] for line in lines] == ["header", "step", "step"] * 2
    assert lines[0]["recipe"] == "tiny"
    assert lines[0]["world"] == 8
    assert {"meshwright", "torch", "python"} == set(lines[0]["versions"])
    assert [line["loss"] for line in lines if line["kind"] == "step"] == [1.0, None, 1.0, 1.0]
    assert lines[3]["first_step"] == 3


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 400), st.integers(0, 5))
def test_an_incomplete_last_line_is_removed_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, cut: int, lines: int
) -> None:
    path = tmp_path_factory.mktemp("incomplete") / "x.jsonl"
    complete = b"".join(json.dumps({"step": n, "text": "ä" * n * 10}).encode() + b"\n" for n in range(lines))
    path.write_bytes(complete[:cut])
    removed = repair(path)
    left = path.read_bytes()
    assert len(left) + removed == len(complete[:cut])
    assert complete.startswith(left)
    assert left == b"" or left.endswith(b"\n")
    assert b"\n" not in complete[len(left) : cut]
    assert [line["step"] for line in read(path)] == list(range(left.count(b"\n")))


def test_a_resumed_run_appends_after_the_last_complete_line(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"step":1}\n{"step":2,"lo')
    assert list(read(path)) == [{"step": 1}]  # also readable before it is repaired
    lines = Lines(path)
    lines.write({"step": 2})
    lines.close()
    assert list(read(path)) == [{"step": 1}, {"step": 2}]


def test_a_full_disk_loses_lines_and_warns_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    lines = Lines(tmp_path / "x.jsonl", warnings.append)
    lines.write({"step": 1})
    real, calls = os.write, 0

    def half_then_full(file: int, data: Any) -> int:
        nonlocal calls
        calls += 1
        if calls % 2:
            return real(file, bytes(data)[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", half_then_full)
        assert [lines.write({"step": step}) for step in (2, 3)] == [False, False]
    assert lines.write({"step": 4})  # space was freed
    lines.close()
    assert list(read(tmp_path / "x.jsonl")) == [{"step": 1}, {"step": 4}]
    assert len(warnings) == 2
    assert "No space left on device" in warnings[0]
    assert "2 lines are missing" in warnings[1]


def test_a_device_that_is_always_full_does_not_end_the_run(tmp_path: Path) -> None:
    warnings: list[str] = []
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    sink = JsonlSink(tmp_path, header("tiny", PLAIN), warnings.append)
    for step in range(1, 4):
        sink.step(record(step))
    sink.close()
    assert len(warnings) == 2  # when it began, and how many lines are missing
    assert "4 lines" in warnings[1]


def test_a_file_at_its_size_limit_keeps_complete_lines(tmp_path: Path) -> None:
    def fills() -> list[bool]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (25, 25))  # the system writes a part and then fails
        lines = Lines(tmp_path / "x.jsonl", lambda _: None)
        return [lines.write({"step": step}) for step in (1, 2, 3)]

    # The child's own stderr file is subject to the limit as well; it stays empty.
    assert child(tmp_path, fills) == [True, True, False]
    assert list(read(tmp_path / "x.jsonl")) == [{"step": 1}, {"step": 2}]


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written"):
        Lines(tmp_path / "file" / "x.jsonl")


def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sink = TensorBoardSink(tmp_path, header("tiny", PLAIN))
    for step in (1, 2):
        sink.step(record(step, loss=float(step)))
    sink.close()
    found = events.EventAccumulator(str(tmp_path)).Reload()
    assert [(one.step, one.value) for one in found.Scalars("train/loss")] == [(1, 1.0), (2, 2.0)]
    assert "memory_gib/peak" in found.Tags()["scalars"]


def test_a_missing_tensorboard_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(InputError, match="not installed") as missing:
        TensorBoardSink(tmp_path, {})
    assert missing.value.fix[0].endswith('pip install "meshwright[train]"')


def test_a_full_disk_ends_tensorboard_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    warnings: list[str] = []
    sink = TensorBoardSink(tmp_path, {}, warnings.append)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(sink._writer, "add_scalar", full)
    for step in (1, 2):
        sink.step(record(step))
    sink.close()
    assert len(warnings) == 1


# The console


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


NOON = datetime(2026, 1, 1, 12, 0)


def test_plain_lines_are_printed_when_due_and_without_color() -> None:
    out = io.StringIO()
    known = Constants(
        4096, 6e9, 8, 1e15, steps=25, estimate_step_s=1.9, estimate_memory_gib={"total": 66, "overhead": 2}
    )
    sink = ConsoleSink(known, log_every=10, stream=out, now=lambda: NOON)
    for step in range(1, 26):
        sink.step(record(step, skipped=step == 13))
    sink.close()
    lines = out.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/25", "10/25", "13/25", "20/25", "25/25"]
    assert "\x1b" not in out.getvalue()
    assert lines[1] == (
        "step 10/25  loss 2.5000  lr 3.00e-04  grad norm 1.25  tokens/s/GPU 256  MFU 41.0%"
        "  step time 2 s (estimate 1.9)  memory 61.2 GiB (estimate 64)"
        "  parts data 5% · fwd+bwd 80% · optimizer 10% · other 5%"
        "  ends 2026-01-01 14:05 (in 2 h 05 min)"
    )
    assert "(skipped)" in lines[2]


def test_a_terminal_shows_a_live_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Terminal()
    sink = ConsoleSink(PLAIN, stream=out)
    sink.step(record(1))
    sink.step(record(100, loss=1.5))
    sink.close()
    assert "\x1b[" in out.getvalue()
    assert "100/100" in out.getvalue()
    assert "1.5000" in out.getvalue()


def test_json_keeps_stdout_clean(capsys: pytest.CaptureFixture[str]) -> None:
    ConsoleSink(PLAIN, json=True).step(record(1))
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("step 1/100")


def test_a_closed_console_does_not_end_the_run() -> None:
    full = open("/dev/full", "w")  # noqa: SIM115  # closing it fails
    sink = ConsoleSink(PLAIN, log_every=1, stream=full)
    for step in (1, 2):
        sink.step(record(step))
    sink.close()
    with pytest.raises(OSError, match="No space"):
        full.close()
    closed = io.StringIO()
    closed.close()
    ConsoleSink(PLAIN, stream=closed).step(record(1))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59, "59 s"), (60, "1 min"), (3599, "1 h 00 min"), (7500, "2 h 05 min"), (273_600, "3 d 4 h")],
)
def test_durations_are_readable(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# Memory


def test_memory_counts_each_storage_once_and_only_here() -> None:
    weight = torch.zeros(1024, 256)
    meta = torch.empty(10**9, device="meta")
    state = {0: {"exp_avg": torch.zeros(1024, 256), "nested": {"deep": [torch.zeros(2048)]}, "step": 3}}
    found = memory_parts(
        [weight, weight.view(-1), weight[:2], meta], [None, torch.zeros(512)], optimizer_tensors(state), CPU
    )
    gib = 1024**3
    assert found.weights * gib == 1024 * 256 * 4
    assert found.gradients * gib == 512 * 4
    assert found.optimizer * gib == 1024 * 256 * 4 + 2048 * 4
    assert sum(found.parts.values()) == pytest.approx(found.peak)
    assert 0 < found.reserved <= found.peak


def test_measured_memory_is_compared_with_the_estimate() -> None:
    found = memory_parts([torch.zeros(4)], [], [], CPU)
    estimated = {"weights": 1.0, "gradients": 2.0, "optimizer": 3.0, "activations": 4.0, "logits": 1.0, "buffers": 0.5,
            "overhead": 1.5, "total": 13.0}  # fmt: skip
    compared = compare_with_estimate(found, estimated)
    assert {name: pair["estimate"] for name, pair in compared.items()} == {
        "weights": 1.0, "gradients": 2.0, "optimizer": 3.0, "other": 5.5, "peak": 11.5,
    }  # fmt: skip
    assert compared["peak"]["measured"] == found.peak
    assert all(pair["estimate"] is None for pair in compare_with_estimate(found, {}).values())
