"""Compare LoRA training of our engine with a plain transformers + peft loop: Llama-3-8B shape on one GPU.

    python -m benchmarks.lora_speed OUT.json [--tiny] [CASE ...]

Rank 32 on all linears, seq 4096, base weights in bf16. The plain loop is a well-tuned baseline:
AutoModelForCausalLM in bf16, SDPA, torch.compile of each block, the loss in checkpointed chunks, clip_grad_norm_, fused
AdamW. By default peft keeps adapters in fp32 and computes with them in fp32; it is measured with this default
and with bf16 adapters. Times are CUDA events over the timed steps; ratios are to the row named in `against`.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from datetime import date
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import msgspec
import torch
import torch.distributed as dist
from benchmarks.engine_h200 import BF16, DEVICE, TINY, figures, ours, plain_step

from meshwright.engine.model.config import config_for, tiny
from meshwright.recipes.types import Data, Kernels, Layout, Optimizer, Peft, Precision, Recipe, Schedule, Train

RANK = 32
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Run(msgspec.Struct, frozen=True):
    """One row of the table."""

    name: str
    micro_batch: int
    engine: bool = True  # ours, or the plain loop
    method: str = "lora"
    adapters: str = "bf16"  # dtype of adapters and their optimizer state
    recompute: str = "none"
    against: str = ""  # the baseline row


RUNS = (  # a row comes after its baseline
    Run("plain", 4, engine=False, adapters="fp32"),
    Run("plain, bf16 adapters", 4, engine=False, against="plain"),
    Run("engine", 4, against="plain"),
    Run("engine, fp32 adapters", 4, adapters="fp32", against="plain"),
    Run("engine, micro batch 6", 6, against="plain"),
    Run("engine, qlora", 4, method="qlora", against="plain"),
    Run("plain, recomputed", 4, engine=False, adapters="fp32", recompute="full"),
    Run("engine, recomputed", 4, recompute="full", against="plain, recomputed"),
    Run("engine, costly kept", 4, recompute="selective", against="plain"),
    Run("engine, qlora recomputed", 4, method="qlora", recompute="full", against="plain, recomputed"),
)


def recipe_of(run: Run) -> Recipe:
    """Return the recipe of a row, with one micro batch per step."""
    return Recipe(
        name=run.name,
        model="llama3_8b",
        goal="peft",
        cluster="1xH200",
        data=Data(seq_length=64 if TINY else 4096),
        train=Train(global_batch_size=run.micro_batch, steps=1000, check_nan=False),
        optimizer=Optimizer(lr=1e-4),
        schedule=Schedule(name="constant", warmup_steps=0),
        precision=Precision(compute="fp32") if TINY else BF16 if run.adapters == "bf16" else Precision(),
        peft=Peft(method=run.method, rank=RANK, alpha=float(RANK)),  # type: ignore[arg-type]
        layout=Layout(micro_batch_size=run.micro_batch, recompute=run.recompute),  # type: ignore[arg-type]
        kernels=Kernels(compile=not TINY, loss="fused_linear"),
    )


def plain(run: Run, recipe: Recipe, config: Any) -> Any:
    """Return a step function of the plain loop."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    with DEVICE:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32 if TINY else torch.bfloat16)
    settings = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=list(LINEARS))
    wrapped = get_peft_model(model, settings, autocast_adapter_dtype=run.adapters == "fp32").to(DEVICE).train()
    if run.recompute == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if not TINY:
        for layer in model.model.layers:
            layer.compile(fullgraph=True)
    trainable = [p for p in wrapped.parameters() if p.requires_grad]
    return plain_step(model, trainable, recipe, use_cache=False)


def measure(run: Run) -> dict[str, Any]:
    """Return tokens per second, peak memory and losses of a row."""
    recipe = recipe_of(run)
    config = config_for(recipe)
    if TINY:
        config = tiny(config, 2)
    row: dict[str, Any] = msgspec.to_builtins(run)
    return row | figures(lambda: (ours if run.engine else plain)(run, recipe, config), recipe)


def main() -> None:
    out, names = Path(sys.argv[1]), [a for a in sys.argv[2:] if not a.startswith("--")]
    dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows: list[dict[str, Any]] = []
    print(f"{'variant':<26} {'batch':>5} {'recompute':>9} {'tok/s':>8} {'ratio':>6} {'peak GiB':>8}")
    for run in (one for one in RUNS if not names or one.name in names):
        rows.append(try_run(run, rows))
        print(format_row(rows[-1]), flush=True)
        save(out, rows)
        gc.collect()
        torch._dynamo.reset()
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
    dist.destroy_process_group()


def try_run(run: Run, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a row with its ratio to the baseline, or with its error."""
    try:
        row = measure(run)
    except Exception as error:
        where = traceback.format_exc()[-1500:]
        return {**msgspec.to_builtins(run), "error": f"{type(error).__name__}: {error}"[:400], "where": where}
    base = next((r for r in rows if r["name"] == run.against and "tokens_per_s" in r), None)
    return row | ({"ratio": row["tokens_per_s"] / base["tokens_per_s"]} if base else {})


def format_row(row: dict[str, Any]) -> str:
    """Format a row of the table."""
    prefix = f"{row['name']:<26} {row['micro_batch']:>5} {row['recompute']:>9}"
    if "error" in row:
        return f"{prefix} {row['error']}\n{row['where']}"
    ratio = f"{row['ratio']:.3f}" if "ratio" in row else ""
    return f"{prefix} {row['tokens_per_s']:>8,.0f} {ratio:>6} {row.get('peak_allocated_gib', 0.0):>8.1f}"


def save(path: Path, rows: list[dict[str, Any]]) -> None:
    """Save the measurements so far."""
    import peft
    import transformers

    found = {
        "command": "python -m benchmarks.lora_speed OUT.json",
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU",
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "peft": peft.__version__,
            "python": sys.version.split()[0],
        },
        "convention": f"Llama-3-8B shape, LoRA of rank {RANK} on all linears, seq 4096, base weights in bf16, "
        "adapters, gradients and AdamW state in the format of `adapters`, clipping, mock data, one micro batch a step",
        "rows": rows,
    }
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
