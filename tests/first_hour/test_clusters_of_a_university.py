"""A university's A100 cluster: files of own models, logs of several jobs, slow file systems."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

CLUSTER = """gpu = "A100-40"
nodes = 32
gpus_per_node = 4
nvlink_domain = 4
network_gb_s_per_node = "200 Gb/s"
host_gib = 256
"""
OWN_FLAVOR = """[model]
name = "llama3"
flavor = "3B_mine"
[training]
local_batch_size = 4
global_batch_size = {batch}
seq_len = 4096
steps = 1000
[parallelism]
data_parallel_shard_degree = {shard}
tensor_parallel_degree = 4
pipeline_parallel_degree = {pp}
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("uni.toml").write_text(CLUSTER)


@pytest.mark.parametrize(
    ("shard", "pp", "batch", "found", "fix"),
    [
        (16, 3, 128, "128 GPUs are not divisible by tp × pp × cp = 12", ""),
        (16, 4, 128, "dp_shard × dp_replicate = 16 × 1, but the other axes leave 8", "data_parallel_shard_degree = -1"),
        (8, 4, 100, "global_batch_size=100 is not divisible by micro_batch_size=1 × dp=8", "global_batch_size = 96"),
        (-1, 4, 128, "", ""),
    ],
)
def test_degrees_and_batch_of_an_unknown_flavor_are_compared_with_the_gpus(
    meshwright: Any, shard: int, pp: int, batch: int, found: str, fix: str
) -> None:
    Path("own.toml").write_text(OWN_FLAVOR.format(shard=shard, pp=pp, batch=batch))
    findings = meshwright("check", "own.toml", "--gpus", "uni.toml", "--json").json["findings"]
    others = [one for one in findings if one["rule"] != "torchtitan.model-name"]
    assert len(others) == bool(found)
    for one in others:
        assert one["severity"] == "error"
        assert found in one["message"]
        assert fix in " ".join(one["fix"])
        assert one["fix"] or "the model is unknown" in one["no_fix"]


OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 39.39 GiB."


def titan_log(path: str, steps: int, *last: str) -> None:
    """Write a log of torchtitan."""
    head = "[titan] 2026-11-10 10:00:00,000 - root - INFO - "
    lines = [f"{head}Building 1-D device mesh with ['dp_shard'], [128]"]
    lines += [
        f"{head}step: {step}  loss: {12 - step / 100:.5f}  memory: 21.42GiB(53.70%)  tps: 1,500  tflops: 40.68"
        for step in range(1, steps + 1, 10)
    ]
    Path(path).parent.mkdir(exist_ok=True)
    Path(path).write_text("\n".join([*lines, *last]) + "\n")


@pytest.mark.parametrize(
    ("before", "newest"),
    [
        ("slurm-4702.out", "slurm-4711.out"),
        ("3b-9998_gpu01.log", "3b-10002_gpu01.log"),
        ("4702/rank1.out", "4711/rank0.out"),
        ("run-2026-11-09_23-10.log", "run-2026-11-10_01-10.log"),
    ],
)
def test_logs_of_several_jobs_in_a_folder_are_not_mixed(meshwright: Any, before: str, newest: str) -> None:
    Path("logs").mkdir()
    titan_log(f"logs/{newest}", 200)
    titan_log(f"logs/{before}", 400, f"[rank3]: {OOM}")  # written last, as by a copy
    found = meshwright("doctor", "logs", "--json").json
    assert [one["rule"] for one in found["findings"]] == []
    (note,) = (one for one in found["notes"] if "several jobs" in one)
    assert f"the newest is diagnosed, logs/{newest};" in note
    assert f"logs/{before} (to step 391, out of memory)" in note


def test_a_job_that_failed_at_its_start_is_the_newest_and_its_error_the_finding(meshwright: Any) -> None:
    titan_log("logs/slurm-11.out", 400, "slurmstepd: error: *** JOB 11 ON gpu001 CANCELLED DUE TO TIME LIMIT ***")
    Path("logs/slurm-12.out").write_text(f"[rank3]: {OOM}\n")
    found = meshwright("doctor", "logs", "--json").json
    assert [one["rule"] for one in found["findings"]] == ["memory.out-of-memory"]


def test_logs_of_ranks_and_nodes_are_of_one_job(meshwright: Any) -> None:
    for number in (0, 1):
        titan_log(f"logs/slurm-4711_rank{number}.out", 200, *((OOM,) if number else ()))
        titan_log(f"more/node-{number:04d}.log", 200, *((OOM,) if number else ()))
    for folder in ("logs", "more"):
        found = meshwright("doctor", folder, "--json").json
        assert [one["rule"] for one in found["findings"]] == ["memory.out-of-memory"], folder


