"""Diagnose a run from its log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, UnsetType

from meshwright import clusters, doctor, models
from meshwright.api import run_requests as requests
from meshwright.api.argument_names import recipe_key
from meshwright.api.counted_tokens import LENGTH, of_samples, with_counted_tokens
from meshwright.api.planning import estimate
from meshwright.api.questions import load_calibration
from meshwright.api.resolve import model_named, typed_model
from meshwright.api.responses import Part, Response, Severity, copied
from meshwright.api.targets import file_of, job_for
from meshwright.api.verb_function import verb
from meshwright.choices import FRONT_ENDS
from meshwright.doctor import Checkup, Run
from meshwright.doctor.assumed_settings import (
    assumptions,
    degrees_that_divide,
    impossible_goal,
    logged_goal,
    trainer_layout,
    unstated_layout,
)
from meshwright.doctor.finding import Evidence, Figure, Remedy
from meshwright.doctor.implied_settings import (
    inferred_batch,
    with_all_gpus,
    with_implied_length,
    with_implied_micro_batch,
)
from meshwright.doctor.logged_settings import file_differences, stated_fields, without_intervals
from meshwright.doctor.match_recipe import (
    closest_recipe,
    contradicting_model,
    described,
    gpus_of,
    gpus_unknown,
    logged_overrides,
    same_model,
)
from meshwright.errors import InputError
from meshwright.frameworks import Content, Framework, import_file
from meshwright.frameworks.other_losses import loss_of
from meshwright.frameworks.other_trainers import OtherLossError, OtherTrainerError
from meshwright.frameworks.required_changes import ChangedFile
from meshwright.frameworks.to_recipe import ImportedRecipe, import_recipe
from meshwright.notes import no_notes
from meshwright.planner import calibration_notes
from meshwright.recipes import index
from meshwright.recipes.case import model_of
from meshwright.recipes.types import Recipe, recipe_fields

if TYPE_CHECKING:
    from meshwright.recipes.case import Case

GLOBAL_BATCH = "train.global_batch_size"


@verb(requests.Doctor)
def diagnose(request: requests.Doctor) -> Checkup:
    """Return the findings for a run, by its folder or its log, with remedies."""
    run, case, notes = run_and_case(request)
    run = _with_options(run, request)
    calibration = load_calibration(request.calibration)
    if calibration is not None and case is not None:
        case = case.replace(calibration=calibration)
        notes = (*calibration_notes(calibration, case.cluster.gpu, case.engine), *notes)
    reference = None
    if request.baseline is not None:
        small = doctor.read(request.baseline)
        reference = doctor.RunStats(small, _case(small, requests.Doctor(request.baseline))[0])
    found = _with_required(doctor.examine(run, case, reference, notes, stated_by(run, request)), run, case, request)
    return msgspec.structs.replace(found, curves=doctor.curves_of(run)) if request.curves else found


def _with_options(run: Run, request: requests.Doctor) -> Run:
    """Return the run with the user's options that a printed command repeats."""
    given = {f"--{name}": getattr(request, name) for name in ("model", "goal", "baseline", "calibration")}
    options = {name: str(value) for name, value in given.items() if value is not None}
    header = msgspec.structs.replace(run.header, options=options, typed=tuple(request.overrides))
    return msgspec.structs.replace(run, header=header)


def _with_required(found: Checkup, run: Run, case: Case | None, request: requests.Doctor) -> Checkup:
    """Return the findings with remedies that the user's file can have: each with the settings that it needs besides.

    A remedy that its framework refuses is left out.
    """
    written = any(remedy.there for one in found.findings for remedy in one.remedies)
    if case is None or request.recipe is None or not run.header.framework or not written:
        return found
    content, theirs = _user_file(request.recipe, request.gpus)
    if content is None or theirs is None:
        return found
    try:
        file = ChangedFile(theirs, content, case.cluster.argument, case.model)
    except InputError:  # the file alone does not say what ran
        return found

    def possible(remedies: Sequence[Remedy]) -> tuple[Remedy, ...]:
        written = [(one, file.in_program(one.try_) or one.there) for one in remedies]
        pairs = [(one, file.with_required(there) if there else ()) for one, there in written]
        return tuple(msgspec.structs.replace(one, there=there) for one, there in pairs if there is not None)

    findings = [msgspec.structs.replace(one, remedies=possible(one.remedies)) for one in found.findings]
    return msgspec.structs.replace(found, findings=tuple(findings))


