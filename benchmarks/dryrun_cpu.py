"""Compare the memory of real CPU ranks of our engine with the dry run: one table.

    python -m benchmarks.dryrun_cpu OUT.json [CASE ...]

Every case is trained for two steps on forked gloo ranks. Each rank counts the bytes of all its tensors' storages as
they are allocated and freed; the dry run of the same recipe and ranks fakes a device that computes like a CPU.
Cases can be selected by name or by a pattern (`pp*`).
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterable
from datetime import date
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import msgspec

from meshwright.dryrun.ranks import run_parallel
from meshwright.dryrun.types import PARTS, PHASES
from meshwright.engine import processes
from meshwright.engine.model_families import family_of
from meshwright.recipes.overrides import apply
from meshwright.recipes.types import Data, Goal, Recipe, Schedule, Train

MIB = 2**20
AS_CPU = (0, 0)
ROUNDS = 2  # steps of every case; the first creates the optimizer state
TIMEOUT_S = 600.0
STEPPED = tuple(
    name for name in PHASES if name != "build"
)  # initializing weights needs memory that the dry run does not trace
PRELOADED = ("meshwright.dryrun.trace", "meshwright.dryrun.replay")
CONVENTION = """Bytes of all storages of a rank, each rounded up to 512, at the highest point of building and two steps;
by part at that point, and the highest point of each phase. real: counted on a gloo rank while it trains. dry: the dry
run of all layers and micro batches. shortened: the dry run that leaves out what repeats.""".replace("\n", " ")


class Case(msgspec.Struct, frozen=True):
    """One training run: a small model, its ranks and overrides."""

    name: str
    world: int
    overrides: tuple[str, ...] = ()
    model: str = "dense"
    goal: Goal = "pretrain"
    samples: int = 2  # in a micro batch
    micro_batches: int = 1
    data_ranks: int = 1


class Peak(msgspec.Struct, frozen=True):
    """The peak of a rank's memory."""

    bytes: int
    phase: str
    parts: dict[str, int]
    phases: dict[str, int]  # peak of each phase in bytes


class Row(msgspec.Struct, frozen=True):
    """A rank of a case: its real memory and what the dry run predicted."""

    case: str
    rank: int
    real: Peak
    dry: Peak
    shortened: Peak

    @property
    def difference(self) -> float:
        """Relative error of the worse of both dry runs."""
        return max((one.bytes / self.real.bytes - 1 for one in self.predicted), key=abs)

    @property
    def by_phase(self) -> float:
        """Relative error of the phase that differs most."""
        phases = self.real.phases
        return max((one.phases[name] / phases[name] - 1 for one in self.predicted for name in STEPPED), key=abs)

    @property
    def predicted(self) -> tuple[Peak, Peak]:
        """Both dry runs."""
        return self.dry, self.shortened


MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "dense": (
        "llama3_8b",
        {"layers": 6, "hidden": 128, "ffn": 384, "heads": 8, "kv_heads": 4, "head_dim": 16, "vocab": 1024},
    ),
    "experts": (
        "qwen3_30b_a3b",
        {"layers": 4, "hidden": 128, "heads": 8, "kv_heads": 4, "head_dim": 16, "vocab": 1024, "experts": 8, "topk": 2},
    ),
}
TOKENS = 256


def _layout(**fields: Any) -> tuple[str, ...]:
    return tuple(f"layout.{name}={str(value).lower()}" for name, value in fields.items())


def _dense(name: str, world: int, *, more: tuple[str, ...] = (), **fields: Any) -> Case:
    settings = {key: fields.pop(key) for key in ("goal", "samples", "micro_batches", "data_ranks") if key in fields}
    return Case(name, world, (*_layout(**fields), *more), **settings)


def _experts(name: str, world: int, *, more: tuple[str, ...] = (), **fields: Any) -> Case:
    case = _dense(name, world, more=(*more, "moe.force_balance=true"), **fields)  # what the dry run assumes
    return msgspec.structs.replace(case, model="experts")


