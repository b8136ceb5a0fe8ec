"""Reading logs and folders: the format, the header, and what cannot be read."""

from __future__ import annotations

import gzip
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.doctor.fake_runs import LOG_WRITERS, OLD_OOM, OOM, healthy

from meshwright import api, doctor, file_access
from meshwright.doctor.faults import out_of_memory
from meshwright.doctor.formats.text import lines_of, number
from meshwright.errors import InputError
from meshwright.recipes import index

MEGATRON = """\
------------------------ arguments ------------------------
  bf16 ............................................ True
  context_parallel_size ........................... 1
  ffn_hidden_size ................................. 14336
  global_batch_size ............................... 128
  group_query_attention ........................... True
  hidden_size ..................................... 4096
  lr .............................................. 0.0003
  max_position_embeddings ......................... 8192
  micro_batch_size ................................ 1
  normalization ................................... RMSNorm
  num_attention_heads ............................. 32
  num_layers ...................................... 32
  num_query_groups ................................ 8
  pipeline_model_parallel_size .................... 1
  position_embedding_type ......................... rope
  seq_length ...................................... 8192
  sequence_parallel ............................... True
  swiglu .......................................... True
  tensor_model_parallel_size ...................... 2
  untie_embeddings_and_output_weights ............. True
  use_distributed_optimizer ....................... True
  vocab_size ...................................... 128256
  world_size ...................................... 8
-------------------- end of arguments ---------------------
[before the start of training step] datetime: 2026-01-01 00:00:00
"""


def test_out_of_memory_messages_of_all_versions_are_parsed() -> None:
    new, old = out_of_memory(OOM), out_of_memory(OLD_OOM)
    assert (new.wanted, new.capacity, new.in_use, new.allocated, new.unused) == (4.0, 79.10, 77.90, 75.0, 1.2)
    assert new.needed == pytest.approx(80.7)
    assert (old.wanted, old.capacity, old.in_use, old.allocated) == (0.5, 79.15, 78.0, 70.0)


