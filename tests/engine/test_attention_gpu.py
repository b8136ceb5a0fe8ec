"""The CUDA kernels of attention against its definition: `python tests/engine/test_attention_gpu.py` prints a table.

Under pytest the script runs in its own process, because forked ranks and an initialized CUDA do not mix.
"""

from __future__ import annotations

import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.engine.attention_cases import Case, distance, expected, inputs, options  # noqa: E402

from meshwright.engine.attention import attend  # noqa: E402
from meshwright.engine.attention.cp_layout import Span, chunk_spans  # noqa: E402
from meshwright.engine.attention.mask_spec import AttentionSpec  # noqa: E402
from meshwright.engine.attention.ring import RingLayout, attend_blocks  # noqa: E402

TOKENS = 1000  # not a multiple of any kernel's block
PLAIN = {
    "plain": Case(8, 8, 64, 64),
    "gqa": Case(8, 2, 128, 128),
    "mla": Case(8, 8, 192, 128),
    "wide heads": Case(4, 2, 256, 256),
    "both sides": Case(8, 2, 64, 64, causal=False),
}
SPECIAL = {
    "window": Case(8, 2, 64, 64, window=100),
    "softcap": Case(8, 4, 256, 256, softcap=2.0),
    "sinks": Case(8, 1, 64, 64, sinks=True),
    "window and sinks": Case(8, 1, 64, 64, sinks=True, window=128),
    "documents": Case(8, 2, 128, 128, documents=True),
    "mla documents": Case(8, 8, 192, 128, documents=True),
    "everything": Case(8, 2, 64, 64, window=100, softcap=2.0, sinks=True, documents=True),
}
CASES = PLAIN | SPECIAL
TOLERANCE = {torch.bfloat16: 0.03, torch.float32: 1e-4}
Result = dict[str, Tensor]


def on_gpu(case: Case, dtype: torch.dtype, tokens: int = TOKENS) -> Result:
    given = inputs(case, tokens)
    return {name: x.cuda() if x.dtype == torch.int64 else x.to("cuda", dtype) for name, x in given.items()}


def leaves(given: Result) -> Result:
    return {name: given[name].clone().requires_grad_() for name in ("q", "k", "v", "sinks") if name in given}


def graded(out: Tensor, inside: Result, grad: Tensor) -> Result:
    out.backward(grad)
    return {"out": out.detach()} | {name: x.grad for name, x in inside.items() if x.grad is not None}


