"""Logs of runs out of memory: what they already have in place is not advised again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

OOM = (
    "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
    "79.11 GiB of which 1.20 GiB is free. Including non-PyTorch memory, this process has 77.90 GiB memory in use."
)
SMALLEST = {"micro_batch_size": 1, "recompute_granularity": "selective"}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
OFFLOAD = {"optimizer_cpu_offload": True, "use_precision_aware_optimizer": True}


def megatron(more: dict[str, Any]) -> list[str]:
    arguments = {
        "num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32, "swiglu": True,
        "group_query_attention": True, "num_query_groups": 8, "seq_length": 4096, "vocab_size": 128256, "bf16": True,
        "max_position_embeddings": 4096, "position_embedding_type": "rope", "normalization": "RMSNorm",
        "disable_bias_linear": True, "untie_embeddings_and_output_weights": True, "sequence_parallel": True,
        "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1, "use_distributed_optimizer": True,
        "global_batch_size": 256, "lr": 0.0003, "train_iters": 10000, "world_size": 16, "mock_data": True, **more,
    }  # fmt: skip
    lines = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in sorted(arguments.items())]
    return lines + [
        f" [2026-01-01 00:00:00] iteration {step:8d}/   10000 | consumed samples: {step * 256:12d} | elapsed time per "
        f"iteration (ms): 7300.{step} | learning rate: 3.000000E-04 | global batch size:   256 | lm loss: "
        f"{11.5 - 0.02 * step:.6E} | loss scale: 1.0 | grad norm: 1.5 | number of skipped iterations:   0 |"
        for step in range(1, 6)
    ]


def trainer(micro: int, checkpointing: bool) -> list[str]:
    lines = [
        "***** Running training *****", "  Num examples = 52,002", "  Num Epochs = 3",
        f"  Instantaneous batch size per device = {micro}",
        f"  Total train batch size (w. parallel, distributed & accumulation) = {8 * micro}",
        "  Gradient Accumulation steps = 1", "  Total optimization steps = 4,875",
    ]  # fmt: skip
    lines += [
        "`use_cache=True` is incompatible with gradient checkpointing. Setting `use_cache=False`."
    ] * checkpointing
    return lines + [str({"loss": 2.5 - 0.01 * step, "grad_norm": 1.2, "learning_rate": 2e-5}) for step in range(5)]


@pytest.mark.parametrize(
    ("lines", "advised"),
    [
        (megatron({"micro_batch_size": 4}),
         ["layout.recompute=selective", "layout.micro_batch_size=1", "layout.recompute=full",
          "layout.offload=optimizer"]),
        (megatron(SMALLEST), ["layout.recompute=full", "layout.offload=optimizer"]),
        (megatron(SMALLEST | FULL), ["layout.offload=optimizer", "layout.tp=4", "layout.pp=2"]),
        (megatron(SMALLEST | FULL | OFFLOAD), ["layout.tp=4", "layout.pp=2"]),
        (trainer(4, False), ["layout.micro_batch_size=1", "kernels.loss=fused_linear", "layout.recompute=full"]),
        (trainer(1, True), ["kernels.loss=fused_linear"]),
    ],
)  # fmt: skip
def test_settings_that_the_log_has_are_not_advised(
    meshwright: Any, tmp_path: Path, lines: list[str], advised: list[str]
) -> None:
    path = tmp_path / "slurm-42.out"
    path.write_text("".join(f"{line}\n" for line in (*lines, OOM)))
    found = meshwright("doctor", str(path), "--json").json["findings"]
    (one,) = (one for one in found if one["rule"] == "memory.out-of-memory")
    assert [text for remedy in one["remedies"] for text in remedy["try"] if "." in text.partition("=")[0]] == advised
    assert not any(remedy["what"] == "action" for remedy in one["remedies"])


def test_a_log_that_has_all_is_advised_more_gpus(meshwright: Any, tmp_path: Path) -> None:
    path = tmp_path / "slurm-42.out"
    arguments = SMALLEST | FULL | OFFLOAD | {"world_size": 2}
    path.write_text("".join(f"{line}\n" for line in (*megatron(arguments), OOM)))
    found = meshwright("doctor", str(path), "--json").json["findings"]
    (one,) = (one for one in found if one["rule"] == "memory.out-of-memory")
    assert [remedy["try"][0].partition(",")[0] for remedy in one["remedies"]] == ["more GPUs"]
    assert "cannot be known without the GPUs: --gpus 2xH100" in one["message"]