def run_and_case(request: requests.Doctor) -> tuple[Run, Case | None, tuple[str, ...]]:
    """Return the run of a log, what ran as far as the log, the file and the user say, and notes on what is assumed."""
    run = doctor.read(request.run)
    typed = str(request.gpus or "").strip()
    if run.header.world and clusters.is_known(typed):  # the type alone: the log states the count
        request = msgspec.structs.replace(
            request, gpus=_on_nodes_of_file(f"{run.header.world}x{typed}", request.recipe)
        )
    run = _with_file(run, request.recipe, request.gpus)
    case, notes = _case(run, request)
    if case is not None:
        run, length_note = with_implied_length(run, case, tuple(request.overrides))
        if length_note:
            case, notes = _case(run, request)
            notes = (*notes, length_note)
    if case is not None:
        run, batch_note = with_implied_micro_batch(run, case, tuple(request.overrides))
        if batch_note:
            case, again = _case(run, request)
            notes = (*dict.fromkeys((*notes, *again)), batch_note)
    if case is not None:
        run, case = of_samples(with_all_gpus(run, case), case, _at_length_of_file(run, request))
        run, padding_note = with_counted_tokens(run, case)
        run, interval_note = without_intervals(_with_differences(run, request, case))
        notes = (*notes, *filter(None, (padding_note, interval_note)))
    if case is None and request.gpus is not None and run.header.on_gpu:  # typed, though there is no estimate for them
        run = _on_gpus(run, str(request.gpus))
    if case is not None and request.gpus is None and gpus_of(run) is None and run.header.recipe is None:
        run = msgspec.structs.replace(run, header=msgspec.structs.replace(run.header, assumed_gpus=True))
    return run, case, notes


def _at_length_of_file(run: Run, request: requests.Doctor) -> Case | None:
    """Return the case with the length of the user's file in place of the typed one; None if that is not both given."""
    kept = [one for one in request.overrides if recipe_key(one) != LENGTH]
    if len(kept) == len(request.overrides) or LENGTH not in run.header.file_fields:
        return None
    return _case(run, msgspec.structs.replace(request, overrides=kept))[0]


def _on_gpus(run: Run, typed: str) -> Run:
    """Return a run with the GPUs and nodes that the user names."""
    on, header = clusters.cluster(typed), run.header
    if clusters.is_known(typed) and header.world is None:  # the type alone
        return msgspec.structs.replace(run, header=msgspec.structs.replace(header, gpus=typed))
    world = header.world or on.world
    header = msgspec.structs.replace(header, gpus=str(on), world=world, gpus_per_node=on.gpus_per_node)
    return msgspec.structs.replace(run, header=header)


def stated_by(run: Run, request: requests.Doctor) -> frozenset[str] | None:
    """Return the recipe fields that the log or the user states; None if all are.

    A shipped recipe is only a start: its batch is not the run's.
    """
    if request.recipe is not None and run.header.file:
        return None
    stated = stated_fields(run, tuple(request.overrides))
    if request.recipe is None or stated is None:
        return stated
    return frozenset(recipe_fields()) - {GLOBAL_BATCH} | stated


def _with_file(run: Run, target: str | None, gpus: str | int | None) -> Run:
    """Return the run with the fields that the user's file sets, and its settings, whose keys the fixes use."""
    content, theirs = (None, None) if target is None or index.is_known(target) else _user_file(target, gpus)
    if content is None or target is None:
        return run
    imported = None if theirs is None else _imported(theirs, content)
    fields = frozenset(recipe_fields()) if theirs is None else _fields_of(imported)
    header = msgspec.structs.replace(run.header, file=target, file_fields=fields)
    if theirs is not None and theirs.name in FRONT_ENDS:  # fixes are lines of its file, as for its log
        header = msgspec.structs.replace(header, front_end=theirs.name, settings=theirs.parse(content).settings)
    elif theirs is not None and doctor.ENGINE.get(run.kind) in (None, theirs.engine):
        settings = theirs.parse(content).settings if imported is None else imported.parsed.settings
        header = msgspec.structs.replace(header, framework=theirs.name, settings=settings, imported=imported)
    return msgspec.structs.replace(run, header=header)


