"""Compare rehearsals with measured runs on one GPU, print one table and save it.

    python benchmarks/rehearse_h200.py --minutes 8 [--out FILE] [--only WORD]... [--again]     (on a GPU)
    python benchmarks/rehearse_h200.py --memory [--out FILE]                                   (dry runs, anywhere)
    python benchmarks/rehearse_h200.py --smoke [--only WORD]                                   (on CPU, tiny models)

single    jobs of one GPU (cases of benchmarks/results/calibration_set.json): the step that `meshwright bench` measures
          here against `meshwright rehearse`
ranks     layouts of 2 and 4 ranks that share the GPU over gloo, against the same ranks rehearsed side by side. The
          network is gloo as timed in steps of half the layers (benchmarks/gloo_times.py): the GPU is shared and ranks
          wait for each other in both, only the network is simulated
cluster   published or planned multi-GPU runs: step time against the published one, peak memory against the dry run.
          Ours is rehearsed in place of the published engine, with the kernels of attention and loss that it used

Results are kept in the file as they come; rows that it has are skipped unless --again.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing as mp
import os
import shlex
import subprocess
import sys
import time
import traceback
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT), str(ROOT / "benchmarks")]
RESULTS = ROOT / "benchmarks" / "results" / "rehearse_h200.json"
STEPS = 12
RANK_STEPS = 3
RANKS_S = 150.0
COMPILED = ("kernels.compile=true",)
PLAIN = (
    "layout.tp=1", "layout.pp=1", "layout.vp=1", "layout.cp=1", "layout.ep=1", "layout.etp=1",
    "layout.dp_replicate=1", "layout.sp=false", "layout.pp_schedule=1f1b",
)  # fmt: skip


@dataclass(frozen=True)
class Single:
    """A job of one GPU, as benchmarks/calibration_set.py writes it."""

    case: str
    seconds: float = 70.0  # about

    @property
    def name(self) -> str:
        return f"single {self.case}"


@dataclass(frozen=True)
class Ranks:
    """Ranks that share the GPU."""

    layout: str
    world: int
    overrides: tuple[str, ...]
    recipe: str = "qwen3_600m_pretrain_config"
    seconds: float = 90.0

    @property
    def name(self) -> str:
        return f"ranks {self.layout}"

    @property
    def layers(self) -> int:
        return 16 // self.world  # gloo moves about 1 GB/s

    def words(self, layers: int) -> list[str]:
        batch = 3 * self.world  # three micro batches on every rank, or more with tp
        shared = ("layout.micro_batch_size=1", f"train.global_batch_size={batch}", "layout.recompute=none")
        shared += (f"architecture.layers={layers}",)
        changed = {word.partition("=")[0] for word in self.overrides}
        plain = [word for word in PLAIN if word.partition("=")[0] not in changed]
        return [self.recipe, *plain, "data.seq_length=2048", *shared, "kernels.compile=false", *self.overrides]


@dataclass(frozen=True)
class Cluster:
    """A multi-GPU run, planned or published."""

    label: str
    gpus: str  # empty: those of the published run
    words: tuple[str, ...]
    published: str = ""  # row_id of benchmarks/data/measurements.csv
    seconds: float = 60.0

    @property
    def name(self) -> str:
        return f"cluster {self.label}"


def llama3_8b(micro_batch: int, world: int, *words: str) -> tuple[str, ...]:
    """Return the words of torchtitan's preset: FSDP2, 8,192 tokens, every second matmul recomputed.

    Attention on Hopper was torch's FlashAttention 2 until October 2025 (its commit e7c0cae of June has cuDNN's for
    Blackwell only), and the loss is not fused.
    """
    batch = (f"layout.micro_batch_size={micro_batch}", f"train.global_batch_size={micro_batch * world}")
    shared = ("data.seq_length=8192", "layout.recompute=selective", "kernels.attention=flash", "kernels.loss=plain")
    return ("llama3_8b_pretrain_config", *PLAIN, *shared, *batch, *words)


def kempner(size: str, micro_batch: int, batch: int, *words: str) -> tuple[str, ...]:
    """Return the words of KempnerForge's presets: 4,096 tokens, full recompute, weights and AdamW states in bf16.

    Attention is FlashAttention 2 of torch; the loss is not fused; tensor parallelism shards the
    sequence too, except in pipeline stages.
    """
    sizes = (f"layout.micro_batch_size={micro_batch}", f"train.global_batch_size={batch}")
    states = ("precision.master=bf16", "precision.moments=bf16", "precision.grads=bf16")
    changed = {word.partition("=")[0] for word in words}
    plain = [word for word in PLAIN if word.partition("=")[0] not in changed]
    kernels = ("kernels.attention=flash", "kernels.loss=plain")
    shared = ("data.seq_length=4096", "layout.recompute=full", *kernels, *states)
    return (f"kempner_{size}_config", *plain, *shared, *sizes, *words)


TP4 = ("layout.tp=4", "layout.sp=true")

ROWS: tuple[Single | Ranks | Cluster, ...] = (
    Single("llama32_1b pretrain 4096 4 eager"),
    Cluster("Llama 3 8B on 8 H100-96, micro batch 1", "", llama3_8b(1, 8, *COMPILED), "a1c2076cfd"),
    Cluster("7B on 4 H200", "", kempner("7b_4gpu", 4, 32, *COMPILED), "afb2efb0b1"),
    Cluster("7B on 8 H200, tp 4", "", kempner("7b_4gpu", 4, 16, *TP4, *COMPILED), "3c9f71676e"),
    Cluster("7B on 32 H200", "", kempner("7b_4gpu", 4, 512, *COMPILED), "d36d25aece"),
    Cluster("13B on 32 H200, tp 4", "", kempner("13b_8gpu_fsdp", 4, 128, *TP4, *COMPILED), "3bff40782b"),
    Cluster(
        "29B on 32 H200, tp 4, pp 2, eager",
        "",
        kempner("29b_32gpu_tp4_pp2", 1, 32, "layout.tp=4", "layout.pp=2", "kernels.compile=false"),
        "99e6b882cf",
    ),
    Cluster("13B on 8 H200, eager", "", kempner("13b_8gpu_fsdp", 4, 128, "kernels.compile=false"), "37f68c32a9"),
    Ranks("fsdp2 2 ranks", 2, ()),
    Ranks("tp 2 with sp, 2 ranks", 2, ("layout.tp=2", "layout.sp=true")),
    Ranks("fsdp2 2, tp 2 with sp, 4 ranks", 4, ("layout.tp=2", "layout.sp=true")),
    Ranks("fsdp2 4 ranks", 4, ()),
    Cluster(
        "Llama 3 8B on 32 H200, fp8, micro batch 2",
        "",
        llama3_8b(2, 32, *COMPILED, "precision.matmul=fp8_tensor"),
        "4f1de8fd47",
    ),
    Cluster("Llama 3 8B on 8 H100-96, micro batch 2", "", llama3_8b(2, 8, *COMPILED), "5a474d490f"),
    Cluster("Llama 3 8B on 128 H100-96, micro batch 2", "", llama3_8b(2, 128, *COMPILED), "7f0c1239a0"),
    Cluster(
        "Llama 3 8B on 64 H200, fp8, micro batch 2",
        "",
        llama3_8b(2, 64, *COMPILED, "precision.matmul=fp8_tensor"),
        "8e905e382d",
    ),
    Cluster(
        "Llama 3 8B on 8 H100-96, eager, micro batch 2", "", llama3_8b(2, 8, "kernels.compile=false"), "6f2e3df221"
    ),
    Cluster("Qwen3-30B-A3B on 16 H100", "16xH100", ("qwen3_30b_a3b_pretrain_config",)),
    Single("llama32_1b pretrain 4096 2 x4"),
    Cluster("Llama 3 70B on 64 H100", "64xH100", ("llama3_70b_pretrain_config",), seconds=100.0),
    Single("qwen3_4b sft 4096 2"),
    Single("llama3_8b lora 4096 1 eager"),
    Single("olmoe_7b pretrain 1024 8 layers8"),
)
MEASUREMENTS = ROOT / "benchmarks" / "data" / "measurements.csv"
CASES = ROOT / "benchmarks" / "results" / "calibration_set.json"


# --- commands ------------------------------------------------------------------------------------------------------


def command(words: list[str], timeout: float) -> dict[str, Any]:
    """Run a meshwright command with --json; return its answer, or an error."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    arguments = [sys.executable, "-m", "meshwright", *words, "--json"]
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=timeout, env=environment, cwd="/tmp")
    except subprocess.TimeoutExpired as error:
        return {"error": {"message": f"no answer in {timeout:.0f} s: {str(error.stderr or '')[-300:]}"}}
    try:
        found: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    except ValueError:
        return {"error": {"message": (done.stderr or done.stdout)[-1500:]}}
    return found