FAULT_LINES = (
    ("out_of_memory", "torch.cuda.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB"),
    ("out_of_memory", "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
    ("loss_not_a_number", "error: the loss is nan in step 12 on rank 3; the batches are in bad_batches.jsonl"),
    ("loss_not_a_number", "Rank 3: found NaN in local grad norm for bucket #0 in backward pass"),
    ("host_memory", "slurmstepd: error: Detected 3 oom_kill events in StepId=4711.0"),
    ("host_memory", "RuntimeError: DataLoader worker (pid 42) is killed by signal: Killed."),
    ("host_memory", "rank 3 of 8 was killed, usually because the machine ran out of memory (SIGKILL)"),
    ("hang", "[E ProcessGroupNCCL.cpp] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5)"),
    ("hang", "error: rank 2 of 8 hangs in step 12, forward_backward: no progress for 600 s."),
    ("network", "torch.distributed.DistBackendError: NCCL error: ncclRemoteError: A call failed possibly"),
    ("gpu_fault", "NVRM: Xid (PCI:0000:17:00): 63, pid=42"),
    ("gpu_fault", "RuntimeError: CUDA error: an illegal memory access was encountered"),
    ("disk_full", "OSError: [Errno 28] No space left on device: 'x'"),
    ("out_of_memory", "RuntimeError: CUDA error: out of memory"),
    ("out_of_memory", "node1:17:42 [0] NCCL WARN Cuda failure 2 'out of memory'"),
    ("time_limit", "slurmstepd: error: *** JOB 4711 ON node1 CANCELLED AT 2026-01-01T04:00:00 DUE TO TIME LIMIT ***"),
    ("error", "error: rank 0 of 2 failed in step 31, data: token 999 is outside the vocabulary"),
)


@pytest.mark.parametrize(("name", "text"), FAULT_LINES)
def test_faults_are_recognized(name: str, text: str) -> None:
    run = doctor.read_text(LOG_WRITERS["torchtitan"](healthy(30)) + text + "\n", "log")
    (fault,) = run.faults
    assert (fault.name, fault.step, fault.text) == (name, 30, text)
    (finding,) = doctor.examine(run).findings
    assert finding.severity == "error"
    assert finding.remedies


TRACE = (
    '[rank3]: Traceback (most recent call last):\n[rank3]:   File "train.py", line 4\n[rank3]: ValueError: token 9\n'
)


def test_an_error_ends_a_run_only_after_a_traceback() -> None:
    steps = LOG_WRITERS["torchtitan"](healthy(30))
    (finding,) = doctor.examine(doctor.read_text(steps + TRACE, "log")).findings
    assert (finding.id, finding.steps, finding.lines) == (
        "run.failed-error",
        (30, 30),
        ("log:37 [rank3]: ValueError: token 9",),
    )
    assert "ValueError: token 9" in finding.message
    assert doctor.examine(doctor.read_text(steps + "ValueError: logged only\n", "log")).ok
    with pytest.raises(InputError, match="no training found"):
        doctor.read_text(TRACE, "log")


def test_the_last_of_many_faults_are_kept() -> None:
    steps = LOG_WRITERS["torchtitan"](healthy(30))
    text = f"{TRACE}\n" * 200 + steps + f"{OOM}\n" * 100
    (finding,) = doctor.examine(doctor.read_text(text, "log")).findings
    assert finding.id == "memory.out-of-memory"


def test_shutdown_messages_of_a_completed_run_are_not_failures(tmp_path: Path) -> None:
    fake_run = healthy(40)
    words = f"{TRACE}[W socket.cpp:752] [c10d] Connection reset by peer\n"
    for total, failed in ((40, False), (1000, True)):
        text = LOG_WRITERS["megatron"](replace(fake_run, total=total)) + words
        assert doctor.examine(doctor.read_text(text, "log")).ok is not failed


def test_where_an_allocation_failed_is_read_from_the_traceback() -> None:
    places = {
        '  File "losses.py", line 12, in cross_entropy': "logits",
        '  File "torch/optim/adamw.py", line 200, in _init_group': "optimizer",
        '  File "model.py", line 3, in forward': "activations",
        '  File "fsdp.py", line 7, in foreach_all_gather': "buffers",
    }
    for line, part in places.items():
        run = doctor.read_text(f"Traceback (most recent call last):\n{line}\n{OOM}\n", "log")
        assert run.faults[0].where == part


def test_the_first_line_of_a_log_covers_as_many_steps_as_the_others() -> None:
    fake_run = healthy(40)
    (rows,) = fake_run.starts
    tenths = replace(fake_run, starts=(tuple(one for one in rows if one.step % 10 == 0),))
    for writer in ("megatron", "automodel"):
        run = doctor.read_text(LOG_WRITERS[writer](tenths), "log")
        assert [(step.step, step.covers) for step in run.steps] == [(10, 10), (20, 10), (30, 10), (40, 10)]


def test_a_megatron_log_is_matched_by_its_arguments() -> None:
    steps = "".join(
        f" [2026-01-01 00:00:00] iteration {i:8d}/     500 | consumed samples: {128 * i:12d} | elapsed time per "
        "iteration (ms): 8000.0 | throughput per GPU (TFLOP/s/GPU): 400.0 | learning rate: 3.000000E-04 | global batch "
        f"size:   128 | lm loss: {8 - i / 50:.6E} | loss scale: 1.0 | grad norm: 1.234 | num zeros: 0 | number of "
        "skipped iterations:   0 | number of nan iterations:   0 |\n"
        for i in range(1, 31)
    )
    run = doctor.read_text(MEGATRON + steps, "log")
    assert (run.kind, run.header.world, run.header.tokens_per_step) == ("megatron", 8, 128 * 8192)
    made, note = doctor.case_of_run(run, "8xH100")
    assert made is not None
    assert not note
    assert (made.tp, made.global_batch_size, made.seq_length, made.engine) == (2, 128, 8192, "megatron")
    assert made.model.params.total == pytest.approx(8.03e9, rel=0.01)
    nothing, why = doctor.case_of_run(run)
    assert nothing is None
    assert "--gpus" in why
    found = doctor.examine(run, made)
    assert {figure.name for figure in found.figures if figure.estimate} >= {"step time", "MFU"}


def test_a_torchtitan_log_is_matched_by_model_mesh_and_gpu() -> None:
    begin = "[rank0]:[titan] 2026-01-01 00:00:00,000 - root - INFO - "
    text = LOG_WRITERS["torchtitan"](healthy()).replace("with 79.10GiB", "80GB HBM3 with 79.10GiB")
    run = doctor.read_text(f"{begin}Model llama3 8B size: 8,030,261,248 total parameters\n{text}", "log")
    assert (run.header.model, run.header.gpu, run.header.world) == ("llama3 8B", "H100", 8)
    made, _ = doctor.case_of_run(run)
    assert made is not None
    assert (made.model.name, made.world, made.engine, made.seq_length) == ("llama3_8b", 8, "torchtitan", 4096)


def test_our_own_logs_contain_the_full_recipe(tmp_path: Path) -> None:
    recipe = index.load("llama3_8b_sft_config")
    fake_run = healthy()
    settings_ = msgspec.to_builtins(recipe)
    text = LOG_WRITERS["own"](replace(fake_run, settings=settings_))
    (tmp_path / "metrics.jsonl").write_text(text)
    run = doctor.read(tmp_path)
    assert run.header.recipe == recipe
    made, note = doctor.case_of_run(run)
    assert made is not None
    assert not note
    assert made.recipe == recipe
    assert str(made.cluster) == "8xH100"


def test_a_folder_is_read_from_the_log_with_the_latest_step(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "0.out").write_text(LOG_WRITERS["megatron"](healthy(30)))
    (tmp_path / "logs" / "1.err").write_text(f"Traceback\n{OOM}\n")
    (tmp_path / "notes.txt").write_text("bought milk\n")
    (tmp_path / "weights.bin").write_bytes(bytes(1000))
    run = doctor.read(tmp_path)
    assert (run.kind, len(run.steps)) == ("megatron", 30)
    assert [finding.id for finding in doctor.examine(run).findings] == ["memory.out-of-memory"]


def test_logs_of_starts_that_follow_each_other_are_one_run(tmp_path: Path) -> None:
    (tmp_path / "slurm-1.out").write_text(LOG_WRITERS["torchtitan"](replace(healthy(300), final_lines=(OOM,))))
    (tmp_path / "slurm-1.err").write_text(f"{OOM}\n")
    (tmp_path / "slurm-2.out").write_text(LOG_WRITERS["torchtitan"](healthy(150, first=251)))
    run = doctor.read(tmp_path)
    assert (run.last_step, [len(one) for one in run.attempts], run.starts) == (400, [300, 150], (1, 251))
    (finding,) = doctor.examine(run).findings
    assert finding.id == "run.restarts"
    assert [Path(line).name.split()[0] for line in finding.lines[:2]] == ["slurm-2.out:5", "slurm-1.err:1"]
    (tmp_path / "slurm-2.out").write_text(LOG_WRITERS["torchtitan"](healthy(150)))
    run = doctor.read(tmp_path)
    assert (run.last_step, run.faults) == (150, ())  # started again, not resumed


def test_a_restart_that_repeats_one_step_needs_no_other_interval(tmp_path: Path) -> None:
    (tmp_path / "slurm-1.out").write_text(LOG_WRITERS["torchtitan"](healthy(20)))
    (tmp_path / "slurm-2.out").write_text(LOG_WRITERS["torchtitan"](healthy(21, first=20)))
    (tmp_path / "slurm-3.out").write_text(LOG_WRITERS["torchtitan"](healthy(10, first=40)))
    found = [one for one in doctor.examine(doctor.read(tmp_path)).findings if one.id == "run.restarts"]
    assert found
    assert not any("save_every=1" in " ".join(fix.try_) for one in found for fix in one.remedies)


def test_unreadable_files_of_a_folder_are_noted(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(LOG_WRITERS["megatron"](healthy(30)))
    (tmp_path / "core.out").write_bytes(bytes(100))
    (note,) = doctor.read(tmp_path).notes
    assert "core.out: it is binary" in note


@pytest.mark.parametrize(
    "packed",
    [
        lambda text: gzip.compress(text.encode()),
        lambda text: gzip.compress(text[:2000].encode()) + gzip.compress(text[2000:].encode()),
        lambda text: gzip.compress(text.encode())[:-9],
        lambda text: text.encode("utf-16"),
        lambda text: text.replace("\n", "\r\n").encode(),
    ],
    ids=["gzip", "gzip in two parts", "gzip cut", "UTF-16", "lines of Windows"],
)
def test_compressed_and_reencoded_logs_are_read(tmp_path: Path, packed: Callable[[str], bytes]) -> None:
    (tmp_path / "train.log.gz").write_bytes(packed(LOG_WRITERS["torchtitan"](healthy(30))))
    for place in (tmp_path, tmp_path / "train.log.gz"):
        assert [step.line for step in doctor.read(place).steps] == list(range(5, 35))


def test_a_failure_before_the_first_step_is_reported_with_its_recipe(tmp_path: Path) -> None:
    settings_ = msgspec.to_builtins(index.load("llama3_8b_sft_config"))
    header = LOG_WRITERS["own"](replace(healthy(30), settings=settings_)).splitlines()[0]
    (tmp_path / "metrics.jsonl").write_text(header + "\n")
    with pytest.raises(InputError, match="found in its 1 logs"):
        doctor.read(tmp_path)
    for error, rule in ((OOM, "memory.out-of-memory"), ("token 999 is outside the vocabulary", "run.failed-error")):
        line = {"error": f"rank 0 of 8 failed in step 1: {error}", "fix": ["data.tokenizer=x"], "at": "2026-02-01"}
        (tmp_path / "failure.jsonl").write_text(json.dumps(line) + "\n")
        found = api.diagnose(tmp_path)
        assert (found.recipe, [one.id for one in found.findings]) == ("llama3_8b_sft_config", [rule])
    assert found.findings[0].remedies[0].try_ == ("data.tokenizer=x",)


def test_a_header_of_another_version_only_loses_the_estimate(tmp_path: Path) -> None:
    recipe = msgspec.to_builtins(index.load("llama3_8b_sft_config"))
    for changed, word in (
        ({"layout": {**recipe["layout"], "strategy": "newer"}}, "newer"),
        ({"cluster": "8xH999"}, "H999"),
    ):
        text = LOG_WRITERS["own"](replace(healthy(), settings={**recipe, **changed}, gpu="H999"))
        spaced = "\n".join(json.dumps(json.loads(line)) for line in text.splitlines())
        (tmp_path / "metrics.jsonl").write_text(spaced)
        (tmp_path / "bad_batches.jsonl").write_text('{"step":"x"}\n[]\n{"step":99}\n')
        (tmp_path / "failure.jsonl").write_text('{"error":3}\nnull\n')
        found = api.diagnose(tmp_path)
        assert found.ok
        assert any(word in note and "--recipe" in note for note in found.notes)


def test_failures_that_a_run_recovered_from_are_not_reported(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(LOG_WRITERS["own"](healthy(40)))
    for at, ids in (("2025-12-31T23:00:00Z", []), ("2026-01-01T01:00:00Z", ["memory.out-of-memory"])):
        line = {"error": f"the run failed in step 41: {OOM}", "fix": [], "at": at}
        (tmp_path / "failure.jsonl").write_text(json.dumps(line) + "\n")
        assert [finding.id for finding in doctor.examine(doctor.read(tmp_path)).findings] == ids
    (tmp_path / "failure.jsonl").unlink()
    for step, ids in ((12, []), (41, ["loss.not-a-number"])):
        line = {"step": step, "rank": 0, "loss": "nan", "grad_norm": 1.0, "samples": [1, 2], "policy": "stop"}
        (tmp_path / "bad_batches.jsonl").write_text(json.dumps(line) + "\n")
        assert [finding.id for finding in doctor.examine(doctor.read(tmp_path)).findings] == ids


def test_the_error_of_a_failed_run_is_recorded_in_its_folder(tmp_path: Path) -> None:
    from meshwright.engine.faults import RunError, StoppedError
    from meshwright.engine.train import _failure_recorded

    (tmp_path / "metrics.jsonl").write_text(LOG_WRITERS["own"](healthy(40)))
    with pytest.raises(StoppedError), _failure_recorded(tmp_path):
        raise StoppedError("preempted")
    assert not (tmp_path / "failure.jsonl").exists()
    with pytest.raises(RunError), _failure_recorded(tmp_path):
        raise RunError(f"rank 0 of 8 failed in step 41, forward_backward: {OOM}")
    (finding,) = doctor.examine(doctor.read(tmp_path)).findings
    assert (finding.id, finding.steps) == ("memory.out-of-memory", (40, 41))


def test_a_fault_with_later_steps_is_not_why_the_run_ended() -> None:
    first, second = healthy(40), healthy(40, first=41)
    text = LOG_WRITERS["torchtitan"](first) + f"{OOM}\n" + LOG_WRITERS["torchtitan"](second)
    run = doctor.read_text(text, "log")
    assert len(run.attempts) == 2
    assert run.faults
    assert doctor.examine(run).ok


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "it is empty"), ("hello\nworld\n", "no training found"), ("[titan] hello\n", "no training found")],
)
def test_a_text_without_a_training_is_rejected_with_the_supported_formats(text: str, words: str) -> None:
    with pytest.raises(InputError) as refused:
        doctor.read_text(text, "log")
    assert words in refused.value.reason
    for name in ("metrics.jsonl", "Megatron-LM", "torchtitan", "AutoModel"):
        assert name in refused.value.reason


