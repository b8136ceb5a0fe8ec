"""An own dense model and an own MoE on 16 nodes: node counts, checks with overrides, repairs, logs and calibration."""

from __future__ import annotations

import json
from pathlib import Path
from string import Template
from typing import Any

import pytest

from meshwright import check
from meshwright.clusters import cluster
from meshwright.errors import InputError

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 6144,
    "intermediate_size": 20480,
    "num_hidden_layers": 48,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 131072,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
TITAN = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
global_batch_size = 200
seq_len = 8192
steps = 1000
[lr_scheduler]
warmup_steps = 100
[parallelism]
data_parallel_replicate_degree = 2
tensor_parallel_degree = 3
[compile]
enable = true
[activation_checkpoint]
mode = "selective"
"""
SCRIPT = Template("""#!/bin/bash
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:h100:8
export CUDA_DEVICE_MAX_CONNECTIONS=1
srun torchrun --nnodes 16 --nproc-per-node 8 --rdzv-backend c10d pretrain_gpt.py --num-layers 48 --hidden-size 6144 \\
  --ffn-hidden-size 20480 --num-attention-heads 48 --group-query-attention --num-query-groups 8 --kv-channels 128 \\
  --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope --normalization RMSNorm --swiglu \\
  --disable-bias-linear --untie-embeddings-and-output-weights --tensor-model-parallel-size 4 \\
  --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 6 --sequence-parallel \\
  --use-distributed-optimizer --micro-batch-size 1 --global-batch-size $batch --train-iters 1000 --lr 3e-4 \\
  --lr-warmup-iters 100 --bf16 --mock-data --tokenizer-type HuggingFaceTokenizer --tokenizer-model tok131k
""")
ARGUMENTS: dict[str, Any] = {
    "bf16": True,
    "ffn_hidden_size": 20480,
    "global_batch_size": 512,
    "group_query_attention": True,
    "hidden_size": 6144,
    "kv_channels": 128,
    "micro_batch_size": 1,
    "num_attention_heads": 48,
    "num_layers": 48,
    "num_query_groups": 8,
    "padded_vocab_size": 131072,
    "pipeline_model_parallel_size": 4,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "swiglu": True,
    "untie_embeddings_and_output_weights": True,
    "seq_length": 8192,
    "sequence_parallel": True,
    "tensor_model_parallel_size": 4,
    "use_distributed_optimizer": True,
}
LAYOUT = (
    "using world size: {world}, data-parallel size: {dp}, context-parallel size: 1, "
    "tensor-model-parallel size: {tp}, pipeline-model-parallel size: {pp}"
)
STEP = (
    " [2026-11-17 10:00:00] iteration {step:8d}/   20000 | consumed samples: {samples:12d} | elapsed time per "
    "iteration (ms): {ms:.1f} | learning rate: 3.000000E-04 | global batch size:   512 | lm loss: {loss:.6E} | "
    "loss scale: 1.0 | grad norm: 0.800 | number of skipped iterations:   0 | number of nan iterations:   0 |"
)
OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 3 has a total capacity of 79.11 GiB "
    "of which 1.20 GiB is free. Process 1 has 77.90 GiB memory in use."
)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Return a folder with the config.json of a dense model of 24 B parameters."""
    folder = tmp_path / "m24b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


def steps(seconds: float, *, bridge: bool = False) -> list[str]:
    lines = []
    for one in range(1, 31):
        if bridge:
            lines.append(f"Step Time : {seconds:.2f}s GPU utilization: 180.2MODEL_TFLOP/s/GPU")
        ms = seconds * 1000 * (1 + one % 3 / 1000)
        lines.append(STEP.format(step=one * 10, samples=one * 5120, ms=ms, loss=9 * one**-0.2))
    return lines


