"""The calibration that a run gives to a plan: `--like RUN`."""

from __future__ import annotations

from math import gcd
from pathlib import Path

import msgspec

from meshwright import clusters, doctor, planner
from meshwright.api.measured_runs import METRICS, is_table, measurement, runs_in
from meshwright.api.targets import Job
from meshwright.clusters import Cluster
from meshwright.costs import calibrate
from meshwright.costs.calibration import Calibration
from meshwright.costs.measurements import Measurement, read_with_notes
from meshwright.doctor import Run
from meshwright.doctor.match_recipe import gpus_of, stated_fields
from meshwright.errors import InputError
from meshwright.recipes.types import recipe_fields


def calibration_like(run: str, on: Cluster, job: Job | None) -> Calibration:
    """Return the shipped calibration with the speed of a run, for a plan on these GPUs."""
    fix = (f"meshwright calibrate {run} --recipe FILE --gpus {on.argument} --out mine.toml", "--calibration mine.toml")
    try:
        rows, assumed = _measured(Path(run), on, job)
        profiles = calibrate.from_runs(rows, run + assumed)
    except InputError as error:
        raise InputError(error.reason, field="like", value=run, fix=fix) from None
    profile = next((one for one in profiles if one.gpu == on.gpu.name), None)
    if profile is None:
        names = ", ".join(one.gpu for one in profiles)
        reason = f"the run is on {names}, and the plan is for {on.gpu.name}: its speed says nothing about that"
        raise InputError(reason, field="like", value=run, fix=("remove --like", f"--gpus 8x{profiles[0].gpu}"))
    return calibrate.with_machine(profile)


def _measured(path: Path, on: Cluster, job: Job | None) -> tuple[list[Measurement], str]:
    """Return what the runs of a path measured, and what is assumed about them, as the end of their name."""
    if is_table(path):
        return read_with_notes(path)[0], ""
    if path.is_dir() and any(path.rglob(METRICS)):
        return runs_in(path)[0], ""
    run = doctor.read(path)
    ran_on = _cluster_of(run, on)
    found = _measured_log(run, ran_on, on, job)
    if isinstance(found, str):
        raise InputError(found.removeprefix("no estimate: "), field="like", value=str(path))
    gpu = run.header.gpu
    unnamed = "which does not name its GPUs" if not gpu else f"whose GPU {gpu} is not in the catalogue"
    return [found], "" if gpus_of(run) else f", {unnamed}: {ran_on} is assumed"


def _measured_log(run: Run, ran_on: Cluster, on: Cluster, job: Job | None) -> Measurement | str:
    """Return what the run of a log measured.

    A log that does not name its model ran the plan's file.
    """
    header = run.header
    unnamed = header.recipe is None and not (header.arguments or header.model or header.recipe_name)
    if unnamed and job is not None and job.content is not None and ran_on.world == on.world:
        header = msgspec.structs.replace(header, file=job.content.path, file_fields=frozenset(recipe_fields()))
        case = planner.case_of(job.recipe, job.model, ran_on, job.engine)
        return measurement(msgspec.structs.replace(run, header=header), case, "", None, 1)
    case_found, why = doctor.case_of_run(run, ran_on)
    return measurement(run, case_found, why, stated_fields(run, ()), 1)


def _cluster_of(run: Run, on: Cluster) -> Cluster:
    """Return the GPUs of a run: nodes and network as the plan's, unless the log names its nodes or another GPU type.

    A speed fitted on the nodes that a GPU usually has, and used on those of the plan, would count the difference of
    their links as that of the GPU.
    """
    named = gpus_of(run)
    theirs = None if named is None else clusters.cluster(named)
    if theirs is not None and theirs.gpu.name != on.gpu.name:
        return theirs
    if theirs is not None and run.header.gpus:  # our own logs name their nodes
        return msgspec.structs.replace(on, nodes=theirs.nodes, gpus_per_node=theirs.gpus_per_node)
    world = run.header.world or on.world
    size = gcd(world, on.gpus_per_node) if world > on.gpus_per_node else world
    return msgspec.structs.replace(on, nodes=world // size, gpus_per_node=size)
