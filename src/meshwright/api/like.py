"""The calibration that a run gives to a plan: `--like RUN`."""

from __future__ import annotations

from math import gcd
from pathlib import Path

import msgspec

from meshwright import clusters, doctor, models, planner
from meshwright.api.measured_runs import METRICS, is_table, measurement, runs_in
from meshwright.api.targets import Job
from meshwright.clusters import Cluster
from meshwright.costs import calibrate
from meshwright.costs.calibration import Calibration
from meshwright.costs.measurements import Measurement, read_with_notes
from meshwright.doctor import Run
from meshwright.doctor.match_recipe import gpus_of, logged_overrides, stated_fields
from meshwright.errors import InputError
from meshwright.notes import no_notes
from meshwright.planner import Question
from meshwright.recipes.case import Case
from meshwright.recipes.types import Recipe, recipe_fields

SAME_MODEL = 0.25  # of the parameters: counts differ by tied embeddings, other models by more


def calibration_like(run: str, question: Question, job: Job | None) -> Calibration:
    """Return the shipped calibration with the speed of a run, for the plan that a question is about."""
    on = question.cluster
    try:
        rows, assumed = _measured(Path(run), question, job)
        profiles = calibrate.from_runs(rows, run + assumed)
    except InputError as error:
        raise InputError(error.reason, field="like", value=run, fix=error.fix or _calibrating(run, question)) from None
    profile = next((one for one in profiles if one.gpu == on.gpu.name), None)
    if profile is None:
        names = ", ".join(one.gpu for one in profiles)
        reason = f"the run is on {names}, and the plan is for {on.gpu.name}: its speed says nothing about that"
        raise InputError(reason, field="like", value=run, fix=("remove --like", f"--gpus 8x{profiles[0].gpu}"))
    return calibrate.with_machine(profile)


def _calibrating(run: str, question: Question) -> tuple[str, ...]:
    """Return the commands that fit the speed to the file of the run, which a model of the user's own does not name."""
    own = f" --model {question.model_ref}" if models.is_path(question.model_ref) else ""
    typed = f"meshwright calibrate {run} --recipe FILE{own} --gpus {question.cluster.argument} --out mine.toml"
    return typed, "--calibration mine.toml"


def _measured(path: Path, question: Question, job: Job | None) -> tuple[list[Measurement], str]:
    """Return what the runs of a path measured, and what is assumed about them, as the end of their name."""
    if is_table(path):
        rows, notes = read_with_notes(path)
        return rows, "".join(f"; {note}" for note in notes)
    if path.is_dir() and any(path.rglob(METRICS)):
        return runs_in(path)[0], ""
    run = doctor.read(path)
    ran_on = _cluster_of(run, question.cluster)
    found, taken = _measured_log(run, ran_on, question, job)
    if isinstance(found, str):
        reason = found.removeprefix("no estimate: ").partition("; add --")[0]  # options of doctor
        raise InputError(reason, field="like", value=str(path))
    gpu = run.header.gpu
    unnamed = "which does not name its GPUs" if not gpu else f"whose GPU {gpu} is not in the catalogue"
    return [found], taken + ("" if gpus_of(run) else f", {unnamed}: {ran_on} is assumed")


def _measured_log(run: Run, ran_on: Cluster, question: Question, job: Job | None) -> tuple[Measurement | str, str]:
    """Return what the run of a log measured, or why it cannot be used; and what is assumed about its model.

    A log that does not name its model ran the plan's file; one whose model is not in the catalogue ran the plan's.
    """
    header, same_gpus = run.header, ran_on.world == question.cluster.world
    is_named = bool(header.arguments or header.model or header.recipe_name)
    if not is_named and header.recipe is None and job is not None and job.content is not None and same_gpus:
        header = msgspec.structs.replace(header, file=job.content.path, file_fields=frozenset(recipe_fields()))
        case = planner.case_of(job.recipe, job.model, ran_on, job.engine)
        return measurement(msgspec.structs.replace(run, header=header), case, "", None, 1), ""
    case_found, why = doctor.case_of_run(run, ran_on)
    taken = ""
    if case_found is None and is_named and header.recipe is None:
        recipe = job.recipe if job is not None and same_gpus else None
        case_found = _planned_case(run, msgspec.structs.replace(question, cluster=ran_on), recipe)
        unknown = f"whose model {header.model} is not in the catalogue" if header.model else "which has no known model"
        taken = f", {unknown}: {question.model_ref} is assumed"
    return measurement(run, case_found, why, stated_fields(run, ()), 1), taken


def _planned_case(run: Run, question: Question, recipe: Recipe | None) -> Case:
    """Return the case of the plan's model, or of its file, with what the log states; raise if the log's is another."""
    logged, planned = run.header.parameters, question.model.params.total
    if logged and abs(planned / logged - 1) > SAME_MODEL:
        name = run.header.model or "its model"
        reason = f"the log's {name} has {logged / 1e9:.3g} B parameters, and {question.model_ref} {planned / 1e9:.3g} B"
        typed = f"meshwright calibrate {run.path} --model FOLDER --gpus {question.cluster.argument} --out mine.toml"
        reason += ": it is another model; calibrate with the folder of its config.json"
        raise InputError(reason, field="like", value=run.path, fix=(typed, "--calibration mine.toml"))
    engine = doctor.ENGINE.get(run.kind, question.engine)
    asked = msgspec.structs.replace(question, engine=engine, seq_length=run.header.seq_length)
    with no_notes():  # on values that are the run's, not the plan's
        return planner.plan_fixed(asked, recipe, logged_overrides(run, ())).case


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
