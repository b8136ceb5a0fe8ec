"""Logs compared with the file that ran, DeepSpeed's JSON in scripts, a run's own speed."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.doctor.fake_runs import LOG_WRITERS, at_estimated_speed
from tests.doctor.fake_runs import case as fake_case

from meshwright.recipes import overrides

CLUSTER = """\
gpu = "A100-80"
nodes = 40
gpus_per_node = 4
memory_gib = 64
hbm_gb_s = 1640
network_gb_s_per_node = "800 Gb/s"
"""
MOE = {
    "num-layers": 48, "hidden-size": 2048, "vocab-size": 151936, "max-position-embeddings": 4096,
    "position-embedding-type": "rope", "normalization": "RMSNorm", "untie-embeddings-and-output-weights": True,
    "num-attention-heads": 32, "group-query-attention": True, "num-query-groups": 4, "kv-channels": 128,
    "qk-layernorm": True, "ffn-hidden-size": 768, "swiglu": True, "num-experts": 128,
    "moe-router-topk": 8, "moe-ffn-hidden-size": 768, "rotary-base": 1000000, "make-vocab-size-divisible-by": 64,
    "tensor-model-parallel-size": 2, "pipeline-model-parallel-size": 1, "expert-model-parallel-size": 8,
    "expert-tensor-parallel-size": 1, "sequence-parallel": True, "use-distributed-optimizer": True,
    "overlap-grad-reduce": True, "overlap-param-gather": True, "micro-batch-size": 2, "global-batch-size": 1280,
    "seq-length": 4096, "train-iters": 190735, "lr": 0.0003, "min-lr": 3e-05, "lr-warmup-iters": 1907,
    "bf16": True, "moe-token-dispatcher-type": "alltoall", "moe-grouped-gemm": True, "save-interval": 213,
}  # fmt: skip
"""Megatron-LM's arguments of a mixture of experts."""
STEP = (
    " [2026-11-10 08:01:26.123456] iteration {step:8d}/  190735 | consumed samples: {samples:12d} | elapsed time per "
    "iteration (ms): {ms:.1f} | learning rate: 3.0E-04 | global batch size:  1280 | lm loss: {loss:.6E} | loss scale: "
    "1.0 | grad norm: 0.400 | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
)


def megatron_script(**changed: Any) -> str:
    """Return a script that starts Megatron-LM with the arguments, some of them changed."""
    flags = {**MOE, **{name.replace("_", "-"): value for name, value in changed.items()}}
    shown = " \\\n  ".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in flags.items())
    return f"#!/bin/bash\ntorchrun --nnodes 40 --nproc-per-node 4 pretrain_gpt.py \\\n  {shown}\n"


def megatron_log(seconds: float, steps: int = 60, **changed: Any) -> str:
    """Return Megatron-LM's log of a run, with its arguments, some of them changed."""
    dumped = {**{name.replace("-", "_"): value for name, value in MOE.items()}, "world_size": 160}
    dumped |= {"recompute_granularity": None, **changed}
    lines = "".join(f"  {name} {'.' * (48 - len(name))} {value}\n" for name, value in sorted(dumped.items()))
    text = (
        "using world size: 160, data-parallel size: 80, context-parallel size: 1, hierarchical context-parallel sizes: "
        "None, tensor-model-parallel size: 2, pipeline-model-parallel size: 1\n"
        f"------------------------ arguments ------------------------\n{lines}"
        "-------------------- end of arguments ---------------------\n"
    )
    for number in range(1, steps + 1):
        step, noise = number * 10, 1 + 0.005 * (number % 3 - 1)
        text += STEP.format(step=step, samples=step * 1280, ms=seconds * 1000 * noise, loss=2.5 + 8 / (number + 1))
    return text


def rules(answer: dict[str, Any]) -> list[str]:
    return [one["rule"] for one in answer["findings"]]


def messages(answer: dict[str, Any], rule: str) -> list[str]:
    return [one["message"] for one in answer["findings"] if one["rule"] == rule]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("leo.toml").write_text(CLUSTER)
    return tmp_path