def _imported(theirs: Framework, content: Content) -> ImportedRecipe | None:
    with suppress(InputError):  # reported by the estimate
        return import_recipe(theirs, content)
    return None


def _user_file(target: str, gpus: str | int | None) -> tuple[Content | None, Framework | None]:
    """Return the user's file and its framework, also one of a front end whose files other commands only check."""
    try:
        return file_of(target, None, gpus)
    except OtherTrainerError as error:
        found = {key: setting.value for key, setting in error.content.settings.items() if not setting.unresolved}
        if isinstance(error, OtherLossError) or loss_of(found):
            raise
        return file_of(target, None, gpus, front_ends=True)


def _target(request: requests.Doctor, gpus: str | None) -> tuple[str | Recipe, dict[str, Any]]:
    """Return what ran as other verbs take it, and its engine unless it is named there: a front end's file as recipe."""
    target = request.recipe or request.model or ""
    if request.recipe is None or index.is_known(target):
        return target, {}
    content, theirs = _user_file(target, request.gpus)
    if content is None or theirs is None or theirs.name not in FRONT_ENDS:
        return target, {}
    model = None if request.model is None else model_named(request.model)
    goal: Any = request.goal
    found = import_file(theirs, content, gpus=gpus, model=model, goal=goal)
    return found.recipe, {"engine": found.settings.engine}


def _fields_of(imported: ImportedRecipe | None) -> frozenset[str]:
    """Return the recipe fields that a file of another framework sets; none if it cannot be imported."""
    if imported is None:
        return frozenset()
    stated, program = {*imported.mapped.source_keys}, imported.parsed.program
    # Every framework computes the global batch from the local one if the file has only that.
    local = "layout.micro_batch_size" in stated or (program is not None and bool(program.fills))
    return frozenset(stated | ({GLOBAL_BATCH} if local else set()))


def _case(run: Run, request: requests.Doctor) -> tuple[Case | None, tuple[str, ...]]:
    """Return what ran, as requested or as the log says, and notes on what is missing or assumed."""
    gpus = None if request.gpus is None else str(request.gpus)
    overrides = tuple(request.overrides)
    if request.recipe is None and request.model is None:
        case, note = doctor.case_of_run(run, gpus, overrides)
        notes: tuple[str, ...] = (note,) if note else ()
        if case is None and overrides:
            raise InputError(f"has no effect: {note}", field="override", value=" ".join(overrides))
    else:
        _require_same_model(run, request)
        case, reduced, goal_note = _case_with_goal(run, request, gpus or _gpus_that_ran(run, request.recipe), overrides)
        notes = tuple(assumptions(run, case, overrides, reduced))
        if (closest := closest_recipe(case)) and request.recipe is None:
            notes = (f"{case.model.name} has no recipe: other settings are those of {closest}", *notes)
        of_model = request.recipe is None or not index.is_known(request.recipe)
        if of_model and (unstated := unstated_layout(run, case, overrides)):
            notes = (*notes, unstated)
        other = contradicting_model(run, case.model)
        notes = (*((f"{other}: the estimate is for the latter",) if other else ()), *notes)
        notes = (goal_note, *notes) if goal_note else notes
        if gpus is None and gpus_of(run) is None and run.header.on_gpu:
            notes = (f"{gpus_unknown(run)}: the estimate assumes {case.cluster}; --gpus changes it", *notes)
    if case is not None:
        _require_same_gpus(run, case)
    return case, notes


