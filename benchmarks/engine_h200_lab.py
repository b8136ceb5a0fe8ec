"""Measure the gain of each optimization on this GPU: training steps of a Llama shape, compared with a plain loop.

python benchmarks/engine_h200_lab.py OUT.json products attention plain head optimizer norms batch tuned folded fp8

The cases are cumulative: each adds one optimization to the previous. Llama-3-8B shape, 4,096 tokens a sequence, bf16
weights, gradients and AdamW state, blocks compiled one by one. On a machine without a GPU a tiny model runs instead.

Tried on an H200 at its 700 W limit (clock 1.5 instead of 1.98 GHz; torch 2.11) and dropped because it did not help:
q, k and v (gate and up) as one GEMM over concatenated weights, -1.3 %: the GEMM gains nothing and the compiler adds a
pass to concatenate the gradients; coordinate descent tuning, 0.0 % for 40 s more of compiling;
Triton GEMMs of max-autotune, 626 to 671 TFLOP/s compared with 678 to 703; recomputing whatever the compiler can
(ban_recompute_materialized_backward off), 98.5 GiB at micro batch 4 but no faster than micro batch 3 without it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import json
import os
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from meshwright.engine.kernels.cross_entropy import logits_to_gradient_
from meshwright.engine.kernels.fp8 import to_fp8
from meshwright.engine.kernels.linears import tune_linears, use_fp8
from meshwright.engine.kernels.matmul import product
from meshwright.engine.kernels.norms import fuse_norms
from meshwright.engine.kernels.optimizer_kernels import adamw_, scale_unless_one_, sum_of_squares
from meshwright.engine.kernels.residuals import fuse_residuals

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
DTYPE = torch.bfloat16 if GPU else torch.float32
SLOT_S = 0.15  # long enough for the clock to settle under the power limit
LR, BETAS, EPS, DECAY = 1e-4, (0.9, 0.999), 1e-8, 0.01
SHAPES = {
    "8b": {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336, "vocab_size": 128256},
    "1b": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "head_dim": 64,
    },
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 160, "vocab_size": 512, "head_dim": 16},
}


@dataclass(frozen=True)
class Case:
    """One training setup."""

    name: str
    shape: str = "8b"
    micro_batch: int = 3
    engine_loss: bool = False
    engine_optimizer: bool = False
    norms: bool = False
    tuned: bool = False
    folded: bool = False
    fp8: str = ""
    seq: int = 4096
    warm: int = 3
    steps: int = 6


PLAIN = Case("plain")
HEAD = replace(PLAIN, name="+ loss with gradients in the forward pass", engine_loss=True)
OPTIMIZER = replace(HEAD, name="+ AdamW and clipping in one pass", engine_optimizer=True)
NORMS = replace(OPTIMIZER, name="+ fused norms", norms=True)
BATCH = replace(NORMS, name="+ micro batch 5", micro_batch=5)
TUNED = replace(BATCH, name="+ tuned GEMMs", tuned=True)
FOLDED = replace(TUNED, name="+ residuals added by the GEMMs", folded=True)
CASES = {
    "plain": PLAIN,
    "head": HEAD,
    "optimizer": OPTIMIZER,
    "norms": NORMS,
    "batch": BATCH,
    "tuned": TUNED,
    "folded": FOLDED,
    "fp8": replace(NORMS, name="fp8, micro batch 6", micro_batch=6, fp8="exact"),
    "fp8fast": replace(NORMS, name="fp8 with fast accumulation, micro batch 6", micro_batch=6, fp8="fast"),
    "plain1b": Case("plain 1b", shape="1b", micro_batch=8),
    "norms1b": replace(NORMS, name="1b, all but the tuned GEMMs", shape="1b", micro_batch=8),
    "folded1b": replace(FOLDED, name="1b, everything", shape="1b", micro_batch=8),
}


# --- measurement -------------------------------------------------------------------------------------------------


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Return the GPU time of one call."""
    call()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats


def tflops(call: Callable[[], object], flop: float) -> int:
    """Return the TFLOP/s of a call, measured long enough for the clock to settle."""
    repeats = max(3, int(SLOT_S / seconds(call, 3)))
    return round(flop / seconds(call, repeats) / 1e12)


class Joules:
    """The GPU's energy counter."""

    def __init__(self) -> None:
        self.lib = ctypes.CDLL("libnvidia-ml.so.1")
        self.lib.nvmlInit_v2()
        self.device = ctypes.c_void_p()
        self.lib.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self.device))

    def read(self) -> float:
        """Return the joules since the driver was loaded."""
        value = ctypes.c_ulonglong()
        self.lib.nvmlDeviceGetTotalEnergyConsumption(self.device, ctypes.byref(value))
        return value.value / 1e3


# --- single operations -------------------------------------------------------------------------------------------


def products(tokens: int = 20480, chunk: int = 4096) -> dict[str, Any]:
    """Compare torch's GEMMs with the tuned ones, in alternating slots."""
    rates = {}
    shapes = ((4096, 4096, tokens), (4096, 14336, tokens), (14336, 4096, tokens), (4096, 128256, chunk))
    for inner, outer, rows in shapes:
        hidden = torch.randn(rows, inner, device=DEVICE, dtype=DTYPE)
        weight = torch.randn(outer, inner, device=DEVICE, dtype=DTYPE) * 0.02
        gradient = torch.randn(rows, outer, device=DEVICE, dtype=DTYPE) * 1e-3
        for left, right, left_t, right_t in (
            (hidden, weight, False, True),
            (gradient, weight, False, False),
            (gradient, hidden, True, False),
        ):
            rates[f"{rows} {inner} {outer} {left_t} {right_t}"] = _compare(left, right, left_t, right_t)
    return rates


def _compare(left: Tensor, right: Tensor, left_t: bool, right_t: bool) -> dict[str, Any]:
    def plain() -> Tensor:
        return (left.t() if left_t else left) @ (right.t() if right_t else right)

    def tuned() -> Tensor:
        return product(left, right, left_t, right_t)

    expected = plain().float()
    error = ((tuned().float() - expected).norm() / expected.norm()).item()
    flop = 2.0 * expected.numel() * left.shape[not left_t]
    del expected
    return {"torch, tuned, torch, tuned": [tflops(call, flop) for call in (plain, tuned) * 2], "error": error}


def attention(batch: int = 3, seq: int = 4096, heads: int = 32, kv_heads: int = 8, width: int = 128) -> dict[str, Any]:
    """Return the TFLOP/s of causal attention forward and backward per torch kernel, counting half of the scores."""
    flop = 2.0 * batch * heads * seq * seq * width
    rates = {}
    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
        leaves = [
            torch.randn(batch, seq, count, width, device=DEVICE, dtype=DTYPE).transpose(1, 2).requires_grad_()
            for count in (heads, kv_heads, kv_heads)
        ]

        def forward(leaves: list[Tensor] = leaves) -> Tensor:
            return functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)

        def both(leaves: list[Tensor] = leaves, forward: Callable[[], Tensor] = forward) -> object:
            out = forward()
            return torch.autograd.grad(out, leaves, torch.ones_like(out))

        with sdpa_kernel([backend]):
            forward_s, total_s = seconds(forward, 60), seconds(both, 30)
        rates[name] = [round(flop / forward_s / 1e12), round(2.5 * flop / (total_s - forward_s) / 1e12)]
    return rates