def test_every_setting_of_a_megatron_log_is_compared_with_the_file(here: Path, meshwright: Any) -> None:
    Path("run.log").write_text(megatron_log(11.2))
    Path("diff.sh").write_text(megatron_script(tensor_model_parallel_size=4, global_batch_size=640, lr=0.001))
    typed = ("doctor", "run.log", "--gpus", "leo.toml", "--recipe")
    (found,) = messages(meshwright(*typed, "diff.sh", "--json").json, "run.differs-from-file")
    assert "tp=2, global_batch_size=1280, lr=0.0003 in the log, tp=4, global_batch_size=640, lr=0.001 in" in found
    Path("diff2.sh").write_text(megatron_script(micro_batch_size=1, recompute_granularity="selective", save_interval=9))
    (found,) = messages(meshwright(*typed, "diff2.sh", "--json").json, "run.differs-from-file")
    assert "micro_batch_size=2, recompute=none, save_every=213 in the log" in found
    Path("same.sh").write_text(megatron_script())
    assert "run.differs-from-file" not in rules(meshwright(*typed, "same.sh", "--json").json)
    typed_rate = meshwright(*typed, "diff.sh", "optimizer.lr=0.001", "--json").json
    assert "lr=" not in messages(typed_rate, "run.differs-from-file")[0]


def test_recompute_in_a_log_is_compared_with_a_file_that_leaves_it_out(here: Path, meshwright: Any) -> None:
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    Path("full.log").write_text(megatron_log(14.0, **full))
    Path("planned.sh").write_text(megatron_script())
    typed = ("doctor", "full.log", "--gpus", "leo.toml", "--recipe", "planned.sh", "--json")
    (found,) = messages(meshwright(*typed).json, "run.differs-from-file")
    assert "recompute=full in the log, recompute=none in planned.sh" in found


@pytest.mark.parametrize("kind", ["own", "torchtitan", "kempnerforge"])
def test_the_settings_of_other_logs_are_compared_too(here: Path, meshwright: Any, kind: str) -> None:
    made = fake_case()
    meshwright("recommend", "llama3-8b", "--gpus", "8xH100", "--goal", "pretrain", "--save", "mine.toml")
    recipe = overrides.apply(made.recipe, ["train.steps=123"])
    run = replace(at_estimated_speed(made), settings=msgspec.to_builtins(recipe), total=123)
    Path("run.log").write_text(LOG_WRITERS[kind](run))
    answer = meshwright("doctor", "run.log", "--gpus", "8xH100", "--recipe", "mine.toml", "--json").json
    (found,) = (one for one in messages(answer, "run.differs-from-file") if "contradicts" in one)
    assert "steps=123" in found


def test_another_save_interval_is_a_note(here: Path, meshwright: Any) -> None:
    made = fake_case()
    meshwright("recommend", "llama3-8b", "--gpus", "8xH100", "--goal", "pretrain", "--save", "mine.toml")
    recipe = overrides.apply(made.recipe, ["checkpoint.save_every=670"])
    run = replace(at_estimated_speed(made), settings=msgspec.to_builtins(recipe), total=recipe.train.steps)
    Path("run.log").write_text(LOG_WRITERS["own"](run))
    typed = ("doctor", "run.log", "--gpus", "8xH100", "--recipe", "mine.toml", "--json")
    answer = meshwright(*typed).json
    assert not [one for one in messages(answer, "run.differs-from-file") if "save_every" in one]
    assert [one for one in answer["notes"] if one.startswith("save_every=670 in the log, save_every=")]


DEEPSPEED = """{{
  "train_batch_size": 64,
  "train_micro_batch_size_per_gpu": {micro},
  "zero_optimization": {{"stage": 1}},
  "bf16": {{"enabled": true}}{more}
}}
"""
MEGATRON_DEEPSPEED = """\
#!/bin/bash
{written}
deepspeed --num_nodes 1 --num_gpus 8 pretrain_gpt.py --tensor-model-parallel-size 2 \\
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 11008 --swiglu \\
    --normalization rmsnorm --use-rotary-position-embeddings --untie-embeddings-and-output-weights \\
    --disable-bias-linear --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 \\
    --global-batch-size 64 --train-iters 1000 --lr 3e-4 --min-lr 3e-5 --lr-warmup-iters 100 --bf16 \\
    --data-path text_document --tokenizer-type HFTokenizer --tokenizer-model llama --save ckpt --load ckpt \\
    --save-interval 100 --no-pipeline-parallel --deepspeed --deepspeed_config ds.json --zero-stage 1 {flags}
"""


