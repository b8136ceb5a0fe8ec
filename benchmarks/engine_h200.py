"""Compare our engine with a plain transformers loop on one GPU: tokens per second, ratio and peak memory.

    python benchmarks/engine_h200.py OUT.json [--tiny] [CASE ...]

The plain loop is a well-tuned baseline: AutoModelForCausalLM in bf16, SDPA, torch.compile of each block, the loss
in checkpointed chunks, clip_grad_norm_, fused AdamW. Both train on the same shapes with bf16 weights, gradients and
optimizer state. Times are CUDA events over the timed steps; the ratio is what to compare between machines.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from datetime import date
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import msgspec
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from meshwright.engine.data.mock import Mock
from meshwright.engine.mesh import build_mesh
from meshwright.engine.model.config import config_for, spec_of, tiny
from meshwright.engine.trainer import Trainer
from meshwright.recipes.types import (
    Architecture,
    Data,
    Kernels,
    Layout,
    Moe,
    Optimizer,
    Precision,
    Recipe,
    Schedule,
    Train,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TINY = "--tiny" in sys.argv
WARM, TIMED = (1, 2) if TINY else (4, 8)
BF16 = Precision(master="bf16", moments="bf16", grads="bf16", reduce="bf16")
FP8 = msgspec.structs.replace(BF16, matmul="fp8_tensor")


class Run(msgspec.Struct, frozen=True):
    """One row of the table."""

    name: str
    model: str
    micro_batch: int
    engine: bool = True  # ours, or the plain loop
    precision: Precision = BF16
    recompute: str = "none"
    recompute_modules: tuple[str, ...] = ()
    layers: int | None = None  # a slice of the model
    against: str = ""  # the baseline row


RUNS = (  # a row comes after its baseline
    Run("1B plain", "llama32_1b", 8, engine=False),
    Run("1B engine", "llama32_1b", 8, against="1B plain"),
    Run("8B plain", "llama3_8b", 3, engine=False),
    Run("8B engine, largest micro batch", "llama3_8b", 5, against="8B plain"),
    Run("8B engine, fp8", "llama3_8b", 6, precision=FP8, against="8B plain"),
    Run("OLMoE plain", "olmoe_7b", 2, engine=False),
    Run("OLMoE engine", "olmoe_7b", 2, against="OLMoE plain"),
    Run("Qwen3-30B-A3B, 8 layers, plain", "qwen3_30b_a3b", 4, engine=False, layers=8),
    Run("Qwen3-30B-A3B, 8 layers, engine", "qwen3_30b_a3b", 4, layers=8, against="Qwen3-30B-A3B, 8 layers, plain"),
    Run("8B engine, planner's micro batch", "llama3_8b", 4, against="8B plain"),
    Run("8B engine, full recompute", "llama3_8b", 4, recompute="full", against="8B plain"),
)


def recipe_of(run: Run) -> Recipe:
    """Return the recipe of a row, with one micro batch per step."""
    return Recipe(
        name=run.name,
        model=run.model,
        goal="pretrain",
        cluster="1xH200",
        architecture=Architecture(layers=run.layers),
        data=Data(seq_length=64 if TINY else 4096),
        train=Train(global_batch_size=run.micro_batch, steps=1000, check_nan=False),
        optimizer=Optimizer(lr=1e-4),
        schedule=Schedule(name="constant", warmup_steps=0),
        precision=run.precision,
        moe=Moe(router_dtype="fp32"),
        layout=Layout(
            micro_batch_size=run.micro_batch,
            recompute=run.recompute,  # type: ignore[arg-type]
            recompute_modules=run.recompute_modules,  # type: ignore[arg-type]
        ),
        kernels=Kernels(compile=not TINY, loss="fused_linear"),
    )


def ours(run: Run, recipe: Recipe, config: Any) -> Any:
    """Return a step function of our engine."""
    mesh = build_mesh(recipe.layout, DEVICE.type)
    source = Mock(config.vocab_size, recipe.data.seq_length, 1)
    trainer = Trainer(recipe, config, mesh, DEVICE, source)
    numbers = iter(range(10**6))
    return lambda: trainer.step(next(numbers), figures=False).losses.sum()


def plain(run: Run, recipe: Recipe, config: Any) -> Any:
    """Return a step function of the plain loop."""
    from transformers import AutoModelForCausalLM

    config._attn_implementation = "sdpa"
    if recipe.model in ("olmoe_7b", "qwen3_30b_a3b"):
        config._experts_implementation = "grouped_mm"
    torch.manual_seed(0)
    with DEVICE:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32 if TINY else torch.bfloat16).train()
    if not TINY:
        for layer in model.model.layers:
            layer.compile(fullgraph=True)
    return plain_step(model, list(model.parameters()), recipe)


def plain_step(
    model: Any, trainable: list[torch.nn.Parameter], recipe: Recipe, autocast: bool = False, **model_kwargs: Any
) -> Any:
    """Return a plain training step for these parameters; `model_kwargs` go to the model with the tokens."""
    optimizer = torch.optim.AdamW(trainable, lr=1e-4, fused=True)
    source = Mock(model.config.vocab_size, recipe.data.seq_length, 1)
    numbers = iter(range(10**6))
    size = recipe.train.global_batch_size

    def chunk_loss(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = model.lm_head(hidden).float()
        return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")

    def step() -> torch.Tensor:
        first = next(numbers) * size
        tokens = torch.from_numpy(source.samples(range(first, first + size)).tokens).to(DEVICE)
        losses = [forward_backward(part) for part in tokens.split(recipe.layout.micro_batch_size)]
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).sum()

    def forward_backward(tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
            hidden = model.base_model(input_ids=tokens[:, :-1], **model_kwargs).last_hidden_state.flatten(0, 1)
            labels = tokens[:, 1:].flatten()
            parts = [
                checkpoint(chunk_loss, h, y, use_reentrant=False)
                for h, y in zip(hidden.chunk(8), labels.chunk(8), strict=True)
            ]
            loss = torch.stack(parts).sum() / (size * recipe.data.seq_length)
        loss.backward()
        return loss.detach()

    return step


def measure(run: Run) -> dict[str, Any]:
    """Return tokens per second, peak memory and losses of a row."""
    recipe = recipe_of(run)
    config = config_for(recipe)
    if TINY:
        config = tiny(config, 2)
        recipe = msgspec.structs.replace(recipe, precision=Precision(compute="fp32"))
    row = {
        "name": run.name,
        "engine": run.engine,
        "micro_batch": run.micro_batch,
        "parameters": spec_of(recipe, config).params.total,
    }
    return row | figures(lambda: (ours if run.engine else plain)(run, recipe, config), recipe)


def figures(make: Any, recipe: Recipe, warm: int = WARM, steps: int = TIMED) -> dict[str, Any]:
    """Return speed, losses and peak memory of the step function that `make` returns."""
    started = time.monotonic()
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step = make()
    losses = [step()]
    first_s = time.monotonic() - started
    losses += [step() for _ in range(warm - 1)]
    seconds = timed(step, losses, steps)
    row = {
        "tokens_per_s": recipe.train.global_batch_size * recipe.data.seq_length / seconds,
        "step_s": seconds,
        "first_step_s": first_s,
        "losses": [round(float(loss), 4) for loss in losses],
    }
    if DEVICE.type == "cuda":
        row |= {
            "peak_allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
            "peak_reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        }
    return row


def timed(step: Any, losses: list[torch.Tensor], steps: int = TIMED) -> float:
    """Return the mean seconds of a step."""
    if DEVICE.type != "cuda":
        started = time.perf_counter()
        losses += [step() for _ in range(steps)]
        return (time.perf_counter() - started) / steps
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    losses += [step() for _ in range(steps)]
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / steps


def main() -> None:
    out, names = Path(sys.argv[1]), [a for a in sys.argv[2:] if not a.startswith("--")]
    limit = float(os.environ.get("BENCH_SECONDS", "1e9"))  # no row is started after this
    started = time.monotonic()
    dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows: list[dict[str, Any]] = []
    for run in RUNS:
        if (names and not any(name in run.name for name in names)) or time.monotonic() - started > limit:
            continue
        try:
            row = measure(run)
        except Exception as error:
            row = {
                "name": run.name,
                "error": f"{type(error).__name__}: {error}"[:400],
                "where": traceback.format_exc()[-1500:],
            }
        base = next((r for r in rows if r["name"] == run.against and "tokens_per_s" in r), None)
        if base and "tokens_per_s" in row:
            row["ratio"] = row["tokens_per_s"] / base["tokens_per_s"]
        rows.append(row)
        broken = run.engine and "error" in row and not any(r.get("engine") for r in rows)
        model_kwargs = row.get("error") or (
            f"{row['tokens_per_s']:>9,.0f} tok/s  {row.get('ratio', 1):.3f} ×  "
            f"{row.get('peak_allocated_gib', 0):.1f} GiB  first {row['first_step_s']:.0f} s  loss {row['losses'][-1]}"
        )
        print(f"{run.name:<40} {model_kwargs}", flush=True)
        save(out, rows)
        gc.collect()
        torch._dynamo.reset()
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
        if broken:  # our first row failed: the others would fail too
            print(row["where"], flush=True)
            break
    dist.destroy_process_group()


def save(path: Path, rows: list[dict[str, Any]]) -> None:
    """Save the measurements so far."""
    import transformers

    found = {
        "command": "python benchmarks/engine_h200.py OUT.json",
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU",
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": sys.version.split()[0],
        },
        "convention": "seq 4096, bf16 weights, gradients and AdamW state, clipping, mock data, one micro batch a step",
        "rows": rows,
    }
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