def fp8_products(tokens: int = 12288) -> dict[str, Any]:
    """Return the TFLOP/s of fp8 GEMMs with fast and with fp32 accumulation."""
    rates = {}
    for rows, inner, columns in ((tokens, 4096, 14336), (tokens, 14336, 4096), (14336, tokens, 4096)):
        left, left_unit = to_fp8(torch.randn(rows, inner, device=DEVICE), torch.float8_e4m3fn)
        right, right_unit = to_fp8(torch.randn(columns, inner, device=DEVICE), torch.float8_e4m3fn)

        def run(
            fast: bool, pair: tuple[Tensor, Tensor] = (left, right), units: tuple[Tensor, ...] = (left_unit, right_unit)
        ) -> Tensor:
            return torch._scaled_mm(
                pair[0], pair[1].t(), scale_a=units[0], scale_b=units[1], out_dtype=DTYPE, use_fast_accum=fast
            )

        flop = 2.0 * rows * inner * columns
        rates[f"{rows} {inner} {columns}"] = [
            tflops(lambda run=run: run(True), flop),
            tflops(lambda run=run: run(False), flop),
        ]
    return rates


OPERATIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "products": products,
    "attention": attention,
    "fp8_products": fp8_products,
}


# --- training steps ----------------------------------------------------------------------------------------------


