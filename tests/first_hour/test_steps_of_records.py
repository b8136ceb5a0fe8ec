"""Steps of logged records, byte order marks, small datasets, slow ranks, and Axolotl files."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

import meshwright
from meshwright import doctor
from meshwright.api.training import _in_fast_precision as in_fast_precision
from meshwright.cli.run import run as run_command
from meshwright.doctor import reading


def trainer_log(total: int, every: int, seconds: float, *, first: bool = False) -> str:
    """Return a log of the Trainer without a progress bar."""
    epochs, rate = 3.0, round(total / seconds, 3)
    steps = [*([1] if first else []), *range(every, total + 1, every)]
    lines = [
        f"{{'loss': {2 - step / total:.4f}, 'grad_norm': 0.5, 'epoch': {round(epochs * step / total, 2)}}}"
        for step in steps
    ]
    end = f"{{'train_runtime': {seconds}, 'train_steps_per_second': {rate}, 'train_loss': 1.1, 'epoch': {epochs}}}"
    return "\n".join([*lines, end])


@pytest.mark.parametrize("seconds", [3605.2, 3598.1])
@pytest.mark.parametrize("first", [False, True])
def test_the_trainers_rounded_rate_gives_whole_steps_per_record(seconds: float, first: bool) -> None:
    run = reading.read_text(trainer_log(1000, 10, seconds, first=first), "hf2.log")
    found = [step.step for step in run.steps]
    assert found == [*([1] if first else []), *range(10, 1001, 10)]
    assert run.header.total_steps == 1000
    assert any("10 steps per record" in note for note in run.notes)


def test_steps_that_are_approximate_are_called_so() -> None:
    run = reading.read_text(trainer_log(70, 7, 30011.0), "slow.log")
    assert any("approximate" in note for note in run.notes)


def test_an_unfinished_run_takes_its_steps_from_the_examples_and_the_batch() -> None:
    head = (
        "***** Running training *****\n  Num examples = 8,000\n  Num Epochs = 3\n"
        "  Total train batch size (w. parallel, distributed & accumulation) = 24\n  Total optimization steps = 1,002\n"
    )
    lines = [f"{{'loss': 1.5, 'grad_norm': 0.5, 'epoch': {round(step / 334, 2)}}}" for step in range(10, 401, 10)]
    run = reading.read_text(head + "\n".join(lines), "unfinished.log")
    assert [step.step for step in run.steps] == list(range(10, 401, 10))
    assert run.header.total_steps == 1002


ROW = '{"messages": [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4"}]}'


def commanded(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        run_command(list(words))
    found = capsys.readouterr()
    return int(ended.value.code or 0), found.out + found.err


@pytest.mark.parametrize("name", ["bom.jsonl", "bom.jsonl.gz", "bom.json", "lines.json", "bom.csv", "bom.txt"])
def test_data_with_a_byte_order_mark_is_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = {
        "bom.json": f"[{ROW}, {ROW}]",
        "bom.csv": 'prompt,response\n"What is 2 + 2?",4\n',
        "bom.txt": "What is 2 + 2?\n4\n",
    }
    raw = texts.get(name, f"{ROW}\n{ROW}\n").encode("utf-8-sig")
    Path(name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    words = ("samples", "qwen3_600m_sft_config", "--dataset", name, "data.tokenizer=bytes", "--count", "1")
    code, text = commanded(capsys, *words)
    assert code == 0, text
    assert "not JSON" not in text
    assert "\ufeff" not in text
    assert "is 2 + 2?" in text


def test_configs_with_a_byte_order_mark_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds_config.json").write_text('{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}}', "utf-8-sig")
    Path("axolotl.yml").write_text("base_model: Qwen/Qwen2.5-0.5B\nmicro_batch_size: 1\nadapter: lora\n", "utf-8-sig")
    Path("tt.toml").write_text('[model]\nname = "llama3"\nflavor = "8B"\n[training]\nseq_len = 2048\n', "utf-8-sig")
    for name in ("ds_config.json", "axolotl.yml", "tt.toml"):
        _, text = commanded(capsys, "check", name, "--gpus", "8xH100")
        assert "not valid" not in text, text
        assert "JSON" not in text, text
        assert "\ufeff" not in text, text


TALK = '{"messages": [{"role": "user", "content": "%s"}, {"role": "assistant", "content": "%s"}]}\n'


@pytest.fixture
def talks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("tools.jsonl").write_text((TALK % ("word " * 400, "answer " * 400)) * 400)
    return "tools.jsonl"


@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-7B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"])
def test_the_recommended_batch_follows_a_small_dataset(model: str, talks: str) -> None:
    words = (f"data.dataset={talks}", "train.epochs=3")
    plan = meshwright.recommend(model, "1x4090", "lora", overrides=words)
    steps = plan.budget.steps
    assert plan.recipe.train.global_batch_size == 8
    assert 50 <= steps <= 500
    changed = [one.why for one in plan.changes if one.field == "train.global_batch_size"]
    assert all("leave only" in why for why in changed)
    assert not any("global_batch_size" in text for one in plan.suggestions for text in one.overrides)


def test_a_typed_batch_stays_and_a_smaller_one_is_suggested(talks: str) -> None:
    words = (f"data.dataset={talks}", "train.epochs=3", "train.global_batch_size=128")
    plan = meshwright.recommend("Qwen/Qwen2.5-7B-Instruct", "1x4090", "lora", overrides=words)
    assert plan.recipe.train.global_batch_size == 128
    assert ("train.global_batch_size=8",) in [one.overrides for one in plan.suggestions]


TITAN = "[rank0]:[titan] 2026-11-17 08:00:0{0},120 - root - INFO - "


def titan_log(*more: str) -> str:
    head = [
        "Building 3-D device mesh with ['pp', 'dp_shard', 'tp'], [3, 64, 1]",
        *more,
        "Trainer is initialized with local batch size 8, global batch size 512, gradient accumulation steps 1, "
        "sequence length 8192, total steps 476838 (warmup 2000)",
        *(
            f"step: {n}  loss: 9.1  grad_norm: 0.4  memory: 57.12GiB(72.21%)  tps: 3,980  tflops: 333.01"
            for n in (1, 2)
        ),
    ]
    return "\n".join(TITAN.format(place) + text for place, text in enumerate(head))


def test_a_pipeline_of_torchtitan_splits_its_local_batch() -> None:
    schedule = "Using pipeline schedule Interleaved1F1B with 4 microbatches and 6 stages."
    stated = reading.read_text(titan_log(schedule), "tt.log").header.overrides
    assert stated["layout.micro_batch_size"] == 2
    unknown = reading.read_text(titan_log(), "tt.log").header.overrides
    assert "layout.micro_batch_size" not in unknown  # the file's counts, as in check and estimate
    assert unknown["train.global_batch_size"] == 512


def megatron_log(slow: dict[int, float], ranks: int = 8, *, forward: float = 600.0) -> str:
    """Return a log with the times of every rank; some are slower by a factor."""
    lines = []
    for step in range(10, 201, 10):
        lines += [
            f" iteration {step:8d}/   10000 | consumed samples: {step * 128:12d} | elapsed time per iteration "
            "(ms): 2000.0 | learning rate: 3.000000E-04 | global batch size:   128 | lm loss: 4.700000E+00 "
            "| grad norm: 0.400 |",
            "times across ranks (ms):",
            "  forward-compute:",
            *(f"     rank {rank}: {forward * slow.get(rank, 1) + (rank * 7 + step) % 5:.2f}" for rank in range(ranks)),
        ]
    return "\n".join(lines)


def stragglers(text: str) -> list[str]:
    found = doctor.examine(reading.read_text(text, "m8.log"))
    return [one.message for one in found.findings if one.id == "speed.stragglers"]


def test_the_times_of_every_rank_name_the_slow_one() -> None:
    assert stragglers(megatron_log({})) == []
    (message,) = stragglers(megatron_log({5: 1.2}))
    assert message.startswith("rank 5 takes 1.20 times")


def test_the_last_stage_of_an_unknown_pipeline_is_no_slow_rank() -> None:
    assert stragglers(megatron_log(dict.fromkeys(range(12, 16), 1.15), 16)) == []


VERBS = "node17: node17:41233:41980 [3] transport/net_ib.cc:1690 NCCL WARN NET/IB: Got completion from peer "
VERBS += "10.1.0.18<41022> with status=12 opcode=0 len=0 vendor err 129 (Recv) hca mlx5_3"
TIMEOUT = (
    "[rank37]:[E1117 11:02:13.118 ProcessGroupNCCL.cpp:685] [Rank 5] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=918273, OpType=_REDUCE_SCATTER_BASE, Timeout(ms)=1800000) ran for 1800021 milliseconds before "
    "timing out."
)
ENDED = "srun: error: node05: task 4: Exited with exit code 1"


@pytest.mark.parametrize("first", [TIMEOUT, VERBS])
def test_a_failed_connection_names_both_ends_and_not_a_rank_that_timed_out(first: str) -> None:
    second = VERBS if first == TIMEOUT else TIMEOUT
    address = "node18:900:900 [0] NCCL INFO Bootstrap : Using ib0:10.1.0.18<0>"
    log = "\n".join([address, megatron_log({}), first, second, ENDED])
    found = doctor.examine(reading.read_text(log, "mcore_nccl.log"))
    (failed,) = [one for one in found.findings if one.id.startswith("run.failed")]
    evidence = {one.name: one.value for one in failed.evidence}
    assert failed.id == "run.failed-network"
    assert evidence["reported by"] == "node17 (GPU 3, mlx5_3)"
    assert evidence["other end of the connection"] == "node18 (10.1.0.18)"
    assert "first rank that reports it" not in evidence
    assert any("exclude node17 and node18" in text for one in failed.remedies for text in one.try_)
    assert "node05" not in str(failed)


def test_the_end_that_all_reports_have_in_common_is_excluded() -> None:
    others = VERBS.replace("node17", "node03").replace("[3]", "[1]")
    found = doctor.examine(reading.read_text("\n".join([megatron_log({}), VERBS, others]), "mcore_nccl.log"))
    (failed,) = [one for one in found.findings if one.id.startswith("run.failed")]
    assert any(text == "exclude 10.1.0.18" for one in failed.remedies for text in one.try_)


AXOLOTL = """base_model: NousResearch/Meta-Llama-3-8B-Instruct
load_in_4bit: true
datasets:
  - path: tools.jsonl
    type: chat_template
