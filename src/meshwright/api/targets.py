"""What a command works on: a recipe by name or file, another framework's file, or a model's recommended recipe."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright import clusters, frameworks, models, planner
from meshwright.api.continued_run import is_run, model_of_run
from meshwright.api.dataset_length import epochs_beside
from meshwright.api.resolve import (
    WEIGHTS,
    is_file,
    is_recipe,
    model_named,
    recipe_from,
    referenced_model,
    require_known,
    typed_model,
)
from meshwright.choices import GOALS, synonym
from meshwright.clusters import Assumption
from meshwright.errors import InputError
from meshwright.models import ModelSpec
from meshwright.notes import no_notes, note
from meshwright.parsing import sequence_length
from meshwright.planner import Plan, Question
from meshwright.recipes import index
from meshwright.recipes import overrides as override
from meshwright.recipes.capabilities import executed_values
from meshwright.recipes.case import model_of
from meshwright.recipes.types import ENGINES, Recipe, field_value, recipe_fields

if TYPE_CHECKING:
    from meshwright.api.own_jobs import OwnJob
    from meshwright.frameworks.dropped import DroppedSetting
    from meshwright.frameworks.file_import import ImportedFile
    from meshwright.frameworks.framework import Content, Framework
    from meshwright.frameworks.types import ExportedConfig
    from meshwright.rules import Finding

SCRIPTS = (".sh", ".py")
OF_ONE_KEY = ("key.", "value.")  # how rules start on a name or a value that a framework does not have
GOAL_FIX = ("--goal pretrain", "--goal sft", "--goal peft")


class Job(msgspec.Struct, frozen=True):
    """What a target trains: one of our recipes, and how another framework's file was read."""

    recipe: Recipe
    words: tuple[str, ...]  # the arguments that name it on the command line
    content: Content | None = None  # of a file
    imported: ImportedFile | None = None  # of another framework's file
    plan: Plan | None = None  # of a model
    own: bool = False  # of a job that runs our `train`

    @property
    def model(self) -> ModelSpec:
        """The model; a file's may have a shape without a name."""
        return model_of(self.recipe) if self.imported is None else self.imported.model

    @property
    def engine(self) -> str:
        """The engine that the target is for: that of a file's framework, or the recipe's."""
        return self.recipe.engine if self.imported is None else self.imported.settings.engine

    @property
    def stated(self) -> tuple[str, ...]:
        """Contract fields that a file sets, by flat name; those of a catalogue recipe are not the user's."""
        if self.imported is not None:
            keys: Iterable[str] = self.imported.settings.mapped.source_keys
        else:
            keys = () if self.content is None else self.content.settings
        fields = recipe_fields()
        return tuple(fields[key].flat for key in keys if key in fields and fields[key].kind == "contract")

    def on(self, engine: str) -> Recipe:
        """Return the recipe for an engine; one made for another than ours gets the engine's sharding strategy."""
        if engine == self.engine or (self.imported is None and self.engine == ENGINES[0]):
            return self.recipe
        moved = planner.moved_to(self.recipe, engine)
        moved = planner.with_listed_stages(moved, self.model, self.engine, engine)
        return without_folder(msgspec.structs.replace(moved, engine=engine), self.imported)

    def assumed(self, engine: str) -> tuple[Assumption, ...]:
        """Return what was taken for what a file leaves open, and for a strategy that the engine does not have."""
        old, new = self.recipe.layout.strategy, self.on(engine).layout.strategy
        has = old in (executed_values("strategy", engine) or ())
        why = f"{engine} runs {old} with a full model on every GPU only" if has else f"the equivalent in {engine}"
        text = f"layout.strategy {old} → {new}: {why}"
        moved = () if old == new else (Assumption("layout.strategy", new, text),)
        held, kept = self.recipe.precision.master, self.on(engine).precision.master
        if held != kept:
            text = f"precision.master {held} → {kept}: {engine} keeps the weights that its optimizer updates in {kept}"
            moved = (*moved, Assumption("precision.master", kept, text))
        listed = self.on(engine).layout.stage_layers
        if listed != self.recipe.layout.stage_layers:
            shown = ",".join(map(str, listed))
            text = f"layout.stage_layers=[{shown}]: as {self.engine} splits the layers, which {engine} does evenly"
            moved = (*moved, Assumption("layout.stage_layers", shown, text))
        return (*(() if self.imported is None else self.imported.assumed), *moved)

    @property
    def epoch_intervals(self) -> tuple[str, ...]:
        """Return the fields in steps that a file's program does at the end of every epoch."""
        return () if self.imported is None else self.imported.settings.epoch_intervals

    @property
    def no_model(self) -> str:
        """Return why a recipe cannot refer to the file's model; empty if it can."""
        if self.imported is None or self.imported.resolvable:
            return ""
        path = self.imported.content.path
        return f"{path} trains a model that no catalogue model is in other sizes, so our engine cannot build it"

    def dropped(
        self, to: Framework | None = None, lost: tuple[DroppedSetting, ...] | None = None
    ) -> tuple[DroppedSetting, ...]:
        """Return the settings that do not survive an export, or an import; raise InputError if they are the model's.

        `lost` are those of an export that keeps the file's own settings.
        """
        read = self.imported
        if read is None:
            return ()
        same = to is not None and read.framework.name == to.name
        found = frameworks.dropped_settings(read.framework, read.content, same) if lost is None else lost
        if "--model" not in self.words:  # else the user names the model
            frameworks.require_model(read.framework, found)
        return found

    def require_length(self) -> None:
        """Raise InputError if nothing says how long another framework's file trains."""
        found = next((one for one in self.assumed(self.engine) if one.field == planner.OPEN_LENGTH), None)
        if found is not None:
            raise InputError(found.message, field=found.field, fix=("train.steps=1000", "train.epochs=3"))

    def open_length(self, recipe: Recipe) -> str:
        """Return that a recipe file of ours, with the user's overrides, does not say how long it trains; or nothing."""
        is_ours = self.content is not None and self.imported is None
        return frameworks.open_length_of_recipe(self.content, recipe) if is_ours and self.content is not None else ""

    def require_weights(self) -> None:
        """Raise InputError if only the run knows the initial weights of a file: without them they would be random."""
        read = self.imported
        if read is None or "checkpoint.pretrained" in read.settings.typed:
            return
        found = frameworks.open_weights(read.framework, read.settings.parsed)
        if found is not None:
            fix = ("checkpoint.pretrained=FOLDER", "checkpoint.pretrained= to start from random weights")
            reason = f"{found.location} names the initial weights, known only when it runs: {found.unresolved}"
            raise InputError(reason, "checkpoint.pretrained", str(found.value), fix)

    def require_expanded(self, written: ExportedConfig) -> None:
        """Raise InputError if a config has a path of the environment: scripts expand it, and the user's own file."""
        fields = {key: str(field_value(self.recipe, key)) for key in frameworks.ENVIRONMENT_PATHS}
        own = self.imported.content.text if self.imported and self.imported.framework.name == written.framework else ""
        for key, text in fields.items():
            if text in own:
                continue
            inside = [name for name, file in written.files.items() if text in file and not name.endswith(SCRIPTS)]
            if frameworks.variables_in([text]) and inside and self.imported is not None:
                reason = f"{self.imported.content.path} takes it from the environment, which {inside[0]} cannot"
                raise InputError(reason, key, text, (f"{key}=PATH",))

    def require_model(self) -> None:
        """Raise InputError if a recipe cannot refer to the file's model."""
        if self.imported is not None and not self.imported.resolvable:
            model = self.imported.model.name
            raise InputError(
                self.no_model, field="model", value=model, fix=(frameworks.model_option(self.imported.content),)
            )

    def runnable(self) -> Recipe:
        """Return the recipe for our engine; raise InputError if the file has settings that could not be imported."""
        if self.imported is not None:
            self._require_imported(self.imported)
        for one in self.assumed(ENGINES[0]):
            note(one.message)
        return self.on(ENGINES[0])

    @property
    def rejected(self) -> tuple[Finding, ...]:
        """Settings of another framework's file with an error, which the recipe does not have."""
        return () if self.imported is None else self.imported.rejected

    @property
    def file_error(self) -> str:
        """Why another framework's file cannot be run or exported before it is corrected; empty if it can."""
        return first_error(self.rejected)

    @property
    def file_correction(self) -> str:
        """What to correct in another framework's file before it can be run; empty if nothing."""
        return correction(self.rejected)

    def _require_imported(self, imported: ImportedFile) -> None:
        """Raise InputError if settings of another framework's file were rejected or are lost."""
        path = imported.content.path
        if error := self.file_error:
            reason, fix = f"{path} is not valid for {imported.framework.title}: {error}", imported.rejected[0].fix
            raise InputError(reason, field="file", value=path, fix=(*fix, f"meshwright check {path}"))
        self.require_model()
        self.require_weights()
        self.dropped()