BF16 = ("precision.compute=bf16",)
SMALL = ("data.seq_length=64", "architecture.hidden=64", "architecture.ffn=128", "architecture.vocab=256")
CASES: tuple[Case, ...] = (
    _dense("fsdp2 x2", 2, data_ranks=2),
    _dense("fsdp2 x4", 4, data_ranks=4),
    _dense("fsdp2 bf16", 2, data_ranks=2, more=(*BF16, *SMALL)),
    _dense("fsdp2, weights kept", 2, data_ranks=2, reshard_after_forward=False),
    _dense("hsdp 2x2", 4, data_ranks=4, dp_replicate=2),
    _dense("ddp x2", 2, data_ranks=2, strategy="ddp"),
    _dense("accumulation 3", 2, data_ranks=2, micro_batches=3),
    _dense("accumulation 5, sums each", 2, data_ranks=2, micro_batches=5, defer_grad_sync=False),
    _dense("recompute full", 2, data_ranks=2, recompute="full"),
    _dense("recompute selective", 2, data_ranks=2, recompute="selective"),
    _dense("recompute modules", 2, data_ranks=2, recompute="selective", recompute_modules="core_attn,layernorm,mlp"),
    _dense("loss fused", 2, data_ranks=2, more=("kernels.loss=fused_linear",)),
    _dense("lora", 2, data_ranks=2, goal="peft"),
    _dense("tp2 sp", 2, tp=2, sp=True),
    _dense("tp2", 2, tp=2),
    _dense("tp2 x fsdp2", 4, tp=2, sp=True, data_ranks=2),
    _dense("pp2 1f1b", 2, pp=2, micro_batches=4),
    _dense("pp2 1f1b, 8 micro batches", 2, pp=2, micro_batches=8),
    _dense("pp2 gpipe", 2, pp=2, pp_schedule="gpipe", micro_batches=4),
    _dense("pp2 interleaved", 2, pp=2, vp=3, pp_schedule="interleaved_1f1b", micro_batches=4),
    _dense("pp2 zero bubble", 2, pp=2, vp=3, pp_schedule="interleaved_zero_bubble", micro_batches=4),
    _dense("pp3 1f1b", 3, pp=3, micro_batches=6),
    _dense("pp4 1f1b", 4, pp=4, micro_batches=8, more=("architecture.layers=8",)),
    _dense("pp2 x fsdp2", 4, pp=2, micro_batches=4, data_ranks=2),
    _dense("pp2 x tp2 x fsdp2", 8, pp=2, tp=2, sp=True, micro_batches=4, data_ranks=2),
    _dense("cp2 ring", 2, cp=2),
    _dense("cp2 a2a", 2, cp=2, cp_comm="a2a"),
    _dense("cp2 allgather", 2, cp=2, cp_comm="allgather"),
    _dense("cp2 x tp2", 4, cp=2, tp=2, sp=True),
    _experts("experts fsdp2", 2, data_ranks=2),
    _experts("ep2", 2, ep=2, data_ranks=2),
    _experts("ep2 x etp2", 4, ep=2, etp=2, data_ranks=4),
    _experts("ep2 x tp2", 2, ep=2, tp=2, sp=True),
    _experts("ep2 x pp2", 4, ep=2, pp=2, data_ranks=2, micro_batches=4),
    _experts("ep2 full", 2, ep=2, data_ranks=2, recompute="full"),
)


def recipe_of(case: Case) -> Recipe:
    """Return the recipe of a case."""
    model, shape = MODELS[case.model]
    start = Recipe(
        name=case.name,
        model=model,
        goal=case.goal,
        cluster="1xH200",  # required but without effect here
        data=Data(dataset="mock", prefetch=0, workers=0, seq_length=TOKENS),
        train=Train(
            steps=ROUNDS, check_nan=False, global_batch_size=case.samples * case.micro_batches * case.data_ranks
        ),
        schedule=Schedule(name="constant", warmup_steps=0),
    )
    given = {f"architecture.{name}": f"architecture.{name}={value}" for name, value in shape.items()}
    given["precision.compute"] = "precision.compute=fp32"  # many CPUs are slow at other dtypes
    given |= {text.partition("=")[0]: text for text in (f"layout.micro_batch_size={case.samples}", *case.overrides)}
    return apply(start, list(given.values()))


def highest(events: Iterable[tuple[str, int]], blocks: Any) -> Peak:
    """Return the peak of a log: its phase, and bytes by part."""
    now, total = dict.fromkeys(PARTS, 0), 0
    phases = dict.fromkeys(PHASES, 0)
    peak, at, parts = 0, "", dict(now)
    for phase, event in events:
        block = blocks(event if event >= 0 else ~event)
        change = block.bytes if event >= 0 else -block.bytes
        now[block.part] += change
        total += change
        if phase in phases:
            phases[phase] = max(phases[phase], total)
        if total > peak:
            peak, at, parts = total, phase, dict(now)
    return Peak(peak, at, parts, phases)


