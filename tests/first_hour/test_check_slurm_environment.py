"""A SLURM script's variables, launcher and signal: what makes a job slow, hang, or train on every node separately."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import meshwright

MODEL = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --swiglu --normalization RMSNorm --position-embedding-type rope --seq-length 8192 "
    "--max-position-embeddings 8192 --untie-embeddings-and-output-weights --disable-bias-linear"
)
FLAGS = (
    "--micro-batch-size 1 --global-batch-size 512 --train-iters 1000 --lr 3e-4 --bf16 --use-distributed-optimizer "
    "--tensor-model-parallel-size 2 --sequence-parallel --data-path /lustre/tok --vocab-size 128256 "
    "--tokenizer-type HuggingFaceTokenizer --tokenizer-model /lustre/tok --save /lustre/ckpt --load /lustre/ckpt"
)
SCRIPT = """#!/bin/bash
#SBATCH --nodes=16
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --time=12:00:00
#MORE
export CUDA_DEVICE_MAX_CONNECTIONS=1
#ENV
MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n1)
srun torchrun --nnodes 16 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint $MASTER_ADDR:29500 \\
"""
RENDEZVOUS = "--nnodes 16 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint $MASTER_ADDR:29500"


def found(path: Path, text: str, rule: str) -> list[Any]:
    path.write_text(f"{text}  pretrain_gpt.py {MODEL} {FLAGS}\n", encoding="utf-8")
    return [one for one in meshwright.check(str(path), gpus="16x4xGH200").findings if one.rule == rule]


@pytest.mark.parametrize(
    ("variable", "value", "fix"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments=True", "export {}=expandable_segments:True"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:true", "export {}=expandable_segments:True"),
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512,garbage_collection_threshold:0.8", ""),
        ("PYTORCH_ALLOC_CONF", "roundup_power2_divisions:[256:1,512:2],expandable_segments:True", ""),
        ("NCCL_ALGO", "Tree,Foo", "export {}=Tree"),
        ("NCCL_ALGO", "^NVLS", ""),
        ("NCCL_ALGO", '"allreduce:tree,ring;broadcast:ring"', ""),
        ("NCCL_PROTO", "LL", "unset {}"),
        ("NCCL_PROTO", "^LL128", ""),
        ("NCCL_PROTO", "Simple,LL", ""),
        ("NCCL_CROSS_NIC", "3", "unset {}"),
        ("NCCL_CROSS_NIC", "1", ""),
        ("NCCL_NET_GDR_LEVEL", "LOC", "unset {}"),
        ("NCCL_NET_GDR_LEVEL", "PHB", ""),
        ("FI_PROVIDER", "tcp", "unset {}"),
        ("FI_PROVIDER", "cxi", ""),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "unset {}"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1", ""),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "unset {}"),
        ("TORCH_DISTRIBUTED_DEBUG", "INFO", ""),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segment:True", "export {}=expandable_segments:True"),
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:10", "unset {}"),
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:10,backend:native", "export {}=backend:native"),
        ("PYTORCH_CUDA_ALLOC_CONF", "garbage_collection_threshold:80", "unset {}"),
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMalloc", "unset {}"),
        ("PYTORCH_CUDA_ALLOC_CONF", "an_option_of_a_later_release:3", ""),
        ("NCCL_SOCKET_IFNAME", "docker0", "unset {}"),
        ("NCCL_SOCKET_IFNAME", "^docker0,lo", ""),
        ("NCCL_SOCKET_IFNAME", "eth0", ""),
        ("NCCL_P2P_LEVEL", "LOC", "unset {}"),
        ("NCCL_P2P_LEVEL", "NVL", ""),
        ("NCCL_MAX_NCHANNELS", "1", "unset {}"),
        ("NCCL_MAX_CTAS", "32", ""),
        ("NCCL_BUFFSIZE", "65536", "unset {}"),
        ("NCCL_BUFFSIZE", "8388608", ""),
        ("NCCL_IB_TIMEOUT", "5", "unset {}"),
        ("NCCL_IB_TIMEOUT", "22", ""),
        ("NCCL_DEBUG", "TRACE", "unset {}"),
        ("NCCL_DEBUG", "INFO", ""),
        ("NCCL_BLOCKING_WAIT", "1", "unset {}"),
        ("TORCH_COMPILE_DISABLE", "1", "unset {}"),
        ("CUDA_VISIBLE_DEVICES", "-1", "unset {}"),
        ("CUDA_VISIBLE_DEVICES", "0,1,2,3", ""),
    ],
)
def test_a_variable_with_a_harmful_value_is_reported(tmp_path: Path, variable: str, value: str, fix: str) -> None:
    findings = found(tmp_path / "run.sh", SCRIPT.replace("#ENV", f"export {variable}={value}"), "launch.environment")
    assert [one.fix for one in findings] == ([(fix.format(variable),)] if fix else [])
    assert all(one.severity == ("error" if "ALLOC" in variable else "warning") for one in findings)
    assert "environment variable" in str(meshwright.explain(variable).meaning)


@pytest.mark.parametrize(
    ("launcher", "fix"),
    [
        (RENDEZVOUS, ""),
        ("--nproc-per-node 4", "torchrun --nnodes 16 --rdzv-backend=c10d --rdzv-endpoint=$MASTER_ADDR:29500"),
        ("--nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint $MASTER_ADDR:29500", "torchrun --nnodes 16"),
        ("--nproc-per-node 4 $MORE_OPTIONS", ""),
        ("--standalone --nproc-per-node 4", ""),
    ],
)
def test_srun_without_the_number_of_nodes_is_several_trainings(tmp_path: Path, launcher: str, fix: str) -> None:
    findings = found(tmp_path / "run.sh", SCRIPT.replace(RENDEZVOUS, launcher), "launch.separate-runs")
    assert [(one.severity, one.fix) for one in findings] == ([("error", (fix,))] if fix else [])
    if fix:
        assert "16 separate trainings" in findings[0].message
        repaired = SCRIPT.replace(f"torchrun {RENDEZVOUS}", launcher.replace("--nproc", f"{fix} --nproc", 1))
        assert not found(tmp_path / "run.sh", repaired, "launch.separate-runs")


@pytest.mark.parametrize(("options", "is_found"), [("", True), ("--hostfile hosts ", False), ("--no_ssh ", False)])
def test_srun_with_deepspeeds_launcher_is_several_trainings(tmp_path: Path, options: str, is_found: bool) -> None:
    (tmp_path / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": true}}')
    head = SCRIPT.partition("srun")[0].replace("MASTER_ADDR", "OTHER")
    text = f"{head}srun deepspeed {options}--num_gpus 4 train.py --deepspeed ds.json\n"
    (tmp_path / "run.sh").write_text(text, encoding="utf-8")
    findings = meshwright.check(str(tmp_path / "run.sh"), gpus="16x4xGH200", model="llama3-8b").findings
    fixes = [one.fix[0] for one in findings if one.rule == "launch.separate-runs"]
    assert bool(fixes) == is_found
    assert all(one.startswith("torchrun --nnodes 16 --nproc-per-node 4 --rdzv-backend=c10d") for one in fixes)


@pytest.mark.parametrize("signal", ["SIGUSR2@600", "TERM@600"])
def test_a_signal_that_megatron_does_not_handle_is_reported(tmp_path: Path, signal: str) -> None:
    text = SCRIPT.replace("#MORE", f"#SBATCH --signal={signal}")
    (finding,) = found(tmp_path / "run.sh", text, "launch.signal")
    assert finding.fix == ("--exit-signal-handler", "#SBATCH --signal=TERM@600")
    repaired = text.replace(signal, "TERM@600") + "  pretrain_gpt.py --exit-signal-handler "
    (tmp_path / "run.sh").write_text(f"{repaired}{MODEL} {FLAGS}\n", encoding="utf-8")
    rules = [one.rule for one in meshwright.check(str(tmp_path / "run.sh"), gpus="16x4xGH200").findings]
    assert "launch.signal" not in rules


def test_launch_names_the_options_that_keep_a_container_and_a_signal_of_sbatch_lines(tmp_path: Path) -> None:
    more = "#SBATCH --container-image=/lustre/i.sqsh\n#SBATCH --container-mounts=/lustre:/lustre\n"
    path = tmp_path / "run.sh"
    text = SCRIPT.replace("#MORE", f"{more}#SBATCH --signal=SIGUSR2@600")
    path.write_text(f"{text}  pretrain_gpt.py {MODEL} {FLAGS}\n", encoding="utf-8")
    notes = "\n".join(meshwright.launch_job(str(path), scheduler="slurm", gpus="16x4xGH200").launch.notes)
    assert "not kept: #SBATCH --container-image=/lustre/i.sqsh --container-mounts=/lustre:/lustre of" in notes
    assert "--image /lustre/i.sqsh --container-kind pyxis --mount /lustre:/lustre keeps the container" in notes
    assert "--signal-ahead 600" in notes
    kept = {"image": "/lustre/i.sqsh", "mounts": ("/lustre:/lustre",), "signal_ahead_s": 600, "time": "12:00:00"}
    again = meshwright.launch_job(str(path), scheduler="slurm", gpus="16x4xGH200", **kept).launch
    assert not any("signal" in one or "container" in one for one in again.notes if "not kept: #SBATCH" in one)
    assert "--container-image=/lustre/i.sqsh" in "\n".join(again.files.values())


@pytest.mark.parametrize(("threads", "fix"), [(64, ("export OMP_NUM_THREADS=16",)), (16, ())])
def test_more_threads_than_the_cpus_of_a_task_are_reported(tmp_path: Path, threads: int, fix: tuple[str, ...]) -> None:
    text = SCRIPT.replace("#MORE", "#SBATCH --cpus-per-task=64").replace("#ENV", f"export OMP_NUM_THREADS={threads}")
    assert [one.fix for one in found(tmp_path / "run.sh", text, "launch.environment")] == ([fix] if fix else [])