def build(case: Case) -> Any:
    """Build the model of a case with its kernels and compiled blocks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = SHAPES[case.shape if GPU else "tiny"]
    heads = shape["hidden_size"] // shape.get("head_dim", 128)
    config = LlamaConfig(
        **shape,
        num_attention_heads=heads,
        num_key_value_heads=8 if GPU else 2,
        max_position_embeddings=8192,
        tie_word_embeddings=case.shape == "1b",
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        attn_implementation="sdpa",
        use_cache=False,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(DTYPE)
    with DEVICE:
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    if case.norms:
        fuse_norms(model)
    if case.tuned:
        tune_linears(model.model.layers)
    if case.folded:
        fuse_residuals(model)
    if case.fp8:
        use_fp8(model.model.layers, exact_gradients=case.fp8 == "exact")
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend="inductor" if GPU else "aot_eager")
    return model.train()


def loss_of(case: Case, model: Any, tokens: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss, computed as the engine does: block by block, then the head."""
    inner = model.model
    hidden = inner.embed_tokens(tokens)
    rope = inner.rotary_emb(hidden, torch.arange(tokens.shape[1], device=DEVICE)[None])
    for layer in inner.layers:
        hidden = layer(hidden, position_embeddings=rope)
    hidden, labels, weight = inner.norm(hidden).flatten(0, 1), labels.flatten(), model.lm_head.weight
    if case.engine_loss:
        return HeadLoss.apply(hidden, weight, labels, case.tuned)

    def part(rows: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy((rows @ weight.t()).float(), targets, reduction="sum")

    parts = zip(hidden.chunk(8), labels.chunk(8), strict=True)
    return torch.stack([checkpoint(part, *rows, use_reentrant=False) for rows in parts]).sum() / labels.numel()


def plain_product(left: Tensor, right: Tensor, left_t: bool, right_t: bool) -> Tensor:
    """Multiply with torch."""
    return (left.t() if left_t else left) @ (right.t() if right_t else right)


class HeadLoss(torch.autograd.Function):
    """The lm_head loss with gradients computed in the forward pass, 4,096 tokens at a time."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, tuned: bool) -> Tensor:
        multiply = product if tuned else plain_product
        per_token = torch.full((labels.numel(),), 1.0 / labels.numel(), device=hidden.device)
        grad_hidden, grad_weight, losses = [], None, []
        for rows, targets, weights in zip(hidden.split(4096), labels.split(4096), per_token.split(4096), strict=True):
            logits = multiply(rows, weight, False, True)
            log_sum, target = logits_to_gradient_(logits, targets, weights)
            losses.append(((log_sum - target) * weights).sum())
            grad_hidden.append(multiply(logits, weight, False, False))
            if grad_weight is None:
                grad_weight = multiply(logits, rows, True, False)
            else:
                grad_weight.addmm_(logits.t(), rows)
        ctx.save_for_backward(torch.cat(grad_hidden), grad_weight)
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return *(scale_unless_one_(one, gradient) for one in ctx.saved_tensors), None, None


class Updates:
    """Gradient clipping and AdamW, of torch or of the engine."""

    def __init__(self, model: nn.Module, use_engine: bool) -> None:
        self.parameters = list(model.parameters())
        self.torch_optimizer = None if use_engine else torch.optim.AdamW(
            self.parameters, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=GPU
        )  # fmt: skip
        self.moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in self.parameters] if use_engine else []
        self.count = 0

    def step(self) -> None:
        """Update the parameters and free the gradients."""
        if self.torch_optimizer is not None:
            nn.utils.clip_grad_norm_(self.parameters, 1.0)
            self.torch_optimizer.step()
            self.torch_optimizer.zero_grad(set_to_none=True)
            return
        self.count += 1
        with torch.no_grad():
            norm = sum_of_squares([p.grad for p in self.parameters]).sqrt()
            factor = (1.0 / (norm + 1e-6)).clamp(max=1.0)
            settings = {"step": self.count, "lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
            for parameter, (first, second) in zip(self.parameters, self.moments, strict=True):
                adamw_(parameter, parameter.grad, first, second, factor, **settings)
                parameter.grad = None


def train(case: Case) -> dict[str, Any]:
    """Train on random tokens: return tokens per second, memory and time per kernel group."""
    started = time.time()
    torch._dynamo.reset()
    model = build(case)
    updates = Updates(model, case.engine_optimizer)
    seq = case.seq if GPU else 32
    generator = torch.Generator(device=DEVICE).manual_seed(1)
    losses: list[Tensor] = []

    def step() -> None:
        shape = (case.micro_batch, seq + 1)
        tokens = torch.randint(model.config.vocab_size, shape, device=DEVICE, generator=generator)
        loss = loss_of(case, model, tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        updates.step()
        losses.append(loss.detach())

    for _ in range(case.warm):
        step()
    row: dict[str, Any] = {"case": case.name, "losses": [round(loss.item(), 4) for loss in losses]}
    if GPU:
        row["until_warm_s"] = time.time() - started
        row |= _timed(step, case, seq)
        row["kernels_us_per_token"] = _profile(step, case.micro_batch * seq)
    return row


def _timed(step: Callable[[], None], case: Case, seq: int) -> dict[str, float]:
    torch.cuda.reset_peak_memory_stats()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(case.steps + 1)]
    joules = Joules()
    before = joules.read()
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    energy = joules.read() - before
    each = [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]
    mean = sum(each) / len(each)
    tokens = case.micro_batch * seq
    return {
        "tokens_per_s": tokens / mean,
        "spread": (max(each) - min(each)) / mean,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "mj_per_token": energy / case.steps / tokens * 1e3,
    }


GROUPS = {"nvjet": "products", "gemm": "products", "cudnn": "attention", "flash": "attention", "adam": "updates"}


def _profile(step: Callable[[], None], tokens: int) -> dict[str, float]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        step()
        torch.cuda.synchronize()
    groups: dict[str, float] = defaultdict(float)
    for event in recorded.key_averages():
        group = next((group for word, group in GROUPS.items() if word in event.key.lower()), "rest")
        groups[group] += event.self_device_time_total / tokens
    return {group: round(time_, 3) for group, time_ in groups.items()}


def main(out: Path, names: list[str]) -> None:
    """Run the named cases in order and save after each."""
    results: dict[str, Any] = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name() if GPU else "cpu"}
    for name in names:
        try:
            results[name] = OPERATIONS[name]() if name in OPERATIONS else train(CASES[name])
        except Exception:  # continue with the next case
            results[name] = {"error": traceback.format_exc()}
        base = results.get("plain1b" if name.endswith("1b") else "plain", {}).get("tokens_per_s")
        if base and "tokens_per_s" in results[name]:
            results[name]["ratio"] = results[name]["tokens_per_s"] / base
        print(name, json.dumps(results[name]), flush=True)
        out.write_text(json.dumps(results, indent=1) + "\n")
        gc.collect()
        with contextlib.suppress(Exception):
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
