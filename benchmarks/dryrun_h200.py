"""What our engine really takes of a GPU's memory, for the comparison with the dry run.

    python -m benchmarks.dryrun_h200 measure OUT.json [--tiny] [--trace=FOLDER] [CASE ...]
    python -m benchmarks.dryrun_h200 workspaces OUT.json [--tiny]
    python -m benchmarks.dryrun_h200 join OUT.json PART.json ...

`measure` trains every case of benchmarks/dryrun_cases.py for a few steps, one after the other in one process, each
built as a run of one rank builds it. For every phase it notes the allocated bytes at its start, end and peak.
`workspaces` measures what single operations take beside their inputs and outputs. Cases can be named, whole or by a
pattern (`llama*`); `plain_allocator` selects those that are also measured without expandable segments. The setting
is PYTORCH_CUDA_ALLOC_CONF, and is noted in every row. `--trace` also writes what the second step of every case
allocates and frees, one line each: to find where a prediction leaves reality (torch 2.11 cannot trace a recompute that
stops early inside a function of autograd's own). `--tiny` tries the script on a CPU: its numbers are all 0.
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
import torch.nn.functional as F  # noqa: N812 (torch's own habit)
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
TRACED = 1  # the number of the step that is traced: the first one that has its optimizer's state
CONVENTION = """Bytes. Of a case, allocated, requested and reserved are the most over its whole life; a phase has what
was allocated where it began and ended, and its peaks; before is allocated when nothing is built, left when everything
is destroyed. Of an operation, saved is what stays beside its outputs, transient what is taken beside inputs, outputs,
saved tensors and gradients, and stays what libraries keep after the first call.""".replace("\n", " ")
SECONDS = float(os.environ.get("BENCH_SECONDS", "1e9"))  # no case is begun after these


# --- the allocator's own counts ----------------------------------------------------------------------------------


def allocated() -> int:
    """Bytes in tensors now, after the GPU has caught up."""
    if not ON_GPU:
        return 0
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def forget_peaks() -> None:
    """Peaks count from here."""
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()


def peaks() -> dict[str, int]:
    """The most that was allocated, asked for and reserved since peaks were forgotten."""
    if not ON_GPU:
        return dict.fromkeys(("peak", "requested_peak", "reserved_peak"), 0)
    return {
        "peak": torch.cuda.max_memory_allocated(),
        "requested_peak": torch.cuda.memory_stats()["requested_bytes.all.peak"],
        "reserved_peak": torch.cuda.max_memory_reserved(),
    }


def retries() -> int:
    """How often the allocator had to give memory back before it could serve a request."""
    return torch.cuda.memory_stats().get("num_alloc_retries", 0) if ON_GPU else 0


def bytes_of(tensors: Iterable[Any]) -> int:
    """Bytes of the storages of these tensors on the device, each counted once."""
    seen: dict[int, int] = {}
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if isinstance(local, Tensor) and local.device.type == DEVICE.type:
            storage = local.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


def clean() -> None:
    """Leaves the device as a new process finds it: also what libraries keep between calls is given back."""
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
    """Notes the memory of every phase of a step."""

    step: int = 0  # 0 while everything is built
    trainer: Trainer | None = None
    phases: list[dict[str, Any]] = field(default_factory=list)
    gradients: int = 0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A phase: what is allocated where it begins and ends, and its peaks."""
        if name == "optimizer" and self.trainer is not None:
            self.gradients = bytes_of(p.grad for s in self.trainer.stages for p in s.parameters() if p.grad is not None)
        start = allocated()
        forget_peaks()
        yield
        end = allocated()
        self.phases.append({"step": self.step, "phase": name, "start": start, "end": end, **peaks()})

    def most(self, what: str) -> int:
        """The largest of a phase's numbers over the whole life."""
        return max(int(phase[what]) for phase in self.phases)


