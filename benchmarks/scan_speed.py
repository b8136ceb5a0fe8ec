"""Compare our Mamba-2 and gated delta rule scans with transformers' reference, which is used if no kernel is installed:
time and memory of a forward and a backward pass, and the error of both against ours in fp64 (which the tests compare
with the recurrence token by token).

    python -m benchmarks.scan_speed OUT.json [--tiny]

Both alternate on the same inputs; ratios are of medians. Errors are the largest of the output and of any gradient, each
relative to its largest value.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers.models.nemotron_h import modeling_nemotron_h as nemotron
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from meshwright.engine.kernels.delta_rule import gated_delta_rule
from meshwright.engine.kernels.state_space import state_space_scan

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
REPEATS = 5
Scan = Callable[..., Tensor]


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.float32).to(dtype)


def state_space(tokens: int, heads: int, width: int, groups: int, state: int) -> tuple[list[Tensor], Scan, Scan]:
    """Return inputs of a Mamba-2 layer, our scan and the reference."""
    x, dt = normal(1, tokens, heads, width), normal(1, tokens, heads)
    a = -torch.linspace(1, 16, heads, device=DEVICE)
    b, c = normal(1, tokens, groups, state), normal(1, tokens, groups, state)
    skip, bias = torch.ones(heads, device=DEVICE), normal(heads, dtype=torch.float32) - 4

    def ours(*tensors: Tensor) -> Tensor:
        return state_space_scan(*tensors, softplus=True)

    def reference(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, bias: Tensor) -> Tensor:
        scan: Any = nemotron.mamba2_chunk_scan
        out: Tensor = scan(x, dt, a, b, c, chunk_size=128, D=skip, dt_bias=bias, dt_softplus=True)
        return out

    return [x, dt, a, b, c, skip, bias], ours, reference


def delta(tokens: int, heads: int, width: int) -> tuple[list[Tensor], Scan, Scan]:
    """Return inputs of a gated delta rule, our rule and the reference."""
    q, k, v = (normal(1, tokens, heads, width) for _ in range(3))
    g = -torch.rand(1, tokens, heads, device=DEVICE) * 0.2
    beta = torch.rand(1, tokens, heads, device=DEVICE).to(torch.bfloat16)

    def ours(*tensors: Tensor) -> Tensor:
        return gated_delta_rule(*tensors, norm=True)

    def reference(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        rule: Any = qwen.torch_chunk_gated_delta_rule
        out: Tensor = rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]
        return out

    return [q, k, v, g, beta], ours, reference


SHORT = 64 if "--tiny" in sys.argv else 4096
LONG = 128 if "--tiny" in sys.argv else 8192
CASES: dict[str, tuple[list[Tensor], Scan, Scan]] = {
    "Mamba-2 of Nemotron-H 8B, 4k": state_space(SHORT, 128, 64, 8, 128),  # the reference runs out of memory at 8k
    "gated delta rule of Qwen3-Next, 4k": delta(SHORT, 32, 128),
    "gated delta rule of Qwen3-Next, 8k": delta(LONG, 32, 128),
}


def passes(scan: Scan, tensors: list[Tensor]) -> list[Tensor]:
    """Return the output and all gradients."""
    tensors = [one.detach().requires_grad_() for one in tensors]
    out = scan(*tensors)
    weights = torch.randn(out.shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1))
    return [out.detach(), *torch.autograd.grad((out.double() * weights).sum(), tensors)]


def timed(scan: Scan, tensors: list[Tensor]) -> tuple[float, float]:
    """Return the seconds and the additional peak GiB (0 without a GPU)."""
    start = 0
    if ON_GPU:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
    started = time.perf_counter()
    passes(scan, tensors)
    if ON_GPU:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    return seconds, (torch.cuda.max_memory_allocated() - start) / 2**30 if ON_GPU else 0.0


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest error, each relative to the largest expected value."""
    return max(float((f.double() - e).abs().max() / e.abs().max()) for f, e in zip(found, expected, strict=True))


def fp32_inputs(tensors: list[Tensor]) -> list[Tensor]:
    return [one[:, :512].float() if one.dim() > 1 else one.float() for one in tensors]


def row(name: str) -> dict[str, Any]:
    """Return the row of a case: both scans alternating, and their fp32 errors on the first 512 tokens."""
    tensors, ours, reference = CASES[name]
    scans = {"ours": ours, "reference": reference}
    for scan in scans.values():
        passes(scan, tensors)
    repeats = [{key: timed(scan, tensors) for key, scan in scans.items()} for _ in range(REPEATS)]
    seconds = {key: median(repeat[key][0] for repeat in repeats) for key in scans}
    memory = {key: max(repeat[key][1] for repeat in repeats) for key in scans}
    found = {key: [one.cpu() for one in passes(scan, fp32_inputs(tensors))] for key, scan in scans.items()}
    exact = [one.cpu() for one in passes(ours, [one.double() for one in fp32_inputs(tensors)])]
    return {
        "name": name,
        "times_faster": round(seconds["reference"] / seconds["ours"], 2),
        "ms": {key: round(1000 * value, 2) for key, value in seconds.items()},
        "gib": {key: round(value, 3) for key, value in memory.items()},
        "from_fp64": {key: distance(value, exact) for key, value in found.items()},
    }


def main() -> None:
    torch.manual_seed(0)
    rows = []
    for name in CASES:
        rows.append(row(name))
        print(rows[-1], flush=True)
    device = torch.cuda.get_device_name() if ON_GPU else "CPU"
    command = "python -m benchmarks.scan_speed OUT.json"
    result = {"command": command, "date": str(date.today()), "device": device, "torch": torch.__version__, "rows": rows}
    Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