def first_error(found: Sequence[Finding]) -> str:
    """Return the first of the errors of a file with its place, and how many more there are; empty if there is none."""
    if not found:
        return ""
    place = f"{found[0].file}:{found[0].line} " if found[0].line else ""
    more = f", and {len(found) - 1} more" if len(found) > 1 else ""
    return f"{place}{found[0].message}{more}"


def correction(found: Sequence[Finding]) -> str:
    """Return what to correct in a file with errors before it can be run; empty if nothing."""
    if not found:
        return ""
    choices = found[0].rule.startswith(OF_ONE_KEY)  # of which one is enough
    fix = " ".join(found[0].fix[:1] if choices else found[0].fix)
    return ": ".join(filter(None, (f"{first_error(found)}; correct the file first", fix)))


def not_saved(job: Job, engine: str) -> list[str]:
    """Return what a recipe of another framework's file does not have of it: settings without a field, and variables."""
    read = job.imported
    if read is None:
        return []
    found = frameworks.dropped_settings(read.framework, read.content, engine == job.engine)
    settings = [read.framework.format_setting(one.key, one.value) for one in found]
    return [*settings, *(f"{name}={value}" for name, value in frameworks.own_variables(read).items())]


def without_folder(recipe: Recipe, imported: ImportedFile | None) -> Recipe:
    """Return a file's recipe for another framework without the file's folder of checkpoints, whose format differs."""
    return recipe if imported is None else override.change(recipe, {"checkpoint.folder": ""})[0]