def failed(row: dict[str, Any], answer: dict[str, Any], what: str) -> dict[str, Any]:
    return {**row, "error": f"{what}: {answer['error']['message'][:1500]}"}


def rehearsed(words: list[str], more: list[str]) -> dict[str, Any]:
    """Rehearse in this process, whose imports are shared by all rows; the ranks run in processes of their own."""
    from meshwright.cli.run import run

    output = io.StringIO()
    with redirect_stdout(output), suppress(SystemExit):
        run(["rehearse", *words, *more, "--json"])
    found: dict[str, Any] = json.loads(output.getvalue())
    if "error" in found:
        raise RuntimeError(found["error"]["message"])
    return found


def single(job: Single, smoke: bool) -> dict[str, Any]:
    """Measure a job of one GPU with `bench`, then rehearse it."""
    case = next(row for row in json.loads(CASES.read_text())["rows"] if row["case"] == job.case)
    words = [word for word in shlex.split(case["command"])[2:] if not word.startswith("train.steps")]
    row: dict[str, Any] = {"command": shlex.join(["meshwright", "rehearse", *words, "--gpus", "auto"])}
    if smoke:
        words = [word for word in words if not word.startswith(("kernels.compile", "data.seq_length"))]
        words += ["kernels.compile=false", "data.seq_length=64"]
    where = ["--gpus", "1xH100", "--device", "cpu", "--tiny"] if smoke else ["--gpus", "auto"]
    measured = command(["bench", *words, f"train.steps={STEPS}", *(["--tiny"] if smoke else [])], RANKS_S)
    if "error" in measured:
        return failed(row, measured, "bench")
    found = rehearsed(words, [*where, "--seconds", "20"])
    return {
        **row,
        "measured_s": measured["step_s"],
        "rehearsed_s": found["step_s"],
        "measured_gib": measured["memory_gib"]["peak"],
        "measured_reserved_gib": measured["memory_gib"]["reserved"],
        "rehearsed_gib": found["allocated_gib"],
        "rehearsed_reserved_gib": found["reserved_gib"],
        "parts_s": found["step_parts_s"],
        "measured_parts_s": measured["step_parts_s"],
        "ranks": ranks_of(found),
        "wall_s": found["wall_s"],
        "band_pct": found["band"]["step_pct"],
    }


