"""Compare training steps on 2 and 4 ranks that share one GPU with those on one rank, and save the table.

    python benchmarks/gpu_ranks.py --minutes 8.5 [--workers 3] [--out FILE] [--only WORD]...   (on a GPU)
    python benchmarks/gpu_ranks.py --smoke --only fsdp2 --most 4                               (on CPU, tiny models)

Every layout of 2 or 4 ranks runs two steps with the real kernels, in fp32 and in eager and compiled bf16 and fp8;
collectives use gloo through host memory. Losses, gradient norms and the gradient of every tensor are compared with an
fp32 step of one rank. In fp32 they must be equal up to the order of sums; in bf16 and fp8 the error may be a multiple
of the error that one rank in eager mode has in that precision.

A child process forks the ranks of each case and ends those that hang; the parent ends a child that does not answer.
Results are kept in the file as they come; cases that it has are skipped.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import queue
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gpu_parity

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "gpu_ranks.json"
BATCH, MICRO_BATCH, LAYERS, STEPS = 16, 2, 4, 2
RANKS_S = 200.0  # per start of ranks
CASE_S = 440.0  # per case: its first one also runs the references
EXACT = {"loss": 1e-5, "gradient": 1e-3}  # relative errors of fp32: only the order of sums differs
NORM = 0.1  # relative error of the gradient norm of every step in bf16 and fp8; 0.04 at most where all is right

TP_SP: dict[str, Any] = {"tp": 2, "sp": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp2": (2, {}),
    "tp-sp": (2, TP_SP),
    "pp-1f1b": (2, {"pp": 2}),
    "cp-ring": (2, {"cp": 2}),
    "fsdp2-tp-sp": (4, TP_SP),
    "hsdp": (4, {"dp_replicate": 2}),
    "fsdp2-pp": (4, {"pp": 2}),
    "cp-a2a": (2, {"cp": 2, "cp_comm": "a2a"}),
    "cp-allgather": (2, {"cp": 2, "cp_comm": "allgather"}),
    "tp-pp": (4, {**TP_SP, "pp": 2}),
    "cp-fsdp2": (4, {"cp": 2}),
    "pp-zbv": (2, {"pp": 2, "vp": 2, "pp_schedule": "zbv"}),
    "pp-interleaved": (2, {"pp": 2, "vp": 2, "pp_schedule": "interleaved_1f1b"}),
    "tp-cp": (4, {**TP_SP, "cp": 2}),
    "fsdp2-recompute": (4, {"recompute": "full"}),
    "ddp": (2, {"strategy": "ddp"}),
    "tp": (2, {"tp": 2}),
    "sums-each": (2, {"defer_grad_sync": False}),
}
EXPERT_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep": (2, {"ep": 2}),
    "ep-fsdp2": (4, {"ep": 2}),
    "ep-tp-sp": (4, {**TP_SP, "ep": 2}),
    "ep-pp": (4, {"ep": 2, "pp": 2}),
    "etp": (2, {"etp": 2}),
    "ep-hsdp": (4, {"ep": 2, "dp_replicate": 2}),
    "ep-cp": (2, {"ep": 2, "cp": 2}),
    "ep4": (4, {"ep": 4}),
}
# family, packed documents, layouts
TRIED: tuple[tuple[str, bool, Sequence[str]], ...] = (
    ("qwen3", True, tuple(LAYOUTS)),
    ("qwen3_moe", False, (*EXPERT_LAYOUTS, "fsdp2", "tp-sp", "pp-1f1b", "cp-ring")),
    ("deepseek_v3", False, ("ep", "tp-sp", "pp-1f1b", "cp-ring", "ep-fsdp2")),
    ("gpt_oss", False, ("ep", "fsdp2", "cp-allgather")),
    ("gemma3_text", True, ("fsdp2", "tp-sp", "cp-ring", "pp-1f1b")),
    ("nemotron_h", False, ("fsdp2", "tp-sp", "cp-a2a", "ep")),
    ("qwen3_next", False, ("ep", "tp-sp", "cp-a2a")),
    ("llama", False, ("fsdp2", "tp-sp", "cp-ring", "pp-1f1b")),
)
MODES: dict[str, dict[str, Any]] = {  # in order of value
    "bf16 compiled": {"compile": True, "precision": "bf16"},
    "fp32 eager": {"compile": False, "precision": "fp32"},
    "fp8 compiled": {"compile": True, "precision": "fp8_tensor"},
    "bf16 eager": {"compile": False, "precision": "bf16"},
    "fp8 gathered": {"compile": True, "precision": "fp8_tensor", "fp8_gather": True},
    "fp8 eager": {"compile": False, "precision": "fp8_tensor"},
}


@dataclass(frozen=True)
class Case:
    """Steps of one layout to compare with one rank."""

    family: str
    packed: bool
    layout: str  # "one" for one rank
    mode: str

    @property
    def name(self) -> str:
        return f"{self.family} {'packed' if self.packed else 'unpacked'} {self.layout} {self.mode}"

    @property
    def world(self) -> int:
        return {**LAYOUTS, **EXPERT_LAYOUTS, "one": (1, {})}[self.layout][0]


def cases() -> list[Case]:
    """Return the cases, the most valuable mode of all layouts first; fp8 gathers only where FSDP shards weights."""
    found = []
    for mode in MODES:
        for family, packed, layouts in TRIED:
            for layout in layouts:
                if mode != "fp8 gathered" or "fsdp" in layout or layout == "hsdp":
                    found.append(Case(family, packed, layout, mode))
    return found


# --- one case: forked ranks ------------------------------------------------------------------------------------------


def recipe_of(case: Case, model: str, smoke: bool) -> Any:
    import msgspec

    from meshwright.recipes import types

    mode, (_, axes) = MODES[case.mode], {**LAYOUTS, **EXPERT_LAYOUTS, "one": (1, {})}[case.layout]
    fp32 = mode["precision"] == "fp32"
    plain = gpu_parity.Case(
        family=case.family,
        compile=mode["compile"],
        packed=case.packed,
        micro_batch=MICRO_BATCH,
        goal="pretrain",
        recompute="none",
        precision="bf16" if fp32 else mode["precision"],
        loss="fused_linear" if mode["compile"] and axes.get("tp", 1) == 1 else "vocab_parallel",
    )
    made = gpu_parity.recipe_of(plain, model, "text", gpu_parity.TOKENS[smoke], fp32)
    return msgspec.structs.replace(
        made,
        train=msgspec.structs.replace(made.train, global_batch_size=BATCH, steps=9),
        precision=msgspec.structs.replace(made.precision, fp8_gather=mode.get("fp8_gather", False)),
        layout=types.Layout(**{"micro_batch_size": MICRO_BATCH, **axes}),
        # Attention kernels of other layouts than one rank's run in fp32 too.
        kernels=msgspec.structs.replace(made.kernels, attention="eager" if fp32 and case.world == 1 else "auto"),
    )


def run_steps(process: Any, recipe: Any, config: Any, packed: bool, smoke: bool) -> dict[str, Any] | None:
    """Train on one rank; rank 0 returns losses, norms, memory and the first step's gradients of all ranks."""
    import torch

    from meshwright.engine.mesh import build_mesh
    from meshwright.engine.model_families import family_of
    from meshwright.engine.worker import set_determinism

    device = process.device
    if device.type == "cpu":
        gpu_parity._compile_without_a_compiler()
    set_determinism(recipe, device)
    mesh = build_mesh(recipe.layout, device.type)
    vocab = config.get_text_config().vocab_size
    source = gpu_parity.Documents(vocab, gpu_parity.TOKENS[smoke], packed, masked=False)
    trainer = family_of(recipe).trainer()(recipe, config, mesh, device, source)
    gradients: dict[str, Any] = {}
    finish = trainer.finish_gradients

    def finish_and_keep() -> Any:
        norm = finish()
        if not gradients:
            gradients.update(full_gradients(trainer))
        return norm

    trainer.finish_gradients = finish_and_keep
    results = [trainer.step(number) for number in range(STEPS)]
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    found = {"losses": [one.loss for one in results], "norms": [one.grad_norm for one in results]}
    trainer.close()
    return {**found, "gradients": gradients, "memory_gib": peak} if process.rank == 0 else None