def peak_of(log: Any) -> Peak:
    """Return the peak of an allocation log."""
    events = ((segment.key.phase, event) for segment in log.segments for event in segment.events)
    return highest(events, lambda number: log.blocks[number])


def real_rank(place: Any, case: Case) -> Peak:
    """Build the trainer of this process and run two steps, recording every storage."""
    return peak_of(log_of_rank(place, case))


def log_of_rank(place: Any, case: Case) -> Any:
    """Return the allocation log of a real rank."""
    from meshwright.dryrun.allocation_log import AllocationLog, RealTensorRecorder
    from meshwright.dryrun.fake_data import dry_recipe, open_samples
    from meshwright.dryrun.trace import run_steps
    from meshwright.engine.mesh import build_mesh

    recipe = dry_recipe(recipe_of(case))
    family = family_of(recipe)
    config = family.config_for(recipe)
    log = AllocationLog("cpu")
    with RealTensorRecorder(log), log.patch_torch():
        mesh = build_mesh(recipe.layout, "cpu")
        source = open_samples(recipe, config)
        trainer = family.trainer()(recipe, config, mesh, place.device, source, None)
        run_steps(trainer, log)
        trainer.close()
        del trainer, source
        gc.collect()
    return log


def dry_rank(task: tuple[Case, int, bool]) -> Peak:
    """Dry-run one rank."""
    from meshwright.dryrun.replay import replay_step

    trace = traced(task)
    if not task[2]:
        return peak_of(trace.log)
    step = replay_step(trace)
    events = ((segment.key.phase, event) for segment in step.segments for event in segment.events)
    return highest(events, lambda number: trace.log.blocks[step.traced_block[number]])


def traced(task: tuple[Case, int, bool]) -> Any:
    """Return the trace of one rank."""
    from meshwright.dryrun.trace import trace

    case, rank, shortened = task
    recipe = recipe_of(case)
    family = family_of(recipe)
    return trace(recipe, family, family.config_for(recipe), case.world, rank, AS_CPU, shortened)


def compared(case: Case) -> list[Row]:
    """Compare each rank of a case with the dry run of the first rank of its pipeline stage."""
    real, size = measured(case), ranks_per_stage(case)
    tasks = [(case, rank, shortened) for rank in range(0, case.world, size) for shortened in (False, True)]
    dry = run_parallel(dry_rank, tasks, None, lambda _: None, lambda one: f"rank {one[1]}")
    return [Row(case.name, rank, real[rank], *dry[2 * (rank // size) :][:2]) for rank in range(case.world)]


def ranks_per_stage(case: Case) -> int:
    """Return the number of ranks of a pipeline stage, which all do the same."""
    return case.world // recipe_of(case).layout.pp


def measured(case: Case) -> list[Peak]:
    """Return the real memory of the ranks of a case."""
    recipe = recipe_of(case)
    family = family_of(recipe)
    modules = (*family.modules(family.config_for(recipe)), *PRELOADED)
    return processes.fork(case.world, real_rank, case, device_type="cpu", preload=modules, timeout=TIMEOUT_S)


def as_text(row: Row) -> str:
    """Format a row of the table: parts that are not zero as real / dry / shortened, in MiB."""
    three = row.real, row.dry, row.shortened
    sizes = " ".join(f"{one.bytes / MIB:9.3f}" for one in three)
    parts = "  ".join(
        f"{name} {'/'.join(f'{one.parts[name] / MIB:.2f}' for one in three)}"
        for name in PARTS
        if any(one.parts[name] for one in three)
    )
    off = f"{100 * row.difference:+7.2f} % {100 * row.by_phase:+7.2f} %"
    return f"{row.case:28} {row.rank:4} {sizes} {off}  {row.real.phase:9} {parts}"


def main(arguments: list[str]) -> None:
    """Run the cases and save the table."""
    out, *patterns = arguments
    rows: list[Row] = []
    print(f"{'case':28} rank  real MiB   dry MiB     short     worst   a phase")
    for case in CASES:
        if patterns and not any(fnmatch(case.name, one) for one in patterns):
            continue
        found = compared(case)
        rows.extend(found)
        for row in found:
            print(as_text(row), flush=True)
    result = {
        "command": f"python -m benchmarks.dryrun_cpu {' '.join([Path(out).name, *patterns])}",
        "date": date.today().isoformat(),
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "python": sys.version.split()[0],
        "convention": CONVENTION,
        "worst": max((abs(row.difference) for row in rows), default=0.0),
        "rows": [{**msgspec.to_builtins(row), "difference": row.difference, "by_phase": row.by_phase} for row in rows],
    }
    Path(out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
