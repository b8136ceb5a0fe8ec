"""The rehearsal: the engine's step on one GPU with a simulated network. Imports torch only when it runs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from meshwright import clusters, costs, extras
from meshwright.api import requests as plan_requests
from meshwright.api import run_requests as requests
from meshwright.api.dry_run import DIGITS, other_engine, rounded
from meshwright.api.recipe_cluster import cluster_for
from meshwright.api.resolve import assumed_in, write_text
from meshwright.api.responses import Part, Response, to_json
from meshwright.api.targets import Job, job_for
from meshwright.api.verb_function import verb
from meshwright.clusters import Cluster, Gpu
from meshwright.costs.timeline import ScheduledPass
from meshwright.dryrun.types import OtherEngine
from meshwright.errors import InputError, MeshwrightError
from meshwright.models import ModelSpec, find
from meshwright.planner import case_of, with_fastest_micro_batch
from meshwright.recipes import overrides as override
from meshwright.recipes.case import Case, model_of
from meshwright.recipes.engine_models import require_trained
from meshwright.recipes.types import ENGINES, Recipe, field_value, recipe_fields
from meshwright.rehearsal.network import Network, load_network
from meshwright.rehearsal.run import BUDGET_S, LARGEST_ON_CPU
from meshwright.rehearsal.run import rehearse as run_rehearsal
from meshwright.rehearsal.run_plan import Device
from meshwright.rehearsal.trace_file import chrome_trace
from meshwright.rehearsal.types import Alternative, CollectiveTime, Rehearsal

ALTERNATIVES = 2
RANKED = 12  # plans among which the alternatives are


@verb(requests.Rehearse)
def rehearse(request: requests.Rehearse) -> Rehearsal:
    """Time a recipe's step of every kind of rank on this machine's GPU, with a simulated network."""
    extras.require("rehearse", *extras.ENGINE)
    if request.alternatives and request.tiny:
        raise InputError("rehearses layouts of the full model", field="alternatives", fix=("without --tiny",))
    options = {"framework": request.framework, "model": request.model}
    job = job_for(request.recipe, request.goal, request.gpus, request.overrides, **options)
    kept, auto = override.split_auto(request.overrides)
    recipe = override.apply(job.runnable(), kept)
    require_trained(find(recipe.model))
    cluster = clusters.cluster(cluster_for(recipe, request.gpus, job.content))
    if auto:
        recipe = with_fastest_micro_batch(Case(recipe, model_of(recipe), cluster))
    device = _device(request)
    network = load_network(request.network) if request.network else None
    for field in ("trace", "out"):
        _check_file(getattr(request, field), field)
    found = _run(request, recipe, cluster, device, network, kept)
    if request.alternatives:
        found = msgspec.structs.replace(
            found, alternatives=_alternatives(request, found, recipe, cluster, device, network)
        )
    found = found if request.tiny else _projected(found, job, kept, recipe, cluster)
    _write(request, found)
    return found


def _projected(found: Rehearsal, job: Job, kept: Sequence[str], recipe: Recipe, cluster: Cluster) -> Rehearsal:
    """Return the rehearsal with the engine that the target is for, if that is not ours, and its step by the cost model.

    Its own code was not run: what the two engines do differently is known to the cost model alone.
    """
    stands_in = other_engine(job, kept, recipe, cluster)
    if stands_in is None:
        return found
    step_s = found.step_s * engine_ratio(override.apply(job.recipe, kept), recipe, job.model, job.engine, cluster)
    text = (
        f"{job.engine} itself: about {step_s:.3f} s, the rehearsed step times the ratio of both engines in the "
        "estimate; its code was not run, and the band is not for it"
    )
    notes = (*found.notes, text)
    return msgspec.structs.replace(found, other_engine=stands_in, other_engine_step_s=step_s, notes=notes)


def engine_ratio(own: Recipe, ours: Recipe, model: ModelSpec, engine: str, cluster: Cluster) -> float:
    """Return the estimated step of a recipe on its engine over that of the recipe that stands in for it on ours."""
    theirs = costs.estimate(case_of(own, model, cluster, engine)).step_s
    return float(theirs / costs.estimate(case_of(ours, model, cluster, ENGINES[0])).step_s)


def _device(request: requests.Rehearse) -> Device:
    """Return the device that runs the kernels; raise InputError if this machine has no GPU and no CPU was asked for."""
    if request.device == "cpu":
        return Device("cpu")
    try:
        here = clusters.cluster("auto")
    except InputError as error:
        cause = error.reason.partition("; ")[0]  # without the advice of commands that take another cluster
        raise InputError(
            f"rehearse times kernels on an NVIDIA GPU: {cause}. The dry run needs none and has memory, FLOPs and "
            "collectives of the same step",
            field="device",
            value=request.device,
            fix=(_dry_run(request), "--device cpu --tiny tries the command with a small model"),
        ) from None
    return Device("cuda", here.gpu, float(here.gpu.memory_gib))


def _dry_run(request: requests.Rehearse) -> str:
    """Return the command of the dry run of the same step."""
    words = ["meshwright", "dryrun", str(request.recipe)]
    for name in ("gpus", "goal", "model", "framework"):
        value = getattr(request, name)
        words += [f"--{name}", str(value)] if value is not None else []
    return shlex.join([*words, *request.overrides])


def _check_file(path: str | None, field: str) -> None:
    if path is None:
        return
    if Path(path).suffix != ".json":
        raise InputError(
            "must end in .json: it is a JSON file", field=field, value=path, fix=(f"--{field} {Path(path).stem}.json",)
        )
    if not Path(path).expanduser().absolute().parent.is_dir():
        raise InputError("its folder does not exist", field=field, value=path, fix=(f"mkdir -p {Path(path).parent}",))


def _run(
    request: requests.Rehearse,
    recipe: Recipe,
    cluster: Cluster,
    device: Device,
    network: Network | None,
    kept: Sequence[str] = (),
) -> Rehearsal:
    from meshwright.engine.warning_filters import no_needless_warnings

    no_needless_warnings()
    config = None
    if request.tiny:
        from meshwright.engine.model_families import family_of
        from meshwright.engine.tiny import tiny_recipe

        family = family_of(recipe)
        recipe, config = tiny_recipe(recipe, family.config_for(recipe), cluster.world, override.requested(recipe, kept))
    if device.kind == "cpu":
        _require_small(recipe, config, request)
    try:
        return run_rehearsal(
            recipe,
            cluster,
            device,
            config=config,
            network=network,
            network_name=f"measured: {request.network}" if network is not None else "",
            scale_to=_scaled_to(request, cluster, device),
            layers=request.layers,
            budget_s=request.seconds or BUDGET_S,
            progress=request.progress or (lambda _: None),
        )
    except (MeshwrightError, ImportError):
        raise
    except Exception as error:
        from meshwright.engine.faults import explain
        from meshwright.engine.rank_env import Process

        raise explain(error, Process()) from error


def _require_small(recipe: Recipe, config: Any, request: requests.Rehearse) -> None:
    if config is not None:
        return
    weights = model_of(recipe).params.total
    if weights > LARGEST_ON_CPU:
        raise InputError(
            f"{recipe.model} has {weights / 1e9:.1f} billion parameters; a CPU rehearses at most "
            f"{LARGEST_ON_CPU / 1e9:g} billion",
            field="device",
            value="cpu",
            fix=("--device cpu --tiny", _dry_run(request)),
        )


def _scaled_to(request: requests.Rehearse, cluster: Cluster, device: Device) -> Gpu | None:
    """Return the GPU type to which kernel times are scaled: the cluster's unless another was asked for."""
    if device.kind == "cpu":
        if request.as_gpu is not None:
            reason = "scales kernels of one GPU to another, and these run on a CPU"
            raise InputError(reason, field="--as", value=request.as_gpu, fix=("without --as", "without --device cpu"))
        return None
    return clusters.gpu(request.as_gpu) if request.as_gpu is not None else cluster.gpu


