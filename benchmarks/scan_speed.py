"""Compare the Mamba-2 and gated delta rule kernels: ours in torch operations and in Triton, those of
flash-linear-attention (fla) and transformers' reference, which runs if no kernel is installed: time and memory of a
forward and a backward pass, and errors.

    python -m benchmarks.scan_speed OUT.json [--only=WORDS] [--tiny] [--unguarded]

`--only` runs the cases whose names contain the words.

Kernels alternate on the same bf16 inputs; times are medians. `fla` is what the engine runs (custom ops that save their
inputs and run fla's forward again in the backward pass), `fla_autograd` is fla's own autograd function. Packed rows
have eight documents per 4,096 tokens: ours and the reference run documents as padded rows, fla and the Triton scan of
Mamba-2 get their boundaries. The Triton kernels run bf16 inputs only: from fp32 inputs, their errors are of ours.
Errors of the output and of the worst gradient are relative to the largest value, against ours in fp64 on the first 512
tokens (the tests compare that with the recurrence token by token), from bf16 and from fp32 inputs.

Triton 3.4 to 3.7.0 compiles a kernel of fla wrongly for Hopper GPUs, and fla refuses to run there. `--unguarded` lifts
that to see whether these shapes are affected: compare the errors. Never train with it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from importlib.util import find_spec
from inspect import unwrap
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from transformers.models.nemotron_h import modeling_nemotron_h as nemotron
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from meshwright.engine.kernels import delta_rule, delta_rule_triton, fla_scan, state_space, state_space_triton
from meshwright.engine.kernels.scan_patch import use_chunked_scans
from meshwright.engine.model_families import family_of
from meshwright.engine.parallelize.document_isolation import document_rows, isolate_documents
from meshwright.models import GatedDelta, Mamba2, find
from meshwright.recipes import load

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
TINY = "--tiny" in sys.argv
REPEATS = 2 if TINY else 7
ERROR_TOKENS = 64 if TINY else 512
SHARES = (0.02, 0.05, 0.08, 0.1, 0.12, 0.15, 0.18, 0.3)  # of a sample's tokens, by document
Scan = Callable[..., Tensor]


class Scans(NamedTuple):
    """The kernels of a kind of layer, all with the arguments of ours, and `documents`."""

    tensors: Callable[[int], list[Tensor]]
    kernels: dict[str, Scan]


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.float32).to(dtype)


def document_ids(tokens: int) -> Tensor:
    """The ids of eight documents [1, tokens]."""
    lengths = [int(share * tokens) for share in SHARES]
    lengths[-1] += tokens - sum(lengths)
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None].to(DEVICE)


def by_rows(scan: Scan) -> Scan:
    """A scan of padded rows with one document each, as the engine runs mixers whose kernels have no boundaries."""

    def isolated(*tensors: Tensor, documents: Tensor | None = None) -> Tensor:
        if documents is None:
            return scan(*tensors)
        count, tokens = documents.numel(), []
        out: list[Tensor] = []
        for rows in document_rows(documents.cpu()):
            rows = rows.to(DEVICE)
            inside = (rows >= 0).flatten().nonzero().flatten()
            at = rows.clamp(min=0)
            parts = [one.flatten(0, 1)[at] if one.dim() > 2 and one.shape[1] == count else one for one in tensors]
            out.append(scan(*parts).flatten(0, 1)[inside])
            tokens.append(rows.flatten()[inside])
        return torch.cat(out)[torch.cat(tokens).argsort()][None]

    return isolated


def mixer_shape(model: str, cls: Any, *heads: str) -> Any:
    """The shape of a model's mixers; with --tiny an eighth of its heads."""
    shape: Any = next(iter(find(model).mixers(cls)))[0]
    return msgspec.structs.replace(shape, **{name: getattr(shape, name) // 8 for name in heads}) if TINY else shape


def state_spaces(model: str) -> Scans:
    """The Mamba-2 scans of a model."""
    shape = mixer_shape(model, Mamba2, "heads", "groups")

    def tensors(tokens: int) -> list[Tensor]:
        x, dt = normal(1, tokens, shape.heads, shape.head_dim), normal(1, tokens, shape.heads)
        b, c = (normal(1, tokens, shape.groups, shape.state) for _ in range(2))
        a = -torch.linspace(1, 16, shape.heads, device=DEVICE)
        bias = normal(shape.heads, dtype=torch.float32) - 4
        return [x, dt, a, b, c, torch.ones(shape.heads, device=DEVICE), bias]

    def reference(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, bias: Tensor) -> Tensor:
        scan: Any = unwrap(nemotron.mamba2_chunk_scan)  # transformers' wrapper takes mamba_ssm if it is installed
        out: Tensor = scan(x, dt, a, b, c, chunk_size=128, D=skip, dt_bias=bias, dt_softplus=True)
        return out

    def direct(*tensors: Tensor, documents: Tensor | None = None) -> Tensor:
        return fla_scan._state_space(*tensors, True, 0.0, float("inf"), documents)

    def triton_scan(*tensors: Tensor, documents: Tensor | None = None) -> Tensor:
        if not state_space_triton.runs(tensors[0], *tensors[3:5]):
            return by_rows(partial(state_space.state_space_scan, softplus=True))(*tensors, documents=documents)
        return state_space_triton.state_space_scan(*tensors, softplus=True, documents=documents)

    kernels = {
        "ours": by_rows(partial(state_space.state_space_scan, softplus=True)),
        "triton": triton_scan,
        "fla": partial(fla_scan.state_space_scan, softplus=True),
        "fla_autograd": direct,
        "reference": by_rows(reference),
    }
    return Scans(tensors, kernels)


def deltas(model: str) -> Scans:
    """The gated delta rules of a model."""
    shape = mixer_shape(model, GatedDelta, "k_heads", "v_heads")

    def tensors(tokens: int) -> list[Tensor]:
        q, k = (normal(1, tokens, shape.k_heads, shape.k_head_dim) for _ in range(2))
        v = normal(1, tokens, shape.v_heads, shape.v_head_dim)
        g = -torch.rand(1, tokens, shape.v_heads, device=DEVICE) * 0.2
        return [q, k, v, g, torch.rand(1, tokens, shape.v_heads, device=DEVICE).to(torch.bfloat16)]

    def reference(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        rule: Any = unwrap(qwen.torch_chunk_gated_delta_rule)  # transformers' wrapper takes fla if it is installed
        q, k = (one.repeat_interleave(v.shape[2] // one.shape[2], 2) for one in (q, k))
        out: Tensor = rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]
        return out

    def direct(*tensors: Tensor, documents: Tensor | None = None) -> Tensor:
        return fla_scan._delta(*tensors, True, documents)

    kernels = {
        "ours": by_rows(partial(delta_rule.gated_delta_rule, norm=True)),
        "triton": partial(delta_rule_triton.gated_delta_rule, norm=True),
        "fla": partial(fla_scan.gated_delta_rule, norm=True),
        "fla_autograd": direct,
        "reference": by_rows(reference),
    }
    return Scans(tensors, kernels)


def mixers(recipe: str, cls: Any) -> Scans:
    """The whole mixer of a recipe's model (projections, convolution, scan and norm) with each kernel."""
    given = load(recipe)
    config = family_of(given).config_for(given).get_text_config()
    for name in ("hidden_size", "mamba_num_heads", "n_groups", "linear_num_key_heads", "linear_num_value_heads"):
        if TINY and hasattr(config, name):
            setattr(config, name, getattr(config, name) // 8)
    made: dict[str, Any] = {}
    for kernel in ("torch", "triton", "fla"):
        torch.manual_seed(1)
        with torch.device(DEVICE):
            mixer = cls(config, config.layer_types.index("linear_attention")).to(torch.bfloat16)
        holder = nn.ModuleList([mixer])
        use_chunked_scans(holder, kernel)
        isolate_documents(holder)
        made[kernel] = mixer
    names = [name for name, _ in made["torch"].named_parameters()]

    def tensors(tokens: int) -> list[Tensor]:
        weights = [one.detach() * 0.02 if one.dim() > 1 else one.detach() for one in made["torch"].parameters()]
        return [normal(1, tokens, config.hidden_size), *weights]

    def run(kernel: str, hidden: Tensor, *weights: Tensor, documents: Tensor | None = None) -> Tensor:
        options = {} if documents is None else {"documents": documents}
        named = dict(zip(names, weights, strict=True))
        out: Tensor = torch.func.functional_call(made[kernel], named, (hidden,), options)
        return out

    return Scans(tensors, {"ours": partial(run, "torch"), **{key: partial(run, key) for key in ("triton", "fla")}})


SHORT, LONG = (128, 256) if TINY else (4096, 8192)
NEMOTRON, NANO = partial(state_spaces, "nemotronh_8b"), partial(state_spaces, "nemotron_nano_9b_v2")
NEXT, SMALL = partial(deltas, "qwen3_next_80b_a3b"), partial(deltas, "qwen35_2b")
NEMOTRON_MIXER = partial(mixers, "nemotronh_8b_pretrain_config", nemotron.NemotronHMamba2Mixer)
NEXT_MIXER = partial(mixers, "qwen3_next_80b_a3b_pretrain_config", qwen.Qwen3NextGatedDeltaNet)
# The scans, the tokens, and whether they are packed documents. The reference of Mamba-2 runs out of memory at 8k.
CASES: dict[str, tuple[Callable[[], Scans], int, bool]] = {
    "Mamba-2 of Nemotron-H 8B, 4k": (NEMOTRON, SHORT, False),
    "Mamba-2 of Nemotron-H 8B, 4k, 8 documents": (NEMOTRON, SHORT, True),
    "Mamba-2 of Nemotron Nano 9B v2, 4k": (NANO, SHORT, False),
    "Mamba-2 of Nemotron Nano 9B v2, 8k, 8 documents": (NANO, LONG, True),
    "gated delta rule of Qwen3-Next and Qwen3.5 9B, 4k": (NEXT, SHORT, False),
    "gated delta rule of Qwen3-Next and Qwen3.5 9B, 4k, 8 documents": (NEXT, SHORT, True),
    "gated delta rule of Qwen3-Next and Qwen3.5 9B, 8k": (NEXT, LONG, False),
    "gated delta rule of Qwen3.5 2B, 4k": (SMALL, SHORT, False),
    "whole Mamba-2 mixer of Nemotron-H 8B, 4k": (NEMOTRON_MIXER, SHORT, False),
    "whole Mamba-2 mixer of Nemotron-H 8B, 4k, 8 documents": (NEMOTRON_MIXER, SHORT, True),
    "whole gated delta mixer of Qwen3-Next, 4k": (NEXT_MIXER, SHORT, False),
    "whole gated delta mixer of Qwen3-Next, 4k, 8 documents": (NEXT_MIXER, SHORT, True),
}


def passes(scan: Scan, tensors: list[Tensor], documents: Tensor | None, weights: Tensor | None) -> list[Tensor]:
    """Return the output and all gradients, for a loss with these weights of the output."""
    tensors = [one.detach().requires_grad_() for one in tensors]
    out = scan(*tensors, documents=documents)
    given = torch.ones_like(out) if weights is None else weights.to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, tensors, given)]


def timed(scan: Scan, tensors: list[Tensor], documents: Tensor | None, weights: Tensor) -> tuple[float, float]:
    """Return the seconds and the additional peak GiB (0 without a GPU)."""
    start = 0
    if ON_GPU:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
    started = time.perf_counter()
    passes(scan, tensors, documents, weights)
    if ON_GPU:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    return seconds, (torch.cuda.max_memory_allocated() - start) / 2**30 if ON_GPU else 0.0


def distances(found: list[Tensor], expected: list[Tensor]) -> dict[str, float]:
    """Return the largest error of the output and of any gradient, each relative to its largest expected value."""
    each = [float((f.double() - e).abs().max() / e.abs().max()) for f, e in zip(found, expected, strict=True)]
    return {"output": each[0], "gradients": max(each[1:])}


def errors(scans: Scans, runs: dict[str, Scan], packed: bool) -> dict[str, dict[str, Any]]:
    """Return by kernel the errors from bf16 and from fp32 inputs, against ours in fp64."""
    tensors = scans.tensors(ERROR_TOKENS)
    documents = document_ids(ERROR_TOKENS) if packed else None
    made = passes(scans.kernels["ours"], tensors, documents, None)[0]
    weights = normal(*made.shape)
    exact = passes(scans.kernels["ours"], [one.double() for one in tensors], documents, weights)
    found: dict[str, dict[str, Any]] = {}
    for key, scan in runs.items():
        fp32 = passes(scan, [one.float() for one in tensors], documents, weights)
        found[key] = {
            "bf16": distances(passes(scan, tensors, documents, weights), exact),
            "fp32": distances(fp32, exact),
        }
    return found


def row(name: str) -> dict[str, Any]:
    """Return the row of a case: all kernels alternating, and their errors."""
    make, tokens, packed = CASES[name]
    torch.manual_seed(0)
    scans = make()
    tensors, documents = scans.tensors(tokens), document_ids(tokens) if packed else None
    runs, failed = {}, {}
    weights = None
    for key, scan in scans.kernels.items():
        if missing := next((one for one in ("fla", "triton") if key.startswith(one) and find_spec(one) is None), ""):
            failed[key] = f"{missing} is not installed"
            continue
        try:
            weights = normal(*passes(scan, tensors, documents, weights)[0].shape)
            passes(scan, tensors, documents, weights)
            runs[key] = scan
        except (RuntimeError, torch.OutOfMemoryError) as error:
            failed[key] = str(error).strip().splitlines()[0][:200]
    assert weights is not None, failed
    repeats = [{key: timed(scan, tensors, documents, weights) for key, scan in runs.items()} for _ in range(REPEATS)]
    seconds = {key: median(repeat[key][0] for repeat in repeats) for key in runs}
    found = {
        "name": name,
        "times_faster_than_reference": _ratio(seconds, "reference", "ours"),
        "triton_times_faster_than_ours": _ratio(seconds, "ours", "triton"),
        "fla_times_faster_than_ours": _ratio(seconds, "ours", "fla"),
        "ms": {key: round(1000 * value, 2) for key, value in seconds.items()},
        "gib": {key: round(max(repeat[key][1] for repeat in repeats), 3) for key in runs},
        "failed": failed,
    }
    del tensors
    return {**found, "from_fp64": errors(scans, runs, packed)}


def _ratio(seconds: dict[str, float], slow: str, fast: str) -> float | None:
    return round(seconds[slow] / seconds[fast], 2) if slow in seconds and fast in seconds else None


def lift_guard() -> None:
    """Let fla run with the Triton versions that it refuses on Hopper GPUs."""
    from fla.ops.common import chunk_o

    chunk_o.TRITON_ABOVE_3_7_1 = True


def main() -> None:
    if "--unguarded" in sys.argv:
        lift_guard()
    rows = []
    words = next((word.removeprefix("--only=") for word in sys.argv if word.startswith("--only=")), "")
    for name in (name for name in CASES if words in name):
        rows.append(row(name))
        print(json.dumps(rows[-1]), flush=True)
        if ON_GPU:
            torch.cuda.empty_cache()
    device = torch.cuda.get_device_name() if ON_GPU else "CPU"
    command = " ".join(["python -m benchmarks.scan_speed OUT.json", *sys.argv[2:]])
    triton = ".".join(map(str, fla_scan._triton())) or None
    versions = {"torch": torch.__version__, "triton": triton}
    result = {"command": command, "date": str(date.today()), "device": device, **versions, "rows": rows}
    Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
