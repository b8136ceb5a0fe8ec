"""Compare the grouped GEMM of experts in fp8 with bf16 on a GPU: errors against it, and time of both passes.

    python benchmarks/fp8_experts.py OUT.json [--smoke]

Tokens are spread over the experts unevenly, as a router does, and the order of runs alternates. The last column is the
whole gain: casts, both products of the forward and backward pass, and the gradient of the weights.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

# model: experts, experts per token, hidden, width of the first product (gate and up), tokens
SHAPES = {
    "qwen3_30b_a3b": (128, 8, 2048, 2 * 768, 16384),
    "olmoe_7b": (64, 8, 2048, 2 * 1024, 16384),
    "gpt_oss_20b": (32, 4, 2880, 2 * 2880, 16384),
    "mixtral_8x7b": (8, 2, 4096, 2 * 14336, 16384),
    "deepseek_v3": (64, 8, 7168, 2 * 2048, 4096),  # a quarter of its experts, as one rank of ep=4 has
}
WARM, TIMED = 5, 15


def operands(experts: int, topk: int, hidden: int, width: int, tokens: int, device: str) -> tuple[Any, Any, Any, Any]:
    """Return rows, matrices, ends of the groups and the gradient of the output."""
    import torch

    torch.manual_seed(0)
    shares = torch.rand(experts).pow(2) + 0.1
    counts = (shares / shares.sum() * tokens * topk).int()
    counts[0] += tokens * topk - int(counts.sum())
    ends = counts.cumsum(0).to(device=device, dtype=torch.int32)
    rows = torch.randn(tokens * topk, hidden, device=device, dtype=torch.bfloat16)
    columns = torch.randn(experts, width, hidden, device=device, dtype=torch.bfloat16).mul_(0.02).transpose(-2, -1)
    grad = torch.randn(tokens * topk, width, device=device, dtype=torch.bfloat16)
    return rows.requires_grad_(), columns.detach().requires_grad_(), ends, grad


def seconds(run: Callable[[], Any], device: str) -> float:
    """Return the time of one call."""
    import torch

    synchronize = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    for _ in range(WARM):
        run()
    synchronize()
    started = perf_counter()
    for _ in range(TIMED):
        run()
    synchronize()
    return (perf_counter() - started) / TIMED


def measured(name: str, shape: tuple[int, int, int, int, int], device: str) -> dict[str, Any]:
    """Return errors and times of one shape, compiled on a GPU."""
    import torch

    from meshwright.engine.experts.grouped_mm import grouped_mm
    from meshwright.engine.kernels.fp8_grouped import fp8_grouped_mm

    rows, columns, ends, grad = operands(*shape, device)
    row: dict[str, Any] = {"model": name, "shape": shape}
    found = {}
    for kind, product in (("bf16", grouped_mm), ("fp8", fp8_grouped_mm)):
        called = torch.compile(product) if device == "cuda" else product

        def both(called: Any = called) -> tuple[Any, Any, Any]:
            out = called(rows, columns, ends)
            return (out.detach(), *torch.autograd.grad(out, (rows, columns), grad))

        found[kind] = [one.float() for one in both()]
        row[f"{kind}_ms"] = 1e3 * min(seconds(both, device) for _ in range(2))
    row["errors"] = {
        what: float((low - wide).norm() / wide.norm())
        for what, low, wide in zip(("out", "rows", "columns"), found["fp8"], found["bf16"], strict=True)
    }
    row["gain"] = row["bf16_ms"] / row["fp8_ms"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--smoke", action="store_true", help="small shapes on CPU: only tests this script")
    options = parser.parse_args()
    rows = []
    for name, shape in SHAPES.items():
        used = (4, 2, 64, 96, 64) if options.smoke else shape
        try:
            rows.append(measured(name, used, "cpu" if options.smoke else "cuda"))
        except Exception as error:
            rows.append({"model": name, "shape": used, "error": f"{type(error).__name__}: {error}"[:600]})
        print(json.dumps(rows[-1]), flush=True)
        options.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