@pytest.mark.parametrize(
    ("more", "rule", "line"),
    [
        (',\n  "fp16": {"enabled": true}', "deepspeed.two-dtypes", 6),
        (
            ',\n  "data_types": {"grad_accum_dtype": "fp32"},\n  "zero_optimisation": {"stage": 1}',
            "deepspeed.ignored-section",
            7,
        ),
        (',\n  "gradient_clipping": "auto"', "megatron-deepspeed.auto", 6),
        (',\n  "scheduler": {"type": "WarmupDecayLR"}', "deepspeed.scheduler", 6),
    ],
)
@pytest.mark.parametrize("in_script", [True, False])
def test_the_rules_of_deepspeed_apply_to_the_json_of_a_megatron_script(
    here: Path, meshwright: Any, more: str, rule: str, line: int, in_script: bool
) -> None:
    text = DEEPSPEED.format(micro=1, more=more)
    Path("run.sh").write_text(
        MEGATRON_DEEPSPEED.format(written=f"cat <<EOT > ds.json\n{text}EOT" if in_script else "", flags="")
    )
    if not in_script:
        Path("ds.json").write_text(text)
    answer = meshwright("check", "run.sh", "--gpus", "8xA100-80", "--json").json
    (found,) = (one for one in answer["findings"] if one["rule"] == rule)
    assert (found["file"], found["line"]) == (("run.sh", line + 2) if in_script else ("ds.json", line))


def test_a_right_json_and_the_optimizer_that_megatron_replaces_are_no_findings(here: Path, meshwright: Any) -> None:
    more = ',\n  "optimizer": {"type": "Lamb", "params": {"betas": [0.9, 0.95]}}'
    Path("ds.json").write_text(DEEPSPEED.format(micro=1, more=more))
    Path("run.sh").write_text(MEGATRON_DEEPSPEED.format(written="", flags="--use-flash-attn-v2"))
    answer = meshwright("check", "run.sh", "--gpus", "8xA100-80", "--json").json
    assert not [one for one in rules(answer) if "deepspeed." in one]


def test_fixes_of_a_megatron_deepspeed_script_name_the_flags_it_has(here: Path, meshwright: Any) -> None:
    Path("ds.json").write_text(DEEPSPEED.format(micro=1, more=""))
    Path("run.sh").write_text(MEGATRON_DEEPSPEED.format(written="", flags="--checkpoint-activations"))
    answer = meshwright("check", "run.sh", "--gpus", "8xA100-80", "--advice", "--json").json
    fixes = {one["rule"]: one["fix"] for one in answer["findings"]}
    assert fixes["kernels.eager-attention"] == ["--use-flash-attn-v2"]
    assert "without --checkpoint-activations" in fixes["memory.recompute-not-needed"]
    flags = "--use-flash-attn-v2 --recompute-granularity selective"
    Path("run.sh").write_text(MEGATRON_DEEPSPEED.format(written="", flags=flags))
    after = rules(meshwright("check", "run.sh", "--gpus", "8xA100-80", "--advice", "--json").json)
    assert not {"kernels.eager-attention", "memory.recompute-not-needed"} & {*after}


@pytest.mark.parametrize("seconds", [19.8, 9.9])
def test_the_band_contains_the_run_that_a_calibration_explains_in_part(
    here: Path, meshwright: Any, seconds: float
) -> None:
    Path("run.log").write_text(megatron_log(seconds))
    Path("run.sh").write_text(megatron_script())
    fitted = meshwright("calibrate", "run.log", "--gpus", "leo.toml", "--out", "mine.toml")
    assert "the calibration explains its one run only in part: the run took" in fitted.out
    assert "exactly" not in fitted.out
    for option in (("--like", "run.log"), ("--calibration", "mine.toml")):
        answer = meshwright("estimate", "run.sh", "--gpus", "leo.toml", *option, "--json").json
        band = answer["estimate"]["band"]
        assert band["step_low_s"] <= seconds <= band["step_high_s"]
        shown = meshwright("estimate", "run.sh", "--gpus", "leo.toml", *option)
        assert "Only the speed of compute is fitted" in shown.out + shown.err
    examined = meshwright("doctor", "run.log", "--gpus", "leo.toml", "--calibration", "mine.toml", "--json").json
    assert "speed.low-mfu" not in rules(examined)