def job_for(
    target: str | Recipe,
    goal: str | None = None,
    gpus: str | int | None = None,
    overrides: Sequence[str] = (),
    engine: str | None = None,
    *,
    framework: str | None = None,
    model: str | None = None,
    why_gpus: str | None = None,
    to: str | None = None,
) -> Job:
    """Return what a target trains: a recipe by name, value or file, another framework's file, or a model on these GPUs.

    `framework` and `model` are for a file that does not show them; `model` also replaces that of a recipe. `why_gpus`
    says in the note of a model why its plan is for GPUs that nobody typed. `to` is the framework that a file is written
    for: its own one keeps paths that the file takes from environment variables.
    """
    if isinstance(target, str) and is_model(target, goal):
        if model is not None:
            instead = f"{model} in place of {target}"
            raise InputError(
                "the target is a model itself", field="model", value=model, fix=("remove --model", instead)
            )
        _no_framework(framework)
        plan = plan_for(target, goal, gpus, overrides, engine or ENGINES[0], why_gpus)
        return Job(plan.recipe, (target,), plan=plan)
    content, theirs = file_of(target, framework, gpus)
    if content is not None and theirs is not None:
        return _imported(content, theirs, framework, goal, gpus, overrides, model, references=to == theirs.name)
    own = None if content is None or content.format != "shell" else _own_job(content)
    if own is not None:
        return _of_own_job(own, goal, gpus, overrides, engine, model)
    found = target if isinstance(target, Recipe) else recipe_from(target, None if gpus is None else _cluster_text(gpus))
    if goal is not None and goal != found.goal:
        reason = f"{target if isinstance(target, str) else found.name} is a recipe for {found.goal}"
        method = next((text.partition("=")[2] for text in overrides if text.startswith("peft.method=")), goal)
        if is_run(target):
            model_too = f"{model_of_run(str(target), method)}: the model that the run trained"
        else:
            named = is_model(found.model, goal)
            model_too = f"{found.model} --goal {method}: the model in place of the recipe" if named else ""
        fix = (f"--goal {found.goal}", *([model_too] if model_too else []))
        raise InputError(reason, field="goal", value=goal, fix=fix)
    found = found if model is None else _with_model(found, model_named(model)[1])
    words = (found.name if isinstance(target, Recipe) else target, *(() if model is None else ("--model", found.model)))
    return Job(found, words, content)


def _own_job(content: Content) -> OwnJob | None:
    from meshwright.api import own_jobs

    return own_jobs.read(content)


def _with_model(recipe: Recipe, reference: str) -> Recipe:
    """Return the recipe for another model; weights that the recipe names are those of its own model."""
    named = recipe.checkpoint.pretrained
    if not named or reference == recipe.model or reference == models.catalogue_name(reference):
        return msgspec.structs.replace(recipe, model=reference)
    note(f"--model {reference} replaces checkpoint.pretrained={named} of {recipe.name}")
    checkpoint = msgspec.structs.replace(recipe.checkpoint, pretrained="")
    return msgspec.structs.replace(recipe, model=reference, checkpoint=checkpoint)


