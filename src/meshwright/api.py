"""The verbs: what the command line, Python users and agents call. Composed from the rooms, no logic of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright import answers, clusters, dialects, models, planner, rules
from meshwright.dialects import Checked, CheckedRecipe, Written
from meshwright.errors import InputError, OutputError, closest, unknown
from meshwright.models import ModelSpec
from meshwright.planner import Plan, Question, Ranking, Sizing
from meshwright.recipes import files, index, types
from meshwright.recipes import overrides as override
from meshwright.recipes.types import Recipe
from meshwright.rules import Rule
from meshwright.typed import one_of, sequence_length, token_budget

if TYPE_CHECKING:
    from meshwright.costs.accuracy import Report
    from meshwright.costs.calibrate import OwnProfile
    from meshwright.engine.start import Finished
    from meshwright.launch.compose import Started

MOST_PLANS = 100


def recommend(
    model: str,
    gpus: str | int,
    goal: str,
    *,
    seq: int | str | None = None,
    engine: str = "meshwright",
    benchmark: bool = False,
    calibration: str | None = None,
    overrides: Sequence[str] = (),
) -> Plan:
    """The plan for a model on a cluster: which recipe, which layout, does it fit, how fast, what will bite."""
    return planner.recommend(
        question_of(model, goal, seq, engine, benchmark, gpus=gpus, calibration=calibration), overrides
    )


def plan(
    target: str,
    gpus: str | int,
    goal: str | None = None,
    *,
    seq: int | str | None = None,
    engine: str = "meshwright",
    top: int = 5,
    calibration: str | None = None,
    overrides: Sequence[str] = (),
) -> Ranking:
    """The fastest plans of the whole legal space for a model or recipe, and why others were dropped."""
    if not 1 <= top <= MOST_PLANS:
        raise InputError(f"ask for 1 to {MOST_PLANS} plans", field="top", value=top)
    return planner.ranked(
        question_of(*_model_and_goal(target, goal), seq, engine, gpus=gpus, calibration=calibration), overrides, top
    )


def size(
    model: str,
    goal: str,
    gpu: str,
    *,
    seq: int | str | None = None,
    engine: str = "meshwright",
    tokens: float | str | None = None,
    price: float | None = None,
    calibration: str | None = None,
    overrides: Sequence[str] = (),
) -> Sizing:
    """GPU counts that fit a training, with speed, goodput, and days and cost for a token budget."""
    if not clusters.knows(gpu) and gpu[:1].isdigit():
        kind = gpu.split("x")[-1]
        raise InputError(
            "give the GPU type alone; the count is what is asked", field="gpu", value=gpu, fix=(f"--gpu {kind}",)
        )
    question = question_of(model, goal, seq, engine, gpus=f"1x{clusters.gpu(gpu).name}", calibration=calibration)
    if price is not None and not (tokens is not None and 0 <= price < 1e6):
        reason = "a price is a number of at least 0" if tokens is not None else "a price needs a token budget"
        raise InputError(reason, field="price", value=price, fix=("--tokens 1T --price 2.5",))
    return planner.size(question, overrides, token_budget(tokens), price)


def estimate(
    target: str,
    *,
    gpus: str | int | None = None,
    goal: str | None = None,
    seq: int | str | None = None,
    engine: str = "meshwright",
    calibration: str | None = None,
    overrides: Sequence[str] = (),
) -> Plan:
    """The estimate of exactly this layout: the recipe's own with overrides, nothing searched."""
    if _is_recipe(target):
        asked = _recipe_from(target)
        model, found_goal = _model_and_goal(target, goal)
        question = question_of(model, found_goal, seq, engine, gpus=gpus or asked.cluster, calibration=calibration)
        return planner.exactly(question, asked, overrides)
    _refuse_unknown(target)
    if gpus is None:
        raise InputError("a model's estimate needs the GPUs", field="gpus", fix=("--gpus 8xH100",))
    question = question_of(target, goal or "pretrain", seq, engine, gpus=gpus, calibration=calibration)
    return planner.exactly(question, None, overrides)


def accuracy(path: str) -> Report:
    """The cost model against a table of measurements."""
    from meshwright.costs import accuracy as accuracies

    return accuracies.accuracy(path)


