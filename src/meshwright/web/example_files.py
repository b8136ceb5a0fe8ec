"""Example files that pages show before the user brings one: a script with errors, and the log of a troubled run."""

from __future__ import annotations

from functools import cache
from math import exp, sin

SCRIPT_NAME, SCRIPT_GPUS = "pretrain.sh", "8x8xH100"
SCRIPT = """#!/bin/bash
#SBATCH --nodes=8
torchrun --nproc-per-node 8 --nnodes 8 pretrain_gpt.py \\
  --num-layers 80 --hidden-size 8192 --num-attention-heads 64 --group-query-attention --num-query-groups 8 \\
  --seq-length 8192 --max-position-embeddings 8192 \\
  --tensor-model-parallel-size 16 \\
  --pipeline-model-parallel-size 3 \\
  --micro-batch-size 1 --global-batch-size 500 \\
  --bf16 --train-iters 1000
"""
LOG_STEPS, SPIKE, SLOWER_FROM = 240, range(118, 123), 160
LOG_FIELDS = {"model": "llama3-8b", "gpus": "8xH100"}
_PREFIX = "[rank0]:[titan] 2026-01-01 00:{minute:02}:{second:02},000 - root - INFO - "


@cache
def log() -> str:
    """Return a log of torchtitan whose loss spikes, whose steps become slower and which ends out of memory."""
    start = _PREFIX.format(minute=0, second=0)
    lines = [
        f"{start}Building device mesh with parallelism: pp=1, dp_replicate=1, dp_shard=8, cp=1, tp=1, ep=1",
        f"{start}CUDA capacity: NVIDIA H100 80GB HBM3 with 79.10GiB memory",
        f"{start}Trainer is initialized with local batch size 1, global batch size 8, gradient accumulation steps 1, "
        f"sequence length 8192, total steps 1000 (warmup 20)",
        f"{start}Training starts at step 1",
    ]
    lines += [_step(step) for step in range(1, LOG_STEPS + 1)]
    lines.append(
        "[rank0]:torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.91 GiB. GPU 0 has a total capacity of "
        "79.10 GiB of which 1.32 GiB is free. Process 4711 has 77.77 GiB memory in use. Of the allocated memory "
        "70.10 GiB is allocated by PyTorch, and 5.20 GiB is reserved by PyTorch but unallocated."
    )
    return "\n".join(lines) + "\n"


def _step(step: int) -> str:
    wobble = sin(12.9898 * step) * 43758.5453 % 1 - 0.5  # the same noise in every process
    spike = 3.2 if step in SPIKE else 0.0
    loss = 2.5 + 8 * exp(-step / 30) + 0.04 * wobble + spike
    norm = 1.0 + 0.3 * wobble + 3 * exp(-step / 10) + 8 * (spike > 0)
    seconds = 1.16 * (1 + 0.015 * wobble) * (1.28 if step >= SLOWER_FROM else 1.0) * (9 if step == 1 else 1)
    gib = 56.0 + max(0, step - 150) * 0.16
    minute, second = divmod(step, 60)
    return _PREFIX.format(minute=minute, second=second) + (
        f"step: {step:2}  loss: {loss:8.5f}  grad_norm: {norm:7.4f}  memory: {gib:5.2f}GiB({gib / 0.791:.2f}%)  "
        f"tps: {8192 / seconds:,.0f}  tflops: {427 / seconds:,.2f}  mfu: {43.2 / seconds:.2f}%"
    )