def _of_own_job(
    own: OwnJob,
    goal: str | None,
    gpus: str | int | None,
    overrides: Sequence[str],
    engine: str | None,
    model: str | None,
) -> Job:
    """Return the recipe that a job trains, with the overrides of its command, on its GPUs unless others are given."""
    changes = override.split_auto(own.overrides)[0]
    options = {"framework": own.framework, "model": model or own.model}
    on = gpus if gpus is not None else own.cluster()
    inner = job_for(own.target, goal or own.goal, on, [*changes, *overrides], engine, **options)
    if inner.imported is not None:
        reason = f"trains {own.target}, a file of {inner.imported.framework.title}"
        raise InputError(reason, field="file", value=own.path, fix=(f"meshwright check {own.target}",))
    cluster = str(gpus) if gpus is not None else own.cluster(inner.recipe.cluster)
    recipe = override.apply(msgspec.structs.replace(inner.recipe, cluster=cluster), changes)
    note(f"{own.path} trains {' '.join((own.target, *own.overrides))} on {clusters.cluster(str(cluster))}")
    return Job(recipe, (own.path,), inner.content, own=True)


def stated_engine(target: str | Recipe) -> str:
    """Return the engine that a recipe names; ours for a model and for another framework's file, which is moved."""
    if isinstance(target, Recipe):
        return target.engine
    if not is_file(target) or not frameworks.is_native(frameworks.open_file(target)):
        return ENGINES[0]
    return recipe_from(target, cluster="").engine


def recipe_for(target: str | Recipe, *args: Any, **options: Any) -> Recipe:
    """Return the recipe of a target for our engine; see job_for."""
    return job_for(target, *args, **options).runnable()


def recipe_in_line(line: Sequence[str]) -> Recipe | None:
    """Return the recipe that a command line with unknown options names, with its length; None if it is not clear."""
    after = dict(itertools.pairwise(line))
    after |= dict(word.split("=", 1) for word in line if word.startswith("--") and "=" in word)
    known = synonym("goal", after.get("--goal", ""))
    goal = known.value if known is not None else after.get("--goal")
    if goal not in (None, *GOALS):
        return None
    for word in (one for one in line[1:] if not one.startswith("-") and "=" not in one):
        with suppress(InputError), no_notes():
            if is_target(word):
                return _as_typed(recipe_for(word, goal, after.get("--gpus")), line, after.get("--seq"))
    return None


def _as_typed(recipe: Recipe, line: Sequence[str], length: str | None) -> Recipe:
    """Return a recipe with the sequence length and the overrides of a command line, as far as they are valid."""
    texts = [word for word in line if "=" in word and not word.startswith("-")]
    with suppress(InputError):
        texts = [*([] if length is None else [f"data.seq_length={sequence_length(length)}"]), *texts]
    for text in texts:
        with suppress(InputError):
            recipe = override.change(recipe, override.requested(recipe, [text]))[0]
    return recipe


def file_of(
    target: str | Recipe, framework: str | None = None, gpus: str | int | None = None, front_ends: bool = False
) -> tuple[Content | None, Framework | None]:
    """Return a file's content and its framework, None for ours; raise for a framework that does not apply.

    `front_ends`: also one whose files are only checked.
    """
    if not isinstance(target, str) or not is_file(target):
        _no_framework(framework)
        return None, None
    content = frameworks.open_file(target)
    try:
        return content, frameworks.framework_of(content, framework, front_ends)
    except frameworks.OtherTrainerError as error:
        raise error if gpus is None else error.on(str(gpus)) from None


def _no_framework(framework: str | None) -> None:
    if framework not in (None, frameworks.NATIVE):
        reason = "applies to files of other frameworks, not to recipes"
        raise InputError(reason, field="framework", value=framework, fix=("remove --framework",))


def _imported(
    content: Content,
    theirs: Framework,
    named: str | None,
    goal: str | None,
    gpus: str | int | None,
    overrides: Sequence[str],
    model: str | None,
    *,
    references: bool,
) -> Job:
    imported = frameworks.import_file(
        theirs,
        content,
        gpus=None if gpus is None else _cluster_text(gpus),
        model=None if model is None else model_named(model),
        goal=goal,  # type: ignore[arg-type]  # one of its choices, as validated
        overrides=overrides,
        count=epochs_beside(content.folder, theirs.engine),
        references=references,
    )
    options = (("--framework", named), ("--model", model), ("--goal", goal))
    named_by = (word for option, value in options if value for word in (option, value))
    # The recipe has the typed overrides already: a command for it names the file with them.
    words = (content.path, *named_by, *override.split_auto(overrides)[0])
    return Job(imported.recipe, words, content, imported)


def _cluster_text(gpus: str | int) -> str:
    return str(clusters.cluster("auto")) if str(gpus).strip().lower() == "auto" else str(gpus)