def shrunk(recipe: Recipe, config: Any) -> tuple[Recipe, Any]:
    """The case on a CPU: the same structure, a small model, nothing compiled."""
    kind, replace = family_of(recipe), msgspec.structs.replace
    config = kind.tiny(config, max(2, kind.layer_types(config)))
    return replace(
        recipe,
        data=replace(recipe.data, seq_length=64),
        kernels=Kernels(loss=recipe.kernels.loss, attention=recipe.kernels.attention),
    ), config


def job_of(case: Case) -> RankSpec:
    """Spec of the only rank of a run of this case, with random weights."""
    recipe = recipe_of(case)
    config = family_of(recipe).config_for(recipe)
    judgement = validate(recipe, config, None, 1)
    if TINY:
        recipe, config = shrunk(recipe, config)
    return RankSpec(recipe=recipe, config=config.to_dict(), case=judgement, folder="")


@contextmanager
def traced(name: str, number: int) -> Iterator[None]:
    """Writes what a step allocates and frees, where that is asked for and it is the step's turn."""
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
    """A line for each block that is taken (+ its number, bytes asked for, who asked) or given back (-)."""
    numbers: dict[int, int] = {}  # by address, which later blocks use again
    for number, entry in enumerate(entries):
        if entry["action"] == "alloc":
            numbers[entry["addr"]] = number
            yield f"+{number} {entry['size']} {caller(entry['frames'])}\n"
        elif entry["action"] == "free_requested":
            yield f"-{numbers.pop(entry['addr'], 'before')} {entry['size']} {caller(entry['frames'])}\n"


def caller(frames: list[dict[str, Any]]) -> str:
    """The innermost places in the engine's and the model's code that lead to an allocation."""
    known = [f for f in frames if any(room in f["filename"] for room in ("meshwright", "transformers/models"))]
    inner = "/".join(Path(frames[0]["filename"]).parts[-2:]) + f":{frames[0]['line']}" if frames else "?"
    return " < ".join([inner, *(f"{Path(f['filename']).name}:{f['line']}:{f['name']}" for f in known[:4])])


def life(spec: RankSpec) -> dict[str, Any]:
    """Builds the trainer of a job and takes its steps; what it took of the device."""
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
        "allocated": meter.most("peak"),
        "requested": meter.most("requested_peak"),
        "reserved": meter.most("reserved_peak"),
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


def measured(case: Case) -> dict[str, Any]:
    """The row of a case; one that failed says why."""
    began = time.monotonic()
    row: dict[str, Any] = {"name": case.name, "allocator": os.environ["PYTORCH_CUDA_ALLOC_CONF"]}
    try:
        row |= life(job_of(case))
    except Exception as error:
        row |= {"error": f"{type(error).__name__}: {error}"[:600], "where": traceback.format_exc()[-2500:]}
    return row | {"seconds": round(time.monotonic() - began, 1)}


def chosen(names: list[str]) -> list[Case]:
    """The cases that these names or patterns mean, in the order of the names; all of them where none is given."""
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
    """Measures cases one after the other."""
    began = time.monotonic()
    backend, own = ("nccl", DEVICE) if ON_GPU else ("gloo", None)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=own)
    rows: list[dict[str, Any]] = []
    for case in chosen(names):
        if time.monotonic() - began > SECONDS:
            print(f"{case.name}: left out, no time", flush=True)
            continue
        rows.append(measured(case))
        clean()
        rows[-1]["left"] = allocated()
        print(summary(rows[-1]), flush=True)
        save(out, {"rows": rows})
    dist.destroy_process_group()


def summary(row: dict[str, Any]) -> str:
    """A row in words."""
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
    """Bytes as GiB."""
    return f"{count / 2**30:.3f}"


# --- single operations -------------------------------------------------------------------------------------------


class Probe(msgspec.Struct, frozen=True):
    """An operation: how its inputs are made and what it computes of them."""

    name: str
    inputs: Callable[[], list[Tensor]]
    run: Callable[..., Any]
    backward: bool = True


def size(full: int, tiny: int) -> int:
    """A width, smaller where the script is only tried."""
    return tiny if TINY else full


