"""The calibration that a run gives to a plan: `--like RUN`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from meshwright import clusters, doctor, planner
from meshwright.api.measured_runs import METRICS, is_table, measurement, runs_in
from meshwright.api.targets import Job
from meshwright.clusters import Cluster
from meshwright.costs import calibrate
from meshwright.costs.calibration import Calibration
from meshwright.costs.measurements import Measurement, read_with_notes
from meshwright.doctor.match_recipe import gpus_of, stated_fields
from meshwright.errors import InputError
from meshwright.recipes.types import recipe_fields


def calibration_like(run: str, on: Cluster, job: Job | None) -> Calibration:
    """Return the shipped calibration with the speed of a run, for a plan on these GPUs."""
    fix = (f"meshwright calibrate {run} --recipe FILE --gpus {on.argument} --out mine.toml", "--calibration mine.toml")
    try:
        profiles = calibrate.from_runs(_measured(Path(run), on, job), run)
    except InputError as error:
        raise InputError(error.reason, field="like", value=run, fix=fix) from None
    profile = next((one for one in profiles if one.gpu == on.gpu.name), None)
    if profile is None:
        names = ", ".join(one.gpu for one in profiles)
        reason = f"the run is on {names}, and the plan is for {on.gpu.name}: its speed says nothing about that"
        raise InputError(reason, field="like", value=run, fix=("remove --like", f"--gpus 8x{profiles[0].gpu}"))
    return calibrate.with_machine(profile)


def _measured(path: Path, on: Cluster, job: Job | None) -> list[Measurement]:
    """Return what the runs of a path measured."""
    if is_table(path):
        return read_with_notes(path)[0]
    if path.is_dir() and any(path.rglob(METRICS)):
        return runs_in(path)[0]
    found = _measured_log(path, on, job)
    if isinstance(found, str):
        raise InputError(found.removeprefix("no estimate: "), field="like", value=str(path))
    return [found]


def _measured_log(path: Path, on: Cluster, job: Job | None) -> Measurement | str:
    """Return what the run of a log measured.

    A log that does not name its GPU type ran on that of the plan; one that does not name its model ran the plan's file.
    """
    run = doctor.read(path)
    header = run.header
    gpus = gpus_of(run) or (f"{header.world}x{on.gpu.name}" if header.world else str(on))
    unnamed = header.recipe is None and not (header.arguments or header.model or header.recipe_name)
    if unnamed and job is not None and job.content is not None and clusters.cluster(gpus).world == on.world:
        header = msgspec.structs.replace(header, file=job.content.path, file_fields=frozenset(recipe_fields()))
        case = planner.case_of(job.recipe, job.model, clusters.cluster(gpus), job.engine)
        return measurement(msgspec.structs.replace(run, header=header), case, "", None, 1)
    case_found, why = doctor.case_of_run(run, None if header.recipe is not None else gpus)
    return measurement(run, case_found, why, stated_fields(run, ()), 1)