def test_of_several_run_folders_the_one_written_last_is_diagnosed(meshwright: Any) -> None:
    for name, steps in (("b", 30), ("a", 60)):
        record = [json.dumps({"step": step, "loss": 3.0, "step_s": 1.0}) for step in range(1, steps)]
        Path(f"runs/{name}").mkdir(parents=True)
        Path(f"runs/{name}/metrics.jsonl").write_text("\n".join(record) + "\n")
        os.utime(f"runs/{name}/metrics.jsonl", (1e9 - steps, 1e9 - steps))
    notes = meshwright("doctor", "runs", "--json").json["notes"]
    assert any("the newest is diagnosed, runs/b; not the others, newest first: runs/a" in one for one in notes), notes


def test_checkpoints_are_written_at_the_speed_of_the_file_system_in_the_cluster_file(meshwright: Any) -> None:
    Path("slow.toml").write_text(CLUSTER + 'storage_gb_s = "5 GB/s"\n')
    typed = ("estimate", "llama3_8b_pretrain_config", "layout.tp=4", "--tokens", "300B", "--gpus")
    each = 8_030_261_248 * 12 / 1e9 / 128  # GB that a GPU writes: weights and two moments in fp32
    for file, speed in (("uni.toml", 1.0), ("slow.toml", 5 / 128)):
        good = meshwright(*typed, file, "--json").json["budget"]["goodput"]
        assert good["save_s"] == pytest.approx(each / speed, rel=0.01)
    assert "each is written in 19.27 s at storage_gb_s=5" in meshwright(*typed, "slow.toml").out
    sizes = ("size", "llama3-8b", "--goal", "pretrain", "--max-gpus", "16", "--gpu")
    assert "GB/s per GPU (assumed; storage_gb_s in a cluster file sets all)" in meshwright(*sizes, "uni.toml").out
    Path("slower.toml").write_text(CLUSTER + "storage_gb_s = 0.5\n")
    assert "at 0.5 GB/s in all (storage_gb_s of the cluster file)" in meshwright(*sizes, "slower.toml").out
    Path("bad.toml").write_text(CLUSTER + 'storage_gb_s = "fast"\n')
    assert 'or "20 GB/s"' in meshwright("estimate", "llama3-8b", "--gpus", "bad.toml", "--goal", "sft").err


BAICHUAN = {
    "model_type": "baichuan", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "vocab_size": 64000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
}  # fmt: skip
MOE = {
    "hidden_size": 2048, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "moe_intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8, "vocab_size": 102400,
    "intermediate_size": 8192, "rms_norm_eps": 1e-6,
}  # fmt: skip
DOTS = MOE | {
    "model_type": "dots1", "n_routed_experts": 64, "n_shared_experts": 2, "first_k_dense_replace": 1,
    "scoring_func": "noaux_tc", "norm_topk_prob": True, "sliding_window": None, "rope_theta": 1e7,
}  # fmt: skip
EXAONE = MOE | {"model_type": "exaone_moe", "num_shared_experts": 1, "rope_theta": 1e6}
MELLUM = MOE | {"model_type": "mellum", "head_dim": 128, "num_local_experts": 64}
WINDOWS = ["sliding_attention"] * 3 + ["full_attention"]


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        (BAICHUAN, ""),
        ({key: value for key, value in BAICHUAN.items() if key != "max_position_embeddings"}, "ALiBi"),
        (BAICHUAN | {"vocab_size": 125696}, "normalizes the rows of its head"),
        (DOTS, ""),
        (DOTS | {"norm_topk_prob": False}, "divides the sigmoid scores"),
        ({key: value for key, value in DOTS.items() if key != "norm_topk_prob"}, "divides the sigmoid scores"),
        (EXAONE, "does not rotate the queries and keys of some layers"),
        (EXAONE | {"sliding_window": None, "layer_types": ["full_attention"] * 32}, ""),
        (MELLUM | {"layer_types": WINDOWS * 8}, "layers with a window in another way"),
        (MELLUM | {"layer_types": ["full_attention"] * 32}, ""),
    ],
)
def test_models_that_megatron_would_build_as_another_are_refused(
    meshwright: Any, config: dict[str, Any], refused: str
) -> None:
    Path("own").mkdir()
    Path("own/config.json").write_text(json.dumps(config))
    typed = ("export", "./own", "--goal", "pretrain", "--gpus", "8xH100", "--to", "megatron-lm", "layout.pp=1")
    found = meshwright(*typed)
    assert refused in found.err
    assert found.code == (2 if refused else 0), found.err
    assert "noaux_tc" not in found.out