TOKENS, HIDDEN, VOCAB = size(8192, 64), size(4096, 64), size(128256, 512)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, trainable: bool = True) -> Tensor:
    """Random numbers on the device."""
    return torch.randn(*shape, dtype=dtype, device=DEVICE).requires_grad_(trainable)


def integers(most: int, *shape: int) -> Tensor:
    """Random integers on the device."""
    return torch.randint(most, shape, device=DEVICE)


def heads(tokens: int, queries: int, keys: int, width: int, values: int, batch: int = 1) -> list[Tensor]:
    """Queries, keys and values as projections leave them: heads beside each other in a token's row."""
    shapes = ((queries, width), (keys, width), (keys, values))
    return [normal(batch, tokens, count, wide) for count, wide in shapes]


def attention(terms: AttentionSpec, kernel: str = "auto", **more: Any) -> Callable[..., Tensor]:
    """Attention as a layer calls it."""

    def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        return attend_local(q, k, v, terms, sinks, kernel=kernel, **{n: make() for n, make in more.items()})

    return run


LONG = size(4096, 64)
PLAIN = AttentionSpec(scale=128**-0.5)


def gqa(tokens: int = LONG, batch: int = 2) -> list[Tensor]:
    return heads(tokens, size(32, 8), size(8, 2), size(128, 16), size(128, 16), batch)


def latent(batch: int = 2) -> list[Tensor]:
    """Heads of multi-head latent attention: values narrower than keys."""
    return heads(LONG, size(16, 4), size(16, 4), size(192, 24), size(128, 16), batch)


def documents() -> Tensor:
    """Four documents of one length in every sample."""
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
    return [normal(ROWS, VOCAB, trainable=False), integers(VOCAB, ROWS)]


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
    Probe("cross_entropy fp32", lambda: [normal(ROWS, VOCAB, dtype=torch.float32), integers(VOCAB, ROWS)],
          lambda logits, labels: F.cross_entropy(logits, labels, reduction="none")),
    Probe("sort 65536 int64", lambda: [integers(64, 65536)], torch.sort, backward=False),
    Probe("argsort stable 65536 int64", lambda: [integers(64, 65536)],
          lambda x: torch.argsort(x, stable=True), backward=False),
    Probe("topk 8 of 128", lambda: [normal(TOKENS, 128, dtype=torch.float32)], lambda x: torch.topk(x, 8)[0]),
    Probe("softmax fp32", lambda: [normal(TOKENS, 128, dtype=torch.float32)], lambda x: x.softmax(-1)),
    Probe("rows by index bf16", lambda: [normal(TOKENS, HIDDEN), integers(TOKENS, 4 * TOKENS)], lambda x, i: x[i]),
    Probe("index_select bf16", lambda: [normal(TOKENS, HIDDEN), integers(TOKENS, 4 * TOKENS)],
          lambda x, i: x.index_select(0, i)),
    Probe("index_add bf16", lambda: [normal(4 * TOKENS, HIDDEN), integers(TOKENS, 4 * TOKENS)],
          lambda x, i: x.new_zeros(TOKENS, x.shape[1]).index_add(0, i, x)),
    Probe("bincount 65536", lambda: [integers(64, 65536)], lambda x: torch.bincount(x, minlength=64), backward=False),
    Probe("embedding bf16", lambda: [integers(VOCAB, TOKENS), normal(VOCAB, HIDDEN)], F.embedding),
    Probe("embedding fp32", lambda: [integers(VOCAB, TOKENS), normal(VOCAB, HIDDEN, dtype=torch.float32)], F.embedding),
    Probe("nf4 unpack", lambda: [integers(255, *packed_shapes((HIDDEN, HIDDEN))[0]).to(torch.uint8),
                                 normal(*packed_shapes((HIDDEN, HIDDEN))[1], trainable=False)], unpack, backward=False),
    Probe("norm of gradients", lambda: [normal(VOCAB, HIDDEN, trainable=False)],
          lambda x: torch.linalg.vector_norm(x, dtype=torch.float32), backward=False),
    Probe("cumsum fp32", lambda: [normal(TOKENS, HIDDEN, dtype=torch.float32)], lambda x: x.cumsum(-1)),
    Probe("conv1d by channel bf16", lambda: [normal(1, HIDDEN, TOKENS), normal(HIDDEN, 1, 4), normal(HIDDEN)],
          lambda x, w, b: F.conv1d(x, w, b, padding=3, groups=w.shape[0])),
)  # fmt: skip


