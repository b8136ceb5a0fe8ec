"""Measure the least time of a training step: its matrix products and attention alone, at the rate that lasts.

    python benchmarks/step_floor.py OUT.json [--seconds 6] [--tiny]

The shapes are those of the cases of benchmarks/peer_speed.py with Llama 3 8B. The products of one layer (forward,
gradients of inputs, and of weights where they are trained), its attention, and then the head, run one after the other
until the GPU has reached its sustained power and clock; the time of the last third counts. Nothing else of a
step runs: no norms, activations, rotary embedding, loss, casts to fp8, optimizer or data. So no implementation of these
steps with the same kernels is faster, and the ratio of a goal to it says whether the goal can be reached.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
FP8 = torch.float8_e4m3fn


class Shape(NamedTuple):
    """A dense decoder."""

    layers: int = 32
    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    groups: int = 8
    head: int = 128
    vocab: int = 128256

    def linears(self) -> list[tuple[int, int]]:
        """Return inputs and outputs of a layer's matrix products: q, k, v as one, output, gate and up as one, down."""
        kv = self.groups * self.head
        return [
            (self.hidden, self.heads * self.head + 2 * kv),
            (self.heads * self.head, self.hidden),
            (self.hidden, 2 * self.ffn),
            (self.ffn, self.hidden),
        ]


class Case(NamedTuple):
    """A step of benchmarks/peer_speed.py."""

    name: str
    samples: int
    tokens: int  # of a sample
    fp8: bool = False
    trains_weights: bool = True
    shape: Shape = Shape()


CASES = (
    Case("Llama-3-8B pretrain", 4, 4096),
    Case("Llama-3-8B pretrain, fp8", 4, 4096, fp8=True),
    Case("Llama-3-8B LoRA", 1, 8192, trains_weights=False),
)
TINY = Shape(2, 64, 128, 4, 2, 16, 256)


def bf16_product(rows: int, inputs: int, outputs: int) -> Callable[[], None]:
    left, right = (
        torch.randn(*size, device=DEVICE, dtype=torch.bfloat16) for size in ((rows, inputs), (inputs, outputs))
    )
    out = torch.empty(rows, outputs, device=DEVICE, dtype=torch.bfloat16)
    return lambda: torch.mm(left, right, out=out)  # type: ignore[func-returns-value]


def fp8_product(rows: int, inputs: int, outputs: int, fast: bool) -> Callable[[], None]:
    left = torch.randn(rows, inputs, device=DEVICE).to(FP8)
    right = torch.randn(outputs, inputs, device=DEVICE).to(FP8).t()
    one = torch.ones((), device=DEVICE)

    def run() -> None:
        torch._scaled_mm(left, right, one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)

    return run


def products(case: Case) -> list[Callable[[], None]]:
    """Return the matrix products of one layer, forward and backward."""
    rows, found = case.samples * case.tokens, []
    for inputs, outputs in case.shape.linears():
        sizes = [(rows, inputs, outputs), (rows, outputs, inputs)]
        sizes += [(outputs, rows, inputs)] if case.trains_weights else []
        for number, size in enumerate(sizes):
            found.append(fp8_product(*size, fast=number == 0) if case.fp8 else bf16_product(*size))
    return found


def head(case: Case) -> list[Callable[[], None]]:
    """Return the products of the head, in bf16, in chunks of rows."""
    rows, (hidden, vocab) = case.samples * case.tokens, (case.shape.hidden, case.shape.vocab)
    sizes = [(rows, hidden, vocab), (rows, vocab, hidden)]
    sizes += [(vocab, rows, hidden)] if case.trains_weights else []
    return [bf16_product(*size) for size in sizes]


def attention(case: Case) -> Callable[[], None]:
    shape = case.shape

    def made(heads: int) -> Tensor:
        size = (case.samples, heads, case.tokens, shape.head)
        return torch.randn(*size, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)

    q, k, v = made(shape.heads), made(shape.groups), made(shape.groups)
    gradient = torch.randn_like(q)
    backends = [SDPBackend.CUDNN_ATTENTION] if ON_GPU else [SDPBackend.MATH]

    def run() -> None:
        with sdpa_kernel(backends):
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        torch.autograd.grad(out, (q, k, v), gradient)

    return run


def sustained_s(parts: list[Callable[[], None]], seconds: float, clock: Callable[[], float]) -> float:
    """Return the seconds of all parts once, at the rate of the last third of some seconds."""
    times = []
    for _ in range(2):  # kernels are loaded
        for part in parts:
            part()
    begin = last = clock()
    while last - begin < seconds:
        for part in parts:
            part()
        now = clock()
        times.append((now, now - last))
        last = now
    late = [took for at, took in times if at - begin > seconds * 2 / 3]
    return median(late)


def clock() -> float:
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def power_and_clock() -> str:
    if not ON_GPU:
        return ""
    query = ["nvidia-smi", "--query-gpu=power.draw,clocks.sm", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()


def measured(case: Case, seconds: float) -> dict[str, object]:
    """Return the floor of a case and its parts, all measured in one mix of kernels."""
    shape, tokens = case.shape, case.samples * case.tokens
    layer, once, attended = products(case), head(case), attention(case)
    repeats = max(shape.layers // 4, 1)  # a quarter of a step, its mix of kernels kept
    quarter = [*layer, attended] * repeats
    all_s = sustained_s(quarter, seconds, clock) * shape.layers / repeats
    state = power_and_clock()
    head_s = sustained_s(once * 2, seconds / 3, clock) / 2
    products_s = sustained_s(layer * repeats, seconds / 2, clock) * shape.layers / repeats
    step_s = all_s + head_s
    passes = 3 if case.trains_weights else 2
    weights = shape.layers * sum(a * b for a, b in shape.linears())
    return {
        "name": case.name,
        "tokens": tokens,
        "floor_s": step_s,
        "tokens_per_s": tokens / step_s,
        "products_s": products_s,
        "products_tflops": 2 * passes * tokens * weights / products_s / 1e12,
        "head_s": head_s,
        "attention_s": all_s - products_s,
        "power_and_clock": state,
    }


def main() -> None:
    seconds = float(sys.argv[sys.argv.index("--seconds") + 1]) if "--seconds" in sys.argv else 6.0
    tiny = "--tiny" in sys.argv
    rows = []
    for case in CASES:
        if tiny:
            if case.fp8 and not ON_GPU:
                continue
            case = case._replace(shape=TINY, tokens=64)
        row = measured(case, 0.3 if tiny else seconds)
        rows.append(row)
        print({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
        if ON_GPU:
            torch.cuda.empty_cache()
    device = torch.cuda.get_device_name() if ON_GPU else "cpu"
    report = {"date": date.today().isoformat(), "device": device, "torch": torch.__version__, "rows": rows}
    Path(sys.argv[1]).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
