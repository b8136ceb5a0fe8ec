"""The calibration that a run gives to a plan: `--like RUN`."""

from __future__ import annotations

import shlex
from contextlib import suppress
from math import gcd
from pathlib import Path
from typing import NamedTuple

import msgspec

from meshwright import clusters, doctor, models, planner
from meshwright.api.measured_runs import METRICS, is_table, measurement, runs_in
from meshwright.api.targets import Job
from meshwright.clusters import Cluster
from meshwright.costs import calibrate
from meshwright.costs.calibration import Calibration
from meshwright.costs.measurements import Measurement, read_with_notes
from meshwright.doctor import Run
from meshwright.doctor.logged_settings import stated_fields
from meshwright.doctor.match_recipe import gpus_of, logged_overrides
from meshwright.errors import InputError
from meshwright.notes import no_notes
from meshwright.planner import Question
from meshwright.recipes.case import Case
from meshwright.recipes.types import Recipe, recipe_fields

SAME_MODEL = 0.25  # of the parameters: counts differ by tied embeddings, other models by more


class _Measured(NamedTuple):
    """What the runs of a path measured, and what is assumed about them, as the end of their name."""

    rows: list[Measurement]
    assumed: str = ""  # about the model
    gpus: str = ""  # about the GPUs; empty if the runs name theirs
    words: str = ""  # arguments with which `calibrate` measures the same


def calibration_like(run: str, question: Question, job: Job | None) -> Calibration:
    """Return the shipped calibration with the speed of a run, for the plan that a question is about."""
    on = question.cluster
    try:
        found = _measured(Path(run), question, job)
    except InputError as error:
        raise InputError(error.reason, field="like", value=run, fix=error.fix or _calibrating(run, question)) from None
    naming = _naming_gpus(run, found) if found.gpus else ()
    try:
        profiles = calibrate.from_runs(found.rows, run + found.assumed + found.gpus)
    except InputError as error:
        raise InputError(error.reason + found.gpus, field="like", value=run, fix=naming or error.fix) from None
    profile = next((one for one in profiles if one.gpu == on.gpu.name), None)
    if profile is None:
        names = ", ".join(one.gpu for one in profiles)
        reason = f"the run is on {names}, and the plan is for {on.gpu.name}: its speed says nothing about that"
        raise InputError(reason, field="like", value=run, fix=("remove --like", f"--gpus 8x{profiles[0].gpu}"))
    if naming and profile.is_far_off:
        how = f"if the run was on other GPUs than {on.gpu.name}, name them: {', then '.join(naming)}"
        profile = msgspec.structs.replace(profile, doubts=(*profile.doubts, how))
    return calibrate.with_machine(profile)


def _calibrating(run: str, question: Question) -> tuple[str, ...]:
    """Return the commands that fit the speed to the file of the run, which a model of the user's own does not name."""
    own = f" --model {question.model_ref}" if models.is_path(question.model_ref) else ""
    on = question.cluster
    with suppress(InputError):  # the log may say how many GPUs ran
        on = _cluster_of(doctor.read(Path(run)), on)
        on = msgspec.structs.replace(on, nodes_typed=on.nodes_typed or on.nodes != question.cluster.nodes)
    typed = f"meshwright calibrate {run} --recipe FILE{own} --gpus {on.argument} --out mine.toml"
    return typed, "--calibration mine.toml"


def _naming_gpus(run: str, found: _Measured) -> tuple[str, ...]:
    """Return the commands that fit the speed of a log whose GPUs the user names."""
    worlds = [row.case.cluster.world for row in found.rows if row.case is not None]
    gpus = f"--gpus {worlds[0] if worlds else 8}xGPU"
    words = " ".join(filter(None, ("meshwright calibrate", run, found.words, gpus, "--out mine.toml")))
    return words, "--calibration mine.toml"


def _measured(path: Path, question: Question, job: Job | None) -> _Measured:
    """Return what the runs of a path measured."""
    if is_table(path):
        rows, notes = read_with_notes(path)
        return _Measured(rows, "".join(f"; {note}" for note in notes))
    if path.is_dir() and any(path.rglob(METRICS)):
        return _Measured(runs_in(path)[0])
    run = doctor.read(path)
    ran_on = _cluster_of(run, question.cluster)
    measured, taken, words = _measured_log(run, ran_on, question, job)
    if isinstance(measured, str):
        reason = measured.removeprefix("no estimate: ").partition("; add --")[0]  # options of doctor
        raise InputError(reason, field="like", value=str(path))
    gpu = run.header.gpu
    why = "which does not name its GPUs" if not gpu else f"whose GPU {gpu} is not in the catalogue"
    return _Measured([measured], taken, "" if gpus_of(run) else f", {why}: {ran_on} is assumed", words)


def _measured_log(run: Run, ran_on: Cluster, question: Question, job: Job | None) -> tuple[Measurement | str, str, str]:
    """Return what the run of a log measured, or why it cannot be used; what is assumed about its model, and its words.

    A log that does not name its model ran the plan's file; one whose model is not in the catalogue ran the plan's.
    """
    header, same_gpus = run.header, ran_on.world == question.cluster.world
    is_named = bool(header.states_settings or header.model or header.recipe_name)
    if not is_named and header.recipe is None and job is not None and job.content is not None and same_gpus:
        header = msgspec.structs.replace(header, file=job.content.path, file_fields=frozenset(recipe_fields()))
        case = planner.case_of(job.recipe, job.model, ran_on, job.engine)
        measured = measurement(msgspec.structs.replace(run, header=header), case, "", None, 1)
        return measured, "", f"--recipe {shlex.join(job.words)}"
    case_found, why = doctor.case_of_run(run, ran_on)
    taken = words = ""
    if case_found is None and is_named and header.recipe is None:
        recipe = job.recipe if job is not None and same_gpus else None
        case_found = _planned_case(run, msgspec.structs.replace(question, cluster=ran_on), recipe)
        unknown = f"whose model {header.model} is not in the catalogue" if header.model else "which has no known model"
        taken, words = f", {unknown}: {question.model_ref} is assumed", f"--model {question.model_ref}"
    return measurement(run, case_found, why, stated_fields(run, ()), 1), taken, words


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