def train(
    target: str | Recipe,
    *,
    dataset: str | None = None,
    model: str | None = None,
    nproc: int | None = None,
    tiny: bool = False,
    out: str | None = None,
    tensorboard: bool = False,
    on_nan: str = "stop",
    timeout: float = 600.0,
    json: bool = False,
    quiet: bool = False,
    accept_changes: bool = False,
    overrides: Sequence[str] = (),
) -> Finished:
    """Trains a recipe on our own engine; imports torch. Goes on from the checkpoints that `out` holds."""
    shared = _settings(nproc, tiny, out, tensorboard, timeout, json, quiet)
    return _run(target, dataset, model, {**shared, "on_nan": on_nan, "accept_changes": accept_changes}, overrides)


def bench(
    target: str | Recipe,
    *,
    model: str | None = None,
    nproc: int | None = None,
    tiny: bool = False,
    out: str | None = None,
    tensorboard: bool = False,
    timeout: float = 600.0,
    json: bool = False,
    quiet: bool = False,
    overrides: Sequence[str] = (),
) -> Finished:
    """Measures the throughput of a recipe on our own engine: 50 steps of mock data; imports torch."""
    shared = _settings(nproc, tiny, out, tensorboard, timeout, json, quiet)
    throwaway = {**shared, "checkpoints": False, "random_weights": True}
    return _run(target, "mock", model, throwaway, overrides, BENCH_OVERRIDES)


BENCH_OVERRIDES = ("train.steps=50", "train.check_nan=false", "train.log_every=10", "train.eval_every=0")


def _settings(
    nproc: int | None, tiny: bool, out: str | None, tensorboard: bool, timeout: float, json: bool, quiet: bool
) -> dict[str, Any]:
    """What train and bench ask for alike, by the names of the engine's settings."""
    return {
        "nproc": nproc,
        "tiny": tiny,
        "folder": out,
        "tensorboard": tensorboard,
        "timeout_s": timeout,
        "json": json,
        "quiet": quiet,
    }


def _run(
    target: str | Recipe,
    dataset: str | None,
    model: str | None,
    settings: dict[str, Any],
    overrides: Sequence[str],
    defaults: Sequence[str] = (),
) -> Finished:
    from meshwright.engine import start

    found = target if isinstance(target, Recipe) else _recipe_from(target)
    if model is not None:
        found = msgspec.structs.replace(found, model=_model(model)[1])
    automatic = [text for text in overrides if text.replace(" ", "").endswith("micro_batch_size=auto")]
    given = [text for text in overrides if text not in automatic]
    set_first = override.requested(found, defaults)
    found = override.change(found, set_first)[0]
    given += [f"data.dataset={dataset}"] if dataset else []
    asked = override.apply(found, given)
    pinned = set_first | override.requested(found, given)
    return start.train(asked, start.Settings(find_micro_batch=bool(automatic), **settings), pinned)


def launch(
    target: str,
    on: str,
    *,
    gpus: str | int | None = None,
    dataset: str | None = None,
    model: str | None = None,
    tiny: bool = False,
    out: str | None = None,
    to: str | None = None,
    submit: bool = False,
    write: str | None = None,
    overwrite: bool = False,
    overrides: Sequence[str] = (),
    **options: Any,
) -> Started:
    """A recipe as a job for a scheduler, checked before anything is written; submitted where that is asked for.

    `to` names the framework that runs it; our own engine does otherwise.
    """
    from meshwright.launch import compose, own

    found = _recipe_from(target)
    if to is not None:
        only = [name for name, value in (("--tiny", tiny), ("--out", out), ("--model", model)) if value]
        if only:
            raise InputError("is an option of our own engine", field=only[0], value=to, fix=("without --to",))
        given = [*overrides, *([f"data.dataset={dataset}"] if dataset else [])]
        written, checked = export(target, to, gpus=gpus, overrides=given)
        asked = compose.exported(written, checked)
        return compose.launch(asked, on, submits=submit, folder=write, overwrite=overwrite, options=options)
    found = found if model is None else msgspec.structs.replace(found, model=_model(model)[1])
    training = own.Training(target, dataset, model, tiny, out, overrides)

    def judged() -> own.Judged:
        checked = _check_recipe(found, gpus, ENGINES[0], training.settled)
        return checked.recipe, checked.cluster or clusters.cluster(checked.recipe.cluster), checked.findings

    asked = own.asked(training, on, found, gpus, judged)
    return compose.launch(asked, on, submits=submit, folder=write, overwrite=overwrite, options=options)