def ranks_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    kept = ("pp_rank", "layers", "layers_run", "micro_batches_run", "busy_s", "rest_s", "compute_s", "exposed_s",
            "allocated_gib", "reserved_gib", "spread_pct", "wall_s", "steps", "collectives")  # fmt: skip
    return [{name: one[name] for name in kept} for one in found["ranks"]]


def cluster(job: Cluster, smoke: bool) -> dict[str, Any]:
    """Rehearse a multi-GPU run, next to what was published."""
    published = measurement(job.published) if job.published else None
    gpus = str(published.case.cluster) if published else job.gpus
    words, more = [*job.words], ["--gpus", gpus]
    row: dict[str, Any] = {"command": shlex.join(["meshwright", "rehearse", *words, *more]), "published": job.published}
    if smoke:
        words, more = [job.words[0]], ["--gpus", "4xH100", "--device", "cpu", "--tiny"]
    found = rehearsed(words, [*more, "--seconds", "30" if published else "45"])
    row |= {
        "rehearsed_s": found["step_s"],
        "tokens_per_s_per_gpu": found["tokens_per_s_per_gpu"],
        "estimate_s": found["estimate_s"],
        "mfu": found["mfu"],
        "parts_s": found["step_parts_s"],
        "band_pct": found["band"]["step_pct"],
        "scale": found["scale"],
        "rehearsed_gib": found["allocated_gib"],
        "reserved_gib": found["reserved_gib"],
        "wall_s": found["wall_s"],
        "notes": found["notes"],
        "ranks": ranks_of(found),
    }
    if published:
        row |= {"published_s": published.step_s, "source": published.source}
    return row