def test_a_run_that_a_speed_explains_is_followed(here: Path, meshwright: Any) -> None:
    Path("run.log").write_text(megatron_log(14.0))
    meshwright("calibrate", "run.log", "--gpus", "leo.toml", "--out", "mine.toml")
    answer = meshwright("doctor", "run.log", "--gpus", "leo.toml", "--calibration", "mine.toml", "--json").json
    (step,) = (one for one in answer["figures"] if one["name"] == "step time")
    assert step["estimate"] == pytest.approx(13.9, rel=0.03)
    assert any("whose time a fitted speed always matches" in note for note in answer["notes"])


TITAN = "[rank0]:[titan] 2026-11-11 {hour:02d}:{minute:02d}:{second:02d},123 - root - INFO - "
TITAN_HEADER = """\
Building 1-D device mesh with ['dp_shard'], [{world}]
CUDA capacity: NVIDIA {gpu} with {memory}GiB memory
Model llama3 8B size: 8,030,261,248 total parameters
Training starts at step 1, with local batch size 1, global batch size {batch}, sequence length 8192, total steps 50000 \
(warmup 2000)
"""


def titan_log(world: int, speeds: list[float], gpu: str = "A100-SXM-64GB") -> str:
    """Return a log of torchtitan up to 0.1 with a speed for every line."""
    begin = TITAN.format(hour=8, minute=0, second=0)
    header = TITAN_HEADER.format(world=world, gpu=gpu, memory=63.43, batch=3 * world)
    text, now = "".join(f"{begin}{line}\n" for line in header.splitlines()), 8 * 3600.0
    for number, speed in enumerate(speeds, 1):
        now += 10 * 3 * 8192 / speed
        hour, rest = divmod(int(now), 3600)
        text += (
            f"{TITAN.format(hour=hour, minute=rest // 60, second=rest % 60)}step: {10 * number:5}  loss: "
            f"{2.5 + 8 / (number + 1):7.4f}  grad_norm:  0.4100  memory: 51.20GiB(80.72%)  tps: {speed:,.0f}  tflops: "
            f"{speed * 57.5e9 / 1e12:.2f}  mfu: {speed * 57.5e9 / 3.12e12:.2f}%\n"
        )
    return text


def test_the_start_line_of_older_torchtitan_has_batch_and_length(here: Path, meshwright: Any) -> None:
    Path("run.log").write_text(titan_log(160, [3400.0] * 40))
    typed = ("doctor", "run.log", "--model", "llama3-8b", "--gpus", "leo.toml", "--json")
    answer = meshwright(*typed).json
    assert answer["total_steps"] == 50000
    assert not [note for note in answer["notes"] if "batch size" in note or "sequence length" in note]
    (step,) = (one for one in answer["figures"] if one["name"] == "step time")
    assert step["measured"] == pytest.approx(3 * 8192 / 3400, rel=0.02)


def test_a_gpu_that_is_not_in_the_catalogue_is_named(here: Path, meshwright: Any) -> None:
    Path("run.log").write_text(titan_log(160, [3400.0] * 40))
    notes = meshwright("doctor", "run.log", "--json").json["notes"]
    unknown = "the log names the GPU A100-SXM-64GB, which is not in the catalogue"
    assert any(f"{unknown}; add --gpus 160xA100-80" in note for note in notes)
    assumed = meshwright("doctor", "run.log", "--recipe", "llama3-8b", "--json")
    assert "does not name the GPUs" not in assumed.out + assumed.err


def test_a_run_that_slows_down_later_is_not_a_slow_network(here: Path, meshwright: Any) -> None:
    Path("small.log").write_text(titan_log(4, [3600.0] * 60))
    Path("slows.log").write_text(titan_log(160, [3450.0 * 0.993**number for number in range(100)]))
    Path("slow.log").write_text(titan_log(160, [2500.0] * 100))
    typed = ("--recipe", "llama3-8b", "--gpus", "leo.toml", "--baseline", "small.log", "--json")
    falling = meshwright("doctor", "slows.log", *typed).json
    assert "speed.slowing-down" in rules(falling)
    assert "speed.slow-network" not in rules(falling)
    (found,) = messages(meshwright("doctor", "slow.log", *typed).json, "speed.slow-network")
    assert "usually the network between nodes is the cause; the log does not time collectives" in found