def _case_with_goal(
    run: Run, request: requests.Doctor, gpus: str | None, overrides: tuple[str, ...]
) -> tuple[Case, str | None, str]:
    """Return the requested case with the goal of the user or the one that the log implies, and a note on the latter."""
    target = request.recipe or request.model or ""
    goal, note = logged_goal(run, target) if request.goal is None else (None, "")
    case, reduced = _requested_case(run, msgspec.structs.replace(request, goal=goal or request.goal), gpus, overrides)
    is_open = request.goal is None and not run.header.file and not index.is_known(target)
    if not is_open or not (reason := impossible_goal(run, case)):
        return case, reduced, note
    if run.kind != "transformers":
        adapters = "if it trained adapters, add --goal lora or --goal qlora"
        return case, reduced, f"{reason}: {adapters}; offloading is layout.offload"
    case, reduced = _requested_case(run, msgspec.structs.replace(request, goal="peft"), gpus, overrides)
    others = "--goal qlora for weights in 4 bits, --goal sft layout.offload=optimizer for offloading"
    return case, reduced, f"{reason}: adapters are assumed, --goal peft; {others}"


def _gpus_that_ran(run: Run, target: str | None) -> str | None:
    """Return the GPUs that the log names: on the nodes and links of the user's file, if it names as many of them."""
    named = gpus_of(run)
    return named if named is None or run.header.gpus else _on_nodes_of_file(named, target)


def _on_nodes_of_file(named: str, target: str | None) -> str:
    """Return GPUs whose nodes are not named on those of the user's file, if it is for the same type and number."""
    if target is None or index.is_known(target):
        return named
    logged = clusters.cluster(named)
    with suppress(InputError):  # the file leaves its GPUs open
        content, theirs = _user_file(target, None)
        asked = None if content is None or theirs is None else theirs.parse(content).gpu_request
        text = job_for(target).recipe.cluster if asked is None else asked.text(asked.gpu or logged.gpu.name)
        own = clusters.cluster(text)
        if (own.world, own.gpu.name) == (logged.world, logged.gpu.name):
            return own.argument
    return named


def _require_same_model(run: Run, request: requests.Doctor) -> None:
    """Raise InputError if the log, or the file that ran, names another model than the user."""
    if request.model is None:
        return
    typed = models.find(typed_model(request.model))
    reason = contradicting_model(run, typed)
    if not reason and request.recipe is not None:
        with suppress(InputError):  # a file that names no model
            own = model_of(job_for(_target(request, None)[0], gpus=request.gpus).recipe)
            if not same_model(own, typed):
                reason = f"{request.recipe} is of {described(own)}, not of {typed.name}, {described(typed)}"
    if reason:
        raise InputError(reason, field="model", value=request.model, fix=("without --model",))


def _require_same_gpus(run: Run, case: Case) -> None:
    """Raise InputError if the log is not from that many GPUs: their number, or a multiple of its dp × cp ranks."""
    world, ranks = run.header.world, run.header.data_ranks
    if (logged := _other_type(run, case)) and run.header.recipe is None:
        fix = (f"--gpus {case.world}x{logged}",)
        raise InputError(f"the log is from {logged} GPUs", field="gpus", value=str(case.cluster), fix=fix)
    if world is None and ranks and case.world % ranks:
        reason, world = f"the log is from a multiple of {ranks} GPUs (dp × cp = {ranks})", ranks
    elif world in (None, case.world):
        return
    else:
        reason = f"the log is from {world} GPUs"
    nodes, rest = divmod(world, case.cluster.gpus_per_node)
    part = () if rest else (msgspec.structs.replace(case.cluster, nodes=nodes).nodes_setting,)  # keeps a file's links
    fix = part if part and case.cluster.file else (f"--gpus {world}x{case.cluster.gpu.name}",)
    raise InputError(reason, field="gpus", value=str(case.cluster), fix=fix)


def _other_type(run: Run, case: Case) -> str:
    """Return the GPU that the log names if it is not of the case's series; variants of one series differ in memory."""
    named = run.header.gpu
    if not named or not clusters.is_known(named):
        return ""
    logged = clusters.gpu(named).name
    series = [one.partition("-")[0] for one in (logged, case.cluster.gpu.name)]
    return logged if len({*series}) == 2 else ""