def attended(case: Case, given: Result, kernel: str, compiled: bool = False) -> Result:
    module: Any = types.SimpleNamespace(kernel=kernel)
    inside, more = leaves(given), options(case, given)

    def layer(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        return attend(module, q, k, v, s_aux=sinks, **more)[0]

    call = torch.compile(layer, fullgraph=True) if compiled else layer
    return graded(call(**inside), inside, given["grad"])


def by_blocks(case: Case, given: Result, ring: int = 2) -> Result:
    """Compute what the ranks of a ring compute, one after another, with all keys local."""
    length, inside = TOKENS // (2 * ring), leaves(given)
    keys = tuple(Span(at, at, length) for at in range(0, TOKENS, length))
    spec, ids = AttentionSpec(case.width**-0.5, case.causal, case.window, case.softcap), given.get("documents")
    whole = []
    for rank in range(ring):
        spans = chunk_spans(TOKENS, ring, rank)
        mine = torch.cat([torch.arange(span.position, span.end) for span in spans]).cuda()
        pair = None if ids is None else (ids[:, mine], ids)
        layout = RingLayout(spans, (keys,))
        out = attend_blocks(inside["q"][:, :, mine], inside["k"], inside["v"], spec, layout, inside.get("sinks"), pair)
        whole.append(torch.zeros(*inside["q"].shape[:-1], out.shape[-1], **like(out)).index_add(2, mine, out))
    return graded(sum(whole).transpose(1, 2), inside, given["grad"])


def like(x: Tensor) -> dict[str, Any]:
    return {"dtype": x.dtype, "device": x.device}


def kernel_calls() -> Iterator[tuple[str, Case, torch.dtype, Callable[[Case, Result], Result]]]:
    """Yield every kernel with its case."""
    half, full = torch.bfloat16, torch.float32
    for name, case in CASES.items():
        for kernel in ("auto", "flex", "eager"):
            yield f"{kernel}: {name}", case, half, lambda c, g, k=kernel: attended(c, g, k)
        yield f"auto fp32: {name}", case, full, lambda c, g: attended(c, g, "auto")
        yield f"blocks: {name}", case, half, by_blocks
        yield f"blocks fp32: {name}", case, full, by_blocks
    for name in ("plain", "gqa", "mla"):
        for kernel in ("cudnn", "flash", "sdpa"):
            yield f"{kernel}: {name}", PLAIN[name], half, lambda c, g, k=kernel: attended(c, g, k)
    for name in ("gqa", "mla", "everything"):
        yield f"compiled: {name}", CASES[name], half, lambda c, g: attended(c, g, "auto", compiled=True)


def check_kernels() -> list[str]:
    """Print the largest difference of each kernel; return the failures."""
    wrong = []
    for label, case, dtype, call in kernel_calls():
        given = on_gpu(case, dtype)
        torch._dynamo.reset()
        try:
            found, wanted = call(case, given), expected(case, given)
            errors = {part: distance(found[part], wanted[part]) for part in wanted}
            message = " ".join(f"{part} {error:.1e}" for part, error in errors.items())
            good = found.keys() == wanted.keys() and all(error < TOLERANCE[dtype] for error in errors.values())
        except Exception as error:  # one kernel that fails must not hide the others
            message, good = f"{type(error).__name__}: {str(error)[:300]}", False
        print(f"{'ok   ' if good else 'WRONG'} {label:28} {message}", flush=True)
        wrong += [] if good else [label]
    return wrong


def check_lengths() -> list[str]:
    """Check that many sequence lengths, as in fine-tuning, do not exceed the recompile limit."""
    case = SPECIAL["window and sinks"]
    try:
        torch._dynamo.reset()
        for tokens in range(200, 1400, 100):
            given = on_gpu(case, torch.bfloat16, tokens)
            found, wanted = attended(case, given, "auto"), expected(case, given)
            worst = max(distance(found[part], wanted[part]) for part in wanted)
            if not worst < TOLERANCE[torch.bfloat16]:
                raise ArithmeticError(f"{tokens} tokens: {worst:.1e}")
        print("ok    twelve lengths")
        return []
    except Exception as error:
        print(f"WRONG twelve lengths: {type(error).__name__}: {str(error)[:600]}")
        return ["twelve lengths"]


def check_memory_and_time(tokens: int = 16384) -> list[str]:
    """Check that no kernel but eager allocates the score matrix (16 GiB); print GiB and ms of a step."""
    cases = {
        "gqa": Case(32, 8, 128, 128),
        "mla": Case(32, 32, 192, 128),
        "window": Case(32, 8, 128, 128, window=1024),
        "sinks": Case(32, 8, 64, 64, sinks=True),
        "documents": Case(32, 8, 128, 128, documents=True),
        "softcap": Case(32, 8, 128, 128, softcap=30.0),
    }
    wrong = []
    for name, case in cases.items():
        for kernel in ("auto", "cudnn", "flash", "flex") if name == "gqa" else ("auto", "flex"):
            given = {part: x[:1] if part != "sinks" else x for part, x in on_gpu(case, torch.bfloat16, tokens).items()}
            try:
                torch._dynamo.reset()
                attended(case, given, kernel)
                torch.cuda.reset_peak_memory_stats()
                allocated, start = torch.cuda.memory_allocated(), synchronized_time()
                for _ in range(3):
                    attended(case, given, kernel)
                gib, ms = (torch.cuda.max_memory_allocated() - allocated) / 2**30, (synchronized_time() - start) / 3e-3
                message, good = f"{gib:5.2f} GiB {ms:7.1f} ms", gib < 4
            except Exception as error:
                message, good = f"{type(error).__name__}: {str(error)[:300]}", False
            print(f"{'ok   ' if good else 'WRONG'} 16k {kernel + ': ' + name:24} {message}", flush=True)
            wrong += [] if good else [f"16k {kernel}: {name}"]
    return wrong


def synchronized_time() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def test_cuda_kernels_compute_attention() -> None:
    import pytest

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    torch.manual_seed(0)
    failed = check_kernels() + check_lengths() + check_memory_and_time()
    print(f"torch {torch.__version__}: " + (f"{len(failed)} wrong: {failed}" if failed else "all right"))
    sys.exit(bool(failed))