def full_gradients(trainer: Any) -> dict[str, Any]:
    """Return the full gradients of all stages by name, on every rank, as fp32 arrays."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    mine: dict[str, Any] = {}
    plans: dict[str, Any] = {}
    for stage in trainer.stages:
        for name, parameter in stage.named_parameters():
            value = parameter.grad
            if value is not None:
                local = value.to_local() if isinstance(value, DTensor) else value
                mine[name] = local.detach().float().cpu().numpy()
                plans[name] = _plan(value) if isinstance(value, DTensor) else None
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (mine, plans))
    known = {name: plan for _, found in everyone for name, plan in found.items()}
    shards = [found for found, _ in everyone]
    return {name: _assembled(name, plan, shards) for name, plan in known.items()}


def _plan(value: Any) -> tuple[tuple[int, ...], Any, dict[int, list[int]]]:
    """Return a sharded tensor's shape, its mesh of ranks, and the mesh axes that split each dimension, outermost first.

    A strided axis splits inside later ones.
    """
    import numpy as np

    orders: dict[int, list[int]] = {}
    mesh = np.array(value.device_mesh.mesh.tolist())
    for axis, placement in reversed(list(enumerate(value.placements))):
        if not hasattr(placement, "dim"):
            continue
        order, at, inside = orders.setdefault(placement.dim % value.ndim, []), 0, getattr(placement, "split_factor", 1)
        while inside > 1:
            inside //= mesh.shape[order[at]]
            at += 1
        order.insert(at, axis)
    return tuple(value.shape), mesh, orders


def _assembled(name: str, plan: Any, shards: list[Any]) -> Any:
    """Return the full tensor from the shards of all ranks."""
    import numpy as np

    if plan is None:
        return next(found[name] for found in shards if name in found)
    shape, mesh, orders = plan
    full = np.full(shape, np.nan, np.float32)
    for place in np.ndindex(*mesh.shape):
        rows = [np.arange(size) for size in shape]
        for dim, axes in orders.items():
            for axis in axes:
                size = -(-len(rows[dim]) // mesh.shape[axis])
                rows[dim] = rows[dim][place[axis] * size : (place[axis] + 1) * size]
        full[np.ix_(*rows)] = shards[int(mesh[place])][name]
    return full


class Lab:
    """Runs cases on forked ranks; keeps the references of one family."""

    def __init__(self, smoke: bool) -> None:
        self.smoke, self.models = smoke, gpu_parity.families()
        self.kept: dict[str, Any] = {}

    def compare(self, case: Case) -> dict[str, Any]:
        """Return the errors of a case, their limits, and whether they are within them."""
        one = replace(case, layout="one")
        self.kept = {name: found for name, found in self.kept.items() if name.startswith(case.family + " ")}
        found = self.ranks(case)
        expected = self.reference(replace(one, mode="fp32 eager"))
        measured = errors(found, expected)
        if case.mode == "fp32 eager":
            row = exact(measured)
        else:
            eager = "bf16 eager" if case.mode.startswith("bf16") else "fp8 eager"
            row = gpu_parity.verdict(measured, errors(self.reference(replace(one, mode=eager)), expected))
        limit = EXACT["gradient"] if case.mode == "fp32 eager" else NORM
        row |= {"norm_error": measured["norm"], "norm_limit": limit}
        row["status"] = row["status"] if measured["norm"] <= limit else "wrong"
        row |= {"found_loss": found["losses"][0], "expected_loss": expected["losses"][0], "ranks": case.world}
        row |= {"losses": found["losses"], "expected_losses": expected["losses"]}
        row |= {"norms": found["norms"], "expected_norms": expected["norms"]}
        return {**row, "memory_gib": round(found["memory_gib"], 2)}

    def reference(self, case: Case) -> dict[str, Any]:
        if case.name not in self.kept:
            self.kept[case.name] = self.ranks(case)
        return self.kept[case.name]  # type: ignore[no-any-return]

    def ranks(self, case: Case) -> dict[str, Any]:
        """Start the ranks of a case and return what rank 0 found; raises what the rules refuse."""
        from meshwright.engine.model_families import family_of
        from meshwright.engine.processes import fork
        from meshwright.engine.train import preloaded
        from meshwright.engine.validate import validate

        recipe = recipe_of(case, self.models[case.family][0], self.smoke)
        config = gpu_parity.small_config(recipe, "text", self.smoke, LAYERS)
        if case.world > 1:  # the fp32 reference has an attention kernel that the rules refuse
            validate(recipe, config, None, case.world)
        found: dict[str, Any] = fork(
            *(case.world, run_steps, recipe, config, case.packed, self.smoke),
            timeout=RANKS_S,
            device_type="cpu" if self.smoke else "cuda",
            collective_timeout_s=RANKS_S,
            preload=preloaded(family_of(recipe), config),
        )[0]
        return found


def errors(found: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, Any]:
    """Return the largest relative error of losses and norms, and the error of every gradient by name."""
    import numpy as np

    left, right = found["gradients"], expected["gradients"]
    if missing := sorted(set(right) - set(left)):  # a copy of a tied head on the last stage has its own name
        raise ValueError(f"no gradients of {missing[:3]} and {len(missing) - 1} more")
    total = math.sqrt(sum(float(np.square(one, dtype=np.float64).sum()) for one in right.values()))
    floor = gpu_parity.FLOOR * total
    by_name = {
        name: float(np.linalg.norm((left[name] - value).ravel())) / max(float(np.linalg.norm(value.ravel())), floor)
        for name, value in right.items()
    }
    loss, norm = (_largest_error(found[name], expected[name]) for name in ("losses", "norms"))
    return {"loss": loss, "norm": norm, "gradients": by_name}


def _largest_error(found: Sequence[float], expected: Sequence[float]) -> float:
    relative = [abs(a - b) / max(abs(b), 1e-6) for a, b in zip(found, expected, strict=True)]
    return max(relative) if all(map(math.isfinite, relative)) else math.inf


def exact(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Compare fp32 errors with the limits of reordered sums."""
    ratios = {
        name: one / EXACT["gradient"] if math.isfinite(one) else math.inf for name, one in measured["gradients"].items()
    }
    worst = max(ratios, key=lambda name: ratios[name])
    fine = measured["loss"] <= EXACT["loss"] and ratios[worst] <= 1.0
    return {
        "status": "ok" if fine else "wrong",
        "loss_error": measured["loss"],
        "loss_limit": EXACT["loss"],
        "worst_gradient": worst,
        "gradient_error": measured["gradients"][worst],
        "gradient_limit": EXACT["gradient"],
        "tensors": len(ratios),
        "tensors_wrong": sum(ratio > 1.0 for ratio in ratios.values()),
    }