def is_model(target: str, goal: str | None = None) -> bool:
    """Return whether a target is a model: a path, or with a goal a catalogue name; raise for one without a goal."""
    if is_recipe(target):
        return False
    if models.is_path(target.strip()) or goal is not None:
        require_known(target)
        return True
    try:
        name = models.catalogue_name(target)
    except InputError:
        return False
    raise InputError(f"{name} is a model: add a goal, or name a recipe", field="recipe", value=target, fix=GOAL_FIX)


def is_target(word: str) -> bool:
    """Return whether a word names a recipe, a file or a model."""
    if is_recipe(word):
        return True
    try:
        require_known(word)
    except InputError:
        return False
    return True


def depends_on_gpus(target: str | Recipe) -> bool:
    """Return whether a target needs GPUs to become a recipe: a model, or a file that is not one of ours."""
    if isinstance(target, Recipe) or not is_file(target):
        return isinstance(target, str) and not index.is_known(target)
    return not frameworks.is_native(frameworks.open_file(target))


def plan_for(
    target: str,
    goal: str | None,
    gpus: str | int | None,
    overrides: Sequence[str],
    engine: str = ENGINES[0],
    why_gpus: str | None = None,
) -> Plan:
    """Return the recommended plan of a model, with a note that says what was assumed."""
    reference = typed_model(target)
    spec, model = referenced_model(reference)
    chosen, why = (goal, "") if goal is not None else default_goal(reference)
    cluster, assumed = (str(gpus), why_gpus or "") if gpus is not None else default_gpus(spec, chosen)
    question = Question(
        model=spec,
        model_ref=model,
        cluster=clusters.cluster(cluster),
        cluster_ref=clusters.cluster_reference(cluster),
        goal=chosen,  # type: ignore[arg-type]  # one of its choices, as validated
        seq_length=sequence_length(None),
        engine=engine,  # type: ignore[arg-type]  # as above
    )
    found = planner.recommend(question, overrides)
    recipe = own_recipe(found)
    note(f"{target}: goal {chosen}{why}, on {question.cluster}{assumed}, other settings from {found.base.name}")
    return msgspec.structs.replace(found, recipe=recipe)


def own_recipe(plan: Plan) -> Recipe:
    """Return the recipe of a plan, named after a user's model."""
    model = Path(plan.question.model_ref)
    is_file = model.suffix in (".json", ".toml")  # a name such as Llama-3.1-70B has no suffix
    stem = model.parent.name if model.name == "config.json" else model.stem if is_file else model.name
    return msgspec.structs.replace(plan.recipe, name=f"{stem or 'model'}_{plan.question.goal}")


def default_goal(reference: str) -> tuple[str, str]:
    """Return the goal for a model without one, and why: a folder with weights is fine-tuned."""
    if not models.is_path(reference.strip()):
        return "pretrain", " (the default)"
    path = Path(os.path.expanduser(reference.strip()))
    folder = path if path.is_dir() else path.parent
    if path.name == "config.json" or path.is_dir():
        weights = any(any(folder.glob(pattern)) for pattern in WEIGHTS)
        if weights:
            return "sft", " (the default with weights; --goal pretrain or peft)"
    return "pretrain", " (the default without weights; --goal sft or peft)"


def default_gpus(spec: models.ModelSpec, goal: Any) -> tuple[str, str]:
    """Return the cluster for a model without one, and why: this machine's GPUs, or those of the closest recipe."""
    try:
        return str(clusters.cluster("auto")), " (this machine; --gpus CLUSTER for another)"
    except InputError:
        near = index.closest(spec, goal).name
        return index.load(near).cluster, f" (as {near}; --gpus CLUSTER for another)"


def stated_goal(reference: str) -> str:
    """Return the goal for a model without one; for a user's model, a note says it."""
    goal, why = default_goal(reference)
    if models.is_path(reference.strip()):
        note(f"{reference}: goal {goal}{why}")
    return goal


def stated_gpus(reference: str, goal: str) -> str:
    """Return the cluster for a model without one, with a note that says it."""
    gpus, why = default_gpus(models.find(reference), goal)
    note(f"{reference}: on {gpus}{why}")
    return gpus


def ranks_cluster(world: int, local: int) -> str:
    """Return the ranks of a run as a cluster of this machine's GPUs, or of the default type."""
    gpu = clusters.DEFAULT_GPU
    with suppress(InputError):  # no GPU here: the ranks run on CPUs
        gpu = clusters.cluster("auto").gpu.name
    return f"{world // local}x{local}x{gpu}"
