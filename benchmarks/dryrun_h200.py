"""Measure the GPU memory of our engine, for the comparison with the dry run.

    python -m benchmarks.dryrun_h200 measure OUT.json [--tiny] [--trace=FOLDER] [CASE ...]
    python -m benchmarks.dryrun_h200 workspaces OUT.json [--tiny]
    python -m benchmarks.dryrun_h200 join OUT.json PART.json ...

`measure` trains every case of benchmarks/dryrun_cases.py for a few steps, one after the other in one process, each
built like a run of one rank. For every phase it records the allocated bytes at its start, end and peak.
`workspaces` measures what single operations allocate besides their inputs and outputs. Cases are selected by name or
pattern (`llama*`); `plain_allocator` selects those that are also measured without expandable segments. The setting
is PYTORCH_CUDA_ALLOC_CONF and is recorded in every row. `--trace` also writes what the second step of every case
allocates and frees, one line each, to find where a prediction differs (torch 2.11 cannot trace a recompute that
stops early inside a custom autograd function). `--tiny` tests the script on a CPU: its numbers are all 0.
"""

from __future__ import annotations

import gc
import gzip
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # as our launch sets it
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import msgspec
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (torch's convention)
from benchmarks.dryrun_cases import CASES, STEPS, Case, recipe_of
from torch import Tensor

from meshwright.engine import losses
from meshwright.engine.attention.local import attend_local
from meshwright.engine.attention.mask_spec import AttentionSpec
from meshwright.engine.build_trainer import build_trainer
from meshwright.engine.experts.grouped_mm import grouped_mm
from meshwright.engine.kernels import matmul
from meshwright.engine.kernels.cross_entropy import logit_gradient, slice_statistics
from meshwright.engine.kernels.fp8 import fp8_linear
from meshwright.engine.kernels.nf4 import packed_shapes, unpack
from meshwright.engine.metrics.memory import optimizer_tensors
from meshwright.engine.model_families import family_of
from meshwright.engine.run_spec import RankSpec
from meshwright.engine.trainer import StepCallbacks, Trainer
from meshwright.engine.validate import validate
from meshwright.engine.worker import set_determinism
from meshwright.recipes.types import Kernels, Recipe

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
TINY = "--tiny" in sys.argv
TRACES = next((Path(a.partition("=")[2]) for a in sys.argv if a.startswith("--trace=")), None)
TRACED = 1  # number of the traced step: the first one with optimizer state
CONVENTION = """Bytes. For a case, allocated, requested and reserved are the peaks over its lifetime; a phase has the
bytes allocated at its start and end, and its peaks; before is allocated before anything is built, left after everything
is destroyed. For an operation, saved is what remains besides its outputs, transient what is allocated besides inputs,
outputs, saved tensors and gradients, and stays what libraries keep after the first call.""".replace("\n", " ")
SECONDS = float(os.environ.get("BENCH_SECONDS", "1e9"))  # no case is started after this


# --- allocator statistics ----------------------------------------------------------------------------------------


def allocated() -> int:
    """Return the allocated bytes after a synchronization."""
    if not ON_GPU:
        return 0
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def reset_peaks() -> None:
    """Reset the peak statistics."""
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()


def peaks() -> dict[str, int]:
    """Return peak allocated, requested and reserved bytes since the last reset."""
    if not ON_GPU:
        return dict.fromkeys(("peak", "requested_peak", "reserved_peak"), 0)
    return {
        "peak": torch.cuda.max_memory_allocated(),
        "requested_peak": torch.cuda.memory_stats()["requested_bytes.all.peak"],
        "reserved_peak": torch.cuda.max_memory_reserved(),
    }


def retries() -> int:
    """Return the number of allocation retries."""
    return torch.cuda.memory_stats().get("num_alloc_retries", 0) if ON_GPU else 0


def bytes_of(tensors: Iterable[Any]) -> int:
    """Return the bytes of the tensors' storages on the device, each counted once."""
    seen: dict[int, int] = {}
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if isinstance(local, Tensor) and local.device.type == DEVICE.type:
            storage = local.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


def clean() -> None:
    """Free all device memory, including library workspaces, as in a new process."""
    gc.collect()
    torch._dynamo.reset()
    matmul._library.cache_clear()
    gc.collect()
    if ON_GPU:
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


# --- cases -------------------------------------------------------------------------------------------------------


@dataclass
class Meter(StepCallbacks):
    """Records the memory of every phase of a step."""

    step: int = 0  # 0 during the build
    trainer: Trainer | None = None
    phases: list[dict[str, Any]] = field(default_factory=list)
    gradients: int = 0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Record a phase: bytes allocated at its start and end, and its peaks."""
        if name == "optimizer" and self.trainer is not None:
            self.gradients = bytes_of(p.grad for s in self.trainer.stages for p in s.parameters() if p.grad is not None)
        start = allocated()
        reset_peaks()
        yield
        end = allocated()
        self.phases.append({"step": self.step, "phase": name, "start": start, "end": end, **peaks()})

    def maximum(self, what: str) -> int:
        """Return the maximum of a value over all phases."""
        return max(int(phase[what]) for phase in self.phases)


def shrunk(recipe: Recipe, config: Any) -> tuple[Recipe, Any]:
    """Return the case for a CPU: same structure, small model, nothing compiled."""
    family, replace = family_of(recipe), msgspec.structs.replace
    config = family.tiny(config, max(2, family.layer_types(config)))
    return replace(
        recipe,
        data=replace(recipe.data, seq_length=64),
        kernels=Kernels(loss=recipe.kernels.loss, attention=recipe.kernels.attention),
    ), config


def spec_of(case: Case) -> RankSpec:
    """Return the rank spec of a single-rank run of a case, with random weights."""
    recipe = recipe_of(case)
    config = family_of(recipe).config_for(recipe)
    validated = validate(recipe, config, None, 1)
    if TINY:
        recipe, config = shrunk(recipe, config)
    return RankSpec(recipe=recipe, config=config.to_dict(), case=validated, folder="")


@contextmanager
def traced(name: str, number: int) -> Iterator[None]:
    """Write what a step allocates and frees, if tracing is on and this is the traced step."""
    if TRACES is None or number != TRACED or not ON_GPU:
        yield
        return
    torch.cuda.memory._record_memory_history(max_entries=10**6, stacks="python")
    try:
        yield
        torch.cuda.synchronize()
        entries = torch.cuda.memory._snapshot()["device_traces"][DEVICE.index]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    TRACES.mkdir(parents=True, exist_ok=True)
    with gzip.open(TRACES / f"{re.sub('[^a-z0-9]+', '_', name.lower())}.txt.gz", "wt") as file:
        file.writelines(events(entries))


def events(entries: list[Any]) -> Iterator[str]:
    """Yield a line per allocation (+ number, requested bytes, call site) and per free (-)."""
    numbers: dict[int, int] = {}  # by address, which later blocks reuse
    for number, entry in enumerate(entries):
        if entry["action"] == "alloc":
            numbers[entry["addr"]] = number
            yield f"+{number} {entry['size']} {call_site(entry['frames'])}\n"
        elif entry["action"] == "free_requested":
            yield f"-{numbers.pop(entry['addr'], 'before')} {entry['size']} {call_site(entry['frames'])}\n"


def call_site(frames: list[dict[str, Any]]) -> str:
    """Return the innermost frames in engine and model code of an allocation."""
    known = [f for f in frames if any(package in f["filename"] for package in ("meshwright", "transformers/models"))]
    inner = "/".join(Path(frames[0]["filename"]).parts[-2:]) + f":{frames[0]['line']}" if frames else "?"
    return " < ".join([inner, *(f"{Path(f['filename']).name}:{f['line']}:{f['name']}" for f in known[:4])])


def run_case(spec: RankSpec) -> dict[str, Any]:
    """Build the trainer of a spec, run its steps and return its memory use."""
    meter, before, retried = Meter(), allocated(), retries()
    set_determinism(spec.recipe, DEVICE)
    with meter.part("build"):
        trainer = build_trainer(spec, DEVICE)
    meter.trainer = trainer
    found: list[Any] = []
    for number in range(STEPS):
        meter.step = number + 1
        with traced(spec.recipe.name, number):
            found.append(trainer.step(number, meter).losses)
    parameters = [p for stage in trainer.stages for p in stage.parameters()]
    row = {
        "before": before,
        "allocated": meter.maximum("peak"),
        "requested": meter.maximum("requested_peak"),
        "reserved": meter.maximum("reserved_peak"),
        "retries": retries() - retried,
        "parameters": bytes_of(parameters),
        "buffers": bytes_of(b for stage in trainer.stages for b in stage.buffers()),
        "gradients": meter.gradients,
        "optimizer": bytes_of(optimizer_tensors(trainer.optimizer.state)),
        "after": allocated(),
        "losses": [round(float(loss.sum()), 4) for loss in found],
        "phases": meter.phases,
    }
    trainer.close()
    return row


def case_row(case: Case) -> dict[str, Any]:
    """Return the row of a case, with the error if it failed."""
    started = time.monotonic()
    row: dict[str, Any] = {"name": case.name, "allocator": os.environ["PYTORCH_CUDA_ALLOC_CONF"]}
    try:
        row |= run_case(spec_of(case))
    except Exception as error:
        row |= {"error": f"{type(error).__name__}: {error}"[:600], "where": traceback.format_exc()[-2500:]}
    return row | {"seconds": round(time.monotonic() - started, 1)}


def select_cases(names: list[str]) -> list[Case]:
    """Return the cases matching names or patterns, in the order of the names; all cases without names."""
    if not names:
        return list(CASES)
    found = [
        case
        for name in names
        for case in CASES
        if (case.plain_allocator if name == "plain_allocator" else fnmatch(case.name, name))
    ]
    return list(dict.fromkeys(found))


def measure(out: Path, names: list[str]) -> None:
    """Measure cases one after the other."""
    started = time.monotonic()
    backend, device_id = ("nccl", DEVICE) if ON_GPU else ("gloo", None)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=device_id)
    rows: list[dict[str, Any]] = []
    for case in select_cases(names):
        if time.monotonic() - started > SECONDS:
            print(f"{case.name}: skipped, out of time", flush=True)
            continue
        rows.append(case_row(case))
        clean()
        rows[-1]["left"] = allocated()
        print(format_row(rows[-1]), flush=True)
        save(out, {"rows": rows})
    dist.destroy_process_group()


def format_row(row: dict[str, Any]) -> str:
    """Format a row."""
    if "error" in row:
        return f"{row['name']:<34} {row['error']}\n{row['where']}"
    by_phase: dict[str, int] = {}
    for phase in row["phases"]:
        by_phase[phase["phase"]] = max(by_phase.get(phase["phase"], 0), phase["peak"])
    parts = "  ".join(f"{name} {gib(value)}" for name, value in by_phase.items())
    return (
        f"{row['name']:<34} allocated {gib(row['allocated'])}  reserved {gib(row['reserved'])}  {parts}  "
        f"{row['seconds']} s  loss {row['losses']}"
    )


def gib(count: int) -> str:
    """Format bytes as GiB."""
    return f"{count / 2**30:.3f}"


# --- single operations -------------------------------------------------------------------------------------------


class Probe(msgspec.Struct, frozen=True):
    """An operation and its inputs."""

    name: str
    inputs: Callable[[], list[Tensor]]
    run: Callable[..., Any]
    backward: bool = True


def size(full: int, tiny: int) -> int:
    """Return a size, smaller with --tiny."""
    return tiny if TINY else full


TOKENS, HIDDEN, VOCAB = size(8192, 64), size(4096, 64), size(128256, 512)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, requires_grad: bool = True) -> Tensor:
    """Return a random normal tensor on the device."""
    return torch.randn(*shape, dtype=dtype, device=DEVICE).requires_grad_(requires_grad)


def random_ints(maximum: int, *shape: int) -> Tensor:
    """Return random integers on the device."""
    return torch.randint(maximum, shape, device=DEVICE)


def heads(tokens: int, queries: int, keys: int, width: int, values: int, batch: int = 1) -> list[Tensor]:
    """Return queries, keys and values as projections output them: [batch, tokens, heads, width]."""
    shapes = ((queries, width), (keys, width), (keys, values))
    return [normal(batch, tokens, count, wide) for count, wide in shapes]


def attention(terms: AttentionSpec, kernel: str = "auto", **more: Any) -> Callable[..., Tensor]:
    """Return a function that calls attention like a layer."""

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        return attend_local(q, k, v, terms, sinks, kernel=kernel, **{n: make() for n, make in more.items()})

    return run


LONG = size(4096, 64)
PLAIN = AttentionSpec(scale=128**-0.5)


def gqa(tokens: int = LONG, batch: int = 2) -> list[Tensor]:
    return heads(tokens, size(32, 8), size(8, 2), size(128, 16), size(128, 16), batch)


def latent(batch: int = 2) -> list[Tensor]:
    """Return heads of multi-head latent attention: values narrower than keys."""
    return heads(LONG, size(16, 4), size(16, 4), size(192, 24), size(128, 16), batch)


def documents() -> Tensor:
    """Return document ids of four equally long documents per sample."""
    return (torch.arange(LONG, device=DEVICE) // (LONG // 4)).expand(2, -1).contiguous()


def grouped(experts: int = 8) -> list[Tensor]:
    inner = size(1536, 32)
    ends = torch.arange(1, experts + 1, device=DEVICE, dtype=torch.int32) * (TOKENS // experts)
    return [normal(TOKENS, HIDDEN), normal(experts, inner, HIDDEN), ends]


def statistics(logits: Tensor, labels: Tensor) -> Tensor:
    return losses._fast(slice_statistics, logits)(logits, labels, None)


def gradient(logits: Tensor, labels: Tensor, log_sum: Tensor, weights: Tensor) -> Tensor:
    return losses._fast(logit_gradient, logits)(logits, labels, log_sum, weights, 0.0, None)


ROWS = size(4096, 32)  # tokens of one block of the loss
WINDOW = size(1024, 16)


def block_of_logits() -> list[Tensor]:
    return [normal(ROWS, VOCAB, requires_grad=False), random_ints(VOCAB, ROWS)]


PROBES = (
    Probe("linear bf16", lambda: [normal(TOKENS, HIDDEN), normal(HIDDEN, HIDDEN)], F.linear),
    Probe("linear bf16 bias", lambda: [normal(TOKENS, HIDDEN), normal(HIDDEN, HIDDEN), normal(HIDDEN)], F.linear),
    Probe("linear fp32", lambda: [normal(TOKENS, HIDDEN, dtype=torch.float32),
                                  normal(256, HIDDEN, dtype=torch.float32)], F.linear),
    Probe("tuned product", lambda: [normal(TOKENS, HIDDEN), normal(HIDDEN, HIDDEN)],
          lambda x, w: matmul.product(x, w, False, True)),
    Probe("linear fp8 tensor", lambda: [normal(TOKENS, HIDDEN), normal(HIDDEN, HIDDEN)],
          lambda x, w: fp8_linear(x, w, True)),
    Probe("attention auto 32/8 seq 4096 batch 2", gqa, attention(PLAIN)),
    Probe("attention auto 32/8 seq 16384", lambda: gqa(size(16384, 128), 1), attention(PLAIN)),
    Probe("attention flash 32/8 seq 4096 batch 2", gqa, attention(PLAIN, "flash")),
    Probe("attention cudnn 32/8 seq 4096 batch 2", gqa, attention(PLAIN, "cudnn" if ON_GPU else "auto")),
    Probe("attention auto 16/16 seq 4096 batch 2",
          lambda: heads(LONG, size(16, 4), size(16, 4), size(128, 16), size(128, 16), 2), attention(PLAIN)),
    Probe("attention auto 192/128 16 heads seq 4096 batch 2", latent, attention(AttentionSpec(scale=192**-0.5))),
    Probe("attention flash 192/128 16 heads seq 4096 batch 2", latent,
          attention(AttentionSpec(scale=192**-0.5), "flash")),
    Probe("attention eager 32/8 seq 2048 batch 1", lambda: gqa(size(2048, 64), 1), attention(PLAIN, "eager")),
    Probe("flex window 32/8 seq 4096 batch 2", gqa, attention(AttentionSpec(scale=128**-0.5, window=WINDOW))),
    Probe("flex softcap 8/4 width 256 seq 4096 batch 2",
          lambda: heads(LONG, 8, 4, size(256, 16), size(256, 16), 2),
          attention(AttentionSpec(scale=1 / 16, softcap=50.0))),
    Probe("flex documents 32/8 seq 4096 batch 2", gqa, attention(PLAIN, documents=documents)),
    Probe("flex sinks window 64/8 width 64 seq 4096 batch 1",
          lambda: [*heads(LONG, 64, 8, size(64, 16), size(64, 16)), normal(64)],
          attention(AttentionSpec(scale=1 / 8, window=size(128, 16)))),
    Probe("rms_norm bf16", lambda: [normal(TOKENS, HIDDEN), normal(HIDDEN)],
          lambda x, w: F.rms_norm(x, (w.shape[0],), w, 1e-5)),
    Probe("rms_norm of heads bf16", lambda: [normal(2, LONG, 32, size(128, 16)), normal(size(128, 16))],
          lambda x, w: F.rms_norm(x, (w.shape[0],), w, 1e-5)),
    Probe("layer_norm bf16", lambda: [normal(TOKENS, HIDDEN), normal(HIDDEN), normal(HIDDEN)],
          lambda x, w, b: F.layer_norm(x, (w.shape[0],), w, b)),
    Probe("silu bf16", lambda: [normal(TOKENS, HIDDEN)], F.silu),
    Probe("grouped_mm bf16 8 experts", grouped, lambda x, w, ends: grouped_mm(x, w.transpose(-2, -1), ends)),
    Probe("grouped_mm bf16 64 experts", lambda: grouped(size(64, 8)),
          lambda x, w, ends: grouped_mm(x, w.transpose(-2, -1), ends)),
    Probe("loss statistics of 4096 tokens", block_of_logits, statistics, backward=False),
    Probe("loss gradient of 4096 tokens",
          lambda: [*block_of_logits(), *(torch.rand(ROWS, device=DEVICE) for _ in range(2))], gradient, backward=False),
    Probe("cross_entropy fp32", lambda: [normal(ROWS, VOCAB, dtype=torch.float32), random_ints(VOCAB, ROWS)],
          lambda logits, labels: F.cross_entropy(logits, labels, reduction="none")),
    Probe("sort 65536 int64", lambda: [random_ints(64, 65536)], torch.sort, backward=False),
    Probe("argsort stable 65536 int64", lambda: [random_ints(64, 65536)],
          lambda x: torch.argsort(x, stable=True), backward=False),
    Probe("topk 8 of 128", lambda: [normal(TOKENS, 128, dtype=torch.float32)], lambda x: torch.topk(x, 8)[0]),
    Probe("softmax fp32", lambda: [normal(TOKENS, 128, dtype=torch.float32)], lambda x: x.softmax(-1)),
    Probe("rows by index bf16", lambda: [normal(TOKENS, HIDDEN), random_ints(TOKENS, 4 * TOKENS)], lambda x, i: x[i]),
    Probe("index_select bf16", lambda: [normal(TOKENS, HIDDEN), random_ints(TOKENS, 4 * TOKENS)],
          lambda x, i: x.index_select(0, i)),
    Probe("index_add bf16", lambda: [normal(4 * TOKENS, HIDDEN), random_ints(TOKENS, 4 * TOKENS)],
          lambda x, i: x.new_zeros(TOKENS, x.shape[1]).index_add(0, i, x)),
    Probe("bincount 65536", lambda: [random_ints(64, 65536)],
          lambda x: torch.bincount(x, minlength=64), backward=False),
    Probe("embedding bf16", lambda: [random_ints(VOCAB, TOKENS), normal(VOCAB, HIDDEN)], F.embedding),
    Probe("embedding fp32", lambda: [random_ints(VOCAB, TOKENS), normal(VOCAB, HIDDEN, dtype=torch.float32)],
          F.embedding),
    Probe("nf4 unpack", lambda: [random_ints(255, *packed_shapes((HIDDEN, HIDDEN))[0]).to(torch.uint8),
                                 normal(*packed_shapes((HIDDEN, HIDDEN))[1], requires_grad=False)],
          unpack, backward=False),
    Probe("norm of gradients", lambda: [normal(VOCAB, HIDDEN, requires_grad=False)],
          lambda x: torch.linalg.vector_norm(x, dtype=torch.float32), backward=False),
    Probe("cumsum fp32", lambda: [normal(TOKENS, HIDDEN, dtype=torch.float32)], lambda x: x.cumsum(-1)),
    Probe("conv1d by channel bf16", lambda: [normal(1, HIDDEN, TOKENS), normal(HIDDEN, 1, 4), normal(HIDDEN)],
          lambda x, w, b: F.conv1d(x, w, b, padding=3, groups=w.shape[0])),
)  # fmt: skip


def flat(result: Any) -> list[Tensor]:
    """Return the tensors of an operation's result."""
    return [one for one in (result if isinstance(result, list | tuple) else [result]) if isinstance(one, Tensor)]


def forward(probe: Probe, inputs: list[Tensor]) -> tuple[Any, dict[str, int]]:
    """Run an operation: return its result, and the bytes of outputs, saved tensors and transients."""
    start = allocated()
    reset_peaks()
    result = probe.run(*inputs)
    end = allocated()
    outputs = bytes_of(flat(result))
    return result, {"outputs": outputs, "saved": end - start - outputs, "transient": peaks()["peak"] - end}


def backward(inputs: list[Tensor], result: Any) -> dict[str, int]:
    """Run the backward pass of an operation: return the bytes of gradients, transients and freed tensors."""
    out = next(one for one in flat(result) if one.requires_grad)
    requires_grad = [one for one in inputs if one.requires_grad]
    grad_output = torch.randn_like(out)
    start = allocated()
    reset_peaks()
    grads = torch.autograd.grad(out, requires_grad, grad_output)
    end, found = allocated(), bytes_of(grads)
    return {"gradients": found, "transient": peaks()["peak"] - start - found, "freed": start + found - end}


def probe_row(probe: Probe) -> dict[str, Any]:
    """Return the row of an operation, run twice: the first call compiles and creates library workspaces."""
    row: dict[str, Any] = {"name": probe.name}
    try:
        inputs = probe.inputs()
        row["inputs"] = [f"{str(one.dtype).removeprefix('torch.')}{list(one.shape)}" for one in inputs]
        before = allocated()
        result, first = forward(probe, inputs)
        row["first"] = {**first, "backward": backward(inputs, result)} if probe.backward else first
        del result
        row["stays"] = allocated() - before
        result, second = forward(probe, inputs)
        row["forward"] = second
        if probe.backward:
            row["saved_by"] = type(next(one for one in flat(result) if one.requires_grad).grad_fn).__name__
            row["backward"] = backward(inputs, result)
    except Exception as error:
        row |= {"error": f"{type(error).__name__}: {error}"[:400], "where": traceback.format_exc()[-1200:]}
    return row


def workspaces(out: Path, names: list[str]) -> None:
    """Measure single operations, each from an empty device."""
    rows: list[dict[str, Any]] = []
    for probe in PROBES:
        if names and not any(fnmatch(probe.name, name) for name in names):
            continue
        clean()
        rows.append(probe_row(probe))
        print(json.dumps({k: v for k, v in rows[-1].items() if k != "first"}), flush=True)
        save(out, {"workspaces": rows})


# --- files -------------------------------------------------------------------------------------------------------


def save(path: Path, found: dict[str, Any]) -> None:
    """Save the measurements so far."""
    import transformers

    head = {
        "command": "python -m benchmarks.dryrun_h200 measure OUT.json (and workspaces OUT.json)",
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name() if ON_GPU else "CPU",
        "versions": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "transformers": transformers.__version__,
            "python": sys.version.split()[0],
        },
        "convention": CONVENTION,
    }
    path.write_text(json.dumps({**head, **found}, indent=1) + "\n")


def join(out: Path, parts: list[str]) -> None:
    """Join several files: rows in the order of the table, those of the usual allocator first."""
    read = [json.loads(Path(part).read_text()) for part in parts]
    rows = [row for one in read for row in one.get("rows", [])]
    order = {case.name: index for index, case in enumerate(CASES)}
    usual = max((row["allocator"] for row in rows), key=[row["allocator"] for row in rows].count, default="")
    rows.sort(key=lambda row: (row["allocator"] != usual, order[row["name"]]))
    found = {"rows": rows, "workspaces": [row for one in read for row in one.get("workspaces", [])]}
    out.write_text(json.dumps({**read[0], **found}, indent=1) + "\n")


def main() -> None:
    command, out, *names = [a for a in sys.argv[1:] if not a.startswith("--")]
    {"measure": measure, "workspaces": workspaces, "join": join}[command](Path(out), names)


if __name__ == "__main__":
    main()