@pytest.mark.parametrize(("start", "batch"), [("CUDA_VISIBLE_DEVICES=0,1,2,3", 8), ("NPROC_PER_NODE=4", 32)])
def test_the_batch_of_a_process_that_spreads_its_layers_is_that_of_one_rank(
    meshwright: Any, start: str, batch: int
) -> None:
    Path("swift.sh").write_text(
        f"{start} swift sft --model Qwen/Qwen2.5-7B-Instruct --tuner_type lora --dataset data.jsonl "
        "--per_device_train_batch_size 2 --gradient_accumulation_steps 4 --max_length 2048\n"
    )
    (fix,) = meshwright("recommend", "swift.sh", "--gpus", "4xA100-40", "--json").json["error"]["fix"]
    assert f" train.global_batch_size={batch}" in fix


def test_a_limit_of_the_cost_or_of_time_names_the_options_that_exist(meshwright: Any) -> None:
    size = ("size", "llama3-70b", "--goal", "pretrain", "--gpu", "H100")
    assert "; a limit of time is --days N" in meshwright(*size, "--budget", "40000").err
    assert "a time is written --days 30days" in meshwright(*size, "--budget", "30days").err
    assert "--days N" not in meshwright(*size, "--days", "30", "--tokens", "1T", "--budget", "40000").err


def test_a_log_of_a_part_of_the_cluster_names_the_nodes_to_write_in_its_file(meshwright: Any) -> None:
    titan_log("run.log", 200)
    Path("run.log").write_text(Path("run.log").read_text().replace("[128]", "[64]"))
    typed = ("doctor", "run.log", "--model", "llama3.2-3b", "--gpus", "uni.toml")
    (fix,) = meshwright(*typed, "--json").json["error"]["fix"]
    assert fix == f"--gpus 16x{Path('uni.toml').resolve()}"
    Path("uni.toml").write_text(CLUSTER.replace("nodes = 32", "nodes = 16"))
    assert meshwright(*typed, "--json").json["gpus"] == "16x4xA100-40"


def test_a_number_of_nodes_before_the_cluster_file_keeps_its_links(meshwright: Any) -> None:
    typed = ("recommend", "llama3.2-3b", "--goal", "pretrain")
    part = meshwright(*typed, "--gpus", "16xuni.toml", "--json").json
    Path("half.toml").write_text(CLUSTER.replace("nodes = 32", "nodes = 16"))
    whole = meshwright(*typed, "--gpus", "half.toml", "--json").json
    assert part["question"]["gpus"] == "16x4xA100-40"
    assert part["estimate"] == whole["estimate"]
    again = next(command for engine, command in part["commands"].items() if "--gpus" in command)
    assert f"--gpus 16x{Path('uni.toml').resolve()}" in again
    assert meshwright(*again.split()[1:]).code == 0
    error = meshwright(*typed, "--gpus", "16xother.toml", "--json").json["error"]
    assert (error["value"], "file not found" in error["message"]) == ("other.toml", True)


def test_a_job_of_a_recipe_on_a_part_of_a_cluster_reads_the_file_beside_it(meshwright: Any) -> None:
    Path("small.toml").write_text('name = "small"\nmodel = "llama32_1b"\ngoal = "pretrain"\ncluster = "2xuni.toml"\n')
    job = meshwright("launch", "small.toml", "--scheduler", "slurm", "--write", "job")
    assert job.code == 0, job.err
    text = "".join(one.read_text() for one in Path("job").iterdir())
    assert "--nodes=2" in text
    assert f"train {Path('small.toml').resolve()}" in text
    kubernetes = ("--scheduler", "kubernetes", "--image", "registry/train:1", "--write", "pod")
    assert meshwright("launch", "small.toml", *kubernetes).code == 0
    assert 'cluster = "2xcluster.toml"' in "".join(one.read_text() for one in Path("pod").iterdir())


def test_options_for_nodes_beside_a_cluster_file_are_written_as_one_argument(meshwright: Any) -> None:
    typed = ("recommend", "llama3.2-3b", "--goal", "pretrain", "--gpus")
    assert "--gpus 8xuni.toml" in meshwright(*typed, "uni.toml", "--nodes", "8").err
    assert meshwright(*typed, "8xuni.toml", "--json").json["question"]["gpus"] == "8x4xA100-40"