def megatron_log(path: Path, seconds: float, world: int = 128) -> str:
    """Write a log of Megatron-LM with its argument dump."""
    degrees = LAYOUT.format(world=world, dp=world // 16, tp=4, pp=4)
    dump = [f"  {name} {'.' * (47 - len(name))} {value}" for name, value in {**ARGUMENTS, "world_size": world}.items()]
    path.write_text("\n".join([degrees, *dump, *steps(seconds)]) + "\n")
    return str(path)


def bridge_log(path: Path) -> str:
    """Write a log of Megatron-Bridge, whose config is not in it, of a run out of memory."""
    degrees = LAYOUT.format(world=128, dp=16, tp=4, pp=2)
    path.write_text("\n".join([degrees, *steps(5.2, bridge=True), OUT_OF_MEMORY]) + "\n")
    return str(path)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("--gpus", "H100", "--nodes", "16"), "--gpus 16x8xH100"),
        (("--gpus", "H100", "--nodes", "16", "--gpus-per-node", "8"), "--gpus 16x8xH100"),
        (("--gpus", "H100", "--gpus-per-node=4", "--nodes=16"), "--gpus 16x4xH100"),
        (("--gpus", "8xH100", "--nodes", "16"), "--gpus 16x8xH100"),
        (("--gpus", "128xH100", "--nodes", "16"), "--gpus 16x8xH100"),
    ],
)
def test_nodes_and_gpus_of_a_node_are_one_cluster(meshwright: Any, words: tuple[str, ...], meant: str) -> None:
    answer = meshwright("recommend", "llama3-8b", "--goal", "pretrain", *words)
    assert answer.code == 2
    assert meant in answer.err
    assert "1x8xH100" not in answer.err
    assert "16x1xH100" not in answer.err


@pytest.mark.parametrize("typed", ["16xh100x8", "8xH100x16", "16 x H100 x 8"])
def test_both_counts_around_a_gpu_are_in_the_fix(typed: str) -> None:
    with pytest.raises(InputError) as found:
        cluster(typed)
    assert list(found.value.fix) == ["16x8xH100"]


