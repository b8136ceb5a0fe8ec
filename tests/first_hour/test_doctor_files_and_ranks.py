"""`doctor` and `calibrate`: the file is believed, the rank behind a hang is named, advice says what it rests on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.doctor.fake_runs import FORMAT, LOG_WRITERS, at_estimated_speed, case
from tests.first_hour.test_doctor_stated_values import figures, finding, megatron

from meshwright import costs
from meshwright.costs.calibrate import best_clock, clocks_tried

TITAN = """[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = {batch}
seq_len = {length}
steps = 1000
[parallelism]
data_parallel_shard_degree = -1
[optimizer]
name = "AdamW"
lr = 3e-4
"""
MEGATRON = (
    "torchrun --nproc_per_node 8 --nnodes 12 pretrain_gpt.py --num-layers 40 --hidden-size 5120 "
    "--ffn-hidden-size 17408 --num-attention-heads 40 --group-query-attention --num-query-groups 8 --kv-channels 128 "
    "--swiglu --vocab-size 151936 --tensor-model-parallel-size 4 --seq-length {length} --micro-batch-size 1 "
    "--global-batch-size 384 --bf16 --lr 3e-4 --train-iters 19074 --max-position-embeddings 8192 "
    "--untie-embeddings-and-output-weights --disable-bias-linear\n"
)


def rules(answer: dict[str, Any]) -> list[str]:
    return [one["rule"] for one in answer["findings"]]


def titan(seconds: float = 0.975, steps: int = 100, tps: int = 8_402, extra: str = "") -> str:
    """Return a torchtitan log of llama3 8B with 8,192 tokens per sample, whose header is cut off."""
    text = ""
    for step in range(1, steps + 1):
        minute, second = divmod(seconds * step, 60)
        text += (
            f"[rank0]:[titan] 2026-11-01 00:{int(minute):02d}:{second:06.3f} - root - INFO - step: {step:2}  loss: "
            f"{2.4 + 8 / (step + 5):8.5f}  grad_norm:  0.6000  memory: 50.00GiB(63.00%)  tps: {tps:,}  tflops: "
            f"{tps * 57.5e9 / 1e12:.2f}  mfu: {tps * 57.5e9 / 9.89e12:.2f}%\n"
        ).replace(".", ",", 1)
    return text + extra


def test_the_users_file_is_not_replaced_by_guesses(meshwright: Any, tmp_path: Path) -> None:
    log, file = tmp_path / "train.log", tmp_path / "mine.toml"
    log.write_text(titan())
    typed = ("doctor", str(log), "--recipe", str(file), "--gpus", "8xH100", "--json")
    file.write_text(TITAN.format(batch=1, length=8192))
    same = meshwright(*typed).json
    assert rules(same) == []
    assert not [note for note in same["notes"] if "sequence length" in note or "batch" in note]
    file.write_text(TITAN.format(batch=2, length=4096))
    other = meshwright(*typed).json
    message = finding(other, "run.differs-from-file")["message"]
    assert "fit a sequence length of 8192" in message
    assert f"{file} says 4096" in message
    file.write_text(TITAN.format(batch=4, length=8192))
    batch = finding(meshwright(*typed, "--goal", "pretrain", "train.seed=3").json, "run.differs-from-file")
    assert "fit a global batch of 8" in batch["message"]
    assert f"{file} says 32" in batch["message"]
    fix = batch["remedies"][0]["try"][0].split()
    assert fix[-4:] == ["--goal", "pretrain", "train.seed=3", "train.global_batch_size=8"]
    assert "run.differs-from-file" not in rules(meshwright(*fix[1:], "--json").json)


def test_a_megatron_script_is_not_replaced_by_guesses(meshwright: Any, tmp_path: Path) -> None:
    log, file = tmp_path / "train.log", tmp_path / "run.sh"
    log.write_text(megatron())
    typed = ("doctor", str(log), "--recipe", str(file), "--gpus", "96xA100-80", "--json")
    file.write_text(MEGATRON.format(length=8192))
    assert rules(meshwright(*typed).json) == []
    file.write_text(MEGATRON.format(length=4096))
    answer = meshwright(*typed).json
    assert rules(answer)[0] == "run.differs-from-file"
    assert figures(answer)["tokens/s/GPU"] == pytest.approx(384 * 4096 / 16.42 / 96, rel=0.01)


def test_a_batch_without_a_file_is_a_usual_number_or_unknown(meshwright: Any, tmp_path: Path) -> None:
    log = tmp_path / "train.log"

    def notes(samples: float) -> str:
        log.write_text(titan(seconds=samples * 8192 / 8 / 8402))
        answer = meshwright("doctor", str(log), "--model", "llama3-8b", "--gpus", "8xH100", "--json").json
        return " ".join(one for one in answer["notes"] if "global batch" in one)

    assert "1024 is assumed, computed from tokens per second and step times (1021 samples)" in notes(1021)
    assert "480 is assumed" in notes(478)
    assert "24 is assumed" in notes(24)
    odd = notes(1213.6)
    assert "it is unknown" in odd or "1200 is assumed" in odd
    assert "it is unknown (tokens per second and step times fit 7.5" in notes(7.51)


def watchdog(
    rank: int, enqueued: int, prefix: str = "[rank{rank}]:", group: str = "PG ID 0 PG GUID 0(default_pg)"
) -> str:
    """Return what torch's watchdog prints on a rank whose collective 808 timed out."""
    start = prefix.format(rank=rank) + "[E1218 20:27:21.426415540 ProcessGroupNCCL.cpp:629] "
    return (
        f"{start}[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=808, OpType=ALLREDUCE, "
        "NumelIn=131072000, NumelOut=131072000, Timeout(ms)=600000) ran for 600081 milliseconds before timing out.\n"
        f"{start}[{group} Rank {rank}]  failure detected by watchdog at work sequence id: 808 PG status: last enqueued "
        f"work: {enqueued}, last completed work: 807\n"
    )


def elastic_table(*ranks: int, host: str) -> str:
    rows = "".join(
        f"[{number}]:\n  time      : 2026-11-01_09:17:37\n  host      : {host}\n  rank      : {rank} (local_rank: "
        f"{rank})\n  exitcode  : -6 (pid: 886322)\n  error_file: <N/A>\n  traceback : Signal 6 (SIGABRT) received\n"
        for number, rank in enumerate(ranks)
    )
    error = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: "
    return f"{error}\nRoot Cause (first observed failure):\n{rows}"


DESYNC = """
\t - To our best knowledge, the lagging/dead/mismatched ranks that caused the desync are:
\t     [6] finished collective #807, but didn't join collective #808 (count from 1)
srun: error: gpu-07: tasks 4-7: Aborted
srun: error: gpu-03: tasks 0-3: Aborted (core dumped)
"""
HANGS = {
    "rank 5 enqueued less": (
        "".join(watchdog(rank, 808 if rank == 5 else 811) for rank in range(8)) + elastic_table(1, 5, host="node012"),
        "Rank 5 (node012) is behind: it had enqueued collective 808 last, the others up to 811",
    ),
    "rank 5 enqueued less, with host prefixes": (
        "".join(watchdog(rank, 808 if rank == 5 else 811, f"gpu-0{rank // 4}: [rank{{rank}}]:") for rank in range(8)),
        "Rank 5 (gpu-01) is behind",
    ),
    "rank 3 is silent": (
        "".join(watchdog(rank, 811) for rank in range(8) if rank != 3),
        "Rank 3 (GPU 3 of node 0) reports no timeout while the other 7 timed out",
    ),
    "torch names the rank, srun the host": (watchdog(0, 811) + DESYNC, "Rank 6 (gpu-07) did not join the collective"),
    "all are in it": ("".join(watchdog(rank, 811) for rank in range(8)), "none is behind"),
    "only one rank's lines": (watchdog(0, 811), "Only rank 0 (GPU 0 of node 0) reports it (ALLREDUCE 808)"),
    "srun labels": (
        "".join(watchdog(rank, 808 if rank == 2 else 811, f"{rank}: ") for rank in range(8))
        + "srun: error: nid001: tasks 0-3: Aborted\nsrun: error: nid002: tasks 4-7: Aborted\n",
        "Rank 2 (nid001) is behind",
    ),
    "another group's ranks are not global": (
        "".join(watchdog(rank, 800 + rank, "[default{rank}]:", "PG ID 2 PG GUID 11(TP)") for rank in range(2)),
        "a collective timed out",
    ),
}


@pytest.mark.parametrize("name", HANGS)
def test_a_timeout_names_the_rank_behind_and_its_host(name: str, meshwright: Any, tmp_path: Path) -> None:
    text, expected = HANGS[name]
    log = tmp_path / "train.log"
    log.write_text(titan(extra=text))
    answer = meshwright("doctor", str(log), "--model", "llama3-8b", "--gpus", "8xH100", "--json").json
    found = finding(answer, "run.failed-hang")
    assert expected in found["message"]
    late = expected.partition("Rank ")[2][:1]
    if "is behind: " in found["message"]:
        assert f"[Rank {late}]" in found["lines"][0]
        assert found["remedies"][0]["try"][0].startswith(f"look at rank {late} (")
    if name == "all are in it":
        assert "never reached" not in found["message"]
        assert "nccl-tests" in found["remedies"][0]["try"][0]


def test_an_error_of_one_rank_explains_the_timeouts_of_the_others(meshwright: Any, tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    crash = "[rank3]:Traceback (most recent call last):\n[rank3]:ValueError: sample 17 has no text\n"
    log.write_text(titan(extra=crash + "".join(watchdog(rank, 811) for rank in range(8) if rank != 3)))
    answer = meshwright("doctor", str(log), "--model", "llama3-8b", "--gpus", "8xH100", "--json").json
    message = finding(answer, "run.failed-hang")["message"]
    assert (
        "rank 3 (GPU 3 of node 0) ended with an error, the likely cause: ValueError: sample 17 has no text" in message
    )


def test_an_out_of_memory_error_names_its_rank(meshwright: Any, tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    out = "[rank5]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.00 GiB.\n"
    log.write_text(titan(extra=out + elastic_table(5, host="node012")))
    answer = meshwright("doctor", str(log), "--json").json
    assert "rank 5 (node012) ran out of memory after step 100" in finding(answer, "memory.out-of-memory")["message"]


BATCH_LINE = (
    "[titan] 2026-11-01 00:00:00,000 - root - INFO - Trainer is initialized with local batch size 1, global batch size "
    "8, gradient accumulation steps 1, sequence length 8192, total steps {total} (warmup 200)\n"
)
ENDINGS = {
    "cut": ("", "the log ends at step 100 of 1,000, without an error or a line that says the training ended"),
    "completed": ("[titan] 2026-11-01 00:03:00,000 - root - INFO - Training completed\n", ""),
    "failed": ("[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.00 GiB.\n", ""),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_a_log_that_stops_early_gets_a_remark(name: str, meshwright: Any, tmp_path: Path) -> None:
    extra, expected = ENDINGS[name]
    log = tmp_path / "train.log"
    log.write_text(BATCH_LINE.format(total=1000) + titan(extra=extra))
    found = [note for note in meshwright("doctor", str(log), "--json").json["notes"] if "the log ends" in note]
    assert [note[: len(expected)] for note in found] == ([expected] if expected else [])
    log.write_text(BATCH_LINE.format(total=100) + titan())
    assert not [note for note in meshwright("doctor", str(log), "--json").json["notes"] if "the log ends" in note]


def test_a_megatron_run_that_ended_on_request_says_so(meshwright: Any, tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(megatron() + "[exiting program after 235.1 minutes] datetime: 2026-11-01 23:54:10 \n")
    notes = meshwright("doctor", str(log), "--json").json["notes"]
    assert "the log ends at step 1,000 of 19,074: exiting program after 235.1 minutes" in notes
    log.write_text(
        megatron().replace("/   19074", "/    1005") + "[after training is done] datetime: 2026-11-01 23:54:10 \n"
    )
    assert not [note for note in meshwright("doctor", str(log), "--json").json["notes"] if "the log ends" in note]


OWN_STEPS = "".join(
    f"step {step}/93  epoch 1.0/3.00  loss 5.3{step}  lr 3.5e-03  grad norm 0.1  tokens/s/rank 9,233  step time 0.2 s\n"
    for step in range(10, 61, 10)
)


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (
            "interrupted (Ctrl-C); checkpoint saved at step 63 in tuned; resume with: meshwright train tuned\n",
            "interrupted (Ctrl-C); checkpoint saved at step 63 in tuned; resume with: meshwright train tuned",
        ),
        (
            "stopped early: no validation loss lower by more than 0 in 1 validation since step 50; 0 continues\n",
            "stopped early: no validation loss lower by more than 0 in 1 validation since step 50",
        ),
        ("press Ctrl-C twice more to quit without saving\n", "without an error or a line that says the training ended"),
    ],
)
def test_a_run_of_ours_that_ended_on_request_says_so(line: str, shown: str, meshwright: Any, tmp_path: Path) -> None:
    (log := tmp_path / "train.log").write_text(OWN_STEPS + line)
    notes = [one for one in meshwright("doctor", str(log), "--json").json["notes"] if "the log ends" in one]
    assert len(notes) == 1
    assert notes[0].startswith("the log ends at step 60 of 93")
    assert shown in notes[0]


def test_a_run_folder_knows_why_it_ended_until_it_starts_again(meshwright: Any, tmp_path: Path) -> None:
    header = '{"kind":"header","recipe":"mine","first_step":1,"steps":93,"peak_flops":null}\n'
    steps = "".join(f'{{"kind":"step","step":{one},"loss":5.1,"step_s":0.2}}\n' for one in range(1, 8))
    why = "preempted (SIGTERM); checkpoint saved at step 7 in run; resume with: meshwright train mine --out run"
    end = f'{{"kind":"end","step":7,"why":"{why}","best_step":null}}\n'
    (log := tmp_path / "metrics.jsonl").write_text(header + steps + end)
    assert meshwright("doctor", str(tmp_path), "--json").json["notes"][-1] == f"the log ends at step 7 of 93: {why}"
    log.write_text(header + steps + end + header.replace('"first_step":1', '"first_step":8'))
    assert "it is still running" in meshwright("doctor", str(tmp_path), "--json").json["notes"][-1]


def test_the_length_of_the_users_file_shows_that_a_log_is_cut(meshwright: Any, tmp_path: Path) -> None:
    log, file = tmp_path / "train.log", tmp_path / "mine.toml"
    log.write_text(titan())
    file.write_text(TITAN.format(batch=1, length=8192))
    notes = meshwright("doctor", str(log), "--recipe", str(file), "--gpus", "8xH100", "--json").json["notes"]
    assert any("the log ends at step 100 of 1,000" in note for note in notes)


OUT_OF_MEMORY = (
    "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.91 GiB. GPU 3 has a total capacity of "
    "79.11 GiB of which 1.20 GiB is free. Including non-PyTorch memory, this process has 77.90 GiB memory in use.\n"
)


def test_remedies_fit_the_gpus_that_the_log_states(meshwright: Any, tmp_path: Path) -> None:
    log, file = tmp_path / "train.log", tmp_path / "mine.toml"
    file.write_text(TITAN.format(batch=4, length=8192))
    asked = ("doctor", str(log), "--recipe", str(file), "--gpus", "8xA100-80", "--json")
    smaller = OUT_OF_MEMORY.replace("79.11", "47.43").replace("77.9", "46.2")
    for text, sized in ((OUT_OF_MEMORY, False), (smaller, True)):
        log.write_text("[titan] 2026-11-01 00:00:00,000 - root - INFO - Starting job\n" + text)
        found = finding(meshwright(*asked).json, "memory.out-of-memory")
        said = "The log's GPUs have 47.4 GiB, not the 80.0 GiB of A100-80: the remedies are sized for 47.4 GiB"
        assert (said in found["message"]) == sized
        peaks = [one["peak_gib"] for one in found["remedies"] if one["peak_gib"]]
        assert peaks
        assert (max(peaks) < 47.43) == sized


def test_out_of_memory_advice_says_what_it_rests_on(meshwright: Any, tmp_path: Path) -> None:
    log, file = tmp_path / "train.log", tmp_path / "mine.toml"
    log.write_text("[titan] 2026-11-01 00:00:00,000 - root - INFO - Starting job\n" + OUT_OF_MEMORY)
    file.write_text(TITAN.format(batch=4, length=8192))
    own = finding(
        meshwright("doctor", str(log), "--recipe", str(file), "--gpus", "8xH100", "--json").json, "memory.out-of-memory"
    )
    assert f"The remedies are tried on {file}: what fits is estimated, not measured" in own["message"]
    smaller = next(one for one in own["remedies"] if one["try"] == ["layout.micro_batch_size=1"])
    # torchtitan computes the global batch from the local one unless the file states it.
    assert smaller["there"] == ["training.local_batch_size = 1", "training.global_batch_size = 32"]
    assert smaller["fits"] is True
    named = finding(
        meshwright("doctor", str(log), "--model", "llama3-8b", "--gpus", "8xH100", "--json").json,
        "memory.out-of-memory",
    )
    assert "which may not be what ran (--recipe FILE" in named["message"]
    unknown = finding(meshwright("doctor", str(log), "--json").json, "memory.out-of-memory")
    assert "cannot be known without the model, the layout and the GPUs" in unknown["message"]
    assert {'activation_checkpoint.mode = "full"', "training.local_batch_size = 1"} <= {
        text for one in unknown["remedies"] for text in one["there"]
    }
    assert not [one for one in unknown["remedies"] if one["what"] == "layout" and not one["there"]]


def test_out_of_memory_advice_for_the_trainer_is_in_its_spelling(meshwright: Any, tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    record = "{'loss': 1.5, 'grad_norm': 0.6, 'learning_rate': 2e-05, 'epoch': 0.01}\n"
    log.write_text(record * 3 + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n")
    remedies = finding(meshwright("doctor", str(log), "--json").json, "memory.out-of-memory")["remedies"]
    assert "gradient_checkpointing: true" in [text for one in remedies for text in one["there"]]


HF_RATES = (
    "{{'loss': {loss}, 'grad_norm': 0.6, 'learning_rate': 2e-05, 'tokens_per_second_per_gpu': {tps}, 'epoch': 0.01}}\n"
)


@pytest.mark.parametrize(
    "kind", ["megatron", "torchtitan", "automodel", "automodel_json", "kempnerforge", "transformers"]
)
def test_calibrate_reads_the_log_of_every_framework(kind: str, meshwright: Any, tmp_path: Path) -> None:
    made = case("llama3_8b_pretrain_config", "8xH100", FORMAT.get(kind, "meshwright"))
    log, out = tmp_path / "train.log", tmp_path / "mine.toml"
    if kind == "transformers":
        tps = float(costs.estimate(made).tokens_per_s_per_gpu) / 1.2
        log.write_text("".join(HF_RATES.format(loss=2 - step / 1000, tps=tps + step % 5) for step in range(60)))
    else:
        log.write_text(LOG_WRITERS[kind](at_estimated_speed(made, 60, slower=1.2)))
    said = ("--recipe", "llama3_8b_pretrain_config", "--gpus", "8xH100")
    found = meshwright("calibrate", str(log), *said, "--out", str(out))
    assert found.code == 0, found.err
    assert "times the speed of the shipped profile. Median error of the step time:" in found.out
    assert f"stored in {out}" in found.out.replace("\n", "")
    speed = float(found.out.split("H100: ")[1].split()[0])
    assert 0.6 < speed < 0.95
    plan = ("estimate", "llama3-8b", "--gpus", "8xH100", "--goal", "pretrain", "--json")
    assert (
        meshwright(*plan, "--calibration", str(out)).json["estimate"]["step_s"]
        > meshwright(*plan).json["estimate"]["step_s"]
    )


@pytest.mark.parametrize("verb", ["recommend", "plan", "estimate"])
def test_like_follows_the_speed_of_a_run(verb: str, meshwright: Any, tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    layout = ("layout.tp=1", "layout.sp=false")  # as in the header of the log
    made = case("llama3_8b_pretrain_config", "8xH100", "torchtitan", *layout)
    named = "[titan] 2026-01-01 00:00:00,000 - root - INFO - Model llama3 8B size: 8,030,261,248 total parameters\n"
    log.write_text(named + LOG_WRITERS["torchtitan"](at_estimated_speed(made, 60, slower=1.3)))
    typed = (verb, "llama3_8b_pretrain_config", "--gpus", "8xH100", "--engine", "torchtitan", *layout, "--json")

    def seconds(*more: str) -> float:
        answer = meshwright(*typed, *more).json
        return float((answer["plans"][0] if verb == "plan" else answer)["estimate"]["step_s"])

    assert 1.15 < seconds("--like", str(log)) / seconds() < 1.5
    assert "fitted to 1 run of" in meshwright(*typed[:-1], "--like", str(log)).out.replace("\n", " ")
    other = meshwright(*typed[:2], "--gpus", "8xA100-80", "--like", str(log))
    assert other.code == 2
    assert "the run is on H100, and the plan is for A100-80" in other.err.replace("\n", " ")
    twice = meshwright(*typed[:-1], "--like", str(log), "--calibration", "mine.toml")
    assert "remove --calibration" in twice.err


def test_like_takes_the_file_of_the_plan_for_a_log_that_names_nothing(meshwright: Any, tmp_path: Path) -> None:
    log, file = tmp_path / "train.log", tmp_path / "mine.toml"
    log.write_text(titan())
    file.write_text(TITAN.format(batch=1, length=8192))
    found = meshwright("estimate", str(file), "--gpus", "8xH100", "--like", str(log))
    assert found.code == 0, found.err
    unnamed = meshwright("estimate", "llama3-8b", "--gpus", "8xH100", "--goal", "pretrain", "--like", str(log))
    assert unnamed.code == 2
    assert f"meshwright calibrate {log} --recipe FILE --gpus 8xH100 --out mine.toml" in unnamed.err.replace("\n", "")
    file.write_text(TITAN.format(batch=4, length=8192))
    other = meshwright("calibrate", str(log), "--recipe", str(file), "--gpus", "8xH100")
    assert other.code == 2
    assert "fit a global batch of 8" in other.err.replace("\n", " ")  # a file of another run teaches nothing


def test_the_table_of_runs_has_sequence_parallelism(meshwright: Any, tmp_path: Path) -> None:
    header = "framework,model,gpus,seq_length,global_batch_size,tp,sp,step_time_s\n"
    table = tmp_path / "runs.csv"

    def memory_and_code(sp: str, tp: int = 2) -> tuple[int, str]:
        table.write_text(header + f"meshwright,llama3-8b,8xH100,8192,64,{tp},{sp},9.5\n")
        found = meshwright("calibrate", str(table))
        return found.code, found.out + found.err

    codes = {sp: memory_and_code(sp) for sp in ("", "true", "off", "no")}
    assert {code for code, _ in codes.values()} == {0}
    clocks = {sp: text.split("clock = ")[1].split()[0] for sp, (_, text) in codes.items()}
    assert clocks[""] == clocks["true"] != clocks["off"] == clocks["no"]
    assert "sequence parallelism needs tp above 1" in memory_and_code("true", tp=1)[1].replace("\n", " ")
    assert memory_and_code("maybe")[0] == 2
    assert ",sp," in meshwright("calibrate", "--template").out


def test_runs_that_contradict_each_other_do_not_move_the_clock() -> None:
    clocks = clocks_tried()
    times = np.array([1.2, 1.21, 1.19, 1.2, 1.2])  # predicted over measured at a clock of 1
    ratios = times[None, :] / clocks[:, None]
    assert clocks[best_clock(ratios, clocks, 1.0)] == pytest.approx(1.2, rel=0.02)
    apart = np.array([0.5, 1.6, 0.7, 1.3, 1.25])
    moved = clocks[best_clock(apart[None, :] / clocks[:, None], clocks, 1.0)]
    assert 1.0 <= moved < 1.15


def test_size_and_recommend_agree_on_checkpoints(meshwright: Any) -> None:
    budget = ("--goal", "pretrain", "--tokens", "1T")
    sized = " ".join(meshwright("size", "llama3-70b", "--gpus", "H100", "--days", "60", *budget).out.split())
    best = sized.split("checkpoint.save_every=")[1].split(")")[0]
    assert "the recipe saves every" in sized
    assert "(checkpoint.save_every=1000), which recommend and the table assume" in sized
    assert "each save blocks training for" in sized
    gpus = sized.split("in 60 days ")[1].split()[0]
    plan = " ".join(meshwright("recommend", "llama3-70b", "--gpus", f"{int(gpus) // 8}x8xH100", *budget).out.split())
    assert f"add checkpoint.save_every={best}" in plan
    assert "(1,000 steps; each blocks training for" in plan