def child(smoke: bool) -> None:
    """Answer cases from stdin with results on stdout, one JSON value per line. Never uses the GPU itself."""
    from meshwright.errors import InputError
    from meshwright.rules import RefusedError

    lab = Lab(smoke)
    for line in sys.stdin:
        started = time.monotonic()
        try:
            row = lab.compare(Case(**json.loads(line)))
        except (RefusedError, InputError) as error:
            row = {"status": "refused", "error": " ".join(str(error).split())[:300]}
        except Exception as error:
            traceback.print_exc()
            row = {"status": "failed", "error": f"{type(error).__name__}: {error}"[:600]}
        row["seconds"] = round(time.monotonic() - started, 1)
        print("\n" + gpu_parity.MARK + json.dumps(row), flush=True)


# --- the parent ------------------------------------------------------------------------------------------------------


class Worker(gpu_parity.Worker):
    """Sends cases to a child process that forks the ranks."""

    script = __file__
    case_s = CASE_S
    threads = 1 / 3  # two to four ranks compile at the same time


def batches_of(left: Iterable[Case], rounds: int = 6) -> list[list[Case]]:
    """Return the cases in batches of one family and mode, in their order: a child keeps references of one family."""
    found: list[list[Case]] = []
    for case in left:
        last = found[-1] if found else []
        if last and len(last) < rounds and (last[0].family, last[0].packed) == (case.family, case.packed):
            last.append(case)
        else:
            found.append([case])
    return found