def flat(made: Any) -> list[Tensor]:
    """The tensors of an operation's result."""
    return [one for one in (made if isinstance(made, list | tuple) else [made]) if isinstance(one, Tensor)]


def forward(probe: Probe, given: list[Tensor]) -> tuple[Any, dict[str, int]]:
    """Runs an operation: what it returns, what it keeps for its backward pass, what it took meanwhile."""
    start = allocated()
    forget_peaks()
    made = probe.run(*given)
    end = allocated()
    outputs = bytes_of(flat(made))
    return made, {"outputs": outputs, "saved": end - start - outputs, "transient": peaks()["peak"] - end}


def backward(given: list[Tensor], made: Any) -> dict[str, int]:
    """Runs the backward pass of an operation: its gradients, and what it took beside them and what was there."""
    out = next(one for one in flat(made) if one.requires_grad)
    trainable = [one for one in given if one.requires_grad]
    by_out = torch.randn_like(out)
    start = allocated()
    forget_peaks()
    grads = torch.autograd.grad(out, trainable, by_out)
    end, found = allocated(), bytes_of(grads)
    return {"gradients": found, "transient": peaks()["peak"] - start - found, "freed": start + found - end}


def probed(probe: Probe) -> dict[str, Any]:
    """The row of an operation: twice, since the first time compiles and makes what libraries keep."""
    row: dict[str, Any] = {"name": probe.name}
    try:
        given = probe.inputs()
        row["inputs"] = [f"{str(one.dtype).removeprefix('torch.')}{list(one.shape)}" for one in given]
        before = allocated()
        made, first = forward(probe, given)
        row["first"] = {**first, "backward": backward(given, made)} if probe.backward else first
        del made
        row["stays"] = allocated() - before
        made, again = forward(probe, given)
        row["forward"] = again
        if probe.backward:
            row["saved_by"] = type(next(one for one in flat(made) if one.requires_grad).grad_fn).__name__
            row["backward"] = backward(given, made)
    except Exception as error:
        row |= {"error": f"{type(error).__name__}: {error}"[:400], "where": traceback.format_exc()[-1200:]}
    return row


def workspaces(out: Path, names: list[str]) -> None:
    """Measures single operations, each from an empty device."""
    rows: list[dict[str, Any]] = []
    for probe in PROBES:
        if names and not any(fnmatch(probe.name, name) for name in names):
            continue
        clean()
        rows.append(probed(probe))
        print(json.dumps({k: v for k, v in rows[-1].items() if k != "first"}), flush=True)
        save(out, {"workspaces": rows})


# --- files -------------------------------------------------------------------------------------------------------


def save(path: Path, found: dict[str, Any]) -> None:
    """What was measured so far."""
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
    """One file of several: rows in the order of the table, those of the usual allocator first."""
    read = [json.loads(Path(part).read_text()) for part in parts]
    rows = [row for one in read for row in one.get("rows", [])]
    order = {case.name: place for place, case in enumerate(CASES)}
    usual = max((row["allocator"] for row in rows), key=[row["allocator"] for row in rows].count, default="")
    rows.sort(key=lambda row: (row["allocator"] != usual, order[row["name"]]))
    found = {"rows": rows, "workspaces": [row for one in read for row in one.get("workspaces", [])]}
    out.write_text(json.dumps({**read[0], **found}, indent=1) + "\n")


def main() -> None:
    command, out, *names = [a for a in sys.argv[1:] if not a.startswith("--")]
    {"measure": measure, "workspaces": workspaces, "join": join}[command](Path(out), names)


if __name__ == "__main__":
    main()