def _alternatives(
    request: requests.Rehearse,
    found: Rehearsal,
    recipe: Recipe,
    cluster: Cluster,
    device: Device,
    network: Network | None,
) -> tuple[Alternative, ...]:
    """Rehearse the best other layouts of the same training, by the planner's order."""
    from meshwright.api.planning import plan

    ranking = plan.handle(plan_requests.Plan(target=recipe, gpus=str(cluster), engine=ENGINES[0], top=RANKED))
    tried: list[Alternative] = []
    for one in ranking.plans:
        changes = _changes(recipe, one.recipe)
        if not changes or not one.estimate.fits or len(tried) == ALTERNATIVES:
            continue
        try:
            other = _run(request, one.recipe, cluster, device, network)
        except MeshwrightError:
            continue
        speedup = found.step_s / other.step_s
        tried.append(
            Alternative(
                changes=changes,
                step_s=other.step_s,
                tokens_per_s_per_gpu=other.tokens_per_s_per_gpu,
                mfu=other.mfu or 0.0,
                allocated_gib=other.allocated_gib,
                speedup=speedup,
                band_pct=other.band_pct,
            )
        )
    return tuple(sorted(tried, key=lambda one: one.step_s))


def _changes(recipe: Recipe, other: Recipe) -> tuple[str, ...]:
    """Return the overrides that make one recipe's layout and kernels the other's."""
    from meshwright.recipes.format_override import format_override

    keys = [key for key in recipe_fields() if key.startswith(("layout.", "kernels."))]
    differing = [key for key in keys if field_value(recipe, key) != field_value(other, key)]
    return tuple(format_override(key, field_value(other, key)) for key in differing)


