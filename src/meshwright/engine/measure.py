"""Measures this machine: matmuls, attention, memory traffic, kernel launches and collectives, in training shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

WARM_UP = 5
ROUNDS = 3
COLLECTIVE_CALLS = 10
LEAST_S = 0.15  # each round repeats a call for at least this long, so that clocks settle
WIDTHS = ((1024, 4096), (4096, 4096), (4096, 14336), (8192, 8192), (8192, 28672), (2048, 768), (7168, 2048))
GEMM_SHAPES = tuple((tokens, *widths) for tokens in (128, 512, 2048, 8192, 32768) for widths in WIDTHS)
ATTENTION_SHAPES = tuple(
    (batch, heads, tokens, width)
    for tokens, batch in ((2048, 8), (8192, 2), (32768, 1))
    for heads, width in ((16, 64), (32, 128), (16, 256))
)
COPY_BYTES = tuple(2**n for n in range(20, 33, 3))


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the time of one call: the best of several rounds of repeated calls, after a warm-up."""
    for _ in range(WARM_UP):
        call()
    once = max(_round(call, 3, device), 1e-6)
    repeats = max(int(LEAST_S / once), 3)
    return min(_round(call, repeats, device) for _ in range(ROUNDS))


def _round(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch's
        torch.cuda.synchronize(device)
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        torch.cuda.synchronize(device)
        return float(start.elapsed_time(end)) / 1e3 / repeats
    from time import perf_counter

    start_s = perf_counter()
    for _ in range(repeats):
        call()
    return (perf_counter() - start_s) / repeats


def gemms(device: torch.device, shapes: Any = GEMM_SHAPES) -> Iterator[dict[str, Any]]:
    """Measure the matrix products of training, in bf16 and, if the GPU supports it, fp8."""
    for tokens, inner, outer in shapes:
        left = torch.randn(tokens, inner, device=device, dtype=torch.bfloat16)
        right = torch.randn(outer, inner, device=device, dtype=torch.bfloat16)
        took = seconds(lambda a=left, b=right: a @ b.t(), device)  # type: ignore[misc]  # bound per shape
        yield _gemm("bf16", [tokens, inner, outer], took)
        if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
            took = seconds(_fp8_product(left, right), device)
            yield _gemm("fp8", [tokens, inner, outer], took)


def _gemm(precision: str, shape: list[int], took: float) -> dict[str, Any]:
    tokens, inner, outer = shape
    tflops = 2.0 * tokens * inner * outer / took / 1e12
    return {"kind": "gemm", "precision": precision, "shape": shape, "s": took, "tflops": tflops}


def _fp8_product(left: Tensor, right: Tensor) -> Callable[[], Tensor]:
    one = torch.ones((), device=left.device)
    a, b = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t()
    return lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)


def attentions(device: torch.device, shapes: Any = ATTENTION_SHAPES) -> Iterator[dict[str, Any]]:
    """Measure causal attention, forward and backward; FLOPs count half of the score matrix."""
    for batch, heads, tokens, width in shapes:
        q, k, v = (
            torch.randn(batch, heads, tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        )

        def forward(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        out = forward()
        grad = torch.randn_like(out)
        flop = 2.0 * batch * heads * tokens * tokens * width  # two products, halved by the mask
        ahead = seconds(forward, device)
        both = seconds(lambda f=forward, g=grad: f().backward(g), device)  # type: ignore[misc]  # bound per shape
        back = max(both - ahead, 1e-9)
        shape = [batch, heads, tokens, width]
        yield {"kind": "attention", "pass": "forward", "shape": shape, "s": ahead, "tflops": flop / ahead / 1e12}
        yield {"kind": "attention", "pass": "backward", "shape": shape, "s": back, "tflops": 2.5 * flop / back / 1e12}


def copies(device: torch.device, sizes: Any = COPY_BYTES) -> Iterator[dict[str, Any]]:
    """Measure memory bandwidth, which bounds norms, residuals and the optimizer."""
    for size in sizes:
        source = torch.randn(size // 2, device=device, dtype=torch.bfloat16)
        target = torch.empty_like(source)
        took = seconds(lambda a=source, b=target: b.copy_(a), device)  # type: ignore[misc]  # bound per size
        yield {"kind": "copy", "bytes": size, "s": took, "gb_s": 2 * size / took / 1e9}


def launches(device: torch.device) -> Iterator[dict[str, Any]]:
    """Measure the launch time of a tiny kernel."""
    tiny = torch.zeros(8, device=device)
    yield {"kind": "launch", "s": seconds(lambda: tiny.add_(1.0), device)}


def adam_steps(device: torch.device, count: int = 2**27) -> Iterator[dict[str, Any]]:
    """Measure a fused AdamW step over fp32 parameters, which moves 28 bytes per parameter."""
    parameter = torch.nn.Parameter(torch.zeros(count, device=device))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], lr=1e-4, fused=device.type == "cuda")
    took = seconds(optimizer.step, device)
    yield {"kind": "adam", "parameters": count, "s": took, "gb_s": 28 * count / took / 1e9}


def collectives(device: torch.device) -> Iterator[dict[str, Any]]:
    """Measure all-gathers over all ranks: the bytes that one GPU receives per second."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    world = dist.get_world_size()
    one_node = world <= torch.cuda.device_count() if device.type == "cuda" else True
    for size in COPY_BYTES[:-1]:
        shard = torch.ones(max(size // world // 2, 1), device=device, dtype=torch.bfloat16)
        full = torch.empty(shard.numel() * world, device=device, dtype=torch.bfloat16)
        took = _collective_s(lambda f=full, s=shard: dist.all_gather_into_tensor(f, s), device)  # type: ignore[misc]
        received = shard.numel() * 2 * (world - 1)
        yield {"kind": "link" if one_node else "network", "bytes": size, "s": took, "gb_s": received / took / 1e9}


def _collective_s(call: Callable[[], object], device: torch.device) -> float:
    """Return the time of a collective; every rank makes the same number of calls."""
    for _ in range(WARM_UP):
        call()
    return min(_round(call, COLLECTIVE_CALLS, device) for _ in range(ROUNDS))


def measure_all(device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield the points of all measurements."""
    yield from launches(device)
    yield from copies(device)
    yield from gemms(device)
    yield from attentions(device)
    yield from adam_steps(device)
    yield from collectives(device)