def measurement(row_id: str) -> Any:
    """Return a published run, with the GPU and the version of the engine that it is known to have used."""
    from meshwright.costs.measurements import read

    return next(one for one in read(MEASUREMENTS) if one.row_id == row_id)


def dry_run_gib(job: Cluster) -> float | None:
    """Return the peak of the fullest rank in a dry run, which needs no GPU."""
    gpus = str(measurement(job.published).case.cluster) if job.published else job.gpus
    found = command(["dryrun", *job.words, "--gpus", gpus], 600)
    return max(one["allocated_gib"] for one in found["ranks"]) if "error" not in found else None


# --- ranks that share the GPU --------------------------------------------------------------------------------------


def measured_gloo(job: Ranks, smoke: bool) -> list[dict[str, Any]]:
    """Time gloo in steps of a model of half the layers, in a fresh process: one that has used the GPU cannot fork."""
    environment = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    program = [sys.executable, "-W", "ignore", "-m", "benchmarks.gloo_times", str(job.world)]
    done = subprocess.run(
        [*program, *job.words(job.layers // 2), *(["--smoke"] if smoke else [])],
        capture_output=True, text=True, timeout=RANKS_S, env=environment, check=False, cwd=ROOT,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"gloo was not timed: {done.stderr[-2000:]}")
    found: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


class RanksPlan:
    """A recipe for ranks that share the device."""

    def __init__(self, words: list[str], world: int, smoke: bool) -> None:
        from meshwright import clusters
        from meshwright.api.targets import job_for
        from meshwright.dryrun.run import validate
        from meshwright.engine.model_families import family_of
        from meshwright.engine.tiny import tiny_recipe
        from meshwright.recipes import overrides as override

        self.device, self.smoke = "cpu" if smoke else "cuda", smoke
        self.words = words
        if smoke:
            kept = [word for word in words if not word.startswith("data.seq_length")]
            self.words = [*kept, "data.seq_length=64"]
        gpus = clusters.cluster(f"{world}xH200")
        recipe = override.apply(job_for(self.words[0], None, str(gpus), ()).runnable(), self.words[1:])
        family = family_of(recipe)
        self.config = family.config_for(recipe)
        if smoke:
            requested = override.requested(recipe, self.words[1:])
            recipe, self.config = tiny_recipe(recipe, self.config, world, requested)
        self.case = validate(recipe, family.spec_of(recipe, self.config), gpus)

    def task(self, points: list[dict[str, Any]]) -> tuple[Any, Any]:
        """Return the plan and the task of a rank, with a network of measured points."""
        from meshwright import clusters
        from meshwright.rehearsal.network import MeasuredNetwork
        from meshwright.rehearsal.run import _Plan
        from meshwright.rehearsal.run_plan import Device

        network = MeasuredNetwork(points, blocks_host=True, source="gloo")
        gpu = None if self.smoke else clusters.cluster("auto").gpu
        plan = _Plan(self.case, self.config, Device(self.device, gpu), network, 1.0, [0], None, 60.0)
        return plan, plan.task((0, (0,)), None)


def ranks(job: Ranks, smoke: bool) -> dict[str, Any]:
    """Measure ranks that share the GPU over gloo, then rehearse the same ranks side by side."""
    from meshwright.dryrun.ranks import run_parallel
    from meshwright.rehearsal.peers import Peers
    from meshwright.rehearsal.rank import ALL, NONE, rehearse_rank

    words = job.words(job.layers)
    setup = RanksPlan(words, job.world, smoke)
    row: dict[str, Any] = {"command": shlex.join(["meshwright", "bench", *words, "--nproc", str(job.world)])}
    more = ["--nproc", str(job.world), *(["--tiny"] if smoke else [])]
    measured = command(["bench", *setup.words, f"train.steps={RANK_STEPS + 2}", *more], RANKS_S)
    if "error" in measured:
        return failed(row, measured, "bench")
    points = measured_gloo(job, smoke)
    plan, task = setup.task(points)
    peers = Peers(mp.get_context("spawn"), job.world, RANKS_S)
    tasks = [replace(task, fixed_steps=RANK_STEPS, peers=peers.at(place)) for place in range(job.world)]
    found = run_parallel(rehearse_rank, tasks, job.world, lambda _: None, lambda _: job.name, children="spawn")
    if errors := [one.out_of_memory for one in found if one.out_of_memory]:
        return {**row, "error": errors[0]}
    from meshwright.rehearsal.compose import TimedRank

    times, silent = (
        [TimedRank(task, result, plan.micro_batches).time(variant) for result in found] for variant in (ALL, NONE)
    )
    totals = found[0].totals
    return {
        **row,
        "measured_s": measured["step_s"],
        "rehearsed_s": max(one.step_s for one in times),
        "by_rank_s": [one.step_s for one in times],
        "without_network_s": max(one.step_s for one in silent),
        "collectives": {f"{axis} {kind}": list(values) for (axis, kind), values in totals.items()},
        "measured_parts_s": measured["step_parts_s"],
        "gloo": points,
        "wall_s": max(result.wall_s for result in found),
    }


def save(path: Path, rows: dict[str, Any]) -> None:
    report = {"date": date.today().isoformat(), "made_by": "python benchmarks/rehearse_h200.py", "rows": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


# --- table ---------------------------------------------------------------------------------------------------------


def line(name: str, row: dict[str, Any]) -> str:
    """Return one line of the table."""
    if "error" in row:
        return f"{name:<46} FAILED {' '.join(row['error'].split())[-300:]}"
    measured, rehearsed = row.get("measured_s") or row.get("published_s"), row["rehearsed_s"]
    shown = f"{measured:8.4f}" if measured else "       -"
    dry = row.get("dryrun_gib") or row.get("measured_gib")
    gib = row.get("rehearsed_gib")
    memory = f"{gib:7.2f} / {dry:7.2f} GiB {100 * (gib / dry - 1):+5.1f} %" if gib and dry else ""
    return f"{name:<46} {shown} {rehearsed:8.4f} s {_error(rehearsed, measured)}  {row['wall_s']:5.0f} s  {memory}"


def _error(rehearsed: float, measured: float | None) -> str:
    return f"{100 * (rehearsed / measured - 1):+6.1f} %" if measured else "       -"


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--minutes", type=float, default=8.0)
    options.add_argument("--out", type=Path, default=RESULTS)
    options.add_argument("--only", action="append", default=[])
    options.add_argument("--again", action="store_true")
    options.add_argument("--memory", action="store_true")
    options.add_argument("--smoke", action="store_true")
    asked = options.parse_args()
    end = time.monotonic() + 60 * asked.minutes
    kept = json.loads(asked.out.read_text())["rows"] if asked.out.exists() and not asked.again else {}
    wanted = [one for one in ROWS if not asked.only or any(word in one.name for word in asked.only)]
    waiting = [one for one in wanted if one.name not in kept or "error" in kept[one.name]]
    for job in [] if asked.memory else waiting:
        if end - time.monotonic() < job.seconds and not asked.smoke:
            print(f"{job.name:<46} no time left", flush=True)
            continue
        start = time.monotonic()
        try:
            run = {Single: single, Cluster: cluster, Ranks: ranks}[type(job)]
            row = run(job, asked.smoke)  # type: ignore[operator]
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            row = {"error": traceback.format_exc()[-3000:]}
        row["took_s"] = round(time.monotonic() - start, 1)
        kept[job.name] = row
        print(line(job.name, row), flush=True)
        save(asked.out, kept)
    for job in wanted if asked.memory else ():
        if isinstance(job, Cluster) and "error" not in kept.get(job.name, {"error": ""}):
            kept[job.name]["dryrun_gib"] = dry_run_gib(job)
            save(asked.out, kept)
    print(f"\n{'row':<46} measured rehearsed     error   wall  rehearsed / dry run or measured memory")
    for job in wanted:
        if job.name in kept:
            print(line(job.name, kept[job.name]))
    return 0 if not any("error" in kept.get(one.name, {}) for one in wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