def _requested_case(
    run: Run, request: requests.Doctor, gpus: str | None, overrides: tuple[str, ...]
) -> tuple[Case, str | None]:
    """Return the case of a named recipe or model with what the log states, and the batch that its figures imply.

    With it come the recipe's own degrees, if they were reduced because the GPUs cannot hold them.
    """
    named: dict[str, Any] = {"model": request.model} if request.recipe else {}
    target, own_engine = _target(request, gpus)
    named |= {"gpus": gpus, "goal": request.goal, **own_engine}
    if engine := doctor.ENGINE.get(run.kind):  # otherwise that of the file, or ours
        named["engine"] = engine
    changes = logged_overrides(run, overrides)
    option = "--recipe" if request.recipe else "--model"
    try:
        with nullcontext() if overrides else no_notes():  # what the log states is nobody's override
            case = estimate(target, **named, overrides=changes).case
    except InputError as error:
        if error.value != target or not error.reason.startswith("unknown"):  # the mistake is another one
            raise
        raise InputError(error.reason, option, target, [f"{option} {one}" for one in error.fix]) from None
    if parallel := trainer_layout(run, case, changes):
        changes = (*changes, *parallel)
        case = estimate(target, **named, overrides=changes).case
    own, reduced = case.recipe.layout, None
    if fewer := degrees_that_divide(case, changes):
        changes, reduced = (*changes, *fewer), f"tp={own.tp}, pp={own.pp}, cp={own.cp}"
        case = estimate(target, **named, overrides=changes).case
    implied = inferred_batch(run, case.world, case.recipe.data.seq_length)
    known = GLOBAL_BATCH in run.header.file_fields or any(text.startswith(GLOBAL_BATCH) for text in changes)
    if implied is None or implied.plausible is None or known:
        return case, reduced
    return estimate(target, **named, overrides=(f"{GLOBAL_BATCH}={implied.plausible}", *changes)).case, reduced


def _with_differences(run: Run, request: requests.Doctor, case: Case) -> Run:
    """Return the run with the settings unlike those of the user's file; a shipped recipe or a model is only a start."""
    if request.recipe is None or not run.header.file:
        return run
    with suppress(InputError):  # the file's own layout cannot be built on these GPUs
        there = str(case.cluster)
        target, engine = _target(request, there)
        named = estimate(target, model=request.model, gpus=there, goal=request.goal, **engine).case.recipe
        found = file_differences(run, named, tuple(request.overrides))
        return msgspec.structs.replace(run, header=msgspec.structs.replace(run.header, file_differences=found))
    return run


class DoctorFinding(Part, frozen=True, kw_only=True):
    """One problem of a run; `fix` holds the overrides of the cheapest remedy that changes the recipe."""

    rule: str
    severity: Severity
    message: str
    steps: tuple[int, int] | None
    lines: Sequence[str]
    evidence: Sequence[Evidence]
    remedies: Sequence[Remedy]
    fix: Sequence[str]


class DoctorResponse(Response, frozen=True, kw_only=True):
    """The diagnosis of a run."""

    ok: bool
    kind: str
    path: str
    file: str
    recipe: str | None
    model: str | None
    gpus: str | None
    cpu_ranks: int | None
    engine: str | None
    steps: int
    last_step: int
    total_steps: int | None
    starts: int
    figures: Sequence[Figure]
    mfu_convention: str
    findings: Sequence[DoctorFinding]
    looked_for: Sequence[str]
    not_examined: Mapping[str, str]
    notes: Sequence[str]
    curves: Sequence[doctor.Curve] | UnsetType = UNSET


def doctor_response(checkup: Checkup, request: requests.Doctor | None = None) -> DoctorResponse:
    """Return the response of doctor."""
    values: dict[str, Any] = msgspec.structs.asdict(checkup)
    values["findings"] = [
        copied(
            DoctorFinding,
            f,
            rule=f.id,
            fix=next((one.try_ for one in f.remedies if one.what in ("layout", "contract")), ()),
        )
        for f in checkup.findings
    ]
    return DoctorResponse(ok=checkup.ok, **{**values, "curves": checkup.curves or UNSET})