adapter: qlora
sequence_len: 4096
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 3
learning_rate: 0.0002
"""


@pytest.mark.parametrize(
    ("line", "carried"),
    [("warmup_steps: 10", "schedule.warmup_steps=10"), ("warmup_ratio: 0.1", "schedule.warmup_steps=15")],
)
def test_the_command_for_an_axolotl_file_keeps_its_warmup(
    line: str, carried: str, talks: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("axolotl.yml").write_text(AXOLOTL + line)
    code, text = commanded(capsys, "export", "axolotl.yml", "--gpus", "1xRTX4090", "--to", "accelerate")
    assert code == 2
    assert carried in text.partition("fix:")[2]
    assert line.partition(":")[0] + "=" not in text.partition("fix:")[0]


def test_a_checked_file_is_run_by_its_framework_in_python_too(talks: str) -> None:
    Path("axolotl.yml").write_text(AXOLOTL)
    assert "on 1xRTX4090 with axolotl" in str(meshwright.check("axolotl.yml", gpus="1xRTX4090"))


def test_offloading_names_the_host_memory_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("acc.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16\nnum_machines: 1\n"
        "num_processes: 2\nfsdp_config:\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
        "  fsdp_offload_params: true\n  fsdp_sharding_strategy: FULL_SHARD\n  fsdp_activation_checkpointing: true\n"
        "  fsdp_transformer_layer_cls_to_wrap: Qwen2DecoderLayer\n"
    )
    words = ["data.seq_length=2048", "layout.micro_batch_size=1", "train.global_batch_size=8"]
    found = meshwright.check("acc.yaml", gpus="2xL40S", model="Qwen/Qwen2.5-7B-Instruct", overrides=words)
    notes = [one for one in found.notes if one.startswith("offloading needs")]
    assert len(notes) == 1
    assert "GiB of host memory per GPU" in notes[0]
    assert "256 GiB" in notes[0]


def test_a_plan_for_gpus_runs_in_fp32_on_a_cpu_that_is_slow_in_bf16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright.engine.cpu_speed.slowdown", lambda compute: 183.0)
    recipe = meshwright.recipe("qwen3_600m_sft_config")
    assert recipe.precision.compute == "bf16"
    run = str(tmp_path / "run")
    assert in_fast_precision(recipe, run, {}).precision.compute == "fp32"
    assert in_fast_precision(recipe, run, {"precision.compute": "bf16"}).precision.compute == "bf16"


def test_random_weights_have_no_fine_tuning_rate() -> None:
    words = ["optimizer.lr=0.001"]
    for start, expected in (("", True), ("random", False)):
        found = meshwright.check(
            "qwen3_600m_sft_config", gpus="1xH100", overrides=[*words, f"checkpoint.pretrained={start}"]
        )
        assert any(one.rule == "learning_rate.fine-tuning" for one in found.findings) is expected


def test_the_config_beside_a_trl_command_is_for_one_process(talks: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("trl.sh").write_text(
        "trl sft --model_name_or_path mistralai/Mistral-7B-Instruct-v0.3 --dataset_name ./tools.jsonl --use_peft "
        "--num_train_epochs 3 --max_length 4096 --per_device_train_batch_size 2 --bf16 "
        "--dtype bfloat16 --output_dir out\n"
    )
    code, text = commanded(capsys, "export", "trl.sh", "--gpus", "1xRTX4090", "--to", "accelerate", "--out", "exp")
    assert code == 0, text
    assert "MULTI_GPU" not in Path("exp/trl.yaml").read_text()
    assert "trl.yaml is for accelerate launch only" in " ".join(text.split())


@pytest.mark.parametrize("typed", ["4090", "RTX4090", "rtx 4090", "L40S"])
def test_a_card_without_a_count_is_one_card(typed: str) -> None:
    plan = meshwright.recommend("Qwen/Qwen2.5-0.5B-Instruct", typed, "lora")
    assert plan.question.cluster.world == 1
    assert any("no count was written" in one.message for one in plan.question.assumed)


@pytest.mark.parametrize("rank", ["131", "  131"])
def test_the_lines_of_megatrons_straggler_detector_name_the_slow_rank(rank: str) -> None:
    line = f"MnRtt/Rnk: 4.12ms/11 | MxRtt/Rnk: 5.90ms/{rank} | MnPwr/Rnk: 388.21W/131 | MxPwr/Rnk: 641.77W/22"
    text = megatron_log({}).replace("times across ranks (ms):", f"{line}\ntimes across ranks (ms):")
    (message,) = stragglers(text)
    assert message.startswith("rank 131 takes 1.43 times")