def table_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the status of every layout by mode."""
    modes = list(MODES)
    by_layout: dict[str, dict[str, str]] = {}
    for row in rows:
        mode = next(mode for mode in modes if row["case"].endswith(mode))
        by_layout.setdefault(row["case"].removesuffix(mode).strip(), {})[mode] = row["status"]
    head = f"{'layout':<40}" + "".join(f"{mode:<16}" for mode in modes)
    return "\n".join(
        [head, *(f"{name:<40}" + "".join(f"{one.get(m, ''):<16}" for m in modes) for name, one in by_layout.items())]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="start no case after this time")
    parser.add_argument("--workers", type=int, default=3, help="child processes that share the GPU")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--only", action="append", default=[], help="only cases whose name has this word")
    parser.add_argument("--most", type=int, default=0, help="at most this many cases")
    parser.add_argument("--again", action="store_true", help="run cases again that are not ok in the file")
    parser.add_argument("--smoke", action="store_true", help="tiny models on CPU, compiled without a compiler")
    parser.add_argument("--list", action="store_true", help="print the cases only")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.smoke)
        return 0
    wanted = [one for one in cases() if all(word in one.name.split() or word == one.mode for word in args.only)]
    wanted = wanted[: args.most or None]
    if args.list:
        print("\n".join(one.name for one in wanted))
        print(f"{len(wanted)} cases")
        return 0
    table = gpu_parity.Table(args.out, len(cases()))
    done = {name for name, row in table.rows.items() if not args.again or row["status"] == "ok"}
    args.ends, args.logs = time.monotonic() + 60 * args.minutes, os.environ.get("OUT") or "/tmp"
    batches: queue.Queue[Any] = queue.Queue()
    for batch in batches_of(one for one in wanted if one.name not in done):
        batches.put(batch)
    workers = [Worker(number, batches, table, args) for number in range(args.workers)]  # type: ignore[arg-type]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(max(1.0, args.ends + 30 - time.monotonic()))
        if worker.is_alive() and worker.process is not None:
            worker.process.kill()
    table.write()
    print(table_text(table.rows.values()))
    counts: dict[str, int] = json.loads(args.out.read_text())["counts"]
    print(f"{len(table.rows)} of {table.total} cases: " + ", ".join(f"{n} {status}" for status, n in counts.items()))
    return 0 if not {"wrong", "failed", "crashed"} & set(counts) else 1


if __name__ == "__main__":
    sys.exit(main())