def watch(started: Started, say: Callable[[str], None], log: Callable[[str], None]) -> Started:
    """Follows a submitted job to its end; `say` gets the changes of its state, `log` the lines of its log."""
    from meshwright.launch import watch as watching

    return msgspec.structs.replace(started, seen=watching.watch(str(started.number), say, log))


def tokenize(
    inputs: Sequence[str],
    tokenizer: str,
    out: str,
    *,
    column: str = "text",
    workers: int | None = None,
    shard_tokens: int | None = None,
    skip_bad_lines: bool = False,
    format: str = "shards",
) -> dict[str, Any]:
    """Turns text, JSON lines or Parquet into tokens that training reads from disk."""
    from meshwright.engine.data.tokenise import SHARD_TOKENS, tokenise

    made = tokenise(
        inputs,
        tokenizer,
        out,
        text_column=column,
        workers=workers,
        shard_tokens=shard_tokens or SHARD_TOKENS,
        bad_lines="skip" if skip_bad_lines else "refuse",
        format=one_of("format", format, ("shards", "megatron")),
    )
    return answers.plainly(made)


def generate(
    checkpoint: str,
    prompt: str,
    *,
    max_tokens: int = 64,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    chat: bool | None = None,
) -> dict[str, Any]:
    """Lets a trained model go on from a prompt; imports torch."""
    from meshwright.engine.trained.generate import Asking
    from meshwright.engine.trained.generate import generate as ask

    said = ask(checkpoint, prompt, Asking(max_tokens, temperature, top_p, seed, chat))
    return answers.plainly(said, prompt=prompt)


def evaluate(
    checkpoint: str,
    *,
    dataset: str | None = None,
    samples: int = 256,
    nproc: int | None = None,
    answers_only: bool = False,
    overrides: Sequence[str] = (),
) -> dict[str, Any]:
    """The perplexity of a trained model; imports torch."""
    from meshwright.engine.trained.perplexity import evaluate as measure

    found = measure(
        checkpoint, dataset=dataset, samples=samples, nproc=nproc, answers=answers_only, overrides=overrides
    )
    return answers.plainly(found, checkpoint=checkpoint)


def convert(
    checkpoint: str,
    out: str,
    *,
    dtype: str | None = None,
    shard_gib: float = 5.0,
    consolidated: bool = False,
    merge: bool = False,
) -> dict[str, Any]:
    """Writes the model of a checkpoint as a Hugging Face folder; imports torch."""
    from meshwright.engine.trained.convert import convert as write

    made = write(checkpoint, out, dtype=dtype, shard_gib=shard_gib, consolidated=consolidated, merge=merge)
    return answers.plainly(made, checkpoint=checkpoint)


def training_to_dict(done: Finished) -> dict[str, Any]:
    """The training object of the outer contract."""
    return answers.training_to_dict(done)


def launch_to_dict(started: Started) -> dict[str, Any]:
    """The launch object of the outer contract."""
    return answers.launch_to_dict(started)


def calibrate_machine() -> tuple[OwnProfile, list[dict[str, Any]]]:
    """Measures this machine's GPU; imports torch."""
    from meshwright.engine.machine import measured

    return measured()


def calibrate_runs(path: str, *, one_type: bool = False) -> list[OwnProfile]:
    """Fits the speed of one's GPUs to a table of one's own runs; one_type refuses a table with several GPU types."""
    from meshwright.costs import calibrate

    return calibrate.from_runs(path, one_type=one_type)


def save_profile(profile: OwnProfile, path: str) -> None:
    """Writes a machine's profile."""
    _write(path, profile_text(profile), "out")


def profile_text(profile: OwnProfile) -> str:
    """A machine's profile as the TOML file that --calibration reads."""
    from meshwright.costs import calibrate

    return calibrate.to_text(profile)


def accuracy_to_dict(report: Report) -> dict[str, Any]:
    """The accuracy object of the outer contract."""
    from meshwright.costs import accuracy as accuracies

    return accuracies.to_dict(report)


def profile_to_dict(profile: OwnProfile) -> dict[str, Any]:
    """A machine's profile as JSON."""
    built: dict[str, Any] = msgspec.to_builtins(profile)
    return built


def recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """A shipped recipe by name, or one from a TOML, YAML or JSON file, with overrides applied."""
    return override.apply(_recipe_from(name), list(overrides))