def test_ranks_without_a_report_are_the_suspects_of_a_timeout(here: Path, meshwright: Any) -> None:
    timeouts = "".join(
        f"[rank{rank}]: [E1110 20:15:00.772 ProcessGroupNCCL.cpp:632] [Rank {rank}] Watchdog caught collective "
        "operation timeout: WorkNCCL(SeqNum=48213, OpType=_ALLGATHER_BASE, NumelIn=1048576, NumelOut=83886080, "
        "Timeout(ms)=600000) ran for 600041 milliseconds before timing out.\n"
        for rank in range(16)
        if rank != 13
    )
    Path("run.log").write_text(megatron_log(11.2) + timeouts)
    Path("run.sh").write_text(megatron_script())
    answer = meshwright("doctor", "run.log", "--gpus", "leo.toml", "--recipe", "run.sh", "--json").json
    (found,) = (one for one in answer["findings"] if one["rule"] == "run.failed-hang")
    assert "145 of 160 ranks report nothing" in found["message"]
    assert "rank 13 (GPU 1 of node 3) first" in found["message"]
    assert "ranks 16-159" in found["message"]
    assert "none is behind" not in found["message"]
    assert "look at rank 13 (GPU 1 of node 3) first" in found["remedies"][0]["try"][0]


AUTOMODEL = Path(__file__).parents[1] / "frameworks" / "automodel" / "sft.yaml"  # 64 samples of up to 2,048 tokens


def automodel_log(tokens: int, seconds: float, time: str = "%Y-%m-%d %H:%M:%S | INFO | root | ") -> str:
    """Return the console of AutoModel at so many tokens per step."""
    start, rate = datetime(2026, 11, 10, 9), tokens / seconds
    return "".join(
        f"{start + timedelta(seconds=step * seconds):{time}}step {step} | epoch 0 | loss {1.8 - step * 1e-3:.4f} | "
        f"grad_norm 1.5000 | lr 1.00e-05 | mem 60.00 GiB | tps {rate:.2f}({rate / 8:.2f}/gpu) | num_label_tokens 9000\n"
        for step in range(100)
    )


def test_steps_of_short_samples_take_the_time_between_their_lines(meshwright: Any, tmp_path: Path) -> None:
    log = tmp_path / "am.log"
    log.write_text(automodel_log(64 * 500, 2.6))
    typed = ("doctor", str(log), "--recipe", str(AUTOMODEL), "--gpus", "8xH200")
    answer = meshwright(*typed, "--json").json
    assert "speed.low-mfu" not in [one["rule"] for one in answer["findings"]]
    times = [one for one in answer["figures"] if one["name"].startswith("step time")]
    assert [round(one["measured"], 1) for one in times] == [2.6]
    (note,) = (one for one in answer["notes"] if "samples have" in one)
    assert 490 < int(note.split()[2]) < 510
    slow = meshwright(*typed, "data.seq_length=500", "--json").json  # compared at their length
    assert "speed.low-mfu" in [one["rule"] for one in slow["findings"]]


def test_a_rate_without_times_says_nothing_of_padded_samples(meshwright: Any, tmp_path: Path) -> None:
    log = tmp_path / "am.log"
    log.write_text(automodel_log(64 * 500, 2.6, time="INFO "))
    answer = meshwright("doctor", str(log), "--recipe", str(AUTOMODEL), "--gpus", "8xH200", "--json").json
    assert "speed.low-mfu" not in [one["rule"] for one in answer["findings"]]
    assert not [one for one in answer["figures"] if one["name"].startswith("step time")]
    assert any("the log does not state its tokens" in one for one in answer["notes"])
    refused = meshwright("calibrate", str(log), "--recipe", str(AUTOMODEL), "--gpus", "8xH200")
    assert refused.code == 2
    assert "the log does not state its tokens" in refused.err


def test_packed_samples_are_compared(meshwright: Any, tmp_path: Path) -> None:
    log, file = tmp_path / "am.log", tmp_path / "packed.yaml"
    file.write_text(AUTOMODEL.read_text().replace("packed_sequence_size: 0", "packed_sequence_size: 2048"))
    log.write_text(automodel_log(64 * 2048, 10.0))
    answer = meshwright("doctor", str(log), "--recipe", str(file), "--gpus", "8xH200", "--json").json
    assert "speed.low-mfu" in [one["rule"] for one in answer["findings"]]