def test_missing_and_binary_files_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="contains no log"):
        doctor.read(tmp_path)
    (tmp_path / "train.log").write_text(LOG_WRITERS["automodel"](healthy()))
    with pytest.raises(InputError, match=r"did you mean .*train\.log"):
        doctor.read(tmp_path / "trian.log")
    (tmp_path / "x.bin").write_bytes(b"\0" * 100)
    with pytest.raises(InputError, match="binary"):
        doctor.read(tmp_path / "x.bin")


def test_only_supplied_texts_are_read_over_http() -> None:
    with file_access.only({"train.log": LOG_WRITERS["torchtitan"](healthy())}):
        assert api.diagnose("train.log").ok
        with pytest.raises(InputError, match="not allowed over HTTP"):
            api.diagnose("/etc/passwd")


@settings(max_examples=15)
@given(st.text(max_size=400))
def test_any_text_is_read_or_rejected(text: str) -> None:
    try:
        run = doctor.read_text(text, "log")
    except InputError:
        return
    doctor.examine(run)


@settings(max_examples=12)
@given(
    writer=st.sampled_from(list(LOG_WRITERS)),
    seed=st.integers(0, 2**20),
    cut=st.integers(0, 20_000),
    junk=st.text(alphabet=st.characters(blacklist_categories=("Cs",)), max_size=30),
)
def test_a_truncated_or_corrupted_log_is_read_or_rejected(writer: str, seed: int, cut: int, junk: str) -> None:
    text = LOG_WRITERS[writer](healthy(30, seed))
    for damaged in (text[:cut], text[:cut] + junk + text[cut:]):
        try:
            found = doctor.examine(doctor.read_text(damaged, "log"))
        except InputError:
            continue
        json.dumps(api.to_json(api.doctor_response(found)), allow_nan=False)


