"""Logs of runs that the scheduler ended: what saves a checkpoint before the next end, in the framework's keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

ARGUMENTS = {
    "num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32,
    "group_query_attention": True, "num_query_groups": 8, "seq_length": 4096, "swiglu": True, "vocab_size": 128256,
    "max_position_embeddings": 4096, "position_embedding_type": "rope", "rotary_base": 500000, "bf16": True,
    "normalization": "RMSNorm", "disable_bias_linear": True, "untie_embeddings_and_output_weights": True,
    "tensor_model_parallel_size": 2, "sequence_parallel": True, "pipeline_model_parallel_size": 1,
    "use_distributed_optimizer": True, "micro_batch_size": 1, "global_batch_size": 256, "lr": 0.0003, "min_lr": 3e-05,
    "lr_decay_style": "cosine", "train_iters": 10000, "world_size": 16, "mock_data": True, "save_interval": 100,
}  # fmt: skip
LIMIT = "slurmstepd: error: *** JOB 42 ON node03 CANCELLED AT 2026-01-01T12:00:00 DUE TO TIME LIMIT ***"
SIGTERM = "W0101 torch/distributed/elastic/agent/server/api.py:719] Received 15 death signal, shutting down"
SIGNAL = "#SBATCH --signal=TERM@300"
LAUNCH = "meshwright launch FILE --scheduler slurm"


def megatron(more: dict[str, Any], steps: int = 70) -> list[str]:
    lines = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in sorted({**ARGUMENTS, **more}.items())]
    lines += ["[before the start of training step] datetime: 2026-01-01 00:00:00", "NVIDIA H100 80GB HBM3"]
    return lines + [
        f" [2026-01-01 00:00:00] iteration {step:8d}/   10000 | consumed samples: {step * 256:12d} | elapsed time per "
        f"iteration (ms): 7300.{step % 10} | learning rate: 3.000000E-04 | global batch size:   256 | lm loss: "
        f"{11.5 - 0.02 * step:.6E} | loss scale: 1.0 | grad norm: 1.5 | number of skipped iterations:   0 |"
        for step in range(1, steps + 1)
    ]


def torchtitan(steps: int = 70) -> list[str]:
    return [
        f"[rank0]:[titan] 2026-01-01 00:{step // 60:02d}:{step % 60:02d},000 - root - INFO - step: {step:2d}  loss: "
        f"{12 - 0.02 * step:7.4f}  grad_norm:  1.2  memory: 60.10GiB(75.97%)  tps: 7,000  tflops: 400.00  mfu: 40.50%"
        for step in range(1, steps + 1)
    ]


def trainer(steps: int = 70) -> list[str]:
    return [
        str({"loss": round(2.5 - 0.005 * step, 4), "grad_norm": 1.2, "learning_rate": 2e-5, "epoch": step / 1000})
        for step in range(1, steps + 1)
    ]


def remedies(meshwright: Any, path: Path, lines: list[str], rule: str) -> list[list[str]]:
    path.write_text("".join(f"{line}\n" for line in lines))
    found = meshwright("doctor", str(path), "--json").json["findings"]
    (one,) = (one for one in found if one["rule"] == rule)
    return [[*remedy["try"], *remedy["there"]] for remedy in one["remedies"]]


@pytest.mark.parametrize(("end", "rule"), [(LIMIT, "run.failed-time-limit"), (SIGTERM, "run.failed-terminated")])
@pytest.mark.parametrize(
    ("lines", "ways"),
    [
        (megatron({}), [["--exit-signal-handler", SIGNAL], ["--exit-duration-in-mins N"]]),
        (megatron({"exit_signal_handler": True}), [[SIGNAL], ["--exit-duration-in-mins N"]]),
        (megatron({"exit_duration_in_mins": 700}), [["--exit-signal-handler", SIGNAL]]),
        (torchtitan(), [["checkpoint.save_every=17", "checkpoint.interval = 17"]]),
        (trainer(), [["enable_jit_checkpoint: true", SIGNAL]]),
    ],
)
def test_what_saves_before_the_end_is_advised_in_the_keys_of_the_log(
    meshwright: Any, tmp_path: Path, lines: list[str], ways: list[list[str]], end: str, rule: str
) -> None:
    found = remedies(meshwright, tmp_path / "slurm-42.out", [*lines, end], rule)
    assert found[2:] == [*ways, [LAUNCH]]


def test_a_run_that_every_time_limit_set_back_is_advised_to_save_before_it(meshwright: Any, tmp_path: Path) -> None:
    lines = [*megatron({}), LIMIT] * 4
    found = remedies(meshwright, tmp_path / "slurm-42.out", lines, "run.restarts")
    assert found[0] == ["--exit-signal-handler", SIGNAL]
    assert ["checkpoint.save_every=14", "--save-interval 14"] in found


NODE_FAILURE = "slurmstepd: error: *** JOB 42 ON n00 CANCELLED AT 2026-01-01T12:00:00 DUE TO NODE FAILURE, SEE LOG ***"
LOST = "[rank{rank}]: socketProgress: Connection closed by remote peer {node}<41822>"


@pytest.mark.parametrize(
    ("peers", "named"), [(["n17"], "n17"), (["n17", "n17"], "n17"), (["n17", "n18"], "NODE"), ([], "NODE")]
)
def test_a_failed_node_is_the_one_to_which_connections_were_lost(
    meshwright: Any, tmp_path: Path, peers: list[str], named: str
) -> None:
    lost = [LOST.format(rank=rank, node=node) for rank, node in enumerate(peers)]
    found = remedies(meshwright, tmp_path / "a.log", [*megatron({}), *lost, NODE_FAILURE], "run.failed-node-failure")
    assert any(f"--exclude={named}" in text for remedy in found for text in remedy)