def _write(request: requests.Rehearse, found: Rehearsal) -> None:
    if request.trace:
        write_text(request.trace, json.dumps(chrome_trace(found)), "trace")
    if request.out:
        write_text(request.out, json.dumps(to_json(rehearsal_response(found, request)), indent=2) + "\n", "out")


class RehearsedRank(Part, frozen=True, kw_only=True):
    """One kind of rank."""

    rank: int
    pp_rank: int
    represents: Sequence[int]
    layers: int
    layers_run: int
    micro_batches: int
    micro_batches_run: int
    steps: int
    busy_s: float
    rest_s: float
    compute_s: float
    optimizer_s: float
    exposed_s: Mapping[str, float]
    spread_pct: float
    allocated_gib: float | None
    reserved_gib: float | None
    collectives: Sequence[CollectiveTime]
    wall_s: float


class RehearsalBand(Part, frozen=True, kw_only=True):
    """The band of the step time."""

    step_pct: float
    step_low_s: float
    step_high_s: float


class RehearsalResponse(Response, frozen=True, kw_only=True):
    """The rehearsed step: time with its parts and band, MFU, memory, and every kind of rank."""

    kind: Literal["rehearsal"] = "rehearsal"
    other_engine: OtherEngine | UnsetType = UNSET  # ours was rehearsed in its place
    other_engine_step_s: float | None = None  # of that engine: this step times the ratio of both in the cost model
    recipe: str
    model: str
    cluster: str
    world: int
    device: str
    scaled_to: str | None
    scale: float
    network: str
    step_s: float
    step_parts_s: Mapping[str, float]
    band: RehearsalBand
    tokens_per_s_per_gpu: float
    tflops_per_gpu: float
    mfu: float | None
    mfu_convention: str
    estimate_s: float
    allocated_gib: float | None
    reserved_gib: float | None
    capacity_gib: float
    fits: bool
    limits: Sequence[str]
    ranks: Sequence[RehearsedRank]
    schedule: str
    passes: Sequence[ScheduledPass]
    alternatives: Sequence[Alternative]
    versions: Mapping[str, str]
    wall_s: float
    settings: Mapping[str, Any]
    notes: Sequence[str] = ()
    assumed: Sequence[clusters.Assumption] = ()

    @property
    def ok(self) -> bool:
        """Return whether the step fits the cluster's GPUs."""
        return self.fits


def rehearsal_response(found: Rehearsal, request: requests.Rehearse | None = None) -> RehearsalResponse:
    """Return the response of rehearse."""
    low, high = found.step_range_s
    same = set(RehearsalResponse.__struct_fields__) & set(found.__struct_fields__) - {
        "ranks",
        "other_engine",
        "assumed",
    }
    values = {name: rounded(getattr(found, name)) for name in same}
    return RehearsalResponse(
        **values,
        other_engine=found.other_engine or UNSET,
        step_parts_s=rounded(found.parts),
        band=RehearsalBand(step_pct=found.band_pct, step_low_s=round(low, DIGITS), step_high_s=round(high, DIGITS)),
        ranks=[
            RehearsedRank(**{name: rounded(getattr(one, name)) for name in RehearsedRank.__struct_fields__})
            for one in found.ranks
        ],
        assumed=(*(assumed_in(request.gpus) if request is not None else ()), *found.assumed),
    )