@given(st.floats(allow_nan=False, allow_infinity=False, width=32))
def test_numbers_are_read_as_logs_write_them(value: float) -> None:
    for text in (f"{value:.6E}", f"{value:,.4f}", f"{value:g}"):
        read = number(text)
        assert read is not None
        assert read == pytest.approx(float(text.replace(",", "")))
    assert math.isnan(number("nan") or 0.0)
    assert number("twelve") is None


def test_colors_and_rank_prefixes_are_removed() -> None:
    lines = list(lines_of("[rank3]:\x1b[31mstep: 1\x1b[0m\r\n12: x\n12:34:56 plain\n 9%\r10%\r\nlast"))
    assert [(line.number, line.rank, line.text) for line in lines] == [
        *((1, "3", "step: 1"), (2, "12", "x"), (3, "", "12:34:56 plain")),
        *((4, "", " 9%"), (4, "", "10%"), (5, "", "last")),
    ]


@pytest.mark.parametrize(
    ("writer", "theirs", "older"),
    [("torchtitan", "tps:", "wps:"), ("automodel", r"mem (.*) \| tps (.*)\(.*/gpu\)", r"mem: \1 | tps \2")],
)
def test_older_log_formats_are_read(writer: str, theirs: str, older: str) -> None:
    text = LOG_WRITERS[writer](healthy(40))
    new, old = (doctor.examine(doctor.read_text(one, "log")) for one in (text, re.sub(theirs, older, text)))
    assert old.figures[0] == msgspec.structs.replace(new.figures[0], measured=pytest.approx(new.figures[0].measured))
    assert {one.name for one in old.figures} == {one.name for one in new.figures}
