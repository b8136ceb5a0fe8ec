"""Training with Megatron-FSDP against fsdp2 on one GPU: `python tests/engine/test_megatron_fsdp_gpu.py` prints a table.

With a file name as argument the results are written there as JSON. Under pytest the script runs in its own process,
because forked ranks and an initialized CUDA do not mix.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import warnings
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.engine.families import FAMILIES  # noqa: E402
from tests.engine.parity import recipe  # noqa: E402

from meshwright.engine.data.mock import Mock  # noqa: E402
from meshwright.engine.mesh import build_mesh  # noqa: E402
from meshwright.engine.model.build import transformers_config  # noqa: E402
from meshwright.engine.trainer import Trainer  # noqa: E402
from meshwright.recipes import types  # noqa: E402

STEPS = 5
# fp32: the same sums. bf16: kernels may sum in another order, and bf16 has three digits.
TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "fp32", {}),
    "tied weights": ("qwen3", "fp32", {}),
    "experts": ("qwen3_moe", "fp32", {}),
    "recompute": ("llama", "fp32", {"recompute": "full"}),
    "llama in bf16": ("llama", "bf16", {}),
}


def train(family: str, given: types.Recipe) -> list[tuple[float, float]]:
    """Return loss and gradient norm of every step."""
    config, device = transformers_config(FAMILIES[family]), torch.device("cuda", 0)
    source = Mock(config.vocab_size, given.data.seq_length, given.train.seed)
    trainer = Trainer(given, config, build_mesh(given.layout, "cuda"), device, source)
    return [(result.loss, result.grad_norm) for result in map(trainer.step, range(STEPS))]


def compare(family: str, compute: str, layout: dict[str, Any]) -> dict[str, Any]:
    """Train with both strategies; return the largest relative differences."""
    found = {}
    for strategy in ("fsdp2", "megatron_fsdp"):
        chosen = types.Layout(micro_batch_size=2, strategy=strategy, **layout)  # type: ignore[arg-type]
        adam = types.Optimizer(name="adamw", lr=1e-2, eps=1e-4)
        given = recipe(chosen, precision=types.Precision(compute=compute), optimizer=adam)  # type: ignore[arg-type]
        found[strategy] = train(family, given)
    pairs = list(zip(found["megatron_fsdp"], found["fsdp2"], strict=True))
    loss, norm = (max(abs(a[i] - b[i]) / abs(b[i]) for a, b in pairs) for i in (0, 1))
    return {**found, "loss_difference": loss, "norm_difference": norm}


def check() -> tuple[dict[str, Any], list[str]]:
    """Return all cases, and those that differ too much."""
    rows, wrong = {}, []
    for name, (family, compute, layout) in CASES.items():
        row = rows[name] = compare(family, compute, layout)
        good = max(row["loss_difference"], row["norm_difference"]) <= TOLERANCE[compute]
        losses = f"{row['megatron_fsdp'][0][0]:.4f} -> {row['megatron_fsdp'][-1][0]:.4f}"
        differences = f"loss {row['loss_difference']:.1e}  norm {row['norm_difference']:.1e}"
        print(f"{'ok   ' if good else 'WRONG'} {name:16} {losses}  {differences}", flush=True)
        wrong += [] if good else [name]
    return rows, wrong


def test_both_strategies_train_the_same() -> None:
    import pytest

    if not torch.cuda.is_available() or find_spec("megatron_fsdp") is None:
        pytest.skip("needs a CUDA GPU and megatron-fsdp")
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_float32_matmul_precision("highest")
    torch.cuda.set_device(0)
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        dist.init_process_group("nccl", rank=0, world_size=1, store=store)
        results, failed = check()
        dist.destroy_process_group()
    versions = f"torch {torch.__version__}, megatron-fsdp {version('megatron-fsdp')}, {torch.cuda.get_device_name()}"
    print(f"{versions}: " + (f"{len(failed)} wrong: {failed}" if failed else "all equal"))
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(
            json.dumps({"machine": versions, "steps": STEPS, "cases": results}, indent=1) + "\n"
        )
    sys.exit(bool(failed))