def test_a_files_own_rules_read_overrides(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(TITAN)
    assert "torchtitan.sequence-parts" in {one.rule for one in check(str(file), gpus="4x8xH100").findings}
    typed = ("parallelism.tensor_parallel_degree=4", "training.local_batch_size=1")
    found = check(str(file), gpus="4x8xH100", overrides=typed)
    assert [one.message for one in found.findings if one.severity == "error"] == []


def test_a_repair_keeps_the_replicas_and_adds_no_pipeline(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(TITAN)
    repair = check(str(file), gpus="4x8xH100").repair
    assert repair is not None
    assert set(repair.overrides) == {"parallelism.tensor_parallel_degree = 4", "training.local_batch_size = 5"}


def test_a_fix_that_the_repair_leaves_out_is_printed(meshwright: Any, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    text = TITAN.replace("[compile]\nenable = true\n", "").replace("steps = 1000", "steps = 1000\ncompile = true")
    text = text.replace("_degree = 3", "_degree = 3\nenable_async_tensor_parallel = true")
    file.write_text(f"{text}[checkpoint]\nenable_checkpoint = true\n[job]\nprint_args = false\n")
    typed = ("check", str(file), "--gpus", "4x8xH100")
    repair = meshwright(*typed, "--json").json["repair"]
    assert "key.removed" in {*repair["leaves"]} & {*repair["removes"]}
    printed = [line for line in meshwright(*typed).out.splitlines() if "enable_checkpoint was removed" in line]
    assert [line.rpartition("fix: ")[2].strip() for line in printed] == ["checkpoint.enable = true"]


def test_a_batch_that_does_not_divide_is_one_finding(tmp_path: Path) -> None:
    file = tmp_path / "run.sbatch"
    file.write_text(SCRIPT.substitute(batch=500))
    errors = [one.rule for one in check(str(file)).findings if one.severity == "error"]
    assert errors == ["batch.divides"]
    file.write_text(SCRIPT.substitute(batch=496))  # 62 micro batches
    assert [one.rule for one in check(str(file)).findings if one.severity == "error"] == ["schedule.micro-batch-groups"]


def test_a_slip_in_a_files_name_is_not_a_recipe(meshwright: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pretrain_24b.sbatch").write_text(SCRIPT.substitute(batch=512))
    answer = meshwright("check", "pretrain_24b.sbtach")
    assert answer.code == 2
    assert "no such file" in answer.err
    assert "pretrain_24b.sbatch" in answer.err
    assert "recipe" not in answer.err


def test_doctor_writes_the_keys_of_megatron_bridge(meshwright: Any, tmp_path: Path) -> None:
    log = bridge_log(tmp_path / "bridge.log")
    answer = meshwright("doctor", log)
    assert "model.recompute_granularity=selective" in answer.out
    assert "--recompute-granularity" not in answer.out
    assert "--gpus 128xH100" in answer.out
    assert "8xH100" not in answer.out.replace("128xH100", "")


def test_doctor_does_not_ask_for_the_gpus_that_were_typed(meshwright: Any, tmp_path: Path) -> None:
    answer = meshwright("doctor", bridge_log(tmp_path / "bridge.log"), "--gpus", "16x8xH100")
    assert "add --recipe NAME" in answer.out
    assert "--gpus" not in answer.out


def test_doctor_says_what_it_assumes_besides_the_degrees(meshwright: Any, tmp_path: Path, model: str) -> None:
    log = bridge_log(tmp_path / "bridge.log")
    notes = meshwright("doctor", log, "--gpus", "16x8xH100", "--model", model, "--json").json["notes"]
    assert any("the log does not state layout.micro_batch_size=" in one and "layout.vp=" in one for one in notes)
    assert not any("tp=" in one for one in notes)  # it states tp and pp


def test_doctor_compares_a_script_with_the_vocabulary_of_the_log(meshwright: Any, tmp_path: Path, model: str) -> None:
    log, script = megatron_log(tmp_path / "run.log", 11.9), tmp_path / "run.sbatch"
    script.write_text(SCRIPT.substitute(batch=512))
    alone = meshwright("doctor", log, "--recipe", str(script), "--json")
    named = meshwright("doctor", log, "--recipe", str(script), "--model", model, "--json")
    assert alone.json["figures"] == named.json["figures"]
    assert "50,304" not in named.err
    assert "fsdp2" not in named.err


def test_doctor_counts_the_gpus_of_a_type_by_the_log(meshwright: Any, tmp_path: Path) -> None:
    log = megatron_log(tmp_path / "run.log", 11.9)
    assert meshwright("doctor", log, "--gpus", "H100", "--json").json["gpus"] == "16x8xH100"


def test_calibrate_takes_logs_of_several_numbers_of_gpus(meshwright: Any, tmp_path: Path) -> None:
    large, small = megatron_log(tmp_path / "a.log", 11.9), megatron_log(tmp_path / "b.log", 23.6, 64)
    by_type = meshwright("calibrate", large, small, "--gpus", "H100")
    assert by_type.code == 0
    typed = meshwright("calibrate", large, small, "--gpus", "16x8xH100")
    assert typed.code == 0
    assert f"{small} is of 8x8xH100" in typed.out.replace("\n", " ")


def test_calibrate_says_that_one_recipe_is_for_all_runs(meshwright: Any, tmp_path: Path) -> None:
    large, small = megatron_log(tmp_path / "a.log", 11.9), megatron_log(tmp_path / "b.log", 23.6, 64)
    dump = f"  {'tensor_model_parallel_size':.<48} 2\n"
    Path(small).write_text(f"{' arguments ':-^60}\n{dump}{' end of arguments ':-^60}\n{Path(small).read_text()}")
    script = tmp_path / "run.sbatch"
    script.write_text(SCRIPT.substitute(batch=512))
    words = ("--recipe", str(script), "--gpus", "H100", "--json")
    error = meshwright("calibrate", large, small, *words).json["error"]
    assert error["fix"][0] == "leave out --recipe, which is for all runs, where the logs name what ran"


def test_calibrate_asks_for_the_gpus_of_the_log(meshwright: Any, tmp_path: Path) -> None:
    answer = meshwright("calibrate", megatron_log(tmp_path / "a.log", 11.9), "--json")
    assert "--gpus 128xH100" in answer.json["error"]["fix"][0]


def test_calibrate_recommends_no_profile_that_does_not_improve(meshwright: Any, tmp_path: Path) -> None:
    slow, fast = megatron_log(tmp_path / "a.log", 20.0), megatron_log(tmp_path / "b.log", 20.0, 64)
    out = str(tmp_path / "both.toml")
    notes = meshwright("calibrate", slow, fast, "--gpus", "H100", "--out", out, "--json").json["notes"]
    assert any("no improvement: do not use the profile" in one for one in notes)
    assert any("one speed does not fit these runs" in one for one in notes)
    assert not any("take --calibration" in one for one in notes)


@pytest.mark.parametrize("finding", ["speed.sustained-slowdown", "speed.low-mfu", "memory.growing"])
def test_explain_says_what_a_finding_needs_and_what_to_do(meshwright: Any, finding: str) -> None:
    answer = meshwright("explain", finding)
    assert "Needs " in answer.out
    assert "meshwright doctor LOG --recipe FILE" in answer.out