def find_recipes(
    query: str | None = None, *, goal: str | None = None, family: str | None = None, benchmark: bool | None = None
) -> list[index.IndexEntry]:
    """The index: recipes by name, family, size or goal; fuzzy when nothing matches to the letter."""
    wanted = None if goal is None else one_of("goal", goal, types.GOALS)
    return index.search(query, goal=wanted, family=family, benchmark=benchmark)


def check(
    target: str | Recipe,
    *,
    gpus: str | int | None = None,
    engine: str | None = None,
    dialect: str | None = None,
    model: str | None = None,
    advice: bool = False,
    overrides: Sequence[str] = (),
) -> Checked:
    """Findings for a recipe by name or value, or for a file of ours or of another framework.

    `model` is for files that do not name theirs; `advice` adds what could be better to what is wrong in such files.
    """
    content = None
    if isinstance(target, str) and (dialects.is_file(target) or not index.knows(target)):
        content = _content(target)
        theirs = dialects.of(content, dialect)
        if theirs is not None:
            if engine is not None:
                raise InputError(f"the file is for {theirs.engine}", field="engine", value=engine)
            named = None if model is None else models.find(model)
            where = None if gpus is None else str(gpus)
            return dialects.check(theirs, content, gpus=where, model=named, overrides=overrides, advice=advice)
    if dialect not in (None, dialects.OURS):
        dialects.dialect(str(dialect))  # a name that nobody knows is told as such
        raise InputError("a recipe of ours has no other words", field="dialect", value=dialect)
    if model is not None:
        raise InputError("a recipe names its own model", field="model", value=model, fix=("without --model",))
    found = target if isinstance(target, Recipe) else _recipe_from(target)
    return _check_recipe(found, gpus, engine or ENGINES[0], overrides, content)


def _check_recipe(
    recipe: Recipe,
    gpus: str | int | None,
    engine: str,
    overrides: Sequence[str],
    content: dialects.Content | None = None,
    advice: bool = True,
) -> CheckedRecipe:
    """Findings for a recipe of ours, on its own cluster or another."""
    engine = one_of("engine", engine, ENGINES)
    asked = override.apply(planner.on_engine(recipe, engine), list(overrides))
    cluster = clusters.cluster(str(gpus) if gpus is not None else asked.cluster)
    return dialects.check_own(asked, cluster, engine, content, advice)


def _content(target: str) -> dialects.Content:
    """The file that a name means; a name that is neither file nor recipe is told with what it may have been."""
    if not dialects.is_file(target):
        index.load(target)  # raises with did-you-mean
    return dialects.open_file(target)


def export(
    target: str | Recipe, to: str, *, gpus: str | int | None = None, overrides: Sequence[str] = ()
) -> tuple[Written, CheckedRecipe]:
    """A recipe in another framework's words, and what the rules say of it there."""
    theirs = dialects.dialect(to)
    found = target if isinstance(target, Recipe) else _recipe_from(target)
    judged = _check_recipe(found, gpus, theirs.engine, overrides, advice=False)
    written = dialects.export(theirs, judged.recipe, judged.model, judged.cluster)
    if not judged.ok:
        asked = f"{judged.recipe.model} --gpus {judged.cluster} --goal {judged.recipe.goal} --engine {judged.engine}"
        note = f"a layout that runs there: meshwright recommend {asked} --save sized.toml, then export sized.toml"
        written = msgspec.structs.replace(written, notes=(*written.notes, note))
    return written, judged


def question_of(
    model: str,
    goal: str,
    seq: int | str | None = None,
    engine: str = "meshwright",
    benchmark: bool = False,
    *,
    gpus: str | int,
    calibration: str | None = None,
) -> Question:
    """A question in words as the values the planner works with."""
    spec, reference = _model(model)
    return Question(
        model=spec,
        model_ref=reference,
        cluster=clusters.cluster(str(gpus)),
        cluster_ref=str(Path(str(gpus)).resolve()) if str(gpus).endswith(".toml") else "",
        goal=one_of("goal", goal, types.GOALS),
        seq_length=sequence_length(seq),
        engine=one_of("engine", engine, types.ENGINES),
        benchmark=benchmark,
        calibration=None if calibration is None else _calibration(calibration),
    )


def _calibration(path: str) -> Any:
    from meshwright.costs import calibrate

    return calibrate.load(path)


def _model_and_goal(target: str, goal: str | None) -> tuple[str, str]:
    """The model and goal that a recipe name stands for, or the model itself and the goal asked for."""
    if _is_recipe(target):
        found = _recipe_from(target)
        if goal is not None and goal != found.goal:
            raise InputError(
                f"{target} is a recipe for {found.goal}", field="goal", value=goal, fix=(f"--goal {found.goal}",)
            )
        return found.model, found.goal
    if goal is None:
        raise InputError("a model needs a goal", field="goal", fix=("--goal pretrain", "--goal sft", "--goal peft"))
    return target, goal


def model_catalogue(query: str | None = None) -> list[ModelSpec]:
    """Models whose name contains the query; all of them without one; a config.json is read."""
    if query is None:
        return list(models.all_specs())
    return [models.find(name) for name in models.search(query)] or [models.find(query)]


def rule_catalogue(query: str | None = None, *, pitfalls: bool = False) -> list[Rule]:
    """Rules by part of their id, those of other frameworks' files too; all of our own without one."""
    found = [r for r in rules.RULES.values() if r.pitfall or not pitfalls]
    if query is None:
        return found
    named = [r for r in found if query.lower() in r.id.lower()]
    if not named and not pitfalls:
        from meshwright.dialects import catalogue

        named = catalogue.find_rules(query)
    if not named:
        raise unknown("rule", query, rules.RULES)
    return named


def recipe_text(found: Recipe, format: str = "toml") -> str:
    """A recipe as TOML, YAML, JSON or the Python that builds it."""
    return files.to_text(found, one_of("format", format, files.FORMATS))


def save_recipe(plan: Plan, path: str) -> None:
    """Writes the plan's recipe as a TOML file that `check` and `recipe` read back."""
    if Path(path).suffix.lower() != ".toml":
        raise InputError("a recipe is saved as TOML", field="save", value=path, fix=(f"--save {Path(path).stem}.toml",))
    named = msgspec.structs.replace(plan.recipe, name=Path(path).stem)
    _write(path, files.to_text(named, "toml"), "save")


def save_files(files: Mapping[str, str], folder: str) -> None:
    """Writes files into a folder, which is made if need be; never over a file that says something else."""
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot be made: {error.strerror}", field="out", value=folder) from error
    for name, text in files.items():
        there = place / name
        if there.exists() and (not there.is_file() or there.read_bytes() != text.encode()):
            raise OutputError("is there already and says something else", field="out", value=str(there))
        _write(str(there), text, "out")


def find_goal(text: str) -> str:
    """One of the three goals."""
    return str(one_of("goal", text, types.GOALS))


SCHEMA = answers.SCHEMA
GOALS, ENGINES = types.GOALS, types.ENGINES
DIALECTS = dialects.NAMES
plan_to_dict = answers.plan_to_dict
estimate_to_dict = answers.estimate_to_dict
ranking_to_dict = answers.ranking_to_dict
sizing_to_dict = answers.sizing_to_dict
entries_to_dicts = answers.entries_to_dicts
recipe_to_dict = answers.recipe_to_dict
check_to_dict = answers.check_to_dict
export_to_dict = answers.export_to_dict
model_to_dict = answers.model_to_dict
gpu_to_dict = answers.gpu_to_dict
rule_to_dict = answers.rule_to_dict
gpu_catalogue = clusters.gpus
find_model = models.find
find_cluster = clusters.cluster
model_names = models.names
recipe_names = index.names


def _model(text: str) -> tuple[ModelSpec, str]:
    """The model and how a recipe refers to it."""
    spec = models.find(text)
    return spec, spec.name if spec.name in models.names() else str(Path(text).expanduser().resolve())


def _refuse_unknown(target: str) -> None:
    """A name that is neither a model nor a recipe is told with what it may have been of both."""
    try:
        models.find(target)
    except InputError:
        near = closest(target, index.names(), 2)
        if near and "_" in target:
            raise unknown("model or recipe", target, [*near, *closest(target, models.names(), 1)]) from None
        raise


def _is_recipe(name: str) -> bool:
    return files.is_file(name) or index.knows(name)


def _recipe_from(name: str) -> Recipe:
    return files.from_file(name) if files.is_file(name) else index.load(name)


def _write(path: str, text: str, field: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror}", field=field, value=path) from error
